"""Transformations of functions: each goes to the backend of the arrays that it is called with."""

from __future__ import annotations

import functools
import operator
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from fmapper._adapter import Adapter
from fmapper._discovery import adapter_of
from fmapper._dtypes import is_inexact
from fmapper._errors import FmapperError, MixedDevicesError, NotCompiledWarning, TransformError
from fmapper._fmap import children
from fmapper._functor import functor
from fmapper._gradient import filling_gradient, no_gradient
from fmapper._holders import check_leaf
from fmapper._keypath import format_link
from fmapper._namespace import array_namespace
from fmapper._nodes import node_type_of, sync
from fmapper._structure import Change, Structure, changes, put_into, refilled, structure_of
from fmapper._trainable import Trained, trained_arrays
from fmapper._visit import visit
from fmapper._warn import warn

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)  # they may close over arrays

_CHECKED = 1024  # static objects that one function remembers to have looked into

F = TypeVar("F", bound=Callable[..., Any])

# --- gradients ------------------------------------------------------------------------------------


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns what `fun` returns, and its gradient.

    The backend is that of the arrays that are trained: those that `trainables` lists. `fun` is
    called with trees like those given to it, and may do with them what it likes.

    Args:
        fun: `fun(*args, **kwargs) -> loss`, a real floating array of shape ().
        argnums: Which arguments to differentiate by: trees or arrays.
        has_aux: `fun` returns (loss, aux); aux is a tree that is handed on.

    Returns:
        `(loss, gradient)`, or `((loss, aux), gradient)`. A gradient is a tree of the class of its
        argument, a tuple of trees if `argnums` is a sequence. It has arrays of shape and dtype of
        those that are trained, and `no_gradient` in the place of all else, so that
        `fmap(lambda p, g: p - lr * g, model, gradient)` is a step. A tied array has one gradient,
        summed over its places, at all of them; in arguments that are not differentiated it is a
        constant. The gradient by a complex array points to where the
        loss grows fastest, in JAX, too (where `jax.grad` gives its conjugate).

        Results are not part of torch's graph unless another transformation is differentiating or
        vectorising this one. What a forward pass changes in buffers of a torch module, it changes.

    Raises:
        TransformError: An argument has no array that is trained, or arrays of NumPy; `fun` returns
            no scalar of the backend.
        MixedDevicesError: What is trained belongs to several backends; lists the paths. Other
            arguments may have any arrays; an error of `fun` has a note with their paths then.
        NotAFunctorError: An object that nobody declared holds arrays.

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
    numbers = _numbers("argnums", argnums)
    if not numbers:
        raise TransformError("argnums is empty, so there is nothing to differentiate by.")
    checked: set[int] = set()

    @functools.wraps(fun, updated=())
    def transformed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        sync()
        places = [_place(number, args) for number in numbers]
        boxes: list[Any] = []
        adapter, trained = _trained(args, places, boxes)
        ids, arrays = [*trained], [*trained.values()]
        rest: list[Structure] = []
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
                return _checked(result, adapter), effects
            if not isinstance(result, tuple) or len(result) != 2:
                raise TransformError(
                    f"has_aux=True: the function must return (loss, aux), not {_a(result)}."
                )
            aux = structure_of(result[1], lambda leaf: adapter_of(leaf) is adapter)
            _refuse_results(aux, checked)
            rest.append(aux)
            return _checked(result[0], adapter), [*aux.arrays, *effects]

        def elsewhere() -> bool:
            others = [arg for place, arg in enumerate(args) if place not in places]
            return any(_shares(tree, trained) for tree in (*others, *kwargs.values()))

        try:
            value, further, gradients = adapter.value_and_grad(run, arrays, elsewhere)
        except Exception as error:
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
            found = [refilled(args[place], memo.copy(), _none) for place in places]
        finally:
            filling_gradient.reset(filling)
        gradient = tuple(found) if several else found[0]
        if not has_aux:
            return value, gradient
        return (value, rest[-1].filled(further)), gradient

    return transformed


def grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Like `value_and_grad`, for the gradient alone; with `has_aux=True`, `(gradient, aux)`.

    Examples:
        >>> import fmapper, torch
        >>> fmapper.grad(fmapper.grad(lambda x: x**3))(torch.tensor(2.0))
        tensor(12.)
    """
    both = value_and_grad(fun, argnums, has_aux=has_aux)

    @functools.wraps(fun, updated=())
    def transformed(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return transformed


def _shares(tree: Any, trained: Mapping[int, Any]) -> bool:
    found = trained_arrays(tree, [])
    if found is None:
        return any(id(leaf) in trained for _, leaf, kind in visit(tree, once=True) if kind is None)
    return not found.keys().isdisjoint(trained)


def _none(leaf: Any) -> Any:
    return no_gradient


def _numbers(name: str, given: Any) -> tuple[int, ...]:
    """What `argnums` or `static_argnums` names."""
    try:
        return tuple(map(operator.index, given if isinstance(given, tuple | list) else (given,)))
    except TypeError:
        raise TransformError(
            f"{name}={given!r}: arguments are named by position here, with an integer or several."
        ) from None


def _note_mixture(
    error: Exception, adapter: Adapter, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Says so if what is not differentiated holds arrays of another backend: it may be for that."""
    trees = _named(args, kwargs)
    if isinstance(error, FmapperError):
        return
    found: dict[str, Any] = {}
    for link, leaf, kind in visit(trees, once=True):
        owner = adapter_of(leaf) if kind is None else None
        if owner is not None and not (owner.host_only and adapter.takes_host_arrays):
            found.setdefault(owner.name, link)
    if len(found) > 1:
        listed = ", ".join(f"{name} at {format_link(link)}" for name, link in found.items())
        error.add_note(f"The arguments hold arrays of several backends: {listed}.")


def _place(number: int, args: tuple[Any, ...]) -> int:
    place = number + len(args) if number < 0 else number
    if not 0 <= place < len(args):
        raise TransformError(
            f"there is no argument {number}: {len(args)} were given by position, and only those "
            "have a number."
        )
    return place


def _trained(
    args: tuple[Any, ...], places: Sequence[int], boxes: list[Any]
) -> tuple[Adapter, dict[int, Any]]:
    """What is trained in some arguments, each array once, by id; and whose arrays these are."""
    found: dict[int, Any] = {}
    for place in places:
        own = trained_arrays(args[place], boxes)
        if own is None:
            trained = Trained(args[place])
            boxes += structure_of(args[place]).boxes
            own = {i: trained.leaves[i] for i in trained.links}
        if not own:
            raise TransformError(_nothing_trained(Trained(args[place]), place, args[place]))
        found.update(own)
    owners = {adapter_of(array): array for array in found.values()}
    if len(owners) > 1:  # numbers of NumPy beside arrays of another backend are settings
        found = {i: array for i, array in found.items() if not _adapter(array).is_number(array)}
        owners = {adapter_of(array): array for array in found.values()}
    if len(owners) > 1:
        trees = _named(args, {})
        _refuse_mixture({_adapter(x).name: _path_of(x, trees) for x in owners.values()})
    return _transforming(next(iter(owners.values())), "differentiate"), found


def _refuse_mixture(paths: Mapping[str, str]) -> None:
    found = ", ".join(f"{name} at {path}" for name, path in paths.items())
    raise MixedDevicesError(
        f"the arrays belong to several backends: {found}. "
        "Move them to one first: to_torch or to_jax."
    )


def _transforming(array: Any, verb: str) -> Adapter:
    adapter = adapter_of(array)
    assert adapter is not None
    reason = adapter.no_transforms()
    if reason is not None:
        raise TransformError(f"cannot {verb} a function of {adapter.name} arrays: {reason}")
    return adapter


def _nothing_trained(trained: Trained, place: int, tree: Any) -> str:
    what = f"argument {place} ({_a(tree)})"
    if not trained.leaves:
        return f"{what} holds no arrays, so there is nothing to differentiate by."
    names = {f"{_adapter(array).dtype(array)}" for array in trained.leaves.values()}
    return (
        f"{what} has no array that is trained: there are {len(trained.leaves)} of dtype "
        f"{', '.join(sorted(names))}. Trained are floating and complex arrays, less those that a "
        "functor's trainable= leaves out, buffers, and parameters without requires_grad."
    )


def _adapter(array: Any) -> Adapter:
    found = adapter_of(array)
    assert found is not None
    return found


