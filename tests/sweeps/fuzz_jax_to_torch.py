"""Fuzzes the conversion of JAX programs to torch: values, dtypes, shapes and gradients.

    PYTHONPATH=tests python -m sweeps.fuzz_jax_to_torch --minutes 60 --seed 7

Floats may differ by rounding only: by some units in the last place of the largest element, by no
more than a program in double precision says that JAX's own result is uncertain, or by what it does
to the result in double precision when every value on the way is off by a rounding. Integers and
bools may be others where such a rounding of a value that is not exact makes them others.
"""

from __future__ import annotations

import functools
import math
import random
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fmapper
from sweeps import fuzzing
from sweeps.fuzzing import Finding, Program, Step

DTYPES = (*("float32",) * 6, "bfloat16", "float16", "complex64", "bool", "int8", "int16", "int32",
          "int32", "uint8", "uint16", "uint32")  # fmt: skip
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3, "complex64": 3e-5}
WIDE = {"float32": "float64", "complex64": "complex128", "bfloat16": "float64",
        "float16": "float64"}  # fmt: skip

UNARY = (
    "abs sign floor ceil round exp log log1p expm1 sqrt rsqrt sin cos tanh arctan square negative"
)
UNARY += " sinh isnan isfinite logical_not real conj cumsum reciprocal nan_to_num cbrt"
NN = "relu relu6 gelu silu sigmoid softplus elu selu leaky_relu softmax log_softmax hard_tanh"
BINARY = "add subtract multiply divide maximum minimum power arctan2 equal less greater_equal"
BINARY += " floor_divide remainder logaddexp copysign hypot bitwise_and bitwise_xor left_shift"
BINARY += " not_equal logical_and fmod right_shift fmax"
REDUCE = "sum prod max min mean any all argmax argmin var std"


