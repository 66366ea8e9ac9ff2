"""Fuzzes the conversion of torch programs to JAX: values, dtypes, shapes and gradients.

    PYTHONPATH=tests python -m sweeps.fuzz_torch_to_jax --minutes 60 --seed 7

JAX has 64 bits here, so that all dtypes are those of torch. Floats may differ by rounding only: by
some units in the last place of the largest element, or by no more than the program in double
precision says that torch's own result is uncertain. Integers and bools may be others where a
rounding of a value on the way, in torch's own precision, makes them others. Numbers too small for
the normal range may be zero, as XLA has them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fmapper
from sweeps import fuzzing
from sweeps.fuzzing import Finding, Program, Step

DTYPES = (*("float32",) * 6, "float64", "bfloat16", "float16", "complex64", "bool", "bool", "int64",
          "int64", "int32", "int16", "int8", "uint8")  # fmt: skip
TOLERANCE = {"float32": 2e-5, "float64": 1e-10, "bfloat16": 3e-2, "float16": 4e-3,
             "complex64": 3e-5, "complex128": 1e-10}  # fmt: skip
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
        return fuzzing.draw_inputs(rng, DTYPES)

    def load(self, values: Any) -> Any:
        return fmapper.to_torch(np.array(values))

    def write(self, values: Any) -> str:
        text = fuzzing.literal(values, "torch")
        return f"torch.tensor({text}, dtype=torch.{values.dtype.name}).reshape({values.shape})"

    def rest(self) -> None:
        jax.clear_caches()
        torch._dynamo.reset()

    def step(self, rng: random.Random, values: Sequence[Any]) -> Step:
        recent = max(range(len(values)), key=lambda i: i * rng.random())
        return rng.choice(MAKERS)(rng, values, recent)

    def promised(self, step: Step, operands: Sequence[Any], value: Any) -> bool:
        first, name = operands[0], step.called()
        if (
            "gelu" in name
        ):  # of infinity it is NaN where torch computes many at once; `1 + erf` cancels
            return bool(first.isfinite().all() and (first > -5).all())
        if "tanhshrink" in name:  # the difference cancels
            return bool((first.abs() > 0.1).all())
        if "median" in name:  # of nothing it is NaN as an integer: what the processor makes of it
            return bool(first.numel() > 0 or first.is_floating_point())
        if "True" in step.text and re.search(r"pow|\*\*", step.text):
            return bool(first.dtype is not torch.bool)  # torch records another dtype than it gives
        if re.search("fft|conv", name):  # infinity less itself, or times a zero of the padding
            return all(bool(x.isfinite().all()) for x in operands)
        if re.search("cum|prod|sum", name):  # torch may add and multiply in double precision
            return bool(value.isfinite().all() or not first.isfinite().all())
        return True

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
            for g, w in zip(got, want, strict=True):
                kinds = (g.dtype.name, str(w.dtype).removeprefix("torch."))
                found = fuzzing.wrong_kind(kinds, (g.shape, w.shape))
                if found is not None:
                    return found
            found = self._values(program, module, model, got, want)
            # With NaN about, torch's derivatives drop some of it: that of logcumsumexp does.
            if found is not None or any(bool(w.isnan().any()) for w in want):
                return found
            # The in-place form overwrites values, yet torch's autograd does not see it.
            if any("logical_and_" in step.called() for step in program.steps):
                return None
            tolerance = _coarsest(program, self.names, tensors)
            found = _gradients(module, model, tensors, arrays, tolerance)
            # Of what is detached the differences would tell.
            detached = any("detach" in step.text for step in program.steps)
            if found is None or detached or not _is_slope(module, model, tensors, arrays):
                return found
            return None

    def _values(
        self, program: Program, module: Any, model: Any, got: Any, want: Any
    ) -> Finding | None:
        wrong = [i for i, g in enumerate(got) if _differs(g, want[i], None)]
        if not wrong:
            return None
        tensors = [self.load(x) for x in program.inputs]
        exact = _in_double(module, tensors)
        with _flush():
            others = [module(*tensors)]
        others += _disturbed(program, self.names, tensors)
        odd = _has_odd_complex(program, self.names, tensors)
        with jax.disable_jit():  # XLA writes whole programs anew: a NaN among constants is lost
            plain = model(*(jnp.asarray(x) for x in program.inputs))
        for i in wrong:
            if not _differs(plain[i], want[i], None):
                continue
            ends = [one[i] for one in others]
            text = _differs(got[i], want[i], exact[i] if exact else None, ends, odd=odd)
            if text:
                return Finding("value", text)
        return None


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*(x.clone() for x in inputs))  # which it may change


def _array(tensor: Any) -> Any:
    return np.asarray(fmapper.to_numpy(tensor.detach().clone().resolve_conj().resolve_neg()))


def _differs(
    got: Any,
    want: Any,
    exact: Any,
    others: Sequence[Any] = (),
    *,
    odd: bool = False,
    least: float = 0.0,
) -> str:
    """Where an array is not a tensor of torch; empty if it is, within rounding.

    Args:
        got: The array.
        want: The tensor.
        exact: The tensor in double precision, where it is known.
        others: What torch gives where values on the way are rounded in another way.
        odd: Whether complex numbers on the way are infinite: torch's own answer to those depends on
            where in an array they are.
        least: What any element may be off by.
    """
    x, y = np.asarray(got), _array(want)
    name = y.dtype.name
    truth = fuzzing.widest(_array(exact)) if exact is not None and exact.shape == y.shape else None
    others = [_array(one) for one in others if one.shape == y.shape and one.dtype == want.dtype]
    if name not in TOLERANCE:
        excused: Any = False if truth is None else truth != y
        for one in others:
            excused = excused | (one != y)
        return fuzzing.difference(x, y, excused=excused)
    wide = fuzzing.widest(y)
    finite = np.isfinite(wide)
    excused = np.full(y.shape, False)
    with np.errstate(all="ignore"):
        allowed = TOLERANCE[name] * np.abs(wide[finite]).max(initial=0.0) + 1e-30 + least
        for one in others:
            away = np.abs(fuzzing.widest(one) - wide)
            allowed = allowed + 4 * np.where(np.isfinite(away), away, 0)
            excused |= np.isfinite(fuzzing.widest(one)) != finite
            excused |= np.isnan(fuzzing.widest(one)) != np.isnan(wide)
        if truth is not None:
            away = np.abs(wide - truth)
            allowed = allowed + 8 * away[np.isfinite(away)].max(initial=0.0)
            excused |= np.isfinite(truth) != finite  # overflow of torch's own
        if odd:
            excused |= np.isfinite(fuzzing.widest(x)) != finite
    return fuzzing.difference(x, y, allowed, excused)


@contextlib.contextmanager
def _flush() -> Iterator[None]:
    """Inside, numbers too small for the normal range are zero for torch, as they are for XLA."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _disturbed(program: Program, names: dict[str, Any], tensors: Sequence[Any]) -> list[list[Any]]:
    """The results where every value that is not exact is off by a rounding, some times."""
    exact: dict[int, Any] = {}

    def note(i: int, y: Any) -> Any:
        exact[i] = y.detach().clone()
        return y

    def off(i: int, y: Any, sample: int) -> Any:
        kind = str(y.dtype).removeprefix("torch.")
        if kind not in fuzzing.ROUNDING or exact[i].shape != y.shape:
            return y
        factors = 2 * torch.tensor(fuzzing.disturbances(sample, tuple(y.shape), kind)) - 1
        widest = torch.complex128 if y.is_complex() else torch.float64
        same = (exact[i] == y) & (fuzzing.ROUNDED.search(program.steps[i].text) is None)
        moved = torch.where(same, y, (y.to(widest) * factors).to(y.dtype))
        if not y.is_complex():  # the sign of NaN is the processor's choice
            moved = torch.where(y.isnan(), torch.copysign(y, torch.tensor(0.5 - sample % 2)), moved)
        with contextlib.suppress(RuntimeError):  # an expanded one
            y.copy_(moved)  # in place, as views of it may follow
        return y

    def flushed(_: int, y: Any) -> Any:
        if not y.is_floating_point():
            return y
        return torch.where(y.abs() < torch.finfo(y.dtype).tiny, 0.0 * y, y)

    found: list[list[Any]] = []
    with contextlib.suppress(Exception):
        found.append(list(program.function(names, flushed)(*(x.clone() for x in tensors))))
    with contextlib.suppress(Exception):  # what double precision cannot be had of
        with _doubled(tensors) as wide:
            program.function(names, note)(*wide)
        for sample in range(fuzzing.SAMPLES):
            function = program.function(names, functools.partial(off, sample=sample))
            found.append(list(function(*(x.clone() for x in tensors))))
    return found


