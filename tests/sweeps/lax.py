"""Converts JAX's own corpus of primitives to torch and compares every case with JAX.

    PYTHONPATH=tests python -m sweeps.lax                         # a sample of every group
    PYTHONPATH=tests python -m sweeps.lax --group '^sort$|^cum' --per 0 --dtypes all
    PYTHONPATH=tests python -m sweeps.lax --gradients --jobs 4 --out reports/lax

The corpus is `jax._src.internal_test_util.test_harnesses`. Each case ends in one of

* `right`: shapes and dtypes are JAX's, integers and bools are equal, NaN, infinities and the signs
  of zeros are where JAX has them, and floats are within rounding: see `TOLERANCE`, or no further
  from JAX in double precision than four times what JAX itself is. Factorisations may differ in the
  sign or phase of their vectors; their product may not. Sorting that is not stable may order equal
  elements as it likes.
* `refused`: conversion says why it cannot do that (a `FmapperError`).
* `MISMATCH`: other values than JAX's, without an error.
* `error`: anything else was raised, or the process died, or it took too long.
* `not run`: JAX itself refuses the case here; it is not counted.

Cases run in worker processes, which are replaced when they crash or hang.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import signal
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sweeps.sweeping import Worker

OUTCOMES = ("right", "refused", "MISMATCH", "error", "not run")
# Of the element, and of the largest element where sums are taken.
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
ROUNDED = ("dot_general", "conv", "cum", "reduce", "scatter", "select_and", "fft", "linear_solve",
           "triangular_solve", "tridiagonal", "cholesky", "lu", "qr", "svd", "eig", "custom",
           "grad", "matmul", "jvp")  # fmt: skip
Case = dict[str, Any]


def main() -> None:
    options = parser().parse_args()
    if options.worker:
        work(options)
        return
    began = time.time()
    results = drive(options)
    report(results, Path(options.out), time.time() - began)
    if any(case["outcome"] == "MISMATCH" for case in results):
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("--group", default="", help="a regular expression for names of groups")
    found.add_argument("--only", default="", help="a regular expression for names of cases")
    found.add_argument(
        "--dtypes", default="sample", help="by comma, or all; sample: float32, int32, bool, more"
    )
    found.add_argument("--per", type=int, default=3, help="cases per group and dtype; 0 for all")
    found.add_argument("--limit", type=int, default=0, help="cases in all, spread over the groups")
    found.add_argument("--jobs", type=int, default=1, help="worker processes")
    found.add_argument("--seconds", type=int, default=60, help="at most, per case")
    found.add_argument("--x64", action="store_true", help="with jax_enable_x64: more cases")
    found.add_argument("--gradients", action="store_true", help="compare gradients too")
    found.add_argument("--out", default="lax", help="reports go to this name .json and .md")
    found.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return found


# --- which cases ----------------------------------------------------------------------------


def corpus(*, x64: bool = False) -> dict[str, Any]:
    """JAX's harnesses by name; with x64 there are those of 64 bits too."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", x64)
    from jax._src.internal_test_util import test_harnesses

    return {
        h.fullname: h
        for h in sorted(test_harnesses.all_harnesses, key=lambda h: h.fullname)
        if h.filter("cpu")
    }


