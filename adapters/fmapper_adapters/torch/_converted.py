"""What `convert` gives for torch: a module with the names of the source and torch's functions."""

from __future__ import annotations

import dataclasses
import itertools
import keyword
import linecache
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fmapper import (
    Input,
    Lowering,
    Observation,
    Program,
    ProgramInputError,
    Ref,
    Scalar,
    convert,
    functor,
    load_program,
    save_program,
    to_torch,
)
from fmapper_adapters.torch import _constants, _emit, _layouts, _tidy
from fmapper_adapters.torch.lax import _table, _types

_SERIAL = itertools.count()
# What a narrower integer, or float, of a program may be given as: JAX narrows these itself.
_NARROWED = {torch.int32: torch.int64, torch.uint32: torch.int64}


_MADE = ("_training_", "_evaluation_")  # how functions and constants of the graphs are called
_COMPUTED = ("_training_made_", "_evaluation_made_")  # those that a graph computes from nothing


class Part(torch.nn.Module):
    """A part of a converted model: it holds parameters, buffers and parts, and computes nothing."""

    def __getitem__(self, key: int | str) -> Any:
        """A part or an array by its number or name, as of a list or dict."""
        if isinstance(key, int) and not hasattr(self, str(key)):
            raise IndexError(key)
        return getattr(self, str(key))

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made of the program again, and unsigned arrays as torch can pickle them.

        `pickle` of a torch tensor of uint16, uint32 or uint64 fails.
        """
        state = dict(self.__dict__)
        modules, buffers = state["_modules"], state["_buffers"]
        state["_modules"] = {k: v for k, v in modules.items() if not k.startswith(_MADE)}
        state["_buffers"] = {k: v for k, v in buffers.items() if not k.startswith(_COMPUTED)}
        kinds = {}
        for name, tensor in state["_buffers"].items():
            signed = None if tensor is None else _types.signed_of(tensor.dtype)
            if signed is not None:
                kinds[name] = tensor.dtype
                state["_buffers"][name] = tensor.view(signed)
        return {**state, "_unsigned": kinds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        kinds = state.pop("_unsigned")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, dtype in kinds.items():
            self._buffers[name] = self._buffers[name].view(dtype)  # type: ignore[union-attr]

    def extra_repr(self) -> str:
        """The shapes of the arrays."""
        arrays = (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False))
        return ", ".join(f"{name}: {tuple(array.shape)}" for name, array in arrays)


class TorchModel(Part):
    """A model that was converted to torch.

    Parameters, buffers and parts have the names that they have in the source; it is called as a
    whole. It is trained, moved, compiled, exported and saved as any other module; JAX has no part
    in it.

    In training mode it computes what was recorded for training, if that was recorded.
    """

    def __init__(
        self, program: Program, added: Mapping[str, Lowering], *, fused: bool = True
    ) -> None:
        super().__init__()
        self._added = _used(added, program)
        self._aliases = dict(program.aliases)
        self._lacks_training = program.lacks_training
        programs = {"training": program} if program.evaluation is not None or program.train else {}
        evaluation = program.evaluation if program.evaluation is not None else program
        if not program.train or program.evaluation is not None:
            programs["evaluation"] = evaluation
        places = _Places(self)
        for name, tensor in to_torch(dict(program.parameters)).items():
            places.parameter(name, tensor, trained=name not in program.frozen)
        for name, tensor in to_torch(dict(program.buffers)).items():
            places.buffer(name, tensor, persistent=name not in program.transient)
        for name, first in program.aliases.items():
            places.alias(name, first)
        self._tied = {places.names[name]: places.names[first]
                      for name, first in program.aliases.items()}  # fmt: skip
        self._codes: dict[str, Code] = {}
        for mode, one in programs.items():
            constants = {}
            for name, tensor in to_torch(dict(one.constants)).items():
                constants[name] = f"_{mode}_{name}"
                self.register_buffer(constants[name], tensor, persistent=False)
            targets = {**places.names, **constants}
            self._codes[mode] = Code(one.without_state(), self._added, targets, {}, mode, fused)
        for code in self._codes.values():
            for target, layout in _layouts.wanted(code.graph).items():
                array = _get(self, target)
                array.data = _layouts.arrange(array.data, *layout)
        self._install()
        self.__class__ = _class_of_its_own()
        self.train(program.starts_in_training)

    def __reduce__(self) -> Any:
        return _bare, (), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._install()
        self.__class__ = _class_of_its_own()

    def __repr__(self) -> str:
        own = Part()
        for name in ("_parameters", "_buffers", "_modules"):
            held = getattr(self, name)
            getattr(own, name).update({k: v for k, v in held.items() if not k.startswith(_MADE)})
        return f"{type(self).__name__}{repr(own).removeprefix('Part')}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the source gives for these arguments.

        Raises:
            ProgramInputError: The program was recorded for other inputs, or not for this mode.
        """
        code = self._code
        if not code.fits(self) and not torch.compiler.is_compiling():
            self._follow()
            code = self._code
        leaves = code.leaves(args, kwargs)
        outputs, changed = code.function(self, *leaves)
        for target, value in zip(code.changed, changed, strict=True):
            array = _get(self, target)
            if isinstance(array, torch.nn.Parameter):
                with torch.no_grad():
                    array.copy_(value)
            else:  # exported programs with no_grad in them cannot be loaded
                array.copy_(value.detach())
        return code.output(outputs)

    @property
    def _code(self) -> Code:
        codes = self._codes
        found = codes.get("training" if self.training else "evaluation")
        if found is not None:
            return found
        if self.training and not self._lacks_training:  # it has no modes
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

    def watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Observation]:
        """Every operation of a call that is one in the graph, with its results."""
        code = self._code
        return list(code.observed(self, code.leaves(args, kwargs)))

    @property
    def program(self) -> Program:
        """What the model computes in its present mode, as data."""
        return self._code.program

    @property
    def graph(self) -> fx.Graph:
        """The graph of its present mode."""
        return self._code.graph

    @property
    def code(self) -> str:
        """The graph as Python code, with the lines of the source as comments."""
        return _readable(self._code.source)

    def as_program(self) -> Program:
        """The program with the arrays of this model, to be saved or lowered again."""
        codes = list(self._codes.values())
        names = {target: name for name, target in codes[0].targets.items()}
        held = dict(
            itertools.chain(
                self.named_parameters(remove_duplicate=False),
                self.named_buffers(remove_duplicate=False),
            )
        )
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
        found = {names[target]: x.detach() for target, x in held.items() if target in names}
        return dataclasses.replace(
            first,
            parameters={n: x for n, x in found.items() if n in codes[0].parameter_names},
            buffers={n: x for n, x in found.items() if n in codes[0].buffer_names},
            frozen=tuple(frozen),
            starts_in_training=self.training,
            evaluation=filled[1] if len(filled) > 1 else None,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes arrays and program to one safetensors file; `load` needs no JAX to read it.

        Raises:
            ConversionError: An array has a dtype that the format lacks.
        """
        save_program(self.as_program(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TorchModel:
        """The model in a file.

        Raises:
            ConversionError: The file holds no program, or is damaged.
            UnsupportedOpsError: It has operations of your own that are not added here.
        """
        found: TorchModel = convert(load_program(path), "torch")
        return found

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What `to`, `half`, `cuda` and the like do: where dtypes change, those of the graph do."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        present = next(iter(self._codes.values())).renamed
        renamed: dict[str, str] = {}
        for dtype in _emit.FLOATS:
            before = present.get(dtype, dtype)
            after = fn(torch.empty(0, dtype=_types.dtype_of(before))).dtype
            if after is not _types.dtype_of(dtype):
                renamed[dtype] = str(after).removeprefix("torch.")
        self._rename(renamed)
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of every module; what is tied stays tied, with `assign=True` too."""
        found = super().load_state_dict(*args, **kwargs)
        self._tie()
        return found

    def _tie(self) -> None:
        """Makes tied arrays one again, which the methods of torch treat one by one."""
        for target, first in self._tied.items():
            one = _get(self, first)
            if _get(self, target) is not one:
                owner, _, last = target.rpartition(".")
                setattr(self.get_submodule(owner), last, one)

    def _follow(self) -> None:
        """Makes the graphs anew where parameters have other dtypes than those they are made for.

        Raises:
            ProgramInputError: Parameters that had one dtype have several now.
        """
        renamed: dict[str, str] = {}
        code = next(iter(self._codes.values()))
        for name, dtype in code.floats.items():
            new = str(_get(self, code.targets[name]).dtype).removeprefix("torch.")
            if renamed.setdefault(dtype, new) != new:
                raise ProgramInputError(
                    f"{code.program.name}: {name} is of {new}, other parameters that were of "
                    f"{dtype} are of {renamed[dtype]}: cast all of them or none"
                )
        self._rename({old: new for old, new in renamed.items() if old != new})

    def _rename(self, renamed: dict[str, str]) -> None:
        """Makes the graphs anew that are made for other dtypes."""
        if all(code.renamed == renamed for code in self._codes.values()):
            return
        codes = {}
        for mode, code in self._codes.items():
            codes[mode] = code if code.renamed == renamed else code.in_dtypes(renamed)
        self._codes = codes  # another dict: a copy of this model may share the old one
        self._install()

    def _install(self) -> None:
        """Gives this module what the code of the graphs expects: functions and constants."""
        first = next(itertools.chain(self.parameters(), self.buffers()), None)
        device = None if first is None else first.device
        for code in self._codes.values():
            for name, module in code.modules.items():
                self.add_module(name, module)
            for name, tensor in code.constants.items():
                self.register_buffer(name, tensor.to(device), persistent=False)


def _bare() -> TorchModel:
    """A model to be filled by `__setstate__`."""
    return TorchModel.__new__(TorchModel)


def _class_of_its_own() -> type[TorchModel]:
    """A class for one model: `torch.compile` counts how often it compiles the code of a forward.

    With one forward for all, it would give up at the ninth model of a process.
    """
    shared = TorchModel.forward
    own = types.FunctionType(
        shared.__code__.replace(), shared.__globals__, "forward", shared.__defaults__
    )
    own.__doc__, own.__annotations__ = shared.__doc__, shared.__annotations__
    return type(TorchModel.__name__, (TorchModel,), {"forward": own, "__module__": __name__})


class _Places:
    """Where arrays of a program are put in a tree of modules, by names that modules allow."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.names: dict[str, str] = {}
        self._root = root

    def parameter(self, name: str, tensor: torch.Tensor, *, trained: bool) -> None:
        trained = trained and (tensor.is_floating_point() or tensor.is_complex())
        owner, last = self._place(name)
        owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=trained))

    def buffer(self, name: str, tensor: torch.Tensor, *, persistent: bool) -> None:
        owner, last = self._place(name)
        owner.register_buffer(last, tensor, persistent=persistent)

    def alias(self, name: str, first: str) -> None:
        tensor = _get(self._root, self.names[first])
        owner, last = self._place(name)
        if isinstance(tensor, torch.nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor)

    def _place(self, name: str) -> tuple[torch.nn.Module, str]:
        owner = self._root
        taken = []
        *parts, last = name.split(".")
        for wanted in parts:
            part = _free(owner, wanted, owner._modules)
            if part not in owner._modules:
                owner.add_module(part, Part())
            owner = owner._modules[part]  # type: ignore[assignment]
            taken.append(part)
        last = _free(owner, last, ())
        self.names[name] = ".".join((*taken, last))
        return owner, last


def _free(owner: torch.nn.Module, name: str, allowed: Any) -> str:
    """A name that is no other attribute of a module and no word of Python's: `train_`, `in_`."""
    name = f"{name}_" if keyword.iskeyword(name) or not name else name
    while name not in allowed and hasattr(owner, name):
        name += "_"
    return name


def _get(root: torch.nn.Module, target: str) -> Any:
    owner, _, last = target.rpartition(".")
    return getattr(root.get_submodule(owner), last)


@functor(children=(), rebuild=lambda code, children: code)  # the graph has tensors without values
class Code:
    """The part of a model that is no array: one program as a function of torch.

    Attributes:
        program: The program, without arrays.
        targets: Where the module has each array of the program.
        renamed: Floating dtypes of the program -> those that it is computed in.
        graph: The graph.
        source: It as Python code.
        function: It as a function of the module and the arrays among its arguments.
        modules: The functions within it.
        constants: Tensors that it needs beside the arrays of the program.
        changed: The arrays of the module that a call changes.
    """

    def __init__(
        self,
        program: Program,
        added: Mapping[str, Lowering],
        targets: Mapping[str, str],
        renamed: Mapping[str, str],
        mode: str,
        fused: bool,
    ) -> None:
        self._made_of = program, added, targets, renamed, mode, fused
        self._fused = fused
        self.program = program
        self.targets = dict(targets)
        self.renamed = dict(renamed)
        by_kind = {kind: [str(i.target) for i in program.inputs if i.kind == kind]
                   for kind in ("parameter", "buffer", "constant")}  # fmt: skip
        self.parameter_names = by_kind["parameter"]
        self.buffer_names = by_kind["buffer"]
        self.constant_names = by_kind["constant"]
        self.floats = {
            str(i.target): i.dtype
            for i in program.inputs
            if i.kind == "parameter" and i.dtype in _emit.FLOATS
        }
        self.users = [i for i in program.inputs if i.kind in ("user", "static")]
        self.paths = program.input_paths()
        self.labels = [
            label for label, i in zip(program.graph.inputs, program.inputs, strict=True)
            if i.kind in ("user", "static")
        ]  # fmt: skip
        self.dtypes = [
            _types.dtype_of(self.renamed.get(i.dtype, i.dtype)) if i.kind == "user" else None
            for i in self.users
        ]
        self.is_plain = (
            all(i.kind == "user" and not _varies(i) for i in self.users)
            and not program.in_spec.children[1].children
            and all(child.kind == "leaf" for child in program.in_spec.children[0].children)
        )
        self.probes = [
            (
                tuple(self.targets[name].split(".")[:-1]),
                self.targets[name].rpartition(".")[2],
                _types.dtype_of(self.renamed.get(dtype, dtype)),
            )
            for dtype, name in {d: n for n, d in reversed(self.floats.items())}.items()
        ]
        self.wanted = [(i.shape, dtype) for i, dtype in zip(self.users, self.dtypes, strict=True)]
        self.changed = [
            self.targets[str(out.target)]
            for out in program.outputs
            if out.kind in ("buffer", "parameter")
        ]
        lowerings = _table.find_all(
            {op: at for op, at in program.ops().items() if not op.startswith("sym::")}, added
        )
        emitter = self._emitted(lowerings)
        self.graph = emitter.graph
        there = set(self.graph.nodes)
        nodes = [(call, emitter.node_of(call.name)) for call in program.graph.calls
                 if call.op != "sym::getitem"]  # fmt: skip
        self._results = [(call, node) for call, node in nodes if node is not None and node in there]
        for node in self.graph.nodes:  # one for each mode
            if node.op == "get_attr" and node.target in emitter.modules:
                node.target = f"_{mode}{node.target}"
        self.modules = {f"_{mode}{name}": module for name, module in emitter.modules.items()}
        _tidy.compose_permutations(self.graph)
        _tidy.share(self.graph)
        program.out_spec.unflatten(itertools.repeat(None))  # compilers cannot make its classes
        self.constants = _constants.hoisted(self.graph, f"_{mode}_made_")
        _tidy.mark_causal(self.graph, self.constants)
        made = self.graph.python_code("self", verbose=True)
        self.source = made.src
        self.function = _executed(made.src, made.globals, program.name)

    def observed(self, model: TorchModel, leaves: Any) -> Iterator[Observation]:
        """The operations of the program with their results, for those that the graph has."""
        found: dict[fx.Node, Any] = {}

        class Watching(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                found[n] = super().run_node(n)
                return found[n]

        with torch.no_grad():
            Watching(model, graph=self.graph).run(*leaves)
        for call, node in self._results:
            values = found[node] if isinstance(found[node], tuple | list) else (found[node],)
            shown = [
                x.view(_types.dtype_of(dtype)) if _types.is_carried(dtype) else x
                for x, (dtype, _) in zip(values, call.result, strict=False)
            ]
            yield Observation(call.module, call.op, call.source, tuple(shown))

    def fits(self, model: torch.nn.Module) -> bool:
        """Whether the parameters have the dtypes that this is made for: one of each is asked."""
        for owner, last, dtype in self.probes:
            part: Any = model
            for name in owner:
                part = part._modules[name]
            if part._parameters[last].dtype is not dtype:
                return False
        return True

    def __deepcopy__(self, memo: Any) -> Code:
        return self

    def __reduce__(self) -> Any:
        return Code, self._made_of

    def in_dtypes(self, renamed: Mapping[str, str]) -> Code:
        """The same, computed in other floating dtypes."""
        program, added, targets, _, mode, fused = self._made_of
        return Code(program, added, targets, renamed, mode, fused)

    def _emitted(self, lowerings: Mapping[str, Lowering]) -> _emit.Emitter:
        program = self.program
        mode = FakeTensorMode(shape_env=ShapeEnv() if program.symbols else None)
        emitter = _emit.Emitter(lowerings, self.renamed, mode, fused=self._fused)
        fakes = _emit.fakes(program, self.renamed, mode)
        changed = {str(o.target) for o in program.outputs if o.kind in ("buffer", "parameter")}
        for name, given, fake in zip(program.graph.inputs, program.inputs, fakes, strict=True):
            if given.kind == "user":
                emitter.placeholder(name, (given.dtype, given.shape), fake)
        for name, given, fake in zip(program.graph.inputs, program.inputs, fakes, strict=True):
            if given.kind not in ("user", "static"):
                target = self.targets[str(given.target)]
                fixed = given.kind != "parameter"
                kind = given.dtype, given.shape
                value = emitter.attribute(name, target, kind, fake, fixed=fixed)
                if given.target in changed and value.is_floating_point():
                    emitter.replace(name, value.clone())  # else autograd sees the new value
        for name, given in zip(program.graph.inputs, program.inputs, strict=True):
            if given.kind != "static":
                emitter.carry(name)
            for i, size in enumerate(given.shape):
                if isinstance(size, str):
                    emitter.size(size, name, i)
        outputs = emitter.run(program.graph)
        users: list[Any] = []
        written: list[Any] = []
        for ref, out in zip(outputs, program.outputs, strict=True):
            value = emitter.value(ref, seen=True) if _is_array(ref) else ref
            (users if out.kind == "user" else written).append(value)
        emitter.output((tuple(users), tuple(written)))
        return emitter

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The tensors among the arguments, in the order of the inputs.

        Raises:
            ProgramInputError: The program was recorded for others.
        """
        if self.is_plain and not kwargs and len(args) == len(self.wanted):
            for x, (shape, dtype) in zip(args, self.wanted, strict=True):
                if not isinstance(x, torch.Tensor) or x.shape != shape or x.dtype is not dtype:
                    break
            else:
                return args
        return self._checked(self.program.bind(args, kwargs, sparing=True))

    def _checked(self, leaves: list[Any]) -> list[Any]:
        sizes: dict[str, Any] = {}
        found: list[Any] = []
        for x, given, dtype, path, label in zip(
            leaves, self.users, self.dtypes, self.paths, self.labels, strict=True
        ):
            if given.kind == "static":
                if not given.accepts(x):
                    raise ProgramInputError(
                        f"{self.program.name}: {path} was {given.value!r} among the examples and "
                        f"is {x!r} now; convert the model with that"
                    )
                continue
            if x is None and label not in self.program.graph.used():
                found.append(None)  # of an argument that was left out
                continue
            found.append(self._tensor(x, given, dtype, path, sizes))
        problem = self.program.size_problem(sizes)
        if problem:
            raise ProgramInputError(f"{self.program.name}: {problem}")
        return found

    def _tensor(
        self, x: Any, given: Input, dtype: Any, path: str, sizes: dict[str, Any]
    ) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            if isinstance(x, bool | int | float | complex):
                x = torch.tensor(x, dtype=dtype)
            else:
                way = "fmapper.to_torch makes it"
                if "key" in str(getattr(x, "dtype", "")):
                    way = "fmapper.to_torch(jax.random.key_data(key)) makes it of a key"
                raise ProgramInputError(
                    f"{self.program.name}: {path} is a {type(x).__name__}; give a tensor, as {way}"
                )
        problem = self.program.shape_problem(given.shape, tuple(x.shape), sizes)
        if not problem and x.dtype is not dtype:
            if _NARROWED.get(dtype) is x.dtype:
                return _narrowed(x, dtype, path)
            problem = f"{x.dtype} was given, {dtype} is wanted"
        if problem:
            raise ProgramInputError(f"{self.program.name}: {path}: {problem}")
        tensor: torch.Tensor = x
        return tensor

    def output(self, values: tuple[Any, ...]) -> Any:
        """The outputs in the structure that the source gives them."""
        if self.program.out_spec.kind == "leaf":
            return values[0]
        return self.program.out_spec.unflatten(values)


def _readable(source: str) -> str:
    """Code without what only saves memory, and without comments that say nothing."""
    lines: list[str] = []
    for line in source.strip("\n").splitlines():
        if line.strip() == _NOWHERE:
            continue
        kept = _FORGETS.sub("", line).rstrip()
        if kept or (lines and lines[-1]):
            lines.append(kept)
    return "\n".join(lines).rstrip() + "\n"


_NOWHERE = "# No stacktrace found for following nodes"
_FORGETS = re.compile(r";  (?:\w+ = )+None(?=$|  #)")


def _can_train(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _narrowed(x: torch.Tensor, dtype: torch.dtype, path: str) -> torch.Tensor:
    """64-bit integers as the 32 bits that the program was recorded with.

    Raises:
        ProgramInputError: One does not fit. Where values cannot be seen, nobody asks.
    """
    if not torch.compiler.is_compiling() and x.device.type == "cpu" and x.numel():
        limits = torch.iinfo(dtype)
        low, high = x.aminmax()
        if low < limits.min or high > limits.max:
            raise ProgramInputError(f"{path}: an integer does not fit into {dtype}")
    narrow: torch.Tensor = x.to(dtype)
    return narrow


def _used(added: Mapping[str, Lowering], program: Program) -> dict[str, Lowering]:
    """The lowerings of users that a program needs: others are no part of a pickled model."""
    ops = {*program.ops(), *(program.evaluation.ops() if program.evaluation is not None else ())}
    ops |= {op.rpartition(".")[0] for op in ops}
    return {
        op: lowering for op, lowering in added.items() if not op.startswith("lax::") or op in ops
    }


def _varies(given: Input) -> bool:
    return any(isinstance(n, str) for n in given.shape)


def _is_array(output: Any) -> bool:
    return isinstance(output, Ref | Scalar)


def _executed(source: str, names: Mapping[str, Any], model: str) -> Callable[..., Any]:
    """The function that is defined by code, which tracebacks can show."""
    file = f"<fmapper {model} {next(_SERIAL)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    space = dict(names)
    exec(compile(source, file, "exec"), space)
    found: Callable[..., Any] = space["forward"]
    return found


def from_program(
    program: Program, lowerings: Mapping[str, Lowering], *, fused: bool = True
) -> TorchModel:
    """The module for a program.

    Args:
        program: The program.
        lowerings: The user's own.
        fused: Use what torch has whole, as softmax and attention, where the program spells it out.

    Raises:
        ConversionError: It was not recorded from JAX.
        UnsupportedOpsError: Primitives have no lowering; lists all of them.
    """
    return TorchModel(program, lowerings, fused=fused)
