"""Rules for meshes, planned with the sizes of a mesh alone."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fmapper  # noqa: E402
from fmapper.meshes import Sharding  # noqa: E402

MESH = {"data": 2, "model": 2}


def specs(rules, tree):
    plan = fmapper.plan(Sharding(MESH, rules), tree)
    assert not plan.refused, plan.refused[0].problem
    return {fmapper.tree.keypath.name_of(leaf.path): leaf.spec for leaf in plan}


def test_rules_select_indices_and_slices_of_lists():
    tree = {"layers": [{"w": np.ones((4, 4), np.float32)} for _ in range(5)]}
    rules = {"layers[1:3].w": ("model",), "layers[4]": (None, "model"), "layers.{i:0-0}.w": None}
    found = [spec[0] for spec in specs(rules, tree).values()]
    assert found == [(), ("model",), ("model",), (), ()]


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


@pytest.fixture(scope="module")
def tied():
    pytest.importorskip("jax")
    return fmapper.convert(Tied(), "jax", (torch.ones(2, 3, dtype=torch.int64),))


def test_tied_arrays_of_converted_models_have_all_their_names(tied):
    for name in ("embed", "head.weight"):
        assert specs({name: ("model",)}, tied)["embed.weight"] == (("model",), ())
    both = {"head.weight": ("model",), "embed.weight": (None, "model")}
    with pytest.raises(fmapper.PlacementError, match=r"'head\.weight' are the same array"):
        specs(both, tied)
    state = {"model": tied, "mu": {name: array + 0 for name, array in tied.params.items()}}
    assert specs({"head.weight": ("model",)}, state)["mu.embed.weight"] == (("model",), ())


def test_the_rule_for_all_others_gives_way_to_a_rule_for_one_of_two_names(tied):
    for tree in (tied, Tied()):
        found = specs({"embed.weight": ("model",), "*": ("data",)}, tree)
        assert list(found.values()) == [(("model",), ()), (("data",),)]
        found = specs({"head.weight": (None, "model"), "*": ("data",)}, tree)
        assert list(found.values()) == [((), ("model",)), (("data",),)]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"up": "model"}, r"write \('model',\)"),
        ({"up": 1}, "an axis or None for each dimension, not 1"),
        (lambda name, array: "model", r"write \('model',\)"),
        ({"layers.0.upp": ("model",)}, r"Did you mean 'layers\.0\.up'\?"),
        ({"up.weigth": ("model",)}, r"Did you mean 'up\.weight'\?"),
        ({torch.nn.Linear: ("model",)}, "Nothing in this tree is a Linear; a converted model"),
    ],
)
def test_what_a_rule_may_have_meant_is_said(rules, message):
    tree = {"layers": [{"up": {"weight": np.ones((4, 2))}}]}
    with pytest.raises(fmapper.PlacementError, match=message):
        Sharding(MESH, rules).specs(tree)


@pytest.mark.parametrize("bundle", [lambda m, s: (m, s), lambda m, s: {"model": m, "opt": s}])
def test_rules_do_not_match_the_indices_of_a_bundle(bundle):
    """A number in a rule is a layer, not a place in a tuple or a transformation of optax."""
    optax = pytest.importorskip("optax")
    layers = [{"w": np.ones((4, 4), np.float32)} for _ in range(3)]
    tree = bundle(layers, optax.adam(0.1).init(layers))
    rules = {"0": ("model",), "1": (None, "model"), "w": ()}
    wanted = [(("model",), ()), ((), ("model",)), ((), ())]
    found = specs(rules, tree)
    for name, axes in found.items():
        if name.endswith(".w"):
            assert axes == wanted[int(name.split(".")[-2])], name
        else:
            assert not any(axes), name
    assert len(found) == 10
    assert [*specs({"0": ("model",), "*": ()}, layers).values()] == [wanted[0], *2 * [wanted[2]]]
