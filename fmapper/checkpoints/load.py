"""`load`: reads a checkpoint of any format, as lazy arrays or into a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from fmapper.backends.discovery import adapter_of, adapters, owner_of
from fmapper.backends.dtypes import dtype_name, is_inexact, wanted_dtype
from fmapper.backends.models import Models
from fmapper.checkpoints import backend as _backend  # noqa: F401  (stored arrays are arrays)
from fmapper.checkpoints.checkpoint import Checkpoint, read_checkpoint
from fmapper.checkpoints.extras.values import (
    array_as_number,
    find_clashes,
    is_value,
    leftover_values,
    missing_values,
    number_as_array,
    values_in,
    with_values,
)
from fmapper.checkpoints.lazy import LazyArray, is_narrow
from fmapper.errors import (
    CheckpointError,
    ConversionWarning,
    PrecisionWarning,
    StructureMismatchError,
)
from fmapper.files.dtypes import name_of_dtype
from fmapper.files.urls import Place, place_of
from fmapper.programs.file import holds_program, load_model
from fmapper.progress import step
from fmapper.states.materialize import (
    Default,
    check_constants,
    default_for,
    fill,
    is_abstract,
)
from fmapper.states.state import (
    OF_STRUCTURED,
    identity_of,
    named_arrays,
    place_as_before,
    weights_of,
)
from fmapper.states.transient import transient_in
from fmapper.tracebacks import short_traceback
from fmapper.tree.nodes import sync
from fmapper.warn import warn

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.meshes.filling import Placer
    from fmapper.meshes.sharding import Sharding

T = TypeVar("T")


@overload
def load(
    path: str | os.PathLike[str],
    like: None = None,
    *,
    format: str,
    rules: Rules | None = None,
) -> Checkpoint: ...
@overload
def load(
    path: str | os.PathLike[str],
    like: None = None,
    *,
    format: None = None,
    rules: Rules,
) -> Checkpoint: ...
@overload
def load(path: str | os.PathLike[str], like: None = None, *, to: str | None = None) -> Any: ...
@overload
def load(
    path: str | os.PathLike[str],
    like: T,
    *,
    format: str | None = None,
    rules: Rules | None = None,
    device: Any = None,
    dtype: Any = None,
    default: Default | None = None,
    strict: bool = True,
    sharding: Sharding | None = None,
) -> T: ...
@short_traceback
def load(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    format: str | None = None,
    rules: Rules | None = None,
    device: Any = None,
    dtype: Any = None,
    default: Default | None = None,
    strict: bool = True,
    sharding: Sharding | None = None,
    to: str | None = None,
) -> Any:
    """Reads a file: the model in it, its arrays into a model, or as lazy arrays by name.

    The file need not be trusted: nothing in it is run, not even in a pickle, and time and memory
    are proportional to the requested contents. A file with more names and numbers than genuine
    checkpoints have is refused; `fmapper.settings.bounds = False` lifts that.

    Args:
        path: A file or folder that `save` or another library has written; for safetensors also a
            URL such as `s3://bucket/model`, of which fsspec reads only the needed bytes.
        like: The model or tree to fill; it is not changed. It may have no memory (torch's device
            `meta`, `jax.ShapeDtypeStruct`). Ties are kept. None returns the contents of the file:
            the model, if the `save` of a converted model wrote it; otherwise a `Checkpoint`, a dict
            from names to arrays that are not yet read.
        format: As for `save`; None detects it. With a format, or with rules, the file of a
            converted model is read as a `Checkpoint`, too.
        rules: How the names and shapes of the checkpoint become those of `like`.
        device: The device for the arrays; None for those of the arrays of `like`, also on a mesh,
            or the CPU.
        dtype: The dtype for floating and complex arrays; None for that of `like`.
        default: Values that the checkpoint lacks: a mapping like it, or `default(name, array)` for
            arrays.
        strict: False ignores extra entries of the checkpoint, and keeps the old values of missing
            ones. Numbers and texts are treated like arrays, but fields of an object may be
            settings: a checkpoint may lack them if it has none of that object. A number fills a
            scalar array of its kind, and the reverse.
        sharding: How to divide the arrays among the devices of a mesh: each process reads only its
            own shards, directly to their devices.
        to: The target, as for `convert`, for the model in the file of a converted model; None for
            the framework in which it was saved.

    Raises:
        CheckpointError: The checkpoint is damaged, or in no known format; or with `to` it has no
            program.
        StructureMismatchError: Names are missing or left over, a shape differs, or there is an
            array instead of a number; lists all of them.
        LossyCastError: A value does not fit into its dtype.
        TypeError: `device`, `dtype`, `default`, `strict` or `sharding` is passed without `like`, or
            `to` with an option for arrays.
        OSError: The file does not exist, or may not be read.

    Examples:
        >>> import fmapper, torch, tempfile
        >>> path = tempfile.mkdtemp() + "/net.safetensors"
        >>> fmapper.save(torch.nn.Linear(2, 1), path)
        >>> net = fmapper.load(path, like=torch.nn.Linear(2, 1, device="meta"))
        >>> fmapper.load(path)["weight"].shape
        (1, 2)
    """
    if like is None:
        _check_unused(device=device, dtype=dtype, default=default, sharding=sharding, strict=strict)
    elif to is not None:
        raise TypeError("load: to= is for the model in a file, like= for arrays to fill: omit one")
    if to is not None and (format is not None or rules is not None):
        raise TypeError("load: to= is for the model in a file, format= and rules= for its arrays")
    source = place_of(path)
    with step(f"loading {source.name}"):
        checkpoint = read_checkpoint(source, format)
        if rules is not None:
            checkpoint = _rename(checkpoint, rules)
        if like is None:
            as_arrays = format is not None or rules is not None
            return checkpoint if as_arrays else _contents_of(source, checkpoint, to)
        tree, back = _by_source(like, checkpoint)
        check_constants(like)
        placer = None if sharding is None else sharding.placer(like)
        filled = back(_fill(tree, checkpoint, device, dtype, default, strict, placer, like))
        return filled if placer is None else placer.finish(filled)


def _contents_of(source: Place, checkpoint: Checkpoint, to: str | None) -> Any:
    """Returns the model in a file if it holds a program, or else its arrays.

    Raises:
        CheckpointError: The file holds a generator, or a target was passed but the file has no
            program.
    """
    if isinstance(source, Path) and holds_program(checkpoint.metadata):
        if "fmapper.generator" in checkpoint.metadata:
            raise CheckpointError(
                f"{source}: holds a generator: read it with fmapper.generation.Generator.load, or "
                "its arrays with format='safetensors'"
            )
        return load_model(source, to)
    if to is not None:
        raise CheckpointError(
            f"{source}: to={to!r} is for the file of a converted model, but this one holds arrays "
            "and no program. Pass like=, a model to fill with them; from_pretrained takes folders "
            "of the Hub."
        )
    return checkpoint


def _check_unused(*, strict: bool, **options: Any) -> None:
    """Raises for options that need a tree to fill."""
    unused = [f"{name}=" for name, value in options.items() if value is not None]
    unused += ["strict="] if strict is not True else []
    if unused:
        raise TypeError(
            f"load: {', '.join(unused)} applies only with like=, a tree to fill. Without it, load "
            f"gives lazy arrays: move them with a mover, such as to_jax(load(path), dtype=...)."
        )


def _rename(checkpoint: Checkpoint, rules: Rules) -> Checkpoint:
    renamed = _with_contents(checkpoint, rules.apply(checkpoint))
    renamed.objects = frozenset()  # objects may have been renamed, or have other fields
    return renamed


def _with_contents(checkpoint: Checkpoint, contents: Mapping[str, Any]) -> Checkpoint:
    copy = Checkpoint(contents)
    copy.path, copy.format, copy.metadata = checkpoint.path, checkpoint.format, checkpoint.metadata
    copy.objects = checkpoint.objects
    return copy


def _in_kinds_of_tree(
    checkpoint: Checkpoint, named: Mapping[str, Any], values: Mapping[str, Any]
) -> Checkpoint:
    """Converts numbers to scalar arrays, and the reverse, to match a tree."""
    changed: dict[str, Any] = {}
    for name, old in named.items():
        if is_value(checkpoint.get(name)):
            adapter = owner_of(old)
            kind = adapter.shape(old), adapter.dtype(old)
            changed[name] = number_as_array(checkpoint[name], *kind)
    for name, value in values.items():
        if isinstance(array := checkpoint.get(name), LazyArray):
            changed[name] = array_as_number(array, value)
    fitting = {name: new for name, new in changed.items() if new is not None}
    return _with_contents(checkpoint, {**checkpoint, **fitting}) if fitting else checkpoint


def _by_source(model: Any, checkpoint: Checkpoint) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a tree to fill and the inverse function.

    That is the model itself, unless its names for arrays are not their paths, or it is a structured
    model and the checkpoint is of its source.
    """
    return weights_of(model) or _by_written_source(model, checkpoint)


