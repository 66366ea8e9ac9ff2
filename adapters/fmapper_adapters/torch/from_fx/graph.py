"""Reads an exported program as a program of plain data."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fmapper import ConversionError
from fmapper.programs import (
    Call,
    DType,
    Graph,
    Input,
    Output,
    Program,
    Ref,
    refs_in,
)
from fmapper.programs.reading import statements_at
from fmapper_adapters.torch import _private
from fmapper_adapters.torch.from_fx import guards, signature_of
from fmapper_adapters.torch.from_fx.size_facts import SizeFacts
from fmapper_adapters.torch.from_fx.treespec import tree_spec
from fmapper_adapters.torch.from_fx.with_parts import with_parts
from fmapper_adapters.torch.meshes import tp_plan
from fmapper_adapters.torch.passes import order
from fmapper_adapters.torch.passes.backward import fold_backward
from fmapper_adapters.torch.passes.one_form import IN_PLACE
from fmapper_adapters.torch.pretrained.origin import origin_of
from fmapper_adapters.torch.record.lines import line_of_stack
from fmapper_adapters.torch.record.parts import PartCalls, with_methods
from fmapper_adapters.torch.record.patches import recurrent

# Arguments and checks that concern only the device or the recording.
_DROPPED_KWARGS = frozenset({"device", "layout", "pin_memory", "non_blocking", "memory_format"})
_CHECKS = frozenset({"aten::_assert_tensor_metadata", "aten::sym_constrain_range"})
_EFFECTS = ("aten::_assert", "aten::_print")
_WITH_EFFECTS = "higher_order::with_effects"
# Effects that are dropped: a failed factorisation gives NaN or infinity (see `decompositions`).
_UNCHECKED = frozenset({"aten::_linalg_check_errors.default"})
_ALIASES = re.compile(r"^L(\['self'\]|__self__)\.?")


def program(
    module: torch.nn.Module,
    exported: torch.export.ExportedProgram,
    other_forms: Collection[str] = (),
    *,
    train: bool,
    whole: Collection[str] = (),
    calls: PartCalls | None = None,
) -> Program:
    """Translates the decomposed graph of `torch.export` to a program.

    Args:
        module: The module.
        exported: The recording.
        other_forms: The names of its operations that are variants of others.
        train: Whether the module was in training mode.
        whole: The operations that the target lowers whole.
        calls: The recorded calls of submodules; None to ignore them.

    Raises:
        ConversionError: The graph contains something that is not plain data.
    """
    signature = exported.graph_signature
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    labels = signature_of.own_inputs(signature, nodes)
    parts = () if calls is None else calls.parts(labels, exported.graph)
    kept = None if calls is None else {*refs_in(tuple(part.result for part in parts))}
    reader = _GraphReader(exported.graph_module, whole, kept)
    graph = _without_tokens(reader.graph(), signature)
    names = _Names(module, exported)
    inputs = tuple(
        names.input(spec, node, at)
        for spec, node, at in _numbered_inputs(signature.input_specs, nodes)
        if spec.kind.name != "TOKEN"
    )
    outputs = []
    users = 0
    for spec in signature.output_specs:
        kind = spec.kind.name
        if kind == "TOKEN":
            continue
        if kind == "USER_OUTPUT":
            outputs.append(Output("user", users))
            users += 1
        elif kind == "BUFFER_MUTATION":
            outputs.append(Output("buffer", names.canonical(spec.target or "")))
        elif kind == "PARAMETER_MUTATION":
            outputs.append(Output("parameter", names.canonical(spec.target or "")))
        elif kind == "USER_INPUT_MUTATION":
            at = graph.inputs.index(str(spec.target))
            outputs.append(Output("input", inputs[at].target))
        else:
            raise ConversionError(
                f"{type(module).__name__}: outputs of kind {kind} are not supported"
            )
    spec = exported.call_spec
    recorded = Program(
        graph=graph,
        inputs=inputs,
        outputs=tuple(outputs),
        in_spec=tree_spec(spec.in_spec),
        out_spec=tree_spec(spec.out_spec),
        signature=signature_of.parameters(module),
        parameters=names.parameters,
        buffers=names.buffers,
        constants=names.constants,
        aliases=names.aliases,
        frozen=tuple(n for n, p in names.parameters.items() if not p.requires_grad),
        transient=names.transient,
        variable_types=_from_parts(module, names, "_variable_types"),
        few_bits=_from_parts(module, names, "_few_bits"),
        axes={names.canonical(n): axes for n, axes in tp_plan.axes_below(module)},
        symbols=signature_of.symbols(exported),
        default_dtype=_name(torch.get_default_dtype()),
        train=train,
        name=type(module).__name__,
        origin=origin_of(module),
    )
    given = [entry for entry in inputs if entry.kind in ("user", "static")]
    paths = recorded.input_paths()
    recorded.guards, recorded.fixed = guards.find_guards(exported, given, paths)
    recorded.ones_like = signature_of.ones_like(module, dict(zip(paths, given, strict=True)))
    facts = SizeFacts.read(exported.graph_module)
    run = functools.partial(order.run, other_forms=other_forms, facts=facts)
    if calls is None:
        return run(recorded)
    recorded.parts, recorded.types, recorded.first_paths = parts, calls.types, calls.first_paths
    recorded.lacks_training = "" if train else calls.left_out
    recorded = with_methods(recorded, exported.graph)
    sources = {call.source for call in recorded.graph.walk()} | {
        part.source for part in recorded.parts
    }
    recorded.lines = statements_at(sources)
    return with_parts(recorded, run)


def _from_parts(module: torch.nn.Module, names: _Names, attribute: str) -> dict[str, str]:
    """Collects an attribute that submodules converted earlier have about their arrays, by name."""
    facts = {}
    for path, part in module.named_modules():
        for name, kind in getattr(part, attribute, {}).items():
            full = names.canonical(f"{path}.{name}" if path else name)
            if full in names.parameters or full in names.buffers:
                facts[full] = kind
    return facts


def with_integers_as_buffers(program: Program) -> Program:
    """Turns the integers of quantised weights into buffers, which are not trained."""
    integers = {
        name
        for name, tensor in program.parameters.items()
        if not (tensor.is_floating_point() or tensor.is_complex())
    }
    parameters = {n: p for n, p in program.parameters.items() if n not in integers}
    moved = {n: p.detach() for n, p in program.parameters.items() if n in integers}
    return dataclasses.replace(
        program,
        inputs=tuple(
            dataclasses.replace(i, kind="buffer") if i.target in integers else i
            for i in program.inputs
        ),
        parameters=parameters,
        buffers={**program.buffers, **moved},
        frozen=tuple(name for name in program.frozen if name not in integers),
    )


def _without_tokens(graph: Graph, signature: Any) -> Graph:
    """Removes the tokens that order effects from a graph: its calls are in order anyway."""
    kinds = [spec.kind.name for spec in signature.input_specs]
    inputs = [n for n, kind in zip(graph.inputs, kinds, strict=True) if kind != "TOKEN"]
    kinds = [spec.kind.name for spec in signature.output_specs]
    outputs = [o for o, kind in zip(graph.outputs, kinds, strict=True) if kind != "TOKEN"]
    if len(outputs) == len(graph.outputs):
        return graph
    return Graph(tuple(inputs), graph.calls, tuple(outputs))


def _numbered_inputs(specs: Any, nodes: list[Any]) -> Any:
    """Yields each input with its node and its position among the user's flat inputs."""
    users = 0
    for spec, node in zip(specs, nodes, strict=True):
        yield spec, node, users
        users += spec.kind.name == "USER_INPUT"


