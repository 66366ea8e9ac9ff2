"""Low-rank adapters (LoRA) of any framework, in the files of PEFT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fmapper.backends.compute import Optimizers
from fmapper.backends.discovery import adapter_of
from fmapper.backends.namespace import array_namespace
from fmapper.errors import StructureMismatchError
from fmapper.moves.mover import mover_to
from fmapper.states.state import load_state, state
from fmapper.tree.functor import functor
from fmapper.verification.models.owners import adapter_of_model

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules


@functor(children=("a", "b", "magnitude"))
@dataclass(eq=False, repr=False)
class LowRank:
    """The update of one weight: `scale * b @ a`, laid out like the weight.

    Attributes:
        a: Of shape (rank, in), (rank, in, height, width) of a convolution, or (rank, rows) of an
            embedding.
        b: Of shape (out, rank), (out, rank, 1, 1), or (columns, rank).
        magnitude: Of DoRA: the norms that the rows of the merged weight have; else None.
        scale: A number: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
        is_transposed: Whether the weight is of shape (in, out), as an embedding's is.
        is_embedding: Whether it is one, which PEFT names otherwise.
    """

    a: Any
    b: Any
    magnitude: Any = None
    scale: float = field(kw_only=True)
    is_transposed: bool = field(default=False, kw_only=True)
    is_embedding: bool = field(default=False, kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the weight."""
        shape = (int(self.b.shape[0]), *map(int, self.a.shape[1:]))
        return shape[::-1] if self.is_transposed else shape

    def merge(self, weight: Any, sign: int = 1) -> Any:
        """Returns a weight with the update in it, of its dtype; a sign of -1 takes that out."""
        xp = array_namespace(weight)
        rank, dtype = self.a.shape[0], weight.dtype
        if self.a.dtype != dtype:  # neither loses what the other lacks
            dtype = xp.result_type(*(xp.result_type(x, xp.float32) for x in (weight, self.a)))
        left = sign * self.scale * xp.reshape(xp.astype(self.b, dtype), (-1, rank))
        right = xp.reshape(xp.astype(self.a, dtype), (rank, -1))
        left, right = (right.T, left.T) if self.is_transposed else (left, right)
        matrix = xp.reshape(weight, (left.shape[0], right.shape[1]))
        made = xp.astype(matrix, dtype) + left @ right
        if self.magnitude is not None:
            axis = 0 if self.is_transposed else 1
            norm = xp.sqrt(xp.sum(made * made, axis=axis, keepdims=True))
            owner = adapter_of(norm)
            if isinstance(owner, Optimizers):  # as in the paper of DoRA (Liu et al. 2024, 4.3)
                norm = owner.without_gradient(norm)
            made = made * xp.reshape(self.magnitude, norm.shape) / norm
        return xp.astype(xp.reshape(made, weight.shape), weight.dtype)


def _beside(name: str, new: Any, weight: Any) -> Any:
    """Returns an update of the weight's framework, to which one that cannot be trained is moved."""
    ours, theirs = adapter_of(new.a if isinstance(new, LowRank) else new), adapter_of(weight)
    if ours is theirs or ours is None or theirs is None:
        return new
    if not isinstance(ours, Optimizers):
        return mover_to(theirs)(new)
    raise StructureMismatchError(
        f"{name}: the adapter holds arrays of {ours.name}, and the weight is one of {theirs.name}. "
        f"Pass fmapper.to_{theirs.name}(adapter), or move the weights"
    )


def _keeper(model: Any) -> Optimizers:
    owner = adapter_of_model(model)
    if not isinstance(owner, Optimizers):
        raise StructureMismatchError(
            f"{type(model).__name__} cannot hold a LoRA adapter in its layers"
        )
    return owner


