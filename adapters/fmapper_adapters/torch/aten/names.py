"""The torch operations that a program may call.

A program file is not trusted, so a program may call only the operations in this list: those that
compute tensors from tensors, as they occur in recordings of torch models. None of them writes to
its arguments, opens files or takes addresses, and each checks its indices. Kernels that trust the
indices in their arguments are excluded: backward passes of pooling, `segment_reduce`, CTC losses,
fractional pooling, solvers that take pivots.

The list is written by hand because nothing says which kernels check their indices: schemas do not,
and the lowerings to JAX include unsafe ones. Besides, those are in another adapter, which may not
be installed. A test compares the two.
"""

from __future__ import annotations

_WORDS = """
    __and__ __lshift__ __or__ __rshift__ __xor__ _adaptive_avg_pool2d _adaptive_avg_pool3d
    _assert_async _assert_scalar _batch_norm_with_update_functional _cdist_forward _conj
    _conj_physical _embedding_bag _embedding_bag_forward_only _fft_c2c _fft_c2r _fft_r2c
    _fused_rms_norm _grouped_mm _histogramdd_bin_edges _histogramdd_from_bin_cts
    _histogramdd_from_bin_tensors _int_mm _is_all_true _is_any_true _linalg_det _linalg_eigh
    _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd _local_scalar_dense _log_softmax
    _lu_with_info _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _neg_view _pack_padded_sequence _pad_circular
    _pdist_forward _prelu_kernel _reshape_copy _safe_softmax _sample_dirichlet
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu _softmax
    _standard_gamma _to_copy _trilinear _unique _unique2 _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_lanczos2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d abs acos acosh adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm
    addmv addr affine_grid_generator alias all amax amin aminmax angle any arange arctan2 argmax
    argmin argsort argwhere asin asinh atan atan2 atanh avg_pool1d avg_pool2d avg_pool3d baddbmm
    bartlett_window bernoulli bilinear binary_cross_entropy bincount binomial bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window bmm
    bucketize cat cauchy cdist ceil celu channel_shuffle cholesky cholesky_inverse cholesky_solve
    chunk clamp clamp_max clamp_min clone col2im complex conj conj_physical constant_pad_nd conv1d
    conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution copy
    copysign cos cosh count_nonzero cummax cummin cumprod cumsum deg2rad detach diag_embed diagonal
    diagonal_copy diagonal_scatter digamma dist div dot dropout einsum elu embedding embedding_bag
    embedding_renorm eq erf erfc erfinv exp exp2 expand expm1 exponential eye fft_fftfreq
    fft_rfftfreq fill fix flip floor floor_divide fmax fmin fmod frac frexp full full_like gather
    gcd ge gelu geometric geqrf ger glu grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru
    gru_cell gt hamming_window hann_window hardshrink hardsigmoid hardswish hardtanh heaviside histc
    histogram huber_loss hypot i0 igamma igammac im2col imag index index_add index_copy index_fill
    index_put index_reduce index_select isfinite isin isinf isnan isneginf isposinf isreal item
    kaiser_window kron kthvalue layer_norm lcm ldexp le leaky_relu lerp lgamma lift_fresh
    lift_fresh_copy linalg_cholesky_ex linalg_cross linalg_diagonal linalg_eig linalg_eigvals
    linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_lstsq linalg_lu
    linalg_lu_factor_ex linalg_matmul linalg_matrix_exp linalg_pinv linalg_qr
    linalg_solve_triangular linalg_vecdot linalg_vector_norm linear linspace log log10 log1p log2
    log_normal log_sigmoid log_sigmoid_forward log_softmax logaddexp logaddexp2 logcumsumexp
    logical_and logical_not logical_or logical_xor logit logspace logsumexp lstm lstm_cell lt
    lu_unpack masked_fill masked_scatter masked_select matmul max max_pool2d_with_indices
    max_pool3d_with_indices max_unpool2d max_unpool3d maximum mean median min minimum mish mm mode
    mse_loss msort mul multi_margin_loss multilabel_margin_loss_forward multinomial mv nan_to_num
    nanmedian nansum narrow narrow_copy native_channel_shuffle native_dropout native_group_norm
    native_layer_norm ne neg new_full new_ones new_zeros nextafter nll_loss2d_forward
    nll_loss_forward nonzero nonzero_numpy nonzero_static norm normal normal_functional one_hot ones
    ones_like ormqr outer pad permute permute_copy pixel_shuffle pixel_unshuffle poisson polar
    polygamma positive pow prelu prod put rad2deg rand rand_like randint randint_like randn
    randn_like randperm real reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu
    relu6 remainder renorm repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d reshape resolve_conj resolve_neg rms_norm rnn_relu rnn_relu_cell rnn_tanh
    rnn_tanh_cell roll rot90 round rrelu_with_noise rrelu_with_noise_functional rsqrt rsub
    scalar_tensor scaled_dot_product_attention scatter scatter_add scatter_reduce searchsorted
    select select_copy select_scatter selu sgn sigmoid sign signbit silu sin sinc sinh slice
    slice_copy slice_scatter smooth_l1_loss softmax softplus softshrink sort special_airy_ai
    special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_digamma special_entr special_erf special_erfc
    special_erfcx special_erfinv special_gammainc special_gammaincc special_gammaln
    special_hermite_polynomial_h special_hermite_polynomial_he special_i0 special_i0e special_i1
    special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
    special_logit special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtr special_ndtri special_polygamma special_psi
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta split split_copy
    split_with_sizes split_with_sizes_copy sqrt square squeeze stack std std_mean sub sum swapaxes
    swapdims sym_numel sym_size t take take_along_dim tan tanh tensor_split threshold tile to topk
    trace transpose triangular_solve tril tril_indices triu triu_indices true_divide trunc unbind
    unbind_copy unfold unfold_copy uniform unique_consecutive unique_dim unsafe_chunk unsafe_split
    unsafe_split_with_sizes unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d var var_mean vdot
    view_as_complex view_as_complex_copy view_as_real view_as_real_copy view_copy where xlogy zeros
    zeros_like
"""
NAMES = frozenset(_WORDS.split())
