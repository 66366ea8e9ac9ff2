"""The arrays of a tree by name, and how to load them into a tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from fmapper.backends.arrays import Arrays
from fmapper.backends.discovery import adapter_of, adapters, owner_of
from fmapper.backends.equality import equal_arrays
from fmapper.backends.meshes import Meshes
from fmapper.backends.models import Models
from fmapper.backends.undeclared import check_leaf
from fmapper.errors import ConversionError, PlacementError, StructureMismatchError
from fmapper.moves.carry import Route, carry_out
from fmapper.moves.view_ties import find_view_ties, remake
from fmapper.states.transient import transient_in
from fmapper.tracebacks import short_traceback
from fmapper.tree.fmap import fmap
from fmapper.tree.keypath import Link, format_link, name_of
from fmapper.tree.nodes import (
    ATOM,
    LEAVES,
    WITHOUT_IDENTITY,
    Item,
    Kind,
    NodeType,
    kind_of,
    sync,
)
from fmapper.tree.walk import visit, walk

T = TypeVar("T")


@short_traceback
def state(tree: Any, *, source: bool = False) -> dict[str, Any]:
    """Returns the arrays of a tree by dotted path; a tied array is under each of its paths.

    The key of a box, such as the `value` of a `flax.nnx.Param`, is left out.

    Args:
        tree: The tree.
        source: Whether to use the names and layouts of the model from which `convert` made this
            one, so that `load_state` accepts them for that model.

    Returns:
        A dict in the order of the walk. The arrays are those of the tree, not copies.

    Raises:
        CycleError: The tree has a cycle.
        NotAFunctorError: An undeclared object holds arrays, which the state would lack.
        StructureMismatchError: Two paths have the same name, because a key contains a dot.
        ConversionError: `source` is set, but the tree is not a converted model.

    Examples:
        >>> import fmapper, numpy as np
        >>> list(fmapper.state({"layers": [{"w": np.ones(2), "name": "a"}]}))
        ['layers.0.w']
    """
    sync()
    if source:
        return _by_source(tree)[0]
    return arrays_by_name(tree)


# A remedy for names that do not fit.
OF_STRUCTURED = (
    " For the arrays of a model that convert(..., structure=True) made of this one, use "
    "state(model, source=True), which has the names and layouts of the source."
)


@short_traceback
def load_state(
    tree: T, state: Mapping[str, Any], *, strict: bool = True, source: bool = False
) -> T:
    """Returns a new tree with the arrays of a state; it keeps backends, devices and dtypes.

    The result has the same ties as `tree`; a state may have a tied array under any of its names.
    The result shares no writable memory with the state.

    Args:
        tree: The tree to fill; it is not changed.
        state: Arrays by name, as `state` returns them; of any backend.
        strict: False keeps arrays that `state` lacks, and ignores extra ones in it. Buffers that
            torch leaves out of a `state_dict` may be missing in any case.
        source: Whether the state is that of the model from which `convert` made `tree`.

    Raises:
        StructureMismatchError: Names are missing or left over, a shape differs, `state` has
            different values for arrays that are tied, or the tree has no memory for them, which
            `materialize` gives it; the message lists all of them.
        LossyCastError: A value does not fit into the dtype of the tree.

    Examples:
        >>> import fmapper, numpy as np
        >>> model = {"w": np.zeros(2), "b": np.zeros(1)}
        >>> fmapper.load_state(model, {"w": np.array([1.0, 2.0])}, strict=False)["w"]
        array([1., 2.])
    """
    sync()
    of_model = _by_source(tree) if source else weights_of(tree)
    if of_model is not None:
        arrays, back = of_model
        unsaved = _transient_of_source(tree, arrays) if source and strict else frozenset()
        filled: T = back(_load(arrays, state, strict, tree, unsaved))
        return filled
    return _load(tree, state, strict, tree)


def _load(
    tree: T,
    state: Mapping[str, Any],
    strict: bool,
    like: Any,
    unsaved: Collection[str] = (),
) -> T:
    """Loads a state, which need not have what is unsaved, into the model `like` or its arrays."""
    named = named_arrays(tree)
    problems = left_over(tree, state, named, strict)
    if strict:
        given = {identity_of(name, old) for name, (_, old) in named.items() if name in state}
        missing = [n for n, (_, old) in named.items() if identity_of(n, old) not in given]
        transient = transient_in(like) if missing else ()
        problems += [
            f"{name}: missing from the state"
            for name in missing
            if id(named[name][1]) not in transient and name not in unsaved
        ]
    steps: dict[Any, tuple[str, Link, Route]] = {}
    places: dict[Any, Any] = {}
    for name, (link, old) in named.items():
        if name not in state:
            continue
        new = state[name]
        adapter = owner_of(old)
        if adapter_of(new) is None:
            problems.append(f"{name}: {type(new).__name__} is not an array")
            continue
        place, new = in_one_form(old, new)
        origin = owner_of(new)
        if (difference := _other_shape(adapter, place, origin, new)) is not None:
            problems.append(f"{name}: {difference}")
        elif (identity := identity_of(name, old)) not in steps:
            route = _route_to(len(steps), adapter, place, origin, new)
            steps[identity], places[identity] = (name, link, route), place
        elif not equal_arrays(state[steps[identity][0]], new):
            problems.append(f"{name}: tied to {steps[identity][0]}, but the state has other values")
    if problems:
        names = any(
            line.endswith((": missing from the state", "not in the tree")) for line in problems
        )
        hint = "\nstrict=False leaves missing arrays unchanged and ignores unexpected ones."
        hint += OF_STRUCTURED
        raise StructureMismatchError(
            "the state does not fit the tree:\n"
            + "\n".join(f"  {line}" for line in problems)
            + hint * names
        )
    links = [link for _, link, _ in steps.values()]
    routes = [route for *_, route in steps.values()]
    olds = [*places.values()]
    news = [route.arrays[0] for route in routes]
    # Writable arrays are copied into separate memory, or the first step of a training would change
    # the state, and arrays that are tied there but not here. Arrays divided among devices are
    # copied part by part, unless they are of the same framework.
    arrays = news
    for copy in (None, True):
        chosen = [
            route for route, old in zip(routes, olds, strict=True) if copy is _copy_of(route, old)
        ]
        arrays = carry_out(chosen, arrays, links.__getitem__, copy=copy, ties=False)
    loaded = {
        identity: from_one_form(_put(array, old, name), old, named[name][1])
        for (identity, (name, *_)), array, old in zip(steps.items(), arrays, olds, strict=True)
    }
    _restore_views(
        {identity: (name, named[name][1]) for identity, (name, *_) in steps.items()}, loaded
    )
    identities = {name: identity_of(name, array) for name, (_, array) in named.items()}
    return refill(
        tree,
        lambda link, leaf: loaded.get(identities.get(name_of(link)), leaf),
    )


def arrays_by_name(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by name, as `state` does."""
    of_model = weights_of(tree)
    if of_model is not None:
        return of_model[0]
    return {name: array for name, (_, array) in named_arrays(tree).items()}


