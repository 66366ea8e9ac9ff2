"""`transcribe`: a model as a file, and the proof of that file."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fmapper import fleaves, fmap, to_numpy
from fmapper.checkpoints import Drop, Rule, Rules
from fmapper.translation.source import format_code
from fmapper.verification.files.proof import File as ProvedFile
from fmapper.verification.files.proof import Proof
from fmapper.verification.models.owners import source_of, source_of_callable
from fmapper.verification.models.trial import Trial
from fmapper_adapters.torch.record.modes import mode
from fmapper_adapters.torch.record.patches.restore import restore_after
from fmapper_translate.constructors.arguments import SAY_ARGUMENTS, find_arguments
from fmapper_translate.constructors.given_modules import Construction, put_together, take_apart
from fmapper_translate.constructors.notes import arguments_of
from fmapper_translate.files import File
from fmapper_translate.functions import Function
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.recording import record
from fmapper_translate.scans.lists import choose
from fmapper_translate.sources.halves import check_dtypes, half_of
from fmapper_translate.sources.sizes import copy_of, of_given_sizes, of_other_sizes
from fmapper_translate.sources.torch import TorchSource
from fmapper_translate.targets import Target, layers
from fmapper_translate.torch.weights import follow_mode
from fmapper_translate.walk.errors import NotTranscribed
from fmapper_translate.witness import functions_that_differ

Inputs = tuple[Any, ...]
Example = tuple[Inputs, Mapping[str, Any]]
_MAKER = "make_model"


@dataclass(frozen=True)
class Transcription:
    """A file for Flax NNX, Equinox or PyTorch.

    Attributes:
        code: The file.
        name: The model's class.
        example: The code that makes it as the source was made: `Net(3, depth=2, rngs=rngs)`.
        weights: The arrays that its `load_weights` takes, by their names in the source.
        aliases: Second names of these -> the first.
        fallen: Functions that are written by their operations -> the reason.
        rules: The rules from the source's state dict to the state of the file's model, whose
            inverse leads back; none where blocks are scanned.
        target: The framework of the file.
        only_evaluation: Why the file is for evaluation alone, and refuses training; empty if it is
            for both.
        flags: Arguments of a call that tell the model its mode -> their values in training.
        keys: Keys for random numbers that the source is called with where a call has none.
        scans: Lists of blocks that are one block, called by a scan -> how many those are.
        not_scanned: Other lists, where scans were asked for -> the reason.
        half: The half precision of the model's arrays, to which those of the file are cast; empty
            if they have another one.
    """

    code: str
    name: str
    example: str
    weights: Mapping[str, Any] = field(repr=False)
    aliases: Mapping[str, str] = field(repr=False)
    fallen: Mapping[str, str] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules, repr=False)
    target: str = "flax"
    only_evaluation: str = ""
    flags: Mapping[str, bool] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict, repr=False)
    scans: Mapping[str, int] = field(default_factory=dict)
    not_scanned: Mapping[str, str] = field(default_factory=dict)
    half: str = ""

    @property
    def whole(self) -> str:
        """The file with `make_model`, which makes the model as the source was made."""
        parameters = {"flax": "*, rngs", "equinox": "*, key"}.get(self.target, "")
        made, cast = self.example, ""
        if self.half:
            made = f"with_dtype({made}, jnp.{self.half})"
            cast = f"{inspect.getsource(_target(self.target).with_dtype)}\n\n"
        maker = (
            f"def {_MAKER}({parameters}):\n"
            f'    """Makes the model that this file was written for."""\n'
            f"    return {made}\n"
        )
        return format_code(f"{self.code}\n\n{cast}{maker}")

    @property
    def maker(self) -> str:
        """The function of `whole` that makes the model."""
        return _MAKER

    def places(
        self, model: Any, space: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, Sequence[int] | None]]:
        """Yields the name of each array in the source, the array, and its axes there.

        Args:
            model: A model of the file.
            space: The names of the file.
        """
        if self.target == "equinox":
            import jax

            for path, leaf in jax.tree_util.tree_leaves_with_path(model):
                if isinstance(leaf, jax.Array):
                    yield space["name_in_source"](model, path), leaf, None
            return
        for name, held, axes in space["named_arrays"](model):
            yield name, held.get_raw_value() if self.target == "flax" else held, axes

    def finish(self, model: Any) -> None:
        """Has a model of the file follow its own mode where a call does not say one."""
        if self.flags:
            follow_mode(model, self.flags)  # type: ignore[no-untyped-call]

    def prove(
        self,
        model: Any,
        inputs: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        *,
        only_evaluation: bool = False,
    ) -> Proof:
        """Measures the distance of outputs, gradients and five steps from those of the model.

        Args:
            model: The model that was transcribed.
            inputs: What it is called with by position.
            options: What it is called with by keyword.
            only_evaluation: Compare nothing but the outputs in evaluation; so are files that are
                for that alone.

        Raises:
            ConversionError: The file does not run.
        """
        origin = source_of(model) or source_of_callable(model, None)
        assert origin is not None
        arrays: dict[str, Any] = {}

        def encode(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return [*map(encode, value)]
            if isinstance(value, dict):
                return {"dict": {name: encode(item) for name, item in value.items()}}
            if not hasattr(value, "dtype"):
                return value
            arrays[f"input.{len(arrays)}"] = to_numpy(value)
            return {"array": len(arrays) - 1}

        if is_of_equinox(model):
            from fmapper_translate.torch.equinox.transcription import name_keys

            inputs, options = name_keys(model, tuple(inputs), options)
        by_position = [encode(value) for value in inputs]
        by_keyword = {
            name: encode(value)
            for name, value in (options or {}).items()
            if name not in ("rngs", "mutable", "key") and name not in self.flags
        }
        module = model[0] if isinstance(model, tuple) else model
        names = [*inspect.signature(type(module).__call__).parameters][1 : 1 + len(inputs)]
        weights = {name: to_numpy(value) for name, value in self.weights.items()}
        file = ProvedFile(
            self.whole,
            _MAKER,
            ("eval", "train"),
            self.target,
            self.aliases,
            weights,
            [by_position, {"dict": by_keyword}],
            arrays,
            by_key=self.target == "torch",
            flags={name: value for name, value in self.flags.items() if name not in names},
            double=bool(self.half),  # in which results agree to two or three digits
        )

        is_torch = isinstance(model, nn.Module)

        def trial(train: bool) -> Trial:
            given = tuple(inputs), {**self.keys, **(options or {})}
            if not is_torch:
                return origin.trial(model, *given, train=train)
            with mode(model, train=train):  # in which what only adds noise stays on
                return origin.trial(model, *fmap(copy_of, given), train=None, parts=True)

        with library.without_caches(model) if is_torch else contextlib.nullcontext():
            evaluates = only_evaluation or bool(self.only_evaluation)
            return file.prove(trial, only_evaluation=evaluates)


def transcribe(
    model: Any,
    inputs: Inputs | list[Inputs],
    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    target: str | None = None,
    dynamic_shapes: Any = "auto",
    scan: bool = False,
) -> Transcription:
    """Writes a model as a file for another framework, in the words of its source.

    Args:
        model: The model: a module of PyTorch for a file for Flax NNX or Equinox; or a module of NNX
            or Equinox, or a bound module of Linen or the pair of one and its variables, for a file
            for PyTorch.
        inputs: What it is called with, by position; or a list of such, of which each lets other
            sides of conditions run.
        arguments: What its class was given, by position and by keyword; read from the model's
            attributes and layers if None. `rngs` is not among them. Modules of Linen have them as
            fields.
        options: What it is called with by keyword, and of Linen also by `apply`: `rngs`, `mutable`.
        target: `"flax"` or `"equinox"` for models of PyTorch, by default the first; else `"torch"`.
        dynamic_shapes: At which other sizes the file is compared with the model, where a tuple says
            what it is called with: by default all that a model of PyTorch takes, and of others
            none; None for none, else which, as for `convert`. A file takes what its source takes.
        scan: Whether lists of blocks become one block with stacked arrays, called by a scan.

    Raises:
        NotTranscribed: Something in it has no counterpart; says what and where. Or with `scan`
            there is nothing to be scanned.
    """
    is_torch = isinstance(model, nn.Module)
    if target not in ((None, *TARGETS) if is_torch else (None, "torch")):
        raise NotTranscribed(
            f"{type(model).__name__} is not a model that is transcribed for {target}: modules of "
            "PyTorch are for Flax NNX and Equinox, and those of NNX, Linen and Equinox for PyTorch"
        )
    if scan and not is_torch:
        raise NotTranscribed("scans are for Flax NNX and Equinox: PyTorch has none over modules")
    with _unchanged_random_numbers():
        examples = _examples(model, inputs, options or {}, dynamic_shapes)
    if isinstance(model, nn.Module):
        to = _target(target or "flax")
        arguments = arguments or arguments_of(model)
        with _unchanged_random_numbers():
            if half := half_of(model):
                wide = copy.deepcopy(model).float()
                found = _in_both_modes(wide, fmap(_to_float, examples), arguments, to, scan)
                saved = model.state_dict()
                weights = {name: saved[name] for name in found.weights}
                found = replace(found, weights=weights, half=half)
                check_dtypes(found.whole, _MAKER, to, found.weights, model, examples[0])
                return found
            return _in_both_modes(model, examples, arguments, to, scan)
    if isinstance(model, tuple) or _is_bound(model):
        from fmapper_translate.torch.linen.transcription import from_linen

        return from_linen(model, [args for args, _ in examples], options)
    if is_of_equinox(model):
        from fmapper_translate.torch.equinox.transcription import from_equinox

        return from_equinox(model, [args for args, _ in examples], arguments, options)
    from fmapper_translate.torch.nnx.transcription import from_nnx

    return from_nnx(model, [args for args, _ in examples], arguments, options)


def _in_both_modes(
    model: nn.Module,
    examples: list[Example],
    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None,
    target: Target,
    scan: bool,
) -> Transcription:
    """Writes a module of PyTorch for both modes; or for evaluation, if it is not for both."""
    try:
        return _from_torch(model, examples, arguments, target, scan)
    except NotTranscribed as error:
        reason = str(error)
        try:
            return _from_torch(model, examples, arguments, target, scan, only_evaluation=reason)
        except NotTranscribed:
            raise error from None


TARGETS = ("flax", "equinox")


def _target(name: str) -> Target:
    """Returns a target for models of PyTorch."""
    if name == "equinox":
        from fmapper_translate.equinox.target import EquinoxTarget

        return EquinoxTarget()
    from fmapper_translate.flax.target import FlaxTarget

    return FlaxTarget()


@contextlib.contextmanager
def _unchanged_random_numbers() -> Iterator[None]:
    """Restores the generators that constructors and calls of modules draw from."""
    numbers, numbers_of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(numbers)
        np.random.set_state(numbers_of_numpy)


def _is_bound(model: Any) -> bool:
    """Returns whether a model is a bound module of Linen."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(model, linen.Module)


