"""The programs of a converted model, for training and for evaluation, and the names of its arrays.

For Flax this is a single static value, compared by identity: it passes through `nnx.split`,
`nnx.jit` and copies with the model, without causing a recompilation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from fmapper import ConversionError, ProgramInputError, convert
from fmapper.programs import Lowering, Program
from fmapper_adapters.flax import variables

Arrays = dict[str, Any]

# The names of the running statistics of batch and instance norms in `torch.nn`.
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


class Programs:
    """The programs of a converted model, without its arrays.

    Attributes:
        training: A `JaxModel` without arrays, or None.
        evaluation: The same for evaluation; at least one of the two exists.
        kinds: The name of each array -> param, frozen, statistic or buffer.
        aliases: Other names of tied arrays -> the name in `kinds`.
        transient: Names of buffers that are not in the state dict of the module.
        axes: Names of arrays -> the mesh axes that the source named for them.
        types: Names of arrays -> the types of their original variables, if known.
    """

    def __init__(self, training: Any, evaluation: Any, names: tuple[Any, Any]) -> None:
        self.training = training
        self.evaluation = evaluation
        program = self.any.program
        frozen = set(program.frozen)
        self.kinds = {name: "frozen" if name in frozen else "param" for name in names[0]}
        for name in names[1]:
            is_statistic = name.rpartition(".")[2] in _STATISTICS
            is_statistic |= program.variable_types.get(name) == "BatchStat"
            self.kinds[name] = "statistic" if is_statistic else "buffer"
        self.aliases = dict(program.aliases)
        self.transient = frozenset(program.transient)
        self.types = variables.types_of(program.variable_types)
        self.axes = dict(program.axes)
        self._names = names

    @property
    def any(self) -> Any:
        """One of the programs, for facts that both share."""
        return self.training if self.evaluation is None else self.evaluation

    @property
    def starts_in_training(self) -> bool:
        """Whether the source was in training; of a single program, whether it is for training."""
        if self.training is None or self.evaluation is None:
            return self.training is not None
        started: bool = self.training.program.starts_in_training
        return started

    def trains(self, model: Any, *, train: bool | None) -> bool:
        """Returns whether a call runs the program for training; the mode None is the model's."""
        if train is None:
            return not model.deterministic
        return self.evaluation is None or (train and self.training is not None)

    def bind(self, arrays: Mapping[str, Any], *, train: bool) -> Any:
        """Returns the `JaxModel` for a mode with these arrays.

        Raises:
            ProgramInputError: The model has no program for this mode.
        """
        model = self.training if train else self.evaluation
        if model is None:
            name = self.any.program.name
            raise ProgramInputError(
                f"{name} was converted for evaluation only: convert it with train=True, or call "
                "eval() on the model"
                if train
                else f"{name} was converted for training only: call train() on the model"
            )
        parameters, buffers = self._names
        return model.replace(
            params={name: arrays[name] for name in parameters},
            buffers={name: arrays[name] for name in buffers},
        )

    def whole(self, arrays: Mapping[str, Any]) -> Program:
        """Returns the program with these arrays; one for training includes that for evaluation."""
        program: Program = self.bind(arrays, train=self.training is not None).as_program()
        if self.training is not None and self.evaluation is not None:
            program.evaluation = self.evaluation.as_program()
        return program

    def __copy__(self) -> Programs:
        return self

    def __deepcopy__(self, memo: Any) -> Programs:
        return self

    def __reduce__(self) -> Any:
        return Programs, (self.training, self.evaluation, self._names)

    def __repr__(self) -> str:
        modes = {"training": self.training, "evaluation": self.evaluation}
        names = " and ".join(mode for mode, model in modes.items() if model is not None)
        return f"<{self.any.program.name} for {names}>"


def from_program(
    program: Program, added: Mapping[str, Lowering], *, precision: str | None
) -> tuple[Programs, Arrays]:
    """Splits a program into those of its modes, and its arrays by name.

    Raises:
        UnsupportedOpsError: Operations have no lowering.
    """
    from fmapper_adapters.jax.libraries import from_program as jax_model

    both = [dataclasses.replace(program, evaluation=None), program.evaluation]
    models = [jax_model(p, added, precision=precision) for p in both if p is not None]
    arrays = {**models[0].params, **models[0].buffers}
    names = tuple(models[0].params), tuple(models[0].buffers)
    shells = [model.replace(params={}, buffers={}) for model in models]
    if program.train:
        training, evaluation = shells[0], shells[1] if len(shells) > 1 else None
    else:
        training, evaluation = None, shells[0]
    return Programs(training, evaluation, names), arrays


def alone(model: Any) -> Any:
    """Returns the `JaxModel` for evaluation, or the only one, of a model of NNX or Linen."""
    start = getattr(model, "start", None)
    if start is None:
        from fmapper_adapters.flax import flax_model as _model

        return _model.bind(model)
    from fmapper_adapters.flax import linen_model

    arrays = linen_model.weights(model, start.variables)
    programs: Programs = start.programs
    return programs.bind(arrays, train=programs.evaluation is None)


def load(path: Any, options: Mapping[str, Any]) -> Any:
    """Returns the model in a file that `save` has written."""
    from fmapper import load_program

    return convert(load_program(path), "flax", **options)


# --- names as trees -------------------------------------------------------------------------------


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nests `{"a.b": x}` to `{"a": {"b": x}}`."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return tree


def flatten(tree: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """Flattens `{"a": {"b": x}}` to pairs of `a.b` and x."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{start}{key}.")
        else:
            yield f"{start}{key}", value


def check_names(programs: Programs, reserved: frozenset[str]) -> None:
    """Checks that no child has the name of one of the model's own attributes.

    Raises:
        ConversionError: A child has such a name; the message names it.
    """
    taken = {name.split(".")[0] for name in (*programs.kinds, *programs.aliases)} & reserved
    if taken:
        raise ConversionError(
            f"{programs.any.program.name}: the child {min(taken)!r} has a name that Flax models "
            f"reserve. Rename it in the module."
        )
