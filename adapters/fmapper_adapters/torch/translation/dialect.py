"""Files for torch."""

from __future__ import annotations

import ast
import base64
import math
import operator
import re
import textwrap
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from fmapper import ConversionError, to_numpy
from fmapper.translation import (
    Class,
    Derived,
    Dialect,
    Embedded,
    Functions,
    Helper,
    Layer,
    Statement,
    elements,
    expr,
    helpers_of,
    literal,
    names_in,
    print_docstring,
    print_imports,
    text,
)
from fmapper_adapters.torch.model import threefry
from fmapper_adapters.torch.translation import derived, layers, printers
from fmapper_adapters.torch.translation.helpers import HELPERS
from fmapper_adapters.torch.translation.loading import print_loading

_IMPORTS = {
    "torch": "import torch",
    "np": "import numpy as np",
    "math": "import math",
    "base64": "import base64",
    "re": "import re",
    "zlib": "import zlib",
    "nn": "from torch import nn",
    "F": "import torch.nn.functional as F",
    "NamedTuple": "from typing import NamedTuple",
}
_PLACES = {
    "torch": torch,
    "F": torch.nn.functional,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "math": math,
    "operator": operator,
    "np": np,
}
_RESERVED = frozenset(
    {
        *_IMPORTS,
        "ctx",
        "load_weights",
        "take_apart",
        "put_in_order",
        "ARRAYS",
        "RENAMED",
        "LISTS",
        "STACKED",
    }
)
_INSTEAD = {  # which NumPy computes here where it is quicker, and to the last bit
    threefry.bits: threefry.hashed_bits,
    threefry.split: threefry.hashed_keys,
    threefry.between: threefry.near,
}
_FEW = 8  # elements of an array that is written out though the state dict has it
_MOST = 64  # elements of an array that is written out
_MODULES = {
    "F.relu": "nn.ReLU()", "F.silu": "nn.SiLU()", "torch.tanh": "nn.Tanh()",
    "torch.sigmoid": "nn.Sigmoid()", "F.elu": "nn.ELU()", "F.softplus": "nn.Softplus()",
}  # fmt: skip


