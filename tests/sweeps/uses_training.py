"""Gradients of converted models, and a step of training, against torch's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from sweeps import zoo
from sweeps.using import (
    TIMES,
    TOLERANCE,
    Arrays,
    Found,
    arrays,
    compiled,
    distance,
    floating,
    in_torch,
    jitted,
    largest,
    paired,
    split,
    wide,
)

GRADIENT = 1e-3  # of the largest element of a gradient
LEAST = 1e-4  # of the largest gradient of the model: what is smaller is measured by that


def gradients(model: Any, inputs: Arrays) -> Found:
    """The gradients of all parameters of a model in evaluation mode."""
    import fmapper

    model.eval()
    converted = fmapper.convert(model, "jax", (), inputs)
    return compared_gradients(model, converted, inputs)


def compared_gradients(model: Any, converted: Any, inputs: Arrays) -> Found:
    """The gradients of a converted model against those of the model in its present mode."""
    outputs, want = torch_gradients(model, inputs)
    got = jax_gradients(converted, inputs, outputs)
    missing = sorted(want.keys() ^ (got.keys() - converted.program.frozen))
    if missing:
        return {"class": "parameters", "reason": f"only one side has {missing}"}
    most = max(map(largest, want.values()))
    worst: dict[str, float] = {}
    for name, gradient in want.items():
        size = max(largest(gradient), LEAST * most, 1e-30)
        worst[name] = distance(got[name], gradient) / size
    name = max(worst, key=lambda name: worst[name])
    found: Found = {"worst": worst[name], "parameters": len(want)}
    found |= {"eager": True} if converted._code.concrete else {}
    if worst[name] <= GRADIENT:
        return found | {"class": "ok"}
    reason = f"{name}: off by {worst[name]:.2e} of the largest element"
    others = torch_gradients_otherwise(model, inputs)
    for key in [key for key in worst if not worst[key] <= GRADIENT]:
        own = max((distance(want[key], other[key]) for other in others), default=0.0)
        ours = distance(got[key], want[key])
        if ours > TIMES * own:
            size = max(largest(want[key]), 1e-30)
            reason = (
                f"{key}: off by {worst[key]:.2e} ({ours:.2e} of {size:.2e}); torch is {own:.2e} "
                "from itself, rounded otherwise"
            )
            return found | {"class": "gradient", "reason": reason}
    return found | {"class": "rounding", "reason": f"{reason}; torch's own rounding is as large"}


def weight(tensor: Any, index: int) -> Any:
    """Numbers that make a loss of an output: one for every element, 0 for the fill of masks."""
    import torch

    generator = torch.Generator().manual_seed(index)
    numbers = torch.rand(tensor.shape, generator=generator) + 0.5
    plain = tensor.detach().isfinite() & (tensor.detach().abs() < 1e30)
    return torch.where(plain, numbers, 0) / max(tensor.numel(), 1)


def torch_gradients(model: Any, inputs: Arrays, like: Any = None) -> tuple[Any, Arrays]:
    """The outputs of a model and the gradients of a weighted sum of them, by parameter."""
    import torch

    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    outputs = model(**copy.deepcopy(inputs))
    weights = [weight(w, i) for i, (_, w) in enumerate(paired(like or outputs, like or outputs))]
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for (y, _), w in zip(paired(outputs, outputs), weights, strict=True):
        if y.requires_grad:
            loss = loss + (torch.where(w != 0, y, 0) * w).sum()
    loss.backward()
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return outputs, found


def jax_gradients(converted: Any, inputs: Arrays, outputs: Any, **options: Any) -> Arrays:
    """The gradients of the same sum in JAX, compiled."""
    import jax
    import jax.numpy as jnp

    numbers, joined = split(arrays(inputs))
    weights = [
        jnp.asarray(weight(w, i).numpy()) for i, (w, _) in enumerate(paired(outputs, outputs))
    ]

    def loss(params: Any, numbers: Any, options: Any) -> Any:
        found = converted.replace(params=params).call((), joined(numbers), **options).output
        pairs = zip(paired(found, outputs), weights, strict=True)
        return sum((jnp.where(w != 0, y, 0) * w).sum() for (y, _), w in pairs)

    gradient = compiled(jax.grad(loss), converted)
    found: Arrays = gradient(converted.params, numbers, options)
    return found


def torch_gradients_otherwise(model: Any, inputs: Arrays) -> list[Arrays]:
    """torch's gradients in float64, and with parameters that are off by a last bit."""
    import torch

    like, _ = torch_gradients(model, inputs)
    found = []
    try:
        double = copy.deepcopy(model).double()
        found.append(torch_gradients(double, floating(inputs, lambda x: x.double()), like)[1])
    except (RuntimeError, TypeError, ValueError):  # it is made for float32
        pass
    for seed in range(2):
        other = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in other.parameters():
                signs = torch.rand(parameter.shape, generator=generator) - 0.5
                if parameter.is_floating_point():
                    parameter.mul_(1 + signs.sign() * torch.finfo(parameter.dtype).eps)
        found.append(torch_gradients(other, inputs, like)[1])
    return found