def weights_of(tree: Any) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
    """Returns the arrays of a model by its own names for them, and the inverse function.

    None for a tree whose arrays are named by their paths.
    """
    for adapter in adapters(Models):
        weights = adapter.weights(tree)
        if weights is not None:
            return weights
    return None


def in_one_form(old: Any, new: Any) -> tuple[Any, Any]:
    """Returns an array and its replacement in the same form: as words if only one is a key."""
    adapter, origin = owner_of(old), owner_of(new)
    if bool(adapter.stays(old)) == bool(origin.stays(new)):
        return old, new
    return adapter.portable(old), origin.portable(new)


def from_one_form(new: Any, form: Any, old: Any) -> Any:
    """Returns a new array in the form of the old one, for which `in_one_form` returned `form`."""
    return new if form is old else owner_of(old).from_portable(new, old)


def _by_source(tree: Any) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Returns the arrays of a converted model as its source has them, and the inverse function.

    Raises:
        ConversionError: The tree is not a converted model.
    """
    for adapter in adapters(Models):
        weights = adapter.weights(tree) or adapter.source_weights(tree)
        if weights is not None:
            return weights
        program = adapter.program_of(tree)
        if program is not None:  # it has the source's names, and perhaps additional generators
            names = {str(i.target) for i in program.inputs if i.kind in ("parameter", "buffer")}
            names |= program.aliases.keys()
            arrays = {name: array for name, array in arrays_by_name(tree).items() if name in names}
            return arrays, lambda filled: _load(tree, filled, False, tree)
    raise ConversionError(
        f"{type(tree).__name__} has no other names for its arrays: only models from "
        "convert do. Omit source=True."
    )


def _transient_of_source(tree: Any, arrays: Mapping[str, Any]) -> frozenset[str]:
    """Returns the arrays that the state dict of a structured model's source leaves out."""
    for adapter in adapters(Models):
        weights = adapter.source_weights(tree, transient=False)
        if weights is not None:
            return frozenset(arrays.keys() - weights[0].keys())
    return frozenset()


