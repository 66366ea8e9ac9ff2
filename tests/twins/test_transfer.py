"""`transfer`: weights between models that were written by different people."""

import numpy as np
import pytest

import fmapper
from fmapper.twins.layouts import layouts
from fmapper.twins.words import words_of


def arrays(shapes, seed=0):
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype("f4") for name, shape in shapes.items()}


def zeros(state):
    return {name: np.zeros_like(array) for name, array in state.items()}


def block(i, names, d=4, wide=6):
    shapes = {"q": (d, d), "norm": (d,), "up": (wide, d), "down": (d, wide)}
    return {name.format(i=i): shapes[kind] for kind, name in names.items()}


THEIRS = {
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "norm": "model.layers.{i}.input_layernorm.weight",
    "up": "model.layers.{i}.mlp.fc1.weight",
    "down": "model.layers.{i}.mlp.fc2.weight",
}


def test_names_in_other_words():
    assert words_of("layers.{}.feed_forward.w1.weight").path == {"mlp", "w", "#1"}
    assert words_of("h.{}.attn.c_attn.weight").path == {"attn", "qkv"}
    assert words_of("encoder.layer.{}.attention.output.dense.bias") == (
        "bias",
        {"encoder", "attn", "o"},
    )
    assert words_of("bn1.running_var") == ("var", {"norm", "#1"})
    assert words_of("a.q.weight").contradicts(words_of("b.k.weight"))


def test_layouts_that_fit():
    assert [str(one) for one in layouts((4, 8), (8, 4))] == ["transpose 1x0"]
    assert [one.certain for one in layouts((4, 4), (4, 4))] == [False, False]
    (one,) = layouts((4, 4), (4, 4), "outputs first", "outputs last")
    assert one.certain
    assert str(one) == "transpose 1x0"
    first, *_ = layouts((12, 6), (6, 3, 4))
    assert str(first) == "reshape 3x4x6, transpose 2x0x1"
    assert first.certain