def _by_written_source(model: Any, checkpoint: Checkpoint) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a tree to fill and the inverse function, for a structured model.

    Some of its arrays have the same names in the source, but other shapes: the checkpoint is of the
    source if more of its arrays have the shapes of the source.
    """
    several = (adapter.source_weights(model, transient=False) for adapter in adapters(Models))
    written = next(filter(None, several), None)
    if written is None:
        return model, lambda filled: filled
    named, back = written

    def count_alike(arrays: Mapping[str, Any]) -> int:
        return sum(
            tuple(stored.shape) == tuple(array.shape)
            for name, array in arrays.items()
            if isinstance(stored := checkpoint.get(name), LazyArray)
        )

    ours = {name: array for name, (_, array) in named_arrays(model).items()}
    alike = count_alike(ours)
    if count_alike(named) > alike:
        return named, back
    turned = [
        name for name in ours if name in checkpoint and _is_turned(ours[name], named.get(name))
    ]
    if turned and count_alike(named) == alike:
        warn(
            f"{', '.join(turned[:3])}: the checkpoint may be of this model or of its source, which "
            "has the same names and shapes, but other layouts. It is read as of this model. If it "
            "is of the source, use load_state(model, load(path), source=True).",
            ConversionWarning,
        )
    return model, lambda filled: filled


def _is_turned(array: Any, other: Any) -> bool:
    """Returns whether an array has the same shape in the source, but another layout."""
    return other is not None and other is not array and tuple(other.shape) == tuple(array.shape)


def _fill(
    tree: Any,
    checkpoint: Checkpoint,
    device: Any,
    dtype: Any,
    default: Default | None,
    strict: bool,
    placer: Placer | None,
    like: Any,
) -> Any:
    """Returns a tree with the arrays, numbers and texts of a checkpoint.

    The tree may be a dict of the arrays of the model `like`.
    """
    sync()
    asked = None if dtype is None else dtype_name(dtype)
    named = {name: array for name, (_, array) in named_arrays(tree).items()}
    values = values_in(tree)
    checkpoint = _in_kinds_of_tree(checkpoint, named, values)
    _check_scaled(checkpoint, named, asked)
    defaults = _defaults(checkpoint, like, named, values, default)
    _check_names(checkpoint, {**checkpoint, **defaults}, like, named, values, strict)
    state: dict[str, Any] = {}
    narrowed: list[str] = []
    for name, old in named.items():
        if name in defaults:
            state[name] = defaults[name]
        elif name in checkpoint:
            new = checkpoint[name]
            state[name] = _in_dtype(new, old, asked)
            if asked is None and state[name].dtype.itemsize < new.dtype.itemsize:
                narrowed.append(name)
    if narrowed:
        warn(
            f"{checkpoint.path}: narrowed to the dtype of the tree: {', '.join(narrowed[:5])}"
            f"{' and others' * (len(narrowed) > 5)}. Pass dtype= to confirm that this is intended.",
            PrecisionWarning,
        )
    place: Callable[[Any, Any], Any] | None = place_as_before if device is None else None
    try:
        place = placer or place
        filled = fill(
            tree, state, device=device, dtype=dtype, default=default, strict=strict, place=place
        )
    except StructureMismatchError as error:
        text = str(error).replace("the state", "the checkpoint")
        raise StructureMismatchError(f"{checkpoint.path}: {text}") from None
    news = {name: {**checkpoint, **defaults}.get(name, old) for name, old in values.items()}
    return with_values(filled, news) if news else filled


def _check_scaled(checkpoint: Checkpoint, named: Mapping[str, Any], asked: str | None) -> None:
    """Raises for a cast of narrow floats if extra arrays may be their scales."""
    left = [n for n, x in checkpoint.items() if isinstance(x, LazyArray) and n not in named]
    if not left:
        return
    for name, old in named.items():
        new = checkpoint.get(name)
        if isinstance(new, LazyArray) and is_narrow(new) and _in_dtype(new, old, asked) is not new:
            raise StructureMismatchError(
                f"{checkpoint.path}: {name} has floats of 8 bits, which would be cast without "
                f"their scales, if {left[0]}, which is left over, has some. Dequantise them: "
                "materialize(tree, dequantize(load(path))). If they are plain numbers, drop what "
                "is left over with rules=."
            )


def _defaults(
    checkpoint: Checkpoint,
    like: Any,
    named: Mapping[str, Any],
    values: Mapping[str, Any],
    default: Default | None,
) -> dict[str, Any]:
    """Returns the defaults of everything that the checkpoint lacks and the tree has with a value.

    `fill` handles abstract arrays.
    """
    if default is None:
        return {}
    absent = _missing_arrays(checkpoint, like, named)
    defaults = {name: default_for(default, name, named[name]) for name in absent}
    if isinstance(default, Mapping):
        defaults |= {n: default[n] for n in values if n in default and n not in checkpoint}
    return {name: value for name, value in defaults.items() if value is not None}


def _missing_arrays(
    checkpoint: Mapping[str, Any], like: Any, named: Mapping[str, Any]
) -> list[str]:
    """Returns the names of arrays with values that a checkpoint lacks.

    A tied array may have any of its names.
    """
    present = {identity_of(name, old) for name, old in named.items() if name in checkpoint}
    transient = transient_in(like)
    return [
        name
        for name, old in named.items()
        if not is_abstract(old)
        and identity_of(name, old) not in present
        and id(old) not in transient
    ]


def _in_dtype(new: LazyArray, old: Any, asked: str | None) -> LazyArray:
    """Casts an array of a checkpoint lazily."""
    stored = name_of_dtype(new.dtype)
    adapter = adapter_of(old)
    assert adapter is not None
    wanted = wanted_dtype(adapter.dtype(old), asked)
    if stored == wanted or not (is_inexact(stored) and is_inexact(wanted)):
        return new
    return new.astype(wanted)


def _check_names(
    checkpoint: Checkpoint,
    given: Mapping[str, Any],
    like: Any,
    named: Mapping[str, Any],
    values: Mapping[str, Any],
    strict: bool,
) -> None:
    """Raises for a checkpoint whose names or kinds of values differ from those of a tree.

    Args:
        checkpoint: The checkpoint.
        given: Its entries, and the defaults for missing ones.
        like: The model to which the tree belongs.
        named: The arrays of the tree by name.
        values: Its numbers and texts by name.
        strict: Whether missing and extra names are errors.
    """
    problems = [*find_clashes(checkpoint, values, named)]
    names: list[str] = []
    if strict:
        missing = [
            *_missing_arrays(given, like, named),
            *missing_values(given, values, like, checkpoint.objects),
        ]
        names += [f"{name}: missing from the checkpoint" for name in missing]
        expected = {*named, *values}
        left = [n for n, x in checkpoint.items() if isinstance(x, LazyArray) and n not in expected]
        left += leftover_values(checkpoint, expected, like)
        names += [f"{name}: in the checkpoint, but not in the tree" for name in left]
    if problems or names:
        raise StructureMismatchError(
            f"{checkpoint.path}: the checkpoint does not fit the tree:\n"
            + "\n".join(f"  {line}" for line in [*problems, *names])
            + "\nChange the value in the tree to that kind, or drop the one stored with rules=."
            * bool(problems)
            + "\nstrict=False keeps old values for missing names and ignores extra ones; "
            f"default= provides missing values; rules= renames and drops.{OF_STRUCTURED}"
            * bool(names)
        )
