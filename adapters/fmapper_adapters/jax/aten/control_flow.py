"""Operations that call functions, and operations that end or replace gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p

from fmapper_adapters.jax.aten.table import dimensions, lowering, pointwise
from fmapper_adapters.jax.aten.types import is_weak

Function = Callable[..., Any]


@lowering("fmapper::stop_gradient", int64="moves", dims=pointwise)
def stop_gradient(x: Any) -> jax.Array:
    """Returns the array as a constant with respect to differentiation."""
    return jax.lax.stop_gradient(x)


@lowering("fmapper::overwrite", int64="moves", dims=pointwise)
@jax.custom_jvp
def overwrite(x: Any, value: Any) -> jax.Array:
    """Returns `value` with the gradient of `x`, as after a write that autograd does not see."""
    return jnp.asarray(value)


@overwrite.defjvp
def _overwrite_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return overwrite(*primals), tangents[0]


@lowering("fmapper::with_gradient", dims=dimensions.with_gradient)
def with_gradient(
    ys: Sequence[Any],
    xs: Sequence[Any],
    backward: Function,
    kept: Sequence[Any],
    places: Sequence[int],
    name: str,
    once: bool = False,
    parameters: str = "",
) -> tuple[jax.Array, ...]:
    """Returns the ys, whose gradients with respect to the xs a function computes.

    Its arguments are the gradients of the ys, then the saved values. Its results belong to the xs
    that `places` names; the others have no gradient. If the gradients are differentiated, the ys
    that they need have these gradients, too, as in torch, unless `once` is set.
    """
    is_array = [isinstance(item, jax.Array) for item in kept]
    arrays = tuple(item for item, array in zip(kept, is_array, strict=True) if array)
    given = {id(x) for x in xs}
    positions = {id(y): i for i, y in enumerate(ys) if id(y) not in given}
    origins = [positions.get(id(item)) for item in arrays]

    def forward(xs: Any, ys: Any, arrays: Any) -> Any:
        results = attached(xs, ys, arrays)
        kept = zip(arrays, origins, strict=True)
        return results, tuple(item if i is None else results[i] for item, i in kept)

    def back(arrays: Any, cotangents: Any) -> Any:
        if -1 in places:
            raise NotImplementedError(
                f"{name} is a torch.autograd.Function whose backward cannot be recorded, so the "
                "model can be called, but not differentiated through it"
            )
        left = iter(arrays)
        given = [next(left) if a else item for item, a in zip(kept, is_array, strict=True)]
        gradients: list[Any] = [jnp.zeros_like(x) for x in xs]
        # In torch, the gradient of a complex number is the conjugate of the gradient in JAX.
        for place, slope in zip(places, backward(*map(_conj, cotangents), *given), strict=True):
            gradients[place] = _conj(_gradient_of(xs[place], slope))
        if once:
            gradients = list(_without_derivative(tuple(gradients), name))
        return tuple(gradients), None, None

    attached: Any = jax.custom_vjp(lambda xs, ys, arrays: ys)
    attached.defvjp(forward, back)
    results: tuple[jax.Array, ...] = attached(tuple(xs), jax.lax.stop_gradient(tuple(ys)), arrays)
    return results


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _without_derivative(gradients: Any, name: str) -> Any:
    return gradients


@_without_derivative.defjvp
def _refuse_derivative(name: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"{name} is a torch.autograd.Function whose backward is `once_differentiable`, so its "
        "gradient cannot be differentiated"
    )


def _gradient_of(x: Any, gradient: Any) -> jax.Array:
    """Casts a gradient to the shape and dtype of its primal, as torch does."""
    extra = tuple(range(gradient.ndim - x.ndim))
    gradient = gradient.sum(extra)
    stretched = tuple(i for i in range(x.ndim) if x.shape[i] == 1 != gradient.shape[i])
    gradient = jnp.broadcast_to(gradient.sum(stretched, keepdims=True), x.shape)
    return (gradient if jnp.iscomplexobj(x) else jnp.real(gradient)).astype(x.dtype)


def _conj(x: Any) -> Any:
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


@lowering("higher_order::wrap_with_set_grad_enabled")
def wrap_with_set_grad_enabled(enabled: bool, function: Function, *args: Any) -> Any:
    """Calls the function, without gradients if torch had switched them off."""
    outputs = function(*args)
    return outputs if enabled else jax.lax.stop_gradient(outputs)


@lowering("higher_order::wrap_with_autocast")
def wrap_with_autocast(
    device: str, dtype: Any, enabled: bool, cache: Any, function: Function, *args: Any
) -> Any:
    """Calls the function.

    Raises:
        NotImplementedError: The casts of autocast were not recorded.
    """
    if enabled:
        raise TypeError(
            "casts of torch.autocast were not recorded: export the model inside the "
            "autocast context"
        )
    return function(*args)


@lowering("higher_order::tag_activation_checkpoint")
def checkpoint(function: Function, *args: Any, **_: Any) -> Any:
    """Calls the function, and recomputes it for its gradient."""
    return jax.checkpoint(function)(*args)


@lowering("higher_order::invoke_subgraph", "higher_order::wrap")
def invoke(function: Function, *args: Any, **_: Any) -> Any:
    """Calls the function; torch's name for it is ignored."""
    return function(*[arg for arg in args if not isinstance(arg, str)])


