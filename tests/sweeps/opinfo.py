"""Converts every operation of PyTorch's own test database to JAX and compares it with eager torch.

    PYTHONPATH=tests python -m sweeps.opinfo                       # all operations; hours
    PYTHONPATH=tests python -m sweeps.opinfo --ops linalg,cumsum --samples 20
    PYTHONPATH=tests python -m sweeps.opinfo --shard 2/8
    PYTHONPATH=tests python -m sweeps.opinfo --kinds   # dtypes and shapes only, of all dtypes

Each case is a sample of an `OpInfo` of `torch.testing` in one dtype. Its outcome is one of

* `exact`: shapes, dtypes, NaN and infinities are torch's, and numbers within rounding: integers
  equal, floats within 1e-5 of the largest element or no further from the result in float64 than
  torch's own float32 is. Of random operations only shapes and dtypes are compared.
* `not exported`: `torch.export` cannot record it.
* `missing`: an operation in it has no lowering, which conversion says.
* `refused`: conversion, or the converted program, says why it cannot do that (a `FmapperError`).
* `error`: anything else was raised, or it took too long.
* `MISMATCH`: other values than torch's, without an error.

With `--kinds` nothing is converted: the lowering of each operation must give the dtypes and shapes
that it gives in torch, for every dtype that torch has.

Cases run in worker processes, which are replaced when they crash or hang. All samples of several
operations are one program, which is halved where it fails, down to single samples.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import signal
import sys
import time
import types
import unittest
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

from sweeps.sweeping import Worker

OUTCOMES = ("exact", "not exported", "missing", "refused", "error", "MISMATCH")
DTYPES = ("float32", "int64", "bool", "complex64")
ALL_DTYPES = (*DTYPES, "float16", "bfloat16", "float64", "complex128", "uint8", "int8", "int16",
              "int32")  # fmt: skip
# Results that torch leaves undefined.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
             "new_empty_strided", "resize_", "resize_as_")  # fmt: skip
# Which result is an index that torch leaves open where elements are equal.
TIES = {"sort": 1, "argsort": 0, "topk": 1, "kthvalue": 1, "median": 1, "nanmedian": 1, "mode": 1}
# Which results are vectors that may be turned together, and along which dimension each lies.
VECTORS = {"svd": {0: -2, 2: -2}, "linalg.svd": {0: -2, 2: -1}, "linalg.eigh": {1: -2}}
TOLERANCE = 1e-5


def main() -> None:
    options = parser().parse_args()
    if options.worker:
        work(options)
        return
    started = time.time()
    results = drive(options)
    report(results, Path(options.out), time.time() - started)
    if any(case["outcome"] == "MISMATCH" for case in results):
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--ops", default="", help="only names that begin so, by comma")
    found.add_argument("--only", default="", help="only these names, by comma")
    found.add_argument("--dtypes", default="")
    found.add_argument("--kinds", action="store_true", help="dtypes and shapes only; with x64")
    found.add_argument("--samples", type=int, default=6, help="per operation and dtype")
    found.add_argument("--reference", action="store_true", help="the longer lists of samples")
    found.add_argument("--shard", default="1/1", help="2/8: the second of eight parts")
    found.add_argument("--seconds", type=int, default=60, help="at most, per program")
    found.add_argument("--quick", action="store_true", help="do not take failing batches apart")
    found.add_argument("--x64", action="store_true", help="with jax_enable_x64")
    found.add_argument("--out", default="opinfo", help="reports go to this name .json and .md")
    found.add_argument("--batch", type=int, default=8, help="operations in one program")
    found.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return found


# --- the driver -----------------------------------------------------------------------------


def drive(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases, from workers that are replaced when one crashes or hangs."""
    wanted = names(options)
    command = [sys.executable, "-m", "sweeps.opinfo", *sys.argv[1:], "--worker"]
    results: list[dict[str, Any]] = []
    while wanted:
        worker = Worker([*command, f"--batch={options.batch}"], wanted)
        begun: list[str] = []
        while wanted:
            answer = worker.answer(10 * options.seconds + 60)
            if answer is not None and "begun" in answer:
                begun = answer["begun"]
                print(f"{len(wanted)} left, now {begun[0]} to {begun[-1]}", file=sys.stderr)
                continue
            if answer is None and options.batch > 1:
                options.batch = 1  # which one it is shows when each is by itself
                break
            if answer is None:
                why = "crashed" if worker.process.poll() is not None else "hung"
                answer = {"cases": [case_of(wanted[0], "", 0, "error", f"the worker {why}")]}
                begun = wanted[:1]
            results += answer["cases"]
            wanted = wanted[len(begun) :]
            for case in first_of_each(answer["cases"]):
                if case["outcome"] not in ("exact", "not exported"):
                    print(line(case), flush=True)
        worker.process.kill()
        worker.process.wait()
    return results


