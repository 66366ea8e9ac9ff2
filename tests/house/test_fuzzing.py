"""The fuzzer finds what is wrong, cuts it to a minimum, and draws the same again."""

import numpy as np
import pytest

from sweeps import fuzzing


class Planted:
    """A direction between NumPy and NumPy, in which the square of a negative number is wrong."""

    title = "NumPy -> NumPy"

    def __init__(self):
        self.names = {"np": np, "square": np.square}

    def inputs(self, rng):
        return [np.array([rng.uniform(-2, 2) for _ in range(3)]) for _ in range(2)]

    def load(self, values):
        return values.copy()

    def step(self, rng, values):
        at = rng.randrange(len(values)), rng.randrange(len(values))
        text = rng.choice(["np.add({0}, {1})", "np.sin({0})", "square({0})", "np.missing({0})"])
        return fuzzing.Step(text, at if "{1}" in text else at[:1])

    def promised(self, step, operands, value):
        return True

    def judge(self, program):
        want = program.function(self.names)(*program.inputs)
        wrong = self.names | {"square": lambda x: x * abs(x)}
        got = program.function(wrong)(*program.inputs)
        same = all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
        return None if same else fuzzing.Finding("value", f"{got} for {want}")

    def write(self, values):
        return f"np.array({values.tolist()})"

    def rest(self):
        pass


@pytest.mark.nightly
def test_what_is_wrong_is_found_and_cut_to_the_step_that_is():
    report = fuzzing.fuzz(Planted(), [f"0:{n}" for n in range(60)])
    assert report.programs == 60
    assert "value: square" in report.found
    shown = report.found["value: square"]
    assert "    y0 = square(x0)\n    return (y0,)" in shown
    assert "x1" not in shown


def test_a_seed_draws_the_same_program_again():
    first, second = (fuzzing.draw(Planted(), "3:4") for _ in range(2))
    assert first.source() == second.source()
    assert 3 <= len(first.steps) <= 15


def test_the_exit_code_says_whether_something_was_found(capsys):
    assert fuzzing.main(Planted(), ["--seed", "1", "--programs", "40"]) == 1
    assert "seed 1" in capsys.readouterr().out


def test_a_value_that_is_nobodys_promise_is_not_drawn():
    class Careful(Planted):
        def promised(self, step, operands, value):
            return "sin" not in step.text or bool((operands[0] > 0).all() and (value > 0).all())

    drawn = [fuzzing.draw(Careful(), f"2:{n}") for n in range(20)]
    assert any("sin" in step.text for program in drawn for step in program.steps)
    for program in drawn:
        names = {"np": np, "square": np.square}
        steps, values = iter(program.steps), list(program.inputs)

        def after(i, y, steps=steps, values=values):
            step = next(steps)
            assert "sin" not in step.text or (values[step.operands[0]] > 0).all()
            values.append(y)
            return y

        program.function(names, after)(*program.inputs)


class Slow(Planted):
    """Also has a step that never ends."""

    def step(self, rng, values):
        if rng.random() < 0.2:
            return fuzzing.Step("spin({0})", (0,))
        return super().step(rng, values)

    def __init__(self):
        super().__init__()
        self.names |= {"spin": spin}


def spin(x):
    while True:
        pass


def test_a_step_without_end_is_not_drawn(monkeypatch):
    monkeypatch.setattr(fuzzing, "STEP", 0.05)
    program = fuzzing.draw(Slow(), "0:1")
    assert program.steps
    assert "spin" not in program.source()


@pytest.mark.parametrize(
    ("got", "want", "allowed", "same"),
    [
        ([1.0, np.nan], [1.0, np.nan], 0.0, True),
        ([1.0, np.nan], [1.0, 2.0], 9.0, False),
        ([np.inf], [-np.inf], 9.0, False),
        ([1.0, 2.0], [1.0, 2.5], [0.0, 1.0], True),
        ([1.0, 2.0], [1.5, 2.0], [0.0, 1.0], False),
        ([complex(np.nan, 1)], [complex(1, np.inf)], 0.0, True),
        ([complex(np.nan, 1)], [1j], 9.0, False),
    ],
)
def test_what_differs_by_more_than_rounding(got, want, allowed, same):
    kind = np.complex64 if isinstance(want[0], complex) else np.float32
    text = fuzzing.difference(np.array(got, kind), np.array(want, kind), np.array(allowed))
    assert (text == "") == same
