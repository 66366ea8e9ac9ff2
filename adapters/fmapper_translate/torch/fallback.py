"""Functions of the operations that JAX computes, for calls and functions without counterpart."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal

from fmapper import ConversionError
from fmapper.translation import expr, identifier, names_in, text
from fmapper.translation.source import translate
from fmapper_translate.recording import Activation, Event
from fmapper_translate.torch import tables
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.torch.expressions import Expressions
    from fmapper_translate.torch.files import File


_PLAIN = (bool, int, float, str, type(None))


def call_of(
    expressions: Expressions, node: ast.Call, callee: Any, event: Event | None, reason: str
) -> ast.expr:
    """Returns the call of a function that computes what a function of a library computes.

    Raises:
        NotTranscribed: It is not a function of arrays alone, or an operation has no counterpart.
    """
    given = [*node.args, *(key.value for key in node.keywords)]
    if event is None or not callable(callee) or any(arg not in event.parts and not isinstance(
        arg, ast.Constant) for arg in given):  # fmt: skip
        raise NotTranscribed(reason)
    values = [
        arg.value if isinstance(arg, ast.Constant) else event.parts[arg].value for arg in given
    ]
    values = [x.get_raw_value() if isinstance(x, nnx.Variable) else x for x in values]
    count = len(node.args)

    def compute(*full: Any) -> Any:
        names = (str(key.arg) for key in node.keywords)
        return callee(*full[:count], **dict(zip(names, full[count:], strict=True)))

    title = identifier(getattr(callee, "__name__", "compute"))
    try:
        names = [*inspect.signature(callee).bind(*node.args).arguments]
    except (TypeError, ValueError):
        names = []
    names = [*names, *(f"x{at}" for at in range(len(names), count)),
             *(str(key.arg) for key in node.keywords)][: len(given)]  # fmt: skip
    key = node, id(event)
    fixed = {names[at]: value for at, value in enumerate(values)
             if not _is_written(expressions, given[at], value, reason)}  # fmt: skip
    called, arrays = _write(expressions.file, key, title, compute, names, values, reason, fixed)
    codes = [expressions.code(given[at]) for at in arrays]
    keywords = [ast.keyword(name, expressions.code(given[names.index(name)])) for name in fixed]
    return ast.Call(expr(called), codes, keywords)


def _is_written(expressions: Expressions, node: ast.expr, value: Any, reason: str) -> bool:
    """Returns whether an argument is an array, or the same whenever a file is run.

    Raises:
        NotTranscribed: It is another one for another model, and a file cannot check which.
    """
    if expressions.file.recording.source.is_array(value) or isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Lambda) or expressions.static(node)[0]:
        return True
    if not isinstance(value, _PLAIN):
        raise NotTranscribed(reason)
    return False


def body_of(expressions: Expressions, reason: str) -> list[str]:
    """Returns the body of a function that computes what the source's does, for each call of it.

    Raises:
        NotTranscribed: It is not a function of arrays alone, computes something else in training
            or in another call, or an operation has no counterpart.
    """
    file, function = expressions.file, expressions.function
    recording = file.recording
    runs = [x for x in recording.activations[recording.made :] if x.function is function]
    bodies = {
        text(_call_of_run(expressions, run, reason, train=train))
        for run in {_kind(run): run for run in runs}.values()
        for train in (False, True)
    }
    if len(bodies) != 1:
        raise NotTranscribed(f"{reason}; and it computes something else in another call")
    checks = [f"assert {name} == {_literal(value)}, 'another value has other operations'"
              for name, value in _fixed_values(expressions, runs, reason).items()]  # fmt: skip
    reason = " ".join(reason.removeprefix(f"{function.label}: ").split())
    return [f"# written by its operations: {reason}", *checks, f"return {bodies.pop()}"]


def _fixed_values(
    expressions: Expressions, runs: Sequence[Activation], reason: str
) -> dict[str, Any]:
    """Returns the arguments and attributes that are not arrays, on which operations may depend.

    Raises:
        NotTranscribed: One is neither a number nor a text, or a part of the module is called.
    """
    recording, fixed = expressions.file.recording, {}
    for name, value in runs[0].arguments.items():
        if name != "self" and not recording.source.is_array(value):
            fixed[name] = value
    for node in expressions.function.nodes:
        if isinstance(node, ast.Call) and expressions.events(node):
            callee = expressions.callee(node)
            if recording.source.is_module(callee) or hasattr(callee, "__func__"):
                raise NotTranscribed(f"{reason}; and it calls {ast.unparse(node.func)}")
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("self."):
            values = [x for x in expressions.values(node) if isinstance(x, _PLAIN)]
            fixed |= {text(expressions.code(node)): value for value in values}
    if not all(isinstance(value, _PLAIN) for value in fixed.values()):
        raise NotTranscribed(f"{reason}; and it is given an object")
    return fixed


def _kind(run: Activation) -> str:
    """Returns what of a call decides which operations it computes."""
    leaves = jax.tree.leaves({name: x for name, x in run.arguments.items() if name != "self"})
    return repr([(x.shape, x.dtype) if hasattr(x, "dtype") else x for x in leaves])


def _call_of_run(expressions: Expressions, run: Activation, reason: str, *, train: bool) -> Any:
    function, given = expressions.function, dict(run.arguments)
    owner = given.pop("self", None) if isinstance(run.arguments.get("self"), nnx.Module) else None
    target, values = function.target, [*given.values()]
    args = function.tree.args
    if args.vararg or args.kwarg or args.posonlyargs:
        raise NotTranscribed(reason)
    state: dict[Any, Any] = {}
    if owner is not None:
        owner = nnx.clone(owner)
        (owner.train if train else owner.eval)()
        state = {path: x for path, x in nnx.iter_graph(owner) if isinstance(x, nnx.Variable)
                 and not tables.is_random(x)}  # fmt: skip
        values += [variable.get_raw_value() for variable in state.values()]
    paths, names, shell = [*state], [*given], None
    if owner is not None:  # without arrays, which would be taken along
        graph, old = nnx.split(owner)
        shell = graph, jax.tree.map(_shape_of, old)

    def compute(*full: Any) -> Any:
        named = dict(zip(names, full, strict=False))
        if shell is None:
            return target(**named)
        twin = nnx.merge(shell[0], jax.tree.map(lambda x: x, shell[1]))
        inner = {path: x for path, x in nnx.iter_graph(twin) if path in paths}
        arrays = dict(zip(paths, full[len(named) :], strict=True))
        for path, variable in inner.items():
            variable.set_raw_value(arrays[path])
        result = target(twin, **named)
        if any(x.get_raw_value() is not arrays[path] for path, x in inner.items()):
            raise NotTranscribed("it changes arrays of a module")
        return result

    title = identifier(function.label.replace(".", "_"))
    called, arrays = _write(
        expressions.file, (id(run), train), title, compute,
        [*given, *("_".join(map(str, path)) for path in paths)], values, reason,
    )  # fmt: skip
    codes = [
        expr(names[at]) if at < len(names)
        else _array_code(expressions, owner, paths[at - len(names)], reason)
        for at in arrays
    ]  # fmt: skip
    return ast.Call(expr(called), codes, [])


def _array_code(
    expressions: Expressions, module: Any, path: Sequence[Any], reason: str
) -> ast.expr:
    """Returns the code for an array of a module, in Flax's layout."""
    base = expr("self")
    for key in path[:-1]:
        layer = tables.base_of(type(module))
        module = module[key] if isinstance(key, int) else getattr(module, key, None)
        if not isinstance(module, nnx.Module):
            raise NotTranscribed(f"{reason}; and {'.'.join(map(str, path))} is in a container")
        if isinstance(key, int):
            base = expr(f"{{0}}[{key}]", base)
        elif not (layer and layer.name == "Sequential"):
            base = ast.Attribute(base, key, ast.Load())
    layer = tables.base_of(type(module))
    if layer is not None:
        return expressions.array(base, layer, path[-1])
    return ast.Attribute(base, str(path[-1]), ast.Load())


