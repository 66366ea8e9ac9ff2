"""The part of the adapter that knows `nnx.Optimizer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from fmapper import ConversionError, StructureMismatchError, get_path, has_path, set_path
from fmapper.programs.reading import source_of_model
from fmapper_adapters.jax.libraries import JaxOptimizers

if TYPE_CHECKING:
    from fmapper.training import OptimizerState


class FlaxOptimizers(JaxOptimizers):
    """Optimizers of modules of NNX, whose parameters are those of a filter."""

    def is_optimizer(self, x: Any) -> bool:
        """Returns whether it is an `nnx.Optimizer`, an `nnx.EMA`, or a pair."""
        from flax import nnx

        return isinstance(x, nnx.Optimizer | nnx.EMA) or super().is_optimizer(x)

    def params(self, model: Any) -> Any:
        """Returns the state of the parameters of a module."""
        from flax import nnx

        is_module = isinstance(model, nnx.Module)  # else of Linen, with its variables
        return nnx.state(model, nnx.Param) if is_module else super().params(model)

    def unpack(self, model: Any, optimizer: Any) -> tuple[Any, ...]:
        """Returns the parts of an `nnx.Optimizer`, which may be one of some of the parameters."""
        from flax import nnx

        if isinstance(optimizer, nnx.EMA):
            import optax

            paths = {*_paths(self.params(model))}  # it may have other variables, too
            flat = [item for item in nnx.to_flat_state(optimizer.params) if item[0] in paths]
            held = optax.EmaState(jnp.ones((), jnp.int32), nnx.as_pure(nnx.from_flat_state(flat)))
            return self.params(model), optax.ema(optimizer.decay, debias=False), held
        if not isinstance(optimizer, nnx.Optimizer):
            return super().unpack(model, optimizer)
        params = nnx.state(model, optimizer.wrt)
        order = {path: at for at, path in enumerate(_paths(self.params(model)))}
        others = [".".join(map(str, path)) for path in _paths(params) if path not in order]
        if others:
            raise ConversionError(f"the optimizer updates {others[0]}, which is not an nnx.Param")
        held, own = nnx.as_pure(optimizer.opt_state), [order[path] for path in _paths(params)]
        return params, optimizer.tx, held, own, int(optimizer.step[...])

    def write_optimizer(self, model: Any, state: OptimizerState) -> tuple[Any, Any]:
        """Returns an `nnx.Optimizer` for a module; a pair of averages, or of a Linen module."""
        from flax import nnx

        (tx, held), _ = super().write_optimizer(model, state)
        if state.algorithm == "average" or not isinstance(model, nnx.Module):
            return (tx, held), None
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        nnx.update(optimizer.opt_state, nnx.state(held))
        counted = [(x.step, *(y.position for y in x.schedules.values())) for x in state.groups]
        optimizer.step[...] = max(map(max, counted), default=0)
        return optimizer, None

    def attach_low_rank(
        self, model: Any, layers: Mapping[str, tuple[Any, Any]], others: Sequence[str]
    ) -> Any:
        """Returns a copy of a module of NNX with `nnx.LoRA` around layers."""
        from flax import nnx

        paths = _linear_layers(model)
        if not paths:
            return super().attach_low_rank(model, layers, others)
        bad = [*others, *(name for name in layers if name not in paths)]
        if bad:
            raise StructureMismatchError(
                f"{', '.join(bad[:3])}: nnx.LoRA is a pair of matrices around a linear layer, "
                "which this is not. Use the adapter as a function of the parameters."
            )
        copy = nnx.clone(model)
        for name, (a, b) in layers.items():
            sizes = a.shape[0], a.shape[1], b.shape[1]
            lora = nnx.LoRA(*sizes, base_module=get_path(copy, paths[name]), rngs=nnx.Rngs(0))
            lora.lora_a, lora.lora_b = nnx.LoRAParam(jnp.asarray(a)), nnx.LoRAParam(jnp.asarray(b))
            copy = set_path(copy, paths[name], lora)
        return copy

    def detach_low_rank(self, model: Any, layers: Iterable[str]) -> list[tuple[Any, Any]]:
        """Returns `lora_a` and `lora_b` of layers."""
        from flax import nnx

        paths = _linear_layers(model)
        loras = [get_path(model, paths[name]) for name in layers if name in paths]
        if not loras or not all(isinstance(lora, nnx.LoRA) for lora in loras):
            return super().detach_low_rank(model, layers)
        return [(lora.lora_a[...], lora.lora_b[...]) for lora in loras]


def _linear_layers(model: Any) -> dict[str, str]:
    """Returns the paths of the linear layers of a structured model, by the source's weights."""
    source = source_of_model(model)
    return {
        place.name: path
        for name, place in ({} if source is None else source.weights.arrays).items()
        for path, _, last in (name.rpartition("."),)
        if last == "kernel" and place.order == (1, 0) and has_path(model, path)
    }


def _paths(params: Any) -> list[Any]:
    from flax import nnx

    return [*nnx.to_flat_state(params).paths]
