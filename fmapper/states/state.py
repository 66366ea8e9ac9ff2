"""The arrays of a tree by name, and as one vector; and the way back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from fmapper.backends.arrays import Arrays
from fmapper.backends.device import common_device
from fmapper.backends.discovery import adapter_of
from fmapper.backends.equality import equal_arrays
from fmapper.backends.namespace import array_namespace
from fmapper.backends.undeclared import check_leaf
from fmapper.errors import FmapperError, StructureMismatchError, UnsupportedLeafError
from fmapper.moves.carry import Route, carry_out
from fmapper.moves.view_ties import find_view_ties, remake
from fmapper.tracebacks import short_traceback
from fmapper.transforms.trainable import Trained
from fmapper.tree.fmap import fmap
from fmapper.tree.keypath import Link, format_link, name_of
from fmapper.tree.nodes import ATOM, WITHOUT_IDENTITY, kind_of, sync
from fmapper.tree.walk import visit

T = TypeVar("T")


@short_traceback
def state(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by dotted path; a tied array is under each of its paths.

    The key of a box, such as the `value` of a `flax.nnx.Param`, is left out.

    Returns:
        A dict in the order of the walk. The arrays are those of the tree, not copies.

    Raises:
        CycleError: The tree has a cycle.
        NotAFunctorError: An object that nobody declared holds arrays, so the state would lack them.
        StructureMismatchError: Two paths have the same name, because a key has a dot in it.

    Examples:
        >>> import fmapper, numpy as np
        >>> list(fmapper.state({"layers": [{"w": np.ones(2), "name": "a"}]}))
        ['layers.0.w']
    """
    sync()
    return {name: array for name, (_, array) in named_arrays(tree).items()}


@short_traceback
def load_state(tree: T, state: Mapping[str, Any], *, strict: bool = True) -> T:
    """Returns a new tree with the arrays of a state; backend, device and dtype stay.

    What is tied in `tree` is tied in the result, and nothing else is. The result shares no memory
    with the state that could be written to.

    Args:
        tree: The tree to fill; it is not changed.
        state: Arrays by name, as `state` gives them; of any backend.
        strict: False leaves arrays that `state` lacks as they are, and ignores what is left over.

    Raises:
        StructureMismatchError: Names are missing or left over, a shape differs, or `state` has
            different values for arrays that are tied; the message lists all of them.
        LossyCastError: A value does not fit into the dtype of the tree.

    Examples:
        >>> import fmapper, numpy as np
        >>> model = {"w": np.zeros(2), "b": np.zeros(1)}
        >>> fmapper.load_state(model, {"w": np.array([1.0, 2.0])}, strict=False)["w"]
        array([1., 2.])
    """
    sync()
    named = named_arrays(tree)
    problems: list[str] = []
    if strict:
        problems += [f"{name}: missing from the state" for name in named if name not in state]
        plain = _plain_values(tree)
        problems += [
            f"{name}: an array in the state, but the tree has {plain[name]!r} there"
            if name in plain
            else f"{name}: in the state, but not in the tree"
            for name in state
            if name not in named
        ]
    steps: dict[Any, tuple[str, Link, Route]] = {}
    for name, (link, old) in named.items():
        if name not in state:
            continue
        new = state[name]
        adapter, source = _adapter_of(old), adapter_of(new)
        if source is None:
            problems.append(f"{name}: {type(new).__name__} is not an array")
        elif (difference := _other_shape(adapter, old, source, new)) is not None:
            problems.append(f"{name}: {difference}")
        elif (identity := identity_of(name, old)) not in steps:
            route = _route_to(len(steps), adapter, old, source, new)
            steps[identity] = name, link, route
        elif not equal_arrays(state[steps[identity][0]], new):
            problems.append(f"{name}: tied to {steps[identity][0]}, but the state has other values")
    if problems:
        names = any(
            line.endswith((": missing from the state", "not in the tree")) for line in problems
        )
        hint = "\nstrict=False leaves missing arrays unchanged and ignores unexpected ones."
        raise StructureMismatchError(
            "the state does not fit the tree:\n"
            + "\n".join(f"  {line}" for line in problems)
            + hint * names
        )
    links = [link for _, link, _ in steps.values()]
    routes = [route for *_, route in steps.values()]
    news = [route.arrays[0] for route in routes]
    # What can be written to is copied, and apart from the rest, or the first step of a training
    # would change the state, and places that are tied there but not here.
    arrays = news
    for frozen in (True, False):
        own = [route for route in routes if route.source.frozen is frozen]
        copy = None if frozen else True
        arrays = carry_out(own, arrays, links.__getitem__, copy=copy, ties=False)
    loaded = {
        identity: _adapter_of(named[name][1]).like(array, named[name][1])
        for (identity, (name, *_)), array in zip(steps.items(), arrays, strict=True)
    }
    _restore_views(
        {identity: (name, named[name][1]) for identity, (name, *_) in steps.items()}, loaded
    )
    identities = {name: identity_of(name, array) for name, (_, array) in named.items()}
    return refill(
        tree,
        lambda link, leaf: loaded.get(identities.get(name_of(link)), leaf),
    )


