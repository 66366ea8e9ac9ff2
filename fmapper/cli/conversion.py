"""Measures a conversion: the arrays and operations of the model, its errors and its speed."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fmapper.backends.arrays import Arrays
from fmapper.backends.device import get_device
from fmapper.backends.discovery import adapter_of, get_adapter
from fmapper.backends.models import Models
from fmapper.errors import ConversionError
from fmapper.profiles import timing
from fmapper.profiles.timing import Timing
from fmapper.programs.steps import find_target, lower_trained, record_program
from fmapper.render import pairs, readable_bytes, readable_seconds
from fmapper.verification.models.owners import inputs_for, source_of, source_of_callable
from fmapper.verification.report import Report

if TYPE_CHECKING:
    from rich.console import RenderableType

_FIRST_KINDS = 8  # of operations that are printed


@dataclass(frozen=True, slots=True)
class Amount:
    """The totals of parameters or buffers; tied ones count once.

    Attributes:
        arrays: The number of arrays.
        numbers: The number of elements in them.
        nbytes: Their size in bytes.
    """

    arrays: int
    numbers: int
    nbytes: int

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Amount:
        """Sums up over arrays of any backend."""
        owned = [(adapter_of(array), array) for array in arrays.values()]
        sizes = [(math.prod(a.shape(x)), a.nbytes(x)) for a, x in owned if a is not None]
        return cls(len(sizes), sum(n for n, _ in sizes), sum(b for _, b in sizes))

    def __str__(self) -> str:
        return f"{self.numbers:,} numbers in {self.arrays:,} arrays, {readable_bytes(self.nbytes)}"


@dataclass(frozen=True, slots=True)
class Conversion:
    """The measurements of a conversion.

    Attributes:
        model: The class of the model.
        target: The framework to which it was converted.
        train: Whether the training mode was recorded.
        parameters: The arrays that are trained.
        buffers: The arrays that are not trained.
        ops: Operations by name -> their number in the program, the most frequent first.
        export_seconds: The time to record the program.
        lowering_seconds: The time to lower it, without compilation.
        first_call_seconds: The first call, with compilation; None if the model was not called.
        verification: The comparison of the outputs on the examples; None if there was none.
        per_call: One call of the converted model; None if calls were not timed.
        per_call_before: One call of the original without gradients, timed alternately with that.
        speedup: The median over the rounds of the original's time by the converted model's.
    """

    model: str
    target: str
    train: bool
    parameters: Arrays
    buffers: Arrays
    ops: dict[str, int]
    export_seconds: float
    lowering_seconds: float
    first_call_seconds: float | None = None
    verification: Report | None = None
    per_call: Timing | None = None
    per_call_before: Timing | None = None
    speedup: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the comparison found no difference."""
        return self.verification is None or self.verification.ok

    def to_json(self) -> str:
        """Returns the measurements as strict JSON; infinite values and NaN are null."""
        return json.dumps(_finite({**asdict(self), "ok": self.ok}), indent=1, allow_nan=False)

    def __rich__(self) -> RenderableType:
        mode = ", in training" if self.train else ""
        return pairs(f"{self.model} to {self.target}{mode}", self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield "parameters", str(self.parameters)
        yield "buffers", str(self.buffers)
        most = [f"{_short(op)} {count}" for op, count in self.ops.items()]
        more = ", ..." if len(most) > _FIRST_KINDS else ""
        total = sum(self.ops.values())
        kinds = f"{total:,} of {len(most)} kinds: " if most else "none"
        yield "operations", kinds + ", ".join(most[:_FIRST_KINDS]) + more
        yield "verified", self._verdict()
        yield "recorded in", readable_seconds(self.export_seconds)
        yield "lowered in", readable_seconds(self.lowering_seconds)
        if self.first_call_seconds is not None:
            compiled = ", with compilation" if find_target(self.target)[0].compiles else ""
            yield "first call", f"{readable_seconds(self.first_call_seconds)}{compiled}"
        if self.per_call is not None and self.per_call_before is not None:
            now, before = self.per_call, self.per_call_before
            yield (
                "per call",
                f"{readable_seconds(now.median)}; {readable_seconds(before.median)} before: "
                f"{self.speedup:.2f}x as fast (medians of {now.n} rounds)",
            )

    def _verdict(self) -> str:
        report = self.verification
        if report is None:
            return "no"
        if not report.ok:
            return f"the outputs differ. {report}"
        errors = [out.error / out.scale if out.scale else out.error for out in report.outputs]
        count = "1 output agrees" if len(errors) == 1 else f"{len(errors)} outputs agree"
        text = f"{count}, off by {max(errors, default=0.0):.1e} of the largest element at most"
        if report.exact is None:
            return text
        before, now = report.exact
        return f"{text}; against float64 {before:.1e} before and {now:.1e} now"


def measure(
    model: Any,
    to: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    train: bool = False,
    compare: bool = True,
    seconds: float = 0.5,
    say: Callable[[str], object] = lambda step: None,
) -> tuple[Conversion, Any]:
    """Converts a model, compares it with its source and times both.

    Args:
        model: A model of any framework that fmapper can record. It is put into evaluation mode,
            unless `train` is set.
        to: The target, as for `convert`.
        args: The example inputs by position, arrays of any backend.
        kwargs: The example inputs by keyword.
        dynamic_shapes: As for `convert`.
        train: As for `convert`; a model in training mode is neither compared nor timed.
        compare: Whether to compare the outputs, also with those in float64.
        seconds: The time for timing calls of both; 0 to skip it.
        say: Called with a description of each step.

    Returns:
        The measurements, and the converted model.

    Raises:
        ConversionError: As for `convert`; also if the object is not a model.
    """
    target, variant = find_target(to)
    if variant:
        raise ConversionError(
            f"the command converts to {target.name}, and not to {to}: save with --out and read the "
            f"file as fmapper.load(path, to={to!r})"
        )
    source = source_of(model) or source_of_callable(model, target)
    if source is None or source is target:
        what = "not a model that can be recorded"
        if source is target:
            what = "already a model of it"
        raise ConversionError(
            f"{type(model).__name__} cannot be converted to {to}: it is {what}. Name a model of "
            "another framework."
        )
    say(f"converting {type(model).__name__} to {to}")
    start = timing.clock()
    program = record_program(
        model, source, target, args, kwargs, dynamic_shapes=dynamic_shapes, train=train
    )
    exported = timing.clock()
    converted = lower_trained(program, target, train=train)
    finished = timing.clock()
    fields: dict[str, Any] = {
        "model": program.name or type(model).__name__,
        "target": to,
        "train": train,
        "parameters": Amount.of(program.parameters),
        "buffers": Amount.of(program.buffers),
        "ops": dict(Counter(call.op for call in program.graph.walk()).most_common()),
        "export_seconds": exported - start,
        "lowering_seconds": finished - exported,
    }
    if not train and (compare or seconds > 0):
        source.to_evaluation(model)
        target.to_evaluation(converted)
        say("calling the converted model")
        now = _wait_for_results(target, converted, args, kwargs)
        fields["first_call_seconds"] = now()
        if compare:
            from fmapper.verification.comparison import verify

            say("comparing the outputs")
            fields["verification"] = verify(
                model, converted, *args, example_kwargs=kwargs, exact=True
            )
        if seconds > 0:
            say("timing both")
            before = _wait_for_results(source, model, args, kwargs)
            pairs = timing.rounds(lambda: (before(), now()), seconds)
            befores, nows = (list(column) for column in zip(*pairs, strict=True))
            fields["per_call"], fields["per_call_before"] = Timing.of(nows), Timing.of(befores)
            fields["speedup"] = statistics.median(b / n for b, n in pairs)
    return Conversion(**fields), converted


def _wait_for_results(
    adapter: Models, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[], float]:
    """Returns a call that copies its inputs and waits for its results."""
    given = inputs_for(adapter, args, kwargs, copy=True)
    call = adapter.caller(model, *given)

    def run() -> float:
        start = timing.clock()
        result = call(*given)
        device = get_device(result)
        if device is not None:
            get_adapter(device.backend, Arrays).wait(device, result)
        return timing.clock() - start

    return run


def _short(op: str) -> str:
    return op.rpartition("::")[2].removesuffix(".default")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
