"""Finds checks such as `equinox.error_if`: branches that call Python to raise an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_RAISING = "equinox._errors"  # the module of the functions that raise


@dataclass(frozen=True, slots=True)
class Check:
    """A check of values.

    Attributes:
        message: The message of its error.
        wrong: The index of the branch that raises the error.
        branch: The other branch, as a closed jaxpr: the values that pass the check.
    """

    message: str
    wrong: int
    branch: Any


def find_check(eqn: Any) -> Check | None:
    """Recognises a check; returns None for any other equation."""
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2:
        return None
    branches = eqn.params["branches"]
    for wrong, branch in enumerate(branches):
        raising = _find_raise(branch)
        if raising is not None:
            return Check(_message(raising), wrong, branches[1 - wrong])
    return None


def holds_one(eqn: Any) -> bool:
    """Returns whether an equation wraps a check in a custom derivative."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    return any(find_check(inner) is not None for inner in eqn.params["call_jaxpr"].jaxpr.eqns)


def _find_raise(branch: Any) -> Any | None:
    """Returns the Python function that a branch calls to raise an error."""
    for eqn in branch.jaxpr.eqns:
        if eqn.primitive.name == "pure_callback":
            called = getattr(eqn.params["callback"], "callback_func", None)
            if getattr(called, "__module__", "") == _RAISING:
                return called
    return None


def _message(raising: Any) -> str:
    cells = dict(zip(raising.__code__.co_freevars, raising.__closure__ or (), strict=True))
    messages = cells["msgs"].cell_contents if "msgs" in cells else ()
    return "; ".join(map(str, messages)) or "a check of the model failed"
