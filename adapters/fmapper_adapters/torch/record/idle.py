"""Names the effects of training that a recording for evaluation leaves out."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch

from fmapper.backends import equals
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import FakeTensor, TorchDispatchMode, pytree
from fmapper_adapters.torch.record.failures import first_line
from fmapper_adapters.torch.record.lines import is_of_torch
from fmapper_adapters.torch.record.modes import mode
from fmapper_adapters.torch.record.obstacles import run_uncompiled
from fmapper_adapters.torch.record.patches.plain_changes import note_changes
from fmapper_adapters.torch.record.patches.restore import restore_after, unwind

_MODES = ("train", "training", "use_input_stats")  # arguments of operations that set the mode


def left_out_of(module: torch.nn.Module, exported: torch.export.ExportedProgram) -> str:
    """Describes the effects of training that a recording for evaluation lacks; empty for none.

    Operations of torch have their mode as an argument, except for attention, whose dropout rate is
    zero in evaluation.
    """
    graphs = [part.graph for part in exported.graph_module.modules() if hasattr(part, "graph")]
    effects = {_effect_in_training(node) for graph in graphs for node in graph.nodes} - {""}
    attentions = [
        part for part in module.modules() if isinstance(part, torch.nn.MultiheadAttention)
    ]
    if any(part.dropout for part in attentions):
        effects.add("dropout")
    return f"what it leaves out is {' and '.join(sorted(effects))}" if effects else ""


def _effect_in_training(node: torch.fx.Node) -> str:
    """Names the additional effect that an operation recorded for evaluation has in training."""
    schema = _private.schema_of(node.target)
    if schema is None:
        return ""
    given: dict[str, Any] = {argument.name: argument.default_value for argument in schema.arguments}
    given |= {**dict(zip(given, node.args, strict=False)), **node.kwargs}
    if next((given[name] for name in _MODES if name in given), None) is not False:
        return ""
    if "running_mean" in given:
        return "batch statistics"
    rate = given.get("p", given.get("dropout"))
    if rate is None:
        return "random numbers"
    is_single = given.get("num_layers") == 1  # dropout applies only between layers
    return "dropout" if rate and not is_single else ""


def left_out_of_code(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Describes what a module's own code does only in training; empty if it does the same.

    Runs the module on the examples in both modes, and compares the operations with their
    arguments, the outputs, the attributes that change, and whether Python draws random numbers.
    """
    runs: list[_Run] = []
    for train in (False, True, False):  # again in evaluation: the first call may have filled caches
        try:
            with mode(module, train=train):
                runs.append(_run(module, args, kwargs))
        except Exception as error:  # the user's code may raise anything
            name = "training" if train else "evaluation"
            return (
                "whether its own code differs in training is unknown, because it does not run on "
                f"the examples in {name} mode ({first_line(error)})"
            )
        if len(runs) > 1 and _compute_the_same(runs[-2], runs[-1]):
            return ""
    return (
        f"it leaves out the code of the model that self.training selects{_place(runs[2], runs[1])}"
    )


class _Run:
    """The operations of a call of a module, and its results.

    Attributes:
        steps: The operations of the call as text, with numbers for tensors.
        lines: The lines of the model that they come from.
        tensors: Tensors that are not results of operations, such as parameters.
        results: The outputs, the attributes that changed, and whether Python drew random numbers.
    """

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.lines: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.results = ""


def _compute_the_same(a: _Run, b: _Run) -> bool:
    if a.steps != b.steps or a.results != b.results or len(a.tensors) != len(b.tensors):
        return False
    return all(map(_is_same, a.tensors, b.tensors))


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):
        return a.shape == b.shape and a.dtype == b.dtype
    return equals(a, b)


def _place(evaluation: _Run, training: _Run) -> str:
    """Returns the line of the model at which training differs first; empty if that is unknown."""
    pairs = zip(evaluation.steps, training.steps, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        at = min(len(evaluation.steps), len(training.steps))
    lines = next((run.lines for run in (training, evaluation) if at < len(run.lines)), [])
    return f", first at {lines[at]}" if lines and lines[at] else ""


def _run(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Run:
    """Calls a module on copies of the inputs, and restores it."""
    args, kwargs = copy.deepcopy((args, dict(kwargs)))
    numbers, numbers_of_numpy = random.getstate(), np.random.get_state()
    try:
        with (
            unwind(),
            run_uncompiled(),
            torch.no_grad(),
            _without_kernels_of_modes(),
            torch.random.fork_rng(devices=[]),
            restore_after(module),
            note_changes(module) as changed,
        ):
            torch.manual_seed(0)
            noted = _Operations()
            with noted:
                output = module(*args, **kwargs)
            drew = random.getstate() != numbers or not _equal_states(numbers_of_numpy)
            leaves, _ = pytree.tree_flatten_with_path(output)
            outputs = [(pytree.keystr(path), noted.describe(leaf)) for path, leaf in leaves]
            noted.run.results = repr((outputs, list(changed), drew))
        return noted.run
    finally:
        random.setstate(numbers)
        np.random.set_state(numbers_of_numpy)


@contextlib.contextmanager
def _without_kernels_of_modes() -> Iterator[None]:
    """Disables kernels that only one of the modes uses for the same computation."""
    backends: Any = torch.backends
    attention, others = backends.mha.get_fastpath_enabled(), (backends.mkldnn, backends.cudnn)
    before = [backend.enabled for backend in others]
    try:
        backends.mha.set_fastpath_enabled(False)
        for backend in others:
            backend.enabled = False
        yield
    finally:
        backends.mha.set_fastpath_enabled(attention)
        for backend, enabled in zip(others, before, strict=True):
            backend.enabled = enabled


def _equal_states(before: Any) -> bool:
    pairs = zip(before, np.random.get_state(), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations within the block.

    Attributes:
        run: The operations so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = _Run()
        self._numbers: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []  # since ids are reused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = pytree.tree_map(self.describe, (args, kwargs))
        result = func(*args, **kwargs)
        made = pytree.tree_map(self._describe_result, result)
        self.run.steps.append(f"{func} {given} {made}")
        self.run.lines.append(_line_of_model(sys._getframe(1)))
        return result

    def describe(self, x: Any) -> str:
        """Returns a value as text, with a number for a tensor."""
        if not isinstance(x, torch.Tensor):
            return repr(x) if isinstance(x, _PLAIN) else type(x).__name__
        if id(x) not in self._numbers:
            self.run.tensors.append(x)
        return self._describe_result(x)

    def _describe_result(self, x: Any) -> str:
        if not isinstance(x, torch.Tensor):
            return self.describe(x)
        self._alive.append(x)
        return self._numbers.setdefault(id(x), f"%{len(self._numbers)}")


_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)


def _line_of_model(frame: FrameType | None) -> str:
    """Returns the innermost line outside of torch and of fmapper; empty without one."""
    while frame is not None and is_of_torch(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
