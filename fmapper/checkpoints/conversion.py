"""Converts checkpoints between formats one panel at a time: resumable and atomic."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmapper import __version__ as VERSION
from fmapper.backends.discovery import known_frameworks
from fmapper.backends.dtypes import dtype_name, is_inexact, wanted_dtype
from fmapper.checkpoints.checkpoint import Checkpoint
from fmapper.checkpoints.extras.settings import CONFIG, QUANTIZATION, split_quantization
from fmapper.checkpoints.extras.values import is_value
from fmapper.checkpoints.formats.format import (
    Contents,
    Format,
    check_contents,
    file_in,
    format_for,
    merge_ties,
    read_contents,
)
from fmapper.checkpoints.formats.safetensors import SafetensorsFolder, shards
from fmapper.checkpoints.formats.writer import Journal, Writer
from fmapper.checkpoints.lazy import LazyArray, is_narrow
from fmapper.checkpoints.remote import url_writer
from fmapper.errors import CheckpointError
from fmapper.files.bounded_json import read_json
from fmapper.files.untrusted import Misfit, open_regular
from fmapper.files.urls import Place, Url, place_of
from fmapper.progress import step
from fmapper.tracebacks import short_traceback

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules

_PLAN, _JOURNAL, _OUT = "plan.json", "journal.txt", "out"
_TEXTS = (".json", ".txt", ".jinja", ".model")  # beside the weights in a folder of the Hub
_MOST_TEXT = 100_000_000  # bytes


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion.

    Attributes:
        path: The new checkpoint.
        format: The name of its format.
        arrays: The number of its arrays; a tied one counts once.
        nbytes: Their bytes.
        seconds: The duration, including comparison but not imports of libraries.
    """

    path: Place
    format: str
    arrays: int
    nbytes: int
    seconds: float


@short_traceback
def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str | None = None,
    *,
    dtype: Any = None,
    rules: Rules | None = None,
    dequantize: bool = False,
    max_shard_size: int | str | None = None,
    check: bool = True,
) -> Converted:
    """Writes a checkpoint in another format, dtype or layout, without loading it into memory.

    It uses memory for a few panels of some 8 MiB, or for the needed part of one array if its layout
    changes. The system copies bytes that do not change, if source and target are stored row by row.
    From a folder of the Hub to a folder of safetensors, the configuration and tokenizer are copied,
    too, unless rules change the names.

    The result is written to the folder `TARGET.partial` until it is complete. The next run with the
    same arguments resumes an interrupted one: pieces in its journal are neither written nor
    compared again, except in formats that are streams (npz, orbax and dcp start over). An existing
    target is compared with the result, and not written.

    Args:
        source: A checkpoint of any format; of safetensors also a URL.
        target: The new file or folder, outside the source; for safetensors also a URL, to which a
            stream is written that cannot be resumed.
        format: As for `save`; None decides by the ending of the target, and keeps the format of a
            folder if the target has no ending.
        dtype: The dtype of floating and complex arrays; None for their own.
        rules: Rules that rename and reshape arrays.
        dequantize: Whether to make quantised arrays dense, as `dequantize` does.
        max_shard_size: As for `save`.
        check: Whether to read back and compare what was written.

    Raises:
        CheckpointError: The source is damaged, the target format cannot hold it, or reading back
            gives other values. Or `dtype` would cast 8-bit floats, which have scales, or
            `dequantize` would leave them as they are.
        LossyCastError: A finite value is infinite in the new dtype.
        FileExistsError: The target exists and differs from the result.
        OSError: The disk is full or not writable; the written part stays in `TARGET.partial`, and
            the next run resumes.
    """
    origin, goal = place_of(source), place_of(target)
    is_there = _check_places(origin, goal)
    asked = None if dtype is None else dtype_name(dtype)
    with step(f"converting {origin.name}") as say:
        source_form, contents = read_contents(origin)
        if dequantize:
            contents = _dequantize(origin, contents, asked)
        contents = _change(contents, rules)
        _check_scaled(origin, contents, asked, dequantize)
        if asked is not None:
            contents.arrays = {name: _cast(a, asked) for name, a in contents.arrays.items()}
        check_contents(contents)
        form = format_for(goal, format, max_shard_size, source_form)
        begin = time.perf_counter()  # the libraries of the formats are imported
        total = sum(array.nbytes for array in contents.arrays.values())
        on_bytes = _Meter(f"converting {origin.name}", total, say)
        done = len(contents.arrays), total
        texts = _texts_for(origin, goal, form, asked, dequantize) if rules is None else {}
        if is_there:
            _compare_with_target(goal, form, contents, texts)
            return Converted(goal, form.name, *done, time.perf_counter() - begin)
        if isinstance(goal, Url):
            with url_writer(goal, check=check, on_bytes=on_bytes) as writer:
                form.write(writer, contents)
            return Converted(goal, form.name, *done, time.perf_counter() - begin)
        plan = _plan(origin, contents, form, asked, rules, dequantize)
        partial = goal.with_name(f"{goal.name}.partial")
        with _explain_full_disk(partial), _Staging(partial, plan, form) as (out, journal):
            form.write(Writer(out, journal=journal, check=check, on_bytes=on_bytes), contents)
            for name, text in texts.items():
                (out / name).write_bytes(text)
            if goal.exists():
                raise FileExistsError(f"{goal} was created by another process meanwhile")
            out.rename(goal)
        shutil.rmtree(partial)
    return Converted(goal, form.name, *done, time.perf_counter() - begin)


