"""Convolutions of torch, transposed or not, with the channels first or last."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fmapper.translation import Call, Layer, Ref, expr
from fmapper_adapters.torch.translation.layers.site import (
    Order,
    Site,
    dtype_option,
    name_of,
    permutation_of,
    stem_of,
)

PLAIN = ("torch.conv1d", "torch.conv2d", "torch.conv3d", "F.conv1d", "F.conv2d", "F.conv3d")
TRANSPOSED = tuple(
    f"{place}.conv_transpose{dims}d" for place in ("torch", "F") for dims in (1, 2, 3)
)
_PADS = ("torch.constant_pad_nd", "F.pad")


@dataclass(slots=True)
class Draft:
    """Collects what is known of a convolution, call by call.

    Attributes:
        kind: Its class without its module.
        sizes: Channels in, channels out, and the sizes of the kernel.
        options: Its keywords: sizes for each dimension, and others.
        arrays: As a layer has them.
        name: What to call it.
        tail: The code of further keywords.
    """

    kind: str
    sizes: tuple[int, int, tuple[int, ...]]
    options: dict[str, Any]
    arrays: dict[str, Any]
    name: str
    tail: str = ""

    def code(self) -> str:
        """Returns its arguments."""
        given, made, kernel = self.sizes
        told = {
            key: value if key in ("pad", "crop") else _same(value)
            for key, value in self.options.items()
        }
        keywords = "".join(
            f", {key}={told[key]}" for key, usual in _USUAL.items() if told.get(key, usual) != usual
        )
        return f"{given}, {made}, {_same(kernel)}{keywords}{self.tail}"


_USUAL: dict[str, Any] = {
    "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1, "bias": True,
    "pad": None, "crop": None,
}  # fmt: skip


def convolution(site: Site, call: Call) -> Layer | None:
    """Finds a convolution, with padding before it and a bias after it."""
    draft = draft_of(site, call)
    if draft is None:
        return None
    x, last = call.args[0], call.name
    dims = len(site.shape(last)) - 2
    user = site.user(last) if name_of(call) in TRANSPOSED else None
    crop = _crop(user, last)
    if crop is not None and user is not None:
        draft.options["crop"], last = crop, user.name
    pad = site.call(x, *_PADS) if site.whole and name_of(call) in PLAIN else None
    if pad is not None:
        padded = _padding_of(pad, dims)
        if padded is None or set(draft.options["padding"]) != {0}:
            return None
        draft.options |= padded
        site.seen.add(pad.name)
        call = replace(call, args=(pad.args[0], *call.args[1:]))
    added = None if draft.options["bias"] else _bias_after(site, last, dims)
    if added is not None:
        own, last = added
        draft.arrays[own[0]] = ("bias", None)
        draft.options["bias"] = True
    found = _around(site, call, draft, last, is_longer=added is not None or crop is not None)
    if "pad" in draft.options or crop is not None:
        return found if found is not None and found.kind.endswith("Last") else None
    return found


def draft_of(site: Site, call: Call) -> Draft | None:
    """Returns the layer that computes a call alone."""
    x, weight = call.args[:2]
    is_transposed = name_of(call) in TRANSPOSED
    held = site.array_with_flips(weight)
    if held is None or not isinstance(x, Ref):
        return None
    order = held[2]
    sizes = site.shape(held[0])
    shape = [sizes[max(i, ~i)] for i in (order or range(len(sizes)))]
    dims = len(shape) - 2
    if dims < 1 or len(site.shape(x)) != dims + 2:
        return None
    options = (_transposed_numbers if is_transposed else _numbers)(call, dims)
    if any(isinstance(one, Ref) for value in options.values() for one in _each(value, 1)):
        return None
    bias = _arg(call, 2, "bias")
    own = None if bias is None else site.array(bias)
    if bias is not None and (own is None or own[2] is not None):
        return None
    groups = options["groups"]
    channels = (shape[0], shape[1] * groups) if is_transposed else (shape[1] * groups, shape[0])
    arrays: dict[str, Any] = {held[0]: ("weight", order)}
    if own is not None:
        arrays[own[0]] = ("bias", None)
    return Draft(
        f"Conv{'Transpose' if is_transposed else ''}{dims}d", (*channels, tuple(shape[2:])),
        options | {"bias": own is not None}, arrays, stem_of(held[1], "conv"),
        dtype_option(site, held[0]),
    )  # fmt: skip


def _numbers(call: Call, dims: int) -> dict[str, Any]:
    places = ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    found = {key: _each(_arg(call, at, key, usual), dims) for at, key, usual in places}
    return found | {"groups": _arg(call, 6, "groups", 1)}


def _transposed_numbers(call: Call, dims: int) -> dict[str, Any]:
    places = (
        (3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0), (7, "dilation", 1),
    )  # fmt: skip
    found = {key: _each(_arg(call, at, key, usual), dims) for at, key, usual in places}
    return found | {"groups": _arg(call, 6, "groups", 1)}


def _arg(call: Call, at: int, key: str, default: Any = None) -> Any:
    return call.args[at] if at < len(call.args) else call.kwargs.get(key, default)


def _padding_of(pad: Call, dims: int) -> dict[str, Any] | None:
    """Returns the padding before a convolution as its options: an even one, or a `pad`."""
    widths = tuple(pad.args[1])
    if _arg(pad, 2, "value", 0) != 0 or len(widths) > 2 * dims:
        return None
    if any(isinstance(one, Ref) for one in widths):
        return None
    widths += (0,) * (2 * dims - len(widths))
    sides = [(widths[2 * i], widths[2 * i + 1]) for i in reversed(range(dims))]
    if any(low != high or low < 0 for low, high in sides):
        return {"pad": widths}
    return {"padding": tuple(low for low, _ in sides)}


def _crop(user: Call | None, value: str) -> tuple[int, ...] | None:
    """Returns how much a call takes from the sides of a result, as `F.pad` has it."""
    if user is None or name_of(user) not in _PADS or user.args[0] != Ref(value):
        return None
    widths = tuple(user.args[1])
    is_crop = all(isinstance(one, int) and one <= 0 for one in widths)
    return widths if is_crop and _arg(user, 2, "value", 0) == 0 else None


def _bias_after(site: Site, value: str, dims: int) -> tuple[tuple[str, str, Order], str] | None:
    """Returns the bias that is added to a result, through a permutation, and what that gives."""
    user = site.user(value)
    at = value
    if user is not None and permutation_of(user, dims + 2) is not None:
        at, user = user.name, site.user(user.name)
    if user is None or name_of(user) not in ("operator.add", "torch.add"):
        return None
    others = [one for one in user.args if one != Ref(at)]
    bias = site.array(others[0]) if len(others) == 1 else None
    if bias is None or bias[2] is not None or len(site.shape(bias[0])) != 1 or at == value:
        return None
    return bias, user.name


def _around(site: Site, call: Call, draft: Draft, output: str, *, is_longer: bool) -> Layer | None:
    """Returns the layer for a convolution and what is done around it.

    Args:
        site: The submodule.
        call: The convolution.
        draft: The layer.
        output: What it gives.
        is_longer: Whether that is more than the convolution gives.
    """
    if not is_longer:
        return channels(site, call, draft.kind, draft.code(), draft.arrays, draft.name)
    ndim = len(site.shape(call.name))
    after = [call.name]
    while after[-1] != output and (user := site.user(after[-1])) is not None:
        after.append(user.name)
    turns = [site.made[one] for one in after if permutation_of(site.made[one], ndim) is not None]
    if not turns and (user := site.user(output)) is not None:
        turns.append(user)
        after.append(user.name)
    before = site.made.get(call.args[0].name)
    if before is None or permutation_of(before, ndim) != (0, ndim - 1, *range(1, ndim - 1)):
        return None
    if len(turns) != 1 or permutation_of(turns[0], ndim) != (0, *range(2, ndim), 1):
        return None
    site.seen |= {before.name, *after}
    kind = f"{draft.kind}Last"
    return Layer(expr(f"{kind}({draft.code()})"), (before.args[0].name,), after[-1], draft.arrays,
                 kind, draft.name)  # fmt: skip


def channels(
    site: Site, call: Call, kind: str, options: str, arrays: dict[str, Any], stem: str,
    output: str = "",
) -> Layer | None:  # fmt: skip
    """Returns a layer that takes the channels first or, if that is what is done around it, last."""
    x: Any = call.args[0]
    before = site.made.get(x.name) if site.whole else None
    ndim = len(site.shape(call.name))
    to_first = (0, ndim - 1, *range(1, ndim - 1))
    to_last = (0, *range(2, ndim), 1)
    user = site.user(output or call.name)
    if (
        before is not None
        and user is not None
        and permutation_of(before, ndim) == to_first
        and permutation_of(user, ndim) == to_last
    ):
        site.seen |= {call.name, before.name, user.name, output or call.name}
        return Layer(expr(f"{kind}Last({options})"), (before.args[0].name,), user.name, arrays,
                     f"{kind}Last", stem)  # fmt: skip
    site.seen |= {call.name, output or call.name}
    return Layer(expr(f"nn.{kind}({options})"), (x.name,), output or call.name, arrays,
                 f"nn.{kind}", stem)  # fmt: skip


def _each(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * dims if len(values) == 1 else values


def _same(value: Any) -> Any:
    """Returns one size for several that are the same."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value
