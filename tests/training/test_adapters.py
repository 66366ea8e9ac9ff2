"""LoRA adapters of PEFT, in every framework."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fmapper
from fmapper import CheckpointError, StructureMismatchError, load_adapter, save_adapter
from fmapper.checkpoints import (
    AddConstant,
    Cast,
    Concatenate,
    Drop,
    Offset,
    Rename,
    Reshape,
    Rules,
    Scale,
    Split,
    Stack,
    Transpose,
)
from fmapper.training import LoraAdapter, LowRank

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy


class Net(torch.nn.Module):
    """One layer of each kind that adapters are for."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(11, 6)
        self.q, self.k = torch.nn.Linear(6, 5), torch.nn.Linear(5, 6)
        self.conv = torch.nn.Conv2d(2, 3, 3, padding=1)
        self.score = torch.nn.Linear(6, 2)

    def forward(self, ids):
        h = self.k(torch.tanh(self.q(self.emb(ids))))
        return self.score(h) + self.conv(h.reshape(h.shape[0], 2, -1, 6)).mean()


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0], [9, 10, 1, 1]])
DRAW = np.random.default_rng(0)


def draw(*shape):
    return DRAW.normal(size=shape).astype(np.float32)


def write(folder, arrays, **settings):
    """Writes a folder as PEFT does."""
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    named = {f"base_model.model.{name}": array for name, array in arrays.items()}
    fmapper.save(named, folder / "adapter_model.safetensors")
    return folder


def pair(name="q", rank=2, inner=6, outer=5):
    a, b = draw(rank, inner), draw(outer, rank)
    return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}


def test_an_update_has_the_scale_of_its_layer(tmp_path):
    arrays = pair() | pair("k", 3, 5, 6)
    how = {"rank_pattern": {"k": 3}, "alpha_pattern": {"k": 5}, "use_rslora": True}
    adapter = load_adapter(write(tmp_path, arrays, **how))
    merged = adapter({"q.weight": np.zeros((5, 6)), "k.weight": np.zeros((6, 5))})
    q = arrays["q.lora_B.weight"] @ arrays["q.lora_A.weight"] * 3 / np.sqrt(2)
    k = arrays["k.lora_B.weight"] @ arrays["k.lora_A.weight"] * 5 / np.sqrt(3)
    assert np.allclose(merged["q.weight"], q, atol=1e-6)
    assert np.allclose(merged["k.weight"], k, atol=1e-6)


def test_a_model_has_the_same_output_in_torch_and_under_jit(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(6, 5))
    x = torch.from_numpy(draw(3, 6))
    adapter = load_adapter(write(tmp_path, pair("0")))
    there = fmapper.to_torch(adapter)
    want = torch.func.functional_call(net, there(dict(net.named_parameters())), (x,))
    assert torch.allclose(there.merge(net)(x), want)
    model = fmapper.convert(net, "jax", (x,), check=False)
    here = fmapper.to_jax(adapter)
    forward = jax.jit(lambda adapter: model.replace(params=adapter(model.params))(x.numpy()))
    assert np.allclose(forward(here), want.detach(), atol=1e-5)
    gradient = jax.grad(lambda adapter: forward(adapter).sum())(here)
    assert sorted(fmapper.state(gradient)) == ["updates.0.weight.a", "updates.0.weight.b"]


def _dot(x, y, *axes):
    return jax.lax.dot_general(x, y, (axes, ((), ())))


PRODUCTS = {
    "matmul": ("w", lambda w, x: x @ w, None),
    "from_the_left": ("w", lambda w, x: (w @ x.T).T, None),
    "linear": ("w", lambda w, x: _dot(x, w, (1,), (1,)), None),
    "einsum": ("w", lambda w, x: jnp.einsum("bsi,io->obs", x[None], w), None),
    "bfloat16": ("w", lambda w, x: x.astype(w.dtype) @ w, None),
    "transposed": ("k", lambda k, x: x @ k, [Transpose("k")]),
    "heads": (
        "k",
        lambda k, x: jnp.einsum("bi,ihd->bhd", x, k).reshape(3, -1),
        [Transpose("k"), Reshape("k", (64, 8, 8), back=(64, 64))],
    ),
    "out_of_heads": (
        "k",
        lambda k, x: jnp.einsum("bhd,hdo->bo", x.reshape(3, 8, 8), k),
        [Transpose("k"), Reshape("k", (8, 8, 64), back=(64, 64))],
    ),
    "flax": (
        "layers.0.kernel",
        lambda k, x: fmapper.load_state(_sequence(), {"layers.0.kernel": k})(x),
        [Transpose("layers.0.kernel")],
    ),
}  # fmt: skip


def _sequence():
    nnx = pytest.importorskip("flax.nnx")
    return nnx.Sequential(nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0)))


