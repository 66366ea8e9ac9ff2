"""Converts the same cases with fmapper and with others, and writes one page of all that was found.

    python -m sweeps.scoreboard torchax --sample 20 --out scoreboard   # in its environment
    python -m sweeps.scoreboard --page docs/benchmarks/scoreboard.md --out scoreboard

`nox -s scoreboard` does so in an environment for each: `daily`, `oldest` and `newest` have the
versions of fmapper's own, `torchax` and `onnx` those of the daily work and a peer beside them. What
does not install is said on the page.

The cases are those of the sweeps of their names: of each operation of torch's test database and of
each primitive in JAX's corpus one call, layers of `torch.nn`, classes of transformers, and models
of JAX, Flax and Equinox. All sides are judged alike, and by less than the sweeps ask for: the first
outputs, in numbers, to 1e-4 of the largest element. What draws random numbers, and what may have
several right answers (factorisations, orders of equal elements) is left out.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import platform
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from sweeps import flaxzoo, lax, opinfo, sweeping, zoo

LIKE = 1e-4
OPSETS = (18, 17, 13)  # which onnx2torch knows best; the first that it takes
PACKAGES = ("torch", "jax", "flax", "transformers", "numpy")
AMBIGUOUS = re.compile(
    r"svd|eig|qr|lu(_|$|\.)|ormqr|householder|lobpcg|pca|rank|pinv|null|argsort|top_?k|kthvalue|median"
    r"|mode$|rng|random|bernoulli|multinomial|normal|dropout|rrelu|schur|hessenberg|tridiag|empty|resize_"
)
SOURCE = "source"  # it does not run, or gives two answers: not a case
SAME, OTHER, FAILS = "same", "other numbers", "fails"


class Case(NamedTuple):
    """A model of torch or JAX, what it is called with, and what comes out, as tensors."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    want: list[Any]


# --- the cases ----------------------------------------------------------------------------------


def of_opinfo() -> dict[str, Callable[[], Case]]:
    """One call of each operation of torch, in float32."""
    import torch

    settings = argparse.Namespace(reference=False, samples=1)

    def make(op: Any) -> Case:
        sample = opinfo.some_samples(op, torch.float32, settings)[0]

        class Call(torch.nn.Module):
            def forward(self, *tensors: Any) -> Any:
                return sample.call(tensors)

        return torch_case(Call(), tuple(sample.tensors), {})

    ops = opinfo.database()
    there = {name: op for name, op in ops.items() if op.supports_dtype(torch.float32, "cpu")}
    return {name: functools.partial(make, op) for name, op in there.items()}


def of_nn() -> dict[str, Callable[[], Case]]:
    """Layers of torch.nn with their options."""
    import torch

    from models import nn_cases

    def make(name: str) -> Case:
        build, inputs = nn_cases.CASES[name]
        module = nn_cases.build(build)
        if not isinstance(module, torch.nn.Module):
            from support import converting

            module = converting.Function(module)
        return torch_case(module.eval(), tuple(inputs), {})

    return {name: functools.partial(make, name) for name in nn_cases.CASES}


def of_zoo() -> dict[str, Callable[[], Case]]:
    """Classes of transformers, made small."""
    from models import tiny_models

    def make(name: str, kind: str) -> Case:
        tiny = tiny_models.build(name, kind)
        return torch_case(tiny.model, (), tiny.inputs)

    classes = tiny_models.classes()
    return {n: functools.partial(make, n.rpartition("/")[2], kind) for n, kind in classes.items()}


