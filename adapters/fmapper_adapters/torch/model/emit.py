"""Writes a program of JAX's primitives as a graph of torch's functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fmapper import ConversionError
from fmapper.programs import Call, DType, Graph, Lowering, Ref, Scalar, Size, size_of
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import FakeTensorMode
from fmapper_adapters.torch.fuse import simplify
from fmapper_adapters.torch.lax import types
from fmapper_adapters.torch.lax.table import TABLE, Avals
from fmapper_adapters.torch.model import bits, control_flow, fx_passes, quoted

_FIX_SIZES = (
    "\nIt may need sizes that do not vary: give such a size as '_' in dynamic_shapes, or pass "
    'dynamic_shapes="auto", which fixes what has to be fixed.'
)
_MOST_STEPS = 20_000  # the most operations per call; unrolled loops need a few thousand
FLOATS = {"float32", "float64", "float16", "bfloat16"}


class Value(fx.Proxy):
    """A tensor that is being recorded; its shape and dtype are known."""

    @property
    def fake(self) -> Any:
        """A tensor without values, of the same shape and dtype."""
        return self.node.meta["val"]

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        dtype: torch.dtype = self.fake.dtype
        return dtype

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.fake.shape)

    def dim(self) -> int:
        """Returns the number of its dimensions."""
        return len(self.fake.shape)

    def is_floating_point(self) -> bool:
        """Returns whether its elements are real floats."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Returns whether its elements are complex numbers."""
        return self.dtype.is_complex

    def view(self, *to: Any) -> Any:
        """Views it in another shape, or its bits as another dtype."""
        if isinstance(to[0], torch.dtype) and not bits.IS_MAPPED:
            return self.tracer.create_proxy("call_function", bits.view_as, (self, *to), {})
        return self.tracer.create_proxy("call_method", "view", (self, *to), {})

    @property
    def shape(self) -> tuple[Any, ...]:
        """Its sizes: ints, or, if they may vary, values that are computed in the graph."""
        return tuple(
            size if isinstance(size, int) else self.size(i)
            for i, size in enumerate(self.fake.shape)
        )

    def numel(self) -> Any:
        """Returns the number of its elements."""
        count: Any = 1
        for size in self.shape:
            count = count * size
        return count


