"""What torch has whole is used where JAX spells it out, and only there."""

import functools

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

import fmapper  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 8)).astype(np.float32)
SQUARE = RNG.normal(size=(4, 4)).astype(np.float32)
HEADS = [RNG.normal(size=(2, 5, 4, 8)).astype(np.float32) for _ in range(3)]
SCALE, BIAS = RNG.normal(size=(2, 8)).astype(np.float32)


def called(model):
    """The names of the functions in the graph of a converted model."""
    return [
        node.target if isinstance(node.target, str) else node.target.__name__
        for node in model.graph.nodes
        if node.op.startswith("call")
    ]


def converted(function, *args):
    """The model of a function, after its outputs and gradients were compared with JAX's."""
    model = fmapper.convert(function, "torch", args)
    inputs = [torch.tensor(x) for x in args]
    real = [i for i, x in enumerate(args) if x.dtype.kind == "f"]
    for i in real:
        inputs[i].requires_grad_()
    got = model(*inputs)
    want = function(*args)
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=2e-5, atol=2e-5)
    weights = np.cos(np.arange(got.numel(), dtype=np.float32)).reshape(got.shape)
    (got * torch.tensor(weights)).sum().backward()
    gradients = jax.grad(lambda *a: (function(*a) * weights).sum(), argnums=real)(*args)
    for i, gradient in zip(real, gradients, strict=True):
        np.testing.assert_allclose(inputs[i].grad.numpy(), gradient, rtol=2e-4, atol=2e-5)
    return model


def mean(x, axis=-1):
    return x.mean(axis, keepdims=True)


def layer_norm(x, scale=1.0, bias=None, eps=1e-5):
    normal = (x - mean(x)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + eps) * scale
    return normal if bias is None else normal + bias


def fast_layer_norm(x, scale, bias):
    """As Flax writes it."""
    average = x.mean(-1)
    variance = jnp.maximum(0.0, (x**2).mean(-1) - average**2)
    factor = jax.lax.rsqrt(variance[..., None] + 1e-6) * scale
    return (x - average[..., None]) * factor + bias


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


def attention(q, k, v, *, scale=0.3, mask=None, bias=None):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = jnp.where(mask, logits, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, -1), v)


