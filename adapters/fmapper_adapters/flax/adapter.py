"""The adapter for Flax."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fmapper import ConversionError
from fmapper.backends import Models, Nodes, NodeType, Observation, Packed
from fmapper.programs import Lowering, Program
from fmapper.programs.reading import source_of_class
from fmapper_adapters.flax.optimizers import FlaxOptimizers
from fmapper_adapters.jax.libraries import JaxModels

if TYPE_CHECKING:
    from types import ModuleType

    from fmapper.checkpoints import Format
    from fmapper.translation import Source


class FlaxAdapter(FlaxOptimizers, JaxModels, Nodes):
    """The adapter for the classes of NNX and Linen; their arrays belong to other backends."""

    name: ClassVar[str] = "flax"
    compiles: ClassVar[bool] = True
    targets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"nnx": {}, "linen": {"linen": True}}
    conversion_options: ClassVar[tuple[str, ...]] = (
        "arguments",
        "precision",
        "rngs",
        "scan",
        "structure",
    )
    compares: ClassVar[bool] = True
    has_modes: ClassVar[bool] = True
    writes_modes: ClassVar[str] = "layers"
    lowers_like: ClassVar[str] = "jax"
    layer_modules: ClassVar[tuple[str, ...]] = ("flax",)
    weight_layouts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("Linear", "LinearGeneral", "Einsum", "Conv"), "outputs last"),
        "Embed": "rows",
    }

    def formats(self) -> Sequence[Format]:
        """Returns the formats of `flax.serialization` and of Orbax, which Flax installs."""
        from fmapper_adapters.flax.checkpoints.msgpack import Msgpack
        from fmapper_adapters.flax.checkpoints.orbax import Orbax

        return (Orbax(), Msgpack())

    def transient(self, node: Any) -> Iterable[Any]:
        """Returns arrays of variables marked as not persistent, and generators given to a model."""
        if self.is_converted(node):
            from fmapper import fleaves

            return fleaves(vars(node).get("rngs"))
        metadata = getattr(type(node), "get_metadata", None)
        if metadata is None or not str(type(node).__module__).startswith(("flax", "fmapper")):
            return ()
        return [node.get_value()] if node.get_metadata().get("persistent") is False else ()

    def weights(self, model: Any) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
        """Returns the arrays of a pair of a module and its variables, or of a graph and its state.

        They are named as in the variables alone, or as in the source of a converted model.
        Generators of a converted model are left out, since its source has none.
        """
        arrays: tuple[dict[str, Any], Callable[[Any], Any]] | None = None
        if isinstance(model, tuple) and self.is_model(model):
            from fmapper_adapters.flax import source as _source

            arrays = _source.weights_of_pair(model)
        elif self.is_converted(model) and getattr(model, "rngs", None) is not None:
            from fmapper_adapters.flax import flax_model

            arrays = flax_model.weights(model)
        return arrays

    def axes(self, node: Any) -> Sequence[tuple[str, Any, tuple[Any, ...]]]:
        """Returns the axes in the metadata of variables of NNX and boxes of Linen."""
        if not any(str(base.__module__).startswith("flax.") for base in type(node).__mro__):
            return ()
        from fmapper_adapters.flax import axes as _axes

        return _axes.of_node(node)

    def packings(self, node: Any) -> Iterable[tuple[str, Any, Packed]]:
        """Returns the parameters of a `FlaxModel` that pack several arrays side by side."""
        if not self.is_converted(node):
            return ()
        from fmapper_adapters.flax import flax_model

        model = flax_model.bind(node)
        return [(name, model.params[name], packed) for name, packed in model.packed.items()]

    def program_of(self, model: Any) -> Program | None:
        """Returns the program of a converted model, for evaluation if it has two."""
        if not self.is_converted(model):
            return None
        program: Program = model._programs.any.without_arrays()
        return program

    def training_rule(self, cls: type) -> Callable[[Any], bool] | None:
        """Trains `nnx.Param` and its subclasses, and nothing else of NNX."""
        if not any(str(base.__module__).startswith("flax.nnx") for base in cls.__mro__):
            return None
        from flax import nnx

        if issubclass(cls, nnx.Param):
            return _yes
        return _no if issubclass(cls, nnx.Variable | nnx.Module) else None

    def computes_with(self, cls: type) -> str | None:
        """Returns JAX for the modules and variables of Flax, which compute with it."""
        origins = (str(base.__module__) for base in cls.__mro__)
        is_flax = any(origin.startswith(("flax.nnx", "flax.linen")) for origin in origins)
        return "jax" if is_flax else None

    def to_evaluation(self, node: Any) -> None:
        """Calls `module.eval()` of NNX modules; Linen modules take the mode in each call."""
        if any(str(base.__module__).startswith("flax.nnx") for base in type(node).__mro__):
            from flax import nnx

            if isinstance(node, nnx.Module):
                node.eval()  # type: ignore[no-untyped-call]

    def node_type(self, cls: type) -> NodeType | None:
        """Returns the node type of a class of Flax or a subclass.

        `import flax` alone does not load NNX, which is slow to load: it is not imported before one
        of its classes occurs.
        """
        origins = [str(base.__module__) for base in cls.__mro__]
        if any(origin.startswith("flax.nnx") for origin in origins):
            from fmapper_adapters.flax import nnx_nodes

            return nnx_nodes.node_type(cls)
        if any(origin.startswith(("flax.linen", "flax.core")) for origin in origins):
            from fmapper_adapters.flax import linen_nodes

            return linen_nodes.node_type(cls)
        return None

    def check_options(self, **options: Any) -> None:
        """Checks the precision, and that the options can be combined.

        Raises:
            ConversionError: Options exclude each other, or the precision does not exist.
        """
        super().check_options(**options)
        if options.get("linen") and options.get("rngs") is not None:
            raise ConversionError("a Linen module does not store rngs: pass them to apply")
        if options.get("linen") and options.get("structure"):
            raise ConversionError(
                "structure=True writes modules of NNX, not Linen: convert to 'nnx', or omit it"
            )
        if options.get("scan") and not options.get("structure"):
            raise ConversionError(
                "scan=True is for models of written classes: pass structure=True as well"
            )
        others = [name for name in ("precision", "rngs") if options.get(name) is not None]
        if options.get("structure") and others:
            raise ConversionError(
                f"structure=True does not accept {others[0]}, because the model is plain NNX "
                f"code. Set its precision with jax.default_matmul_precision when you call it; its "
                f"layers have their own rngs."
            )

    def from_program(
        self, program: Program, lowerings: Mapping[str, Lowering], **options: Any
    ) -> Any:
        """Returns a `FlaxModel`, or for the target `linen` a `LinenModel`."""
        from fmapper_adapters.flax import flax_model

        modes = options.pop("modes", False)
        options.pop("scan", None)
        if options.pop("structure", False):
            return self.build(program, modes=modes)
        return flax_model.from_program(program, lowerings, **options)

    def translate(self, program: Program, *, modes: bool = False) -> Source:
        """Returns a file for NNX."""
        from fmapper.translation import write
        from fmapper_adapters.flax.translation.dialect import FlaxDialect
        from fmapper_adapters.jax.libraries import prepare_program, with_shared_statistics

        def prepare(program: Program) -> tuple[Program, Any, frozenset[str]]:
            program, shared = with_shared_statistics(program)
            return *prepare_program(program), shared

        evaluation = program.evaluation
        program, *parts = prepare(program)
        if evaluation is None or not evaluation.train:  # if the model has both
            evaluation = None
        else:
            evaluation, *others = prepare(evaluation)
            if parts != others:
                raise ConversionError(
                    f"{program.name}: its arrays are split differently in evaluation and "
                    "training, so one file cannot hold both. Use train=False (--eval)"
                )
        return write(program, FlaxDialect(*parts), evaluation=evaluation)

    def build(self, program: Program, *, modes: bool = False) -> Any:
        """Returns the module of NNX."""
        from fmapper_adapters.flax.translation import build as _build

        return _build.build(program, self.translate(program, modes=modes))

    def build_transcribed(self, model: Any, source: Models, *call: Any, **options: Any) -> Any:
        """Builds a model in the words of its source."""
        from fmapper.translation import build_transcribed

        return build_transcribed(model, source, self, *call, **options)

    def finish(self, model: Any, *, trains: bool, reason: str = "") -> None:
        """Gives layers cheaper forms; without `trains` the model refuses to be trained."""
        from fmapper_adapters.flax.translation import build as _build
        from fmapper_adapters.flax.translation.fast_layers import accelerate

        accelerate(model)
        if not trains:
            _build.refuse_training(type(model), type(model).__name__, reason)

    def open_file(
        self, net: ModuleType, name: str, weights: Mapping[str, Any], *, train: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the model of a file, filled with the arrays of its source, and options."""
        from fmapper_adapters.flax.translation import build as _build

        return _build.open_file(net, name, weights, train=train)

    def is_model(self, x: Any) -> bool:
        """Returns whether an object is a module of NNX, or one of Linen with its variables."""
        if not _may_be_model(x):
            return False
        from fmapper_adapters.flax import source as _source

        return _source.is_model(x)

    def options(self, model: Any) -> Sequence[str]:
        """Returns the options of `apply`, for modules of Linen."""
        from fmapper_adapters.flax import source as _source

        return _source.options(model)

    def call(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        train: bool | None = None,
        seed: int | None = None,
    ) -> Any:
        """Calls the model and leaves it unchanged."""
        from fmapper_adapters.flax import flax_model

        if self.is_converted(model):
            return flax_model.evaluate(model, args, kwargs, train=train)
        return super().call(model, args, kwargs, train=train, seed=seed)

    def keys(self, model: Any, *, train: bool | None) -> dict[str, Any]:
        """Returns the keyword `rngs` for a converted model without a generator."""
        from fmapper_adapters.flax import flax_model

        return flax_model.keys(model, train=train) if self.is_converted(model) else {}

    def examine(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """Examines the program for evaluation, or the only program.

        A module whose classes were written by `source` is called instead.
        """
        from fmapper_adapters.flax import programs

        if source_of_class(model) is not None:
            parameters = inspect.signature(model.__call__).parameters
            given = {key: value for key, value in kwargs.items() if key in parameters}
            return (self.call(model, args, given, train=False),)
        examined: tuple[Any] | None = programs.alone(model).examine(args, kwargs)
        return examined

    def watch(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        whole: Collection[str] = (),
        train: bool | None = None,
        double: bool = False,
    ) -> Iterable[Observation] | None:
        """Records the operations of a converted model, or of the program of another model."""
        from fmapper_adapters.flax import flax_model

        if self.is_converted(model):
            return None if double else flax_model.watch(model, args, kwargs, train=train)
        return super().watch(model, args, kwargs, whole=whole, train=train, double=double)

    def sources(self) -> Any:
        """Returns the module for sources of NNX modules, and of Linen modules with variables."""
        from fmapper_adapters.flax import source

        return source

    def is_converted(self, model: Any) -> bool:
        """Returns whether the model is a `FlaxModel`."""
        loaded = sys.modules.get("fmapper_adapters.flax.flax_model")
        return loaded is not None and isinstance(model, loaded.FlaxModel)


def _may_be_model(x: Any) -> bool:
    """Returns whether an object may be of Flax, by its class and without loading Flax."""
    first = x[0] if isinstance(x, tuple) and len(x) == 2 else x
    first = getattr(first, "__self__", first)
    return any(str(base.__module__).startswith("flax.") for base in type(first).__mro__)


def _yes(array: Any) -> bool:
    return True


def _no(array: Any) -> bool:
    return False
