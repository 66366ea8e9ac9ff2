"""Models in plain JAX as its users write them, small: name -> a function that builds one.

Functions with their parameters in dicts and lists; classes that hold arrays; programs without
parameters. Each gives the model as `fmapper.convert` takes it, and what it is called with.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy as jsp
from jax import lax

import fmapper

Case = tuple[Any, tuple[Any, ...], dict[str, Any]]
MODELS: dict[str, Callable[[], Case]] = {}


def model(function: Callable[[], Case]) -> Callable[[], Case]:
    MODELS[f"jax/{function.__name__}"] = function
    return function


def normal(*shape: int, seed: int = 7) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def integers(*shape: int, below: int, seed: int = 8) -> Any:
    return jax.random.randint(jax.random.key(seed), shape, 0, below)


def positive_definite(n: int, seed: int = 5) -> Any:
    a = normal(n, n, seed=seed)
    return a @ a.T + n * jnp.eye(n)


# --- networks -------------------------------------------------------------------------------------


@model
def mlp_list() -> Case:
    """The neural network of JAX's tutorials: a list of pairs."""
    sizes = [6, 16, 16, 4]
    params = [
        (0.3 * normal(n, m, seed=i), 0.1 * normal(n, seed=i + 9))
        for i, (m, n) in enumerate(itertools.pairwise(sizes))
    ]

    def predict(params: Any, image: Any) -> Any:
        activations = image
        for w, b in params[:-1]:
            activations = jax.nn.relu(jnp.dot(w, activations) + b)
        final_w, final_b = params[-1]
        logits = jnp.dot(final_w, activations) + final_b
        return logits - jax.nn.logsumexp(logits)

    return (jax.vmap(predict, in_axes=(None, 0)), params), (normal(5, 6),), {}


@model
def loss_and_gradient() -> Case:
    """A training step is a program as any other."""
    params = {"w1": normal(4, 8), "b1": jnp.zeros(8), "w2": normal(8, 1, seed=1)}

    def loss(params: Any, x: Any, y: Any) -> Any:
        h = jnp.tanh(x @ params["w1"] + params["b1"])
        return jnp.mean((h @ params["w2"] - y) ** 2)

    @jax.jit
    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return (step, params), (normal(6, 4), normal(6, 1)), {}


@model
def gradient_of_cnn() -> Case:
    params = {"conv": 0.3 * normal(3, 3, 1, 4), "dense": 0.3 * normal(36, 3)}

    def loss(params: Any, x: Any, y: Any) -> Any:
        x = lax.conv_general_dilated(
            x, params["conv"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
        logits = x.reshape(x.shape[0], -1) @ params["dense"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))

    return (jax.grad(loss), params), (normal(2, 6, 6, 1), jnp.array([0, 2])), {}


@model
def adam_step() -> Case:
    import optax

    params = {"w": normal(5, 3), "b": jnp.zeros(3)}
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = optimiser.init(params)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            logits = x @ p["w"] + p["b"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimiser.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    return (step, params), (state, normal(6, 5), integers(6, below=3)), {}


@model
def functor_class() -> Case:
    @fmapper.functor
    class Policy:
        def __init__(self) -> None:
            self.layers = [
                {"w": normal(4, 8), "b": jnp.zeros(8)},
                {"w": normal(8, 2), "b": jnp.ones(2)},
            ]
            self.temperature = 0.5

        def __call__(self, x: Any) -> Any:
            for layer in self.layers[:-1]:
                x = jax.nn.relu(x @ layer["w"] + layer["b"])
            return jax.nn.softmax(
                (x @ self.layers[-1]["w"] + self.layers[-1]["b"]) / self.temperature
            )

    return Policy(), (normal(3, 4),), {}


@model
def registered_dataclass() -> Case:
    import dataclasses

    @functools.partial(
        jax.tree_util.register_dataclass, data_fields=["kernel", "bias"], meta_fields=["stride"]
    )
    @dataclasses.dataclass
    class Conv:
        kernel: Any
        bias: Any
        stride: int

        def __call__(self, x: Any) -> Any:
            y = lax.conv(x, self.kernel, (self.stride, self.stride), "SAME")
            return y + self.bias[:, None, None]

    return Conv(normal(4, 2, 3, 3), normal(4), 2), (normal(2, 2, 7, 7),), {}


class LSTMParams(NamedTuple):
    wx: Any
    wh: Any
    b: Any


@model
def lstm_scan() -> Case:
    params = LSTMParams(0.3 * normal(3, 16), 0.3 * normal(4, 16, seed=1), jnp.zeros(16))

    def forward(p: LSTMParams, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ p.wx + h @ p.wh + p.b, 4, axis=-1)
            c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((xs.shape[1], 4))
        (h, c), hs = lax.scan(step, (zeros, zeros), xs)
        _, back = lax.scan(step, (h, c), xs, reverse=True, unroll=2)
        return hs, back

    return (forward, params), (normal(6, 2, 3),), {}


@model
def gpt_dict() -> Case:
    def layer(i: int) -> Any:
        return {
            "ln1": {"g": jnp.ones(16), "b": jnp.zeros(16)},
            "attn": {"qkv": 0.2 * normal(16, 48, seed=i), "proj": 0.2 * normal(16, 16, seed=i + 1)},
            "ln2": {"g": jnp.ones(16), "b": jnp.zeros(16)},
            "mlp": {
                "fc": 0.2 * normal(16, 64, seed=i + 2),
                "proj": 0.2 * normal(64, 16, seed=i + 3),
            },
        }

    params = {
        "wte": 0.3 * normal(25, 16, seed=40),
        "wpe": 0.1 * normal(10, 16, seed=41),
        "blocks": [layer(0), layer(10)],
        "ln_f": {"g": jnp.ones(16), "b": jnp.zeros(16)},
    }

    def layer_norm(x: Any, g: Any, b: Any, eps: float = 1e-5) -> Any:
        mean = jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.var(x, axis=-1, keepdims=True)
        return g * (x - mean) / jnp.sqrt(variance + eps) + b

    def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return jax.nn.softmax(q @ k.T / jnp.sqrt(q.shape[-1]) + mask) @ v

    def gpt(params: Any, ids: Any) -> Any:
        x = params["wte"][ids] + params["wpe"][jnp.arange(len(ids))]
        mask = (1 - jnp.tri(len(ids))) * -1e10
        for p in params["blocks"]:
            qkv = layer_norm(x, **p["ln1"]) @ p["attn"]["qkv"]
            heads = [jnp.split(part, 2, -1) for part in jnp.split(qkv, 3, -1)]
            out = [attention(q, k, v, mask) for q, k, v in zip(*heads, strict=True)]
            x = x + jnp.hstack(out) @ p["attn"]["proj"]
            x = x + jax.nn.gelu(layer_norm(x, **p["ln2"]) @ p["mlp"]["fc"]) @ p["mlp"]["proj"]
        return layer_norm(x, **params["ln_f"]) @ params["wte"].T

    return (gpt, params), (integers(7, below=25),), {}


@model
def transformer_scan_remat() -> Case:
    params = {"w": 0.2 * normal(3, 8, 8), "g": jnp.ones((3, 8)), "bias": 0.1 * normal(3, 8)}

    def forward(params: Any, x: Any) -> Any:
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def block(x: Any, p: Any) -> Any:
            y = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["g"]
            return x + jax.nn.silu(y @ p["w"] + p["bias"]), jnp.linalg.norm(x)

        return lax.scan(block, x, params)

    return (forward, params), (normal(4, 8),), {}


@model
def rope_and_alibi_attention() -> Case:
    params = {name: 0.3 * normal(12, 12, seed=i) for i, name in enumerate("qkvo")}

    def forward(p: Any, x: Any) -> Any:
        n, d = x.shape
        q, k, v = (rearranged(x @ p[name]) for name in "qkv")
        freqs = 10000 ** (-jnp.arange(0, 4, 2) / 4)
        turn = jnp.exp(1j * jnp.outer(jnp.arange(n), freqs))

        def rope(x: Any) -> Any:
            z = lax.complex(x[..., ::2], x[..., 1::2]) * turn
            return jnp.stack([z.real, z.imag], -1).reshape(x.shape)

        slopes = 2.0 ** -jnp.arange(1, 4)
        distance = jnp.arange(n)[None] - jnp.arange(n)[:, None]
        bias = jnp.where(distance <= 0, slopes[:, None, None] * distance, -jnp.inf)
        scores = jnp.einsum("hqd,hkd->hqk", rope(q), rope(k)) / 2 + bias
        out = jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), v)
        return out.transpose(1, 0, 2).reshape(n, d) @ p["o"]

    def rearranged(x: Any) -> Any:
        return x.reshape(len(x), 3, 4).transpose(1, 0, 2)

    return (forward, params), (normal(6, 12),), {}