def _with(args: tuple[Any, ...], places: Sequence[int], memo: dict[Any, Any]) -> list[Any]:
    """The arguments with other arrays in some of them; ties across those are kept."""
    chosen = sorted(set(places))
    new = refilled([args[place] for place in chosen], memo)
    given = list(args)
    for place, arg in zip(chosen, new, strict=True):
        given[place] = arg
    return given


def _checked(value: Any, adapter: Adapter) -> Any:
    """A loss: a floating array of shape (), of the backend that differentiates."""
    found = adapter_of(value)
    if found is None:
        raise TransformError(
            f"the function must return a floating array of shape (), not {_a(value)}: on the way "
            "to a number, by float() or .item(), the gradient is lost."
        )
    if found is not adapter:
        raise TransformError(
            f"the function must return an array of {adapter.name}, whose arrays are trained, not "
            f"one of {found.name}: on the way there the gradient is lost."
        )
    if found.shape(value) != ():
        raise TransformError(
            f"the function must return a scalar to differentiate, not an array of shape "
            f"{found.shape(value)}. Take its mean or sum."
        )
    dtype = found.dtype(value)
    if not is_inexact(dtype) or dtype.startswith("complex"):
        raise TransformError(
            f"the function must return a real floating scalar, not one of dtype {dtype}."
        )
    return value


def _a(value: Any) -> str:
    return f"a {type(value).__name__}"


# --- vmap -----------------------------------------------------------------------------------------