def torch_case(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Case:
    """Runs a module of torch twice, with other seeds, for what is wanted of it."""
    import copy

    import torch

    want = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            given = copy.deepcopy((args, kwargs))
            want.append(zoo.parts(copy.deepcopy(module)(*given[0], **given[1])))
    one_answer(*want)
    return Case(module, args, kwargs, want[0])


def one_answer(first: list[Any], second: list[Any]) -> None:
    """Refuses what gives other numbers, or none, when it runs again."""
    if not first or any(zoo.array_difference(as_numpy(a), b, "") for a, b in zip(first, second)):  # noqa: B905
        raise ValueError("it gives nothing, or something else each time")


def of_lax() -> dict[str, Callable[[], Case]]:
    """One call of each group of JAX's corpus of primitives, in each of some dtypes."""

    def names() -> dict[str, Any]:
        options = argparse.Namespace(group="", only="", dtypes="sample", per=1, limit=0)
        corpus = lax.corpus()
        return {
            "class": "",
            "names": [(corpus[n].group_name, n) for n in lax.chosen(corpus, options)],
        }

    def make(name: str) -> Case:
        run = lax.Run(lax.corpus()[name])
        return jax_case(run.function, tuple(run.args), {}, run.function)

    # Loading the corpus computes with JAX, after which no process may be forked.
    found = sweeping.run_case(names, seconds=300, gigabytes=8)["names"]
    return {f"{group}/{name}": functools.partial(make, name) for group, name in found}


def of_flaxzoo() -> dict[str, Callable[[], Case]]:
    """Models of JAX, Flax and Equinox."""

    def make(build: Callable[[], Any]) -> Case:
        model, args, kwargs = build()
        reference = flaxzoo.Reference(model, args, kwargs)
        own = functools.partial(reference._own, reference_tree(reference))
        return jax_case(model, args, kwargs, lambda *a, **k: own(a, k)[0])

    return {name: functools.partial(make, build) for name, build in flaxzoo.models().items()}


def reference_tree(reference: flaxzoo.Reference) -> Any:
    """The parameters of a model as its reference takes them."""
    import jax

    return jax.tree.unflatten(reference._structure, list(reference.parameters.values()))


def jax_case(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any) -> Case:
    """Runs a model of JAX; `call` is the model as a function."""
    import jax

    import fmapper

    want = [fmapper.to_torch(x) for x in jax.tree.leaves(call(*args, **kwargs)) if has_shape(x)]
    if not want:
        raise ValueError("it gives no array")
    return Case((model, call), args, kwargs, want)


def has_shape(x: Any) -> bool:
    return hasattr(x, "shape")


def as_numpy(x: Any) -> Any:
    """A tensor or an array of JAX; halves as float32, which NumPy has."""
    import numpy as np

    if hasattr(x, "detach"):
        x = x.detach().resolve_conj().resolve_neg()
        return (x.float() if str(x.dtype) == "torch.bfloat16" else x).numpy()
    return np.asarray(x.astype("float32") if str(x.dtype) == "bfloat16" else x)


# --- the sides ----------------------------------------------------------------------------------


def fmapper_to_jax(case: Case) -> list[Any]:
    import torch

    import fmapper

    converted = fmapper.convert(case.model, "jax", case.args, case.kwargs)
    if converted._code.concrete:  # it runs eagerly only: as it is for the values of the examples
        converted = fmapper.convert(case.model, "jax", case.args, case.kwargs, specialize=True)
    given = fmapper.fmap(
        lambda x: fmapper.to_jax(x.detach().clone()) if torch.is_tensor(x) else x,
        (case.args, case.kwargs),
    )
    return zoo.parts(zoo.compiled_call(converted, *given))


def torchax_to_jax(case: Case) -> list[Any]:
    """torchax as it is used: torch runs the module whenever JAX traces it."""
    import jax
    import torch
    import torchax
    from torch.utils import _pytree

    import fmapper

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model

        def forward(self, args: Any, kwargs: Any) -> Any:
            return zoo.parts(self.model(*args, **kwargs))

    leaves, spec = _pytree.tree_flatten((case.args, case.kwargs))
    tensors = {i: fmapper.to_jax(x) for i, x in enumerate(leaves) if torch.is_tensor(x)}
    state, function = torchax.extract_jax(Parts().eval())

    def run(state: Any, tensors: Any) -> Any:
        given = [tensors.get(i, leaf) for i, leaf in enumerate(leaves)]
        return function(state, _pytree.tree_unflatten(given, spec))

    return list(jax.jit(run)(state, tensors))


def fmapper_to_torch(case: Case) -> list[Any]:
    import jax
    import torch

    import fmapper

    converted = fmapper.convert(case.model[0], "torch", case.args, case.kwargs)
    fixed = ("method", "mutable", "capture_intermediates")
    varying = {name: value for name, value in case.kwargs.items() if name not in fixed}
    args, kwargs = flaxzoo.to_torch((case.args, varying))
    with torch.no_grad():
        return [x for x in jax.tree.leaves(converted(*args, **kwargs)) if has_shape(x)]


def onnx_to_torch(case: Case) -> list[Any]:
    """jax2onnx, then onnx2torch."""
    import jax
    import onnx2torch
    import torch
    from jax2onnx import to_onnx

    import fmapper

    leaves, structure = jax.tree.flatten((case.args, case.kwargs))
    places = [i for i, leaf in enumerate(leaves) if has_shape(leaf)]

    def run(*arrays: Any) -> Any:
        given = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            given[i] = array
        args, kwargs = jax.tree.unflatten(structure, given)
        return [x for x in jax.tree.leaves(case.model[1](*args, **kwargs)) if has_shape(x)]

    specs = [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in places]
    module = None
    for opset in OPSETS:
        try:
            module = onnx2torch.convert(to_onnx(run, specs, opset=opset)).eval()
            break
        except Exception:
            if opset == OPSETS[-1]:
                raise
    assert module is not None
    with torch.no_grad():
        output = module(*[fmapper.to_torch(leaves[i]) for i in places])
    return list(output) if isinstance(output, list | tuple) else [output]


FROM_TORCH = {"opinfo": of_opinfo, "nn": of_nn, "zoo": of_zoo}
FROM_JAX = {"lax": of_lax, "flaxzoo": of_flaxzoo}
SWEEPS = {**FROM_TORCH, **FROM_JAX}
OURS = {sweep: fmapper_to_jax if sweep in FROM_TORCH else fmapper_to_torch for sweep in SWEEPS}
SIDES: dict[str, dict[str, Callable[[Case], list[Any]]]] = {
    "fmapper": OURS,
    "torchax": dict.fromkeys(FROM_TORCH, torchax_to_jax),
    "jax2onnx, onnx2torch": dict.fromkeys(FROM_JAX, onnx_to_torch),
}
ENVIRONMENTS = {
    "daily": ("fmapper",),
    "oldest": ("fmapper",),
    "newest": ("fmapper",),
    "torchax": ("torchax",),
    "onnx": ("jax2onnx, onnx2torch",),
}
PEERS = {"torchax": ("torchax",), "onnx": ("jax2onnx", "onnx2torch")}


def outcome(make: Callable[[], Case], side: Callable[[Case], list[Any]]) -> dict[str, Any]:
    """How a case ends on a side; runs in a process of its own."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        case = make()
    except Exception as error:
        return {"class": SOURCE, "reason": sweeping.reason(error)}
    try:
        got = [as_numpy(x) for x in side(case)]
    except Exception as error:
        return {"class": FAILS, "reason": sweeping.reason(error)}
    if len(got) != len(case.want):
        reason = f"{len(got)} outputs, not {len(case.want)}"
        return {"class": OTHER, "reason": reason}
    pairs = zip(got, case.want, strict=True)
    worst = max(zoo.array_difference(a, b, "") for a, b in pairs)
    return {
        "class": SAME if worst <= LIKE else OTHER,
        "reason": f"off by {worst:.1e}" if math.isfinite(worst) else "another shape, or not finite",
    }


# --- a run in one environment -------------------------------------------------------------------


def prepare(sweeps: Collection[str]) -> None:
    """Loads what the cases need before processes are forked; JAX must not compute before that."""
    zoo.prepare()
    if "zoo" in sweeps:
        from models import tiny_models

        tiny_models.build("LlamaForCausalLM", "llama")
    if "flaxzoo" in sweeps:
        flaxzoo.prepare()
    gc.freeze()  # or each process would copy all of it


def spread(names: list[str], count: int) -> list[str]:
    """Some of the names, evenly spread, the same ones wherever this runs; all for 0."""
    names = sorted(name for name in names if not AMBIGUOUS.search(name))
    if not count or count >= len(names):
        return names
    return [names[i * len(names) // count] for i in range(count)]


def run(options: argparse.Namespace) -> None:
    """Runs the sides of an environment over the sweeps that they take part in."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    wanted = {
        side: [sweep for sweep in SIDES[side] if sweep in options.sweeps]
        for side in ENVIRONMENTS[options.environment]
    }
    prepare({sweep for sweeps in wanted.values() for sweep in sweeps})
    found = known(options)
    for side, sweeps in wanted.items():
        for sweep in sweeps:
            convert = SIDES[side][sweep]
            cases = SWEEPS[sweep]()
            chosen = spread(list(cases), options.sample)
            results = found.setdefault(side, {})[sweep] = {}
            for name in chosen:
                bound = functools.partial(outcome, cases[name], convert)
                results[name] = sweeping.run_case(bound, seconds=options.seconds, gigabytes=8)
                print(f"{side}: {sweep}: {name}: {results[name]['class']}", flush=True)
            counts = Counter(one["class"] for one in results.values())
            print(f"== {side}: {sweep}: {dict(counts)}", flush=True)
    write(
        options,
        {"sample": options.sample, "versions": versions(options.environment), "sides": found},
    )