@lowering("higher_order::cond", returns_number=True)
def cond(
    condition: Any, if_true: Function, if_false: Function, operands: Sequence[Any] = ()
) -> Any:
    """Calls one of two functions; only that one runs, also under a traced condition."""
    if isinstance(condition, bool):
        return (if_true if condition else if_false)(*operands)
    condition = jnp.asarray(condition).reshape(()).astype(bool)

    def branch(function: Function) -> Function:
        return lambda *args: tuple(map(_as_array, function(*args)))

    return jax.lax.cond(condition, branch(if_true), branch(if_false), *map(_as_array, operands))


@lowering("higher_order::while_loop", returns_number=True)
def while_loop(
    condition: Function, body: Function, carried: Sequence[Any], fixed: Sequence[Any] = ()
) -> Any:
    """Runs the body while the condition holds; gradients flow forward only, as in JAX."""
    start = tuple(map(_as_array, carried))

    def holds(state: Any) -> Any:
        return jnp.asarray(condition(*state, *fixed)).reshape(()).astype(bool)

    def step(state: Any) -> Any:
        return _like(body(*state, *fixed), start)

    return jax.lax.while_loop(holds, step, start)


@lowering("higher_order::scan")
def scan(body: Function, init: Sequence[Any], xs: Sequence[Any], fixed: Sequence[Any] = ()) -> Any:
    """Carries states along the first dimension; returns the last ones, then the stacked results."""
    start = tuple(map(jnp.asarray, init))

    def step(state: Any, x: Any) -> Any:
        outputs = body(*state, *x, *fixed)
        return _like(outputs[: len(start)], start), tuple(outputs[len(start) :])

    state, results = jax.lax.scan(step, start, tuple(xs))
    return (*state, *results)


@lowering("higher_order::map_impl", "higher_order::map")
def map_over(body: Function, xs: Sequence[Any], fixed: Sequence[Any] = ()) -> Any:
    """Calls the function for each element along the first dimension, and stacks the results."""
    return jax.lax.map(lambda x: tuple(body(*x, *fixed)), tuple(xs))


@lowering("higher_order::associative_scan")
def associative_scan(combine: Function, xs: Sequence[Any], fixed: Sequence[Any] = ()) -> Any:
    """Returns all partial results of an associative function along the first dimension."""
    count = len(xs)

    def both(left: Any, right: Any) -> Any:
        return tuple(jax.vmap(lambda *pair: tuple(combine(*pair, *fixed)))(*left, *right))

    return tuple(jax.lax.associative_scan(both, tuple(xs)))[:count]


def _as_array(x: Any) -> Any:
    """Returns a number as a weakly typed array."""
    return jnp.asarray(x) if isinstance(x, bool | int | float | complex) else x


def _like(values: Sequence[Any], start: Sequence[Any]) -> tuple[Any, ...]:
    """Casts new states to the dtype and weak type of the old ones, as loops require."""
    new = []
    for value, old in zip(values, start, strict=True):
        array = jnp.asarray(value)
        dtype, weak = old.dtype, is_weak(old)
        new.append(
            convert_element_type_p.bind(array, new_dtype=dtype, weak_type=weak, sharding=None)
        )
    return tuple(new)
