"""`shard`: divides the arrays of a tree among the devices of a mesh, by rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fmapper.backends.arrays import Arrays
from fmapper.backends.discovery import adapter_of, adapters
from fmapper.backends.meshes import Meshes, Spec, parts_of, uneven_dimension
from fmapper.backends.nodes import Nodes
from fmapper.backends.undeclared import check_leaf
from fmapper.errors import CopyNeededError, FmapperError, PlacementError
from fmapper.meshes import rules as _rules
from fmapper.meshes.layout import (
    adapter_of_mesh,
    mesh_sizes,
    read_names,
    read_spec,
)
from fmapper.meshes.plan import ShardPlan, plan_array
from fmapper.meshes.units import AskedUnits, read_units
from fmapper.moves.carry import UNTOUCHED
from fmapper.moves.collect import Leaves
from fmapper.moves.mover import Mover
from fmapper.moves.onto_mesh import bring
from fmapper.moves.place import Keep
from fmapper.moves.router import Router
from fmapper.tracebacks import short_traceback, shorten_traceback
from fmapper.tree.fmap import fmap
from fmapper.tree.keypath import KeyPath, format_link, name_of
from fmapper.tree.nodes import node_type_of, sync
from fmapper.tree.walk import visit

if TYPE_CHECKING:
    from fmapper.meshes.derivation import Traffic
    from fmapper.meshes.filling import Placer

T = TypeVar("T")
Uneven = Literal["refuse", "replicate"]
_SHOWN = 10  # arrays that an error lists


class Sharding(Router):
    """A mover that divides the arrays of a tree among the devices of a mesh.

    `shard(tree, mesh, rules)` is `Sharding(mesh, rules)(tree)`. Create a sharding to use it more
    than once, or to plan it first: `fmapper.plan(sharding, tree)`.

    Args:
        mesh: A `jax.sharding.Mesh` or a `torch.distributed.device_mesh.DeviceMesh` whose axes have
            names. For a plan, the sizes of the axes are enough: `{"data": 8, "model": 4}`.
        rules: How arrays are divided; see `shard`.
        names: Further names of axes, see `shard`.
        uneven: How to treat a dimension that does not divide evenly, see `shard`.
        fsdp: The torch modules whose parameters are gathered for use; see `shard`.
        copy: False shares the memory of shards with their previous framework.
        strict: False ignores undeclared objects that hold arrays.
        report: Called with the `ShardPlan` of what was done, such as `print`.

    Raises:
        PlacementError: The rules are invalid.
        TypeError: `mesh` is not a mesh.
    """

    def __init__(
        self,
        mesh: Any,
        rules: _rules.Rules,
        *,
        names: Mapping[str, Any] | None = None,
        uneven: Uneven = "refuse",
        fsdp: AskedUnits | None = None,
        copy: bool | None = None,
        strict: bool | None = None,
        report: Callable[[ShardPlan], object] | None = None,
    ) -> None:
        sync()
        self.mesh, self.rules, self.names = mesh, rules, dict(names or {})
        self.uneven, self.copy, self.strict, self.report = uneven, copy, strict, report
        if isinstance(rules, str) and rules not in (_rules.MODEL, _rules.DERIVE, _rules.LAYOUT):
            raise PlacementError(
                f"rules={rules!r}: write rules as a dict, such as "
                '{"up_proj.weight": ("model", None)}, as a function of a name and an array, as a '
                'tuple of axes for all arrays; or "model", "derive" or "layout".'
            )
        if uneven not in ("refuse", "replicate"):
            raise PlacementError(f"uneven= is 'refuse' or 'replicate', not {uneven!r}.")
        self._adapter = adapter_of_mesh(mesh)
        self.axes: dict[str, int] = mesh_sizes(mesh)
        self._units = read_units(fsdp, self.axes)
        gathered = {axis for axes in (self._units or {}).values() for axis in axes}
        self._own = {axis: size for axis, size in self.axes.items() if axis not in gathered}
        self._on = mesh  # the axes that rules divide by; None for no axes
        if gathered and self._adapter is not None:
            if not self._adapter.gathers:
                raise PlacementError(
                    "fsdp= is for modules of torch on a DeviceMesh. In "
                    f"{self._adapter.name}, write rules that divide arrays along the axis, such as "
                    '{"*": ("fsdp",)}; "derive" does it for an axis of that name.'
                )
            self._on = self._adapter.submesh(mesh, [*self._own]) if self._own else None
        self._meanings = read_names(names, self._own)

    def __repr__(self) -> str:
        return f"Sharding({self.axes}, {self.rules!r})"

    def __call__(self, tree: T) -> T:
        """Returns the tree, with its arrays divided on the mesh."""
        try:
            new = fmap(self, tree)
            if self._adapter is not None:
                nodes = [(link, node) for link, node, kind in visit(new, once=True) if kind]
                self._adapter.prepare((format_link(link), node) for link, node in nodes)
                if self._units is not None:
                    named = [(format_link(link), name_of(link), node) for link, node in nodes]
                    self._adapter.fully_shard(named, self.mesh, self._units)
            return new
        except Exception as error:
            shorten_traceback(error)
            raise

    def __fmap__(
        self, tree: Any, is_leaf: Callable[[Any], bool] | None, cache: dict[Any, Any] | None
    ) -> tuple[dict[int, Any], Callable[[Any], Any]]:
        """Divides all arrays of a tree, or none; see `fmapper.tree.tree_map.TreeFunction`."""
        adapter = self._needs_mesh()
        leaves = Leaves(tree, is_leaf, cache or ())
        self._check(leaves, adapter)
        specs, resolved = self._specs(tree)
        if self.report is not None:
            self.report(self._plan(specs, resolved))
        arrays = [array for array in resolved.arrays if specs[id(array)] is not None]
        new = self._divide(arrays, [specs[id(a)] or () for a in arrays], adapter, resolved.where)
        memo = {
            **leaves.by_id,
            **{id(old): placed for old, placed in zip(arrays, new, strict=True)},
        }
        return memo, lambda leaf: leaf

    def plan(self, tree: Any) -> ShardPlan:
        """Plans how the arrays of a tree would be divided; see `fmapper.plan`."""
        specs, resolved = self._specs(tree, refuse=False)
        return self._plan(specs, resolved)

    def specs(self, tree: Any) -> dict[str, Spec]:
        """Returns the axes of the mesh that divide each array of a tree, by name.

        Raises:
            PlacementError: The rules do not fit the tree.
        """
        specs, resolved = self._specs(tree)
        named = {resolved.names[id(a)]: specs[id(a)] for a in resolved.arrays}
        return {name: spec for name, spec in named.items() if spec is not None}

    def placer(self, tree: Any) -> Placer:
        """Returns a function that divides new values by the rules for an old array.

        Of arrays in files, only the parts of this process are read. Pass the filled tree to its
        `finish`.
        """
        from fmapper.meshes.filling import Placer  # needed only for loading

        adapter = self._needs_mesh()
        specs, _ = self._specs(tree)
        return Placer(self, adapter, self._on, specs, gathers=self._units is not None)

    def bring(self, array: Any, spec: Spec) -> Any:
        """Moves an array of any backend onto the mesh, divided by a spec."""
        return bring(array, self.mesh, spec, self._needs_mesh(), copy=self.copy)

    # --- specs ----------------------------------------------------------------------------------

    def _needs_mesh(self) -> Meshes:
        if self._adapter is None:
            raise PlacementError(
                f"{self.mesh!r} states only the sizes of a mesh, which is enough for a plan; to "
                "shard arrays, pass a jax.sharding.Mesh or torch's DeviceMesh."
            )
        return self._adapter

    def _specs(self, tree: Any, *, refuse: bool = True) -> tuple[dict[int, Any], _rules.Found]:
        """Returns the spec of each array, None for one that stays, and the matches of the rules."""
        parts = {word: parts_of(axes, self._own) for word, axes in self._meanings.items()}
        resolved = _rules.Found(self.rules, tree, parts)
        specs: dict[int, Any] = {}
        problems = []
        for array in resolved.arrays:
            rule, name = resolved.rules.get(id(array), (None, ""))
            if isinstance(rule, Keep):
                specs[id(array)] = None
                continue
            shape = _shape(array)
            try:
                spec = read_spec(_axes(rule), shape, self._own, self._meanings)
                even = self._even(spec, shape)
                packed = resolved.packed.get(id(array))
                specs[id(array)] = even if packed is None else packed.divide(even, self._own)
            except (PlacementError, TypeError) as error:
                clause = f", by the rule {name}" if name else ""
                reserved = [axis for axis in self.axes if axis not in self._own]
                if any(repr(axis) in str(error) for axis in reserved):
                    error = PlacementError(f"{error}; {', '.join(reserved)} is for fsdp= alone")
                problems.append(f"{resolved.where(array)}{clause}: {error}")
                specs[id(array)] = problems[-1]
        if problems and refuse:
            more = f"\n... and {len(problems) - _SHOWN} more" * (len(problems) > _SHOWN)
            raise PlacementError("\n".join(problems[:_SHOWN]) + f"{more}\n{UNTOUCHED}")
        return specs, resolved

    def _even(self, spec: Spec, shape: Sequence[int]) -> Spec:
        """Returns a spec without uneven divisions.

        Raises:
            PlacementError: A dimension does not divide evenly.
        """
        while (at := uneven_dimension(spec, shape, self.axes)) is not None:
            if self.uneven == "refuse":
                axes = "+".join(spec[at])
                raise PlacementError(
                    f"dimension {at} of {tuple(shape)} does not divide evenly by "
                    f"{parts_of(spec[at], self.axes)}, the size of {axes}; "
                    "uneven='replicate' leaves such a dimension unsharded"
                )
            spec = (*spec[:at], (), *spec[at + 1 :])
        return spec

    def _plan(self, specs: Mapping[int, Any], resolved: _rules.Found) -> ShardPlan:
        lines = []
        for array in resolved.arrays:
            spec, rule = specs[id(array)], resolved.rules.get(id(array), (None, ""))[1]
            problem = spec if isinstance(spec, str) else ""
            adapter = _arrays(array)
            path = KeyPath.from_link(resolved.links[id(array)])
            entries = () if problem else spec
            if (
                self._units
                and entries
                and isinstance(adapter, Meshes)
                and adapter.is_gathered(array)
            ):
                first = next(iter(self._units.values()))
                entries = ((*entries[0], first[-1]), *entries[1:])  # after the division by rules
            dtype = adapter.dtype(array)
            lines.append(plan_array(path, _shape(array), dtype, entries, rule, self.axes, problem))
        sent = self._traffic(specs, resolved)
        return ShardPlan(self.axes, tuple(lines), sent.sums, sent.gathers, sent.moves)

    def _traffic(self, specs: Mapping[int, Any], resolved: _rules.Found) -> Traffic:
        """Predicts the communication of each model of a tree in a forward pass."""
        from fmapper.meshes.derivation import Traffic, packed_arrays, program_of, traffic

        sent = Traffic()
        seen: set[int] = set()
        for node in resolved.nodes:
            program = program_of(node)
            if program is not None:
                named = _rules.arrays_of(node)
                divided = {name: specs.get(id(array)) for name, array in named.items()}
                sharded = {name: spec for name, spec in divided.items() if isinstance(spec, tuple)}
                packed = {name for name, _, _ in packed_arrays(node)}
                batch = self._meanings["zero"]
                new = traffic(program, sharded, self.axes, packed, gathered=batch)
            elif self.rules == _rules.MODEL and parts_of(self._meanings["tensor"], self.axes) > 1:
                named = {name: array for name, array, _ in _rules.axes_of(node)}
                new = Traffic(tuple(name for a in adapters(Nodes) for name in a.sums(node)))
            else:
                continue
            arrays = {*map(id, named.values())}
            sent += new if arrays - seen else Traffic()  # a part of a model is counted with it
            seen |= arrays
        return sent

    # --- sharding the arrays --------------------------------------------------------------------

    def _check(self, leaves: Leaves, adapter: Meshes) -> None:
        """Raises for nodes that would leave arrays behind."""
        mover = Mover("shard", adapter.name, strict=self.strict)
        for node, kind in leaves.nodes:
            mover.check_node(node, kind, leaves.where)
        for node, leaf in leaves.missing:
            mover.check_borrowed(node, leaf, leaves.where)
        for leaf in leaves.by_id.values() if self.strict is not False else ():
            if adapter_of(leaf) is None and node_type_of(leaf) is None:
                check_leaf(leaf, leaves.where, leaf, leaves.by_id.values)

    def _divide(
        self,
        arrays: Sequence[Any],
        specs: Sequence[Spec],
        adapter: Meshes,
        where: Callable[[Any], str],
    ) -> list[Any]:
        assert isinstance(adapter, Arrays)
        indices = [at for at, array in enumerate(arrays) if _arrays(array) is adapter]
        results: list[Any] = list(arrays)
        if self._on is None:
            mover = Mover("shard", adapter.name)
            for at, array in enumerate(arrays):
                local = array if _arrays(array) is adapter else mover(array)
                try:
                    results[at] = adapter.like(adapter.copy_whole(local, self.mesh), array)
                except PlacementError as error:
                    raise PlacementError(f"{where(array)}: {error} {UNTOUCHED}") from error
            return results
        for at, array in enumerate(arrays):
            if _arrays(array) is not adapter:
                try:
                    results[at] = bring(array, self._on, specs[at], adapter, copy=self.copy)
                except CopyNeededError as error:
                    raise CopyNeededError(f"{where(array)}: {error}. {UNTOUCHED}") from error
                except (FmapperError, TypeError) as error:
                    reason = str(error).removesuffix(f" {UNTOUCHED}").removeprefix("model: ")
                    raise PlacementError(f"{where(array)}: {reason} {UNTOUCHED}") from error
        local = [arrays[at] for at in indices]
        wanted = [specs[at] for at in indices]
        new = adapter.shard(local, self._on, wanted, lambda at: where(local[at]))
        for at, placed in zip(indices, new, strict=True):
            results[at] = adapter.like(placed, arrays[at])
        return results


@short_traceback
def shard(
    tree: T,
    mesh: Any,
    rules: _rules.Rules,
    *,
    names: Mapping[str, Any] | None = None,
    uneven: Uneven = "refuse",
    fsdp: AskedUnits | None = None,
    copy: bool | None = None,
    strict: bool | None = None,
    report: Callable[[ShardPlan], object] | None = None,
) -> T:
    """Divides the arrays of a tree among the devices of a mesh.

    One set of rules serves JAX, where arrays get a `NamedSharding`, and torch, where they become
    `DTensor`s. Every device receives only its part: an array of another backend, or in a file, is
    read a part at a time. Arrays without a rule are replicated. Either everything is divided or, if
    something fails, nothing.

    A rule selects arrays by a class, which matches everything below its instances, or by a pattern:
    consecutive whole keys anywhere in the array's name in `state`, with `*` for anything.
    `up_proj.weight` matches that weight in every layer, in a model converted to any framework, and
    the optimizer state for it. The first match wins; `"*"` is tried last. The value of a rule is an
    axis of the mesh for each dimension from the first on, or None: `("model", None)`; two axes on
    one dimension, `(("data", "model"),)`; or the last dimension, `(..., "model")`, of any number of
    dimensions, as in stacked layers. None alone replicates an array, and `fmapper.keep` leaves it
    where it is.

    Args:
        tree: A model, an optimizer, a batch: anything.
        mesh: A `jax.sharding.Mesh` or a `torch.distributed.device_mesh.DeviceMesh` whose axes have
            names.
        rules: `{pattern or class: axes}`; axes alone, for all arrays; None, which replicates them;
            a function of the name and the array that returns axes; or their source: `"model"` for
            those that the model declares (transformers' `tp_plan`, also after conversion; the
            metadata of Flax's variables), `"derive"` for those derived from the program of a
            converted model, `"layout"` for each array's current axes on a mesh with the same axes,
            of this framework or another.
        names: Further names of axes -> axes of the mesh: `{"mlp": "model", "embed": None}`. Plans
            of models and derived rules use `tensor`, `expert` and `zero`, which by default stand
            for the first axis of the mesh with a usual name for them.
        uneven: How to treat a dimension that does not divide evenly: `refuse` raises, and
            `replicate` leaves it whole.
        fsdp: For torch modules: the axis of the mesh along which `fully_shard` (FSDP2) shards
            parameters without a rule, as `{Block: "data"}` with classes or paths of the modules
            whose parameters are gathered together. Paths are patterns as in rules, and select the
            outermost modules that match: `"layers.*"` the layers. An axis alone selects the modules
            that transformers does not split; of two axes the first replicates. Optimizers in the
            tree follow. Rules cannot use these axes, and each process computes with its own part of
            a batch.
        copy: For arrays on a mesh of another framework: False shares the memory of each shard, and
            raises if it cannot; None copies writable memory.
        strict: False ignores undeclared objects that hold arrays.
        report: Called with the `ShardPlan` of what was done, such as `print`.

    Raises:
        CopyNeededError: `copy=False`, and the memory of a shard cannot be shared.
        PlacementError: A rule is invalid, matches nothing, comes too late or does not fit a shape,
            or rules divide a tied array in two ways; names the arrays.
        NotAFunctorError: An undeclared object holds arrays.

    Examples:
        >>> import fmapper, jax, numpy as np
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> model = {"up": {"weight": np.ones((4, 2), "float32"), "bias": np.ones(4, "float32")}}
        >>> new = fmapper.shard(model, mesh, {"up": ("model",)})
        >>> new["up"]["weight"].sharding.spec[0]
        'model'
    """
    return Sharding(
        mesh, rules, names=names, uneven=uneven, fsdp=fsdp, copy=copy, strict=strict, report=report
    )(tree)


def _axes(rule: Any) -> tuple[Any, ...]:
    """Returns the axes of a rule.

    Raises:
        PlacementError: It is not a tuple of axes.
    """
    if rule is None:
        return ()
    if isinstance(rule, str):
        raise PlacementError(f"a rule is a tuple, an axis for each dimension: write ({rule!r},)")
    if not isinstance(rule, Iterable):
        raise PlacementError(
            f"a rule is a tuple, an axis or None for each dimension, not {rule!r:.60}"
        )
    return tuple(rule)


def _arrays(array: Any) -> Arrays:
    adapter = adapter_of(array)
    assert adapter is not None
    return adapter


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(_arrays(array).shape(array))
