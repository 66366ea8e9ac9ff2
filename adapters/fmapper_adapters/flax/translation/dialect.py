"""Files for Flax NNX."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fmapper import ConversionError, to_numpy
from fmapper.translation import (
    Class,
    Dialect,
    Helper,
    Layer,
    Statement,
    expr,
    helpers_of,
    identifier,
    literal,
    names_in,
    text,
)
from fmapper_adapters.flax.translation import layers
from fmapper_adapters.flax.translation.helpers import HELPERS
from fmapper_adapters.flax.translation.slices import Slices, tables_of
from fmapper_adapters.jax.libraries import JaxPrinters

_IMPORTS = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "math": "import math",
    "nnx": "from flax import nnx",
    "partial": "from functools import partial",
    "NamedTuple": "from typing import NamedTuple",
    "base64": "import base64",
    "zlib": "import zlib",
}
_RESERVED = frozenset({
    *_IMPORTS, "load_weights", "take_apart", "ARRAYS", "RENAMED", "SLICES", "Buffer", "FrozenParam",
})  # fmt: skip
_MOST = 64  # elements of an array that is written out


class FlaxDialect(Dialect):
    """Writes for Flax NNX.

    Args:
        slices: Arrays of the model of which the program has slices.
    """

    parameters: ClassVar[Mapping[str, Sequence[str]]] = {
        "nnx.Linear": ("in_features", "out_features"),
        "nnx.Embed": ("num_embeddings", "features"),
        "nnx.LayerNorm": ("num_features",),
        "nnx.RMSNorm": ("num_features",),
        "BatchNorm": ("num_features",),
        "GroupNorm": ("num_features", "num_groups"),
        "Conv": ("in_features", "out_features", "kernel_size"),
        "ConvTranspose": ("in_features", "out_features", "kernel_size"),
        "GroupedConvTranspose": ("in_features", "out_features", "kernel_size"),
        "Recurrent": ("cell", "in_features", "features"),
        "LSTMCell": ("in_features", "features"),
        "GRUCell": ("in_features", "features"),
        "RNNCell": ("in_features", "features"),
        "nnx.Dropout": ("rate",),
    }

    defaults: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "nnx.Linear": {"use_bias": True},
        "nnx.LayerNorm": {"use_scale": True, "use_bias": True},
        "BatchNorm": {"momentum": 0.99, "epsilon": 1e-05, "use_scale": True, "use_bias": True},
        "Conv": {"use_bias": True, "strides": 1, "kernel_dilation": 1, "feature_group_count": 1},
        "ConvTranspose": {"use_bias": True, "strides": 1, "kernel_dilation": 1},
    }

    def __init__(self, slices: Slices | None = None) -> None:
        self._jax = JaxPrinters()
        self.slices = slices or {}

    def reserved_names(self) -> frozenset[str]:
        """Returns the names of imports and helpers."""
        return _RESERVED | HELPERS.keys() | self._jax.reserved_names()

    def printer(self, op: str) -> Any:
        """Returns the printer of JAX."""
        return self._jax.printer(op)

    def helper(self, name: str) -> Helper | None:
        """Returns a helper of Flax, or of JAX."""
        return HELPERS.get(name) or self._jax.helper(name)

    def fallback(self, call: Any) -> str:
        """Returns the lowering to JAX as a helper."""
        return self._jax.fallback(call)

    def layer_of_unit(self, structure: Any, unit: Any) -> Layer | None:
        """Returns a layer of NNX."""
        return layers.layer_of_unit(structure, unit)

    def layer_of_call(self, structure: Any, unit: Any, call: Any) -> Layer | None:
        """Returns a layer of NNX."""
        return layers.layer_of_call(structure, unit, call)

    def dtype(self, name: str) -> ast.expr:
        """Returns `jnp.float32` and its like."""
        return self._jax.dtype(name)

    def read_array(self, node: ast.expr, order: tuple[int, ...] | None) -> ast.expr:
        """Returns the code that reads a variable, with its dimensions permuted."""
        values = expr("{0}[...]", node)
        if order is None:
            return values
        return (
            expr("{0}.T", values) if order == (1, 0) else expr("{0}.transpose({1})", values, order)
        )

    def write_array(self, node: ast.expr, value: ast.expr) -> Statement:
        """Returns the code that writes a variable."""
        return Statement((text(expr("{0}[...]", node)),), value)

    def stack(self, node: ast.expr) -> ast.expr:
        """Returns `jnp.stack(ys)`."""
        return expr("jnp.stack({0})", node)

    def rows(self, node: ast.expr, *, reverse: bool) -> ast.expr:
        """Returns the array itself, or reversed along its first dimension."""
        return expr("jnp.flip({0}, 0)", node) if reverse else node

    def parameter(self, array: Any) -> ast.expr:
        """Returns an `nnx.Param`, with its values if they are constant."""
        shape = tuple(int(size) for size in array.shape)
        values = to_numpy(array)
        known = _fill(values, self.dtype(values.dtype.name))
        if known is None:
            dtype = self.dtype(values.dtype.name)
            known = expr("nnx.initializers.normal()(rngs.params(), {0}, {1})", shape, dtype)
        return expr("nnx.Param({0})", known)

    def frozen_array(self, array: Any, *, kind: str) -> ast.expr:
        """Returns a variable that is not trained."""
        return expr(f"{kind}({{0}})", self.constant(array))

    def constant(self, array: Any) -> ast.expr:
        """Returns the code for an array: a computation, its elements, or its bytes."""
        values = np.asarray(to_numpy(array))
        dtype = self.dtype(values.dtype.name)
        known = _fill(values, dtype) or _compute(values, dtype)
        if known is not None:
            return known
        if values.size <= _MOST and values.dtype.kind in "biuf" and np.isfinite(values).all():
            return expr("jnp.array({0}, dtype={1})", literal(values.tolist()), dtype)
        return self._jax.pack(values)

    def make(self, cls: str, arguments: Sequence[Any]) -> ast.expr:
        """Returns `Block(64, rngs=rngs)`."""
        given = ", ".join([f"{{{i}}}" for i in range(len(arguments))] + ["rngs=rngs"])
        return expr(f"{cls}({given})", *arguments)

    def parts(self, made: Sequence[ast.expr]) -> ast.expr:
        """Returns an `nnx.List`."""
        codes = [text(one) for one in made]
        if len(codes) > 1 and len(set(codes)) == 1:
            return expr("nnx.List([{0} for _ in range({1})])", made[0], len(made))
        return expr("nnx.List({0})", list(made))

    def sequence(self, made: Sequence[ast.expr | None]) -> ast.expr:
        """Returns a `Sequential`, which is an `nnx.List` that can be called."""
        parts = [expr("lambda x: x") if one is None else one for one in made]
        return expr("Sequential({0})", parts)

    def file(self, draft: Any, classes: Sequence[Class], root: Class) -> str:
        """Returns the file: records, helpers, classes, and `load_weights`."""
        blocks = [_record(cls, fields) for cls, fields in draft.records.items()]
        blocks += [_class(cls) for cls in classes]
        blocks.append(_print_loading(draft, root))
        body = "\n\n\n".join(blocks)
        everything = "\n\n\n".join([*helpers_of(body, self.helper), body])
        used = names_in(everything)
        known = {**_IMPORTS, **self._jax.imports()}
        lines = sorted({line for name, line in known.items() if name in used})
        plain = [line for line in lines if line.startswith("import ")]
        origin = draft.program.types.get("", "")
        origin = origin if re.fullmatch(r"[\w.<>]+", origin) else ""
        beginning = f"{root.name} for Flax NNX{f', from {origin}' if origin else ''}"
        head = f'"""{beginning}; written by fmapper."""'
        others = [line for line in lines if not line.startswith("import ")]
        return f"{head}\n\n" + "\n".join([*plain, *others]) + f"\n\n\n{everything}\n"


def _fill(values: Any, dtype: ast.expr) -> ast.expr | None:
    """Returns the code for a constant array."""
    if values.size == 0 or values.dtype.kind not in "biuf":
        return None
    first = values.reshape(-1)[0]
    if not (values == first).all():
        return None
    shape = tuple(int(size) for size in values.shape)
    if values.ndim == 0:
        return expr("jnp.array({0}, dtype={1})", first.item(), dtype)
    if first == 0 and not np.signbit(np.asarray(values, np.float64)).any():
        return expr("jnp.zeros({0}, {1})", shape, dtype)
    if first == 1:
        return expr("jnp.ones({0}, {1})", shape, dtype)
    return expr("jnp.full({0}, {1}, {2})", shape, first.item(), dtype)


def _compute(values: Any, dtype: ast.expr) -> ast.expr | None:
    """Returns the code that computes an array: positions, a triangle, or rotary frequencies."""
    flat = values.reshape(-1)
    if values.dtype.kind in "iu" and values.size > 2:
        step = int(flat[1]) - int(flat[0])
        if step and (np.diff(flat.astype(np.int64)) == step).all():
            start, stop = int(flat[0]), int(flat[-1]) + step
            given = (start, stop, step) if step != 1 else (start, stop) if start else (stop,)
            node = expr(f"jnp.arange({', '.join(map(repr, given))}, dtype={{0}})", dtype)
            return node if values.ndim == 1 else expr("{0}.reshape({1})", node, tuple(values.shape))
    if values.ndim >= 2 and values.shape[-1] > 2 and values.dtype.kind in "biuf":
        square = np.broadcast_to(np.tri(*values.shape[-2:]), values.shape)
        if (values == square).all():
            return expr("jnp.tril(jnp.ones({0}, {1}))", tuple(values.shape), dtype)
    if values.dtype == np.float32 and values.ndim == 1 and values.size > 1 and flat[0] == 1:
        size = values.size
        if flat[-1] > 0:
            base = float(np.float64(flat[1]) ** -size)
            for guess in (round(base), round(base, 2), round(base / 100) * 100):
                if guess > 1:
                    wanted = 1.0 / guess ** (np.arange(0, 2 * size, 2) / (2 * size))
                    if np.allclose(values, wanted.astype(np.float32), rtol=3e-7, atol=0):
                        power = f"jnp.arange(0, {2 * size}, 2) / {2 * size}"
                        return expr(f"1.0 / {float(guess)!r} ** ({power})")
    return None


def _record(cls: str, fields: Sequence[str]) -> str:
    lines = [f"class {cls}(NamedTuple):", *(f"    {field}: jax.Array" for field in fields)]
    return "\n".join(lines if fields else [*lines, "    pass"])


def _class(cls: Class) -> str:
    sketch = cls.sketch
    lines = [f"class {cls.name}(nnx.Module):"]
    parameters = "".join(f", {name}" for name in cls.parameters)
    if sketch.made or cls.stored or sketch.ties or cls.parameters:
        lines.append(f"    def __init__(self{parameters}, *, rngs: nnx.Rngs):")
        lines += [f"        self.{name} = {name}" for name in cls.stored]
        lines += [f"        self.{attr} = {text(node)}" for attr, node in sketch.made]
        lines += [f"        {tie}" for tie in sketch.ties]
        lines.append("")
    else:
        lines += ["    def __init__(self, *, rngs: nnx.Rngs):", "        pass", ""]
    if any(attr.removeprefix("item_").isdigit() for attr, _ in sketch.made):
        lines += [
            "    def __getitem__(self, index):",
            '        return getattr(self, f"item_{index}")',
            "",
        ]
    for method in sketch.methods:
        lines.append(f"    def {method.name}({', '.join(['self', *method.parameters])}):")
        lines += [textwrap.indent(line, "        ") for line in method.print_lines()]
        lines.append("")
    return "\n".join(lines).rstrip()


_LOAD = '''def load_weights(model: nnx.Module, state, strict=True) -> nnx.Module:
    """Fills the model with the arrays of the source's state dict, by name; returns it.

    With `strict=False` parameters that are not in there stay as they are.
    """
    state = take_apart(state)
    for path, layer in nnx.iter_modules(model):
        names = next((found for cls, found in ARRAYS.items() if isinstance(layer, cls)), {})
        for key, variable in vars(layer).items():
            if not isinstance(variable, nnx.Variable) or isinstance(variable, nnx.RngState):
                continue
            source, order = names.get(key, (key, None))
            name = ".".join(map(str, (*path, source)))
            for ours, theirs in RENAMED.items():
                if f".{name}".endswith(f".{ours}"):
                    name = name.removesuffix(ours) + theirs
                    break
            if name in state or (strict and isinstance(variable, nnx.Param)):
                array = jnp.asarray(state[name])
                variable[...] = array if order is None else array.transpose(order)
    return model'''

_TAKE_APART = '''def take_apart(state):
    """Returns a state that has the slices of arrays, too."""
    found = dict(state)
    for name, array in state.items():
        for end, slices in SLICES.items():
            if f".{name}".endswith(f".{end}"):
                owner = name.removesuffix(end)
                found |= {owner + key: array[start:stop] for key, (start, stop) in slices.items()}
    return found


'''
_RENAMING = """            for ours, theirs in RENAMED.items():
                if f".{name}".endswith(f".{ours}"):
                    name = name.removesuffix(ours) + theirs
                    break
