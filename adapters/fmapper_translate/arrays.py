"""Parameters and buffers of modules: the variables of the file, read and written."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import torch
from torch import nn

from fmapper.translation import expr, text
from fmapper_translate.printing import rows
from fmapper_translate.targets import layers
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.expressions import Expressions
    from fmapper_translate.recording import Event


def read(expressions: Expressions, base: ast.expr, owner: nn.Module, name: str) -> ast.expr:
    """Returns the code for the value of a module's array, in PyTorch's layout.

    Args:
        expressions: The printer of the function.
        base: The code for the module.
        owner: The module.
        name: The array's name in PyTorch.
    """
    target = expressions.file.target
    layer = expressions.file.layer_of(owner)
    key, order = layer.variable(name) if layer is not None else (name, None)
    constructs = expressions.file.constructs(expressions.function)
    array = target.read(expr(f"{{0}}.{key}", base), getattr(owner, name), constructs=constructs)
    return array if order is None else _transpose(array, _inverse(order))


def value_of(expressions: Expressions, node: ast.expr) -> ast.expr:
    """Returns the code for an expression, of a parameter for its value, even if it may be None."""
    if isinstance(node, ast.Attribute):
        for event in expressions.events(node):
            owner = event.parts[node.value].value if node.value in event.parts else None
            if isinstance(event.value, nn.Parameter) and isinstance(owner, nn.Module):
                return read(expressions, expressions.code(node.value), owner, node.attr)
    return expressions.code(node)


COLLECTIONS = (nn.ParameterList, nn.ParameterDict)


def read_all(expressions: Expressions, code: ast.expr, parameters: nn.Module) -> ast.expr:
    """Returns the code for the values of a list of parameters, or of a dict of them."""
    first = next(iter(parameters.parameters()), None)
    one = expressions.file.target.read(expr("array"), first, constructs=False)
    if isinstance(parameters, nn.ParameterDict):
        return expr("{name: {0} for name, array in {1}.items()}", one, code)
    return expr("[{0} for array in {1}]", one, code)


def read_one(expressions: Expressions, node: ast.Subscript, event: Event) -> ast.expr | None:
    """Returns the code for the value of one of these; None for what is none of them."""
    part = event.parts.get(node.value)
    if part is None or not isinstance(part.value, COLLECTIONS):
        return None
    if expressions.file.constructs(expressions.function):
        return None
    code = expressions.code(node.value)
    whole = code.generators[0].iter if isinstance(code, ast.ListComp | ast.DictComp) else code
    if isinstance(part.value, nn.ParameterDict) and isinstance(whole, ast.Call):
        assert isinstance(whole.func, ast.Attribute)
        whole = whole.func.value
    element = ast.Subscript(whole, expressions.code(node.slice), ast.Load())
    made: ast.expr = expressions.file.target.read(element, event.value, constructs=False)
    return made


def parameter(expressions: Expressions, node: ast.Call) -> ast.expr:
    """Returns the code that makes a parameter, which may be one that is not trained."""
    code, target = expressions.code, expressions.file.target
    named = {key.arg: key.value for key in node.keywords}
    values = [*node.args[:1], *filter(None, [named.get("data")])]
    given = [*filter(None, [named.get("requires_grad")]), *node.args[1:]]
    test = code(given[0]) if given else ast.Constant(True)
    if isinstance(test, ast.Constant):
        return target.array("parameter" if test.value else "buffer", *map(code, values))
    return target.array("choice", code(values[0]), test)


def variable(expressions: Expressions, node: ast.expr) -> ast.expr:
    """Returns the code for the variable of an expression that is an array of a module.

    Raises:
        NotTranscribed: It is something else.
    """
    events = expressions.events(node)
    match node:
        case ast.Attribute(value, "data"):
            return variable(expressions, value)
        case ast.Attribute(value, name):
            owners = [event.parts[value].value for event in events if value in event.parts]
            if not all(isinstance(item, nn.Module) for item in owners):
                raise NotTranscribed("it is an array of no module")
            file = expressions.file
            kinds = [file.layers.base_of(type(owner)) for owner in owners]  # before they are tied
            kinds += map(file.layer_of, owners)
            keys = {layer.variable(name)[0] if layer is not None else name for layer in kinds}
            base = expressions.code(value)
            if len(keys) != 1 and name != "bias":  # which all layers call so
                return expr(f"array_of({{0}}, {name!r})", base)
            return ast.Attribute(base, keys.pop() if keys else name, ast.Load())
        case ast.Name() if events and all(isinstance(x.value, nn.Parameter) for x in events):
            return node
    raise NotTranscribed("it is an array of no module")


def _orders(expressions: Expressions, node: ast.expr) -> set[layers.Order]:
    """Returns the orders of an array's dimensions in its variable; see `Layer.arrays`."""
    if isinstance(node, ast.Attribute) and node.attr == "data":
        return _orders(expressions, node.value)
    values = expressions.values(node)
    kept = [item for item in values if isinstance(item, nn.Parameter)]  # not computed of others
    return {expressions.file.order_of(item) for item in kept or values}


