"""The script that runs a translated file in a process of its own, without the source framework."""

from fmapper_adapters.jax.translation.functions.stateless import PROOF

_MODEL = '''
has_buffers = hasattr(net, "BUFFERS")
if hasattr(net, "dropout"):
    net.dropout = lambda x, *args, **kwargs: x


def make():
    if not hasattr(net, "load_weights"):
        return ()
    trees = net.load_weights(getattr(net, f"init_{name}")(jax.random.key(0)), weights)
    return tuple(trees) if has_buffers else (trees,)


def run(model, train):
    function = getattr(net, name)
    key = {"key": jax.random.key(0)} if train and takes_key(function) else {}
    return function(*model, *args, **kwargs, **key)


def gradients(model, train):
    first, *rest = model
    return jax.jit(jax.grad(lambda first: loss(run((first, *rest), train))))(first)


def descend(model, grads, rate):
    first, *rest = model
    return jax.tree.map(lambda p, g: p - rate * g, first, grads), *rest


def named(model):
    """Returns arrays by their names in the source, as they are there."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        model[0] if isinstance(model, tuple) else model
    ):
        key, order = net.source_of(path)
        found[key] = np.asarray(leaf) if order is None else np.asarray(leaf).transpose(
            np.argsort(order))
    return found
'''
SCRIPT = PROOF.replace("# the model", _MODEL.strip())
