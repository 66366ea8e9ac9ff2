"""Converted models for Flax: an `nnx.Module` with the names of its source."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from fmapper import ProgramInputError, fmap, save_program, summary
from fmapper.backends import Observation, shorten_traceback
from fmapper.programs import Lowering, Program
from fmapper_adapters.flax import programs as _programs
from fmapper_adapters.flax.packed import PACKED, of_blocks, to_blocks
from fmapper_adapters.flax.programs import Programs
from fmapper_adapters.jax.libraries import PackedArray

_RESERVED = frozenset({"deterministic", "rngs", "_programs"})
_HAS_METHODS = hasattr(nnx.Variable, "get_value")  # before Flax 0.12 there is only the property


class Buffer(nnx.Variable[Any]):
    """An array of a module that is neither a parameter nor a running statistic."""


class FrozenParam(nnx.Variable[Any]):
    """A parameter that is not trained: `requires_grad` was False. It is not an `nnx.Param`."""


_CLASSES: dict[str, Any] = {
    "param": nnx.Param,
    "frozen": FrozenParam,
    "statistic": nnx.BatchStat,
    "buffer": Buffer,
}


_PLAIN = frozenset(_CLASSES.values())


class Part(nnx.Module):
    """A submodule of a converted model: its variables and submodules, by their original names.

    A submodule with a number for a name is found by index: `model.layers[0].weight`. Submodules
    without arrays, such as activations, are left out, and the others keep their numbers; `len`
    counts the numbered submodules that exist.
    """

    if TYPE_CHECKING:  # names of the source are known only at run time

        def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, key: int | str) -> Any:
        """Returns the child with that number or name.

        Raises:
            IndexError: No child has that number.
            KeyError: No child has that name.
        """
        if isinstance(key, str):
            if key not in _children(self):
                raise KeyError(key)
            return vars(self)[key]
        name = str(key.__index__())
        if name not in _children(self):
            raise IndexError(
                f"no submodule {name}: there are {', '.join(map(str, _numbers(self))) or 'none'}, "
                f"the numbers of the submodules with arrays"
            )
        return vars(self)[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: the program is that of the whole model, and not divided into its parts.

        Raises:
            TypeError: Says how to get a model whose submodules are called.
        """
        raise TypeError(
            "a submodule of a converted model holds variables and cannot be called: the program is "
            "that of the whole model. convert(..., 'flax', structure=True) gives a model whose "
            "submodules can be called."
        )

    def __len__(self) -> int:
        return len(_numbers(self))

    def __iter__(self) -> Iterator[Any]:
        return (vars(self)[str(number)] for number in _numbers(self))

    def __contains__(self, name: object) -> bool:
        return name in _children(self)

    def __bool__(self) -> bool:
        return True

    def __hash__(self) -> int:
        return id(self)


class Parts(Part):
    """A part whose children are all numbered, like those of a `ModuleList`.

    As in an `nnx.List`, the keys in the paths of NNX are numbers. Elsewhere they are strings,
    because Flax cannot sort numbers among strings.
    """

    _pytree__has_int_keys = True