class _Names:
    """The arrays of a module by name, each once, and the meaning of each input of the graph."""

    def __init__(self, module: torch.nn.Module, exported: torch.export.ExportedProgram) -> None:
        self.aliases: dict[str, str] = {}
        self.parameters = self._each_once(module.named_parameters(remove_duplicate=False))
        self.buffers = self._each_once(signature_of.buffers(module))
        self.constants: dict[str, Any] = {}
        persistent = {*module.state_dict(keep_vars=True)}
        self.transient = tuple(name for name in self.buffers if name not in persistent)
        self._exported = exported

    def _each_once(self, pairs: Any) -> dict[str, Any]:
        arrays: dict[str, Any] = {}
        first: dict[int, str] = {}
        for name, array in pairs:
            if id(array) in first:
                self.aliases[name] = first[id(array)]
            else:
                first[id(array)] = name
                arrays[name] = array
        return arrays

    def canonical(self, name: str) -> str:
        return self.aliases.get(name, name)

    def input(self, spec: Any, node: Any, position: int) -> Input:
        kind = spec.kind.name
        value = node.meta.get("val")
        if kind == "PARAMETER":
            return self._array("parameter", self.canonical(spec.target), value, self.parameters)
        if kind == "BUFFER":
            return self._array("buffer", self.canonical(spec.target), value, self.buffers)
        if kind == "CONSTANT_TENSOR":
            self.constants[spec.target] = self._exported.constants[spec.target]
            return self._array("constant", spec.target, value, self.constants)
        if kind == "USER_INPUT":
            if isinstance(value, torch.Tensor):
                return Input("user", position, _name(value.dtype), _shape(value.shape))
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                dtype = {"SymInt": "int", "SymFloat": "float"}.get(type(value).__name__, "boolean")
                return Input("user", position, dtype, (), str(value))
            return Input("static", position, "", (), getattr(spec.arg, "value", value))
        raise ConversionError(
            f"{node.name}: an input of kind {kind} ({spec.target}) cannot leave torch. Keep "
            "objects that are not tensors out of the forward."
        )

    def _array(self, kind: str, name: str, value: Any, arrays: Mapping[str, Any]) -> Input:
        if name not in arrays:
            # An array that is not in the state dict, such as a plain attribute.
            self.constants[name] = self._exported.state_dict.get(
                name, self._exported.constants.get(name)
            )
            return Input("constant", name, _name(value.dtype), _shape(value.shape))
        return Input(kind, name, _name(value.dtype), _shape(value.shape))


