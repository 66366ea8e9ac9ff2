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
nll_loss2d_forward mse_loss smooth_l1_loss huber_loss binary_cross_entropy multi_margin_loss
multilabel_margin_loss_forward ctc_loss _ctc_loss lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
rrelu_with_noise_functional _fused_rms_norm _scaled_dot_product_flash_attention_for_cpu
"""


def table() -> Any:
    """Torch's own table of decompositions without what is lowered whole."""
    chosen: Any = torch.export.default_decompositions()
    for name in _KEPT.split():
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:  # another version of torch has no such operation
            continue
        for overload in packet.overloads():
            chosen.pop(getattr(packet, overload), None)
    return chosen