"""

# Classes of layers -> their arrays -> how torch calls them.
_ARRAYS = {
    "nnx.Linear": ("kernel", "weight"),
    "nnx.Embed": ("embedding", "weight"),
    "nnx.LayerNorm": ("scale", "weight"),
    "nnx.RMSNorm": ("scale", "weight"),
    "GroupNorm": ("scale", "weight"),
    "BatchNorm": ("scale", "weight"),
    "Conv": ("kernel", "weight"),
    "ConvTranspose": ("kernel", "weight"),
    "GroupedConvTranspose": ("kernel", "weight"),
}


def _print_loading(draft: Any, root: Class) -> str:
    """Returns `load_weights` with its tables."""
    by_path: dict[str, str] = {}
    arrays: dict[str, dict[str, Any]] = {}  # classes of layers -> their arrays -> the order
    for path, layer in _layers(draft.root, ""):
        by_path[path] = layer.kind
        by_path |= {
            f"{path}.{inner}" if path else inner: kind for inner, kind in layer.inner.items()
        }
        for attr, order in layer.arrays.values():
            owner, _, last = attr.rpartition(".")
            arrays.setdefault(layer.inner.get(owner, layer.kind), {}).setdefault(last, order)
    table = {}
    for kind, held in arrays.items():
        names = {}
        for attr, order in held.items():
            known, source = _ARRAYS.get(kind, (attr, attr))
            name = source if attr == known else attr
            name = {"mean": "running_mean", "var": "running_var"}.get(attr, name)
            if (name, order) != (attr, None):
                names[attr] = (name, order)
        if names:
            table[kind] = names
    renamed: dict[str, str] = {}
    everything: dict[str, str] = {}
    for path, (target, order) in draft._arrays().items():
        owner, _, attr = path.rpartition(".")
        expected, layout = table.get(by_path.get(owner, ""), {}).get(attr, (attr, None))
        wanted = ".".join((*draft.place(owner), identifier(expected)))
        everything[wanted] = target
        if wanted != target:
            renamed[wanted] = target
        for other in draft.structure.paths.get(owner, ()) if owner else ():
            if other != owner and draft.program.first_paths.get(other) == other:
                twin = ".".join((*draft.place(other), identifier(expected)))
                everything[twin] = renamed[twin] = target
        if layout != order:
            raise ConversionError(f"{path}: layers of one class have their arrays in two orders")
    rows = [f"    {kind}: {names!r}," for kind, names in table.items()]
    ends = _by_suffix(renamed, everything)
    table_of_names = [f"    {ours!r}: {theirs!r}," for ours, theirs in ends.items()]
    lines = ["ARRAYS = {", *rows, "}"]
    loading = _LOAD
    if ends:
        lines += ["RENAMED = {", *table_of_names, "}"]
    else:
        loading = _LOAD.replace(_RENAMING, "")
    slices = tables_of(draft.dialect.slices)
    if slices:
        rows = [f"    {whole!r}: {parts!r}," for whole, parts in slices.items()]
        lines += ["SLICES = {", *rows, "}"]
        loading = _TAKE_APART + loading
    else:
        loading = loading.replace("    state = take_apart(state)\n", "")
    return "\n".join([*lines, "", "", loading])


def _by_suffix(renamed: Mapping[str, str], everything: Mapping[str, str]) -> dict[str, str]:
    """Maps suffixes of names to replacements, as short as possible."""
    found: dict[str, str] = {}
    for ours, theirs in renamed.items():
        one, other = ours.split("."), theirs.split(".")
        shared = 0
        while shared < min(len(one), len(other)) - 1 and one[shared] == other[shared]:
            shared += 1
        short = ".".join(one[shared:]), ".".join(other[shared:])
        for begin in range(shared, -1, -1):
            short = ".".join(one[begin:]), ".".join(other[begin:])
            if all(
                name.removesuffix(short[0]) + short[1] == source
                for name, source in everything.items()
                if f".{name}".endswith(f".{short[0]}")
            ):
                break
        found[short[0]] = short[1]
    return found


def _layers(node: Any, path: str) -> Any:
    if node.layer is not None:
        yield path, node.layer
    for key, child in node.children.items():
        yield from _layers(child, f"{path}.{key}" if path else key)
