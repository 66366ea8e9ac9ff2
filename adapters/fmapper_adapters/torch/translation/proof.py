"""The script that runs a translated file in a process of its own, without the source framework."""

from fmapper.translation import proof_script

_IMPORTS = """
import re, torch
from torch import nn
if double:
    torch.set_default_dtype(torch.float64)
"""
_MODEL = '''
def array(value):
    return torch.from_numpy(np.array(value))


def in_order(value):  # as JAX has flattened it
    return sorted(value)


def make(train, rate_of=lambda rate: 0.0):
    model = getattr(net, name)()
    net.load_weights(model, weights)
    model.train(train)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = rate_of(layer.p)
    return model


def run(model, train):
    with torch.no_grad():
        return [x.numpy() for x in leaves(model(*args, **kwargs))]


def run_with_dropout(rate_of):
    model = make(True, rate_of)
    if not any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in model.modules()):
        return None

    def outputs(seed):
        torch.manual_seed(seed)
        return run(model, True)

    return outputs


def waves(x):
    kind = x.dtype if x.dtype == torch.float64 else torch.float32
    return torch.cos(torch.arange(x.numel(), dtype=kind)).reshape(x.shape)


def learn(model, train):
    model.zero_grad()
    found = leaves(model(*args, **kwargs))
    floats = [x for x in found if x.is_floating_point()]
    total = sum((x * waves(x)).mean() for x in floats)
    if total.requires_grad:  # or they depend on no parameter, for which JAX has zeros
        total.backward()
    slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [x.detach().numpy() for x in found], slopes


def descend(model, slopes, rate):
    with torch.no_grad():
        for parameter, slope in zip(model.parameters(), slopes):
            parameter -= rate * slope
    return model


def names(model):
    for path, module in model.named_modules():
        known = net.ARRAYS.get(type(module), {})
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, parameter in own:
            source, order = known.get(key, (key, None))
            full = f"{path}.{source}" if path else source
            for ours, (theirs, other) in getattr(net, "RENAMED", {}).items():
                if f".{path}.{key}".endswith(f".{ours}"):
                    full, order = f"{path}.{key}".lstrip(".").removesuffix(ours) + theirs, other
                    break
            for ours, theirs in getattr(net, "LISTS", {}).items():
                full = re.sub(rf"\\b{ours}\\.(\\d+)", rf"{theirs}\\1", full)
            for full, order, rows in gates_of(f"{path}.{key}".lstrip("."), full, order):
                if is_known(full):
                    yield full, order, parameter, rows


def gates_of(ours, full, order):
    """Yields the arrays of the source that are the rows of one of the model."""
    known = getattr(net, "GATES", {}).get(ours)
    if known is None:
        yield full, order, slice(None)
        return
    pattern, gates, order = known
    begin = 0
    for gate in gates:
        part = pattern.format(gate)
        end = begin + shape_of(part)[0 if order is None else order[0]]
        yield part, order, slice(begin, end)
        begin = end


def shape_of(name):
    """Returns the shape of an array of the source, or of a row of one."""
    for path in reversed(getattr(net, "STACKED", {})):
        if name not in weights and name.startswith(f"{path}."):
            _, _, rest = name[len(path) + 1 :].partition(".")
            return shape_of(f"{path}.{rest}" if rest else path)[1:]
    return tuple(weights[name].shape)


def is_known(name):
    try:
        return shape_of(name) is not None
    except KeyError:
        return False


def back(value, order, name):
    value, shape = value.detach().numpy(), shape_of(name)
    if order is None:
        return value.reshape(shape)
    axes = [max(i, ~i) for i in order]
    flipped = [at for at, i in enumerate(order) if i < 0]
    value = np.flip(value.reshape([shape[i] for i in axes]), flipped)
    return value.transpose(np.argsort(axes))


def rows_of(value, rows):
    return value[rows] if value.ndim else value


def gradients_by_name(model, slopes):  # what the file has not got has none
    known = dict(zip(map(id, model.parameters()), slopes))
    found = {key: np.zeros(value.shape) for key, value in weights.items()}
    for key, order, one, rows in names(model):
        if id(one) in known:
            found[key] = back(rows_of(known[id(one)], rows), order, key)
    return found


def arrays_by_name(model):  # what the file has not got stays
    absent = {key: value.numpy() for key, value in weights.items()}
    return absent | {
        key: back(rows_of(one, rows), order, key) for key, order, one, rows in names(model)
    }
'''
SCRIPT = proof_script(_IMPORTS, _MODEL)
