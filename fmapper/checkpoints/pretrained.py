"""`from_pretrained` and `save_pretrained`: a model with its weights, in the layout of the Hub."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from fmapper.backends.arrays import HOST
from fmapper.backends.device import devices, parse_device
from fmapper.backends.discovery import adapter_of, adapters, all_adapters, owner_of
from fmapper.backends.dtypes import dtype_name, is_inexact
from fmapper.backends.models import Models
from fmapper.checkpoints.backend import read_ahead
from fmapper.checkpoints.checkpoint import read_checkpoint
from fmapper.checkpoints.extras.settings import CONFIG
from fmapper.checkpoints.formats.format import Contents, shard_bytes
from fmapper.checkpoints.formats.safetensors import SafetensorsFolder
from fmapper.checkpoints.formats.writer import Writer
from fmapper.checkpoints.lazy import LazyArray, is_narrow
from fmapper.checkpoints.rules.naming import Drop
from fmapper.checkpoints.rules.rules import Rules
from fmapper.checkpoints.save import contents_of_tree
from fmapper.errors import (
    CheckpointError,
    ConversionError,
    FmapperWarning,
    StructureMismatchError,
)
from fmapper.files.hub import download
from fmapper.files.urls import local_place
from fmapper.files.whole import new_folder
from fmapper.moves.mover import to_device
from fmapper.programs.steps import find_target
from fmapper.progress import step
from fmapper.states.materialize import fill
from fmapper.states.state import named_arrays
from fmapper.states.transient import transient_in
from fmapper.tracebacks import short_traceback
from fmapper.warn import warn

if TYPE_CHECKING:
    from fmapper.meshes.sharding import Sharding
    from fmapper.meshes.streaming import Offload
    from fmapper_adapters.flax import FlaxModel
    from fmapper_adapters.jax import JaxModel


@dataclass
class Pretrained:
    """A pretrained model that an adapter has read from a folder.

    Attributes:
        model: The model without memory for its parameters.
        backend: The backend of the model.
        example_kwargs: Example inputs by keyword.
        dynamic_shapes: The sizes of these that vary, as for `convert`.
        rules: Returns the rules from the arrays of a folder to those of the model.
        rules_back: Returns the rules from the arrays of the model to those of a folder.
        may_lack: Returns whether a folder may lack a name of the model.
        may_have: Returns whether a folder may have a name that the model lacks.
        quantization: The quantisation of the weights that the configuration states.
        files: Returns texts to save beside the weights, by file name: the configuration.
        names: The names of the model's arrays that belong to a folder; None for all.
    """

    model: Any
    backend: str
    example_kwargs: dict[str, Any]
    dynamic_shapes: Any = "auto"
    rules: Callable[[Mapping[str, LazyArray]], Rules] = lambda arrays: Rules()
    rules_back: Callable[[], Rules] = Rules
    may_lack: Callable[[str], bool] = lambda name: False
    may_have: Callable[[str], bool] = lambda name: False
    quantization: Mapping[str, Any] | None = None
    files: Callable[[], Mapping[str, str]] = dict
    names: Collection[str] | None = None


@overload
def from_pretrained(
    folder: str | os.PathLike[str], to: str | None, *, offload: Offload, **options: Any
) -> Any: ...
@overload
def from_pretrained(
    folder: str | os.PathLike[str], to: str, *, structure: bool, **options: Any
) -> Any: ...
@overload
def from_pretrained(
    folder: str | os.PathLike[str], to: Literal["jax"], **options: Any
) -> JaxModel: ...
@overload
def from_pretrained(
    folder: str | os.PathLike[str], to: Literal["flax", "nnx"], **options: Any
) -> FlaxModel: ...
@overload
def from_pretrained(folder: str | os.PathLike[str], to: str | None, **options: Any) -> Any: ...
@short_traceback
def from_pretrained(
    folder: str | os.PathLike[str],
    to: str | None,
    *,
    dtype: Any = None,
    device: Any = None,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = "auto",
    rules: Rules | None = None,
    sharding: Sharding | None = None,
    offload: Offload | None = None,
    **options: Any,
) -> Any:
    """Loads a model, in any framework, from a folder in the layout of the Hub.

    The folder has a `config.json` of transformers and weights in safetensors (or of `torch.save`).
    The class is instantiated without memory, its program is recorded from shapes alone, and the
    weights are read directly to their devices, in their final dtype, without going through torch.
    Quantised weights are dequantised on the way. Classes are those of the installed transformers;
    no code of the folder is run.

    Args:
        folder: The folder, as written by `model.save_pretrained`; or the name of a repository of
            the Hub, such as `org/name`, which huggingface_hub downloads or finds in its cache.
        to: `torch`, `jax`, `flax` (or `nnx`); with `structure=True` also `equinox`; None for the
            framework of the folder's own class.
        dtype: The dtype of floating parameters; None or "auto" for that of the configuration.
        device: The device for the weights; None for the CPU, or JAX's default device.
        example_inputs: The inputs for which the program is recorded, as for `convert`.
        example_kwargs: The same by keyword. Without either, they are made from the configuration:
            two rows of eight tokens and their mask, images, sounds.
        dynamic_shapes: As for `convert`. By default all sizes vary that the code does not fix; for
            images and spectrograms only their number.
        rules: The rules from names and shapes of the folder to those of the model; None for the
            tables of transformers.
        sharding: How to divide the weights among the devices of a mesh:
            `fmapper.meshes.Sharding(mesh, "model")`. Each process reads its own shards.
        offload: How much of a converted model to keep on small devices, as
            `fmapper.meshes.Offload({"gpu:0": "8GiB", "cpu": None})`. The rest is fetched while the
            model runs.
        **options: As for `convert`.

    Returns:
        The module of transformers, in evaluation mode; or a `JaxModel` or `FlaxModel` of it, whose
        parameters have torch's names; with `offload` an `OffloadedModel`, with `structure=True` a
        module of the target with the model's classes. An attention mask of tokens may be omitted.

    Raises:
        CheckpointError: The folder holds no model of a known kind, or is damaged.
        StructureMismatchError: Weights are missing, or have other shapes; lists them.
        ConversionError: The model cannot be converted, or the target is `linen`, whose models hold
            no arrays.
        PlacementError: With `offload`, the model is not converted, or a layer does not fit.
        TypeError: `offload` is passed with `sharding` or `device`, which it determines itself;
            `structure=True` with `sharding` or `offload`; or options for a conversion without one.
        FileNotFoundError: There is no such folder, and no repository of this name that can be
            downloaded.
    """
    if offload is not None and not (sharding is None and device is None):
        raise TypeError("offload= places the weights: pass neither sharding= nor device=")
    if options.get("structure") and not (offload is None and sharding is None):
        raise TypeError(
            "structure=True takes neither sharding= nor offload=: its layers have layouts of "
            "their own. Omit them, and divide the model with fmapper.meshes.shard."
        )
    if to is not None and find_target(to)[1]:
        raise ConversionError(
            f"from_pretrained fills models that hold their arrays, which one of {to} does not: "
            f"load the module with to='torch', and convert that to {to!r}"
        )
    source = local_place(folder, "from_pretrained")
    with step(f"loading {source.name}") as say:
        if not source.is_dir():
            source = download(os.fspath(folder))
        _check_folder(source)
        checkpoint = read_checkpoint(source)  # before the slow creation of the class
        arrays = {n: a for n, a in checkpoint.items() if isinstance(a, LazyArray)}
        wanted = None if dtype in (None, "auto") else dtype_name(dtype)
        pretrained = find_pretrained(source, wanted, arrays)
        if pretrained.quantization is not None:
            from fmapper.checkpoints.quantized.finding import dequantize  # for few folders

            dense = _dtype_of(pretrained.model)
            arrays = dequantize(
                arrays, pretrained.quantization, dense, metadata=checkpoint.metadata
            )
        chosen = pretrained.rules(arrays) if rules is None else rules
        named = chosen.apply(arrays)
        model = pretrained.model
        state = _select(model, _weights(model)[0], named, pretrained, source)
        _check_shapes(state, model, source)
        _check_left(arrays, named, chosen, pretrained, source)
        target = None if to == pretrained.backend else to
        recorded = {"example_inputs": example_inputs, "example_kwargs": example_kwargs}
        recorded["dynamic_shapes"] = None if dynamic_shapes == "auto" else dynamic_shapes
        unused = [*options, *(name for name, value in recorded.items() if value is not None)]
        if unused and target is None:
            raise TypeError(f"loading to {to} takes no {', '.join(unused)}: nothing is converted")
        is_whole = sharding is None and offload is None and not options.get("structure")
        early = target is not None and is_whole and _is_host(device)
        with read_ahead(state.values() if early else ()):
            if target is not None:
                say(f"converting {type(model).__name__}")
                given = tuple(example_inputs or ()), example_kwargs or {}
                if options.get("structure"):
                    options["arrays"] = state
                model = _convert(pretrained, target, *given, dynamic_shapes, options)
                if "arrays" in options:
                    return model if device is None else to_device(device)(model)
            say(f"reading the weights of {source.name}")
            tree, back = _weights(model)
            state = _select(model, tree, named, pretrained, source)
            if offload is not None:
                return offload(model, state)
            place = None if sharding is None else sharding.placer(model)
            filled = back(fill(tree, state, device=device, strict=False, place=place))
            return filled if place is None else place.finish(filled)


def _is_host(device: Any) -> bool:
    """Returns whether arrays for a device stay in host memory."""
    if device is not None:
        return parse_device(device).kind == HOST.kind
    return all(candidate.kind == HOST.kind for candidate in devices())


@contextmanager
def _note_of(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Adds a note to errors of a conversion about the generated example inputs."""
    try:
        yield
    except ConversionError as error:
        shapes = ", ".join(f"{name}{list(array.shape)}" for name, array in inputs.items())
        if inputs:
            error.add_note(
                f"The example inputs were made from the configuration: {shapes}. If the model "
                "takes others, pass them as example_kwargs="
            )
        raise


