"""Key paths: the place of a child in a tree, printed and parsed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias, overload

Link: TypeAlias = "tuple[Link, object] | None"
"""A path while walking: (link of the parent, key). A walk makes one pair per child, so that
memory stays linear in depth; a `KeyPath` is made only when someone looks."""

_TOKEN = re.compile(
    r"""\.?(?P<name>[^.\[\]]+)|\[(?P<literal>-?\d+|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")\]"""
)


class BoxKey(str):
    """The key of a box's content, where users do not think of the box as a level of its own.

    A `flax.nnx.Param` is a box: its array is looked up and printed as `layers[0].kernel.value`, but
    `state` leaves out the key and names the array `layers.0.kernel`.

    Examples:
        >>> BoxKey("value") == "value"
        True
    """

    __slots__ = ()


class KeyPath:
    """A path from the root of a tree to one of its nodes or leaves.

    Keys are attribute names, dict keys and indices; a `KeyPath` among them is spliced in. Paths are
    immutable, hashable, and compare by their keys.

    Examples:
        >>> path = KeyPath("layers", 0, "weight")
        >>> print(path)
        layers[0].weight
        >>> path[:2] == KeyPath("layers", 0), path + KeyPath("T"), len(path)
        (True, KeyPath('layers', 0, 'weight', 'T'), 3)
        >>> KeyPath.parse("layers[0].weight") == path
        True
    """

    __slots__ = ("_keys", "_link")
    _keys: tuple[object, ...] | None
    _link: Link

    def __init__(self, *keys: object) -> None:
        flat: list[object] = []
        for key in keys:
            flat.extend(key.keys if isinstance(key, KeyPath) else (key,))
        object.__setattr__(self, "_keys", tuple(flat))
        object.__setattr__(self, "_link", None)

    @classmethod
    def from_link(cls, link: Link) -> KeyPath:
        """Makes a path from a chain of (parent, key) pairs, which is unrolled on first use."""
        path = object.__new__(cls)
        object.__setattr__(path, "_keys", None)
        object.__setattr__(path, "_link", link)
        return path

    @classmethod
    def parse(cls, text: str) -> KeyPath:
        """Reads the printed form of a path back.

        Raises:
            ValueError: `text` is not a path in printed form.
        """
        keys: list[object] = []
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            name = token["name"] if token is not None else None
            if token is None or (
                name is not None and ((at > 0) != (text[at] == ".") or not name.isidentifier())
            ):
                raise ValueError(
                    f"{text!r} is not a key path: cannot parse {text[at:]!r}. "
                    "Write it like layers[0].weight or weights['my key']."
                )
            if name is not None:
                keys.append(name)
            else:
                keys.append(ast.literal_eval(token["literal"]))
            at = token.end()
        return cls(*keys)

    @property
    def keys(self) -> tuple[object, ...]:
        """The keys, root first."""
        if self._keys is None:
            keys: list[object] = []
            link = self._link
            while link is not None:
                link, key = link
                keys.append(key)
            object.__setattr__(self, "_keys", tuple(reversed(keys)))
            object.__setattr__(self, "_link", None)
        return self._keys or ()

    @property
    def parent(self) -> KeyPath:
        """The path without its last key; the root is its own parent."""
        return KeyPath(*self.keys[:-1])

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"KeyPath is immutable: cannot set {name!r}")

    def __reduce__(self) -> tuple[type[KeyPath], tuple[object, ...]]:
        return KeyPath, self.keys

    def __iter__(self) -> Iterator[object]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: slice) -> KeyPath: ...
    @overload
    def __getitem__(self, index: int) -> object: ...
    def __getitem__(self, index: int | slice) -> object:
        if isinstance(index, slice):
            return KeyPath(*self.keys[index])
        return self.keys[index]

    def __add__(self, other: object) -> KeyPath:
        if isinstance(other, KeyPath | tuple | list):
            return KeyPath(*self.keys, *other)
        return NotImplemented

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyPath) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash((KeyPath, self.keys))

    def __repr__(self) -> str:
        return f"KeyPath({', '.join(map(repr, self.keys))})"

    def __str__(self) -> str:
        return format_keys(self.keys, root="")


def format_keys(keys: Iterable[object], *, root: str = "model") -> str:
    """Prints keys as Python would reach them from `root`: `model.layers[0]['my key']`."""
    text = root + "".join(
        f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in keys
    )
    return text if root else text.removeprefix(".")


def name_of(place: Link | KeyPath) -> str:
    """Returns the dotted name of a path in a state, without the keys of boxes."""
    keys = (place if isinstance(place, KeyPath) else KeyPath.from_link(place)).keys
    return ".".join([str(key) for key in keys if type(key) is not BoxKey])


def format_link(link: Link) -> str:
    """Prints the path of a link, beginning with `model`."""
    return format_keys(KeyPath.from_link(link))