class JaxToTorch:
    """Compositions of jnp, lax and jax.nn, converted and run eagerly."""

    title = "JAX -> torch"

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": jax.lax, "np": np}

    def inputs(self, rng: random.Random) -> list[Any]:
        return fuzzing.draw_inputs(rng, DTYPES)

    def load(self, values: Any) -> Any:
        return jnp.asarray(values)

    def write(self, values: Any) -> str:
        text = fuzzing.literal(values, "np")
        return f"jnp.array({text}, '{values.dtype.name}').reshape({values.shape})"

    def rest(self) -> None:
        jax.clear_caches()
        torch._dynamo.reset()

    def step(self, rng: random.Random, values: Sequence[Any]) -> Step:
        maker = rng.choice(MAKERS)
        recent = max(range(len(values)), key=lambda i: i * rng.random())
        return maker(rng, values, recent)

    def promised(self, step: Step, operands: Sequence[Any], value: Any) -> bool:
        # Which of two complex numbers is larger where one is NaN is the compiler's choice, and how
        # ties share a gradient in the place of an index that was clipped depends on the memory.
        odd = any(jnp.iscomplexobj(x) and not jnp.isfinite(x).all() for x in operands)
        if odd and "/" in step.text:  # in torch it depends on where in an array they are
            return False
        # JAX's derivative of a cumulative product makes the zeros of other signs that are sorted.
        zeros = operands[0][operands[0] == 0] if "top_k" in step.text else jnp.zeros(0)
        if bool(jnp.signbit(zeros).any() and not jnp.signbit(zeros).all()):
            return False
        extreme = step.called() in ("at.max", "at.min")
        if extreme and "clip" in step.text:
            return False
        extreme = extreme or re.search(r"max|min", step.text) is not None
        return not (extreme and jnp.iscomplexobj(value) and bool(jnp.isnan(operands[0]).any()))

    def judge(self, program: Program) -> Finding | None:
        function = program.function(self.names)
        arrays = [self.load(x) for x in program.inputs]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = function(*arrays)
            try:
                model = fmapper.convert(function, "torch", tuple(arrays))
                got = model(*(fmapper.to_torch(a) for a in arrays))
            except fmapper.FmapperError as error:
                return Finding("refused", f"{type(error).__name__}: {error}")
            except Exception as error:
                return Finding("error", f"{type(error).__name__}: {error}")
            # One by one some operations of JAX give other dtypes than in a program.
            for g, w in zip(got, jax.eval_shape(function, *arrays), strict=True):
                kinds = (str(g.dtype).removeprefix("torch."), w.dtype.name)
                found = fuzzing.wrong_kind(kinds, (g.shape, w.shape))
                if found is not None:
                    return found
            found = self._values(program, got, want)
            if found is not None:
                return found
            return self._gradients(program, function, model, arrays)

    def _values(self, program: Program, got: Any, want: Any) -> Finding | None:
        pairs = [(_array(g), np.asarray(w)) for g, w in zip(got, want, strict=True)]
        wrong = [i for i, (g, w) in enumerate(pairs) if fuzzing.difference(g, w, _allowed(w))]
        if not wrong:
            return None
        # The compiler may take liberties with one whole program: both are JAX's results.
        jitted = [np.asarray(y) for y in jax.jit(program.function(self.names))(
            *(self.load(x) for x in program.inputs))]  # fmt: skip
        exact, samples = _disturbed(program, self.names, every=True)
        flips = _disturbed(program, self.names, every=False)[1]
        for i in wrong:
            g, w = pairs[i]
            allowed: Any = _allowed(w)
            excused: Any = False
            if w.dtype.name in TOLERANCE:
                allowed = allowed + _uncertainty(w, jitted[i], exact[i] if exact else None)
                if exact and exact[i].shape == w.shape:
                    allowed = allowed + 4 * fuzzing.spread([one[i] for one in samples], exact[i])
            else:
                for one in flips:
                    excused = excused | (one[i] != exact[i]) | (exact[i] != w)
            text = fuzzing.difference(g, w, allowed, excused)
            if text and fuzzing.difference(g, jitted[i], allowed, excused):
                return Finding("value", text)
        return None

    def _gradients(
        self, program: Program, function: Any, model: Any, arrays: list[Any]
    ) -> Finding | None:
        """Compares the gradients of the sum of all finite floating outputs, by all floats."""
        floats = [i for i, a in enumerate(arrays) if a.dtype == jnp.float32]
        if not floats or not all(bool(jnp.isfinite(arrays[i]).all()) for i in floats):
            return None

        def loss(*chosen: Any) -> Any:
            full = list(arrays)
            for i, x in zip(floats, chosen, strict=True):
                full[i] = x
            return sum((y.sum() for y in function(*full) if y.dtype == jnp.float32), jnp.zeros(()))

        chosen = [arrays[i] for i in floats]
        every = tuple(range(len(floats)))
        try:
            want = jax.jit(jax.grad(loss, every))(*chosen)
        except Exception:  # JAX has no derivative of it
            return None
        inputs = [fmapper.to_torch(a) for a in arrays]
        for i in floats:
            inputs[i] = inputs[i].clone().requires_grad_()
        try:
            outputs = [y for y in model(*inputs) if y.dtype is torch.float32]
            if any(bool(y.isnan().any()) for y in outputs):
                return None  # how NaN is shared out by maxima is nobody's promise
            total = sum((y.sum() for y in outputs), torch.zeros(()))
            total = total + sum((inputs[i] * 0).sum() for i in floats)
            got = torch.autograd.grad(total, [inputs[i] for i in floats])
        except Exception as error:
            return Finding("gradient", f"{type(error).__name__}: {error}")
        pairs = [(_array(g), np.asarray(w)) for g, w in zip(got, want, strict=True)]
        rough = [
            1e-3 * float(np.abs(w).max(initial=0.0)) + self._least(arrays[i], outputs)
            for i, (_, w) in zip(floats, pairs, strict=True)
        ]
        # Of what is not finite neither side promises the kind.
        finite = [i for i, (_, w) in enumerate(pairs) if np.isfinite(w).all()]
        if not any(fuzzing.difference(*pairs[i], rough[i]) for i in finite):
            return None
        eager = [np.asarray(e) for e in jax.grad(loss, every)(*chosen)]
        exact, samples = _disturbed(program, self.names, every=True, slopes=tuple(floats))
        for i in finite:
            (g, w), e = pairs[i], eager[i]
            if not np.isfinite(e).all():
                continue
            allowed = rough[i] + 4 * np.abs(w - e).max(initial=0.0)
            if exact:
                allowed = allowed + 4 * np.abs(np.nan_to_num(w - exact[i])).max(initial=0.0)
                allowed = allowed + 4 * fuzzing.spread([one[i] for one in samples], exact[i])
            text = fuzzing.difference(g, w, allowed)
            if text:
                return Finding("gradient", text)
        return None

    def _least(self, given: Any, outputs: Sequence[Any]) -> float:
        """What the terms of a gradient leave where they cancel, as those of a sum of softmax do."""
        largest = min(float(np.abs(given).max(initial=0.1)), 1.0)
        sizes = [float(y.detach().abs().sum()) for y in outputs]
        return 4 * 2.0**-24 * sum(filter(math.isfinite, sizes)) / largest


