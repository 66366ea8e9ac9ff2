"""Flax NNX as a target: modules with variables, and random numbers that layers keep."""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from flax import nnx
from torch import nn

from fmapper.translation import expr, text
from fmapper_adapters.flax.translation.build import open_file
from fmapper_adapters.flax.translation.dialect import FlaxDialect
from fmapper_translate.flax import encoders, recurrent, scans, transformers, weights
from fmapper_translate.flax import layers as flax_layers
from fmapper_translate.flax.table import LAYERS
from fmapper_translate.functions import Function
from fmapper_translate.operations import negate
from fmapper_translate.targets import Target, derivatives, distributions, functions, pools, rows
from fmapper_translate.targets import transformers as target_transformers

if TYPE_CHECKING:
    from fmapper_translate.files import File


class FlaxTarget(Target):
    """Flax NNX."""

    name = "flax"
    title = "Flax NNX"
    module = "nnx.Module"
    mode = "deterministic"
    random = "rngs"
    initializers = "nnx.initializers"
    walk = "nnx.iter_modules"
    layers = LAYERS
    helpers: ClassVar[Sequence[types.ModuleType]] = (
        flax_layers,
        pools,
        recurrent,
        encoders,
        weights,
        derivatives,
        distributions,
        rows,
        functions,
    )
    scans: ClassVar[types.ModuleType] = scans
    library: ClassVar[Sequence[types.ModuleType]] = (transformers, target_transformers)
    imports: ClassVar[Mapping[str, str]] = {"nnx": "from flax import nnx"}
    dialect = FlaxDialect
    loading = (weights.load_weights, weights.source_state, weights.named_arrays)
    with_dtype = staticmethod(weights.with_dtype)
    arrays: ClassVar[Mapping[str, str]] = {
        "parameter": "nnx.Param({0})", "buffer": "Buffer({0})", "constant": "Constant({0})",
        "choice": "(nnx.Param if {1} else Buffer)({0})",
    }  # fmt: skip
    option = "{0}.set_metadata({1}, {2})"
    new_part = "nnx.data({0})"  # or it would stay a setting
    plain_list = "PlainList({0})"
    no_part = "nnx.Module()"
    no_random_numbers = "nnx.Rngs(0)"
    copy = "clone({0}, rngs=rngs)"

    def source(self) -> ast.keyword:
        """Returns `rngs=rngs`."""
        return ast.keyword("rngs", expr("rngs"))

    def draw(self) -> ast.expr:
        """Returns the code for a random key when a model is made."""
        return expr("rngs.params()")

    def parameter(self, function: Function, *, constructs: bool) -> tuple[ast.arg, Any]:
        """Returns `rngs`."""
        return ast.arg("rngs", expr("nnx.Rngs") if constructs else None), None

    def frame(self, file: File, function: Function, body: list[str]) -> list[str]:
        """Returns the lines with the random numbers that an object keeps."""
        is_constructor = function.name == "__init__" and file.is_module(function.owner)
        keeps = is_constructor and function.owner in file.draws
        return [*body, "self.rngs = rngs"] if keeps else body

    def key(self, file: File, function: Function) -> ast.expr:
        """Returns a key of the module's random numbers."""
        return expr("{0}.noise()", self._rngs(file, function))

    def extras(self, file: File, function: Function, *callees: Any) -> list[ast.keyword]:
        """Returns `rngs` for a function without a module that draws."""
        is_drawing = any(isinstance(item, Function) and item in file.draws for item in callees)
        return [ast.keyword("rngs", self._rngs(file, function))] if is_drawing else []

    def dropout(
        self, file: File, function: Function, *given: ast.expr, dims: tuple[int, ...] = ()
    ) -> ast.expr:
        """Returns a layer of dropout, and its call."""
        array, rate, training = given
        more = f", broadcast_dims={dims}" if dims else ""
        return expr(f"nnx.Dropout({{1}}{more})({{0}}, deterministic={{3}}, rngs={{2}})",
                    array, rate, self._rngs(file, function), negate(training))  # fmt: skip

    def _rngs(self, file: File, function: Function) -> ast.expr:
        """Returns the code for the random numbers of a function: its module's, or those given."""
        if file.is_module(function.owner) and not function.is_static:
            file.draws.add(file.maker_of(function.owner))
            return expr("self.rngs")
        for name, values in file.recording.arguments_of(function).items():
            if all(isinstance(value, nn.Module) for value in values):
                file.draws |= {file.maker_of(type(value)) for value in values}
                return expr(f"{name}.rngs")
        file.draws.add(function)
        return expr("rngs")

    def read(self, array: ast.expr, value: Any, *, constructs: bool) -> ast.expr:
        """Returns the value of a variable."""
        return expr("{0}[...]", array)

    def write(
        self, file: File, function: Function, array: ast.expr, value: ast.expr, sign: str = ""
    ) -> str:
        """Returns the statement that writes a variable."""
        return f"{text(array)}[...] {sign}= {text(value)}"

    def initialize(self, array: ast.expr, initializer: ast.expr) -> str:
        """Returns the statement that draws the values of a variable."""
        return text(expr("initialize({0}, {1}, rngs)", array, initializer))

    def fields(self, file: File, cls: type) -> list[str]:
        """Returns none: objects have the attributes that they are given."""
        return []

    def open(self, net: types.ModuleType, name: str, weights: Mapping[str, Any]) -> Any:
        """Returns the state of a model, and the function that makes the model of it."""
        model, _ = open_file(net, name, weights, train=False)
        graph, state = nnx.split(model)
        return state, lambda state: nnx.merge(graph, state)
