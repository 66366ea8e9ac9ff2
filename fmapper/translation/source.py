"""`source`: a model as the source code of another framework."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fmapper.backends.models import Models
from fmapper.errors import ConversionError, ConversionWarning
from fmapper.programs.reading.written import source_of_class
from fmapper.programs.steps import (
    evaluation_of,
    find_target,
    lower_with_fixed_sizes,
    lower_with_varying_sizes,
    record_program,
)
from fmapper.progress import step
from fmapper.translation.proof import HalfPrecisionError, prove
from fmapper.translation.reading.helpers import add_to_docstring
from fmapper.translation.ties import with_called_names
from fmapper.verification.models.owners import (
    family_of,
    inputs_for,
    source_of,
    source_of_callable,
)
from fmapper.warn import warn

if TYPE_CHECKING:
    from fmapper.programs.program import Program
    from fmapper.translation.source_file import Source
    from fmapper.verification.files.proof import Proof

_BY_OPERATIONS = "Written by its operations, not in the words of its source"


def source(
    model: Any,
    to: str | None = None,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = "auto",
    train: bool = False,
    scan: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Translates a model to readable source code for another framework.

    The file has the model's classes, with the layers of the target in them, and `load_weights`,
    which fills it from the model's state dict. It imports neither fmapper nor the framework that
    the model comes from.

    Models of torch for `flax` and `equinox`, and those of NNX, Linen and Equinox for `torch`, are
    written in the words of their source: its constructors, conditions and loops, for both modes,
    and the results of each function in evaluation are compared with the model's. Where that is not
    possible, and all others, from the operations of a call; the file's docstring then says what was
    not possible.

    Args:
        model: What `convert(..., structure=True)` has given; or a model to be translated.
        to: For the latter, the target: `flax` (or `nnx`), `equinox` or `jax` (functions and trees
            of arrays) for models of torch, `torch` for those of JAX, Flax and Equinox.
        example_inputs: What it is called with, by position.
        example_kwargs: What it is called with by keyword.
        dynamic_shapes: Which sizes may vary: by default all that the code does not fix. A file in
            the words of the source takes all that its source takes; then these are the sizes at
            which both are compared, None for those of the examples alone.
        train: Write what it does in training, too: dropout, batch statistics. A file in the words
            of the source has it in any case; it is run and compared in training.
        scan: Write blocks that repeat as one with stacked arrays, called by a scan, which compiles
            one block and not all of them. Lists that cannot be scanned stay lists.
        arguments: What its constructor was given, by name, for a file in the words of its source
            and no other. Needed where neither attributes nor layers of a model say it; values that
            make another model are an error.

    Raises:
        ConversionError: The model cannot be recorded, or something in it cannot be written; says
            what and where. Or with `scan` there is nothing to be scanned.

    Examples:
        >>> import fmapper, torch
        >>> code = fmapper.source(torch.nn.Linear(2, 3), "flax", (torch.ones(4, 2),))
        >>> "nnx.Linear(2, 3, rngs=rngs)" in code
        True
    """
    known = source_of_class(model)
    if to is None:
        if known is None:
            raise ConversionError(
                f"{type(model).__name__}: its source is not available. convert(..., "
                "structure=True) creates a model with source; source(model, 'flax', "
                "example_inputs) writes one."
            )
        return _with_reason(format_code(known.code), known.by_operations)
    reason = ""
    write = transcribe_proved if train else transcribe
    given = (example_inputs, example_kwargs, arguments, dynamic_shapes)
    try:
        return write(model, to, *given, scan=scan)[0].whole
    except OtherPairError:
        if scan or arguments is not None:
            raise
    except ConversionError as error:
        if scan or arguments is not None:
            raise
        reason = str(error)
    code = _write_operations(model, to, example_inputs, example_kwargs, dynamic_shapes, train)
    return _with_reason(code, reason)


def _with_reason(code: str, reason: str) -> str:
    """Returns a file that says why it is not in the words of its source, if it is not."""
    return add_to_docstring(code, f"{_BY_OPERATIONS}: {reason}") if reason else code


def _write_operations(
    model: Any,
    to: str,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    train: bool,
) -> str:
    """Returns the file from the recorded operations of a model."""
    given = (example_inputs, example_kwargs or {}, dynamic_shapes, train)
    recorded: dict[bool, Program] = {}
    differs: Any = None
    ways = _ways(to, train=train)
    proved = "evaluation" if train else "modes" if len(ways) > 1 else False
    for modes in ways:
        settings: dict[str, Any] = {"modes": modes, "known": recorded}
        try:
            found, _, proof = translate(model, to, *given, proved=proved, **settings)
        except ConversionError as error:
            if not train and isinstance(error, HalfPrecisionError):
                break  # one for evaluation needs no comparison
            if not modes:
                raise
            differs = error
            break
        if proof is None or proof:
            if train:
                check_trains(found)
            return format_code(found.code)
        differs = proof
    if not train:
        return format_code(translate(model, to, *given, alone=True)[0].code)
    raise ConversionError(
        f"{type(model).__name__}: what it does in evaluation is another program than what it "
        f"does in training ({differs}), and a file has one for both. Use train=False"
    )