class _GraphReader:
    """Reads one graph; inner graphs by further readers."""

    def __init__(
        self,
        owner: torch.fx.GraphModule,
        whole: Collection[str],
        kept: Collection[str] | None = None,
    ) -> None:
        self._owner = owner
        self._whole = whole
        self._by_call = kept is not None  # whether to distinguish the calls of submodules
        self._kept = kept or ()
        self._inner: dict[str, Graph | Ref] = {}
        self._effects: dict[str, int] = {}  # name -> the number of its results

    def graph(self) -> Graph:
        inputs: list[str] = []
        calls: list[Call] = []
        outputs: Any = ()
        for node in self._owner.graph.nodes:
            if node.op == "placeholder":
                inputs.append(node.name)
            elif node.op == "get_attr":
                self._read_attribute(node)
            elif node.op == "output":
                outputs = self._plain(node.args[0], node)
            elif node.op == "call_function":
                op = op_name(node, self._whole)
                if op == _WITH_EFFECTS:
                    calls += self._effect(node)
                elif self._is_behind(node):
                    calls += self._behind(node)
                elif op.startswith("aten::_assert") and _is_of_storage(node):
                    continue  # programs have no storage offsets
                elif op.rpartition(".")[0] not in _CHECKS and op not in _CHECKS:
                    calls.append(self._call(node, op))
            elif "_guards" not in str(node.target):
                raise ConversionError(f"{node.name}: a call of {node.target} was left in the graph")
        folded = fold_backward(Graph(tuple(inputs), calls, outputs))
        return folded.without_dead_calls(
            lambda call: (
                call.op.startswith(_EFFECTS)
                or call.name in self._effects
                or call.op in IN_PLACE
                or call.name in self._kept
            )
        )

    def _effect(self, node: torch.fx.Node) -> list[Call]:
        """Returns the operation inside `with_effects(token, operation, ...)`."""
        target: Any = node.args[1]
        value: Any = node.meta.get("val") or ()
        results = value[1:] if isinstance(value, list | tuple) else ()
        if isinstance(target, _OVERLOAD):
            op = name_of_overload(target)
            self._effects[node.name] = len(_private.schema_of(target).returns)
        else:
            op = f"higher_order::{target}"
            self._effects[node.name] = len(results)
        if op in _UNCHECKED:
            return []
        return [self._call(node, op, node.args[2:], results)]

    def _behind(self, node: torch.fx.Node) -> list[Call]:
        """Returns the call that reads a result of `with_effects`, without its token."""
        call: Any = node.args[0]
        index: Any = node.args[1]
        if index == 0:
            return []  # the token
        if self._effects[call.name] == 1:
            self._inner[node.name] = Ref(call.name)
            return []
        return [self._call(node, "sym::getitem", (call, index - 1))]

    def _is_behind(self, node: torch.fx.Node) -> bool:
        source: Any = node.args[0] if node.args else None
        return node.target is operator.getitem and getattr(source, "name", "") in self._effects

    def _read_attribute(self, node: torch.fx.Node) -> None:
        value = operator.attrgetter(str(node.target))(self._owner)
        if not isinstance(value, torch.fx.GraphModule):
            raise ConversionError(
                f"{node.name}: {node.target} is a {type(value).__name__} inside an inner "
                f"function; pass it to that function as an argument"
            )
        self._inner[node.name] = _GraphReader(
            value, self._whole, () if self._by_call else None
        ).graph()

    def _call(self, node: torch.fx.Node, op: str, given: Any = None, results: Any = None) -> Call:
        args = self._plain(node.args if given is None else given, node)
        kwargs = {
            key: self._plain(value, node)
            for key, value in node.kwargs.items()
            if key not in _DROPPED_KWARGS
        }
        path, source = place(node, by_call=self._by_call)
        return Call(
            node.name,
            op,
            args,
            kwargs,
            path,
            source,
            _results(node.meta.get("val") if results is None else results, _is_sized(node)),
        )

    def _plain(self, value: Any, node: torch.fx.Node) -> Any:
        if isinstance(value, torch.fx.Node):
            return self._inner.get(value.name) or Ref(value.name)
        if value is None or isinstance(value, bool | int | float | complex | str):
            return value
        if isinstance(value, list | tuple):
            return tuple(self._plain(inner, node) for inner in value)
        if isinstance(value, Mapping):
            return {key: self._plain(inner, node) for key, inner in value.items()}
        if isinstance(value, slice):
            return tuple(self._plain(v, node) for v in (value.start, value.stop, value.step))
        if value is torch.complex32:
            raise ConversionError(f"{node.name} ({node.target}): only torch has complex32")
        if isinstance(value, torch.dtype):
            return DType(_name(value))
        if isinstance(value, torch.device | torch.layout | torch.memory_format | torch.Generator):
            return None
        raise ConversionError(
            f"{node.name} ({node.target}): an argument of type {type(value).__name__} cannot be "
            f"converted"
        )


