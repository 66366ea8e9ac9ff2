"""Follows operations on JAX arrays without data: they are traced, and the jaxpr is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive

from fmapper.checkpoints import (
    Later,
    LazyArray,
    Recorder,
    Storage,
    StorageView,
    concatenate,
    put,
    stack,
    take,
)
from fmapper_adapters.jax.record.equations import plain

T = TypeVar("T")

_stand_in: Any = Primitive("fmapper_stand_in")
_stand_in.def_abstract_eval(
    lambda *, number, shape, dtype: jax.core.ShapedArray(shape, np.dtype(dtype))
)
_numbers = itertools.count()  # unique, since JAX caches what it has traced
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_SAME = {"copy", "copy_p", "device_put", "sharding_constraint", "optimization_barrier", "reshard"}
# Operations that only move elements -> the operands with elements; the others are indices.
_MOVES = {
    "gather": (0,),
    "dynamic_slice": (0,),
    "pad": (0, 1),
    "scatter": (0, 2),
    "dynamic_update_slice": (0, 1),
    "tile": (0,),
}
_ARITHMETIC: dict[str, Callable[..., LazyArray]] = {
    "add": Recorder.add,
    "add_any": Recorder.add,
    "sub": Recorder.subtract,
    "mul": Recorder.multiply,
    "div": Recorder.divide,
    "neg": lambda a: Recorder.multiply(a, -1),
}


class JaxRecorder(Recorder):
    """Stands in for arrays with tracers."""

    def __init__(self, recording: Any) -> None:
        super().__init__(recording)
        self._stand_ins: dict[int, LazyArray] = {}
        self._asked: dict[int, tuple[Any, Later]] = {}

    def run(self, body: Callable[[], T]) -> T:
        """Runs a function while JAX traces it."""
        results: list[T] = []

        def trace() -> list[Any]:
            results.append(body())
            return [tracer for tracer, _ in self._asked.values()]

        with self._borders():
            closed = jax.make_jaxpr(trace)()
        values = self._read(closed.jaxpr, closed.consts, [])
        for (_, later), value in zip(self._asked.values(), values, strict=True):
            later.value = _lazy(value)
        return results[0]

    def stand_in(self, array: LazyArray) -> Any:
        """Returns a tracer that stands for a lazy array."""
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        number = next(_numbers)
        self._stand_ins[number] = self.cast(array, dtype)
        return _stand_in.bind(number=number, shape=array.shape, dtype=dtype.name)

    def lazy(self, array: Any) -> LazyArray | None:
        """Returns the lazy array that a tracer stands for, once the function has run."""
        if not isinstance(array, jax.core.Tracer):
            return None
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):  # a random key
            return None
        if id(array) not in self._asked:
            self._asked[id(array)] = array, Later(array.shape, np.dtype(array.dtype))
        return self._asked[id(array)][1]

    def explain(self, error: Exception) -> str | None:
        """Explains that tracers have no values."""
        kinds = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
        if isinstance(error, (*kinds, jax.errors.TracerIntegerConversionError)):
            return "a conversion to a number, truth value or array of NumPy"
        if isinstance(error, ValueError) and "__jax_array__" in str(error):
            return "a function of JAX"
        return None

    # reading a jaxpr

    def _read(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a jaxpr: lazy arrays, and values that depend on none."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in _live_equations(jaxpr):
            given = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
            values.update(zip(eqn.outvars, self._equation(eqn, given), strict=True))
        return [x.val if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]

    def _equation(self, eqn: Any, given: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == _stand_in.name:
            return [self._stand_ins[params["number"]]]
        for key in _INNER:
            inner = params.get(key)
            if inner is not None and (name in ("jit", "pjit") or "call" in name or "remat" in name):
                consts = inner.consts if hasattr(inner, "consts") else ()
                return self._read(getattr(inner, "jaxpr", inner), consts, given)
        if not any(isinstance(x, LazyArray) for x in given):
            output = eqn.primitive.bind(*given, **params)
            return list(output) if eqn.primitive.multiple_results else [output]
        if name in _SAME:
            return given
        if name == "reduce_sum":
            return [self.total(_lazy(given[0]), params["axes"])]
        if name == "unstack":
            return list(_lazy(given[0]).unstack(params["axis"]))
        if name == "split":
            return list(_lazy(given[0]).split(list(params["sizes"]), params["axis"]))
        try:
            return [self._operation(name, eqn, given)]
        except NotImplementedError:
            raise self.refusal(f"{name} of JAX", plain.source(eqn)) from None

    def _operation(self, name: str, eqn: Any, given: list[Any]) -> LazyArray:
        params = eqn.params
        array = _lazy(given[0])
        if name in _ARITHMETIC:
            shape = eqn.outvars[0].aval.shape
            operands = [self.number(_lazy(x)) for x in given]
            return _ARITHMETIC[name](
                *(self.broadcast(x, shape) if isinstance(x, LazyArray) else x for x in operands)
            )
        if name == "convert_element_type":
            return self.cast(array, np.dtype(params["new_dtype"]))
        if name == "transpose":
            return array.transpose(params["permutation"])
        if name in ("reshape", "squeeze", "expand_dims"):
            if name == "reshape" and params["dimensions"] is not None:
                array = array.transpose(params["dimensions"])
            return array.reshape(eqn.outvars[0].aval.shape)
        if name == "broadcast_in_dim":
            sizes = dict(zip(params["broadcast_dimensions"], array.shape, strict=True))
            rows = array.reshape([sizes.get(axis, 1) for axis in range(len(params["shape"]))])
            return self.broadcast(rows, params["shape"])
        if name == "concatenate":
            return concatenate([_lazy(x) for x in given], params["dimension"])
        if name == "stack":
            return stack([_lazy(x) for x in given], params["axis"])
        if name in ("slice", "rev"):
            index = [slice(None)] * array.ndim
            if name == "slice":
                bounds = params["start_indices"], params["limit_indices"]
                index = [*map(slice, *bounds, params["strides"] or [1] * array.ndim)]
            for axis in params.get("dimensions", ()):
                index[axis] = slice(None, None, -1)
            return Storage(array).read(StorageView.of(array.shape, index))
        if name in _MOVES:
            return self._move(eqn, given, _MOVES[name])
        raise NotImplementedError(name)

    def _move(self, eqn: Any, given: list[Any], moving: Sequence[int]) -> LazyArray:
        """Runs an operation on the positions of the elements."""
        arrays = [_lazy(given[at]) for at in moving]
        operands = list(given)
        begin = 0
        for at, array in zip(moving, arrays, strict=True):
            positions = np.arange(begin, begin + array.size, dtype=np.int32)
            operands[at] = jnp.asarray(positions.reshape(array.shape))
            begin += array.size
        if any(isinstance(x, LazyArray) for x in operands):
            raise self.refusal("an index", plain.source(eqn))
        params = {**eqn.params, "fill_value": -1} if "fill_value" in eqn.params else eqn.params
        moved = np.asarray(eqn.primitive.bind(*operands, **params))
        if moved.size and not 0 <= moved.min() <= moved.max() < begin:
            raise self.refusal("an index that is out of bounds", plain.source(eqn))
        if len(arrays) == 1:
            return take(arrays[0], moved)
        base, part = arrays
        landed, first = moved >= base.size, base.size
        if eqn.primitive.name == "pad":
            value = self.number(part)
            if isinstance(value, LazyArray):
                raise self.refusal("padding with an element", plain.source(eqn))
            landed, first = moved < base.size, 0
            base, part = LazyArray.full(moved.shape, value, part.dtype), base
        places = np.full(part.size, -1)
        places[moved[landed] - first] = np.flatnonzero(landed)
        if (places < 0).any():
            raise self.refusal("a place that is written twice, or not at all", plain.source(eqn))
        memory = Storage(base)
        put(memory, places.reshape(part.shape), part)
        return memory.content.reshape(moved.shape)

    # borders to other frameworks

    @contextmanager
    def _borders(self) -> Iterator[None]:
        """Lets functions of JAX take the arrays of other frameworks."""
        functions = {
            (module, name): function
            for module in (jnp, jax.lax)
            for name, function in vars(module).items()
            if callable(function) and not isinstance(function, type) and not name.startswith("_")
        }
        moves = {(jax, name): getattr(jax, name) for name in ("device_put", "device_get")}
        try:
            for (module, name), function in functions.items():
                setattr(module, name, self._with_tracers(function))
            jax.device_put = self._transfer(jax.device_put, self._tracer)
            jax.device_get = self._transfer(jax.device_get, self._host)
            yield
        finally:
            for (module, name), function in {**functions, **moves}.items():
                setattr(module, name, function)

    def _with_tracers(self, function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = jax.tree.map(self._tracer, (args, kwargs))
            return function(*args, **kwargs)

        return call

    def _tracer(self, leaf: Any) -> Any:
        """Returns a tracer for an array without data of another framework."""
        if isinstance(leaf, jax.core.Tracer | jax.Array):
            return leaf
        array = self.recording.lazy(leaf)
        return leaf if array is None else self.stand_in(array)

    def _transfer(self, original: Any, convert: Callable[[Any], Any]) -> Callable[..., Any]:
        def move(tree: Any, *args: Any, **options: Any) -> Any:
            leaves = jax.tree.leaves(tree)
            if all(self.recording.lazy(leaf) is None for leaf in leaves):
                return original(tree, *args, **options)
            return jax.tree.map(convert, tree)

        return move

    def _host(self, leaf: Any) -> Any:
        array = self.recording.lazy(leaf)
        return leaf if array is None else self.recording.recorders["numpy"].stand_in(array)


def _live_equations(jaxpr: Any) -> list[Any]:
    """Returns the equations that the outputs depend on, in order."""
    wanted = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars):
            continue
        wanted.update(x for x in eqn.invars if not isinstance(x, Literal))
        kept.append(eqn)
    return kept[::-1]


def _lazy(value: Any) -> LazyArray:
    return value if isinstance(value, LazyArray) else LazyArray.of(np.asarray(value))
