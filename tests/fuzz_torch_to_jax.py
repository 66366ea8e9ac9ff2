"""Fuzzes the conversion of torch programs to JAX: values, dtypes, shapes and gradients.

    python tests/fuzz_torch_to_jax.py --minutes 60 --seed 7

JAX has 64 bits here, so that all dtypes are those of torch. Floats may differ by rounding only: by
some units in the last place of the largest element, or by no more than the program in double
precision says that torch's own result is uncertain.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fmapper
import fuzzing
from fuzzing import Finding, Program, Step

FLOATS = ("float32", "float64", "bfloat16", "float16")
DTYPES = (*("float32",) * 6, "float64", "bfloat16", "float16", "complex64", "bool", "bool", "int64",
          "int64", "int32", "int16", "int8", "uint8")  # fmt: skip
TOLERANCE = {"float32": 2e-5, "float64": 1e-10, "bfloat16": 3e-2, "float16": 4e-3,
             "complex64": 3e-5, "complex128": 1e-10}  # fmt: skip
# Few, so that little is compiled.
SHAPES = ((), (1,), (3,), (4,), (2, 3), (3, 3), (3, 2), (1, 3), (2, 1, 3), (4, 4), (0,), (0, 3))
ODD = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-3, 300.0, 1e20)
NUMBERS = ("0", "1", "2", "-1", "0.5", "3", "-2.5", "True")

UNARY = """abs sign floor ceil round trunc frac exp exp2 log log1p expm1 sqrt rsqrt sin cos tan tanh
atan square neg sinh asinh isnan isinf isfinite logical_not real conj reciprocal nan_to_num sigmoid
relu erf erfc digamma lgamma bitwise_not positive sgn signbit deg2rad angle i0 logit log2 log10"""
NN = """relu relu6 gelu silu sigmoid softplus elu selu leaky_relu hardtanh hardswish hardsigmoid
mish softsign tanhshrink celu logsigmoid softshrink hardshrink"""
BINARY = """add sub mul div maximum minimum pow atan2 eq lt ge ne floor_divide remainder fmod
logaddexp copysign hypot bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor fmax
fmin true_divide xlogy heaviside rsub gt le nextafter"""
SHIFTS = "bitwise_left_shift bitwise_right_shift"
REDUCE = """sum prod amax amin mean any all argmax argmin var std logsumexp nansum count_nonzero
median norm"""
IN_PLACE = "add_ sub_ mul_ div_ pow_ copy_ remainder_ floor_divide_ maximum eq_ lt_ logical_and_"
ALONE = "neg_ abs_ zero_ relu_ exp_ sigmoid_ floor_ sqrt_ square_ tanh_ sign_ clamp_(0,1) fill_(2)"


class TorchToJax:
    """Compositions of what tensors can do, as the forward of a module."""

    title = "torch -> JAX"

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}

    def inputs(self, rng: random.Random) -> list[Any]:
        shapes = [rng.choice(SHAPES)]
        for _ in range(rng.randint(0, 2)):
            shapes.append(rng.choice([shapes[0], rng.choice(SHAPES), shapes[0][1:]]))
        return [_values(rng, shape, rng.choice(DTYPES)) for shape in shapes]

    def load(self, values: Any) -> Any:
        return fmapper.to_torch(np.array(values))

    def write(self, values: Any) -> str:
        name = values.dtype.name
        kind = complex if values.dtype.kind == "c" else float if name in FLOATS else values.dtype
        text = repr(np.asarray(values).astype(kind).tolist())
        text = text.replace("nan", "torch.nan").replace("inf", "torch.inf")
        return f"torch.tensor({text}, dtype=torch.{name}).reshape({values.shape})"

    def rest(self) -> None:
        jax.clear_caches()
        torch._dynamo.reset()

    def step(self, rng: random.Random, values: Sequence[Any]) -> Step:
        recent = max(range(len(values)), key=lambda i: i * rng.random())
        return rng.choice(MAKERS)(rng, values, recent)

    def judge(self, program: Program) -> Finding | None:
        module = _Module(program.function(self.names))
        tensors = tuple(self.load(x) for x in program.inputs)
        with warnings.catch_warnings(), jax.enable_x64(True):
            warnings.simplefilter("ignore")
            want = module(*tensors)
            try:
                model = fmapper.convert(module, "jax", tensors, check=False)
                arrays = [jnp.asarray(x) for x in program.inputs]
                got = model(*arrays)
            except fmapper.FmapperError as error:
                return Finding("refused", f"{type(error).__name__}: {error}")
            except Exception as error:
                return Finding("error", f"{type(error).__name__}: {error}")
            exact = None
            for i, (g, w) in enumerate(zip(got, want, strict=True)):
                found = _kind(g, w)
                if found is not None:
                    return found
                if _differs(g, w, None):
                    exact = _in_double(module, tensors) if exact is None else exact
                    text = _differs(g, w, exact[i] if exact else None)
                    if text:
                        return Finding("value", text)
            return _gradients(module, model, tensors, arrays)


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*(x.clone() for x in inputs))  # which it may change


def _kind(got: Any, want: Any) -> Finding | None:
    if f"torch.{got.dtype.name}" != str(want.dtype):
        return Finding("dtype", f"{got.dtype} for {want.dtype}")
    if tuple(got.shape) != tuple(want.shape):
        return Finding("shape", f"{tuple(got.shape)} for {tuple(want.shape)}")
    return None


def _array(tensor: Any) -> Any:
    return np.asarray(fmapper.to_numpy(tensor.detach().clone().resolve_conj().resolve_neg()))


def _differs(got: Any, want: Any, exact: Any) -> str:
    """Where an array is not a tensor of torch; empty if it is, within rounding."""
    x, y = np.asarray(got), _array(want)
    name = y.dtype.name
    known = exact is not None and tuple(exact.shape) == y.shape
    truth = _array(exact) if known else None
    if name in TOLERANCE:
        wide = np.complex128 if name.startswith("complex") else np.float64
        x, y = x.astype(wide), y.astype(wide)
        finite = np.isfinite(y)
        with np.errstate(all="ignore"):
            scale = np.abs(y[finite]).max(initial=0.0)
            allowed = TOLERANCE[name] * scale + 1e-30
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            if truth is not None:
                off = np.abs(y - truth.astype(wide))
                allowed = allowed + 8 * off[np.isfinite(off)].max(initial=0.0)
                same |= np.isfinite(truth.astype(wide)) != finite  # overflow of torch's own
            same |= (np.abs(x - y) <= allowed) & finite & np.isfinite(x)
    else:
        same = x == y
        if truth is not None:  # where rounding decides, as of floor or argmax
            same = same | (truth != y)
    if same.all():
        return ""
    at = tuple(int(i) for i in np.unravel_index(np.argmin(same), same.shape))
    return f"{int((~same).sum())} of {same.size} elements, as {x[at]!r} for {y[at]!r} at {at}"


def _in_double(module: Any, tensors: Sequence[Any]) -> list[Any]:
    """The results in double precision; empty where that cannot be had."""

    def widened(x: Any) -> Any:
        if x.is_complex():
            return x.to(torch.complex128)
        return x.double() if x.is_floating_point() else x

    try:
        return list(module(*map(widened, tensors)))
    except Exception:
        return []


def _gradients(module: Any, model: Any, tensors: Any, arrays: Any) -> Finding | None:
    """Compares the gradients of the sum of all floating outputs, by all inputs of 32 bits."""
    floats = [i for i, x in enumerate(tensors) if x.dtype is torch.float32]
    if not floats or not all(bool(tensors[i].isfinite().all()) for i in floats):
        return None
    given = [x.clone().requires_grad_(i in floats) for i, x in enumerate(tensors)]

    def slopes(given: Any) -> Any:
        outputs = [y for y in module(*given) if y.is_floating_point() and y.requires_grad]
        total = sum((y.sum() for y in outputs), sum((given[i] * 0).sum() for i in floats))
        return torch.autograd.grad(total, [given[i] for i in floats])

    def loss(*chosen: Any) -> Any:
        full = list(arrays)
        for i, x in zip(floats, chosen, strict=True):
            full[i] = x
        found = [y.sum() for y in model(*full) if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum(found, jnp.zeros(())).astype(jnp.float32)

    try:
        want = slopes(given)
    except Exception:  # torch has no derivative of it
        return None
    try:
        got = jax.grad(loss, tuple(range(len(floats))))(*[arrays[i] for i in floats])
    except Exception as error:
        return Finding("gradient", f"{type(error).__name__}: {error}")
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if not bool(w.isfinite().all()) or not _differs(g, w, None):
            continue
        try:
            wide = [x.double() if x.is_floating_point() else x for x in tensors]
            exact = slopes([x.clone().requires_grad_(n in floats) for n, x in enumerate(wide)])[i]
        except Exception:
            exact = None
        text = _differs(g, w, exact)
        if text:
            return Finding("gradient", text)
    return None


# --- inputs ---


def _values(rng: random.Random, shape: tuple[int, ...], dtype: str) -> Any:
    count = math.prod(shape)
    if dtype == "bool":
        flat: list[Any] = [rng.random() < 0.5 for _ in range(count)]
    elif "int" in dtype:
        span = np.iinfo(dtype)
        edges = [int(span.min), int(span.max), 0, 1]
        flat = [rng.choice(edges) if rng.random() < 0.1 else max(rng.randint(-4, 9), int(span.min))
                for _ in range(count)]  # fmt: skip
    else:
        odd = rng.random() < 0.25
        flat = [rng.choice(ODD) if odd and rng.random() < 0.25 else round(rng.gauss(0, 2), 3)
                for _ in range(count)]  # fmt: skip
        if dtype == "complex64":
            flat = [complex(x, round(rng.gauss(0, 2), 3)) for x in flat]
    with np.errstate(all="ignore"):
        return np.asarray(np.array(flat).reshape(shape)).astype(jnp.dtype(dtype))


# --- steps ---


def _unary(rng: random.Random, values: Any, at: int) -> Step:
    return Step(f"torch.{rng.choice(UNARY.split())}({{0}})", (at,))


def _nn(rng: random.Random, values: Any, at: int) -> Step:
    return Step(f"F.{rng.choice(NN.split())}({{0}})", (at,))


def _binary(rng: random.Random, values: Any, at: int) -> Step:
    name = rng.choice(BINARY.split())
    if rng.random() < 0.3:
        return Step(f"torch.{name}({{0}}, {rng.choice(NUMBERS)})", (at,))
    if rng.random() < 0.2:  # without dimensions: of another rank when dtypes are promoted
        kind = rng.choice(["int64", "float64", "float32", "bool", "uint8", "float16"])
        return Step(f"torch.{name}({{0}}, torch.tensor(3, dtype=torch.{kind}))", (at,))
    return Step(f"torch.{name}({{0}}, {{1}})", (at, rng.randrange(len(values))))


def _operators(rng: random.Random, values: Any, at: int) -> Step:
    number, sign = rng.choice(NUMBERS), rng.choice(["+", "-", "*", "/", "//", "%", "**", ">", "=="])
    return Step(rng.choice([f"{{0}} {sign} {number}", f"{number} {sign} {{0}}"]), (at,), sign)


def _reduce(rng: random.Random, values: Any, at: int) -> Step:
    name, rank = rng.choice(REDUCE.split()), values[at].ndim
    if rng.random() < 0.3 or name in ("norm", "count_nonzero"):
        return Step(f"torch.{name}({{0}})", (at,))
    dim = rng.randint(-rank, max(rank - 1, 0)) if rank else 0
    keep = ", keepdim=True" if rng.random() < 0.5 else ""
    end = ".values" if name == "median" else ""
    return Step(f"torch.{name}({{0}}, dim={dim}{keep}){end}", (at,))


def _cumulative(rng: random.Random, values: Any, at: int) -> Step:
    name = rng.choice(["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"])
    dim = rng.randrange(max(values[at].ndim, 1))
    end = rng.choice([".values", ".indices"]) if name in ("cummax", "cummin") else ""
    return Step(f"torch.{name}({{0}}, {dim}){end}", (at,))


def _cast(rng: random.Random, values: Any, at: int) -> Step:
    dtype = rng.choice(DTYPES)
    text = rng.choice([f"{{0}}.to(torch.{dtype})", "{0}.type_as({1})", "{0}.float()", "{0}.long()"])
    return Step(text, (at, rng.randrange(len(values))) if "{1}" in text else (at,), "to")


def _place(rng: random.Random, shape: Sequence[int]) -> str:
    """An index that gives a view."""
    parts = []
    for n in shape[: rng.randint(1, 3)]:
        a, b, c = (rng.randint(-n, max(n - 1, 0)) for _ in range(3))
        parts.append(rng.choice([":", "None", str(c), f"{a}:{b}", "::2", "...", ":-1", "1:"]))
    return ", ".join(parts) if parts and parts.count("...") < 2 else "..."


def _index(rng: random.Random, values: Any, at: int) -> Step:
    n = values[at].shape[0] if values[at].ndim else 1
    a, b = (rng.randint(-n, max(n - 1, 0)) for _ in range(2))
    place = rng.choice([_place(rng, values[at].shape)] * 3 + [
        f"torch.tensor([{a}, {b}, {a}])", f"[{a}, {b}], ..., :1", f"..., torch.tensor([{a}])",
        f"torch.tensor({a})",
    ])  # fmt: skip
    return Step(f"{{0}}[{place}]", (at,), "index")


def _view(rng: random.Random, values: Any, at: int) -> Step:
    x = values[at]
    order = list(range(x.ndim))
    rng.shuffle(order)
    n, dim = rng.randint(1, 3), rng.randrange(max(x.ndim, 1))
    return Step(rng.choice([
        "{0}.reshape(-1)", f"{{0}}.permute({tuple(order)})", "{0}.mT", "{0}[None]",
        f"{{0}}.expand({(n, *x.shape)})", f"{{0}}.unsqueeze({dim})", "{0}.squeeze()",
        f"{{0}}.repeat_interleave({n}, {dim})", f"{{0}}.repeat({n}, *{[1] * x.ndim})",
        f"torch.flip({{0}}, ({dim},))", f"torch.roll({{0}}, {n}, {dim})", "{0}.contiguous()",
        f"{{0}}.reshape({tuple(x.shape)[::-1]})", "{0}.movedim(0, -1)", "{0}.detach()",
        f"F.pad({{0}}, ({n}, 1), value=1)", f"{{0}}.chunk(2, {dim})[0]", "torch.diagonal({0})",
        "torch.tril({0})", "torch.triu({0}, 1)", f"{{0}}.unfold({dim}, 1, 1)", "{0}.flatten(0, 1)",
        f"{{0}}.narrow({dim}, 0, 1)", "{0}.clone()", f"{{0}}.transpose({dim}, -1)",
        f"{{0}}.unbind({dim})[-1]", f"torch.rot90({{0}}, {n})", "{0}.view(-1)", "{0}.T",
        f"torch.broadcast_to({{0}}, {(n, *x.shape)})", f"{{0}}.split(1, {dim})[0]",
    ]), (at,))  # fmt: skip


def _change(rng: random.Random, values: Any, at: int) -> Step:
    """A change in place, of a value or of a view of it."""
    view = rng.choice(["", f"[{_place(rng, values[at].shape)}]", ".mT", ".view(-1)", "[..., :1]"])
    if rng.random() < 0.3:
        name = rng.choice(ALONE.split())
        return Step(f"{{0}}{view}.{name}{'' if '(' in name else '()'}", (at,), f"in place {name}")
    name = rng.choice(IN_PLACE.split())
    other = rng.choice(["{1}", "{1}", rng.choice(NUMBERS), "{0}[..., :1]", "{0}.clone()[..., :1]"])
    if name == "copy_" and "{" not in other:
        other = "{1}"
    operands = (at, rng.randrange(len(values))) if other == "{1}" else (at,)
    return Step(f"{{0}}{view}.{name}({other})", operands, f"in place {name}")


def _update(rng: random.Random, values: Any, at: int) -> Step:
    n = values[at].shape[0] if values[at].ndim else 1
    a, b = (rng.randint(0, max(n - 1, 0)) for _ in range(2))
    ids, other = f"torch.tensor([{a}, {b}])", rng.randrange(len(values))
    text = rng.choice([
        f"{{0}}.index_add(0, {ids}, {{0}}[{ids}].clone())", f"{{0}}.index_fill(0, {ids}, 3)",
        f"{{0}}.index_copy(0, {ids}, {{0}}[:2].clone() if {a} != {b} else {{0}}[{ids}])",
        f"{{0}}.index_put(({ids},), {{1}}, accumulate=True)", "{0}.masked_fill({0} > 0, 2)",
        f"{{0}}.index_put_((torch.tensor([{a}]),), {{1}}.to({{0}}.dtype))",
        f"{{0}}.index_select(0, {ids})", "torch.take({0}, torch.tensor([0, -1]))",
        "{0}.scatter_add(0, torch.zeros_like({0}, dtype=torch.int64), {0})",
        "{0}.scatter(0, torch.zeros({0}.shape, dtype=torch.int64), 2)",
        "{0}.scatter_reduce(0, torch.zeros_like({0}, dtype=torch.int64), {0}, 'amax')",
        "{0}.gather(-1, torch.zeros_like({0}, dtype=torch.int64))",
        "torch.slice_scatter({0}, {0}[:1] * 2, 0, 0, 1)",
        "torch.select_scatter({0}, {0}[0], 0, -1)",
        "{0}.masked_fill_({1}.to(torch.bool), 1)", f"{{0}}.index_add_(0, {ids}, {{0}}[:2] + 0)",
    ])  # fmt: skip
    return Step(text, (at, other) if "{1}" in text else (at,))


def _join(rng: random.Random, values: Any, at: int) -> Step:
    other = rng.choice([i for i, v in enumerate(values) if v.ndim == values[at].ndim])
    dim = rng.randint(0, max(values[at].ndim - 1, 0))
    return Step(rng.choice([
        f"torch.cat([{{0}}, {{1}}], {dim})", f"torch.stack([{{0}}, {{1}}], {dim})",
        "torch.hstack([{0}, {1}])", "torch.meshgrid({0}, {1}, indexing='ij')[0]",
        "torch.broadcast_tensors({0}, {1})[0]", "torch.cartesian_prod({0}, {1})",
    ]), (at, other))  # fmt: skip


def _product(rng: random.Random, values: Any, at: int) -> Step:
    return Step(rng.choice([
        "torch.matmul({0}, {1})", "{0} @ {1}.mT", "torch.outer({0}, {1})", "F.linear({0}, {1})",
        "torch.einsum('...i,...i->...', {0}, {1})", "torch.einsum('ij,kj->ik', {0}, {1})",
        "torch.tensordot({0}, {1}, 1)", "torch.dot({0}, {1})", "torch.kron({0}, {1})",
        "torch.addmm({0}, {0}, {1})", "torch.addcmul({0}, {0}, {1}, value=2)", "torch.mv({0}, {1})",
        "torch.bmm({0}, {1})", "torch.cdist({0}, {1})", "torch.lerp({0}, {1}, 0.25)",
        "F.conv1d({0}.reshape(1, 1, -1), {1}.reshape(1, 1, -1), padding=1)",
    ]), (at, rng.randrange(len(values))))  # fmt: skip


def _sort(rng: random.Random, values: Any, at: int) -> Step:
    dim = rng.randint(-1, max(values[at].ndim - 1, 0))
    return Step(rng.choice([
        f"torch.sort({{0}}, {dim}).values", f"torch.argsort({{0}}, {dim}, stable=True)",
        f"torch.sort({{0}}, dim={dim}, descending=True, stable=True).indices",
        f"torch.topk({{0}}, 2, {dim}).values", f"torch.max({{0}}, {dim}).indices",
        f"torch.kthvalue({{0}}, 1, {dim}).values", f"torch.min({{0}}, {dim}).values",
        f"torch.quantile({{0}}, 0.3, {dim})", "torch.searchsorted({0}.reshape(-1).sort()[0], {0})",
        "torch.bucketize({0}, torch.tensor([-1., 0., 1.]))", f"torch.aminmax({{0}}, dim={dim}).min",
    ]), (at,))  # fmt: skip


def _choose(rng: random.Random, values: Any, at: int) -> Step:
    return Step(rng.choice([
        "torch.where({0} > 0, {0}, {1})", "torch.where({1} != 0, {0}, 0)", "{0}.clamp(-1, 2)",
        "torch.where({0} > 0, 1.5, {1})", "torch.clamp({0}, {1}, {0})", "{0}.clamp(min=0.5)",
        "torch.isclose({0}, {1})", "torch.clip({0}, max={1})", "torch.eq({0}, {1}).sum() + {0}",
        "torch.full_like({0}, 2) + {1}", "torch.zeros_like({0}, dtype=torch.int32) + {1}",
        "torch.arange({0}.shape[0]) + {1}", "{0}.new_ones(3) * {1}", "torch.ones(3) * {0}",
    ]), (at, rng.randrange(len(values))))  # fmt: skip


def _layers(rng: random.Random, values: Any, at: int) -> Step:
    x = values[at]
    last = x.shape[-1:] if x.ndim else (1,)
    dim = rng.randint(-1, max(x.ndim - 1, 0))
    return Step(rng.choice([
        f"F.softmax({{0}}, {dim})", f"F.log_softmax({{0}}, {dim})",
        f"F.layer_norm({{0}}, {tuple(last)})", f"F.normalize({{0}}, dim={dim})", "F.glu({0}, -1)",
        "F.max_pool1d({0}.reshape(1, 1, -1), 2, 1)", "F.avg_pool1d({0}.reshape(1, 1, -1), 2, 1, 1)",
        "F.adaptive_avg_pool1d({0}.reshape(1, 1, -1), 2)", "F.one_hot({0}.long().clamp(0, 3), 4)",
        "F.adaptive_max_pool1d({0}.reshape(1, 1, -1), 2)", "F.embedding({0}.long() % 3, {1})",
        "F.interpolate({0}.reshape(1, 1, -1), scale_factor=2)", "F.mse_loss({0}, {1})",
        "F.scaled_dot_product_attention({0}, {0}, {0})", f"F.rms_norm({{0}}, {tuple(last)})",
        "F.cosine_similarity({0}, {1}, 0)", "F.smooth_l1_loss({0}, {1})", "F.pdist({0})",
        "torch.fft.rfft({0}).abs()", "torch.linalg.vector_norm({0}, 1)", "torch.diff({0})",
    ]), (at, rng.randrange(len(values))))  # fmt: skip


MAKERS = (_unary, _unary, _nn, _binary, _binary, _binary, _operators, _reduce, _reduce, _cumulative,
          _cast, _index, _index, _view, _view, _change, _change, _change, _update, _join, _product,
          _sort, _choose, _layers)  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(fuzzing.main(TorchToJax()))
