"""The report of `verify`: everything that was compared, and where two models first part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fmapper.errors import ConversionError
from fmapper.plots import Bar, draw_differences
from fmapper.render import as_html, table
from fmapper.verification.differences import Difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a model.

    Attributes:
        module: The path of the submodule that it belongs to.
        op: Its name.
        source: The line of code that called it.
        loop: The iterations of the loops around it, outer ones first, such as `scan[3]`.
    """

    module: str
    op: str
    source: str = ""
    loop: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """The submodule, the iteration of a loop, and the line of code that contain it."""
        return self.module, self.loop, self.source

    def __str__(self) -> str:
        inside = ", ".join(part for part in (self.module, self.loop) if part)
        where = f"in {inside}: " if inside else ""
        return f"{where}{self.op}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True, slots=True)
class Parting(Difference):
    """The first place where two models part.

    Attributes:
        stage: `weights`, `forward`, `draws`, `buffers`, `backward` or `steps`.
        a: In the forward pass, the operation of `a` whose operands agree but whose result does not.
        b: The same operation of `b`.
        name: In other stages, the parameter or buffer, by its name in `a`.
        step: The number of the step, from 1.
        mode: `train` or `eval`.
        rounded: Whether this may be a rounding, for instance of a table in single precision.
    """

    stage: str = "forward"
    a: Operation | None = None
    b: Operation | None = None
    name: str = ""
    step: int = 0
    mode: str = ""
    rounded: bool = False

    def __str__(self) -> str:
        text = Difference.__str__(self)
        if self.b is not None:
            text += f"\n  of b: {self.b}"
        return text


def part_at(difference: Difference, stage: str, **more: Any) -> Parting:
    """Makes a `Parting` from a difference."""
    fields = (
        difference.path,
        difference.error,
        difference.scale,
        difference.allowed,
        difference.note,
        difference.size,
        difference.precision,
    )
    return Parting(*fields, stage=stage, **more)


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The result of `verify`; true if something was compared and everything agrees.

    Attributes:
        outputs: One difference per array of the output; per number or text if there is no array.
        first: The first place where the models part, if they do: the operation of the forward pass,
            if it is known in both models; the parameter of the backward pass; the step.
        exact: The largest error of `a` and of `b` against `a` in float64, relative to the largest
            element; None if it was not computed.
        layers: The largest difference in each layer, in the order of `a`; for `verify(...,
            layers=True)`.
        modes: Which of the two was called in training mode and which was not, if they differ.
        loss: The difference of the losses; None if no gradients were compared.
        divergence: The mean Kullback-Leibler divergence of the logits, in nats; None if the output
            has no `logits`.
        weights: One difference per parameter before anything was trained.
        gradients: One difference per parameter, in the layout of `a`.
        steps: For each step of the optimiser, one difference per parameter and running statistic.
        buffers: One difference per buffer after the call.
        draws: The comparison of random numbers; an error is a distance in standard errors.
        undecided: Questions that the comparison could not decide, and why.
    """

    outputs: tuple[Difference, ...]
    first: Difference | None = None
    exact: tuple[float, float] | None = None
    layers: tuple[Difference, ...] = ()
    modes: str = ""
    loss: Difference | None = None
    divergence: float | None = None
    weights: tuple[Difference, ...] = ()
    gradients: tuple[Difference, ...] = ()
    steps: tuple[tuple[Difference, ...], ...] = ()
    buffers: tuple[Difference, ...] = ()
    draws: tuple[Difference, ...] = ()
    undecided: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether something was compared, also of gradients and steps, and everything agrees."""
        trained = (self.gradients, *self.steps)
        is_compared = all(
            any(difference.size for difference in differences)
            for differences in trained
            if differences
        )
        every = (difference for _, differences in self.parts() for difference in differences)
        return self.size > 0 and is_compared and all(difference.ok for difference in every)

    @property
    def size(self) -> int:
        """The number of elements of outputs that were compared."""
        return sum(output.size for output in self.outputs)

    def __bool__(self) -> bool:
        return self.ok

    def parts(self) -> Iterator[tuple[str, tuple[Difference, ...]]]:
        """Yields the differences by stage: `outputs`, `gradients`, `step 1`, ..."""
        yield "outputs", self.outputs
        yield "weights", self.weights
        yield "losses", () if self.loss is None else (self.loss,)
        yield "draws", self.draws
        yield "buffers", self.buffers
        yield "gradients", self.gradients
        for number, step in enumerate(self.steps, 1):
            yield f"parameters after step {number}", step

    def __repr__(self) -> str:
        return f"<Report: {'the same' if self else 'not the same'}\n{self}>"

    def __str__(self) -> str:
        lines = []
        for what, differences in self.parts():
            if not differences and what != "outputs":
                continue
            wrong = [difference for difference in differences if not difference.ok]
            lines.append(f"{len(differences) - len(wrong)} of {len(differences)} {what} agree")
            if what != "outputs" and not any(difference.size for difference in differences):
                lines[-1] = (
                    f"nothing was compared of {len(differences)} {what}: they are NaN in both"
                )
            wrong.sort(key=lambda difference: -difference.share)
            shown = wrong[:_MOST] or (differences if what == "outputs" else ())
            lines += [f"  {difference}" for difference in shown]
            if len(wrong) > _MOST:
                lines.append(f"  and {len(wrong) - _MOST} more")
        if not self.size:
            what = "are all empty or NaN" if self.outputs else "hold no arrays"
            lines = [f"nothing was compared: the outputs {what}. Pass inputs that give numbers"]
        if self.modes:
            lines.append(self.modes)
        if self.divergence is not None:
            lines.append(f"divergence of the logits: {self.divergence:.2e} nats")
        if self.first is not None:
            lines.append(f"first difference: {self.first}")
        if self.exact is not None:
            a, b = self.exact
            lines.append(f"against float64: a is off by {a:.2e}, b by {b:.2e} of the largest")
        lines += [f"not decided: {question}" for question in self.undecided]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as numbers, texts, lists and dicts, ready for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def _repr_html_(self) -> str:
        lines = [line for line in str(self).splitlines() if not line.startswith(" ")]
        parts = [*self.parts(), ("layers", self.layers)]
        tables = [
            table(
                (what.removesuffix("s"), "largest difference", "allowed", ""),
                map(_row, differences),
            )
            for what, differences in parts
            if differences
        ]
        return as_html("\n".join(lines), *tables)

    def plot(self, axes: Axes | None = None) -> Axes:
        """Plots the difference of each layer, relative to its largest element.

        Needs matplotlib, as in the extra `plot`.

        Args:
            axes: The axes to draw on; None for a new figure of pyplot.

        Returns:
            The axes. Their label is a sentence that can stand for the picture.

        Raises:
            ConversionError: There are no layers: the report does not come from `verify(...,
                layers=True)`, or the models cannot be watched.
            BackendUnavailableError: matplotlib is not installed.
        """
        if not self.layers:
            raise ConversionError(
                "there is nothing to plot: verify(..., layers=True) compares layer by layer, if "
                "both models can be recorded."
            )
        bars = [
            Bar(layer.path, layer.share, layer.allowed / (layer.scale or 1.0), layer.ok)
            for layer in self.layers
        ]
        return draw_differences(bars, axes)


_MOST = 5  # differences of one stage that are shown


def _row(difference: Difference) -> tuple[str, ...]:
    numbers = (
        ("", "") if difference.note else (f"{difference.error:.2e}", f"{difference.allowed:.2e}")
    )
    return difference.path, *numbers, difference.note or ("agrees" if difference.ok else "differs")
