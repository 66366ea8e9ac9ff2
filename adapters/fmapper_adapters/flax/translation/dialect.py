"""Files for Flax NNX."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from flax import nnx

from fmapper import ConversionError, to_numpy
from fmapper.translation import (
    CHECK_NAMES,
    NOT_SAVED,
    Class,
    Helper,
    Statement,
    attribute_name,
    by_suffix,
    expr,
    names_beside,
    print_checks,
    shortest_parts,
    text,
)
from fmapper_adapters.flax.translation.helpers import HELPERS
from fmapper_adapters.jax.libraries import (
    TAKE_APART,
    JaxDialect,
    Slices,
    slices_by_suffix,
)


class FlaxDialect(JaxDialect):
    """Writes for Flax NNX.

    Args:
        slices: Arrays that are made of parts.
        shared: Statistics that several calls update, which layers have to own.
    """

    def __init__(self, slices: Slices | None = None, shared: frozenset[str] = frozenset()) -> None:
        super().__init__(slices)
        self._shared = shared

    own_key: ClassVar[str] = "self.rngs.noise()"
    random_state: ClassVar[Mapping[str, str]] = {"rngs": "rngs"}
    title: ClassVar[str] = "Flax NNX"
    mode: ClassVar[str] = "deterministic"
    in_evaluation: ClassVar[str] = "self.deterministic"
    told_in_training: ClassVar[Mapping[str, Sequence[str]]] = {
        "SpectralNorm": ("steps",),
    }
    own_imports: ClassVar[Mapping[str, str]] = {"nnx": "from flax import nnx"}
    own_helpers: ClassVar[Mapping[str, Helper]] = HELPERS

    def own_methods(self) -> frozenset[str]:
        """Returns the methods of `nnx.Module`."""
        return frozenset(dir(nnx.Module))

    def read_array(self, node: ast.expr, order: tuple[int, ...] | None) -> ast.expr:
        """Returns the code that reads a variable, with its dimensions permuted."""
        return super().read_array(expr("{0}[...]", node), order)

    def write_array(self, node: ast.expr, value: ast.expr) -> Statement:
        """Returns the code that writes a variable."""
        return Statement((text(expr("{0}[...]", node)),), value)

    def parameter(self, array: Any) -> ast.expr:
        """Returns an `nnx.Param`, with its values if they are constant."""
        shape = tuple(int(size) for size in array.shape)
        known = self.fill(array)
        if known is None:
            dtype = self.dtype(to_numpy(array).dtype.name)
            known = expr("nnx.initializers.normal()(rngs.params(), {0}, {1})", shape, dtype)
        return expr("nnx.Param({0})", known)

    def frozen_array(self, array: Any, *, kind: str, saved: bool = False) -> ast.expr:
        """Returns a variable that is not trained."""
        return expr(f"{kind}({{0}})", self.constant(array, saved=saved))

    def loaded_array(self, array: Any) -> ast.expr:
        """Returns a variable that `load_weights` must find in the state dict."""
        return expr("LoadedBuffer({0})", self.zeros(array))

    def make(self, cls: Class) -> ast.expr:
        """Returns `Block(rngs=rngs)`, or `GLU()` for a class without parts."""
        return expr(f"{cls.name}()" if cls.is_bare else f"{cls.name}(rngs=rngs)")

    def parts(self, made: Sequence[ast.expr]) -> ast.expr:
        """Returns an `nnx.List`."""
        codes = [text(one) for one in made]
        if len(codes) > 1 and len(set(codes)) == 1:
            return expr("nnx.List([{0} for _ in range({1})])", made[0], len(made))
        return expr("nnx.List({0})", list(made))

    def mapping(self, made: Mapping[str, ast.expr]) -> ast.expr | None:
        """Returns an `nnx.Dict`."""
        if any(hasattr(nnx.Dict, key) for key in made):
            return None
        return expr("nnx.Dict({0})", made)

    def sequence(self, made: Sequence[ast.expr | None]) -> ast.expr:
        """Returns a `Sequential`, which is an `nnx.List` that can be called."""
        parts = [expr("lambda x: x") if one is None else one for one in made]
        return ast.Call(expr("Sequential"), parts, [])

    def file(self, draft: Any, classes: Sequence[Class], root: Class) -> str:
        """Returns the file: records, helpers, classes, and `load_weights`."""
        lost = sorted(self._shared - draft.owners.keys())
        if lost:
            raise ConversionError(
                f"{lost[0]}: several calls update it in training, and no layer of Flax does what "
                "its module does. Use train=False (--eval)"
            )
        tables = []
        frozen = _frozen_parts(draft)
        if frozen:
            root.sketch.ties.append("freeze(self, FROZEN)")
            tables = ["\n".join(["FROZEN = (", *(f"    {path!r}," for path in frozen), ")"])]
        alone = draft.program.lacks_training and root.name
        printed = [_class(cls, for_evaluation=cls.name == alone) for cls in classes]
        blocks = [*printed, *tables, _print_loading(draft, root)]
        return self.assemble(draft, root.name, blocks)


def _frozen_parts(draft: Any) -> list[str]:
    """Returns the parts of layers, and the parameters in layers, that the source does not train."""
    program = draft.program
    frozen, others = [], []
    for path, (target, _) in draft._arrays().items():
        owner, _, attr = path.rpartition(".")
        place = ".".join((*draft.place(owner), attr))
        if target in program.parameters and target not in program.frozen:
            others.append(place)
        elif target in program.frozen and target in draft.owners:
            frozen.append(place)
    return shortest_parts(frozen, others)


_REFUSAL = (
    "    def train(self, **attributes):",
    "        raise RuntimeError(__doc__)",
    "",
)


def _class(cls: Class, *, for_evaluation: bool) -> str:
    sketch = cls.sketch
    lines = [f"class {cls.name}(nnx.Module):"]
    if not cls.is_bare:
        lines.append("    def __init__(self, *, rngs: nnx.Rngs):")
        lines += [f"        self.{attr} = {text(node)}" for attr, node in sketch.made]
        lines += [f"        {tie}" for tie in sketch.ties]
        lines += ["        self.eval()"] if for_evaluation else []
        is_empty = not (sketch.made or sketch.ties or for_evaluation)
        lines += ["        pass"] if is_empty else []
        lines.append("")
    if for_evaluation:
        lines += _REFUSAL
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


_LOAD = f'''def load_weights(model: nnx.Module, state, strict=True) -> nnx.Module:
    """Fills the model with the arrays of the source's state dict, by name; returns it.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    given = take_apart(state)
    known, missing = set(), []
    for path, layer in nnx.iter_modules(model):
        names = next((found for cls, found in ARRAYS.items() if isinstance(layer, cls)), {{}})
        for key, variable in vars(layer).items():
            if not isinstance(variable, nnx.Variable) or isinstance(variable, nnx.RngState):
                continue
            source, order = names.get(key, (key, None))
            name = ".".join(map(str, (*path, source)))
            for end, found in ORDERS.items():
                order = found if f".{{name}}".endswith(f".{{end}}") else order
            for ours, theirs in RENAMED.items():
                if f".{{name}}".endswith(f".{{ours}}"):
                    name = name.removesuffix(ours) + theirs
                    break
            known.add(name)
            if name in given:
                array = jnp.asarray(given[name], variable.dtype)
                if order is not None and array.ndim == len(order):
                    array = array.transpose(order)
                if array.shape != variable.shape:
                    raise ValueError(f"{{name}}: {{array.shape}} instead of {{variable.shape}}")
                variable.set_value(array)
            elif True{NOT_SAVED}:
                missing.append(name)
{CHECK_NAMES}    return model'''

_RENAMING = """            for ours, theirs in RENAMED.items():
                if f".{name}".endswith(f".{ours}"):
                    name = name.removesuffix(ours) + theirs
                    break
"""

_TURNING = """            for end, found in ORDERS.items():
                order = found if f".{name}".endswith(f".{end}") else order
"""

# Classes of layers -> their arrays -> how torch calls them.
_ARRAYS = {
    "nnx.Linear": ("kernel", "weight"),
    "nnx.Embed": ("embedding", "weight"),
    "PaddedEmbed": ("embedding", "weight"),
    "nnx.LayerNorm": ("scale", "weight"),
    "GroupNorm": ("scale", "weight"),
    "BatchNorm": ("scale", "weight"),
    "Conv": ("kernel", "weight"),
    "ConvTranspose": ("kernel", "weight"),
    "GroupedConvTranspose": ("kernel", "weight"),
}


def _print_loading(draft: Any, root: Class) -> str:
    """Returns `load_weights` with its tables."""
    by_path: dict[str, str] = {}
    arrays: dict[str, dict[str, Counter[Any]]] = {}  # classes of layers -> arrays -> their orders
    for path, layer in _layers(draft.root, ""):
        by_path[path] = layer.kind
        by_path |= {
            f"{path}.{inner}" if path else inner: kind for inner, kind in layer.inner.items()
        }
        for attr, order in layer.arrays.values():
            owner, _, last = attr.rpartition(".")
            arrays.setdefault(layer.inner.get(owner, layer.kind), {}).setdefault(last, Counter())[
                order
            ] += 1
    table = {}
    for kind, held in arrays.items():
        names = {}
        for attr, orders in held.items():
            ((order, _),) = orders.most_common(1)
            known, source = _ARRAYS.get(kind, (attr, attr))
            name = source if attr == known else attr
            name = {"mean": "running_mean", "var": "running_var"}.get(attr, name)
            if (name, order) != (attr, None):
                names[attr] = (name, order)
        if names:
            table[kind] = names
    renamed: set[str] = set()
    everything: dict[str, str] = {}
    turned: dict[str, Any] = {}  # the exceptions from the orders of their classes
    for path, (target, order) in draft._arrays().items():
        owner, _, attr = path.rpartition(".")
        expected, layout = table.get(by_path.get(owner, ""), {}).get(attr, (attr, None))
        wanted = ".".join((*draft.place(owner), attribute_name(expected)))
        everything[wanted] = target
        if wanted != target:
            renamed.add(wanted)
        for other in draft.structure.paths.get(owner, ()) if owner else ():
            is_before = _order_of_visits(draft.place(other)) < _order_of_visits(draft.place(owner))
            is_written = is_before or draft.program.first_paths.get(other) == other
            if other != owner and is_written:
                twin = ".".join((*draft.place(other), attribute_name(expected)))
                everything[twin] = target
                renamed.add(twin)
        if layout != order:
            turned[wanted] = order
    rows = [f"    {kind}: {names!r}," for kind, names in table.items()]
    places = {name: (target, None) for name, target in everything.items()}
    ends = by_suffix({name: places[name] for name in renamed}, places)
    table_of_names = [f"    {ours!r}: {theirs!r}," for ours, (theirs, _) in ends.items()]
    lines = ["ARRAYS = {", *rows, "}"]
    loading, naming = _LOAD, ""
    if ends:
        lines += ["RENAMED = {", *table_of_names, "}"]
    else:
        loading = _LOAD.replace(_RENAMING, "")
    if turned:
        ends_of_turned = _orders_by_end(turned, everything)
        rows = [f"    {end!r}: {order!r}," for end, order in ends_of_turned.items()]
        lines += ["ORDERS = {  # where they are not those of their class", *rows, "}"]
    else:
        loading = loading.replace(_TURNING, "")
    slices = slices_by_suffix(draft.dialect.slices)
    *tables, loading = print_checks(loading, *names_beside(draft, slices))
    lines += tables
    loading = loading.replace("            elif True:\n", "            else:\n")
    loading = loading.replace("elif True and ", "elif ")
    if slices:
        rows = [f"    {whole!r}: {parts!r}," for whole, parts in slices.items()]
        lines += ["SLICES = {", *rows, "}"]
        loading = TAKE_APART + naming + loading
    else:
        loading = loading.replace("    given = take_apart(state)\n", "").replace("given", "state")
        loading = naming + loading
    return "\n".join([*lines, "", "", loading])


def _order_of_visits(steps: Sequence[str]) -> list[tuple[bool, int, str]]:
    """Returns by what NNX sorts modules: it sees one that has two names under the first alone."""
    return [
        (not step.isdigit(), int(step) if step.isdigit() else 0, attribute_name(step))
        for step in steps
    ]


def _orders_by_end(turned: Mapping[str, Any], everything: Collection[str]) -> dict[str, Any]:
    """Maps the shortest ends of names, which no other names have, to the orders of those."""
    found: dict[str, Any] = {}
    for name, order in turned.items():
        steps = name.split(".")
        ends = [".".join(steps[begin:]) for begin in range(len(steps) - 1, -1, -1)]
        for end in ends:
            same = [one for one in everything if f".{one}".endswith(f".{end}")]
            if all(one in turned and turned[one] == order for one in same):
                break
        found[end] = order
    return found


def _layers(node: Any, path: str) -> Any:
    if node.layer is not None:
        yield path, node.layer
    for key, child in node.children.items():
        yield from _layers(child, f"{path}.{key}" if path else key)