def _array(tensor: Any) -> Any:
    return np.asarray(fmapper.to_numpy(tensor.detach().clone()))


def _allowed(want: Any) -> float:
    """Some units in the last place of the largest element."""
    if want.dtype.name not in TOLERANCE:
        return 0.0
    y = fuzzing.widest(want)
    return TOLERANCE[want.dtype.name] * float(np.abs(y[np.isfinite(y)]).max(initial=0.0))


def _disturbed(
    program: Program, names: dict[str, Any], *, every: bool, slopes: tuple[int, ...] = ()
) -> tuple[list[Any], list[list[Any]]]:
    """The results in double precision: exact, and with values that are off by a rounding.

    Args:
        program: What is run; it may be one that double precision cannot be had of.
        names: What its steps use.
        every: Whether inputs and values that the dtype holds exactly are off as well.
        slopes: Inputs by which the sum of the results is differentiated, which are then given.

    Returns:
        The exact results, and those of each sample; empty if they cannot be had.
    """
    kinds: dict[int, str] = {}
    held = [jnp.asarray(x) for x in program.inputs]

    def off(y: Any, kind: str, sample: int, text: str = "") -> Any:
        if sample < 0 or kind not in fuzzing.ROUNDING or not jnp.issubdtype(y.dtype, jnp.inexact):
            return y
        factors = fuzzing.disturbances(sample, y.shape, kind)
        # That of large negative numbers is a difference of much larger ones, for torch.
        moved = y * factors + (4 * (factors - 1) if "gelu" in text else 0)
        # Floats of small integers are not in double precision, so that it cannot tell.
        if every or (y.dtype.name == kind and fuzzing.ROUNDED.search(text)):
            return moved
        return jnp.where(y == y.astype(kind).astype(y.dtype), y, moved)

    def note(i: int, y: Any) -> Any:
        kinds[i] = y.dtype.name
        return y

    def run(wide: list[Any], sample: int) -> Any:
        given = [off(x, h.dtype.name, sample) if every else x
                 for x, h in zip(wide, held, strict=True)]  # fmt: skip

        def after(i: int, y: Any) -> Any:
            return off(y, kinds[i], sample, program.steps[i].text)

        return program.function(names, after)(*given)

    def loss(chosen: list[Any], wide: list[Any], sample: int) -> Any:
        full = list(wide)
        for i, x in zip(slopes, chosen, strict=True):
            full[i] = x
        results = zip(run(full, sample), single, strict=True)
        return sum((y.sum() for y, s in results if s.dtype == jnp.float32), jnp.zeros(()))

    try:
        single = program.function(names, note)(*held)
        found = []
        with jax.enable_x64(True):
            wide = [jnp.asarray(x.astype(WIDE.get(x.dtype.name, x.dtype.name)))
                    for x in program.inputs]  # fmt: skip
            for sample in range(-1, fuzzing.SAMPLES):
                chosen = [wide[i] for i in slopes]
                results = jax.grad(loss)(chosen, wide, sample) if slopes else run(wide, sample)
                found.append([np.asarray(y) for y in results])
    except Exception:
        return [], []
    return found[0], found[1:]


def _uncertainty(want: Any, jitted: Any, exact: Any) -> float:
    """How far JAX itself may be from the truth, four times."""
    wide = np.complex128 if want.dtype.name == "complex64" else np.float64
    ends = [np.asarray(want).astype(wide), np.asarray(jitted).astype(wide)]
    if exact is not None and exact.shape == want.shape:
        ends.append(exact.astype(wide))
    with np.errstate(all="ignore"):
        off = np.max([np.abs(a - ends[0]) for a in ends[1:]], axis=0)
    return 4 * float(off[np.isfinite(off)].max(initial=0.0))


# --- steps ---


def _unary(rng: random.Random, values: Any, at: int) -> Step:
    return Step(f"jnp.{rng.choice(UNARY.split())}({{0}})", (at,))


def _nn(rng: random.Random, values: Any, at: int) -> Step:
    return Step(f"jax.nn.{rng.choice(NN.split())}({{0}})", (at,))


