"""What a declaration in the middle of a look-up does to it."""

import pytest

import fmapper
from fmapper.tree import nodes

jax = pytest.importorskip("jax")


def test_a_class_declared_during_its_look_up_is_no_class_of_jax(monkeypatch):
    class Late:
        def __init__(self):
            self.w = 1

    look_up = nodes._look_up
    calls = []

    def slow(cls):
        if cls is Late and not calls:
            calls.append(cls)
            fmapper.functor(Late)  # as another thread might, after this one found no declaration
            return next(filter(None, (source.registered_type(cls) for source in nodes.sources)))
        return look_up(cls)

    monkeypatch.setattr(nodes, "_look_up", slow)
    assert fmapper.fmap(lambda x: x + 1, [Late()])[0].w == 2
    assert calls == [Late]
