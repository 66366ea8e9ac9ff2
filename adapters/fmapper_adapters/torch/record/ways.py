"""The ways in which torch can record a module, from the most general program to the last resort."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx.experimental import sym_node

from fmapper_adapters.torch import _private
from fmapper_adapters.torch.from_fx import check, trusted_asserts
from fmapper_adapters.torch.record import output_order
from fmapper_adapters.torch.record.patches import operations
from fmapper_adapters.torch.record.values import examples, expert_loops, loop_proof, split_rows

Patch: TypeAlias = "Callable[[], contextlib.AbstractContextManager[Any]]"


@dataclass(frozen=True)
class Way:
    """A way in which torch can record a module.

    Attributes:
        name: How the module is recorded, for messages.
        export: Takes the module, its arguments, its keywords and the varying sizes.
        patches: The patches of torch during the recording.
        after: Takes the program, the module, its arguments and its keywords, and raises for a
            program that may not be used.
        for_values: Whether it is for modules that depend on values; such ways are preferred once a
            recording has failed because of values.
        keeps_gradients: Whether custom autograd functions keep their gradients.
        sees_parts: Whether the calls of submodules can be watched.
    """

    name: str
    export: Callable[..., torch.export.ExportedProgram]
    patches: tuple[Patch, ...]
    after: Callable[..., None] | None = None
    for_values: bool = False
    keeps_gradients: bool = True
    sees_parts: bool = True

    def record(self, module: torch.nn.Module, *inputs: Any) -> torch.export.ExportedProgram:
        """Records the module for its arguments, its keywords and the varying sizes.

        Raises:
            Exception: The error of torch or of a check, if this way cannot record it.
        """
        with contextlib.ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(patch())
            exported = self.export(module, *inputs)
        if self.after is not None:
            self.after(exported, module, *inputs[:2])
        return exported


def is_data_dependent(error: Exception) -> bool:
    """Returns whether a recording failed because it depends on values."""
    signs = ("GuardOnDataDependentSymNode", "data-dependent", "DataDependent", "UnbackedSymbol")
    return any(sign in f"{type(error).__name__}: {error}" for sign in signs)


# Failures that `draft_export` handles soundly: it follows the examples, and the program asserts
# that other inputs lead to the same path.
_SOUND = {"DATA_DEPENDENT_ERROR", "GUARD_ADDED"}
_FLOAT = re.compile(r"\bzuf\d")  # torch's names of floats that are read from arrays


def _refuse_guesses(
    exported: torch.export.ExportedProgram,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raises for a draft that does not check that inputs take the branches of the examples."""
    report = _private.report_of(exported)
    failures = list(getattr(report, "failures", ()))
    kinds = {failure.failure_type.name for failure in failures}
    if not kinds <= _SOUND:
        raise RuntimeError(f"draft_export: {', '.join(sorted(kinds - _SOUND))}")
    decided = [failure.data.get("expr") for failure in failures]
    for expression in decided:
        if _FLOAT.search(str(expression)):  # torch guesses without an assertion
            raise RuntimeError(f"draft_export assumes {expression} without checking it")
    if not trusted_asserts.is_asserted(exported.graph, decided):
        raise RuntimeError("draft_export: an assumed value is not asserted")
    with quiet():
        check.run(exported.module(), module, args, kwargs, seed=0)  # its assertions may be wrong


@contextlib.contextmanager
def _without_provenance() -> Iterator[None]:
    """Switches off torch's record of the provenance of size expressions.

    The record is only for a report, and takes most of the time of `draft_export`: minutes, if sizes
    depend on sizes that depend on values.
    """
    log = getattr(sym_node, "dtrace_structured", None)

    def without_expressions(name: str, *args: Any, **kwargs: Any) -> None:
        if name != "expression_created" and log is not None:
            log(name, *args, **kwargs)

    try:
        if log is not None:
            setattr(sym_node, "dtrace_structured", without_expressions)  # noqa: B010
        yield
    finally:
        if log is not None:
            setattr(sym_node, "dtrace_structured", log)  # noqa: B010
        for reference in list(getattr(logging, "_handlerList", ())):
            if type(reference()).__name__ == "CaptureStructuredTrace":
                reference().close()  # torch leaves a file open