def _check_places(source: Place, target: Place) -> bool:
    """Checks that a target is possible; returns whether something is there."""
    if isinstance(target, Url):
        return target.exists() and not (target.is_dir() and not target.names())
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: no such folder")
    if (
        isinstance(source, Path)
        and source.is_dir()
        and target.resolve().is_relative_to(source.resolve())
    ):
        raise CheckpointError(f"{target} would be inside its source, {source}")
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    return target.exists()


def _compare_with_target(
    target: Place, form: Format, contents: Contents, texts: Mapping[str, bytes]
) -> None:
    """Raises unless the target equals the result, complete and with the same values."""
    try:
        problem = _difference(target, form, contents, texts)
    except CheckpointError as error:
        problem = str(error)
    if problem:
        raise FileExistsError(
            f"{target} already exists, and is not what this conversion writes ({problem}): remove "
            "it, or choose another name"
        )


def _difference(target: Place, form: Format, contents: Contents, texts: Mapping[str, bytes]) -> str:
    """Describes how a target differs from the result; empty if it does not."""
    from fmapper.checkpoints.inspection import diff  # only for existing targets

    current, stored = read_contents(target)
    if type(current) is not type(form):
        return f"it is in the format {current.name}"
    if isinstance(form, SafetensorsFolder):
        names = [name for name, _ in shards(contents.arrays, form.most)]
        if [file.name for file in stored.files] != names:
            return "its shards differ"
    for name, text in texts.items():
        file = Path(str(target)) / name
        if not file.is_file() or file.read_bytes() != text:
            return f"{name} differs"
    pair = (Checkpoint.of(target, form.name, side) for side in (stored, contents))
    for difference in diff(*pair).differences:  # formats without bools have 0 and 1
        if difference.what != "value" or stored.values.get(difference.name) != contents.values.get(
            difference.name
        ):
            return str(difference)
    return ""


def _dequantize(source: Place, contents: Contents, dtype: str | None) -> Contents:
    """Makes quantised arrays dense lazily; nothing is read.

    Raises:
        CheckpointError: There are no quantised arrays, or their kind is ambiguous.
    """
    from fmapper.checkpoints.quantized.array import QuantizedArray  # few checkpoints need it
    from fmapper.checkpoints.quantized.finding import dequantize, find_quantized

    checkpoint = Checkpoint.of(source, "", contents)
    quantised = {n for n, x in find_quantized(checkpoint).items() if isinstance(x, QuantizedArray)}
    if not quantised:
        raise CheckpointError(f"{source}: holds no quantised arrays of a supported kind")
    contents.arrays, contents.ties = merge_ties(dequantize(checkpoint, dtype=dtype))
    of_torchao = {*quantised, "tensor_names"}
    contents.metadata = {n: x for n, x in contents.metadata.items() if n not in of_torchao}
    return contents


def _change(contents: Contents, rules: Rules | None) -> Contents:
    """Renames, transposes and casts the contents lazily by rules; nothing is read."""
    if rules is None:
        return contents
    tied = {name: contents.arrays[first] for name, first in contents.ties.items()}
    named = rules.apply({**contents.arrays, **tied, **contents.values})
    contents.values = {name: value for name, value in named.items() if is_value(value)}
    arrays = {name: x for name, x in named.items() if name not in contents.values}
    contents.arrays, contents.ties = merge_ties(arrays)
    return contents


def _check_scaled(source: Place, contents: Contents, dtype: str | None, dequantize: bool) -> None:
    """Raises for narrow floats that would lose their scales.

    Scales may have any name, so their absence cannot be established.
    """
    if dtype is None and not dequantize:
        return
    narrow = {name: array for name, array in contents.arrays.items() if is_narrow(array)}
    names = [name for name, array in narrow.items() if dequantize or array.dtype.name != dtype]
    if not names:
        return
    shown = f"{', '.join(names[:5])}{' and others' * (len(names) > 5)}"
    plain = "If they are plain numbers, cast them by a rule, such as Cast(names, 'float32')."
    if dequantize:
        raise CheckpointError(
            f"{source}: {shown}: floats of 8 bits without recognised scales, W_scale_inv "
            f"or W_scale beside W. Rename the scales in a conversion of its own first. {plain}"
        )
    raise CheckpointError(
        f"{source}: {shown}: to cast floats of 8 bits to {dtype} would ignore their scales. Pass "
        f"dequantize=True (--dequantize on the command line). {plain}"
    )


def _cast(array: LazyArray, dtype: str) -> LazyArray:
    stored = array.dtype.name
    wanted = wanted_dtype(stored, dtype)
    return array if stored == wanted or not is_inexact(stored) else array.astype(wanted)