def _binary(rng: random.Random, values: Any, at: int) -> Step:
    name = rng.choice(BINARY.split())
    if rng.random() < 0.3:
        number = rng.choice(["0", "1", "2", "-1", "0.5", "3", "-2.5", "True", "jnp.int8(3)",
                             "jnp.float16(1.5)", "np.float32(2)", "jnp.uint8(200)"])  # fmt: skip
        return Step(rng.choice([f"jnp.{name}({{0}}, {number})", f"jnp.{name}({number}, {{0}})"]),
                    (at,))  # fmt: skip
    return Step(f"jnp.{name}({{0}}, {{1}})", (at, rng.randrange(len(values))))


def _reduce(rng: random.Random, values: Any, at: int) -> Step:
    name, rank = rng.choice(REDUCE.split()), values[at].ndim
    axis = rng.choice([None, *range(-rank, rank)])
    keep = ", keepdims=True" if rng.random() < 0.5 else ""
    return Step(f"jnp.{name}({{0}}, axis={axis}{keep})", (at,))


def _cumulative(rng: random.Random, values: Any, at: int) -> Step:
    name = rng.choice(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
    axis = rng.randrange(max(values[at].ndim, 1))
    return Step(f"lax.{name}({{0}}, axis={axis}, reverse={rng.random() < 0.3})", (at,))


def _cast(rng: random.Random, values: Any, at: int) -> Step:
    return Step(f"{{0}}.astype('{rng.choice(DTYPES)}')", (at,), "astype")


def _index(rng: random.Random, values: Any, at: int) -> Step:
    parts: list[str] = []
    for n in values[at].shape[: rng.randint(1, 3)]:
        if rng.random() < 0.15:
            parts.append("None")
        if rng.random() < 0.15:
            parts.append("...")
            break  # what followed would be of other dimensions
        a, b = rng.randint(-n - 1, n + 1), rng.randint(-n - 1, n + 1)
        # JAX is promised that these are in bounds: the slopes of others are not theirs.
        c, d = (rng.randint(-n, max(n - 1, 0)) for _ in range(2))
        parts.append(rng.choice([":", str(c), f"{a}:{b}", f"::{rng.choice((-1, 2, -2))}",
                                 f"jnp.array([{c}, {d}])"]))  # fmt: skip
    return Step(f"{{0}}[{', '.join(parts) or '...'}]", (at,), "index")


def _update(rng: random.Random, values: Any, at: int) -> Step:
    n = values[at].shape[0] if values[at].ndim else 1
    a, b = rng.randint(-n - 1, n + 1), rng.randint(-n, n)
    where = rng.choice([str(a), f"{a}:{b}", "...", f"jnp.array([{a}, {b}, {a}])", "::2", "::-1"])
    name = rng.choice(["set", "add", "multiply", "max", "min"])
    other = rng.choice(["{1}", "1", "0.5", "{0}[:1]"])
    mode = rng.choice(["", "", ", mode='drop'", ", mode='clip'"])
    operands = (at, rng.randrange(len(values))) if other == "{1}" else (at,)
    return Step(f"{{0}}.at[{where}].{name}({other}{mode})", operands, f"at.{name}")


def _dynamic(rng: random.Random, values: Any, at: int) -> Step:
    shape = values[at].shape
    sizes = tuple(rng.randint(0, n) for n in shape)
    scalars = [i for i, v in enumerate(values) if v.ndim == 0 and v.dtype == jnp.int32]
    start = "{1}" if scalars and rng.random() < 0.7 else str(rng.randint(-2, 4))
    operands = (at, rng.choice(scalars)) if start == "{1}" else (at,)
    starts = ", ".join([start] * len(shape))
    if rng.random() < 0.5:
        return Step(f"lax.dynamic_slice({{0}}, ({starts},), {sizes})", operands)
    other = f"{{0}}[{', '.join(f':{n}' for n in sizes) or '...'}]"
    return Step(f"lax.dynamic_update_slice({{0}}, {other}, ({starts},))", operands)


def _take(rng: random.Random, values: Any, at: int) -> Step:
    whole = [i for i, v in enumerate(values) if "int" in v.dtype.name]
    if not whole:
        return _index(rng, values, at)
    axis = rng.choice([None, 0, -1])
    mode = rng.choice(["fill", "clip", "wrap"])
    return Step(rng.choice([
        f"jnp.take({{0}}, {{1}}, axis={axis}, mode='{mode}')",
        f"jnp.take_along_axis({{0}}, {{1}}, axis={axis}, mode='{mode}')",
        "{0}.at[{1}].get(mode='fill')",
        "jnp.zeros(4).at[{1}].add(1)", "jax.nn.one_hot({1}, 4)",
        "jax.ops.segment_sum({0}, {1}, 3)",
    ]), (at, rng.choice(whole)))  # fmt: skip


def _shapes(rng: random.Random, values: Any, at: int) -> Step:
    x = values[at]
    order = list(range(x.ndim))
    rng.shuffle(order)
    n = rng.randint(1, 3)
    axis = rng.randrange(max(x.ndim, 1))
    return Step(rng.choice([
        "{0}.reshape(-1)", f"jnp.transpose({{0}}, {tuple(order)})", "{0}.T", "{0}[None]",
        f"jnp.broadcast_to({{0}}, {(n, *x.shape)})", f"jnp.expand_dims({{0}}, {axis})",
        f"jnp.repeat({{0}}, {n}, axis={axis})", f"jnp.tile({{0}}, {n})", "jnp.squeeze({0})",
        f"jnp.flip({{0}}, {axis})", f"jnp.roll({{0}}, {n}, axis={axis})",
        "jnp.moveaxis({0}, 0, -1)", f"{{0}}.reshape({x.shape[::-1]})",
        f"jnp.pad({{0}}, {n}, constant_values=1)", f"jnp.pad({{0}}, {n}, mode='edge')",
        f"jnp.split({{0}}, 1, axis={axis})[0]", "jnp.diagonal({0})", "jnp.tril({0})",
        f"lax.pad({{0}}, jnp.zeros((), {{0}}.dtype), [(-1, 2, 1)] * {x.ndim})",
    ]), (at,))  # fmt: skip


def _join(rng: random.Random, values: Any, at: int) -> Step:
    same = [i for i, v in enumerate(values) if v.ndim == values[at].ndim]
    other = rng.choice(same)
    axis = rng.randint(0, max(values[at].ndim - 1, 0))
    return Step(rng.choice([
        f"jnp.concatenate([{{0}}, {{1}}], axis={axis})", f"jnp.stack([{{0}}, {{1}}], axis={axis})",
        "jnp.append({0}, {1})",
    ]), (at, other))  # fmt: skip


def _product(rng: random.Random, values: Any, at: int) -> Step:
    other = rng.randrange(len(values))
    kind = rng.choice(["", ", preferred_element_type=jnp.float32"])
    return Step(rng.choice([
        f"jnp.matmul({{0}}, {{1}}{kind})", "{0} @ {1}.T", "{0}.T @ {1}", "jnp.outer({0}, {1})",
        f"jnp.einsum('...i,...i->...', {{0}}, {{1}}{kind})", "jnp.einsum('ij,kj->ik', {0}, {1})",
        "jnp.einsum('ii', {0})", "jnp.tensordot({0}, {1}, 1)", "jnp.dot({0}, {1})",
        "jnp.vdot({0}, {1})", "jnp.einsum('ij,ij->j', {0}, {1})", "jnp.kron({0}, {1})",
        "jnp.convolve({0}.reshape(-1), {1}.reshape(-1), mode='same')",
        "lax.conv_general_dilated({0}.reshape(1, 1, -1), {1}.reshape(1, 1, -1), (2,), 'SAME')",
        "lax.conv({0}.reshape(1, 1, -1), {0}.reshape(1, 1, -1)[..., :2], (1,), 'VALID')",
    ]), (at, other))  # fmt: skip


def _sort(rng: random.Random, values: Any, at: int) -> Step:
    axis = rng.randint(-1, max(values[at].ndim - 1, 0))
    return Step(rng.choice([
        f"jnp.sort({{0}}, axis={axis})", f"jnp.argsort({{0}}, axis={axis})",
        f"jnp.argsort({{0}}, axis={axis}, descending=True)", "lax.top_k({0}, 1)[0]",
        "lax.top_k({0}, 2)[1]", f"jnp.median({{0}}, axis={axis})",
        "jnp.searchsorted(jnp.sort({0}.reshape(-1)), {0})", "jnp.unique({0}, size=3)",
        "lax.sort_key_val({0}, jnp.broadcast_to(jnp.arange({0}.shape[-1]), {0}.shape))[1]",
    ]), (at,))  # fmt: skip


def _choose(rng: random.Random, values: Any, at: int) -> Step:
    other = rng.randrange(len(values))
    return Step(rng.choice([
        "jnp.where({0} > 0, {0}, {1})", "jnp.where({1} != 0, {0}, 0)", "jnp.clip({0}, -1, 2)",
        "jnp.clip({0}, 0, 1)", "lax.clamp(jnp.zeros((), {0}.dtype), {0}, jnp.ones((), {0}.dtype))",
        "jnp.select([{0} > 1, {0} < 0], [{0}, {1}], 7)", "jnp.where(jnp.isnan({0}), 0, {1})",
        "jnp.maximum({0}, 0) + jnp.minimum({1}, 0)", "jnp.choose({0} > 0, [{0}, {1}])",
    ]), (at, other))  # fmt: skip


def _loop(rng: random.Random, values: Any, at: int) -> Step:
    return Step(rng.choice([
        "lax.scan(lambda c, x: (c + x, c * x), {0}[0], {0})[1]",
        "lax.scan(lambda c, x: (c + x, c * x), {0}[0], {0}, reverse=True)[0]",
        "lax.scan(lambda c, x: (jnp.tanh(c), x * 2), {0}, jnp.arange(3))[0]",
        "lax.fori_loop(0, 3, lambda i, c: c + i, {0})", "lax.map(lambda x: x * 2 + 1, {0})",
        "lax.fori_loop(0, 2, lambda i, c: c.at[i].set(c[-1]), {0})",
        "lax.while_loop(lambda c: (c < 50).any(), lambda c: c * 2 + 1, {0} * 0 + 1)",
        "lax.cond(jnp.sum({0}) > 0, lambda x: x + 1, lambda x: x * 3, {0})",
        "lax.switch({0}.size % 3, [lambda x: x, lambda x: -x, lambda x: x * 2], {0})",
        "lax.associative_scan(jnp.add, {0})", "lax.associative_scan(jnp.maximum, {0})",
        "jax.vmap(lambda x: x * x.sum())({0})", "jax.jvp(jnp.sin, ({0},), ({0},))[1]",
        "jax.grad(lambda x: (x ** 2).sum())({0})", "jax.checkpoint(jnp.tanh)({0})",
        "lax.reduce_window({0}, jnp.zeros((), {0}.dtype), lax.add, (2,) * {0}.ndim, "
        "(1,) * {0}.ndim, 'SAME')",
        "lax.reduce({0}, jnp.zeros((), {0}.dtype), lambda a, b: a + b, (0,))",
        "lax.reduce({0}, jnp.ones((), {0}.dtype), lambda a, b: a * b, (0,))",
    ]), (at,), "")  # fmt: skip


def _norm(rng: random.Random, values: Any, at: int) -> Step:
    """What is recognised, or nearly so."""
    return Step(rng.choice([
        "({0} - {0}.mean(-1, keepdims=True)) * lax.rsqrt({0}.var(-1, keepdims=True) + 1e-5)",
        "{0} * lax.rsqrt((jnp.square({0})).mean(-1, keepdims=True) + 1e-6)",
        "jnp.exp({0} - {0}.max(-1, keepdims=True)) / "
        "jnp.exp({0} - {0}.max(-1, keepdims=True)).sum(-1, keepdims=True)",
        "jnp.exp({0} - 1) / jnp.exp({0} - 1).sum(-1, keepdims=True)",
        "jax.nn.logsumexp({0}, axis=-1)", "jax.nn.standardize({0})",
        "jax.nn.softmax({0} @ {0}.T, -1) @ {0}", "{0} * jax.nn.sigmoid({0})",
        "jax.nn.softmax(jnp.where(jnp.tril(jnp.ones({0}.shape[:1] * 2, bool)), {0} @ {0}.T * 0.5, "
        "-1e9), -1) @ {0}",
        "jax.nn.gelu({0}, approximate=False)", "{0} @ {0}.T + {0}[0, 0]", "{0} @ {0}.T + {0}[:, 0]",
        "jnp.linalg.norm({0}, axis=-1)", "jax.nn.glu(jnp.concatenate([{0}, {0}], -1))",
    ]), (at,), "pattern")  # fmt: skip


MAKERS = (_unary, _unary, _nn, _binary, _binary, _binary, _reduce, _reduce, _cumulative, _cast,
          _index, _index, _update, _update, _dynamic, _take, _shapes, _shapes, _join, _product,
          _product, _sort, _choose, _choose, _loop, _norm)  # fmt: skip
direction = functools.cache(JaxToTorch)

if __name__ == "__main__":
    sys.exit(fuzzing.main(direction()))