def is_of_equinox(model: Any) -> bool:
    """Returns whether a model is a module of Equinox."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(model, equinox.Module)


def _from_torch(
    model: nn.Module,
    examples: list[Example],
    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None,
    target: Target,
    scan: bool,
    *,
    only_evaluation: str = "",
) -> Transcription:
    cls = type(model)
    args, kwargs = arguments or find_arguments(model)
    seen: set[int] = set()
    found = (
        [take_apart(value, seen) for value in args],
        {name: take_apart(value, seen) for name, value in kwargs.items()},
    )
    args = [library.prepare(value) for value in found[0]]
    kwargs = {name: library.prepare(value) for name, value in found[1].items()}

    def make(args: Sequence[Any] = args, kwargs: Mapping[str, Any] = kwargs) -> nn.Module:
        made: nn.Module = put_together(Construction(cls, args, kwargs))
        made.load_state_dict(model.state_dict())
        return made

    for one in examples:
        if not _are_equal(functools.partial(_call, *one), model, make(*found)):
            which = "found for it" if arguments is None else "given"
            raise NotTranscribed(
                f"{cls.__name__}: a model that is made with the arguments {which}, "
                f"{', '.join(kwargs)}, gives something else. {SAY_ARGUMENTS}"
            )
    calls = [functools.partial(_call, *one) for one in examples]
    evaluates = bool(only_evaluation)
    recording, twin = record(TorchSource(target.layers), make, calls, only_evaluation=evaluates)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    weights |= dict(model.named_buffers())
    saved = model.state_dict()
    unused = layers.unused_counters(model, counts=target.counts_batches)
    weights = {n: x for n, x in weights.items() if n in saved and n not in unused}
    first = {value.data_ptr(): name for name, value in reversed(weights.items()) if value.numel()}
    aliases = {name: first[value.data_ptr()] for name, value in saved.items()
               if name not in weights and value.data_ptr() in first}  # fmt: skip
    title = f"{cls.__name__} for {target.title}, transcribed from {cls.__module__}"

    def differ(code: str, example: str) -> dict[Function, str]:
        return functions_that_differ(code, example, recording, target, weights, examples)

    settings: dict[str, Any] = {
        "only_evaluation": only_evaluation, "gives_initial_values": not target.is_tree
    }  # fmt: skip
    file = File(recording, twin, target, **settings)
    try:
        code, example = file.write(title, args, kwargs, differ)
    except NotTranscribed:
        if not file.initializers:
            raise
        settings["gives_initial_values"] = False
        file = File(recording, twin, target, **settings)
        code, example = file.write(title, args, kwargs, differ)
    scanned: dict[str, int] = {}
    refused: dict[str, str] = {}
    rules = _rules_of(twin, file)
    if scan:
        files = [(code, example)]

        def check() -> None:
            made = file.write_once(title, args, kwargs)
            if wrong := differ(*made):
                raise NotTranscribed(next(iter(wrong.values())))
            files.append(made)

        scanned, refused = choose(file, check)
        (code, example), rules = files[-1], Rules()
    return Transcription(
        format_code(code), cls.__name__, example, weights, aliases, file.fallen, rules,
        target.name, only_evaluation, scans=scanned, not_scanned=refused,
    )  # fmt: skip


def _examples(
    model: Any, inputs: Inputs | list[Inputs], options: Mapping[str, Any], dynamic_shapes: Any
) -> list[Example]:
    """Returns what a model is called with: what is given, and that in other sizes.

    Raises:
        NotTranscribed: It does not take sizes that are to vary.
    """
    if isinstance(inputs, list):
        return [(args, options) for args in inputs]
    first = (inputs, options)
    is_torch = isinstance(model, nn.Module)
    other = None
    if isinstance(dynamic_shapes, str) and dynamic_shapes == "auto":
        other = of_other_sizes(first, functools.partial(_takes, model)) if is_torch else None
    elif dynamic_shapes is not None:
        if not is_torch and any(hasattr(x, "shape") for x in fleaves(options)):
            raise NotTranscribed("models of JAX are not compared at other sizes of keywords")
        module = model[0] if isinstance(model, tuple) else model
        called = module.forward if is_torch else type(module).__call__.__get__(module)
        names = [*inspect.signature(called).parameters]
        takes = functools.partial(_takes, model) if is_torch else lambda _: True
        other = of_given_sizes(first, names, dynamic_shapes, takes)
    return [first] if other is None else [first, other]


def _call(inputs: Inputs, options: Mapping[str, Any], model: nn.Module) -> object:
    inputs, options = fmap(copy_of, (inputs, dict(options)))  # which a model may write into
    return model(*inputs, **options)


def _to_float(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _takes(model: nn.Module, inputs: Example) -> bool:
    """Returns whether a model runs with inputs by position and by keyword."""
    with mode(model, train=False), restore_after(model), torch.no_grad():
        try:
            _call(*inputs, model)
        except Exception:  # models raise anything
            return False
    return True


def _are_equal(call: Callable[[nn.Module], object], model: nn.Module, other: nn.Module) -> bool:
    """Returns whether two models give the same in evaluation, to the last bit."""
    given = []
    for each in (model, other):
        with mode(each, train=False), restore_after(each), torch.no_grad():
            torch.manual_seed(0)
            given.append([x for x in fleaves(call(each)) if isinstance(x, torch.Tensor)])
    ours, theirs = given
    pairs = zip(ours, theirs, strict=False)
    is_same = all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in pairs)
    return is_same and len(ours) == len(theirs)


def _place(model: nn.Module, file: File, path: str) -> Iterator[str]:
    """Returns the steps to a part of a file's model."""
    part = model
    for step in path.split(".") if path else ():
        layer = file.layers.layer_of(type(part))
        yield from filter(None, [layer and layer.inside, step])
        part = part.get_submodule(step)


