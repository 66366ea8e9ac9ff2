"""The script that runs a translated file in a process of its own, without the source framework."""

from fmapper.translation import proof_script
from fmapper_adapters.jax.translation.functions.stateless import DRAWS, SETTINGS, STATELESS

_IMPORTS = "import functools, inspect\n" + SETTINGS
_MODEL = '''
has_buffers = hasattr(net, "BUFFERS")
own_dropout = getattr(net, "dropout", None)
if own_dropout is not None:
    net.dropout = lambda x, *args, **kwargs: x


def make(train):
    if not hasattr(net, "load_weights"):
        return ()
    trees = jax.tree.map(widen, getattr(net, f"init_{name}")(jax.random.key(0)))
    trees = net.load_weights(trees, weights)
    return tuple(trees) if has_buffers else (trees,)


def call(model, train):
    function = getattr(net, name)
    key = {"key": jax.random.key(0)} if train and takes_key(function) else {}
    return function(*model, *args, **kwargs, **key)


def run_with_dropout(rate_of):
    model = make(True)
    if own_dropout is None and not draws.drawn:
        return None

    def dropout(x, rate, broadcast_dims=(), key=None):
        chosen = rate if broadcast_dims else rate_of(rate)
        return x if chosen == 0 else own_dropout(x, chosen, broadcast_dims, key)

    @jax.jit
    def run(model, key):
        function = getattr(net, name)
        keys = {"key": key} if takes_key(function) else {}
        return leaves(function(*model, *args, **kwargs, **keys))

    def outputs(seed):
        still = getattr(net, "dropout", None)
        net.dropout = dropout
        try:
            return with_own_draws(lambda: run(model, jax.random.key(seed)))
        finally:
            net.dropout = still

    return outputs


@functools.cache
def differentiate(train):
    def first_loss(first, rest):
        return loss((first, *rest), train)

    gradient = jax.grad(first_loss, has_aux=True)
    compiled = jax.jit(lambda first, rest: uphill(*gradient(first, rest)))
    return lambda model: compiled(model[0], model[1:])


def descend(model, slopes, rate):
    first, *rest = model
    return stepped(first, slopes, rate), *rest


def named(model):
    """Returns arrays by their names in the source, as they are there."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        model[0] if isinstance(model, tuple) else model
    ):
        for key, order, array in parts(path, np.asarray(leaf)):
            found[key] = array if order is None else array.transpose(np.argsort(order))
    return found


def parts(path, array):
    """Yields the names of an array in the source, and the order and the array of each."""
    if not hasattr(net, "sources_of"):
        yield *net.source_of(path), array
        return
    sources = net.sources_of(path)
    for (key, order), block in zip(sources, net.blocks_of(array, len(sources)), strict=True):
        yield key, order, block
'''
SCRIPT = proof_script(_IMPORTS, STATELESS + _MODEL, DRAWS)
