"""Files for plain JAX."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fmapper import ConversionError, to_numpy
from fmapper.translation import Class, Helper, Layer, expr, text
from fmapper_adapters.jax.translation.dialect import JaxDialect
from fmapper_adapters.jax.translation.functions.bodies import print_function
from fmapper_adapters.jax.translation.functions.helpers import HELPERS
from fmapper_adapters.jax.translation.functions.layers import LAYER, restate
from fmapper_adapters.jax.translation.functions.loading import buffers_of, print_loading
from fmapper_adapters.jax.translation.functions.things import (
    FROZEN,
    Function,
    items_of,
)
from fmapper_adapters.jax.translation.layers.slices import Slices

_DRAWS = "keys()"


class FunctionsDialect(JaxDialect):
    """Writes functions for JAX.

    Args:
        slices: Arrays of the model of which the program has slices.
        train: Whether the program is that of training.
    """

    own_helpers: ClassVar[Mapping[str, Helper]] = HELPERS
    has_sequences: ClassVar[bool] = False

    def __init__(self, slices: Slices | None = None, *, keys: bool = False) -> None:
        super().__init__(slices)
        self.passes_keys = keys  # type: ignore[misc]  # only then it draws

    def reserved_names(self) -> frozenset[str]:
        """Returns the names of imports, helpers and of the arguments of functions."""
        return super().reserved_names() | {"params", "buffers", "BUFFERS"}

    def layer_of_unit(self, structure: Any, unit: Any) -> Layer | None:
        """Returns a layer as a function."""
        return restate(super().layer_of_unit(structure, unit))

    def layer_of_call(self, structure: Any, unit: Any, call: Any) -> Layer | None:
        """Returns a layer as a function."""
        return restate(super().layer_of_call(structure, unit, call))

    def parameter(self, array: Any) -> ast.expr:
        """Returns an array, with its values if they are constant."""
        known = self.fill(array)
        if known is not None:
            return known
        shape = tuple(int(size) for size in array.shape)
        dtype = self.dtype(to_numpy(array).dtype.name)
        return expr("0.02 * jax.random.normal(keys(), {0}, {1})", shape, dtype)

    def frozen_array(self, array: Any, *, kind: str, saved: bool = False) -> ast.expr:
        """Returns an array that is not trained."""
        return expr(f"{FROZEN}({{0}})", self.constant(array, saved=saved))

    def loaded_array(self, array: Any) -> ast.expr:
        """Returns an array that is not trained, with values from `load_weights`."""
        return expr(f"{FROZEN}({{0}})", self.zeros(array))

    def make(self, cls: Class) -> ast.expr:
        """Returns `Block()`, which becomes a call of the function that makes its arrays."""
        return expr(f"{cls.name}()")

    def parts(self, made: Sequence[ast.expr]) -> ast.expr:
        """Returns a list."""
        codes = [text(one) for one in made]
        if len(codes) > 1 and len(set(codes)) == 1:
            return expr("[{0} for _ in range({1})]", made[0], len(made))
        return ast.List(list(made), ast.Load())

    def sequence(self, made: Sequence[ast.expr | None]) -> ast.expr:
        """Raises: a sequence is a function.

        Raises:
            ConversionError: Always.
        """
        raise ConversionError("plain JAX has no sequence of parts")

    def file(self, draft: Any, classes: Sequence[Class], root: Class) -> str:
        """Returns the file: records, helpers, functions, and `load_weights`.

        Raises:
            ConversionError: A submodule is at two places.
        """
        for cls in classes:
            _refuse_ties(cls)
        functions = _functions(draft, classes, self.reserved_names())
        buffers = buffers_of(draft)
        blocks = []
        for cls in classes:
            function = functions[cls.name]
            is_root = cls is root
            if function.has_arrays:
                blocks.append(_print_init(function, functions, splits=is_root and bool(buffers)))
            for method in cls.sketch.methods:
                code = print_function(function, method, functions)
                if is_root and buffers and method.name == "__call__":
                    code = _with_buffers(code)
                blocks.append(code)
        own = functions[root.name]
        loading = [print_loading(draft, buffers)] if own.has_arrays else []
        root.name = own.name
        return self.assemble(draft, root.name, [*blocks, *loading])


def _refuse_ties(cls: Class) -> None:
    if cls.sketch.ties:
        one, other = cls.sketch.ties[0].replace("self.", "").split(" = ")
        raise ConversionError(
            f"{cls.sketch.path or 'the model'}: {one} and {other} are one submodule, and a tree of "
            f"arrays has none at two places. Give it to both as an argument of their calls, or "
            f"translate to flax."
        )


def _functions(
    draft: Any, classes: Sequence[Class], reserved: frozenset[str]
) -> dict[str, Function]:
    """Returns the functions by the names of their classes; those of parts come first."""
    taken = set(reserved)
    for cls in classes:
        taken |= {name.partition("=")[0] for one in cls.sketch.methods for name in one.parameters}
        for node in cls.sketch.nodes():
            taken |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        taken -= {cls.name for cls in classes}
    found: dict[str, Function] = {}
    for cls in classes:
        snake = _snake_case(cls.name)
        name, number = snake, 1
        while {name, f"init_{name}"} & taken:
            number += 1
            name = f"apply_{snake}" if number == 2 else f"{snake}_{number}"
        taken |= {name, f"init_{name}"}
        node = draft._node(cls.sketch.path)
        attrs = [attr for attr, _ in cls.sketch.made]
        keys = dict(zip(attrs, node.children, strict=True))
        function = Function(cls, name, keys)
        function.has_arrays = any(_arrays(one, found) is not None for _, one in cls.sketch.made)
        found[cls.name] = function
    return found


def _snake_case(name: str) -> str:
    """Returns a name in the form of functions.

    Examples:
        >>> _snake_case("BasicBlock"), _snake_case("ViTBlock"), _snake_case("UNet")
        ('basic_block', 'vit_block', 'unet')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=\w[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _arrays(made: ast.expr, functions: Mapping[str, Function]) -> ast.expr | None:
    """Returns the code that makes the arrays of a part; None where there are none."""
    if isinstance(made, ast.ListComp):
        one = _arrays(made.elt, functions)
        return None if one is None else ast.ListComp(one, made.generators)
    if isinstance(made, ast.List):
        items = [_arrays(one, functions) for one in items_of(made)]
        if not any(items):
            return None
        codes = [one or expr("None") for one in items]
        if len(codes) > 1 and len(set(map(text, codes))) == 1:
            return expr("[{0} for _ in range({1})]", codes[0], len(codes))
        return ast.List(codes, ast.Load())
    if isinstance(made, ast.Call):
        name = text(made.func)
        if name == LAYER:
            return None if text(made.args[1]) == "None" else made.args[1]
        if name == FROZEN:
            return made.args[0]
        if name in functions:
            own = functions[name]
            return expr(f"init_{own.name}({_DRAWS})") if own.has_arrays else None
    return None if isinstance(made, ast.Constant) else made


def _print_init(function: Function, functions: Mapping[str, Function], *, splits: bool) -> str:
    rows = []
    for attr, made in function.cls.sketch.made:
        arrays = _arrays(made, functions)
        if arrays is not None:
            rows.append(f"        {function.keys[attr]!r}: {text(arrays)},")
    lines = ["    return {", *rows, "    }"]
    if splits:
        lines = ["    return split({", *rows, "    })"]
    code = "\n".join(lines)
    if code.count(_DRAWS) == 1 and " for _ in range" not in code:
        lines = code.replace(_DRAWS, "key").split("\n")
    elif _DRAWS in code:
        lines.insert(0, "    keys = Keys(key)")
    key = "key" if _DRAWS in code else "key=None"
    return "\n".join([f"def init_{function.name}({key}):", *lines])


def _with_buffers(code: str) -> str:
    """Returns the function of the model with its arrays in two trees."""
    header, *lines = code.split("\n")
    header = header.replace("(params", "(params, buffers", 1)
    at = sum(1 for _ in itertools.takewhile(lambda line: line.startswith("    #"), lines))
    return "\n".join([header, *lines[:at], "    params = merge(params, buffers)", *lines[at:]])
