"""Models of JAX, Flax and Equinox as people write them, converted to torch and compared with JAX.

`nox -s flaxzoo` runs all of them; `nox -s flaxzoo -- --out zoo linen/` runs some. A sweep that was
stopped goes on with what has no result yet. A model is right if

* its outputs and what it keeps (batch statistics, counters, caches) are JAX's, to 1e-4 of the
  largest element, whole numbers exactly; and again after all parameters were changed;
* its parameters have the names and shapes of the source;
* its gradients with respect to all of them are those of `jax.grad`, where JAX has any; or no more
  than four times as far from those in float64 as JAX's own are.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

from sweeps import sweeping

TOLERANCE = 1e-4
HALVES = 100  # how much more numbers of 16 bits may differ
KINDS = "linen", "nnx", "equinox", "functions"
Found = dict[str, Any]


def models() -> dict[str, Callable[[], Any]]:
    """All models by name."""
    found: dict[str, Callable[[], Any]] = {}
    for kind in KINDS:
        found |= importlib.import_module(f"models.{kind}_models").MODELS
    return found


class Reference:
    """A model as JAX runs it: a function of its parameters, by their names in the source.

    Attributes:
        parameters: The arrays that are trained, by name.
        call: Takes them; gives the output, and what the model keeps by name.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import jax

        tree, self._own = _opened(model, kwargs)
        paths, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        names = [".".join(_key(k) for k in path) or "value" for path, _ in paths]
        assert len(set(names)) == len(names)
        leaves = [leaf for _, leaf in paths]
        self.parameters = dict(zip(names, leaves, strict=True))
        self._given, self._given_tree = jax.tree.flatten((args, kwargs), is_leaf=_is_none)
        self._dynamic = [i for i, leaf in enumerate(self._given) if isinstance(leaf, jax.Array)]
        self._run = jax.jit(self._pure)

    def call(self, parameters: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return self._run(parameters, [self._given[i] for i in self._dynamic])

    def _pure(self, parameters: dict[str, Any], dynamic: list[Any]) -> Any:
        import jax

        given = list(self._given)
        for i, leaf in zip(self._dynamic, dynamic, strict=True):
            given[i] = leaf
        args, kwargs = jax.tree.unflatten(self._given_tree, given)
        in_order = [parameters[name] for name in self.parameters]  # jit sorts them
        tree = jax.tree.unflatten(self._structure, in_order)
        output, kept = self._own(tree, args, kwargs)
        plain = jax.tree.map(_plain, output, is_leaf=_is_none)
        return plain, {name: _plain(x) for name, x in kept.items()}

    @functools.cached_property
    def coarseness(self) -> int:
        """How much more it may differ, as it computes in 16 bits or less somewhere."""
        import jax

        dynamic = [self._given[i] for i in self._dynamic]
        jaxpr = str(jax.make_jaxpr(self._pure)(self.parameters, dynamic))
        return HALVES if any(kind in jaxpr for kind in ("bf16[", "f16[", "f8_")) else 1

    def wide(self) -> Reference:
        """The same in float64, where JAX has that switched on."""
        import jax.numpy as jnp

        def widened(x: Any) -> Any:
            if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return jnp.asarray(x, jnp.float64)

        found = copy.copy(self)
        found.parameters = {n: widened(x) for n, x in self.parameters.items()}
        found._given = [widened(x) for x in self._given]
        return found

    def gradients(self) -> dict[str, Any] | str:
        """The gradients of a weighted sum of all outputs; a reason where JAX has none."""
        import jax

        dynamic = [self._given[i] for i in self._dynamic]

        def loss(parameters: dict[str, Any]) -> Any:
            return weighted(jax.tree.leaves(self._pure(parameters, dynamic)[0]), jax.numpy)

        try:
            found: dict[str, Any] = jax.jit(jax.grad(loss))(self.parameters)
        except (ValueError, NotImplementedError, TypeError) as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return found


def _is_none(x: Any) -> bool:
    return x is None


def _key(key: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _plain(x: Any) -> Any:
    """Keys as the numbers that they are made of."""
    import jax

    is_key = hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def _opened(model: Any, kwargs: dict[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """The trained arrays of a model as a tree, and the model as a function of such a tree."""
    import equinox as eqx
    import flax.linen as nn
    from flax import nnx

    if isinstance(model, nn.Module) and model.scope is not None:
        model = model.unbind()
    if isinstance(model, tuple) and isinstance(model[0], nn.Module):
        return _opened_linen(*model)
    if isinstance(model, tuple) and isinstance(model[0], nnx.GraphDef):
        model = nnx.merge(*model)
    if isinstance(model, nnx.Module):
        return _opened_nnx(model)
    function, tree = (lambda m, *a, **k: m(*a, **k)), model
    if isinstance(model, tuple):
        function, tree = model
    elif isinstance(getattr(model, "__wrapped__", None), eqx.Module):
        import jax

        function, tree = (lambda m, *a: jax.vmap(m)(*a)), model.__wrapped__
    elif not isinstance(model, eqx.Module) and hasattr(model, "func"):
        return _opened_closure(model)
    trained, rest = eqx.partition(tree, eqx.is_inexact_array)
    return trained, lambda t, args, kw: (function(eqx.combine(t, rest), *args, **kw), {})


def _opened_closure(model: Any) -> tuple[Any, Callable[..., Any]]:
    """A partial of a jitted function: the dicts in its closure are filled while it is called."""
    inner = model.func.__wrapped__
    held = dict(zip(inner.__code__.co_freevars, inner.__closure__, strict=True))
    dicts = {name: cell.cell_contents for name, cell in held.items()}
    trained = {n: {k: x for k, x in d.items() if hasattr(x, "shape")} for n, d in dicts.items()}
    call = functools.partial(inner, *model.args, **model.keywords)

    def run(values: Any, args: Any, kwargs: Any) -> Any:
        for name, own in values.items():
            dicts[name].update(own)
        try:
            return call(*args, **kwargs), {}
        finally:
            for name, own in trained.items():
                dicts[name].update(own)

    return trained, run


def _opened_linen(module: Any, variables: Any) -> tuple[Any, Callable[..., Any]]:
    import flax.linen as nn
    from flax import traverse_util

    variables = nn.meta.unbox(variables)

    def run(trained: Any, args: Any, kwargs: Any) -> Any:
        given = {**variables, **trained}
        if not kwargs.get("mutable"):
            return module.apply(given, *args, **kwargs), {}
        output, updates = module.apply(given, *args, **kwargs)
        updates = nn.meta.unbox(updates)
        kept, new = {}, {}
        for name, tree in updates.items():
            if name not in variables:
                new[name] = tree
                continue
            for path, value in traverse_util.flatten_dict(tree).items():
                kept[".".join((name, *map(str, path)))] = value
        return (output, new) if new else output, kept

    return {name: variables[name] for name in ("params",) if name in variables}, run


def _opened_nnx(model: Any) -> tuple[Any, Callable[..., Any]]:
    from flax import nnx

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    tree = nnx.to_pure_dict(params)

    def run(values: Any, args: Any, kwargs: Any) -> Any:
        filled = nnx.clone(params) if hasattr(params, "clone") else nnx.merge_state(params)
        nnx.replace_by_pure_dict(filled, values)
        module = nnx.merge(graph, filled, rest, copy=True)
        output = module(*args, **kwargs)
        state = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))
        kept: dict[str, Any] = {}

        def walk(part: Any, path: tuple[str, ...]) -> None:
            if isinstance(part, dict):
                for name, inner in part.items():
                    walk(inner, (*path, str(name)))
            else:
                kept[".".join(path)] = part

        walk(state, ())
        return output, kept

    return tree, run


def weighted(outputs: list[Any], xp: Any) -> Any:
    """A sum of all floating outputs with weights of their own, of JAX or torch."""
    import numpy as np

    total = 0.0
    for i, x in enumerate(outputs):
        if not hasattr(x, "shape"):
            continue
        kind = str(x.dtype).removeprefix("torch.")
        if kind.startswith("complex"):
            x = x.real  # noqa: PLW2901
        elif "float" not in kind:
            continue
        weights = np.random.default_rng(i).standard_normal(tuple(x.shape)).astype("float32")
        if xp.__name__ == "torch":
            x = x.to(xp.float32)  # noqa: PLW2901
            total = total + (xp.where(xp.isfinite(x), x, 0) * xp.from_numpy(weights)).sum()
        else:
            x = x.astype("float64" if kind == "float64" else "float32")  # noqa: PLW2901
            total = total + (xp.where(xp.isfinite(x), x, 0) * weights).sum()
    return total


def difference(got: Any, want: Any) -> float:
    """The largest error relative to the largest element; infinite where no rounding explains it."""
    import numpy as np

    if not hasattr(want, "shape"):
        return 0.0 if got == want else float("inf")
    if not hasattr(got, "detach"):
        return float("inf")
    kind = str(got.dtype).removeprefix("torch.")
    if kind != str(want.dtype) or tuple(got.shape) != tuple(want.shape):
        return float("inf")
    half = kind in ("bfloat16", "float16") or kind.startswith("float8")
    got = got.detach().resolve_conj().resolve_neg()
    a = (got.float() if half else got).numpy()
    b = np.asarray(want).astype("float32") if half else np.asarray(want)
    if not np.issubdtype(b.dtype, np.inexact):
        return 0.0 if np.array_equal(a, b) else float("inf")
    wide = np.complex128 if np.iscomplexobj(b) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not finite.size:
        return 0.0 if not finite.size else float("inf")
    size = max(float(np.abs(b[finite]).max(initial=0)), 1e-6) * (HALVES if half else 1)
    worst = float(np.abs(a[finite] - b[finite]).max(initial=0)) / size
    return worst if np.isfinite(worst) else float("inf")


def compared(got: Any, want: Any, what: str) -> tuple[float, str]:
    """The largest difference among the leaves of two outputs, and at which."""
    import jax

    paths, _ = jax.tree_util.tree_flatten_with_path(want, is_leaf=_is_none)
    mine = jax.tree.leaves(got, is_leaf=_is_none)
    if len(mine) != len(paths):
        return float("inf"), f"{what}: {len(mine)} values, {len(paths)} are wanted"
    pairs = [
        (difference(a, b), what + jax.tree_util.keystr(path))
        for a, (path, b) in zip(mine, paths, strict=True)
    ]
    return max(pairs, default=(0.0, what), key=lambda pair: pair[0])


def to_torch(tree: Any) -> Any:
    """Arguments as a user of torch has them: arrays as tensors, keys as their numbers."""
    import jax

    import fmapper

    return jax.tree.map(
        lambda x: fmapper.to_torch(_plain(x)) if isinstance(x, jax.Array) else x,
        tree,
        is_leaf=_is_none,
    )


def case(name: str, *, export: bool = False, compiled: bool = False) -> Found:
    """One model: built, run in JAX, converted, run in torch and compared."""
    import torch

    import fmapper

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        model, args, kwargs = models()[name]()
        reference = Reference(model, args, kwargs)
        want, kept = reference.call(reference.parameters)
        moved = changed_parameters(reference.parameters)
        want_moved, _ = reference.call(moved)
        gradients = reference.gradients()
    except Exception as error:
        return {"class": "not built", "reason": sweeping.reason(error),
                "trace": sweeping.trace(error)}  # fmt: skip
    began = time.monotonic()
    try:
        converted = fmapper.convert(model, "torch", args, kwargs)
    except fmapper.UnsupportedOpsError as error:
        return {"class": "unsupported", "ops": sorted(error.ops), "reason": sweeping.reason(error)}
    except fmapper.ConversionError as error:
        return {"class": "refused", "reason": sweeping.reason(error),
                "trace": sweeping.trace(error)}  # fmt: skip
    found: Found = {"convert": round(time.monotonic() - began, 2)}
    options = {
        n: x for n, x in kwargs.items() if n not in ("method", "mutable", "capture_intermediates")
    }
    given = to_torch(args), to_torch(options)
    if "method" in kwargs or "mutable" in kwargs or "capture_intermediates" in kwargs:
        # These are fixed; a program may still list them among its arguments.
        names = {p.name for p in converted.program.signature}
        given[1].update({n: kwargs[n] for n in kwargs if n in names and n not in given[1]})
    before = {n: x.clone() for n, x in converted.state_dict().items()}

    wrong = parameters_problem(reference.parameters, converted)
    if wrong:
        return found | {"class": "parameters", "reason": wrong}
    output = converted(*given[0], **given[1])
    worst, where = compared(output, want, "output")
    bad, at = kept_difference(converted, kept)
    if bad > worst:
        worst, where = bad, at
    found["worst"] = worst
    if worst > TOLERANCE * reference.coarseness:
        return found | {"class": "MISMATCH", "reason": f"{where}: off by {worst:.2e}"}
    converted.load_state_dict(before)

    if not isinstance(gradients, str) and gradients:
        worst, where = gradient_difference(converted, given, gradients)
        found["gradient"] = worst
        if worst > TOLERANCE * reference.coarseness:
            own = rounding(reference, gradients)
            found["rounding"] = own
            if worst > 4 * own:
                reason = f"{where}: off by {worst:.2e}; JAX is {own:.2e} from itself in float64"
                return found | {"class": "gradient", "reason": reason}
        converted.load_state_dict(before)
    elif gradients:
        found["no_gradient"] = gradients

    new = {plain_name(n): x for n, x in moved.items()}
    with torch.no_grad():
        for n, p in named(converted).items():
            p.copy_(fmapper.to_torch(new[n]))
        worst, where = compared(converted(*given[0], **given[1]), want_moved, "output")
    found["moved"] = worst
    # Other numbers may be nearer to a cancellation.
    if worst > 10 * TOLERANCE * reference.coarseness:
        return found | {
            "class": "parameters",
            "reason": f"{where}: off by {worst:.2e} when parameters change",
        }
    converted.load_state_dict(before)

    if any(type(x).__name__ == "State" for x in given[0]):  # a class of Equinox, unknown to torch
        spec = converted.program.in_spec
        given = spec.unflatten(spec.flatten(given))
    for wanted, run in ((export, exported), (compiled, compiled_run)):
        if wanted:
            try:
                result = run(converted, given)
            except Exception as error:
                return found | {"class": run.__name__, "reason": sweeping.reason(error),
                                "trace": sweeping.trace(error)}  # fmt: skip
            worst, where = compared(result, want, "output")
            if worst > TOLERANCE * reference.coarseness:
                return found | {"class": run.__name__, "reason": f"{where}: off by {worst:.2e}"}
            converted.load_state_dict(before)
    return found | {"class": "ok"}


def exported(model: Any, given: Any) -> Any:
    import torch

    return torch.export.export(model, *given).module()(*given[0], **given[1])


def compiled_run(model: Any, given: Any) -> Any:
    import torch

    torch._dynamo.reset()  # or the models of one process count against one limit
    return torch.compile(model, backend="eager", fullgraph=True)(*given[0], **given[1])


def changed_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Others of the same size: what is frozen into a program does not follow."""
    import numpy as np

    found = {}
    for i, (name, x) in enumerate(parameters.items()):
        noise = np.random.default_rng(i).uniform(0.9, 1.1, x.shape)
        found[name] = (x * noise).astype(x.dtype)
    return found


def named(model: Any) -> dict[str, Any]:
    """The parameters of a module; names that modules keep for themselves have a _ more."""
    return {plain_name(n): p for n, p in model.named_parameters()}


def plain_name(name: str) -> str:
    return ".".join(part.removesuffix("_") for part in name.split("."))


def parameters_problem(want: dict[str, Any], model: Any) -> str:
    """Which parameters are missing, or are too many, or have other shapes."""
    plain = {plain_name(n): n for n in want}
    got = named(model)
    missing = sorted(set(plain) - set(got))
    more = sorted(set(got) - set(plain))
    if missing or more:
        return f"missing {missing[:5]}, too many {more[:5]}"
    for n, own in plain.items():
        if tuple(got[n].shape) != tuple(want[own].shape):
            return f"{n} is {tuple(got[n].shape)}, {tuple(want[own].shape)} in the source"
    return ""


def kept_difference(model: Any, kept: dict[str, Any]) -> tuple[float, str]:
    """How far the buffers are from what JAX has after the call."""
    buffers = dict(model.named_buffers())
    worst = 0.0, "state"
    for name, want in kept.items():
        short = name.partition(".")[2]
        quoted = (n.replace("'", "_") for n in (name, short))  # no quotes in names of torch
        names = (name, short, name + "_", *quoted)
        got = next((buffers[n] for n in names if n in buffers), None)
        if got is None:
            return float("inf"), f"no buffer for {name}"
        bad = difference(got, want)
        if bad > worst[0]:
            worst = bad, f"state {name}"
    return worst


def gradient_difference(model: Any, given: Any, want: dict[str, Any]) -> tuple[float, str]:
    """The largest error of a gradient, and of which parameter."""
    import jax
    import torch

    parameters = named(model)
    loss = weighted(jax.tree.leaves(model(*given[0], **given[1])), torch)
    gradients: Any = [None] * len(parameters)
    if torch.is_tensor(loss) and loss.requires_grad:
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    # Of complex ones, JAX gives the derivative, torch the direction of ascent.
    found = {
        name: None if g is None else g.conj().resolve_conj().to(torch.complex128).numpy()
        for name, g in zip(parameters, gradients, strict=True)
    }
    return gradients_difference(found, want)


def gradients_difference(got: dict[str, Any], want: dict[str, Any]) -> tuple[float, str]:
    """The largest error relative to the largest element of each, or 1e-2 of that of all.

    A gradient that is zero, as of a bias before a norm, is rounding of sums of that size.
    """
    import numpy as np

    wide = {plain_name(n): np.asarray(g).astype("complex128") for n, g in want.items()}
    top = max((float(np.abs(g).max(initial=0)) for g in wide.values()), default=0.0)
    worst = 0.0, "gradient"
    for name, g in want.items():
        b, a = wide[plain_name(name)], got[plain_name(name)]
        a = np.zeros(b.shape, "complex128") if a is None else a
        half = HALVES if g.dtype.itemsize == 2 else 1
        size = max(float(np.abs(b).max(initial=0)), 1e-2 * top, 1e-6) * half
        bad = float("inf")
        if np.array_equal(np.isfinite(a), np.isfinite(b)):
            finite = np.isfinite(b)
            bad = float(np.abs(a[finite] - b[finite]).max(initial=0)) / size
        if bad > worst[0]:
            worst = bad, f"gradient of {name}"
    return worst


def rounding(reference: Reference, gradients: dict[str, Any]) -> float:
    """How far the gradients of JAX are from those in float64; 0 if that is not to be had."""
    import jax
    import numpy as np

    try:
        with jax.enable_x64(True):
            exact = reference.wide().gradients()
    except (TypeError, ValueError):  # it is made for float32
        return 0.0
    if isinstance(exact, str):
        return 0.0
    wide = {n: np.asarray(g).astype("complex128") for n, g in exact.items()}
    found = gradients_difference({plain_name(n): g for n, g in wide.items()}, gradients)[0]
    return found if found < 1e-2 else 0.0  # other numbers were drawn, or other branches taken


def prepare() -> None:
    """Loads what all cases need before processes are forked; JAX must not compute before that."""
    import equinox
    import flax.linen
    import flax.nnx
    import jax
    import optax
    import torch

    import fmapper_adapters.torch.lax.table

    assert all((equinox, flax.linen, flax.nnx, jax, optax))
    fmapper_adapters.torch.lax.table.find_all({}, {})
    torch.set_num_threads(1)
    models()


def main() -> None:
    parser = sweeping.arguments((__doc__ or "").splitlines()[0], "flaxzoo")
    parser.add_argument("--export", action="store_true", help="torch.export each model, too")
    parser.add_argument("--compile", action="store_true", help="and torch.compile")
    parser.add_argument("--here", action="store_true", help="in this process: fast, not bounded")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    prepare()
    gc.freeze()  # or each process would copy all of it
    cases = {
        name: functools.partial(case, name, export=options.export, compiled=options.compile)
        for name in models()
    }
    if options.here:
        sweeping.run_case = sweeping.run_here
    sweeping.sweep(cases, options, "Models of JAX, Flax and Equinox in torch")


if __name__ == "__main__":
    main()
