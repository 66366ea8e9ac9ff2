"""Runs and trains a model of JAX for `verify`."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import to_jax
from fmapper.verification import Call, Draws, Loss, Slope, Stepper, Trial, numpy_seeded
from fmapper_adapters.jax.arrays import prng_keys
from fmapper_adapters.jax.record.trace import Source
from fmapper_adapters.jax.trials import dropout
from fmapper_adapters.jax.trials.precision import double_precision, dtypes_in, traced_apart
from fmapper_adapters.jax.trials.same_draws import same_draws
from fmapper_adapters.jax.verify import double


class JaxTrial(Trial):
    """A function of arrays that is called and trained.

    Args:
        source: The model as a function of its arrays.
        args: Its inputs by position.
        kwargs: Its inputs by keyword.
        same: Whether it gets its random numbers from `Draws`.
    """

    def __init__(
        self, source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, same: bool
    ) -> None:
        self._source = source
        self._same = same
        self._inputs = to_jax((tuple(args), dict(kwargs)), strict=False)
        self.aliases = dict(source.aliases)
        held = {name: to_jax(array) for name, array in source.parameters.items()}
        learned = {
            name: array
            for name, array in held.items()
            if jnp.issubdtype(array.dtype, jnp.inexact) and name not in source.frozen
        }
        self.weights = {name: np.asarray(array) for name, array in learned.items()}
        self._fixed = {name: array for name, array in held.items() if name not in learned}
        self.fixed = {n: np.asarray(x) for n, x in self._fixed.items() if not prng_keys.is_key(x)}
        self.state = dict(source.buffers)
        self._slopes: dict[Any, Callable[..., Any]] = {}

    def call(self, weights: Mapping[str, Any], *, inputs: Any = None, double: bool = False) -> Call:
        """Calls the function, one operation after the other."""
        draws = Draws()
        given = self._inputs
        if inputs is not None:
            args, kwargs = to_jax(inputs, strict=False)
            # Without options of the framework, such as the `method` of Linen: the source has them.
            given = args, {name: kwargs.get(name, value) for name, value in given[1].items()}
        with _precision(double=double), _without_dropout() as rates, self._give_draws(draws):
            output, after = self._compute(self._widen(_arrays(weights), double),
                                          self._widen(self.state, double),
                                          self._widen(given, double))  # fmt: skip
            draws.end()
        drawn = draws.drawn if self._same else None
        active = frozenset(rate for rate in rates if rate > 0)
        return Call(output, _flatten, after, drawn, active, lambda: self._dtypes(weights))

    def _dtypes(self, weights: Mapping[str, Any]) -> frozenset[str]:
        """Returns the floating dtypes that the function computes in."""
        given = jax.tree.map(lambda x: x, self._inputs)
        leaves, tree = jax.tree.flatten(given)
        at = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

        def run(weights: Any, state: Any, arrays: Any) -> Any:
            full = list(leaves)
            for i, array in zip(at, arrays, strict=True):
                full[i] = array
            output, after = self._compute(weights, state, jax.tree.unflatten(tree, full))
            return _flatten(output), after

        with _without_dropout(), self._give_draws(Draws()):
            arrays = [leaves[i] for i in at]
            return dtypes_in(jax.make_jaxpr(run)(_arrays(weights), self.state, arrays))

    def slope(
        self,
        weights: Mapping[str, Any],
        loss: Loss | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        double: bool = False,
    ) -> Slope:
        """Differentiates a loss, compiled."""
        with _precision(double=double), _without_dropout(), self._give_draws(Draws()):
            before = self._widen(self.state, double) if state is None else state
            compiled = self._slopes.get((loss, double))
            if compiled is None:
                given = self._widen(self._inputs, double)

                def total(weights: Any, state: Any) -> Any:
                    output, after = self._compute(weights, state, given)
                    value = _default_loss(output) if loss is None else loss(output, jnp.asarray)
                    return value, after

                compiled = jax.jit(jax.value_and_grad(total, has_aux=True))
                self._slopes[loss, double] = compiled
            try:
                wide = self._widen(_arrays(weights), double)
                (value, after), gradients = compiled(wide, before)
            except (ValueError, NotImplementedError) as error:
                is_expected = "Reverse-mode differentiation does not work" in str(error)
                if isinstance(error, ValueError) and not is_expected:
                    raise
                return Slope(refused=f"{error}".partition("\n")[0])
            named = {name: np.asarray(jnp.conj(slope)) for name, slope in gradients.items()}
        return Slope(float(jnp.real(value)), named, after)

    def _compute(self, weights: Any, state: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
        args, kwargs = jax.tree.map(lambda x: x, inputs)  # copies, since a call may consume a state
        fixed = {n: double(x) if _is_wide() else x for n, x in self._fixed.items()}
        output, changed = self._source.call({**fixed, **weights}, state, *args, **kwargs)
        return output, {name: changed.get(name, array) for name, array in state.items()}

    def _give_draws(self, draws: Draws) -> contextlib.AbstractContextManager[None]:
        return _same_draws(draws) if self._same else numpy_seeded()

    def _widen(self, tree: Any, wide: bool) -> Any:
        return jax.tree.map(double, tree) if wide else tree

    def draw(
        self, weights: Mapping[str, Any], seeds: Sequence[int], *, double: bool = False
    ) -> dict[float, list[list[Any]]]:
        """Returns the outputs for each seed and dropout rate, without the layers of other rates."""
        if not self._has_keys():
            return {}
        outputs: dict[float, list[list[Any]]] = {}
        rates = [math.nan]
        for rate in rates:
            with _precision(double=double), _without_dropout(but=rate) as others:
                outputs[rate] = self._outputs_of(weights, seeds, double=double)
            rates += sorted(r for r in others if r > 0 and r not in rates)
        return outputs

    def noise(
        self, weights: Mapping[str, Any], seeds: Sequence[int], *, double: bool = False
    ) -> list[list[Any]]:
        """Returns the outputs for each seed, with random numbers of the model's own."""
        with _precision(double=double):
            return self._outputs_of(weights, seeds if self._has_keys() else (0,), double=double)

    def _names(self) -> list[str]:
        args, _ = self._inputs
        names = [parameter.name for parameter in self._source.parameters_of_call()]
        return names + [""] * (len(args) - len(names))  # of those in `*args`

    def _has_keys(self) -> bool:
        args, kwargs = self._inputs
        named = [*(("", x) for x in self.state.values())]
        named += [*zip(self._names(), args, strict=False), *kwargs.items()]
        return any(_is_key(x, name) for name, tree in named for x in jax.tree.leaves(tree))

    def _outputs_of(
        self, weights: Mapping[str, Any], seeds: Sequence[int], *, double: bool
    ) -> list[list[Any]]:
        given, arrays = self._widen(self._inputs, double), _arrays(weights)
        state, names = self._widen(self.state, double), self._names()

        @jax.jit
        def outputs(weights: Any, state: Any, seed: Any) -> list[Any]:
            args, kwargs = given
            moved = {name: _move_keys(x, "", seed) for name, x in state.items()}
            positional = tuple(
                _move_keys(x, name, seed) for name, x in zip(names, args, strict=False)
            )
            named = {name: _move_keys(x, name, seed) for name, x in kwargs.items()}
            output, _ = self._compute(weights, moved, (positional, named))
            return _flatten(output)

        return [[*map(np.asarray, outputs(arrays, state, seed))] for seed in seeds]

    def stepper(self, optimizer: Any) -> Stepper | None:
        """Returns the steps of an optimiser of optax, for weights nested by the dots in names."""
        transformation = getattr(optimizer, "tx", optimizer)  # as `nnx.Optimizer` holds it
        if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
            return None
        state: Any = None

        def step(weights: Mapping[str, Any], gradients: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal state
            full = {n: gradients.get(n, np.zeros_like(x)) for n, x in weights.items()}
            with _precision(double=any(x.dtype == np.float64 for x in weights.values())):
                now, slopes = _nest(_arrays(weights)), _nest(_arrays(full))
                state = transformation.init(now) if state is None else state
                updates, state = transformation.update(slopes, state, now)
                after = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), now, updates)
                return {name: np.asarray(_inner(after, name)) for name in weights}

        return step


