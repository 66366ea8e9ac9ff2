"""Pairs of twins, the mistakes to plant in each, and where each has to be found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

import fmapper
from fmapper.checkpoints import Concatenate, Rename, Reshape, Rules, Transpose
from parity import equinox_twins as eqx_
from parity import linen_twins as linen_
from parity import nnx_twins as nnx_
from parity import plain_twins as plain_
from parity import torch_models as torch_
from parity import torch_twins


@dataclass
class Twins:
    """Two models, their inputs, and how the names and layouts of the first become the second's."""

    a: Any
    b: Any
    inputs: tuple[Any, ...]
    rules: Rules
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """Twins to make with a fault or without one.

    Attributes:
        name: The architecture and the two frameworks.
        make: Called with a fault, or with "".
        faults: Faults -> what the place that is reported has to contain, as a pattern: the stage,
            then what the report says, with the code of lines.
        modes: The values of `train` to compare with.
    """

    name: str
    make: Callable[[str], Twins]
    faults: Mapping[str, str]
    modes: tuple[bool, ...] = (False,)


PAIRS: list[Pair] = []


def pair(modes: Iterable[bool] = (False,), **faults: str) -> Callable[[Any], Any]:
    """Registers a function that makes twins; the underscores of faults are blanks."""

    def register(make: Callable[[str], Twins]) -> Callable[[str], Twins]:
        name = make.__name__.replace("_", " ")
        named = {fault.replace("_", " "): place for fault, place in faults.items()}
        named = {fault.replace("stop gradient", "stop-gradient"): p for fault, p in named.items()}
        PAIRS.append(Pair(name, make, named, tuple(modes)))
        return make

    return register


# --- weights ------------------------------------------------------------------------------------