@model
def kv_cache_generation() -> Case:
    """Greedy decoding: a cache that is written by dynamic_update_slice, in a scan."""
    params = {
        "embed": normal(11, 8),
        **{n: 0.3 * normal(8, 8, seed=i) for i, n in enumerate("qkvo")},
    }

    def generate(p: Any, prompt: Any, steps: int) -> Any:
        def step(carry: Any, i: Any) -> Any:
            token, keys, values = carry
            x = p["embed"][token]
            keys = lax.dynamic_update_slice(keys, (x @ p["k"])[None], (i, 0))
            values = lax.dynamic_update_index_in_dim(values, x @ p["v"], i, 0)
            scores = jnp.where(jnp.arange(len(keys)) <= i, keys @ (x @ p["q"]), -1e9)
            y = x + jax.nn.softmax(scores) @ values @ p["o"]
            logits = y @ p["embed"].T
            return (jnp.argmax(logits), keys, values), (logits, token)

        start = prompt, jnp.zeros((steps, 8)), jnp.zeros((steps, 8))
        return lax.scan(step, start, jnp.arange(steps))[1]

    return (functools.partial(generate, steps=5), params), (jnp.int32(3),), {}


@model
def beam_search() -> Case:
    params = {"table": 2 * normal(9, 9)}

    def search(p: Any, start: Any) -> Any:
        beams, length = 3, 6

        def cond(state: Any) -> Any:
            i, _, _, done = state
            return (i < length) & ~jnp.all(done)

        def body(state: Any) -> Any:
            i, tokens, scores, done = state
            last = tokens[:, i - 1]
            logp = jax.nn.log_softmax(p["table"][last])
            logp = jnp.where(done[:, None], jnp.where(jnp.arange(9) == 0, 0.0, -jnp.inf), logp)
            total = scores[:, None] + logp
            scores, flat = lax.top_k(total.reshape(-1), beams)
            beam, token = flat // 9, flat % 9
            tokens = tokens[beam].at[:, i].set(token)
            return i + 1, tokens, scores, done[beam] | (token == 0)

        tokens = jnp.zeros((beams, length), jnp.int32).at[:, 0].set(start)
        scores = jnp.array([0.0, -jnp.inf, -jnp.inf])
        return lax.while_loop(cond, body, (1, tokens, scores, jnp.zeros(beams, bool)))[1:3]

    return (search, params), (jnp.int32(4),), {}


@model
def dropout_and_sampling() -> Case:
    params = {"w": normal(6, 6)}

    def forward(p: Any, x: Any, key: Any) -> Any:
        k = jax.random.split(key, 12)
        keep = jax.random.bernoulli(k[0], 0.8, x.shape)
        h = jnp.where(keep, x / 0.8, 0) @ p["w"]
        return {
            "h": h,
            "normal": jax.random.normal(k[1], (3,)),
            "truncated": jax.random.truncated_normal(k[2], -2, 2, (4,)),
            "categorical": jax.random.categorical(k[3], h),
            "permutation": jax.random.permutation(k[4], 9),
            "choice": jax.random.choice(k[5], 10, (4,), replace=False),
            "gamma": jax.random.gamma(k[6], jnp.array([0.5, 2.0])),
            "randint": jax.random.randint(k[7], (5,), -3, 9),
            "exponential": jax.random.exponential(k[8], (3,)),
            "laplace": jax.random.laplace(k[9], (3,)),
            "dirichlet": jax.random.dirichlet(k[10], jnp.ones(3)),
            "uniform": jax.random.uniform(jax.random.fold_in(k[11], 3), (3,), minval=-1),
        }

    return (forward, params), (normal(4, 6), jax.random.key(12)), {}


