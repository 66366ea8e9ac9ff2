"""`Rules.record` on functions of torch and JAX, and of several frameworks at once."""

import re

import pytest

import fmapper
from fmapper import CheckpointError

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from fmapper.checkpoints import Rules  # noqa: E402
from support.recording import array, layers, restores, same  # noqa: E402


def tensors(**shapes):
    return {name: torch.from_numpy(x) for name, x in layers(**shapes).items()}


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 10, bias=False)
        self.bn = torch.nn.BatchNorm1d(8)


# torch


def test_tensors_of_fused_layers():
    def convert(state):
        out = {}
        for name, w in state.items():
            _, i, part = name.split(".")
            if part == "qkv":
                q, k, v = w.t().chunk(3, dim=0)
                out[f"l.{i}.q"] = q.contiguous()
                out[f"l.{i}.k"] = k.clone().view(2, 4, 8)
                out[f"l.{i}.v"] = v.reshape(2, 4, 8).permute(1, 0, 2).flatten(0, 1)
            else:
                out[f"l.{i}.{part}"] = w.transpose(0, 1).unsqueeze(-1).to(torch.float64)
        return out

    state = tensors(qkv=(8, 24), fc=(8, 32))
    rules = same(convert, state)
    restores(rules, fmapper.to_numpy(state))
    assert len(rules) < 12


def test_tensors_that_the_function_makes():
    def convert(state):
        stacked = torch.empty(3, 8)
        padded = torch.zeros(12, 8, dtype=state["h.0.w"].dtype)
        chosen = torch.zeros(6, 8)
        like = torch.zeros_like(state["h.0.w"])
        for i in range(3):
            stacked[i] = state[f"h.{i}.ln"]
        padded[:4] = state["h.0.w"]
        chosen[[4, 1, 0]] = state["h.1.w"][:3]
        chosen[torch.tensor([2])] = state["h.1.w"][3:]
        like.narrow(0, 1, 2).copy_(state["h.2.w"][:2])
        return {
            "stacked": stacked,
            "padded": padded,
            "chosen": chosen,
            "like": like,
            "pad": torch.nn.functional.pad(state["h.1.ln"], (1, 2)),
            "stack": torch.stack([state[f"h.{i}.w"].T for i in range(3)]),
            "columns": state["h.2.w"][:, [1, 0, 3]],
            "flip": state["h.2.w"].flip(1)[:, :2],
            "repeat": state["h.2.w"].repeat_interleave(2, 0),
            "expand": state["h.2.ln"][None].expand(2, -1).reshape(16),
        }

    same(convert, tensors(w=(4, 8), ln=(8,)))


def test_arithmetic_of_torch_rounds_as_torch_does():
    def convert(state):
        narrow = state["h.1.a"].bfloat16()
        return {
            "sum": state["h.0.a"] + state["h.0.b"],
            "alpha": state["h.0.a"].add(2, alpha=2),
            "total": torch.stack([state["h.1.a"], state["h.2.a"]]).sum(0),
            "one": 1 + state["h.1.b"],
            "narrow": (narrow * 3.3).float(),
            "third": (narrow / 3).float(),
            "half": state["h.2.a"].half().mul_(0.1),
            "tensor": state["h.2.b"] * torch.tensor(0.1),
        }

    rules = same(convert, tensors(a=(9,), b=(9,)))
    assert "Sum(['h.0.a" in str(rules)


def fill(state):
    model = Small()
    model.bn.weight.data.copy_(state["h.0.ln"])
    model.bn.bias.data[:4] = state["h.1.ln"][:4]
    model.bn.bias.data[4:].copy_(state["h.2.ln"][4:])
    model.load_state_dict({"a.weight": state["h.0.w"].T}, strict=False)
    return model


def make(state):
    with torch.device("meta"):
        model = Small()
    model.a.weight = torch.nn.Parameter(state["h.0.w"].t())
    parts = {"weight": state["h.0.ln"], "bias": state["h.1.ln"], "running_mean": state["h.2.ln"]}
    more = {"running_var": torch.ones(8), "num_batches_tracked": torch.tensor(0)}
    model.bn.load_state_dict({**parts, **more}, assign=True)
    return model


@pytest.mark.parametrize("function", [fill, make])
def test_a_function_that_fills_a_model(function):
    same(function, tensors(w=(8, 10), ln=(8,)))


