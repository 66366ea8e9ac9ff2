"""Converted models for JAX: a pytree of parameters and buffers, called like the module."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fmapper import (
    ConversionError,
    ProgramInputError,
    UnsupportedOpsError,
    convert,
    functor,
    get_device,
    load_program,
    load_state,
    materialize,
    save_program,
    summary,
    to_jax,
    to_numpy,
)
from fmapper.backends import BoxKey, Models, Observation, Packed, get_adapter, shorten_traceback
from fmapper.programs import Call, Lowering, Program, lower
from fmapper_adapters.jax.arrays import few_bits
from fmapper_adapters.jax.arrays.packed import blocks_of
from fmapper_adapters.jax.aten import table
from fmapper_adapters.jax.model import check_inputs, execute, interpret, meshes
from fmapper_adapters.jax.model.static_program import Arrays, StaticProgram


class Outcome(NamedTuple):
    """The output of a call, and the arrays that the call has changed.

    Attributes:
        output: The output.
        model: The model with the buffers that the call has changed, such as running averages.
        args: The positional arguments, with the arrays that the call has changed.
        kwargs: The keyword arguments, with the arrays that the call has changed.
    """

    output: Any
    model: JaxModel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# `state` leaves out the keys of boxes, so that arrays have the names of the source.
@functor(children=(BoxKey("params"), BoxKey("buffers")), trainable=("params",))
class JaxModel:
    """A model that was converted to JAX.

    It is a pytree whose leaves are the arrays in `params` and `buffers`, so that JAX can transform
    functions of it: `jax.grad(lambda params: loss(model.replace(params=params)(x)))(model.params)`.
    Calls are compiled once per combination of shapes and dtypes, and do not need torch.

    Attributes:
        params: The trained arrays by the names of the state dict. Tied arrays are there under their
            first name only; `aliases` has the others.
        buffers: The other arrays of the module.
        precision: The precision of matrix products and convolutions in float32, with the values of
            `jax.default_matmul_precision`; None for JAX's own setting.
    """

    params: Arrays
    buffers: Arrays
    precision: str | None
    is_converted_model = True

    def __init__(
        self,
        params: Arrays,
        buffers: Arrays,
        code: StaticProgram,
        precision: str | None = "highest",
    ) -> None:
        self.params = params
        self.buffers = buffers
        self.precision = precision
        self._code = code

    @property
    def program(self) -> Program:
        """The program of the model."""
        return self._code.program

    @property
    def aliases(self) -> dict[str, str]:
        """The other names of tied arrays -> the name under which `params` or `buffers` has them."""
        return self.program.aliases

    @property
    def packed(self) -> dict[str, Packed]:
        """The parameters that pack several arrays side by side, such as gate and up, by name."""
        parameters: dict[str, Packed] = {}
        for packing in self._code.packings:
            parameters |= packing.parameters
        return parameters

    @property
    def is_random(self) -> bool:
        """Whether a call needs a key."""
        return self._code.random

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output for the arguments of the module's forward.

        Two more keywords are accepted, unless forward has arguments of these names:

        * `key`: a `jax.random.key` for dropout and other random numbers,
        * `mutable=True`: return a pair, the output and the model with the arrays that the call
          changes, such as the running averages of batch norms.

        `call` always accepts a key, and always returns the changed arrays.

        Raises:
            ProgramInputError: The program was recorded for other inputs.
        """
        code = self._code
        key = None if "key" in code.own_keywords else kwargs.pop("key", None)
        mutable = False if "mutable" in code.own_keywords else kwargs.pop("mutable", False)
        arrays = None
        if not code.concrete and not (code.random and key is None):
            arrays = code.routes.find(args, kwargs)
        if arrays is None:
            try:
                outcome = self.call(args, kwargs, key=key)
            except ProgramInputError as error:
                shorten_traceback(error)
                raise
            output, model = outcome.output, outcome.model
        else:
            results = execute.run_compiled(code, (), self.precision, *self._state(), arrays, key)
            output, model = self._finish(results)
        return (output, model) if mutable else output

    def call(
        self,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: Any = None,
        observe: interpret.Observer | None = None,
    ) -> Outcome:
        """Returns the output, and the arrays that the module would have changed in place.

        Args:
            args: The positional arguments of forward.
            kwargs: The keyword arguments of forward.
            key: A `jax.random.key`, for programs that draw random numbers.
            observe: Called with every operation and its result; the program is not compiled then.

        Raises:
            ProgramInputError: The program was recorded for other inputs, or needs a key.
        """
        code = self._code
        leaves = code.program.bind(args, kwargs or {})
        arrays, numbers = check_inputs.check(code, leaves)
        for name, array in (*self.params.items(), *self.buffers.items()):
            if isinstance(blocks_of(array), jax.ShapeDtypeStruct):
                raise ProgramInputError(
                    f"{code.program.name}: {name} has a shape but no values. Fill the model: "
                    "fmapper.materialize(model, state)."
                )
        if code.random and key is None:
            raise ProgramInputError(
                f"{code.program.name} draws random numbers: pass key=jax.random.key(0)"
            )
        if code.concrete:
            results = self._run_eagerly(numbers, arrays, key, observe)
        elif observe is not None:
            given = meshes.gather((*self._state(), arrays))
            results = execute.run_program(code, numbers, self.precision, *given, key, observe)
        else:
            results = execute.run_compiled(
                code, numbers, self.precision, *self._state(), arrays, key
            )
            code.routes.add(args, kwargs or {})
        output, model = self._finish(results)
        output = code.echoes.put(output, args, kwargs or {})
        for position, value in results[2].items():
            leaves[position] = value
        new_args, new_kwargs = code.program.in_spec.unflatten(leaves)
        return Outcome(output, model, new_args, new_kwargs)

    def _state(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the arrays of the program as a flat list, which makes calls cheaper."""
        return self._code.pick_params(self.params), self._code.pick_buffers(self.buffers)

    def _finish(self, results: execute.Results) -> tuple[Any, JaxModel]:
        """Returns the output, and the model with the arrays that the call has changed."""
        users, changed, _, checks = results
        code = self._code
        if checks is not None:
            execute.check_assertions(code, checks)
        if code.all_computed:
            outputs = users
        else:
            values = iter(users)
            outputs = [next(values) if fixed is None else fixed[0] for fixed in code.fixed_outputs]
        model = self
        if changed:
            model = self.replace(
                params=_update(self.params, changed), buffers=_update(self.buffers, changed)
            )
        return code.program.out_spec.unflatten(outputs), model

    def watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Observation]:
        """Runs a call one operation at a time; yields each with its results."""
        seen: list[Observation] = []

        def observe(call: Call, result: Any) -> None:
            arrays = tuple(x for x in jax.tree.leaves(result) if isinstance(x, jax.Array))
            operands = tuple(call.refs())
            seen.append(Observation(call.module, call.op, call.source, arrays, call.name, operands))

        self.call(args, kwargs, observe=observe)
        return seen

    def examine(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any] | None:
        """Returns the output for the examples; None for random numbers, or after an error.

        Raises:
            ConversionError: Operations return other dtypes than in the source.
        """
        code = self._code
        code.problems = []
        try:
            if code.random and not code.concrete:  # nothing to compare: it need not be compiled
                arrays, numbers = check_inputs.check(code, code.program.bind(args, kwargs))
                run = partial(execute.run_program, code, numbers, self.precision)
                jax.eval_shape(run, *self._state(), arrays, jax.random.key(0))
                result = None
            else:
                key = jax.random.key(0) if code.random else None
                result = (self.call(args, kwargs, key=key).output,)
        except Exception:  # the call raises it, too
            result = None
        finally:
            problems, code.problems = code.problems, None
        if problems:
            raise ConversionError(
                f"{code.program.name}: operations would return other dtypes than in the model: "
                f"{'; '.join(dict.fromkeys(problems))}. Pass check=False to accept them."
            )
        return None if code.random else result

    def _run_eagerly(self, numbers: Any, arrays: Any, key: Any, observe: Any) -> Any:
        """Runs a program without compilation, because its sizes depend on the values of arrays."""
        given = meshes.gather((*self._state(), arrays))
        return execute.run_program(self._code, numbers, self.precision, *given, key, observe)

    def replace(
        self,
        *,
        params: Arrays | None = None,
        buffers: Arrays | None = None,
        precision: Any = ...,
    ) -> JaxModel:
        """Returns this model with other arrays, or another precision."""
        return JaxModel(
            self.params if params is None else params,
            self.buffers if buffers is None else buffers,
            self._code,
            self.precision if precision is ... else precision,
        )

    def as_program(self) -> Program:
        """Returns the program with the arrays of this model, to be saved or lowered again."""
        return dataclasses.replace(
            self.without_arrays(),
            parameters={name: few_bits.in_bytes(x) for name, x in self.params.items()},
            buffers={name: few_bits.in_bytes(x) for name, x in self.buffers.items()},
        )

    def without_arrays(self) -> Program:
        """Returns the program with its constants, but not the parameters and buffers."""
        return dataclasses.replace(self.program, constants=dict(self._code.constants))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes arrays and program to a safetensors file, which `load` reads without torch.

        Raises:
            ConversionError: An array has a dtype that the format lacks.
        """
        save_program(self.as_program(), path, to="jax")

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> JaxModel:
        """Returns the model in a file, with the options of `convert`.

        Raises:
            ConversionError: The file does not contain a program, or is damaged.
            UnsupportedOpsError: Custom operations are not registered in this process.
        """
        model: JaxModel = convert(load_program(path), "jax", **options)
        return model

    def state_dict(self) -> Arrays:
        """Returns the arrays by the names of the module's state dict, tied ones under each name."""
        kept = {n: a for n, a in self.buffers.items() if n not in self.program.transient}
        state = {**self.params, **kept}
        return state | {
            name: state[first] for name, first in self.aliases.items() if first in state
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> JaxModel:
        """Returns a model with this program and other arrays, such as those of a checkpoint.

        Args:
            state: Arrays of any backend by the names of `state_dict`.

        Raises:
            StructureMismatchError: Names are missing or unexpected, or a shape differs.
            LossyCastError: A value does not fit into the dtype of the model.
        """
        renamed: Arrays = {}
        for name, array in state.items():
            renamed.setdefault(self.aliases.get(name, name), array)
        for name in self.program.transient:  # in no state dict: they stay
            renamed.setdefault(name, self.buffers[name])
        arrays = {**self.params, **self.buffers}
        is_hollow = any(isinstance(blocks_of(x), jax.ShapeDtypeStruct) for x in arrays.values())
        loaded = (materialize if is_hollow else load_state)(arrays, renamed)
        return self.replace(
            params={name: loaded[name] for name in self.params},
            buffers={name: loaded[name] for name in self.buffers},
        )

    def __reduce__(self) -> Any:
        """Pickles the program; the lowerings are found again."""
        return _unpickle, (self.as_program(), self.precision)

    def __copy__(self) -> JaxModel:
        return self.replace()

    def __deepcopy__(self, memo: Any) -> JaxModel:
        """Copies the arrays; the copy shares the code, so that it is not compiled again."""
        arrays = copy.deepcopy((self.params, self.buffers), memo)
        return self.replace(params=arrays[0], buffers=arrays[1])

    def __repr__(self) -> str:
        count = sum(int(np.size(array)) for array in self.params.values())
        return f"JaxModel({self.program.name}, {len(self.params)} parameters of {count:,} numbers)"

    def _repr_html_(self) -> str:
        return self.program._repr_html_() + summary(self)._repr_html_()


JaxModel.__module__ = "fmapper_adapters.jax"  # its public module


def _unpickle(program: Program, precision: str | None) -> JaxModel:
    model: JaxModel = lower(program, get_adapter("jax", Models), precision=precision)
    return model


def from_program(
    program: Program,
    added: Mapping[str, Lowering],
    *,
    precision: str | None = "highest",
) -> JaxModel:
    """Returns the model for a program.

    Raises:
        UnsupportedOpsError: Operations have no lowering; the message lists all of them.
    """
    try:
        lowerings = table.find_all(program.ops(), added)
    except UnsupportedOpsError as error:
        if not any(op.startswith("lax::") for op in error.ops):
            raise
        raise UnsupportedOpsError(
            f"{program.name} was recorded from JAX: its operations are JAX's own, and nothing "
            'lowers them to JAX. Convert the program to "torch". Its weights are in '
            "program.parameters and program.buffers, by name; fmapper.to_jax takes them back",
            error.ops,
        ) from None
    arrays = _move_arrays({"params": program.parameters, "buffers": program.buffers})
    for kind, name in itertools.product(arrays, program.few_bits):
        if name in arrays[kind]:
            dtype = program.few_bits[name]
            arrays[kind][name] = few_bits.out_of_bytes(arrays[kind][name], dtype, name)
    constants = to_numpy(program.constants)
    code = StaticProgram(program.without_state(), lowerings, constants)
    return JaxModel(arrays["params"], arrays["buffers"], code, precision)


def _move_arrays(arrays: dict[str, Arrays]) -> dict[str, Arrays]:
    """Moves the arrays of a program to JAX; abstract ones become shapes."""
    hollow = {
        kind: {n: x for n, x in named.items() if _is_hollow(x)} for kind, named in arrays.items()
    }
    if not any(hollow.values()):
        moved: dict[str, Arrays] = to_jax(arrays)
        return moved
    solid = {
        kind: {n: x for n, x in named.items() if n not in hollow[kind]}
        for kind, named in arrays.items()
    }
    parts = to_jax(solid), to_jax(hollow, device="meta")
    return {
        kind: {n: next(p[kind][n] for p in parts if n in p[kind]) for n in named}
        for kind, named in arrays.items()
    }


def _is_hollow(array: Any) -> bool:
    device = get_device(array)
    return device is not None and device.kind == "meta"


def _update(arrays: Arrays, changed: Arrays) -> Arrays:
    return {name: changed.get(name, array) for name, array in arrays.items()}
