"""Rows that a program picks by their values, as experts do, in arrays of a size that is known.

`torch.nonzero` gives as many rows as a mask has elements that hold. A compiled file needs that
number beforehand, so that it takes as many rows as the mask has elements; those that are too many
have indices beyond the end, and JAX adds them to nothing. The result is the same where rows are
computed each by itself and then added to the places that they were picked from. Other uses are
refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from fmapper import ConversionError
from fmapper.meshes import follow_rows, regroups
from fmapper.programs import Call, Program, Ref, refs_in
from fmapper_adapters.jax.aten import table

_NONZERO = "aten::nonzero"
_KEEPS = ("fmapper::stop_gradient", "aten::to", "aten::_to_copy", "aten::alias", "aten::detach")
_UNKNOWN = re.compile(r"\bu\d+\b")


def with_bounded_rows(program: Program) -> Program:
    """Returns a program without sizes that depend on values.

    Raises:
        ConversionError: It has some, and computes with more than the rows; says where.
    """
    calls = program.graph.calls
    found = [call for call in calls if call.op.startswith(_NONZERO)]
    counts = {str(call.result[0][1][0]) for call in found if call.result}
    counts = {count for count in counts if _UNKNOWN.fullmatch(count)}
    rows = _Rows(program, counts)
    if not counts:
        is_varying = any(isinstance(size, str) for one in program.inputs for size in one.shape)
        for call in calls if is_varying else ():  # with fixed sizes it may be padded
            rows.refuse(call)
        return program
    kept = [call for call in calls if not rows.is_implied(call)]
    live = dataclasses.replace(program.graph, calls=kept)
    live = live.without_dead_calls(lambda call: "_assert" in call.op or bool(call.graphs()))
    for call in live.calls:
        rows.follow(call)
    rows.check_outputs(live.outputs)
    graph = dataclasses.replace(live, calls=[rows.bound(call) for call in live.calls])
    symbols = {name: one for name, one in program.symbols.items() if name not in counts}
    return dataclasses.replace(program, graph=graph, symbols=symbols)


class _Rows:
    """Finds which values have picked rows, and refuses what does more than compute each of them."""

    def __init__(self, program: Program, counts: set[str]) -> None:
        self._program = program
        self._counts = counts
        self._calls = {call.name: call for call in program.graph.calls}
        self._shapes = {name: shape for name, (_, shape) in program.kinds().items()}
        self._indices: dict[str, tuple[str, int]] = {}  # values -> the nonzero, and the dimension
        self._picked: dict[str, str] = {}  # other values with a row for each -> the nonzero

    def is_implied(self, call: Call) -> bool:
        """Returns whether a call asserts bounds of a number of rows, as torch does by itself."""
        asked = self._calls.get(getattr(call.args[0], "name", "")) if call.args else None
        if "_assert_scalar" not in call.op or asked is None or len(asked.args) != 2:
            return False
        size, bound = asked.args
        made = self._calls.get(getattr(size, "name", ""))
        is_count = (
            made is not None
            and made.op.startswith("aten::sym_size")
            and made.args[1] == 0
            and self._calls[made.args[0].name].op.startswith(_NONZERO)
        )
        if not is_count or not isinstance(bound, int):
            return False
        assert made is not None
        most = self._elements(self._calls[made.args[0].name])
        return (asked.op == "sym::ge" and bound <= 0) or (
            asked.op == "sym::le" and isinstance(most, int) and most <= bound
        )

    def _elements(self, call: Call) -> int | str:
        shape = self._shapes[call.args[0].name]
        if all(isinstance(size, int) for size in shape):
            found = 1
            for size in shape:
                found *= int(size)
            return found
        return "*".join(f"({size})" for size in shape)

    def follow(self, call: Call) -> None:
        """Notes what rows a call computes.

        Raises:
            ConversionError: It does something else with rows.
        """
        if call.op.startswith(_NONZERO):
            given = self._shapes[call.args[0].name]
            if not self._counts.isdisjoint({*map(str, call.result[0][1])}) and given:
                self._indices[call.name] = (call.name, -1)
            return
        refs = {*call.refs()} & (self._indices.keys() | self._picked.keys())
        if not refs:
            return self.refuse(call)
        base = call.op.partition(".")[0]
        if base in _KEEPS and len(refs) == 1:
            (one,) = refs
            known = self._indices if one in self._indices else self._picked
            known[call.name] = known[one]  # type: ignore[assignment]
        elif not _RULES.get(base, _Rows.each)(self, call):
            raise self._refusal(call)

    def refuse(self, call: Call) -> None:
        """Raises for a call that gives as many rows as values say."""
        if any(_UNKNOWN.search(str(size)) for _, shape in call.result for size in shape):
            raise self._refusal(call)

    def check_outputs(self, outputs: Any) -> None:
        """Raises for a result whose size depends on values."""
        for name in refs_in(outputs):
            if name in self._indices or name in self._picked:
                raise self._refusal(self._calls[name])

    def _refusal(self, call: Call) -> ConversionError:
        place = call.module.partition("@")[0] or self._program.name
        return ConversionError(
            f"{place}: {call.op.partition('::')[2]} ({call.source}) computes with rows whose "
            "number depends on values (torch.nonzero, torch.where), and a compiled file needs "
            "sizes that do not. Only rows that are computed each by itself and added to where "
            "they were picked can be translated. Write it with a mask, as torch.where(mask, a, b), "
            "or use fmapper.convert without structure=True, which runs it without jit"
        )

    def bound(self, call: Call) -> Call:
        """Returns a call with the number of elements of the mask for that of the rows."""
        known = self._indices.get(call.name, ("",))[0] or self._picked.get(call.name)
        if not known:
            return call
        most = self._elements(self._calls[known])
        shapes = tuple((dtype, (most, *shape[1:])) for dtype, shape in call.result)
        op = "fmapper::bounded_nonzero.default" if known == call.name else call.op
        return dataclasses.replace(call, op=op, result=shapes)

    # --- rules --------------------------------------------------------------------------------

    def column(self, call: Call) -> bool:
        """Follows one column of indices: `rows[:, i]`, with or without the dimension."""
        (source, at) = self._indices.get(call.args[0].name, ("", -1))
        if not source or len(call.args) < 3 or call.args[1] != 1:
            return False
        start = call.args[2]
        is_one = call.op.startswith("aten::select") or call.args[3:4] == (start + 1,)
        if at != -1 or not is_one:
            return False
        self._indices[call.name] = (source, start)
        return True

    def each(self, call: Call) -> bool:
        """Follows rows that are computed each by itself; indices only if they do not change."""
        rule, refs = table.dims(call.op), {*call.refs()}
        known = self._picked if refs.isdisjoint(self._indices) else self._indices
        names = [name for name in (*self._indices, *self._picked) if name in refs]
        if not known.keys() >= {*names} or len({known[name] for name in names}) != 1:
            return False
        if rule is regroups:
            if any(_UNKNOWN.search(str(argument)) for argument in call.args[1:]):
                return False
        elif known is self._indices:
            return False
        kept = follow_rows(call, self._shapes, dict.fromkeys(names, 0), rule)
        if kept != [0] or self._shapes[call.name][0] != self._shapes[names[0]][0]:
            return False
        known[call.name] = known[names[0]]  # type: ignore[assignment]
        return True

    def pick(self, call: Call) -> bool:
        """Follows `x[indices]`: the first dimensions by columns of one nonzero."""
        x, indices = call.args
        names = [one.name for one in indices if isinstance(one, Ref)]
        known = [self._indices.get(name, ("", -1)) for name in names]
        sources = {source for source, _ in known}
        if x.name in self._indices or x.name in self._picked or len(names) != len(indices):
            return False
        is_row = all(
            len(self._shapes[name]) == 1 and at >= 0
            for name, (_, at) in zip(names, known, strict=True)
        )
        if len(sources) != 1 or "" in sources or not is_row:
            return False
        self._picked[call.name] = sources.pop()
        return True

    def add(self, call: Call) -> bool:
        """Ends rows that are added to the places that they were picked from."""
        if call.op.startswith("aten::index_add"):
            x, dim, index, values, *_ = call.args
            indices = [index]
        else:
            x, indices, values, *rest = call.args
            dim = 0
            if rest[:1] != [True] and call.kwargs.get("accumulate") is not True:
                return False
        known = [self._indices.get(getattr(one, "name", ""), ("", -1)) for one in indices]
        sources = {source for source, _ in known}
        is_picked = isinstance(values, Ref) and {self._picked.get(values.name, "")} == sources
        if dim != 0 or len(sources) != 1 or "" in sources or not is_picked:
            return False
        if x.name in self._picked or x.name in self._indices:
            return False
        mask = self._shapes[self._calls[sources.pop()].args[0].name]
        sizes = self._shapes[x.name][: len(known)]
        return sizes == tuple(mask[at] if at >= 0 else -1 for _, at in known)


_RULES: Mapping[str, Callable[[_Rows, Call], bool]] = {
    "aten::slice": _Rows.column,
    "aten::select": _Rows.column,
    "aten::index": _Rows.pick,
    "aten::index_add": _Rows.add,
    "aten::index_put": _Rows.add,
}