def source(cls: Callable[..., Any], *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """A model with weights as after training: no bias is zero, and no norm is the identity."""
    model = cls(*args, **kwargs)
    draw = torch.Generator().manual_seed(len(list(model.modules())))
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if not x.is_floating_point():
                continue
            noise = torch.randn(x.shape, generator=draw)
            if re.search(r"norm|bn|ln_f|gamma|counts|var", name) and name[-4:] not in (
                "bias",
                "mean",
            ):
                x.copy_(1 + 0.2 * noise.clamp(-2, 2))
            else:
                x.copy_(noise * (x[0].numel() ** -0.5 if x.ndim > 1 else 0.3))
    return model.to(dtype)


FLAX = {
    torch.nn.Linear: ("kernel", (1, 0)),
    torch.nn.Conv2d: ("kernel", (2, 3, 1, 0)),
    torch.nn.Conv1d: ("kernel", (2, 1, 0)),
    torch.nn.Embedding: ("embedding", None),
}


def carried(model: Any, style: str, *renames: tuple[str, str]) -> Rules:
    """The rules from PyTorch to a framework whose twin has the same attributes, but for renames."""
    names: dict[str, str] = {}
    axes: dict[tuple[int, ...], list[str]] = {}
    columns: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        buffers.pop("num_batches_tracked", None)
        for key in (*dict(module.named_parameters(recurse=False)), *buffers):
            new, turn = key, None
            if style == "plain":
                new = {"weight": "w", "bias": "b"}.get(key, key)
                turn = (1, 0) if isinstance(module, torch.nn.Linear) and key == "weight" else None
            elif style in ("nnx", "linen"):
                new = {"running_mean": "mean", "running_var": "var"}.get(key, key)
                if key == "weight":
                    new, turn = FLAX.get(type(module), ("scale", None))
            full = f"{path}.{new}".removeprefix(".")
            for pattern, replacement in renames:
                full = re.sub(pattern, replacement, full)
            if style == "linen":
                full = f"{'batch_stats' if key in buffers else 'params'}.{full}"
            full = f"1.{full}" if style == "plain" else full
            names[f"{path}.{key}".removeprefix(".")] = full
            if turn:
                axes.setdefault(turn, []).append(full)
            if style == "equinox" and key == "bias" and hasattr(module, "kernel_size"):
                columns.setdefault(len(module.kernel_size), []).append(full)
    return Rules(
        [
            Rename(names),
            *(Transpose(of, turn) for turn, of in axes.items()),
            *(Reshape(of, (-1, *[1] * n), back=(-1,)) for n, of in columns.items()),
        ]
    )


def filled(a: Any, b: Any, rules: Rules) -> Any:
    """The second model with the weights of the first."""
    needed = {name for rule in rules for name in getattr(rule, "from_", ())}
    state = {n: np.asarray(fmapper.to_numpy(x)) for n, x in fmapper.state(a).items() if n in needed}
    arrays = {name: x.read() for name, x in rules.apply(state).items()}
    missing = arrays.keys() - fmapper.state(b).keys()
    assert not missing, f"{missing} of {sorted(fmapper.state(b))}"
    return fmapper.load_state(b, arrays, strict=False)


def made(cls: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return cls(*args, rngs=nnx.Rngs(0), **kwargs)


def to_nnx(a: Any, b: Any, inputs: Any, *renames: tuple[str, str], **options: Any) -> Twins:
    rules = carried(a, "nnx", *renames)
    return Twins(a, filled(a, b, rules), inputs, rules, options)


def to_linen(a: Any, b: Any, inputs: Any, *renames: tuple[str, str], **options: Any) -> Twins:
    given = jax.tree.map(jnp.asarray, [fmapper.to_numpy(x) for x in inputs])
    variables = jax.eval_shape(b.init, jax.random.key(0), *given)
    variables = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables)
    rules = carried(a, "linen", *renames)
    return Twins(a, filled(a, (b, variables), rules), inputs, rules, options)


def to_equinox(a: Any, b: Any, inputs: Any, *renames: tuple[str, str], **options: Any) -> Twins:
    rules = carried(a, "equinox", *renames)
    return Twins(a, filled(a, b, rules), inputs, rules, options)


def to_plain(a: Any, function: Any, inputs: Any, fault: str = "", **options: Any) -> Twins:
    rules = carried(a, "plain")
    params: dict[str, Any] = {}
    state = {name: fmapper.to_numpy(x.detach()) for name, x in a.named_parameters()}
    for name, x in rules.apply(state).items():
        at, keys = params, name.split(".")[1:]
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = jnp.asarray(x.read())

    def model(params: Any, *inputs: Any) -> Any:
        return function(params, *inputs, fault=fault)

    return Twins(a, (model, params), inputs, rules, options)


KEY = jax.random.key(0)


def normal(*shape: int, dtype: Any = None) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def tokens(*shape: int, below: int = 29) -> Any:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(2))


