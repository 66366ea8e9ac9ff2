"""The generator of JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import ConversionError, ProgramInputError, RebuildError, functor, to_jax
from fmapper.backends import BoxKey
from fmapper.checkpoints import Rules
from fmapper.generation import Decoding, Generated, Generation, Generator, Prompts
from fmapper.programs import Lowering
from fmapper_adapters.jax.arrays.packed import blocks_of
from fmapper_adapters.jax.generation import blocks, choose, grouped, loop
from fmapper_adapters.jax.model import execute, jax_model
from fmapper_adapters.jax.model.static_program import Arrays, StaticProgram


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """The programs of a generator, shared by generators with other arrays and settings.

    Attributes:
        first: The program of a prompt, if there is one.
        step: The program of a step.
        layout: The layout of weights that differs from the model's.
    """

    first: StaticProgram | None
    step: StaticProgram
    layout: blocks.Layout

    @functools.cached_property
    def run_first(self) -> StaticProgram | None:
        """The compiled function for the first token."""
        return None if self.first is None else blocks.code(self.first, self.layout)

    @functools.cached_property
    def run_step(self) -> StaticProgram:
        """The compiled function for a step."""
        return blocks.code(grouped.code(self.step), self.layout)


def _rebuild(generator: JaxGenerator, children: Mapping[str, Any]) -> JaxGenerator:
    """Returns a generator with new arrays, for example those that a mover has made.

    Raises:
        RebuildError: Arrays are not of JAX, or have no values.
    """
    for arrays in children.values():
        for name, array in arrays.items():
            if not isinstance(blocks_of(array), jax.Array):
                raise RebuildError(
                    f"{name}: a generator of JAX computes with arrays of JAX that have values, not "
                    f"with a {type(array).__name__}. Move its arrays instead, "
                    "fmapper.state(generator), or create a generator of the other framework."
                )
    return generator.replace(params=children["params"], buffers=children["buffers"])


@functor(children=(BoxKey("params"), BoxKey("buffers")), trainable=("params",), rebuild=_rebuild)
class JaxGenerator(Generator):
    """Generates text in JAX, without torch.

    It is a functor: `to_gpu`, `shard`, `state` and `load_state` take it as they take a model.

    Attributes:
        precision: The precision of matrix products in float32.
    """

    def __init__(
        self,
        generation: Generation,
        decoding: Decoding,
        codes: Codes,
        held: Arrays,
        buffers: Arrays,
        precision: str | None,
    ) -> None:
        super().__init__(generation, decoding)
        self._arrays = held, buffers  # in one attribute, so that threads replace both at once
        self.precision = precision
        self._codes = codes

    @property
    def _held(self) -> Arrays:
        return self._arrays[0]

    @property
    def buffers(self) -> Arrays:
        """The arrays of the model that are not trained, by the names of its state dict."""
        return self._arrays[1]

    @property
    def params(self) -> Arrays:
        """The trained arrays of the model by the names of its state dict."""
        return blocks.restore(self._held, self._codes.layout)

    def replace(
        self, *, params: Any = None, buffers: Any = None, precision: Any = ...
    ) -> JaxGenerator:
        """Returns this generator with other arrays.

        Args:
            params: Arrays by name, with any sharding, or a converted model, such as a `JaxModel` or
                a `FlaxModel`, with such arrays.
            buffers: Other arrays by name.
            precision: The precision of matrix products in float32.

        Raises:
            ConversionError: Names are missing or left over, or shapes or dtypes differ.
        """
        given = {} if params is None else _arrays_of(params)
        given |= buffers or {}
        left = [name for name in given if name not in self._names()]
        if left:
            raise ConversionError(
                f"{self.generation.name} has no {', '.join(left[:5])}"
                f"{' and others' * (len(left) > 5)}: pass only arrays that the generator has"
            )
        held, codes = self._held, self._codes
        if params is not None:
            new = _update(self.params, given, self.generation.step.aliases, strict=True)
            layout = blocks.choose(self.generation, new)
            if layout != codes.layout:  # such as for arrays that are now on several devices
                codes = Codes(codes.first, codes.step, layout)
            held = blocks.lay_out(new, layout)
        return JaxGenerator(
            self.generation,
            self.decoding,
            codes,
            held,
            _update(self.buffers, given, {}, strict=False),
            self.precision if precision is ... else precision,
        )

    def live_arrays(self) -> Arrays:
        """Returns the trained arrays, some of them in blocks, and the buffers."""
        held, buffers = self._arrays
        return {**held, **buffers}

    def layout(self) -> Rules:
        """Returns the rules for the weights in blocks."""
        return blocks.rules(self.params, self._codes.layout)

    def hold(self, arrays: Mapping[str, Any]) -> None:
        """Replaces all arrays at once; a running call keeps those that it began with."""
        held, buffers = self._arrays
        self._arrays = {n: arrays[n] for n in held}, {n: arrays[n] for n in buffers}

    def _names(self) -> set[str]:
        """Returns the names of its arrays in the model, with all names of tied ones."""
        first, step = self.generation.prefill, self.generation.step
        aliases = {**step.aliases, **({} if first is None else first.aliases)}
        return {*self.params, *self.buffers, *aliases}

    def as_generation(self) -> Generation:
        """Returns the programs with this generator's arrays, which all are in the first one."""
        first, step = self._codes.first, self._codes.step
        main = step if first is None else first
        held = dataclasses.replace(
            main.program,
            parameters=dict(self.params),
            buffers=dict(self.buffers),
            constants=dict(main.constants),
        )
        if first is None:
            return dataclasses.replace(self.generation, prefill=None, step=held)
        rest = dataclasses.replace(step.program, constants=dict(step.constants))
        return dataclasses.replace(self.generation, prefill=held, step=rest)

    def _with(self, *, decoding: Decoding) -> JaxGenerator:
        return JaxGenerator(
            self.generation, decoding, self._codes, self._held, self.buffers, self.precision
        )

    def _run(
        self, given: Prompts, decoding: Decoding, stops: Any, count: int, key: Any, scores: bool
    ) -> Any:
        call = _Call(self, given, decoding, stops, count, key, scores)
        if count == 0:
            rows = call.rows // decoding.copies * decoding.num_return_sequences
            tokens = jax.device_put(call.tokens[:rows, : call.prompt])
            shape = (rows,) if decoding.num_beams > 1 else (rows, 0, self.generation.vocabulary)
            return Generated(tokens, jnp.zeros(shape)) if scores else tokens
        state = call.advance(call.first(), count)
        if decoding.num_beams > 1:
            return call.best(state, decoding.num_return_sequences, scores)
        made = int(state["count"])
        tokens = _cut(state["tokens"], (call.rows, call.prompt + made))
        return Generated(tokens, state["scores"][: call.rows, :made]) if scores else tokens

    def _stream(
        self, given: Prompts, decoding: Decoding, stops: Any, count: int, key: Any
    ) -> Iterator[Any]:
        call = _Call(self, given, decoding, stops, count, key, False)
        return call.stream(count)

    def __repr__(self) -> str:
        count = sum(int(np.size(array)) for array in self._held.values())
        return (
            f"JaxGenerator({self.generation.name}, batch={self.batch}, "
            f"max_length={self.max_length}, {count:,} parameters)"
        )