class FlaxModel(Part):
    """A model that was converted to Flax.

    Parameters are `nnx.Param`s, or `FrozenParam`s where `requires_grad` was False; the running
    statistics of batch norms are `nnx.BatchStat`s, and other buffers are `Buffer`s. Arrays that
    were in other variables of Flax before they were converted to torch, such as an `nnx.RngKey`,
    are in variables of the same types again; your own types are known in the process that converted
    the model. Tied arrays are one variable at several places.

    Attributes:
        deterministic: Whether the model is in evaluation mode; `train()` and `eval()` of the model,
            or of a module around it, switch it.
        rngs: The `nnx.Rngs` from which random numbers are drawn, if one was passed to `convert` or
            set later.
    """

    deterministic: bool

    def __init__(self, programs: Programs, arrays: Mapping[str, Any], *, rngs: Any = None) -> None:
        _programs.check_names(programs, _RESERVED)
        self._programs = programs
        self.deterministic = not programs.starts_in_training
        if rngs is not None:
            self.rngs = rngs
        variables = {}
        for name, kind in programs.kinds.items():
            metadata = {"persistent": False} if name in programs.transient else {}
            variables[name] = _class(programs, name, kind)(arrays[name], **metadata)
        variables.update((alias, variables[name]) for alias, name in programs.aliases.items())
        _fill(self, _programs.nest(variables))

    def _repr_html_(self) -> str:
        html: str = self._programs.any.program._repr_html_()
        return html + summary(self)._repr_html_()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output for the arguments of the module's forward.

        Arrays that forward changes, such as running averages in training, are changed in the
        variables. Unless forward has an argument of this name, `rngs` is accepted too: an
        `nnx.Rngs` whose stream `dropout` provides the random numbers, a stream, or a
        `jax.random.key`.

        Raises:
            ProgramInputError: The program was recorded for other inputs, or needs random numbers;
                or the model has no program for this mode; or tied variables are no longer the same.
        """
        train = not self.deterministic
        variables = _variables(self)
        arrays = {name: _value(variable) for name, variable in variables.items()}
        model = self._programs.bind(arrays, train=train)
        takes_rngs = any(p.name == "rngs" for p in model.program.signature)
        rngs = None if takes_rngs else kwargs.pop("rngs", None)
        key = None
        if train or model.is_random:
            key = _key(vars(self).get("rngs") if rngs is None else rngs)
        if key is None and model.is_random:
            raise ProgramInputError(
                f"{model.program.name} draws random numbers: pass rngs=nnx.Rngs(dropout=0), or "
                "set model.rngs"
            )
        try:
            outcome = model.call(args, kwargs, key=key)
        except ProgramInputError as error:
            shorten_traceback(error)
            raise
        _write(variables, arrays, outcome.model)
        return outcome.output

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the mode when `nnx.view` asks for it.

        Args:
            deterministic: Whether the view is in evaluation mode.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def state_dict(self) -> dict[str, Any]:
        """Returns the arrays by the names of the module's state dict, tied ones under each name."""
        arrays: dict[str, Any] = bind(self).state_dict()
        return arrays

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the arrays in the variables, for example by those of another checkpoint.

        Args:
            state: Arrays of any backend by the names of `state_dict`.

        Raises:
            StructureMismatchError: Names are missing or unexpected, or a shape differs.
            LossyCastError: A value does not fit into the dtype of the model.
        """
        model = bind(self)
        before = {**model.params, **model.buffers}
        _write(_variables(self), before, model.load_state_dict(state))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes arrays and programs to a safetensors file, which `load` reads without torch.

        Raises:
            ConversionError: An array has a dtype that the format lacks.
        """
        program = self._programs.whole(_arrays(self))
        program.starts_in_training = program.train and not self.deterministic
        save_program(program, path, to="flax")

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> FlaxModel:
        """Returns the model in a file, in the mode in which it was saved.

        Args:
            path: The file.
            **options: The options of `convert`.

        Raises:
            ConversionError: The file does not contain a program, or is damaged.
            UnsupportedOpsError: Custom operations are not registered in this process.
        """
        model: FlaxModel = _programs.load(path, options)
        return model


FlaxModel.__module__ = "fmapper_adapters.flax"  # its public module


def from_program(
    program: Program,
    added: Mapping[str, Lowering],
    *,
    precision: str | None = "highest",
    rngs: Any = None,
    linen: bool = False,
) -> Any:
    """Builds the model of a program, for NNX or Linen.

    Raises:
        UnsupportedOpsError: Operations have no lowering; lists all of them.
    """
    programs, arrays = _programs.from_program(program, added, precision=precision)
    if not linen:
        return FlaxModel(programs, arrays, rngs=rngs)
    from fmapper_adapters.flax import linen_model

    return linen_model.from_arrays(programs, arrays)


def evaluate(
    model: FlaxModel, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool | None
) -> Any:
    """Calls a model in a mode, None for its own, without changing it."""
    copy = fmap(lambda leaf: leaf, model)  # a call may change the variables
    copy.deterministic = not model._programs.trains(model, train=train)
    return copy(*args, **{**keys(model, train=train), **kwargs})


def keys(model: FlaxModel, *, train: bool | None) -> dict[str, Any]:
    """Returns the keyword with a random key that a call in a mode needs without a generator."""
    is_training = model._programs.trains(model, train=train)
    bound = model._programs.bind(_arrays(model), train=is_training)
    if not bound.is_random or vars(model).get("rngs") is not None:
        return {}
    return {"rngs": jax.random.key(0)}


def watch(
    model: FlaxModel, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool | None
) -> list[Observation] | None:
    """Records every operation of a call in a mode; None if it draws random numbers."""
    is_training = model._programs.trains(model, train=train)
    bound = model._programs.bind(_arrays(model), train=is_training)
    if bound.is_random:
        return None
    observations: list[Observation] = bound.watch(args, kwargs)
    return observations


def _class(programs: Programs, name: str, kind: str) -> Any:
    """Returns the type of a variable: the original one, unless only one of the two is trained."""
    original = programs.types.get(name)
    if original is None or kind == "frozen" or issubclass(original, nnx.Param) != (kind == "param"):
        return _CLASSES[kind]
    return original


