"""The parts of the proof scripts that files share: settings of XLA, functions without state."""

# What both modes have in common is compiled once, and not with less effort: at XLA's level 0 the
# second step of a network with attention over channels is NaN. XLA can wait for itself forever
# where computations are dispatched while others run.
SETTINGS = """
import os, tempfile
import jax, jax.numpy as jnp
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.TemporaryDirectory()
    jax.config.update("jax_compilation_cache_dir", cache.name)
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_default_prng_impl", "rbg")  # its first weights compile ten times as fast
if double:
    jax.config.update("jax_enable_x64", True)


def widen(x):  # arrays of a model that is made in single precision
    is_single = double and getattr(x, "dtype", None) in (jnp.float32, jnp.complex64)
    return x.astype(jnp.promote_types(x.dtype, jnp.float64)) if is_single else x


def waves(x):
    kind = x.dtype if x.dtype == jnp.float64 else jnp.float32
    return jnp.cos(jnp.arange(x.size, dtype=kind)).reshape(x.shape)


def uphill(slopes, found):
    return found, jax.tree.map(jnp.conj, slopes)  # so that it is also by complex numbers


@jax.jit
def stepped(weights, slopes, rate):
    return jax.tree.map(lambda p, g: p - rate * g, weights, slopes)
"""

# Gives functions of `jax.random` the numbers that the source is given.
DRAWS = """
def uniform(key, shape=(), dtype=float, minval=0.0, maxval=1.0, **options):
    drawn = draws.take("uniform", shape) * (np.float32(maxval) - np.float32(minval))
    return jnp.asarray(drawn + np.float32(minval), dtype)


def bernoulli(key, p=0.5, shape=None, **options):
    return uniform(key, jnp.shape(p) if shape is None else shape) < p


def randint(key, shape, minval, maxval, dtype=int, **options):
    drawn = jnp.floor(uniform(key, shape) * (maxval - minval)) + minval
    return drawn.astype(dtype)


own_draws = {
    name: getattr(jax.random, name)
    for name in ("uniform", "bernoulli", "randint", "normal", "exponential", "permutation")
}


def with_own_draws(run):  # while JAX draws numbers of its own
    given = {name: getattr(jax.random, name) for name in own_draws}
    vars(jax.random).update(own_draws)
    try:
        return run()
    finally:
        vars(jax.random).update(given)


jax.random.uniform, jax.random.bernoulli, jax.random.randint = uniform, bernoulli, randint
jax.random.normal = lambda key, shape=(), dtype=float, **options: (
    jnp.asarray(draws.take("normal", shape), dtype)
)
jax.random.exponential = lambda key, shape=(), dtype=float, **options: (
    -jnp.log1p(-uniform(key, shape, dtype))
)
jax.random.permutation = lambda key, x, *args, **options: jnp.argsort(uniform(key, (x,)))
"""

# Before it stand `make`, `call`, `differentiate`, `descend` and `named` of a library.
STATELESS = """
def takes_key(function):  # by keyword: a model's own argument may be called so
    own = inspect.signature(function).parameters.get("key")
    return own is not None and own.kind is inspect.Parameter.KEYWORD_ONLY


def array(value):
    return jnp.asarray(value)


def in_order(value):  # dicts in their own order, as the source has them; JAX would sort them
    return list(value)


def run(model, train):
    draws.begin()
    found = leaves(call(model, train))
    draws.end()
    return found


def loss(model, train):
    found = run(model, train)
    floats = [x for x in found if jnp.issubdtype(x.dtype, jnp.floating)]
    total = sum(jnp.mean(x * waves(x)) for x in floats)
    return total, found


def learn(model, train):
    return differentiate(train)(model)


def gradients_by_name(model, slopes):
    return named(slopes)


def arrays_by_name(model):
    return named(model)
"""
