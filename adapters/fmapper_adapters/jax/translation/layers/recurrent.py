"""Recurrent layers and cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr, local_array
from fmapper_adapters.jax.translation.layers.site import keywords

# The operation -> the class of a cell, the further arguments of its constructor, and its gates.
_KINDS = {
    "lstm": ("LSTMCell", "", 4),
    "gru": ("GRUCell", "", 3),
    "rnn_tanh": ("RNNCell", "", 1),
    "rnn_relu": ("RNNCell", "activation=jax.nn.relu, ", 1),
}


def layers(structure: Structure, unit: Unit, calls: Sequence[Call]) -> Layer | None:
    """Returns layers of cells, as `nn.LSTM` has them; a state of zeros is that of the layer."""
    found = [call for call in calls if call.op.endswith(".input") and _kind(call) in _KINDS]
    if len(found) != 1 or len(found[0].args) != 9:
        return None
    (call,) = found
    x, states, arrays, has_biases, count, rate, _, is_bidirectional, batch_first = call.args
    states = states if isinstance(states, tuple) else (states,)
    made = {one.name: one for one in calls}
    zeros = [one.name for one in states if _is_zero(made.get(one.name))]
    others = {one.name for one in calls if not _picks(one, call)} - {call.name, *zeros}
    if others or len(zeros) not in (0, len(states)) or len(structure.values[x.name][1]) != 3:
        return None
    given = (x.name,) if zeros else (x.name, *(one.name for one in states))
    each = 4 if has_biases else 2
    directions = 2 if is_bidirectional else 1
    if len(arrays) != each * count * directions or {*given} & made.keys():
        return None
    cell, more, _ = _KINDS[_kind(call)]
    hidden, width = (structure.values[arrays[at].name][1][1] for at in (1, 0))
    held: dict[str, Any] = {}
    inner: dict[str, str] = {}
    for at, array in enumerate(arrays):
        path, kind = f"cells.{at // each}.{('ih', 'hh')[at % 2]}", at % each
        inner[path] = "nnx.Linear"
        held[array.name] = (f"{path}.kernel", (1, 0)) if kind < 2 else (f"{path}.bias", None)
    if any(local_array(structure, unit, name) is None for name in held):
        return None
    options = f"num_layers={count}, " if count != 1 else ""
    options += "" if has_biases else "use_bias=False, "
    options += "bidirectional=True, " if is_bidirectional else ""
    options += "batch_first=True, " if batch_first else ""
    options += f"dropout={rate!r}, " if rate and count > 1 else ""
    options += more + keywords(structure.values[arrays[0].name][0])
    code = expr(f"Recurrent({cell}, {width}, {hidden}, {options}rngs=rngs)")
    results = _results(calls, call, 1 + len(states))
    draws = bool(rate) and count > 1
    return Layer(
        code, given, call.name, held, "Recurrent", "rnn", results=results, inner=inner, draws=draws
    )


def cell(structure: Structure, unit: Unit, calls: Sequence[Call]) -> Layer | None:
    """Returns a cell, as `nn.LSTMCell` is one; a state of zeros is that of the cell."""
    found = [call for call in calls if _kind(call).removesuffix("_cell") in _KINDS]
    if len(found) != 1 or not _kind(found[0]).endswith("_cell"):
        return None
    (call,) = found
    kind, more, _ = _KINDS[_kind(call).removesuffix("_cell")]
    x, states, *arrays = call.args
    states = states if isinstance(states, tuple) else (states,)
    arrays = [one for one in arrays if one is not None]
    made = {one.name: one for one in calls}
    zeros = [one.name for one in states if _is_zero(made.get(one.name))]
    others = {one.name for one in calls if not _picks(one, call)} - {call.name, *zeros}
    if others or len(zeros) not in (0, len(states)) or len(arrays) not in (2, 4):
        return None
    given = (x.name,) if zeros else (x.name, *(one.name for one in states))
    is_foreign = any(local_array(structure, unit, one.name) is None for one in arrays)
    if is_foreign or {*given} & made.keys() or len(structure.values[x.name][1]) != 2:
        return None
    hidden, width = (structure.values[arrays[at].name][1][1] for at in (1, 0))
    held: dict[str, Any] = {
        arrays[0].name: ("ih.kernel", (1, 0)), arrays[1].name: ("hh.kernel", (1, 0)),
    }  # fmt: skip
    for array, name in zip(arrays[2:], ("ih.bias", "hh.bias"), strict=False):
        held[array.name] = (name, None)
    options = more + ("" if len(arrays) == 4 else "use_bias=False, ")
    options += keywords(structure.values[arrays[0].name][0])
    code = expr(f"{kind}({width}, {hidden}, {options}rngs=rngs)")
    results = _results(calls, call, len(states))
    if len(states) == 1:  # such a cell gives its state alone; the class gives a tuple
        results = (call.name,)
    inner = {"ih": "nnx.Linear", "hh": "nnx.Linear"}
    return Layer(code, given, call.name, held, kind, "cell", results=results, inner=inner)


def _kind(call: Call) -> str:
    return call.op.partition("::")[2].partition(".")[0].removesuffix("_with_dropout")


def _picks(one: Call, call: Call) -> bool:
    return one.op == "sym::getitem" and one.args[0] == Ref(call.name)


def _results(calls: Sequence[Call], call: Call, count: int) -> tuple[str, ...]:
    """Returns what the results of a call are called; empty for those that nobody uses."""
    names: Mapping[Any, str] = {one.args[1]: one.name for one in calls if _picks(one, call)}
    return tuple(names.get(at, "") for at in range(count))


def _is_zero(call: Call | None) -> bool:
    if call is None:
        return False
    name = call.op.partition("::")[2].partition(".")[0]
    if name in ("zeros", "new_zeros", "zeros_like"):
        return True
    return name == "full" and call.args[1] == 0
