"""What the comparison of a model of JAX with what was made of it sees, and says where it cannot."""

import warnings

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

X = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)


@pytest.fixture
def lowered_as(monkeypatch):
    """Gives a primitive another lowering for the time of a test."""

    def enter(op, change):
        from fmapper.programs import lowering
        from fmapper_adapters.torch.lax.matrices import linalg

        right = getattr(linalg, op)

        def other(*args, **kwargs):
            return change(right(*args, **kwargs))

        added = {f"lax::{op}": fmapper.Lowering(other, takes_avals=op == "qr")}
        monkeypatch.setitem(lowering.added, "torch", added)

    return enter


def symmetric(x):
    return x @ x.T


def decayed(x):
    values, vectors = jnp.linalg.eigh(symmetric(x))
    return vectors @ jnp.diag(jnp.exp(-values)) @ vectors.T


def turned(x, dimension=-1):
    """Every second vector with the other sign."""
    odd = torch.cumsum(torch.ones_like(x), dimension) % 2
    return x * (2 * odd - 1)


@pytest.mark.nightly_cases("<lambda>0")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.linalg.eigh(symmetric(x)),
        lambda x: jax.lax.scan(
            lambda c, _: (c + jnp.linalg.eigh(symmetric(c))[1] ** 2, None), x, None, length=2
        )[0],
        decayed,
    ],
)
def test_other_signs_of_vectors_are_as_right(lowered_as, function):
    lowered_as("eigh", lambda found: (turned(found[0]), found[1]))
    fmapper.convert(function, "torch", (X,))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("function", "change"),
    [
        (lambda x: jnp.linalg.eigh(symmetric(x))[0], lambda f: (f[0], f[1] * 1.1)),
        (lambda x: jnp.linalg.eigh(symmetric(x))[1], lambda f: (f[0] * 1.1, f[1])),
        (decayed, lambda f: (f[0].flip(-1), f[1])),
        (
            lambda x: (x * 2, jnp.linalg.eigh(jax.lax.sort(symmetric(x)))[0].sum()),
            lambda f: (f[0], f[1] + 1),
        ),
    ],
)
def test_what_does_not_hang_on_the_signs_is_compared(lowered_as, function, change):
    lowered_as("eigh", change)
    with pytest.raises(
        fmapper.ConversionError, match="the converted model differs from the original"
    ):
        fmapper.convert(function, "torch", (X,))


def test_what_hangs_on_the_signs_is_said(lowered_as):
    lowered_as("eigh", lambda found: (turned(found[0]), found[1]))
    with pytest.warns(fmapper.ConversionWarning, match=r"output\[1\] could not be compared"):
        fmapper.convert(lambda x: (x, jnp.linalg.eigh(symmetric(x))[1].sum(1)), "torch", (X,))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["svd", "qr"])
def test_other_factors(lowered_as, name):
    def change(found):
        if name == "svd":
            s, u, v = found
            return s, turned(u), turned(v, -2)
        return turned(found[0]), turned(found[1], -2)

    lowered_as(name, change)
    fmapper.convert(getattr(jnp.linalg, name), "torch", (X,))
    lowered_as(name, lambda found: (found[0] * 1.5, *found[1:]))
    with pytest.raises(
        fmapper.ConversionError, match="the converted model differs from the original"
    ):
        fmapper.convert(getattr(jnp.linalg, name), "torch", (X,))


@pytest.mark.nightly
def test_sizes_for_which_the_model_itself_fails_are_said():
    four = np.ones((4, 2), np.float32)

    def picky(x):
        if not jax.export.is_symbolic_dim(x.shape[0]) and x.shape[0] != 4:
            raise ValueError("four rows, please")
        return x * 2

    with pytest.warns(
        fmapper.ConversionWarning,
        match=r"only on the examples.* n = 5: ValueError: four rows, please",
    ):
        fmapper.convert(picky, "torch", (four,), dynamic_shapes=["n, _"])


def test_no_other_sizes_are_said():
    def fixed(x):
        return x * (2 if x.shape[0] ** 2 == 16 else 3)

    with pytest.warns(fmapper.ConversionWarning, match="no other sizes were found"):
        fmapper.convert(fixed, "torch", (np.ones(4, np.float32),), dynamic_shapes=["n"])


@pytest.mark.parametrize("block", [8, 64])
def test_sizes_in_blocks_are_found(block):
    def blocks(x):
        if x.shape[0] % block:
            raise ValueError("whole blocks only")
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fmapper.convert(blocks, "torch", (np.ones(2 * block, np.float32),), dynamic_shapes=["n"])
