"""`transfer` where one side has what the other lacks: ties, values, counters, statistics."""

import numpy as np
import pytest

import fmapper

torch = pytest.importorskip("torch")


class Language(torch.nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.emb = torch.nn.Embedding(7, 4)
        self.mid = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mid(self.emb(ids))))


IDS = torch.tensor([[1, 4, 2]])


def test_an_array_that_only_the_source_ties_fills_both():
    source = Language(tied=True)
    filled, _ = fmapper.transfer(source, Language(tied=False))
    assert filled.head.weight is not filled.emb.weight
    assert torch.equal(filled(IDS), source(IDS))


def test_arrays_that_only_the_target_ties_must_be_equal():
    source, target = Language(tied=False), Language(tied=True)
    with pytest.raises(fmapper.TransferError, match=r"head\.weight and emb\.weight have different"):
        fmapper.transfer(source, target)
    source.head.weight.data.copy_(source.emb.weight)
    filled, report = fmapper.transfer(source, target)
    assert filled.head.weight is filled.emb.weight
    assert torch.equal(filled(IDS), source(IDS))
    back, _ = fmapper.transfer(filled, Language(tied=False), rules=report.rules.inverse())
    for name, array in source.state_dict().items():
        assert torch.equal(back.state_dict()[name], array)


def test_a_use_of_one_array_in_two_places_is_filled_by_equal_ones():
    class Attending(Language):
        def __init__(self):
            super().__init__(tied=True)
            del self.head

        def forward(self, ids):
            return torch.tanh(self.mid(self.emb(ids))) @ self.emb.weight.T

    source = Language(tied=False)
    with pytest.raises(fmapper.TransferError, match=r"head\.weight: .*emb\.weight.*be equal"):
        fmapper.transfer(source, Attending())
    source.head.weight.data.copy_(source.emb.weight)
    filled, _ = fmapper.transfer(source, Attending())
    assert torch.allclose(filled(IDS), source(IDS))


def test_a_target_that_is_half_filled_is_filled():
    source, target = Language(tied=False), Language(tied=False)
    target.mid = torch.nn.Linear(4, 4, device="meta")
    filled, _ = fmapper.transfer(source, target)
    assert torch.equal(filled(IDS), source(IDS))
    assert target.mid.weight.is_meta
    with pytest.raises(fmapper.TransferError, match=r"emb\.weight: \[7, 4\] of the target"):
        fmapper.transfer(source.mid, target)


def test_counters_and_random_states_without_values_are_zeros():
    nnx = pytest.importorskip("flax.nnx")
    jax = pytest.importorskip("jax")

    class Norm(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, use_running_average=True, epsilon=1e-5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(x))

    source = torch.nn.BatchNorm1d(3).eval()
    filled, _ = fmapper.transfer(source, nnx.eval_shape(lambda: Norm(nnx.Rngs(0))))
    state = fmapper.state(filled)
    assert not any(isinstance(array, jax.ShapeDtypeStruct) for array in state.values())
    assert jax.random.key_data(state["dropout.rngs.key"]).tolist() == [0, 0]
    back, _ = fmapper.transfer(filled, torch.nn.BatchNorm1d(3, device="meta"))
    assert back.num_batches_tracked.item() == 0
    source.num_batches_tracked += 5
    again, _ = fmapper.transfer(source, torch.nn.BatchNorm1d(3, device="meta"))
    assert again.num_batches_tracked.item() == 5


def test_statistics_that_the_target_lacks_are_not_dropped():
    nnx = pytest.importorskip("flax.nnx")
    jnp = pytest.importorskip("jax.numpy")

    class Affine(nnx.Module):
        def __init__(self):
            self.scale, self.bias = nnx.Param(jnp.ones(3)), nnx.Param(jnp.zeros(3))

        def __call__(self, x):
            return x * self.scale[...] + self.bias[...]

    with pytest.raises(fmapper.TransferError, match=r"running_mean: \[3\] of the source"):
        fmapper.transfer(torch.nn.BatchNorm1d(3).eval(), Affine())
    with pytest.raises(
        fmapper.TransferError, match=r"running_mean: \[3\] of the target.*\n.*\n.*keep="
    ):
        fmapper.transfer(Affine(), torch.nn.BatchNorm1d(3))


def test_nan_in_a_file_is_named(tmp_path):
    source = torch.nn.Linear(3, 2)
    state = {name: array.clone() for name, array in source.state_dict().items()}
    state["bias"][1] = np.nan
    fmapper.save(state, tmp_path / "model.safetensors")
    target = torch.nn.Linear(3, 2)
    before = target.bias.clone()
    with pytest.raises(fmapper.TransferError, match=r"bias: the source has NaN"):
        fmapper.transfer(tmp_path / "model.safetensors", target)
    assert torch.equal(target.bias, before)


