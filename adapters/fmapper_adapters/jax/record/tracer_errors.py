"""Explains why a model cannot be traced, with the line and the usual remedy."""

from __future__ import annotations

import traceback

import jax

from fmapper_adapters.jax.record import frames as _frames

_WAYS: tuple[tuple[type[Exception] | str, str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        "a branch on a value: use jax.lax.cond or jnp.where, or pass the value as a Python bool",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        "an array is used as a Python integer: pass it as a Python int",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "an array is passed to NumPy: use jax.numpy instead",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "indexing with a mask has a result of unknown size: use jnp.where, or size=",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "Python needs a value where only the shape is known: pass it as a Python number, or use "
        "jax.lax.cond, scan or while_loop",
    ),
    (
        jax.errors.UnexpectedTracerError,
        "an array of this call is stored outside of it: return it, or store it in a variable of "
        "the model",
    ),
    (
        "InvalidRngError",
        'random numbers need a key: pass rngs={"dropout": jax.random.key(0)} in example_kwargs',
    ),
    (
        "ModifyScopeVariableError",
        'variables are modified: pass mutable=["batch_stats"] in example_kwargs',
    ),
    (
        "TraceContextError",
        "variables that do not belong to the model are modified: make them attributes of the model",
    ),
    (
        "InconclusiveDimensionOperation",
        "it depends on a size that may vary: fix that size",
    ),
)


def explain(name: str, error: Exception) -> str:
    """Explains an error of tracing in terms of the user's code."""
    way = next((text for kind, text in _WAYS if _is_a(error, kind)), "")
    if isinstance(error, TypeError) and " missing " in str(error) and "argument" in str(error):
        way = "pass its inputs as example_inputs and example_kwargs"
    if isinstance(error, NameError) and "unbound axis name" in str(error):
        way = "the batch has this axis: pass jax.vmap(model, axis_name=...) in place of the model"
    place = _place(error)
    at = f" at {place}" if place else ""
    reason = f"{type(error).__name__}: {_short(error)}"
    return f"{name} cannot be recorded{at}: {f'{way} ({reason})' if way else reason}"


def _is_a(error: Exception, kind: type[Exception] | str) -> bool:
    if isinstance(kind, str):
        return any(base.__name__ == kind for base in type(error).__mro__)
    return isinstance(error, kind)


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[0][:200] if lines else "no reason is given"


def _place(error: Exception) -> str:
    """Returns the innermost line outside of libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [
        f for f in frames
        if not (_frames.is_of_jax(f.filename) or _frames.is_of_python(f.filename))
        and not _frames.is_of(f.filename, _LIBRARIES)
    ]  # fmt: skip
    return f"{of_user[-1].filename}:{of_user[-1].lineno}" if of_user else ""


_LIBRARIES = (*_frames.OF_FLAX_AND_ALIKE, "numpy", "jaxtyping")