def _export(module: torch.nn.Module, *inputs: Any) -> torch.export.ExportedProgram:
    args, kwargs, shapes = inputs
    return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)


def _from_bytecode(module: torch.nn.Module, *inputs: Any) -> torch.export.ExportedProgram:
    args, kwargs, shapes = inputs
    exported = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=True)
    output_order.restore(exported)
    return exported


def _draft(module: torch.nn.Module, *inputs: Any) -> torch.export.ExportedProgram:
    args, kwargs, shapes = inputs
    return torch.export.draft_export(module, args, kwargs, dynamic_shapes=shapes, strict=False)


def _over_experts(module: torch.nn.Module, *inputs: Any) -> torch.export.ExportedProgram:
    """Records loops over the experts that are hit as loops over all of them."""
    if not expert_loops.has_expert_loops(module):
        raise loop_proof.NotProved("there is no loop over the indices of true elements")
    missing: set[Any] = set()
    while True:
        count = len(missing)
        forward = expert_loops.visit_all_experts(module.forward, missing)
        try:
            with quiet(), examples.replace_forward(module, forward):
                return _export(module, *inputs)
        except Exception:  # torch may have replaced the error
            if len(missing) == count:
                raise


def _with_whole_rows(module: torch.nn.Module, *inputs: Any) -> torch.export.ExportedProgram:
    with examples.replace_forward(module, split_rows.keep_rows_together(module.forward)):
        return _export(module, *inputs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences torch's warnings and logs about its internals.

    After a failure, torch also prints the graph so far to stderr. So output of a forward is held
    back until it has succeeded.
    """
    printed = io.StringIO()
    # Each logger has its own level, so setting that of `torch` is not enough.
    logs = [logging.getLogger(name) for name in _LOGS]
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings(), contextlib.redirect_stderr(printed):
            warnings.simplefilter("ignore")
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


_LOGS = (
    "torch.export",
    "torch.export._trace",
    "torch._export.non_strict_utils",
    "torch.export._draft_export",
    "torch.fx._symbolic_trace",
    "torch.fx.experimental.symbolic_shapes",
    "torch._guards",
    "torch._subclasses.fake_tensor",
    "torch.utils._sympy.interp",
)

_USUAL: tuple[Patch, ...] = (quiet, torch.enable_grad, operations.stand_ins)
_NO_GRAD: tuple[Patch, ...] = (quiet, torch.no_grad, operations.stand_ins)
_BYTECODE: tuple[Patch, ...] = (quiet, torch.enable_grad)  # which would include stand-ins
_EXPERTS: tuple[Patch, ...] = (torch.enable_grad, operations.stand_ins)  # each attempt is quiet
_DRAFT: tuple[Patch, ...] = (_without_provenance, *_USUAL)

# Gradients are on, so that `torch.no_grad` is recorded, unless a module can be recorded only
# without: torch cannot differentiate some loops. Reading bytecode takes longer. Among the ways for
# values, those that keep programs more general come first.
WAYS = (
    Way("as it is", _export, _USUAL),
    Way("without gradients", _export, _NO_GRAD, keeps_gradients=False),
    STRICTLY := Way("from its bytecode", _from_bytecode, _BYTECODE, keeps_gradients=False,
                    sees_parts=False),
    Way("over all experts", _over_experts, _EXPERTS, for_values=True),
    _BRANCHES := Way("along its branches", _draft, _DRAFT, _refuse_guesses, for_values=True),
    _VALUES := Way("for the values of the examples", examples.record_values, _USUAL,
                   for_values=True),
    UNAWARE := Way("hidden from it", functools.partial(examples.record_values, aware=False),
                   _USUAL),
)  # fmt: skip
SPECIALIZED = (_VALUES, _BRANCHES, UNAWARE)
WITH_WHOLE_ROWS = (Way("with the rows of all parts", _with_whole_rows, _USUAL),)
