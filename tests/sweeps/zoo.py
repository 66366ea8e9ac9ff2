"""Every model class of transformers, made small, converted to JAX and compared with eager PyTorch.

`nox -s zoo` runs all of them; `nox -s zoo -- --shard 0/8 '^bert/' --out zoo` runs some. A sweep
that was stopped goes on with what has no result yet.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import warnings
from typing import Any

from sweeps import sweeping

TOLERANCE = 1e-4
SIZED_BY_VALUES = "sized by values"
HALVES = 100  # how much more numbers of 16 bits may differ


def zoo_case(name: str, kind: str) -> dict[str, Any]:
    """One class: built, recorded, converted, run and compared."""
    import torch

    from models import tiny_models

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        tiny = tiny_models.build(name, kind)
    except tiny_models.CannotBuild as error:
        return {"class": "not built", "reason": str(error)}
    about = {name: describe(value) for name, value in tiny.inputs.items()}
    return converted_case(tiny.model, (), tiny.inputs, tiny.outputs) | {
        "inputs": about,
        "rule": str(tiny.rule),
    }


def describe(value: Any) -> str:
    return str(list(getattr(value, "shape", ()))) if hasattr(value, "shape") else repr(value)


def converted_case(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], want: Any, **options: Any
) -> dict[str, Any]:
    """Converts a module, runs it on the same inputs and compares all outputs."""
    import time

    import torch

    import fmapper

    began = time.monotonic()
    try:
        converted = fmapper.convert(model, "jax", args, kwargs, **options)
    except fmapper.UnsupportedOpsError as error:
        return {"class": "unsupported", "ops": sorted(error.ops), "reason": sweeping.reason(error)}
    except fmapper.ConversionError as error:
        export = "torch.export could not record it" in str(error)
        kind = "torch.export" if export else "refused"
        return {"class": kind, "reason": sweeping.reason(error), "trace": sweeping.trace(error)}
    specialized = converted._code.concrete
    by_values = sizes_follow_values(converted.program)
    if specialized:  # it runs eagerly only: as it is for the values of the examples
        converted = fmapper.convert(model, "jax", args, kwargs, specialize=True, **options)
        if converted._code.concrete:
            return {"class": "refused", "reason": "it runs outside of jax.jit only"}
    times = {"convert": round(time.monotonic() - began, 1)}
    given = fmapper.fmap(
        lambda x: fmapper.to_jax(x.detach().clone()) if torch.is_tensor(x) else x, (args, kwargs)
    )
    options = {}
    if converted._code.random:
        if sizes_follow_draws(model, args, kwargs):
            return {"class": SIZED_BY_VALUES, "reason": "its sizes follow the numbers it draws"}
        want, drawn = with_draws(model, args, kwargs)
        replay(converted._code, drawn)
        options["key"] = __import__("jax").random.key(0)
    got = compiled_call(converted, *given, **options)
    worst, where = difference(got, want)
    if worst <= TOLERANCE and not converted._code.random and not specialized:
        found = on_other_values(model, converted, args, kwargs)
        if found is not None:
            worst, where = found[0], f"for other values: {found[1]}"
    times["all"] = round(time.monotonic() - began, 1)
    if worst > TOLERANCE:
        reason = f"{where}: off by {worst:.2e} of the largest element"
        own = rounding(model, args, kwargs)
        if worst <= 4 * own:
            reason += f"; torch is {own:.2e} from itself, rounded otherwise"
            return {"class": "rounding", "reason": reason, "worst": worst, "times": times}
        recorded = recorded_difference(model, args, kwargs, want)
        if recorded > TOLERANCE:
            reason += f"; torch.export has recorded it so: its program is off by {recorded:.2e}"
        return {"class": "MISMATCH", "reason": reason, "worst": worst, "times": times}
    about = {"checks": len(converted._code.checks), "specialized": specialized}
    if specialized:
        kind = SIZED_BY_VALUES if by_values else "specialized"
        return {"class": kind, "reason": by_values, "worst": worst, "times": times} | about
    return {"class": "ok", "worst": worst, "times": times} | about


def sizes_follow_values(program: Any) -> str:
    """Says which output has a size that depends on values: no compiled function returns it."""
    made = {call.name: call for call in program.graph.calls}
    for at, value in enumerate(program.graph.outputs):
        call = made.get(getattr(value, "name", ""))
        shapes = [str(shape) for _, shape in call.result] if call else []
        if any(re.search(r"\bu\d+", shape) for shape in shapes):
            return f"output {at}, of {call.op}, has shape {shapes[0]}"
    return ""


def sizes_follow_draws(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the module gives outputs of other shapes where it draws other numbers."""
    outputs = [with_draws(model, args, kwargs, seed)[0] for seed in (3, 4)]
    shapes = [[x.shape for x in parts(output)] for output in outputs]
    return shapes[0] != shapes[1]


