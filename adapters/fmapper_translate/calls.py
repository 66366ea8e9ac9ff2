"""Calls of functions of Python and PyTorch that become others."""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fmapper.translation import expr, literal
from fmapper_translate import _private
from fmapper_translate.constructors import initial_values
from fmapper_translate.constructors.given_modules import take_apart
from fmapper_translate.functions import Function
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.printing.folding import is_constant
from fmapper_translate.recording import Recording
from fmapper_translate.targets import distributions, layers
from fmapper_translate.targets.constructions import make_partial
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.expressions import Expressions
    from fmapper_translate.files import File
    from fmapper_translate.recording import Event
    from fmapper_translate.targets.layers import Layer

# Functions that have the same arguments in JAX, in the same order -> what `dim` is called there.
TRANSFORMS: dict[Any, str] = {
    torch.fft.fft: "axis", torch.fft.ifft: "axis", torch.fft.rfft: "axis", torch.fft.irfft: "axis",
    torch.fft.hfft: "axis", torch.fft.ihfft: "axis", torch.fft.fft2: "axes",
    torch.fft.ifft2: "axes", torch.fft.rfft2: "axes", torch.fft.irfft2: "axes",
    torch.fft.fftn: "axes", torch.fft.ifftn: "axes", torch.fft.rfftn: "axes",
    torch.fft.irfftn: "axes",
}  # fmt: skip


def call_parts(expressions: Expressions, node: ast.Call) -> ast.Call:
    """Prints a call of modules, through a function that tells them apart if it must."""
    file, modules = expressions.file, expressions.values(node.func)
    more = file.target.extras(file, expressions.function, *modules)
    func = expressions.code(node.func)
    if all(file.target.is_taken(file, item, more) for item in modules):
        return expressions.plain_call(node, func, more)
    made = expressions.plain_call(node, expr("call_part"), more)
    return ast.Call(made.func, [func, *made.args], made.keywords)


def may_be_module(expressions: Expressions, node: ast.Call, callee: Any) -> bool:
    """Returns whether a call is of a function without a name, and of a module another time."""
    is_nameless = expressions.file.recording.function_of(callee) is None
    values = expressions.values(node.func) if isinstance(callee, types.FunctionType) else []
    return is_nameless and any(isinstance(item, nn.Module) for item in values)


def with_new_keywords(node: ast.Call, layer: Layer | None) -> ast.Call:
    """Returns a call of a layer with the keywords of its counterpart."""
    new = {} if layer is None else layer.keywords
    named = [ast.keyword(new.get(str(key.arg), key.arg), key.value) for key in node.keywords]
    return ast.Call(node.func, node.args, named) if new else node


def isinstance_(expressions: Expressions, call: ast.Call) -> ast.expr:
    """Prints `isinstance`, without the classes of layers that the model has nowhere."""
    value, kinds = call.args
    tested = expressions.code(value)
    if isinstance(tested, ast.Constant):
        return ast.Constant(isinstance(tested.value, expressions.values(kinds)[0]))
    listed = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    given = expressions.values(value)
    absent = {
        cls
        for cls in expressions.file.absent
        if not any(isinstance(x, cls) for x in given)  # as what is replaced later
    }
    kept = [kind for kind in listed if not set(expressions.values(kind)) & absent]
    if not kept:
        return ast.Constant(False)
    are_records = any(library.is_record(type(x)) for x in given)
    codes = [
        expr(library.RECORD)
        if are_records and dict in expressions.values(kind)
        else expressions.code(kind)
        for kind in kept
    ]
    made = codes[0] if len(codes) == 1 else ast.Tuple(codes, ast.Load())
    return expr("isinstance({0}, {1})", tested, made)


DROPOUTS = (
    nn.functional.dropout, nn.functional.dropout1d, nn.functional.dropout2d,
    nn.functional.dropout3d,
)  # fmt: skip