class VaryingSize(fx.Proxy):
    """A size that is computed in the graph.

    As in JAX, it equals another size only if both are always equal, and never equals a number.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VaryingSize):
            return False
        left, right = (size.node.meta.get("val") for size in (self, other))
        return isinstance(left, torch.SymInt) and str(left) == str(right)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(str(self.node.meta.get("val")))


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Creates nodes with the shape and dtype of their results."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, lines: Mapping[str, str]) -> None:
        super().__init__(graph)
        self.mode = mode
        self.lines = lines
        self.place: tuple[str, str] = "", ""
        self.result: Callable[[], Any] = tuple  # results of an operation without a trial run
        self.steps = 0  # operations of the current call

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any) -> fx.Node:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise ConversionError(f"it needs more than {_MOST_STEPS} operations of torch")
        node = super().create_node(kind, target, args, kwargs, *rest)
        path, source = node.meta["place"] = self.place
        if source:
            file, _, line = source.rpartition(":")
            code = quoted.on_one_line(self.lines.get(source, "").strip() or "?")
            where = quoted.on_one_line(path) or "forward"
            if line.isdecimal():
                node.meta["stack_trace"] = (
                    f'File "{quoted.on_one_line(file)}", line {int(line)}, in {where}\n{code}'
                )
        if kind in ("call_function", "call_method"):
            node.meta["val"] = self._value(kind, target, args, kwargs)
        return node

    def _value(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "is_control_flow", False):
            return self.result()
        operands, named = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        if kind == "call_method":
            first, *operands = operands
            target = getattr(first, target)
        if self.mode.shape_env is None:
            with self.mode:
                return target(*operands, **named)
        with self.mode, _private.enable_python_dispatcher():  # C++ kernels read sizes
            value = target(*operands, **named)
        if self.mode.shape_env.replacements:  # the example's size would be fixed
            name = getattr(target, "__name__", target)
            raise TypeError(f"{name} of torch fixes a size that varies")
        return value

    def proxy(self, node: fx.Node) -> fx.Proxy:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return Value(node, self)
        return (VaryingSize if isinstance(value, torch.SymInt) else fx.Proxy)(node, self)


class Emitter:
    """Makes the graph of a program, or of a function within one.

    Args:
        lowerings: The lowerings by operation.
        renamed: Floating dtypes of the program -> the dtypes in which to compute it.
        mode: The mode of the fake tensors, shared by a graph and those within it.
        fused: Whether to use torch's fused functions for operations that the program expands.
        lines: The source code at the lines that calls name.
        native: Whether the program was recorded from torch, so that its operations are called
            directly.
    """

    def __init__(
        self,
        lowerings: Mapping[str, Lowering],
        renamed: Mapping[str, str],
        mode: FakeTensorMode,
        *,
        fused: bool = True,
        lines: Mapping[str, str] = MappingProxyType({}),
        native: bool = False,
    ) -> None:
        self._fused = fused
        self._native = native
        self._lines = lines
        self.graph = fx.Graph()
        self.modules: dict[str, fx.GraphModule] = {}
        self._lowerings = lowerings
        self._renamed = renamed
        self._mode = mode
        self._tracer = _Tracer(self.graph, mode, lines)
        self._env: dict[str, Any] = {}
        self._kinds: dict[str, Any] = {}
        self._roles: dict[str, str] = {}
        self._sizes: dict[str, Any] = {}
        self._anchor: Value | None = None
        self._device: Any = None
        self.is_inner = False  # in a loop, a branch or a function
        self.borders: frozenset[str] = frozenset()  # arguments and results of submodules

    # --- inputs and outputs ---

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype that represents values of a dtype of the program."""
        name = self._renamed.get(name, name)
        return types.dtype_of(name) if self._native else types.carrier_of(name)

    def placeholder(self, name: str, kind: tuple[str, tuple[Any, ...]], fake: Any) -> Any:
        """Returns an input of the graph in the dtype that users pass."""
        node = self._tracer.create_node("placeholder", name, (), {})
        node.target = node.name  # used in code verbatim, so it must be an identifier
        return self._input(name, node, kind, fake)

    def attribute(
        self, name: str, target: str, kind: tuple[str, tuple[Any, ...]], fake: Any, *, fixed: bool
    ) -> Any:
        """Makes a parameter or buffer of the module an input; a `fixed` one has no gradient."""
        self._roles[name] = "fixed" if fixed else "trained"
        node = self._tracer.create_node("get_attr", target, (), {})
        return self._input(name, node, kind, fake)

    def _input(self, name: str, node: fx.Node, kind: Any, fake: Any) -> Any:
        node.meta["val"] = fake
        value = self._tracer.proxy(node)
        self._env[name] = value
        self._kinds[name] = kind
        if self._anchor is None and isinstance(value, Value):
            self._anchor = value
        return value

    def carry(self, name: str) -> None:
        """Converts an input of unsigned integers to the signed ones that carry it."""
        dtype, _ = self._kinds[name]
        if types.is_carried(dtype) and not self._native:
            self._env[name] = self._env[name].view(types.carrier_of(dtype))

    def replace(self, name: str, value: Any) -> None:
        """Replaces an existing input."""
        self._env[name] = value

    def size(self, symbol: str, name: str, dimension: int) -> None:
        """Reads a varying size from an input."""
        if symbol.isidentifier() and symbol not in self._sizes:
            self._sizes[symbol] = self._env[name].size(dimension)

    def value(self, ref: Any, *, seen: bool = False) -> Any:
        """Returns an argument as a tensor.

        Args:
            ref: The argument.
            seen: Whether to return it in the dtype that users see.
        """
        value = self._plain(ref, numbers=False)
        kind = self._kind(ref) if seen else None
        if kind is not None and types.is_carried(kind[0]) and isinstance(value, Value):
            return value.view(types.dtype_of(kind[0]))
        return value

    def nodes_of(self, name: str) -> tuple[fx.Node, ...]:
        """Returns the nodes of the results of an outermost call; empty if they are gone."""
        entry = self._env.get(name)
        values = entry if isinstance(entry, tuple | list) else (entry,)
        nodes = tuple(value.node for value in values if isinstance(value, fx.Proxy))
        return nodes if len(nodes) == len(values) else ()

    def output(self, values: Any) -> None:
        """Ends the graph."""
        nodes = fx.node.map_aggregate(values, lambda v: v.node if isinstance(v, fx.Proxy) else v)
        self.graph.create_node("output", "output", (nodes,), {})
        self.graph.eliminate_dead_code(fx_passes.is_kept)

    # --- for lowerings ---

    @property
    def fused(self) -> bool:
        """Whether fused functions of torch are used."""
        return self._fused

    @property
    def device(self) -> Any:
        """The device of the inputs."""
        if self._anchor is None:
            return None
        if self._device is None:
            self._device = self._anchor.device
        return self._device

    def make(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes a tensor by a function such as `torch.arange`, on the device of the inputs."""
        if self.device is not None:
            kwargs["device"] = self.device
        return self._tracer.create_proxy("call_function", function, args, kwargs)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Emits a function of this library as a single call of the graph."""
        return self._tracer.create_proxy("call_function", function, args, kwargs)

    def call_as(
        self, results: Sequence[tuple[str, tuple[Any, ...]]], function: Any, *args: Any, **kw: Any
    ) -> Any:
        """Emits a function without a trial run: it returns a tuple of these dtypes and shapes."""
        self._tracer.result = functools.partial(self._fake, results)
        return self.call(function, *args, **kw)

    def submodule(self, graph: Graph, kind: str) -> Any:
        """Makes an inner function of the program a module, to be called in the graph.

        Outer sizes that it needs and cannot read from its operands become inputs of the module, and
        are bound to the returned function.
        """
        name = f"_{kind}_{len(self.modules)}"
        self.modules[name], symbols = self._function(graph)
        module = fx.Proxy(self._tracer.create_node("get_attr", name, (), {}), self._tracer)
        if not symbols:
            return module
        result, self._tracer.result = self._tracer.result, lambda: None  # no shape
        try:
            return self.call(control_flow.with_sizes, module, *(self._sizes[s] for s in symbols))
        finally:
            self._tracer.result = result

    def inline(self, graph: Graph, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Emits the calls of an inner function here, and returns its results."""
        env, kinds, place = self._env, self._kinds, self._tracer.place
        self._env = dict(zip(graph.inputs, operands, strict=True))
        kinds_of_inputs = graph.kinds or (None,) * len(graph.inputs)
        self._kinds = dict(zip(graph.inputs, kinds_of_inputs, strict=True))
        try:
            return tuple(self.value(out) for out in self.run(graph))
        finally:
            self._env, self._kinds, self._tracer.place = env, kinds, place

    # --- calls ---

    def run(self, graph: Graph) -> tuple[Any, ...]:
        """Emits the calls of a graph whose inputs exist.

        Returns:
            The outputs, for `value`.

        Raises:
            ConversionError: A lowering fails; the message names the call.
        """
        before = _Current.emitter
        _Current.emitter = self
        kinds = {name: self._kinds[name] for name in graph.inputs if name in self._kinds}
        try:
            moved: Mapping[str, Any] = {}
            if not self._native:
                options: Any = {"fused": self._fused, "borders": self.borders}
                graph, moved = simplify(graph, kinds, self._roles, **options)
            for call in graph.calls:
                self._tracer.place = call.module, call.source
                self._tracer.steps = 0
                self._kinds[call.name] = call.result[0] if len(call.result) == 1 else None
                try:
                    self._env[call.name] = self._result(call)
                except ConversionError as error:
                    if self._tracer.steps <= _MOST_STEPS:
                        raise
                    raise ConversionError(f"{call.op} ({call.name}): {error}") from None
                except Exception as error:
                    at = f" in {call.module}" if call.module else ""
                    source = f" ({call.source})" if call.source else ""
                    why = f"{type(error).__name__}: {error}"
                    if isinstance(error, torch.fx.proxy.TraceError):
                        why = "the computation depends on a size that varies"
                    raise ConversionError(
                        f"{call.op}{at}{source} cannot be lowered to torch: {why}"
                        f"{_FIX_SIZES if self._sizes else ''}"
                    ) from error
            for name, ref in moved.items():
                if isinstance(ref, Ref) and ref.name in self._env:
                    self._env[name] = self._env[ref.name]
            outputs: tuple[Any, ...] = graph.outputs
            return outputs
        finally:
            _Current.emitter = before

    def _result(self, call: Call) -> Any:
        if call.op == "sym::getitem":
            return self._env[call.args[0].name][call.args[1]]
        lowering = self._lowerings.get(call.op) or TABLE.entries[call.op]
        operands = tuple(self._kind(arg) for arg in call.args)
        is_array = [isinstance(arg, Ref) for arg in call.args]
        numbers = lowering.takes_numbers and any(is_array)
        args = [self._plain(arg, numbers=numbers) for arg in call.args]
        kwargs = {key: self._plain(value, numbers=True) for key, value in call.kwargs.items()}
        if lowering.takes_avals:
            kwargs["avals"] = Avals(operands, tuple(call.result))
        self._tracer.result = functools.partial(self._fake, call.result)
        result = lowering.function(*args, **kwargs)
        if not self._native:
            self._check(call, result)
        return result

    def _kind(self, arg: Any) -> Any:
        if isinstance(arg, Ref):
            return self._kinds[arg.name]
        return (arg.dtype, ()) if isinstance(arg, Scalar) else None

    def _plain(self, value: Any, *, numbers: bool) -> Any:
        if isinstance(value, Ref):
            return self._env[value.name]
        if isinstance(value, Scalar):
            number = types.carried_number(value.value, value.dtype)
            if numbers:
                return number
            return self.make(torch.full, (), number, dtype=self.dtype(value.dtype))
        if isinstance(value, DType):
            return value
        if isinstance(value, Size):
            return self._size(value.expression)
        if isinstance(value, tuple):
            return tuple(self._plain(inner, numbers=numbers) for inner in value)
        if isinstance(value, Mapping):
            return {key: self._plain(inner, numbers=numbers) for key, inner in value.items()}
        return value

    def _size(self, expression: str) -> Any:
        size = size_of(expression, self._sizes)
        if size is None:
            raise ConversionError(f"the size {expression} is not known from the inputs")
        return size

    def _fake(self, results: Sequence[tuple[str, tuple[Any, ...]]]) -> Any:
        """Returns fake results of a call from JAX's dtypes and shapes."""
        pairs = [(self.dtype(t), [self._fake_size(n) for n in shape]) for t, shape in results]
        with self._mode:
            return tuple(torch.empty(n, dtype=dtype, device="cpu") for dtype, n in pairs)

    def _fake_size(self, size: Any) -> Any:
        if isinstance(size, int):
            return size
        sizes = self._sizes.items()
        values = {k: v.node.meta["val"] if isinstance(v, fx.Proxy) else v for k, v in sizes}
        return size_of(size, values)

    def _check(self, call: Call, result: Any) -> None:
        """Checks the results of a lowering against JAX's dtypes and shapes."""
        results = result if isinstance(result, tuple | list) else (result,)
        if len(results) != len(call.result):
            raise TypeError(f"gives {len(results)} results instead of {len(call.result)}")
        for value, (dtype, shape) in zip(results, call.result, strict=True):
            if not isinstance(value, Value):
                if isinstance(value, fx.Proxy):
                    continue  # operations with several results track their shapes
                raise TypeError(f"gives a {type(value).__name__}, not a tensor")
            fixed = all(isinstance(n, int) for n in shape)
            if value.dtype is not self.dtype(dtype) or (
                fixed and tuple(value.fake.shape) != tuple(shape)
            ):
                raise TypeError(
                    f"gives {value.dtype} of shape {tuple(value.fake.shape)} "
                    f"instead of {dtype} of shape {tuple(shape)}"
                )

    def _function(self, graph: Graph) -> tuple[fx.GraphModule, list[str]]:
        """Returns an inner graph as a module, with the sizes that it takes before its operands."""
        inner = Emitter(
            self._lowerings, self._renamed, self._mode, fused=self._fused, lines=self._lines,
            native=self._native,
        )  # fmt: skip
        inner.is_inner = True
        seen = {size for _, shape in graph.kinds for size in shape}
        around = {symbol: inner._outer_size(symbol, size) for symbol, size in self._sizes.items()
                  if symbol not in seen}  # fmt: skip
        for name, kind in zip(graph.inputs, graph.kinds, strict=True):
            inner.placeholder(name, kind, self._fake([kind])[0])
            for i, size in enumerate(kind[1]):
                if isinstance(size, str):
                    inner.size(size, name, i)
        inner.output(tuple(inner.value(out) for out in inner.run(graph)))
        root = torch.nn.Module()
        for name, module in inner.modules.items():
            root.add_module(name, module)
        needed = [symbol for symbol, node in around.items() if node.users]
        for symbol in around.keys() - needed:
            inner.graph.erase_node(around[symbol])
        return fx.GraphModule(root, inner.graph), needed

    def _outer_size(self, symbol: str, size: Any) -> fx.Node:
        """Makes a size of the surrounding graph an input of this function."""
        node = self._tracer.create_node("placeholder", f"size_{symbol}", (), {})
        node.target = node.name
        node.meta["val"] = size.node.meta["val"] if isinstance(size, fx.Proxy) else size
        self._sizes[symbol] = self._tracer.proxy(node)
        return node


class _Current:
    """The emitter whose lowerings are being called."""

    emitter: Emitter | None = None


def current() -> Emitter:
    """Returns the emitter whose lowerings run; some create tensors or call functions by it."""
    if _Current.emitter is None:
        raise RuntimeError("a lowering was called outside of a conversion")
    return _Current.emitter