def known(options: argparse.Namespace) -> dict[str, Any]:
    """What the sweeps that are not asked for gave earlier, over the same cases."""
    file = options.out / f"{options.environment}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    return before.get("sides", {}) if before.get("sample") == options.sample else {}


def versions(environment: str) -> dict[str, str]:
    """Of Python and of what takes part."""
    found = {"Python": platform.python_version()}
    for package in (*PACKAGES, *PEERS.get(environment, ())):
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def write(options: argparse.Namespace, what: dict[str, Any]) -> None:
    """Keeps what was found in an environment as JSON."""
    options.out.mkdir(parents=True, exist_ok=True)
    what = {"day": date.today().isoformat(), **what}
    (options.out / f"{options.environment}.json").write_text(json.dumps(what, indent=1))


# --- the page -----------------------------------------------------------------------------------

HEAD = """# Scoreboard

```console
nox -s scoreboard
```

Models and operations converted by fmapper and by others, one environment after the other, on the
processors of one machine. {sampled}

`38 of 40` are 38 cases whose first outputs are those of the source, to 1e-4 of the largest element
of each, out of 40 that the source itself runs. After a semicolon: how many gave other numbers or
shapes and no error. What draws random numbers or has several right answers is left out. How long
conversion takes is measured [elsewhere](conversion.md#time-to-convert).

The sweeps ask for more than this page does, of fmapper alone: gradients, dtypes, state, other
inputs than the examples. What they gave is on the page of [conversion](conversion.md).
"""
TITLES = {
    "opinfo": "operations of torch",
    "nn": "layers of torch.nn",
    "zoo": "classes of transformers",
    "lax": "primitives of JAX",
    "flaxzoo": "models of JAX, Flax, Equinox",
}