def dropout(expressions: Expressions, call: ast.Call) -> ast.expr:
    """Prints `F.dropout` and its like, which draw from the model's random numbers.

    Raises:
        NotTranscribed: It drops channels, and the target does not.
    """
    code = expressions.code
    named = {str(key.arg): key.value for key in call.keywords}
    given = inspect.signature(nn.functional.dropout).bind(*call.args, **named).arguments
    rate = code(given["p"]) if "p" in given else expr("0.5")
    training = code(given["training"]) if "training" in given else expr("True")
    file, inputs = expressions.file, expressions.values(given["input"])
    dims: set[tuple[int, ...]] = {()}
    if expressions.callee(call) is not nn.functional.dropout:  # of channels, which come second
        dims = {tuple(range(2, x.ndim)) for x in inputs}
        if len(dims) != 1 or () in dims:
            raise NotTranscribed("it drops channels of inputs with other dimensions")
    return file.target.dropout(
        file, expressions.function, code(given["input"]), rate, training, dims=dims.pop()
    )


def attention(expressions: Expressions, call: ast.Call) -> ast.expr | None:
    """Prints scaled dot-product attention; None where its operations say more.

    That is with grouped heads, or with keywords in a dict.
    """
    named = {key.arg: key.value for key in call.keywords}
    given: dict[Any, ast.expr] = {**dict(zip(_OF_ATTENTION, call.args, strict=False)), **named}
    grouped = given.pop("enable_gqa", None)
    is_grouped = grouped is not None and not is_constant(expressions.code(grouped), False)
    if is_grouped or None in given or any(isinstance(item, ast.Starred) for item in call.args):
        return None
    codes = {name: expressions.code(node) for name, node in given.items()}
    rate = codes.pop("dropout_p", ast.Constant(0.0))
    more = [
        ast.keyword({"attn_mask": "mask"}.get(name, name), codes[name])
        for name in ("attn_mask", "is_causal", "scale")
        if name in codes and not is_constant(codes[name], None, False)
    ]
    if not (isinstance(rate, ast.Constant) and rate.value == 0):
        file, weights = expressions.file, expr("weights")
        drop = file.target.dropout(file, expressions.function, weights, rate, ast.Constant(True))
        more.append(ast.keyword("dropout", expr("lambda weights: {0}", drop)))
    func = expr(expressions.file.helper_name("attention"))
    return ast.Call(func, [codes[name] for name in _OF_ATTENTION[:3]], more)


_OF_ATTENTION = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
)  # fmt: skip


def count_of_tuple(callee: Any) -> int:
    """Returns how many numbers a function such as PyTorch's `_pair` gives; 0 for another one."""
    is_tuple = getattr(callee, "__module__", "") == nn.modules.utils.__name__ and callee.__closure__
    return inspect.getclosurevars(callee).nonlocals.get("n", 0) if is_tuple else 0


def makes_array(expressions: Expressions, call: ast.Call, callee: Any) -> bool:
    """Returns whether a call makes a tensor of numbers, a list or an array of NumPy."""
    if isinstance(callee, type) and (callee is torch.Tensor or callee in _LEGACY):
        given = expressions.values(call.args[0]) if len(call.args) == 1 else []
        return isinstance(call.args[0], ast.List) or any(
            isinstance(item, list | tuple | np.ndarray) for item in given
        )
    return callee in (torch.tensor, torch.as_tensor, torch.from_numpy)


_LEGACY = (torch.FloatTensor, torch.DoubleTensor, torch.IntTensor, torch.LongTensor)


def transform(expressions: Expressions, call: ast.Call, callee: Any) -> ast.expr:
    """Prints a Fourier transform."""
    names = {"dim": TRANSFORMS[callee], "input": "a"}
    keywords = [ast.keyword(names.get(str(key.arg), key.arg), key.value) for key in call.keywords]
    func = expr(f"jnp.fft.{callee.__name__.removeprefix('fft_')}")
    return expressions.plain_call(ast.Call(call.func, call.args, keywords), func, [])


def meshgrid(expressions: Expressions, call: ast.Call) -> ast.expr:
    """Prints `torch.meshgrid`, whose indices are those of matrices unless it says otherwise."""
    is_list = len(call.args) == 1 and any(
        isinstance(value, list | tuple) for value in expressions.values(call.args[0])
    )
    args: list[ast.expr] = [ast.Starred(call.args[0], ast.Load())] if is_list else call.args
    given = {key.arg for key in call.keywords}
    more = [] if "indexing" in given else [ast.keyword("indexing", ast.Constant("ij"))]
    made = ast.Call(call.func, args, call.keywords)
    return expressions.plain_call(made, expr("jnp.meshgrid"), more)


