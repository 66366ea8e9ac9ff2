"""`Sync` in one process: every kind of source and target, and what must not happen."""

from __future__ import annotations

import copy
import weakref
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

import fmapper
from fmapper.checkpoints import Cast, Offset, Rename, Rules, Sum, Transpose
from fmapper.sync import Transport

INPUTS = (torch.ones(2, 3),)


def make(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def change(model: torch.nn.Module, seed: int = 9) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))


def assert_same_outputs(target: Any, source: torch.nn.Module) -> None:
    wanted = source(*INPUTS).detach().numpy()
    np.testing.assert_allclose(np.asarray(target(np.ones((2, 3), "float32"))), wanted, rtol=1e-5)


class Twin(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(jnp.tanh(self.first(x)))


TWIN = Rules([
    Rename(["0.{x}", "2.{x}"], ["first.{x}", "last.{x}"]),
    Transpose("{x}.weight"),
    Rename("{x}.weight", "{x}.kernel"),
])  # fmt: skip


def test_tensors_are_written_in_place() -> None:
    source, target = make(), make(1)
    held, version = target[0].weight, target[0].weight._version
    sync = fmapper.Sync(source, target)
    change(source)
    assert sync() is sync.target is target
    assert target[0].weight is held
    assert held._version > version
    for own, wanted in zip(target.parameters(), source.parameters(), strict=True):
        assert torch.equal(own, wanted)
    assert sync.stats.nbytes == sum(p.nbytes for p in source.parameters())
    assert (sync.stats.sent, sync.stats.received) == (0, 0)


def test_a_backward_pass_that_needs_old_weights_is_refused() -> None:
    source, target = make(), make(1)
    sync = fmapper.Sync(source, target)
    loss = target(*INPUTS).sum()
    sync()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("to", ["jax", "flax"])
def test_converted_models(to: str) -> None:
    source = make()
    target = fmapper.convert(source, to, INPUTS)
    sync = fmapper.Sync(source, target)
    for seed in (1, 2, 3):
        change(source, seed)
        assert sync() is target
        assert_same_outputs(target, source)


def test_a_model_with_written_classes() -> None:
    source = make()
    target = fmapper.convert(source, "flax", INPUTS, structure=True)
    sync = fmapper.Sync(source, target)
    change(source)
    assert sync() is target
    assert_same_outputs(target, source)


def test_a_twin_with_rules_and_back() -> None:
    source, target = make(), Twin(nnx.Rngs(0))
    sync = fmapper.Sync(source, target, TWIN)
    change(source)
    assert sync() is target
    assert_same_outputs(target, source)
    target.first.kernel.set_value(target.first.kernel.get_value() + 1)
    back = fmapper.Sync(target, source, TWIN.inverse())
    assert back() is source
    assert_same_outputs(target, source)


def test_a_twin_without_rules() -> None:
    source, target = make(), Twin(nnx.Rngs(0))
    fmapper.Sync(source, target)()
    assert_same_outputs(target, source)


class Mean(torch.nn.Module):
    """Generates: the next token goes by the mean of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.out = torch.nn.Linear(6, 11)

    def prefill(self, tokens: Any, mask: Any) -> Any:
        cache = ((self.embed(tokens) * mask[..., None]).sum(1), mask.sum(1, keepdim=True).float())
        return self.out(torch.tanh(3 * cache[0] / cache[1])), cache

    def step(self, tokens: Any, cache: Any) -> Any:
        cache = cache[0] + self.embed(tokens), cache[1] + 1
        return self.out(torch.tanh(3 * cache[0] / cache[1])), cache


def test_arrays_of_a_generator() -> None:
    """With several rows weights lie in blocks, padded with zeros."""
    model = Mean()
    generator = fmapper.generator(model, max_length=12, batch=2, to="jax", check=False)
    sync = fmapper.Sync(model, generator)
    change(model, 1)
    assert sync() is generator
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(generator.params[name], parameter.detach())


@pytest.mark.nightly
@pytest.mark.parametrize("batch", [1, 2])
def test_a_generator_and_a_text_that_is_generated_at_the_time(batch: int) -> None:
    """With more rows weights lie in blocks. A text is finished with the weights it began with."""
    model = Mean()
    generator = fmapper.generator(model, max_length=12, batch=batch, to="jax", check=False)
    prompts = [[1, 2, 3], [4, 5, 6]][:batch]
    sync = fmapper.Sync(model, generator)
    change(model, 1)
    assert sync() is generator
    old = fmapper.generator(model, max_length=12, batch=batch, to="jax", check=False)(prompts)
    np.testing.assert_array_equal(generator(prompts), old)
    tokens = generator.stream(prompts)
    first = next(tokens)
    change(model, 2)
    sync()
    stream = np.stack([first, *tokens], 1)
    np.testing.assert_array_equal(stream, np.asarray(old)[:, 3 : 3 + stream.shape[1]])
    new = fmapper.generator(model, max_length=12, batch=batch, to="jax", check=False)(prompts)
    np.testing.assert_array_equal(generator(prompts), new)
    assert (np.asarray(new) != np.asarray(old)).any()


def test_parts_for_an_engine_with_an_interface_of_its_own() -> None:
    source = make()
    engine = fmapper.to_torch(make(1), device="meta")
    sync = fmapper.Sync(source, engine)
    for seed in (1, 2):
        change(source, seed)
        found = {name: values for name, _, values in sync.parts()}
        assert found.keys() == source.state_dict().keys()
        for name, values in source.state_dict().items():
            np.testing.assert_array_equal(found[name], values)
    with pytest.raises(fmapper.SyncError, match="no memory"):
        sync()
    with pytest.raises(fmapper.SyncError, match="has memory"):
        fmapper.Sync(source, make(1)).parts().__next__()


def test_linen_variables() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(2)(jnp.tanh(linen.Dense(4)(x)))

    source, net = make(), Net()
    variables = net.init(jax.random.key(0), jnp.ones((2, 3)))
    names = ["params.Dense_1.{x}", "params.Dense_0.{x}"]
    rules = Rules([*TWIN.rules, Rename(["first.{x}", "last.{x}"], names)])
    new = fmapper.Sync(source, variables, rules)()
    assert_same_outputs(lambda x: net.apply(new, x), source)


def test_a_tree_that_cannot_be_changed_is_given_anew() -> None:
    target = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    source = make()[0]
    sync = fmapper.Sync(source, target)
    for seed in (1, 2):
        change(source, seed)
        new = sync()
        assert new is sync.target is not target
        np.testing.assert_array_equal(new.weight, source.weight.detach().numpy())


def test_new_parameters_of_jax_are_given_to_the_call() -> None:
    source = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(3)}
    target = torch.nn.Linear(2, 3)
    sync = fmapper.Sync(source, target, Rules([Rename(["w", "b"], ["weight", "bias"])]))
    sync({"w": jnp.ones((3, 2)), "b": jnp.full(3, 2.0)})
    assert target.weight.tolist() == [[1.0, 1.0]] * 3
    assert target.bias.tolist() == [2.0] * 3


def test_arrays_that_are_not_tied_any_more_are_refused() -> None:
    """Two zeros that are one object count as tied; later versions of them differ."""
    zeros = jnp.zeros(3)
    source, target = {"a": zeros, "b": zeros}, {n: np.zeros(3, "float32") for n in "ab"}
    sync = fmapper.Sync(source, target)
    with pytest.raises(fmapper.SyncError, match=r"b.* was tied to another array"):
        sync({"a": jnp.ones(3), "b": jnp.full(3, 2.0)})
    assert not target["b"].any()


def test_values_are_cast_moved_joined_and_computed() -> None:
    rng = np.random.default_rng(0)
    source = {name: rng.normal(size=(3, 2)).astype("float32") for name in "abcd"}
    rules = Rules([
        Transpose("a"),
        Offset("b", 1.0),
        Cast("a", "bfloat16"),
        Sum(["c", "d"], "cd"),
        Transpose("cd"),
    ])  # fmt: skip
    wanted = rules.apply(source)
    target = {name: jnp.zeros(x.shape, x.dtype) for name, x in wanted.items()}
    new = fmapper.Sync(source, target, rules)()
    for name, array in wanted.items():
        np.testing.assert_array_equal(np.asarray(new[name]), array.read())


def test_one_array_of_the_source_for_two_of_the_target() -> None:
    weight = make()[0].weight
    target = {name: np.zeros((4, 3), "float32") for name in "ab"}
    fmapper.Sync({"a": weight, "b": weight}, target)()
    for array in target.values():
        np.testing.assert_array_equal(array, weight.detach().numpy())


def test_arrays_that_are_tied_in_the_target_alone_are_refused() -> None:
    source = {"a": np.zeros(3), "b": np.ones(3)}
    target = {"a": torch.zeros(3, dtype=torch.float64)}
    target["b"] = target["a"]
    with pytest.raises(fmapper.SyncError, match="a: tied to b in the target"):
        fmapper.Sync(source, target)


def test_whole_numbers_of_another_width_must_fit() -> None:
    source, target = {"n": np.array([1, 2])}, {"n": jnp.zeros(2, "int32")}
    sync = fmapper.Sync(source, target)
    sync()
    assert target["n"].tolist() == [1, 2]
    source["n"][0] = 1 << 40
    with pytest.raises(fmapper.LossyCastError, match="n"):
        sync()
    assert target["n"].tolist() == [1, 2]


def test_a_cast_that_overflows_leaves_the_target_as_it_was() -> None:
    source = {"a": np.ones(4, "float32"), "b": np.full(4, 1e6, "float32")}
    target = {"a": torch.zeros(4), "b": torch.zeros(4, dtype=torch.float16)}
    sync = fmapper.Sync(source, target)
    with pytest.raises(fmapper.LossyCastError, match="b"):
        sync()
    assert target["a"].tolist() == [0.0] * 4
    source["b"][:] = 2
    sync()
    assert target["b"].tolist() == [2.0] * 4


def test_infinite_and_missing_numbers_stay() -> None:
    source = {"a": np.array([np.inf, -np.inf, np.nan, 1.0], "float32")}
    target = {"a": torch.zeros(4, dtype=torch.bfloat16)}
    fmapper.Sync(source, target)()
    np.testing.assert_array_equal(target["a"].float().numpy(), source["a"])


def test_what_is_left_over_raises_when_it_is_planned() -> None:
    source, target = make(), make(1)
    target.register_parameter("more", torch.nn.Parameter(torch.ones(2)))
    with pytest.raises((fmapper.SyncError, fmapper.TransferError), match="more"):
        fmapper.Sync(source, target)
    rules = Rules([Rename("0.weight", "other")])
    with pytest.raises(fmapper.SyncError, match=r"(?s)0\.weight.*nothing.*other.*no place"):
        fmapper.Sync(source, make(1), rules)


def test_a_buffer_that_is_left_over_raises_unless_checkpoints_leave_it_out() -> None:
    sources = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    for source, persistent in zip(sources, (True, False), strict=True):
        source.register_buffer("centre", torch.ones(3), persistent=persistent)
    with pytest.raises(fmapper.SyncError, match="centre: the target has no place for it"):
        fmapper.Sync(sources[0], torch.nn.Linear(3, 2))
    target = torch.nn.Linear(3, 2)
    fmapper.Sync(sources[1], target)()
    assert torch.equal(target.weight, sources[1].weight)


@pytest.mark.parametrize("what", ["shape", "dtype", "class", "layer"])
def test_what_has_changed_since_is_refused(what: str) -> None:
    source, target = make(), make(1)
    before = copy.deepcopy(target.state_dict())
    sync = fmapper.Sync(source, target)
    if what == "shape":
        source[2].bias = torch.nn.Parameter(torch.zeros(3))
    elif what == "dtype":
        source[2].bias = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    elif what == "class":
        source[1] = torch.nn.Identity()
    else:
        source.append(torch.nn.Linear(2, 2))
    with pytest.raises(fmapper.SyncError, match="planned"):
        sync()
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name])


def test_memory_that_is_replaced_is_followed() -> None:
    """The tensor is the same object, with other values or another order of them."""
    source, target = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    sync = fmapper.Sync(source, target)
    sync()
    source.weight.data = source.weight.data.T
    target.bias.data = torch.zeros(3)
    sync()
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)


def test_an_array_that_was_donated_is_named() -> None:
    source, target = {"a": jnp.ones(3), "b": jnp.ones(3)}, {"a": np.zeros(3, "float32")}
    target["b"] = np.zeros(3, "float32")
    sync = fmapper.Sync(source, target)
    source["b"].delete()
    with pytest.raises(fmapper.SyncError, match=r"b of the source.*donated"):
        sync()
    assert not target["a"].any()


def test_a_layer_that_is_replaced_is_followed() -> None:
    source, target = make(), make(1)
    sync = fmapper.Sync(source, target)
    source[0] = torch.nn.Linear(3, 4)
    target[2] = torch.nn.Linear(4, 2)
    sync()
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[2].weight, source[2].weight)


def test_a_read_only_array_is_refused_before_anything_is_written() -> None:
    target = {"a": np.zeros(2), "b": np.zeros(2)}
    target["b"].flags.writeable = False
    with pytest.raises(fmapper.SyncError, match="b: the array of the target is read-only"):
        fmapper.Sync({"a": np.ones(2), "b": np.ones(2)}, target)
    assert not target["a"].any()


def test_a_part_alone() -> None:
    source, target = make(), make(1)
    before = target[0].weight.clone()
    head = {"2.weight": source[2].weight, "2.bias": source[2].bias}
    with pytest.raises(fmapper.TransferError, match=r"(?s)0\.weight.*keep= lists names"):
        fmapper.Sync(head, target)
    sync = fmapper.Sync(head, target, keep=["0.*"])
    sync()
    assert torch.equal(target[2].weight, source[2].weight)
    assert torch.equal(target[0].weight, before)
    assert sync.plan.kept == ("0.weight", "0.bias")


def test_a_checkpoint_is_refused() -> None:
    with pytest.raises(fmapper.SyncError, match="path of a checkpoint"):
        fmapper.Sync("model.safetensors", make())


def test_a_model_with_itself_is_refused() -> None:
    model = make()
    with pytest.raises(fmapper.SyncError, match="share"):
        fmapper.Sync(model, model)


def test_arrays_that_somebody_holds_do_not_change() -> None:
    source = make()
    target = fmapper.convert(source, "jax", INPUTS)
    sync = fmapper.Sync(source, target)
    held = []
    for seed in range(6):
        change(source, seed)
        sync()
        held.append((target.params["0.weight"], source[0].weight.detach().numpy().copy()))
    for array, values in held:
        np.testing.assert_array_equal(array, values)


def test_memory_is_used_again() -> None:
    source = {"w": np.zeros((512, 1024), "float32")}
    target = {"w": jnp.zeros((512, 1024))}
    sync = fmapper.Sync(source, target)
    addresses = set()
    for _ in range(8):
        source["w"] += 1
        sync()
        addresses.add(target["w"].unsafe_buffer_pointer())
    assert len(addresses) == 2
    assert float(target["w"][0, 0]) == 8


def test_old_arrays_are_let_go() -> None:
    """Neither end is kept alive by the sync, as it was planned or as it was in the last call."""
    source, target = {"w": jnp.ones(3)}, {"w": jnp.zeros(3)}
    old = [weakref.ref(source["w"]), weakref.ref(target["w"])]
    sync = fmapper.Sync(source, target)
    sync()
    source["w"] = jnp.full(3, 2.0)
    sync()
    assert [ref() for ref in old] == [None, None]
    old = [weakref.ref(source["w"])]
    source["w"] = jnp.full(3, 3.0)
    assert old[0]() is None
    sync()
    assert target["w"].tolist() == [3.0] * 3


def test_shared_arrays_are_the_same_objects() -> None:
    source, target = Twin(nnx.Rngs(0)), Twin(nnx.Rngs(1))
    fmapper.Sync(source, target, share=True)()
    assert target.first.kernel.get_value() is source.first.kernel.get_value()
    with pytest.raises(fmapper.SyncError, match="share=True"):
        fmapper.Sync(make(), make(1), share=True)


def test_arrays_are_not_shared_unless_asked() -> None:
    source, target = Twin(nnx.Rngs(0)), Twin(nnx.Rngs(1))
    fmapper.Sync(source, target)()
    kernel = source.first.kernel.get_value()
    assert target.first.kernel.get_value().unsafe_buffer_pointer() != kernel.unsafe_buffer_pointer()
    kernel.delete()  # as a training step that donates it does
    assert np.isfinite(np.asarray(target.first.kernel.get_value())).all()


def test_random_states_and_counters_stay() -> None:
    class Net(nnx.Module):
        def __init__(self, seed: int) -> None:
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(seed))
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))

    source, target = Net(0), Net(1)
    source.norm.mean.set_value(jnp.ones(3))
    key = jax.random.key_data(target.drop.rngs.key.get_value())
    fmapper.Sync(source, target)()
    np.testing.assert_array_equal(target.norm.mean.get_value(), 1)
    np.testing.assert_array_equal(jax.random.key_data(target.drop.rngs.key.get_value()), key)


def test_random_states_that_only_one_side_has_as_keys_stay() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, x: Any) -> Any:
            return self.drop(self.linear(x))

    model = Net()
    target = fmapper.convert(model, "torch", (jnp.ones((2, 3)),), train=True, check=False)
    for ends in ((model, target), (target, model)):
        sync = fmapper.Sync(*ends)
        assert sync.plan.kept == ("drop.rngs.key", "drop.rngs.count")
        assert [array.name for array in sync.plan] == ["linear.kernel", "linear.bias"]


def test_the_plan_says_what_becomes_of_each_array() -> None:
    plan = fmapper.Sync(make(), Twin(nnx.Rngs(0)), TWIN).plan
    rows = {array.name: array for array in plan}
    assert rows["first.kernel"].sources == ("0.weight",)
    assert rows["first.kernel"].layout == "moved"
    assert rows["last.bias"].layout == "same"
    assert plan.nbytes == 4 * (3 * 4 + 4 + 4 * 2 + 2)
    assert plan.sent == 0
    assert "first.kernel" in str(plan)


def test_nothing_is_compiled_in_a_call() -> None:
    source = make()
    target = fmapper.convert(source, "flax", INPUTS)
    sync = fmapper.Sync(source, target)
    sync()
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    change(source)
    sync()
    assert not [name for name in events if "compile" in name]


def test_dtypes_that_jax_has_only_at_times() -> None:
    with jax.enable_x64(True):
        target = {"a": jnp.zeros(3, "float64"), "b": jnp.zeros(3, "float32")}
    sync = fmapper.Sync({"a": np.ones(3), "b": np.ones(3, "float32")}, target)
    with pytest.raises(fmapper.SyncError, match=r"a: float64 .* become float32.*jax_enable_x64"):
        sync()
    assert not target["b"].any()
    with jax.enable_x64(True):
        sync()
        assert target["a"].dtype == "float64"
        assert target["a"].tolist() == [1.0] * 3


def test_nothing_is_planned_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lazy array is made, and no array is looked at by itself."""
    from fmapper.checkpoints.lazy import LazyArray
    from fmapper.sync import ends

    source = {f"layers.{n}": torch.randn(4, 4) for n in range(50)}
    source["scale"] = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    target = {name: torch.zeros_like(array) for name, array in source.items()}
    jax_target = {name: fmapper.to_jax(array) for name, array in target.items()}
    syncs = [fmapper.Sync(source, end) for end in (target, jax_target)]
    syncs[1]()  # its memory is allocated

    def fail(*args: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(ends.Place, "of", fail)
    monkeypatch.setattr(LazyArray, "of", fail)
    monkeypatch.setattr(LazyArray, "part", fail)
    monkeypatch.setattr(LazyArray, "read", fail)
    for sync, end in zip(syncs, (target, jax_target), strict=True):
        assert sync() is end
    for name, array in source.items():
        assert torch.equal(target[name], array)
        np.testing.assert_array_equal(jax_target[name], fmapper.to_numpy(array.detach()))


def test_memory_that_became_read_only_is_refused_before_anything_is_written() -> None:
    source = {"a": np.ones(2), "b": np.ones(2)}
    target = {"a": np.zeros(2), "b": np.zeros(2)}
    sync = fmapper.Sync(source, target)
    target["b"].flags.writeable = False
    with pytest.raises(fmapper.SyncError, match=r"^b: .*cannot be written to any more"):
        sync()
    target["b"] = np.zeros(2).astype(">f8")  # which NumPy's own code would write to a copy of
    with pytest.raises(fmapper.SyncError, match=r"^b: .*cannot be written to any more"):
        sync()
    assert not target["a"].any()


def test_without_memory_for_one_array_none_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from fmapper.backends.discovery import owner_of

    source = {"a": torch.ones(4), "b": torch.ones(4)}
    target = {"a": torch.zeros(4), "b": jnp.zeros(4)}
    sync = fmapper.Sync(source, target)

    def take(self: Any, *args: Any, **options: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(owner_of(target["b"])), "take", take)
        with pytest.raises(MemoryError):
            sync()
    assert not target["a"].any()
    sync()
    assert target["a"].all()
    assert target["b"].all()


def test_weights_that_are_tied_in_a_state_dict() -> None:
    """There they are two tensors on one memory."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    source, target = Tied(), Tied()
    for ends in ((source.state_dict(), target), (source, target.state_dict())):
        sync = fmapper.Sync(*ends)
        change(source)
        sync()
        assert torch.equal(target.head.weight, source.head.weight)
        assert [array.name for array in sync.plan] == ["embed.weight"]
    state = source.state_dict()
    sync = fmapper.Sync(state, target)
    state["head.weight"] = torch.zeros(5, 3)
    before = target.head.weight.clone()
    with pytest.raises(fmapper.SyncError, match=r"embed\.weight .* had the memory of another"):
        sync()
    assert torch.equal(target.head.weight, before)
    with pytest.raises(fmapper.SyncError, match=r"tied to head\.weight in the target"):
        fmapper.Sync({name: x.clone() for name, x in state.items()}, target.state_dict())


def test_memory_that_would_be_written_twice_is_refused() -> None:
    memory = torch.zeros(6)
    with pytest.raises(fmapper.SyncError, match="share memory that is written"):
        fmapper.Sync({"a": memory[:4]}, {"a": memory[2:]})
    ones = {"a": torch.ones(4), "b": torch.ones(4)}
    with pytest.raises(fmapper.SyncError, match="b and a of the target have elements in common"):
        fmapper.Sync(ones, {"a": memory[:4], "b": memory[2:]})
    target = {"a": torch.zeros(3, 4)}
    sync = fmapper.Sync({"a": torch.ones(3, 4)}, target)
    for overlapping in (torch.zeros(1, 4).expand(3, 4), memory.as_strided((3, 4), (1, 1))):
        with pytest.raises(fmapper.SyncError, match=r"a: .* has several elements in one place"):
            fmapper.Sync({"a": torch.ones(3, 4)}, {"a": overlapping})
        target["a"] = overlapping
        with pytest.raises(fmapper.SyncError, match=r"a: .* has several elements in one place"):
            sync()
    with pytest.raises(fmapper.SyncError, match=r"a: .* is read-only"):
        fmapper.Sync({"a": np.float32(1)}, {"a": np.float32(0)})
    assert not memory.any()
    halves = {"a": memory[::2], "b": memory[1::2]}
    fmapper.Sync({"a": torch.ones(3), "b": torch.full((3,), 2.0)}, halves)()
    assert memory.tolist() == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("how", ["tied", "tied by memory", "the source's", "another of the source"])
def test_memory_that_came_to_be_shared_is_refused(how: str) -> None:
    source = {"a": torch.full((3,), 1.0), "b": torch.full((3,), 2.0)}
    target = torch.nn.Module()
    for name in source:
        target.register_parameter(name, torch.nn.Parameter(torch.zeros(3)))
    sync = fmapper.Sync(source, target)
    if how == "tied":
        target.b = target.a
    elif how == "tied by memory":
        target.b.data = target.a.data
    else:
        target.a.data = source["a" if how == "the source's" else "b"]
    with pytest.raises(fmapper.SyncError, match=r"elements in common|share memory"):
        sync()
    assert [x.tolist() for x in source.values()] == [[1.0] * 3, [2.0] * 3]
    target.a.data, target.b = torch.zeros(3), torch.nn.Parameter(torch.zeros(3))
    sync()
    assert [x.tolist() for x in target.parameters()] == [[1.0] * 3, [2.0] * 3]


def test_memory_that_two_frameworks_share_is_refused() -> None:
    source = {"a": np.zeros(4)}
    with pytest.raises(fmapper.SyncError, match="source and target share memory"):
        fmapper.Sync(source, {"a": torch.from_numpy(source["a"])})


def test_memory_of_an_array_that_is_kept_is_refused() -> None:
    memory = torch.zeros(6)
    target = {"a": memory[:4], "b": memory[2:]}
    with pytest.raises(fmapper.SyncError, match="of the target have elements in common"):
        fmapper.Sync({"a": torch.ones(4)}, target, keep=["b"])


@pytest.mark.parametrize(
    ("dtype", "other", "value"),
    [("int8", "uint8", -1), ("uint8", "int8", 255), ("int64", "uint64", -1)],
)
def test_numbers_do_not_change_their_sign(dtype: str, other: str, value: int) -> None:
    source, target = {"n": np.array([7], dtype)}, {"n": np.zeros(1, other)}
    sync = fmapper.Sync(source, target)
    sync()
    assert target["n"][0] == 7
    source["n"][0] = value
    with pytest.raises(fmapper.LossyCastError, match="n"):
        sync()
    assert target["n"][0] == 7


def test_lazy_conjugates_and_negatives_are_written() -> None:
    """`_foreach_copy_` refuses them, after others were written."""
    source = {"a": torch.ones(3), "b": torch.randn(3, dtype=torch.complex64), "c": torch.randn(3)}
    memory = torch.zeros(2, 3, dtype=torch.complex64).conj()
    target = {"a": torch.zeros(3), "b": memory[0], "c": memory[1].imag}
    fmapper.Sync(source, target)()
    for name, array in source.items():
        assert torch.equal(target[name], array)


@pytest.mark.parametrize("to", ["torch", "jax", "numpy"])
def test_arrays_of_every_kind(to: str) -> None:
    def make(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        dtypes = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
        dtypes += [torch.complex64, torch.bool, torch.uint8, torch.int32]
        arrays = {str(dtype): (3 * torch.randn(3, 2)).to(dtype) for dtype in dtypes}
        arrays["number"], arrays["truth"] = torch.randn(()), torch.rand(()) < 0.5
        arrays["empty"], arrays["no column"] = torch.zeros(0, 3), torch.zeros(2, 0).bfloat16()
        arrays["transposed"], arrays["steps"] = torch.randn(5, 4).T, torch.randn(6, 6)[1::2, ::3]
        arrays["expanded"] = torch.randn(1, 4).expand(3, 4)
        arrays["conjugate"] = torch.randn(3, dtype=torch.complex64).conj()
        return arrays

    source = make(0)
    zeros = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in source.items()}
    target = {"torch": dict, "jax": fmapper.to_jax, "numpy": fmapper.to_numpy}[to](zeros)
    sync = fmapper.Sync(source, target)
    for seed in (1, 2, 3):
        source.update(make(seed))
        assert sync() is target
        for name, array in source.items():
            wanted = fmapper.to_numpy(array)
            np.testing.assert_array_equal(fmapper.to_numpy(target[name]), wanted, name)


def test_two_syncs_of_one_transport_are_not_confused() -> None:
    """In another order the weights of one would go into the other, where shapes are alike."""
    wires: dict[tuple[int, int], Queue[bytes]] = {(0, 1): Queue(), (1, 0): Queue()}

    def transport(rank: int) -> Transport:
        def send(data: memoryview, to: int) -> None:
            wires[rank, to].put(bytes(data))

        return Transport(rank, 2, send, lambda sender: wires[sender, rank].get(timeout=60))

    def train() -> None:
        way = transport(0)
        syncs = [fmapper.Sync({"a": np.full(3, at)}, None, transport=way) for at in (1.0, 2.0)]
        for sync in syncs[::-1]:
            with pytest.raises(fmapper.SyncError, match="rank 1 calls another sync"):
                sync()
        for sync in syncs:
            sync()

    way, targets = transport(1), [{"a": np.zeros(3)} for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(train)
        syncs = [fmapper.Sync(None, target, transport=way) for target in targets]
        for sync in syncs:
            with pytest.raises(fmapper.SyncError, match=r"rank 0 calls another sync.*old weights"):
                sync()
        assert not any(target["a"].any() for target in targets)
        for sync in syncs:
            sync()
        trainer.result()
    assert [target["a"].tolist() for target in targets] == [[1.0] * 3, [2.0] * 3]
