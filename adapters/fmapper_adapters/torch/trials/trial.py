"""Runs and trains a module for `verify`."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from fmapper import ConversionError, fleaves, fmap, to_numpy, to_torch
from fmapper.verification import Call, Draws, Loss, Slope, Stepper, Trial, numpy_seeded
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.record.patches.foreign_classes import fields_of
from fmapper_adapters.torch.record.patches.restore import restore_after
from fmapper_adapters.torch.trials.precision import Dtypes, WideCasts, precision, wider
from fmapper_adapters.torch.trials.same_draws import SameDraws


class TorchTrial(Trial):
    """A copy of a module, to be called and trained.

    Args:
        model: The module, or a function of tensors.
        args: Its inputs by position.
        kwargs: Its inputs by keyword.
        train: The mode; None for the module's current mode.
    """

    def __init__(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool | None
    ) -> None:
        model = as_module(model)
        original = _private.original_of(model) or model  # a compiled module would call the original
        model = _copy(original)
        if train is not None:
            model.train(train)
        self._original = original
        self._model, self._noisy = model, _copy(model)
        self._inputs = to_torch((tuple(args), dict(kwargs)), strict=False)
        if train is not None and any(inner.training for inner in model.modules()):
            for inner in _find_noise(model, *self._inputs):
                inner.eval()
        self._learning: dict[bool, torch.nn.Module] = {}
        self._is_quiet = False  # whether nothing was random: checks cost a third of the time
        parameters = dict(model.named_parameters())
        tied = dict(model.named_parameters(remove_duplicate=False))
        first = {id(x): name for name, x in parameters.items()}
        self.aliases = {n: first[id(x)] for n, x in tied.items() if n not in parameters}
        self.weights = {n: _numpy(p) for n, p in parameters.items() if p.requires_grad}
        self.fixed = {n: _numpy(p) for n, p in parameters.items() if not p.requires_grad}
        self.state = _state_of(model)

    def call(self, weights: Mapping[str, Any], *, inputs: Any = None, double: bool = False) -> Call:
        """Calls the copy without gradients."""
        model = self._fresh(double=double)
        given = self._inputs if inputs is None else to_torch(inputs, strict=False)
        run = self._run(model, weights, self.state, given, double=double)
        with run as (args, kwargs, still, same):
            with torch.no_grad():
                output = model(*args, **kwargs)
            same.draws.end()
            state = _state_of(model)
            output = fmap(_copy_of, output)
        rates = frozenset(still.rates)
        return Call(output, _flatten, state, same.draws.drawn, rates, lambda: self._dtypes(weights))

    def _dtypes(self, weights: Mapping[str, Any]) -> frozenset[str]:
        """Returns the floating dtypes that the module computes in."""
        model, seen = self._fresh(double=False), Dtypes()
        run = self._run(model, weights, self.state, self._inputs, double=False)
        with run as (args, kwargs, *_), torch.no_grad(), seen:
            model(*args, **kwargs)
        return frozenset(seen.dtypes)

    def slope(
        self,
        weights: Mapping[str, Any],
        loss: Loss | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        double: bool = False,
    ) -> Slope:
        """Differentiates a loss by autograd."""
        if state is None:
            self._learning[double], state = self._fresh(double=double), self.state
        model = self._learning[double]
        run = self._run(model, weights, state, self._inputs, double=double)
        with run as (args, kwargs, _, same):
            output = model(*args, **kwargs)
            same.draws.end()
            value = _loss([*_tensors_in(output)]) if loss is None else loss(output, _constant)
            after = _state_of(model)
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return Slope(float(value), {}, after)
            learned = {n: p for n, p in model.named_parameters() if n in self.weights}
            try:
                slopes = torch.autograd.grad(value, [*learned.values()], allow_unused=True)
                if all(slope is None for slope in slopes):
                    raise RuntimeError("its outputs depend on parameters that are not its own")
            except (RuntimeError, AssertionError) as error:  # as of values that are overwritten
                if isinstance(error, torch.OutOfMemoryError) or "alloc" in str(error):
                    raise
                return Slope(refused=f"{error}".partition("\n")[0][:_LONGEST])
            named = zip(learned, slopes, strict=True)
            gradients = {name: _numpy(slope) for name, slope in named if slope is not None}
        return Slope(float(value.detach()), gradients, after)

    def _fresh(self, *, double: bool) -> torch.nn.Module:
        model = _copy(self._model)
        return model.double() if double else model

    @contextlib.contextmanager
    def _run(
        self, model: torch.nn.Module, weights: Mapping[str, Any], state: Mapping[str, Any],
        inputs: Any, *, double: bool,
    ) -> Iterator[tuple[Any, Any, _WithoutDropout, SameDraws]]:  # fmt: skip
        """Fills a module, and yields its inputs and the modes that control randomness."""
        _fill(model, weights, state)
        args, kwargs = fmap(_copy_of, inputs)  # which the module may write into
        args, kwargs = fmap(_double, (args, kwargs)) if double else (args, kwargs)
        still, same = _WithoutDropout(), SameDraws()
        with contextlib.ExitStack() as stack:
            stack.enter_context(precision(double=double))
            stack.enter_context(numpy_seeded())
            for mode in () if self._is_quiet else (still, same):
                stack.enter_context(mode)
            if double:
                stack.enter_context(WideCasts())
            same.draws.begin()
            yield args, kwargs, still, same
        self._is_quiet = self._is_quiet or not (still.has_dropout or same.has_drawn)

    def draw(
        self, weights: Mapping[str, Any], seeds: Sequence[int], *, double: bool = False
    ) -> dict[float, list[list[Any]]]:
        """Returns the outputs for each seed and dropout rate, without dropout of other rates.

        Dropout with shared masks and other noise are always on.
        """
        outputs: dict[float, list[list[Any]]] = {}
        rates = [math.nan]
        for rate in rates:
            chosen = _WithoutDropout(but=rate)
            outputs[rate] = self._outputs_of(weights, seeds, double, chosen)
            rates += [other for other in sorted(chosen.rates) if other not in rates]
        return outputs

    def noise(
        self, weights: Mapping[str, Any], seeds: Sequence[int], *, double: bool = False
    ) -> list[list[Any]]:
        """Returns the outputs for each seed, with random numbers of the module's own."""
        return self._outputs_of(weights, seeds, double, contextlib.nullcontext())

    def _outputs_of(
        self, weights: Mapping[str, Any], seeds: Sequence[int], double: bool, mode: Any
    ) -> list[list[Any]]:
        model = _copy(self._noisy)
        inputs = fmap(_double, self._inputs) if double else self._inputs
        outputs = []
        generators = torch.random.fork_rng(devices=[]), numpy_seeded()
        with torch.no_grad(), generators[0], generators[1], precision(double=double):
            model = model.double() if double else model
            _fill(model, weights, self.state)
            for seed in seeds:
                torch.default_generator.manual_seed(seed)
                np.random.seed(seed)
                args, kwargs = fmap(_copy_of, inputs)  # which the module may write into
                before, numpy_before = torch.get_rng_state(), _numpy_state()
                with restore_after(model), mode:
                    outputs.append([_numpy(x) for x in _tensors_in(model(*args, **kwargs))])
                is_still = _numpy_state() == numpy_before
                if is_still and torch.equal(torch.get_rng_state(), before):
                    break  # nothing is random
        return outputs

    def stepper(self, optimizer: Any) -> Stepper | None:
        """Returns the steps of an optimiser of torch.

        Args:
            optimizer: A class of optimisers, or a function that makes one for the parameters; or an
                optimiser for the parameters of the module itself.
        """
        if not (isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)):
            return None
        model = _copy(self._model)
        parameters = dict(model.named_parameters())
        learned = {name: parameters[name] for name in self.weights}
        made = _optimizer_for(optimizer, model, self._original, learned)

        def step(weights: Mapping[str, Any], gradients: Mapping[str, Any]) -> dict[str, Any]:
            with torch.no_grad():
                for name, parameter in learned.items():
                    parameter.data = _tensor(weights[name])
                    gradient = gradients.get(name)
                    parameter.grad = (
                        None if gradient is None else _tensor(gradient).to(parameter.dtype)
                    )
            made.step()
            return {name: _numpy(parameter) for name, parameter in learned.items()}

        return step


