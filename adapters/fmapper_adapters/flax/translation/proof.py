"""The script that runs a translated file in a process of its own, without the source framework."""

SCRIPT = '''"""Runs a translated model and compares it with what its source gave."""
import importlib.util, json, sys
import numpy as np, jax, jax.numpy as jnp
from flax import nnx

file, data, name = sys.argv[1:4]
spec = importlib.util.spec_from_file_location("translated", file)
net = importlib.util.module_from_spec(spec)
sys.modules["translated"] = net
spec.loader.exec_module(net)
given = dict(np.load(data, allow_pickle=False))


def pick(prefix):
    return {key[len(prefix):]: value for key, value in given.items() if key.startswith(prefix)}


def built(what):
    if isinstance(what, list):
        return tuple(built(one) for one in what)
    if not isinstance(what, dict):
        return what
    if "dict" in what:
        return {key: built(one) for key, one in what["dict"].items()}
    return jnp.asarray(given[f"input.{what['array']}"])


weights = pick("weight.")
args, kwargs = map(built, json.loads(str(given["inputs"])))


def make(train):
    model = getattr(net, name)(rngs=nnx.Rngs(0))
    net.load_weights(model, weights)
    model.train() if train else model.eval()
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.Dropout):
            layer.rate = 0.0
    return model


def names(model):
    for path, layer in nnx.iter_modules(model):
        known = next((found for cls, found in net.ARRAYS.items() if isinstance(layer, cls)), {})
        for key, variable in vars(layer).items():
            if isinstance(variable, nnx.Variable) and not isinstance(variable, nnx.RngState):
                source, order = known.get(key, (key, None))
                full = ".".join(map(str, (*path, source)))
                for ours, theirs in getattr(net, "RENAMED", {}).items():
                    if f".{full}".endswith(f".{ours}"):
                        full = full.removesuffix(ours) + theirs
                        break
                yield full, order, variable


def leaves(value):  # dicts in their own order, as the source has them; JAX would sort them
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for one in value for leaf in leaves(one)]
    return [value] if hasattr(value, "dtype") else []


def outputs(model):
    return leaves(model(*args, **kwargs))


def loss(model):
    floats = [x for x in outputs(model) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.mean(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)) for x in floats)


def back(value, order):
    value = np.asarray(value)
    return value if order is None else value.transpose(np.argsort(order))


def whole(found):
    """Returns arrays by name with slices put together as in the source."""
    for end, slices in getattr(net, "SLICES", {}).items():
        for name in [name for name in weights if f".{name}".endswith(f".{end}")]:
            parts = [name.removesuffix(end) + key for key in slices]
            if all(part in found for part in parts):
                found[name] = np.concatenate([found.pop(part) for part in parts])
    return found


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
    return float(error.max() / max(finite.max(initial=0.0), scale, 1e-30))


report = {}
for mode in json.loads(sys.argv[4]):
    train = mode == "train"
    wanted = pick(mode + ".")
    found = outputs(make(train))
    expected = [wanted[f"output.{i}"] for i in range(sum(k.startswith("output.") for k in wanted))]
    if len(found) != len(expected):
        report[mode + " outputs"] = float("inf")
        continue
    report[mode + " outputs"] = max([compare(a, b, 1e-6) for a, b in zip(found, expected)] + [0.0])
    gradients = {k[9:]: v for k, v in wanted.items() if k.startswith("gradient.")}
    if not gradients:
        continue
    model = make(train)
    grads = nnx.jit(nnx.grad(loss))(model)
    largest = max([float(np.abs(g).max(initial=0)) for g in gradients.values()] + [0.0])
    by_name = {}
    holder = make(train)
    graphdef, params, rest = nnx.split(holder, nnx.Param, ...)
    holder = nnx.merge(graphdef, grads, rest)
    for key, order, variable in names(holder):
        if isinstance(variable, nnx.Param):
            by_name[key] = back(variable[...], order)
    by_name = whole(by_name)
    report[mode + " gradients"] = max(
        [
            compare(by_name[k], g, 1e-3 * largest) if k in by_name else float("inf")
            for k, g in gradients.items()
        ]
        + [0.0]
    )
    model, rate = make(train), float(wanted["rate"])

    @nnx.jit
    def step(model):
        grads = nnx.grad(loss)(model)
        state = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - rate * g, state, grads))

    for _ in range(5):
        step(model)
    after = whole({key: back(variable[...], order) for key, order, variable in names(model)})
    report[mode + " steps"] = max(
        [
            compare(after[k[6:]], v, 1e-3) if k[6:] in after else float("inf")
            for k, v in wanted.items()
            if k.startswith("after.")
        ]
        + [0.0]
    )
print(json.dumps(report))
'''