@pytest.mark.daily_cases("from_the_left", "heads")
@pytest.mark.parametrize("case", PRODUCTS)
def test_a_product_is_with_a_matrix_and_with_its_update(case):
    name, function, rules = PRODUCTS[case]
    dtype = jnp.bfloat16 if case == "bfloat16" else jnp.float32
    adapter = LoraAdapter({"w": LowRank(draw(2, 64), draw(64, 2), scale=2.0)})
    adapter, weight = fmapper.to_jax(adapter), jnp.asarray(draw(64, 64), dtype)
    if rules is not None:
        adapter = adapter.place(Rules([Rename("w", name), *rules]))
        weight = weight.reshape(rules[-1].shape if case.endswith("heads") else (64, 64))
    x = jnp.asarray(draw(3, 64))
    run = lambda params, x: (function(params[name], x) ** 2).sum()  # noqa: E731  # no cancellation
    apart = jax.value_and_grad(lambda a, w, x: a.apply(run, {name: w}, x))
    step = jax.jit(apart).lower(adapter, weight, x).compile()
    merged = jax.value_and_grad(lambda a: run(a({name: weight}), x))(adapter)
    rounding = 0.05 if case == "bfloat16" else 1e-4  # merging rounds
    leaves = zip(jax.tree.leaves(step(adapter, weight, x)), jax.tree.leaves(merged), strict=True)
    assert all(np.allclose(a, b, atol=rounding * np.abs(b).max()) for a, b in leaves)
    if case != "bfloat16":  # of which XLA for CPUs makes a float32
        assert step.memory_analysis().temp_size_in_bytes < weight.nbytes / 2


MERGED = {
    "a_sum_with_a_number": lambda p, x: x @ (1.0 + p["l"] @ p["r"]),
    "half_of_the_rows": lambda p, x: jnp.einsum(
        "bij,ihj->bh", x.reshape(3, 2, 3), p["w"].reshape(2, 6, 3)
    ),
    "other_rows": lambda p, x: x @ p["w"].reshape(4, 9).T.reshape(6, 6),
    "a_batch": lambda p, x: jnp.einsum("bi,bij->bj", x, jnp.stack([p["w"]] * 3)),
    "a_sum_of_activations": lambda p, x: (x + (x @ p["l"]) @ p["r"]) @ p["w"],
    "a_penalty": lambda p, x: x.sum() + (p["w"] ** 2).sum(),
    "a_scan": lambda p, x: jax.lax.scan(lambda c, row: (c, row @ p["w"]), 0.0, x)[1],
}


@pytest.mark.daily_cases("a_sum_with_a_number", "other_rows")
@pytest.mark.parametrize("case", MERGED)
def test_what_is_no_product_with_all_rows_is_merged(case):
    adapter = fmapper.to_jax(LoraAdapter({"w": LowRank(draw(2, 6), draw(6, 2), scale=2.0)}))
    params = fmapper.to_jax({"w": draw(6, 6), "l": draw(6, 2), "r": draw(2, 6)})
    x = jnp.asarray(draw(3, 6))
    want = MERGED[case](adapter(params), x)
    made = adapter.apply(MERGED[case], params, x)
    assert np.allclose(made, want, atol=1e-5 * np.abs(want).max())


def test_a_model_in_place_of_its_parameters_is_refused():
    adapter = LoraAdapter({"0.weight": LowRank(draw(2, 6), draw(5, 2), scale=2.0)})
    with pytest.raises(StructureMismatchError, match=r"dict\(module.named_parameters\(\)\)"):
        fmapper.to_torch(adapter)(torch.nn.Sequential(torch.nn.Linear(6, 5)))


