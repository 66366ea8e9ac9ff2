"""Code that is printed for operations of ATen gives what their lowerings give.

Functions of torch are recorded; each of their calls is printed, the code is run with the inputs
that the call had, and values, shapes and dtypes are compared with those of the lowering.
"""

import math
import warnings

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from fmapper.programs import Ref  # noqa: E402
from fmapper.programs.program import map_arguments  # noqa: E402
from fmapper.translation import Printing, Value, expr, text  # noqa: E402
from fmapper_adapters.jax.model import interpret  # noqa: E402
from fmapper_adapters.jax.translation.helpers import HELPERS  # noqa: E402
from fmapper_adapters.jax.translation.table import load  # noqa: E402
from support.converting import Function  # noqa: E402

TOLERANCE = {"float32": 1e-6, "complex64": 1e-6, "bfloat16": 1e-2, "float16": 1e-2}
WORDS = {"jnp": jnp, "jax": jax, "np": np, "math": math}
for source in HELPERS.values():
    exec(source, WORDS)


def size_code(size):
    return expr(str(size)) if isinstance(size, str) else expr(repr(size))


def printed(call, known, *, inline=None):
    """Returns the code of a call, and the values that it uses; None where there is no printer.

    Args:
        call: The call.
        known: The values by name.
        inline: Code in the place of a name.
    """

    def argument(value):
        if not isinstance(value, Ref):
            return value
        array = known[value.name]
        node = (inline or {}).get(value.name) or expr(f"{value.name}_")
        if isinstance(array, tuple | list):
            return Value(node)
        return Value(node, kinds[value.name], tuple(array.shape))

    kinds = {name: str(value.dtype) for name, value in known.items() if hasattr(value, "dtype")}
    printer = load().find(call.op)
    if printer is None:
        return None
    node = printer(
        Printing(call, size_code),
        *map_arguments(call.args, argument),
        **map_arguments(dict(call.kwargs), argument),
    )
    if node is None:
        return None
    return text(node.node if isinstance(node, Value) else node)


def differs(found, want, scale=1.0):
    """Says how values differ; empty if they do not."""
    if isinstance(want, tuple):
        return next(filter(None, map(differs, found, want)), "")
    if not want.size:
        return ""
    x, y = (np.asarray(jnp.asarray(a, jnp.promote_types(a.dtype, "float32"))
            if str(a.dtype) in TOLERANCE else a) for a in (found, want))  # fmt: skip
    if str(want.dtype) not in TOLERANCE:
        return "" if (x == y).all() else f"{x.ravel()[:6]} for {y.ravel()[:6]}"
    with np.errstate(all="ignore"):
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.abs(x - y))
        size = max(1e-30, float(np.max(np.where(np.isfinite(y), np.abs(y), 0))))
    worst = float(np.max(apart)) / size
    if worst <= scale * TOLERANCE[str(want.dtype)]:
        return ""
    at = np.unravel_index(int(np.argmax(apart)), apart.shape)
    return f"{x[at]} for {y[at]}"


def examine(function, *args, options=None, **kwargs):
    """Records a function and yields each of its calls, its code, and what is wrong with it."""
    module = function if isinstance(function, torch.nn.Module) else Function(function)
    model = fmapper.convert(module.eval(), "jax", args, kwargs, **(options or {}))
    program = model.as_program()
    arrays = {**program.parameters, **program.buffers, **program.constants}
    users = iter(x for x in jax.tree.leaves(fmapper.to_jax((args, kwargs))))
    inputs = [
        given.value if given.kind == "static"
        else next(users) if given.kind == "user"
        else jnp.asarray(arrays[str(given.target)])
        for given in program.inputs
    ]  # fmt: skip
    found: list = []

    def run(inputs):
        """Computes everything in one program, which is compiled once."""
        known = dict(zip(program.graph.inputs, inputs, strict=True))
        pairs = {}

        def observe(call, result):
            known[call.name] = result
            code, problem = printed(call, known), ""
            if code is None:
                problem = "no code"
            else:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        mine = eval(code, {**WORDS, **{f"{k}_": v for k, v in known.items()}})
                    problem = looks_other(mine, result)
                    if not problem:
                        pairs[len(found)] = (mine, result)
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
            found.append((call, code or "", problem))

        at = interpret.Run(model._code.lowerings, observe=observe)
        interpret.evaluate(program.graph, inputs, at)
        return pairs

    static = {i for i, given in enumerate(program.inputs) if given.kind == "static"}
    arrays_in = [None if i in static else x for i, x in enumerate(inputs)]
    fill = {i: inputs[i] for i in static}
    pairs = jax.jit(lambda xs: run([fill.get(i, x) for i, x in enumerate(xs)]))(arrays_in)
    for at, (mine, want) in pairs.items():
        call, code, _ = found[at]
        found[at] = call, code, differs(mine, want)
    return found


