"""`fmap` and its relatives; `tree_map` has the walk itself."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast, overload

from fmapper.tracebacks import short_traceback, shorten_traceback
from fmapper.tree.classes import has_class_attribute
from fmapper.tree.keypath import KeyPath
from fmapper.tree.nodes import sync
from fmapper.tree.tree_map import (
    UNSET,
    Default,
    TreeFunction,
    TreeMap,
    Walk,
    structural_walk,
)
from fmapper.tree.walk import visit

if TYPE_CHECKING:
    from fmapper.array_types import Array, ArrayFunction, Named, Old

Function = Callable[..., Any]
T = TypeVar("T")
K = TypeVar("K")
New = TypeVar("New")


class _Options(TypedDict, total=False):
    is_leaf: Callable[..., bool] | None  # after the path, if there are paths
    cache: dict[Any, Any] | Default | None
    prune: Any


# The type of a builtin container's items is that of `f`'s results; other nodes keep their class.
# fmt: off
@overload
def fmap(f: ArrayFunction[New], tree: Array, **options: Unpack[_Options]) -> New: ...
@overload
def fmap(f: ArrayFunction[New], tree: dict[K, Old], **options: Unpack[_Options]) -> dict[K, New]: ...  # noqa: E501
@overload
def fmap(f: ArrayFunction[New], tree: list[Old], **options: Unpack[_Options]) -> list[New]: ...
@overload
def fmap(f: ArrayFunction[New], tree: Named, **options: Unpack[_Options]) -> Named: ...
@overload
def fmap(f: ArrayFunction[New], tree: tuple[Old, ...], **options: Unpack[_Options]) -> tuple[New, ...]: ...  # noqa: E501
@overload
def fmap(f: TreeFunction, tree: T, **options: Unpack[_Options]) -> T: ...
@overload
def fmap(f: Function, tree: dict[K, Any], *rest: Any, **options: Unpack[_Options]) -> dict[K, Any]: ...  # noqa: E501
@overload
def fmap(f: Function, tree: list[Any], *rest: Any, **options: Unpack[_Options]) -> list[Any]: ...
@overload
def fmap(f: Function, tree: T, *rest: Any, **options: Unpack[_Options]) -> T: ...
@overload
def fmap(f: Function, tree: Any, *rest: Any, walk: Walk | None, **options: Unpack[_Options]) -> Any: ...  # noqa: E501
# fmt: on
def fmap(
    f: Callable[..., Any] | TreeFunction,
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    cache: dict[Any, Any] | Default | None = UNSET,
    prune: Any = UNSET,
    walk: Walk | None = None,
) -> Any:
    """Applies `f` to every leaf of a tree and rebuilds the tree around the results.

    The input is never changed. The same object at two places is mapped once and the result is the
    same object at both places; cycles through nodes with the default rebuild are kept. Numbers,
    strings, None and `()` have no identity: `f` gets them at every place.

    Args:
        f: `f(leaf, *rest_leaves) -> new leaf`, or a mover.
        tree: Anything. Its structure is the structure of the result.
        rest: Trees of the same structure, possibly of other classes or plain dicts with the same
            keys. Where `tree` has a leaf they may have anything; `f` gets it. Where one is a
            gradient that has `no_gradient` there, the leaf stays as it is.
        is_leaf: `is_leaf(node) -> bool`: nodes for which it is true are leaves too.
        cache: None switches the memo off, so that ties are not kept. A dict of your own is used
            as the memo, so that ties are kept across calls: `cache[id(x)]` is the result for x, and
            `cache[id(cache)]` a list of everything that must stay alive for the ids to be valid,
            as in `copy.deepcopy`.
        prune: A value to put at every later occurrence of a leaf or node.
        walk: `walk(recurse, node, *rest_nodes) -> result`, called for every node instead of the
            default, which maps all children with `recurse(child, *rest_children)` and rebuilds.

    Returns:
        A new tree of the same structure.

    Raises:
        StructureMismatchError: A tree in `rest` differs from `tree`; the message names the path.
        CycleError: A cycle runs through a tuple or a node with a rebuild of its own.
        RebuildError: A node could not be rebuilt.
        Exception: Whatever `f` raises, with a note that says at which path.

    The behaviour follows Functors.jl, https://fluxml.ai/Functors.jl.

    Examples:
        >>> import fmapper
        >>> w = [1, 2]
        >>> new = fmapper.fmap(lambda x: 10 * x, {"encoder": w, "decoder": w, "name": None})
        >>> new, new["encoder"] is new["decoder"]
        ({'encoder': [10, 20], 'decoder': [10, 20], 'name': None}, True)
        >>> fmapper.fmap(lambda p, g: p - g, {"w": [3, 4]}, {"w": (1, 1)})
        {'w': [2, 3]}
    """
    try:
        sync()
        mapping = TreeMap(cast(Any, f), is_leaf=is_leaf, cache=cache, prune=prune, walk=walk)
        if type(f) is not FunctionType and _takes_trees(f):
            if rest:
                raise TypeError(f"{f!r} takes one tree, but got {1 + len(rest)}.")
            mapping.look_first(cast(TreeFunction, f), tree)
        elif _takes_trees(tree):
            raise TypeError(f"fmap takes the function as its first argument: fmap({tree!r}, tree).")
        return mapping(tree, rest)
    except Exception as error:
        shorten_traceback(error)
        raise


def _takes_trees(f: object) -> bool:
    """Returns whether the class has `__fmap__`; instances such as nnx.Rngs have any name."""
    return has_class_attribute(type(f), "__fmap__")


# fmt: off
@overload
def fmap_with_path(f: Function, tree: dict[K, Any], *rest: Any, **options: Unpack[_Options]) -> dict[K, Any]: ...  # noqa: E501
@overload
def fmap_with_path(f: Function, tree: list[Any], *rest: Any, **options: Unpack[_Options]) -> list[Any]: ...  # noqa: E501
@overload
def fmap_with_path(f: Function, tree: T, *rest: Any, **options: Unpack[_Options]) -> T: ...
@overload
def fmap_with_path(f: Function, tree: Any, *rest: Any, walk: Walk | None, **options: Unpack[_Options]) -> Any: ...  # noqa: E501
# fmt: on
@short_traceback
def fmap_with_path(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[KeyPath, Any], bool] | None = None,
    cache: dict[Any, Any] | Default | None = UNSET,
    prune: Any = UNSET,
    walk: Walk | None = None,
) -> Any:
    """Maps like `fmap`, with `f(path, leaf, *rest_leaves)` and `is_leaf(path, node)`.

    A tied leaf is mapped once, with its first path. A walk of your own is called as
    `walk(recurse, path, node, *rest)` and recurses with `recurse(path, child, *rest)`.

    Examples:
        >>> import fmapper
        >>> fmapper.fmap_with_path(lambda path, x: f"{path}={x}", {"a": [1, 2], "b": 3})
        {'a': ['a[0]=1', 'a[1]=2'], 'b': 'b=3'}
    """
    sync()
    return TreeMap(f, is_leaf=is_leaf, cache=cache, prune=prune, walk=walk, with_path=True)(
        tree, rest
    )


@short_traceback
def fmapstructure(f: Callable[..., Any], tree: Any, *rest: Any, **options: Unpack[_Options]) -> Any:
    """Maps like `fmap`, with plain dicts, lists and tuples in place of user classes.

    Examples:
        >>> import collections, fmapper
        >>> Point = collections.namedtuple("Point", "x y")
        >>> fmapper.fmapstructure(lambda x: -x, Point(1, [2, 3]))
        {'x': -1, 'y': [-2, -3]}
    """
    sync()
    return TreeMap(f, walk=structural_walk, **options)(tree, rest)


@short_traceback
def fmapstructure_with_path(
    f: Callable[..., Any], tree: Any, *rest: Any, **options: Unpack[_Options]
) -> Any:
    """Maps like `fmapstructure`, with `f(path, leaf, *rest_leaves)`."""
    sync()
    return TreeMap(f, walk=structural_walk, with_path=True, **options)(tree, rest)


@short_traceback
def fleaves(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Returns the leaves of a tree, depth first, one per occurrence.

    Raises:
        CycleError: The tree has a cycle, so the list would be infinite.

    Examples:
        >>> import fmapper
        >>> fmapper.fleaves({"b": [1, 2], "a": (3, None)})
        [1, 2, 3]
    """
    sync()
    return [value for _, value, node_type in visit(tree, is_leaf=is_leaf) if node_type is None]


@short_traceback
def fcollect(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Collects all nodes and leaves of a tree, depth first, parents first, each object once.

    Numbers and strings have no identity and are listed at every place. Cycles are followed once.

    Examples:
        >>> import fmapper
        >>> inner = [1, 2]
        >>> fmapper.fcollect({"a": inner, "b": inner})
        [{'a': [1, 2], 'b': [1, 2]}, [1, 2], 1, 2]
    """
    sync()
    return [value for _, value, _ in visit(tree, is_leaf=is_leaf, once=True)]
