"""Recorded operations as one rule per array."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.checkpoints.rules.arithmetic import Offset, Scale, Sum
from fmapper.checkpoints.rules.joining import Concatenate, Split, Stack, Unstack
from fmapper.checkpoints.rules.layout import Cast, Reshape, Transpose
from fmapper.checkpoints.rules.naming import AddConstant, Tie
from fmapper.checkpoints.rules.rule import Rule
from fmapper.errors import CheckpointError

if TYPE_CHECKING:
    from fmapper.checkpoints.recording.graph import Node, Parts

NUMBER = "\x00"  # the placeholder in a name for the number of an array in a stack
OVER = "n"
_ON_ONE = ("reshape", "transpose", "cast", "offset", "scale")


class Step(NamedTuple):
    """A rule for arrays with names; steps of the same kind become one rule.

    Attributes:
        depth: The minimal number of steps before it.
        kind: The kind of rule.
        values: Its fields other than names.
        sources: The names that it consumes.
        targets: The names that it produces.
        numbers: The first and last number of a stack.
    """

    depth: int
    kind: str
    values: tuple[Any, ...]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    numbers: tuple[int, int] | None = None


MAKE: dict[str, Callable[[Sequence[str], Sequence[str], Any], Rule]] = {
    "tie": lambda a, b, _: Tie(a[0], b[0]),
    "transpose": lambda a, _, v: Transpose(a[0], v[0]),
    "cast": lambda a, _, v: Cast(a[0], *v),
    "offset": lambda a, _, v: Offset(a[0], *v),
    "scale": lambda a, _, v: Scale(a[0], *v),
    "sum": lambda a, b, _: Sum(a, b[0]),
    "constant": lambda _, b, v: AddConstant(b[0], *v),
    "reshape": lambda a, _, v: Reshape(a[0], *v),
    "concatenate": lambda a, b, v: Concatenate(a, b[0], *v),
    "split": lambda a, b, v: Split(a[0], b, *v),
    "stack": lambda a, b, v: Stack(a[0], b[0], OVER, *v),
    "unstack": lambda a, b, v: Unstack(a[0], b[0], OVER, *v),
}


class Steps:
    """The steps from leaves to outputs.

    Attributes:
        steps: The steps.
        names: The final name of each output -> its name after the steps.
    """

    def __init__(self, outputs: Mapping[str, Node], taken: Iterable[str]) -> None:
        self.steps: list[Step] = []
        self.names: dict[str, str] = {}
        self._taken = set(taken)
        self._finals = set(outputs)
        self._uses: Counter[int] = Counter()
        self._only: dict[int, Node] = {}
        self._outputs: dict[int, str] = {}
        for name, node in outputs.items():
            if id(node) in self._outputs:
                raise CheckpointError(f"{name} and {self._outputs[id(node)]} are the same array")
            self._outputs[id(node)] = name
        self._seen: dict[int, Node] = {}
        self._places: dict[int, tuple[str, int]] = {}
        for node in outputs.values():
            self._visit(node)
        for name, node in outputs.items():
            self.names[name] = self._place(node)[0]

    def _visit(self, node: Node) -> None:
        if id(node) in self._seen:
            return
        self._seen[id(node)] = node
        for parent in node.parents:
            self._visit(parent)
            self._only[id(parent)] = node
            if node.kind != "part" or node.value[1] == 0:
                self._uses[id(parent)] += 1
        if node.kind == "part":  # its siblings are made as well
            for other in node.value[0].nodes:
                self._visit(other)

    def _wish(self, node: Node) -> str | None:
        """Returns the final name of an array, if only steps with one array lead there."""
        while id(node) not in self._outputs:
            following = self._only.get(id(node))
            if following is None or self._uses[id(node)] != 1:
                return None
            if following.kind not in _ON_ONE:
                return None
            node = following
        return self._outputs[id(node)]

    def _new_name(self, node: Node, default: str, reusable: Sequence[str] = ()) -> str:
        name = self._wish(node)
        if name is None or (name in self._taken and name not in reusable):
            name = default
            while name in self._taken or name in self._finals:
                name += "#"
        self._taken.add(name)
        return name

    def _place(self, node: Node) -> tuple[str, int]:
        """Returns the current name of an array, and after how many steps."""
        if id(node) not in self._places:
            self._make(node)
        return self._places[id(node)]

    def _add(self, kind: str, values: Any, sources: Any, targets: Any, depth: int) -> None:
        self.steps.append(Step(depth, kind, tuple(values), tuple(sources), tuple(targets)))

    def _own(self, parent: Node) -> tuple[str, int]:
        """Returns a name for a step to consume, that of a copy if others need the array."""
        name, depth = self._place(parent)
        if self._uses[id(parent)] + (id(parent) in self._outputs) == 1:
            return name, depth
        self._uses[id(parent)] -= 1
        copy = f"{name}#"
        while copy in self._taken or copy in self._finals:
            copy += "#"
        self._taken.add(copy)
        self._add("tie", (), [name], [copy], depth + 1)
        self._places[id(parent)] = name, depth + 1
        return copy, depth + 1

    def _make(self, node: Node) -> None:
        if node.kind == "leaf":
            self._places[id(node)] = node.name, 0
        elif node.kind == "part":
            self._take_apart(node.parents[0], node.value[0])
        elif node.kind == "constant":
            name = self._new_name(node, "constant")
            self._add("constant", (node.shape, *node.value), [], [name], 1)
            self._places[id(node)] = name, 1
        elif node.kind in _ON_ONE:
            self._place(node.parents[0])
            if id(node) in self._places:  # splitting the parent has produced this one already
                return
            name, depth = self._own(node.parents[0])
            shapes = node.shape, node.parents[0].shape
            values = (node.value,) if node.kind == "transpose" else node.value or shapes
            self._add(node.kind, values, [name], [name], depth + 1)
            self._places[id(node)] = name, depth + 1
        else:
            self._join(node)

    def _join(self, node: Node) -> None:
        places = [self._own(parent) for parent in node.parents]
        names = [name for name, _ in places]
        depth = max(depth for _, depth in places) + 1
        folded = fold_numbers(names) if node.kind == "stack" else None
        default = folded[0].replace(f".{NUMBER}", "").replace(NUMBER, "") if folded else names[0]
        target = self._new_name(node, default, names)
        if node.kind == "concatenate":
            sizes = tuple(parent.shape[node.value] for parent in node.parents)
            values = (node.value,) if len({*sizes}) == 1 else (node.value, sizes)
            self._add("concatenate", values, names, [target], depth)
        elif node.kind == "sum":
            self._add("sum", (), names, [target], depth)
        elif folded is None:  # without numbers to stack by
            shape = node.parents[0].shape
            row = (*shape[: node.value], 1, *shape[node.value :])
            for name in names:
                self._add("reshape", (row, shape), [name], [name], depth)
            depth += 1
            if len(names) > 1:
                self._add("concatenate", (node.value,), names, [target], depth)
            else:
                target = names[0]
        else:
            name, numbers = folded
            step = Step(depth, "stack", (node.value,), (name,), (target,), numbers)
            self.steps.append(step)
        self._places[id(node)] = target, depth

    def _take_apart(self, parent: Node, parts: Parts) -> None:
        name, depth = self._own(parent)
        depth += 1
        items = [self._only.get(id(node)) for node in parts.nodes]
        rest = (*parent.shape[: parts.axis], *parent.shape[parts.axis + 1 :])
        if {*parts.sizes} == {1} and all(
            item is not None
            and (item.kind, item.shape) == ("reshape", rest)
            and self._uses[id(node)] == 1
            and id(node) not in self._outputs
            for item, node in zip(items, parts.nodes, strict=True)
        ):
            present = [item for item in items if item is not None]
            wishes = [self._wish(item) for item in present]
            names = [wish for wish in wishes if wish is not None and wish not in self._taken]
            stack = fold_numbers(names) if len(names) == len(present) else None
            if stack is not None:
                self._taken.update(names)
                target, numbers = stack
                self.steps.append(
                    Step(depth, "unstack", (parts.axis,), (name,), (target,), numbers)
                )
                for item, new in zip(present, names, strict=True):
                    self._places[id(item)] = new, depth
                for node in parts.nodes:  # no other step needs them
                    self._places[id(node)] = "", depth
                return
        targets = [
            self._new_name(node, f"{name}#{at}", [name]) for at, node in enumerate(parts.nodes)
        ]
        values = (parts.axis,) if len({*parts.sizes}) == 1 else (parts.axis, parts.sizes)
        self._add("split", values, [name], targets, depth)
        for node, target in zip(parts.nodes, targets, strict=True):
            self._places[id(node)] = target, depth


_NUMBERS = re.compile(r"\d+")


def fold_numbers(names: Sequence[str]) -> tuple[str, tuple[int, int]] | None:
    r"""Merges names that differ in one number into one name, and the first and last number.

    Examples:
        >>> fold_numbers(["a.0.w1", "a.1.w1"])
        ('a.\x00.w1', (0, 1))
    """
    if len(names) < 2:
        return None
    rows = [_NUMBERS.findall(name) for name in names]
    plain = {_NUMBERS.sub(NUMBER, name) for name in names}
    if len(plain) != 1:
        return None
    columns = list(zip(*rows, strict=True))
    varying = [at for at, column in enumerate(columns) if len({*column}) > 1]
    if len(varying) != 1:
        return None
    first = int(columns[varying[0]][0])
    if list(columns[varying[0]]) != [str(first + i) for i in range(len(names))]:
        return None
    places = list(_NUMBERS.finditer(names[0]))
    place = places[varying[0]]
    name = names[0][: place.start()] + NUMBER + names[0][place.end() :]
    return name, (first, first + len(names) - 1)
