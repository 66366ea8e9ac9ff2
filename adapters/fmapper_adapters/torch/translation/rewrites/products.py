"""Products of arrays of more dimensions, which matrices are made for, as `torch.einsum`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fmapper_adapters.torch.model import fx_passes

_PRODUCTS = {torch.matmul, operator.matmul}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_Dims = list[list[str]]  # of each dimension, the letters of those that it is flattened from


def write_products(graph: Any, is_of_other: Callable[[Any, Any], bool]) -> None:
    """Writes products of activations whose dimensions are flattened as `torch.einsum`, in place.

    `(a.transpose(1, 2) @ b.permute(0, 2, 4, 1, 3).flatten(3, 4)).unflatten(-1, (n, 2))`, turned, is
    `torch.einsum("bskh,btkgh->btkgs", a, b)`.

    Args:
        graph: The graph.
        is_of_other: Whether a submodule takes a value from another, for a node, or gives it.
    """
    for node in list(graph.nodes):
        if node.target not in _PRODUCTS or len(node.args) != 2:
            continue
        found = _Product(is_of_other).read(node)
        if found is None:
            continue
        equation, (left, right), last = found
        with graph.inserting_before(last):
            new = graph.call_function(torch.einsum, (equation, left, right))
        new.meta.update(last.meta)
        last.replace_all_uses_with(new)
    graph.eliminate_dead_code(fx_passes.is_kept)


class _Product:
    def __init__(self, is_of_other: Callable[[Any, Any], bool]) -> None:
        self.is_of_other = is_of_other
        self.sizes: dict[str, Any] = {}
        self.same: dict[str, str] = {}

    def read(self, node: Any) -> tuple[str, tuple[Any, Any], Any] | None:
        """Returns the equation, what it is of, and the node that it stands for."""
        sides = [self._source(one, node) for one in node.args]
        (left, rows), (right, columns) = sides
        if any(_is_held(one) for one in (left, right)) or len(rows) != len(columns):
            return None
        if len(rows) < 3 or not any(len(one) != 1 for one in (*rows, *columns)):
            return None
        pairs = [*zip(rows[:-2], columns[:-2], strict=True), (rows[-1], columns[-2])]
        if not all(self._unite(mine, theirs) for mine, theirs in pairs):
            return None
        dims = [*rows[:-2], rows[-2], columns[-1]]
        last, dims = self._result(node, dims)
        if any(len(one) != 1 for one in dims):
            return None
        names = {letter: self.same.get(letter, letter) for letter in self.sizes}
        order: dict[str, str] = {}
        words = []
        for given in (self._letters(left, 0), self._letters(right, left.meta["val"].ndim)):
            words.append("".join(order.setdefault(names[x], _LETTERS[len(order)]) for x in given))
        result = "".join(order[names[x]] for (x,) in dims)
        return f"{words[0]},{words[1]}->{result}", (left, right), last

    def _letters(self, source: Any, begin: int) -> str:
        return _LETTERS[begin : begin + source.meta["val"].ndim]

    def _source(self, value: Any, node: Any) -> tuple[Any, _Dims]:
        """Returns what an operand is made of by turning and flattening, and its dimensions."""
        chain: list[Any] = []
        while _is_method(value, "permute", "transpose", "flatten") and len(value.users) == 1:
            if self.is_of_other(value, node):
                break
            chain.append(value)
            value = value.args[0]
        begin = len(self.sizes)
        letters = _LETTERS[begin : begin + value.meta["val"].ndim]
        self.sizes.update(zip(letters, value.meta["val"].shape, strict=True))
        dims: _Dims = [[one] for one in letters]
        for one in reversed(chain):
            dims = _turn(one, dims)
        return value, dims

    def _unite(self, mine: list[str], theirs: list[str]) -> bool:
        """Takes dimensions of both operands for the same, if their sizes are."""
        if len(mine) != len(theirs):
            return False
        for one, other in zip(mine, theirs, strict=True):
            if str(self.sizes[one]) != str(self.sizes[other]):
                return False
            self.same[other] = one
        return True

    def _result(self, node: Any, dims: _Dims) -> tuple[Any, _Dims]:
        """Returns the last of what splits and turns a product, and its dimensions."""
        while len(node.users) == 1:
            (user,) = node.users
            if self.is_of_other(node, user):
                break
            if _is_method(user, "permute", "transpose"):
                dims = _turn(user, dims)
            elif _is_method(user, "unflatten") and (split := self._split(user, dims)) is not None:
                dims = split
            else:
                break
            node = user
        return node, dims

    def _split(self, node: Any, dims: _Dims) -> _Dims | None:
        at = node.args[1] % len(dims)
        shape = node.meta["val"].shape[at : at + len(dims[at])]
        wanted = [self.sizes[one] for one in dims[at]]
        if len(node.args[2]) != len(dims[at]) or [*map(str, shape)] != [*map(str, wanted)]:
            return None
        return [*dims[:at], *([one] for one in dims[at]), *dims[at + 1 :]]


def _turn(node: Any, dims: _Dims) -> _Dims:
    """Returns the dimensions of what turns or flattens an array of these."""
    count, args = len(dims), node.args[1:]
    if node.target == "transpose":
        order = list(range(count))
        a, b = (int(one) % count for one in args)
        order[a], order[b] = order[b], order[a]
        return [dims[i] for i in order]
    if node.target == "permute":
        turned = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        return [dims[int(i) % count] for i in turned]
    begin, end = (int(one) % count for one in args)
    joined = [letter for one in dims[begin : end + 1] for letter in one]
    return [*dims[:begin], joined, *dims[end + 1 :]]


def _is_method(value: Any, *names: str) -> bool:
    return isinstance(value, fx.Node) and value.op == "call_method" and value.target in names


def _is_held(source: Any) -> bool:
    """Returns whether an array is one of the model, which may be that of a layer."""
    seen = {source}
    todo = [source]
    while todo:
        one = todo.pop()
        if one.op == "get_attr":
            return True
        if one.op == "call_method" or one.target is operator.getitem:
            fresh = [x for x in one.all_input_nodes if x not in seen]
            seen.update(fresh)
            todo += fresh[:1]
    return False