class _Call:
    """One call of a generator."""

    def __init__(
        self,
        generator: JaxGenerator,
        given: Prompts,
        decoding: Decoding,
        stops: Any,
        count: int,
        key: Any,
        scores: bool,
    ) -> None:
        generation = generator.generation
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            raise ProgramInputError(
                f"{generation.name}: generators are compiled by themselves, and cannot be called "
                "within jit, grad or vmap. Call it outside."
            )
        if decoding.do_sample and key is None:
            raise ProgramInputError(
                f"{generation.name}: sampling (do_sample=True) needs a key: pass "
                f"key=jax.random.key(0)"
            )
        self.generator, self.given = generator, given
        self.key = None
        if decoding.do_sample:
            self.key = jax.random.key(key) if isinstance(key, int) else key
        self.rows = len(given.tokens)
        self.tokens, self.mask = _places(generation, given)
        self.prompt = len(generation.start) or given.tokens.shape[1]
        if stops:
            stops = [row for row in stops for _ in range(decoding.copies)]
        self.fixed = choose.static_settings(decoding, stops, scores=scores)
        self.knobs = choose.settings(
            decoding,
            stops,
            self.tokens.shape,
            generation.vocabulary,
            self.prompt,
            self.prompt + count,
            given.tokens,
        )
        self.held, self.buffers = generator._arrays
        self.arrays = loop.pick(generator._codes.run_step, self.held, self.buffers)

    def first(self) -> loop.State:
        """Returns the state after the first token."""
        generator = self.generator
        code, step = generator._codes.run_first, generator._codes.run_step
        given = self.given
        if code is not None:
            arrays = loop.pick(code, self.held, self.buffers)
            logits, cache, holds = loop.prefill(
                code, generator.precision, arrays, given.columns, given.column_mask
            )
            execute.check_assertions(code, holds if code.checks else None)
        else:
            empty = loop.empty_cache(step)
            prompts = (given.columns, given.column_mask, np.int32(given.tokens.shape[1]))
            logits, cache, holds = loop.prefill_by_steps(
                step, generator.precision, self.arrays, prompts, empty
            )
            execute.check_assertions(step, holds if step.checks else None)
        done = np.arange(generator.generation.batch) >= self.rows
        state = loop.begin(self.fixed, self.knobs, self.key, logits, self.tokens, self.mask, done)
        return {**state, "cache": cache, "holds": np.ones(len(step.checks), bool)}

    def advance(self, state: loop.State, until: int) -> loop.State:
        """Advances the state by a number of tokens."""
        generator = self.generator
        step = generator._codes.run_step
        new: loop.State = loop.loop(
            step,
            generator.precision,
            self.fixed,
            self.arrays,
            state,
            self.knobs,
            self.key,
            np.int32(until),
        )
        execute.check_assertions(step, new["holds"] if step.checks else None)
        return new

    def best(self, state: loop.State, many: int, scores: bool) -> Any:
        """Returns the best texts of each prompt and, if requested, their scores."""
        prompts = self.rows // self.fixed.beams
        made = int(state["best_lengths"][:prompts, :many].max())
        tokens = _cut(state["best"], (prompts, many, self.prompt + made))
        values = state["best_scores"][:prompts, :many].reshape(-1)
        return Generated(tokens, values) if scores else tokens

    def stream(self, count: int) -> Iterator[Any]:
        """Yields tokens, one per row, until all rows have stopped."""
        if count == 0:
            return
        state: Any = self.first()
        for made in range(1, count + 1):
            yield np.asarray(state["last"])[: self.rows]
            if made == count or bool(np.asarray(state["done"]).all()):
                return
            state = self.advance(state, made + 1)