def _state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Returns copies of buffers, and of parameters that only the module itself may change."""
    fixed = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    return {n: x.detach().clone() for n, x in (*fixed, *model.named_buffers()) if x.numel()}


def _optimizer_for(
    optimizer: Any, model: torch.nn.Module, original: torch.nn.Module, learned: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Returns the optimiser for a copy of a module."""
    if isinstance(optimizer, torch.optim.Optimizer):
        names = {id(p): name for name, p in original.named_parameters()}
        parameters = dict(model.named_parameters())
        held = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [p for p in held if id(p) not in names]
        if foreign:
            raise ConversionError(
                f"{type(optimizer).__name__} holds {len(foreign)} parameters that "
                f"{type(original).__name__} does not have. Pass the optimizer of this very model."
            )
        memo: dict[int, Any] = {id(p): parameters[names[id(p)]] for p in held}
        copied: torch.optim.Optimizer = copy.deepcopy(optimizer, memo)
        for name, value in vars(optimizer).items():  # attributes that a copy of an optimizer lacks
            if name not in vars(copied) and not hasattr(type(copied), name):
                setattr(copied, name, copy.deepcopy(value, memo))
        return copied
    first = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    takes_parameters = isinstance(first, type) and issubclass(first, torch.optim.Optimizer)
    made: torch.optim.Optimizer = optimizer([*learned.values()] if takes_parameters else model)
    return made


