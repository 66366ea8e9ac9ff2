"""Sharding rules: by pattern or class, by a function, or by the model itself."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from fmapper.backends.discovery import adapter_of, adapters
from fmapper.backends.meshes import Meshes, Packed
from fmapper.backends.models import Models
from fmapper.backends.nodes import Nodes
from fmapper.errors import PlacementError
from fmapper.meshes.bundles import names_in_bundle
from fmapper.meshes.layout import Axes
from fmapper.suggest import did_you_mean
from fmapper.tree.keypath import KeyPath, Link, format_keys, name_of
from fmapper.tree.nodes import NodeType, kind_of
from fmapper.tree.pattern import Pattern
from fmapper.tree.walk import walk

if TYPE_CHECKING:
    from fmapper.moves.place import Keep

Rule: TypeAlias = "Axes | Keep | None"
"""The axes of an array, `keep` for one that stays as it is, or None for one that is not divided."""

Rules: TypeAlias = "Mapping[Any, Rule] | Callable[[str, Any], Rule] | Axes | str | None"

Said: TypeAlias = "list[tuple[str, Any, Axes]]"

MODEL, DERIVE, LAYOUT = "model", "derive", "layout"
_NO_RULE: Final = ""
_WEAK = (_NO_RULE, "'*'")  # the rule can be overridden by another for the same array


class Found:
    """The axes of the arrays of a tree, by rules.

    Args:
        rules: The rules.
        tree: The tree.
        parts: The number of parts for each axis name of derived rules.

    Attributes:
        arrays: The arrays, each once, in the order of the walk.
        names: The first name of each, by id.
        links: The first place of each, by id.
        rules: By id: the axes, and the rule as the user wrote it.
        nodes: The nodes, in the order of the walk.
        packed: By id: the packing of an array that holds several side by side.
    """

    def __init__(self, rules: Rules, tree: Any, parts: Mapping[str, int]) -> None:
        self.arrays: list[Any] = []
        self.names: dict[int, str] = {}
        self.rules: dict[int, tuple[Rule, str]] = {}
        self.links: dict[int, Link] = {}
        self._leads: list[tuple[Any, Any]] = []
        self._aliases: dict[str, list[str]] = {}
        self.nodes: list[Any] = []
        self._in_bundle: dict[str, str] = {}
        if isinstance(rules, Mapping):
            self._by_patterns(rules, tree)
        elif isinstance(rules, tuple) or rules is None:
            self._by_patterns({"*": rules}, tree, may_be_empty=True)
        elif callable(rules):
            self._walk(tree)
            for array in self.arrays:
                name = self.names[id(array)]
                self.rules[id(array)] = rules(name, array), "the function"
        elif rules == LAYOUT:
            self._walk(tree)
            for array in self.arrays:
                try:
                    self.rules[id(array)] = _layout(array), LAYOUT
                except TypeError as error:
                    raise PlacementError(f"{self.where(array)}: {error}") from None
        else:
            self._walk(tree)
            self._by_model(rules, parts)
        for follower, lead in self._leads:
            if id(lead) in self.rules and _shape(follower) == _shape(lead):
                rule = self.rules[id(lead)][0]
                self.rules[id(follower)] = rule, f"as {self.names[id(lead)]}"
        self.packed = self._packings()

    def where(self, array: Any) -> str:
        """Returns the path of an array, for errors."""
        return format_keys(KeyPath.from_link(self.links[id(array)]))

    def _packings(self) -> dict[int, Packed]:
        """Returns the packings of arrays, also of an optimizer's arrays for packed parameters."""
        from fmapper.meshes.derivation import packed_arrays

        named, packings = {}, {}
        for node in self.nodes:
            for name, array, packed in packed_arrays(node):
                packings[id(array)] = packed
                named[name] = _shape(array), packed
        for array in self.arrays if named else ():
            match = _suffix(self.names[id(array)], named)
            if match is not None and named[match][0] == _shape(array):
                packings.setdefault(id(array), named[match][1])
        leads = ((follower, lead) for follower, lead in self._leads if id(lead) in packings)
        for follower, lead in leads:
            if _shape(follower) == _shape(lead):
                packings[id(follower)] = packings[id(lead)]
        return packings

    def _walk(self, tree: Any, state: Any = None, down: Any = None) -> None:
        for link, value, kind, inner in walk(tree, once=False, state=state, down=down):
            if kind is not None:
                self.nodes.append(value)
                self._know_aliases(value)
                if isinstance(kind, NodeType) and kind.follows:
                    self._leads += kind.follows(value)
            elif adapter_of(value) is not None:
                if id(value) not in self.names:
                    self.arrays.append(value)
                    self.names[id(value)] = name_of(link)
                    self.links[id(value)] = link
                self._meet(value, link, inner)

    def _know_aliases(self, node: Any) -> None:
        """Records the other names of arrays that are tied in the source of a converted model."""
        from fmapper.meshes.derivation import program_of

        program = program_of(node)
        for alias, name in program.aliases.items() if program is not None else ():
            self._aliases.setdefault(name, []).append(alias)

    def _names(self, link: Link) -> Iterator[str]:
        """Yields the name of an array at a place, and its aliases in the source."""
        yield (name := self._name(link))
        for first, others in self._aliases.items():
            if name == first or name.endswith(f".{first}"):
                yield from (f"{name.removesuffix(first)}{other}" for other in others)

    def _name(self, link: Link) -> str:
        name = name_of(link)
        return self._in_bundle.get(name, name)

    def _meet(self, array: Any, link: Link, state: Any) -> None:
        """Records the rules by pattern and class that match an array at a place."""

    # --- patterns and classes -------------------------------------------------------------------

    def _by_patterns(
        self, rules: Mapping[Any, Rule], tree: Any, *, may_be_empty: bool = False
    ) -> None:
        patterns = {rule: key_pattern(rule) for rule in rules if isinstance(rule, str)}
        classes = tuple(rule for rule in rules if isinstance(rule, type))
        for rule in rules:
            if not isinstance(rule, str | type):
                raise PlacementError(
                    f"a rule selects arrays by a path pattern or a class, not by {rule!r}."
                )
        order = {rule: at for at, rule in enumerate(sorted(rules, key=lambda r: r == "*"))}
        met: dict[Any, str] = {}
        won: set[Any] = set()

        lent: list[tuple[Any, Link, Any]] = []

        def down(above: Any, node: Any, key: Any, child: Any) -> Any:
            kind = kind_of(type(node))
            is_lent = isinstance(kind, NodeType) and key in kind.borrowed
            inside = (cls for cls in classes if isinstance(child, cls))
            return above[0].union(inside), above[1] or is_lent

        def meet(array: Any, link: Link, state: Any) -> None:
            if state[1]:  # an optimizer's copy of a model's array, whose rule decides
                lent.append((array, link, (state[0], False)))
                return
            for name in self._names(link):
                take(array, link, name, state[0])

        def take(array: Any, link: Link, name: str, inside: Iterable[Any]) -> None:
            matching = [rule for rule, p in patterns.items() if p.occurs_in(name)] + list(inside)
            for rule in matching:
                met.setdefault(rule, name)
            first = min(matching, key=order.__getitem__, default=None)
            won.add(first)
            entry = (None, _NO_RULE) if first is None else (rules[first], _name(first))
            earlier = self.rules.setdefault(id(array), entry)
            if earlier[1] in _WEAK and entry[1] != _NO_RULE:
                self.rules[id(array)] = entry
            elif entry[1] not in _WEAK and _plain(earlier[0]) != _plain(entry[0]):
                raise PlacementError(
                    f"{self.where(array)} and {self._place(name, link)} are the same array, but "
                    f"the rule {earlier[1]} says {earlier[0]!r} and the rule {entry[1]} says "
                    f"{entry[0]!r}. Make both rules agree, or untie the arrays."
                )

        self._meet = meet  # type: ignore[method-assign]
        self._in_bundle = names_in_bundle(tree)
        start = frozenset(cls for cls in classes if isinstance(tree, cls))
        self._walk(tree, (start, False), down)
        decided = set(self.rules)
        for array, link, state in lent:
            if id(array) not in decided:
                meet(array, link, state)
        problems = []
        for rule in order:
            if rule not in met:
                if may_be_empty and not self.arrays:
                    continue
                problems.append(f"the rule {_name(rule)} matches no array.{self._hint(rule)}")
            elif rule not in won:
                problems.append(
                    f"the rule {_name(rule)} never applies: earlier rules match all of its arrays, "
                    f"such as {met[rule]}. The first match applies, so move it before them."
                )
        if problems:
            raise PlacementError("\n".join(problems))

    def _place(self, name: str, link: Link) -> str:
        """Returns the path or alias of an array, for errors."""
        shown = self._name(link)
        return format_keys(KeyPath.from_link(link)) if name == shown else repr(name)

    def _hint(self, rule: Any) -> str:
        """Suggests what a rule that matches nothing may have meant."""
        if isinstance(rule, type):
            return (
                f" Nothing in this tree is a {rule.__qualname__}; a converted model has no such "
                "classes, only names."
            )
        keys = rule.strip("*.").split(".")
        candidates: dict[str, None] = {}
        for name in self.names.values():
            parts = name.split(".")
            starts = range(len(parts) - len(keys) + 1)
            candidates |= dict.fromkeys(".".join(parts[at : at + len(keys)]) for at in starts)
        return did_you_mean(".".join(keys), candidates)

    # --- rules from the model -------------------------------------------------------------------

    def _by_model(self, source: str, parts: Mapping[str, int]) -> None:
        named: dict[str, tuple[tuple[int, ...], Rule]] = {}
        for node in self.nodes:
            described = _derive(node, parts) if source == DERIVE else axes_of(node)
            for name, array, axes in described:
                self.rules[id(array)] = axes, source
                named[name] = _shape(array), axes
        if not self.rules:
            raise PlacementError(_NOTHING_SAID[source])
        for array in self.arrays:
            if id(array) in self.rules:
                continue
            match = _suffix(self.names[id(array)], named)
            if match is not None and named[match][0] == _shape(array):  # an optimizer's
                self.rules[id(array)] = named[match][1], f"as {match}"