def names(options: argparse.Namespace) -> list[str]:
    """The operations asked for, in this shard."""
    found = sorted(database())
    if options.ops:
        starts = tuple(options.ops.split(","))
        found = [name for name in found if name.startswith(starts)]
    if options.only:
        only = options.only.split(",")
        found = [name for name in found if name in only]
    part, parts = (int(number) for number in options.shard.split("/"))
    return found[part - 1 :: parts]


def database() -> dict[str, Any]:
    """Every operation of torch's database by its name and variant."""
    if importlib.util.find_spec("expecttest") is None:
        # torch's test cases derive from a class of it; nothing here uses them
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.formatted_name: op for op in op_db}


def case_of(op: str, dtype: str, sample: int, outcome: str, why: str = "") -> dict[str, Any]:
    return {"op": op, "dtype": dtype, "sample": sample, "outcome": outcome, "why": why}


def line(case: dict[str, Any]) -> str:
    why = " ".join(str(case["why"]).split())
    return f"{case['outcome']:9} {case['op']} {case['dtype']} #{case['sample']}: {why[:240]}"


# --- the worker -----------------------------------------------------------------------------


class TooLongError(Exception):
    pass


def work(options: argparse.Namespace) -> None:
    """Reads names of operations, writes their cases."""
    import jax
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", options.x64 or options.kinds)
    signal.signal(signal.SIGALRM, on_alarm)
    table = database()
    remember_composite_ops()
    wanted = sys.stdin.read().split("\n")
    for start in range(0, len(wanted), options.batch):
        batch = wanted[start : start + options.batch]
        print(json.dumps({"begun": batch}), flush=True)
        cases = cases_of([table[name] for name in batch], options)
        print(json.dumps({"cases": cases}), flush=True)
        jax.clear_caches()
        torch._dynamo.reset()


def remember_composite_ops() -> None:
    """torch lists them all anew for each program, which takes longer than all else."""
    import functools

    from torch._export import utils
    from torch.export import exported_program

    listed = functools.cache(utils._collect_all_valid_cia_ops)
    for module in (utils, exported_program):
        if hasattr(module, "_collect_all_valid_cia_ops"):
            module._collect_all_valid_cia_ops = lambda: set(listed())


def on_alarm(*_: Any) -> None:
    raise TooLongError("took too long")


