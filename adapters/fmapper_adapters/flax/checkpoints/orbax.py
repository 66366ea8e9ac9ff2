"""Folders of Orbax, read and written by orbax itself, an array at a time.

Orbax writes all arrays of a tree at once, and reads them whole. Its handler of arrays is told here
to write one after the other; parts of arrays are read through tensorstore, which it stands on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from fmapper import CheckpointError
from fmapper.checkpoints import DTYPES, Contents, Format, LazyArray, Writer, nest

_SIGNS = ("_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA")
_ITEM = "default"  # the folder that a CheckpointManager has its arrays in
_VALUES = (bool, int, float, str)


class Orbax(Format):
    """A folder as `StandardCheckpointer` and `PyTreeCheckpointer` have it.

    Names are keys joined by dots. What is read of an array is read in the chunks that it was
    written in.
    """

    name: ClassVar[str] = "orbax"
    endings: ClassVar[tuple[str, ...]] = (".orbax",)
    is_folder: ClassVar[bool] = True

    def is_at(self, path: Path) -> bool:
        """Tells whether Orbax's files are in a folder."""
        return path.is_dir() and any((_inner(path) / sign).exists() for sign in _SIGNS)

    def read(self, path: Path) -> Contents:
        """Has orbax read what is where."""
        import orbax.checkpoint as ocp

        folder = _inner(path).absolute()
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                found = checkpointer.metadata(folder)
                tree = getattr(found, "item_metadata", found)
                tree = getattr(tree, "tree", tree)
                scalars = _scalars(checkpointer, folder, tree)
        except CheckpointError:
            raise
        except Exception as error:  # of orbax and tensorstore: they raise anything
            raise CheckpointError(f"{path}: orbax does not read it: {error}") from None
        contents = Contents({}, files=(folder,))
        for name, leaf in _leaves(tree):
            if name in scalars:
                contents.values[name] = scalars[name]
            else:
                contents.arrays[name] = _Chunked(folder, name, leaf)
        return contents

    def write(self, out: Writer, contents: Contents) -> None:
        """Has orbax write the tree, which reads each array when its turn comes."""
        import orbax.checkpoint as ocp

        handlers = ocp.type_handlers
        tied = {name: contents.arrays[first] for name, first in contents.ties.items()}
        values = {name: value for name, value in contents.values.items() if value is not None}
        for name, array in contents.arrays.items():
            if array.dtype.name not in DTYPES:
                raise CheckpointError(f"{name}: orbax has no {array.dtype.name}")
            if not array.size:
                raise CheckpointError(f"{name}: orbax holds no arrays without elements")
        registry = handlers.create_type_handler_registry(
            (LazyArray, _one_by_one()),
            (jax.Array, handlers.ArrayHandler()),  # there is none; without it orbax warns
            (int, handlers.ScalarHandler()),
            (float, handlers.ScalarHandler()),
            (str, handlers.StringHandler()),
        )
        values = {n: int(v) if isinstance(v, bool) else v for n, v in values.items()}
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        tree = nest({**contents.arrays, **tied, **values})
        with ocp.Checkpointer(handler) as checkpointer:
            args = ocp.args.PyTreeSave(tree)
            checkpointer.save(out.path.absolute(), args=args, force=True)


def _inner(path: Path) -> Path:
    return path / _ITEM if (path / _ITEM).is_dir() else path


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=lambda node: hasattr(node, "directory"))
    return [(leaf.name, leaf) for leaf in leaves if hasattr(leaf, "directory")]


def _scalars(checkpointer: Any, folder: Path, tree: Any) -> dict[str, Any]:
    """Returns the numbers and strings of a checkpoint."""
    import orbax.checkpoint as ocp

    kinds = ("ScalarMetadata", "StringMetadata")
    is_leaf = lambda node: hasattr(node, "directory")  # noqa: E731
    chosen = jax.tree_util.tree_map(
        lambda leaf: 0 if type(leaf).__name__ in kinds else ocp.PLACEHOLDER, tree, is_leaf=is_leaf
    )
    names = jax.tree_util.tree_map(lambda leaf: getattr(leaf, "name", ""), tree, is_leaf=is_leaf)
    if 0 not in jax.tree_util.tree_leaves(chosen):
        return {}
    args = jax.tree_util.tree_map(lambda _: ocp.RestoreArgs(), chosen)
    restored = checkpointer.restore(folder, ocp.args.PyTreeRestore(item=chosen, restore_args=args))
    pairs = zip(jax.tree_util.tree_leaves(names), jax.tree_util.tree_leaves(restored), strict=True)
    return {
        name: value.item() if isinstance(value, np.generic | np.ndarray) else value
        for name, value in pairs
        if value is not ocp.PLACEHOLDER
    }


class _Chunked(LazyArray):
    """An array in a folder of Orbax."""

    def __init__(self, folder: Path, name: str, about: Any) -> None:
        dtype = np.dtype(about.dtype).name
        if dtype not in DTYPES:
            raise CheckpointError(f"{folder}: {name}: is of an unknown dtype {dtype}")
        self.shape, self.dtype = tuple(map(int, about.shape)), np.dtype(about.dtype)
        self._folder, self._name = folder, name

    def _read(self, box: Any) -> Any:
        import tensorstore

        ocdbt = (self._folder / "manifest.ocdbt").exists()
        store: dict[str, Any] = {"driver": "file", "path": f"{self._folder / self._name}/"}
        if ocdbt:
            base = f"file://{self._folder}/"
            store = {"driver": "ocdbt", "base": base, "path": f"{self._name}/"}
        failed: Exception | None = None
        for driver in ("zarr", "zarr3"):
            try:
                spec = {"driver": driver, "kvstore": store}
                array = tensorstore.open(spec, open=True, read=True).result()
                if array.shape != self.shape:
                    raise CheckpointError(f"{self._folder}: {self._name}: has another shape")
                return array[tuple(slice(*pair) for pair in box)].read().result()
            except (ValueError, KeyError, OSError, RuntimeError) as error:
                failed = failed or error
        raise CheckpointError(f"{self._folder}: {self._name}: {failed}") from failed


def _one_by_one() -> Any:
    import orbax.checkpoint as ocp

    class Handler(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
        """Writes arrays one after the other, so that one is in memory at a time."""

        def __init__(self) -> None:
            super().__init__(deepcopy_host_arrays=False)

        async def serialize(
            self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
        ) -> Sequence[Any]:
            args = args or [ocp.SaveArgs()] * len(values)
            for value, info, arg in zip(values, infos, args, strict=True):
                for future in await super().serialize([value.read()], [info], [arg]):
                    future.result()
            return []

    return Handler()
