"""A program of JAX's primitives in functions of torch, with the parts that it was recorded with."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fmapper import ConversionError
from fmapper.programs import Call, DType, Graph, Program, Ref, Scalar, Size, map_arguments, refs_in
from fmapper_adapters.torch._private import FakeTensorMode
from fmapper_adapters.torch.aten import calls
from fmapper_adapters.torch.lax import table
from fmapper_adapters.torch.model import compiled, control_flow, emit
from fmapper_adapters.torch.model.compiled import without_logs
from fmapper_adapters.torch.translation import flow, names, tidy

_FEW = 3  # calls of a part without arrays, which becomes its caller's
_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod}


def restate(program: Program) -> tuple[Program, Mapping[str, Callable[..., Any]]]:
    """Returns a program whose calls are functions and methods of torch.

    Returns:
        The program, and the functions of fmapper that it calls, by operation.

    Raises:
        ConversionError: A call has no lowering, or runs functions of its own.
    """
    return _Restated(_with_turned_results(program)).run()


def _with_turned_results(program: Program) -> Program:
    """Returns a program whose parts turn their products themselves.

    `jax.vmap` has the product of a matrix and many vectors the other way round, and turns it
    behind the part that computes it.
    """
    made = {call.name: call for call in program.graph.calls}
    users: dict[str, list[Call]] = {}
    for call in program.graph.walk():
        for name in call.refs():
            users.setdefault(name, []).append(call)
    told: Counter[str] = Counter(refs_in(program.graph.outputs))
    for part in program.parts:
        told.update(refs_in((part.arguments, part.result)))
    moved: dict[str, str] = {}  # calls -> the parts that they become calls of
    parts = []
    for part in program.parts:
        result = part.result.name if isinstance(part.result, Ref) else ""
        used, product = users.get(result, []), made.get(result)
        is_product = (
            product is not None
            and product.op == "lax::dot_general"
            and product.module == part.name
            and isinstance(product.args[0], Ref)
            and product.args[0].name in program.graph.inputs
        )
        if part.name and is_product and len(used) == 1 and told[result] == 1:
            (call,) = used
            if call.op == "lax::transpose" and call.module == part.parent:
                moved[call.name] = part.name
        turned = next((name for name, path in moved.items() if path == part.name), "")
        parts.append(dataclasses.replace(part, result=Ref(turned)) if turned else part)
    if not moved:
        return program
    graph = program.graph
    calls = [
        dataclasses.replace(call, module=moved[call.name]) if call.name in moved else call
        for call in graph.calls
    ]
    return dataclasses.replace(
        program,
        parts=tuple(parts),
        graph=Graph(graph.inputs, calls, graph.outputs, graph.kinds),
    )


def _made_beside(call: Call, like: str) -> Call:
    """Has a call within a function that makes a tensor put it where an argument of that is."""
    if not like or "device" not in call.kwargs:
        return call
    return dataclasses.replace(call, kwargs={**call.kwargs, "device": Ref(like)})


def _owner(program: Program, target: str) -> str:
    """Returns the call of the innermost part that an array is below."""
    owners = [part for part in program.parts if target.startswith(f"{part.path}.") or not part.path]
    return max(owners, key=lambda part: len(part.path)).name if owners else ""


def _place_with_source(node: fx.Node, before: Collection[fx.Node], owner: str) -> None:
    """Has the submodule that computes a value store it, also where that changes its dtype.

    A constant is stored by the submodule that has the array.
    """
    if node in before:
        return
    sources = [one for one in node.all_input_nodes if one.target is not getattr]  # of a device
    if not sources:
        node.meta["place"] = owner, ""
    elif "place" in sources[0].meta:
        node.meta["place"] = sources[0].meta["place"]


def _place_views_of_arrays(graph: fx.Graph) -> None:
    """Has a submodule that alone reads an array as another dtype do that itself."""
    for node in graph.nodes:
        source = node.args[0] if (node.op, node.target) == ("call_method", "view") else None
        places = dict(user.meta.get("place", ("", "")) for user in node.users)
        if isinstance(source, fx.Node) and source.op == "get_attr" and len(places) == 1:
            node.meta["place"] = next(iter(places.items()))


def _write_powers(graph: fx.Graph) -> None:
    """Writes powers of sizes as products, in place: the only arithmetic that sizes have."""
    for node in list(graph.nodes):
        is_size = isinstance(node.meta.get("val"), torch.SymInt)
        if node.target is not operator.pow or not is_size or not isinstance(node.args[1], int):
            continue
        size, times = node.args
        for _ in range(times - 1):
            with graph.inserting_before(node):
                made = graph.call_function(operator.mul, (size, node.args[0]))
            made.meta.update(node.meta, val=_value(size) * _value(node.args[0]))
            size = made
        node.replace_all_uses_with(size)
        graph.erase_node(node)


def _value(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, fx.Node) else size


class _Restated:
    def __init__(self, program: Program) -> None:
        self.program = program
        ops = {op: at for op, at in program.ops().items() if op != "sym::getitem"}
        native = not any(op.startswith("lax::") for op in ops)
        own = calls.native_lowerings(ops, {}) if native else {}
        self.mode = FakeTensorMode(shape_env=ShapeEnv() if program.symbols or native else None)
        self.emitter = emit.Emitter(
            table.find_all(ops, own), {}, self.mode, lines=program.lines, native=native
        )
        self.names: dict[Any, str] = {}
        self.symbols: dict[str, str] = {}
        self.numbers: dict[int, str] = {}
        self.shapes = dict(
            zip(program.graph.inputs, (given.shape for given in program.inputs), strict=True)
        )
        self.functions: dict[str, Callable[..., Any]] = {}

    def run(self) -> tuple[Program, Mapping[str, Callable[..., Any]]]:
        program, emitter = self.program, self.emitter
        self._inputs()
        parts = [(part.arguments, part.result) for part in program.parts]
        there = {*program.graph.inputs, *(call.name for call in program.graph.calls)}
        told = [n for n in dict.fromkeys(refs_in(tuple(parts))) if n in there]
        graph = program.graph
        wider = Graph(graph.inputs, graph.calls, (*graph.outputs, *map(Ref, told)), graph.kinds)
        count = len(graph.outputs)
        emitter.borders = frozenset(told)
        with without_logs():
            outputs = emitter.run(wider)
        before = {*emitter.graph.nodes}
        found = [
            emitter.value(ref, seen=i < count) if isinstance(ref, Ref | Scalar) else ref
            for i, ref in enumerate(outputs)
        ]
        for value, output in zip(found, program.outputs, strict=False):
            if output.kind == "buffer" and isinstance(value, fx.Proxy):
                owner = _owner(program, str(output.target))
                _place_with_source(value.node, before, owner)
        emitter.output(tuple(found))
        _place_views_of_arrays(emitter.graph)
        for value in found[count:]:
            if isinstance(value, fx.Proxy):
                value.node.meta[tidy.BORDER] = True
        _write_powers(emitter.graph)
        tidy.tidy(emitter.graph)
        (last,) = (node for node in emitter.graph.nodes if node.op == "output")
        self._find_fixed()
        self.taken = set(self.program.graph.inputs)
        made = self._calls(emitter.graph, emitter.modules)
        values = [self._plain(value) for value in last.args[0]]
        became = dict(zip(told, values[count:], strict=True))

        def rename(value: Any) -> Any:
            return became.get(value.name, value) if isinstance(value, Ref) else value

        restated = dataclasses.replace(
            program,
            graph=Graph(graph.inputs, made, tuple(values[:count]), graph.kinds),
            parts=tuple(
                dataclasses.replace(
                    part,
                    arguments=map_arguments(part.arguments, rename),
                    result=map_arguments(part.result, rename),
                )
                for part in program.parts
            ),
            evaluation=None,
        )
        kept = set(refs_in(tuple(part.result for part in restated.parts)))
        restated.graph.calls = [self._on_device(call, restated) for call in made]
        living = restated.graph.without_dead_calls(lambda call: call.name in kept)
        living = flow.without_dead_carries(living)
        restated.graph = living.without_dead_calls(lambda call: call.name in kept)
        restated.graph.calls = [flow.open_call(call) for call in restated.graph.calls]
        return restated, self.functions

    def _on_device(self, call: Call, program: Program) -> Call:
        """Has a call that makes a tensor put it where an argument of its submodule is."""
        if "device" not in call.kwargs:
            return call
        kwargs = {key: value for key, value in call.kwargs.items() if key != "device"}
        arrays = {name for node, name in self.names.items()
                  if isinstance(node.meta.get("val"), torch.Tensor)}  # fmt: skip
        parts = {one.name: one for one in program.parts}
        part = parts.get(call.module)
        first = None
        while part is not None and first is None:
            first = next((name for name in refs_in((part.arguments,)) if name in arrays), None)
            is_small = sum(one.module == part.name for one in program.graph.calls) <= _FEW
            part = parts.get(part.parent) if part.name and is_small else None
        if first is not None:
            kwargs["device"] = Ref(first)
        return dataclasses.replace(call, kwargs=kwargs)

    # --- inputs -------------------------------------------------------------------------------

    def _inputs(self) -> None:
        program, emitter = self.program, self.emitter
        fakes = compiled.fakes(program, {}, self.mode)
        for name, given, fake in zip(program.graph.inputs, program.inputs, fakes, strict=True):
            kind = given.dtype, given.shape
            if given.kind == "user":
                value = emitter.placeholder(name, kind, fake)
            elif given.kind == "static":
                emitter.replace(name, given.value)
                continue
            else:
                fixed = given.kind != "parameter"
                value = emitter.attribute(name, str(given.target), kind, fake, fixed=fixed)
            self.names[value.node] = name
            for i, size in enumerate(given.shape):
                if isinstance(size, str) and size.isidentifier():
                    self.symbols.setdefault(str(fake.shape[i].node.expr), size)
        for name, given in zip(program.graph.inputs, program.inputs, strict=True):
            if given.kind != "static":
                emitter.carry(name)
            for i, size in enumerate(given.shape):
                if isinstance(size, str):
                    emitter.size(size, name, i)

    def _find_fixed(self) -> None:
        """Finds the symbols that torch has taken for the numbers that stand for them."""
        for node, name in self.names.items():
            sizes = node.meta["val"].shape
            for size, symbol in zip(sizes, self.shapes.get(name, ()), strict=False):
                if isinstance(symbol, str) and symbol.isidentifier():
                    text = str(size) if isinstance(size, int) else str(size.node.expr)
                    if text.isdigit():
                        self.numbers[int(text)] = symbol

    # --- calls --------------------------------------------------------------------------------

    def _calls(self, graph: Any, modules: Mapping[str, Any]) -> list[Call]:
        """Returns the nodes of a graph as calls.

        Args:
            graph: The graph.
            modules: The functions within it, by name.
        """
        found: list[Call] = []
        for node in graph.nodes:
            is_input = node in self.names or node.op in ("output", "placeholder")
            if is_input or node.target is getattr or node.target in modules:
                continue
            if node.op not in ("call_function", "call_method"):
                raise ConversionError(f"{self.program.name}: {node.target} has no source yet")
            name = self._name(node)
            given = [one for one in node.all_input_nodes if one.op == "get_attr"]
            inner = [self._inner(modules[one.target]) for one in given if one.target in modules]
            found.append(self._call(node, name, inner))
        return found

    def _name(self, node: Any) -> str:
        name = str(node.name)
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        self.names[node] = name
        return name

    def _inner(self, module: Any) -> Graph:
        """Returns a function within the program as a graph."""
        tidy.tidy(module.graph)
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        names = tuple(map(self._name, inputs))
        calls = self._calls(module.graph, dict(module.named_children()))
        used = [n for call in calls for n in refs_in((call.args, call.kwargs)) if n in names]
        like = next(iter(used), names[0] if names else "")
        calls = [_made_beside(call, like) for call in calls]
        (last,) = (node for node in module.graph.nodes if node.op == "output")
        kinds = tuple(self._kind(node.meta["val"]) for node in inputs)
        return Graph(names, calls, self._plain(tuple(last.args[0])), kinds)

    def _call(self, node: Any, name: str, inner: list[Graph]) -> Call:
        value = node.meta.get("val")
        module, source = node.meta.get("place", ("", ""))
        is_several = isinstance(value, tuple | list)
        result = tuple(self._kind(one) for one in (value if is_several else [value]))
        if is_several and len(result) == 1:
            result = (("", ()),)  # of a tuple of one, which is not an array
        if flow.is_flow(node.target):
            found = flow.call_of_flow(node, self._plain, inner)
            return dataclasses.replace(
                found, name=name, module=module, source=source, result=result
            )
        if node.target is control_flow.with_sizes:
            raise ConversionError(
                f"{module or self.program.name} ({source}): a loop or a branch that computes with "
                "a size of what is around it has no source while that size varies: give the size "
                "as '_' in dynamic_shapes"
            )
        if inner:
            raise ConversionError(f"{module or self.program.name}: a function has no source yet")
        args, kwargs = self._plain(tuple(node.args)), self._plain(dict(node.kwargs))
        op = self._op(node, args)
        return Call(name, op, args, kwargs, module, source, result)

    def _op(self, node: Any, args: Any) -> str:
        if node.op == "call_method":
            is_size = node.target == "size" and len(args) == 2
            return "torch::sym_size" if is_size else f"tensor::{node.target}"
        target: Any = node.target
        if isinstance(node.meta.get("val"), torch.SymInt | int) and target in _ARITHMETIC:
            return f"sym::{target.__name__}"
        if target is operator.getitem and isinstance(args[1], int):
            before = node.args[0].meta.get("val")
            if isinstance(before, tuple | list):
                return "sym::getitem"
        public = names.public_name(target)
        if public:
            return f"torch::{public}"
        op = f"fmapper::{target.__module__}:{target.__qualname__}"
        self.functions[op] = target
        return op

    def _plain(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value.target is getattr:
                return None
            return Ref(self.names[value])
        if isinstance(value, torch.dtype):
            return DType(str(value).removeprefix("torch."))
        if isinstance(value, tuple | list):
            return tuple(self._plain(one) for one in value)
        if isinstance(value, slice):
            return {
                "slice": (
                    self._plain(value.start),
                    self._plain(value.stop),
                    self._plain(value.step),
                )
            }
        if isinstance(value, Mapping):
            return {key: self._plain(one) for key, one in value.items()}
        if type(value) is int and value in self.numbers:
            return Size(self.numbers[value])
        return value

    def _kind(self, value: Any) -> tuple[str, tuple[int | str, ...]]:
        if not isinstance(value, torch.Tensor):
            return "", ()
        shape = tuple(
            self._fixed_size(n) if isinstance(n, int) else self._size(n) for n in value.shape
        )
        return str(value.dtype).removeprefix("torch."), shape

    def _fixed_size(self, size: int) -> int | str:
        """Returns a size; the symbol, if torch took the number that stands for it as fixed."""
        for number, symbol in self.numbers.items():
            if size and size % number == 0:
                return symbol if size == number else f"{size // number}*{symbol}"
        return size

    def _size(self, size: Any) -> int | str:
        text = str(size.node.expr)
        text = re.sub(r"\b[a-z]\d+\b", lambda m: self.symbols.get(m[0], m[0]), text)
        return self._fixed_size(int(text)) if text.isdigit() else text
