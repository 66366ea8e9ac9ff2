"""The script that runs a translated file in a process of its own, without the source framework."""

from fmapper.translation import proof_script
from fmapper_adapters.jax.libraries import DRAWS, SETTINGS

_IMPORTS = "from flax import nnx\n" + SETTINGS
_MODEL = '''
def array(value):
    return jnp.asarray(value)


def in_order(value):  # dicts in their own order, as the source has them; JAX would sort them
    return list(value)


def make(train, rate_of=lambda rate: 0.0):
    model = getattr(net, name)(rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(widen, nnx.state(model)))
    net.load_weights(model, weights)
    model.train() if train else model.eval()
    for layer in dropouts(model):
        if rate_of(None) == 0 or not layer.broadcast_dims:
            layer.rate = rate_of(layer.rate)
    return model


def dropouts(model):
    return [layer for _, layer in nnx.iter_modules(model) if isinstance(layer, nnx.Dropout)]


def run(model, train):
    draws.begin()
    found = leaves(model(*args, **kwargs))
    draws.end()
    return found


def run_with_dropout(rate_of):
    model = make(True, rate_of)
    if not draws.drawn and not any(layer.rate > 0 for layer in dropouts(model)):
        return None
    graph, keys, rest = nnx.split(model, nnx.RngKey, ...)

    @jax.jit
    def run(keys, rest, seed):
        moved = jax.tree.map(lambda key: move(key, seed), keys)
        return leaves(nnx.merge(graph, moved, rest)(*args, **kwargs))

    return lambda seed: with_own_draws(lambda: run(keys, rest, seed))


def move(key, seed):
    if key.ndim:
        return jax.vmap(move, (0, None))(key, seed)
    return jax.random.fold_in(key, seed)


def loss(model):
    found = run(model, None)
    floats = [x for x in found if jnp.issubdtype(x.dtype, jnp.floating)]
    total = sum(jnp.mean(x * waves(x)) for x in floats)
    return total, found


@nnx.jit
def differentiate(model):
    return uphill(*nnx.grad(loss, has_aux=True)(model))


def learn(model, train):
    return differentiate(model)


def descend(model, slopes, rate):
    nnx.update(model, stepped(nnx.state(model, nnx.Param), slopes, rate))
    return model


def named(model, kind=nnx.Variable):
    """Returns variables by their names in the source, as they are there."""
    found = {}
    for path, layer in nnx.iter_modules(model):
        known = next((found for cls, found in net.ARRAYS.items() if isinstance(layer, cls)), {})
        for key, variable in vars(layer).items():
            if not isinstance(variable, kind) or isinstance(variable, nnx.RngState):
                continue
            source, order = known.get(key, (key, None))
            place = ".".join(map(str, (*path, source)))
            for end, other in getattr(net, "ORDERS", {}).items():
                order = other if f".{place}".endswith(f".{end}") else order
            for full, value in apart(place, np.asarray(variable[...])):
                for ours, theirs in getattr(net, "RENAMED", {}).items():
                    if f".{full}".endswith(f".{ours}"):
                        full = full.removesuffix(ours) + theirs
                        break
                found[full] = value if order is None else value.transpose(np.argsort(order))
    return found


def gradients_by_name(model, slopes):
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    return named(nnx.merge(graphdef, slopes, rest), nnx.Param)


def arrays_by_name(model):
    return named(model)
'''
SCRIPT = proof_script(_IMPORTS, _MODEL, DRAWS)
