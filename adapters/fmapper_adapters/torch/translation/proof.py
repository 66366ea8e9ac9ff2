"""The script that runs a translated file in a process of its own, without the source framework."""

SCRIPT = '''"""Runs a translated model and compares it with what its source gave."""
import importlib.util, json, re, sys
import numpy as np, torch
from torch import nn

file, data, name = sys.argv[1:4]
spec = importlib.util.spec_from_file_location("translated", file)
net = importlib.util.module_from_spec(spec)
sys.modules["translated"] = net
spec.loader.exec_module(net)
given = dict(np.load(data, allow_pickle=False))


def pick(prefix):
    return {key[len(prefix):]: value for key, value in given.items() if key.startswith(prefix)}


def tensor(array):
    return torch.from_numpy(np.array(array))


weights = {key: tensor(value) for key, value in pick("weight.").items()}

def built(what):
    if isinstance(what, list):
        return tuple(built(one) for one in what)
    if not isinstance(what, dict):
        return what
    if "dict" in what:
        return {key: built(one) for key, one in what["dict"].items()}
    return tensor(given[f"input.{what['array']}"])


args, kwargs = map(built, json.loads(str(given["inputs"])))


def make(train):
    model = getattr(net, name)()
    net.load_weights(model, weights)
    model.train(train)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
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
            yield full, order, parameter


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, (tuple, list)):
        return [leaf for one in value for leaf in leaves(one)]
    return []


def outputs(model):
    return leaves(model(*args, **kwargs))


def loss(model):
    floats = [x for x in outputs(model) if x.is_floating_point()]
    weights = [torch.cos(torch.arange(x.numel(), dtype=torch.float32)) for x in floats]
    return sum((x * w.reshape(x.shape)).mean() for x, w in zip(floats, weights))


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


def stacked(found):
    """Returns arrays by name with the rows of layers stacked as in the source."""
    for path, count in reversed(getattr(net, "STACKED", {}).items()):
        for name in [name for name in found if name.startswith(f"{path}.0")]:
            rest = name[len(path) + 2 :]
            found[path + rest] = np.stack([found.pop(f"{path}.{i}{rest}") for i in range(count)])
    return found


def back(value, order, name):
    value, shape = value.detach().numpy(), shape_of(name)
    if order is None:
        return value.reshape(shape)
    axes = [max(i, ~i) for i in order]
    flipped = [at for at, i in enumerate(order) if i < 0]
    value = np.flip(value.reshape([shape[i] for i in axes]), flipped)
    return value.transpose(np.argsort(axes))


def compare(found, wanted, scale):
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape:
        return float("inf")
    if not found.size:
        return 0.0
    a, b = found.astype(np.complex128), wanted.astype(np.complex128)
    both = np.isnan(a) & np.isnan(b) | (a == b)
    error = np.where(both, 0, np.abs(np.where(both, 0, a) - np.where(both, 0, b)))
    finite = np.abs(b[np.isfinite(b)])
    error = float(error.max() / max(finite.max(initial=0.0), scale, 1e-30))
    return float("inf") if error != error else error


report = {}
for mode in json.loads(sys.argv[4]):
    train = mode == "train"
    wanted = pick(mode + ".")
    with torch.no_grad():
        found = [x.numpy() for x in outputs(make(train))]
    expected = [wanted[f"output.{i}"] for i in range(sum(k.startswith("output.") for k in wanted))]
    if len(found) != len(expected):
        report[mode + " outputs"] = float("inf")
        continue
    report[mode + " outputs"] = max([compare(a, b, 1e-6) for a, b in zip(found, expected)] + [0.0])
    gradients = {k[9:]: v for k, v in wanted.items() if k.startswith("gradient.")}
    if not gradients:
        continue
    model = make(train)
    loss(model).backward()
    largest = max([float(np.abs(g).max(initial=0)) for g in gradients.values()] + [0.0])
    by_name = stacked({
        key: back(torch.zeros_like(p) if p.grad is None else p.grad, order, key)
        for key, order, p in names(model) if is_known(key)
    })
    report[mode + " gradients"] = max(
        [
            compare(by_name[k], g, 1e-3 * largest) if k in by_name else
            (0.0 if not np.any(g) else float("inf"))
            for k, g in gradients.items()
        ]
        + [0.0]
    )
    model = make(train)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(wanted["rate"]))
    for _ in range(5):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    after = {key: value.numpy() for key, value in weights.items()}  # what the file has not stays
    after |= stacked({key: back(p, order, key) for key, order, p in names(model) if is_known(key)})
    report[mode + " steps"] = max(
        [compare(after[k[6:]], v, 1e-3) for k, v in wanted.items() if k.startswith("after.")]
        + [0.0]
    )
print(json.dumps(report))
'''
