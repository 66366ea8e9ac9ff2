"""Recorded rules, compared with what the function gives."""

import numpy as np

import fmapper
from fmapper.checkpoints import Rules

RNG = np.random.default_rng(0)


def array(*shape, dtype="f4"):
    return RNG.standard_normal(shape).astype(dtype)


def layers(**shapes):
    return {f"h.{i}.{name}": array(*shape) for i in range(3) for name, shape in shapes.items()}


def same(function, state, *args):
    """Records a function, compares with what it gives, and returns the rules."""
    rules = Rules.record(function, state, *args)
    assert Rules.from_toml(rules.to_toml()) == rules
    found = rules.apply(fmapper.to_numpy(fmapper.state(state)))
    wanted = fmapper.to_numpy(fmapper.state(function(state, *args)))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        got = found[name].read()
        assert (got.dtype, got.shape) == (value.dtype, value.shape), name
        assert got.tobytes() == np.ascontiguousarray(value).tobytes(), name
    return rules


def bits(value):
    return (value.dtype, value.shape, np.ascontiguousarray(value).tobytes())


def restores(rules, state):
    back = rules.inverse().apply(rules.apply(state))
    assert back.keys() == state.keys()
    assert all(bits(back[name].read()) == bits(state[name]) for name in state)