def _other_shape(adapter: Arrays, old: Any, source: Arrays, new: Any) -> str | None:
    """Describes a mismatch between an array of a state and the array that it replaces."""
    try:
        wanted, given = adapter.shape(old), source.shape(new)
        device, origin = adapter.device(old), source.device(new)
    except (RuntimeError, TypeError) as error:  # an array has no shape, or was deleted
        return str(error)
    if device.kind == "meta" != origin.kind:
        return "the tree has no memory there, and load_state keeps devices: use materialize"
    return None if wanted == given else f"shape {given} in the state, {wanted} in the tree"


def _restore_views(places: Mapping[Any, tuple[str, Any]], loaded: dict[Any, Any]) -> None:
    """Makes loaded arrays views of one another where the old ones were.

    Args:
        places: Identity -> the name of the old array and the array.
        loaded: Identity -> the new array.

    Raises:
        StructureMismatchError: The values of a view differ from those of its base.
    """
    of_backend: dict[str, list[Any]] = {}
    for identity, (_, old) in places.items():
        of_backend.setdefault(owner_of(old).name, []).append(identity)
    for identities in of_backend.values():
        olds = [places[identity][1] for identity in identities]
        adapter = owner_of(olds[0])
        for tie in find_view_ties(olds, adapter) if adapter.may_share_memory(olds) else ():
            view, base = identities[tie.view], identities[tie.base]
            remade = remake(olds[tie.view], olds[tie.base], loaded[base], adapter, adapter)
            if remade is None:
                continue
            if not equal_arrays(remade, loaded[view]):
                raise StructureMismatchError(
                    f"the state does not fit the tree:\n  {places[view][0]}: a view of "
                    f"{places[base][0]}, but the state has other values"
                )
            loaded[view] = remade


def refill(tree: T, replace: Callable[[Link, Any], Any]) -> T:
    """Replaces the leaves of a tree by `replace(link, leaf)`, called once for each, in order."""
    new = [
        replace(link, leaf)
        for link, leaf, node_type in visit(tree, once=True)
        if node_type is None and kind_of(type(leaf)) is not ATOM
    ]
    pending = iter(new)
    return fmap(lambda leaf: leaf if kind_of(type(leaf)) is ATOM else next(pending), tree)


def at(link: Link) -> Callable[[Any], Link]:
    """Returns a function that always returns a link, for `check_leaf`."""
    return lambda _: link


def _leaves(tree: Any) -> Iterator[Any]:
    return (leaf for _, leaf, node_type in visit(tree, once=True) if node_type is None)


def identity_of(name: str, array: Any) -> Any:
    """Returns an identity that tied arrays share; constants such as `np.True_` are not tied."""
    return name if kind_of(type(array)) in WITHOUT_IDENTITY else id(array)


def named_arrays(tree: Any) -> dict[str, tuple[Link, Any]]:
    """Returns the arrays of a tree by name, each with its link.

    Constants of programs, which no state has, are left out.
    """
    named: dict[str, tuple[Link, Any]] = {}
    for link, leaf, node_type, _ in walk(tree, once=False, enter=items_in_state):
        if node_type is None and adapter_of(leaf) is None:
            check_leaf(leaf, at(link), others=lambda: _leaves(tree))
        elif node_type is None:
            name = name_of(link)
            if name in named:
                raise StructureMismatchError(
                    f"{format_link(link)} and {format_link(named[name][0])} are both called "
                    f"{name!r} in a state, which joins keys with dots. Rename one of the keys."
                )
            named[name] = (link, leaf)
    return named


