"""Runs a model of JAX operation by operation, or in float64, to compare it with another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import to_jax
from fmapper.backends import Observation
from fmapper.programs import Program, Ref, Scalar
from fmapper_adapters.jax import _private, loops, vector_choices
from fmapper_adapters.jax.arrays import few_bits, prng_keys
from fmapper_adapters.jax.record import parts, trace
from fmapper_adapters.jax.record.equations import custom_derivatives
from fmapper_adapters.jax.trials.precision import double_precision


def operations(
    source: trace.Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Observation]:
    """Yields the calls of the program of a model, each computed by JAX, in order."""
    with parts.record_calls(parts.PartScopes()):
        program, equations = trace.record_with_equations(source, args, kwargs)
    leaves = iter(jax.tree.leaves((tuple(args), dict(kwargs)), is_leaf=lambda x: x is None))
    held = {
        "parameter": program.parameters,
        "buffer": program.buffers,
        "constant": program.constants,
    }
    env: dict[str, Any] = {}
    for name, given in zip(program.graph.inputs, program.inputs, strict=True):
        if given.kind in held:
            env[name] = to_jax(held[given.kind][str(given.target)])
            path = "" if given.kind == "constant" else str(given.target)
            yield Observation(path, "weight", "", (env[name],), name)
            continue
        leaf = next(leaves)
        env[name] = _words(to_jax(leaf)) if given.kind == "user" else leaf
        if given.kind == "user":
            yield Observation("", "input", "", (env[name],), name)
    whole: dict[str, str] = {}  # an element of several results -> the name of the operation
    for call in program.graph.calls:
        if call.op == "sym::getitem":
            env[call.name] = env[call.args[0].name][call.args[1]]
            whole[call.name] = call.args[0].name
            continue
        equation = equations[call.name]
        taken = _operands(equation, [_value(arg, env) for arg in call.args])
        operands = tuple(whole.get(name, name) for name in call.refs())
        steps = loops.Steps(call.name, _words)
        refs = [whole.get(r.name, r.name) if isinstance(r, Ref) else "" for r in call.args]
        named = zip(taken, refs[len(refs) - len(taken) :], strict=True)
        values = steps.run(equation, [*named], call.module, call.source)
        if values is None:
            values = [(x, "") for x in custom_derivatives.results_of(equation)(taken)]
        else:
            yield from steps.seen
            operands = tuple(dict.fromkeys(name for _, name in values if name))
        results = env[call.name] = [_words(x) for x, _ in values]
        path, scope = parts.part_in(call.module), parts.scope_in(call.module)
        of_call = tuple(results), call.name, operands
        yield Observation(path, call.op, call.source, *of_call, scope=scope)


def outline(program: Program) -> Iterator[Observation]:
    """Yields the calls of a program without values."""
    for name, given in zip(program.graph.inputs, program.inputs, strict=True):
        if given.kind in ("parameter", "buffer", "user"):
            kind = "input" if given.kind == "user" else "weight"
            yield Observation(str(given.target), kind, "", (), name)
    for call in program.graph.calls:
        yield Observation(call.module, call.op, call.source, (), call.name, tuple(call.refs()))


def in_double(
    source: trace.Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Observation]:
    """Returns the operations of a model in double precision."""
    with double_precision():
        held = (dict(source.parameters), dict(source.buffers))
        parameters, buffers = jax.tree.map(double, to_jax(held, strict=False))
        wide = dataclasses.replace(source, parameters=parameters, buffers=buffers)
        given = jax.tree.map(double, to_jax((args, dict(kwargs)), strict=False))
        return list(operations(wide, *given))


def compile_model(
    source: trace.Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """Returns a model as a function of arguments like these, behind `jax.jit`."""
    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    is_array = [hasattr(leaf, "dtype") for leaf in leaves]

    @jax.jit
    def run(params: Any, buffers: Any, arrays: list[Any]) -> Any:
        rest = iter(arrays)
        full = [next(rest) if a else leaf for leaf, a in zip(leaves, is_array, strict=True)]
        own_args, own_kwargs = jax.tree.unflatten(tree, full)
        return source.call(params, buffers, *own_args, **own_kwargs)[0]

    arrays = to_jax((source.parameters, source.buffers))

    def call(given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Calls the model with its mode set."""
        flat = jax.tree.leaves((given, dict(named)))
        return run(*arrays, [leaf for leaf in flat if hasattr(leaf, "dtype")])

    return call


def outcome(
    source: trace.Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., tuple[list[Any], dict[str, Any]]]:
    """Returns a call of a model as XLA compiles it, with little effort; see `Adapter.outcome`."""
    leaves, tree = jax.tree.flatten((args, dict(kwargs)), is_leaf=lambda x: x is None)
    static = [not (hasattr(x, "shape") and hasattr(x, "dtype")) for x in leaves]
    traced = trace.Traced(source, leaves, tree, static)
    given = [to_jax(leaf) for leaf, fixed in zip(leaves, static, strict=True) if not fixed]
    arrays = [*map(to_jax, (*source.parameters.values(), *source.buffers.values())), *given]
    run = jax.jit(traced.flat).lower(*arrays).compile(_QUICK)

    def call(
        off: float, *, compiled: bool = True, turned: bool = False
    ) -> tuple[list[Any], dict[str, Any]]:
        generator = np.random.default_rng(0)
        way = vector_choices.turn(traced.flat) if turned else run if compiled else traced.flat
        returned, changed = way(*(_shake(x, off, generator) for x in arrays))
        rest = iter(returned)
        outputs = [leaf if fixed else _words(next(rest)) for leaf, fixed in traced.outputs]
        return outputs, dict(zip(traced.changed, map(_words, changed), strict=True))

    return call


# For programs that run once.
_QUICK: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def _shake(x: Any, off: float, generator: np.random.Generator) -> Any:
    if not off or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    noise = jnp.asarray(generator.uniform(-off, off, x.shape), x.real.dtype)
    return (x * (1 + noise)).astype(x.dtype)


def in_float64(
    source: trace.Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any | None:
    """Computes the output in float64; None if the code requires another dtype."""
    with double_precision():
        arrays = jax.tree.map(double, (dict(source.parameters), dict(source.buffers)))
        own_args, own_kwargs = jax.tree.map(double, (args, dict(kwargs)))
        try:
            return source.call(*arrays, *own_args, **own_kwargs)[0]
        except TypeError:  # JAX's error for mixed dtypes without promotion
            return None


def double(x: Any) -> Any:
    """Returns an array of floating numbers in double precision; anything else unchanged."""
    if not isinstance(x, jax.Array) and not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.asarray(x, jnp.complex128)
    return jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _value(arg: Any, env: Mapping[str, Any]) -> Any:
    if isinstance(arg, Ref):
        value = env[arg.name]
        return value[0] if isinstance(value, list) else value
    return jnp.asarray(arg.value, arg.dtype) if isinstance(arg, Scalar) else arg


def _operands(eqn: Any, operands: list[Any]) -> list[Any]:
    """Returns the operands of an equation, keys as their words."""
    given = []
    for var, x in zip(eqn.invars, operands[len(operands) - len(eqn.invars) :], strict=True):
        is_key = hasattr(var.aval, "dtype") and prng_keys.is_key(var.aval)
        given.append(
            jax.random.wrap_key_data(x, impl=_private.key_kind(var.aval.dtype).name)
            if is_key
            else x
        )
    return given


def _words(x: Any) -> Any:
    return jax.random.key_data(x) if prng_keys.is_key(x) else few_bits.in_bytes(x)
