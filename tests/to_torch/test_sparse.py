"""Sparse matrices of JAX in models that are converted to torch."""

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
sparse = pytest.importorskip("jax.experimental.sparse")

from support.from_jax import check  # noqa: E402


def array(*shape):
    x = np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)
    return jnp.asarray(np.where(np.random.default_rng(0).random(shape) < 0.5, x, 0))


def bcoo(*shape, **options):
    return sparse.BCOO.fromdense(array(*shape), **options)


M = bcoo(4, 3)
BATCH = bcoo(2, 4, 3, n_batch=1)

CASES = {
    "matrix by matrix": (lambda d, x: sparse.BCOO((d, M.indices), shape=M.shape) @ x,
                         (M.data, array(3, 2))),
    "matrix by vector": (lambda d, x: sparse.BCOO((d, M.indices), shape=M.shape) @ x,
                         (M.data, array(3))),
    "from the left": (lambda d, x: x @ sparse.BCOO((d, M.indices), shape=M.shape),
                      (M.data, array(2, 4))),
    "transposed": (lambda d, x: sparse.BCOO((d, M.indices), shape=M.shape).T @ x,
                   (M.data, array(4, 2))),
    "to dense": (lambda d: sparse.BCOO((d, M.indices), shape=M.shape).todense() ** 2, (M.data,)),
    "batch": (lambda d, x: sparse.bcoo_dot_general(
                  sparse.BCOO((d, BATCH.indices), shape=BATCH.shape), x,
                  dimension_numbers=(([2], [1]), ([0], [0]))), (BATCH.data, array(2, 3, 5))),
    "batch that is free": (lambda d, x: sparse.bcoo_dot_general(
                  sparse.BCOO((d, BATCH.indices), shape=BATCH.shape), x,
                  dimension_numbers=(([2], [0]), ([], []))), (BATCH.data, array(3, 5))),
    "batch that is summed": (lambda d, x: sparse.bcoo_dot_general(
                  sparse.BCOO((d, BATCH.indices), shape=BATCH.shape), x,
                  dimension_numbers=(([0, 2], [1, 0]), ([], []))), (BATCH.data, array(3, 2))),
    "every element": (lambda d, x: sparse.bcoo_dot_general(
                  sparse.BCOO((d, M.indices), shape=M.shape), x,
                  dimension_numbers=(([0, 1], [0, 1]), ([], []))), (M.data, array(4, 3))),
    "sums": (lambda d: sparse.BCOO((d, M.indices), shape=M.shape).sum(0).todense(), (M.data,)),
    "times dense": (lambda d, x: (sparse.BCOO((d, M.indices), shape=M.shape) * x).todense(),
                    (M.data, array(4, 3))),
    "times sparse": (lambda d: ((m := sparse.BCOO((d, M.indices), shape=M.shape)) @ m.T).todense(),
                     (M.data,)),
    "batched by vmap": (jax.vmap(lambda d, x: sparse.BCOO((d, M.indices), shape=M.shape) @ x),
                        (jnp.stack([M.data, 2 * M.data]), array(2, 3))),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.nightly_cases(
    "transposed", "batch", "batch that is summed", "sums", "times sparse", "batched by vmap"
)
@pytest.mark.parametrize("name", CASES)
def test_operations(name):
    function, inputs = CASES[name]
    check(function, *inputs, gradients=name != "times sparse")  # JAX has none of that


@pytest.mark.nightly
@pytest.mark.parametrize("dense", [0, 1])
def test_dense_dimensions(dense):
    m = bcoo(4, 3, 2, n_dense=dense)
    check(
        lambda d, x: sparse.bcoo_dot_general(
            sparse.BCOO((d, m.indices), shape=m.shape),
            x,
            dimension_numbers=(([1], [0]), ([], [])),
        ),
        m.data,
        array(3, 5),
        gradients=not dense,  # JAX has none
    )


@pytest.mark.nightly
def test_a_matrix_from_a_dense_one():
    check(lambda x: sparse.BCOO.fromdense(x, nse=7) @ jnp.ones((3, 2)), array(4, 3))


@pytest.mark.nightly
def test_compressed_rows():
    m = sparse.BCSR.fromdense(array(4, 3))
    check(
        lambda d, x: sparse.BCSR((d, m.indices, m.indptr), shape=m.shape) @ x, m.data, array(3, 2)
    )


@pytest.mark.nightly
def test_elements_that_are_not_specified_meet_no_infinity():
    m = sparse.BCOO.fromdense(jnp.asarray([[1.0, 0.0], [0.0, 2.0]]), nse=3)
    x = np.asarray([[np.inf, 1.0], [1.0, 3.0]], np.float32)
    model = fmapper.convert(lambda x: m @ x, "torch", (x,))
    np.testing.assert_array_equal(model(torch.from_numpy(x)).detach(), m @ x)


@pytest.mark.nightly
def test_a_layer_with_a_sparse_weight():
    """A matrix is a tree of its data and indices: the data are trained."""
    m = bcoo(4, 3)
    x = np.array(array(2, 3))

    def layer(params, x):
        return jnp.asarray(x) @ params["weight"].T + params["bias"]

    params = {"weight": m, "bias": jnp.arange(4.0)}
    model = fmapper.convert((layer, params), "torch", (x,))
    np.testing.assert_allclose(
        model(torch.from_numpy(x)).detach(), layer(params, x), rtol=1e-5, atol=1e-6
    )
    model(torch.from_numpy(x)).sum().backward()
    want = jax.grad(
        lambda d: layer({**params, "weight": sparse.BCOO((d, m.indices), shape=m.shape)}, x).sum()
    )(m.data)
    found = {n: p.grad for n, p in model.named_parameters() if n.startswith("weight")}
    assert len(found) == 1
    np.testing.assert_allclose(*found.values(), want, rtol=1e-5)