def check_trains(source: Source) -> None:
    """Checks that a file trains, where that was asked for.

    Raises:
        ConversionError: It is for evaluation alone.
    """
    if source.lacks_training:
        raise ConversionError(
            f"{source.name}: its training cannot be written: {source.lacks_training}. train=False "
            "(--eval) writes a file for evaluation alone"
        )


def _ways(to: str, *, train: bool) -> tuple[bool, ...]:
    """Returns whether a file is to have another program for evaluation: at first not."""
    how = _target(to).writes_modes
    return (False, True) if how == "all" or (train and how) else (False,)


def _target(to: str) -> Models:
    """Returns the adapter that writes files of a target.

    Raises:
        ConversionError: There are none of this variant of the target.
    """
    target, variant = find_target(to)
    if variant:
        raise ConversionError(
            f"models cannot be written as source code for {to}: use {target.name}"
        )
    return target


class Transcription(Protocol):
    """A file with the statements of its source."""

    @property
    def whole(self) -> str:
        """The file."""

    @property
    def name(self) -> str:
        """The class of the model in it."""

    @property
    def maker(self) -> str:
        """The function in it that makes the model."""

    @property
    def weights(self) -> Mapping[str, Any]:
        """The arrays that it loads."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Second names of these -> the first."""

    def places(
        self, model: Any, space: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, Sequence[int] | None]]:
        """Yields the names of arrays in the source, those of a model, and the source's axes."""

    def finish(self, model: Any) -> None:
        """Has a model of the file follow its own mode where a call does not say one."""

    def prove(
        self, model: Any, inputs: Any, options: Any, *, only_evaluation: bool = False
    ) -> Proof:
        """Compares its outputs, gradients and five steps with those of the model."""

    @property
    def only_evaluation(self) -> str:
        """Why the file is for evaluation alone; empty if it is for both modes."""

    @property
    def scans(self) -> Mapping[str, int]:
        """Lists of blocks that are one block, called by a scan -> how many those are."""

    @property
    def not_scanned(self) -> Mapping[str, str]:
        """Other lists, where scans were asked for -> the reason."""

    @property
    def fallen(self) -> Mapping[str, str]:
        """Functions that are written by their operations -> the reason."""


class OtherPairError(ConversionError):
    """Models of this framework are not transcribed for this target."""


def transcribe_proved(
    model: Any,
    to: str,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    arguments: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = "auto",
    *,
    train: bool | None = True,
    scan: bool = False,
) -> tuple[Transcription, Proof]:
    """Writes a model in the words of its source, and proves the file.

    Arguments and errors are those of `transcribe`; a file that differs is an error, too. With
    `train` it has to train; with None it is proved in training if it does, and with False in
    evaluation alone.
    """
    found, args, kwargs = transcribe(model, to, args, kwargs, arguments, dynamic_shapes, scan=scan)
    if train and found.only_evaluation:
        raise ConversionError(found.only_evaluation)
    proof = found.prove(model, args, kwargs, only_evaluation=train is False)
    if not proof:
        raise ConversionError(f"{found.name}: its transcription differs: {proof}")
    return found, proof


def transcribe(
    model: Any,
    to: str,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    arguments: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = "auto",
    *,
    scan: bool = False,
) -> tuple[Transcription, tuple[Any, ...], dict[str, Any]]:
    """Writes a model in the words of its source; returns the file, and the model's own inputs.

    Args:
        model: A model of PyTorch, for a file for Flax NNX; or of NNX, Linen or Equinox, for one for
            PyTorch.
        to: The target.
        args: What it is called with, by position.
        kwargs: What it is called with by keyword.
        arguments: What its constructor was given, by name; None to find it.
        dynamic_shapes: At which sizes it is compared, too; see `source`.
        scan: Whether blocks are called by scans.

    Raises:
        ConversionError: Something in it has no counterpart; says what.
    """
    target, variant = find_target(to)
    origin = source_of(model)
    if origin is None and is_dataclass(model):  # a module of Equinox
        origin = source_of_callable(model, target)
    if variant or origin is None:
        raise OtherPairError(f"{type(model).__name__} is not transcribed for {to}")
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    args, kwargs = inputs_for(origin, args, kwargs or {})
    try:
        import fmapper_translate

        given = None if arguments is None else ((), arguments)
        found = fmapper_translate.transcribe(
            model, args, given, kwargs, target=target.name, dynamic_shapes=dynamic_shapes,
            scan=scan,
        )  # fmt: skip
    except ConversionError:
        raise
    except Exception as error:  # of the model's own code too; or a framework is not installed
        raise ConversionError(
            f"{type(model).__name__} cannot be transcribed: {type(error).__name__}: {error}"
        ) from error
    return found, args, kwargs


@contextlib.contextmanager
def note_arguments() -> Iterator[None]:
    """Notes what constructors of models are given within the block, for `transcribe`."""
    try:
        from fmapper_translate.constructors import notes
    except ImportError:  # the frameworks for which it writes are not installed
        yield
    else:
        with notes.note_arguments():
            yield


