"""Which ATen operations are taken apart before lowering, and which are lowered whole."""

from __future__ import annotations

from typing import Any

import torch

# Whole where the target has it whole, or where torch's own decomposition rounds differently.
_KEPT = """
linear matmul einsum scaled_dot_product_attention bilinear layer_norm native_layer_norm
group_norm native_group_norm rms_norm conv1d conv2d conv3d conv_transpose1d
conv_transpose2d conv_transpose3d convolution embedding embedding_bag _embedding_bag softmax
log_softmax _softmax _log_softmax logsumexp gelu silu mish elu selu celu hardswish hardsigmoid
hardtanh leaky_relu softplus softshrink hardshrink log_sigmoid log_sigmoid_forward relu6 prelu
threshold glu rrelu_with_noise logit upsample_nearest1d upsample_nearest2d upsample_nearest3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d
upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa
_upsample_bicubic2d_aa adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d
avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d
fractional_max_pool2d fractional_max_pool3d pixel_shuffle pixel_unshuffle channel_shuffle im2col
col2im grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator baddbmm addmm addmv
addbmm addr addcmul addcdiv var std var_mean std_mean norm linalg_vector_norm cdist
_cdist_forward native_dropout dropout bernoulli multinomial normal tril triu roll flip rot90
repeat_interleave one_hot index_add index_copy index_fill index_reduce scatter_add
scatter_reduce masked_fill masked_scatter index_select take take_along_dim gather put
select_scatter slice_scatter diagonal_scatter as_strided_scatter searchsorted bucketize
unique_consecutive histc logcumsumexp cumsum cumprod cummax cummin trace kron isin sinc xlogy
special_xlog1py i0 special_i0e special_i1 special_i1e special_ndtri special_log_ndtr
special_erfcx nan_to_num lerp hypot deg2rad rad2deg sgn frac heaviside copysign logaddexp
logaddexp2 aminmax count_nonzero mode nansum nanmedian median floor_divide square linspace
logspace eye full_like zeros_like ones_like new_zeros new_ones new_full rand randn randint
randperm rand_like randn_like randint_like gru lstm rnn_tanh rnn_relu nll_loss_forward
nll_loss2d_forward mse_loss pad reflection_pad1d reflection_pad2d
reflection_pad3d replication_pad1d replication_pad2d replication_pad3d _pad_circular
smooth_l1_loss huber_loss binary_cross_entropy
multi_margin_loss
multilabel_margin_loss_forward ctc_loss _ctc_loss lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
rrelu_with_noise_functional _fused_rms_norm _scaled_dot_product_flash_attention_for_cpu
"""

_NAMES = frozenset(_KEPT.split())


_OVERLOAD = type(torch.ops.aten.add.Tensor)  # torch has no public name for it


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class _Kept:
    """The last table, and the operations outside of ATen that were there when it was made."""

    table: dict[Any, Any] | None = None
    known: frozenset[Any] = frozenset()
    whole: frozenset[Any] = frozenset()  # that torch would have taken apart


def table(exported: torch.export.ExportedProgram) -> dict[Any, Any]:
    """Torch's own table of decompositions without what is lowered whole.

    torch lists all operations there are for it, so it is made anew only for a program with custom
    operations that no earlier one had: they may have been registered since.
    """
    custom = {
        node.target
        for owner in exported.graph_module.modules()
        if isinstance(owner, torch.fx.GraphModule)
        for node in owner.graph.nodes
        if isinstance(node.target, _OVERLOAD) and node.target.namespace != "aten"
    }
    if _Kept.table is None or not custom <= _Kept.known:
        _Kept.known = _Kept.known | custom
        _Kept.table = _table()
    return _Kept.table


def stays(target: Any, table: dict[Any, Any]) -> bool:
    """Whether the decompositions of a table leave an operation as it is.

    Composite operations that change what they are given, or give it back, torch takes apart in any
    case.
    """
    if not isinstance(target, _OVERLOAD) or target.namespace != "aten" or target in table:
        return False
    if target._schema.is_mutable:
        return False
    if target.has_kernel_for_dispatch_key(_COMPOSITE):
        return target in _Kept.whole
    name = target.overloadpacket.__name__
    if name.startswith(("_assert", "_print")):  # effects, which get tokens
        return False
    return name in _NAMES or torch.Tag.core in target.tags


def _table() -> dict[Any, Any]:
    chosen: Any = torch.export.default_decompositions()
    whole = set()
    for name in sorted(_NAMES):
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:  # another version of torch has no such operation
            continue
        for overload in packet.overloads():
            if chosen.pop(getattr(packet, overload), None) is not None:
                whole.add(getattr(packet, overload))
    _Kept.whole = frozenset(whole)
    chosen[torch.ops.aten.as_strided.default] = _as_strided_of_contiguous
    chosen.update(_UNCHECKED)
    return dict(chosen.items())


# Without the check that a factorisation has worked, which would be an effect in the program. One
# that fails gives NaN or infinity: compiled programs cannot raise.
_aten: Any = torch.ops.aten
_UNCHECKED = {
    _aten.linalg_inv.default: lambda a: _aten.linalg_inv_ex(a)[0],
    _aten.linalg_cholesky.default: lambda a, **kwargs: _aten.linalg_cholesky_ex(a, **kwargs)[0],
    _aten.linalg_lu_factor.default: lambda a, **kwargs: _aten.linalg_lu_factor_ex(a, **kwargs)[:2],
    _aten.linalg_solve.default: lambda a, b, **kwargs: _aten._linalg_solve_ex(a, b, **kwargs)[0],
    _aten.linalg_solve_ex.default: (
        lambda a, b, *, left=True, check_errors=False: _aten._linalg_solve_ex(a, b, left=left)[::3]
    ),
}


def _as_strided_of_contiguous(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Strided views where there is no storage: as views of a contiguous array of the elements.

    Raises:
        ValueError: The view shows elements that x does not have.
    """
    start = 0 if storage_offset is None else storage_offset - x.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if all(size) and not (start >= 0 and last < x.numel()):
        raise ValueError(
            f"as_strided({list(size)}, {list(stride)}, {storage_offset}) shows elements of the "
            f"storage that are not in the tensor of shape {list(x.shape)} that it is called on; "
            "call it on the tensor that owns them"
        )
    if x.is_contiguous():
        if start == (storage_offset or 0):
            return NotImplemented
        return x.reshape(-1).clone().as_strided(size, stride, start)
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), -x.size(d)))
    dense = x.permute(order)
    if not dense.is_contiguous():
        raise ValueError(
            f"as_strided on a tensor of shape {list(x.shape)} and stride {list(x.stride())}, "
            "whose elements are not all of its storage; call contiguous() first"
        )
    return dense.reshape(-1).clone().as_strided(size, stride, start)
