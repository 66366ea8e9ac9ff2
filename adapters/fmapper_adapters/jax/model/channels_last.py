"""Keeps images channels-last between convolutions on the CPU, which saves transposes.

torch's images are channels-first, and XLA's convolution on the CPU is channels-last: it transposes
every image before a convolution and back afterwards, because it does not carry a layout from one
operation to the next. With this pass, the result of a convolution keeps its layout, and a note of
the order of its dimensions, through elementwise operations, pooling, padding, reductions and others
that can work along other dimensions. All other operations get the dimensions in torch's order. The
values are the same; only their order in memory differs.

The pass works on the jaxpr that a program becomes, not on the program: it has a rule for about 70
JAX primitives, instead of one for more than 400 ATen operations and those of users, most of which
consist of several primitives; and the sizes of a call decide which convolution is a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

from fmapper.programs import reshape_groups
from fmapper_adapters.jax.equations import bind, evaluate, trace
from fmapper_adapters.jax.model import conv_as_matmul

Order = tuple[int, ...]


@dataclass(frozen=True)
class Turned:
    """An array with permuted dimensions: dimension i of the value is dimension `order[i]`."""

    array: Any
    order: Order

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the value."""
        return tuple(self.array.shape[i] for i in self.order)

    def plain(self) -> Any:
        """Returns the value with its dimensions in their original order."""
        return jax.lax.transpose(self.array, self.order)


