"""A program as a function of torch: its graph, and the checks of its arguments."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fmapper import ProgramInputError, functor
from fmapper.backends import Observation
from fmapper.programs import Input, Lowering, Program, Ref, Scalar, Size, size_of
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import FakeTensorMode
from fmapper_adapters.torch.aten import calls
from fmapper_adapters.torch.lax import table, types
from fmapper_adapters.torch.model import constants, emit, fx_passes, quoted

_EXAMPLE = 1009  # for varying sizes: unlikely to equal a sum or product of others
_SERIAL = itertools.count()
# Wider dtypes that are accepted for the integers of a program: JAX narrows these itself.
_NARROWED = {torch.int32: torch.int64, torch.uint32: torch.int64}


@contextlib.contextmanager
def without_logs() -> Iterator[None]:
    """Keeps torch from logging failures, which are raised anyway or only fix a size."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


@functor(children=(), rebuild=lambda code, children: code)  # the graph has tensors without values
class Code:
    """The part of a model that is not an array: a program as a function of torch.

    Attributes:
        program: The program, without arrays.
        targets: The path of each array of the program in the module.
        renamed: Floating dtypes of the program -> the dtypes in which it is computed.
        graph: The graph.
        source: The graph as Python code.
        function: The graph as a function of the module and the tensors among its arguments.
        modules: The functions within it.
        constants: Tensors that it needs in addition to the arrays of the program.
        changed: The arrays of the module that a call changes.
        changed_inputs: The inputs that a call changes; `function` returns them last.
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
            if i.kind == "parameter" and i.dtype in emit.FLOATS
        }
        self.users = [i for i in program.inputs if i.kind in ("user", "static")]
        self.paths = program.input_paths()
        self.labels = [
            label for label, i in zip(program.graph.inputs, program.inputs, strict=True)
            if i.kind in ("user", "static")
        ]  # fmt: skip
        self.dtypes = [
            types.dtype_of(self.renamed.get(i.dtype, i.dtype)) if i.kind == "user" else None
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
                types.dtype_of(self.renamed.get(dtype, dtype)),
            )
            for dtype, name in {d: n for n, d in reversed(self.floats.items())}.items()
        ]
        for given in self.users:  # caches expressions, so that compiled calls need not parse them
            for size in given.shape:
                size_of(str(size), {})
        program.size_problem({})
        self.wanted = [(i.shape, dtype) for i, dtype in zip(self.users, self.dtypes, strict=True)]
        self.changed = [
            self.targets[str(out.target)]
            for out in program.outputs
            if out.kind in ("buffer", "parameter")
        ]
        places = {i.target: at for at, i in enumerate(i for i in self.users if i.kind == "user")}
        self.changed_inputs = [places[out.target] for out in program.outputs if out.kind == "input"]
        ops = {op: at for op, at in program.ops().items() if op != "sym::getitem"}
        self._is_native = not any(op.startswith("lax::") for op in ops)
        native = calls.native_lowerings(ops, added) if self._is_native else {}
        lowerings = table.find_all(ops, {**added, **native})
        emitter = self._emit(lowerings)
        self.graph = emitter.graph
        results = [(call, emitter.nodes_of(call.name)) for call in program.graph.calls
                   if call.op != "sym::getitem"]  # fmt: skip
        for node in self.graph.nodes:  # separate names for each mode
            if node.op == "get_attr" and node.target in emitter.modules:
                node.target = f"_{mode}{node.target}"
        self.modules = {f"_{mode}{name}": module for name, module in emitter.modules.items()}
        fx_passes.compose_permutations(self.graph)
        fx_passes.share(self.graph)
        program.out_spec.unflatten(itertools.repeat(None))  # creates its classes
        self.constants = constants.hoist(self.graph, f"_{mode}_made_")
        fx_passes.mark_causal(self.graph, self.constants)
        there = set(self.graph.nodes)
        self._results = [(call, nodes if there.issuperset(nodes) else ())
                         for call, nodes in results]  # fmt: skip
        made = self.graph.python_code("self", verbose=True)
        self.source = made.src
        self.function = _execute(made.src, made.globals, program.name)

    def observe(self, model: torch.nn.Module, leaves: Any) -> Iterator[Observation]:
        """Yields the operations of the program, with their results if the graph computes them."""
        values: dict[fx.Node, Any] = {}

        class Watching(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                values[n] = super().run_node(n)
                return values[n]

        with torch.no_grad():
            Watching(model, graph=self.graph).run(*leaves)
        for call, nodes in self._results:  # without nodes: part of a larger operation
            shown = [
                x.view(types.dtype_of(dtype)) if types.is_carried(dtype) else x
                for x, (dtype, _) in zip((values[n] for n in nodes), call.result, strict=False)
            ]
            yield Observation(
                call.module, call.op, call.source, tuple(shown), call.name, tuple(call.refs())
            )

    def fits(self, model: torch.nn.Module) -> bool:
        """Returns whether the parameters have the dtypes for which the code was made."""
        for owner, last, dtype in self.probes:
            part: Any = model
            for name in owner:
                part = part._modules[name]
            if _private.parameters_of(part)[last].dtype is not dtype:
                return False
        return True

    def __deepcopy__(self, memo: Any) -> Code:
        return self

    def __reduce__(self) -> Any:
        return Code, self._made_of

    def in_dtypes(self, renamed: Mapping[str, str]) -> Code:
        """Returns the code that computes in other floating dtypes."""
        program, added, targets, _, mode, fused = self._made_of
        return Code(program, added, targets, renamed, mode, fused)

    def _emit(self, lowerings: Mapping[str, Lowering]) -> emit.Emitter:
        program = self.program
        varies = program.symbols or self._is_native
        mode = FakeTensorMode(shape_env=ShapeEnv() if varies else None)
        emitter = emit.Emitter(
            lowerings, self.renamed, mode, fused=self._fused, lines=program.lines,
            native=self._is_native,
        )  # fmt: skip
        given_fakes = fakes(program, self.renamed, mode)
        changed = {str(o.target) for o in program.outputs if o.kind in ("buffer", "parameter")}
        for name, given, fake in zip(
            program.graph.inputs, program.inputs, given_fakes, strict=True
        ):
            if given.kind == "user":
                emitter.placeholder(name, (given.dtype, given.shape), fake)
        for name, given, fake in zip(
            program.graph.inputs, program.inputs, given_fakes, strict=True
        ):
            if given.kind not in ("user", "static"):
                target = self.targets[str(given.target)]
                fixed = given.kind != "parameter"
                kind = given.dtype, given.shape
                value = emitter.attribute(name, target, kind, fake, fixed=fixed)
                if given.target in changed and value.is_floating_point():
                    emitter.replace(name, value.clone())  # keeps the old value for autograd
        for name, given in zip(program.graph.inputs, program.inputs, strict=True):
            if given.kind == "static":
                emitter.replace(name, given.value)
            else:
                emitter.carry(name)
            for i, size in enumerate(given.shape):
                if isinstance(size, str):
                    emitter.size(size, name, i)
        with without_logs():
            outputs = emitter.run(program.graph)
        users: list[Any] = []
        written: list[Any] = []
        inputs: list[Any] = []
        to = {"user": users, "input": inputs}
        for ref, out in zip(outputs, program.outputs, strict=True):
            value = emitter.value(ref, seen=True) if _is_array(ref) else ref
            to.get(out.kind, written).append(value)
        emitter.output((tuple(users), (*written, *inputs)))
        return emitter

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the tensors among the arguments, in the order of the inputs.

        Raises:
            ProgramInputError: The program was recorded for other arguments.
        """
        if self.is_plain and not kwargs and len(args) == len(self.wanted):
            for x, (shape, dtype) in zip(args, self.wanted, strict=True):
                if not isinstance(x, torch.Tensor) or x.shape != shape or x.dtype is not dtype:
                    break
            else:
                return args
        return self._check(self.program.bind(args, kwargs, sparing=True))

    def with_statics(self, leaves: list[Any]) -> list[Any]:
        """Checks static leaves, such as the mode, and returns the tensors.

        Raises:
            ProgramInputError: The program was recorded for other tensors.
        """
        return self._check(
            [g.value if g.kind == "static" else x for g, x in zip(self.users, leaves, strict=True)]
        )

    def _check(self, leaves: list[Any]) -> list[Any]:
        sizes: dict[str, Any] = {}
        tensors: list[Any] = []
        for x, given, dtype, path, label in zip(
            leaves, self.users, self.dtypes, self.paths, self.labels, strict=True
        ):
            if given.kind == "static":
                if not given.accepts(x):
                    raise ProgramInputError(
                        f"{self.program.name}: {path} was {given.value!r} in the examples, "
                        f"but is {x!r} now; convert the model with the new value"
                    )
                continue
            if x is None and label not in self.program.graph.uses():
                tensors.append(None)  # an omitted argument
                continue
            tensors.append(self._tensor(x, given, dtype, path, sizes))
        problem = self.program.size_problem(sizes)
        if problem:
            raise ProgramInputError(f"{self.program.name}: {self.program.name_sizes(problem)}")
        return tensors

    def _tensor(
        self, x: Any, given: Input, dtype: Any, path: str, sizes: dict[str, Any]
    ) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            if isinstance(x, bool | int | float | complex):
                x = torch.tensor(x, dtype=dtype)
            else:
                way = "fmapper.to_torch makes it"
                if "key" in str(getattr(x, "dtype", "")):
                    way = "convert a key with fmapper.to_torch(jax.random.key_data(key))"
                raise ProgramInputError(
                    f"{self.program.name}: {path} is a {type(x).__name__}; pass a tensor: {way}"
                )
        problem = self.program.shape_problem(given.shape, tuple(x.shape), sizes)
        if not problem and x.dtype is not dtype:
            if _NARROWED.get(dtype) is x.dtype:
                return _narrow(x, dtype, path)
            problem = f"expected {dtype}, got {x.dtype}"
        if problem:
            why = [text for text in self.program.fixed if text.startswith(f"{path}.shape[")]
            note = f"; {'; '.join(why)}" if why else ""
            problem = self.program.name_sizes(problem)
            raise ProgramInputError(f"{self.program.name}: {path}: {problem}{note}")
        tensor: torch.Tensor = x
        return tensor

    def output(self, values: tuple[Any, ...]) -> Any:
        """Returns the outputs in the structure of the source's."""
        if self.program.out_spec.kind == "leaf":
            return values[0]
        return self.program.out_spec.unflatten(values)


