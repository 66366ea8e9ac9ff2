"""Convolutions of NNX."""

from __future__ import annotations

from typing import Any

from fmapper.translation import Layer, Ref, expr
from fmapper_adapters.jax.translation.layers.site import Site, keywords, stem_of


def convolution(site: Site) -> Layer | None:
    """Returns a convolution, transposed or not, with the channels first."""
    if site.call.op.partition("::")[2].partition(".")[0] == "convolution":
        stride, padding, dilation, is_transposed, extra, groups = site.call.args[3:9]
        if is_transposed:
            return _transposed_conv(site, stride, padding, extra, groups, dilation)
        return _plain(site, stride, padding, dilation, groups)
    stride, padding, dilation, groups = (site.arg(i) for i in range(3, 7))
    return _plain(site, stride, padding, dilation, groups)


def transposed_conv(site: Site) -> Layer | None:
    """Returns a transposed convolution with the channels first."""
    stride, padding, extra, groups, dilation = (site.arg(i) for i in range(3, 8))
    return _transposed_conv(site, stride, padding, extra, groups, dilation)


def _plain(site: Site, stride: Any, padding: Any, dilation: Any, groups: Any) -> Layer | None:
    dims = _dimensions(site)
    if not dims:
        return None
    weight = site.array(1)
    assert weight is not None
    shape = site.shape(weight[0])
    options = f"padding={_padding(padding, dims)}, "
    if (groups or 1) != 1:
        options += f"feature_group_count={groups}, "
    return _layer(site, "Conv", shape[1] * (groups or 1), shape[0], options, stride, dilation)


def _transposed_conv(
    site: Site, stride: Any, padding: Any, extra: Any, groups: Any, dilation: Any
) -> Layer | None:
    dims = _dimensions(site)
    if not dims or any(isinstance(one, Ref) for one in (extra, padding)):
        return None
    weight = site.array(1)
    assert weight is not None
    shape, groups = site.shape(weight[0]), groups or 1
    each = (_each(dilation, 1, dims), shape[2:], _each(padding, 0, dims))
    reach = [d * (k - 1) - p for d, k, p in zip(*each, strict=True)]
    pads = [(r, r + e) for r, e in zip(reach, _each(extra, 0, dims), strict=True)]
    kind, options = "ConvTranspose", f"padding={_pairs(pads)}, transpose_kernel=True, "
    if groups != 1:
        kind, options = "GroupedConvTranspose", f"groups={groups}, padding={pads}, "
    return _layer(site, kind, shape[0], shape[1] * groups, options, stride, dilation)


def _dimensions(site: Site) -> int:
    """Returns how many dimensions are convolved; 0 where no layer does that."""
    weight, bias = site.array(1), site.array(2)
    given = site.arg(0)
    if weight is None or not isinstance(given, Ref) or (bias is None and site.arg(2) is not None):
        return 0
    dims = len(site.shape(weight[0])) - 2
    is_batch = len(site.shape(given.name)) == dims + 2
    return dims if is_batch and site.dtype(given.name) == site.dtype(weight[0]) else 0


def _layer(
    site: Site, kind: str, given: int, made: int, options: str, stride: Any, dilation: Any
) -> Layer:
    weight, bias, x = site.array(1), site.array(2), site.arg(0)
    assert weight is not None
    shape = site.shape(weight[0])
    dims = len(shape) - 2
    stride, dilation = _each(stride, 1, dims), _each(dilation, 1, dims)
    before = "" if bias else "use_bias=False, "
    if any(s != 1 for s in stride):
        before += f"strides={_same(stride)}, "
    if any(d != 1 for d in dilation):
        before += f"kernel_dilation={_same(dilation)}, "
    before += keywords(site.dtype(weight[0]))
    code = f"{kind}({given}, {made}, {tuple(shape[2:])}, {before}{options}rngs=rngs)"
    arrays: dict[str, Any] = {weight[0]: ("kernel", (*range(2, dims + 2), 1, 0))}
    if bias:
        arrays[bias[0]] = ("bias", None)
    stem = stem_of(weight[1], "conv")
    return Layer(expr(code), (x.name,), site.call.name, arrays, kind, stem)


def _padding(value: Any, dims: int) -> str:
    """Returns how NNX calls padding; what torch calls `same` is as in JAX, with strides of one."""
    return repr(value.upper()) if isinstance(value, str) else _same(_each(value, 0, dims))


def _pairs(pads: list[tuple[int, int]]) -> str:
    """Prints the padding before and after each dimension: one number where all are equal."""
    return repr(pads[0][0] if len({one for pair in pads for one in pair}) == 1 else pads)


def _each(value: Any, default: int, dims: int) -> tuple[int, ...]:
    if value is None:
        return (default,) * dims
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _same(values: tuple[int, ...]) -> str:
    return repr(values[0] if len(set(values)) == 1 else values)
