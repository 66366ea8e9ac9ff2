"""Writes programs for torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fmapper import ConversionError, translation
from fmapper.programs import Graph, Other, Part, Program, Ref, Scalar, substitute
from fmapper.translation import Source
from fmapper_adapters.torch.translation.dialect import TorchDialect
from fmapper_adapters.torch.translation.loading import own_name
from fmapper_adapters.torch.translation.restate import restate


def write(program: Program, *, modes: bool = False) -> Source:
    """Returns a program that was recorded from JAX with its parts as a file for torch.

    What it does in training is written where its layers do that in torch, too; else what it does
    in evaluation alone.

    Args:
        program: The program.
        modes: Its own code does something else in evaluation, which is written below conditions.

    Raises:
        ConversionError: Something in it cannot be written.
    """
    if program.evaluation is None:
        return _write(program, lacks_training=program.lacks_training)
    evaluation = dataclasses.replace(
        program.evaluation, parameters=program.parameters, buffers=program.buffers
    )
    try:
        return _write_training(program, evaluation, modes=modes)
    except ConversionError as error:
        return _write(evaluation, lacks_training=str(error))


def _write_training(program: Program, evaluation: Program, *, modes: bool) -> Source:
    """Returns the file of a program for training.

    Args:
        program: The program.
        evaluation: What it does in evaluation.
        modes: Not only layers do something else there.
    """
    parts, others = (
        _without_modes(one.parts, other.parts)
        for one, other in ((program, evaluation), (evaluation, program))
    )
    found = _write(
        dataclasses.replace(program, evaluation=None, parts=parts),
        dataclasses.replace(evaluation, parts=others) if modes else None,
        random=False,
    )
    if ".copy_(" in found.code.partition("def load_weights")[0]:
        raise ConversionError("it changes buffers in ways that torch layers do not")
    if "def _hash_words(" in found.code:  # what keys draw by is there
        raise ConversionError("it draws random numbers in ways that torch layers do not")
    return found


def _without_modes(parts: Sequence[Part], others: Sequence[Part]) -> tuple[Part, ...]:
    """Returns the calls of training, without flags that are other ones in evaluation.

    Modules of torch know their mode themselves.
    """
    known = {part.name: part.arguments for part in others}

    def is_mode(part: Part, key: str, value: Any) -> bool:
        return isinstance(value, bool) and known.get(part.name, {}).get(key, value) != value

    return tuple(
        dataclasses.replace(
            part,
            arguments={
                key: Other() if is_mode(part, key, value) else value
                for key, value in part.arguments.items()
            },
        )
        for part in parts
    )


def _write(
    program: Program,
    evaluation: Program | None = None,
    *,
    random: bool = True,
    lacks_training: str = "",
) -> Source:
    """Returns the file of a program.

    Args:
        program: The program.
        evaluation: What it does in evaluation, if that is something else.
        random: Write the state of generators where calls need it; else layers are to draw.
        lacks_training: Why the file is for evaluation alone; it refuses training then.
    """
    generators = {name for name, kind in program.variable_types.items() if "Rng" in kind}
    if generators:
        plain = _without_changes(program, generators)
        restated, functions = restate(plain if random else _with_first_counts(plain, generators))
        used = {*restated.graph.uses(), *(n for c in restated.graph.walk() for n in c.refs())}
        inputs = zip(restated.graph.inputs, restated.inputs, strict=True)
        left = [str(one.target) for name, one in inputs if name in used]
        if not random or not generators & {*left}:
            buffers = {k: v for k, v in program.buffers.items() if k not in generators}
            beside = (*program.transient, *sorted(generators))  # in the state of the source
            restated = dataclasses.replace(restated, buffers=buffers, transient=beside)
            if evaluation is not None:
                evaluation = dataclasses.replace(
                    _without_changes(evaluation, generators), buffers=buffers
                )
            return _print(restated, functions, evaluation, lacks_training)
    return _print(*restate(program), evaluation, lacks_training)


def _print(
    program: Program,
    functions: Mapping[str, Callable[..., Any]],
    evaluation: Program | None,
    lacks_training: str,
) -> Source:
    """Returns the file of a program of torch's functions.

    Args:
        program: The program.
        functions: The functions of fmapper that it calls, by operation.
        evaluation: What it does in evaluation, in JAX's primitives; None where that is the same.
        lacks_training: Why the file is for evaluation alone; empty where it is not.

    Raises:
        ConversionError: Its parts have other names there.
    """
    program = dataclasses.replace(program, lacks_training=lacks_training)
    renamed, lists = translation.with_lists(program)
    if evaluation is not None:
        evaluation, others = restate(evaluation)
        functions = {**others, **functions}
        evaluation, other_lists = translation.with_lists(evaluation)
        if lists != other_lists:
            raise ConversionError(f"{program.name}: it has other lists of parts in evaluation")
    dialect = TorchDialect(functions, lists, lacks_training)
    found = translation.write(renamed, dialect, evaluation=evaluation)
    found.lacks_training = lacks_training
    found.weights = found.weights.rename(lambda name: own_name(name, lists))
    return found


def _without_changes(program: Program, buffers: set[str]) -> Program:
    """Returns a program that leaves buffers as they are."""
    pairs = zip(program.graph.outputs, program.outputs, strict=True)
    kept = [(value, one) for value, one in pairs
            if one.kind == "user" or str(one.target) not in buffers]  # fmt: skip
    graph = program.graph
    values = tuple(value for value, _ in kept)
    return dataclasses.replace(
        program,
        graph=Graph(graph.inputs, graph.calls, values, graph.kinds),
        outputs=tuple(one for _, one in kept),
    )


def _with_first_counts(program: Program, generators: set[str]) -> Program:
    """Returns a program in which a generator that draws again draws as it did at first.

    Layers are to draw, which have generators of their own: a dropout that is called twice would
    be given what the first call of it has counted.
    """
    graph = program.graph
    pairs = zip(graph.inputs, program.inputs, strict=True)
    counts: dict[str, Any] = {
        label: Ref(label) for label, one in pairs if str(one.target) in generators
    }
    calls = []
    for call in graph.calls:
        args, kwargs = substitute((call.args, call.kwargs), counts)
        is_count = call.op == "lax::add" and isinstance(args[0], Ref) and args[0].name in counts
        if is_count and isinstance(args[1], Scalar):
            counts[call.name] = counts[args[0].name]
        else:
            calls.append(dataclasses.replace(call, args=args, kwargs=kwargs))
    return dataclasses.replace(
        program, graph=Graph(graph.inputs, calls, substitute(graph.outputs, counts), graph.kinds)
    )