def page(found: dict[str, dict[str, Any]], note: str = "") -> str:
    """The page, of what was found in each environment, with a note on this run."""
    samples = {one["sample"] for one in found.values() if "sides" in one}
    count = max(samples, default=0)
    days = " and ".join(sorted({one["day"] for one in found.values()}))
    sampled = f"Measured on {days}, over all cases."
    if count:
        sampled = (
            f"Measured on {days}, over a **sample**: {count} cases of each sweep, evenly spread\n"
            "over their names, the same for all sides."
        )
    lines = [HEAD.format(sampled=f"{sampled} {note}".strip())]
    for title, sweeps in (("From torch to JAX", FROM_TORCH), ("From JAX to torch", FROM_JAX)):
        lines += [f"## {title}", ""]
        lines += ["| | environment | " + " | ".join(TITLES[sweep] for sweep in sweeps) + " |"]
        lines += ["|---" * (2 + len(sweeps)) + "|"]
        for environment, one in found.items():
            for side, results in one.get("sides", {}).items():
                cells = [cell(results[sweep]) if sweep in results else "" for sweep in sweeps]
                if any(cells):
                    lines += [f"| {side} | {environment} | {' | '.join(cells)} |"]
        lines += [""]
    lines += ["## Environments", "", "| | |", "|---|---|"]
    for environment, one in found.items():
        what = ", ".join(f"{name} {number}" for name, number in one.get("versions", {}).items())
        lines += [f"| {environment} | {what or one['reason']} |"]
    lines += [f"| {name} | not in this run |" for name in ENVIRONMENTS if name not in found]
    lines += ["", *failures(found)]
    return "\n".join(lines).rstrip() + "\n"


