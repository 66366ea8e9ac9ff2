"""Calls that give arrays their first values: `nn.init`, and methods such as `normal_`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fmapper.translation import expr, text
from fmapper_translate import arrays
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.targets.constructions import names_of
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.expressions import Expressions

Code = Mapping[str, ast.expr]


def is_initialization(callee: Any) -> bool:
    """Returns whether a function is one of `nn.init`, or of a library's that has the same."""
    return getattr(callee, "__module__", "") in (nn.init.__name__, library.INITIALIZATION)


def initialize(expressions: Expressions, call: ast.Call) -> str:
    """Returns the statement that gives an array its first values as `nn.init` does.

    Args:
        expressions: The printer of the function.
        call: The call.

    Raises:
        NotTranscribed: The distribution or the array has no counterpart.
    """
    callee = expressions.callee(call)
    names = names_of(call)
    given = inspect.signature(callee).bind(*call.args, **names)
    given.apply_defaults()
    target, *rest = given.arguments.items()
    if callee.__name__ == "copy_":
        return arrays.write(expressions, target[1], expressions.code(rest[0][1]))
    codes = {
        name: expressions.code(value) if isinstance(value, ast.expr) else expr(repr(value))
        for name, value in rest if name != "generator"
    }  # fmt: skip
    return _fill(expressions, target[1], callee.__name__, codes)


def draw(expressions: Expressions, call: ast.Call) -> ast.expr:
    """Returns the code for what `nn.init` gives for an array that is made in the call.

    Raises:
        NotTranscribed: It gives values to an array of a module, or has no counterpart.
    """
    callee = expressions.callee(call)
    names = names_of(call)
    given = inspect.signature(callee).bind(*call.args, **names)
    given.apply_defaults()
    (_, target), *rest = given.arguments.items()
    if any(isinstance(value, nn.Parameter) for value in expressions.values(target)):
        raise NotTranscribed("it gives an array of a module values within an expression")
    codes = {
        name: expressions.code(value) if isinstance(value, ast.expr) else expr(repr(value))
        for name, value in rest if name != "generator"
    }  # fmt: skip
    return _draw_values(expressions, target, callee.__name__, codes)


def _draw_values(expressions: Expressions, target: ast.expr, name: str, codes: Code) -> ast.expr:
    array = expressions.code(target)
    if name in _CONSTANTS:
        return _CONSTANTS[name](array, *codes.values())
    expressions.function.makes_modules = True
    file = expressions.file.target
    made = _initializer(file.initializers, name, codes, has_layout=True)
    match array:
        case ast.Call(ast.Attribute(ast.Name("jnp"), "zeros"), [ast.Tuple() as shape, *_]):
            return expr("{0}({1}, {2})", made, file.draw(), shape)
    return expr("{0}({1}, {2}.shape)", made, file.draw(), array)


def draw_by_method(expressions: Expressions, call: ast.Call, func: ast.Attribute) -> ast.expr:
    """Returns the code for what a method gives an array that is made there: `x.normal_(std=2)`."""
    return _draw_values(expressions, func.value, func.attr, _codes_of(expressions, call, func))


def _codes_of(expressions: Expressions, call: ast.Call, func: ast.Attribute) -> Code:
    """Returns the parameters of a method in `METHODS` -> their code."""
    parameters = METHODS[func.attr]
    names = names_of(call)
    named = dict(zip(parameters, call.args, strict=False)) | names
    return {
        name: expressions.code(named[name]) if name in named else expr(repr(default))
        for name, default in parameters.items()
    }


def has_no_effect(expressions: Expressions, target: ast.expr) -> bool:
    """Returns whether what is initialized is a count, or computed of other arrays at each call."""
    if not isinstance(target, ast.Attribute):
        return False
    owners = expressions.values(target.value)
    is_computed = [isinstance(x, nn.Module) and is_parametrized(x, target.attr) for x in owners]
    values = expressions.values(target)
    computed = [x for x in values if x is not None and not isinstance(x, nn.Parameter)]
    return target.attr == "num_batches_tracked" or (
        bool(owners) and all(is_computed) and len(computed) == len(values)
    )


def initialize_by_method(expressions: Expressions, call: ast.Call, func: ast.Attribute) -> str:
    """Returns the statement for a method of an array that is not yet in use: `w.data.zero_()`.

    Raises:
        NotTranscribed: The array has no counterpart.
    """
    if func.attr not in METHODS:
        return arrays.write(expressions, func.value, expressions.code(call))
    return _fill(expressions, func.value, func.attr, _codes_of(expressions, call, func))


