"""Records what a function or a tree of JAX computes, as a program with its arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from fmapper import Input, Output, Parameter, Program, to_jax
from fmapper_adapters.jax import _jaxpr, _keys, _pytrees


@dataclass
class Source:
    """A model as a function of its arrays.

    Attributes:
        call: Takes parameters and buffers by name, then arguments and keywords; gives the output
            and the buffers (and parameters) that are changed.
        parameters: The arrays that are trained.
        buffers: The others; keys as they are.
        aliases: Other names of arrays -> the name under which they are.
        frozen: Names of parameters that are not trained.
        function: Whose signature the model has.
        skipped: How many of its first parameters are no arguments of the model.
        signature: The signature itself, where it is known.
        name: What errors call it.
    """

    call: Callable[..., Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None
    skipped: int = 0
    signature: tuple[Parameter, ...] = ()
    name: str = ""


def record(
    source: Source,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    train: bool = False,
) -> Program:
    """The program of a model for example inputs.

    Raises:
        ConversionError: It cannot be recorded.
    """
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_none)
    static = [not _is_array(leaf) for leaf in leaves]
    arrays = [to_jax(leaf) for leaf, fixed in zip(leaves, static, strict=True) if not fixed]
    outputs: list[Any] = []

    def run(parameters: Any, buffers: Any, given: list[Any]) -> Any:
        rest = iter(given)
        full = [leaf if fixed else next(rest) for leaf, fixed in zip(leaves, static, strict=True)]
        own_args, own_kwargs = jax.tree.unflatten(tree, full)
        output, changed = source.call(parameters, buffers, *own_args, **own_kwargs)
        flat, out_tree = jax.tree.flatten(output, is_leaf=_is_none)
        fixed = [not _is_array(leaf) for leaf in flat]
        outputs[:] = [flat, fixed, out_tree, list(changed)]
        return [x for x, f in zip(flat, fixed, strict=True) if not f], list(changed.values())

    shapes = arrays
    closed = jax.make_jaxpr(run)(source.parameters, source.buffers, shapes)
    flat, fixed, out_tree, changed = outputs
    # dicts are flattened in the order of their keys
    names = [("parameter", n) for n in sorted(source.parameters)]
    names += [("buffer", n) for n in sorted(source.buffers)]
    positions = [i for i, f in enumerate(static) if not f]
    labels = [f"{'p' if kind == 'parameter' else 'b'}_{i}" for i, (kind, _) in enumerate(names)]
    labels = [_label(n) for _, n in names]
    labels = _distinct([*labels, *_user_labels(source, tree, positions)])
    reader = _jaxpr.Reader()
    graph = reader.root(closed, labels)
    kinds = [_keys.physical(v.aval) for v in closed.jaxpr.invars]
    shown = [(d, tuple(n if isinstance(n, int) else str(n) for n in s)) for d, s in kinds]
    inputs = [Input(kind, n, *shown[i]) for i, (kind, n) in enumerate(names)]
    users = [Input("user", p, *shown[len(names) + i]) for i, p in enumerate(positions)]
    everyone = {u.target: u for u in users}
    all_users = [everyone.get(i) or Input("static", i, value=leaf) for i, leaf in enumerate(leaves)]
    constants = [
        Input("constant", n, str(a.dtype), tuple(a.shape)) for n, a in reader.constants.items()
    ]
    graph_inputs = list(graph.inputs)
    static_names = [f"static_{i}" for i, f in enumerate(static) if f]
    order = iter(static_names)
    user_names = iter(graph_inputs[len(names) : len(names) + len(users)])
    full_names = [next(order) if f else next(user_names) for f in static]
    graph.inputs = (
        *graph_inputs[: len(names)],
        *full_names,
        *graph_inputs[len(names) + len(users) :],
    )
    rest = iter(graph.outputs)
    values = [leaf if f else next(rest) for leaf, f in zip(flat, fixed, strict=True)]
    graph.outputs = (*values, *rest)
    written = [Output("parameter" if n in source.parameters else "buffer", n) for n in changed]
    return Program(
        graph=graph,
        inputs=(*inputs, *all_users, *constants),
        outputs=(*(Output("user", i) for i in range(len(flat))), *written),
        in_spec=_pytrees.tree_spec(tree),
        out_spec=_pytrees.tree_spec(out_tree),
        signature=source.signature or _signature(source.function)[source.skipped :],
        parameters={n: _raw(x) for n, x in source.parameters.items()},
        buffers={n: _raw(x) for n, x in source.buffers.items()},
        constants={n: _raw(x) for n, x in reader.constants.items()},
        aliases=source.aliases,
        frozen=source.frozen,
        train=train,
        name=source.name,
    )


def _is_none(x: Any) -> bool:
    return x is None


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _raw(x: Any) -> Any:
    return jax.random.key_data(x) if _keys.is_key(x) else x


def _label(name: str) -> str:
    found = "".join(c if c.isalnum() else "_" for c in name)
    return found if found[:1].isalpha() else f"p_{found}"


def _distinct(labels: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for label in labels:
        number = seen.get(label, 0)
        seen[label] = number + 1
        found.append(f"{label}_{number}" if number else label)
    return found


def _user_labels(source: Source, tree: Any, positions: list[int]) -> list[str]:
    return [f"input_{p}" for p in positions]


def _signature(function: Callable[..., Any] | None) -> tuple[Parameter, ...]:
    """The parameters of a function, as a program keeps them."""
    if function is None:
        return ()
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: "positional",
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
        inspect.Parameter.KEYWORD_ONLY: "keyword",
        inspect.Parameter.VAR_POSITIONAL: "args",
        inspect.Parameter.VAR_KEYWORD: "kwargs",
    }
    found = []
    for p in inspect.signature(function).parameters.values():
        default = p.default if isinstance(p.default, bool | int | float | str | None) else None
        required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        found.append(Parameter(p.name, kinds[p.kind], default, required))
    return tuple(found)