def compiled_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
    """The output under `jax.jit`, with the parameters, buffers and arrays as arguments."""
    import jax

    leaves = model.program.bind(args, kwargs)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def run(params: Any, buffers: Any, arrays: Any) -> Any:
        filled = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            filled[i] = array
        args, kwargs = model.program.in_spec.unflatten(filled)
        output = model.replace(params=params, buffers=buffers).call(args, kwargs, **options).output
        found, rest = jax.tree.flatten(output)
        rests.append((found, rest))
        return [x if hasattr(x, "shape") else None for x in found]

    rests: list[Any] = []
    arrays = jax.jit(run)(model.params, model.buffers, [leaves[i] for i in places])
    found, rest = rests[-1]
    known = [b if hasattr(a, "shape") else a for a, b in zip(found, arrays, strict=True)]
    return jax.tree.unflatten(rest, known)


def on_other_values(
    model: Any, converted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[float, str] | None:
    """The difference for inputs of the same shapes; None where the program or torch refuses them.

    Floats are drawn anew, as are tokens: those that mark pictures and the like stay. What says
    where something is, as masks and sizes of grids, stays, too.
    """
    import torch

    import fmapper
    from models import tiny_configs

    generator = torch.Generator().manual_seed(7)
    special = (tiny_configs.IMAGE, tiny_configs.AUDIO, tiny_configs.VIDEO, tiny_configs.START)

    def other(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or "mask" in name:
            return value
        if value.is_floating_point():
            order = torch.randperm(value.numel(), generator=generator)
            return value.flatten()[order].reshape(value.shape).clone()
        if name.endswith("input_ids") and value.numel() > 1:
            kept = torch.isin(value, torch.tensor(special))
            return torch.where(kept, value, value.flatten()[~kept.flatten()].min())
        return value

    changed = {name: other(name, value) for name, value in kwargs.items()}
    try:
        want, _ = with_draws(model, args, changed)
    except (RuntimeError, ValueError, IndexError):  # torch does not take them
        return None
    given = fmapper.fmap(
        lambda x: fmapper.to_jax(x.detach().clone()) if torch.is_tensor(x) else x, (args, changed)
    )
    try:
        got = compiled_call(converted, *given)
    except Exception as error:
        if "these inputs violate" in str(error):  # a check of the program
            return None
        return float("inf"), f"{type(error).__name__}: {str(error)[-300:]}"
    return difference(got, want)


def with_draws(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int = 3
) -> tuple[Any, list[Any]]:
    """What a module gives, and with it the random numbers that it draws: their operation first."""
    import copy

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    drawn: list[Any] = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if torch.Tag.nondeterministic_seeded in func.tags and torch.is_tensor(result):
                drawn.append((plain_name(func._schema.name), result.detach().clone()))
            return result

    torch.manual_seed(seed)
    given = copy.deepcopy((args, kwargs))
    with Listener(), torch.no_grad():
        return model(*given[0], **given[1]), drawn


def rounding(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """How far a module is from itself in float64 or with parameters that are off by a last bit.

    The same numbers are drawn. Where it chooses, of numbers that are as good as equal, this is far.
    0 if not known.
    """
    import copy

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import fmapper

    plain, numbers = with_draws(model, args, kwargs)

    class Replay(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.drawn = iter(numbers)

        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if torch.Tag.nondeterministic_seeded in func.tags and torch.is_tensor(result):
                result.copy_(next(self.drawn)[1])
            return result

    def moved(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        args, kwargs = copy.deepcopy((args, kwargs))
        try:
            with Replay(), torch.no_grad():
                return difference_of_tensors(plain, model(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError, StopIteration):  # it is made for float32
            return 0.0

    wide = fmapper.fmap(
        lambda x: x.double() if torch.is_tensor(x) and x.is_floating_point() else x, (args, kwargs)
    )
    found = [moved(copy.deepcopy(model).double(), *wide)]
    for seed in range(3):
        other = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in other.parameters():
                signs = torch.rand(parameter.shape, generator=generator) - 0.5
                if parameter.is_floating_point():
                    parameter.mul_(1 + signs.sign() * torch.finfo(parameter.dtype).eps)
        found.append(moved(other, args, kwargs))
    return max(found)


def difference_of_tensors(got: Any, want: Any) -> float:
    """The largest error as in `difference`; infinite differences say that values were chosen."""
    import torch

    import fmapper

    arrays = fmapper.fmap(lambda x: x.detach().numpy() if torch.is_tensor(x) else x, got)
    worst = difference(arrays, want)[0]
    return worst if worst < float("inf") else 0.0


def plain_name(op: str) -> str:
    """`normal` for `aten::normal_`, `aten::normal_functional.default` and the like."""
    name = op.partition("::")[2].partition(".")[0]
    return name.removesuffix("_functional").removesuffix("_")


def replay(code: Any, drawn: list[Any]) -> None:
    """Has the converted program draw the numbers that torch has drawn, in the same order."""
    import dataclasses

    import fmapper

    names = {plain_name(op) for op, one in code.lowerings.items() if one.random is True}
    if "native_dropout" in names:
        names.add("bernoulli")  # of which torch makes it
    left = iter([pair for pair in drawn if pair[0] in names])

    def next_one(name: str, *args: Any, **_: Any) -> Any:
        found, tensor = next(left)
        numbers = fmapper.to_jax(tensor)
        if (name, found) == ("native_dropout", "bernoulli"):
            return args[0] * numbers / (1 - args[1]), numbers.astype(bool)
        assert found == name, f"torch has drawn with {found}, the program draws with {name}"
        return numbers

    code.lowerings = {
        op: dataclasses.replace(one, function=functools.partial(next_one, plain_name(op)))
        if one.random is True
        else one
        for op, one in code.lowerings.items()
    }


def recorded_difference(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], want: Any
) -> float:
    """How far what torch.export records is off, in torch: models can tell that they are traced."""
    import torch

    from fmapper_adapters.jax.aten import table
    from fmapper_adapters.torch.record import export as _export
    from fmapper_adapters.torch.record import modes
    from fmapper_adapters.torch.record.patches import foreign_classes

    with (
        modes.mode(model, train=False),
        foreign_classes.register(model, (args, kwargs)),
        torch.no_grad(),
    ):
        exported, _ = _export.record(model, args, kwargs, None, whole=table.lowers_whole({}))
        return difference(exported.module()(*args, **kwargs), want)[0]


def difference(got: Any, want: Any, path: str = "output") -> tuple[float, str]:
    """The largest error among all outputs, relative to the largest element of each, and where."""
    import numpy as np
    import torch

    if torch.is_tensor(want):
        return array_difference(np.asarray(got), want, path), path
    if isinstance(want, dict):
        pairs = [(got[key], value, f"{path}.{key}") for key, value in want.items()]
    elif isinstance(want, list | tuple):
        if len(got) != len(want):
            return float("inf"), f"{path} has {len(got)} parts, {len(want)} are wanted"
        pairs = [(got[i], value, f"{path}[{i}]") for i, value in enumerate(want)]
    elif want is None or isinstance(want, bool | int | float | str):
        return (0.0 if got == want else float("inf")), path
    else:
        # A cache and the like: its tensors in the order of torch's own flattening.
        ours, theirs = parts(got), parts(want)
        if len(ours) > len(theirs):  # what counts in Python there is an array here if it varies
            ours = [x for x in ours if x.ndim]
            theirs = [x for x in theirs if x.ndim]
        pairs = [(a, b, path) for a, b in zip(ours, theirs, strict=True)]
    return max((difference(*pair) for pair in pairs), default=(0.0, path))


def parts(tree: Any) -> list[Any]:
    """The arrays in an object, such as a cache, in the order of its attributes."""
    if hasattr(tree, "shape"):
        return [tree]
    if isinstance(tree, dict):
        return [x for value in tree.values() for x in parts(value)]
    if isinstance(tree, list | tuple):
        return [x for value in tree for x in parts(value)]
    if hasattr(tree, "__dict__") and not isinstance(tree, type) and not callable(tree):
        return [x for value in vars(tree).values() for x in parts(value)]
    return []


def array_difference(got: Any, want: Any, path: str) -> float:
    import numpy as np

    want = want.detach().resolve_conj().resolve_neg()
    b = (want.float() if str(want.dtype) == "torch.bfloat16" else want).numpy()
    if tuple(got.shape) != tuple(b.shape):
        return float("inf")
    if b.size == 0:
        return 0.0
    if not np.issubdtype(b.dtype, np.inexact):
        return 0.0 if np.array_equal(got, b.astype(got.dtype)) else float("inf")
    kind = np.complex128 if np.iscomplexobj(b) else np.float64
    a, b = got.astype(kind), b.astype(kind)
    odd = ~np.isfinite(b)
    if not np.array_equal(np.isnan(a), np.isnan(b)) or not np.array_equal(
        a[odd & ~np.isnan(b)], b[odd & ~np.isnan(b)]
    ):
        return float("inf")
    if odd.all():
        return 0.0
    # Masks filled with the smallest number would hide everything else.
    plain = ~odd & (np.abs(b) < 1e30)
    if not np.array_equal(a[~odd & ~plain], b[~odd & ~plain]):
        return float("inf")
    size = max(float(np.abs(b[plain]).max(initial=0)), 1e-6)
    size *= HALVES if want.dtype.itemsize == 2 else 1
    return float(np.abs(a[plain] - b[plain]).max(initial=0)) / size


def prepare() -> None:
    """Loads what all cases need before processes are forked; JAX must not compute before that."""
    import jax
    import torch
    import transformers

    import fmapper_adapters.jax.aten.table
    import fmapper_adapters.jax.model.jax_model
    import fmapper_adapters.torch.record.export

    assert all((jax, torch, transformers, fmapper_adapters.torch))
    fmapper_adapters.jax.aten.table.load()
    torch.set_num_threads(1)
    # Half of what torch.export needs is imported when it first runs.
    fmapper_adapters.torch.record.export.export_program(torch.nn.Linear(1, 1), (torch.ones(1),), {})


def main() -> None:
    parser = sweeping.arguments(__doc__ or "", "zoo")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    prepare()
    from models import tiny_models

    tiny_models.build("LlamaForCausalLM", "llama")  # likewise what transformers needs
    gc.freeze()  # or each process would copy all of it
    classes = tiny_models.classes()
    cases = {
        name: functools.partial(zoo_case, name.rpartition("/")[2], kind)
        for name, kind in classes.items()
    }
    sweeping.sweep(cases, options, "Model classes of transformers")


if __name__ == "__main__":
    main()