def is_placement(callee: Any, call: ast.Call, values: Callable[[ast.expr], list[Any]]) -> bool:
    """Returns whether a call moves a module to a device, and does nothing else with it."""
    method = getattr(callee, "__func__", None)
    given = [
        x for node in (*call.args, *(key.value for key in call.keywords)) for x in values(node)
    ]
    return method in _PLACEMENTS and not any(
        isinstance(x, torch.dtype | torch.Tensor) for x in given
    )


def _is_other_tree(value: Any) -> bool:
    """Returns whether JAX has other leaves of a tree than PyTorch, or in another order."""
    if isinstance(value, dict):
        return [*value] != sorted(value, key=str) or any(map(_is_other_tree, value.values()))
    return value is None or (isinstance(value, list | tuple) and any(map(_is_other_tree, value)))


_PLACEMENTS = (nn.Module.to, nn.Module.cuda, nn.Module.cpu)


def special(expressions: Expressions, call: ast.Call, callee: Any) -> ast.expr | None:
    """Prints calls of PyTorch whose code is not that of their operations; None for others."""
    if initial_values.is_initialization(callee) and expressions.file.constructs(
        expressions.function
    ):
        return initial_values.draw(expressions, call)
    if callee in _private.FUNCTIONS_OF_TREES:
        given = [value for node in call.args for value in expressions.values(node)]
        if any(map(_is_other_tree, given)):
            raise NotTranscribed("JAX sorts the keys of dicts in trees, and has no leaf for None")
    if callee is hasattr and expressions.file.target.is_tree:  # whose classes declare attributes
        owners = [x for x in expressions.values(call.args[0]) if isinstance(x, nn.Module)]
        asked = expressions.values(call.args[1]) or [getattr(call.args[1], "value", None)]
        if owners and not any(getattr(x, str(n), n) is None for x in owners for n in asked):
            owner, name = map(expressions.code, call.args)
            return expr("getattr({0}, {1}, None) is not None", owner, name)
    if callee is nn.functional.multi_head_attention_forward:
        return attention_forward(expressions, call)
    if isinstance(call.func, ast.Attribute):
        if isinstance(getattr(callee, "__self__", None), torch.Size):  # whose method is `numel`
            return expr("math.prod({0})", expressions.code(call.func.value))
        if getattr(callee, "__func__", None) is nn.Module.named_children:
            return expr("named_children({0})", expressions.code(call.func.value))
        if getattr(callee, "__func__", None) is nn.Module.children:
            parts = expr("named_children({0})", expressions.code(call.func.value))
            return expr("[part for _, part in {0}]", parts)
        is_listing = getattr(callee, "__func__", None) is nn.Module.modules
        if is_listing and not expressions.file.target.is_tree:
            return expr("modules_in({0})", expressions.code(call.func.value))
        if is_placement(callee, call, expressions.values):
            return expressions.code(call.func.value)
    if callee is checkpoint:  # which saves memory
        inner = ast.Call(call.args[0], call.args[1:], [])
        return expressions.call_of(inner, expressions.values(call.args[0])[0])
    method: Any = getattr(callee, "__func__", None)
    names = _NAMES_OF_PARAMETERS.get(method)
    constructs, is_tree = expressions.file.constructs, expressions.file.target.is_tree
    if names and not is_tree and not constructs(expressions.function):
        array = expressions.file.target.read(expr("array"), None, constructs=False)
        module = expressions.code(call.func.value)  # type: ignore[attr-defined]
        return expr(f"({names} for name, array in named_parameters({{1}}))", array, module)
    return distribution(expressions, call, callee)


_NAMES_OF_PARAMETERS = {nn.Module.parameters: "{0}", nn.Module.named_parameters: "(name, {0})"}