def translate_proved(
    model: Any,
    to: str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = "auto",
) -> tuple[Source, Proof, str]:
    """Translates and proves a model for both modes, or for evaluation alone.

    The latter where what the model does in training is another program, as that of a model which
    keeps a cache in evaluation only, or cannot be recorded.

    Returns:
        The source, its proof, and why it is for evaluation alone; empty where it is for both.

    Raises:
        ConversionError: It cannot be recorded or written for evaluation; or it does not run.
    """
    given = (model, to, args, kwargs, dynamic_shapes)
    known: dict[bool, Program] = {}
    reason = ""
    for modes in _ways(to, train=True):
        try:
            source, _, proof = translate(*given, True, proved=True, modes=modes, known=known)
        except ConversionError as error:
            reason = str(error)
            break
        assert proof is not None
        if proof:
            return source, proof, source.lacks_training
        reason = str(proof)
        if not proof.holds("train"):
            break
    source, proof = translate_for_evaluation(*given)
    return source, proof, reason


def translate_for_evaluation(
    model: Any,
    to: str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = "auto",
) -> tuple[Source, Proof]:
    """Translates and proves a model for evaluation, and for training where one program is both.

    Raises:
        ConversionError: It cannot be recorded or written for evaluation; or it does not run.
    """
    given = (model, to, args, kwargs, dynamic_shapes, False)
    source, program, proof = translate(*given, proved=True)
    if not proof and program.evaluation is not None:
        source, _, proof = translate(*given, proved=True, alone=True)
    assert proof is not None
    return source, proof


def translate(
    model: Any,
    to: str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = "auto",
    train: bool = False,
    *,
    proved: bool | str = False,
    modes: bool = False,
    alone: bool = False,
    known: dict[bool, Program] | None = None,
) -> tuple[Source, Program, Proof | None]:
    """Translates a model; returns its source, its program and, if `proved`, the proof.

    With `proved="evaluation"` that compares its outputs in evaluation alone, and with `"modes"`
    where the program is for both. With `modes` its own code does something else in evaluation, as
    what is below `if self.training`; with `alone` that is left out which it does in training.
    `known` keeps the recording of a mode for another call.

    Raises:
        ConversionError: It cannot be recorded or written; or it does not run.
    """
    target = _target(to)
    origin = source_of(model) or source_of_callable(model, target)
    if origin is None:
        raise ConversionError(f"{type(model).__name__} is not a model that can be translated")
    if family_of(origin) == family_of(target):
        raise ConversionError(
            f"{type(model).__name__} is a model of {origin.name}: it cannot be translated to {to}"
        )
    if not isinstance(args, tuple | list):
        args = (args,)
    args, kwargs = tuple(args), kwargs or {}

    def record(shapes: Any, **settings: Any) -> Program:
        settings |= {"train": train, "parts": True, "dynamic_shapes": shapes}
        settings["both"] = target.writes_modes != "layers"  # which asks for what it needs
        program = record_program(model, origin, target, args, kwargs, **settings)
        program = with_called_names(program)
        if not program.parts:
            raise ConversionError(
                f"{type(model).__name__}: its submodules were not recorded, because it can only "
                f"be recorded as a whole. Use convert without structure=True."
            )
        if alone and program.evaluation is not None:
            lack = "that is another program, which is not written"
            program = replace(evaluation_of(program), lacks_training=lack)
        return replace(program, starts_in_training=False)

    def write(program: Program) -> Source:
        if modes and target.writes_modes == "layers":
            shapes = dynamic_shapes if program.symbols else None
            program = replace(program, evaluation=record(shapes, only_layers=True))
        found: Source = target.translate(program, modes=modes)
        return found

    with step(f"translating {type(model).__name__} to {to}") as say:
        known = {} if known is None else known
        program = known.setdefault(train, known.get(train) or record(dynamic_shapes))
        is_auto = isinstance(dynamic_shapes, str) and dynamic_shapes == "auto"
        if is_auto and program.symbols:
            vary = lower_with_varying_sizes if origin.fixes_sizes else lower_with_fixed_sizes
            program, found = vary(program, record, write)
        else:
            found = write(program)
        found.fixed = program.fixed
        if found.leaves:
            warn(
                f"{found.name} is given an object whose fields have no names: the arrays in it are "
                f"parameters of their own, {', '.join(found.leaves)}. convert without "
                f"structure=True takes the object.",
                ConversionWarning,
            )
        if not proved or (proved == "modes" and program.evaluation is None):
            return found, program, None
        say("running the file and the model")
        given = (found, program, model, origin, target, args, kwargs)
        return found, program, prove(*given, only_evaluation=proved is not True)


def format_code(code: str) -> str:
    """Formats code with ruff, if that is installed."""
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    ruff = ruff or shutil.which("ruff")
    if ruff is None:
        return code
    command = [ruff, "format", "--isolated", "--line-length", "100", "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else code
