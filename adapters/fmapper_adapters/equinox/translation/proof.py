"""The script that runs a translated file in a process of its own, without the source framework."""

from fmapper.translation import proof_script
from fmapper_adapters.jax.libraries import DRAWS, SETTINGS, STATELESS

_IMPORTS = "import functools, inspect, equinox as eqx\n" + SETTINGS
_MODEL = '''
def make(train):
    model = jax.tree.map(widen, getattr(net, name)(key=jax.random.key(0)))
    model = net.load_weights(model, weights)
    return model if train else eqx.nn.inference_mode(model)


def call(model, train):
    key = {"key": jax.random.key(0)} if train and takes_key(type(model).__call__) else {}
    return with_rates(model)(*args, **kwargs, **key)


def is_dropout(x):
    return isinstance(x, eqx.nn.Dropout)


def with_rates(model, rate_of=lambda rate: 0.0):
    def change(x):
        if not is_dropout(x) or (getattr(x, "broadcast_dims", ()) and rate_of(None) != 0):
            return x
        return eqx.tree_at(lambda d: d.p, x, rate_of(x.p))

    return jax.tree.map(change, model, is_leaf=is_dropout)


def run_with_dropout(rate_of):
    model = with_rates(make(True), rate_of)
    layers = filter(is_dropout, jax.tree.leaves(model, is_leaf=is_dropout))
    if not draws.drawn and not any(layer.p > 0 for layer in layers):
        return None

    @eqx.filter_jit
    def run(model, key):
        keys = {"key": key} if takes_key(type(model).__call__) else {}
        return leaves(model(*args, **kwargs, **keys))

    return lambda seed: with_own_draws(lambda: run(model, jax.random.key(seed)))


@functools.cache
def differentiate(train):
    gradient = eqx.filter_grad(lambda model: loss(model, train), has_aux=True)
    return eqx.filter_jit(lambda model: uphill(*gradient(model)))


def descend(model, slopes, rate):
    weights, rest = eqx.partition(model, eqx.is_inexact_array)
    return eqx.combine(stepped(weights, slopes, rate), rest)


def named(model):
    """Returns arrays by their names in the source, as they are there."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array)):
        for key, order, array in parts(model, path, np.asarray(leaf)):
            found |= as_in_source(key, order, array, found)
    return found


def parts(model, path, array):
    """Yields the names of an array in the source, and the order and the array of each."""
    if not hasattr(net, "sources_of"):
        yield *net.source_of(model, path), array
        return
    sources = net.sources_of(model, path)
    for (key, order), block in zip(sources, net.blocks_of(array, len(sources)), strict=True):
        yield key, order, block


def as_in_source(key, order, array, found):
    """Returns an array by its name, in the layout of the source."""
    if order is not None:
        array = np.flip(array, [at for at, i in enumerate(order) if i < 0])
        array = array.transpose(np.argsort([max(i, ~i) for i in order]))
    if key in weights and array.size == weights[key].size:
        array = array.reshape(weights[key].shape)
    if key in found:
        raise ValueError(f"two arrays of the file are {key}")
    return {key: array}
'''
SCRIPT = proof_script(_IMPORTS, STATELESS + _MODEL, DRAWS)