def _plan(
    source: Place,
    contents: Contents,
    form: Format,
    dtype: str | None,
    rules: Rules | None,
    dequantize: bool,
) -> dict[str, Any]:
    """Returns the settings that two runs must share for one to resume the other."""
    files: list[Any] = []
    for file in contents.files:
        if isinstance(file, Url):
            files.append([str(file), file.size(), file.mark()])
            continue
        status = file.stat()
        files.append([str(file.absolute()), status.st_size, status.st_mtime_ns])
    text = "" if rules is None else rules.to_toml()
    return {
        "fmapper": VERSION,
        "source": str(source if isinstance(source, Url) else source.absolute()),
        "files": files,
        "format": form.name,
        "dtype": dtype,
        "max_shard_size": form.most if isinstance(form, SafetensorsFolder) else None,
        "dequantize": dequantize,
        "rules": hashlib.sha256(text.encode()).hexdigest(),
    }


def _texts_for(
    source: Place, target: Place, form: Format, dtype: str | None, dequantize: bool
) -> dict[str, bytes]:
    """Returns the texts to copy from a folder of the Hub, by name."""
    if not isinstance(form, SafetensorsFolder) or isinstance(target, Url):
        return {}
    return {text.name: _read_text(text, dtype, dequantize) for text in _texts_beside(source)}


def _texts_beside(folder: Place) -> list[Path]:
    """Returns the files beside the weights in a folder of the Hub, without code."""
    if isinstance(folder, Url) or not (folder / CONFIG).is_file():
        return []
    names = sorted(path.name for path in folder.iterdir() if path.suffix in _TEXTS)
    return [file_in(folder, name) for name in names if not name.endswith(".index.json")]


def _read_text(path: Path, dtype: str | None, dequantize: bool) -> bytes:
    """Reads a text; a configuration gets the dtype and quantisation of the new arrays."""
    try:
        with open_regular(path) as file:
            data = file.read(_MOST_TEXT + 1)
        if len(data) > _MOST_TEXT:
            raise Misfit("is too long for what stands beside weights")
        if path.name != CONFIG or (dtype is None and not dequantize):
            return data
        settings = read_json(data.decode())
        if type(settings) is not dict:
            raise Misfit("is not an object")
    except (Misfit, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if dequantize:
        settings, _ = split_quantization(settings)
    if dtype is not None:
        settings = _with_dtype(settings, dtype)
    return json.dumps(settings, indent=2).encode() + b"\n"


def _with_dtype(settings: dict[str, Any], dtype: str) -> dict[str, Any]:
    parts = {
        key: {**part, **dict.fromkeys(filter(_is_of_weights, part), dtype)}
        for key, part in settings.items()
        if key.endswith("_config") and key != QUANTIZATION and type(part) is dict
    }
    names = [*filter(_is_of_weights, settings)] or ["dtype"]
    return {**settings, **parts, **dict.fromkeys(names, dtype)}


def _is_of_weights(name: str) -> bool:
    """Returns whether a setting is the dtype of weights, not of a router or a state."""
    framework, _, end = name.rpartition("_")
    return name == "dtype" or (end == "dtype" and framework in known_frameworks())


class _Staging(contextlib.AbstractContextManager[tuple[Path, Journal]]):
    """The temporary folder of a conversion, used by one process at a time."""

    def __init__(self, folder: Path, plan: dict[str, Any], form: Format) -> None:
        self._folder, self._plan, self._form = folder, plan, form

    def __enter__(self) -> tuple[Path, Journal]:
        self._folder.mkdir(exist_ok=True)
        self._lock = _lock(self._folder)
        out, plan = self._folder / _OUT, self._folder / _PLAN
        previous = plan.read_text() if plan.exists() else ""
        text = json.dumps(self._plan, indent=2)
        if previous != text:
            for path in self._folder.iterdir():
                if path.name != _LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            plan.write_text(text)
        if self._form.is_folder:
            out.mkdir(exist_ok=True)
        self._journal = Journal(self._folder / _JOURNAL)
        return out, self._journal

    def __exit__(self, *_: object) -> None:
        self._journal.close()
        os.close(self._lock)


_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


@contextlib.contextmanager
def _explain_full_disk(folder: Path) -> Iterator[None]:
    """Adds to a full disk's error where the partial files are, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        text = f"{error.strerror}. What was written stays there; make room, and run this again"
        raise OSError(error.errno, text, str(folder)) from error


_LOCK = "lock"


def _lock(folder: Path) -> int:
    """Locks the folder for the lifetime of this process."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not on Windows
        pass
    except OSError:
        os.close(handle)
        raise CheckpointError(f"{folder}: another process is writing there") from None
    return handle


class _Meter:
    """Reports progress, speed and remaining time of a conversion."""

    def __init__(self, title: str, total: int, say: Callable[[str], None]) -> None:
        self._title, self._total, self._say = title, total, say
        self._done, self._begin = 0, time.monotonic()

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        seconds = max(time.monotonic() - self._begin, 1e-6)
        rate = self._done / seconds
        left = (self._total - self._done) / max(rate, 1.0)
        share = self._done / max(self._total, 1)
        self._say(f"{self._title}: {share:.0%}, {rate / 1e6:,.0f} MB/s, {left:.0f} s left")