@pytest.mark.nightly
def test_a_model_multiplies_with_updates_of_all_its_layers():
    """Whatever they are, with the numbers of merged weights."""
    net = Net()
    draws = {"q": (5, 6), "emb": (6, 11), "score": (2, 6)}
    updates = {
        f"{name}.weight": LowRank(
            draw(2, width), draw(height, 2), scale=2.0, is_transposed=name == "emb"
        )
        for name, (height, width) in draws.items()
    }
    updates["conv.weight"] = LowRank(draw(2, 2, 3, 3), draw(3, 2, 1, 1), scale=2.0)
    adapter = fmapper.to_jax(LoraAdapter(updates))
    model = fmapper.convert(net.eval(), "jax", (IDS,), check=False)

    loss = lambda params: (model.replace(params=params)(IDS.numpy()) ** 2).sum()  # noqa: E731
    apart = jax.value_and_grad(lambda a: a.apply(loss, model.params))(adapter)
    merged = jax.value_and_grad(lambda a: loss(a(model.params)))(adapter)
    for a, b in zip(jax.tree.leaves(apart), jax.tree.leaves(merged), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.nightly
def test_training_an_adapter_takes_the_memory_of_its_base():
    """And four times the adapter, and a layer: no merged weights, and no gradients of them."""
    optax = pytest.importorskip("optax")
    count, size = 6, 512
    layers = [torch.nn.Linear(size, size, bias=False) for _ in range(count)]
    net = torch.nn.Sequential(*[x for layer in layers for x in (layer, torch.nn.Tanh())])
    x = torch.from_numpy(draw(2, size))
    model = fmapper.convert(net, "jax", (x,), check=False)
    names = [name for name, _ in net.named_parameters()]
    updates = {name: LowRank(draw(4, size), draw(size, 4), scale=2.0) for name in names}
    adapter = fmapper.to_jax(LoraAdapter(updates))
    adam = optax.adam(1e-3)

    def step(adapter, state, model, x):
        run = lambda params, x: (model.replace(params=params)(x) ** 2).mean()  # noqa: E731
        loss = lambda a: a.apply(run, model.params, x)  # noqa: E731
        changes, state = adam.update(jax.grad(loss)(adapter), state)
        return optax.apply_updates(adapter, changes), state

    given = adapter, adam.init(adapter), model, jnp.asarray(x.numpy())
    used = jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile().memory_analysis()
    peak = used.argument_size_in_bytes + used.temp_size_in_bytes
    base, own = (sum(x.nbytes for x in jax.tree.leaves(t)) for t in (model.params, adapter))
    assert peak <= base + 4 * own + 4 * size**2


def test_merging_is_undone_to_rounding(tmp_path):
    adapter = load_adapter(write(tmp_path, pair()))
    weights = {"q.weight": draw(5, 6), "other": draw(2)}
    merged = adapter(weights)
    assert not np.allclose(merged["q.weight"], weights["q.weight"])
    assert np.allclose(adapter.unmerge(merged)["q.weight"], weights["q.weight"], atol=1e-6)
    assert merged["other"] is weights["other"]


@pytest.mark.parametrize("name", ["emb", "head"])
def test_an_update_of_a_tied_weight_is_in_all_its_places(name):
    net = torch.nn.ModuleDict({"emb": torch.nn.Embedding(5, 6), "head": torch.nn.Linear(6, 5)})
    net["head"].weight = net["emb"].weight
    update = LowRank(draw(2, 6), draw(5, 2), scale=0.5)
    merged = LoraAdapter({f"{name}.weight": update}).merge(net)
    assert merged["head"].weight is merged["emb"].weight
    change = (merged["emb"].weight - net["emb"].weight).detach().numpy()
    assert np.allclose(change, 0.5 * update.b @ update.a, atol=1e-6)


def test_what_cannot_be_undone_is_refused(tmp_path):
    dora = pair() | {"q.lora_magnitude_vector": draw(5)}
    adapter = load_adapter(write(tmp_path, dora, use_dora=True))
    with pytest.raises(StructureMismatchError, match=r"q\.weight: cannot be unmerged"):
        adapter.unmerge({"q.weight": draw(5, 6)})


def test_rows_of_a_dora_have_its_magnitudes(tmp_path):
    size = np.abs(draw(5))
    dora = pair() | {"q.lora_magnitude_vector": size}
    adapter = load_adapter(write(tmp_path, dora, use_dora=True))
    merged = adapter({"q.weight": draw(5, 6)})["q.weight"]
    assert np.allclose(np.linalg.norm(merged, axis=1), size, rtol=1e-5)


def test_a_weight_keeps_its_dtype(tmp_path):
    adapter = fmapper.to_torch(load_adapter(write(tmp_path, pair())))
    merged = adapter({"q.weight": torch.zeros(5, 6, dtype=torch.bfloat16)})
    assert merged["q.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("to", [fmapper.to_numpy, fmapper.to_torch, fmapper.to_jax])
@pytest.mark.parametrize("halves", [("float32", "bfloat16"), ("float16", "bfloat16")])
def test_a_weight_is_not_rounded_to_the_dtype_of_its_update(to, halves):
    weight, half = halves
    w, a, b = draw(5, 6).astype(weight), *(draw(*s).astype(half) for s in ((2, 6), (5, 2)))
    adapter = to(LoraAdapter({"w": LowRank(a, b, scale=2.0)}))
    made = fmapper.to_numpy(adapter({"w": to(w)})["w"])
    want = w.astype("float64") + 2 * b.astype("float64") @ a.astype("float64")
    assert made.dtype == weight
    assert np.allclose(made, want, rtol=1e-6 if weight == "float32" else 1e-3, atol=1e-6)


def test_an_adapter_of_another_framework(tmp_path):
    adapter = load_adapter(write(tmp_path, pair()))
    weights = {"q.weight": torch.zeros(5, 6)}
    made = adapter(weights)["q.weight"]  # that of NumPy goes where the weights are
    want = adapter({"q.weight": np.zeros((5, 6), np.float32)})["q.weight"]
    assert np.allclose(made, want, atol=1e-6)
    with pytest.raises(StructureMismatchError, match=r"Pass fmapper.to_torch\(adapter\)"):
        fmapper.to_jax(adapter)(weights)
    with pytest.raises(StructureMismatchError, match="takes no LoRA adapter"):
        adapter.unmerge(torch.nn.Linear(6, 5))


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({}, "q.weight: the model has no such weight"),
        ({"q.weight": np.zeros((6, 5))}, r"for a weight of shape \(5, 6\), not \(6, 5\)"),
    ],
)
def test_an_update_that_finds_no_weight_raises(tmp_path, params, what):
    adapter = load_adapter(write(tmp_path, pair()))
    with pytest.raises(StructureMismatchError, match=what):
        adapter(params)
    with pytest.raises(StructureMismatchError):
        adapter.merge(dict(params))


