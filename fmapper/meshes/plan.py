"""Sharding plans: how each array is sharded, by which rule, and its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fmapper.backends.meshes import Spec
from fmapper.files.dtypes import itemsize
from fmapper.meshes.layout import shard_shape, show_spec
from fmapper.render import as_html, as_text, readable_bytes
from fmapper.tree.keypath import KeyPath, format_keys

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHOWN = 40  # arrays in the printed table


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """The plan of one array.

    Attributes:
        path: Its path; a tied array is listed once, with its first path.
        shape: Its shape.
        dtype: Its dtype.
        spec: The axes of the mesh that divide each dimension; None for an array that stays.
        rule: The rule that applies, as the user wrote it; empty if no rule matches.
        shard: The shape of a device's part.
        nbytes: Bytes of the whole array.
        nbytes_per_device: Bytes of that part.
        problem: Why it is refused; empty otherwise.
    """

    path: KeyPath
    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None
    rule: str
    shard: tuple[int, ...]
    nbytes: int
    nbytes_per_device: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The plan of a sharding; made by `fmapper.plan`, and passed to `report=`.

    It prints as a table; `leaves` has the same data.

    Attributes:
        mesh: The sizes of the axes of the mesh.
        leaves: The plan of each array, in the order of the walk.
        sums: The submodules or weights whose results a forward pass sums over devices, once per
            sum. Known for converted models, whatever the rules, and for the `tp_plan` of
            transformers' models.
        gathers: For converted models: the parameters that are gathered before use, such as those
            divided along an axis of the batch (called batch, data, dp, fsdp or zero), and the
            submodules that need a divided array whole.
        moves: For converted models: the submodules where devices exchange shards, because one array
            packs several side by side, such as gate and up projections.
    """

    mesh: dict[str, int]
    leaves: tuple[PlannedShard, ...]
    sums: tuple[str, ...] = ()
    gathers: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[PlannedShard]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    @property
    def refused(self) -> tuple[PlannedShard, ...]:
        """The arrays that cannot be sharded as planned; if there are any, nothing is sharded."""
        return tuple(leaf for leaf in self.leaves if leaf.problem)

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.mesh.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, each counted once."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def nbytes_per_device(self) -> int:
        """Bytes that each device of the mesh gets."""
        return sum(leaf.nbytes_per_device for leaf in self.leaves)

    def nbytes_of_process(self, local: Mapping[str, int]) -> int:
        """Counts the bytes that a process holds and reads, each part once.

        Args:
            local: The number of the process's devices along each axis; 1 for a missing axis.

        Examples:
            >>> import fmapper, numpy as np
            >>> from fmapper.meshes import Sharding
            >>> sharding = Sharding({"data": 4, "model": 8}, {"w": ("model",)})
            >>> plan = fmapper.plan(sharding, {"w": np.ones((64, 4), "float32")})
            >>> plan.nbytes_per_device, plan.nbytes_of_process({"model": 4})
            (128, 512)
        """
        return sum(
            leaf.nbytes_per_device
            * math.prod(local.get(axis, 1) for axes in leaf.spec or () for axis in axes)
            for leaf in self.leaves
        )

    def __str__(self) -> str:
        """Returns the table, as plain text."""
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def __rich__(self) -> RenderableType:
        """Returns the table: refused arrays first, then as many others as fit."""
        from rich.table import Table
        from rich.text import Text

        mesh = ", ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        table = Table(title=f"mesh of {mesh}", title_justify="left", caption_justify="left")
        for name in ("path", "dtype", "shape", "divided by", "shard"):
            table.add_column(name, overflow="fold")
        table.add_column("per device", justify="right")
        table.add_column("rule", overflow="fold")
        ranked = sorted(self.leaves, key=lambda leaf: not leaf.problem)
        for leaf in ranked[:_SHOWN]:
            row = (
                format_keys(leaf.path),
                leaf.dtype,
                str(leaf.shape),
                "stays" if leaf.spec is None else show_spec(leaf.spec),
                str(leaf.shard),
                readable_bytes(leaf.nbytes_per_device),
                leaf.problem or leaf.rule,
            )
            table.add_row(*map(Text, row), style="red" if leaf.problem else None)
        rest = len(self) - _SHOWN
        more = f"... and {rest} arrays more\n" if rest > 0 else ""
        table.caption = (
            f"{more}{readable_bytes(self.nbytes)} in all, "
            f"{readable_bytes(self.nbytes_per_device)} on each of {self.devices} devices"
        )
        for done, places in (("sums over devices", self.sums), ("gathers", self.gathers)):
            if places:
                table.caption += f"\na forward pass {done} {len(places)} times"
        return table


def plan_array(
    path: KeyPath,
    shape: tuple[int, ...],
    dtype: str,
    spec: Spec | None,
    rule: str,
    mesh: dict[str, int],
    problem: str = "",
) -> PlannedShard:
    """Plans one array."""
    shard = () if spec is None else shape if problem else shard_shape(spec, shape, mesh)
    size = itemsize(dtype)
    nbytes = 0 if spec is None else math.prod(shard) * size
    return PlannedShard(
        path, shape, dtype, spec, rule, shard, math.prod(shape) * size, nbytes, problem
    )
