"""A model made of the source code that was written for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fmapper import ConversionError
from fmapper.programs import Program
from fmapper.translation import Source, run_file
from fmapper_adapters.flax.translation.fast_layers import accelerate
from fmapper_adapters.jax.libraries import ProgramArrays


def build(program: Program, source: Source) -> Any:
    """Returns the module that a file makes, with the arrays of its program."""
    module = run_file(source)

    def make() -> Any:
        return module[source.name](rngs=nnx.Rngs(0))

    model = nnx.eval_shape(make)  # initial values of arrays that are replaced would fill the memory
    arrays = ProgramArrays(program)
    module["load_weights"](model, arrays)
    source.weights.keep_rest(arrays)
    _compute_rest(model, make)
    accelerate(model)
    if not program.starts_in_training:
        model.eval()
    if not program.train:
        refuse_training(type(model), program.name, program.lacks_training)
    return model


def open_file(
    net: ModuleType, name: str, weights: Mapping[str, Any], *, train: bool
) -> tuple[Any, dict[str, Any]]:
    """Returns the module of a file in a mode, and no options; see `Models.open_file`."""

    def make() -> Any:
        return getattr(net, name)(rngs=nnx.Rngs(0))

    try:
        model = nnx.eval_shape(make)
    except jax.errors.JAXTypeError:  # its constructor reads numbers from arrays
        model = make()
    net.load_weights(model, jax.tree.map(jnp.asarray, dict(weights)))
    _compute_rest(model, make)
    model.train() if train else model.eval()
    return model, {}


def refuse_training(cls: Any, name: str, lack: str) -> None:
    """Makes models of a class, which is of one file, refuse to be put into training.

    Their layers would be, but dropout and what else the source does in training is not written.
    """
    reason = f"; {lack}" if lack else ""

    def train(self: Any, **attributes: Any) -> None:
        raise ConversionError(
            f"{name} was converted for evaluation only: convert it with train=True{reason}"
        )

    cls.train = train


def _compute_rest(model: Any, make: Callable[[], Any]) -> None:
    """Gives what is still without values those of a new model: the states of what draws."""
    lacking = [path for path, one in _variables(model) if _is_abstract(one)]
    if not lacking:
        return

    @jax.jit
    def compute() -> list[Any]:
        made = dict(_variables(make()))
        return [made[path].get_raw_value() for path in lacking]

    variables = dict(_variables(model))
    for path, value in zip(lacking, compute(), strict=True):
        variables[path].set_raw_value(value)


def _variables(model: Any) -> list[tuple[Any, nnx.Variable[Any]]]:
    return [(path, one) for path, one in nnx.iter_graph(model) if isinstance(one, nnx.Variable)]


def _is_abstract(variable: nnx.Variable[Any]) -> bool:
    return isinstance(variable.get_raw_value(), jax.ShapeDtypeStruct)
