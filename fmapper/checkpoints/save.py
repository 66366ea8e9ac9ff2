"""`save`: the arrays of any tree, by name, in a file or folder of any format."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from fmapper.backends.arrays import HOST, Arrays
from fmapper.backends.discovery import adapter_of
from fmapper.backends.meshes import Meshes
from fmapper.checkpoints import backend as _backend  # noqa: F401  (lazy arrays are arrays)
from fmapper.checkpoints.boxes import Box
from fmapper.checkpoints.checkpoint import Checkpoint
from fmapper.checkpoints.extras.values import is_value, names_of_objects
from fmapper.checkpoints.formats.format import (
    Contents,
    check_contents,
    format_for,
    merge_ties,
)
from fmapper.checkpoints.formats.writer import Writer
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.remote import url_writer
from fmapper.errors import CheckpointError
from fmapper.files.dtypes import numpy_dtype
from fmapper.files.urls import Url, place_of
from fmapper.files.whole import new_folder, new_path
from fmapper.moves.mover import to_numpy
from fmapper.progress import step
from fmapper.states.state import arrays_by_name
from fmapper.states.transient import transient_in
from fmapper.tracebacks import short_traceback
from fmapper.tree.keypath import format_link, name_of
from fmapper.tree.nodes import sync
from fmapper.tree.walk import visit


@short_traceback
def save(
    tree: Any,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Writes the arrays, numbers and strings of a tree to a file or folder, for `load` to read.

    Arrays have their names in `state`, and may be of any backend and device. They are written one
    after the other: an array on an accelerator is copied to the host in parts, just before it is
    written. Tied arrays are written once, or recorded as tied. The result appears when it is
    complete; until then it is beside the target, as `NAME.PID-THREAD.tmp`.

    Arrays of JAX or torch that are spread over several processes are written by all of them: each
    calls `save` with the same path, on a shared file system, and writes its own parts. If a process
    dies, the others raise within half a minute.

    Args:
        tree: A model, an optimizer, a state dict, a checkpoint from `load`: any tree.
        path: The file or folder. A file is replaced; a folder must not exist, or be empty. For
            safetensors also a URL, to which fsspec writes a stream.
        format: `safetensors` (a file for a name that ends so, else a folder of shards with an index
            in the Hub's layout) or `npz`; with torch `pt` and `dcp`, with Flax `msgpack` and
            `orbax`. None decides by the ending of the path.
        metadata: Texts to store besides the arrays, if the format supports them.
        max_shard_size: The bytes of arrays in each file of a folder of safetensors, as a number or
            as `2GB`; None for 5 GB. A larger array has a file to itself.

    Raises:
        CheckpointError: The format cannot hold an array or a value; names it. Nothing is written.
            Or the format does not exist, or the path is not a possible name.
        NotAFunctorError: An undeclared object holds arrays.
        FileExistsError: The folder exists and is not empty.

    Examples:
        >>> import fmapper, numpy as np, tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "net.safetensors"
        >>> fmapper.save({"w": np.ones(2), "step": 7}, path)
        >>> fmapper.load(path)["step"]
        7
    """
    from fmapper.checkpoints.formats import together  # a slow import that others do not need

    sync()
    target = place_of(path)
    form = format_for(target, format, max_shard_size)
    with step(f"saving {target.name}"):
        contents = contents_of_tree(tree)
        contents.metadata |= metadata or {}
        check_contents(contents)
        spread = together.spread_arrays(contents)
        if spread is not None:
            together.save(target, form, contents, spread)
            return
        if isinstance(target, Url):
            if form.is_folder and target.is_dir() and target.names():
                raise FileExistsError(f"{target} already exists and is not an empty folder")
            with url_writer(target) as writer:
                form.write(writer, contents)
            return
        place = new_folder if form.is_folder else new_path
        with place(target) as beside:
            form.write(Writer(beside), contents)


def contents_of_tree(tree: Any) -> Contents:
    """Returns a tree as the contents of a checkpoint."""
    named = arrays_by_name(tree)
    first, ties = merge_ties(named)
    arrays = {name: as_lazy(name, array) for name, array in first.items()}
    metadata = dict(tree.metadata) if isinstance(tree, Checkpoint) else {}
    objects = tree.objects if isinstance(tree, Checkpoint) else names_of_objects(tree)
    return Contents(arrays, ties, _values_of_tree(tree), metadata, objects=frozenset(objects))


def transient_names(source: Any) -> Collection[str]:
    """Returns the names of buffers of a model that checkpoints leave out."""
    if isinstance(source, str | os.PathLike | Checkpoint):
        return ()
    transient = transient_in(source)
    return [name for name, array in arrays_by_name(source).items() if id(array) in transient]


def _values_of_tree(tree: Any) -> dict[str, Any]:
    """Returns the numbers, strings and bools of a tree by name."""
    values: dict[str, Any] = {}
    for link, leaf, node_type in visit(tree):
        if node_type is not None or adapter_of(leaf) is not None:
            continue
        if is_value(leaf):
            name = name_of(link)
            if name in values and repr(values[name]) != repr(leaf):
                raise CheckpointError(f"{name}: two numbers or texts have this name. Rename one.")
            values[name] = leaf
        elif isinstance(leaf, complex | bytes | bytearray):
            raise CheckpointError(
                f"{format_link(link)}: {type(leaf).__name__} cannot be saved, only arrays, "
                "integers, floats, strings and bools; make it an array"
            )
    return values


def as_lazy(name: str, array: Any) -> LazyArray:
    """Wraps an array of any backend as a lazy one, read when it is written."""
    if isinstance(array, LazyArray):
        return array
    adapter = adapter_of(array)
    assert adapter is not None
    array = adapter.portable(array)
    adapter = adapter_of(array)
    assert adapter is not None
    try:
        if adapter.device(array).kind != "meta":
            if not (isinstance(adapter, Meshes) and adapter.writers(array)):
                adapter.check(array)  # arrays that processes hold in parts are written elsewhere
            return _InMemory(adapter, array)
    except Exception as error:
        raise CheckpointError(f"{name}: cannot be saved: {error}") from error
    raise CheckpointError(f"{name}: has a shape but no values to save")


class _InMemory(LazyArray):
    """An array of a tree, copied to the host when it is read."""

    def __init__(self, adapter: Arrays, array: Any) -> None:
        self.shape, self.dtype = adapter.shape(array), numpy_dtype(adapter.dtype(array))
        self.array = array
        self.adapter = adapter

    def _read(self, box: Box) -> Any:
        part = tuple(slice(*pair) for pair in box)
        if self.adapter.device(self.array).kind != HOST.kind:
            return to_numpy(self.array[part])
        return self.adapter.export([self.array], HOST).data[0][(*part, ...)]