def order(expressions: Expressions, node: ast.expr) -> layers.Order:
    """Returns the order of an array's dimensions in its variable; see `Layer.arrays`.

    Raises:
        NotTranscribed: It is another one another time, or the array is of no module.
    """
    orders = _orders(expressions, node)
    if len(orders) != 1:
        raise NotTranscribed("its layout is another one for each layer")
    return orders.pop()


def has_sources_layout(expressions: Expressions, node: ast.expr) -> bool:
    """Returns whether an array's dimensions are in the order of the source.

    Raises:
        NotTranscribed: They are at times, or the array is of no module.
    """
    kinds = {order is None for order in _orders(expressions, node)}
    if len(kinds) != 1:
        raise NotTranscribed("its layout is another one for each layer")
    return kinds.pop()


def write(expressions: Expressions, node: ast.expr, value: ast.expr) -> str:
    """Returns the statement that gives an array of a module a value in PyTorch's layout."""
    target, axes = variable(expressions, node), order(expressions, node)
    made = value if axes is None else _transpose(value, axes)
    file = expressions.file
    return file.target.write(file, expressions.function, target, made)


def is_computed(expressions: Expressions, node: ast.expr) -> bool:
    """Returns whether an expression is a tensor, and no parameter."""
    values = expressions.values(node)
    kinds = [isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter) for x in values]
    return bool(kinds) and all(kinds)


def stays(expressions: Expressions, target: ast.expr, value: ast.expr) -> bool:
    """Returns whether a call gives an attribute what it is: `self.mask = self.mask.to(x)`."""
    name, events = ast.unparse(target), expressions.events(value)
    reads = [node for node in ast.walk(value) if ast.unparse(node) == name]
    values = [x for read in reads[:1] for x in expressions.values(read)]  # type: ignore[arg-type]
    is_same = [event.value is x for event, x in zip(events, values, strict=False)]
    return isinstance(target, ast.Attribute) and bool(is_same) and all(is_same)


def write_part(
    expressions: Expressions,
    target: ast.Subscript,
    value: ast.expr,
    op: ast.operator | None = None,
) -> str:
    """Returns the statement that writes a value into a part of an array.

    Args:
        expressions: The printer of the function.
        target: The part.
        value: The value.
        op: What computes the new one with it and the old one.

    Raises:
        NotTranscribed: It is a part of a part.
    """
    owner, index, new = (
        expressions.code(target.value),
        expressions.code(target.slice),
        expressions.code(value),
    )
    if isinstance(target.value, ast.Subscript | ast.Call):
        raise NotTranscribed("it writes into a part of a part")
    parts = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    values = [next(iter(expressions.values(part)), None) for part in parts]
    under = (
        under_mask(expressions, target, value)
        if rows.is_mask(values[0]) and len(parts) == 1
        else None
    )
    method = None if op is None else _METHODS.get(type(op))
    if under is not None:
        made = under if op is None else ast.BinOp(owner, op, under)
        made = expr("jnp.where({0}, {1}, {2})", index, made, owner)
    elif method is not None and not any(isinstance(item, torch.Tensor) for item in values):
        made = expr(f"{{0}}.at[{{1}}].{method}({{2}})", owner, index, new)
    else:
        index, read = rows.place(expressions.file.places, index, values)
        if op is not None:  # PyTorch writes once where an index is there several times
            new = ast.BinOp(expr(f"{{0}}{read}", owner, index), op, new)
        made = expr("{0}.at[{1}].set({2})", owner, index, new)
    if is_array(expressions, target.value):
        return write(expressions, target.value, made)
    return f"{text(owner)} = {text(made)}"