def cell(results: dict[str, Any]) -> str:
    """The cases of a sweep that are right, and that are wrong."""
    counts = Counter(one["class"] for one in results.values())
    whole = sum(counts.values()) - counts[SOURCE]
    if not whole:
        return "none runs"
    return f"{counts[SAME]} of {whole}" + (f"; {counts[OTHER]} wrong" if counts[OTHER] else "")


def failures(found: dict[str, dict[str, Any]]) -> list[str]:
    """Every case that is not right, with the first words of the reason."""
    lines = ["## What was not right", ""]
    for environment, one in found.items():
        for side, sweeps in one.get("sides", {}).items():
            for sweep, results in sweeps.items():
                bad = {n: r for n, r in results.items() if r["class"] not in (SAME, SOURCE)}
                if not bad:
                    continue
                lines += [f"**{side} ({environment}): {TITLES[sweep]}**", ""]
                lines += [f"* `{name}`: {short(result)}" for name, result in bad.items()]
                lines += [""]
    return lines if len(lines) > 2 else []


def short(result: dict[str, Any]) -> str:
    """The class and the first words of the reason, as Markdown."""
    text = str(result.get("reason", "")).partition("\n---")[0].partition(" | ")[0]
    text = " ".join(text.split())[:140].replace("`", "'")
    return f"{result['class']}: `{text}`" if text else result["class"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", nargs="?", choices=ENVIRONMENTS, help="where this runs")
    parser.add_argument("--sample", type=int, default=0, help="cases of each sweep; 0 for all")
    parser.add_argument("--sweeps", nargs="+", default=SWEEPS, choices=SWEEPS, metavar="SWEEP")
    parser.add_argument("--seconds", type=float, default=120, help="of a processor, per case")
    parser.add_argument("--out", type=Path, default=Path("scoreboard"), help="folder of results")
    parser.add_argument("--failed", help="write down why the environment could not be made")
    parser.add_argument("--page", type=Path, help="write the page of all results in --out")
    parser.add_argument("--note", default="", help="what the page has to say of this run")
    options = parser.parse_args()
    if options.failed:
        write(options, {"reason": options.failed})
    elif options.environment:
        run(options)
    if options.page:
        files = [options.out / f"{name}.json" for name in ENVIRONMENTS]
        found = {file.stem: json.loads(file.read_text()) for file in files if file.exists()}
        options.page.write_text(page(found, options.note), "utf-8")


if __name__ == "__main__":
    main()