def training(model: Any, inputs: Arrays) -> Found:
    """With dropout: the same for the same key. Without: torch's outputs and running statistics."""
    import jax
    import numpy as np

    import fmapper

    noisy = with_dropout(copy.deepcopy(model), 0.1).train()
    converted = fmapper.convert(noisy, "jax", (), inputs, train=True)
    keys = [jax.random.key(i) for i in (0, 0, 1)] if converted.is_random else []
    options = {"key": keys[0]} if keys else {}
    outputs = in_torch(copy.deepcopy(noisy), inputs)
    given = arrays(inputs)
    drawn = [jitted(converted, given, key=key)[0] for key in keys]
    if drawn:
        same, other = (
            all(np.array_equal(a, b, equal_nan=True) for a, b in both_floating(drawn[0], one))
            for one in drawn[1:]
        )
        if not same or other:
            return {"class": "MISMATCH", "reason": f"same key same {same}, other key same {other}"}
    found = jax_gradients(converted, inputs, outputs, **options)
    bad = [name for name, x in found.items() if not np.isfinite(wide(x)).all()]
    if bad:
        return {"class": "gradient", "reason": f"not finite: {bad}"}
    return {"random": bool(keys)} | without_randomness(model, inputs)


def both_floating(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """The floating arrays of two outputs of JAX."""
    for x, y in zip(zoo.parts(a), zoo.parts(b), strict=True):
        if "float" in str(x.dtype):
            yield x, y


def without_randomness(model: Any, inputs: Arrays) -> Found:
    """A step of training with no dropout against torch's: outputs, buffers, gradients."""
    import jax
    import numpy as np

    import fmapper

    plain = with_dropout(copy.deepcopy(model), 0.0).train()
    converted = fmapper.convert(plain, "jax", (), inputs, train=True)
    options = {}
    stepped = copy.deepcopy(plain)
    want = in_torch(stepped, inputs)
    if converted.is_random:  # something else than dropout: it gets torch's numbers
        stepped = copy.deepcopy(plain)
        want, drawn = zoo.with_draws(stepped, (), inputs)
        zoo.replay(converted._code, drawn)
        options["key"] = jax.random.key(0)
    got, after = jitted(converted, arrays(inputs), **options)
    worst, where = zoo.difference(got, want)
    for name, buffer in stepped.named_buffers():
        if name in after.buffers:
            error = zoo.array_difference(np.asarray(after.buffers[name]), buffer, name)
            worst, where = max((worst, where), (error, name))
    if worst > TOLERANCE:
        return {"class": "MISMATCH", "reason": f"{where}: off by {worst:.2e} in training"}
    found: Found = {"class": "ok", "worst": worst}
    names = [type(inner).__name__ for inner in plain.modules()]
    if any("BatchNorm" in name for name in names):
        moved = [n for n, b in plain.named_buffers() if "running" in n and n in after.buffers]
        found["statistics"] = len(moved)
        if not options:
            found |= compared_gradients(plain, converted, inputs)
    return found


def with_dropout(model: Any, rate: float) -> Any:
    """A model that drops out nothing, or, where it would drop out nothing, something.

    For nothing, layers are not left out, and nothing is masked, either.
    """
    for inner in model.modules():
        for name, value in [*vars(inner).items()]:
            set_rate(inner, name, value, rate)
        if type(inner).__name__.startswith("Dropout"):
            set_rate(inner, "dropout.p", inner.p, rate)
    if not rate:
        todo, seen = (
            [model.config, *(m.config for m in model.modules() if hasattr(m, "config"))],
            [],
        )
        while todo:
            config = todo.pop()
            if any(config is one for one in seen):
                continue
            seen.append(config)
            for name, value in [*vars(config).items()]:
                set_rate(config, name, value, rate)
                if hasattr(value, "to_dict"):
                    todo.append(value)
    return model


def set_rate(owner: Any, name: str, value: Any, rate: float) -> None:
    nothing = not rate and ("drop" in name or name in ("mask_time_prob", "mask_feature_prob"))
    some = rate and "dropout" in name and not value
    if type(value) is float and (nothing or some):
        setattr(owner, name.removeprefix("dropout."), rate)