_METHODS = {ast.Add: "add", ast.Mult: "multiply", ast.Div: "divide"}  # of parts of arrays


def change(expressions: Expressions, node: ast.expr, sign: str, value: ast.expr) -> str:
    """Returns the statement that adds a number to an array of a module, or multiplies it.

    Raises:
        NotTranscribed: The number is an array in another layout.
    """
    is_number = not any(getattr(item, "ndim", 0) for item in expressions.values(value))
    if not is_number and not has_sources_layout(expressions, node):
        raise NotTranscribed("it has another layout")
    array, new = variable(expressions, node), expressions.code(value)
    file = expressions.file
    return file.target.write(file, expressions.function, array, new, sign)


def is_array(expressions: Expressions, node: ast.expr) -> bool:
    """Returns whether an expression is an array of a module."""
    values = expressions.values(node)
    if not values or not all(isinstance(item, torch.Tensor) for item in values):
        return False
    try:
        variable(expressions, node)
    except NotTranscribed:
        return False
    return True


def is_local(expressions: Expressions, node: ast.expr) -> bool:
    """Returns whether an expression is a variable with a tensor that no parameter is made of.

    What a constructor does with it is not about first values.
    """
    values = expressions.values(node)
    if not isinstance(node, ast.Name) or not values:
        return False
    parameters = {x.untyped_storage().data_ptr() for x in expressions.file.model.parameters()}
    return all(
        type(value) is torch.Tensor and value.untyped_storage().data_ptr() not in parameters
        for value in values
    )


def tie(expressions: Expressions, target: ast.expr, value: ast.expr) -> list[str] | None:
    """Returns the statement that gives a linear layer and an embedding one matrix.

    There is none if the layer has no bias and is the function's object's own: it is left out, and
    its calls are the embedding's `attend`. None if this is another assignment.
    """
    match target, value:
        case ast.Attribute(one, "weight"), ast.Attribute(other, "weight"):
            parts = [expressions.values(node) for node in (one, other)]
        case _:
            return None
    if not all(parts):
        return None
    linear, table = parts[0][-1], parts[1][-1]
    nodes = [one, other]
    if isinstance(linear, nn.Embedding):
        linear, table = table, linear
        nodes.reverse()
    if not isinstance(linear, nn.Linear) or not isinstance(table, nn.Embedding):
        return None
    codes = [text(expressions.code(node)) for node in nodes]
    is_own = isinstance(nodes[0], ast.Attribute) and isinstance(nodes[0].value, ast.Name)
    statements = expressions.function.tree.body
    is_always = any(getattr(item, "value", None) is value for item in statements)
    if linear.bias is None and is_own and is_always:
        expressions.file.tie(linear, expressions.function, codes[1])
        return []
    if expressions.file.target.is_tree:
        return None
    expressions.file.tie(linear)
    given = codes if nodes[0] is one else codes[::-1]
    return [f"tie({', '.join(given)})"]