def test_a_model_that_is_given_is_not_filled():
    def load(state, model):
        model.a.weight.data.copy_(state["w"])
        return model

    model = Small()
    before = model.a.weight.clone()
    with pytest.raises(CheckpointError, match=r"bn\.weight: it has values that depend on no array"):
        Rules.record(load, {"w": torch.ones(10, 8)}, _ramp(model))
    assert torch.equal(model.a.weight, before)


def _ramp(model):
    with torch.no_grad():
        model.bn.weight.copy_(torch.arange(8.0))
    return model


def test_a_module_is_a_state():
    module = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    module[1].weight = module[0].weight
    rules = Rules.record(lambda m: {n: x.T for n, x in m.state_dict().items()}, module)
    assert "Drop('1.weight', tied_to='0.weight')" in str(rules)
    assert rules.inverse().inverse() == rules


BAD = {
    "torch.sort": lambda s: {"a": s["w"][s["w"].argsort()]},
    "torch.sum": lambda s: {} if s["w"].sum() > 0 else s,
    "torch.item": lambda s: {"a": torch.tensor([float(s["w"][0, 0])])},
    "torch.mm": lambda s: {"a": s["w"] @ s["w"].T},
    "torch.abs": lambda s: {"a": s["w"].abs()},
    "an operation": lambda s: {"a": s["w"].tolist()},
    "the cast of float32 to int32": lambda s: {"a": s["w"].to(torch.int32)},
    "a view as int32": lambda s: {"a": s["w"].view(torch.int32) + 1},
    "an index": lambda s: {"a": torch.ones(3)[s["w"].to(torch.float32).view(-1).bool()]},
}


@pytest.mark.parametrize("operation", BAD)
def test_values_of_tensors_are_refused_at_the_line(operation):
    with pytest.raises(CheckpointError) as error:
        Rules.record(BAD[operation], {"w": torch.ones(3, 3)})
    assert re.search(r"test_recording_frameworks\.py:\d+: ", str(error.value))
    assert operation in str(error.value) or operation == "an index"


def test_torch_is_as_before():
    kept = torch.from_numpy, torch.Tensor.numpy, torch.Tensor.__getitem__
    Rules.record(lambda s: {"w": s["w"].t()}, {"w": torch.ones(2, 3)})
    assert (torch.from_numpy, torch.Tensor.numpy, torch.Tensor.__getitem__) == kept
    assert "numpy" not in vars(torch.Tensor)

    rows = torch.tensor(0), torch.tensor(1)  # a class with `__getitem__` takes them for sequences
    x = torch.zeros(3, 4)
    x[rows, rows] = 1
    assert x.sum() == 2


# several frameworks


def test_from_torch_to_numpy_and_back():
    def convert(state):
        return {
            "numpy": np.concatenate([state["h.0.ln"].numpy(), np.asarray(state["h.1.ln"])]),
            "torch": torch.from_numpy(np.asarray(state["h.1.w"]).T),
            "tensor": torch.as_tensor(state["h.2.w"].numpy()[::2]),
            "list": torch.stack([torch.tensor(state["h.2.ln"].numpy())]),
        }

    same(convert, tensors(w=(4, 8), ln=(8,)))


@pytest.mark.nightly
def test_einops():
    rearrange = pytest.importorskip("einops").rearrange

    def convert(state):
        return {name: rearrange(w, "(h d) c -> h c d", h=2) for name, w in state.items()}

    assert len(same(convert, tensors(w=(4, 8)))) == 2
    assert len(same(convert, layers(w=(4, 8)))) == 2


# JAX


