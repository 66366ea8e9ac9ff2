"""Layers of torch.nn with their options, and inputs for them: what converted ones are compared on.

`CASES` maps a name to what makes a module or function and
to its inputs; weights and inputs are random with a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

Case = tuple[Callable[[], Any], tuple[Any, ...]]
CASES: dict[str, Case] = {}
_numbers = torch.Generator().manual_seed(0)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_numbers)


def u(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_numbers)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_numbers)


def case(kind: str, make: Callable[[], Any], *inputs: Any, name: str = "") -> None:
    label = f"{kind}{': ' if name else ''}{name}"
    while label in CASES:
        label += "'"
    CASES[label] = (make, inputs)


def layer(kind: str, *inputs: Any, **options: Any) -> None:
    """A class of torch.nn with options."""
    shown = ", ".join(f"{key}={_short(value)}" for key, value in options.items())
    case(kind, lambda: getattr(nn, kind)(**options), *inputs, name=shown)


def _short(value: Any) -> str:
    return f"{list(value.shape)}" if torch.is_tensor(value) else repr(value)


def build(make: Callable[[], Any]) -> Any:
    """The module, with weights and statistics that are not those that it starts with."""
    torch.manual_seed(0)
    module = make()
    if not isinstance(module, nn.Module):
        return module
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if not isinstance(parameter, nn.parameter.UninitializedParameter):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
            elif name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return module


# --- linear, embedding --------------------------------------------------------------------------

layer("Identity", r(3))
for bias in (True, False):
    layer("Linear", r(4, 3), in_features=3, out_features=2, bias=bias)
layer("Linear", r(3), in_features=3, out_features=2)
layer("Linear", r(2, 0, 3), in_features=3, out_features=2)
layer("Bilinear", r(4, 3), r(4, 2), in1_features=3, in2_features=2, out_features=5)
layer("Flatten", r(2, 3, 4))
layer("Flatten", r(2, 3, 4, 5), start_dim=0, end_dim=-2)
layer("Unflatten", r(2, 12), dim=1, unflattened_size=(3, 4))
TOKENS = torch.tensor([[1, 3, 3, 0], [2, 0, 4, 1]])
layer("Embedding", TOKENS, num_embeddings=5, embedding_dim=3)
layer("Embedding", TOKENS, num_embeddings=5, embedding_dim=3, padding_idx=0)
layer("Embedding", TOKENS, num_embeddings=5, embedding_dim=3, max_norm=0.5)
layer("Embedding", TOKENS, num_embeddings=5, embedding_dim=3, max_norm=0.5, norm_type=1)
INDICES, OFFSETS = torch.tensor([1, 3, 3, 0, 2, 0, 4]), torch.tensor([0, 3, 3, 5])
for mode in ("sum", "mean", "max"):
    for padding in (None, 0, -1):
        for last in (False, True):
            layer(
                "EmbeddingBag",
                INDICES,
                torch.tensor([0, 3, 3, 7]) if last else OFFSETS,
                num_embeddings=5,
                embedding_dim=3,
                mode=mode,
                padding_idx=padding,
                include_last_offset=last,
            )
    layer("EmbeddingBag", TOKENS, num_embeddings=5, embedding_dim=3, mode=mode)
case(
    "embedding_bag with weights",
    lambda: lambda i, w, o, p: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p),
    INDICES,
    r(5, 3),
    OFFSETS,
    r(7),
)

# --- convolution, pooling, sampling -------------------------------------------------------------

SIZES = {1: (9,), 2: (9, 8), 3: (6, 5, 7)}
for n, size in SIZES.items():
    conv, turned = f"Conv{n}d", f"ConvTranspose{n}d"
    x = r(2, 4, *size)
    base = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}
    layer(conv, x, **base)
    layer(conv, x[0], **base)
    layer(conv, x, **base, bias=False, stride=2, padding=1)
    layer(conv, x, **base, dilation=2, groups=2, padding=2)
    layer(conv, x, **base, padding="same")
    for padding_mode in ("reflect", "replicate", "circular"):
        layer(conv, x, **base, padding=1, padding_mode=padding_mode)
    layer(turned, x, **base)
    layer(turned, x[0], **base)
    layer(turned, x, **base, stride=2, padding=1, output_padding=1)
    layer(turned, x, **base, stride=2, dilation=2, groups=2, bias=False)
    layer(turned, x, **base, stride=3, dilation=2, padding=2, groups=2, output_padding=1)
    pool = r(2, 3, *size)
    layer(f"MaxPool{n}d", pool, kernel_size=2)
    layer(f"MaxPool{n}d", pool, kernel_size=3, stride=2, padding=1, ceil_mode=True)
    layer(f"MaxPool{n}d", pool, kernel_size=2, stride=1, dilation=2)
    layer(f"MaxPool{n}d", pool, kernel_size=3, stride=2, return_indices=True)
    layer(f"AvgPool{n}d", pool, kernel_size=2)
    for counted in (True, False):
        options = {"padding": 1, "ceil_mode": True, "count_include_pad": counted}
        layer(f"AvgPool{n}d", pool, kernel_size=3, stride=2, **options)
    if n > 1:
        layer(f"AvgPool{n}d", pool, kernel_size=2, divisor_override=3)
        layer(
            f"FractionalMaxPool{n}d",
            pool,
            kernel_size=2,
            output_size=(3,) * n,
            _random_samples=u(2, 3, n),
        )
    layer(f"LPPool{n}d", pool, norm_type=2, kernel_size=2)
    layer(f"LPPool{n}d", pool.abs(), norm_type=1.5, kernel_size=3, stride=2, ceil_mode=True)
    layer(f"AdaptiveAvgPool{n}d", pool, output_size=3)
    layer(f"AdaptiveAvgPool{n}d", pool, output_size=(1,) * n)
    layer(f"AdaptiveMaxPool{n}d", pool, output_size=3)
    layer(f"AdaptiveMaxPool{n}d", pool, output_size=2, return_indices=True)
    for kind in ("ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"):
        layer(f"{kind}{n}d", pool, padding=tuple(range(1, 3)) * n)
    layer(f"ConstantPad{n}d", pool, padding=(1, -1) * n, value=3.5)

    class Unpool(nn.Module):
        def __init__(self, n: int = n) -> None:
            super().__init__()
            self.down = getattr(nn, f"MaxPool{n}d")(2, return_indices=True)
            self.up = getattr(nn, f"MaxUnpool{n}d")(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(*self.down(x), output_size=x.shape)

    case(f"MaxUnpool{n}d", Unpool, pool)
    layer("Upsample", pool, scale_factor=2, mode="nearest")
    layer("Upsample", pool, size=tuple(s + 3 for s in size), mode="nearest-exact")
    smooth = {1: "linear", 2: "bilinear", 3: "trilinear"}[n]
    for corners in (True, False):
        layer("Upsample", pool, scale_factor=1.5, mode=smooth, align_corners=corners)
layer("AdaptiveAvgPool2d", r(2, 3, 9, 8), output_size=(None, 4))
for corners in (True, False):
    layer("Upsample", r(2, 3, 5, 6), scale_factor=2, mode="bicubic", align_corners=corners)
layer("UpsamplingNearest2d", r(2, 3, 5, 6), scale_factor=2)
layer("UpsamplingBilinear2d", r(2, 3, 5, 6), scale_factor=2)
layer("PixelShuffle", r(2, 8, 3, 4), upscale_factor=2)
layer("PixelUnshuffle", r(2, 2, 6, 4), downscale_factor=2)
layer("ChannelShuffle", r(2, 6, 3, 4), groups=3)
layer("Fold", r(2, 12, 12), output_size=(4, 5), kernel_size=2)
layer("Unfold", r(2, 3, 6, 5), kernel_size=(2, 3), dilation=2, padding=1, stride=2)
for mode in ("bilinear", "nearest", "bicubic"):
    for padding_mode in ("zeros", "border", "reflection"):
        case(
            "grid_sample",
            lambda mode=mode, padding_mode=padding_mode: (
                lambda x, grid: F.grid_sample(x, grid, mode, padding_mode, align_corners=False)
            ),
            r(2, 3, 5, 6),
            2.4 * u(2, 4, 3, 2) - 1.2,
            name=f"{mode}, {padding_mode}",
        )
case(
    "affine_grid", lambda: lambda t: F.affine_grid(t, [2, 3, 4, 5], align_corners=False), r(2, 2, 3)
)

# --- normalisation ------------------------------------------------------------------------------

IMAGE = 3 * r(3, 4, 5, 6) + 1
for options in ({}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1}):
    layer("BatchNorm1d", IMAGE[:, :, 0], num_features=4, **options)
    layer("BatchNorm2d", IMAGE, num_features=4, **options)
    layer("BatchNorm3d", IMAGE[..., None], num_features=4, **options)
    layer("InstanceNorm2d", IMAGE, num_features=4, **options)
layer("BatchNorm1d", IMAGE[:, :, 0, 0], num_features=4)
layer("InstanceNorm1d", IMAGE[:, :, 0], num_features=4, affine=True)
layer("InstanceNorm2d", IMAGE, num_features=4, affine=True, track_running_stats=True)
layer("InstanceNorm2d", IMAGE[0], num_features=4)
layer("InstanceNorm3d", IMAGE[..., None], num_features=4, affine=True)
layer("LayerNorm", IMAGE, normalized_shape=6)
layer("LayerNorm", IMAGE, normalized_shape=(5, 6))
layer("LayerNorm", IMAGE, normalized_shape=6, bias=False)
layer("LayerNorm", IMAGE, normalized_shape=6, elementwise_affine=False, eps=0.1)
layer("GroupNorm", IMAGE, num_groups=2, num_channels=4)
layer("GroupNorm", IMAGE, num_groups=4, num_channels=4, affine=False)
layer("GroupNorm", IMAGE[:, :, 0, 0], num_groups=2, num_channels=4)
layer("RMSNorm", IMAGE, normalized_shape=6)
layer("RMSNorm", IMAGE, normalized_shape=(5, 6), eps=1e-3)
layer("RMSNorm", IMAGE, normalized_shape=6, elementwise_affine=False)
layer("LocalResponseNorm", IMAGE, size=3)
layer("LocalResponseNorm", IMAGE[:, :, 0], size=2, alpha=0.1, k=2.0)
case("normalize", lambda: lambda x: F.normalize(x, dim=1), IMAGE)
for name in ("weight_norm", "spectral_norm", "orthogonal"):
    case(name, lambda name=name: getattr(nn.utils.parametrizations, name)(nn.Linear(3, 4)), r(5, 3))

# --- activations --------------------------------------------------------------------------------

INF = float("inf")
EDGES = torch.tensor(
    [-30, -6, -3.001, -3, -1, -0.5, -0.0, 0, 0.3, 0.5, 1, 3, 3.001, 6, 30, float("nan"), INF, -INF]
)
KINDS = """ELU CELU SELU Mish Hardswish Hardsigmoid Hardtanh ReLU ReLU6 LeakyReLU Softplus
Softshrink Hardshrink LogSigmoid SiLU GELU Sigmoid Tanh Tanhshrink Softsign RReLU"""
for kind in KINDS.split():
    # torch's GELU of infinity in 32 bits is NaN on some processors, infinity on others.
    layer(kind, EDGES[:-2] if kind == "GELU" else EDGES)
    case(kind, lambda kind=kind: getattr(nn, kind)().bfloat16(), EDGES[:15].bfloat16(), name="bf16")
layer("ELU", EDGES, alpha=0.3)
layer("CELU", EDGES, alpha=0.3)
layer("GELU", EDGES, approximate="tanh")
layer("Hardtanh", EDGES, min_val=-0.5, max_val=3.0)
layer("LeakyReLU", EDGES, negative_slope=-0.2)
layer("Softplus", EDGES, beta=2.0, threshold=5.0)
layer("Softshrink", EDGES, lambd=0.3)
layer("Hardshrink", EDGES, lambd=0.3)
layer("Threshold", EDGES, threshold=0.5, value=7.0)
layer("GLU", r(3, 6))
layer("GLU", r(4, 6), dim=0)
layer("PReLU", r(2, 3, 4), num_parameters=3)
layer("PReLU", r(2, 3, 4))
layer("PReLU", r(5))
for dim in (0, 1, -1):
    for kind in ("Softmax", "LogSoftmax", "Softmin"):
        layer(kind, 5 * r(2, 3, 4), dim=dim)
layer("Softmax2d", r(2, 3, 4, 4))
for kind in ("Dropout", "Dropout1d", "Dropout2d", "AlphaDropout", "FeatureAlphaDropout"):
    layer(kind, r(2, 3, 4))
layer("CosineSimilarity", r(4, 5), r(4, 5), dim=1)
layer("PairwiseDistance", r(4, 5), r(4, 5), p=2)
layer("PairwiseDistance", r(4, 5), r(4, 5), p=1, keepdim=True)

# --- attention ----------------------------------------------------------------------------------

sdpa = F.scaled_dot_product_attention
Q, K, V = r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 6)
MASK = u(2, 1, 5, 7) > 0.5
MASK[0, 0, 1] = False
NOWHERE = r(5, 7)
NOWHERE[2] = -INF
LOWEST = torch.zeros(5, 7)
LOWEST[2] = torch.finfo(torch.float32).min
case("attention", lambda: sdpa, Q, K, V)
case("attention", lambda: lambda *a: sdpa(*a, is_causal=True), Q, K, V, name="causal")
case(
    "attention", lambda: lambda *a: sdpa(*a, is_causal=True), K, Q, V[:, :, :5], name="causal, L>S"
)
case("attention", lambda: lambda *a: sdpa(*a, scale=-0.3), Q, K, V, name="scale")
for name, mask in {"bool": MASK, "float": r(5, 7), "-inf": NOWHERE, "lowest": LOWEST}.items():
    case("attention", lambda: sdpa, Q, K, V, mask, name=f"mask {name}")
case("attention", lambda: lambda *a: sdpa(*a, enable_gqa=True), Q, K[:, :2], V[:, :2], name="gqa")
case("attention", lambda: sdpa, Q[0], K[0], V[0], name="3d")
case("attention", lambda: sdpa, Q[0, 0], K[0, 0], V[0, 0], name="2d")
case("attention", lambda: sdpa, Q.bfloat16(), K.bfloat16(), V.bfloat16(), name="bf16")
case("attention", lambda: sdpa, Q.half(), K.half(), V.half(), name="half")
kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
case("attention", lambda: kernel, Q, K, r(2, 4, 7, 8), name="flash")
kernel_math = torch.ops.aten._scaled_dot_product_attention_math
case("attention", lambda: kernel_math, Q, K, V, MASK, name="math")
for options in (
    {},
    {"bias": False, "batch_first": True},
    {"kdim": 3, "vdim": 5},
    {"add_bias_kv": True, "add_zero_attn": True},
):
    key, value = r(6, 2, options.get("kdim", 8)), r(6, 2, options.get("vdim", 8))
    query = r(5, 2, 8)
    if options.get("batch_first"):
        query, key, value = (x.transpose(0, 1).contiguous() for x in (query, key, value))
    layer("MultiheadAttention", query, key, value, embed_dim=8, num_heads=2, **options)
case(
    "MultiheadAttention",
    lambda: AttentionWith(
        need_weights=False, is_causal=True, attn_mask=torch.ones(5, 5).triu(1).bool()
    ),
    r(5, 2, 8),
    name="causal",
)
case(
    "MultiheadAttention",
    lambda: AttentionWith(average_attn_weights=False, key_padding_mask=ints(2, 2, 5).bool()),
    r(5, 2, 8),
    name="padding, all weights",
)


class AttentionWith(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.options = {
            key: nn.Buffer(value) if torch.is_tensor(value) else value
            for key, value in options.items()
        }
        for key, value in self.options.items():
            if torch.is_tensor(value):
                setattr(self, key, value)

    def forward(self, x: torch.Tensor) -> Any:
        options = {
            key: getattr(self, key) if torch.is_tensor(value) else value
            for key, value in self.options.items()
        }
        return self.attention(x, x, x, **options)


for options in ({}, {"norm_first": True, "activation": "gelu"}, {"batch_first": True}):
    small = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, **options}
    layer("TransformerEncoderLayer", r(5, 2, 8), **small)
    layer("TransformerDecoderLayer", r(5, 2, 8), r(5, 2, 8), **small)
case(
    "TransformerEncoder",
    lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2, enable_nested_tensor=False
    ),
    r(2, 5, 8),
)
case("Transformer", lambda: nn.Transformer(8, 2, 1, 1, 12), r(5, 2, 8), r(4, 2, 8))

# --- recurrent ----------------------------------------------------------------------------------

STEPS = r(5, 2, 3)
for kind in ("RNN", "LSTM", "GRU"):
    small = {"input_size": 3, "hidden_size": 4}
    layer(kind, STEPS, **small)
    layer(kind, STEPS[:, 0], **small)
    layer(kind, STEPS, **small, num_layers=2, bidirectional=True)
    layer(kind, STEPS, **small, batch_first=True, bias=False)
    layer(kind, STEPS, **small, num_layers=2, dropout=0.5)
    state = r(1, 2, 4)
    layer(kind, STEPS, (state, r(1, 2, 4)) if kind == "LSTM" else state, **small)
    layer(f"{kind}Cell", STEPS[0], **small)
    layer(f"{kind}Cell", STEPS[0, 0], **small, bias=False)
layer("RNN", STEPS, input_size=3, hidden_size=4, nonlinearity="relu")
layer("RNNCell", STEPS[0], input_size=3, hidden_size=4, nonlinearity="relu")
layer("LSTM", STEPS, input_size=3, hidden_size=4, proj_size=2, num_layers=2, bidirectional=True)

# --- losses -------------------------------------------------------------------------------------

A, B, C = r(4, 5), r(4, 5), r(4, 5)
CLASSES = torch.tensor([0, 4, -100, 2])
KNOWN = CLASSES.clamp(0)
LABELS = torch.tensor([[3, 0, -1, 1, 2], [1, 2, 3, 4, 0], [-1, 0, 0, 0, 0], [2, 2, -1, 2, 1]])
WEIGHTS = u(5)
SPEECH = r(12, 3, 6).log_softmax(-1)
WORDS = ints(5, 3, 4) + 1
LENGTHS = torch.tensor([12, 10, 8]), torch.tensor([4, 3, 2])
SHORT = torch.tensor([12, 4, 12]), torch.tensor([4, 4, 0])
for reduction in ("mean", "sum", "none"):
    how: dict[str, Any] = {"reduction": reduction}
    for kind in ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss"):
        layer(kind, A, B, **how)
    layer("SmoothL1Loss", A, B, **how, beta=0.3)
    layer("SmoothL1Loss", A, B, **how, beta=0)
    layer("HuberLoss", A, B, **how, delta=0.3)
    layer("BCELoss", u(4, 5), u(4, 5), **how)
    layer("BCELoss", torch.tensor([0.0, 1, 0.5, 1]), torch.tensor([1.0, 0, 0.5, 1]), **how)
    layer("BCEWithLogitsLoss", A, u(4, 5), **how, pos_weight=u(5), weight=WEIGHTS)
    layer("NLLLoss", A.log_softmax(1), CLASSES, **how)
    layer("NLLLoss", A.log_softmax(1), CLASSES, **how, weight=WEIGHTS)
    layer("NLLLoss", A[0], CLASSES[0], **how)
    layer("NLLLoss", r(2, 5, 3, 4), ints(5, 2, 3, 4), **how, weight=WEIGHTS, ignore_index=1)
    layer("CrossEntropyLoss", A, CLASSES, **how, weight=WEIGHTS, label_smoothing=0.2)
    layer("CrossEntropyLoss", A, B.softmax(1), **how)
    layer("CrossEntropyLoss", A[0], CLASSES[0], **how)
    layer("CrossEntropyLoss", r(2, 5, 3, 4), ints(5, 2, 3, 4), **how)
    layer("MultiMarginLoss", A, KNOWN, **how)
    layer("MultiMarginLoss", A, KNOWN, **how, p=2, margin=0.3, weight=WEIGHTS)
    layer("MultiMarginLoss", A[0], KNOWN[:1], **how)
    layer("MultiLabelMarginLoss", A, LABELS, **how)
    layer("MultiLabelMarginLoss", A[0], LABELS[0], **how)
    layer("MultiLabelSoftMarginLoss", A, ints(2, 4, 5).float(), **how, weight=WEIGHTS)
    layer("SoftMarginLoss", A, B.sign(), **how)
    layer("KLDivLoss", A.log_softmax(1), B.softmax(1), **how)
    layer("KLDivLoss", A.log_softmax(1), B.log_softmax(1), **how, log_target=True)
    layer("PoissonNLLLoss", A, torch.arange(5.0), **how, full=True)
    layer("PoissonNLLLoss", A.abs(), B.abs(), **how, log_input=False)
    layer("GaussianNLLLoss", A, B, u(4, 5), **how, full=True)
    layer("CosineEmbeddingLoss", A, B, torch.tensor([1, -1, 1, -1]), **how, margin=0.1)
    layer("HingeEmbeddingLoss", A, B.sign(), **how)
    layer("MarginRankingLoss", A, B, B.sign(), **how, margin=0.2)
    layer("TripletMarginLoss", A, B, C, **how, swap=True)
    layer("TripletMarginWithDistanceLoss", A, B, C, **how)
    layer("CTCLoss", SPEECH, WORDS, *LENGTHS, **how)
    layer("CTCLoss", SPEECH, WORDS.reshape(-1)[:9], *LENGTHS, **how)
    layer("CTCLoss", SPEECH, torch.ones_like(WORDS), *SHORT, **how)
    layer("CTCLoss", SPEECH, torch.ones_like(WORDS), *SHORT, **how, zero_infinity=True)
    layer("CTCLoss", SPEECH, WORDS - 1, (12, 10, 8), (4, 3, 2), **how, blank=5)
    layer("CTCLoss", SPEECH[:, 0], WORDS[0], torch.tensor(12), torch.tensor(4), **how)
layer("AdaptiveLogSoftmaxWithLoss", A, KNOWN, in_features=5, n_classes=10, cutoffs=[3, 6])
