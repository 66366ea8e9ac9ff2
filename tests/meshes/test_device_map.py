"""`fmapper.meshes.device_map`: parts of a model on few small devices, planned by bytes."""

import pytest

torch = pytest.importorskip("torch")

import fmapper  # noqa: E402
from fmapper.meshes import device_map  # noqa: E402

LAYER = (8 * 8 + 8) * 4  # bytes of a Linear(8, 8)


def layers(n, device="meta"):
    with torch.device(device):
        return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(n)))


def test_devices_are_filled_in_order():
    plan = device_map(layers(4), {"a": 2 * LAYER, "b": 4 * LAYER})
    assert dict(plan) == {"0": "a", "1": "a", "2": "b", "3": "b"}
    assert plan.nbytes == {"a": 2 * LAYER, "b": 2 * LAYER}
    assert plan.room == 0
    assert plan.device_of("3.weight") == "b"
    assert "3" in str(plan)


def test_what_fits_is_one_part():
    assert dict(device_map(layers(4), {"a": "1KiB", "b": "4.5KiB"}, no_split=["Sequential"])) == {
        "": "b"
    }
    assert dict(device_map(layers(4), {"a": None})) == {"": "a"}


def test_room_is_kept_for_layers_that_are_brought():
    plan = device_map(layers(4), {0: 3 * LAYER, "cpu": LAYER, "disk": None})
    assert [plan.device_of(str(n)) for n in range(4)] == [0, 0, "cpu", "disk"]
    assert plan.room == LAYER


def test_classes_that_stay_whole():
    net = torch.nn.Sequential(layers(2), layers(2))
    memory = {"a": 3 * LAYER, "b": None}
    assert device_map(net, memory).device_of("1.0.weight") == "a"
    whole = device_map(net, memory, no_split=["Linear", "1"])
    assert dict(whole) == {"0": "a", "1": "b"}


def test_tied_weights_count_once_and_stay_together():
    net = layers(3)
    net[2].weight, net[2].bias = net[0].weight, net[0].bias
    plan = device_map(net, {"a": LAYER, "b": LAYER})
    assert dict(plan) == {"0": "a", "1": "b", "2": "a"}
    assert plan.copies == ()


def test_copies_of_tied_weights_are_said():
    net = layers(2)
    net[1].weight = net[0].weight
    plan = device_map(net, {"a": LAYER, "b": LAYER}, no_split="Linear")
    assert plan.copies == (("0.weight", ("a", "b")),)
    assert plan.nbytes == {"a": LAYER, "b": LAYER}
    assert "0.weight is on a and b" in str(plan)


def test_another_dtype():
    plan = device_map(layers(4), {"a": 2 * LAYER}, dtype="bfloat16")
    assert plan.nbytes == {"a": 2 * LAYER}


def test_what_does_not_fit_is_refused():
    with pytest.raises(fmapper.PlacementError, match=r"1\.weight .* max_memory"):
        device_map(layers(2), {"a": LAYER})
    with pytest.raises(fmapper.PlacementError, match="largest layer"):
        device_map(layers(2), {0: LAYER - 1, "cpu": None})
    with pytest.raises(fmapper.PlacementError, match="'1 gig'"):
        device_map(layers(2), {"a": "1 gig"})
    with pytest.raises(fmapper.PlacementError, match="no device"):
        device_map(layers(2), {})


def test_a_converted_model_goes_by_the_order_of_use():
    pytest.importorskip("jax")

    class Backwards(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.last(self.first(x))

    model = fmapper.convert(Backwards(), "jax", (torch.ones(2, 8),))
    plan = device_map(model, {"a": LAYER, "b": LAYER})
    assert list(plan.items()) == [("first", "a"), ("last", "b")]


def test_a_model_of_shapes():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.eval_shape(
        lambda: nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2)))
    )
    plan = device_map(model, {"a": LAYER, "b": LAYER})
    assert plan.nbytes == {"a": LAYER, "b": LAYER}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "T5"])
def test_as_accelerate_where_layers_stay_whole(name):
    accelerate = pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Llama": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
        "GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 4},
        "Bert": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
        "T5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 4},
    }[name]
    if name in ("Llama", "Bert"):
        sizes |= {"num_hidden_layers": 4}
    config = getattr(transformers, f"{name}Config")(vocab_size=100, **sizes)
    head = {"Llama": "ForCausalLM", "GPT2": "LMHeadModel", "Bert": "Model"}.get(
        name, "ForConditionalGeneration"
    )
    with torch.device("meta"):
        model = getattr(transformers, name + head)(config)
    model.tie_weights()
    total = fmapper.summary(model).nbytes
    memory = {0: total * 2 // 3, "cpu": total * 2}
    whole = list(model._no_split_modules)
    theirs = accelerate.infer_auto_device_map(model, dict(memory), no_split_module_classes=whole)
    ours = device_map(model, memory)

    def there(key):
        while key and key not in theirs:
            key = key.rpartition(".")[0]
        return theirs[key]

    names = [key for key, _ in model.named_parameters()]
    assert [ours.device_of(key) for key in names] == [there(key) for key in names]