def _rules_of(model: nn.Module, file: File) -> Rules:
    """Returns the rules from a state dict to the state of the file's model."""
    places: dict[str, tuple[str, layers.Order]] = {}
    tied = file.tied_names()
    for path, part in model.named_modules(remove_duplicate=False):
        layer = file.layer_of(part)
        for name in [*part._parameters, *part._buffers]:
            key, order = layer.variable(name) if layer is not None else (name, None)
            inside = [layer.inside] if layer is not None and layer.inside else []
            steps = [*_place(model, file, path), *inside, key]
            places[f"{path}.{name}" if path else name] = ".".join(steps), order
    unused = layers.unused_counters(model, counts=file.target.counts_batches)
    saved = {name: value.numpy() for name, value in model.state_dict().items()
             if name not in tied and name not in unused}  # fmt: skip

    def rename(state: Mapping[str, Any]) -> dict[str, Any]:
        named = [(places[name], array) for name, array in state.items()]
        return {key: array.transpose(order) if order else array for (key, order), array in named}

    drops: list[Rule] = [Drop(second, tied_to=first) for second, first in tied.items()]
    counted = any(name.endswith("num_batches_tracked") for name in saved)
    patterns = sorted(unused) if counted else ["{layer...}.num_batches_tracked"] * bool(unused)
    drops[:0] = [Drop(pattern, forget=True) for pattern in patterns]
    return Rules([*drops, *Rules.record(rename, saved, backend="numpy")])