def vmap(fun: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """A function that does for every index along an axis what `fun` does for one.

    Args:
        fun: A function of trees; numbers and what else is no array it gets as it is.
        in_axes: Along which axis the arrays of an argument are taken apart: an integer for all, or
            one entry per argument: an integer, None for an argument that goes whole to every call,
            or a list, tuple or dict of those like the argument itself. Arguments by name: axis 0.
        out_axes: Which axis of the results is the new one: an integer for all, or a tuple with one
            for each part of a tuple.

    Raises:
        TransformError: The arrays are NumPy's, or there are none, or `in_axes` does not fit.
        MixedDevicesError: Arrays of several backends.

    The interface is that of `jax.vmap` and `torch.func.vmap`.

    Examples:
        >>> import fmapper, torch
        >>> dot = lambda m, x: (m["w"] * x).sum()
        >>> fmapper.vmap(dot, in_axes=(None, 0))({"w": torch.ones(2)}, torch.eye(2))
        tensor([1., 1.])
    """

    @functools.wraps(fun, updated=())
    def mapped(*args: Any, **kwargs: Any) -> Any:
        sync()
        given = [*args, kwargs]
        axes = [*_per_argument(in_axes, len(args)), 0]
        parts = [structure_of(arg) for arg in given]
        found: list[Any] = []
        along: list[int | None] = []
        for place, (part, axis) in enumerate(zip(parts, axes, strict=True)):
            found += part.arrays
            along += _axes(part, axis, f"argument {place}")
            _refuse_holders(part, _named(args, kwargs))
        adapter = _backend(found, "vectorise", _named(args, kwargs))
        results: list[Structure] = []

        def run(new: Sequence[Any]) -> list[Any]:
            pending = iter(new)
            *new_args, new_kwargs = (
                part.filled([next(pending) for _ in part.arrays]) for part in parts
            )
            result = fun(*new_args, **new_kwargs)
            results.append(structure_of(result, lambda leaf: adapter_of(leaf) is adapter))
            _refuse_results(results[-1], set())
            return results[-1].arrays

        new = adapter.vectorized(run, found, along)
        if out_axes != 0:
            new = _moved(new, _axes(results[-1], out_axes, "the result"))
        return results[-1].filled(new)

    return mapped


def _per_argument(in_axes: Any, count: int) -> Sequence[Any]:
    if in_axes is None or isinstance(in_axes, int):
        return [in_axes] * count
    if not isinstance(in_axes, list | tuple) or len(in_axes) != count:
        raise TransformError(
            f"in_axes={in_axes!r} does not fit {count} arguments: an integer for all of them, or a "
            "tuple with one entry for each."
        )
    return in_axes


def _axes(structure: Structure, spec: Any, what: str) -> list[int | None]:
    """The axis of each array of an argument or result."""
    if spec is None or isinstance(spec, int):
        return [spec] * len(structure.arrays)
    known: dict[int, int | None] = {}

    def look(spec: Any, tree: Any) -> None:
        if spec is None or isinstance(spec, int):
            for _, leaf, kind in visit(tree, once=True):
                if kind is None and known.setdefault(id(leaf), spec) != spec:
                    raise TransformError(f"there are two axes for one tied array of {what}.")
            return
        axes, have = children(spec), children(tree)
        if axes.keys() != have.keys():
            raise TransformError(
                f"the axes {spec!r} do not fit {what}: there is {_a(tree)} with the children "
                f"{', '.join(map(repr, have)) or 'none'}."
            )
        for key, axis in axes.items():
            look(axis, have[key])

    look(spec, structure.tree)
    return [known[id(array)] for array in structure.arrays]


def _moved(new: list[Any], axes: Sequence[int | None]) -> list[Any]:
    """Results with their new axis, which is the first, where it is wanted."""
    moved = []
    for array, axis in zip(new, axes, strict=True):
        if axis is None:
            moved.append(array[0])
        else:
            moved.append(array_namespace(array).moveaxis(array, 0, axis) if axis else array)
    return moved


# --- jit ------------------------------------------------------------------------------------------


@overload
def jit(fun: F, *, static_argnums: int | Sequence[int] = ...) -> F: ...
@overload
def jit(fun: None = None, *, static_argnums: int | Sequence[int] = ...) -> Callable[[F], F]: ...
def jit(fun: Any = None, *, static_argnums: int | Sequence[int] = ()) -> Any:
    """A function that is compiled by the backend of the arrays that it is called with.

    It is recorded once for trees of one structure with arrays of the same shapes and dtypes, and
    replayed from then on, so it should have no effects but its result. Arrays are inputs; strings,
    settings and other objects are static: other values are another program. Numbers that are
    arguments, or items of containers, are inputs to JAX and static in torch: give an array for what
    changes with every call. Numbers within functors are static. Ties survive.

    JAX compiles with `jax.jit`. torch records what the function does to its tensors and compiles
    that with `torch.compile`; where there is no compiler, or the function looks at values, as in
    `if x.sum() > 0`, `x.sum().item()` or `x[x > 0]`, it runs as it is and says so once.

    Args:
        fun: A function of trees, a model that can be called, or a method of one: then what the
            model holds is an input, too. Without it, `jit` is a decorator with arguments.
        static_argnums: Arguments whose numbers are static, because they decide shapes or branches.

    Raises:
        TransformError: There are no arrays, or NumPy's alone.
        MixedDevicesError: Arrays of several backends; NumPy's may go along to JAX.

    Warns:
        NotCompiledWarning: The function runs uncompiled; says why.

    Examples:
        >>> import fmapper, jax.numpy as jnp
        >>> @fmapper.jit
        ... def step(model, gradient, lr):
        ...     return fmapper.fmap(lambda p, g: p - lr * g, model, gradient)
        >>> step({"w": jnp.ones(2)}, {"w": jnp.ones(2)}, 0.5)
        {'w': Array([0.5, 0.5], dtype=float32)}
    """
    if fun is None:
        return functools.partial(jit, static_argnums=static_argnums)
    numbers = _numbers("static_argnums", static_argnums)
    owner, call = _owner_of(fun)
    if owner is not None:  # what it holds is an input, too
        inner = jit(call, static_argnums=[number + (number >= 0) for number in numbers])
        return functools.wraps(fun, updated=())(functools.partial(_call, inner, owner))
    programs: dict[str, Program] = {}
    checked: dict[int, Any] = {}
    hollowing = threading.RLock()
    reasons = _Reasons()
    said: list[str] = []

    def program_for(adapter: Adapter) -> Program:
        def run(arrays: Sequence[Any], key: Any) -> tuple[list[Any], Any]:
            memo: dict[Any, Any] = {}
            args, kwargs = key.filled(arrays, memo)
            result = fun(*(arg.value if type(arg) is _Fixed else arg for arg in args), **kwargs)
            changed = changes(key.boxes, memo)
            rest = structure_of(result, lambda leaf: adapter_of(leaf) is adapter)
            _refuse_results(rest, set())
            return [*rest.arrays, *(value for _, value in changed)], (
                rest,
                [change for change, _ in changed],
            )

        return adapter.compiled(run, reasons.add)

    def uncompiled(adapter: Adapter, args: Any, kwargs: Any) -> Any:
        try:
            result = fun(*args, **kwargs)
        except BaseException:
            if reasons.found:  # it may be for this error that nothing could be recorded
                reasons.found.clear()
                programs.pop(adapter.name, None)
            raise
        if reasons.found and not said:
            said.append(reasons.found[0])
            name = getattr(fun, "__qualname__", type(fun).__name__)
            warn(f"jit runs {name} uncompiled: {reasons.found[0]}", NotCompiledWarning)
        reasons.found.clear()
        return result

    @functools.wraps(fun, updated=())
    def compiled(*args: Any, **kwargs: Any) -> Any:
        sync()
        given = list(args)
        for number in numbers:
            place = _place(number, args)
            given[place] = _Fixed(args[place])
        key = structure_of((given, kwargs), numbers=True, shown=_named(args, kwargs))
        if any(id(leaf) not in checked for leaf in key.opaque):
            _refuse_holders(key, _named(args, kwargs))
            if len(checked) > _CHECKED:
                checked.clear()
            checked.update((id(leaf), leaf) for leaf in key.opaque)
        adapter = _backend(key.arrays, "compile", _named(args, kwargs))
        if adapter.name not in programs:
            programs[adapter.name] = program_for(adapter)
        found = programs[adapter.name](key.arrays, key)
        boxes = key.boxes
        key.tree, key.arrays, key.boxes = None, [], []  # the program outlives them
        if found is None:
            return uncompiled(adapter, args, kwargs)
        out, (rest, changed) = found
        if changed:
            out, effects = out[: -len(changed)], out[-len(changed) :]
            for change, effect in zip(changed, effects, strict=True):
                put_into(boxes, change, effect)
        with hollowing:
            if not rest.hollow:  # it holds what stood for arrays while they were recorded
                rest.hollowed(adapter.hollow)
        return rest.filled(out)

    return compiled


class _Reasons(threading.local):
    """Why the call that this thread is in could not be compiled."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, reason: str) -> None:
        self.found.append(reason)


def _owner_of(fun: Any) -> tuple[Any, Callable[..., Any]]:
    """The model that a function is, or is a method of, and the function that takes it first."""
    sync()
    if isinstance(fun, types.MethodType) and node_type_of(fun.__self__) is not None:
        return fun.__self__, fun.__func__
    if node_type_of(fun) is not None:
        return fun, _call
    return None, fun


def _call(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return fun(*args, **kwargs)


Program = Callable[[list[Any], Structure], "tuple[Sequence[Any], Any] | None"]


@functor(children=("value",))
class _Fixed:
    """An argument whose numbers are static, as they are in every functor."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _backend(arrays: Sequence[Any], verb: str, trees: Any) -> Adapter:
    """Whose arrays these are; those of the host may go along with an adapter that takes them."""
    found: dict[str, Any] = {}
    for array in arrays:
        adapter = adapter_of(array)
        if adapter is not None:
            found.setdefault(adapter.name, array)
    if not found:
        raise TransformError(
            f"cannot {verb} this call: there are no arrays among the arguments, which would say "
            "where it is to run."
        )
    others = {name for name, array in found.items() if not _adapter(array).host_only}
    if others and all(_adapter(found[name]).takes_host_arrays for name in others):
        found = {name: found[name] for name in others}
    if len(found) > 1:
        _refuse_mixture({name: _path_of(array, trees) for name, array in found.items()})
    return _transforming(next(iter(found.values())), verb)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What was given, so that paths in it read well."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return {**dict(enumerate(args)), **kwargs}


def _refuse_holders(structure: Structure, trees: Any) -> None:
    """An object that nobody declared would be static, with the arrays that it holds."""

    def where(x: Any) -> Any:
        return next(link for link, leaf, _ in visit(trees, once=True) if leaf is x)

    for leaf in structure.opaque:
        if not isinstance(leaf, _FUNCTIONS):
            check_leaf(leaf, where, leaf)


def _refuse_results(structure: Structure, checked: set[int]) -> None:
    """An undeclared object would carry what stands for arrays out of the transformation."""
    if hash(structure) not in checked:
        _refuse_holders(structure, structure.tree)
        checked.add(hash(structure))


def _path_of(array: Any, trees: Any) -> str:
    link = next(link for link, leaf, _ in visit(trees, once=True) if leaf is array)
    return format_link(link)