def _derive(node: Any, parts: Mapping[str, int]) -> Said:
    """Derives the axes of arrays from the program of a node, if it has one."""
    from fmapper.meshes.derivation import derive_axes, program_of

    program = program_of(node)
    if program is None:
        return []
    arrays = arrays_of(node)
    axes = derive_axes(program, parts)
    return [(name, arrays[name], words) for name, words in axes.items() if name in arrays]


_NOTHING_SAID = {
    MODEL: (
        "nothing in this tree specifies its sharding, as transformers models do (tp_plan), models "
        "converted from them, and Flax variables with axes in their metadata. Write rules, "
        'such as {"up_proj.weight": ("model", None)}, or have them derived: rules="derive".'
    ),
    DERIVE: (
        "nothing in this tree has a program from which rules could be derived: convert the model, "
        'or write rules, such as {"up_proj.weight": ("model", None)}.'
    ),
}


def axes_of(node: Any) -> Said:
    """Returns name, array and axes of the arrays for which a node declares axes."""
    described = (adapter.axes(node) for adapter in adapters(Nodes))
    return [*next(filter(None, described), ())]


def arrays_of(model: Any) -> Mapping[str, Any]:
    """Returns the arrays of a converted model by their names in its program."""
    several = (adapter.weights(model) for adapter in adapters(Models))
    weights = next(filter(None, several), None)
    if weights is not None:
        return weights[0]
    if hasattr(model, "arrays_by_name"):
        arrays: Mapping[str, Any] = model.arrays_by_name()
        return arrays
    from fmapper.states.state import state

    return state(model)


def _suffix(name: str, named: Container[str]) -> str | None:
    """Returns the longest suffix of a name, in whole keys, that `named` contains."""
    keys = name.split(".")
    ends = (".".join(keys[at:]) for at in range(len(keys)))
    return next((end for end in ends if end in named), None)


def _layout(array: Any) -> Rule:
    """Returns the current axes of an array; None for one without a mesh."""
    adapter: Any = adapter_of(array)
    layout = adapter.layout(array) if isinstance(adapter, Meshes) else None
    return None if layout is None else layout[1]


def key_pattern(text: str) -> Pattern:
    """Parses a pattern that matches whole keys anywhere in a name."""
    return Pattern(text.strip("."), PlacementError)


def _plain(rule: Rule) -> Any:
    return tuple(rule) if isinstance(rule, Iterable) else rule


def _name(rule: Any) -> str:
    return repr(rule) if isinstance(rule, str) else rule.__qualname__


def _shape(array: Any) -> tuple[int, ...]:
    adapter = adapter_of(array)
    assert adapter is not None
    return adapter.shape(array)
