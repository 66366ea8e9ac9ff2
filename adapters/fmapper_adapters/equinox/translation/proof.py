"""The script that runs a translated file in a process of its own, without the source framework."""

from fmapper_adapters.jax.libraries import PROOF

_MODEL = '''
import equinox as eqx


def make():
    return net.load_weights(getattr(net, name)(key=jax.random.key(0)), weights)


def run(model, train):
    key = {"key": jax.random.key(0)} if train and takes_key(type(model).__call__) else {}
    return without_dropout(model)(*args, **kwargs, **key)


def without_dropout(model):
    is_dropout = lambda x: isinstance(x, eqx.nn.Dropout)
    still = lambda x: eqx.tree_at(lambda d: d.p, x, 0.0) if is_dropout(x) else x
    return jax.tree.map(still, model, is_leaf=is_dropout)


def gradients(model, train):
    return eqx.filter_jit(eqx.filter_grad(lambda model: loss(run(model, train))))(model)


def descend(model, grads, rate):
    return eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, grads))


def named(model):
    """Returns arrays by their names in the source, as they are there."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array)):
        key, order = net.source_of(model, path)
        array = np.asarray(leaf)
        if order is not None:
            array = np.flip(array, [at for at, i in enumerate(order) if i < 0])
            array = array.transpose(np.argsort([max(i, ~i) for i in order]))
        if key in weights and array.size == weights[key].size:
            array = array.reshape(weights[key].shape)
        if key in found:
            raise ValueError(f"two arrays of the file are {key}")
        found[key] = array
    return found
'''
SCRIPT = PROOF.replace("# the model", _MODEL.strip())
