"""Whether a layer computes what a submodule does, found out by numbers.

There are many ways to write a normalisation or a bias. Two functions whose values and derivatives
agree in double precision at random places, for two sets of sizes, are taken for the same.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fmapper.programs import DType, Ref, Scalar, Size, size_of
from fmapper.translation import Call, Layer, Structure, Unit, local_array, rows_in, text
from fmapper_adapters.torch.translation.helpers import HELPERS

_PLACES: dict[str, Any] = {
    "torch": torch, "F": torch.nn.functional, "operator": operator, "math": math,
    "torch.special": torch.special, "torch.linalg": torch.linalg, "torch.fft": torch.fft,
}  # fmt: skip
_MOST = 1 << 22  # elements of an array that is computed with
_NEAR = 1e-7  # a rounding of float32 is in the numbers of the program: eps
_DRAWS = ("rand", "bernoulli", "multinomial", "normal", "dropout", "empty")


class _Unknown(Exception):
    """Raised for a call or a size that cannot be computed here."""


def computes_same(structure: Structure, unit: Unit, layer: Layer) -> bool:
    """Returns whether a layer has the values and derivatives of a submodule.

    Args:
        structure: The program.
        unit: The submodule.
        layer: The layer: of one input and one output, with all the arrays of the submodule.
    """
    try:
        return all(_agree(structure, unit, layer, seed) for seed in (0, 1))
    except _Unknown:
        return False


def _agree(structure: Structure, unit: Unit, layer: Layer, seed: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    sizes = {symbol: _example(bounds, seed + 3 + 2 * at)
             for at, (symbol, bounds) in enumerate(structure.program.symbols.items())}  # fmt: skip
    given: dict[str, Any] = {}
    for name in unit.given:
        if name in structure.sizes:
            continue
        dtype, shape = structure.values.get(name, ("", ()))
        whole = tuple(_size(size, sizes) for size in shape)
        if dtype != "float32" or math.prod(whole) > _MOST:
            raise _Unknown
        if local_array(structure, unit, name) is None:
            spread = torch.rand(whole, generator=generator, dtype=torch.float64)
            value = torch.randn(whole, generator=generator, dtype=torch.float64) * 10 ** (-seed)
            value = value * (0.1 + spread)
        else:
            value = 0.5 + torch.rand(whole, generator=generator, dtype=torch.float64)
            if any(call.op == "flow::begin" for call in unit.calls()):  # gates must not saturate
                value = (value - 1.0) * 2.0 / whole[-1] ** 0.5
        given[name] = value.requires_grad_()
    (source,) = layer.inputs
    module = _module(layer, given)
    try:
        wanted = _Run(structure, given, sizes).run(unit)
        found = module(given[source])
        found = found[0] if layer.results else found
    except _Unknown:
        raise
    except Exception as error:  # such a layer does not take that, or the sizes do not fit
        raise _Unknown from error
    if not isinstance(wanted, torch.Tensor) or found.shape != wanted.shape:
        return False
    weights = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    inputs = list(given.values())
    one, other = (
        torch.autograd.grad((value * weights).sum(), inputs, allow_unused=True)
        if value.requires_grad
        else [None] * len(inputs)
        for value in (wanted, found)
    )
    return all(_near(a, b) for a, b in zip((wanted, *one), (found, *other), strict=True))


def _near(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    scale = float(a.detach().abs().max()) if a.numel() else 0.0
    return bool(float((a - b).detach().abs().max()) <= _NEAR * scale) if a.numel() else True


def _example(bounds: tuple[int | None, int | None], wanted: int) -> int:
    low, high = bounds
    return max(low or 1, min(wanted, high or wanted))


def _size(size: int | str, sizes: Mapping[str, int]) -> int:
    known = size if isinstance(size, int) else size_of(size, sizes)
    if not isinstance(known, int) or known <= 0:
        raise _Unknown
    return known


def _module(layer: Layer, given: Mapping[str, Any]) -> Any:
    """Returns the layer, a function of the arrays that are given."""
    namespace: dict[str, Any] = {"torch": torch, "nn": nn, "F": torch.nn.functional}
    helper = HELPERS.get(layer.kind)
    if helper is not None:
        exec(helper.source, namespace)
    made = eval(text(layer.made), namespace).double()
    rows: dict[str, list[tuple[int, Any]]] = {}
    for name, (attr, order) in layer.arrays.items():
        whole, at = rows_in(attr)
        value = put_in_order(given[name], order)
        rows.setdefault(whole, []).append((at.start if at else 0, value))
    held = {
        attr: torch.cat([value for _, value in sorted(several, key=operator.itemgetter(0))])
        if len(several) > 1
        else several[0][1].reshape(made.get_parameter(attr).shape)
        for attr, several in rows.items()
    }
    if held.keys() != dict(made.named_parameters()).keys():
        raise _Unknown
    return lambda x: torch.func.functional_call(made, held, (x,))


def put_in_order(array: Any, order: tuple[int, ...] | None) -> Any:
    """Returns an array with its dimensions in an order; `~i` is its dimension i backwards."""
    if order is None:
        return array
    turned = array.permute([max(i, ~i) for i in order])
    return turned.flip([at for at, i in enumerate(order) if i < 0])


class _Run:
    """Computes the calls of a submodule in double precision."""

    def __init__(
        self, structure: Structure, given: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> None:
        self._structure = structure
        self._values = dict(given)
        self._sizes = sizes

    def run(self, unit: Unit) -> Any:
        self._run([*unit.calls()])
        return self._values[unit.gives[0]]

    def _run(self, calls: list[Call]) -> None:
        at = 0
        while at < len(calls):
            call = calls[at]
            if call.op == "flow::begin":
                end = next(i for i, one in enumerate(calls) if i > at and one.op == "flow::end")
                self._loop(call, calls[at + 1 : end], calls[end])
                at = end
            else:
                told = {key: value for key, value in call.kwargs.items() if key != "device"}
                args, kwargs = self._plain(call.args), self._plain(told)
                self._values[call.name] = _function(call)(*args, **kwargs)
            at += 1

    def _loop(self, begin: Call, steps: list[Call], end: Call) -> None:
        """Runs the steps of a loop as often as there are rows."""
        if any(call.op.startswith("flow::") for call in steps) or begin.kwargs["reverse"]:
            raise _Unknown
        carry, xs = map(self._plain, begin.args)
        dims = begin.kwargs.get("dims") or (0,) * len(xs)
        rows = [x.unbind(dim) for x, dim in zip(xs, dims, strict=True)]
        made = []
        for row in zip(*rows, strict=True):
            self._values[begin.name] = (*carry, *row)
            self._run(steps)
            _, carry, ys = map(self._plain, end.args)
            made.append(ys)
        dims = end.kwargs.get("dims") or (0,) * len(made[0])
        stacks = [
            torch.stack(ys, dim) for ys, dim in zip(zip(*made, strict=True), dims, strict=True)
        ]
        self._values[end.name] = (*carry, *stacks)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Ref):
            known = self._structure.sizes.get(value.name)
            if known is not None:
                return _size(known, self._sizes)
            if value.name not in self._values:
                raise _Unknown
            return self._values[value.name]
        if isinstance(value, Size):
            return _size(value.expression, self._sizes)
        if isinstance(value, Scalar):
            return value.value
        if isinstance(value, DType):
            if value.name == "float32":
                return torch.float64
            dtype = getattr(torch, value.name)
            if dtype.is_floating_point or dtype.is_complex:
                raise _Unknown
            return dtype
        if isinstance(value, tuple):
            return tuple(self._plain(one) for one in value)
        if isinstance(value, Mapping):
            if set(value) == {"slice"}:
                return slice(*self._plain(tuple(value["slice"])))
            return {key: self._plain(one) for key, one in value.items()}
        return value


def _function(call: Call) -> Any:
    kind, _, name = call.op.partition("::")
    place, _, last = name.rpartition(".")
    if any(word in last for word in _DRAWS):
        raise _Unknown
    if kind == "tensor":
        return operator.methodcaller if not name else _method(name)
    if (kind, name) == ("torch", "sym_size"):
        return lambda array, dim: array.shape[dim]
    if kind == "sym":
        return getattr(operator, name)
    found = getattr(_PLACES.get(place), last, None) if kind == "torch" else None
    if found is None:
        raise _Unknown
    return found


def _method(name: str) -> Any:
    return lambda owner, *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def numbers_in(unit: Unit) -> Iterator[float]:
    """Yields the numbers that the calls of a submodule compute with."""
    for call in unit.calls():
        todo = [call.args, tuple(call.kwargs.values())]
        while todo:
            for one in todo.pop():
                if isinstance(one, tuple):
                    todo.append(one)
                elif isinstance(one, float):
                    yield one
                elif isinstance(one, Scalar) and isinstance(one.value, float):
                    yield one.value