def matrices_decay(model: Any, fault: str, rate: float = 1e-2) -> dict[str, Any]:
    """AdamW as language models are trained: biases and norms do not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    mask = None
    if fault != "weight decay":
        mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
    adamw = optax.adamw(rate, b2=0.999, weight_decay=0.1, mask=mask)
    return {"optimizer": (torch.optim.AdamW(groups, rate), adamw)}


# Places: a part of the model and an operation, and the line of code that it comes from, of one of
# the two.
SECOND_GELU = r"aten::gelu.*norm2\(self\.fc2"
ROPE = r"in layers\.1\.attn: .*(x \* cos|x\.chunk)"

# --- multilayer perceptrons ---------------------------------------------------------------------


@pair(
    gelu=SECOND_GELU,
    eps="in norm2:",
    bias_twice=r"y \+ self\.fc2\.bias",
    weight_decay=r"^steps: step 1: .*(bias|norm\d\.weight):",
)
def mlp_torch_nnx(fault):
    a = source(torch_.MLP)
    b = made(nnx_.MLP, fault=fault)
    return to_nnx(a, b, (normal(4, 12),), **matrices_decay(a, fault))


@pair(swapped_norms="in norm1:", dtype="in fc2:", dropout_in_eval="Dropout_0")
def mlp_torch_linen(fault):
    dropout = 0.5 if fault == "dropout in eval" else 0.0
    return to_linen(source(torch_.MLP), linen_.MLP(dropout, fault), (normal(4, 12),))


@pair(dtype="in fc2:", eps="in norm2:", swapped_norms="in norm1:")
def mlp_torch_equinox(fault):
    return to_equinox(source(torch_.MLP), eqx_.MLP(fault=fault, key=KEY), (normal(4, 12),))


@pair(gelu=SECOND_GELU, bias_twice=r"return y \+ p\[.b.\]", swapped_norms="in norm1:")
def mlp_torch_plain(fault):
    return to_plain(source(torch_.MLP), plain_.mlp, (normal(4, 12),), fault)


@pair(gelu=SECOND_GELU, swapped_norms="in norm1:", bias_twice=r"y \+ self\.fc2\.bias")
def mlp_bf16_torch_nnx(fault):
    a = source(torch_.MLP, dtype=torch.bfloat16)
    b = made(nnx_.MLP, dtype=jnp.bfloat16, fault=fault)
    return to_nnx(a, b, (normal(4, 12, dtype=torch.bfloat16),))


@pair(
    modes=(False, True),
    dropout_in_eval=r"self\.dropout\(x, deterministic",
    dropout_missing="^draws: dropout",
)
def mlp_dropout_torch_nnx(fault):
    a, b = source(torch_.MLP, dropout=0.3), made(nnx_.MLP, dropout=0.3, fault=fault)
    return to_nnx(a, b, (normal(4, 12),))


# --- images -------------------------------------------------------------------------------------


@pair(
    modes=(False, True),
    momentum=r"^buffers: bn2\.running",
    swapped_norms="in bn1:",
    eps="in bn2:",
    variance=r"^buffers: bn2\.running_var",
)
def convnet_torch_nnx(fault):
    return to_nnx(source(torch_.ConvNet), made(nnx_.ConvNet, fault=fault), (normal(4, 3, 8, 8),))


@pair(
    modes=(False, True),
    momentum=r"^buffers: bn2\.running",
    eps="in bn2:",
    variance=r"^buffers: bn2\.running_var",
)
def convnet_torch_linen(fault):
    return to_linen(source(torch_.ConvNet), linen_.ConvNet(fault=fault), (normal(4, 3, 8, 8),))


@pair(
    modes=(False, True),
    momentum=r"^buffers: layer2\.bn2\.running",
    dtype=r"in layer2\.conv2:",
    swapped_norms=r"in layer2\.bn1:",
)
def resnet_torch_nnx(fault):
    return to_nnx(source(torch_.ResNet), made(nnx_.ResNet, fault=fault), (normal(4, 3, 8, 8),))


@pair(
    modes=(False, True),
    momentum=r"^buffers: layer1\.bn1\.running",
    eps=r"in layer2\.bn2:",
    swapped_norms=r"in layer2\.bn1:",
    weight_decay=r"^steps: step 1: .*(bn\d?\.weight|bias):",
)
def resnet_torch_torch(fault):
    a = source(torch_.ResNet)
    b = torch_twins.ResNet(fault)
    rules = carried(
        a,
        "torch",
        (r"layer2\.down", "down.0"),
        (r"layer2\.bn3", "down.1"),
        (r"layer1\.conv(.)", lambda m: f"conv.{int(m[1]) - 1}"),
        (r"layer2\.conv(.)", lambda m: f"conv.{int(m[1]) + 1}"),
        (r"layer1\.bn(.)", lambda m: f"norm.{int(m[1]) - 1}"),
        (r"layer2\.bn(.)", lambda m: f"norm.{int(m[1]) + 1}"),
    )
    b = filled(a, b, rules)

    def sgd(model, one):
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": one},
        ]
        return torch.optim.SGD(groups, 0.01, momentum=0.9)

    optimizers = sgd(a, 0.0), sgd(b, 0.1 if fault == "weight decay" else 0.0)
    return Twins(a, b, (normal(4, 3, 8, 8),), rules, {"optimizer": optimizers})


@pair(
    gelu=r"in blocks\.1\.mlp: aten::gelu",
    scale=r"in blocks\.1\.attn: .*scores = ",
    eps=r"in blocks\.1\.norm2:",
)
def vit_torch_nnx(fault):
    return to_nnx(source(torch_.ViT), made(nnx_.ViT, fault=fault), (normal(2, 3, 8, 8),))


@pair(
    swapped_norms=r"in blocks\.1\.norm1:",
    gelu=r"in blocks\.1\.mlp: aten::gelu",
    scale=r"in blocks\.1\.attn: .*scores = ",
)
def vit_bf16_torch_nnx(fault):
    a = source(torch_.ViT, dtype=torch.bfloat16)
    b = made(nnx_.ViT, dtype=jnp.bfloat16, fault=fault)
    return to_nnx(a, b, (normal(2, 3, 8, 8, dtype=torch.bfloat16),))


LINEN_BLOCKS = (
    (r"\.(attn|mlp)\.", r".\1_"),
    (r"(blocks|h)\.(\d)", r"\1_\2"),
)


@pair(
    swapped_norms=r"in blocks\.1\.norm1:",
    dtype=r"in blocks\.1\.mlp\.fc2:",
    gelu=r"in blocks\.1\.mlp: aten::gelu",
)
def vit_torch_linen(fault):
    return to_linen(
        source(torch_.ViT), linen_.ViT(fault=fault), (normal(2, 3, 8, 8),), *LINEN_BLOCKS
    )


@pair(swapped_norms=r"in blocks\.1\.norm1:", scale=r"in blocks\.1\.attn: .*scores = ")
def vit_bf16_torch_torch(fault):
    a = source(torch_.ViT, dtype=torch.bfloat16)
    b = torch_twins.ViT(fault=fault).to(torch.bfloat16)
    renames = ((r"\.attn\.o\.", ".proj."),)
    rules = carried(a, "torch", *renames)
    for kind in ("weight", "bias"):
        parts = [f"blocks.{{i}}.attn.{name}.{kind}" for name in "qkv"]
        rules = rules + Rules([Concatenate(parts, f"blocks.{{i}}.qkv.{kind}")])
    inputs = (normal(2, 3, 8, 8, dtype=torch.bfloat16),)
    return Twins(a, filled(a, b, rules), inputs, rules)


@pair(eps=r"in middle\.norm2:", swapped_norms=r"in middle\.norm1:", dtype=r"in middle\.conv2:")
def unet_torch_nnx(fault):
    inputs = (normal(2, 3, 8, 8), torch.tensor([3.0, 47.0]))
    return to_nnx(source(torch_.UNet), made(nnx_.UNet, fault=fault), inputs)


@pair(
    eps=r"in blocks\.1\.norm2:",
    gelu=r"in blocks\.1\.channels: aten::gelu",
    swapped_norms=r"in blocks\.1\.norm1:",
)
def mixer_torch_nnx(fault):
    return to_nnx(source(torch_.Mixer), made(nnx_.Mixer, fault=fault), (normal(2, 3, 8, 8),))


@pair(eps=r"blocks\.1\.norm2", gelu=r"blocks\.1\.channels", swapped_norms=r"blocks\.1\.norm1")
def mixer_nnx_equinox(fault):
    first = to_nnx(source(torch_.Mixer), made(nnx_.Mixer), (normal(2, 3, 8, 8),))
    back = carried(torch_.Mixer(), "equinox")
    rules = first.rules.inverse() + back
    b = filled(first.a, eqx_.Mixer(fault=fault, key=KEY), back)
    return Twins(first.b, b, (jnp.asarray(first.inputs[0]),), rules)


@pair(
    eps=r"in blocks\.1\.norm:",
    gelu=r"in blocks\.1: aten::gelu",
    scale=r"in blocks\.1: aten::mul.*self\.gamma",
    weight_decay=r"^steps: step 1: .*(bias|norm\.weight|gamma):",
)
def convnext_torch_nnx(fault):
    a = source(torch_.ConvNeXt)
    b = made(nnx_.ConvNeXt, fault=fault)
    return to_nnx(a, b, (normal(2, 3, 8, 8),), **matrices_decay(a, fault))


# --- language -----------------------------------------------------------------------------------

LENGTHS = torch.tensor([6, 4])


@pair(
    mask="places <=? lengths",
    gelu=r"in layers\.0\.mlp: aten::gelu",
    eps=r"in layers\.0\.norm2:",
    bias_twice=r"v \+ self\.v\.bias",
)
def bert_torch_nnx(fault):
    a, b = source(torch_.Bert), made(nnx_.Bert, fault=fault)
    inputs = (tokens(2, 6), tokens(2, 6, below=2), LENGTHS)
    return to_nnx(a, b, inputs, (r"\.attn\.", ".attention."))


@pair(
    mask="places [<>]=? lengths",
    gelu=r"in layers\.0\.mlp: aten::gelu",
    eps="in norm:",
    norm_first=r"in layers\.0\.(attn\.[qkv]|norm1):",
)
def bert_torch_torch(fault):
    a = source(torch_.Bert)
    rules = carried(
        a,
        "torch",
        (r"\.attn\.o\.", ".self_attn.out_proj."),
        (r"mlp\.fc", "linear"),
    )
    for kind in ("weight", "bias"):
        parts = [f"layers.{{i}}.attn.{name}.{kind}" for name in "qkv"]
        rules = rules + Rules([Concatenate(parts, f"layers.{{i}}.self_attn.in_proj_{kind}")])
    b = filled(a, torch_twins.Bert(fault=fault), rules)
    return Twins(a, b, (tokens(2, 6), tokens(2, 6, below=2), LENGTHS), rules)


@pair(
    gelu=r"in h\.1\.mlp: aten::gelu",
    mask=r"\.tril?\(",
    dtype=r"in h\.1\.mlp\.fc2:",
    eps=r"in h\.1\.norm2:",
)
def gpt_torch_nnx(fault):
    return to_nnx(source(torch_.GPT), made(nnx_.GPT, fault=fault), (tokens(2, 6),))


@pair(
    label_shift="labels",
    mask=r"\.tril?\(",
    scale=r"in h\.1\.attn: .*scores = ",
    weight_decay=r"^steps: step 1: .*(bias|norm\d\.weight|ln_f\.weight):",
)
def gpt_loss_torch_plain(fault):
    a, ids = source(torch_.GPT), tokens(2, 6)
    return to_plain(a, plain_.gpt, (ids, ids), fault, **matrices_decay(a, fault))


@pair(
    gelu=r"in h\.1\.mlp: aten::gelu",
    mask=r"\.tril?\(|mask = mask \|",
    swapped_norms=r"in h\.1\.norm1:",
)
def gpt_bf16_torch_linen(fault):
    a = source(torch_.GPT, dtype=torch.bfloat16)
    return to_linen(a, linen_.GPT(jnp.bfloat16, fault), (tokens(2, 6),), *LINEN_BLOCKS)


@pair(rope=ROPE, eps=r"in layers\.1\.norm2:", dtype=r"in layers\.1\.down:", mask=r"\.tril?\(")
def llama_torch_nnx(fault):
    a, b = source(torch_.Llama), made(nnx_.Llama, fault=fault)
    return to_nnx(a, b, (tokens(2, 6),), ("norm1", "input_norm"), ("norm2", "post_norm"))


@pair(label_shift="labels", scale=r"in layers\.1\.attn: .*scores = ")
def llama_loss_torch_nnx(fault):
    a, b, ids = source(torch_.Llama), made(nnx_.Llama, fault=fault), tokens(2, 6)
    return to_nnx(a, b, (ids, ids), ("norm1", "input_norm"), ("norm2", "post_norm"))


@pair(rope=ROPE, mask=r"\.tril?\(", swapped_norms=r"in layers\.1\.norm1:")
def llama_bf16_torch_plain(fault):
    a = source(torch_.Llama, dtype=torch.bfloat16)
    return to_plain(a, plain_.llama, (tokens(2, 6),), fault)


@pair(rope=ROPE, eps=r"in layers\.1\.norm2:", scale=r"in layers\.1\.attn: .*scores = ")
def llama_torch_plain(fault):
    return to_plain(source(torch_.Llama), plain_.llama, (tokens(2, 6),), fault)


@pair(
    scale=r"in layers\.0\.attn: .*scores = ",
    mask="< lengths|< until|until = ",
    eps=r"in layers\.0\.norm2:",
    bias_twice=r"bias = bias \* 2",
)
def t5_torch_nnx(fault):
    return to_nnx(
        source(torch_.T5Encoder), made(nnx_.T5Encoder, fault=fault), (tokens(2, 6), LENGTHS)
    )


@pair(gelu="aten::gelu", scale=r"best / best\.sum", bias_twice=r"outer \+ self\.b2")
def moe_torch_nnx(fault):
    return to_nnx(source(torch_.MoE), made(nnx_.MoE, fault=fault), (normal(2, 5, 12),))


@pair(scale=r"best / best\.sum", bias_twice=r"outer \+ self\.b2")
def moe_bf16_torch_nnx(fault):
    a = source(torch_.MoE, dtype=torch.bfloat16)
    b = made(nnx_.MoE, dtype=jnp.bfloat16, fault=fault)
    return to_nnx(a, b, (normal(2, 5, 12, dtype=torch.bfloat16),))


@pair(
    mask="< lengths|< until|until = ",
    scale="in attn: .*scores = ",
    bias_twice=r"v \+ self\.v\.bias",
    dtype=r"in mlp\.fc2:",
)
def perceiver_torch_nnx(fault):
    inputs = (normal(2, 6, 16), LENGTHS)
    return to_nnx(source(torch_.Perceiver), made(nnx_.Perceiver, fault=fault), inputs)


# --- sequences ----------------------------------------------------------------------------------


@pair(
    bias_twice="bias_hh_l0", order_of_gates=r"sigmoid\(f\) \* c", eps="in norm:", dtype="in head:"
)
def lstm_torch_plain(fault):
    return to_plain(source(torch_.Recurrent, "lstm"), plain_.lstm, (tokens(2, 5),), fault)


@pair(stop_gradient=r"^backward: (rnn|embed)\.", dropout_in_eval=r"F\.dropout\(x", eps="in norm:")
def lstm_torch_torch(fault):
    a = source(torch_.Recurrent, "lstm")
    rules = carried(a, "torch", (r"rnn\.(\w+)_l0", r"cell.\1"))
    b = filled(a, torch_twins.Recurrent(fault=fault), rules)
    return Twins(a, b, (tokens(2, 5),), rules)


@pair(bias_twice=r"hn \+ jnp\.split", dtype="in head:")
def gru_torch_equinox(fault):
    renames = ((r"rnn\.weight_(..)_l0", r"w_\1"), (r"rnn\.bias_(..)_l0", r"b_\1"))
    b = eqx_.GRU(fault=fault, key=KEY)
    return to_equinox(source(torch_.Recurrent, "gru"), b, (tokens(2, 5),), *renames)


@pair(bias_twice=r"hn \+ jnp\.split", eps="in norm:")
def gru_torch_nnx(fault):
    a = source(torch_.Recurrent, "gru")
    renames = (
        (r"rnn\.weight_ih_l0", "x.kernel"),
        (r"rnn\.weight_hh_l0", "h.kernel"),
        (r"rnn\.bias_ih_l0", "x.bias"),
        (r"rnn\.bias_hh_l0", "h.bias"),
    )
    rules = carried(a, "nnx", *renames) + Rules([Transpose(["x.kernel", "h.kernel"])])
    return Twins(a, filled(a, made(nnx_.GRU, fault=fault), rules), (tokens(2, 5),), rules)


@pair(mask=r"in (filters|gates)\.1:|pad\(x", bias_twice=r"y \+ filter_\.bias")
def wavenet_torch_equinox(fault):
    return to_equinox(
        source(torch_.WaveNet), eqx_.WaveNet(fault=fault, key=KEY), (normal(2, 1, 12),)
    )


# --- reinforcement learning, generative models, representations -----------------------------------


@pair(
    stop_gradient=r"^backward: fc2\.",
    scale=r"log_std\.exp\(\)",
    frozen="^backward: log_std:",
    weight_decay="^steps: step 1: .*(bias|log_std):",
)
def actor_critic_torch_linen(fault):
    a = source(torch_.ActorCritic)
    b = linen_.ActorCritic(fault=fault)
    return to_linen(a, b, (normal(5, 6),), **matrices_decay(a, fault))


@pair(stop_gradient=r"^backward: (value|advantage)\.", scale="wanted = reward")
def dqn_torch_plain(fault):
    inputs = (normal(5, 6), tokens(5, below=3), normal(5), normal(6, 5).T)
    return to_plain(source(torch_.DQN), plain_.dqn, inputs, fault)


@pair(scale=r"noise \* ", stop_gradient=r"^backward: mu\.", dtype="in dec1:")
def vae_torch_equinox(fault):
    inputs = (normal(3, 12), normal(3, 4))
    return to_equinox(source(torch_.VAE), eqx_.VAE(fault=fault, key=KEY), inputs)


@pair(
    modes=(False, True),
    ema="^buffers: target_",
    momentum="^buffers: target_",
    stop_gradient=r"^backward: online\.",
)
def byol_torch_nnx(fault):
    inputs = (normal(4, 12), normal(12, 4).T)
    a, b = source(torch_.BYOL), made(nnx_.BYOL, fault=fault)
    rules = carried(a, "nnx", ("target_weight", "target_kernel"))
    rules = rules + Rules([Transpose("target_kernel")])
    return Twins(a, filled(a, b, rules), inputs, rules)


@pair(
    modes=(False, True),
    ema="^buffers: target_",
    momentum="^buffers: target_",
    stop_gradient=r"^backward: online\.",
    frozen="^backward: target_",
)
def byol_torch_torch(fault):
    a, b = source(torch_.BYOL), torch_twins.BYOL(fault=fault)
    rules = carried(a, "torch", ("target_", "target."))
    return Twins(a, filled(a, b, rules), (normal(4, 12), normal(12, 4).T), rules)


@pair(
    modes=(False, True),
    ema="^buffers: counts:",
    momentum="^buffers: (codes|counts):",
    stop_gradient=r"^backward: enc\.",
)
def vq_torch_nnx(fault):
    return to_nnx(source(torch_.VQ), made(nnx_.VQ, fault=fault), (normal(7, 6),))


@pair(scale=r"logit_scale\.exp\(\)", bias_twice=r"text \+ self\.text2\.bias", gelu="aten::gelu")
def clip_torch_nnx(fault):
    inputs = (normal(4, 10), tokens(4, 6))
    return to_nnx(source(torch_.CLIP), made(nnx_.CLIP, fault=fault), inputs)


@pair(
    frozen=r"^(backward|steps: step 1): backbone\.",
    dropout_in_eval=r"self\.dropout\(x, deterministic",
    weight_decay=r"^steps: step 1: .*(bias|norm\.weight):",
)
def finetune_torch_nnx(fault):
    dropout = 0.5 if fault == "dropout in eval" else 0.0
    a = source(torch_.Finetune)
    b = made(nnx_.Finetune, dropout=dropout, fault=fault)
    return to_nnx(a, b, (normal(5, 16),), **matrices_decay(a, fault))


@pair(frozen=r"^backward: backbone\.", gelu="in backbone: aten::gelu")
def finetune_torch_equinox(fault):
    b = eqx_.Finetune(fault=fault, key=KEY)
    return to_equinox(source(torch_.Finetune), b, (normal(5, 16),), (r"backbone\.", ""))