class TorchDialect(Dialect):
    """Writes for torch.

    Args:
        functions: The functions of fmapper that the program calls, by operation.
        lists: The names of lists -> what comes before the number of a part in the model.
        lacks_training: Why the file is for evaluation alone; empty where it is not.
    """

    in_evaluation: ClassVar[str] = "not self.training"
    holds_constants: ClassVar[bool] = True

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        lists: Mapping[str, str] | None = None,
        lacks_training: str = "",
    ) -> None:
        self._functions = functions
        self.lists = dict(lists or {})
        self._lack = " ".join(lacks_training.split())
        self._embedded = Embedded(_PLACES, instead=_INSTEAD)
        self._derived = Functions(str, derived.function_class, "{0}.apply")

    def reserved_names(self) -> frozenset[str]:
        """Returns the names of imports and helpers."""
        return _RESERVED | HELPERS.keys() | self._derived.helpers.keys()

    def own_methods(self) -> frozenset[str]:
        """Returns the methods of `nn.Module`."""
        return frozenset(dir(torch.nn.Module))

    def printer(self, op: str) -> Any:
        """Returns how a function or method of torch is called."""
        return printers.printer(op)

    def helper(self, name: str) -> Helper | None:
        """Returns a class that code may call by its name."""
        known = self._embedded.helpers.get(name) or self._derived.helpers.get(name)
        return known or HELPERS.get(name)

    def fallback(self, call: Any) -> str:
        """Returns a function of fmapper as a helper."""
        function = self._functions.get(call.op)
        if function is None:
            raise ConversionError(f"{call.op} cannot be written to a file ({call.source})")
        return self._embedded.add(function)

    def call_derived(
        self, function: Derived, given: Sequence[ast.expr], taken: Collection[str]
    ) -> ast.expr:
        """Returns `StraightThrough.apply(x)`."""
        return self._derived.call(function, given, {*taken, *self.reserved_names()})

    def layer_of_unit(self, structure: Any, unit: Any) -> Layer | None:
        """Returns a layer of torch."""
        return layers.layer_of_unit(structure, unit)

    def layer_of_call(self, structure: Any, unit: Any, call: Any) -> Layer | None:
        """Returns a layer of torch."""
        return layers.layer_of_call(structure, unit, call)

    def dtype(self, name: str) -> ast.expr:
        """Returns `torch.float32` and its like."""
        return expr(f"torch.{name}")

    def dtype_argument(self, name: str) -> ast.expr:
        """Returns `torch.float32` and its like."""
        return self.dtype(name)

    def read_array(self, node: ast.expr, order: tuple[int, ...] | None) -> ast.expr:
        """Returns a parameter or buffer, with its dimensions in another order."""
        if order is None:
            return node
        if order == (1, 0):
            return expr("{0}.T", node)
        flipped = [at for at, i in enumerate(order) if i < 0]
        turned = expr("{0}.permute({1})", node, tuple(max(i, ~i) for i in order))
        return expr("{0}.flip({1})", turned, flipped) if flipped else turned

    def write_array(self, node: ast.expr, value: ast.expr) -> Statement:
        """Returns the code that writes into a buffer."""
        return Statement((), expr("{0}.copy_({1}.detach())", node, value))

    def stack(self, node: ast.expr, dim: int) -> ast.expr:
        """Returns `torch.stack(ys, 1)`."""
        return expr("torch.stack({0}, {1})", node, dim) if dim else expr("torch.stack({0})", node)

    def rows(self, node: ast.expr, dim: int, *, reverse: bool) -> ast.expr:
        """Returns the array itself, or `x.unbind(1)`."""
        if not dim:
            return expr("{0}.flip(0)", node) if reverse else node
        rows = expr("{0}.unbind({1})", node, dim)
        return expr("reversed({0})", rows) if reverse else rows

    def parameter(self, array: Any) -> ast.expr:
        """Returns an `nn.Parameter`, with the values where they are all the same."""
        values = np.asarray(to_numpy(array))
        known = self._fill(values)
        if known is None:
            shape = tuple(int(size) for size in values.shape)
            options = {} if values.dtype == np.float32 else {"dtype": self.dtype(values.dtype.name)}
            keywords = "".join(f", {key}={{{key}}}" for key in options)
            sizes = ", ".join(map(str, shape))
            known = expr(f"torch.randn({sizes}{keywords}) * 0.02", **options)
        return expr("nn.Parameter({0})", known)

    def frozen_array(self, array: Any, *, kind: str, saved: bool = False) -> ast.expr:
        """Returns an array that is not trained, with its values."""
        known = self.constant(array)
        if kind == "FrozenParam":
            return expr("nn.Parameter({0}, requires_grad=False)", known)
        if kind == "Constant":
            return expr("nn.Buffer({0}, persistent=False)", known)
        return expr("nn.Buffer({0})", known)

    def is_loaded(self, array: Any, *, varies: bool) -> bool:
        """Returns whether an array is neither one number nor small and alike in all modules."""
        values = np.asarray(to_numpy(array))
        return (values.size > _FEW or varies) and self._fill(values) is None

    def loaded_array(self, array: Any) -> ast.expr:
        """Returns a buffer that `load_weights` must find among the arrays of the source."""
        dtype = to_numpy(array).dtype.name
        sizes = ", ".join(str(int(size)) for size in array.shape) or "()"
        end = "" if dtype == "float32" else f", dtype={text(self.dtype(dtype))}"
        return expr(f"nn.Buffer(torch.zeros({sizes}{end}))")

    def constant(self, array: Any) -> ast.expr:
        """Returns an array: its elements, or its bytes."""
        values = np.asarray(to_numpy(array))
        dtype = self.dtype(values.dtype.name)
        known = self._fill(values)
        if known is not None:
            return known
        if values.size <= _MOST and values.dtype.kind in "biuf" and np.isfinite(values).all():
            return expr("torch.tensor({0}, dtype={1})", literal(elements(values)), dtype)
        flat = values.reshape(-1)
        if (
            values.dtype.kind in "iu"
            and values.size > 2
            and (np.diff(flat.astype(np.int64)) == 1).all()
        ):
            node = expr("torch.arange({0}, {1}, dtype={2})", int(flat[0]), int(flat[-1]) + 1, dtype)
            return node if values.ndim == 1 else expr("{0}.reshape({1})", node, tuple(values.shape))
        data = base64.b85encode(zlib.compress(values.tobytes(), 9)).decode()
        return expr(
            "torch.frombuffer(bytearray(zlib.decompress(base64.b85decode({0}))), dtype={1})"
            ".reshape({2})",
            data,
            dtype,
            tuple(int(s) for s in values.shape),
        )

    def _fill(self, values: Any) -> ast.expr | None:
        """Returns the code for a constant array."""
        if values.size == 0 or values.dtype.kind not in "biuf":
            return None
        first = values.reshape(-1)[0]
        if not (values == first).all():
            return None
        shape = tuple(int(size) for size in values.shape)
        dtype = self.dtype(values.dtype.name)
        if values.ndim == 0:
            end = "" if values.dtype == np.float32 else ", dtype={1}"
            return expr(f"torch.tensor({{0}}{end})", first.item(), dtype)
        kind = {0: "zeros", 1: "ones"}.get(first.item())
        end = "" if values.dtype == np.float32 else ", dtype={1}"
        if kind:
            return expr(f"torch.{kind}({{0}}{end})", shape, dtype)
        return expr("torch.full({0}, {2}, dtype={1})", shape, dtype, first.item())

    def make(self, cls: Class) -> ast.expr:
        """Returns `Block()`."""
        return expr(f"{cls.name}()")

    def parts(self, made: Sequence[ast.expr]) -> ast.expr:
        """Returns an `nn.ModuleList`."""
        codes = [text(one) for one in made]
        if any(code.startswith(("nn.Buffer(", "nn.Parameter(")) for code in codes):
            return expr("Items({0})", list(made))  # an nn.ModuleList takes modules alone
        if len(codes) > 1 and len(set(codes)) == 1:
            return expr("nn.ModuleList([{0} for _ in range({1})])", made[0], len(made))
        return expr("nn.ModuleList({0})", list(made))

    def arrays(self, made: Sequence[ast.expr]) -> ast.expr:
        """Returns an `nn.ParameterList`, which would make parameters of buffers."""
        has_buffers = any(text(one).startswith("nn.Buffer(") for one in made)
        return expr("Items({0})" if has_buffers else "nn.ParameterList({0})", list(made))

    def sequence(self, made: Sequence[ast.expr | None]) -> ast.expr:
        """Returns an `nn.Sequential`."""
        return ast.Call(expr("nn.Sequential"), [self._module(one) for one in made], [])

    def _module(self, made: ast.expr | None) -> ast.expr:
        if made is None:
            return expr("nn.Identity()")
        if isinstance(made, ast.Call):
            return made
        known = _MODULES.get(text(made))
        return expr(known) if known else expr("Apply({0})", made)

    def file(self, draft: Any, classes: Sequence[Class], root: Class) -> str:
        """Returns the file: records, helpers, classes, and `load_weights`."""
        blocks = [_record(cls, fields) for cls, fields in draft.records.items()]
        for cls in classes:
            lack = self._lack if cls.name == root.name else ""
            blocks.append(_class(cls, lack))
        blocks.append(print_loading(draft))
        body = "\n\n\n".join(blocks)
        helpers = helpers_of(body, self.helper)
        everything = "\n\n\n".join([*helpers, body])
        used = names_in(everything)
        known = {**_IMPORTS, **self._embedded.imports}
        lines = [line for name, line in known.items() if name in used]
        origin = draft.program.types.get("", "")
        origin = origin if re.fullmatch(r"[\w.<>]+", origin) else ""
        beginning = f"{root.name} for PyTorch{f', from {origin}' if origin else ''}"
        head = print_docstring(f"{beginning}; written by fmapper.", self._lack)
        return f"{head}\n\n{print_imports(lines)}\n\n\n{everything}\n"


