"""Calls of layers' constructors as code, by the table of layers."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable

from fmapper.translation import expr, literal, text
from fmapper_translate.targets import layers
from fmapper_translate.walk.errors import NotTranscribed

Code = Callable[[ast.expr], ast.expr]


def make_layer(
    code: Code,
    call: ast.Call,
    kind: type,
    layer: layers.Layer,
    given: ast.keyword,
    *,
    bound: bool = False,
    func: ast.expr | None = None,
) -> ast.expr:
    """Returns the code that makes a layer.

    Args:
        code: Returns the code for an expression of the source.
        call: The call that makes it in the source.
        kind: The class that it is of there.
        layer: The row of the table.
        given: The random numbers that its constructor is given.
        bound: Whether the class is a `partial`, which has the defaults.
        func: The code for what is called, if it is another than the source's.

    Raises:
        NotTranscribed: It is given an argument without a counterpart.
    """
    args, keywords = _arguments(code, call.args, call.keywords, kind, layer)
    args = [
        ast.ListComp(item.elt, item.generators) if isinstance(item, ast.GeneratorExp) else item
        for item in args
    ]
    for name, default in layer.defaults.items() if not bound else ():
        if name not in layer.first(len(args)):
            keywords.setdefault(name, expr(default))
    if layer.takes_rngs:
        keywords[given.arg] = given.value
    if layer.name == "list" and not keywords:  # which is written as one
        known = args[0] if args else ast.List([], ast.Load())
        return known if isinstance(known, ast.List | ast.ListComp) else expr("list({0})", known)
    return _call(func or code(call.func), args, keywords)


def make_partial(code: Code, call: ast.Call, kind: type, layer: layers.Layer) -> ast.Call:
    """Returns the code for `partial(nn.LayerNorm, eps=1e-6)`; see `make_layer`."""
    first, *rest = call.args
    args, keywords = _arguments(code, rest, call.keywords, kind, layer)
    return _call(code(call.func), [code(first), *args], keywords)


def make_activation(
    code: Code, call: ast.Call, kind: type, activation: layers.Activation
) -> ast.expr:
    """Returns the code for a function that stands for a layer without arrays."""
    name, names, defaults = activation
    by_name = names_of(call) if names else {}
    given = layers.signature_of(kind).bind_partial(None, *call.args, **by_name).arguments
    keywords = {key: expr(default) for key, default in defaults.items()}
    for theirs, ours in names.items():
        if theirs in given:
            made = code(given[theirs])
            words = layers.WORDS.get(theirs, {})
            keywords[ours] = literal(words[ast.literal_eval(made)]) if words else made
    if not keywords:
        return expr(name)
    name = layers.WITH_ARGUMENTS.get(kind, name)
    return expr(f"partial({name}, {', '.join(f'{key}={text(v)}' for key, v in keywords.items())})")


def names_of(call: ast.Call) -> dict[str, ast.expr]:
    """Returns the arguments of a call by keyword.

    Raises:
        NotTranscribed: Some are in a dict.
    """
    if any(key.arg is None for key in call.keywords):
        raise NotTranscribed(f"options of {ast.unparse(call.func)} are in a dict")
    return {str(key.arg): key.value for key in call.keywords}


def _call(func: ast.expr, args: list[ast.expr], keywords: dict[str | None, ast.expr]) -> ast.Call:
    return ast.Call(func, args, [ast.keyword(name, value) for name, value in keywords.items()])


def _arguments(
    code: Code,
    args: list[ast.expr],
    keywords: list[ast.keyword],
    kind: type,
    layer: layers.Layer,
) -> tuple[list[ast.expr], dict[str | None, ast.expr]]:
    by_name = {key.arg: key.value for key in keywords if key.arg not in layers.IGNORED}
    if layer.names is None:
        parameters = list(layers.signature_of(kind).parameters)[1:]
        kept = [
            arg for name, arg in itertools.zip_longest(parameters, args)
            if arg is not None and name not in layers.IGNORED
        ]  # fmt: skip
        return [*map(code, kept)], {name: code(value) for name, value in by_name.items()}
    if None in by_name:
        raise NotTranscribed(f"options of {kind.__name__} are in a dict")
    named = {str(name): value for name, value in by_name.items()}
    bound = layers.signature_of(kind).bind_partial(None, *args, **named).arguments
    positional: list[ast.expr] = []
    rest: dict[str | None, ast.expr] = {}
    for at, (name, value) in enumerate(list(bound.items())[1:]):
        if name in layers.IGNORED:
            continue
        if name not in layer.names:
            raise NotTranscribed(f"{kind.__name__}: {name} has no counterpart")
        made = code(value)
        if name in layer.is_one_number and isinstance(made, ast.Tuple | ast.List):
            (made,) = made.elts
        if value in args and at < layer.by_place:
            positional.append(made)
        else:
            rest[layer.names[name]] = made
    return positional, rest