def chosen(harnesses: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """The names of the cases that the options ask for."""
    import numpy as np

    kinds: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for name, harness in harnesses.items():
        if re.search(options.group, harness.group_name) and re.search(options.only, name):
            kinds[harness.group_name, np.dtype(harness.dtype).name].append(name)
    wanted = []
    for (group, dtype), names in kinds.items():
        if dtype in _dtypes_of(group, kinds, options.dtypes):
            wanted += _spread(names, options.per)
    return _spread(wanted, options.limit)


def _dtypes_of(group: str, kinds: Iterable[tuple[str, str]], asked: str) -> list[str]:
    """The dtypes of a group that are asked for; a sample has one besides the usual ones."""
    there = [dtype for name, dtype in kinds if name == group]
    if asked == "all":
        return there
    if asked != "sample":
        return [dtype for dtype in asked.split(",") if dtype in there]
    usual = [dtype for dtype in ("float32", "int32", "bool") if dtype in there]
    others = sorted(set(there) - set(usual))
    return [*usual, others[zlib.crc32(group.encode()) % len(others)]] if others else usual


def _spread(names: list[str], count: int) -> list[str]:
    if not count or count >= len(names):
        return names
    return [names[i * len(names) // count] for i in range(count)]


# --- the driver -----------------------------------------------------------------------------


def drive(options: argparse.Namespace) -> list[Case]:
    """All cases, by worker processes that each take a part."""
    names = chosen(corpus(x64=options.x64), options)
    parts: list[list[Case]] = [[] for _ in range(options.jobs)]
    threads = [
        threading.Thread(target=run_part, args=(names[i :: options.jobs], options, part))
        for i, part in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted((case for part in parts for case in part), key=lambda case: str(case["name"]))


def run_part(names: list[str], options: argparse.Namespace, results: list[Case]) -> None:
    """Runs cases in workers; where one dies, the case that it had begun is an error."""
    left = list(names)
    while left:
        worker = Worker([sys.executable, "-m", "sweeps.lax", *sys.argv[1:], "--worker"], left)
        while left:
            case = worker.answer(4 * options.seconds + 60)
            if case is None:
                why = "crashed" if worker.process.poll() is not None else "hangs"
                case = {"name": left[0], "outcome": "error", "why": f"the process {why}"}
            results.append(case)
            left.pop(0)
            if case["outcome"] != "right":
                print(line(case), flush=True)
            if case["why"].startswith("the process"):
                break
        worker.process.kill()
        worker.process.wait()


def line(case: Case) -> str:
    return f"{case['outcome']:9} {case['name']}: {' '.join(str(case['why']).split())[:300]}"


# --- the worker -----------------------------------------------------------------------------


class TooLongError(Exception):
    pass


def work(options: argparse.Namespace) -> None:
    """Reads names of cases, writes how they end."""
    import jax
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    harnesses = corpus(x64=options.x64)
    signal.signal(signal.SIGALRM, _on_alarm)
    for number, name in enumerate(sys.stdin.read().split("\n")):
        began = time.time()
        outcome, why = outcome_of(
            harnesses[name], seconds=options.seconds, gradients=options.gradients
        )
        took = round(time.time() - began, 2)
        case = {"name": name, "group": harnesses[name].group_name, "outcome": outcome, "why": why}
        print(json.dumps({**case, "seconds": took}), flush=True)
        if number % 50 == 49:
            jax.clear_caches()


def _on_alarm(*_: Any) -> None:
    raise TooLongError("took too long")


def outcome_of(harness: Any, *, seconds: int = 60, gradients: bool = False) -> tuple[str, str]:
    """How one case ends, and why."""
    import fmapper

    signal.alarm(seconds)
    try:
        case = Run(harness)
        try:
            case.reference()
        except TooLongError:
            raise
        except Exception as error:  # a case that JAX cannot run is no case
            return "not run", _short(error)
        problem = case.forward()
        if not problem and gradients:
            problem = case.gradients()
        return ("MISMATCH", problem) if problem else ("right", "")
    except fmapper.FmapperError as error:
        return "refused", _short(error)
    except Exception as error:
        return "error", _short(error)
    finally:
        signal.alarm(0)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1500]


class Run:
    """A case with its arguments, run by JAX and by torch."""

    def __init__(self, harness: Any) -> None:
        import jax
        import numpy as np

        import fmapper

        self.harness = harness
        made = harness.dyn_args_maker(np.random.RandomState(zlib.crc32(harness.fullname.encode())))
        self.args = [jax.numpy.asarray(arg) for arg in made]
        self.want: list[Any] = []
        self.model: Any = None
        fmapper.leaf(type(harness))  # arrays that it holds are not parameters

        def function(*args: Any) -> Any:
            return harness.dyn_fun(*args)

        self.function = function

    def reference(self) -> None:
        import jax

        self.want = jax.tree.leaves(self.function(*self.args))

    def forward(self) -> str:
        """What is wrong with the outputs; empty if nothing is."""
        import jax
        import torch

        import fmapper

        self.model = fmapper.convert(self.function, "torch", tuple(self.args))
        with torch.no_grad():
            found = self.model(*[fmapper.to_torch(arg) for arg in self.args])
        have = [fmapper.to_jax(x) for x in jax.tree.leaves(found)]
        if len(have) != len(self.want):
            return f"{len(have)} outputs, JAX has {len(self.want)}"
        problems = []
        for i, (x, y) in enumerate(zip(have, self.want, strict=True)):
            problem = differs(x, y, rounded=self.harness.group_name.startswith(ROUNDED))
            if problem and self._is_as_near(i, x, y):
                problem = ""
            if problem:
                problems.append(f"output {i}: {problem}")
        if problems and not self._is_factorisation(have) and not self._is_unstable(have):
            return "; ".join(problems)
        return ""

    def _is_unstable(self, have: list[Any]) -> bool:
        """Whether elements are in another order where JAX promises none."""
        import numpy as np

        group, params = self.harness.group_name, self.harness.params
        ours, theirs = ([np.asarray(_widened(x)) for x in outs] for outs in (have, self.want))
        if any(x.shape != y.shape for x, y in zip(ours, theirs, strict=True)):
            return False
        if group == "sort" and not params["is_stable"] and ours[0].ndim == 1:
            keys = params["num_keys"]
            same = all(map(np.array_equal, ours[:keys], theirs[:keys]))
            rows = [
                sorted(zip(*(x.tolist() for x in outs), strict=True)) for outs in (ours, theirs)
            ]
            return same and rows[0] == rows[1]
        if group == "approx_top_k":
            at = np.asarray(have[1])
            there = np.take_along_axis(_widened(self.args[0]), at, -1)
            distinct = all(
                len(set(row)) == len(row) for row in at.reshape(-1, at.shape[-1]).tolist()
            )
            return distinct and np.array_equal(there, theirs[0])
        return False

    def _is_as_near(self, i: int, have: Any, want: Any) -> bool:
        """Whether it is no further from double precision than four times what JAX is."""
        import jax
        import numpy as np

        if not jax.numpy.issubdtype(want.dtype, np.inexact) or have.shape != want.shape:
            return False
        try:
            with jax.enable_x64(True):
                exact = jax.tree.leaves(self.function(*[_doubled(arg) for arg in self.args]))[i]
                exact = np.asarray(exact)
        except Exception:  # the case takes no doubles
            return False
        x, y = _widened(have), _widened(want)
        if (
            not _same_places(x, y)
            or x.dtype.kind not in "fc"
            or exact.shape != x.shape
            or exact.dtype.kind != x.dtype.kind
        ):
            return False
        good = np.isfinite(x) & np.isfinite(exact)
        if not np.array_equal(np.isnan(x), np.isnan(exact)) or not good.any():
            return False
        with np.errstate(all="ignore"):
            ours, theirs = np.abs(x - exact)[good], np.abs(y - exact)[good]
        rounding = 2 * _eps(want) * np.abs(exact[good])
        return bool(np.all(ours <= 4 * theirs + rounding) or ours.max() <= 4 * theirs.max())

    def gradients(self) -> str:
        """What is wrong with the gradients by floating arguments; empty if JAX has none."""
        import jax
        import jax.numpy as jnp
        import numpy as np
        import torch

        import fmapper

        at = [i for i, arg in enumerate(self.args) if jnp.issubdtype(arg.dtype, np.floating)]
        if not at or not any(jnp.issubdtype(y.dtype, np.floating) for y in self.want):
            return ""
        rng = np.random.RandomState(0)
        weights = [jnp.asarray(rng.randn(*y.shape), y.dtype) if jnp.issubdtype(y.dtype, np.floating)
                   else None for y in self.want]  # fmt: skip

        def loss(floats: list[Any]) -> Any:
            args = list(self.args)
            for i, x in zip(at, floats, strict=True):
                args[i] = x
            outs = jax.tree.leaves(self.function(*args))
            return sum((w * y).sum() for w, y in zip(weights, outs, strict=True) if w is not None)

        try:
            want = jax.grad(loss)([self.args[i] for i in at])
        except TooLongError:
            raise
        except Exception:
            return ""
        tensors = [fmapper.to_torch(arg) for arg in self.args]
        for i in at:
            tensors[i].requires_grad_()
        outs = jax.tree.leaves(self.model(*tensors))
        total = sum((fmapper.to_torch(w) * y).sum() for w, y in zip(weights, outs, strict=True)
                    if w is not None)  # fmt: skip
        if not total.requires_grad:
            found = [torch.zeros_like(tensors[i]) for i in at]
        else:
            found = torch.autograd.grad(total, [tensors[i] for i in at], materialize_grads=True)
        problems = [
            f"gradient {i}: {problem}"
            for i, x, y in zip(at, found, want, strict=True)
            if (problem := differs(fmapper.to_jax(x), y, rounded=True, scale=8, zeros=False))
        ]
        return "; ".join(problems)

    def _is_factorisation(self, have: list[Any]) -> bool:
        """Whether outputs are a factorisation that differs from JAX's in signs and phases only."""
        import numpy as np

        product = PRODUCTS.get(self.harness.group_name)
        if product is None or any(x.shape != y.shape or x.dtype != y.dtype
                                  for x, y in zip(have, self.want, strict=True)):  # fmt: skip
            return False
        ours, theirs = ([_widened(x) for x in outs] for outs in (have, self.want))
        matrix = _widened(self.args[0])
        params = self.harness.params
        with np.errstate(all="ignore"):
            a = product(matrix, ours, params)
            b = product(matrix, theirs, params)
        limit = 200 * _eps(self.want[0])
        return all(
            x.shape == y.shape and np.abs(x).max(initial=0) <= 4 * np.abs(y).max(initial=0) + limit
            for x, y in zip(a, b, strict=True)
        )


def _h(x: Any) -> Any:
    return x.conj().swapaxes(-1, -2)


def _eye(x: Any) -> Any:
    import numpy as np

    return _h(x) @ x - np.eye(x.shape[-1])


def _qr(a: Any, outs: list[Any], params: Any) -> list[Any]:
    q, r = outs
    return [q @ r - a, _eye(q)]


def _svd(a: Any, outs: list[Any], params: Any) -> list[Any]:
    s, *vectors = outs
    if not vectors:
        return [s * 0 + 1]
    u, vh = vectors
    k = s.shape[-1]
    return [(u[..., :, :k] * s[..., None, :]) @ vh[..., :k, :] - a, _eye(u), _eye(_h(vh))]


def _eigh(a: Any, outs: list[Any], params: Any) -> list[Any]:
    import numpy as np

    v, w = outs if outs[0].ndim > outs[1].ndim else outs[::-1]
    lower = np.tril(a) + _h(np.tril(a, -1))
    upper = np.triu(a) + _h(np.triu(a, 1))
    full = lower if params.get("lower", True) else upper
    return [full @ v - v * w[..., None, :], _eye(v), np.diff(w) * (np.diff(w) < 0)]


def _eig(a: Any, outs: list[Any], params: Any) -> list[Any]:
    w, *vectors = outs
    left = params.get("compute_left_eigenvectors") or not params.get("compute_right_eigenvectors")
    found = [w.sum(-1) - a.trace(axis1=-2, axis2=-1)]
    for i, v in enumerate(vectors):
        if left and i == 0:
            found.append(_h(v) @ a - w[..., :, None] * _h(v))
        else:
            found.append(a @ v - v * w[..., None, :])
        found.append((abs(v) ** 2).sum(-2) - 1)
    return found


PRODUCTS = {"qr": _qr, "svd": _svd, "eigh": _eigh, "eig": _eig}


def differs(
    have: Any, want: Any, *, rounded: bool = False, scale: float = 1.0, zeros: bool = True
) -> str:
    """What is wrong with an array beside another one; empty if nothing is.

    Args:
        have: An array.
        want: What it should be.
        rounded: Errors may be as large as rounding of the largest element.
        scale: What the tolerance is multiplied by.
        zeros: The signs of zeros count.
    """
    import numpy as np

    if have.dtype != want.dtype or have.shape != want.shape:
        return f"{have.dtype}{have.shape}, JAX has {want.dtype}{want.shape}"
    x, y = np.atleast_1d(_widened(have)), np.atleast_1d(_widened(want))
    if x.dtype.kind not in "fc":
        wrong = x != y
    elif not _same_places(x, y):
        wrong = (np.isnan(x) != np.isnan(y)) | ((np.isinf(x) | np.isinf(y)) & (x != y))
    else:
        finite = np.isfinite(y)
        size = np.where(finite, np.abs(y), 0)
        tolerance = scale * TOLERANCE.get(_real(want), _eps(want))
        limit = tolerance * (size.max(initial=0) if rounded else size)
        with np.errstate(all="ignore"):
            wrong = finite & ~(np.abs(x - y) <= limit)
        if zeros and x.dtype.kind == "f":
            wrong |= (x == 0) & (y == 0) & (np.signbit(x) != np.signbit(y))
    if not wrong.any():
        return ""
    at = tuple(int(i[0]) for i in np.nonzero(wrong))
    return f"{int(wrong.sum())} of {wrong.size} elements, first at {at}: {x[at]}, JAX has {y[at]}"


def _same_places(x: Any, y: Any) -> bool:
    """Whether NaN and infinities are in the same places."""
    import numpy as np

    if not (np.array_equal(np.isnan(x), np.isnan(y)) and np.array_equal(np.isinf(x), np.isinf(y))):
        return False
    return x.dtype.kind == "c" or bool(np.array_equal(x[np.isinf(x)], y[np.isinf(y)]))


def _widened(array: Any) -> Any:
    """As numpy's own numbers, floats in double precision."""
    import jax.numpy as jnp
    import numpy as np

    found = np.asarray(array)
    if jnp.issubdtype(array.dtype, np.floating):
        return found.astype(np.float64)
    if jnp.issubdtype(array.dtype, np.complexfloating):
        return found.astype(np.complex128)
    if jnp.issubdtype(array.dtype, np.integer):
        return found.astype(np.uint64 if jnp.iinfo(array.dtype).min == 0 else np.int64)
    return found


def _doubled(array: Any) -> Any:
    import jax.numpy as jnp
    import numpy as np

    if jnp.issubdtype(array.dtype, np.inexact):
        return jnp.asarray(_widened(array))
    return array


def _real(array: Any) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(str(array.dtype), str(array.dtype))


def _eps(array: Any) -> float:
    import jax.numpy as jnp

    return float(jnp.finfo(_real(array)).eps)


# --- the report -----------------------------------------------------------------------------


def report(results: list[Case], out: Path, seconds: float) -> None:
    """Writes what was found as .json and .md."""
    import jax
    import torch

    counts = collections.Counter(case["outcome"] for case in results)
    whole = len(results) - counts["not run"]
    share = 100 * counts["right"] / max(whole, 1)
    lines = [
        "# JAX's corpus of primitives, converted to torch",
        "",
        f"torch {torch.__version__}, JAX {jax.__version__}, {seconds:.0f} s.",
        f"{counts['right']} of {whole} cases are right: {share:.1f} %.",
        "",
        *(f"* {name}: {counts[name]}" for name in OUTCOMES),
        "",
        f"| group | {' | '.join(OUTCOMES)} |",
        f"|---|{'---|' * len(OUTCOMES)}",
    ]
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for case in results:
        groups[case.get("group", "?")].append(case["outcome"])
    for group, found in sorted(groups.items()):
        lines.append(f"| {group} | {' | '.join(str(found.count(o)) for o in OUTCOMES)} |")
    for name in OUTCOMES[1:]:
        if counts[name]:
            lines += ["", f"## {name}", ""]
            lines += [f"* {line(case)}" for case in results if case["outcome"] == name]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    head = {"torch": torch.__version__, "jax": jax.__version__, "seconds": seconds}
    out.with_suffix(".json").write_text(json.dumps({**head, "cases": results}, indent=1))
    print("\n".join(lines[3:10]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
