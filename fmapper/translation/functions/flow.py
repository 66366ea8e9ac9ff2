"""The loops and branches of a function, with their blocks."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fmapper.errors import ConversionError
from fmapper.programs.program import Call, Graph, map_arguments, refs_in, substitute
from fmapper.programs.treespec import Ref
from fmapper.translation import naming
from fmapper.translation.code import Value, expr, literal, name, text
from fmapper.translation.functions.forms import Body, Statement, mentions
from fmapper.translation.guards.sizes import Sizes
from fmapper.translation.scans.steps import Carried, states_of, units_in
from fmapper.translation.units import Structure, Unit, free_in, refs_of

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect
    from fmapper.translation.functions.bodies import BodyWriter

_HOLD = 10**6


class Flow:
    """Writes loops and branches.

    Their graphs are open: they refer to the values of the function around them, and their own
    inputs are what changes from round to round.
    """

    _structure: Structure
    _unit: Unit
    _dialect: Dialect
    _body: Body
    _env: dict[str, Value]
    _left: Counter[str]
    _names: naming.Names
    _next: dict[str, str]  # values -> the variables of loops that they become
    _hints: dict[str, str]
    _sizes: Sizes
    _argument: Callable[[Any], Any]
    _bind: Callable[[str, ast.expr], None]
    _carried: list[tuple[Any, str]]  # tuples that a loop carries on -> the variables that have them
    _call: Callable[[Call], None]
    _child: Callable[[Unit], None]
    _define: Callable[[str, ast.expr, str, str], None]
    _emit: Callable[..., None]
    _line: Callable[[str], str]
    _hold: Callable[[Any, str, str, list[str]], None]
    _is_free: Callable[[str], bool]
    _new_name: Callable[..., str]
    _print_structure: Callable[[Any], ast.expr]
    _writer: BodyWriter
    _passed: dict[int, set[str]]
    _picks: Callable[[Call], list[Call]]
    _reassign: Callable[[Iterable[str]], None]

    def _inputs_of(self, call: Call) -> list[str]:
        """Returns the values that a loop or branch needs, and its results."""
        given = [value for graph in call.graphs() for value in refs_in(graph.outputs)]
        return [*self._stays(call), *given]

    def _stays(self, call: Call) -> dict[str, None]:
        """Returns the values that a loop or branch needs."""
        rows = refs_in(call.args[2]) if call.op == "flow::scan" else ()
        return dict.fromkeys([*free_in(call), *rows])

    def _flow(self, call: Call) -> None:
        write = {"flow::scan": self._scan, "flow::while": self._while, "flow::branch": self._branch}
        before = self._sizes.asked.copy()
        count = len(self._body.statements)
        write[call.op](call)
        for statement in self._body.statements[count:]:
            statement.origin = self._line(call.source)
        for symbol in self._sizes.asked - before:
            self._sizes.asked[symbol] += 1  # a variable of its own: others change in the rounds
        passed = [v for unit in units_in([call]) for v in self._passed.get(id(unit), ())]
        for value in [*self._stays(call), *passed]:
            self._left[value] -= 1

    # --- loops --------------------------------------------------------------------------------

    def _scan(self, call: Call) -> None:
        body, carry, xs = call.args
        count = len(carry)
        picks = self._results_of(call)
        carried = states_of(call, self._writer._forms, self._left)
        state = self._begin(body, carried, carry, picks)
        arrays = [self._code(one) for one in xs]
        lists = {}
        for i, value in enumerate(body.outputs[count:]):
            if count + i in picks:
                lists[i] = self._fresh(
                    f"{picks[count + i].name} rows", self._rows_name(value, body)
                )
                self._left[f"{picks[count + i].name} rows"] = _HOLD
                self._emit((lists[i],), literal([]))
        header = self._header(call, body, body.inputs[count:], arrays)
        with_block = self._open()
        for i, value in enumerate(body.outputs[count:]):
            if i not in lists:
                self._pass_by(value)
        self._run(body)
        produced = [(target, self._code(body.outputs[count + i])) for i, target in lists.items()]
        for target, node in produced:
            self._body.statements.append(Statement((), expr("{0}.append({1})", name(target), node)))
        self._advance(state, carried)
        self._close(header, with_block)
        self._end(state, carried, picks)
        dims = call.kwargs.get("dims", ())
        for i, target in lists.items():
            pick = picks[count + i]
            rows = name(target)
            if call.kwargs["reverse"]:
                rows = expr("{0}[::-1]", rows)
            self._left[f"{pick.name} rows"] = 0
            stacked = self._dialect.stack(rows, dims[i] if dims else 0)
            self._define(pick.name, stacked, call.source, "torch::stack")

    def _header(self, call: Call, body: Graph, rows: Sequence[str], arrays: list[ast.expr]) -> str:
        """Returns the header of a loop over rows, and defines its variables."""
        reverse = call.kwargs["reverse"]
        wanted = [i for i, row in enumerate(rows) if self._left[row] > 0]
        length = call.kwargs["length"]
        if not wanted:
            number = literal(length) if isinstance(length, int) else self._code(length)
            return f"for _ in range({text(number)})"
        targets = []
        for i in wanted:
            array = arrays[i]
            usual = f"{array.id}_t" if isinstance(array, ast.Name) else "row"
            targets.append(self._fresh(rows[i], self._hints.get(rows[i], usual)))
        dims = call.kwargs.get("rows") or (0,) * len(rows)
        parts = [self._dialect.rows(arrays[i], dims[i], reverse=reverse) for i in wanted]
        code = text(parts[0]) if len(parts) == 1 else f"zip({', '.join(map(text, parts))})"
        self._reassign(targets)
        for i, target in zip(wanted, targets, strict=True):
            self._bind(rows[i], name(target))
        return f"for {', '.join(targets)} in {code}"

    def _while(self, call: Call) -> None:
        condition, body, carry = call.args
        picks = self._results_of(call)
        values = zip(body.inputs, body.outputs, strict=True)
        carried = [Carried(Ref(inner), after, (i,)) for i, (inner, after) in enumerate(values)]
        state = self._begin(body, carried, carry, picks)
        for target, inner in zip(state, condition.inputs, strict=True):
            self._left[inner] += 1  # the rest of a round needs it, too
            self._names.holds[target] = inner
            self._bind(inner, name(target))
        block = self._open()
        self._run(condition)
        node = self._code(condition.outputs[0])
        header = f"while {text(node)}"
        if self._body.statements:
            header = "while True"
            leave = ((f"if not ({text(node)})", [Statement((), name("break"))]),)
            self._body.statements.append(Statement((), literal(None), leave))
        for target, inner, own in zip(state, condition.inputs, body.inputs, strict=True):
            self._left[inner] -= 1
            self._names.holds[target] = own
            self._bind(own, name(target))
        self._run(body)
        self._advance(state, carried)
        self._close(header, block)
        self._end(state, carried, picks)

    def _begin(
        self, body: Graph, carried: Sequence[Carried], carry: Sequence[Any], picks: dict[int, Call]
    ) -> list[str]:
        """Writes the initial values of a loop's variables; returns those."""
        first = dict(zip(body.inputs, carry, strict=False))
        nodes = [self._first(one, first) for one in carried]
        state: list[str] = []
        for one, node in zip(carried, nodes, strict=True):
            inner, at = _holder(one), one.at[0]
            others = [other for other in nodes if other is not node]
            others += map(name, state)
            if isinstance(node, ast.Name) and self._may_carry(node.id, others):
                state.append(node.id)
                self._names.holds[node.id] = inner
            else:
                hinted = self._hints.get(picks[at].name) if at in picks and not one.name else ""
                wanted = one.name or self._hints.get(inner) or hinted
                wanted = wanted or self._own_name(one.gives, body) or "carry"
                state.append(self._fresh(inner, wanted))
            self._left[inner] += _HOLD
        pairs = [(t, node) for t, node in zip(state, nodes, strict=True) if text(node) != t]
        if any(mentions(node, target) for target, _ in pairs for _, node in pairs):
            self._assign(pairs)
        else:
            for target, node in pairs:
                self._emit((target,), node)
        for target, one in zip(state, carried, strict=True):
            if one.name:
                self._hold(one.given, target, _holder(one), [*refs_in((one.given,))])
                self._carried.append((one.gives, target))
                continue
            inner = _holder(one)
            self._bind(inner, name(target))
            if one.gives != Ref(inner):
                self._left[inner] -= _HOLD
                if isinstance(one.gives, Ref):
                    self._next[one.gives.name] = target
        return state

    def _first(self, one: Carried, first: Mapping[str, Any]) -> ast.expr:
        """Returns the code for what a variable of a loop has before it."""
        if not one.name:
            return self._code(first[_holder(one)])
        return self._print_structure(map_arguments(one.given, lambda ref: first[ref.name]))

    def _may_carry(self, variable: str, others: Sequence[ast.expr]) -> bool:
        """Returns whether a loop may go on with a variable, which nobody else needs."""
        if variable not in self._names.holds or any(mentions(one, variable) for one in others):
            return False
        return self._is_free(variable)

    def _advance(self, state: list[str], carried: Sequence[Carried]) -> None:
        """Writes the end of an iteration: the next values of a loop's variables."""
        pairs = []
        for target, one in zip(state, carried, strict=False):
            node = self._print_structure(one.gives) if one.name else self._code(one.gives)
            if one.gives != one.given and text(node) != target:
                pairs.append((target, node))
        self._assign(pairs)

    def _assign(self, pairs: list[tuple[str, ast.expr]]) -> None:
        """Writes a simultaneous assignment."""
        if pairs:
            nodes = [node for _, node in pairs]
            node = nodes[0] if len(nodes) == 1 else ast.Tuple(nodes, ast.Load())
            targets = tuple(target for target, _ in pairs)
            self._emit(targets, node)

    def _end(self, state: list[str], carried: Sequence[Carried], picks: dict[int, Call]) -> None:
        for target, one in zip(state, carried, strict=True):
            if one.name:
                known = {
                    value: Ref(picks[at].name) if at in picks else None
                    for value, at in zip(refs_in((one.given,)), one.at, strict=True)
                }
                after = substitute(one.given, known)
                self._hold(after, target, _holder(one), [*refs_in((after,))])
                continue
            self._left[self._names.holds[target]] = 0
            if one.at[0] in picks:
                pick = picks[one.at[0]].name
                self._names.holds[target] = pick
                self._bind(pick, name(target))
                self._hints.setdefault(pick, target)

    # --- branches -----------------------------------------------------------------------------

    def _branch(self, call: Call) -> None:
        index, branches = call.args
        picks = self._results_of(call)
        node = self._code(index)
        targets = {}
        hinted = naming.targets(self._line(call.source))
        for i, pick in picks.items():
            wanted = hinted[i] if len(hinted) == len(call.result) else ""
            targets[i] = self._fresh(
                pick.name, wanted or self._own_name(branches[-1].outputs[i], branches[-1])
            )
        self._reassign(targets.values())
        blocks = []
        is_bool = self._structure.values.get(getattr(index, "name", ""), ("",))[0] == "bool"
        questions = self._questions(node, len(branches), is_bool=is_bool)
        for at, branch in enumerate(branches[::-1] if len(branches) == 2 else branches):
            sizes = copy.deepcopy(self._sizes)
            outer = self._open()
            self._run(branch)
            nodes = []
            for i, value in enumerate(branch.outputs):
                if i in targets:
                    nodes.append(self._code(value))
                else:
                    self._pass_by(value)
            if nodes:
                one = nodes[0] if len(nodes) == 1 else ast.Tuple(nodes, ast.Load())
                self._body.statements.append(Statement(tuple(targets.values()), one))
            sizes.asked = self._sizes.asked
            self._sizes = sizes
            blocks.append((questions[at], self._body.statements))
            self._body.statements = outer
        self._body.statements.append(Statement((), literal(None), tuple(blocks)))
        for i, target in targets.items():
            self._names.holds[target] = picks[i].name
            self._bind(picks[i].name, name(target))

    def _questions(self, node: ast.expr, count: int, *, is_bool: bool) -> list[str]:
        """Returns the conditions of branches."""
        code = text(node)
        if count == 2:
            return [f"if {code}" if is_bool else f"if {text(expr('{0} > 0', node))}", "else"]
        between = [f"elif {text(expr('{0} == {1}', node, i))}" for i in range(1, count - 1)]
        return [f"if {text(expr('{0} <= 0', node))}", *between, "else"]

    # --- what they share ----------------------------------------------------------------------

    def _results_of(self, call: Call) -> dict[int, Call]:
        """Returns the calls that pick used results, by index."""
        picks = {int(pick.args[1]): pick for pick in self._picks(call) if self._left[pick.name] > 0}
        if not picks and self._left[call.name] > len(self._picks(call)):
            raise ConversionError(f"{call.op} returns its results as one value ({call.source})")
        return picks

    def _open(self) -> list[Statement]:
        outer, self._body.statements = self._body.statements, []
        return outer

    def _close(self, header: str, outer: list[Statement]) -> None:
        block, self._body.statements = self._body.statements, outer
        self._body.statements.append(Statement((), literal(None), ((header, block),)))

    def _run(self, graph: Graph) -> None:
        step: Call | Unit
        for step in graph.calls:
            if isinstance(step, Unit):
                self._child(step)
            elif step.name not in self._structure.sizes:
                self._call(step)

    def _code(self, value: Any) -> ast.expr:
        return literal(self._argument(value))

    def _pass_by(self, value: Any) -> None:
        for one in refs_in(value):
            self._left[one] -= 1

    def _fresh(self, value: str, wanted: str = "") -> str:
        target = self._new_name(value, wanted)
        self._names.holds[target] = value
        return target

    def _own_name(self, value: Any, graph: Graph) -> str:
        """Returns the name of a value in the model's code; empty if it has none."""
        if not isinstance(value, Ref):
            return ""
        if value.name in self._hints:
            return self._hints[value.name]
        maker = next((one for one in graph.calls if one.name == value.name), None)
        if not isinstance(maker, Call):
            return ""
        calls = [one for one in graph.calls if isinstance(one, Call)]
        users = [one for one in calls if value.name in refs_of(one)]
        line = self._line(maker.source)
        if any(self._line(one.source) == line for one in users):
            return ""
        found = naming.targets(line)
        return found[0] if len(found) == 1 else ""

    def _rows_name(self, value: Any, graph: Graph) -> str:
        own = self._own_name(value, graph)
        if own.endswith("s"):
            return f"all_{own}"
        return f"{own}s" if own else "ys"


def _holder(one: Carried) -> str:
    """Returns the value, or what stands for the values, that a variable of a loop holds."""
    return f"carried {one.given}" if one.name else str(one.given.name)