def test_another_width_names_both():
    with pytest.raises(fmapper.TransferError, match=r"weight: \[2, 5\] of the target") as caught:
        fmapper.transfer(torch.nn.Linear(3, 2), torch.nn.Linear(5, 2))
    assert "weight: [2, 3] of the source, has no place" in str(caught.value)
    assert "rules=" in str(caught.value)


def test_rows_that_stand_before_the_first_position_are_cut():
    class Positions(Language):
        def __init__(self, offset):
            super().__init__(tied=False)
            self.offset, self.pos = offset, torch.nn.Embedding(6 + offset, 4)

        def forward(self, ids):
            at = torch.arange(ids.shape[1]) + self.offset
            return self.head(torch.tanh(self.mid(self.emb(ids) + self.pos(at))))

    source, target = Positions(2), Positions(0)
    filled, report = fmapper.transfer(source, target, example_inputs=(IDS,))
    assert torch.equal(filled.pos.weight, source.pos.weight[2:])
    assert torch.allclose(filled(IDS), source(IDS))
    with pytest.raises(fmapper.CheckpointError, match="what it drops is not kept"):
        report.rules.inverse()
    with pytest.raises(fmapper.AmbiguousTransferError, match=r"pos\.weight"):
        fmapper.transfer(source.state_dict(), target)
    with pytest.raises(fmapper.TransferError, match=r"pos\.weight: \[8, 4\] of the target"):
        fmapper.transfer(target, source)


def test_rules_that_are_not_exactly_invertible_are_named():
    recurrent = torch.nn.LSTM(3, 4)
    shapes = {"cell.weight_ih": (16, 3), "cell.weight_hh": (16, 4), "cell.bias": (16,)}
    target = {name: np.zeros(shape, "f4") for name, shape in shapes.items()}
    filled, report = fmapper.transfer(recurrent, target)
    assert "not exactly invertible: Sum(" in str(report)
    back, report = fmapper.transfer(filled, recurrent)
    assert torch.equal(back.bias_ih_l0, torch.from_numpy(filled["cell.bias"]))
    assert not back.bias_hh_l0.any()
    assert not report.lossy
    again, _ = fmapper.transfer(back, target, rules=report.rules.inverse())
    for name, array in filled.items():
        np.testing.assert_array_equal(again[name], array)


class Body(torch.nn.Module):
    def __init__(self, first="a", second="b"):
        super().__init__()
        self.names = first, second
        self.add_module(first, torch.nn.Linear(4, 4))
        self.add_module(second, torch.nn.Linear(4, 4))

    def forward(self, x):
        first, second = map(self.get_submodule, self.names)
        return second(torch.tanh(first(x)))


class Headed(Body):
    """A body with the names of the other one, and a head that comes after it, or in its midst."""

    def __init__(self, size=2, *, inside=False, bend=torch.tanh):
        super().__init__("b", "a")
        self.head, self.inside, self.bend = torch.nn.Linear(4, size), inside, bend

    def forward(self, x):
        x = self.bend(self.b(x))
        return self.a(self.head(x)) if self.inside else self.head(torch.relu(self.a(x)))


@pytest.mark.parametrize("inputs", [None, torch.randn(3, 4)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_head_that_the_source_lacks_is_kept(inputs, device, size):
    source = Body()
    with torch.device(device):
        target = Headed(size)
    filled, report = fmapper.transfer(source, target, keep=["head.*"], example_inputs=inputs)
    assert torch.equal(filled.b.weight, source.a.weight)
    assert torch.equal(filled.a.weight, source.b.weight)
    assert report.kept == ("head.weight", "head.bias")
    assert not report.proved


def test_what_depends_on_a_weight_that_is_kept_is_not_proved():
    inputs = torch.randn(3, 4)
    with pytest.raises(fmapper.AmbiguousTransferError, match=r"(?s)a\.weight .*do not tell, so"):
        fmapper.transfer(Body(), Headed(4, inside=True), keep=["head.*"], example_inputs=inputs)
    with pytest.raises(fmapper.TransferError, match="aten::sigmoid"):
        fmapper.transfer(Body(), Headed(bend=torch.sigmoid), keep=["head.*"], example_inputs=inputs)


class Exchanged(Language):
    def __init__(self, *, tied):
        super().__init__(tied=tied)
        self.emb, self.mid = self.mid, self.emb

    def forward(self, ids):
        return self.head(torch.tanh(self.emb(self.mid(ids))))


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("inputs", [None, IDS])
def test_models_of_another_precision(dtypes, inputs):
    mine, theirs = (getattr(torch, name) for name in dtypes)
    source, target = Language(tied=False).to(mine), Exchanged(tied=False).to(theirs)
    filled, report = fmapper.transfer(source, target, example_inputs=inputs)
    assert report.proved
    assert torch.equal(filled.mid.weight, source.emb.weight.to(theirs))


def test_arrays_without_elements_have_layouts():
    from fmapper.twins.layouts import layouts

    assert [layout.steps for layout in layouts((0, 3), (0, 3))] == [()]
    assert len(layouts((0, 6), (0, 2, 3))) == 1