def _has_odd_complex(program: Program, names: dict[str, Any], tensors: Sequence[Any]) -> bool:
    """Whether there are complex numbers on the way that are not finite."""
    odd = [x.is_complex() and not bool(x.isfinite().all()) for x in tensors]

    def note(_: int, y: Any) -> Any:
        odd.append(y.is_complex() and not bool(y.isfinite().all()))
        return y

    program.function(names, note)(*(x.clone() for x in tensors))
    return any(odd)


@contextlib.contextmanager
def _doubled(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """Copies in double precision, and inside floats that come of integers have it, too."""

    def widened(x: Any) -> Any:
        if x.is_complex():
            return x.to(torch.complex128)
        return x.double() if x.is_floating_point() else x.clone()

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield list(map(widened, tensors))
    finally:
        torch.set_default_dtype(before)


def _in_double(module: Any, tensors: Sequence[Any]) -> list[Any]:
    """The results in double precision; empty where that cannot be had."""
    try:
        with _doubled(tensors) as wide:
            return list(module(*wide))
    except Exception:
        return []


def _coarsest(program: Program, names: dict[str, Any], tensors: Sequence[Any]) -> float:
    """The tolerance for the floats on the way that have the fewest bits: slopes go through them."""
    found = [TOLERANCE["float32"]]

    def note(_: int, y: Any) -> Any:
        found.append(TOLERANCE.get(str(y.dtype).removeprefix("torch."), 0.0))
        return y

    program.function(names, note)(*(x.clone() for x in tensors))
    return max(found)


def _is_slope(module: Any, model: Any, tensors: Sequence[Any], arrays: Any) -> bool:
    """Whether the converted model's gradients are the differences of torch's own outputs.

    Then torch is wrong: with integers whose squares overflow, or where it has kept a value for the
    derivative that was overwritten since.
    """
    floats = [i for i, x in enumerate(tensors) if x.dtype is torch.float32]
    total = _total(model, arrays, floats)
    got = jax.grad(total, tuple(range(len(floats))))(*[arrays[i] for i in floats])
    exact = _in_double(module, tensors)
    if not exact or any(y.is_complex() for y in exact):
        return False
    with _doubled(tensors) as wide, torch.no_grad():
        for i, slopes in zip(floats, got, strict=True):
            want, step = np.zeros(wide[i].shape), 1e-6
            for at in np.ndindex(*wide[i].shape):
                ends = []
                for sign in (1, -1):
                    moved = [x.clone() for x in wide]
                    moved[i][at] += sign * step
                    ends.append(
                        sum(float(y.sum()) for y in module(*moved) if y.is_floating_point())
                    )
                want[at] = (ends[0] - ends[1]) / (2 * step)
            if not np.allclose(np.asarray(slopes), want, rtol=1e-3, atol=1e-4):
                return False
    return True


def _total(model: Any, arrays: Any, floats: Sequence[int]) -> Callable[..., Any]:
    """The sum of all floating outputs, as a function of the inputs at some places."""

    def loss(*chosen: Any) -> Any:
        full = list(arrays)
        for i, x in zip(floats, chosen, strict=True):
            full[i] = x
        found = [y.sum() for y in model(*full) if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum(found, jnp.zeros(())).astype(jnp.float32)

    return loss


def _gradients(
    module: Any, model: Any, tensors: Any, arrays: Any, tolerance: float
) -> Finding | None:
    """Compares the gradients of the sum of all floating outputs, by all inputs of 32 bits."""
    floats = [i for i, x in enumerate(tensors) if x.dtype is torch.float32]
    if not floats or not all(bool(tensors[i].isfinite().all()) for i in floats):
        return None
    given = [x.clone().requires_grad_(i in floats) for i, x in enumerate(tensors)]

    def slopes(given: Any) -> Any:
        outputs = [y for y in module(*given) if y.is_floating_point() and y.requires_grad]
        total = sum((y.sum() for y in outputs), sum((given[i] * 0).sum() for i in floats))
        return torch.autograd.grad(total, [given[i] for i in floats])

    try:
        sizes = [float(y.abs().sum()) for y in module(*tensors) if y.is_floating_point()]
        want = slopes(given)
    except Exception:  # torch has no derivative of it
        return None
    try:
        got = jax.grad(_total(model, arrays, floats), tuple(range(len(floats))))(
            *[arrays[i] for i in floats]
        )
    except Exception as error:
        return Finding("gradient", f"{type(error).__name__}: {error}")
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        # What cancels, as in the derivative of x / |x|, leaves a rounding of its terms.
        largest = np.abs(_array(given[floats[i]])).max(initial=0.1)
        least = 4 * 2.0**-24 * sum(filter(math.isfinite, sizes)) / float(largest)
        least += tolerance * float(w.abs().max()) if w.numel() else 0.0
        if not bool(w.isfinite().all()) or not _differs(g, w, None, least=least):
            continue
        try:
            # Derivatives of torch may overflow in the dtypes of integers: that of atan2 does.
            wide = [x if x.dtype is torch.bool or x.is_complex() else x.double()
                    if x.is_floating_point() else x.long() for x in tensors]  # fmt: skip
            exact = slopes([x.clone().requires_grad_(n in floats) for n, x in enumerate(wide)])[i]
        except Exception:
            exact = None
        text = _differs(g, w, exact, least=least)
        if text:
            return Finding("gradient", text)
    return None


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
    view = rng.choice(
        [
            "",
            f"[{_place(rng, values[at].shape)}]",
            ".mT",
            ".view(-1)",
            "[..., :1]",
            ".unfold(-1, 2, 2)",
            ".diagonal()",
            ".unbind(0)[-1]",
            ".squeeze()",
            ".chunk(2, -1)[0]",
            ".unfold(0, 1, 2)[:1]",
            "[None]",
            ".expand(2, -1)",
        ]
    )
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
    each = f"torch.tensor({sorted({a, b})})"  # of the same place twice torch gives other gradients
    text = rng.choice([
        f"{{0}}.index_add(0, {ids}, {{0}}[{ids}].clone())", f"{{0}}.index_fill(0, {ids}, 3)",
        f"{{0}}.index_copy(0, {each}, {{0}}[:{len({a, b})}].clone())",
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
