"""Gradients, computed by the backend of the trained arrays, as trees of the model's class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from fmapper.backends.compute import Compute, filling_gradient
from fmapper.backends.discovery import adapter_of, owner_of
from fmapper.backends.dtypes import is_inexact
from fmapper.errors import FmapperError, TransformError
from fmapper.tracebacks import short_traceback
from fmapper.transforms.arguments import (
    original_of,
    path_of,
    place_of,
    positions,
    refuse_holders,
    refuse_mixture,
    refuse_untransformable,
    transformer_of,
)
from fmapper.transforms.static_key import (
    Change,
    StaticKey,
    changes,
    put_into,
    structure_of,
)
from fmapper.transforms.trainable import Trained
from fmapper.tree.keypath import format_link
from fmapper.tree.nodes import no_gradient, sync
from fmapper.tree.tree_map import refill
from fmapper.tree.walk import visit

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@overload
def value_and_grad(  # type: ignore[overload-overlap]
    fun: Callable[Concatenate[T, P], R], argnums: Literal[0] = ..., *, has_aux: bool = ...
) -> Callable[Concatenate[T, P], tuple[R, T]]: ...
@overload
def value_and_grad(
    fun: Callable[P, Any], argnums: int | Sequence[int], *, has_aux: bool = ...
) -> Callable[P, tuple[Any, Any]]: ...
def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that returns the value of `fun` and its gradient.

    The backend is that of the trained arrays, which `trainables` lists. `fun` is called with
    rebuilt trees, which it may change.

    Args:
        fun: `fun(*args, **kwargs) -> loss`, a real floating array of shape ().
        argnums: Which arguments to differentiate by: trees or arrays.
        has_aux: Whether `fun` returns (loss, aux); aux is a tree that is passed on.

    Returns:
        `(loss, gradient)`, or `((loss, aux), gradient)`. A gradient is a tree of the class of its
        argument, a tuple of trees if `argnums` is a sequence. It has arrays with the shape and
        dtype of the trained ones, and `no_gradient` in place of everything else, so that
        `fmap(lambda p, g: p - lr * g, model, gradient)` is a step. A tied array has one gradient,
        the sum over its places, at all of them; in arguments that are not differentiated it is a
        constant. The gradient by a complex array points to where the loss grows fastest, in JAX,
        too (where `jax.grad` gives its conjugate).

        Results are not part of torch's graph unless another transformation differentiates or
        vectorises this one. Changes that a forward pass makes to buffers of a torch module persist.

    Raises:
        TransformError: An argument has no trained array, or arrays of NumPy; `fun` does not return
            a scalar of the backend.
        MixedDevicesError: The trained arrays belong to several backends; lists the paths. Other
            arguments may have any arrays; then a note with their paths is added to errors of `fun`.
        NotAFunctorError: An undeclared object holds arrays.

    The interface is that of `jax.value_and_grad`, https://docs.jax.dev.

    Examples:
        >>> import fmapper, torch
        >>> @fmapper.functor
        ... class Line:
        ...     def __init__(self, w, b):
        ...         self.w, self.b = w, b
        >>> model = Line(torch.tensor(2.0), torch.tensor(1.0))
        >>> loss, gradient = fmapper.value_and_grad(lambda m, x: (m.w * x + m.b) ** 2)(model, 3.0)
        >>> loss, gradient.w, gradient.b
        (tensor(49.), tensor(42.), tensor(14.))
    """
    several = not isinstance(argnums, int)
    numbers = positions("argnums", argnums)
    if not numbers:
        raise TransformError(
            "argnums is empty, so there is nothing to differentiate with respect to."
        )

    @short_traceback
    @functools.wraps(fun, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        sync()
        places = [place_of(number, args) for number in numbers]
        boxes: list[Any] = []
        adapter, trained = _find_trained(args, places, boxes)
        ids, arrays = [*trained], [*trained.values()]
        rest: list[StaticKey] = []
        changed: list[tuple[Change, Any]] = []

        def run(new: Sequence[Any]) -> tuple[Any, list[Any]]:
            given: Sequence[Any] = args
            memo: dict[Any, Any] = {}
            if any(after is not before for after, before in zip(new, arrays, strict=True)):
                memo = dict(zip(ids, new, strict=True))
                given = _with(args, places, memo)
            result = fun(*given, **kwargs)
            changed[:] = changes(boxes, memo) if boxes else ()
            effects = [value for _, value in changed]
            if not has_aux:
                return _check_loss(result, adapter), effects
            if not isinstance(result, tuple) or len(result) != 2:
                raise TransformError(
                    f"has_aux=True: the function must return (loss, aux), not "
                    f"{type(result).__name__}."
                )
            aux = structure_of(result[1], lambda leaf: adapter_of(leaf) is adapter)
            refuse_holders(aux, aux.tree)
            rest.append(aux)
            return _check_loss(result[0], adapter), [*aux.arrays, *effects]

        def elsewhere() -> bool:
            others = [arg for place, arg in enumerate(args) if place not in places]
            return any(_shares(tree, trained) for tree in (*others, *kwargs.values()))

        try:
            value, further, gradients = adapter.value_and_grad(run, arrays, elsewhere)
        except Exception as error:
            refuse_untransformable(
                error, adapter, arrays, "differentiate", original_of(args, kwargs)
            )
            _note_mixture(error, adapter, args, kwargs)
            raise
        if changed:
            effects = further[-len(changed) :]
            del further[-len(changed) :]
            for (change, _), effect in zip(changed, effects, strict=True):
                put_into(boxes, change, effect)
        filling = filling_gradient.set(True)
        try:
            memo = dict(zip(ids, gradients, strict=True))
            filled = [refill(args[place], memo.copy(), _none) for place in places]
        finally:
            filling_gradient.reset(filling)
        gradient = tuple(filled) if several else filled[0]
        if not has_aux:
            return value, gradient
        return (value, rest[-1].fill(further)), gradient

    return wrapper


@overload
def grad(
    fun: Callable[Concatenate[T, P], Any],
    argnums: Literal[0] = ...,
    *,
    has_aux: Literal[False] = ...,
) -> Callable[Concatenate[T, P], T]: ...
@overload
def grad(
    fun: Callable[P, Any], argnums: int | Sequence[int] = ..., *, has_aux: bool = ...
) -> Callable[P, Any]: ...
def grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns only the gradient of `value_and_grad`; with `has_aux=True`, `(gradient, aux)`.

    Examples:
        >>> import fmapper, torch
        >>> fmapper.grad(fmapper.grad(lambda x: x**3))(torch.tensor(2.0))
        tensor(12.)
    """
    both = value_and_grad(fun, argnums, has_aux=has_aux)

    @short_traceback
    @functools.wraps(fun, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return wrapper


def _none(leaf: Any) -> Any:
    return no_gradient


def _shares(tree: Any, trained: Mapping[int, Any]) -> bool:
    return any(id(leaf) in trained for _, leaf, kind in visit(tree, once=True) if kind is None)


def _find_trained(
    args: tuple[Any, ...], places: Sequence[int], boxes: list[Any]
) -> tuple[Compute, dict[int, Any]]:
    """Finds the trained arrays of some arguments, each once, and their backend."""
    arrays: dict[int, Any] = {}
    for place in places:
        trained = Trained(args[place])
        if trained.computes:
            structure_of(args[place])  # raises for children that cannot be tracked
        if not trained.links:
            raise TransformError(_why_untrained(trained, place, args[place]))
        boxes += trained.boxes
        arrays.update((i, trained.leaves[i]) for i in trained.links)
    owners = {adapter_of(array): array for array in arrays.values()}
    if len(owners) > 1:  # NumPy numbers beside arrays of another backend are settings
        arrays = {i: array for i, array in arrays.items() if not owner_of(array).is_number(array)}
        owners = {adapter_of(array): array for array in arrays.values()}
    if len(owners) > 1:
        trees = original_of(args, {})
        refuse_mixture({owner_of(x).name: path_of(x, trees) for x in owners.values()})
    return transformer_of(next(iter(owners.values())), "differentiate"), arrays


def _why_untrained(trained: Trained, place: int, tree: Any) -> str:
    what = f"argument {place} ({type(tree).__name__})"
    if not trained.leaves:
        return f"{what} holds no arrays, so there is nothing to differentiate with respect to."
    names = {f"{owner_of(array).dtype(array)}" for array in trained.leaves.values()}
    return (
        f"{what} has no trained array: there are {len(trained.leaves)} of dtype "
        f"{', '.join(sorted(names))}. Floating-point and complex arrays are trained, except those "
        f"that a functor's trainable= omits, buffers, and parameters without requires_grad."
    )


def _with(args: tuple[Any, ...], places: Sequence[int], memo: dict[Any, Any]) -> list[Any]:
    """Replaces arrays in some of the arguments, and keeps ties across them."""
    chosen = sorted(set(places))
    new = refill([args[place] for place in chosen], memo)
    given = list(args)
    for place, arg in zip(chosen, new, strict=True):
        given[place] = arg
    return given


def _check_loss(value: Any, adapter: Compute) -> Any:
    """Checks that a loss is a floating scalar array of the backend that differentiates."""
    owner = adapter_of(value)
    if owner is None:
        raise TransformError(
            "the function must return a floating array of shape (), not "
            f"{type(value).__name__}: converting to a number with float() or .item() loses "
            "the gradient."
        )
    if owner is not adapter:
        raise TransformError(
            f"the function must return an array of {adapter.name}, whose arrays are trained, not "
            f"one of {owner.name}: that conversion loses the gradient."
        )
    if owner.shape(value) != ():
        raise TransformError(
            f"the function must return a scalar to differentiate, not an array of shape "
            f"{owner.shape(value)}. Take its mean or sum."
        )
    dtype = owner.dtype(value)
    if not is_inexact(dtype) or dtype.startswith("complex"):
        raise TransformError(
            f"the function must return a real floating scalar, not one of dtype {dtype}."
        )
    return value


def _note_mixture(
    error: Exception, adapter: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds a note to an error if other arguments hold arrays of another backend."""
    trees = original_of(args, kwargs)
    if isinstance(error, FmapperError):
        return
    links: dict[str, Any] = {}
    for link, leaf, kind in visit(trees, once=True):
        owner = adapter_of(leaf) if kind is None else None
        if owner is not None and not (owner.host_only and adapter.takes_host_arrays):
            links.setdefault(owner.name, link)
    if len(links) > 1:
        listed = ", ".join(f"{name} at {format_link(link)}" for name, link in links.items())
        error.add_note(f"The arguments hold arrays of several backends: {listed}.")