# Methods that list what is in a module -> the heads of loops over it; None for those without.
_LISTINGS: Mapping[Any, str | None] = {
    nn.Module.modules: "_, {0} in iter_modules({1})",
    nn.Module.children: "_, {0} in named_children({1})",
    nn.Module.named_children: "{0} in named_children({1})",
    nn.Module.parameters: "_, {0} in named_parameters({1})",
    nn.Module.named_parameters: "{0} in named_parameters({1})",
    nn.Module.named_modules: None,
    nn.Module.buffers: None,
    nn.Module.named_buffers: None,
}


def loop_head(expressions: Expressions, node: ast.For) -> str | None:
    """Returns the head of a loop over the modules or parameters of a module; None for another loop.

    Raises:
        NotTranscribed: It has no counterpart.
    """
    if not isinstance(node.iter, ast.Call) or not isinstance(node.iter.func, ast.Attribute):
        return None
    callee, func = expressions.callee(node.iter), node.iter.func
    method = getattr(callee, "__func__", None)
    if callee is None and not expressions.events(node.iter):
        method = getattr(nn.Module, func.attr, None)
    if method not in _LISTINGS:
        return None
    template = _LISTINGS[method]
    is_lacking = expressions.file.target.is_tree and "children" in str(template)
    if template is None or is_lacking or node.iter.args or node.iter.keywords:
        raise NotTranscribed(f"{ast.unparse(node.iter)} has no counterpart")
    target = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
    names = ", ".join(map(ast.unparse, target))
    head = template.format(names, text(expressions.code(func.value)))
    return f"for {head.replace('iter_modules', expressions.file.target.walk)}:"


def apply(expressions: Expressions, call: ast.Call) -> list[str]:
    """Returns the loop for `model.apply(function)`: calls of the function with each module."""
    assert isinstance(call.func, ast.Attribute)
    target = expressions.values(call.args[0])[0]
    function = expressions.file.recording.function_of(getattr(target, "func", target))
    given = expressions.file.target.source()
    rngs = f", {given.arg}={text(given.value)}"
    rngs = rngs if function is not None and function.makes_modules else ""
    owner, called = (text(expressions.code(node)) for node in (call.func.value, call.args[0]))
    return [
        f"for _, module in {expressions.file.target.walk}({owner}):",
        f"    {called}(module{rngs})",
    ]


# Methods of tensors -> their parameters and defaults.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "normal_": {"mean": 0.0, "std": 1.0},
    "uniform_": {"from": 0.0, "to": 1.0},
    "zero_": {},
    "fill_": {"value": 0.0},
}


def _fill(expressions: Expressions, target: ast.expr, name: str, codes: Code) -> str:
    if isinstance(target, ast.Subscript) and name in _NUMBERS:
        owner, index = expressions.code(target.value), expressions.code(target.slice)
        value = next(iter(codes.values()), ast.Constant(_NUMBERS[name]))
        made = expr("{0}.at[{1}].set({2})", owner, index, value)
        return arrays.write(expressions, target.value, made)
    if isinstance(target, ast.Call):
        return _fill_view(expressions, target, name, codes)
    variable = arrays.variable(expressions, target)
    if name in _CONSTANTS:
        made = _CONSTANTS[name](variable, *codes.values())
        return expressions.file.target.write(expressions.file, expressions.function, variable, made)
    has_layout = name in _SCALED and arrays.has_sources_layout(expressions, target)
    module = expressions.file.target.initializers
    made = _initializer(module, name, codes, has_layout=has_layout)
    return expressions.file.target.initialize(variable, made)


def _fill_view(expressions: Expressions, target: ast.Call, name: str, codes: Code) -> str:
    """Fills an array as if it had another shape: `xavier_uniform_(w.view(w.shape[0], -1))`."""
    match target.func:
        case ast.Attribute(ast.Name(alias) as base, "view" | "reshape" | "flatten"):
            values = [
                node.value for node in expressions.function.nodes
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == alias
            ]  # fmt: skip
        case ast.Attribute(ast.Attribute() as base, "view" | "reshape" | "flatten"):
            values = [base]
        case _:
            values = []
    if len(values) != 1:
        raise NotTranscribed("it is an array of no module")
    target_ = expressions.file.target
    made = _initializer(target_.initializers, name, codes, has_layout=True)
    view, whole = expressions.code(target), expressions.code(base)
    drawn = expr("{0}({3}, {1}.shape).reshape({2}.shape)", made, view, whole, target_.draw())
    return arrays.write(expressions, values[0], drawn)


