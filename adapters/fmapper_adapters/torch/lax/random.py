"""Random bits, the same as in JAX."""

from __future__ import annotations

from typing import Any

import torch

from fmapper import ConversionError
from fmapper.programs import DType
from fmapper_adapters.torch import _private
from fmapper_adapters.torch.lax.table import TABLE, Avals, lax
from fmapper_adapters.torch.model import counters, threefry
from fmapper_adapters.torch.model.emit import current


@lax("random_seed", takes_avals=True)
def random_seed(seeds: Any, *, impl: str, partitionable: bool, avals: Avals) -> Any:
    if avals.operands[0][0] == "uint16":  # carried as int16
        seeds = seeds.to(torch.int32) & 0xFFFF
    return current().call(threefry.seed, seeds)


@lax("random_bits")
def random_bits(
    key: Any, *, bit_width: int, shape: tuple[Any, ...], impl: str, partitionable: bool
) -> Any:
    return current().call(threefry.bits, key, bit_width, shape, **_order(partitionable))


@lax("random_split")
def random_split(key: Any, *, shape: tuple[Any, ...], impl: str, partitionable: bool) -> Any:
    return current().call(threefry.split, key, shape, **_order(partitionable))


@lax("random_fold_in", takes_avals=True)
def random_fold_in(key: Any, data: Any, *, impl: str, partitionable: bool, avals: Avals) -> Any:
    if avals.operands[1][0] == "uint16":
        data = data.to(torch.int32) & 0xFFFF
    return current().call(threefry.fold_in, key, data)


def _order(partitionable: bool) -> dict[str, bool]:
    return {} if partitionable else {"partitionable": False}


@TABLE.lowering("torch::uniform", takes_avals=True)
def uniform(key: Any, *, dims: tuple[Any, ...], partitionable: bool, avals: Avals) -> Any:
    dtype = current().dtype(avals.results[0][0])
    return current().call(threefry.uniform, key, dims, dtype, **_order(partitionable))


@TABLE.lowering("torch::uniform_between")
def uniform_between(unit: Any, span: Any, low: Any) -> Any:
    return current().call(threefry.between, unit, span, low)


@lax("threefry2x32")
def threefry2x32(key1: Any, key2: Any, high: Any, low: Any) -> Any:
    return _pair(threefry.hash_words, key1, key2, high, low)


@lax("iota_2x32_shape")
def iota_2x32_shape(*, shape: tuple[Any, ...]) -> Any:
    words = current().make(threefry.counters, shape)
    return words[0], words[1]


def _pair(function: Any, *args: Any) -> Any:
    results = current().call(function, *args)
    return results[0], results[1]


@lax("philox2x32")
def philox2x32(key: Any, x0: Any, x1: Any) -> Any:
    return _pair(counters.philox2x32, key, x0, x1)


@lax("philox4x32")
def philox4x32(k0: Any, k1: Any, *xs: Any) -> Any:
    results = current().call(counters.philox4x32, k0, k1, *xs)
    return tuple(results[i] for i in range(4))


@lax("threefry4x32")
def threefry4x32(*words: Any) -> Any:
    results = current().call(counters.threefry4x32, *words)
    return tuple(results[i] for i in range(4))


# `RandomAlgorithm` of JAX; the default is that of XLA's CPU.
_ALGORITHMS = {"rng_default": "philox", "rng_three_fry": "threefry", "rng_philox": "philox"}


@lax("rng_bit_generator")
def rng_bit_generator(state: Any, *, shape: tuple[Any, ...], dtype: DType, algorithm: str) -> Any:
    width = int(dtype.name.removeprefix("uint"))
    return _pair(counters.state_bits, state, width, shape, _ALGORITHMS[algorithm])


@lax("random_gamma_grad")
def random_gamma_grad(alpha: Any, sample: Any) -> Any:
    return _private.gamma_gradient(alpha, sample)


@lax("rng_uniform")
def rng_uniform(*operands: Any, **params: Any) -> Any:
    raise ConversionError(
        "rng_uniform draws from a state that XLA holds, so no two calls agree; use jax.random"
    )
