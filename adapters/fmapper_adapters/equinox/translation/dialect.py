"""Files for Equinox."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from fmapper import ConversionError, to_numpy
from fmapper.translation import (
    Class,
    Helper,
    Layer,
    Method,
    expr,
    identifier,
    text,
)
from fmapper_adapters.equinox.translation.helpers import HELPERS
from fmapper_adapters.equinox.translation.layers import kind_of, restate
from fmapper_adapters.equinox.translation.loading import frozen_parts, print_loading
from fmapper_adapters.jax.libraries import JaxDialect, Slices

_FROZEN = "Frozen"  # marks the code of an array that is not trained
_DRAWS = "keys()"
MODE = "inference"  # what `eqx.nn.inference_mode` sets


class EquinoxDialect(JaxDialect):
    """Writes for Equinox.

    Args:
        slices: Arrays of the model of which the program has slices.
        train: Whether the program is that of training.
    """

    title: ClassVar[str] = "Equinox"
    mode: ClassVar[str] = MODE
    in_evaluation: ClassVar[str] = f"self.{MODE}"
    own_imports: ClassVar[Mapping[str, str]] = {
        "eqx": "import equinox as eqx",
        "Callable": "from collections.abc import Callable",
    }
    own_helpers: ClassVar[Mapping[str, Helper]] = HELPERS

    def __init__(self, slices: Slices | None = None, *, keys: bool = False) -> None:
        super().__init__(slices)
        self.passes_keys = keys  # type: ignore[misc]  # only then it draws

    def layer_of_unit(self, structure: Any, unit: Any) -> Layer | None:
        """Returns a layer of Equinox."""
        return restate(super().layer_of_unit(structure, unit))

    def layer_of_call(self, structure: Any, unit: Any, call: Any) -> Layer | None:
        """Returns a layer of Equinox."""
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
        return _mark(array, self.constant(array, saved=saved))

    def loaded_array(self, array: Any) -> ast.expr:
        """Returns an array that is not trained, with values from `load_weights`."""
        return _mark(array, self.zeros(array))

    def make(self, cls: Class) -> ast.expr:
        """Returns `Block(key=keys())`, or `GLU()` where no array is drawn."""
        return expr(f"{cls.name}(key={_DRAWS})" if _takes_key(cls) else f"{cls.name}()")

    def parts(self, made: Sequence[ast.expr]) -> ast.expr:
        """Returns a list."""
        codes = [text(one) for one in made]
        if len(codes) > 1 and len(set(codes)) == 1:
            return expr("[{0} for _ in range({1})]", made[0], len(made))
        return ast.List(list(made), ast.Load())

    def sequence(self, made: Sequence[ast.expr | None]) -> ast.expr:
        """Returns a `Sequential`, which is that of Equinox and takes functions, too."""
        parts = [expr("lambda x: x") if one is None else one for one in made]
        return ast.Call(expr("Sequential"), parts, [])

    def state_name(self, draft: Any, path: str) -> str:
        """Returns the name of an array; the parts of a sequence are its `layers`."""
        found: list[str] = []
        walked = ""
        for step, place in zip(path.split("."), draft.place(path), strict=True):
            if walked in draft.sequences:
                found.append("layers")
            found.append(place)
            walked = f"{walked}.{step}" if walked else step
        return ".".join(found)

    def file(self, draft: Any, classes: Sequence[Class], root: Class) -> str:
        """Returns the file: records, helpers, classes, and `load_weights`.

        Raises:
            ConversionError: A submodule is at two places.
        """
        known = {name: name for name in (*HELPERS, *(cls.name for cls in classes))}
        known |= {f"eqx.nn.{name}": f"eqx.nn.{name}" for name in ("Lambda", "WeightNorm")}
        frozen = frozen_parts(draft)
        for method in root.sketch.methods if frozen else ():
            method.lines.insert(0, "self = freeze(self)")
        blocks = [_class(cls, known, draft) for cls in classes]
        loading = print_loading(draft, "\n".join(blocks), frozen)
        return self.assemble(draft, root.name, [*blocks, loading])


def _class(cls: Class, known: Mapping[str, str], draft: Any) -> str:
    sketch = cls.sketch
    if sketch.ties:
        one, other = sketch.ties[0].replace("self.", "").split(" = ")
        raise ConversionError(
            f"{sketch.path or 'the model'}: {one} and {other} are one submodule, and a tree of "
            f"Equinox has no submodule at two places. Give it to both as an argument of their "
            f"calls, or translate to flax."
        )
    lines = [f"class {cls.name}(eqx.Module):"]
    frozen = {attr for attr, node in sketch.made if _is_frozen(node)}
    made = [(attr, _without_mark(node)) for attr, node in sketch.made]
    lines += [f"    {attr}: {kind_of(node, known)}" for attr, node in made if attr != MODE]
    if any(attr == MODE for attr, _ in made):
        lines.append(f"    {MODE}: bool  # set by eqx.nn.inference_mode")
    if len(lines) > 1:
        lines.append("")
    if not cls.is_bare:
        lines += _constructor(cls, made)
    if any(attr.removeprefix("item_").isdigit() for attr, _ in made):
        lines += ["    def __getitem__(self, index):",
                  '        return getattr(self, f"item_{index}")', ""]  # fmt: skip
    in_sequence = any(path.rpartition(".")[0] in draft.sequences for path in cls.paths)
    for method in sketch.methods:
        parameters = ["self", *method.parameters]
        if in_sequence and method.name == "__call__" and "key=None" not in parameters:
            parameters += ["key=None"] if "*" in parameters else ["*", "key=None"]
        lines.append(f"    def {method.name}({', '.join(parameters)}):")
        lines += [textwrap.indent(line, "        ") for line in _with_fixed(method, frozen)]
        lines.append("")
    return "\n".join(lines).rstrip()


def _constructor(cls: Class, made: Sequence[tuple[str, ast.expr]]) -> list[str]:
    lines = [f"        self.{attr} = {text(node)}" for attr, node in made]
    code = "\n".join(lines)
    if code.count(_DRAWS) == 1 and " for " not in code:
        lines = code.replace(_DRAWS, "key").split("\n")
    elif _DRAWS in code:
        lines.insert(0, "        keys = Keys(key)")
    key = ", *, key" if _takes_key(cls) else ""
    key += "" if _DRAWS in code or not key else "=None"
    return [f"    def __init__(self{key}):", *(lines or ["        pass"]), ""]


def _takes_key(cls: Class) -> bool:
    """Returns whether a constructor draws arrays, or is that of the model."""
    return "" in cls.paths or any(_DRAWS in text(node) for _, node in cls.sketch.made)


def _mark(array: Any, made: ast.expr) -> ast.expr:
    """Returns the code of an array, marked if it would be trained: not one of integers."""
    is_inexact = to_numpy(array).dtype.name.startswith(("float", "bfloat", "complex"))
    return expr(f"{_FROZEN}({{0}})", made) if is_inexact else made


def _is_frozen(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and text(node.func) == _FROZEN


def _without_mark(node: ast.expr) -> ast.expr:
    return node.args[0] if isinstance(node, ast.Call) and _is_frozen(node) else node


def _with_fixed(method: Method, frozen: Iterable[str]) -> list[str]:
    """Returns the statements of a method, which stop gradients to arrays that are not trained."""
    lines = method.print_lines()
    nodes = [node for line in lines for node in ast.walk(ast.parse(line))]
    taken = {*method.parameters, *(node.id for node in nodes if isinstance(node, ast.Name))}
    for attr in sorted(frozen):
        fixed = f"jax.lax.stop_gradient(self.{attr})"
        counts = [_replace(line, f"self.{attr}", "")[1] for line in lines]
        if sum(counts) > 1:
            at = next(i for i, count in enumerate(counts) if count)
            at -= at > 0 and lines[at - 1] in method.comments.values()
            name = identifier(attr, taken)
            taken.add(name)
            lines.insert(at, f"{name} = {fixed}")
            lines[at + 1 :] = [_replace(one, f"self.{attr}", name)[0] for one in lines[at + 1 :]]
        else:
            lines = [_replace(line, f"self.{attr}", fixed)[0] for line in lines]
    return lines


def _replace(statement: str, read: str, by: str) -> tuple[str, int]:
    """Returns a statement that reads something else, but for comments, and how often it does."""
    reads, total, lines = re.compile(rf"\b{re.escape(read)}\b"), 0, []
    for line in statement.split("\n"):
        found, count = (line, 0) if line.lstrip().startswith("#") else reads.subn(by, line)
        total += count
        lines.append(found)
    return "\n".join(lines), total