def _other_shape(adapter: Arrays, old: Any, source: Arrays, new: Any) -> str | None:
    """Describes what is wrong with an array of a state, or with the array that it replaces."""
    try:
        wanted, given = adapter.shape(old), source.shape(new)
        adapter.device(old), source.device(new)
    except (RuntimeError, TypeError) as error:  # one of them has none, or was deleted
        return str(error)
    return None if wanted == given else f"shape {given} in the state, {wanted} in the tree"


def _restore_views(places: Mapping[Any, tuple[str, Any]], loaded: dict[Any, Any]) -> None:
    """Makes loaded arrays views of one another where the old ones were.

    Args:
        places: Identity -> the name of the old array and the array.
        loaded: Identity -> the new array.

    Raises:
        StructureMismatchError: A view is to have other values than its base.
    """
    of_backend: dict[str, list[Any]] = {}
    for identity, (_, old) in places.items():
        of_backend.setdefault(_adapter_of(old).name, []).append(identity)
    for identities in of_backend.values():
        olds = [places[identity][1] for identity in identities]
        adapter = _adapter_of(olds[0])
        for tie in find_view_ties(olds, adapter) if adapter.may_share_memory(olds) else ():
            view, base = identities[tie.view], identities[tie.base]
            seen = remake(olds[tie.view], olds[tie.base], loaded[base], adapter, adapter)
            if seen is None:
                continue
            if not equal_arrays(seen, loaded[view]):
                raise StructureMismatchError(
                    f"the state does not fit the tree:\n  {places[view][0]}: a view of "
                    f"{places[base][0]}, but the state has other values"
                )
            loaded[view] = seen


@short_traceback
def destructure(tree: T) -> tuple[Any, Callable[[Any], T]]:
    """Flattens the trainable arrays of a tree to one vector; returns it and the inverse.

    Those are the floating and complex arrays, less what is not trained; see `trainables`. A tied
    array is in the vector once. The vector has the dtype to which those of the arrays
    promote; the way back gives every array its own dtype again (a real one takes the real part),
    ties what was tied, and carries all else over. It can be differentiated, jitted and vmapped.

    Returns:
        The vector, of shape (n,), and `rebuild(vector) -> tree`.

    Raises:
        MixedDevicesError: The arrays are not on one device of one backend.
        NotAFunctorError: An object that nobody declared holds arrays.

    The idea is that of `Optimisers.destructure`, https://fluxml.ai/Optimisers.jl.

    Examples:
        >>> import fmapper, numpy as np
        >>> vector, rebuild = fmapper.destructure({"w": np.ones((2, 2)), "n": 3})
        >>> vector, rebuild(2 * vector)["w"].tolist()
        (array([1., 1., 1., 1.]), [[2.0, 2.0], [2.0, 2.0]])
    """
    sync()
    trained = Trained(tree)
    arrays, links = [], []
    for link, leaf, node_type in visit(tree, once=True):
        if node_type is None and leaf in trained:
            arrays.append(leaf)
            links.append(link)
        elif node_type is None and adapter_of(leaf) is None:
            check_leaf(leaf, _at(link))
    common_device(zip(links, arrays, strict=True))
    flat = [_flatten(array, link) for array, link in zip(arrays, links, strict=True)]
    shapes = [_adapter_of(array).shape(array) for array in arrays]
    total = sum(map(math.prod, shapes))
    if not arrays:
        from array_api_compat import numpy

        vector = cast(Any, numpy).zeros((0,))
    else:
        vector = _join(flat, links)

    def rebuild(vector: Any) -> Any:
        adapter = adapter_of(vector)
        if adapter is None or adapter.shape(vector) != (total,):
            shape = None if adapter is None else adapter.shape(vector)
            raise StructureMismatchError(
                f"destructure: expected a vector of shape ({total},), got shape {shape}."
            )
        starts = itertools.accumulate(map(math.prod, shapes), initial=0)
        pieces = (
            _piece(vector[start : start + math.prod(shape)], array, shape)
            for start, array, shape in zip(starts, arrays, shapes, strict=False)
        )
        return refill(tree, lambda _, leaf: next(pieces) if leaf in trained else leaf)

    return vector, rebuild