def test_arrays_of_jax():
    jnp = pytest.importorskip("jax.numpy")
    jax = pytest.importorskip("jax")

    def convert(state):
        out = {}
        for i in range(3):
            q, k, v = jnp.split(jnp.asarray(state[f"h.{i}.qkv"]), 3, axis=1)
            layer = out.setdefault("params", {}).setdefault(f"layers_{i}", {})
            layer["q"] = q.reshape(8, 2, 4)
            layer["k"] = jnp.array(np.asarray(k).T, dtype=jnp.bfloat16)
            layer["v"] = jnp.moveaxis(v.reshape(8, 2, 4), 1, 0)
            layer["ln"] = jnp.asarray(state[f"h.{i}.ln"]) + 1
        w = jnp.asarray(state["w"])
        out["stack"] = jnp.stack([state[f"h.{i}.qkv"].T for i in range(3)])
        out["reverse"] = w[::-1, ::2]
        out["half"] = w * 0.5
        out["put"] = jax.device_put(state["w"])
        out["got"] = jax.device_get(w).T
        out["numpy"] = jnp.vstack([jnp.swapaxes(state["w"], 0, 1), jnp.ones((2, 10))])
        return out

    rules = same(convert, {**layers(qkv=(8, 24), ln=(8,)), "w": array(10, 8)})
    assert "Offset('h.{i}.ln')" in str(rules)


def test_arrays_of_jax_that_the_function_makes():
    jnp = pytest.importorskip("jax.numpy")

    def convert(state):
        stacked = jnp.zeros((3, 8))
        for i in range(3):
            stacked = stacked.at[i].set(state[f"h.{i}.ln"])
        w = jnp.asarray(state["w"])
        return {
            "stacked": stacked,
            "pad": jnp.pad(w, ((0, 2), (0, 0)), constant_values=1),
            "set": jnp.zeros((12, 8)).at[1:11].set(w),
            "rows": w[jnp.array([2, 0, 1])],
        }

    rules = same(convert, {**layers(ln=(8,)), "w": array(10, 8)})
    assert "Stack('h.{n}.ln', 'stacked', over='n')" in str(rules)


def test_from_flax_to_torch_and_to_flax():
    nnx = pytest.importorskip("flax.nnx")
    jnp = pytest.importorskip("jax.numpy")
    traverse_util = pytest.importorskip("flax.traverse_util")

    def back(state):
        flat = traverse_util.flatten_dict(state["params"], sep=".")
        return {
            name.replace("kernel", "weight"): torch.from_numpy(np.asarray(w).T.copy())
            for name, w in flat.items()
        }

    state = {"params": {"l": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}}
    restores(same(back, state), fmapper.to_numpy(fmapper.state(state)))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.l = nnx.Linear(2, 3, rngs=rngs)
            self.dropout = nnx.Dropout(0.1)

    def make(state):
        model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
        graph, arrays = nnx.split(model)
        arrays["l"]["kernel"].set_value(jnp.asarray(state["weight"].T))
        arrays["l"]["bias"].set_value(jnp.asarray(state["bias"]))
        return nnx.merge(graph, arrays)

    def load(state, model):
        model.l.kernel[...] = jnp.asarray(state["weight"].T)
        model.l.bias[...] = state["bias"]
        return model

    given = {"weight": array(3, 2), "bias": array(3)}
    model = Model(nnx.Rngs(0))
    bias = model.l.bias[...]
    Rules.record(load, given, model)
    assert (model.l.bias[...] == bias).all()
    assert len(same(make, given)) == len(same(load, given, model)) == 2


def test_values_of_tracers_are_refused_at_the_line():
    jnp = pytest.importorskip("jax.numpy")
    bad = {
        "sort of JAX": lambda s: {"a": jnp.asarray(s["w"])[jnp.argsort(jnp.asarray(s["w"])[0])]},
        "truth value": lambda s: s if jnp.asarray(s["w"]).sum() > 0 else {},
        "dot_general of JAX": lambda s: {"a": jnp.asarray(s["w"]) @ jnp.asarray(s["w"]).T},
        "abs of JAX": lambda s: {"a": jnp.abs(s["w"])},
    }
    for operation, function in bad.items():
        with pytest.raises(CheckpointError) as error:
            Rules.record(function, {"w": array(3, 3)})
        assert re.search(r"test_recording_frameworks\.py:\d+: ", str(error.value))
        assert operation in str(error.value)


# tables of other projects


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of what tunix imports
def test_tables_of_tunix_and_maxtext():
    pytest.importorskip("transformers")
    pytest.importorskip("jax")
    from models import foreign_tables

    if not foreign_tables.find_packages():
        pytest.skip("TWINS_PACKAGES has no google-tunix and maxtext")
    tables = [*foreign_tables.tunix(), *foreign_tables.maxtext()]
    assert len(tables) == 20
    for table in tables:
        restores(same(table.function, table.state), table.state)
