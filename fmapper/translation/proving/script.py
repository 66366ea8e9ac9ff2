"""The script that runs a translated file in a process of its own, without the source framework."""

from __future__ import annotations

import ast
import inspect
import types

from fmapper.verification.models import draws as draws_module
from fmapper.verification.models import spreads

_SCRIPT = '''"""Runs a translated model and compares it with what its source gave."""
from __future__ import annotations
import importlib.util, json, sys
import numpy as np
file, data, name = sys.argv[1:4]
given = dict(np.load(data, allow_pickle=False))
double = "double" in given
# imports



# the draws


# the spreads


draws = Draws()
# from the draws
spec = importlib.util.spec_from_file_location("translated", file)
net = importlib.util.module_from_spec(spec)
sys.modules["translated"] = net
spec.loader.exec_module(net)


def pick(prefix):
    return {key[len(prefix):]: value for key, value in given.items() if key.startswith(prefix)}


def built(what):
    if isinstance(what, list):
        return tuple(built(one) for one in what)
    if not isinstance(what, dict):
        return what
    if "record" in what:
        return getattr(net, what["record"])(**built(what["held"]))
    if "dict" in what:
        return {key: built(one) for key, one in what["dict"].items()}
    return array(given[f"input.{what['array']}"])


def leaves(value):
    if isinstance(value, dict):
        value = [value[key] for key in in_order(value)]
    if isinstance(value, (tuple, list)):
        return [leaf for one in value for leaf in leaves(one)]
    return [value] if hasattr(value, "dtype") else []


def whole(found):
    """Returns arrays by name with slices and rows put together as in the source."""
    for end, slices in getattr(net, "SLICES", {}).items():
        for name in [name for name in weights if f".{name}".endswith(f".{end}")]:
            parts = [name.removesuffix(end) + key for key in slices]
            if all(part in found for part in parts):
                found[name] = np.concatenate([found.pop(part) for part in parts])
    for path, count in reversed(getattr(net, "STACKED", {}).items()):
        for name in [name for name in found if name.startswith(f"{path}.0")]:
            rest = name[len(path) + 2 :]
            found[path + rest] = np.stack([found.pop(f"{path}.{i}{rest}") for i in range(count)])
    return found


def apart(name, value):
    """Yields the arrays of blocks that are one module, with their names."""
    for path, count in getattr(net, "SCANNED", {}).items():
        rest = name.removeprefix(f"{path}.")
        if rest != name and not rest[0].isdigit():
            for i in range(count):
                yield from apart(f"{path}.{i}.{rest}", value[i])
            return
    yield name, value


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


def largest_error(found, expected, scale):
    errors = [
        compare(found[key], value, scale) if key in found else float("inf")
        for key, value in expected.items()
    ]
    return max([*errors, 0.0])


def distance_with_dropout(mode, still):
    """Returns how far means and spreads over seeds are from those of the source.

    Dropout of one rate of the source is on at a time, or of none of them (nan). It is drawn at one
    half at least: where dropout is does not depend on its rate, and shows best there.
    """
    errors = []
    rates = given[f"{mode}.rates"].tolist()

    def rate_of(own):
        if own not in rates:
            return own
        return max(own, 0.5) if own == rate else 0.0

    for i, rate in enumerate(rates):
        spread = Spread(still)
        run = run_with_dropout(rate_of)
        for seed in range(int(given[f"{mode}.seeds"])):
            spread.add(still if run is None else run(seed))
        errors.append(spread.distance(given[f"{mode}.spread.{i}"]))
    return max(errors)


# the model

weights = {key: array(value) for key, value in pick("weight.").items()}
args, kwargs = map(built, json.loads(str(given["inputs"])))
report = {}
for mode in json.loads(sys.argv[4]):
    train = mode == "train"
    wanted = pick(f"{mode}.output.")
    wanted = [wanted[str(i)] for i in range(len(wanted))]
    expected = pick(f"{mode}.gradient.")
    model = make(train)
    found, slopes = learn(model, train) if expected else (run(model, train), None)
    if draws.drawn != given.get(f"{mode}.draws", draws.drawn):
        report[mode + " draws"] = 1.0  # though these numbers may make no difference
    if len(found) != len(wanted):
        report[mode + " outputs"] = float("inf")
        continue
    report[mode + " outputs"] = max([compare(a, b, 1e-6) for a, b in zip(found, wanted)] + [0.0])
    if f"{mode}.rates" in given:
        report[mode + " dropout"] = distance_with_dropout(mode, wanted)
    if not expected:
        continue
    largest = max([float(np.abs(g).max(initial=0)) for g in expected.values()] + [0.0])
    known = whole(gradients_by_name(model, slopes))
    fixed = {key: 0 * known[key] for key in pick(f"{mode}.fixed.") if key in known}
    report[mode + " gradients"] = largest_error(known, fixed | expected, 1e-3 * largest)
    for step in range(5):
        if step:
            _, slopes = learn(model, train)
        model = descend(model, slopes, float(given[f"{mode}.rate"]))
    known = whole(arrays_by_name(model))
    report[mode + " steps"] = largest_error(known, pick(f"{mode}.after."), 1e-3)
print(json.dumps(report))
'''


def proof_script(imports: str, model: str, draws: str = "") -> str:
    """Returns the script for the files of one framework.

    Args:
        imports: What its part imports, and has the framework compute in double precision if
            `double`.
        draws: What lets the framework draw by `draws.take(kind, shape)`; the file is run after it.
        model: Its part, which defines `array(x)`, an array of the framework, and `in_order(x)`, the
            keys of a dict in the order in which the source flattens it; `make(train)`, the model
            with `weights` and without dropout; `run(model, train)`, its outputs; `learn(model,
            train)`, its outputs and gradients; `descend(model, slopes, rate)`, the model after a
            step; `run_with_dropout(rate_of)`, a function of a seed that gives the outputs in
            training with random numbers of its own, and with dropout at the rates that those of
            layers which share no mask become, or None if neither is drawn;
            `gradients_by_name(model, slopes)` and `arrays_by_name(model)`, as in the source.
    """
    parts = {
        "# imports": imports.strip(),
        "# the draws": _class_in(draws_module, "Draws"),
        "# the spreads": _class_in(spreads, "Spread"),
        "# from the draws": draws.strip(),
        "# the model": model.strip(),
    }
    script = _SCRIPT
    for mark, code in parts.items():
        script = script.replace(f"\n{mark}\n", f"\n{code}\n")
    return script


def _class_in(module: types.ModuleType, name: str) -> str:
    """Returns the code of a class; its public module is another one."""
    source = inspect.getsource(module)
    nodes = ast.parse(source).body
    found = next(x for x in nodes if isinstance(x, ast.ClassDef) and x.name == name)
    return ast.get_source_segment(source, found) or ""
