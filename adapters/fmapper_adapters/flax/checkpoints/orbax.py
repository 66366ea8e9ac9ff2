"""Folders of Orbax: written by orbax itself, and read through tensorstore, one chunk at a time.

Orbax writes all arrays of a tree at once, each as a single chunk, and reads them whole. The handler
in this module writes small arrays together, and large ones one after the other in several chunks,
through tensorstore, which Orbax is built on. Existing folders are read in the chunks that they
have: one chunk is in memory at a time, and is kept until another array is read.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from fmapper import CheckpointError
from fmapper.checkpoints import (
    STORED_DTYPES,
    Contents,
    Format,
    LazyArray,
    Misfit,
    UnreadableArray,
    Writer,
    check_count,
    check_folder,
    check_name,
    nest,
    read_json_file,
    read_json_table,
    reason_of,
    show,
    tied_to_text,
    unite_tied,
    within,
)
from fmapper_adapters.flax.checkpoints.zarr import MOST_ABOUT, StoredChunks, Stores

_METADATA = "_METADATA"
_CUSTOM = "custom_metadata"  # a field of that file for users' own data
_OURS = "fmapper"
_ARRAYS = ("np.ndarray", "jax.Array")
_SCALAR, _STRING = "scalar", "string"
_STRINGS = "_strings.json"
_STEP = "_CHECKPOINT_METADATA"
_UNFINISHED = ".orbax-checkpoint-tmp"
_SIGNS = (_METADATA, "manifest.ocdbt", _STEP)
_ITEM = "default"  # where a CheckpointManager keeps its arrays
_BATCH = 32 << 20  # bytes of small arrays that are written together
_MOST_BATCH = 1024  # arrays


class _Row(NamedTuple):
    """An array, number or string: its name, its kind, and whether it is stored separately."""

    name: str
    kind: str
    is_stored: bool


class Orbax(Format):
    """A folder of `StandardCheckpointer` or `PyTreeCheckpointer`. Names are keys joined by dots.

    Orbax reads an array under each of its names, so a tied array is written once per name. Ties are
    described in Orbax's custom metadata.
    """

    name: ClassVar[str] = "orbax"
    endings: ClassVar[tuple[str, ...]] = (".orbax",)
    is_folder: ClassVar[bool] = True

    def is_at(self, path: Path) -> bool:
        """Returns whether Orbax's files are in a folder."""
        return path.is_dir() and any((_inner(path) / sign).exists() for sign in _SIGNS)

    def read(self, path: Path) -> Contents:
        """Reads the metadata of the folder and of each array, and the numbers and strings."""
        folder = _inner(path).absolute()
        try:
            return _read(path, folder)
        except Misfit as error:
            raise CheckpointError(f"{path}: {error}") from None
        except (ValueError, KeyError, RuntimeError) as error:  # raised by tensorstore
            if isinstance(error, CheckpointError):
                raise
            reason = reason_of(error)
            raise CheckpointError(f"{path}: tensorstore cannot read it: {reason}") from None

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes the tree by Orbax, which reads each array in turn."""
        import orbax.checkpoint as ocp

        handlers = ocp.type_handlers
        tied = {name: contents.arrays[first] for name, first in contents.ties.items()}
        values = {name: value for name, value in contents.values.items() if value is not None}
        for name, array in contents.arrays.items():
            if array.dtype.name not in STORED_DTYPES:
                raise CheckpointError(f"{name}: orbax has no {array.dtype.name}")
            if not array.size:
                raise CheckpointError(f"{name}: orbax does not support arrays without elements")
        for name, value in values.items():
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise CheckpointError(f"{name}: orbax has no integers of more than 64 bits")
        places: dict[str, str] = {}
        for name in (*contents.arrays, *contents.ties, *values):
            if _leads_out(name):
                raise CheckpointError(
                    f"{name}: orbax uses names as paths, and this one leads out of the folder"
                )
            other = places.setdefault(name.removesuffix("/"), name)
            if other != name:
                raise CheckpointError(
                    f"{name}: orbax stores it in the same place as {other}. Rename one."
                )
        _check_texts([name for name, value in values.items() if isinstance(value, str)])
        if not contents.arrays and not values:
            raise CheckpointError("orbax does not write a checkpoint without arrays and values")
        registry = handlers.create_type_handler_registry(
            (LazyArray, _in_parts(out)),
            (jax.Array, handlers.ArrayHandler()),  # no array is one, but orbax warns without it
            (int, handlers.ScalarHandler()),
            (float, handlers.ScalarHandler()),
            (str, handlers.StringHandler()),
        )
        values = {n: int(v) if isinstance(v, bool) else v for n, v in values.items()}
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        tree = nest({**contents.arrays, **tied, **values})
        with ocp.Checkpointer(handler) as checkpointer:
            custom = {_CUSTOM: {_OURS: tied_to_text(contents)}} if contents.ties else {}
            args = ocp.args.PyTreeSave(tree, **custom)
            checkpointer.save(out.path.absolute(), args=args, force=True)


def _inner(path: Path) -> Path:
    return path / _ITEM if (path / _ITEM).is_dir() else path


def _read(path: Path, folder: Path) -> Contents:
    nbytes = check_folder(path)
    _check_finished(path, folder)
    if not (folder / _METADATA).exists():
        raise Misfit(f"has no {_METADATA}, which Orbax writes next to the arrays")
    with within(_METADATA):
        about, rows = read_json_table(folder / _METADATA, "tree_metadata", _row)
    check_count(len(rows), "arrays of Orbax", nbytes)
    names = [row.name for row in rows if row.kind in _ARRAYS]
    numbers = [row.name for row in rows if row.kind == _SCALAR]
    check_count(len(numbers), "numbers of Orbax", nbytes)
    _check_names(folder, rows)
    stores = Stores(folder, nbytes, about.get("store_array_data_equal_to_fill_value") is True)
    contents = Contents({}, files=(folder,))
    for name, layout in zip(names, stores.layouts(names), strict=True):
        contents.arrays[name] = (
            UnreadableArray.of_unknown(folder, name, layout.shape, layout.unknown)
            if layout.unknown
            else StoredChunks(stores, name, layout)
        )
    for name, layout in zip(numbers, stores.layouts(numbers), strict=True):
        if layout.shape:
            raise Misfit("is not a number", name[:60])
        if layout.unknown:
            raise Misfit(f"has the unknown dtype {show(layout.unknown)}", name[:60])
        contents.values[name] = StoredChunks(stores, name, layout).read().item()
    texts = [row.name for row in rows if row.kind == _STRING]
    contents.values.update(_texts(folder / _STRINGS, texts) if texts else {})
    custom = about.get(_CUSTOM)
    ties = custom.get(_OURS) if isinstance(custom, dict) else None
    if isinstance(ties, str):
        with within(_METADATA):
            unite_tied(contents, ties)
    return contents


def _check_finished(path: Path, folder: Path) -> None:
    """Raises if the process that saved the checkpoint died before it was complete."""
    is_finished = not any(_UNFINISHED in place.name for place in (folder, *folder.parents[:2]))
    for home in {path, folder}:
        if (home / _STEP).exists():
            with within(_STEP):
                about = read_json_file(home / _STEP, MOST_ABOUT)
            times = about if type(about) is dict else {}
            if times.get("init_timestamp_nsecs") and "commit_timestamp_nsecs" in times:
                is_finished &= times["commit_timestamp_nsecs"] is not None
    if not is_finished:
        raise Misfit("is unfinished: the process that saved it has not completed it")


def _row(row: Any) -> _Row:
    keys = row.get("key_metadata") if type(row) is dict else None
    about = row.get("value_metadata") if type(row) is dict else None
    if type(keys) is not list or type(about) is not dict:
        raise Misfit("lists something that is not an array")
    if not all(type(key) is dict and type(key.get("key")) in (str, int) for key in keys):
        raise Misfit("lists an array without a name")
    name = ".".join(str(key["key"]) for key in keys)
    with within(ascii(name)[1:-1][:60]):
        check_name(name)
        if _leads_out(name):
            raise Misfit("leads out of the folder")
        kind, is_stored = about.get("value_type"), about.get("skip_deserialize") is not True
        if type(kind) is not str:
            raise Misfit("is of an unknown kind")
        is_known = kind in (*_ARRAYS, _SCALAR, _STRING)
        if is_known and not is_stored:
            raise Misfit("is only named, not stored in this folder")
        if is_stored and not is_known:
            raise Misfit(f"is of kind {kind[:60]!a}, which is not read")
    return _Row(name, kind, is_stored)


def _leads_out(name: str) -> bool:
    return name.startswith("/") or ".." in name.split("/")


def _check_names(folder: Path, rows: Sequence[_Row]) -> None:
    """Raises for a name that occurs twice, and for array metadata that is too large."""
    names = set()
    for row in rows:
        if row.is_stored and row.name in names:
            raise Misfit("occurs twice", row.name[:60])
        names.add(row.name)
        for file in (".zarray", "zarr.json"):
            place = f"{folder}/{row.name}/{file}"  # normally a few bytes; absent with OCDBT
            if os.path.exists(place) and os.path.getsize(place) > MOST_ABOUT:
                raise Misfit(f"has a {file} that is too large", row.name[:60])


def _check_texts(names: Sequence[str]) -> None:
    """Raises for names of strings that are no JSON pointers, or that point into another string."""
    for name in names:
        if re.search("~(?![01])", name):
            raise CheckpointError(f"{name}: orbax has no string under a name with ~. Rename it.")
        keys = name.split("/")
        for count in range(1, len(keys)):
            if (other := "/".join(keys[:count])) in names:
                raise CheckpointError(f"{name}: orbax would put it inside the string {other}")


def _texts(path: Path, names: Sequence[str]) -> Mapping[str, str]:
    """Reads strings; the name of each is a JSON pointer to its place in the file."""
    if not path.exists():
        raise Misfit(f"has no {path.name}, where its strings are")
    tree, texts = read_json_file(path), {}
    for name in names:
        node = tree
        for key in name.split("/"):
            node = (
                node.get(key.replace("~1", "/").replace("~0", "~")) if type(node) is dict else None
            )
        if type(node) is not str:
            raise Misfit(f"is not a text in {path.name}", name[:60])
        texts[name] = node
    return texts


def _in_parts(out: Writer) -> Any:
    import orbax.checkpoint as ocp
    import tensorstore

    handlers: Any = ocp.type_handlers

    class Handler(handlers.NumpyHandler):  # type: ignore[misc]
        """Writes small arrays together, and large ones part by part."""

        async def serialize(
            self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
        ) -> Sequence[Any]:
            for info in infos:
                if hasattr(info, "await_path_creation"):  # Orbax creates the folder concurrently
                    await info.await_path_creation()
            for group in _batches(list(zip(values, infos, strict=True))):
                small = len(group) > 1  # a transaction collects writes in memory
                transaction = tensorstore.Transaction() if small else None
                stores = await asyncio.gather(*(self.create(*pair, transaction) for pair in group))
                by_name = {info.name: store for (_, info), store in zip(group, stores, strict=True)}
                arrays = {info.name: value for value, info in group}
                for name, box, data in out.panels_of(arrays):
                    place = by_name[name][tuple(slice(*pair) for pair in box)]
                    panel = np.asarray(data).view(arrays[name].dtype)
                    await place.write(panel.reshape(place.shape))
                if transaction is not None:
                    await transaction.commit_async()
            return []

        async def create(self, value: Any, info: Any, transaction: Any) -> Any:
            chunk = tuple(stop - start for start, stop in out.boxes(value)[0])
            spec = handlers.get_json_tspec_write(
                info,
                use_ocdbt=info.is_ocdbt_checkpoint,
                global_shape=value.shape,
                local_shape=chunk,
                dtype=value.dtype,
                process_index=jax.process_index() if info.is_ocdbt_checkpoint else None,
            )
            return await tensorstore.open(
                tensorstore.Spec(spec),
                create=True,
                open=True,
                context=info.ts_context,
                transaction=transaction,
            )

    return Handler()


def _batches(pairs: Sequence[tuple[LazyArray, Any]]) -> Iterator[list[tuple[LazyArray, Any]]]:
    """Yields groups of arrays of bounded bytes; a large array is alone."""
    group: list[tuple[LazyArray, Any]] = []
    nbytes = 0
    for value, info in pairs:
        if group and (nbytes + value.nbytes > _BATCH or len(group) == _MOST_BATCH):
            yield group
            group, nbytes = [], 0
        group.append((value, info))
        nbytes += value.nbytes
    if group:
        yield group