WHOLE = {
    "softmax": (jax.nn.softmax, (X,), ["softmax"]),
    "softmax over the second dimension": (lambda x: jax.nn.softmax(x, 1), (X,), ["softmax"]),
    "log_softmax": (jax.nn.log_softmax, (X,), ["log_softmax"]),
    "gelu": (
        lambda x: jax.nn.gelu(x, approximate=False),
        (X,),
        ["exact_gelu", "getitem"],
    ),
    "gelu with tanh": (jax.nn.gelu, (X,), ["gelu"]),
    "silu": (lambda x: x * jax.nn.sigmoid(x), (X,), ["silu"]),
    "layer norm": (layer_norm, (X, SCALE, BIAS), ["layer_norm"]),
    "layer norm of Flax": (fast_layer_norm, (X, SCALE, BIAS), ["layer_norm"]),
    "layer norm without weights": (layer_norm, (X,), ["layer_norm"]),
    "layer norm of a square": (layer_norm, (SQUARE, SCALE[:4], BIAS[:4]), ["layer_norm"]),
    "RMS norm": (rms_norm, (X, SCALE), ["rms_norm"]),
    "attention": (attention, HEADS, None),
    "attention with a mask": (
        functools.partial(attention, mask=np.tril(np.ones((5, 5), bool))),
        HEADS,
        None,
    ),
    "attention with a mask that leaves nothing": (
        functools.partial(attention, mask=np.arange(5)[:, None] > 2),
        HEADS,
        None,
    ),
    "attention with a bias": (
        functools.partial(attention, bias=RNG.normal(size=(4, 5, 5)).astype(np.float32)),
        HEADS,
        None,
    ),
    "attention of JAX": (
        functools.partial(jax.nn.dot_product_attention, is_causal=True),
        HEADS,
        None,
    ),
    "dense": (lambda x, w, b: x @ w + b, (SQUARE, SQUARE[::-1].copy(), BIAS[:4]), ["addmm"]),
    "dense with the weights first": (
        lambda x, w, b: (w @ x.T).T + b,
        (SQUARE, SQUARE[::-1].copy(), BIAS[:4]),
        ["linear"],
    ),
    "dense of several dimensions": (
        lambda x, w, b: jnp.einsum("abc,cde->abde", x, w) + b,
        (X, RNG.normal(size=(8, 2, 3)).astype(np.float32), SCALE[:6].reshape(2, 3)),
        None,
    ),
    "mean": (lambda x: x.mean((0, 2)), (X,), ["mean"]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_spelt_out_becomes_one_call(name):
    function, args, wanted = WHOLE[name]
    found = called(converted(function, *args))
    if wanted is not None:
        assert found in (wanted, ["t", *wanted])
    elif "attention" in name:
        assert "attend" in found
        assert "softmax" not in found
    elif "dense" in name:
        assert "linear" in found
        assert "add" not in found
        assert "einsum" not in found


# The arithmetic is that of something known, but the dimensions or the numbers are not.
NEARLY = {
    "softmax of complex numbers": (
        lambda x: jnp.abs(jax.nn.softmax(jax.lax.complex(x, x[::-1]))),
        (SQUARE,),
        "softmax",
    ),
    "softmax, shifted by a number": (
        lambda x: jnp.exp(x - 0.5) / jnp.exp(x - 0.5).sum(-1, keepdims=True),
        (X,),
        "softmax",
    ),
    "softmax, shifted by the mean": (
        lambda x: jnp.exp(x - mean(x)) / jnp.exp(x - mean(x)).sum(-1, keepdims=True),
        (X,),
        "softmax",
    ),
    "softmax, shifted by the largest of all": (
        lambda x: jnp.exp(x - x.max()) / jnp.exp(x - x.max()).sum(-1, keepdims=True),
        (X,),
        "softmax",
    ),
    "softmax, shifted by the largest and a number": (
        lambda x: (
            jnp.exp(x - x.max(-1, keepdims=True, initial=3.0))
            / jnp.exp(x - x.max(-1, keepdims=True, initial=3.0)).sum(-1, keepdims=True)
        ),
        (X,),
        "softmax",
    ),
    "softmax, summed over the other dimension": (
        lambda x: jnp.exp(x - mean(x, 1)) / jnp.exp(x - mean(x, 1)).sum(0),
        (SQUARE,),
        "softmax",
    ),
    "softmax, the sum lies along the other dimension": (
        lambda x: jnp.exp(x - 1) / jnp.exp(x - 1).sum(1)[None, :],
        (SQUARE,),
        "softmax",
    ),
    "softmax, shifted by something else in each place": (
        lambda x: jnp.exp(x - x * 0.5) / jnp.exp(x - x * 0.5).sum(-1, keepdims=True),
        (SQUARE,),
        "nothing",
    ),
    "layer norm, the mean lies along the other dimension": (
        lambda x: (x - x.mean(1)[None, :]) * jax.lax.rsqrt(x.var(1, keepdims=True) + 1e-5),
        (SQUARE,),
        "layer_norm",
    ),
    "layer norm, the variance is of the other dimension": (
        lambda x: (x - mean(x)) * jax.lax.rsqrt(x.var(0, keepdims=True) + 1e-5),
        (SQUARE,),
        "layer_norm",
    ),
    "layer norm, the variance is of something else": (
        lambda x, y: (x - mean(x)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5),
        (SQUARE, SQUARE[::-1].copy()),
        "layer_norm",
    ),
    "layer norm, divided by one less": (
        lambda x: (x - mean(x)) * jax.lax.rsqrt(x.var(-1, keepdims=True, ddof=1) + 1e-5),
        (SQUARE,),
        "layer_norm",
    ),
    "layer norm, the scale lies along the other dimension": (
        lambda x, s: layer_norm(x) * s[:, None],
        (SQUARE, SCALE[:4]),
        "nothing",
    ),
    "gelu with another number": (
        lambda x: 0.5 * x * (1 + jax.lax.erf(x * 0.7)),
        (X,),
        "gelu",
    ),
    "gelu of two things": (
        lambda x, y: 0.5 * x * (1 + jax.lax.erf(y * np.float32(np.sqrt(0.5)))),
        (X, X * 2),
        "gelu",
    ),
    "silu of two things": (lambda x, y: x * jax.nn.sigmoid(y), (X, X * 2), "silu"),
    "a sum divided by another number": (lambda x: x.sum(-1) / 7, (X,), "mean"),
    "a bias along the other dimension": (
        lambda x, w, b: x @ w + b[:, None],
        (SQUARE, SQUARE[::-1].copy(), BIAS[:4]),
        "addmm",
    ),
    "attention, the softmax is over the queries": (
        lambda q, k, v: jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), 2), v
        ),
        HEADS,
        "attend",
    ),
    "attention, the values are summed over the queries": (
        lambda q, k, v: jnp.einsum(
            "bhqk,bqhd->bkhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1), v
        ),
        HEADS,
        "attend",
    ),
    "attention, the weights are changed": (
        lambda q, k, v: jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1) ** 2, v
        ),
        HEADS,
        "attend",
    ),
}