def test_two_linear_layers_in_torch_and_flax():
    torch = pytest.importorskip("torch")
    nnx = pytest.importorskip("flax.nnx")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))

    class Twin(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.hidden[1](self.dropout(nnx.relu(self.hidden[0](x))))

    target = Twin(nnx.Rngs(0))
    before = fmapper.state(target)["hidden.0.kernel"].copy()
    filled, report = fmapper.transfer(model, target)
    filled.eval()
    assert fmapper.verify(model, filled, np.ones((2, 3), "f4"))
    assert (fmapper.state(target)["hidden.0.kernel"] == before).all()
    assert {*report.kept} == {"dropout.rngs.key", "dropout.rngs.count"}
    back, _ = fmapper.transfer(filled, model, rules=report.rules.inverse())
    for name, array in model.state_dict().items():
        assert (back.state_dict()[name] == array).all()
    again, _ = fmapper.transfer(model, nnx.eval_shape(lambda: Twin(nnx.Rngs(0))), keep=["*.rngs.*"])
    assert (
        fmapper.state(again)["hidden.0.kernel"] == fmapper.state(filled)["hidden.0.kernel"]
    ).all()


def test_layers_that_are_stacked():
    source = arrays({k: v for i in range(3) for k, v in block(i, THEIRS).items()})
    wanted = {
        "layers.up.kernel": np.stack([source[THEIRS["up"].format(i=i)].T for i in range(3)]),
        "layers.down.kernel": np.stack([source[THEIRS["down"].format(i=i)].T for i in range(3)]),
        "layers.norm.scale": np.stack([source[THEIRS["norm"].format(i=i)] for i in range(3)], 1),
    }
    source = {name: array for name, array in source.items() if "q_proj" not in name}
    filled, report = fmapper.transfer(source, zeros(wanted))
    for name, array in wanted.items():
        np.testing.assert_array_equal(filled[name], array)
    back, _ = fmapper.transfer(filled, zeros(source), rules=report.rules.inverse())
    for name, array in source.items():
        np.testing.assert_array_equal(back[name], array)
    assert fmapper.checkpoints.Rules.from_toml(report.rules.to_toml()) == report.rules


def test_norms_that_names_do_not_tell_apart_are_asked_for():
    source = arrays({"l.attention_norm.weight": (4,), "l.ffn_norm.weight": (4,)})
    target = zeros(arrays({"l.a.scale": (4,), "l.b.scale": (4,)}))
    with pytest.raises(fmapper.AmbiguousTransferError, match=r"l\.a\.scale") as caught:
        fmapper.transfer(source, target)
    listed = caught.value.candidates["l.a.scale"]
    assert {name for name, *_ in listed} == {*source}
    assert all(rule.startswith("Rename") for *_, rule in listed)


def test_a_square_matrix_without_layers_is_asked_for():
    with pytest.raises(fmapper.AmbiguousTransferError, match="transpose"):
        fmapper.transfer(arrays({"a.w": (4, 4)}), zeros(arrays({"b.w": (4, 4)})))


def test_a_square_matrix_beside_others_is_asked_for():
    source = arrays({"up.weight": (8, 4), "mid.weight": (8, 8), "down.weight": (4, 8)})
    shapes = {"up.kernel": (4, 8), "mid.kernel": (8, 8), "down.kernel": (8, 4)}
    with pytest.raises(fmapper.AmbiguousTransferError, match="transpose") as caught:
        fmapper.transfer(source, arrays(shapes, 1))
    assert {*caught.value.candidates} == {"mid.kernel"}


def test_other_architectures_name_what_is_missing():
    source = arrays({"a.weight": (4, 3), "a.bias": (4,)})
    with pytest.raises(fmapper.TransferError, match=r"c\.scale: \[7\] of the target"):
        fmapper.transfer(source, zeros(arrays({"b.w": (4, 3), "b.b": (4,), "c.scale": (7,)})))
    with pytest.raises(fmapper.TransferError, match=r"a\.bias: \[4\] of the source"):
        fmapper.transfer(source, zeros(arrays({"b.w": (4, 3)})))


def test_names_that_are_exchanged():
    """A name of the target is that of another array of the source."""
    source = arrays({"up.weight": (4, 3), "down.weight": (3, 4), "gate.weight": (5, 3)})
    wanted = {"up.kernel": source["up.weight"].T, "down.kernel": source["down.weight"].T}
    wanted["gate.kernel"] = source["gate.weight"].T
    filled, _ = fmapper.transfer(source, zeros(wanted))
    for name, array in wanted.items():
        np.testing.assert_array_equal(filled[name], array)


def test_pairs_that_only_outputs_settle():
    """Norms and matrices of one shape, with names that say nothing, one in the other order."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.LayerNorm(4), torch.nn.LayerNorm(4)
            self.gate, self.up = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            y = self.first(x)
            return self.second(torch.relu(self.gate(y)) * self.up(y))

    class Mine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = torch.nn.LayerNorm(4), torch.nn.LayerNorm(4)
            self.a = torch.nn.Parameter(torch.zeros(4, 4))
            self.b = torch.nn.Parameter(torch.zeros(4, 4))
            self.a_bias = torch.nn.Parameter(torch.zeros(4))
            self.b_bias = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x):
            y = self.n2(x)
            return self.n1((y @ self.a + self.a_bias) * torch.relu(y @ self.b + self.b_bias))

    source, x = Theirs(), torch.randn(3, 4)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_()
    with pytest.raises(fmapper.AmbiguousTransferError):
        fmapper.transfer(source.state_dict(), Mine())
    filled, report = fmapper.transfer(source, Mine(), example_inputs=(x,))
    assert report.proved
    assert torch.equal(filled.n2.weight, source.first.weight)
    assert torch.equal(filled.b, source.gate.weight.T)
    assert torch.equal(filled.b_bias, source.gate.bias)
    assert fmapper.verify(source, filled, x)


def test_another_activation_is_named():
    torch = pytest.importorskip("torch")
    source = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    target = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.SiLU(), torch.nn.Linear(3, 2))
    with pytest.raises(fmapper.TransferError, match=r"first difference is at 1: .*sigmoid"):
        fmapper.transfer(source, target, example_inputs=torch.randn(2, 3))


class Gated:
    """Makes modules of one architecture with names in some order."""

    def __init__(self, *names):
        torch = pytest.importorskip("torch")

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.names = names
                for name in names[:2]:
                    self.add_module(name, torch.nn.LayerNorm(4))
                for name in names[2:]:
                    self.add_module(name, torch.nn.Linear(4, 4, bias=False))

            def forward(self, x):
                first, second, gate, up = (getattr(self, name) for name in self.names)
                y = first(x)
                return second(torch.relu(gate(y)) * up(y))

        self.module = Net()
        torch.manual_seed(0)
        for parameter in self.module.parameters():
            torch.nn.init.normal_(parameter)


def test_roles_say_more_than_names():
    torch = pytest.importorskip("torch")
    source = Gated("a", "b", "c", "d").module
    filled, report = fmapper.transfer(source, Gated("y", "x", "w", "v").module)
    assert torch.equal(filled.y.weight, source.a.weight)
    assert torch.equal(filled.w.weight, source.c.weight)
    assert all("role" in one.witnesses for one in report.arrays)
    assert report.proved
    with pytest.raises(fmapper.AmbiguousTransferError):
        fmapper.transfer(source.state_dict(), Gated("y", "x", "w", "v").module)


def test_names_that_roles_contradict_are_not_believed():
    torch = pytest.importorskip("torch")
    source = Gated("norm1", "norm2", "up_proj", "gate_proj").module  # `up` is what is bent
    target = Gated("norm2", "norm1", "gate", "up").module
    filled, report = fmapper.transfer(source, target)
    assert report.proved
    assert torch.equal(filled.gate.weight, source.up_proj.weight)
    assert torch.equal(filled.norm2.bias, source.norm1.bias)


def test_rows_of_layers_that_are_stacked_have_roles():
    jax = pytest.importorskip("jax")

    def loop(params, x):
        for i in range(3):
            x = jax.numpy.tanh(x @ params[f"l{i}"]["a"]) @ params[f"l{i}"]["b"]
        return x

    def scan(params, x):
        def step(x, layer):
            return jax.numpy.tanh(x @ layer["z"]) @ layer["y"], None

        return jax.lax.scan(step, x, params)[0]

    source = arrays({f"l{i}.{name}": (4, 4) for i in range(3) for name in "ab"})
    source = {f"l{i}": {name: source[f"l{i}.{name}"] for name in "ab"} for i in range(3)}
    target = {"y": np.zeros((3, 4, 4), "f4"), "z": np.zeros((3, 4, 4), "f4")}
    (_, filled), report = fmapper.transfer((loop, source), (scan, target))
    assert report.proved  # a square matrix may be turned
    np.testing.assert_array_equal(filled["z"], np.stack([source[f"l{i}"]["a"] for i in range(3)]))


@pytest.mark.parametrize("given", [True, False])
def test_models_that_draw_random_numbers_are_refused(given):
    torch = pytest.importorskip("torch")

    class Noisy(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.rand(2)

    class AlwaysDropout(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.dropout(super().forward(x), training=True)

    inputs = {"example_inputs": torch.ones(1, 3)} if given else {}
    with pytest.raises(fmapper.TransferError, match=r"the source .* random numbers, at aten::rand"):
        fmapper.transfer(Noisy(3, 2), torch.nn.Linear(3, 2), **inputs)
    with pytest.raises(fmapper.TransferError, match=r"the target .* random numbers, at aten::rand"):
        fmapper.transfer(torch.nn.Linear(3, 2), Noisy(3, 2), **inputs)
    with pytest.raises(fmapper.TransferError, match=r"the source .* draws random numbers, at "):
        fmapper.transfer(AlwaysDropout(3, 2), AlwaysDropout(3, 2), **inputs)


def test_keys_among_the_inputs_draw_the_same_numbers():
    jax = pytest.importorskip("jax")

    def noisy(params, x, key):
        return x @ params["w"] + jax.random.normal(key, (2,))

    def other(params, x, key):
        return x @ params["kernel"] + jax.random.normal(key, (2,))

    given = np.ones((1, 3), "f4"), jax.random.key(0)
    source, target = {"w": np.ones((3, 2), "f4")}, {"kernel": np.zeros((3, 2), "f4")}
    (_, filled), _ = fmapper.transfer((noisy, source), (other, target), example_inputs=given)
    assert np.all(filled["kernel"] == 1)


def test_a_folder_of_the_hub_is_read_as_its_class(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    config = transformers.MixtralConfig(**sizes, **heads)
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = transformers.MixtralForCausalLM(config)
    filled, report = fmapper.transfer(tmp_path, empty, keep=["*inv_freq"])
    for name, array in model.state_dict().items():
        assert torch.equal(filled.state_dict()[name], array)
    filled, _ = fmapper.transfer(fmapper.load(tmp_path), model)  # by the tables of transformers
    assert torch.equal(filled.lm_head.weight, model.lm_head.weight)
    made = fmapper.load(tmp_path, rules=report.rules)
    assert "model.layers.0.mlp.experts.gate_up_proj" in made


def test_two_biases_of_an_lstm_are_added():
    torch = pytest.importorskip("torch")
    module = torch.nn.LSTM(3, 4)
    shapes = {"cell.weight_ih": (16, 3), "cell.weight_hh": (16, 4), "cell.bias": (16,)}
    filled, report = fmapper.transfer(module, zeros(arrays(shapes)))
    added = (module.bias_ih_l0 + module.bias_hh_l0).detach().numpy()
    assert (filled["cell.bias"] == added).all()
    assert "Sum(" in str(report.rules)
    with pytest.raises(fmapper.CheckpointError, match="terms of a sum"):
        report.rules.inverse()
    shapes = {"cell.weight_ih": (12, 3), "cell.weight_hh": (12, 4), "cell.bias": (12,)}
    with pytest.raises(fmapper.TransferError, match="has no place in the target"):
        fmapper.transfer(torch.nn.GRU(3, 4), zeros(arrays(shapes)))


def test_the_hidden_bias_of_a_gru_is_added_in_two_gates():
    torch = pytest.importorskip("torch")
    module = torch.nn.GRU(3, 4)
    shapes = {"weight_ih": (12, 3), "weight_hh": (12, 4), "bias": (12,), "bias_n": (4,)}
    wanted = zeros(arrays({f"cell.{name}": shape for name, shape in shapes.items()}))
    filled, _ = fmapper.transfer(module, wanted)
    inputs, hidden = module.bias_ih_l0.detach().numpy(), module.bias_hh_l0.detach().numpy()
    assert (filled["cell.bias"][:8] == (inputs + hidden)[:8]).all()
    assert (filled["cell.bias"][8:] == inputs[8:]).all()
    assert (filled["cell.bias_n"] == hidden[8:]).all()


@pytest.mark.parametrize("space", [(3,), (3, 3)])
def test_a_matrix_of_flattened_images_is_asked_for(space):
    """Its rows are in another order where channels come last, which shapes do not tell."""
    source = arrays({"conv.weight": (6, 4, *space), "fc.weight": (5, 150)})
    target = zeros(arrays({"conv.kernel": (*space, 4, 6), "fc.kernel": (150, 5)}))
    with pytest.raises(fmapper.AmbiguousTransferError, match=r"fc\.kernel") as caught:
        fmapper.transfer(source, target)
    assert {*caught.value.candidates} == {"fc.kernel"}


def test_a_pair_that_is_left_alone_needs_a_second_witness():
    source = arrays({"a.gate.weight": (4, 3), "a.up.weight": (4, 3)})
    target = zeros(arrays({"b.gate.weight": (4, 3), "b.other.weight": (4, 3)}))
    with pytest.raises(fmapper.AmbiguousTransferError, match=r"b\.other\.weight") as caught:
        fmapper.transfer(source, target)
    assert {*caught.value.candidates} == {"b.other.weight"}


def test_weights_that_are_not_numbers_are_refused():
    source = arrays({"fc.weight": (3, 2), "fc.bias": (3,)})
    _, report = fmapper.transfer(source, zeros(source))
    source["fc.bias"][1] = np.nan
    with pytest.raises(fmapper.TransferError, match=r"fc\.bias: the source has NaN"):
        fmapper.transfer(source, zeros(source))
    filled, _ = fmapper.transfer(source, zeros(source), rules=report.rules)
    np.testing.assert_array_equal(filled["fc.bias"], source["fc.bias"])