def _places(generation: Generation, given: Prompts) -> tuple[Any, Any]:
    """Returns an array for all positions that begins with the given tokens, and their mask."""
    tokens = np.zeros((generation.batch, generation.max_length), np.int32)
    mask = np.zeros(tokens.shape, bool)
    if generation.start:
        tokens[:, : len(generation.start)] = generation.start
        mask[:, : len(generation.start)] = True
        return tokens, mask
    rows, width = given.tokens.shape
    tokens[:rows, :width] = given.tokens
    mask[:rows, :width] = np.logical_or.accumulate(given.mask, 1)  # as transformers counts
    return tokens, mask


def _cut(tokens: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Cuts tokens to a shape, on the host: JAX would compile a slice per shape."""
    part = tuple(slice(size) for size in shape)
    if not tokens.is_fully_addressable:
        return tokens[part].reshape(-1, shape[-1])
    rows: jax.Array = jax.device_put(np.asarray(tokens)[part].reshape(-1, shape[-1]))
    return rows


def _arrays_of(model: Any) -> Arrays:
    """Returns arrays by the names of the state dict: of a dict, or of a converted model."""
    if isinstance(model, Mapping):
        return dict(model)
    state_dict = getattr(model, "state_dict", None)
    if state_dict is None:
        raise ConversionError(
            f"params must be a dict of arrays by name, or a converted model, not a "
            f"{type(model).__name__}"
        )
    return dict(state_dict())


def _update(old: Arrays, new: Arrays, aliases: Mapping[str, str], *, strict: bool) -> Arrays:
    missing = [name for name in old if name not in new]
    for alias, name in aliases.items():
        if name in missing and alias in new:
            new = {**new, name: new[alias]}
    missing = [name for name in old if name not in new]
    if strict and missing:
        raise ConversionError(f"params has no {', '.join(missing[:5])}")
    arrays: dict[str, Any] = {name: new.get(name, array) for name, array in old.items()}
    for name, array in arrays.items():
        if array.shape != old[name].shape:
            raise ConversionError(f"{name}: expected shape {old[name].shape}, got {array.shape}")
    moved: Arrays = to_jax(arrays)
    for name, array in moved.items():
        if array.dtype != old[name].dtype:
            raise ConversionError(
                f"{name}: expected dtype {old[name].dtype}, got {array.dtype}. Cast the arrays "
                f"first, fmapper.cast(params, {str(old[name].dtype)!r})."
            )
    return moved


def from_generation(
    generation: Generation,
    decoding: Decoding,
    lowerings: Mapping[str, Lowering],
    *,
    precision: str | None = "highest",
) -> JaxGenerator:
    """Builds a generator from two programs.

    Raises:
        UnsupportedOpsError: Operations have no lowering.
        ConversionError: A program cannot be run in a loop.
    """
    programs = [p for p in (generation.prefill, generation.step) if p is not None]
    held: Arrays = {}
    models: list[Any] = []
    for program in programs:
        new = [
            {n: x for n, x in named.items() if n not in held}
            for named in (program.parameters, program.buffers)
        ]
        model = jax_model.from_program(
            dataclasses.replace(program, parameters=new[0], buffers=new[1]), lowerings
        )
        held |= {**model.params, **model.buffers}
        models.append(model)
        _refuse(model._code)
    first = None if generation.prefill is None else models[0]._code
    step = models[-1]._code
    params = {n: x for model in models for n, x in model.params.items()}
    buffers = {n: x for model in models for n, x in model.buffers.items()}
    bare = dataclasses.replace(
        generation,
        prefill=None if first is None else first.program,
        step=step.program,
    )
    layout = blocks.choose(bare, params)
    held = blocks.lay_out(params, layout)
    return JaxGenerator(bare, decoding, Codes(first, step, layout), held, buffers, precision)


def _refuse(code: StaticProgram) -> None:
    """Checks that programs can be part of a loop.

    Raises:
        ConversionError: A program cannot; the message says why.
    """
    name = code.program.name
    changed = [str(o.target) for o in code.program.outputs if o.kind not in ("user", "input")]
    if changed:
        raise ConversionError(
            f"{name}: a step changes {', '.join(changed)} of the model itself. State that changes "
            f"from token to token belongs in the cache."
        )
    if code.concrete:
        raise ConversionError(
            f"{name} has sizes that depend on the values of tensors, and cannot be compiled"
        )
    if code.random:
        raise ConversionError(
            f"{name} draws random numbers in addition to those that choose tokens"
        )