def _flatten(array: Any, link: Link) -> Any:
    """Returns an array in one dimension.

    Raises:
        UnsupportedLeafError: It has no shape or no strides; names the path.
    """
    adapter = _adapter_of(array)
    try:
        adapter.shape(array)
        if adapter.is_freed(array):
            adapter.check(array)
        xp: Any = array_namespace(array)
        return xp.reshape(array, (-1,))
    except FmapperError:
        raise
    except Exception as error:
        raise _no_part(array, link, str(error)) from error


def _join(parts: Sequence[Any], links: Sequence[Link]) -> Any:
    """Returns flat arrays as one vector of the dtype that they promote to.

    Raises:
        UnsupportedLeafError: One does not promote, or has no values; names the path.
    """
    xp: Any = array_namespace(parts)
    try:
        dtype = xp.result_type(*parts)
        return xp.concat([xp.astype(part, dtype) for part in parts])
    except Exception as error:
        for part, link in zip(parts, links, strict=True):
            try:
                _adapter_of(part).check(part)
                xp.concat([xp.astype(part, xp.result_type(part, parts[0]))] * 2)
            except Exception as why:
                own, first = (_adapter_of(one).dtype(one) for one in (part, parts[0]))
                if own != first:
                    why = TypeError(f"{why} ({own}, and {first} at {format_link(links[0])})")
                raise _no_part(part, link, str(why)) from error
        raise


def _no_part(array: Any, link: Link, reason: str) -> UnsupportedLeafError:
    """Returns the error for an array that cannot be a part of a vector."""
    try:
        _adapter_of(array).check(array)
    except TypeError as why:
        reason = str(why)
    return UnsupportedLeafError(
        f"{format_link(link)}: cannot be a part of a vector: {reason.rstrip('.')}. Convert it "
        "first, or declare the trained children: @fmapper.functor(trainable=(...))."
    )


def refill(tree: T, replace: Callable[[Link, Any], Any]) -> T:
    """Replaces the leaves of a tree by `replace(link, leaf)`, called once for each, in order."""
    new = [
        replace(link, leaf)
        for link, leaf, node_type in visit(tree, once=True)
        if node_type is None and kind_of(type(leaf)) is not ATOM
    ]
    pending = iter(new)
    return fmap(lambda leaf: leaf if kind_of(type(leaf)) is ATOM else next(pending), tree)


def _at(link: Link) -> Callable[[Any], Link]:
    return lambda _: link


def identity_of(name: str, array: Any) -> Any:
    """Returns the identity that tied places share; constants such as `np.True_` are not tied."""
    return name if kind_of(type(array)) in WITHOUT_IDENTITY else id(array)


def _piece(part: Any, like: Any, shape: tuple[int, ...]) -> Any:
    xp: Any = array_namespace(part)
    own, wanted = _adapter_of(part).dtype(part), _adapter_of(like).dtype(like)
    if own.startswith("complex") and not wanted.startswith("complex"):
        part = xp.real(part)
    return _adapter_of(like).like(xp.astype(xp.reshape(part, shape), like.dtype), like)


def named_arrays(tree: Any) -> dict[str, tuple[Link, Any]]:
    """Returns the arrays of a tree by name, each with its link."""
    named: dict[str, tuple[Link, Any]] = {}
    for link, leaf, node_type in visit(tree):
        if node_type is None and adapter_of(leaf) is None:
            check_leaf(leaf, _at(link))
        elif node_type is None:
            name = name_of(link)
            if name in named:
                raise StructureMismatchError(
                    f"{format_link(link)} and {format_link(named[name][0])} are both called "
                    f"{name!r} in a state, which joins keys with dots. Rename one of the keys."
                )
            named[name] = (link, leaf)
    return named


def _plain_values(tree: Any) -> dict[str, Any]:
    """Returns the leaves that are not arrays, by name, for error messages."""
    return {
        name_of(link): leaf
        for link, leaf, node_type in visit(tree)
        if node_type is None and adapter_of(leaf) is None
    }


def _route_to(place: int, adapter: Arrays, old: Any, source: Arrays, new: Any) -> Route:
    """Returns a mover to the backend, device and dtype of the old array."""
    dtype = adapter.dtype(old)
    return Route(
        source,
        adapter,
        source.device(new),
        adapter.device(old),
        source.dtype(new),
        dtype,
        dtype,
        [place],
        [new],
    )


def _adapter_of(array: Any) -> Arrays:
    found = adapter_of(array)
    assert found is not None
    return found