def readable(source: str) -> str:
    """Removes statements that only save memory, and empty comments, from code."""
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


def _narrow(x: torch.Tensor, dtype: torch.dtype, path: str) -> torch.Tensor:
    """Narrows 64-bit integers to the 32 bits that the program was recorded with.

    Raises:
        ProgramInputError: An integer does not fit. Values that cannot be read are not checked.
    """
    if not torch.compiler.is_compiling() and x.device.type == "cpu" and x.numel():
        limits = torch.iinfo(dtype)
        low, high = x.aminmax()
        if low < limits.min or high > limits.max:
            raise ProgramInputError(f"{path}: an integer does not fit into {dtype}")
    narrow: torch.Tensor = x.to(dtype)
    return narrow


def _varies(given: Input) -> bool:
    return any(isinstance(n, str) for n in given.shape)


def _is_array(output: Any) -> bool:
    return isinstance(output, Ref | Scalar | Size)


def _execute(source: str, names: Mapping[str, Any], model: str) -> Callable[..., Any]:
    """Executes code that tracebacks can show, and returns the function that it defines."""
    file = f"<fmapper {quoted.on_one_line(model)[:100]} {next(_SERIAL)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    space = dict(names)
    exec(compile(source, file, "exec"), space)
    forward: Callable[..., Any] = space["forward"]
    weakref.finalize(forward, linecache.cache.pop, file, None)
    return forward


def fakes(program: Program, renamed: Mapping[str, str], mode: FakeTensorMode) -> list[Any]:
    """Returns a tensor without values for each input of a program; None for other inputs.

    Sizes that may vary are symbols of `mode`, one for each name.
    """
    sizes = {s: _symbol(_EXAMPLE * 2**i + 7 * i**2, mode) for i, s in enumerate(program.symbols)}
    tensors: list[Any] = []
    for given in program.inputs:
        if given.kind == "static":
            tensors.append(None)
            continue
        dtype = types.dtype_of(renamed.get(given.dtype, given.dtype))
        shape: Any = [n if isinstance(n, int) else size_of(n, sizes) for n in given.shape]
        with mode:
            tensors.append(torch.empty(shape, dtype=dtype, device="cpu"))
    return tensors


def _symbol(example: int, mode: FakeTensorMode) -> Any:
    """Returns a symbol of `mode` for a size."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    (size,) = mode.from_tensor(torch.empty(example, device="meta"), symbolic_context=context).shape
    return size