@model
def random_legacy_keys() -> Case:
    def walk(scale: Any, key: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            key, x = carry
            key, sub = jax.random.split(key)
            x = x + scale * jax.random.normal(sub, x.shape)
            return (key, x), x

        return lax.scan(step, (key, jnp.zeros(3)), length=6)[1]

    return (walk, jnp.float32(0.3)), (jax.random.PRNGKey(17),), {}


@model
def metropolis_hastings() -> Case:
    params = {"mean": normal(2), "log_scale": jnp.zeros(2)}

    def sample(p: Any, key: Any) -> Any:
        def logp(x: Any) -> Any:
            return jsp.stats.norm.logpdf(x, p["mean"], jnp.exp(p["log_scale"])).sum()

        def step(x: Any, key: Any) -> Any:
            k1, k2 = jax.random.split(key)
            proposal = x + 0.5 * jax.random.normal(k1, x.shape)
            accept = jnp.log(jax.random.uniform(k2)) < logp(proposal) - logp(x)
            x = jnp.where(accept, proposal, x)
            return x, (x, accept)

        return lax.scan(step, jnp.zeros(2), jax.random.split(key, 10))[1]

    return (sample, params), (jax.random.key(5),), {}


@model
def hamiltonian_monte_carlo() -> Case:
    params = {"precision": positive_definite(3)}

    def sample(p: Any, q: Any, key: Any) -> Any:
        def energy(q: Any) -> Any:
            return 0.5 * q @ p["precision"] @ q

        def leapfrog(_: Any, state: Any) -> Any:
            q, m = state
            m = m - 0.05 * jax.grad(energy)(q)
            q = q + 0.1 * m
            return q, m - 0.05 * jax.grad(energy)(q)

        m = jax.random.normal(key, q.shape)
        new, m2 = lax.fori_loop(0, 5, leapfrog, (q, m))
        delta = energy(q) + 0.5 * m @ m - energy(new) - 0.5 * m2 @ m2
        return lax.cond(delta > -1, lambda: new, lambda: q), delta

    return (sample, params), (normal(3), jax.random.key(2)), {}


# --- graphs, routing, sorting ---------------------------------------------------------------------


@model
def message_passing() -> Case:
    params = {"edge": normal(10, 6), "node": normal(10, 4, seed=1), "global": normal(4, 2, seed=2)}

    def forward(p: Any, graph: dict[str, Any]) -> Any:
        nodes, edges = graph["nodes"], graph["edges"]
        s, r = graph["senders"], graph["receivers"]
        edges = jax.nn.relu(jnp.concatenate([nodes[s], nodes[r], edges], -1) @ p["edge"])
        logits = edges.sum(-1)
        high = jax.ops.segment_max(logits, r, num_segments=5, indices_are_sorted=False)
        weights = jnp.exp(logits - high[r])
        weights = weights / jax.ops.segment_sum(weights, r, 5)[r]
        received = jax.ops.segment_sum(edges * weights[:, None], r, 5)
        nodes = jnp.concatenate([nodes, received], -1) @ p["node"]
        low = jax.ops.segment_min(nodes, graph["batch"], 2)
        product = jax.ops.segment_prod(nodes, graph["batch"], 2)
        return {"nodes": nodes, "low": low, "product": product, "out": nodes.mean(0) @ p["global"]}

    graph = {
        "nodes": normal(5, 4),
        "edges": normal(9, 2),
        "senders": integers(9, below=5),
        "receivers": jnp.array([0, 1, 2, 3, 4, 0, 1, 2, 3]),
        "batch": jnp.array([0, 0, 1, 1, 1]),
    }
    return (forward, params), (graph,), {}


@model
def graph_convolution_dense() -> Case:
    params = [0.5 * normal(4, 8), 0.5 * normal(8, 3, seed=2)]

    def forward(weights: Any, x: Any, adjacency: Any) -> Any:
        a = adjacency + jnp.eye(len(adjacency))
        d = jnp.diag(a.sum(1) ** -0.5)
        a = d @ a @ d
        for i, w in enumerate(weights):
            x = a @ x @ w
            x = jax.nn.relu(x) if i < len(weights) - 1 else x
        return jax.nn.log_softmax(x, axis=1)

    return (forward, params), (normal(6, 4), (normal(6, 6, seed=1) > 0).astype(float)), {}


@model
def top_k_sparsity() -> Case:
    params = {"encode": normal(6, 20), "decode": normal(20, 6, seed=1)}

    def forward(p: Any, x: Any) -> Any:
        h = x @ p["encode"]
        values, index = lax.top_k(h, 4)
        sparse = jnp.zeros_like(h).at[jnp.arange(len(x))[:, None], index].set(jax.nn.relu(values))
        approx, where = lax.approx_max_k(h, 2)
        ranks = jnp.argsort(jnp.argsort(-h, axis=-1), axis=-1)
        return sparse @ p["decode"], approx, where, ranks

    return (forward, params), (normal(5, 6),), {}


@model
def sorting_program() -> Case:
    def forward(weight: Any, x: Any, ids: Any) -> Any:
        y = x * weight
        unique, inverse, counts = jnp.unique(
            ids, return_inverse=True, return_counts=True, size=6, fill_value=-1
        )
        return {
            "sorted": jnp.sort(y, axis=0),
            "order": jnp.argsort(y, descending=True),
            "lex": jnp.lexsort((ids, ids % 3)),
            "median": jnp.median(y, axis=1),
            "quantile": jnp.quantile(y, jnp.array([0.1, 0.5]), axis=0),
            "percentile": jnp.percentile(y, 30, method="nearest"),
            "unique": unique,
            "inverse": inverse,
            "counts": counts,
            "partition": jnp.partition(y, 2, axis=-1)[:, 2],
            "search": jnp.searchsorted(jnp.sort(y.ravel()), jnp.linspace(-1, 1, 5)),
            "nonzero": jnp.nonzero(ids > 3, size=4),
            "histogram": jnp.histogram(x, bins=5)[0],
            "digitize": jnp.digitize(x, jnp.array([-1.0, 0.0, 1.0])),
            "flip": jnp.flip(y, 0),
            "top": jnp.max(y),
            "where": jnp.argwhere(ids == 2, size=3),
        }

    return (forward, normal(6)), (normal(4, 6, seed=2), integers(9, below=6)), {}


@model
def sinkhorn() -> Case:
    params = {"a": normal(5, 3), "b": normal(6, 3, seed=1), "log_eps": jnp.float32(-1.0)}

    def forward(p: Any) -> Any:
        cost = jnp.sum((p["a"][:, None] - p["b"][None]) ** 2, -1)
        eps = jnp.exp(p["log_eps"])
        log_k = -cost / eps

        def body(carry: Any, _: Any) -> Any:
            f, g = carry
            f = -jax.nn.logsumexp(log_k + g[None], axis=1) - jnp.log(5.0)
            g = -jax.nn.logsumexp(log_k + f[:, None], axis=0) - jnp.log(6.0)
            return (f, g), jnp.abs(f).max()

        (f, g), errors = lax.scan(body, (jnp.zeros(5), jnp.zeros(6)), None, length=12)
        plan = jnp.exp(f[:, None] + log_k + g[None])
        return jnp.sum(plan * cost), plan, errors

    return (
        (lambda p, scale: jax.tree.map(lambda x: x * scale, forward(p)), params),
        (jnp.float32(2),),
        {},
    )


@model
def product_quantiser_straight_through() -> Case:
    @jax.custom_vjp
    def quantise(x: Any) -> Any:
        return jnp.round(x * 4) / 4

    quantise.defvjp(lambda x: (quantise(x), jnp.abs(x) <= 1), lambda mask, g: (g * mask,))

    @jax.custom_jvp
    def clipped(x: Any) -> Any:
        return jnp.clip(x, -1, 1)

    @clipped.defjvp
    def clipped_jvp(primals: Any, tangents: Any) -> Any:
        return clipped(primals[0]), tangents[0] * (1 - jnp.tanh(primals[0]) ** 2)

    def forward(p: Any, x: Any) -> Any:
        return quantise(clipped(x @ quantise(p["w1"]))) @ p["w2"]

    return (forward, {"w1": 0.4 * normal(5, 8), "w2": normal(8, 2)}), (normal(4, 5),), {}


@model
def gumbel_softmax_and_reverse() -> Case:
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def reverse_gradient(x: Any, scale: float) -> Any:
        return x

    reverse_gradient.defvjp(lambda x, scale: (x, None), lambda scale, _, g: (-scale * g,))

    def forward(p: Any, x: Any, key: Any) -> Any:
        h = jnp.tanh(x @ p["feature"])
        logits = h @ p["label"]
        g = jax.random.gumbel(key, logits.shape)
        soft = jax.nn.softmax((logits + g) / 0.7)
        hard = jax.nn.one_hot(jnp.argmax(soft, -1), soft.shape[-1])
        return hard + soft - lax.stop_gradient(soft), reverse_gradient(h, 0.5) @ p["domain"]

    params = {"feature": normal(5, 6), "label": normal(6, 4), "domain": normal(6, 2)}
    return (forward, params), (normal(3, 5), jax.random.key(3)), {}


# --- numerical programs ---------------------------------------------------------------------------


@model
def gaussian_process() -> Case:
    params = {
        "log_length": jnp.float32(0.1),
        "log_amp": jnp.float32(0.3),
        "log_noise": jnp.float32(-2.0),
    }

    def forward(p: Any, x: Any, y: Any, new: Any) -> Any:
        def kernel(a: Any, b: Any) -> Any:
            d = jnp.sum((a[:, None] - b[None]) ** 2, -1)
            return jnp.exp(2 * p["log_amp"]) * jnp.exp(-0.5 * d / jnp.exp(2 * p["log_length"]))

        k = kernel(x, x) + jnp.exp(p["log_noise"]) * jnp.eye(len(x))
        chol = jsp.linalg.cholesky(k, lower=True)
        alpha = jsp.linalg.cho_solve((chol, True), y)
        cross = kernel(new, x)
        v = jsp.linalg.solve_triangular(chol, cross.T, lower=True)
        nll = 0.5 * y @ alpha + jnp.log(jnp.diag(chol)).sum() + 0.5 * len(x) * jnp.log(2 * jnp.pi)
        return cross @ alpha, jnp.diag(kernel(new, new)) - jnp.sum(v**2, 0), nll

    return (forward, params), (normal(8, 2), normal(8, seed=1), normal(3, 2, seed=2)), {}


@model
def kalman_filter() -> Case:
    params = {
        "A": 0.9 * jnp.eye(3) + 0.05 * normal(3, 3),
        "C": normal(2, 3, seed=1),
        "Q": 0.1 * jnp.eye(3),
        "R": 0.2 * jnp.eye(2),
    }

    def forward(p: Any, ys: Any) -> Any:
        def step(carry: Any, y: Any) -> Any:
            m, P = carry
            m, P = p["A"] @ m, p["A"] @ P @ p["A"].T + p["Q"]
            S = p["C"] @ P @ p["C"].T + p["R"]
            K = jnp.linalg.solve(S, p["C"] @ P).T
            r = y - p["C"] @ m
            m, P = m + K @ r, (jnp.eye(3) - K @ p["C"]) @ P
            _, logdet = jnp.linalg.slogdet(2 * jnp.pi * S)
            ll = -0.5 * (r @ jnp.linalg.inv(S) @ r + logdet)
            return (m, P), (m, ll)

        return lax.scan(step, (jnp.zeros(3), jnp.eye(3)), ys)[1]

    return (forward, params), (normal(7, 2),), {}


@model
def hidden_markov_model() -> Case:
    params = {
        "initial": normal(4),
        "transition": normal(4, 4, seed=1),
        "emission": normal(4, 6, seed=2),
    }

    def forward(p: Any, obs: Any) -> Any:
        log_t = jax.nn.log_softmax(p["transition"], axis=1)
        log_e = jax.nn.log_softmax(p["emission"], axis=1)

        def step(alpha: Any, o: Any) -> Any:
            alpha = jax.nn.logsumexp(alpha[:, None] + log_t, axis=0) + log_e[:, o]
            return alpha, alpha

        def viterbi(score: Any, o: Any) -> Any:
            total = score[:, None] + log_t
            return total.max(0) + log_e[:, o], total.argmax(0)

        start = jax.nn.log_softmax(p["initial"]) + log_e[:, obs[0]]
        last, alphas = lax.scan(step, start, obs[1:])
        score, back = lax.scan(viterbi, start, obs[1:])
        best = jnp.argmax(score)
        _, path = lax.scan(lambda s, b: (b[s], b[s]), best, back, reverse=True)
        return jax.nn.logsumexp(last), alphas, jnp.append(path, best)

    return (forward, params), (integers(8, below=6),), {}


@model
def kmeans() -> Case:
    def forward(points: Any, start: Any) -> Any:
        def cond(state: Any) -> Any:
            _, change, i = state
            return (change > 1e-4) & (i < 20)

        def body(state: Any) -> Any:
            centers, _, i = state
            d = jnp.linalg.norm(points[:, None] - centers[None], axis=-1)
            assigned = jax.nn.one_hot(jnp.argmin(d, 1), len(centers))
            new = assigned.T @ points / jnp.maximum(assigned.sum(0)[:, None], 1)
            return new, jnp.abs(new - centers).max(), i + 1

        return lax.while_loop(cond, body, (start, jnp.inf, 0))

    x = normal(20, 2)
    return forward, (x, x[:3]), {}


@model
def linear_algebra() -> Case:
    def forward(w: Any, b: Any) -> Any:
        s = w @ w.T + 3 * jnp.eye(5)
        q, r = jnp.linalg.qr(w)
        values, vectors = jnp.linalg.eigh(s)
        lu, pivots = jsp.linalg.lu_factor(w)
        return {
            "det": jnp.linalg.det(w),
            "inv": jnp.linalg.inv(s),
            "solve": jnp.linalg.solve(w, b),
            "qr": jnp.abs(q @ r),
            "r": jnp.abs(r),
            "eigenvalues": values,
            "projector": vectors[:, -1:] @ vectors[:, -1:].T,
            "singular": jnp.linalg.svd(w, compute_uv=False),
            "pinv": jnp.linalg.pinv(w),
            "rank": jnp.linalg.matrix_rank(w),
            "power": jnp.linalg.matrix_power(w, 3),
            "norms": jnp.stack([jnp.linalg.norm(w), jnp.linalg.norm(w, 2), jnp.linalg.norm(w, 1)]),
            "lu": lu,
            "pivots": pivots,
            "expm": jsp.linalg.expm(0.1 * w),
            "multi": jnp.linalg.multi_dot([w, s, b]),
            "lstsq": jnp.linalg.lstsq(s, b)[0],
            "kron": jnp.kron(w[:2, :2], s[:2, :2]),
            "cross": jnp.cross(w[:, :3], s[:, :3]),
            "trace": jnp.trace(s),
            "outer": jnp.outer(b, b),
            "cond": jnp.linalg.cond(s),
            "triangles": jnp.tril(w) + jnp.triu(s, 1),
            "slogdet": jnp.linalg.slogdet(w),
        }

    return (forward, normal(5, 5)), (normal(5),), {}


@model
def special_functions() -> Case:
    def forward(w: Any, x: Any) -> Any:
        y = jnp.abs(x * w) + 0.5
        s, sp, st = jsp.special, jsp.special, jsp.stats
        return {
            "gammaln": s.gammaln(y),
            "digamma": s.digamma(y),
            "erf": s.erf(x),
            "erfc": s.erfc(x),
            "erfinv": s.erfinv(jnp.tanh(x)),
            "logit": s.logit(jax.nn.sigmoid(x)),
            "expit": sp.expit(x),
            "xlogy": s.xlogy(y, y),
            "entr": s.entr(y),
            "i0e": s.i0e(x),
            "i1": s.i1(x),
            "betainc": s.betainc(y, y + 1, jax.nn.sigmoid(x)),
            "gammainc": s.gammainc(y, y + 0.3),
            "zeta": s.zeta(y + 1.5, 1.0),
            "polygamma": s.polygamma(1, y),
            "ndtr": s.ndtr(x),
            "log_ndtr": s.log_ndtr(x),
            "ndtri": s.ndtri(jax.nn.sigmoid(x)),
            "logsumexp": s.logsumexp(x, axis=0, b=y),
            "beta": st.beta.logpdf(jax.nn.sigmoid(x), y, y),
            "gamma": st.gamma.logpdf(y, 2.0),
            "poisson": st.poisson.logpmf(jnp.floor(y), y),
            "t": st.t.logpdf(x, 3.0),
            "mvn": st.multivariate_normal.logpdf(x, jnp.zeros(4), 2 * jnp.eye(4)),
            "cauchy": st.cauchy.cdf(x),
            "sinc": jnp.sinc(x),
            "log1p": jnp.log1p(y),
            "logaddexp": jnp.logaddexp(x, y),
            "hypot": jnp.hypot(x, y),
            "cbrt": jnp.cbrt(x),
            "arctan2": jnp.arctan2(x, y),
            "nan": jnp.nan_to_num(jnp.log(x)),
            "exp2": jnp.exp2(x),
        }

    return (forward, normal(4, seed=2)), (normal(3, 4),), {}


@model
def fft_filters() -> Case:
    def forward(p: Any, x: Any) -> Any:
        spectrum = jnp.fft.rfft(x, axis=-1)
        filtered = jnp.fft.irfft(spectrum * jax.nn.sigmoid(p["mask"]), n=x.shape[-1])
        two = jnp.fft.ifft2(jnp.fft.fft2(x) * jnp.exp(1j * p["phase"]))
        full = jnp.fft.fftshift(jnp.abs(jnp.fft.fft(x, n=12)), axes=-1)
        conv = jnp.convolve(x[0], p["kernel"], mode="same")
        correlation = jsp.signal.fftconvolve(x, p["kernel"][None], mode="full")
        dct = jsp.fft.dct(x)
        return filtered, two.real, jnp.angle(two), full, conv, correlation, dct

    params = {"mask": normal(6), "phase": normal(4, 10), "kernel": normal(3)}
    return (forward, params), (normal(4, 10),), {}


@model
def hippo_ssm() -> Case:
    """S4 in its convolutional form."""

    def forward(p: Any, u: Any) -> Any:
        n = 4
        steps = jnp.exp(p["log_step"])
        a = -jnp.tril(
            jnp.sqrt((2 * jnp.arange(n) + 1)[:, None] * (2 * jnp.arange(n) + 1)[None]), -1
        )
        a = a - jnp.diag(jnp.arange(n) + 1.0)
        eye = jnp.eye(n)
        inverse = jnp.linalg.inv(eye - steps / 2 * a)
        ab, bb = inverse @ (eye + steps / 2 * a), steps * inverse @ p["B"]
        length = u.shape[0]
        kernel = jnp.array(
            [(p["C"] @ jnp.linalg.matrix_power(ab, i) @ bb).reshape() for i in range(length)]
        )
        ud = jnp.fft.rfft(jnp.pad(u, (0, length)))
        kd = jnp.fft.rfft(jnp.pad(kernel, (0, length)))
        return jnp.fft.irfft(ud * kd)[:length] + p["D"] * u

    params = {
        "B": normal(4, 1),
        "C": normal(1, 4),
        "D": jnp.float32(1),
        "log_step": jnp.float32(-1),
    }
    return (forward, params), (normal(8),), {}


@model
def neural_ode_adaptive() -> Case:
    """An adaptive step by while_loop; cond within it."""
    params = {"w1": 0.5 * normal(2, 8), "w2": 0.5 * normal(8, 2)}

    def forward(p: Any, y0: Any) -> Any:
        def f(y: Any) -> Any:
            return jnp.tanh(y @ p["w1"]) @ p["w2"]

        def step(state: Any) -> Any:
            t, y, h, n = state
            h = jnp.minimum(h, 1.0 - t)
            k1 = f(y)
            k2 = f(y + h * k1)
            error = 0.5 * h * jnp.abs(k2 - k1).max()
            good = error < 1e-2
            y, t = lax.cond(good, lambda: (y + 0.5 * h * (k1 + k2), t + h), lambda: (y, t))
            return t, y, h * jnp.clip(0.9 * jnp.sqrt(1e-2 / (error + 1e-9)), 0.2, 3.0), n + 1

        return lax.while_loop(lambda s: (s[0] < 1.0 - 1e-6) & (s[3] < 50), step, (0.0, y0, 0.3, 0))[
            1:
        ]

    return (forward, params), (normal(3, 2),), {}


@model
def newton_implicit() -> Case:
    """custom_root and the Newton steps of a fixed count."""
    params = {"a": jnp.array([2.0, 3.0, 5.0])}

    def forward(p: Any, x0: Any) -> Any:
        def f(x: Any) -> Any:
            return x**3 - p["a"]

        def solve(g: Any, x: Any) -> Any:
            return lax.fori_loop(0, 12, lambda _, x: x - g(x) / (3 * x**2), x)

        def tangent(g: Any, y: Any) -> Any:
            return y / g(jnp.ones_like(y))

        root = lax.custom_root(f, x0, solve, tangent)
        direct = jnp.power(p["a"], 1 / 3)
        solved, _ = jax.scipy.sparse.linalg.cg(lambda v: (2 + p["a"]) * v, root)
        return root, direct, solved

    return (forward, params), (jnp.ones(3),), {}


@model
def bfgs_minimise() -> Case:
    from jax.scipy.optimize import minimize

    def forward(target: Any, x0: Any) -> Any:
        result = minimize(
            lambda x: jnp.sum((x - target) ** 2) + 0.1 * jnp.sum(x**4), x0, method="BFGS"
        )
        return result.x, result.fun

    return (forward, normal(3)), (jnp.zeros(3),), {}


@model
def hessian_and_jacobian() -> Case:
    params = {"w": normal(3, 3)}

    def forward(p: Any, x: Any) -> Any:
        def f(x: Any) -> Any:
            return jnp.sum(jnp.sin(p["w"] @ x) ** 2)

        def g(x: Any) -> Any:
            return jnp.tanh(p["w"] @ x) * x[::-1]

        value, tangent = jax.jvp(f, (x,), (jnp.ones(3),))
        return jax.hessian(f)(x), jax.jacfwd(g)(x), jax.jacrev(g)(x), value, tangent, jax.grad(f)(x)

    return (forward, params), (normal(3),), {}


@model
def physics_informed() -> Case:
    """A network and its derivatives, as PINNs take them."""
    params = [(0.6 * normal(2, 10), normal(10)), (0.6 * normal(10, 1, seed=1), jnp.zeros(1))]

    def forward(params: Any, t: Any, x: Any) -> Any:
        def u(t: Any, x: Any) -> Any:
            h = jnp.stack([t, x])
            for w, b in params[:-1]:
                h = jnp.tanh(h @ w + b)
            w, b = params[-1]
            return (h @ w + b)[0]

        def residual(t: Any, x: Any) -> Any:
            u_xx = jax.grad(jax.grad(u, 1), 1)(t, x)
            return jax.grad(u, 0)(t, x) + u(t, x) * jax.grad(u, 1)(t, x) - 0.01 / math.pi * u_xx

        return jax.vmap(residual)(t, x), jax.vmap(u)(t, x)

    return (forward, params), (normal(6), normal(6, seed=3)), {}


@model
def lorenz_and_games() -> Case:
    """Integers: Conway's life, Collatz by while, a linear congruence that wraps."""

    def forward(params: Any, board: Any, n: Any) -> Any:
        def life(board: Any, _: Any) -> Any:
            shifts = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
            near = sum(jnp.roll(board, s, (0, 1)) for s in shifts)
            return ((near == 3) | ((board == 1) & (near == 2))).astype(board.dtype), near.sum()

        board, counts = lax.scan(life, board, length=4)
        steps = jax.vmap(
            lambda n: lax.while_loop(
                lambda s: s[0] != 1,
                lambda s: (jnp.where(s[0] % 2 == 0, s[0] // 2, 3 * s[0] + 1), s[1] + 1),
                (n, 0),
            )[1]
        )(n)
        random = lax.fori_loop(
            0, 5, lambda _, s: s * jnp.uint32(1664525) + jnp.uint32(1013904223), jnp.uint32(1)
        )
        bits = lax.population_count(random), random >> 7, random ^ (random << 3)
        sigma, rho, beta = params

        def lorenz(s: Any, _: Any) -> Any:
            x, y, z = s
            d = jnp.stack([sigma * (y - x), x * (rho - z) - y, x * y - beta * z])
            return s + 0.01 * d, s

        return board, counts, steps, random, bits, lax.scan(lorenz, jnp.ones(3), length=10)[1]

    board = (normal(8, 8) > 0.3).astype(jnp.int32)
    return (forward, jnp.array([10.0, 28.0, 8 / 3])), (board, jnp.array([1, 6, 7, 27])), {}


@model
def switch_and_nested_loops() -> Case:
    params = [0.3 * normal(4, 4, seed=i) for i in range(3)]

    def forward(ws: Any, x: Any, path: Any) -> Any:
        branches = [
            lambda x: jnp.tanh(x @ ws[0]),
            lambda x: jnp.sin(x) @ ws[1],
            lambda x: x - x @ ws[2],
        ]

        def outer(x: Any, i: Any) -> Any:
            x = lax.switch(i, branches, x)
            x = lax.fori_loop(0, i + 1, lambda j, x: x * (1.0 - 0.1 * j), x)
            return x, x.sum()

        x, sums = lax.scan(outer, x, path)
        return x, sums, lax.map(lambda row: jnp.outer(row, row), x)

    return (forward, params), (normal(2, 4), jnp.array([0, 2, 1, 2])), {}


@model
def vmapped_control_flow() -> Case:
    def one(p: Any, x: Any, n: Any) -> Any:
        y = lax.cond(x.sum() > 0, lambda x: jnp.exp(-x) * p["a"], lambda x: x**2 * p["b"], x)
        return lax.while_loop(lambda s: s[1] < n, lambda s: (s[0] * 0.9, s[1] + 1), (y, 0))[0]

    params = {"a": normal(3), "b": normal(3, seed=1)}
    return (jax.vmap(one, (None, 0, 0)), params), (normal(5, 3), jnp.array([0, 3, 1, 2, 5])), {}


@model
def indexing() -> Case:
    def forward(table: Any, i: Any, x: Any) -> Any:
        return {
            "take": jnp.take(table, i, axis=0, mode="clip"),
            "fill": jnp.take(table, i + 5, axis=1, mode="fill"),
            "along": jnp.take_along_axis(table, i[:, None], axis=1),
            "negative": table[-i],
            "add": table.at[i].add(x),
            "multiply": table.at[i, 1].multiply(2.0),
            "max": table.at[:, i].max(0.3),
            "min": table.at[i[0]].min(0.0),
            "drop": table.at[i + 3].set(1.0, mode="drop"),
            "get": table.at[i + 4].get(mode="fill", fill_value=7),
            "slices": table[1:5:2, ::-1],
            "ellipsis": table[..., None, 2],
            "bools": jnp.where(table > 0, table, -1),
            "dynamic": lax.dynamic_slice(table, (i[0], 1), (2, 3)),
            "mixed": table[i[:, None], jnp.arange(3)],
            "apply": table.at[i[1]].apply(jnp.sin),
            "select": jnp.select([table > 1, table < -1], [table, -table], 0),
            "choose": jnp.choose(i % 2, [x[:, 0], x[:, 1]], mode="clip"),
            "power": table.at[0].power(2),
            "pieces": jnp.piecewise(x, [x < 0, x > 1], [lambda x: -x, lambda x: x**2, 0.0]),
            "put": jnp.put_along_axis(table, i[:, None], 9.0, axis=1, inplace=False),
        }

    return (forward, normal(6, 6)), (jnp.array([0, 4, 2, 4, 1, 3]), normal(6, 6, seed=1)), {}


@model
def shapes_and_windows() -> Case:
    def forward(w: Any, x: Any) -> Any:
        y = x * w
        return {
            "roll": jnp.roll(y, 2, 1),
            "tile": jnp.tile(y, (2, 1, 2)),
            "repeat": jnp.repeat(y, jnp.array([1, 2, 0, 1, 3, 1]), axis=1, total_repeat_length=8),
            "pads": [
                jnp.pad(y, ((0, 0), (1, 2), (2, 1)), mode=m)
                for m in ("constant", "edge", "reflect", "wrap", "symmetric", "mean", "maximum")
            ],
            "stack": jnp.stack([y, y], 1),
            "moved": jnp.moveaxis(y, 0, -1),
            "rot": jnp.rot90(y, 1, (1, 2)),
            "cumsum": jnp.cumsum(y, 1),
            "cumprod": jnp.cumprod(y, -1),
            "cummax": lax.cummax(y, 1, reverse=True),
            "diff": jnp.diff(y, n=2, axis=1),
            "gradient": jnp.gradient(y, axis=2),
            "trapezoid": jnp.trapezoid(y),
            "interp": jnp.interp(jnp.linspace(-1, 7, 5), jnp.arange(6.0), y[0, :, 0]),
            "poly": jnp.polyval(w[:3], y),
            "vander": jnp.vander(w, 3),
            "cov": jnp.cov(y[0]),
            "corr": jnp.corrcoef(y[1]),
            "window": lax.reduce_window(y, 0.0, lax.add, (1, 3, 2), (1, 1, 2), "SAME"),
            "patches": lax.conv_general_dilated_patches(y[:, None], (2, 2), (1, 1), "VALID"),
            "split": jnp.array_split(y, 4, axis=1),
            "block": jnp.block([[y[0], y[1]], [y[1], y[0]]]),
            "meshgrid": jnp.meshgrid(w, w[:2], indexing="ij"),
            "dsplit": jnp.dsplit(y, [2]),
            "logspace": jnp.logspace(0, 1, 4) * w[0],
            "std": y.std(1, ddof=1),
            "nanmean": jnp.nanmean(jnp.where(y > 0, y, jnp.nan)),
            "ptp": jnp.ptp(y, 0),
            "average": jnp.average(y, axis=2, weights=jnp.arange(4.0)),
            "clip": jnp.clip(y, -0.5, w.max()),
            "divmod": jnp.divmod(y, 0.3),
            "round": jnp.round(y, 1),
            "allclose": jnp.allclose(y, y + 1e-9),
            "count": jnp.count_nonzero(y > 0),
            "tensordot": jnp.tensordot(y, y, axes=[[0, 2], [0, 2]]),
            "inner": jnp.inner(y, w),
            "vdot": jnp.vdot(w, w),
        }

    return (forward, normal(4)), (normal(2, 6, 4),), {}


@model
def einsum_tensor_network() -> Case:
    params = {
        "cores": [normal(1, 3, 4), normal(4, 3, 4, seed=1), normal(4, 3, 1, seed=2)],
        "w": normal(2, 3, 4, 5),
    }

    def forward(p: Any, x: Any) -> Any:
        a, b, c = p["cores"]
        full = jnp.einsum("aib,bjc,ckd->ijk", a, b, c)
        y = jnp.einsum("ni,nj,nk,ijk->n", x, x, x, full)
        z = jnp.einsum("...hqd,...hkd->...hqk", p["w"], p["w"])
        return (
            y,
            z,
            jnp.einsum("ii->i", x.T @ x),
            jnp.einsum("ijk->kj", full),
            jnp.einsum("abcd->", p["w"]),
        )

    return (forward, params), (normal(5, 3),), {}


@model
def convolutions_lax() -> Case:
    params = {
        "a": 0.3 * normal(3, 3, 2, 4),
        "b": 0.3 * normal(4, 1, 3, 3),
        "c": 0.3 * normal(3, 3, 4, 2),
        "d": 0.4 * normal(5, 2, 3),
    }

    def forward(p: Any, x: Any, s: Any) -> Any:
        numbers = lax.conv_dimension_numbers(x.shape, p["a"].shape, ("NHWC", "HWIO", "NHWC"))
        y = lax.conv_general_dilated(x, p["a"], (1, 1), [(2, 1), (0, 3)], (1, 1), (2, 1), numbers)
        z = lax.conv_general_dilated(
            y.transpose(0, 3, 1, 2), p["b"], (2, 1), "SAME", feature_group_count=4
        )
        up = lax.conv_transpose(
            y, p["c"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        one = lax.conv_general_dilated(s, p["d"], (1,), [(1, 0)], lhs_dilation=(2,))
        half = lax.conv_general_dilated(
            x.astype(jnp.bfloat16),
            p["a"].astype(jnp.bfloat16),
            (1, 1),
            "VALID",
            dimension_numbers=numbers,
        )
        return y, z, up, one, half.astype(jnp.float32)

    return (forward, params), (normal(2, 7, 6, 2), normal(2, 2, 8)), {}


@model
def image_augmentation() -> Case:
    from jax.scipy.ndimage import map_coordinates

    def forward(p: Any, image: Any, key: Any) -> Any:
        h, w, _ = image.shape
        grid = jnp.stack(jnp.meshgrid(jnp.arange(h), jnp.arange(w), indexing="ij"), -1) - 3.0
        c, s = jnp.cos(p["angle"]), jnp.sin(p["angle"])
        turned = jnp.tensordot(grid, jnp.array([[c, -s], [s, c]]), axes=1) + 3.0
        channels = [
            map_coordinates(
                image[..., i], list(jnp.moveaxis(turned, -1, 0)), order=1, mode="nearest"
            )
            for i in range(3)
        ]
        image = jnp.stack(channels, -1)
        image = jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)
        top = jax.random.randint(key, (2,), 0, 3)
        crop = lax.dynamic_slice(image, (*top, 0), (4, 4, 3))
        scaled = jax.image.scale_and_translate(
            crop, (6, 6, 3), (0, 1), p["scale"], jnp.zeros(2), "linear"
        )
        return crop, scaled, jax.image.resize(crop, (3, 9, 3), "cubic", antialias=False)

    params = {"angle": jnp.float32(0.3), "scale": jnp.array([1.5, 1.2])}
    return (
        (forward, params),
        (jax.random.uniform(jax.random.key(1), (7, 7, 3)), jax.random.key(2)),
        {},
    )


@model
def ctc_and_losses() -> Case:
    import optax

    def forward(p: Any, x: Any, labels: Any) -> Any:
        logits = x @ p["w"]
        pad = jnp.zeros(logits.shape[:2])
        onehot = jax.nn.one_hot(labels[:, :2], 5)
        return {
            "ctc": optax.ctc_loss(logits, pad, labels, jnp.zeros(labels.shape)),
            "cross": optax.softmax_cross_entropy(logits[:, :2], onehot),
            "huber": optax.huber_loss(logits),
            "cosine": optax.cosine_similarity(logits, logits[:, ::-1]),
            "focal": optax.sigmoid_focal_loss(logits[:, :2], onehot),
            "hinge": optax.hinge_loss(logits, jnp.sign(logits)),
            "kl": optax.kl_divergence(jax.nn.log_softmax(logits), jax.nn.softmax(logits[::-1])),
            "binary": optax.sigmoid_binary_cross_entropy(logits[:, :2], onehot),
            "cosh": optax.log_cosh(logits),
        }

    return (forward, {"w": normal(4, 5)}), (normal(2, 6, 4), jnp.array([[1, 3, 2], [4, 4, 0]])), {}


@model
def mixed_precision_scaling() -> Case:
    params = {"w": normal(8, 8), "v": normal(8, 8, seed=1).astype(jnp.bfloat16)}

    def forward(p: Any, x: Any) -> Any:
        y = x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
        z = jnp.dot(jax.nn.gelu(y), p["v"], preferred_element_type=jnp.float32)
        half = (z * 8).astype(jnp.float16)
        scale = jnp.max(jnp.abs(x)) / 127
        eight = jnp.clip(jnp.round(x / scale), -128, 127).astype(jnp.int8)
        product = lax.dot(eight, eight.T, preferred_element_type=jnp.int32)
        return z, half, product, product * scale**2

    return (forward, params), (normal(4, 8),), {}


@model
def closure_and_partial() -> Case:
    weights = {"w": normal(4, 3), "scale": 2.0}

    @jax.jit
    def forward(x: Any, *, power: int = 2, flags: tuple[bool, str] = (True, "sum")) -> Any:
        y = x @ weights["w"] * weights["scale"]
        y = y**power if flags[0] else y
        return {"y": y, "label": None, "both": (y.sum(), [y.mean()])}

    return functools.partial(forward, power=3), (normal(5, 4),), {}


@model
def reinforce_returns() -> Case:
    params = {"w": normal(3, 2), "v": normal(3)}

    def forward(p: Any, obs: Any, actions: Any, rewards: Any, done: Any) -> Any:
        logits, values = obs @ p["w"], obs @ p["v"]

        def gae(carry: Any, t: Any) -> Any:
            advantage, following = carry
            reward, value, end = t
            delta = reward + 0.99 * following * (1 - end) - value
            advantage = delta + 0.99 * 0.95 * (1 - end) * advantage
            return (advantage, value), advantage

        _, adv = lax.scan(gae, (0.0, 0.0), (rewards, values, done), reverse=True)
        adv = lax.stop_gradient((adv - adv.mean()) / (adv.std() + 1e-8))
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0]
        ratio = jnp.exp(logp - lax.stop_gradient(logp) + 0.1)
        policy = -jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv).mean()
        entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
        return policy - 0.01 * entropy, adv

    args = (
        normal(7, 3),
        integers(7, below=2),
        normal(7, seed=1),
        (normal(7, seed=2) > 1).astype(float),
    )
    return (forward, params), args, {}


@model
def deep_equilibrium() -> Case:
    """A fixed point with an implicit derivative by custom_vjp."""

    def f(p: Any, x: Any, z: Any) -> Any:
        return jnp.tanh(z @ p["w"] + x)

    def iterate(step: Any, z: Any) -> Any:
        def cond(state: Any) -> Any:
            return (jnp.abs(state[0] - state[1]).max() > 1e-6) & (state[2] < 60)

        return lax.while_loop(cond, lambda s: (s[1], step(s[1]), s[2] + 1), (z, step(z), 0))[1]

    @jax.custom_vjp
    def solve(p: Any, x: Any) -> Any:
        return iterate(lambda z: f(p, x, z), jnp.zeros_like(x))

    def forward(p: Any, x: Any) -> Any:
        z = solve(p, x)
        return z, (p, x, z)

    def backward(saved: Any, g: Any) -> Any:
        p, x, z = saved
        _, vjp_z = jax.vjp(lambda z: f(p, x, z), z)
        _, vjp_p = jax.vjp(lambda p, x: f(p, x, z), p, x)
        return vjp_p(iterate(lambda u: vjp_z(u)[0] + g, g))

    solve.defvjp(forward, backward)
    return (
        (lambda p, x: solve(p, x) @ p["out"], {"w": 0.2 * normal(4, 4), "out": normal(4, 2)}),
        (normal(3, 4),),
        {},
    )


@model
def hash_grid_encoding() -> Case:
    """Instant NGP: hashes of uint32, gathered tables."""
    params = {"tables": normal(3, 16, 2)}

    def forward(p: Any, x: Any) -> Any:
        primes = jnp.array([1, 2654435761], dtype=jnp.uint32)
        found = []
        for level in range(3):
            scaled = x * (4 * 2**level)
            low = jnp.floor(scaled).astype(jnp.uint32)
            frac = scaled - low
            total = 0.0
            for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
                at = low + jnp.array(corner, jnp.uint32)
                index = (at[:, 0] * primes[0]) ^ (at[:, 1] * primes[1])
                weight = jnp.prod(jnp.where(jnp.array(corner) == 1, frac, 1 - frac), -1)
                total = total + p["tables"][level][index % 16] * weight[:, None]
            found.append(total)
        return jnp.concatenate(found, -1)

    return (forward, params), (jax.random.uniform(jax.random.key(0), (6, 2)),), {}


@model
def spherical_harmonics_and_rays() -> Case:
    def forward(spheres: Any, origins: Any, directions: Any) -> Any:
        d = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)

        def distance(sphere: Any) -> Any:
            center, radius = sphere[:3], sphere[3]
            oc = origins - center
            b = jnp.sum(oc * d, -1)
            disc = b**2 - jnp.sum(oc**2, -1) + radius**2
            t = -b - jnp.sqrt(jnp.maximum(disc, 1e-6))
            return jnp.where((disc > 0) & (t > 0), t, 1e3)

        t = jax.vmap(distance)(spheres)
        nearest, hit = t.min(0), t.argmin(0)
        x, y, z = jnp.moveaxis(d, -1, 0)
        harmonics = jnp.stack(
            [jnp.full_like(x, 0.28), 0.49 * y, 0.49 * z, 1.09 * x * y, 0.31 * (3 * z**2 - 1)], -1
        )
        return jnp.exp(-nearest), hit, harmonics, jnp.arccos(jnp.clip(z, -1, 1)), jnp.arctan2(y, x)

    spheres = jnp.concatenate([normal(4, 3) + jnp.array([0, 0, 4]), jnp.ones((4, 1))], -1)
    directions = normal(9, 3, seed=2) * 0.3 + jnp.array([0, 0, 1.0])
    return (forward, spheres), (jnp.zeros((9, 3)), directions), {}


@model
def wave_equation() -> Case:
    def simulate(speed: Any, start: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            before, now = carry
            padded = jnp.pad(now, 1, mode="wrap")
            lap = (
                padded[2:, 1:-1]
                + padded[:-2, 1:-1]
                + padded[1:-1, 2:]
                + padded[1:-1, :-2]
                - 4 * now
            )
            after = 2 * now - before + 0.1 * speed**2 * lap
            return (now, after), jnp.sum(after**2)

        (_, last), energy = lax.scan(step, (start, start), length=10)
        return last, energy

    return (jax.jit(simulate), 1 + 0.1 * normal(6, 6)), (normal(6, 6, seed=1),), {}


@model
def attention_dot_product() -> Case:
    params = {name: 0.3 * normal(8, 2, 4, seed=i) for i, name in enumerate("qkv")}

    def forward(p: Any, x: Any, lengths: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[n]) for n in "qkv")
        causal = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        window = jax.nn.dot_product_attention(q, k, v, local_window_size=(2, 0))
        padded = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)
        shared = jax.nn.dot_product_attention(q, k[:, :, :1], v[:, :, :1])
        return causal, window, padded, shared

    return (forward, params), (normal(2, 6, 8), jnp.array([6, 3])), {}