def channels_last(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function to keep images channels-last between its operations."""

    def run(*args: Any) -> Any:
        closed, tree = trace(function, *args)
        outputs = evaluate(closed, jax.tree.leaves(args), _replace, Turned)
        return jax.tree.unflatten(tree, map(_plain, outputs))

    return run


def _replace(eqn: Any, given: Sequence[Any]) -> Sequence[Any]:
    outputs, name = None, eqn.primitive.name
    if name == "conv_general_dilated":
        outputs = _convolve(eqn, given)
    elif name in _RULES and any(isinstance(x, Turned) for x in given):
        outputs = _RULES[name](eqn, given)
    return bind(eqn, [_plain(x) for x in given]) if outputs is None else outputs


def _plain(x: Any) -> Any:
    return x.plain() if isinstance(x, Turned) else x


def _lay(x: Any, order: Order) -> Any:
    """Returns x with its dimensions in an order."""
    if isinstance(x, Turned):
        if x.order == order:
            return x.array
        x = x.plain()
    if jnp.ndim(x) == 0:
        return x
    back = _inverse(order)
    if sum(size != 1 for size in x.shape) <= 1:
        return x.reshape([x.shape[i] for i in back])
    return jax.lax.transpose(x, back)


def _inverse(order: Order) -> Order:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _turn(array: Any, order: Order) -> Any:
    return array if order == tuple(range(len(order))) else Turned(array, order)


# --- convolutions -------------------------------------------------------------------------------


def _convolve(eqn: Any, given: Sequence[Any]) -> list[Any] | None:
    x, weight = given[0], _plain(given[1])
    params = dict(eqn.params)
    names = params["dimension_numbers"]
    count = len(names.lhs_spec)
    as_it_is = tuple(range(count))
    if count < 3 or {names.lhs_spec, names.out_spec} != {as_it_is}:
        return None
    last: Order = (0, count - 1, *range(1, count - 1))
    images = _lay(x, last)
    places = eqn.outvars[0].aval.shape[2:]
    if _is_simple(params, as_it_is) and conv_as_matmul.pays(images, weight, places):
        y = conv_as_matmul.convolve(images, weight, places, **params)
    else:
        params["dimension_numbers"] = names._replace(lhs_spec=last, out_spec=last)
        (y,) = bind(eqn, (images, weight), params)
    return [_turn(y, last)]


def _is_simple(params: dict[str, Any], as_it_is: Order) -> bool:
    """Returns whether a convolution has one group and no input dilation."""
    return (
        params["dimension_numbers"].rhs_spec == as_it_is
        and params["feature_group_count"] == params["batch_group_count"] == 1
        and set(params["lhs_dilation"]) == {1}
    )


# --- operations that can work along other dimensions --------------------------------------------

_Rule = Callable[[Any, Sequence[Any]], "list[Any] | None"]
_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def enter(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return enter


_ELEMENTWISE = """abs add and atan2 cbrt ceil clamp convert_element_type copy cos cosh div eq erf
erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul
ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
stop_gradient sub tan tanh xor"""


@_rule(*_ELEMENTWISE.split())
def _elementwise(eqn: Any, given: Sequence[Any]) -> list[Any] | None:
    """Gives operands the layout of the one that is as large as the result."""
    shape = eqn.outvars[0].aval.shape
    order = next((x.order for x in given if isinstance(x, Turned) and x.shape == shape), None)
    if order is None or any(len(_shape(x)) not in (0, len(shape)) for x in given):
        return None
    outputs = bind(eqn, [_lay(x, order) for x in given])
    return [_turn(y, order) for y in outputs]


def _shape(x: Any) -> tuple[Any, ...]:
    return x.shape if isinstance(x, Turned) else jnp.shape(x)


@_rule("transpose")
def _transpose(eqn: Any, given: Sequence[Any]) -> list[Any]:
    (x,) = given
    return [_turn(x.array, tuple(x.order[i] for i in eqn.params["permutation"]))]


@_rule(
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "squeeze"
)
def _drop(eqn: Any, given: Sequence[Any]) -> list[Any]:
    """Drops dimensions; the remaining ones keep their layout."""
    (x,) = given
    name = "axes" if "axes" in eqn.params else "dimensions"
    gone = tuple(sorted(x.order[i] for i in eqn.params[name]))
    outputs = bind(eqn, [x.array], {**eqn.params, name: gone})
    left = [place for place in x.order if place not in gone]
    ranks = sorted(left)
    return [_turn(y, tuple(map(ranks.index, left))) for y in outputs]


_ALONG = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation",
          "padding_config", "start_indices", "limit_indices", "strides")  # fmt: skip


@_rule("reduce_window_max", "reduce_window_min", "reduce_window_sum", "slice", "pad")
def _along_each(eqn: Any, given: Sequence[Any]) -> list[Any]:
    """Permutes parameters that have one entry per dimension."""
    x, *others = given
    if not isinstance(x, Turned):  # a padding value
        return bind(eqn, [_plain(y) for y in given])
    back = _inverse(x.order)
    params = {
        name: tuple(value[i] for i in back) if name in _ALONG and value is not None else value
        for name, value in eqn.params.items()
    }
    return [_turn(bind(eqn, [x.array, *map(_plain, others)], params)[0], x.order)]


@_rule("concatenate")
def _concatenate(eqn: Any, given: Sequence[Any]) -> list[Any]:
    order = next(x.order for x in given if isinstance(x, Turned))
    params = {**eqn.params, "dimension": order[eqn.params["dimension"]]}
    return [_turn(bind(eqn, [_lay(x, order) for x in given], params)[0], order)]


@_rule("split", "rev")
def _at_axis(eqn: Any, given: Sequence[Any]) -> list[Any]:
    (x,) = given
    params = dict(eqn.params)
    if "axis" in params:
        params["axis"] = x.order[params["axis"]]
    else:
        params["dimensions"] = tuple(x.order[i] for i in params["dimensions"])
    return [_turn(y, x.order) for y in bind(eqn, [x.array], params)]


@_rule("reshape")
def _reshape(eqn: Any, given: Sequence[Any]) -> list[Any] | None:
    """Reshapes where merged or split dimensions are adjacent in the layout."""
    (x,) = given
    if eqn.params.get("dimensions") is not None or eqn.params.get("sharding") is not None:
        return None
    new = eqn.outvars[0].aval.shape
    old, wanted = ([n if isinstance(n, int) else str(n) for n in s] for s in (x.shape, new))
    groups, fits = reshape_groups(old, wanted)
    sized = []  # for each group, where it begins in the array, and its new dimensions
    for here, there in groups:
        lies = x.order[here]
        if not fits or lies != tuple(range(lies[0], lies[0] + len(lies)) if lies else ()):
            return None
        sized.append((lies[0] if lies else len(x.order), range(there.start, there.stop)))
    flat = [i for _, there in sorted(sized, key=itemgetter(0)) for i in there]
    return [_turn(x.array.reshape([new[i] for i in flat]), _inverse(tuple(flat)))]
