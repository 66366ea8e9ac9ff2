"""Converted models for torch: a module with the names of its source."""

from __future__ import annotations

import dataclasses
import itertools
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fmapper import (
    ProgramInputError,
    convert,
    fmap,
    load_program,
    save_program,
    summary,
    to_torch,
)
from fmapper.backends import Observation
from fmapper.programs import Lowering, Program
from fmapper_adapters.torch.lax import types as _types
from fmapper_adapters.torch.model import conv_weight_layout, emit
from fmapper_adapters.torch.model.compiled import Code, readable
from fmapper_adapters.torch.model.module_tree import MADE, Part, Places, get

_COMPUTED = tuple(f"{mode}made_" for mode in MADE)  # constants that graphs compute


class TorchModel(Part):
    """A model that was converted to torch.

    Parameters, buffers and submodules have the names of the source; only the whole model can be
    called. It is trained, moved, compiled, exported and saved like any other module, and does not
    need JAX.

    In training mode it runs the program that was recorded for training, if there is one.
    """

    def __init__(
        self, program: Program, added: Mapping[str, Lowering], *, fused: bool = True
    ) -> None:
        super().__init__()
        self._added = _used_lowerings(added, program)
        self._aliases = dict(program.aliases)
        self._lacks_training = program.lacks_training
        programs = {"training": program} if program.evaluation is not None or program.train else {}
        evaluation = program.evaluation if program.evaluation is not None else program
        if not program.train or program.evaluation is not None:
            programs["evaluation"] = evaluation
        self._codes: dict[str, Code] = {}
        self._tied = self._variable_types = self._few_bits = self._mesh_axes = {}  # reserved
        places = Places(self)
        for name, tensor in to_torch(dict(program.parameters)).items():
            places.parameter(name, tensor, trained=name not in program.frozen)
        for name, tensor in to_torch(dict(program.buffers)).items():
            places.buffer(name, tensor, persistent=name not in program.transient)
        for name, first in program.aliases.items():
            places.alias(name, first)
        self._tied = {places.names[name]: places.names[first]
                      for name, first in program.aliases.items()}  # fmt: skip
        self._variable_types = {places.names[n]: t for n, t in program.variable_types.items()}
        self._few_bits = {places.names[n]: t for n, t in program.few_bits.items()}
        self._mesh_axes = {places.names[n]: axes for n, axes in program.axes.items()}
        for mode, variant in programs.items():
            constants = {}
            for i, (name, tensor) in enumerate(to_torch(dict(variant.constants)).items()):
                constants[name] = f"_{mode}_{name if name.isidentifier() else f'held_{i}'}"
                self.register_buffer(constants[name], tensor, persistent=False)
            targets = {**places.names, **constants}
            self._codes[mode] = Code(variant.without_state(), self._added, targets, {}, mode, fused)
        for code in self._codes.values():
            for target, layout in conv_weight_layout.weights_of(code.graph).items():
                array = get(self, target)
                array.data = conv_weight_layout.arrange(array.data, *layout)
        self._install()
        self.__class__ = _class_of_its_own()
        self.train(program.starts_in_training)

    def __getstate__(self) -> dict[str, Any]:
        """Pickles without attributes that can be recreated from the program."""
        state = super().__getstate__()
        state["_modules"] = _without(state["_modules"], MADE)
        state["_buffers"] = _without(state["_buffers"], _COMPUTED)
        return state

    def __reduce__(self) -> Any:
        return _bare, (), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._install()
        self.__class__ = _class_of_its_own()

    def __repr__(self) -> str:
        part = Part()
        for name in ("_parameters", "_buffers", "_modules"):
            getattr(part, name).update(_without(getattr(self, name), MADE))
        return f"{type(self).__name__}{repr(part).removeprefix('Part')}"

    def _repr_html_(self) -> str:
        return self.program._repr_html_() + summary(self)._repr_html_()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the model for these arguments.

        Raises:
            ProgramInputError: The program was recorded for other inputs, or not for this mode.
        """
        code = self._code
        if not code.fits(self) and not torch.compiler.is_compiling():
            self._follow()
            code = self._code
        leaves = code.leaves(args, kwargs)
        outputs, changed = code.function(self, *leaves)
        arrays = [get(self, target) for target in code.changed]
        arrays += [leaves[i] for i in code.changed_inputs]
        for array, value in zip(arrays, changed, strict=True):
            if isinstance(array, torch.nn.Parameter):
                with torch.no_grad():
                    array.copy_(value)
            else:  # exported programs with no_grad cannot be loaded
                array.copy_(value.detach())
        return code.output(outputs)

    @property
    def _code(self) -> Code:
        codes = self._codes
        code = codes.get("training" if self.training else "evaluation")
        if code is not None:
            return code
        if self.training and not self._lacks_training:  # a program without modes
            return codes["evaluation"]
        return self._refuse_mode()

    def _refuse_mode(self) -> Code:
        name = next(iter(self._codes.values())).program.name
        if not self.training:
            raise ProgramInputError(
                f"{name} was recorded for training only: call train() on the model, or convert it "
                "with train=False"
            )
        raise ProgramInputError(
            f"{name} was recorded for evaluation only: call eval() on the model. Its training was "
            f"not: {self._lacks_training}"
        )

    def takes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool) -> bool:
        """Returns whether a mode has a program that accepts these arguments."""
        code = self._codes.get("training" if train else "evaluation")
        try:
            return code is not None and code.leaves(args, kwargs) is not None
        except ProgramInputError:
            return False

    def outcome(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
    ) -> tuple[list[Any], dict[str, Any]]:
        """Calls the model in a mode: returns output leaves, and the changed arrays by name."""
        code = self._codes["training" if train else "evaluation"]
        leaves = code.program.bind(args, kwargs, sparing=True)
        with torch.no_grad():
            outputs, changed = code.function(self, *code.with_statics(leaves))
        names = [str(out.target) for out in code.program.outputs if out.kind != "user"]
        return list(outputs), dict(zip(names, changed, strict=True))

    def watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Observation]:
        """Yields every operation of a call that is a single call in the graph."""
        code = self._code
        return list(code.observe(self, code.leaves(args, kwargs)))

    @property
    def program(self) -> Program:
        """The program of the model in its present mode."""
        return self._code.program

    @property
    def graph(self) -> fx.Graph:
        """The graph of the present mode."""
        return self._code.graph

    @property
    def code(self) -> str:
        """The graph as Python code, with the lines of the source as comments."""
        return readable(self._code.source)

    def as_program(self) -> Program:
        """Returns the program with the arrays of this model, to be saved or lowered again."""
        codes = list(self._codes.values())
        held = self._tensors_by_name()
        filled = [
            dataclasses.replace(
                code.program,
                constants={n: held[code.targets[n]].detach() for n in code.constant_names},
            )
            for code in codes
        ]
        first = filled[0]
        frozen = [
            n for n in codes[0].parameter_names
            if not held[codes[0].targets[n]].requires_grad and _can_train(held[codes[0].targets[n]])
        ]  # fmt: skip
        arrays = {name: x.detach() for name, x in self.arrays_by_name().items()}
        return dataclasses.replace(
            first,
            parameters={n: x for n, x in arrays.items() if n in codes[0].parameter_names},
            buffers={n: x for n, x in arrays.items() if n in codes[0].buffer_names},
            frozen=tuple(frozen),
            starts_in_training=self.training,
            evaluation=filled[1] if len(filled) > 1 else None,
        )

    def arrays_by_name(self) -> dict[str, torch.Tensor]:
        """Returns parameters, buffers and constants by their names in the program."""
        held = self._tensors_by_name()
        targets = next(iter(self._codes.values())).targets
        return {name: held[target] for name, target in targets.items() if target in held}

    def _tensors_by_name(self) -> dict[str, torch.Tensor]:
        return dict(
            itertools.chain(
                self.named_parameters(remove_duplicate=False),
                self.named_buffers(remove_duplicate=False),
            )
        )

    def weights(self) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
        """Returns the arrays by the names of the source, and a function that replaces them.

        Returns None if modules allow all of these names.
        """
        targets = next(iter(self._codes.values())).targets
        renamed = {target: name for name, target in targets.items() if name != target}
        arrays = {
            renamed.get(name, name): array
            for name, array in self._tensors_by_name().items()
            if not name.startswith(MADE)
        }
        if not any(name in arrays for name in renamed.values()):
            return None

        def back(filled: Mapping[str, Any]) -> Any:
            new = {id(array): filled[name] for name, array in arrays.items()}
            return fmap(lambda leaf: new.get(id(leaf), leaf), self)

        return arrays, back

    def constants_of_programs(self) -> set[str]:
        """Returns the names of buffers and modules that only the code of the graphs uses."""
        return {name for name in (*self._buffers, *self._modules) if name.startswith(MADE)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes arrays and program to a safetensors file, which `load` reads without JAX.

        Raises:
            ConversionError: An array has a dtype that the format lacks.
        """
        save_program(self.as_program(), path, to="torch")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TorchModel:
        """Returns the model in a file.

        Raises:
            ConversionError: The file does not contain a program, or is damaged.
            UnsupportedOpsError: Custom operations are not registered in this process.
        """
        model: TorchModel = convert(load_program(path), "torch")
        return model

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Implements `to`, `half` and similar methods; the graph's dtypes follow."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        present = next(iter(self._codes.values())).renamed
        renamed: dict[str, str] = {}
        for dtype in emit.FLOATS:
            before = present.get(dtype, dtype)
            after = fn(torch.empty(0, dtype=_types.dtype_of(before))).dtype
            if after is not _types.dtype_of(dtype):
                renamed[dtype] = str(after).removeprefix("torch.")
        self._rename(renamed)
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state dict; tied arrays stay tied, also with `assign=True`."""
        keys = super().load_state_dict(*args, **kwargs)
        self._tie()
        return keys

    def _tie(self) -> None:
        """Restores ties after a method of torch that replaces arrays one by one."""
        for target, first in self._tied.items():
            array = get(self, first)
            if get(self, target) is not array:
                owner, _, last = target.rpartition(".")
                setattr(self.get_submodule(owner), last, array)

    def _follow(self) -> None:
        """Rebuilds the graphs if the dtypes of parameters have changed.

        Raises:
            ProgramInputError: Parameters that had the same dtype have different ones now.
        """
        renamed: dict[str, str] = {}
        code = next(iter(self._codes.values()))
        for name, dtype in code.floats.items():
            new = str(get(self, code.targets[name]).dtype).removeprefix("torch.")
            if renamed.setdefault(dtype, new) != new:
                raise ProgramInputError(
                    f"{code.program.name}: {name} is {new}, but other parameters that were "
                    f"{dtype} are {renamed[dtype]}: cast either all of them or none"
                )
        self._rename({old: new for old, new in renamed.items() if old != new})

    def _rename(self, renamed: dict[str, str]) -> None:
        """Rebuilds the graphs with other dtypes."""
        if all(code.renamed == renamed for code in self._codes.values()):
            return
        codes = {}
        for mode, code in self._codes.items():
            codes[mode] = code if code.renamed == renamed else code.in_dtypes(renamed)
        self._codes = codes  # a new dict: a copy of this model may share the old one
        self._install()

    def _install(self) -> None:
        """Installs the functions and constants that the code of the graphs uses."""
        self._modules = _without(self._modules, MADE)
        self._buffers = _without(self._buffers, _COMPUTED)
        first = next(itertools.chain(self.parameters(), self.buffers()), None)
        device = None if first is None else first.device
        for code in self._codes.values():
            for name, module in code.modules.items():
                self.add_module(name, module)
            for name, tensor in code.constants.items():
                self.register_buffer(name, tensor.to(device), persistent=False)


TorchModel.__module__ = "fmapper_adapters.torch"  # its public module


def _without(held: Mapping[str, Any], beginnings: tuple[str, ...]) -> dict[str, Any]:
    """Returns the state of a module without names with these prefixes."""
    return {name: value for name, value in held.items() if not name.startswith(beginnings)}


def _bare() -> TorchModel:
    """Makes an empty model, to be filled by `__setstate__`."""
    return TorchModel.__new__(TorchModel)


def _class_of_its_own() -> type[TorchModel]:
    """Makes a class for one model: `torch.compile` counts compilations of a forward's code.

    With one class for all, it would give up at the ninth model of a process.
    """
    shared = TorchModel.forward
    forward = types.FunctionType(
        shared.__code__.replace(), shared.__globals__, "forward", shared.__defaults__
    )
    forward.__doc__, forward.__annotations__ = shared.__doc__, shared.__annotations__
    return type(TorchModel.__name__, (TorchModel,), {"forward": forward, "__module__": __name__})


def _can_train(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _used_lowerings(added: Mapping[str, Lowering], program: Program) -> dict[str, Lowering]:
    """Returns the users' lowerings that a program needs: others are not pickled."""
    ops = {*program.ops(), *(program.evaluation.ops() if program.evaluation is not None else ())}
    ops |= {op.rpartition(".")[0] for op in ops}
    return {
        op: lowering for op, lowering in added.items() if not op.startswith("lax::") or op in ops
    }


def from_program(
    program: Program, lowerings: Mapping[str, Lowering], *, fused: bool = True
) -> TorchModel:
    """Returns the module for a program.

    Args:
        program: The program.
        lowerings: The user's lowerings.
        fused: Whether to use torch's fused functions, such as softmax and attention.

    Raises:
        ConversionError: The program cannot be lowered.
        UnsupportedOpsError: Operations have no lowering; the message lists all of them.
    """
    return TorchModel(program, lowerings, fused=fused)
