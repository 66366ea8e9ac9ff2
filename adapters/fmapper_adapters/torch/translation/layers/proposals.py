"""Layers of torch for submodules that compute the same in other words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fmapper.translation import Call, Layer, Structure, Unit, expr, local_array
from fmapper_adapters.torch.translation.layers import convolutions, equality
from fmapper_adapters.torch.translation.layers.site import Site, dtype_option, name_of
from fmapper_adapters.torch.translation.printers import shortest

_MOST = 24  # layers that are tried in the place of a submodule


def layer_of_unit(structure: Structure, unit: Unit) -> Layer | None:
    """Returns a layer that has the values and derivatives of a submodule."""
    calls = [*unit.calls()]
    arrays = [name for name in unit.given if name not in structure.sizes]
    given = [name for name in arrays if local_array(structure, unit, name) is None]
    own = [name for name in arrays if name not in given]
    is_simple = len(unit.gives) == 1 and not any(call.op.startswith("flow::") for call in calls)
    if not is_simple or len(given) != 1:
        return None
    if not own:
        pooling = _adaptive_pooling(Site(structure, unit, whole=False), given[0])
        same = pooling is not None and equality.computes_same(structure, unit, pooling)
        return pooling if same else None
    if len(arrays) < len(unit.given):
        return None
    if any(structure.inputs[name].kind != "parameter" for name in own):
        return None
    site = Site(structure, unit, whole=False)
    found = _low_ranks(site, given[0], own)
    if all(isinstance(step, Call) for step in unit.steps):
        convolutions_of = _convolutions(site, calls, given[0], own)
        found = itertools.chain(found, convolutions_of, _norms(site, unit, given[0], own))
    for layer in itertools.islice(found, _MOST):
        if equality.computes_same(structure, unit, layer):
            return layer
    return None


def _adaptive_pooling(site: Site, x: str) -> Layer | None:
    """Returns the layer of torch for one of Equinox that pools to a size."""
    cls = site.structure.program.types.get(site.unit.path, "")
    found = re.fullmatch(r"equinox\..*\.(Adaptive(?:Avg|Max)Pool([123])d)", cls)
    if found is None:
        return None
    sizes = site.shape(site.unit.gives[0])[-int(found[2]) :]
    if not all(isinstance(size, int) for size in sizes):
        return None
    told = sizes[0] if len({*sizes}) == 1 else sizes
    code = expr(f"nn.{found[1]}({told})")
    return Layer(code, (x,), site.unit.gives[0], {}, f"nn.{found[1]}", "pool")


def _low_ranks(site: Site, x: str, own: list[str]) -> Iterator[Layer]:
    """Yields linear layers to which a product of two thin matrices is added."""
    shapes = {name: site.shape(name) for name in own}
    out = site.shape(site.unit.gives[0])[-1:]
    width = site.shape(x)[-1:]
    biases = [name for name in own if shapes[name] == out]
    matrices = [name for name in own if len(shapes[name]) == 2]
    if len(matrices) != 3 or len(biases) > 1 or len(matrices) + len(biases) != len(own):
        return
    for weight, down, up in itertools.permutations(matrices):
        rank = shapes[down][1]
        wanted = width + out, (*width, rank), (rank, *out)
        if (shapes[weight], shapes[down], shapes[up]) != wanted:
            continue
        arrays: dict[str, Any] = {
            weight: ("weight", (1, 0)), down: ("lora_a", (1, 0)), up: ("lora_b", (1, 0)),
            **dict.fromkeys(biases, ("bias", None)),
        }  # fmt: skip
        end = "" if biases else ", bias=False"
        code = expr(f"LoRALinear({width[0]}, {out[0]}, {rank}{end})")
        yield Layer(code, (x,), site.unit.gives[0], arrays, "LoRALinear", "linear")


def _convolutions(site: Site, calls: list[Call], x: str, own: list[str]) -> Iterator[Layer]:
    """Yields convolutions, with what is left as the bias."""
    kinds = (*convolutions.PLAIN, *convolutions.TRANSPOSED)
    found = [call for call in calls if name_of(call) in kinds]
    draft = convolutions.draft_of(site, found[0]) if len(found) == 1 else None
    if draft is None:
        return
    left = [name for name in own if name not in draft.arrays]
    made = draft.sizes[1]
    sizes = [size for name in left for size in site.shape(name) if size != 1]
    if len(left) > 1 or (left and sizes not in ([made], [])):
        return
    if left:
        draft.arrays[left[0]] = ("bias", None)
        draft.options["bias"] = True
    for kind in (f"nn.{draft.kind}", f"{draft.kind}Last"):
        code = expr(f"{kind}({draft.code()})")
        yield Layer(code, (x,), site.unit.gives[0], draft.arrays, kind, draft.name)


def _norms(site: Site, unit: Unit, x: str, own: list[str]) -> Iterator[Layer]:
    """Yields normalisations of groups of channels, and of the last dimensions."""
    shape, scale = site.shape(x), site.shape(own[0])
    if site.shape(unit.gives[0]) != shape or len(shape) < 2 or len(own) > 2:
        return
    if any(site.shape(name) != scale for name in own):
        return
    epsilons = [e for e in dict.fromkeys(map(shortest, equality.numbers_in(unit))) if 0 < e < 0.1]
    for eps in epsilons[:2]:
        for layer in _norms_with(site, x, own, eps):
            yield replace(layer, inputs=(x,), output=unit.gives[0])


def _norms_with(site: Site, x: str, own: list[str], eps: float) -> Iterator[Layer]:
    shape, scale = site.shape(x), site.shape(own[0])
    named = sorted(own, key=lambda name: "bias" in str(site.structure.inputs[name].target))
    end = dtype_option(site, x)
    if shape[-len(scale) :] == scale:
        sizes: Any = scale[0] if len(scale) == 1 else scale
        options = ("" if eps == 1e-5 else f", eps={eps!r}") + end
        bias = ", bias=False" if len(own) == 1 else ""
        arrays = dict(zip(named, (("weight", None), ("bias", None)), strict=False))
        yield Layer(expr(f"nn.LayerNorm({sizes}{options}{bias})"), (), "", arrays, "nn.LayerNorm",
                    "norm")  # fmt: skip
        if len(own) == 1:
            yield Layer(expr(f"nn.RMSNorm({sizes}, eps={eps!r}{end})"), (), "", arrays,
                        "nn.RMSNorm", "norm")  # fmt: skip
    if len(scale) != 1 or len(own) != 2:
        return
    (channels,) = scale
    arrays = dict(zip(named, (("weight", None), ("bias", None)), strict=True))
    kinds = []
    if shape[1] == channels:
        kinds.append("nn.GroupNorm")
    if shape[-1] == channels:
        kinds.append("GroupNormLast")
    if shape[0] == channels:
        kinds.append("GroupNormOfOne")
    options = ("" if eps == 1e-5 else f", eps={eps!r}") + end
    for kind, groups in itertools.product(kinds, _groups(site, channels)):
        yield Layer(expr(f"{kind}({groups}, {channels}{options})"), (), "", arrays, kind, "norm")


def _groups(site: Site, channels: int) -> list[int]:
    """Returns in how many groups channels may be, those first that the code names."""
    named: set[Any] = set()
    for call in site.made.values():
        named |= {size for size in site.shape(call.name) if isinstance(size, int)}
    divisors = [n for n in range(1, channels + 1) if channels % n == 0]
    return sorted(divisors, key=lambda n: (n not in named or n == 1, -n))
