"""Runs the result of a conversion on the examples, and compares it with the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmapper.backends.models import Models
from fmapper.errors import ConversionError, ConversionWarning, FmapperError, MoveError
from fmapper.verification.differences import Difference
from fmapper.verification.models.owners import inputs_for
from fmapper.verification.models.turns import in_turn
from fmapper.warn import keeping_warnings, warn

_SLACK = 10  # times the bound of `verify`, because compilers reorder sums


@in_turn  # a call while another model is recorded may behave differently
def refuse_difference(
    model: Any,
    source: Models,
    converted: Any,
    target: Models,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    train: bool,
) -> None:
    """Compares both on the example inputs; a model with random numbers is only run.

    Differences that rounding explains, according to float64, are ignored, and so are those from the
    order of equal elements, for which it warns.

    Raises:
        ConversionError: They differ; says where first.
    """
    from fmapper.verification.comparison import compare, differences
    from fmapper.verification.location import TIES

    with keeping_warnings():  # the call itself gives these warnings, too
        try:
            given = inputs_for(target, args, kwargs)
        except MoveError:  # examples without values, as on the meta device
            return
        examined = target.examine(converted, *given)
        if examined is None or train:
            return
        try:
            reference = source.call(
                model, *inputs_for(source, args, kwargs, copy=True), train=False
            )
        except FmapperError:
            raise
        except Exception as error:  # an error of the model's code, although it could be recorded
            raise ConversionError(
                f"{type(model).__name__} does not run on the examples itself, though it was "
                f"recorded: {type(error).__name__}: {str(error).strip()[:500]}"
            ) from error
    wrong = [d for d in differences(reference, examined[0]) if not _is_close(d)]
    if not wrong:
        return
    report = compare(model, converted, args, kwargs, train=False, exact=True)
    if report.exact is not None and not any(d.note for d in wrong):
        ours, theirs = report.exact
        if theirs <= _SLACK * ours:
            return
    first = report.first
    name = type(model).__name__
    if first is not None and first.note.startswith(TIES):
        warn(
            f"{name}: {first.path} chooses between equal elements of the examples, and the "
            "converted model chooses differently, so later results differ, by "
            f"{max(d.error for d in wrong):.2g} in {wrong[0].path}. Both are valid; if the choice "
            "matters, use examples without equal elements.",
            ConversionWarning,
        )
        return
    raise ConversionError(
        f"{name}: the converted model and the model give different results for the examples. "
        f"{report}\nPass check=False to accept it."
    )


def _is_close(difference: Difference) -> bool:
    return not difference.note and difference.error <= _SLACK * difference.allowed