def _is_of_storage(node: torch.fx.Node) -> bool:
    """Returns whether an assertion is about a storage offset."""
    todo = list(node.all_input_nodes)
    while todo:
        source = todo.pop()
        if source.target is torch.ops.aten.sym_storage_offset.default:
            return True
        if not isinstance(source.meta.get("val"), torch.Tensor):
            todo += source.all_input_nodes
    return False


def place(node: torch.fx.Node, *, by_call: bool = False) -> tuple[str, str]:
    """Returns the module path of a node, and its innermost line outside of torch.

    With `by_call`, the second call of a module is `path@1`.
    """
    stack = node.meta.get("nn_module_stack") or {}
    key = next(reversed(stack), "")
    path = stack[key][0] if stack else ""
    if by_call and stack:
        path = _private.name_of_place(key, path)[0]
    source = _private.line_of_node(node, "method") or line_of_stack(node.meta.get("stack_trace"))
    return _ALIASES.sub("", path), source or _private.line_of_node(node)


# The classes of targets of nodes, which have no public names.
_OVERLOAD = type(torch.ops.aten.add.Tensor)
_HIGHER_ORDER = type(torch.ops.higher_order.cond).__mro__[-2]


def op_name(node: torch.fx.Node, whole: Collection[str]) -> str:
    """Returns the operation name of a node.

    Operations that contain dropout draw random numbers only if it is on. Then they have a different
    name, if the target lowers that.
    """
    target = recurrent.SAME.get(node.target, node.target)
    if isinstance(target, _OVERLOAD):
        _, name, overload = str(target).split(".")
        drawing = f"fmapper::{name}_with_dropout"
        is_lowered = drawing in whole or f"{drawing}.{overload}" in whole
        if (is_lowered or target.namespace == "fmapper") and _drops(node, target):
            return f"{drawing}.{overload}"
        return name_of_overload(target)
    name = getattr(target, "__name__", str(target))
    if isinstance(target, _HIGHER_ORDER):
        return f"higher_order::{name}"
    module = getattr(target, "__module__", "") or ""
    if module in ("_operator", "operator", "math", "builtins") or module.startswith("torch"):
        return f"sym::{name}"
    raise ConversionError(f"{node.name}: a call of {module}.{name} was left in the graph")


