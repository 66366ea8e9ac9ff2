"""Recurrent layers of torch for loops over the steps of cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr, local_array
from fmapper_adapters.torch.translation.layers import equality
from fmapper_adapters.torch.translation.layers.site import Site, dtype_option, name_of

_GATES = {"torch.sigmoid": "sigmoid", "torch.tanh": "tanh"}
_KINDS = {1: "RNN", 3: "GRU", 4: "LSTM"}
_MOVES = ("permute", "torch.permute", "t", "transpose", "torch.transpose", "torch.flip")
_MOST = 48  # layers that are tried in the place of a loop


@dataclass(slots=True)
class _Cell:
    """The arrays of a cell, by what they are products with and by the gates that they reach.

    Attributes:
        gates: The functions of its gates.
        own: `ih` for the inputs, `hh` for the state, `bias` -> arrays, with their orders and gates.
    """

    gates: list[Call]
    own: dict[str, list[tuple[str, Any, tuple[int, ...]]]] = field(default_factory=dict)


def layer_of_unit(structure: Structure, unit: Unit) -> Layer | None:
    """Returns the recurrent layer that a loop over the steps of a cell is, or two of them."""
    calls = [*unit.calls()]
    unit = replace(unit, steps=[*calls])
    begins = [call for call in calls if call.op == "flow::begin"]
    given = [name for name in unit.given if local_array(structure, unit, name) is None]
    if len(begins) not in (1, 2) or len(given) != 1 or len(unit.gives) != 1:
        return None
    shape = structure.values.get(given[0], ("", ()))[1]
    cells = [_cell(structure, unit, calls, begin) for begin in begins]
    if len(shape) not in (2, 3) or any(cell is None for cell in cells):
        return None
    dims = {begin.kwargs.get("dims", ()) for begin in begins}
    if len(dims) != 1 or dims.pop() not in ((0,), (1,)[: len(shape) - 1]):
        return None
    found = _layers(structure, unit, [cell for cell in cells if cell is not None], given[0])
    for layer in itertools.islice(found, _MOST):
        if equality.computes_same(structure, unit, layer):
            return layer
    return None


def _cell(structure: Structure, unit: Unit, calls: Sequence[Call], begin: Call) -> _Cell | None:
    """Returns the cell of a loop; None for a loop that is not of products and gates."""
    picks = {call.name: call.args[1] for call in calls
             if call.op == "sym::getitem" and call.args[0] == Ref(begin.name)}  # fmt: skip
    states = {name for name, at in picks.items() if at < len(begin.args[0])}
    inner = _calls_after(calls, picks)
    site = Site(structure, unit, whole=False)
    gates = [call for call in inner if name_of(call) in _GATES]
    found: dict[str, tuple[str, Any, set[str]]] = {}
    for call in inner:
        for side, (name, _, order) in _arrays_in(site, call, states):
            if name in found:
                return None
            found[name] = (side, order, _first_gates(calls, call))
    direct = [one for one in gates if any(one.name in reached for *_, reached in found.values())]
    numbers = {one.name: at for at, one in enumerate(direct)}
    if len(direct) not in _KINDS:
        return None
    cell = _Cell(direct)
    for name, (side, order, reached) in found.items():
        at = tuple(sorted(numbers[one] for one in reached))
        cell.own.setdefault(side, []).append((name, order, at))
    return cell if {"ih", "hh"} <= {*cell.own} <= {"ih", "hh", "bias"} else None


def _calls_after(calls: Sequence[Call], values: Mapping[str, Any]) -> list[Call]:
    """Returns the calls that compute with values, and with what those compute, within a loop."""
    known = {*values}
    found = []
    for call in calls:
        if call.name not in known and call.op != "flow::end" and known & {*call.refs()}:
            known.add(call.name)
            found.append(call)
    return found


def _first_gates(calls: Sequence[Call], start: Call) -> set[str]:
    """Returns the gates that the result of a call reaches first."""
    found: set[str] = set()
    known = {start.name}
    for call in calls:
        if call.op.startswith("flow::") or not known & {*call.refs()}:
            continue
        if name_of(call) in _GATES:
            found.add(call.name)
        else:
            known.add(call.name)
    return found


def _arrays_in(site: Site, call: Call, states: set[str]) -> Iterator[tuple[str, Any]]:
    """Yields the arrays that a call computes with.

    Yields:
        `ih` for one that inputs are multiplied with, `hh` for the state, `bias` for another; and
        the array with the order in which torch has its dimensions.
    """
    product = _product(call)
    if product is not None:
        x, weight, is_right = product
        held = site.array(weight)
        if held is None:
            x, weight, is_right = weight, x, False
            held = site.array(weight)
        if held is not None and len(site.shape(weight)) == 2:
            order = held[2] or (0, 1)
            turned = order[::-1] if is_right else order
            side = "hh" if _source(site, x) in states else "ih"
            yield side, (held[0], held[1], None if turned == (0, 1) else turned)
    own = [site.array(one) for one in (*call.args, *call.kwargs.values()) if isinstance(one, Ref)]
    yield from (("bias", one) for one in own if one and len(site.shape(one[0])) == 1)


def _product(call: Call) -> tuple[Any, Any, bool] | None:
    """Returns the factors of a product, and whether the second one is the right one."""
    name = name_of(call)
    if name == "F.linear":
        return call.args[0], call.args[1], False
    if name == "torch.addmm":
        return call.args[1], call.args[2], True
    if name in ("torch.matmul", "operator.matmul", "torch.mv"):
        return call.args[0], call.args[1], True
    return None


def _source(site: Site, value: Any) -> str:
    """Returns what a value is, before its dimensions were moved."""
    while isinstance(value, Ref) and value.name in site.made:
        made = site.made[value.name]
        if name_of(made) not in _MOVES:
            break
        value = made.args[0]
    return value.name if isinstance(value, Ref) else ""


def _layers(structure: Structure, unit: Unit, cells: Sequence[_Cell], x: str) -> Iterator[Layer]:
    """Yields layers that the arrays of cells may be of, the directions in both orders."""
    if len({len(cell.gates) for cell in cells}) != 1:
        return
    site = Site(structure, unit, whole=False)
    kind = _KINDS[len(cells[0].gates)]
    orders = [*_orders(cells[0], kind)]
    for order, directions in itertools.product(orders, (cells, cells[::-1])[: len(cells)]):
        choices = [[*_arrays(site, cell, order)] for cell in directions]
        for chosen in itertools.product(*choices):
            yield _layer(site, kind, [*chosen], x)


def _orders(cell: _Cell, kind: str) -> Iterator[tuple[int, ...]]:
    """Yields orders of the gates as torch may have them: `ifgo` of an LSTM, `rzn` of a GRU."""
    tanh = [at for at, gate in enumerate(cell.gates) if _GATES[name_of(gate)] == "tanh"]
    others = [at for at in range(len(cell.gates)) if at not in tanh]
    place = {"RNN": 0, "GRU": 2, "LSTM": 2}[kind]
    if len(tanh) != 1:
        return
    for one in itertools.permutations(others):
        yield (*one[:place], *tanh, *one[place:])


Rows = dict[str, tuple[str, Any]]  # arrays -> what they are called, rows too, and their orders


def _arrays(site: Site, cell: _Cell, order: tuple[int, ...]) -> Iterator[Rows]:
    """Yields the arrays of a cell by their names in torch, with the gates in an order."""
    found: Rows = {}
    for side in ("ih", "hh"):
        rows = _rows(site, cell.own[side], order, f"weight_{side}")
        if rows is None:
            return
        found |= rows
    biases = cell.own.get("bias", [])
    for chosen in _choices(biases, len(order)):
        several = [_rows(site, one, order, name) for name, one in chosen.items() if one]
        if all(rows is not None for rows in several):
            yield found | {key: one for rows in several if rows for key, one in rows.items()}


def _choices(biases: Sequence[Any], count: int) -> Iterator[dict[str, list[Any]]]:
    """Yields which biases are those of the inputs, and which those of the state."""
    for picked in itertools.product(("bias_ih", "bias_hh"), repeat=len(biases)):
        found: dict[str, list[Any]] = {"bias_ih": [], "bias_hh": []}
        for name, bias in zip(picked, biases, strict=True):
            found[name].append(bias)
        reached = {
            name: sorted(at for *_, gates in chosen for at in gates)
            for name, chosen in found.items()
        }
        every = [*range(count)]
        if reached["bias_ih"] in (every, []) and reached["bias_hh"] in (every, []):
            if reached["bias_ih"] or not biases:
                yield found
        elif reached["bias_ih"] == every and len(reached["bias_hh"]) == 1 and count == 3:
            yield {"bias_ih": found["bias_ih"], "bias_n": found["bias_hh"]}


def _rows(site: Site, own: Sequence[Any], order: tuple[int, ...], name: str) -> Rows | None:
    """Returns the arrays of gates as rows of one."""
    if name == "bias_n":
        ((array, turned, _),) = own
        return {array: (name, turned)}
    if len(own) == 1:
        ((array, turned, gates),) = own
        return {array: (name, turned)} if len(gates) == len(order) else None
    by_gate = {gates: (array, turned) for array, turned, gates in own}
    if {*by_gate} != {(at,) for at in order} or len(by_gate) != len(own):
        return None
    found: Rows = {}
    begin = 0
    for at in order:
        array, turned = by_gate[(at,)]
        end = begin + site.shape(array)[0 if turned is None else turned[0]]
        found[array] = (f"{name}[{begin}:{end}]", turned)
        begin = end
    return found


def _layer(site: Site, kind: str, chosen: Sequence[Rows], x: str) -> Layer:
    """Returns the layer with these arrays, one group for each direction."""
    arrays: Rows = {}
    for rows, end in zip(chosen, ("_l0", "_l0_reverse"), strict=False):
        for array, (name, order) in rows.items():
            base, bracket, at = name.partition("[")
            arrays[array] = (f"{base}{end}{bracket}{at}", order)
    names = {name.partition("[")[0] for name, _ in arrays.values()}
    prefix, options = "nn.", ""
    if "bias_n_l0" in names:
        prefix = "NewBias"
    elif "bias_ih_l0" not in names:
        options = ", bias=False"
    elif "bias_hh_l0" not in names:
        prefix = "SingleBias"
    sizes = {"weight_ih_l0": 0, "weight_hh_l0": 0}
    for array, (name, order) in arrays.items():
        base = name.partition("[")[0]
        if base in sizes:
            sizes[base] = site.shape(array)[1 if order is None else order[1]]
    options += ", batch_first=True" if _dim(site) else ""
    options += ", bidirectional=True" if len(chosen) > 1 else ""
    given, hidden = sizes.values()
    code = expr(f"{prefix}{kind}({given}, {hidden}{options}{dtype_option(site, x)})")
    (output,) = site.unit.gives
    return Layer(code, (x,), output, arrays, f"{prefix}{kind}", kind.lower(), results=(output, ""))


def _dim(site: Site) -> int:
    """Returns along which dimension the steps are."""
    begin = next(call for call in site.made.values() if call.op == "flow::begin")
    found: int = begin.kwargs["dims"][0]
    return found