def share(expressions: Expressions, target: ast.Attribute, value: ast.expr) -> str:
    """Returns the statement that gives a module an array of another one, which both then have.

    Raises:
        NotTranscribed: They have it in other layouts.
    """
    owners = expressions.values(target.value)
    layer = expressions.file.layer_of(owners[-1]) if owners else None
    key, axes = layer.variable(target.attr) if layer is not None else (target.attr, None)
    if axes != _order_in_its_layer(expressions, value):
        raise NotTranscribed("both have other layouts")
    shared = variable(expressions, value)
    return f"{text(expressions.code(target.value))}.{key} = {text(shared)}"


def replace(expressions: Expressions, target: ast.Attribute, code: ast.expr) -> str | None:
    """Returns the statement that gives a layer a new array, whose name is another one in the file.

    None for another module, or an array that has its name and dimensions in the file, too.

    Args:
        expressions: The printer of the function.
        target: The array of the layer.
        code: The code for the new one.
    """
    owners = expressions.values(target.value)
    layer = expressions.file.layer_of(owners[-1]) if owners else None
    key, axes = layer.variable(target.attr) if layer is not None else (target.attr, None)
    if key == target.attr and axes is None:
        return None
    if not isinstance(code, ast.Call) or len(code.args) != 1:
        raise NotTranscribed("it is not an array that is made here")
    args = code.args if axes is None else [_transpose(code.args[0], axes)]
    made = ast.Call(code.func, args, code.keywords)
    return f"{text(expressions.code(target.value))}.{key} = {text(made)}"


def _order_in_its_layer(expressions: Expressions, node: ast.expr) -> layers.Order:
    """Returns the order of an array in its layer; tied to another one it may have that of both."""
    owners = expressions.values(node.value) if isinstance(node, ast.Attribute) else []
    layer = expressions.file.layer_of(owners[-1]) if owners else None
    if layer is None or not isinstance(node, ast.Attribute):
        return order(expressions, node)
    return layer.variable(node.attr)[1]


def argument(expressions: Expressions, node: ast.expr) -> ast.expr:
    """Returns the code for an argument of a function that may write into arrays."""
    if not is_array(expressions, node):
        return expressions.code(node)
    match variable(expressions, node):
        case ast.Attribute(owner, name):
            return expr(expressions.file.target.place.format("{0}", name), owner)
        case other:
            return other


def refuse_change(expressions: Expressions, target: ast.expr) -> None:
    """Refuses to give a module another attribute when it is called, where it is a tree.

    Raises:
        NotTranscribed: It is one.
    """
    file = expressions.file
    if isinstance(target, ast.Attribute) and file.target.is_tree:
        owners = [x for x in expressions.values(target.value) if isinstance(x, nn.Module)]
        is_slot = any(file.slots.has(owner, target.attr) for owner in owners)
        if owners and not is_slot and not file.constructs(expressions.function):
            raise NotTranscribed(f"{ast.unparse(target)} changes when the model is called")


def under_mask(expressions: Expressions, target: ast.Subscript, value: ast.expr) -> ast.expr | None:
    """Returns what is written under a mask: a number, or an array of the target's size.

    None for an array of as many rows as elements hold.
    """
    owners, masks = map(expressions.values, (target.value, target.slice))
    if all(owner.ndim == mask.ndim for owner, mask in zip(owners, masks, strict=True)):
        is_number = [getattr(item, "ndim", 0) == 0 for item in expressions.values(value)]
        if isinstance(value, ast.Constant) or (is_number and all(is_number)):
            return expressions.code(value)
        match value:
            case ast.Subscript(inner, mask) if ast.dump(mask) == ast.dump(target.slice):
                return expressions.code(inner)
    return None


def index_of(node: ast.expr) -> ast.expr:
    """Returns an index whose lists are arrays, as JAX wants them."""
    if isinstance(node, ast.Tuple):
        return ast.Tuple([index_of(item) for item in node.elts], ast.Load())
    return expr("jnp.array({0})", node) if isinstance(node, ast.List) else node


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(order.index, range(len(order))))


def _transpose(array: ast.expr, order: tuple[int, ...]) -> ast.expr:
    return expr("{0}.T", array) if order == (1, 0) else expr("{0}.transpose({1})", array, order)