@pytest.mark.nightly_cases(
    "softmax, shifted by the largest and a number",
    "layer norm, the scale lies along the other dimension",
    "attention, the weights are changed",
    "layer norm, the variance is of something else",
    "softmax of complex numbers",
    "softmax, summed over the other dimension",
    "softmax, the sum lies along the other dimension",
    "softmax, shifted by something else in each place",
    "layer norm, the mean lies along the other dimension",
    "layer norm, the variance is of the other dimension",
    "attention, the softmax is over the queries",
)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NEARLY)
def test_what_only_looks_like_it_is_left_alone(name):
    function, args, unwanted = NEARLY[name]
    assert unwanted not in called(converted(function, *args))


@pytest.mark.nightly
def test_batch_norm_takes_statistics_that_nobody_trains_only():
    def norm(params, x):
        centred = x - params["mean"]
        return centred * jax.lax.rsqrt(params["var"] + 1e-5) * params["scale"] + params["bias"]

    values = {name: np.abs(SCALE) + i for i, name in enumerate(("mean", "var", "scale", "bias"))}
    params = {name: jnp.asarray(x) for name, x in values.items()}
    model = fmapper.convert((norm, params), "torch", (X,))
    assert "batch_norm" not in called(model)
    model(torch.tensor(X)).square().sum().backward()
    want = jax.grad(lambda p: jnp.square(norm(p, X)).sum())(params)
    for name, gradient in want.items():
        np.testing.assert_allclose(getattr(model, name).grad, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_batch_norm_in_evaluation_is_one_call():
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    layer.mean[...], layer.var[...] = jnp.asarray(BIAS), jnp.abs(SCALE)
    model = fmapper.convert(layer, "torch", (X,)).eval()
    assert "batch_norm" in called(model)
    assert "rsqrt" not in called(model)
    layer.eval()
    assert fmapper.verify(layer, model, X)


def test_chains_of_moves_become_one():
    def turned(x):
        return jnp.transpose(jnp.transpose(x[:, None], (1, 2, 0, 3))[0], (1, 0, 2))

    assert called(converted(lambda x: turned(x) * 2, X)) in (["mul"], ["reshape", "mul"])


@pytest.mark.nightly
def test_constants_are_computed_once_and_move_along():
    model = converted(
        lambda x: jnp.where(np.tril(np.ones((4, 4), bool)), x, 0.0) + jnp.eye(4), SQUARE
    )
    made = [name for name, _ in model.named_buffers()]
    assert made
    assert not model.state_dict()
    assert "arange" not in called(model)
    wide = model.double()
    assert wide(torch.tensor(SQUARE).double()).dtype is torch.float64


@pytest.mark.nightly
def test_weights_of_convolutions_lie_as_torch_reads_them():
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))
    x = RNG.normal(size=(2, 6, 6, 3)).astype(np.float32)
    model = fmapper.convert(layer, "torch", (x,))
    assert fmapper.verify(layer, model, x)
    kernel = model.kernel
    assert kernel.shape == (3, 3, 3, 4)
    np.testing.assert_array_equal(kernel.detach(), layer.kernel[...])
    assert kernel.permute(3, 2, 0, 1).is_contiguous(memory_format=torch.channels_last)
    model(torch.tensor(x)).sum().backward()
    torch.optim.Adam(model.parameters()).step()
    assert kernel.permute(3, 2, 0, 1).is_contiguous(memory_format=torch.channels_last)


def test_the_same_thing_is_computed_once():
    def twice(x):
        return jnp.tanh(x + 1) * jnp.tanh(x + 1)

    assert sorted(called(converted(twice, X))) == ["add", "mul", "tanh"]


@pytest.mark.nightly
@pytest.mark.parametrize(("mask", "causal"), [(jnp.tril, True), (jnp.triu, False)])
def test_attention_is_told_that_its_mask_is_causal(mask, causal):
    def function(q, k, v):
        return attention(q, k, v, mask=mask(jnp.ones((5, 5), bool)))

    model = converted(function, *HEADS)
    (node,) = [n for n in model.graph.nodes if "attend" in n.name and n.op.startswith("call")]
    assert node.kwargs.get("is_causal", False) is causal


@pytest.mark.nightly
def test_attention_of_one_text_has_a_batch_as_the_fast_one_wants_it():
    model = converted(attention, *(x[:1] for x in HEADS))
    (node,) = [n for n in model.graph.nodes if "attend" in n.name and n.op.startswith("call")]
    assert [source.meta["val"].ndim for source in node.args[:3]] == [4, 4, 4]
