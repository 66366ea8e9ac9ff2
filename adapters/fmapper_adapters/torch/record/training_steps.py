"""Runs and trains a module, for results that a translation must match."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from fmapper import fleaves, fmap, to_torch
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.record.patches.foreign_classes import fields_of
from fmapper_adapters.torch.record.patches.restore import restore_after
from fmapper_adapters.torch.record.same_draws import SameDraws

if TYPE_CHECKING:
    from fmapper.translation import Draws

_STEPS = 5


def training_steps(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
) -> Callable[..., dict[str, Any]]:
    """Returns a function of a rate, a disturbance and a precision that runs and trains a copy.

    Dropout is left out, unless it is given a seed. The module is not changed.
    """
    model = _copy(_private.original_of(model) or model)  # a compiled one would call the original
    model.train(train)
    noisy = _copy(model)
    args, inputs = to_torch((tuple(args), dict(kwargs)), strict=False)
    for inner in _find_noise(model, args, inputs) if train else ():
        inner.eval()

    is_quiet = False  # no dropout or draws were met; looking for them takes a third of the time

    def run(rate: float, off: float, *, double: bool = False, seeds: Sequence[int] = ()) -> Any:
        nonlocal is_quiet
        copied, given = _copy(noisy if seeds else model), (args, inputs)
        if double:
            copied.double()
            given = fmap(_double, given)
        if seeds:
            with _precision(double=double):
                return _draw(copied, *given, off, seeds)
        still, same = _WithoutDropout(), SameDraws()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_precision(double=double))
            for mode in () if is_quiet else (still, same):
                stack.enter_context(mode)
            found = _run(copied, *given, rate, off, same.draws)
        is_quiet = is_quiet or not (still.found or same.found)
        return found

    return run


@contextlib.contextmanager
def _precision(*, double: bool) -> Iterator[None]:
    """Has torch make tensors of double precision within the block, if wanted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if double else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _double(x: Any) -> Any:
    is_single = isinstance(x, torch.Tensor) and x.dtype == torch.float32
    return x.double() if is_single else x


def _copy(model: torch.nn.Module) -> torch.nn.Module:
    """Returns a deep copy of a module, with the functions among its attributes.

    `copy.deepcopy` leaves functions as they are, so that one which a module keeps, as
    `self.mlp_of = lambda x: mlp(x)`, would go on calling the submodules of the original. It copies
    no tensor that has a history, as the weight that `weight_norm` computes; its next call replaces
    it.
    """
    known: dict[int, Any] = {}
    for inner in model.modules():
        for value in pytree.tree_leaves(dict(vars(inner))):
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                known[id(value)] = value.detach().clone()
    copied: torch.nn.Module = copy.deepcopy(model, known)
    for old, new in zip(model.modules(), copied.modules(), strict=True):
        for name, value in vars(old).items():
            if isinstance(value, types.FunctionType) and value.__closure__:
                vars(new)[name] = _copy_closure(value, known)
    return copied