def as_module(model: Any) -> torch.nn.Module:
    """Returns the module itself; for a function, a module that calls it, without modes."""
    return model if isinstance(model, torch.nn.Module) else _Called(model).eval()


class _Called(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _numpy_state() -> tuple[bytes, int]:
    """Returns the state of NumPy's own generator."""
    state = np.random.get_state(legacy=False)["state"]
    return state["key"].tobytes(), state["pos"]


def _numpy(x: torch.Tensor) -> Any:
    return to_numpy(x.detach(), copy=True)


def _tensor(x: Any) -> Any:
    return to_torch(x, copy=True)


def _flatten(output: Any) -> list[torch.Tensor]:
    return [*_tensors_in(output)]


def _copy_of(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _constant(x: Any) -> Any:
    return torch.from_numpy(x)


def _fill(model: torch.nn.Module, weights: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Fills a module with arrays."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, value in weights.items():
            held[name].copy_(_tensor(value))
        for name, value in state.items():
            held[name].copy_(value)


def _double(x: Any) -> Any:
    return x.to(wider(x.dtype)) if isinstance(x, torch.Tensor) else x


def _copy(model: torch.nn.Module) -> torch.nn.Module:
    """Returns a deep copy of a module, with the functions among its attributes.

    `copy.deepcopy` does not copy functions, so a function in an attribute, as in `self.mlp_of =
    lambda x: mlp(x)`, would still call the submodules of the original. Nor does it copy tensors
    with a history, such as the weight that `weight_norm` computes; the next call replaces them.
    """
    memo: dict[int, Any] = {}
    for inner in model.modules():
        for value in pytree.tree_leaves(dict(vars(inner))):
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    copied: torch.nn.Module = copy.deepcopy(model, memo)
    for old, new in zip(model.modules(), copied.modules(), strict=True):
        for name, value in vars(old).items():
            if isinstance(value, types.FunctionType) and value.__closure__:
                vars(new)[name] = _copy_closure(value, memo)
    return copied


def _copy_closure(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """Returns a function whose closure has copies of its content."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            other = memo.get(id(cell.cell_contents))
        except ValueError:  # an empty cell
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
    """Returns submodules whose training adds only noise: without arrays, and with random numbers.

    Dropout is not included: `_WithoutDropout` handles it by its rates.
    """
    noisy: list[torch.nn.Module] = []
    watched = []
    draws = SameDraws()
    trial = _copy(model)
    for inner, copied in zip(model.modules(), trial.modules(), strict=True):
        held = (inner.parameters(), inner.buffers(), inner.children())
        is_dropout = type(inner).__module__ == torch.nn.Dropout.__module__
        if is_dropout or any(next(iter(members), None) is not None for members in held):
            continue
        if type(inner).__module__.startswith("torch."):
            noisy.append(inner)
        else:
            _watch(copied, draws.draws, functools.partial(noisy.append, inner))
            watched.append(copied)
    if watched:
        with torch.no_grad(), _WithoutDropout(), draws:
            trial(*args, **kwargs)
    return noisy


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


class _WithoutDropout(TorchFunctionMode):
    """Disables dropout, also inside attention.

    Args:
        but: The rate of dropout that stays on, at a rate of at least one half. Dropout that shares
            masks along dimensions stays on, too. None disables all dropout.

    Attributes:
        has_dropout: Whether any operation had a dropout rate.
        rates: The rates of dropout in training.
    """

    def __init__(self, but: float | None = None) -> None:
        super().__init__()
        self.has_dropout = False
        self.rates: set[float] = set()
        self._but = but

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _SHARED and self._but is not None:
            return func(*args, **kwargs)
        if func in _DROPOUT or func in _SHARED:
            self.has_dropout = True
            given = dict(zip(_DROPOUT_NAMES, args, strict=False)) | kwargs
            train = given.get("training", given.get("train", True))
            rate = self._rate(given.get("p", 0.5), train=train)
            if rate == 0:
                return given["input"]
            if len(args) > 1:
                return func(args[0], rate, *args[2:], **kwargs)
            return func(*args, **{**kwargs, "p": rate})
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.has_dropout = True
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = self._rate(kwargs["dropout_p"])
            args = self._with_rate(args, 4)
        if func is torch.nn.functional.multi_head_attention_forward:
            self.has_dropout = True
            train = kwargs.get("training", True)
            args = self._with_rate(args, _ATTENTION_RATE, train=train)
        if getattr(func, "__name__", "") in _RECURRENT:  # the rate precedes the mode
            self.has_dropout = True
            at = 5 if isinstance(args[6], bool) else 6
            args = self._with_rate(args, at, train=args[at + 1])
        return func(*args, **kwargs)

    def _with_rate(self, args: Any, at: int, *, train: bool = True) -> Any:
        """Returns arguments with a dropout rate of zero, unless that rate stays on."""
        kept = [self._rate(rate, train=train) for rate in args[at : at + 1]]
        return (*args[:at], *kept, *args[at + 1 :])

    def _rate(self, rate: float, *, train: bool = True) -> float:
        if train and rate > 0:
            self.rates.add(float(rate))
        return max(rate, 0.5) if rate == self._but else 0.0


_LONGEST = 200  # characters of an error to show
_ATTENTION_RATE = 10  # the position of the rate, since inner calls are not intercepted
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_DROPOUT_NAMES = ("input", "p", "training")
_DROPOUT = {torch.dropout, torch.nn.functional.dropout}
_SHARED = {  # one mask for several elements
    torch.nn.functional.dropout1d,
    torch.nn.functional.dropout2d,
    torch.nn.functional.dropout3d,
    torch.nn.functional.feature_alpha_dropout,
    torch.nn.functional.alpha_dropout,
}


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a module's output, also in objects that are not pytrees."""
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