@functor(children=("updates", "replaced"))
@dataclass(eq=False, repr=False)
class LoraAdapter:
    """A low-rank adapter: a functor, trained by itself while the weights stay.

    `adapter(params)` gives the parameters with the updates in them, in torch, JAX and NumPy, under
    `jit` and in gradients with respect to the adapter.

    Attributes:
        updates: Names of weights -> their `LowRank`.
        replaced: Names of arrays that are not those of the model: biases, and modules that were
            trained as a whole.
        settings: The rest of PEFT's configuration, as text.
        rules: From the names and layouts of its weights to those of the model that it is for; None
            if they are the model's.

    Examples:
        >>> import fmapper, numpy as np
        >>> update = fmapper.training.LowRank(np.ones((1, 3)), np.ones((2, 1)), scale=0.5)
        >>> adapter = fmapper.training.LoraAdapter({"fc.weight": update})
        >>> float(adapter({"fc.weight": np.zeros((2, 3))})["fc.weight"][0, 0])
        0.5
    """

    updates: dict[str, LowRank]
    replaced: dict[str, Any] = field(default_factory=dict)
    settings: str = "{}"
    rules: Rules | None = None

    def __call__(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns parameters with the adapter merged into them; those that it does not name stay.

        Args:
            params: Arrays by name, of the adapter's framework; such as the `params` of a `JaxModel`
                or `dict(module.named_parameters())`.

        Raises:
            StructureMismatchError: The adapter names arrays that are not there, or of another
                shape; lists all of them. An adapter is never left out.
        """
        return self._apply(params)

    def apply(self, function: Callable[..., Any], params: Mapping[str, Any], *args: Any) -> Any:
        """Returns `function(self(params), *args)`, without merged matrices in memory in JAX.

        A product with a matrix becomes one with it and one with its update. Weights that are used
        otherwise, such as those of convolutions, and within `jax.lax.scan` and `jax.checkpoint`,
        are merged, as are those of DoRA and those that rules join.

        Args:
            function: A function of the parameters by name and of `args`, which JAX traces.
            params: Arrays by name, as for calling the adapter.
            args: Trees of arrays.
        """
        owner = adapter_of(next(iter(params.values()), None))
        if not isinstance(owner, Optimizers):
            return function(self(params), *args)
        merged = lambda weights, *args: function(weights[0](weights[1]), *args)  # noqa: E731
        return owner.call_apart(merged, (self, params), *args)

    def _apply(
        self, params: Mapping[str, Any], sign: int = 1, bring: Callable[[Any], Any] = lambda x: x
    ) -> dict[str, Any]:
        """Returns arrays with the updates in the weights, which are brought to those."""
        if not isinstance(params, Mapping):
            raise StructureMismatchError(
                f"{type(params).__name__} takes no LoRA adapter: pass its parameters "
                "by name, such as dict(module.named_parameters()) or fmapper.state(model)."
            )
        parts = [*self.replaced.items(), *self.updates.items()]  # an embedding may be in both

        def apply(params: Mapping[str, Any]) -> dict[str, Any]:
            merged, problems = dict(params), []
            for name, new in parts:
                weight = merged.get(name)
                if weight is None:
                    problems.append(f"{name}: the model has no such weight")
                elif tuple(weight.shape) != tuple(new.shape):
                    shapes = f"{tuple(new.shape)}, not {tuple(weight.shape)}"
                    problems.append(f"{name}: the adapter is for a weight of shape {shapes}")
                else:
                    there = bring(weight)
                    part = _beside(name, new, there)
                    is_update = isinstance(part, LowRank)
                    merged[name] = part.merge(there, sign) if is_update else part
            if problems:
                raise StructureMismatchError("\n  ".join(["the adapter does not fit:", *problems]))
            return merged

        if self.rules is None:
            return apply(params)
        from fmapper.training.rules import change_before

        return change_before(self.rules, params, [name for name, _ in parts], apply, bring)

    def unmerge(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arrays as they were before, to rounding.

        Raises:
            StructureMismatchError: What was there before is not known: the adapter replaces arrays,
                or is a DoRA, which rescales rows by norms that are gone. Or it does not fit.
        """
        gone = [*self.replaced, *(n for n, u in self.updates.items() if u.magnitude is not None)]
        if gone:
            raise StructureMismatchError(
                f"{', '.join(gone[:3])}: cannot be unmerged, as the adapter does not say what was "
                "there before. Keep the parameters of the base."
            )
        return self._apply(params, -1)

    def place(self, rules: Rules) -> LoraAdapter:
        """Returns the adapter for a model that has the weights under other names or laid out anew.

        It is trained and written as before: its own arrays, names and layouts stay.

        Args:
            rules: The rules from the base to the model, such as those of the report of `transfer`,
                or of a table of MaxText or Tunix. They need an inverse.

        Returns:
            An adapter that takes `state(model)`.
        """
        return replace(self, rules=rules)

    def attach(self, model: Any) -> Any:
        """Returns a copy of a structured Flax model that holds the adapter, as `nnx.LoRA` layers.

        The scale is in `lora_b`, as `nnx.LoRA` has none; so a step of training there is another
        than one of `a` and `b`.

        Args:
            model: A model that `convert(..., "flax", structure=True)` made of the adapter's base.

        Raises:
            StructureMismatchError: The adapter has magnitudes or replaces arrays, or a layer of it
                is not one that `nnx.LoRA` can be around; says which.
        """
        bad = [n for n, u in self.updates.items() if u.magnitude is not None or u.is_transposed]
        layers = {name: (u.a.T, u.scale * u.b.T) for name, u in self.updates.items()}
        return _keeper(model).attach_low_rank(model, layers, [*self.replaced, *bad])

    def detach(self, model: Any) -> LoraAdapter:
        """Returns the adapter that a model of `attach` holds, with what was trained."""
        held = _keeper(model).detach_low_rank(model, [*self.updates])
        updates = {
            name: replace(update, a=a.T, b=b.T / update.scale)
            for (name, update), (a, b) in zip(self.updates.items(), held, strict=True)
        }
        return replace(self, updates=updates)

    def merge(self, model: Any, *, source: bool = False) -> Any:
        """Returns a copy of a model with the adapter merged into its weights.

        Args:
            model: A model of any framework.
            source: Whether the adapter has the names of the model that `convert` made this one of,
                as for one with `structure=True`.

        Raises:
            StructureMismatchError: The adapter names arrays that the model does not have.
        """
        weights = state(model, source=source)
        owner = next((adapter_of(update.a) for update in self.updates.values()), None)
        bring = lambda x: x if owner in (None, adapter_of(x)) else mover_to(owner)(x)  # noqa: E731
        new = self._apply(weights, bring=bring)
        old = {id(weights[name]) for name in new if new[name] is not weights[name]}
        # Other names of what has changed, which is tied, would have the values of before.
        new = {n: x for n, x in new.items() if x is not weights[n] or id(x) not in old}
        return load_state(model, new, source=source)