def _initializer(module: str, name: str, codes: Code, *, has_layout: bool) -> ast.expr:
    """Returns the initializer for a function of `nn.init`.

    Args:
        module: The module of the target's initializers.
        name: The function.
        codes: Its arguments.
        has_layout: Whether the array has PyTorch's layout, if that matters: outputs first.
    """
    if name in _DRAWS:
        return _DRAWS[name](module, *codes.values())
    if name not in _SCALED:
        raise NotTranscribed(f"{name} has no counterpart")
    distribution, mode, scale = _SCALED[name](**codes)
    axes = ", in_axis=1, out_axis=0" if has_layout else ""
    template = f"{module}.variance_scaling({{0}}, {mode!r}, {distribution!r}{axes})"
    return expr(template, scale)


# --- constants ------------------------------------------------------------------------------------


def _full(variable: ast.expr, value: ast.expr) -> ast.expr:
    return expr("jnp.full_like({0}, {1})", variable, value)


_CONSTANTS: Mapping[str, Callable[..., ast.expr]] = {
    "zeros_": lambda variable: expr("jnp.zeros_like({0})", variable),
    "ones_": lambda variable: expr("jnp.ones_like({0})", variable),
    "eye_": lambda variable: expr("jnp.eye(*{0}.shape)", variable),
    "constant_": _full,
    "fill_": _full,
    "zero_": lambda variable: expr("jnp.zeros_like({0})", variable),
}

_NUMBERS = {"zeros_": 0.0, "ones_": 1.0, "constant_": 0.0, "fill_": 0.0, "zero_": 0.0}

# --- distributions --------------------------------------------------------------------------------


def _uniform(module: str, low: ast.expr, high: ast.expr) -> ast.expr:
    is_zero = isinstance(low, ast.Constant) and low.value == 0
    return expr(f"{module}.uniform({{0}})", high) if is_zero else expr(
        "uniform_init({0}, {1})", low, high
    )  # fmt: skip


def _normal(module: str, mean: ast.expr, std: ast.expr) -> ast.expr:
    is_zero = isinstance(mean, ast.Constant) and mean.value == 0
    return expr(f"{module}.normal({{0}})", std) if is_zero else expr(
        "normal_init({0}, {1})", mean, std
    )  # fmt: skip


def _trunc_normal(module: str, mean: ast.expr, std: ast.expr, a: ast.expr, b: ast.expr) -> ast.expr:
    defaults = {"mean": (mean, 0.0), "std": (std, 1.0), "a": (a, -2.0), "b": (b, 2.0)}
    keywords = [
        ast.keyword(name, code)
        for name, (code, default) in defaults.items()
        if text(code) != repr(default)
    ]
    return ast.Call(expr("trunc_normal_init"), [], keywords)


_DRAWS: Mapping[str, Callable[..., ast.expr]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "trunc_normal_": _trunc_normal,
    "orthogonal_": lambda module, gain: (
        expr(f"{module}.orthogonal()")
        if text(gain) in ("1", "1.0")
        else expr(f"{module}.orthogonal({{0}})", gain)
    ),
}

Scaled = tuple[str, str, ast.expr]  # distribution, mode, and scale of the variance


def _square(gain: ast.expr) -> ast.expr:
    is_one = isinstance(gain, ast.Constant) and gain.value == 1
    return ast.Constant(1.0) if is_one else expr("{0} ** 2", gain)


def _xavier(distribution: str) -> Callable[..., Scaled]:
    return lambda gain: (distribution, "fan_avg", _square(gain))


def _he(distribution: str) -> Callable[..., Scaled]:
    def scale(a: ast.expr, mode: ast.expr, nonlinearity: ast.expr) -> Scaled:
        kind, fan = ast.literal_eval(nonlinearity), ast.literal_eval(mode)
        if kind != "leaky_relu":
            return distribution, fan, ast.Constant(round(nn.init.calculate_gain(kind) ** 2, 12))
        if isinstance(a, ast.Constant):
            return distribution, fan, ast.Constant(2 / (1 + a.value**2))  # type: ignore[operator]
        return distribution, fan, expr("2 / (1 + {0} ** 2)", a)

    return scale


_SCALED: Mapping[str, Callable[..., Scaled]] = {
    "lecun_normal_": lambda: ("normal", "fan_in", ast.Constant(round(0.87962566103423978**-2, 12))),
    "default_flax_embed_init_": lambda: ("normal", "fan_in", ast.Constant(1.0)),
    "xavier_uniform_": _xavier("uniform"),
    "xavier_normal_": _xavier("normal"),
    "kaiming_uniform_": _he("uniform"),
    "kaiming_normal_": _he("normal"),
}