def distribution(expressions: Expressions, call: ast.Call, callee: Any) -> ast.expr | None:
    """Prints what makes a distribution or a method of one; None for other calls.

    Raises:
        NotTranscribed: It has no counterpart.
    """
    kind = callee if isinstance(callee, type) else type(getattr(callee, "__self__", None))
    if not issubclass(kind, Distribution):
        return None
    known, name = DISTRIBUTIONS.get(kind), getattr(callee, "__name__", "")
    if known is None or not hasattr(known, name if kind is not callee else "log_prob"):
        raise NotTranscribed(f"{kind.__name__} or its {name} has no counterpart")
    if kind is callee:
        return expressions.plain_call(call, expr(expressions.file.helper_name(known.__name__)))
    made = expressions.plain_call(call, expressions.code(call.func))
    if name in ("sample", "rsample"):
        key = expressions.file.target.key(expressions.file, expressions.function)
        return ast.Call(made.func, [key, *made.args], made.keywords)
    return made


DISTRIBUTIONS: dict[type, type] = {
    torch.distributions.Categorical: distributions.Categorical,
    torch.distributions.Normal: distributions.Normal,
}


def attention_forward(expressions: Expressions, call: ast.Call) -> ast.expr:
    """Prints `F.multi_head_attention_forward`.

    Raises:
        NotTranscribed: It drops weights, or has more keys and values than it is given.
    """
    names = {str(key.arg): key.value for key in call.keywords}
    signature = inspect.signature(nn.functional.multi_head_attention_forward)
    given = signature.bind(*call.args, **names).arguments
    for name in ("bias_k", "bias_v", "add_zero_attn", "dropout_p", "static_k", "static_v"):
        code = expressions.code(given[name]) if name in given else ast.Constant(None)
        if not isinstance(code, ast.Constant) or code.value:
            raise NotTranscribed(f"{name} of multi_head_attention_forward has no counterpart")
    return expressions.plain_call(call, expr("multi_head_attention_forward"))


def entry(
    expressions: Expressions,
    node: ast.Subscript,
    registry: dict[Any, Any],
    kinds: set[Any],
    print_global: Callable[[ast.expr, Any], ast.expr],
) -> ast.expr:
    """Returns the code for a class, function or module from a table of the source's module.

    The file then has these.

    Raises:
        NotTranscribed: The table has arrays.
    """
    assert isinstance(node.value, ast.Name)

    def code(kind: Any) -> ast.expr:
        if not isinstance(kind, nn.Module):
            return print_global(node, kind)
        if kind.state_dict():
            raise NotTranscribed("its table has arrays, which all models share")
        return expressions.file.value(take_apart(kind, set()))

    used = {key: code(item) for key, item in registry.items() if any(item is x for x in kinds)}
    expressions.file.tables[node.value.id] = ast.Dict([*map(literal, used)], [*used.values()])
    return ast.Subscript(node.value, expressions.code(node.slice), ast.Load())


_ALONG_ONE = (nn.functional.softmax, nn.functional.log_softmax, torch.cat, torch.stack)


def partial(expressions: Expressions, node: ast.Call, event: Event | None) -> ast.expr | None:
    """Returns the code for a `partial` of a layer's class or a function; None for another."""
    code, file = expressions.code, expressions.file
    part = event.parts.get(node.args[0]) if event is not None else None
    kind = part.value if part is not None else expressions.static(node.args[0])[1]
    layer = file.layers.layer_of(kind)
    if layer is not None:
        return make_partial(code, node, kind, layer)
    given = [str(key.arg) for key in node.keywords]
    if kind in _ALONG_ONE and given == ["dim"]:
        func, function = code(node.func), code(node.args[0])
        return expr("{0}({1}, axis={2})", func, function, code(node.keywords[0].value))
    if kind in file.layers.activations and layers.IGNORED.issuperset(given):
        return code(node.args[0])
    return None


def add_global(expressions: Expressions, name: str, value: Any) -> bool:
    """Adds what a name of a module is, as a `partial` of a class; returns whether a file has it."""
    if not isinstance(value, functools.partial) or not isinstance(value.func, type):
        return expressions.file.add_global(expressions.function, name, value)
    kind = value.func
    first = expressions.reference(ast.Name(kind.__name__, ast.Load()), kind)
    try:
        args = [first, *map(literal, value.args)]
        keywords = [ast.keyword(key, literal(item)) for key, item in value.keywords.items()]
    except TypeError:
        return False
    call, layer = ast.Call(expr("partial"), args, keywords), expressions.file.layers.layer_of(kind)
    made = call if layer is None else make_partial(lambda node: node, call, kind, layer)
    expressions.file.tables[name] = made
    return True