HEADS = Rules([
    Rename("layers.{i}.{p}.weight", "layers.{i}.{p}.kernel"),
    Transpose("layers.{i}.{p}.kernel"),
    Reshape("layers.{i}.{p}.kernel", (6, 2, 2), back=(6, 4)),
    Concatenate(["layers.{i}.q.kernel", "layers.{i}.k.kernel"], "layers.{i}.qk.kernel", axis=1),
    Cast("layers.{i}.qk.kernel", "bfloat16", back="float32"),
    Stack("layers.{i}.qk.kernel", "layers.qk.kernel", over="i"),
    Rename("head.{x}", "out.{x}"),
])  # fmt: skip
BASE = {f"layers.{i}.{p}.weight": draw(4, 6) for i in range(2) for p in "qk"} | {
    "head.weight": draw(3, 6),
    "head.bias": draw(3),
}


@pytest.mark.daily_cases("replaced")
@pytest.mark.parametrize("kind", ["plain", "dora", "replaced"])
def test_an_adapter_applies_to_a_twin_by_rules(tmp_path, kind):
    """One that stacks layers, fuses projections and has heads: as its base, under jit."""
    arrays = pair("layers.0.q", outer=4) | pair("layers.1.k", outer=4) | pair("head", outer=3)
    if kind == "dora":
        for name, size in (("layers.0.q", 4), ("layers.1.k", 4), ("head", 3)):
            arrays[f"{name}.lora_magnitude_vector"] = np.abs(draw(size))
    if kind == "replaced":
        arrays |= {"head.bias": draw(3), "layers.0.k.modules_to_save.weight": draw(4, 6)}
    adapter = load_adapter(write(tmp_path, arrays, use_dora=kind == "dora"))
    exact = Rules(rule for rule in HEADS if not isinstance(rule, Cast))
    twin = {name: array.read() for name, array in exact.apply(BASE).items()}
    placed = adapter.place(HEADS)
    want = {name: array.read() for name, array in exact.apply(adapter(BASE)).items()}
    for to in (fmapper.to_numpy, fmapper.to_torch, fmapper.to_jax):
        merged = fmapper.to_numpy(to(placed)(to(twin)))
        assert all(np.allclose(merged[name], want[name], atol=1e-5) for name in want)
    if kind == "replaced":
        return
    gradient = jax.jit(jax.grad(lambda a, p: sum((x**3).sum() for x in a(p).values())))
    got = gradient(fmapper.to_jax(placed), fmapper.to_jax(twin))
    other = gradient(fmapper.to_jax(adapter), fmapper.to_jax(BASE))
    for name, array in fmapper.state(other).items():
        assert np.allclose(fmapper.state(got)[name], array, rtol=1e-4, atol=1e-4)
    if kind == "plain":
        before = placed.unmerge(placed(twin))
        assert placed(twin)["out.bias"] is twin["out.bias"]
        assert all(np.allclose(before[name], twin[name], atol=1e-6) for name in twin)


