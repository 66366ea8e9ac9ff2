"""The script that runs a translated file of functions without state, and compares."""

# In place of `# the model` stand `make`, `run`, `gradients`, `descend` and `named` of a library.
PROOF = '''"""Runs a translated model and compares it with what its source gave."""
import importlib.util, inspect, json, sys
import numpy as np, jax, jax.numpy as jnp

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


def takes_key(function):  # by keyword: a model's own argument may be called so
    own = inspect.signature(function).parameters.get("key")
    return own is not None and own.kind is inspect.Parameter.KEYWORD_ONLY


def leaves(value):  # dicts in their own order, as the source has them; JAX would sort them
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for one in value for leaf in leaves(one)]
    return [value] if hasattr(value, "dtype") else []


def loss(value):
    floats = [x for x in leaves(value) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.mean(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)) for x in floats)


# the model


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


def largest_error(found, expected, scale):
    errors = [
        compare(found[key], value, scale) if key in found else float("inf")
        for key, value in expected.items()
    ]
    return max([*errors, 0.0])


report = {}
for mode in json.loads(sys.argv[4]):
    train = mode == "train"
    wanted = pick(mode + ".")
    found = leaves(run(make(), train))
    expected = [wanted[f"output.{i}"] for i in range(sum(k.startswith("output.") for k in wanted))]
    if len(found) != len(expected):
        report[mode + " outputs"] = float("inf")
        continue
    report[mode + " outputs"] = max([compare(a, b, 1e-6) for a, b in zip(found, expected)] + [0.0])
    expected = {k[9:]: v for k, v in wanted.items() if k.startswith("gradient.")}
    if not expected:
        continue
    model, rate = make(), float(wanted["rate"])
    largest = max([float(np.abs(g).max(initial=0)) for g in expected.values()] + [0.0])
    grads = whole(named(gradients(model, train)))
    report[mode + " gradients"] = largest_error(grads, expected, 1e-3 * largest)
    for _ in range(5):
        model = descend(model, gradients(model, train), rate)
    after = {k[6:]: v for k, v in wanted.items() if k.startswith("after.")}
    report[mode + " steps"] = largest_error(whole(named(model)), after, 1e-3)
print(json.dumps(report))
'''