def cases_of(ops: list[Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases of some operations, which are one program as long as nothing fails."""
    import torch

    samples: list[Any] = []
    for op in ops:
        dtypes = options.dtypes.split(",") if options.dtypes else DTYPES
        for name in ALL_DTYPES if options.kinds and not options.dtypes else dtypes:
            dtype = getattr(torch, name)
            if op.supports_dtype(dtype, "cpu"):
                try:
                    samples += some_samples(op, dtype, options)
                except Exception as error:  # a sample that this machine cannot make is no case
                    print(f"no samples of {op.formatted_name}: {error}", file=sys.stderr)
    found = taken_apart(samples, options)
    return [
        case_of(s.op.formatted_name, s.dtype, s.number, outcome, why)
        for s, (outcome, why) in zip(samples, found, strict=True)
    ]


def taken_apart(samples: list[Any], options: argparse.Namespace) -> list[tuple[str, str]]:
    """The outcomes, from programs of all samples, or of half of them, down to single ones."""
    if not samples:
        return []
    if options.quick and len({(s.op.formatted_name, s.dtype) for s in samples}) == 1:
        found = outcomes(samples, options)
        return found or outcomes(samples[:1], options, alone=True) * len(samples)
    found = outcomes(samples, options, alone=len(samples) == 1)
    if found is not None:
        return found
    kinds = sorted({s.op.formatted_name for s in samples})
    if len(kinds) > 1:
        first = set(kinds[: len(kinds) // 2])
        places = [s.op.formatted_name in first for s in samples]
    else:
        dtypes = {s.dtype for s in samples}
        one = min(dtypes)
        half = len(samples) // 2
        places = [s.dtype == one if len(dtypes) > 1 else n < half for n, s in enumerate(samples)]
    parts = {
        here: iter(
            taken_apart([s for s, p in zip(samples, places, strict=True) if p is here], options)
        )
        for here in (True, False)
    }
    return [next(parts[here]) for here in places]


def some_samples(op: Any, dtype: Any, options: argparse.Namespace) -> list[Any]:
    """Samples that eager torch can compute, spread over those that there are."""
    import torch

    torch.manual_seed(0)
    make = op.reference_inputs if options.reference else op.sample_inputs
    everything = list(islice(make("cpu", dtype, requires_grad=False), 400))
    count = min(options.samples, len(everything))
    chosen = sorted({i * len(everything) // max(count, 1) for i in range(count)})
    found = []
    for number in chosen:
        sample = Sample(op, everything[number], str(dtype).removeprefix("torch."), number)
        try:
            with torch.no_grad():
                sample.want = sample.call(sample.tensors)
        except Exception:  # torch itself refuses it here
            continue
        found.append(sample)
    return found


class Sample:
    """A call of an operation: its tensors, and the call as a function of them."""

    def __init__(self, op: Any, sample: Any, dtype: str, number: int) -> None:
        import torch
        from torch.utils._pytree import tree_flatten

        self.op = op
        self.dtype = dtype
        self.number = number
        leaves, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.leaves = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        self.want: Any = None

    def call(self, tensors: Any, dtype: Any = None) -> Any:
        """What torch computes; with floats in another dtype, if one is given."""
        import torch
        from torch.utils._pytree import tree_flatten

        given = iter([converted(tensor, dtype) for tensor in tensors])
        leaves = [next(given) if leaf is None else leaf[0] for leaf in self.leaves]
        leaves = [
            torch.float64 if dtype is not None and leaf is torch.float32 else leaf
            for leaf in leaves
        ]
        first, args, kwargs = self.spec.unflatten(leaves)
        found = tree_flatten(self.op.op(first, *args, **kwargs))[0]
        numbers = (int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
        return [leaf for leaf in found if isinstance(leaf, (torch.Tensor, *numbers))]

    def has_ties(self) -> bool:
        """Whether elements of the first tensor are equal."""
        return bool(self.tensors[0].unique().numel() < self.tensors[0].numel())


def converted(tensor: Any, dtype: Any) -> Any:
    """The tensor in float64 or complex128, or a copy that a call may change."""
    import torch

    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor if torch.compiler.is_exporting() else tensor.clone()
    return tensor.to(torch.complex128 if tensor.is_complex() else dtype)


def outcomes(samples: list[Any], options: argparse.Namespace, *, alone: bool = False) -> Any:
    """The outcome of each sample, from one program; None where it fails, unless it is alone."""
    import fmapper

    signal.alarm(options.seconds)
    try:
        return examined(samples) if options.kinds else compared(samples)
    except TooLongError:
        return [("error", "took too long")] if alone else None
    except fmapper.UnsupportedOpsError as error:
        return [("missing", ", ".join(sorted(error.ops)))] if alone else None
    except fmapper.ConversionError as error:
        kind = "not exported" if "could not record" in str(error) else "refused"
        return [(kind, str(error))] if alone else None
    except fmapper.FmapperError as error:
        return [("refused", str(error))] if alone else None
    except Exception as error:
        return [("error", f"{type(error).__name__}: {error}")] if alone else None
    finally:
        signal.alarm(0)


def module_of(samples: list[Any]) -> Any:
    """A module that calls all samples with the tensors that it is given."""
    import torch

    class Calls(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            given = iter(tensors)
            return [s.call([next(given) for _ in s.tensors]) for s in samples]

    return Calls()


def examined(samples: list[Any]) -> list[tuple[str, str]]:
    """Whether the lowerings of what a call comes to give the dtypes and shapes that torch gives.

    Those are the operations that reach torch's kernels, and the one that is called itself.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None):
            before = described((args, kwargs or {}))
            found = func(*args, **(kwargs or {}))
            calls.append((func, *before, described(found)))
            return found

    outcomes = []
    for sample in samples:
        calls: list[Any] = []
        given = iter([converted(tensor, None) for tensor in sample.tensors])
        leaves = [next(given) if leaf is None else leaf[0] for leaf in sample.leaves]
        first, args, kwargs = sample.spec.unflatten(leaves)
        with torch.no_grad():
            packet = getattr(torch.ops.aten, sample.op.name.replace(".", "_"), None)
            if packet is not None:
                try:
                    resolve = torch._C._jit_resolve_packet
                    overload = resolve(f"aten::{packet.__name__}", first, *args, **kwargs)
                    func = getattr(packet, overload or "default")
                    calls.append((func, (first, *args), kwargs, func(first, *args, **kwargs)))
                except Exception:  # the function has other arguments than the operation
                    pass
            with Calls():
                sample.op.op(first, *args, **kwargs)
        problems = dict.fromkeys(filter(None, (kind_problem(*call) for call in calls)))
        worst = min((kind for kind, _ in problems), default="exact")
        outcomes.append((worst, "; ".join(text for _, text in problems)))
    return outcomes


def described(values: Any) -> Any:
    """Tensors as shapes and dtypes: torch changes some in place later, as by `squeeze_`."""
    import torch
    from torch.utils._pytree import tree_map

    def one(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if type(x) is torch.Tensor else x

    return tree_map(one, values)


def kind_problem(func: Any, args: Any, kwargs: Any, found: Any) -> tuple[str, str] | None:
    """What is wrong with the dtypes and shapes that the lowering of an operation gives.

    A lowering that raises, for values that it has to see among other reasons, is `refused`.
    """
    import jax
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    from fmapper_adapters.jax.aten import table as _table
    from fmapper_adapters.jax.aten import types as _types
    from fmapper_adapters.torch.from_fx import graph

    name = graph.name_of_overload(func)
    try:
        entry = _table.find(name, {})
    except KeyError:
        entry = None
    if entry is None or func._schema.is_mutable or entry.data_dependent_shape:
        return None
    arrays: list[Any] = []

    def plain(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            dtype = str(x.dtype).removeprefix("torch.")
            arrays.append(jax.ShapeDtypeStruct(tuple(x.shape), dtype))
            return Place(len(arrays) - 1)
        if isinstance(x, torch.dtype):
            return _types.dtype_of(str(x).removeprefix("torch."))
        ignored = (torch.device, torch.layout, torch.memory_format, torch.Generator)
        return None if isinstance(x, ignored) else x

    class Place(int):
        pass

    args = tree_map(plain, tuple(args))
    kwargs = tree_map(plain, {k: v for k, v in kwargs.items() if k not in graph._DROPPED_KWARGS})
    if entry.random:
        kwargs["key"] = jax.random.key(0)

    def filled(x: Any, given: Any) -> Any:
        if isinstance(x, Place):
            return given[x]
        if isinstance(x, list | tuple):
            return tuple(filled(one, given) for one in x)
        return x

    def run(*given: Any) -> Any:
        own = {key: filled(value, given) for key, value in kwargs.items()}
        return entry.function(*filled(args, given), **own)

    try:
        got = jax.tree.leaves(jax.eval_shape(run, *arrays))
    except Exception as error:
        return "refused", f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    wanted = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
    if len(got) != len(wanted):
        return None
    for one, other in zip(got, wanted, strict=True):
        dtype = str(other.dtype).removeprefix("torch.")
        if one.dtype != _types.dtype_of(dtype) or tuple(one.shape) != tuple(other.shape):
            kinds = [str(array.dtype) for array in arrays]
            text = f"{name} of {kinds} gives {one} for {dtype}{list(other.shape)}"
            return "MISMATCH", text
    return None


def compared(samples: list[Any]) -> list[tuple[str, str]] | None:
    import jax

    import fmapper

    tensors = tuple(tensor for sample in samples for tensor in sample.tensors)
    model = fmapper.convert(module_of(samples), "jax", tensors, check=False)
    arrays = [fmapper.to_jax(tensor.detach().clone().resolve_conj()) for tensor in tensors]
    key = jax.random.key(0)
    outcome = model.call(tuple(arrays), {}, key=key if model._code.random else None)
    random = model._code.random
    if random and len({sample.op.formatted_name for sample in samples}) > 1:
        return None  # each by itself, so that it is known which draw numbers
    return [
        difference(got, sample, not random and sample.op.name not in UNDEFINED)
        for got, sample in zip(outcome.output, samples, strict=True)
    ]


def difference(got: list[Any], sample: Any, values: bool) -> tuple[str, str]:
    """Where the outputs of a sample are not torch's."""
    got = turned(got, sample)
    for place, (mine, theirs) in enumerate(zip(got, sample.want, strict=True)):
        values = values and not (place == TIES.get(sample.op.name) and sample.has_ties())
        found = difference_of_arrays(mine, theirs, sample, place, values)
        if found:
            return "MISMATCH", f"output {place}: {found}"
    return "exact", ""


def turned(got: list[Any], sample: Any) -> list[Any]:
    """The results where singular vectors and eigenvectors have the signs, or phases, of torch's.

    They are defined up to these, and LAPACK's differ by who built it. Both vectors of a singular
    value are turned by the same; those beyond the singular values may be any basis of their space.
    """
    import numpy as np

    found, phases = list(got), None
    for place, axis in VECTORS.get(sample.op.name, {}).items():
        mine, theirs = np.asarray(got[place]), numpy_of(sample.want[place])
        if mine.shape != theirs.shape or not mine.size:
            return got
        columns = axis == -2
        if not columns:
            mine, theirs = np.swapaxes(mine, -1, -2), np.swapaxes(theirs, -1, -2)
        if phases is None:
            count = sample.want[1 - place].shape[-1]  # of singular values, or eigenvalues
            phases = (mine.conj() * theirs).sum(-2)[..., None, :count]
            phases = phases / np.where(phases == 0, 1, np.abs(phases))
        paired, others = mine[..., :count], mine[..., count:]
        paired = paired * (phases if columns else phases.conj())
        others = others @ (np.swapaxes(others.conj(), -1, -2) @ theirs[..., count:])
        turned = np.concatenate([paired, others], -1).astype(mine.dtype)
        found[place] = turned if columns else np.swapaxes(turned, -1, -2)
    return found


def difference_of_arrays(got: Any, want: Any, sample: Any, place: int, values: bool) -> str:
    import jax
    import numpy as np
    import torch

    if not isinstance(want, torch.Tensor):
        same = np.allclose(np.asarray(got), want, rtol=TOLERANCE, equal_nan=True)
        return "" if same or not values else f"{got} for {want}"
    if tuple(got.shape) != tuple(want.shape):
        return f"shape {tuple(got.shape)} for {tuple(want.shape)}"
    dtype = str(want.dtype).removeprefix("torch.")
    if got.dtype != jax.dtypes.canonicalize_dtype(dtype):
        return f"dtype {got.dtype} for {dtype}"
    if not values:
        return ""
    a, b = np.asarray(got), numpy_of(want)
    if not np.issubdtype(b.dtype, np.inexact):
        wrong = a != narrowed(b, a.dtype)
        if not wrong.any():
            return ""
        return f"{int(wrong.sum())} of {wrong.size} elements, {shown(a, b, wrong)}"
    a, b = (x.astype(np.complex128 if np.iscomplexobj(b) else np.float64) for x in (a, b))
    if np.iscomplexobj(b):
        a, b = (np.stack([x.real, x.imag]) for x in (a, b))
    special = ~np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    wrong = ~same & (special | ~np.isfinite(a))
    if wrong.any():
        return f"not finite in {int(wrong.sum())} elements, {shown(a, b, wrong)}"
    wrong = ~same & ~special
    if not wrong.any():
        return ""
    largest = float(np.abs(b[~special]).max())
    error = np.abs(np.where(wrong, a - np.where(wrong, b, 0), 0))
    if error.max() <= TOLERANCE * max(largest, 1e-30):
        return ""
    if rounding(a, b, sample, place):
        return ""
    worst = error >= error.max()
    return f"off by {error.max() / max(largest, 1e-30):.1e} of the largest, {shown(a, b, worst)}"


def narrowed(b: Any, dtype: Any) -> Any:
    """Integers of torch in the dtype that JAX has; the ends of int64 are those of int32 there."""
    import numpy as np

    if b.dtype != np.int64 or dtype != np.int32:
        return b.astype(dtype)
    wide, narrow = np.iinfo(b.dtype), np.iinfo(dtype)
    found = np.where(b == wide.min, narrow.min, np.where(b == wide.max, narrow.max, b))
    return found.astype(dtype)


def rounding(a: Any, b: Any, sample: Any, place: int) -> bool:
    """Whether the result is as near to that in float64 as torch's own is."""
    import numpy as np
    import torch

    try:
        with torch.no_grad():
            exact = numpy_of(sample.call(sample.tensors, torch.float64)[place])
    except Exception:  # not every operation takes float64
        return False
    if np.iscomplexobj(exact):
        exact = np.stack([exact.real, exact.imag])
    if exact.shape != a.shape or not np.isfinite(exact).all():
        return False
    mine, theirs = np.abs(a - exact).max(), np.abs(b - exact).max()
    return bool(mine <= 2 * theirs + 1e-6 * np.abs(exact).max())


def numpy_of(tensor: Any) -> Any:
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy()


def shown(a: Any, b: Any, wrong: Any) -> str:
    return f"{a[wrong][0]} for {b[wrong][0]}"


# --- the report -----------------------------------------------------------------------------


def report(results: list[dict[str, Any]], out: Path, seconds: float) -> None:
    """Writes and prints what came out."""
    import jax
    import torch

    counts = collections.Counter(case["outcome"] for case in results)
    worst = outcome_of_each_op(results)
    text = [
        "# Operations of torch.testing's database, converted to JAX",
        "",
        f"torch {torch.__version__}, jax {jax.__version__}, {seconds:.0f} s",
        "",
        "| | cases | operations (by their worst case) |",
        "|---|---|---|",
    ]
    of_ops = collections.Counter(worst.values())
    text += [f"| {name} | {counts[name]} | {of_ops[name]} |" for name in OUTCOMES]
    exported = len(results) - counts["not exported"]
    ops_exported = len(worst) - of_ops["not exported"]
    text += [
        f"| exact, of those exported | {percent(counts['exact'], exported)} "
        f"| {percent(of_ops['exact'], ops_exported)} |",
        "",
    ]
    for name in reversed(OUTCOMES[1:]):
        cases = [case for case in results if case["outcome"] == name]
        if cases:
            text += [f"## {name}", ""]
            text += [f"* {line(case)}" for case in first_of_each(cases)]
            text += [""]
    wanted = collections.Counter(
        op for c in results if c["outcome"] == "missing" for op in c["why"].split(", ")
    )
    if wanted:
        text += ["## Missing lowerings, by cases", ""]
        text += [f"* {op}: {count}" for op, count in wanted.most_common()]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text("\n".join(text) + "\n")
    rows = {"torch": torch.__version__, "jax": jax.__version__, "seconds": seconds}
    out.with_suffix(".json").write_text(json.dumps({**rows, "cases": results}, indent=1))
    print("\n".join(text[4:14]))


def outcome_of_each_op(results: list[dict[str, Any]]) -> dict[str, str]:
    """The worst outcome of each operation; `not exported` only where no case was."""
    found: dict[str, set[str]] = {}
    for case in results:
        found.setdefault(case["op"], set()).add(case["outcome"])
    ranks = [*OUTCOMES[2:], "exact", "not exported"]
    order = ["MISMATCH", "error", "refused", "missing", "exact", "not exported"]
    assert set(ranks) == set(order)
    return {op: next(o for o in order if o in seen) for op, seen in found.items()}


def first_of_each(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seen: dict[tuple[str, ...], dict[str, Any]] = {}
    for case in cases:
        seen.setdefault((case["op"], case["dtype"], case["outcome"]), case)
    return list(seen.values())


def percent(part: int, whole: int) -> str:
    return f"{part} of {whole}, {100 * part / max(whole, 1):.1f} %"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