def add_functions_of(file: File, cls: type) -> None:
    """Adds the functions of a class that ran to a file."""
    for function in file.recording.functions:
        if function.owner is cls:
            file.add_function(function)


def without_ignored(expressions: Expressions, call: ast.Call, *, is_layer: bool) -> ast.Call:
    """Returns the call of a class without `**options` that layers of a file do not have.

    Those of a class of the source, which may have others another time, are kept if they are empty.
    """
    options = {key: expressions.values(key.value) for key in call.keywords if key.arg is None}
    kept = [
        key
        for key in call.keywords
        if key not in options
        or not all(map(layers.IGNORED.issuperset, options[key]))
        or not (is_layer or any(options[key]))
    ]
    return call if len(kept) == len(call.keywords) else ast.Call(call.func, call.args, kept)


def is_operation(value: Any) -> bool:
    """Returns whether something is a function of PyTorch with arguments."""
    return isinstance(value, functools.partial) and inspect.isbuiltin(value.func)


# Functions that a file has its own of, with the same arguments.
WITH_COUNTERPARTS = (
    nn.utils.weight_norm, nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm,
    nn.Transformer.generate_square_subsequent_mask, checkpoint_sequential,
    nn.functional.kl_div, nn.functional.gaussian_nll_loss, nn.functional.local_response_norm,
    nn.functional.instance_norm,
)  # fmt: skip


TEMPLATES: dict[Any, str] = {
    torch.is_tensor: "isinstance({0}, jax.Array)", torch.finfo: "jnp.finfo({0})",
    **_private.FUNCTIONS_OF_TREES,
    torch.Size: "tuple({0})", torch.numel: "{0}.size", torch.autograd.Variable: "{0}",
}  # fmt: skip


def is_composed(expressions: Expressions, call: ast.Call, callee: Any) -> bool:
    """Returns whether a call of `F.cross_entropy` is of more than logits and labels."""
    if callee is not nn.functional.cross_entropy:
        return False
    labels = [x for item in call.args[1:2] for x in expressions.values(item)]
    return len(call.keywords) > 1 or any(item.is_floating_point() for item in labels)


def has_no_effect(expressions: Expressions, call: ast.Call, callee: Any) -> bool:
    """Returns whether a file does without a call: of hooks, devices or seeds."""
    name, constructs = getattr(call.func, "attr", ""), expressions.file.constructs
    seeds = getattr(callee, "__name__", "") in _SEEDS and constructs(expressions.function)
    function = expressions.file.recording.function_of(callee)
    is_silent = function is not None and only_logs(expressions.file.recording, function)
    is_silent |= is_placement(callee, call, expressions.values)
    return name in _WITHOUT_EFFECT or seeds or is_silent


def only_logs(recording: Recording, function: Function) -> bool:
    """Returns whether all that a function does is to log, or to warn."""
    calls = (node for node in function.nodes if isinstance(node, ast.Call))
    events = [(node, event) for node in calls for event in recording.events.get(node, ())]
    callees = [x.parts[node.func].value if node.func in x.parts else None for node, x in events]
    is_message = [*map(library.is_message, callees)]
    is_harmless = [x in _PURE or isinstance(getattr(x, "__self__", None), str) for x in callees]
    stored = [
        item for node in function.nodes
        for item in (node.targets if isinstance(node, ast.Assign) else ())
    ]  # fmt: skip
    return (
        any(is_message)
        and all(map(operator.or_, is_message, is_harmless))
        and all(isinstance(x, ast.Name) for x in stored)
        and all(isinstance(x, _QUIET) for x in function.nodes[1:] if isinstance(x, ast.stmt))
    )


_PURE = (isinstance, len, str, type, hasattr)
_QUIET = (ast.Assign, ast.Expr, ast.If, ast.Pass)
UNUSED = ("recompute_scale_factor", "antialias")  # of `interpolate`
_SEEDS = frozenset({"manual_seed", "manual_seed_all", "seed"})
_WITHOUT_EFFECT = frozenset({  # hooks of state dicts, and the place of weights in memory
    "flatten_parameters",
    "_register_load_state_dict_pre_hook", "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook", "register_state_dict_pre_hook",
})  # fmt: skip