@contextlib.contextmanager
def _same_draws(draws: Draws) -> Iterator[None]:
    with same_draws(draws), numpy_seeded():
        yield


def _is_wide() -> bool:
    """Returns whether JAX has double precision here."""
    return bool(jnp.asarray(0.0).dtype == jnp.float64)


def _nest(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tree of dicts for names with dots."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split(".")
        inner = tree
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = array
    return tree


def _inner(tree: Any, name: str) -> Any:
    for key in name.split("."):
        tree = tree[key]
    return tree


def _arrays(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x) for name, x in weights.items()}


def _precision(*, double: bool) -> contextlib.AbstractContextManager[Any]:
    return double_precision() if double else contextlib.nullcontext()


def _flatten(output: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(output) if hasattr(x, "dtype")]


def _default_loss(output: Any) -> Any:
    leaves = _flatten(output)
    return sum(jnp.mean(x * _waves(x)) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))


def _waves(x: Any) -> Any:
    precision = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return jnp.cos(jnp.arange(x.size, dtype=precision)).reshape(x.shape)


@contextlib.contextmanager
def _without_dropout(but: float | None = None) -> Iterator[set[float]]:
    """Makes the dropout layers of libraries identities within the block.

    Args:
        but: The rate of the layers that still drop elements, one half of them or more. Layers that
            share masks along dimensions stay, too. None makes all layers identities.

    Yields:
        The rates of the other layers that are called.
    """
    rates: set[float] = set()
    changed = []

    def choose(original: Any) -> Any:
        def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            rate = getattr(self, "rate", getattr(self, "p", 0.0))
            if but is not None and bool(getattr(self, "broadcast_dims", False)):
                return original(self, x, *args, **kwargs)
            rates.add(float(rate))
            if rate != but:
                return x
            name = "rate" if hasattr(self, "rate") else "p"
            object.__setattr__(self, name, max(rate, 0.5))  # modules of libraries are frozen
            try:
                return original(self, x, *args, **kwargs)
            finally:
                object.__setattr__(self, name, rate)

        return call

    try:
        for library in (dropout.__name__, "flax.nnx", "flax.linen", "equinox.nn"):
            cls = getattr(sys.modules.get(library), "Dropout", None)
            if cls is not None:
                changed.append((cls, vars(cls)["__call__"]))
                type.__setattr__(cls, "__call__", choose(vars(cls)["__call__"]))
        with traced_apart("dropout", but):
            yield rates
    finally:
        for cls, original in changed:
            type.__setattr__(cls, "__call__", original)


def _move_keys(tree: Any, name: str, seed: Any) -> Any:
    """Returns a tree with other random keys for each seed.

    In arguments with the name of a key, arrays of words count as keys.
    """

    def move(x: Any) -> Any:
        if not _is_key(x, name):
            return x
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(move(jax.random.wrap_key_data(x)))
        return jax.vmap(move)(x) if x.ndim else jax.random.fold_in(x, seed)

    return jax.tree.map(move, tree)


def _is_key(x: Any, name: str) -> bool:
    dtype = getattr(x, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype is not None
    return dtype == jnp.uint32 and x.ndim > 0 and any(word in name for word in ("key", "rng"))