def _fill(part: Any, children: Mapping[str, Any]) -> None:
    for name, child in children.items():
        if isinstance(child, Mapping):
            inner = Parts() if all(map(_is_number, child)) else Part()
            _fill(inner, child)
            setattr(part, name, inner)
        else:
            setattr(part, name, child)


def _is_number(name: str) -> bool:
    return name.isdecimal() and str(int(name)) == name


# --- variables ------------------------------------------------------------------------------------


def bind(model: FlaxModel) -> Any:
    """Returns the `JaxModel` for evaluation with the arrays of a model."""
    programs: Programs = model._programs
    return programs.bind(_arrays(model), train=programs.evaluation is None)


def _arrays(model: FlaxModel) -> dict[str, Any]:
    return {name: _value(variable) for name, variable in _variables(model).items()}


def _variables(model: FlaxModel) -> dict[str, Any]:
    """Returns the variables by name, each once.

    Raises:
        ProgramInputError: Tied variables are no longer the same, so that one would be ignored.
    """
    programs: Programs = model._programs
    by_name = {name: _find(model, name) for name in programs.kinds}
    for alias, name in programs.aliases.items():
        other = _find(model, alias)
        if other is not by_name[name] and _differ(other, by_name[name]):
            raise ProgramInputError(
                f"{alias} and {name} are tied, but are two different variables now. Assign the "
                "same variable to both; nnx.split, nnx.jit and nnx.grad keep a tie, the functions "
                "of jax.tree do not."
            )
    return by_name


def _differ(a: Any, b: Any) -> bool:
    """Returns whether two variables differ in value; False inside `jax.jit`."""
    values = _value(a), _value(b)
    return values[0] is not values[1] and not isinstance(values[0], jax.core.Tracer)


def _find(model: FlaxModel, name: str) -> Any:
    part: Any = model
    try:
        for key in name.split("."):
            part = vars(part)[key]
    except KeyError:
        raise ProgramInputError(f"{name} is no longer in the model") from None
    return part


def _children(part: Any) -> dict[str, Any]:
    """Returns the children of a part by name, without attributes of Flax and the model."""
    reserved = _RESERVED if isinstance(part, FlaxModel) else frozenset()
    return {
        name: value
        for name, value in vars(part).items()
        if name not in reserved and isinstance(value, Part | nnx.Variable)
    }


def _numbers(part: Any) -> list[int]:
    return sorted(int(name) for name in _children(part) if _is_number(name))


def _value(variable: Any) -> Any:
    if not _HAS_METHODS:
        return variable.value
    if type(variable) in _PLAIN:
        raw = variable.get_raw_value()
        # skips get_value's handling of trees, references and hooks, which is slower than the call
        is_array = isinstance(raw, jax.Array) and not isinstance(raw, jax.core.Tracer)
        if is_array and not (
            variable.has_metadata("on_get_value") or variable.has_metadata(PACKED)
        ):
            return raw
    return of_blocks(variable.get_value(), variable.get_metadata())


def _write(variables: Mapping[str, Any], before: Mapping[str, Any], model: Any) -> None:
    """Writes changed arrays back to their variables."""
    for name, value in (*model.params.items(), *model.buffers.items()):
        if value is before[name]:
            continue
        variable, new = variables[name], value
        if isinstance(value, PackedArray) or variable.has_metadata(PACKED):
            metadata = dict(variable.get_metadata())
            new = to_blocks(value, metadata)
            variable.set_metadata(metadata)
        if _HAS_METHODS:
            variable.set_value(new)
        else:
            variable.value = new


def _key(rngs: Any) -> Any:
    """Returns a PRNG key from an `nnx.Rngs`, one of its streams, or a key."""
    if isinstance(rngs, nnx.Rngs):
        return rngs.dropout()
    return rngs() if callable(rngs) else rngs


def weights(model: FlaxModel) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Returns the arrays of a model by the names of its source, and a function that replaces them.

    The generators of the model are not among them.
    """

    def back(filled: Mapping[str, Any]) -> Any:
        copy = nnx.clone(model)
        old = bind(copy)
        params = {name: filled[name] for name in old.params}
        new = old.replace(params=params, buffers={name: filled[name] for name in old.buffers})
        _write(_variables(copy), {**old.params, **old.buffers}, new)
        return copy

    held = bind(model)
    arrays = {**held.params, **held.buffers}
    tied = {name: arrays[first] for name, first in held.aliases.items() if first in arrays}
    return {**arrays, **tied}, back