def looks_other(found, want):
    """Says how structures, shapes and dtypes differ; empty if they do not."""
    if isinstance(want, tuple):
        if not isinstance(found, tuple | list) or len(found) != len(want):
            return f"{type(found).__name__} for {len(want)} results"
        return next(filter(None, map(looks_other, found, want)), "")
    if found.dtype != want.dtype or found.shape != want.shape:
        return f"{found.dtype}{list(found.shape)} for {want.dtype}{list(want.shape)}"
    return "weak" if getattr(found, "weak_type", False) else ""


def check(function, *args, without=(), **kwargs):
    """Compares all calls of a function; returns their code by operation."""
    found = examine(function, *args, **kwargs)
    wrong = [
        f"{call.op}{call.args}{dict(call.kwargs)} -> {code}: {problem}"
        for call, code, problem in found
        if problem and call.op not in without
    ]
    assert not wrong, "\n".join(wrong)
    return {call.op: code for call, code, _ in found}


def tensors(*shape, seed=0):
    """Returns a tensor with numbers of both signs, some of them whole."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return torch.where(torch.rand(*shape, generator=generator) > 0.8, x.round(), x)


FLOATS = [torch.float32, torch.bfloat16]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_one_float(dtype):
    def function(x, y):
        small = [torch.asin, torch.acos, torch.atanh, torch.erfinv]
        large = [torch.sqrt, torch.rsqrt, torch.log, torch.log2, torch.log10, torch.log1p,
                 torch.acosh, torch.lgamma, torch.digamma]  # fmt: skip
        every = [torch.neg, torch.abs, torch.sign, torch.square, torch.reciprocal, torch.exp,
                 torch.exp2, torch.expm1, torch.sin, torch.cos, torch.tan, torch.atan, torch.sinh,
                 torch.cosh, torch.tanh, torch.asinh, torch.sigmoid, torch.erf, torch.erfc,
                 torch.isnan, torch.isinf, torch.isfinite, torch.floor, torch.ceil, torch.trunc,
                 torch.round, torch.logical_not, torch.nan_to_num, torch.clone, torch.detach,
                 torch.isposinf, torch.isneginf, torch.deg2rad, torch.rad2deg]  # fmt: skip
        return (
            [f(torch.clamp(x, -0.9, 0.9)) for f in small],
            [f(y) for f in large],
            [f(x) for f in every],
        )

    x = tensors(5, 7)
    check(function, x.to(dtype), (x.abs() + 1.1).to(dtype))


@pytest.mark.nightly
def test_functions_of_integers_and_bools():
    def function(i, b):
        both = [torch.exp, torch.sin, torch.sqrt, torch.sigmoid, torch.tanh, torch.isnan,
                torch.rsqrt, torch.reciprocal, torch.isfinite, torch.logical_not,
                torch.bitwise_not]  # fmt: skip
        whole = [torch.neg, torch.abs, torch.sign, torch.square, torch.floor, torch.round]
        return [f(i) for f in both + whole], [f(b) for f in both]

    for dtype in (torch.int64, torch.uint8):
        check(function, torch.tensor([0, 1, 2, 5, 9], dtype=dtype), torch.tensor([True, False]))


PAIRS = [
    (torch.float32, torch.bfloat16), (torch.bfloat16, torch.int64), (torch.float16, torch.float32),
    (torch.int64, torch.float32), (torch.bool, torch.int64), (torch.uint8, torch.int64),
    (torch.int16, torch.bfloat16),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_arithmetic_of_two_dtypes(first, second):
    def function(x, y, zero):
        found = []
        for a, b in ((x, y), (x, zero), (zero, x), (y, x)):
            found += [a + b, a * b, a / b, a == b, a < b, a >= b, torch.maximum(a, b),
                      torch.logical_and(a, b), torch.logical_or(a, b), torch.where(b > 0, a, b),
                      torch.minimum(a, b), torch.cat([x.reshape(-1), y.reshape(-1)]),
                      torch.logical_xor(a, b)]  # fmt: skip
            if torch.bool not in (a.dtype, b.dtype):
                found += [a - b, torch.add(a, b, alpha=2), a % b, torch.fmod(a, b)]
            if not (a.dtype.is_floating_point or b.dtype.is_floating_point):
                found += [a & b, a | b, a ^ b]
        return found

    x, y = tensors(3, 4) * 3, tensors(2, 3, 1, seed=1).abs() * 3 + 1
    check(function, (x.abs() + 1).to(first), y.to(second), torch.tensor(2.5).to(second))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
def test_arithmetic_with_numbers(dtype):
    def function(x):
        found = [x + 1, x + 0, x * 2, x * 1, 3 * x, x / 2, x + 1.5, x * 0.5, 1.5 / (x + 1), x == 1,
                 x < 0.5, x > 2, x != 0, x + True, x.sum() + x, x.sum() * 2, x.sum() / x.numel(),
                 torch.clamp(x * 1, 0, 1), torch.where(x > 0, x, 0), torch.where(x > 0, x, 0.5),
                 torch.where(x > 0, 1.0, 0.0), torch.where(x > 0, -math.inf, 0.0), 2.0 ** x,
                 x.masked_fill(x > 0, 0), torch.clamp(x + 0.5, min=0),
                 (x + 1).clamp(max=1)]  # fmt: skip
        if dtype != torch.bool:
            found += [x - 1, 1 - x, torch.rsub(x, 2, alpha=3), x % 2, x // 2, x ** 2, x ** 3,
                      torch.sub(x, 3, alpha=2), torch.add(x, x, alpha=3), x ** 2.5]  # fmt: skip
        if dtype.is_floating_point:
            found += [(x * x) ** 0.5, (x * x + 1) ** -0.5, x ** -1, x ** 1, x ** -2,
                      torch.div(x, 0.3, rounding_mode="trunc"), x.masked_fill(x > 0, -math.inf),
                      x.masked_fill(x > 0, torch.finfo(dtype).min), torch.addcmul(x, x, x),
                      torch.addcdiv(x, x, x * x + 1, value=0.5), torch.atan2(x, x + 1),
                      torch.div(x, 2, rounding_mode="floor")]  # fmt: skip
        else:
            found += [x & 1, x | 1, x ^ 1, ~x]
        return found

    check(function, (tensors(4, 5) * 3).to(dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", FLOATS)
def test_activations(dtype):
    def function(x):
        return [F.relu(x), F.relu6(x), F.silu(x), F.selu(x), F.mish(x), F.hardswish(x),
                F.hardsigmoid(x), F.logsigmoid(x), F.gelu(x), F.gelu(x, approximate="tanh"),
                F.elu(x), F.elu(x, 0.5), F.celu(x, 0.7), F.leaky_relu(x), F.leaky_relu(x, 0.2),
                F.softplus(x), F.hardtanh(x), F.hardtanh(x, -2, 3), F.glu(x), F.glu(x, 0),
                F.softmax(x, -1), F.softmax(x, 0), F.log_softmax(x, -1), torch.logsumexp(x, -1),
                torch.logsumexp(x, (0, 1), keepdim=True), F.softmax(x, -1, dtype=torch.float32),
                F.threshold(x, 0, 0), F.softsign(x), F.tanhshrink(x), F.softmin(x, -1)]  # fmt: skip

    check(function, (tensors(6, 8) * 4).to(dtype), without={"aten::log_sigmoid_forward.default"})


@pytest.mark.nightly
def test_shapes():
    def function(x, one, i):
        b, t, _ = x.shape
        return [x.view(b, -1), x.reshape(-1), x.view(b, t, 2, -1).transpose(1, 2), x.view(x.shape),
                x.permute(2, 0, 1), x.permute(0, 2, 1), x.permute(0, 1, 2), x.transpose(-1, -2),
                x.transpose(0, 2), x[0].t(), x[0].T, x.mT, x.flatten(1), x.unflatten(-1, (2, -1)),
                x[:, None], x[..., None], x[:, None, :, None], x[None], x.unsqueeze(-2), one[:, 0],
                one.squeeze(), one.squeeze(1), one.squeeze(0), one.expand(2, 5, 4),
                one.expand_as(x),
                x[:, 1:], x[:, :-1], x[..., ::2], x[:, -2:], x[:, :100], x[..., 1:3], x[:, 1],
                x[..., 0], x[-1], x[0, :, 1:], x[:, :, -1], x[:, 1:, None], x[:, None, 1:, 2:],
                torch.cat([x, x], -1), torch.cat([x, x]), torch.cat([x[:, :0], x], 1),
                torch.stack([x, x], 1), torch.stack([x, x]), x.repeat(1, 2, 1), x.repeat(2,
                1, 1, 1),
                torch.flip(x, (1,)), x.flip(0, 2), torch.roll(x, 1, 1), x.roll((1, 2), (0, 2)),
                x.roll(2), x.split(2, 1), x.split([1, 3, 1], 1), x.chunk(2, -1), x.chunk(2, 1),
                x.unbind(1), x.unbind(), x.narrow(1, 1, 2), x.repeat_interleave(2, 1),
                torch.tril(x), torch.triu(x, 1), x.diagonal(0, 1, 2), x.movedim(0, 2),
                F.pad(x, (1, 2)), F.pad(x, (1, 1, 0, 2), value=2.5), F.pad(x, (1, 1), "reflect"),
                F.pad(x, (2, 1), "replicate"), F.pad(x, (1, 2), mode="circular"),
                F.one_hot(i, 6), torch.arange(5)[None] + i[:, None], x.swapaxes(0, 1),
                x.expand(2, -1, -1, -1), torch.broadcast_to(i, (3, 4)),
                torch.meshgrid(i, i, indexing="ij"), torch.zeros(0, 3).reshape(3, -1),
                x.contiguous().view(-1, 4), torch.atleast_2d(i), x.squeeze(),
                i.tile(2)]  # fmt: skip

    check(function, tensors(2, 5, 4), tensors(2, 1, 4), torch.tensor([0, 3, 5, 1]))


@pytest.mark.nightly
def test_new_arrays():
    def function(x, i):
        return [torch.zeros(2, 3), torch.ones(2, dtype=torch.int64), torch.full((2, 2), 3),
                torch.full((2,), -math.inf), torch.full((2, 2), True), torch.full((), 1.5),
                torch.zeros_like(x), torch.ones_like(i), torch.full_like(x, 2.5),
                torch.zeros_like(x, dtype=torch.bool), x.new_zeros(3), x.new_ones(2, 2),
                i.new_full((2,), 7), i.new_zeros(2, dtype=torch.float32), torch.arange(4),
                torch.arange(1, 9, 2), torch.arange(3, dtype=torch.float32), torch.eye(3),
                torch.arange(0, 1, 0.25), torch.arange(2, 5, dtype=torch.int32), torch.eye(2, 3),
                torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(2.0), torch.tensor(3) + i,
                x.to(torch.bfloat16), i.to(torch.float32), x.bool(), x.to(torch.int64), i.float(),
                x.to(torch.float64), x.half() + i[:2], i.to(torch.uint8), torch.linspace(0, 1, 5),
                torch.full((2, 3), 0), torch.ones(()) * x, torch.where(x > 0, torch.tensor(0.0), x),
                torch.zeros(2, 0), torch.full((2,), 1.0, dtype=torch.float16)]  # fmt: skip

    check(function, tensors(3, 2), torch.tensor([1, 0, 4]))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool, torch.uint8])
def test_reductions(dtype):
    def function(x):
        found = [x.sum(), x.sum(-1), x.sum((0, 2), keepdim=True), x.amax(-1), x.amin((0, 1)),
                 x.max(), x.min(), x.any(), x.all(-1),
                 x.any(0, keepdim=True), x.cumsum(-1), x.sum(1, dtype=torch.float32),
                 x.count_nonzero(), x.any((0, 1)), x[0, 0, 0].sum()]  # fmt: skip
        if dtype not in (torch.bool, torch.uint8):
            found += [x.argmax(-1), x.argmin(0, keepdim=True)]
            found += [x.prod(-1), x.max(-1), x.min(0), x.max(1, keepdim=True)[0], x.cumprod(1)]
        if dtype.is_floating_point:
            found += [x.mean(), x.mean(-1), x.mean((1, 2), keepdim=True), x.var(-1), x.std(0),
                      x.var(-1, unbiased=False, keepdim=True), x.std(), x.norm(dim=-1),
                      torch.linalg.vector_norm(x), torch.var_mean(x, -1), x.norm(p=1, dim=0),
                      torch.linalg.vector_norm(x, dim=-1, keepdim=True), F.normalize(x, dim=-1),
                      x.argmax(), torch.std_mean(x, (0, 1)), x.softmax(1).mean(0),
                      x.mean(-1, dtype=torch.float32), torch.linalg.norm(x, dim=-1)]  # fmt: skip
        return found

    check(function, (tensors(4, 3, 5) * 2).abs().to(dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_orders(dtype):
    def topk(x):  # of integers some are equal, between which it chooses
        return (
            [x.topk(2), x.topk(2, 0), x.topk(1, largest=False)] if dtype.is_floating_point else []
        )

    def function(x):
        y = x + 1
        return [x.sort(), x.sort(0, descending=True), x.argsort(-1), x.argsort(descending=True),
                *topk(x), y.max(0), (x * 2).sort()]  # fmt: skip

    check(function, (tensors(4, 5) * 3).to(dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", FLOATS)
def test_products(dtype):
    def function(x, w, b, y):
        return [F.linear(x, w), F.linear(x, w, b), x @ w.T, x[0] @ w.t(), torch.addmm(b, x[0], w.T),
                torch.addmm(b, x[0], w.T, beta=0.5, alpha=2), torch.bmm(x, y), x @ y,
                torch.baddbmm(x @ y, x, y), x[0] @ b[0] if False else x[0] @ w[0],
                torch.einsum("bij,bjk->bik", x, y), torch.einsum("bij, kj -> bik", x, w),
                torch.outer(b, b), torch.dot(b, b), torch.mv(w, w[0]),
                F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
                F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3),
                F.scaled_dot_product_attention(x, x, x, x[:, :, :3]),
                F.scaled_dot_product_attention(x, x, x, torch.zeros(3, 3,
                dtype=torch.bool))]  # fmt: skip

    x, w, b, y = tensors(2, 3, 4), tensors(5, 4), tensors(5), tensors(2, 4, 3)
    check(function, *(a.to(dtype) for a in (x, w, b, y)))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_lookup_and_assignment(dtype):
    def function(x, i, j):
        y, z, w = x.clone(), x.clone(), x.clone()
        y[i] = 0
        z[x > 0] = 1
        w[:, 1] = x[:, 0]
        return [F.embedding(i, x.float()), x[i], x[:, i], x[i, i], x[i[:, None], i], y, z, w,
                x[i, 0], x.index_select(1, i), x.gather(1, j), x.gather(0, j[:3]), x[..., i],
                x.take_along_dim(j, 1), x.scatter(1, j, x[:, :2]), x.scatter(1, j, 1),
                x.index_put((i,), x[:3], accumulate=True)]  # fmt: skip

    x = (tensors(4, 4) * 3).to(dtype)
    j = torch.tensor([[0, 1], [3, 2], [1, 0], [2, 3]])
    check(function, x, torch.tensor([2, 0, 3]), j, without={"aten::gather.default"})


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers(dtype):
    def function(x, w, k, b):
        return [F.layer_norm(x, (6,)), F.layer_norm(x, (6,), w, w, 1e-3), F.rms_norm(x, (6,), w),
                F.layer_norm(x, (4, 6)), F.group_norm(x, 2), F.group_norm(x, 4, b, b),
                F.conv1d(x, k, b, padding=1, stride=2), F.conv1d(x, k[:, :2], groups=2),
                F.conv2d(x[:, :, None], k[:, :, None], dilation=(1, 2)), F.rms_norm(x,
                (6,))]  # fmt: skip

    x, w = (tensors(2, 4, 6) * 3), tensors(6) + 2
    check(function, *(a.to(dtype) for a in (x, w, tensors(4, 4, 3), tensors(4))))