_REFUSAL = (
    "    def train(self, mode=True):",
    "        if mode:",
    "            raise RuntimeError(__doc__)",
    "        return super().train(mode)",
)


def _record(cls: str, fields: Mapping[str, str]) -> str:
    lines = [
        f"class {cls}(NamedTuple):",
        *(f"    {field}: {kind or 'torch.Tensor'}" for field, kind in fields.items()),
    ]
    return "\n".join(lines if fields else [*lines, "    pass"])


def _class(cls: Class, lacks_training: str) -> str:
    sketch = cls.sketch
    lines = [f"class {cls.name}(nn.Module):"]
    if sketch.made or sketch.ties or lacks_training:
        lines += ["    def __init__(self):", "        super().__init__()"]
        lines += [f"        self.{attr} = {text(node)}" for attr, node in sketch.made]
        lines += [f"        {tie}" for tie in sketch.ties]
        lines += ["        self.eval()", "", *_REFUSAL] if lacks_training else []
        lines.append("")
    for method in sketch.methods:
        name = "forward" if method.name == "__call__" else method.name
        lines.append(f"    def {name}({', '.join(['self', *method.parameters])}):")
        lines += [textwrap.indent(line, "        ") for line in method.print_lines()]
        lines.append("")
    return "\n".join(lines).rstrip()