def _convert(
    pretrained: Pretrained,
    to: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    options: Mapping[str, Any],
) -> Any:
    """Converts the model of a folder, with generated example inputs if none are passed."""
    from fmapper.programs import convert as conversion  # only needed here

    convert: Any = conversion.convert_with_arrays
    examples: Mapping[str, Any] = {}
    if not args and not kwargs:
        examples = pretrained.example_kwargs
        if dynamic_shapes == "auto":
            dynamic_shapes = pretrained.dynamic_shapes
    with _note_of(examples):
        return convert(
            pretrained.model,
            to,
            args,
            {**examples, **kwargs},
            dynamic_shapes=dynamic_shapes,
            **options,
        )


def _check_folder(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise _unknown(folder)


def find_pretrained(folder: Path, dtype: str | None, arrays: Mapping[str, LazyArray]) -> Pretrained:
    """Reads the model of a folder without its weights.

    Raises:
        CheckpointError: No installed framework can read it.
    """
    _check_folder(folder)
    for adapter in all_adapters():
        if isinstance(adapter, Models):
            pretrained = adapter.read_pretrained(folder, dtype, arrays)
            if pretrained is not None:
                return pretrained
    raise _unknown(folder)


def _unknown(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder}: has no {CONFIG} of a known model")


def _check_left(
    arrays: Mapping[str, LazyArray],
    named: Mapping[str, LazyArray],
    rules: Rules,
    pretrained: Pretrained,
    source: Path,
) -> None:
    """Warns of arrays that have no place in a model, unless it expects them.

    Raises:
        CheckpointError: They may be the scales of weights with narrow floats.
    """
    expected = {*named_arrays(_weights(pretrained.model)[0]), *(pretrained.names or ())}
    dropped = [
        name
        for rule in rules
        if isinstance(rule, Drop)
        for change in rule.changes(arrays)
        for name in change.names
    ]
    left = [
        n
        for n in (*dropped, *(n for n in named if n not in expected))
        if not pretrained.may_have(n)
    ]
    shown = f"{', '.join(left[:5])}{' and others' * (len(left) > 5)}"
    narrow = [name for name, array in arrays.items() if is_narrow(array)]
    if narrow and (left or pretrained.quantization is not None):
        why = "its config.json has no quantization_config"
        if pretrained.quantization is not None:
            why = "there is no W_scale_inv or W_scale beside them"
        raise CheckpointError(
            f"{source}: {narrow[0]} has floats of 8 bits, which would be read without scales: "
            f"{why}. Without a place in the model: {shown or 'nothing'}. Rename the scales with "
            "convert_checkpoint(rules=), and state the quantization_config."
        )
    if left:
        warn(
            f"{source}: {len(left)} arrays have no place in {type(pretrained.model).__name__} and "
            f"were ignored: {shown}",
            FmapperWarning,
        )


def _select(
    model: Any, tree: Any, arrays: dict[str, LazyArray], pretrained: Pretrained, source: Path
) -> dict[str, LazyArray]:
    """Returns the arrays of the folder that a model uses, in its dtypes."""
    named = {name: array for name, (_, array) in named_arrays(tree).items()}
    present = {id(named[name]) for name in arrays if name in named} | {*transient_in(model)}
    saved = (
        named if pretrained.names is None else pretrained.names
    )  # a tensor may be a plain attribute
    lacking = [
        name
        for name, old in named.items()
        if name in saved and id(old) not in present and not pretrained.may_lack(name)
    ]
    if lacking:
        raise StructureMismatchError(
            f"{source}: has no weights for:\n" + "\n".join(f"  {name}" for name in lacking)
        )
    return {name: _as(arrays[name], named[name]) for name in named if name in arrays}


def _check_shapes(arrays: Mapping[str, LazyArray], model: Any, source: Path) -> None:
    """Raises for arrays that do not fit the model, before the slow recording of its program."""
    named = {name: array for name, (_, array) in named_arrays(_weights(model)[0]).items()}
    problems = []
    for name, array in arrays.items():
        adapter = adapter_of(named[name])
        assert adapter is not None
        shape, dtype = tuple(adapter.shape(named[name])), adapter.dtype(named[name])
        if array.shape != shape:
            problems.append(f"{name}: shape {array.shape} in the folder, {shape} in the model")
        elif is_inexact(dtype) and array.dtype.name != dtype:
            problems.append(f"{name}: dtype {array.dtype.name} in the folder, {dtype} in the model")
    if problems:
        raise StructureMismatchError(
            f"{source}: the weights do not fit the model:\n"
            + "\n".join(f"  {line}" for line in problems)
        )


def _weights(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a tree with the names of the folder, and the inverse function."""
    trees = (
        adapter.weights(model) or adapter.source_weights(model) for adapter in adapters(Models)
    )
    return next(filter(None, trees), (model, lambda filled: filled))


def _as(array: LazyArray, old: Any) -> LazyArray:
    """Casts a stored array to the dtype of the one that it replaces."""
    adapter = adapter_of(old)
    assert adapter is not None
    wanted = adapter.dtype(old)
    return array.astype(wanted) if is_inexact(wanted) else array


def _dtype_of(model: Any) -> str | None:
    """Returns the dtype of the first floating array of a model."""
    several = (owner_of(array).dtype(array) for _, array in named_arrays(model).values())
    return next(filter(is_inexact, several), None)


def _main_dtype(contents: Contents) -> str | None:
    """Returns the floating dtype of the largest number of bytes."""
    sizes: Counter[str] = Counter()
    for array in contents.arrays.values():
        if is_inexact(array.dtype.name):
            sizes[array.dtype.name] += array.nbytes
    return max(sizes, key=sizes.__getitem__, default=None)


def _widen(array: LazyArray, old: Any) -> LazyArray:
    """Widens integers, such as counters, that JAX has narrowed."""
    adapter = adapter_of(old)
    assert adapter is not None
    wanted = adapter.dtype(old)
    if array.dtype.name == wanted or is_inexact(wanted) or wanted == "bool":
        return array
    return LazyArray.of(array.read().astype(wanted))


@short_traceback
def save_pretrained(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    rules: Rules | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Writes a folder that `transformers.AutoModel.from_pretrained` opens, from any framework.

    The weights get the names and shapes that transformers would save, in shards with an index; the
    configuration is that of the folder from which the model was loaded. The folder appears only
    when it is complete.

    Args:
        model: A model from `from_pretrained`, trained or not; or any tree whose arrays have the
            names of such a model.
        folder: The folder to write; it must not exist, or be empty.
        like: The folder with the architecture and configuration of the model; None for the one from
            which it was loaded.
        rules: The rules from names and shapes of a folder to those of the model, whose inverse is
            applied; None for the tables of transformers.
        max_shard_size: The bytes of arrays in each file, as a number or as `2GB`; None for 5 GB.

    Raises:
        CheckpointError: `like` holds no model of a known kind, or the rules have no inverse.
        StructureMismatchError: The model lacks arrays of such a folder.
        FileExistsError: The folder exists and is not empty.
    """
    places = folder, _origin_of(model) if like is None else like
    target, origin = (local_place(path, "save_pretrained") for path in places)
    form = SafetensorsFolder(None if max_shard_size is None else shard_bytes(max_shard_size))
    with step(f"saving {target.name}"):
        contents = contents_of_tree(_weights(model)[0])
        pretrained = find_pretrained(origin, _main_dtype(contents), contents.arrays)
        wanted = {
            name: array
            for name, (_, array) in named_arrays(pretrained.model).items()
            if pretrained.names is None or name in pretrained.names
        }
        leave = transient_in(pretrained.model)
        tied = {name: contents.arrays[first] for name, first in contents.ties.items()}
        stored = {**contents.arrays, **tied}
        missing = [n for n, a in wanted.items() if n not in stored and id(a) not in leave]
        if missing:
            raise StructureMismatchError(
                f"the model does not match {origin}: it lacks\n"
                + "\n".join(f"  {name}" for name in missing)
            )
        arrays = {n: _widen(stored[n], a) for n, a in wanted.items() if id(a) not in leave}
        back = pretrained.rules_back() if rules is None else rules.inverse()
        named = back.apply(arrays)
        with new_folder(target) as beside:
            for name, text in pretrained.files().items():
                (beside / name).write_text(text, encoding="utf-8")
            form.write(Writer(beside), Contents(named))


def _origin_of(model: Any) -> str:
    origin = next(filter(None, (adapter.origin_of(model) for adapter in adapters(Models))), "")
    if origin and os.path.isdir(origin):
        return origin
    why = f"{origin}, which it was made from, is gone" if origin else "it is not known"
    raise CheckpointError(
        f"save_pretrained: the folder of this {type(model).__name__} is unknown ({why}). Pass "
        f"like=, a folder with its configuration."
    )