def items_in_state(value: Any, kind: NodeType | Kind) -> Iterable[Item] | None:
    """Returns the children of a node whose arrays belong to a state; None for a leaf."""
    if kind in LEAVES:
        return None
    if not isinstance(kind, NodeType):
        return ()
    if kind.constants is None:
        return kind.items(value)
    constants = kind.constants(value)
    return [item for item in kind.items(value) if item[0] not in constants]


def constants_in(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree that no state has, by name."""
    named: dict[str, Any] = {}
    for link, node, node_type in visit(tree):
        if isinstance(node_type, NodeType) and node_type.constants is not None:
            keys = node_type.constants(node)
            parts = {key: part for key, part in node_type.items(node) if key in keys}
            named |= {
                ".".join(filter(None, (name_of(link), name_of(at)))): array
                for at, array, inner in visit(parts)
                if inner is None and adapter_of(array) is not None
            }
    return named


def left_over(
    tree: Any, state: Mapping[str, Any], named: Mapping[str, tuple[Link, Any]], strict: bool
) -> list[str]:
    """Describes the entries of a state whose names are not those of arrays of a tree.

    Without `strict`, describes only arrays that would be dropped because the tree has another
    object there, and floats that would be cast although an extra entry may hold their scales.
    """
    left = [name for name in state if name not in named]
    if not left:
        return []
    plain = {
        name_of(link): leaf
        for link, leaf, node_type in visit(tree)
        if node_type is None and adapter_of(leaf) is None
    }
    kinds = {n: "not an array" if adapter_of(state[n]) is None else "an array" for n in left}
    problems = [
        f"{name}: {kinds[name]} in the state, but the tree has {plain[name]!r} there"
        if name in plain
        else f"{name}: in the state, but not in the tree"
        for name in left
        if strict or (name in plain and kinds[name] == "an array")
    ]
    narrow = {n: x for n, x in state.items() if n in named and _is_narrow(x) and not strict}
    return problems + [
        f"{name}: would be cast from floats of 8 bits without their scales, if {left[0]} has some"
        for name in narrow
        if not _is_narrow(named[name][1])
    ]


def _is_narrow(array: Any) -> bool:
    adapter = adapter_of(array)
    return adapter is not None and adapter.dtype(array).startswith("float8")


def _route_to(place: int, adapter: Arrays, old: Any, source: Arrays, new: Any) -> Route:
    """Returns a mover to the backend, device and dtype of the old array.

    For an array on a mesh, values are cast on their own device, before they are divided.
    """
    dtype, origin = source.dtype(new), source.device(new)
    wanted = held = adapter.dtype(old)
    target, device = adapter, adapter.device(old)
    if _is_on_mesh(old):
        target, device, held = source, origin, source.storable(wanted) or dtype
    return Route(source, target, origin, device, dtype, held, held, [place], [new])


def _copy_of(route: Route, old: Any) -> bool | None:
    """Returns the `copy` option for values that replace an old array; None copies if needed."""
    is_apart = _is_on_mesh(old) and route.source is not owner_of(old)
    return None if route.source.frozen or is_apart else True


def _put(array: Any, old: Any, name: str) -> Any:
    """Returns values, already in the dtype of an old array, in the form that replaces it.

    Raises:
        PlacementError: The old array is divided unevenly, which its framework cannot repeat.
    """
    if not _is_on_mesh(old):
        return owner_of(old).like(array, old)
    placed = place_as_before(old, array)
    if placed is None:
        raise PlacementError(
            f"{name}: {owner_of(old).name} cannot divide new values unevenly, as the old array is. "
            f"Shard it evenly first, with fmapper.shard."
        )
    return placed


def place_as_before(old: Any, new: Any) -> Any:
    """Shards new values like the array they replace; None if it is not on a mesh."""
    if not _is_on_mesh(old):
        return None
    from fmapper.moves.onto_mesh import place_as  # few trees need it

    return place_as(old, new)


def _is_on_mesh(array: Any) -> bool:
    adapter = adapter_of(array)
    return isinstance(adapter, Meshes) and adapter.layout(array) is not None