@pytest.mark.parametrize(
    "rule",
    [
        Scale("q.weight", 3),
        Offset("q.weight", 1),
        Rename("q.weight", "p.weight"),
        Reshape("q.weight", (30,), back=(5, 6)),
        Split("q.weight", ["q.upper", "q.lower"], sizes=[2, 3]),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_rules_do_to_an_update_what_they_do_to_its_weight(tmp_path, rule):
    dora = pair() | {"q.lora_magnitude_vector": np.abs(draw(5))}
    adapter = load_adapter(write(tmp_path, dora, use_dora=True))
    rules, base = Rules([rule]), {"q.weight": draw(5, 6)}
    carry = lambda arrays: {name: array.read() for name, array in rules.apply(arrays).items()}  # noqa: E731
    twin, want = carry(base), carry(adapter(base))
    for to in (fmapper.to_numpy, fmapper.to_torch, fmapper.to_jax):
        got = fmapper.to_numpy(to(adapter.place(rules))(to(twin)))
        assert got.keys() == want.keys()
        assert all(np.allclose(got[name], want[name], atol=1e-5) for name in want)


def test_an_adapter_is_merged_into_a_module_that_somebody_wrote(tmp_path):
    """Of which only the weights that it is for are moved: keys of JAX are of no other framework."""
    nnx = pytest.importorskip("flax.nnx")

    class Twin(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0), deterministic=True)

        def __call__(self, x):
            return self.drop(self.up(x))

    twin = Twin()
    rules = Rules([Rename("q.{x}", "up.{x}"), Rename("up.weight", "up.kernel")])
    adapter = load_adapter(write(tmp_path, pair()))
    placed = adapter.place(rules + Rules([Transpose("up.kernel"), Scale("up.kernel", 0.5)]))
    update = adapter({"q.weight": np.zeros((5, 6), np.float32)})["q.weight"]
    for adapter in (placed, fmapper.to_jax(placed)):
        change = adapter.merge(twin).up.kernel[...] - twin.up.kernel[...]
        assert np.allclose(change, 0.5 * update.T, atol=1e-6)


def test_an_update_that_rules_would_lose_raises(tmp_path):
    adapter = load_adapter(write(tmp_path, pair()))
    base = {"q.weight": draw(5, 6)}
    rules = Rules([Drop("q.weight")])
    with pytest.raises(CheckpointError, match="inverse"):
        adapter.place(rules)(base)
    join = Concatenate(["q.weight", "q.pad"], "w", sizes=[5, 1])
    padded = Rules([AddConstant("q.pad", (1, 6), 0.0), join])
    with pytest.raises(StructureMismatchError, match="only arrays of the model"):
        adapter.place(padded)({"w": draw(6, 6)})


def test_a_weight_that_the_twin_lacks_raises(tmp_path):
    adapter = load_adapter(write(tmp_path, pair()))
    with pytest.raises(StructureMismatchError, match=r"q\.weight: .* no such weight"):
        adapter.place(Rules([Rename("k.weight", "k")]))({"k": draw(5, 6)})


def test_a_weight_that_is_replaced_gets_its_update(tmp_path):
    """As an embedding that was resized, whose base PEFT saves with the adapter."""
    arrays = pair() | {"q.base_layer.weight": draw(5, 6)}
    merged = load_adapter(write(tmp_path, arrays))({"q.weight": draw(5, 6)})
    update = 1.5 * arrays["q.lora_B.weight"] @ arrays["q.lora_A.weight"]
    assert np.allclose(merged["q.weight"], arrays["q.base_layer.weight"] + update, atol=1e-6)


def test_a_pattern_matches_as_in_peft(tmp_path):
    """From the begin of a path where it says so, and from any part of it otherwise."""
    arrays = pair("a.q") | pair("q")
    how = {"alpha_pattern": {"^q": 8, "a.q": 6}}
    scales = {n: u.scale for n, u in load_adapter(write(tmp_path, arrays, **how)).updates.items()}
    assert scales == {"a.q.weight": 3, "q.weight": 4}


@pytest.mark.parametrize("excluded", [["k"], r".*k"])
def test_modules_that_are_excluded_have_no_weights(tmp_path, excluded):
    """PEFT writes `all-linear` as all linear layers, with those that are excluded."""
    how = {"target_modules": ["q", "layers.0.k"], "exclude_modules": excluded}
    assert load_adapter(write(tmp_path, pair(), **how)).updates.keys() == {"q.weight"}


def test_an_update_that_is_added_is_among_the_targets_that_are_written(tmp_path):
    """Or PEFT would leave it out."""
    how = {"target_modules": ["q"], "exclude_modules": ["k"]}
    adapter = load_adapter(write(tmp_path, pair(), **how))
    more = {**adapter.updates, "k.weight": LowRank(draw(2, 5), draw(6, 2), scale=1.5)}
    save_adapter(LoraAdapter(more, settings=adapter.settings), tmp_path / "more")
    settings = json.loads((tmp_path / "more" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["k", "q"]
    assert settings["exclude_modules"] is None


# The Llama 3 of Tunix, and of MaxText with scanned layers: two layers of width 16, with four heads
# and two of keys. What they have of each weight, with the update that qwix puts beside the first,
# and that MaxText's own adapters hold for the second.
TUNIX = {
    "weights": Rules([
        Rename("model.layers.{i}.self_attn.{p}.weight", "layers.{i}.attn.{p}.w"),
        Rename("model.layers.{i}.mlp.{p}.weight", "layers.{i}.mlp.{p}.kernel"),
        Transpose(["layers.{i}.attn.{p}.w", "layers.{i}.mlp.{p}.kernel"]),
        Reshape("layers.{i}.attn.q_proj.w", (16, 4, 4), back=(16, 16)),
        Reshape([f"layers.{{i}}.attn.{p}_proj.w" for p in "kv"], (16, 2, 4), back=(16, 8)),
        Reshape("layers.{i}.attn.o_proj.w", (4, 4, 16), back=(16, 16)),
    ]),
    "adapter": Rules([
        Rename(
            "updates.model.layers.{i}.self_attn.{p}.weight.{m}", "layers.{i}.attn.{p}.w_lora_{m}"
        ),
        Rename("updates.model.layers.{i}.mlp.{p}.weight.{m}", "layers.{i}.mlp.{p}.kernel_lora_{m}"),
        Transpose(["layers.{i}.attn.{p}.w_lora_{m}", "layers.{i}.mlp.{p}.kernel_lora_{m}"]),
        Reshape("layers.{i}.attn.q_proj.w_lora_b", (3, 4, 4), back=(3, 16)),
        Reshape([f"layers.{{i}}.attn.{p}_proj.w_lora_b" for p in "kv"], (3, 2, 4), back=(3, 8)),
        Reshape("layers.{i}.attn.o_proj.w_lora_a", (4, 4, 3), back=(16, 3)),
    ]),
    "shapes": {
        f"layers.{i}.{name}_lora_{m}": shape
        for i in range(2)
        for name, shapes in {
            "attn.q_proj.w": ((16, 3), (3, 4, 4)),
            "attn.k_proj.w": ((16, 3), (3, 2, 4)),
            "attn.v_proj.w": ((16, 3), (3, 2, 4)),
            "attn.o_proj.w": ((4, 4, 3), (3, 16)),
            "mlp.gate_proj.kernel": ((16, 3), (3, 24)),
            "mlp.down_proj.kernel": ((24, 3), (3, 16)),
        }.items()
        for m, shape in zip("ab", shapes, strict=True)
    },
    "product": lambda a, b: np.tensordot(a, b, 1),
}  # fmt: skip


def to_maxtext(begin, end):
    """Rules of what MaxText does to a weight, and to the second matrix of its update."""
    heads = {"query": (begin, 2, 4, 4), "key": (begin, 2, 2, 4), "value": (begin, 2, 2, 4)}
    flat = {"query": (begin, 2, 16), "key": (begin, 2, 8), "value": (begin, 2, 8)}
    rules = [
        Reshape(f"decoder.layers.self_attention.{p}.{end}", heads[p], back=flat[p]) for p in heads
    ]
    for p in ("query", "key"):  # whose halves for rotation alternate there
        name, shape = f"decoder.layers.self_attention.{p}.{end}", heads[p]
        halves = (*shape[:-1], 2, 2)
        rules += [
            Reshape(name, halves, back=shape),
            Transpose(name, (0, 1, 2, 4, 3)),
            Reshape(name, shape, back=halves),
        ]
    return [*rules, Scale(f"decoder.layers.self_attention.query.{end}", 0.5)]  # of sqrt(4)


MODULES = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
MAXTEXT = {
    "weights": Rules([
        Rename({
            f"model.layers.{{i}}.self_attn.{p}.weight": f"decoder.{{i}}.{q}.kernel"
            for p, q in MODULES.items()
        }),
        Transpose("decoder.{i}.{p}.kernel"),
        Stack(
            "decoder.{i}.{p}.kernel", "decoder.layers.self_attention.{p}.kernel", over="i", axis=1
        ),
        *to_maxtext(16, "kernel"),
    ]),
    "adapter": Rules([
        Rename({
            f"updates.model.layers.{{i}}.self_attn.{p}.weight.{{m}}": f"decoder.{{i}}.{q}.{{m}}"
            for p, q in MODULES.items()
        }),
        Transpose("decoder.{i}.{p}.{m}"),
        Stack(
            "decoder.{i}.{p}.{m}", "decoder.layers.self_attention.{p}.lora_{m}.kernel",
            over="i", axis=1,
        ),
        *to_maxtext(3, "lora_b.kernel"),
    ]),
    "shapes": {
        f"decoder.layers.self_attention.{name}.lora_{m}.kernel": shape
        for name, shapes in {
            "query": ((16, 2, 3), (3, 2, 4, 4)),
            "key": ((16, 2, 3), (3, 2, 2, 4)),
            "value": ((16, 2, 3), (3, 2, 2, 4)),
        }.items()
        for m, shape in zip("ab", shapes, strict=True)
    },
    "product": lambda a, b: np.einsum("ilr,rl...->il...", a, b),
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "modules"),
    [(TUNIX, "qkvo"), (MAXTEXT, "qkv")],
    ids=["tunix", "maxtext"],
)
def test_names_of_other_libraries_are_a_matter_of_rules(tmp_path, table, modules):
    """Tables carry an adapter to their matrices, whose product is the update there; and back."""
    sizes = {"q": (16, 16), "k": (8, 16), "v": (8, 16), "o": (16, 16)}
    sizes = {f"self_attn.{p}_proj": sizes[p] for p in modules}
    sizes |= {"mlp.gate_proj": (24, 16), "mlp.down_proj": (16, 24)} if table is TUNIX else {}
    arrays = {}
    for i in range(2):
        for name, (outer, inner) in sizes.items():
            arrays |= pair(f"model.layers.{i}.{name}", 3, inner, outer)
    adapter = load_adapter(write(tmp_path, arrays, r=3, lora_alpha=6))
    theirs = table["adapter"].apply(fmapper.state(adapter))
    theirs = {name: array.read() for name, array in theirs.items()}
    assert {name: array.shape for name, array in theirs.items()} == table["shapes"]
    updates = adapter({name: np.zeros(u.shape) for name, u in adapter.updates.items()})
    for name, array in table["weights"].apply(updates).items():
        a, b = (
            theirs[f"{name}_lora_{m}"] if table is TUNIX
            else theirs[name.replace("kernel", f"lora_{m}.kernel")]
            for m in "ab"
        )  # fmt: skip
        assert np.allclose(2 * table["product"](a, b), array.read(), atol=1e-5)
    trained = {name: array + 1 for name, array in theirs.items()}
    back = {n: array.read() for n, array in table["adapter"].inverse().apply(trained).items()}
    again = table["adapter"].apply(fmapper.state(fmapper.load_state(adapter, back)))
    assert all(np.allclose(again[name].read(), trained[name], atol=1e-6) for name in trained)


def test_a_structured_flax_model_holds_an_adapter(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 6))
    x = torch.from_numpy(draw(3, 6))
    model = fmapper.convert(net, "flax", (x,), structure=True)
    adapter = fmapper.to_jax(load_adapter(write(tmp_path, pair("0"))))
    want = adapter.merge(model, source=True)(x.numpy())
    with_lora = adapter.attach(model)
    assert np.allclose(with_lora(x.numpy()), want, atol=1e-5)
    assert len(jax.tree.leaves(nnx.state(with_lora, nnx.LoRAParam))) == 2
    again = adapter.detach(with_lora)
    assert np.allclose(again.updates["0.weight"].b, adapter.updates["0.weight"].b, atol=1e-6)
    tuned = jax.jit(lambda a: a.merge(model, source=True)(x.numpy()))(adapter)
    assert np.allclose(tuned, want, atol=1e-5)
    with pytest.raises(StructureMismatchError, match="pass the result of attach"):
        adapter.detach(model)
    with pytest.raises(StructureMismatchError, match="around a linear layer, which this is not"):
        LoraAdapter(adapter.updates, {"2.bias": draw(6)}).attach(model)
    with pytest.raises(StructureMismatchError, match="cannot hold a LoRA adapter in its layers"):
        adapter.attach(fmapper.convert(net, "jax", (x,)))


A = {"q.lora_A.weight": draw(2, 6)}
BAD = {
    "one half": (A, {}, "q has only lora_A"),
    "another half": ({"q.lora_B.weight": draw(5, 2)}, {}, "q has only lora_B"),
    "ranks": ({**A, "q.lora_B.weight": draw(5, 3)}, {}, "do not fit together"),
    "rank of the configuration": (pair(), {"r": 4}, "has rank 2, and the configuration says 4"),
    "no magnitude": (pair(), {"use_dora": True}, "has no magnitude"),
    "magnitude": ({**pair(), "q.lora_magnitude_vector": draw(5)}, {}, "has a magnitude"),
    "target": (pair(), {"target_modules": ["q", "v"]}, "the modules 'v', of which"),
    "pattern": (pair(), {"target_modules": r".*\.v"}, "of which there are no weights"),
    "no target": (pair() | pair("k"), {"target_modules": ["q"]}, "weights for 'k', which the"),
    "saved": (pair(), {"modules_to_save": ["score"]}, "the modules 'score', of which"),
    "saved of another kind": (pair(), {"modules_to_save": "score"}, "must be positive numbers"),
    "twice": ({"q.weight": draw(2), "q.modules_to_save.weight": draw(2)}, {}, "twice"),
    "slow pattern": (pair(), {"target_modules": "(q+)+"}, "a pattern that may take long"),
    "no pattern": (pair(), {"rank_pattern": {"q[": 2}}, "is not a regular expression"),
    "no alpha": (pair(), {"lora_alpha": None}, "must be positive numbers"),
    "no table": (pair(), {"rank_pattern": [2]}, "must be positive numbers"),
    "no number": (pair(), {"alpha_pattern": {"q": "3"}}, "must be positive numbers"),
    "no texts": (pair(), {"target_modules": [3]}, "must be positive numbers"),
    "no names": (pair(), {"exclude_modules": {"q": 1}}, "must be positive numbers"),
    "kind": (pair(), {"peft_type": "IA3"}, "of kind 'IA3', not LORA"),
    "qalora": (pair(), {"use_qalora": True}, "adapters with use_qalora are not read"),
    "pissa": (pair(), {"init_lora_weights": "pissa_niter_4"}, "PEFT changes the weights of the ba"),
    "unknown part": ({**pair(), "q.lora_C.weight": draw(2)}, {}, "not part of a LoRA"),
}


@pytest.mark.parametrize(("arrays", "settings", "what"), BAD.values(), ids=BAD)
def test_a_folder_that_is_not_whole_raises(tmp_path, arrays, settings, what):
    with pytest.raises(CheckpointError, match=what):
        load_adapter(write(tmp_path, arrays, **settings))


@pytest.mark.daily_cases("100")
@pytest.mark.parametrize("count", [100, 1_000])
def test_no_key_of_a_folder_is_lost(tmp_path, count):
    """Whatever the names are: each is in the adapter, or the folder is refused."""
    words = ["q", "k", "lora_A", "lora_B", "weight", "bias", "lora_embedding_A", "modules_to_save"]
    choose = np.random.default_rng(1)
    for at in range(count):
        names = {".".join(choose.choice(words, choose.integers(1, 5))) for _ in range(4)}
        folder = tmp_path / str(at)
        folder.mkdir()
        write(folder, {name: draw(2, 2) for name in names})
        try:
            adapter = load_adapter(folder)
        except CheckpointError:
            continue
        assert 2 * len(adapter.updates) + len(adapter.replaced) == len(names)
        save_adapter(adapter, folder / "again")
        again = load_adapter(folder / "again")
        assert fmapper.state(again).keys() == fmapper.state(adapter).keys()


def test_an_adapter_is_written_as_it_was_read(tmp_path):
    arrays = (
        pair() | pair("k", 3, 5, 6) | {"score.weight": draw(2, 6), "q.base_layer.bias": draw(5)}
    )
    how = {"rank_pattern": {"k": 3}, "base_model_name_or_path": "mine"}
    (tmp_path / "a").mkdir()
    adapter = load_adapter(write(tmp_path / "a", arrays, **how))
    save_adapter(fmapper.to_jax(adapter), tmp_path / "b")
    first, second = (fmapper.load(tmp_path / f / "adapter_model.safetensors") for f in "ab")
    assert first.keys() == second.keys()
    again = load_adapter(tmp_path / "b")
    assert fmapper.state(again).keys() == fmapper.state(adapter).keys()
    assert [u.scale for u in again.updates.values()] == [u.scale for u in adapter.updates.values()]
    assert json.loads((tmp_path / "b" / "adapter_config.json").read_text())["r"] in (2, 3)
    assert json.loads(again.settings)["base_model_name_or_path"] == "mine"


KINDS = {
    "linear": {"target_modules": ["q", "k"]},
    "patterns": {
        "target_modules": ["q", "k"],
        "use_rslora": True,
        "rank_pattern": {"q": 3},
        "alpha_pattern": {"k": 5},
    },
    "embedding": {"target_modules": ["emb", "q"]},
    "convolution": {"target_modules": ["conv", "q"]},
    "dora": {"target_modules": ["q", "k"], "use_dora": True},
    "dora of a convolution": {"target_modules": ["conv"], "use_dora": True},
    "modules to save": {"target_modules": ["q"], "modules_to_save": ["score"]},
    "biases": {"target_modules": ["q"], "bias": "all"},
}


@pytest.mark.nightly  # PEFT imports transformers and accelerate
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_those_of_peft(tmp_path, kind):
    """Outputs and gradients in torch, JAX and structured Flax; and PEFT reads what is written."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    theirs = peft.get_peft_model(net, peft.LoraConfig(r=2, lora_alpha=3, **KINDS[kind])).eval()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    want = theirs(IDS)
    (want**2).sum().backward()
    theirs.save_pretrained(tmp_path / "theirs")
    adapter = load_adapter(tmp_path / "theirs")

    there = fmapper.to_torch(adapter)
    got = torch.func.functional_call(plain, there(dict(plain.named_parameters())), (IDS,))
    assert torch.allclose(got, want, atol=1e-5)
    model = fmapper.convert(plain.eval(), "jax", (IDS,))
    forward = jax.jit(lambda a: model.replace(params=a(model.params))(IDS.numpy()))
    here = fmapper.to_jax(adapter)
    assert np.allclose(forward(here), want.detach(), atol=1e-5)
    gradients = fmapper.state(jax.grad(lambda a: (forward(a) ** 2).sum())(here))
    trained = [
        p.grad.numpy() for p in theirs.parameters() if p.requires_grad and p.grad is not None
    ]
    assert len(gradients) == len(trained)
    for gradient in gradients.values():
        assert any(
            gradient.size == other.size
            and np.allclose(np.ravel(gradient), np.ravel(other), rtol=1e-4, atol=1e-5)
            for other in trained
        )
    structured = fmapper.convert(plain, "flax", (IDS,), structure=True)
    merged = adapter.merge(structured, source=True)
    assert np.allclose(merged(jnp.asarray(IDS.numpy())), want.detach(), atol=1e-5)

    save_adapter(here, tmp_path / "ours")
    back = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    assert torch.allclose(back(IDS), want, atol=1e-6)