def _literal(value: Any) -> str:
    """Returns the code for a number or text, infinity among them."""
    return ast.unparse(ast.Constant(value))


def _wider(x: Any) -> Any:
    return jax.eval_shape(lambda: jnp.zeros([size + 1 for size in x.shape], x.dtype))


def _write(
    file: File, key: Any, title: str, compute: Callable[..., Any], names: Sequence[str],
    values: Sequence[Any], reason: str, fixed: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, list[int]]:  # fmt: skip
    """Writes a function of arrays to a file; returns its name, and which values it takes."""
    if key in file.written_for:
        return file.written_for[key]
    is_array, is_module = file.recording.source.is_array, file.recording.source.is_module
    arrays = [at for at, value in enumerate(values) if is_array(value)]
    rest = [None if at in arrays else value for at, value in enumerate(values)]
    for leaf in jax.tree.leaves(rest, is_leaf=is_module):
        if isinstance(leaf, jax.Array) or is_module(leaf) or tables.is_random(leaf):
            raise NotTranscribed(reason)

    def pure(*given: Any) -> Any:
        full = dict(enumerate(rest)) | dict(zip(arrays, given, strict=True))
        return compute(*full.values())

    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    try:
        shapes = [_shape_of(values[at]) for at in arrays]
        traced = jax.make_jaxpr(pure)(*shapes).jaxpr
        used = {*traced.outvars, *(x for step in traced.eqns for x in step.invars
                                   if not isinstance(x, Literal))}  # fmt: skip
        unused = [at for at, x in zip(arrays, traced.invars, strict=True) if x not in used]
        wider = [_wider(x) if at in unused else x for at, x in zip(arrays, shapes, strict=True)]
        if unused and str(jax.make_jaxpr(pure)(*wider).jaxpr.eqns) != str(traced.eqns):
            raise NotTranscribed(f"{reason}; and it depends on the sizes of an array alone")
        rest = [shapes[arrays.index(at)] if at in unused else x for at, x in enumerate(rest)]
        arrays = [at for at in arrays if at not in unused]
        pure.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(names[at], kinds) for at in arrays]
        )
        examples = tuple(
            jnp.ones(x.shape, x.dtype) if isinstance(x, jax.core.Tracer) else x
            for x in (values[at] for at in arrays)
        )
        written = translate(pure, "torch", examples, alone=True)[0]
    except (ConversionError, TypeError, ValueError, AttributeError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise NotTranscribed(f"{reason}; and as operations: {first}") from error
    functions = _functions_of(written.code, written.name, reason)
    if fixed:
        head, _, body = functions[""].partition("):")
        comma = "" if head.endswith("(") else ", "
        lines = [f"    assert {name} == {_literal(x)}, 'another value has other operations'"
                 for name, x in fixed.items()]  # fmt: skip
        functions[""] = "\n".join([f"{head}{comma}*, {', '.join(fixed)}):", *lines]) + body
    called = file.add_written(title, functions)
    file.written_for[key] = called, arrays
    return called, arrays


def _shape_of(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)  # type: ignore[no-untyped-call]


def _functions_of(code: str, name: str, reason: str) -> dict[str, str]:
    """Returns the functions of a file by name: that of its model without one, and what it calls."""
    defined = {
        item.name: item
        for item in ast.parse(code).body
        if isinstance(item, ast.ClassDef | ast.FunctionDef)
    }
    model = defined[name]
    if not isinstance(model, ast.ClassDef) or [x.name for x in model.body] != ["forward"]:  # type: ignore[attr-defined]
        raise NotTranscribed(f"{reason}; and it uses arrays that it is not given")
    noise = "# return compute(*full.values())"  # which it takes for the line of an operation
    lines = [line for line in code.splitlines() if line.strip() != noise]

    def segment(item: Any) -> str:
        return textwrap.dedent("\n".join(lines[item.lineno - 1 : item.end_lineno]))

    found = {"": segment(model.body[0]).replace("(self, ", "(", 1)}
    todo = [*names_in(found[""])]
    while todo:
        item = defined.get(todo.pop())
        if item is not None and item.name not in found:
            found[item.name] = segment(item)
            todo += names_in(found[item.name])
    return found