def name_of_overload(overload: Any) -> str:
    """Returns the operation name of an overload."""
    namespace, name, rest = str(overload).split(".")
    return f"{namespace}::{name}.{rest}"


def _drops(node: torch.fx.Node, overload: Any) -> bool:
    """Returns whether an operation's dropout is on, so that it draws numbers."""
    names = [argument.name for argument in _private.schema_of(overload).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    rate: Any = given.get("dropout_p", given.get("dropout", given.get("training", 0.0)))
    layers: Any = given.get("num_layers", given.get("layers", 2))
    return bool(rate) and given.get("train", True) is not False and layers != 1


def _is_sized(node: torch.fx.Node) -> bool:
    """Returns whether the size of a result depends on values, even if asserted."""
    if node.target is torch.ops.aten.index.Tensor:
        indices: Any = node.args[1]
        dtypes = [i.meta["val"].dtype for i in indices if isinstance(i, torch.fx.Node)]
        return torch.bool in dtypes or torch.uint8 in dtypes
    packet = getattr(node.target, "overloadpacket", None)
    if packet is torch.ops.aten.repeat_interleave:
        repeats = node.args[:2][-1]
        by_array = isinstance(repeats, torch.fx.Node) and torch.is_tensor(repeats.meta["val"])
        return by_array and node.kwargs.get("output_size") is None
    if packet is None or packet is torch.ops.aten.select or not isinstance(node.target, _OVERLOAD):
        return False
    pairs = zip(_private.schema_of(node.target).arguments, node.args, strict=False)
    return any(
        str(argument.real_type).replace("Optional", "").strip("[]") in ("int", "List[int")
        and any(_is_read(item) for item in (value if isinstance(value, list | tuple) else [value]))
        for argument, value in pairs
    )


def _is_read(value: Any) -> bool:
    """Returns whether a number comes from an array."""
    number = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    return isinstance(number, torch.SymInt) and bool(free_unbacked_symbols(number))


def _results(value: Any, sized: bool = False) -> tuple[tuple[str, tuple[int | str, ...]], ...]:
    if isinstance(value, torch.Tensor):
        shape = _shape(value.shape)
        return ((_name(value.dtype), ("u0", *shape[1:]) if sized else shape),)
    if isinstance(value, list | tuple):
        return tuple(result for inner in value for result in _results(inner))
    return ()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(shape: Any) -> tuple[int | str, ...]:
    sizes = (size if isinstance(size, int) else str(size) for size in shape)
    # a symbol whose value has been fixed
    return tuple(int(s) if isinstance(s, str) and s.isdigit() else s for s in sizes)