def _copy_closure(function: types.FunctionType, known: dict[int, Any]) -> types.FunctionType:
    """Returns a function that sees the copies of what it has closed over."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            other = known.get(id(cell.cell_contents))
        except ValueError:  # nothing is in it yet
            other = None
        cells.append(cell if other is None else types.CellType(other))
    copied = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _find_noise(model: torch.nn.Module, args: Any, kwargs: Any) -> list[torch.nn.Module]:
    """Returns the submodules whose modes differ only in noise: they hold nothing, and draw."""
    found: list[torch.nn.Module] = []
    watched = []
    draws = SameDraws()
    trial = _copy(model)
    for inner, copied in zip(model.modules(), trial.modules(), strict=True):
        held = (inner.parameters(), inner.buffers(), inner.children())
        if any(next(iter(one), None) is not None for one in held):
            continue
        if type(inner).__module__.startswith("torch."):
            found.append(inner)
        else:
            _watch(copied, draws.draws, functools.partial(found.append, inner))
            watched.append(copied)
    if watched:
        with torch.no_grad(), _WithoutDropout(), draws:
            trial(*args, **kwargs)
    return found


def _watch(module: torch.nn.Module, draws: Draws, tell: Callable[[], None]) -> None:
    """Calls a function when a module has drawn random numbers."""
    before = 0

    def start(*_: Any) -> None:
        nonlocal before
        before = sum(draws.turns.values())

    def stop(*_: Any) -> None:
        if sum(draws.turns.values()) > before:
            tell()

    module.register_forward_pre_hook(start)
    module.register_forward_hook(stop)


def _disturb(parameters: Iterable[torch.Tensor], off: float) -> None:
    for parameter in parameters:
        waves = torch.cos(torch.arange(parameter.numel(), dtype=torch.float64))
        parameter.mul_(1 + off * waves.reshape(parameter.shape))


def _draw(
    model: torch.nn.Module, args: Any, inputs: Any, off: float, seeds: Sequence[int]
) -> dict[float, list[list[Any]]]:
    """Returns the outputs of a module for each seed, with the dropout of one rate at a time.

    Those with none of it are under nan. Dropout that shares masks, and other noise, are always on.
    """
    found: dict[float, list[list[Any]]] = {}
    rates = [math.nan]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if off:
            _disturb([p for p in model.parameters() if p.requires_grad], off)
        for rate in rates:
            for seed in seeds:
                torch.default_generator.manual_seed(seed)
                before = torch.get_rng_state()
                chosen = _WithoutDropout(but=rate)
                with restore_after(model), chosen:
                    outputs = [x.clone().numpy() for x in _tensors_in(model(*args, **inputs))]
                rates += [one for one in sorted(chosen.rates) if one not in rates]
                found.setdefault(rate, []).append(outputs)
                if torch.equal(torch.get_rng_state(), before):
                    break  # nothing is random
    return found


def _run(
    model: torch.nn.Module, args: Any, inputs: Any, rate: float, off: float, draws: Draws
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {
        name: b.clone() for name, b in model.named_buffers() if b.is_floating_point() and b.numel()
    }
    with torch.no_grad():
        if off:
            _disturb(learned.values(), off)
            found = {f"weight.{name}": p.detach().clone().numpy() for name, p in learned.items()}
        for i, output in enumerate(_outputs(_copy(model), args, inputs, draws)):
            found[f"output.{i}"] = output.numpy()
        found["draws"] = np.array(draws.drawn)
    for step in range(_STEPS if learned else 0):
        loss = _loss(_outputs(model, args, inputs, draws))
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return found
        try:
            gradients = torch.autograd.grad(loss, list(learned.values()), allow_unused=True)
            if all(one is None for one in gradients):
                raise RuntimeError("its outputs depend on parameters that are not its own")
        except RuntimeError as error:  # such as that of values which the model has overwritten
            if isinstance(error, torch.OutOfMemoryError) or "alloc" in str(error):
                raise
            outputs = {key: value for key, value in found.items() if key.startswith("output.")}
            return outputs | {"refused": np.array(f"{error}".partition("\n")[0][:_LONGEST])}
        with torch.no_grad():
            for (name, parameter), gradient in zip(learned.items(), gradients, strict=True):
                if gradient is None:
                    continue
                if step == 0:
                    found[f"gradient.{name}"] = gradient.detach().clone().numpy()
                parameter.sub_(rate * gradient)
    for name, parameter in learned.items():
        if f"gradient.{name}" in found:
            found[f"after.{name}"] = parameter.detach().numpy()
    for name in (*dict(model.named_parameters()), *before):
        if name not in learned:
            found[f"fixed.{name}"] = np.zeros(())  # it must get no gradient, or it would learn
    for name, buffer in model.named_buffers():  # such as the statistics of batches
        if name in before and not torch.equal(buffer, before[name]):
            found[f"after.{name}"] = buffer.detach().numpy()
    return found


class _WithoutDropout(TorchFunctionMode):
    """Leaves dropout out, also that inside of attention.

    Args:
        but: The rate of dropout that stays, drawn at one half at least, and with it dropout that
            shares masks along dimensions; None if there is none.

    Attributes:
        found: Whether there was anything that could have dropout.
        rates: The rates of dropout in training.
    """

    def __init__(self, but: float | None = None) -> None:
        super().__init__()
        self.found = False
        self.rates: set[float] = set()
        self._but = but

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _SHARED and self._but is not None:
            return func(*args, **kwargs)
        if func in _DROPOUT or func in _SHARED:
            self.found = True
            given = dict(zip(_DROPOUT_NAMES, args, strict=False)) | kwargs
            train = given.get("training", given.get("train", True))
            rate = self._rate(given.get("p", 0.5), train=train)
            if rate == 0:
                return given["input"]
            if len(args) > 1:
                return func(args[0], rate, *args[2:], **kwargs)
            return func(*args, **{**kwargs, "p": rate})
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.found = True
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = self._rate(kwargs["dropout_p"])
            args = self._with_rate(args, 4)
        if func is torch.nn.functional.multi_head_attention_forward:
            self.found = True
            train = kwargs.get("training", True)
            args = self._with_rate(args, _ATTENTION_RATE, train=train)
        if getattr(func, "__name__", "") in _RECURRENT:  # dropout stands before the mode
            self.found = True
            at = 5 if isinstance(args[6], bool) else 6
            args = self._with_rate(args, at, train=args[at + 1])
        return func(*args, **kwargs)

    def _with_rate(self, args: Any, at: int, *, train: bool = True) -> Any:
        """Returns arguments whose rate of dropout is zero unless it is to stay."""
        kept = [self._rate(rate, train=train) for rate in args[at : at + 1]]
        return (*args[:at], *kept, *args[at + 1 :])

    def _rate(self, rate: float, *, train: bool = True) -> float:
        if train and rate > 0:
            self.rates.add(float(rate))
        return max(rate, 0.5) if rate == self._but else 0.0


_LONGEST = 200  # characters of an error that are told
_ATTENTION_RATE = 10  # what is called in there is not seen
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_DROPOUT_NAMES = ("input", "p", "training")
_DROPOUT = {torch.dropout, torch.nn.functional.dropout}
_SHARED = {  # with one mask for several elements
    torch.nn.functional.dropout1d,
    torch.nn.functional.dropout2d,
    torch.nn.functional.dropout3d,
    torch.nn.functional.feature_alpha_dropout,
    torch.nn.functional.alpha_dropout,
}


def _outputs(model: torch.nn.Module, args: Any, kwargs: Any, draws: Draws) -> list[torch.Tensor]:
    draws.begin()
    found = [*_tensors_in(model(*args, **kwargs))]
    draws.end()
    return found


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in what a module returns, also those in objects without a pytree."""
    for leaf in fleaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif fields := fields_of(leaf):
            yield from _tensors_in(tuple(fields.values()))


def _loss(outputs: list[torch.Tensor]) -> Any:
    return sum((x * _waves(x)).mean() for x in outputs if x.is_floating_point())


def _waves(x: torch.Tensor) -> torch.Tensor:
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    return torch.cos(torch.arange(x.numel(), dtype=dtype)).reshape(x.shape)
