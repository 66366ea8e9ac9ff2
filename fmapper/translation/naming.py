"""Names for values: those of the variables in the model's own code, where they are known."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from typing import Any

from fmapper.translation.code import identifier

RESERVED = frozenset({"self", "rngs"}) | frozenset(
    name for name in dir(builtins) if name.islower() and name not in ("input", "copyright")
)


_IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_")  # what torch calls methods that change a tensor


@functools.lru_cache(maxsize=4096)
def targets(statement: str) -> tuple[str, ...]:
    """Returns the variables that a statement assigns to; none for other statements.

    Examples:
        >>> targets("q, k = f(x)"), targets("x += 1"), targets("return x")
        (('q', 'k'), ('x',), ())
        >>> targets("x.masked_fill_(mask, 0.0)"), targets("x.data.clamp_(0, 1)")
        (('x',), ('x',))
    """
    return tuple(map(_name, _parts(_target(statement))))


def _target(statement: str) -> ast.AST | None:
    try:
        tree = ast.parse(statement).body
    except SyntaxError:
        return None
    node = tree[0] if len(tree) == 1 else None
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return node.targets[0]
    match node:
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return target
        case ast.Expr(ast.Call(func=ast.Attribute(value, attr))) if _IN_PLACE.fullmatch(attr):
            return (
                value.value if isinstance(value, ast.Attribute) and value.attr == "data" else value
            )
    return None


def _parts(target: ast.AST | None) -> list[Any]:
    if isinstance(target, ast.Tuple | ast.List):
        return [*target.elts]
    return [] if target is None else [target]


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript | ast.Starred):
        return _name(node.value)
    return ""


def is_plain(statement: str) -> bool:
    """Returns whether a statement is a return or an expression."""
    return not targets(statement)


def fallback(value: str, op: str = "") -> str:
    """Names a value after its operation, where the model's code has no name."""
    kind, _, base = op.partition("::")
    base = base.partition(".")[0] if kind == "aten" else base.removesuffix(".default")
    base = base.rpartition(".")[2]
    base = base or value
    base = re.sub(r"^_+|_+$|_\d+$", "", base)
    return _BETTER.get(base, base) or "value"


_BETTER = {
    "view": "x", "permute": "x", "unsqueeze": "x", "expand": "x", "clone": "x", "cat": "joined",
    "getitem": "part", "to_copy": "x", "mul": "product", "add": "total", "sub": "difference",
    "div": "quotient", "linear": "x", "slice": "part", "select": "part", "mean": "mean",
    "stop_gradient": "x", "native_dropout": "x", "index": "picked", "where": "chosen",
    "bitwise_and": "both", "bitwise_or": "either", "bitwise_not": "rest", "arange": "positions",
    "scaled_dot_product_attention": "attended", "native_layer_norm": "x", "layer_norm": "x",
    "convolution": "x", "squeeze": "x", "softmax": "weights", "bmm": "product", "mm": "product",
    "matmul": "product", "addmm": "x", "stack": "stacked", "relu": "x", "gelu": "x", "silu": "x",
    "pow": "power", "sum": "total", "reshape": "x", "transpose": "x", "truediv": "quotient",
    "scaled_dot_product_attention_with_dropout": "attended",
    "randn": "noise", "randn_like": "noise", "normal": "noise", "normal_functional": "noise",
    "upsample_bilinear2d": "x", "upsample_nearest2d": "x", "upsample_bicubic2d": "x",
    "leaky_relu": "x", "elu": "x", "constant_pad_nd": "x", "pad": "x", "slice_scatter": "x",
    "max_pool2d": "x", "avg_pool2d": "x", "adaptive_avg_pool2d": "x", "linalg_vector_norm": "norm",
    "and": "both", "or": "either", "movedim": "x", "index_select": "picked", "conv2d": "x",
}  # fmt: skip


class Names:
    """The variables of one function, and the value of each.

    Args:
        taken: Names that are not variables here.
    """

    def __init__(self, taken: frozenset[str] = RESERVED) -> None:
        self._taken = taken
        self.holds: dict[str, str] = {}  # variable -> value

    def choose(self, wanted: str, free: set[str]) -> str:
        """Chooses the variable of a value.

        Args:
            wanted: The name that is wanted.
            free: Variables whose values nobody needs any more.
        """
        held = {variable for variable in self.holds if variable not in free}
        return identifier(wanted, held | self._taken)


def singular(plural: str, title: str) -> str:
    """Returns the name for an item of a list, after the list or else after its class.

    Examples:
        >>> singular("layers", "GPTBlock"), singular("h", "GPTBlock"), singular("stack", "")
        ('layer', 'block', 'one_stack')
    """
    if plural.endswith("ies"):
        return f"{plural[:-3]}y"
    if plural.endswith("s") and not plural.endswith("ss") and len(plural) > 1:
        return plural[:-1]
    words: list[str] = re.findall(r"[A-Z][a-z]+", title)
    if words:
        return words[-1].lower()
    return f"one_{plural}" if plural else "one"
