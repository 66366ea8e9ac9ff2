"""What Python asks of sizes that vary: decided for the examples, checked at each call."""

import enum
import functools
import io
import itertools
import logging
import math
import operator
import sys
import threading
from typing import ClassVar

import pytest

import fmapper
from fmapper.programs import lowering

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

KNOWN = {4: 2.0}


def array(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@functools.lru_cache
def remembered(n):
    return 2 * n


def matched(x):
    match x.shape[0]:
        case 4:
            return x * 4
        case _:
            return x


def until(x):
    n = 1
    while n < x.shape[0]:
        n *= 2
    return x * n


def steps(x):
    return sum(x[i] * i for i in range(x.shape[0]))


def rows(x):
    return sum(row * i for i, row in enumerate(x))


# A function, the size of the examples, and the sizes for which the program holds.
logger = logging.Logger("alone")
logger.addHandler(logging.StreamHandler(io.StringIO()))


def shown(x):
    print(x.shape, x.shape[0])
    logger.error("a batch of %s", x.shape)
    return x * 2


def of_a_class(x):
    match x.shape[0]:
        case int():
            return x * 2
    return x


@functools.singledispatch
def of_a_kind(size):
    return 2.0


@of_a_kind.register
def _(size: int):
    return 3.0


class Size(enum.IntEnum):
    FOUR = 4


def through_methods(x):
    return x * len(list(filter({4}.__contains__, x.shape)))


def halves(x):
    return sum(x[i] for i in range(int(x.shape[0] / 2)))


def divided(x):
    try:
        return x * (8 // (x.shape[0] - 4))
    except ZeroDivisionError:
        return x


def is_number(size):
    return type(size) is int


QUESTIONS = {
    "even": (lambda x: x * 2 if x.shape[0] % 2 == 0 else x, 4, {0, 2, 4, 6, 8}),
    "odd": (lambda x: x * 2 if x.shape[0] % 2 == 0 else x, 5, {1, 3, 5, 7}),
    "truth": (lambda x: x * 2 if x.shape[0] % 2 else x, 5, {1, 3, 5, 7}),
    "no truth": (lambda x: x * 2 if not x.shape[0] % 3 else x, 4, {1, 2, 4, 5, 7, 8}),
    "a step of decoding": (lambda x: x[0] if x.shape[0] == 1 else x.sum(0), 4,
                           {0, 2, 3, 4, 5, 6, 7, 8}),
    "get": (lambda x: x * KNOWN.get(x.shape[0], 7.0), 4, {4}),
    "get, nothing there": (lambda x: x * {4: 2.0}.get(x.shape[0], 7.0), 5, {5}),
    "look-up": (lambda x: x * KNOWN[x.shape[0]] if x.shape[0] in KNOWN else x, 5, {5}),
    "whole shapes": (lambda x: x * {(4, 3): 2.0}.get(x.shape, 7.0), 4, {4}),
    "in": (lambda x: x * 2 if x.shape[0] in (1, 4) else x, 5, {0, 2, 3, 5, 6, 7, 8}),
    "in, there": (lambda x: x * 2 if x.shape[0] in (1, 4) else x, 4, {4}),
    "in a set": (lambda x: x * 2 if x.shape[0] in {1, 4} else x, 5, {5}),
    "shape": (lambda x: x * 2 if x.shape == (4, 3) else x, 5, {0, 1, 2, 3, 5, 6, 7, 8}),
    "not equal": (lambda x: x * 2 if x.shape[0] != 4 else x, 5, {0, 1, 2, 3, 5, 6, 7, 8}),
    "more": (lambda x: x * 2 if x.shape[0] > 3 else x, 4, {4, 5, 6, 7, 8}),
    "not more": (lambda x: x * 2 if x.shape[0] > 3 else x, 2, {0, 1, 2, 3}),
    "less, turned": (lambda x: x * 2 if 5 >= x.shape[0] else x, 4, {0, 1, 2, 3, 4, 5}),  # noqa: SIM300
    "a float": (lambda x: x * 2 if x.shape[0] > 2.5 else x, 4, {3, 4, 5, 6, 7, 8}),
    "equals a float": (lambda x: x * 2 if x.shape[0] == 4.0 else x, 4, {4}),
    "infinite": (lambda x: x * 2 if x.shape[0] < math.inf else x, 4, set(range(9))),
    "max": (lambda x: x * max(x.shape[0], 3), 4, {3, 4, 5, 6, 7, 8}),
    "sizes of sizes": (lambda x: x * 2 if x.size // 6 == 2 else x, 4, {4, 5}),
    "match": (matched, 5, {0, 1, 2, 3, 5, 6, 7, 8}),
    "while": (until, 4, {3, 4}),
    "range": (steps, 4, {4}),
    "rows": (rows, 4, {4}),
    "length": (lambda x: x * len(x), 4, {4}),
    "a number": (lambda x: x * math.log2(x.shape[0]), 4, {4}),
    "a cache": (lambda x: x * remembered(x.shape[0]), 4, set(range(9))),
    "nothing": (lambda x: x * 2 if x.shape[0] == "n" else x, 4, set(range(9))),
    "text": (lambda x: x * 2 if str(x.shape[0]) == "4" else x, 4, {4}),
    "a name": (lambda x: x * {"n4": 2.0}.get(f"n{x.shape[0]}", 7.0), 5, {5}),
    "text of a half": (lambda x: x * {"2": 2.0}.get(f"{x.shape[0] // 2}", 7.0), 4, {4, 5}),
    "a shape as text": (lambda x: x * {"(4, 3)": 2.0}.get(repr(x.shape), 7.0), 4, {4}),
    "is shown": (shown, 4, set(range(9))),
    "an integer": (lambda x: x * 2 if isinstance(x.shape[0], int) else x, 4, set(range(9))),
    "a class": (of_a_class, 4, set(range(9))),
    "dispatched": (lambda x: x * of_a_kind(x.shape[0]), 4, set(range(9))),
    "its own class": (lambda x: x * 2 if type(x.shape[0]) is int else x, 4, {4}),
    "its own class, elsewhere": (lambda x: x * 2 if is_number(x.shape[0]) else x, 4, {4}),
    "its own class, among others": (lambda x: x * (type(x.shape[0]) in (int, float)), 4, {4}),
    "an enumeration": (lambda x: x * 2 if x.shape[0] == Size.FOUR else x, 4, {4}),
    "no element": (lambda x: x * 2 if {4}.isdisjoint([x.shape[0]]) else x, 5, {5}),
    "another set": (lambda x: x * len({4}.symmetric_difference([x.shape[0]])), 5, {5}),
    "a filter": (through_methods, 5, {5}),
    "contains": (lambda x: x * 2 if operator.contains({4}, x.shape[0]) else x, 5, {5}),
    "getitem": (lambda x: x * operator.itemgetter(x.shape[0])({4: 2.0}), 4, {4}),
    "an array of numbers": (lambda x: x * 2 if x.shape[0] in np.array([4, 5]) else x, 4, {4}),
    "no element of an array": (lambda x: x * 2 if (np.array([4, 5]) != x.shape[0]).all() else x,
                               6, {0, 1, 2, 3, 6, 7, 8}),
    "more than an array": (lambda x: x * 2 if (x.shape[0] > np.array([4, 5])).any() else x, 4,
                           {0, 1, 2, 3, 4}),
    "a branch of JAX": (lambda x: jax.lax.cond(x.shape[0] % 2, jnp.negative, jnp.sin, x), 4,
                        {0, 2, 4, 6, 8}),
    "a bit": (lambda x: x * 2 if x.shape[0] & 1 else x, 4, {4}),
    "shifted": (lambda x: x * (x.shape[0] >> 1), 4, {4}),
    "all bits": (lambda x: x * ~x.shape[0], 4, set(range(9))),
    "absolute": (lambda x: x * abs(x.shape[0] - 5), 4, {0, 1, 2, 3, 4}),
    "how many bits": (lambda x: x * x.shape[0].bit_length(), 4, {4}),
    "rounded": (lambda x: x * round(x.shape[0]), 4, set(range(9))),
    "a format": (lambda x: x * float(f"{x.shape[0]:03d}"), 4, {4}),
    "repeated": (lambda x: x * sum([2] * x.shape[0]), 4, {4}),
    "a half": (lambda x: x * 2 if x.shape[0] / 2 == 2 else x, 4, {4}),
    "half of them": (halves, 4, {4}),
    "a power": (lambda x: x * x.shape[0] ** -0.5, 4, {4}),
    "a function of NumPy": (lambda x: x / np.sqrt(x.shape[0]), 4, {4}),
    "divided by": (divided, 5, {0, 1, 2, 3, 5, 6, 7, 8}),
    "divided by zero": (divided, 4, {4}),
    "first": (lambda x: x[0], 4, set(range(1, 9))),
    "positions": (lambda x: x + jnp.ones((6, 3))[: x.shape[0]], 4, set(range(7))),
    "one hot": (lambda x: jax.nn.one_hot(jnp.arange(3), x.shape[0]) @ x, 4, set(range(9))),
    "broadcast": (lambda x: x + jnp.ones((1, 3)), 4, set(range(9))),
    "an array": (lambda x: jnp.where(x.sum() > x.shape[0], x, -x), 4, set(range(9))),
}  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.nightly_cases("even", "one hot", "an array")
@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
@pytest.mark.parametrize("name", QUESTIONS)
def test_questions(name):
    function, size, held = QUESTIONS[name]
    example = (array(size, 3),)
    model = fmapper.convert(function, "torch", example, dynamic_shapes=["n, _"], check=False)
    for n in range(9):
        x = array(n, 3)
        if n in held:
            want = np.asarray(function(jnp.asarray(x)))
            got = model(torch.from_numpy(x)).detach().numpy()
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        else:
            with pytest.raises(fmapper.ProgramInputError, match=r"test_guards.py:"):
                model(torch.from_numpy(x))


PAIRS = {
    "equal": (lambda x, y: x + y if x.shape == y.shape else x, (4, 4), lambda a, b: a == b),
    "not equal": (lambda x, y: x + y if x.shape == y.shape else x, (4, 5), lambda a, b: a != b),
    "longer": (lambda x, y: x if x.shape[0] >= y.shape[0] else y, (5, 4), lambda a, b: a >= b),
    "together": (lambda x, y: x * 2 if x.size + y.size > 24 else x, (4, 5), lambda a, b: a + b > 8),
    "a set": (lambda x, y: x if len({x.shape[0], y.shape[0]}) == 1 else y, (4, 4),
              lambda a, b: (a, b) == (4, 4)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
@pytest.mark.parametrize("name", PAIRS)
def test_questions_about_two_sizes(name):
    function, sizes, holds = PAIRS[name]
    examples = tuple(array(n, 3) for n in sizes)
    model = fmapper.convert(function, "torch", examples, dynamic_shapes=["a, _", "b, _"])
    for a, b in itertools.product((3, 4, 5), (3, 4, 5)):
        given = array(a, 3), array(b, 3)
        if holds(a, b):
            want = function(*map(jnp.asarray, given))
            got = model(*map(torch.from_numpy, given)).detach()
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        else:
            with pytest.raises(fmapper.ProgramInputError):
                model(*map(torch.from_numpy, given))


def test_a_refusal_says_which_question():
    model = fmapper.convert(
        lambda x: x * 2 if x.shape[0] % 2 == 0 else x, "torch", (array(4, 3),),
        dynamic_shapes=["n, _"],
    )  # fmt: skip
    with pytest.raises(
        fmapper.ProgramInputError,
        match=r"n is 5.* mod\(n, 2\) == 0.*guards.py:\d+\).*Convert the model with examples",
    ):
        model(torch.ones(5, 3))


def test_a_size_that_is_left_no_other_value_is_told():
    with pytest.warns(fmapper.FixedSizeWarning, match=r"x.shape\[0\] is 4: n == 4 at .*guards.py"):
        model = fmapper.convert(
            lambda x: x * 2 if x.shape[0] == 4 else x, "torch", (array(4, 3),),
            dynamic_shapes=["n, _"],
        )  # fmt: skip
    assert model.program.fixed


def test_guards_are_not_asked_for_twice():
    def many(x):
        for _ in range(50):
            x = x * 2 if x.shape[0] > 3 and x.shape[0] % 2 == 0 and x.shape[0] + 1 > 3 else x
        return x

    model = fmapper.convert(many, "torch", (array(4, 3),), dynamic_shapes=["n, _"])
    assert [(g.expression, g.relation, g.value) for g in model.program.guards] == [
        ("n", ">=", 4), ("mod(n, 2)", "==", 0),
    ]  # fmt: skip


def test_guards_are_kept_in_files(tmp_path):
    model = fmapper.convert(
        lambda x: x * 2 if x.shape[0] % 2 == 0 else x, "torch", (array(4, 3),),
        dynamic_shapes=["n, _"],
    )  # fmt: skip
    model.save(tmp_path / "even.safetensors")
    loaded = type(model).load(tmp_path / "even.safetensors")
    assert torch.equal(loaded(torch.ones(6, 3)), torch.full((6, 3), 2.0))
    with pytest.raises(fmapper.ProgramInputError, match=r"mod\(n, 2\) == 0"):
        loaded(torch.ones(5, 3))


def test_guards_hold_in_compiled_models():
    torch._dynamo.reset()
    model = fmapper.convert(
        lambda x: x * 2 if x.shape[0] % 2 == 0 else x, "torch", (array(4, 3),),
        dynamic_shapes=["n, _"],
    )  # fmt: skip
    compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    for n in (4, 6, 8):
        assert torch.equal(compiled(torch.ones(n, 3)), torch.full((n, 3), 2.0))
    with pytest.raises(Exception, match=r"mod\(n, 2\) == 0"):
        compiled(torch.ones(5, 3))


def test_jax_is_left_as_it_was():
    symbol = jax.export.symbolic_shape("n")[0]
    before = dict(type(symbol).__dict__)

    class Answers:  # a conversion restores no attributes of classes
        all: ClassVar[list] = []

    def asked(x):
        Answers.all.append((symbol == 4, hash(symbol) == hash(4), bool(symbol)))
        other = threading.Thread(target=lambda: Answers.all.append(symbol != 4))
        other.start()
        other.join()
        return x * 2 if x.shape[0] == 4 else x

    fmapper.convert(asked, "torch", (array(5, 3),), dynamic_shapes=["n, _"], check=False)
    assert Answers.all == [(False, False, True), True]
    assert dict(type(symbol).__dict__) == before

    def fails(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fmapper.convert(fails, "torch", (array(5, 3),), dynamic_shapes=["n, _"])
    assert dict(type(symbol).__dict__) == before


def test_a_debugger_is_left_alone():
    seen = []

    def trace(frame, event, argument):
        seen.append(frame.f_code.co_name)

    def asked(x):
        return x * 2 if type(x.shape[0]) is int else x

    # From Python 3.12 on, both can watch.
    alone = pytest.raises(fmapper.ConversionError, match="differs")
    fixed = pytest.warns(fmapper.FixedSizeWarning, match=r"type\(n\) is asked for")
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with alone if sys.version_info < (3, 12) else fixed:
            fmapper.convert(asked, "torch", (array(4, 3),), dynamic_shapes=["n, _"])
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert "asked" in seen
    fmapper.convert(lambda x: x, "torch", (array(4, 3),), dynamic_shapes=["n, _"])
    assert sys.gettrace() is before


# --- auto -----------------------------------------------------------------------------------------


AUTO = {
    "split": (lambda x: sum(jnp.split(x, 2)), (4, 3), {(4, 3), (4, 5)}, r"x.shape\[0\] is 4: "),
    "weights": (lambda x: x @ jnp.ones((3, 2)), (4, 3), {(4, 3), (6, 3)}, r"x.shape\[1\] is 3"),
    "positions": (lambda x: x + jnp.ones((16, 3))[: x.shape[0]], (4, 3), {(4, 3), (9, 3)},
                  r"x.shape\[1\] is 3"),
    "a triangular solve": (
        lambda x: jax.scipy.linalg.solve_triangular(x.T @ x + 9 * jnp.eye(3), x.T),
        (4, 3), {(4, 3)}, r"x.shape\[1\] is 3",
    ),
    "a comparison": (lambda x: x * 2 if x.shape[1] == 3 else x, (4, 3), {(4, 3), (9, 3)},
                     r"x.shape\[1\] is 3: it == 3 at .*test_guards.py"),
    "two free sizes": (lambda x: x.reshape(x.shape[0], 2, -1).sum(1), (4, 6), {(4, 6), (7, 6)},
                       r"x.shape\[1\] is 6"),
}  # fmt: skip


@pytest.mark.nightly_cases("positions", "split", "a triangular solve")
@pytest.mark.parametrize("name", AUTO)
def test_auto_fixes_what_must_be_and_says_so(name):
    function, shape, others, told = AUTO[name]
    with pytest.warns(fmapper.FixedSizeWarning, match=told):
        model = fmapper.convert(function, "torch", (array(*shape),), dynamic_shapes="auto")
    for other in others:
        x = array(*other)
        np.testing.assert_allclose(
            model(torch.from_numpy(x)), function(jnp.asarray(x)), rtol=1e-4, atol=1e-4
        )
    wrong = tuple(n + 1 if f"[{i}]" in model.program.fixed[0] else n for i, n in enumerate(shape))
    with pytest.raises(fmapper.ProgramInputError, match=r"x.shape\[\d\] is "):
        model(torch.ones(wrong))


@pytest.mark.nightly
def test_auto_fixes_only_sizes_that_a_convolution_needs():
    kernel = jnp.ones((3, 3, 2, 4))

    def convolved(x):
        return jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    with pytest.warns(fmapper.FixedSizeWarning, match=r"x.shape\[3\] is 2") as told:
        model = fmapper.convert(convolved, "torch", (array(3, 8, 10, 2),), dynamic_shapes="auto")
    assert "shape[1]" not in str(told[0].message)
    for shape in ((5, 8, 10, 2), (1, 7, 13, 2)):
        x = array(*shape)
        got = model(torch.from_numpy(x)).detach()
        np.testing.assert_allclose(got, convolved(x), rtol=1e-4, atol=1e-4)


# --- the comparison with the source ---------------------------------------------------------------


@pytest.fixture
def wrong_tanh():

    @fmapper.lowering("lax::tanh", to="torch")
    def tanh(x, **_):
        return torch.tanh(x) + (torch.cumsum(torch.ones_like(x), 0) > 5) * 0.5

    yield
    del lowering.added["torch"]["lax::tanh"]


@pytest.mark.usefixtures("wrong_tanh")
def test_wrong_programs_are_found():
    with pytest.raises(fmapper.ConversionError, match=r"the examples .*output\[0\] differs"):
        fmapper.convert(jnp.tanh, "torch", (array(7, 3),))
    assert fmapper.convert(jnp.tanh, "torch", (array(7, 3),), check=False)


@pytest.mark.usefixtures("wrong_tanh")
def test_wrong_programs_are_found_at_other_sizes():
    fmapper.convert(jnp.tanh, "torch", (array(5, 3),))
    with pytest.raises(fmapper.ConversionError, match=r"inputs with n = \d+ .*output\[0\] differs"):
        fmapper.convert(jnp.tanh, "torch", (array(5, 3),), dynamic_shapes=["n, _"])


@pytest.mark.usefixtures("wrong_tanh")
def test_wrong_updates_of_state_are_found():
    nnx = pytest.importorskip("flax.nnx")

    class Counts(nnx.Module):
        def __init__(self):
            self.last = nnx.BatchStat(jnp.zeros((7, 3)))

        def __call__(self, x):
            self.last[...] = jnp.tanh(x)
            return x

    with pytest.raises(fmapper.ConversionError, match="last differs"):
        fmapper.convert(Counts(), "torch", (array(7, 3),))


def test_results_that_hang_on_the_last_bit_are_no_difference():
    x = np.ones((6, 6), np.float32)
    fmapper.convert(lambda x: jnp.argmax(jnp.sin(x * 1e4) @ x), "torch", (x,))
    fmapper.convert(lambda x: jnp.linalg.eigh(x @ x.T), "torch", (array(5, 5),))


def test_a_source_that_does_not_run_is_told():
    from jax.extend.core import Primitive

    def nothing(aval):
        return aval

    primitive = Primitive("without_an_implementation")
    primitive.def_abstract_eval(nothing)

    fmapper.lowering("lax::without_an_implementation")(lambda x: x)
    try:
        with pytest.warns(fmapper.FmapperWarning, match="nothing was compared"):
            fmapper.convert(primitive.bind, "torch", (array(3),))
    finally:
        del lowering.added[None]["lax::without_an_implementation"]
