"""Statements that come again are loops that compute the same."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fmapper.translation.repeats.loops import with_repeats
from fmapper.translation.source import translate_proved

VARIABLES = ["x", "y", "y_2", "z", "p"]


@st.composite
def functions(draw):
    """Draws rounds of equal statements, with variables and numbers that may be any."""
    period, count = draw(st.sampled_from([(5, 2), (3, 3), (2, 4), (1, 4)]))
    variable, number = st.sampled_from(VARIABLES), st.integers(0, 3)
    forms = draw(st.lists(st.sampled_from([*"abcdef"]), min_size=period, max_size=period))
    varies = draw(st.lists(st.booleans(), min_size=4 * period, max_size=4 * period))
    fixed = [draw(variable) for _ in range(3 * period)]
    kept, names = draw(st.integers(0, 2 * period)), draw(st.permutations(VARIABLES))
    lines = []
    for at in range(count):
        for i, form in enumerate(forms):
            a, b, c = (
                draw(variable) if varies[4 * i + j] and draw(st.booleans()) else fixed[3 * i + j]
                for j in range(3)
            )
            a = names[at] if i == kept else a
            n = draw(number) if varies[4 * i + 3] else at
            lines.append(
                {
                    "a": f"{a} = f({b}, {c}, {n})",
                    "b": f"{a} = self.m[{at}]({b}) + {c}",
                    "c": f"{a}, {b} = (f({c}, {a}, {n}), {b})",
                    "d": f"{a} = {b} * {n}",
                    "e": f"for q in (1, 2):\n    {a} = f({b}, q, {n})",
                    "f": f"for q in (1, 2):\n    {a} = f({b}, q, {n})\n    {c} = f({a}, {c}, 1)",
                }[form]
            )
    after = [
        f"z = f({draw(variable)}, z, 1)",
        f"for q in (1, 2):\n    z = f({draw(variable)}, z, q)",
    ]
    lines += draw(st.sampled_from([[], [after[0]], [after[1]], after]))
    given = draw(st.lists(variable, min_size=1, max_size=count + 1))
    if draw(st.booleans()):  # what each round has assigned
        at = kept % period
        given = [re.search(r"(\w+)(, \w+)? = ", line)[1] for line in lines[at::period][:count]]
        given = given[:: draw(st.sampled_from([1, -1]))]
    items = ", ".join(given)
    found = f"f(({items},), p, 0)"
    if draw(st.booleans()):
        each = ", ".join(f"f({item}, z, 1)" for item in items.split(", "))
        found = f"[{each}]"
    return [*lines, draw(st.sampled_from([f"return [{items}]", f"return {found}"]))]


def run(lines, arguments):
    code = "\n".join(lines).replace("\n", "\n    ")
    space = {"f": lambda *args: hash(args)}
    exec(f"def run(self, {', '.join(VARIABLES)}):\n    {code}", space)
    parts = [lambda x, i=i: hash((i, x)) for i in range(5)]
    return space["run"](SimpleNamespace(m=parts), *arguments)


@pytest.mark.nightly
@settings(max_examples=600, deadline=None)
@given(functions())
def test_a_loop_computes_what_the_statements_do(lines):
    found = with_repeats(lines, {"self.m": 5}, {}, {}, {})
    arguments = [hash(("argument", i)) for i in range(len(VARIABLES))]
    assert run(found, arguments) == run(lines, arguments)


@pytest.mark.nightly
@settings(max_examples=600, deadline=None)
@given(functions(), st.data())
def test_rounds_that_begin_or_end_otherwise_compute_what_the_statements_do(lines, data):
    """The first statements read code, and the last ones are left out or read where they are."""
    *body, last = lines
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=2)):
        code = data.draw(st.sampled_from(["f(p, z, 7)", "x * 3", "f(y, x, 1)", "f(y_2, p, 0)"]))
        head, equals, tail = body[at].partition(" = ")
        if equals and "\n" not in body[at]:
            tail = re.sub(
                r"(?<![.\w])[xyzp](_2)?(?=[,) ])", lambda _, code=code: code, tail, count=1
            )
            body[at] = f"{head}{equals}{tail}"
    body = body[: len(body) - data.draw(st.integers(0, 4))]
    if body and re.fullmatch(r"\w+ = .*", body[-1]) and data.draw(st.booleans()):
        target, _, code = body.pop().partition(" = ")
        last = re.sub(rf"(?<![.\w]){target}\b", lambda _: f"({code})", last, count=1)
    origin = data.draw(st.sampled_from(["", "a line of a loop"]))
    known = {line: SimpleNamespace(shapes={}, origin=origin) for line in body}
    found = with_repeats([*body, last], {"self.m": 5}, {}, known, {})
    arguments = [hash(("argument", i)) for i in range(len(VARIABLES))]
    assert run(found, arguments) == run([*body, last], arguments)


def test_the_first_round_may_have_code_for_what_others_are_given():
    lines = ["y = f(x, z(3))", "b = g(y)", "a = h(b)"]
    lines += ["y = f(x, a)", "b = g(y)", "a = h(b)"] * 2
    assert rolled([*lines, "return f(b, a)"]) == (
        "a = z(3)\nfor _ in range(3):\n    y = f(x, a)\n    b = g(y)\n    a = h(b)\nreturn f(b, a)"
    )


def test_what_only_the_first_round_has_a_variable_for_gets_one():
    lines = ["t = zeros(3)", "h = self.m[0](t, x)", "y = p(h)"]
    for _ in range(3):
        lines += ["h = self.m[0](y.argmax(-1), h)", "y = p(h)"]
    known = {line: SimpleNamespace(shapes={}, origin=f"{line[0]} = a line") for line in lines}
    found = with_repeats([*lines, "return y"], {}, {}, known, {})
    assert found[1:] == [
        "h = x",
        "for _ in range(4):\n    h = self.m[0](t_2, h)\n    y = p(h)\n    t_2 = y.argmax(-1)",
        "return y",
    ]


def _known(lines, origins):
    return {
        line: SimpleNamespace(shapes={}, origin=origin)
        for line, origin in zip(lines, origins, strict=True)
    }


@pytest.mark.parametrize(
    ("last", "is_whole"),
    [
        ("a = g(y, a)", True),
        ("a = self.drop(y, a)", False),  # it may count, or draw
        ("a = torch.rand(y, a)", False),
        ("a = y.add_(a)", False),
    ],
)
def test_the_last_round_computes_what_nobody_reads(last, is_whole):
    lines = ["y = f(a, x)", "y = y * y", last] * 3
    known = _known(lines, ["in a loop"] * 9)
    found = "\n".join(with_repeats([*lines[:-1], "return y"], {}, {}, known, {}))
    assert ("range(3)" in found) is is_whole


def test_numbers_of_what_nobody_reads_are_not_guessed():
    """The next number would be an index that the array may not have."""
    lines = [
        line.format(at) for at in range(3) for line in ("y = f(a, x)", "y = y * y", "a = y[{0}]")
    ]
    known = _known(lines, ["in a loop"] * 9)
    found = "\n".join(with_repeats([*lines[:-1], "return y"], {}, {}, known, {}))
    assert "range(3)" not in found
    assert "y[2]" not in found


def test_nothing_is_computed_in_vain_where_the_source_has_no_loop():
    lines = ["y = f(a, x)", "y = y * y", "a = g(y, a)"] * 3
    rest = ["y = f(a,  x)", "y = y *  y", "return y"]  # of other lines of the model's code
    known = _known(lines[:6], ["in a loop"] * 6) | _known(rest, ["one", "another", ""])
    assert "range(3)" not in "\n".join(with_repeats([*lines[:6], *rest], {}, {}, known, {}))


def test_one_value_may_begin_several_states():
    lines = ["z = f(x, 0)", "h, c = g(x, z, z)", "h = h * x"]
    lines += ["h, c = g(x, h, c)", "h = h * x"] * 3
    found = rolled([*lines, "return h"]).splitlines()
    assert found[0] == "z = f(x, 0)"
    assert {*found[1:3]} == {"h = z", "c = z"}
    assert found[3] == "for _ in range(4):"


def test_numbers_that_come_again_are_of_longer_rounds():
    lines = [f"y = f(y, {at})" for at in (1, 2, 1, 2, 1, 2)]
    assert rolled([*lines, "return y"]) == (
        "for _ in range(3):\n    y = f(y, 1)\n    y = f(y, 2)\nreturn y"
    )


def rolled(lines):
    return "\n".join(with_repeats(lines, {"self.m": 3}, {}, {}, {}))


def test_results_of_rounds_are_a_list():
    lines = [
        line.format(at, f"_{at + 1}" if at else "")
        for at in range(3)
        for line in ("x = self.m[{0}](p[{0}])", "y{1} = x.mean()")
    ]
    assert rolled([*lines, "return stack([p, y, y_2, y_3], 1)"]) == (
        "ys = []\n"
        "for i, one_m in enumerate(self.m):\n"
        "    x = one_m(p[i])\n"
        "    ys.append(x.mean())\n"
        "return stack([p, *ys], 1)"
    )


def test_rounds_of_one_statement_are_a_comprehension():
    lines = [f"y_{at} = f(self.m[{at}](p), {8 * at})" for at in range(3)]
    assert rolled([*lines, "return stack([p, y_0, y_1, y_2])"]) == (
        "ys = [f(one_m(p), n) for one_m, n in zip(self.m, (0, 8, 16), strict=True)]\n"
        "return stack([p, *ys])"
    )


def test_numbers_that_count_the_rounds_are_their_index():
    lines = [f"ys_{at} = f(x[:, {at}], y)" for at in range(3)]
    assert rolled([*lines, "return stack([ys_0, ys_1, ys_2])"]) == (
        "all_ys = [f(x[:, i], y) for i in range(3)]\nreturn stack(all_ys)"
    )


def test_what_a_round_gives_to_the_next_keeps_its_name():
    lines = ["y = f(x, 2)", "y = g(y)", "y_2 = f(y, 4)", "y_2 = g(y_2)", "y_3 = f(y_2, 8)",
             "y_3 = g(y_3)", "return y_3"]  # fmt: skip
    assert rolled(lines) == ("y = x\nfor n in (2, 4, 8):\n    y = f(y, n)\n    y = g(y)\nreturn y")


@pytest.mark.parametrize("shape", [("b", "h"), ("c", "h")])
def test_sizes_that_only_the_first_round_reads_are_those_of_all(shape):
    lines = []
    for at in range(3):
        lines += [f"x = self.m[{at}](p[{at}])", "b = x.shape[0]"][: 1 if at else 2]
        lines += ["x = g(x, b)", f"x = h(x, {at})", "q.append(x)"]
    known = {line: SimpleNamespace(shapes={"x": ("b", "h")}, origin="") for line in lines}
    known["x = self.m[2](p[2])"] = SimpleNamespace(shapes={"x": shape}, origin="")
    found = with_repeats([*lines, "return q"], {"self.m": 3}, {}, known, {})
    assert (len(found) == 2) is (shape == ("b", "h"))


class Levels(nn.Module):
    """Predicts boxes on several levels, as detectors do."""

    def __init__(self, widths=(8, 12, 16), strides=(8, 16, 32)):
        super().__init__()
        self.strides = strides
        self.heads = nn.ModuleList(nn.Conv2d(width, 10, 1) for width in widths)
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + i)) for i in range(3))

    def forward(self, levels):
        boxes, scores = [], []
        for i, head in enumerate(self.heads):
            y = head(levels[i])
            batch, _, height, width = y.shape
            y = y.view(batch, 2, 5, height, width).permute(0, 1, 3, 4, 2)
            sides = (y[..., :4] * self.scales[i]).exp() * self.strides[i]
            boxes.append(sides.reshape(batch, -1, 4))
            scores.append(y[..., 4].sigmoid().reshape(batch, -1))
        return torch.cat(boxes, 1), torch.cat(scores, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "equinox", "jax"])
def test_a_detector_predicts_in_a_loop(target):
    pytest.importorskip(target)
    torch.manual_seed(0)
    levels = [torch.randn(2, w, s, s) for w, s in ((8, 8), (12, 4), (16, 2))]
    source, proof, reason = translate_proved(Levels(), target, (levels,))
    assert proof, reason
    if target != "jax":
        assert "zip(self.heads, " in source.code
        assert source.code.count(".transpose(0, 1, 3, 4, 2)") == 1
        assert "boxes.append(sides.reshape(batch, -1, 4))" in source.code


def test_a_variable_that_a_round_assigns_before_it_reads_the_last_one_has_another_name():
    lines = ["y = f(p, 1)", "z = g(x, y)", "y = h(z, 1)"]
    for at in (2, 3):
        lines += [f"y_2 = f(p, {at})", "z = g(y, y_2)", f"y = h(z, {at})"]
    assert rolled([*lines, "return y"]) == (
        "for n in range(1, 4):\n    y = f(p, n)\n    z = g(x, y)\n    x = h(z, n)\nreturn x"
    )
    read_later = [*lines, "return x, y"]  # which is then what the first round was given
    assert with_repeats(read_later, {}, {}, {}, {}) == read_later


def test_an_item_that_is_read_beside_the_list_has_a_variable():
    names = ["y", "y_2", "y_3"]
    lines = [
        line.format(at, name)
        for at, name in enumerate(names)
        for line in ("x = self.m[{0}](p[{0}])", "{1} = g(x)")
    ]
    assert rolled([*lines, "return [y, y_2, y_3], y_3"]).endswith(
        "    y = g(x)\n    ys.append(y)\nreturn ys, y"
    )


@pytest.mark.parametrize("first", ["y", "x"])
def test_inner_loops_that_give_something_else_to_their_next_step_stay(first):
    step = "for q in (1, 2):\n    {0} = f({1}, q, {2})"
    rounds = ("y", first, 0), ("z", "y", 1), ("p", "z", 2)
    lines = [step.format(*one) for one in rounds]
    assert with_repeats([*lines, "return p"], {}, {}, {}, {}) == [*lines, "return p"]


class TimeMix(nn.Module):
    """What a step gives to the next has a second name, and lists have the names of their stacks."""

    def __init__(self):
        super().__init__()
        self.key, self.value, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.first = nn.Parameter(torch.randn(4))

    def mix(self, k, v):
        hs = []
        a, pp = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]) - 1.0
        for t in range(k.shape[1]):
            kk, vv = k[:, t], v[:, t]
            p = torch.maximum(pp, self.first + kk)
            e1 = torch.exp(pp - p)
            a = e1 * a + vv
            hs.append(a / e1)
            p = torch.maximum(pp + 1.0, kk)
            pp = p
        hs = torch.stack(hs, dim=1)
        return hs * 2.0 + pp[:, None]

    def attend(self, x):
        k, v = self.key(x), self.value(x)
        return self.mix(k, v)

    def forward(self, x):
        y = self.attend(x) + x
        return self.out(y)


@pytest.mark.nightly
def test_loops_over_steps_in_methods_of_methods_have_the_names_of_the_source():
    source, proof, _ = translate_proved(TimeMix(), "flax", (torch.randn(2, 6, 4),))
    assert proof
    for line in (
        "for i in range(6):",
        "    kk = k[:, i]",
        "    e1 = jnp.exp(pp - p)",
        "    hs_2.append(a / e1)",
        "return hs * 2.0 + pp",
    ):
        assert line in source.code
    assert source.code.count("jnp.maximum(") == 2


def test_numbers_that_grow_by_one_are_a_range():
    lines = [f"x = f(x, {n})\ny = g(x)" for n in (3, 4, 5)]
    found = with_repeats([one for line in lines for one in line.split("\n")], {}, {}, {}, {})
    assert found[0].startswith("for n in range(3, 6):")
