"""Checkpoints as mappings from names to lazy arrays, as `load` returns them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from fmapper.checkpoints.extras.settings import CONFIG, read_settings, split_quantization
from fmapper.checkpoints.formats.format import Contents, file_in, read_contents
from fmapper.files.urls import Place
from fmapper.suggest import did_you_mean


class Checkpoint(dict[str, Any]):
    """The arrays of a checkpoint by name, and its numbers and strings.

    Arrays are `LazyArray`s: they have a shape and a dtype, and are read when they are moved
    (`fmapper.to_jax(checkpoint)`, `fmapper.to_numpy(checkpoint["w"])`) or asked for
    (`checkpoint["w"].read()`). A tied array is one object under each of its names.

    Attributes:
        path: The file or folder, or the URL of it.
        format: The name of its format.
        metadata: Texts that are stored besides the arrays.
        objects: The names of objects that were saved with all of their numbers.
    """

    path: Place
    format: str
    metadata: dict[str, str]
    objects: frozenset[str] = frozenset()

    @classmethod
    def of(cls, path: Place, format: str, contents: Contents) -> Checkpoint:
        """Builds the mapping from the contents of a checkpoint."""
        checkpoint = cls(contents.arrays)
        checkpoint.update((name, contents.arrays[first]) for name, first in contents.ties.items())
        checkpoint.update(contents.values)
        checkpoint.path, checkpoint.format, checkpoint.metadata = path, format, contents.metadata
        checkpoint.objects = contents.objects
        return checkpoint

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantisation that the folder's `config.json` states; None without one.

        Raises:
            CheckpointError: The configuration is damaged.
        """
        path = cast(Path, self.path)  # a Url has the methods used here
        if not path.is_dir() or not (path / CONFIG).exists():
            return None
        return split_quantization(read_settings(file_in(path, CONFIG)))[1]

    def __missing__(self, name: str) -> Any:
        """Raises for a name that the checkpoint lacks.

        Raises:
            KeyError: Always; suggests the closest name.
        """
        hint = did_you_mean(name, self) if isinstance(name, str) else ""
        raise KeyError(f"{name!r} is not in {self.path}.{hint}")

    def __repr__(self) -> str:
        """Shows the place and the size; `inspect` lists the arrays."""
        arrays = {id(value): value for value in self.values() if hasattr(value, "nbytes")}
        size = sum(array.nbytes for array in arrays.values())
        return f"<Checkpoint {self.path}: {self.format}, {len(arrays)} arrays, {size:,} bytes>"


def read_checkpoint(path: Place, format: str | None = None) -> Checkpoint:
    """Reads the contents of a checkpoint without its arrays.

    Raises:
        CheckpointError: It is damaged, or in no known format.
        FileNotFoundError: No file or folder has this name.
    """
    form, contents = read_contents(path, format)
    return Checkpoint.of(path, form.name, contents)
