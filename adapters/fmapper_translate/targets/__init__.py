"""Frameworks that models of PyTorch are transcribed for.

`Target` is what a file has in place of PyTorch's layers, arrays and random numbers; `flax/` and
`equinox/` have one each. What their files have in common is here:

layers         the rows of the tables of layers
constructions  calls of layers' constructors
functions      functions of arrays, and initializers; files take them
pools          windows and edges of images and sequences
idioms         operations with the sizes of the source
derivatives    operations with a derivative of their own
distributions  distributions of random numbers
rows           rows that are picked by values
scans          arrays of stacked blocks
"""

from __future__ import annotations

import ast
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fmapper.translation import expr, literal

if TYPE_CHECKING:
    from fmapper_adapters.jax.libraries import JaxDialect
    from fmapper_translate.files import File
    from fmapper_translate.functions import Function
    from fmapper_translate.targets.layers import Layers


class Target(ABC):
    """Counterparts of PyTorch's layers, arrays and random numbers in a file.

    Attributes:
        name: The framework.
        title: Its name in prose.
        module: The class of its modules.
        mode: The attribute of modules that says that they are in evaluation.
        random: The parameter of constructors that random numbers come from.
        initializers: The module of its initializers.
        walk: The function that yields all modules in one, with their paths.
        layers: The table of layers.
        helpers: The modules whose definitions a file takes along.
        scans: The module whose definitions a file that scans takes along, before others.
        library: The modules with the counterparts of a library's infrastructure.
        imports: Names -> the statements that import them.
        dialect: The printers of operations.
        loading: The functions that every file has.
        updating: Classes and functions of files whose model collects statistics.
        with_dtype: The function that casts the arrays of a model.
        arrays: Kinds of arrays -> their code in a constructor.
        place: The code for an array `{1}` of a module `{0}` that a function gives values.
        part: The statement that gives a module `{0}` another attribute `{1}`.
        dataclass: The decorator of configurations.
        option: The code that gives a parameter `{0}` an option `{1}` of the value `{2}`.
        new_part: The code for a module in the place of a setting that was None.
        plain_list: The code for a list of modules that have their names elsewhere.
        is_tree: Whether modules are trees: with fixed attributes, and of each array one copy for
            each place, which says nothing of how it is trained.
        counts_batches: Whether norms whose statistics are plain means count their batches.
        no_part: The code for a module without a class.
        no_random_numbers: The code for what a layer is given that draws none.
        copy: The code for a copy of a module; the module itself where nothing changes it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    module: ClassVar[str]
    mode: ClassVar[str]
    random: ClassVar[str]
    initializers: ClassVar[str]
    walk: ClassVar[str]
    layers: ClassVar[Layers]
    helpers: ClassVar[Sequence[types.ModuleType]]
    scans: ClassVar[types.ModuleType]
    library: ClassVar[Sequence[types.ModuleType]]
    imports: ClassVar[Mapping[str, str]]
    dialect: ClassVar[type[JaxDialect]]
    loading: ClassVar[Sequence[Callable[..., Any]]]
    updating: ClassVar[Sequence[type]] = ()
    with_dtype: Callable[[Any, Any], Any]
    arrays: ClassVar[Mapping[str, str]]
    place: ClassVar[str] = "{0}.{1}"
    part: ClassVar[str] = "{0}.{1} = {2}"
    option: ClassVar[str] = ""
    dataclass: ClassVar[str] = "@dataclass"
    new_part: ClassVar[str] = "{0}"
    plain_list: ClassVar[str] = "{0}"
    is_tree: ClassVar[bool] = False
    counts_batches: ClassVar[bool] = False
    no_part: ClassVar[str] = ""
    no_random_numbers: ClassVar[str] = ""
    copy: ClassVar[str] = "{0}"

    def refuse(self, file: File) -> None:  # noqa: B027
        """Refuses a file whose model has no counterpart in training.

        Raises:
            NotTranscribed: It has none.
        """

    @abstractmethod
    def source(self) -> ast.keyword:
        """Returns the random numbers that a constructor of a layer is given."""

    @abstractmethod
    def parameter(self, function: Function, *, constructs: bool) -> tuple[ast.arg, Any]:
        """Returns the parameter of a function for random numbers, and its default."""

    @abstractmethod
    def frame(self, file: File, function: Function, body: list[str]) -> list[str]:
        """Returns the lines of a function with what keeps random numbers and modes."""

    @abstractmethod
    def key(self, file: File, function: Function) -> ast.expr:
        """Returns the code for a random key when a model is called."""

    @abstractmethod
    def extras(self, file: File, function: Function, *callees: Any) -> list[ast.keyword]:
        """Returns what a call of modules or of a function is given beside the source's arguments.

        Args:
            file: The file.
            function: The function that calls them.
            callees: What the call has called: modules, or a `Function`.
        """

    def is_taken(self, file: File, module: Any, given: list[ast.keyword]) -> bool:
        """Returns whether calls of a module, or of a function in its place, take such keywords."""
        return True

    def more_parameters(self, file: File, function: Function) -> list[tuple[ast.arg, Any]]:
        """Returns further parameters of a function that the source does not have."""
        return []

    @abstractmethod
    def dropout(
        self, file: File, function: Function, *given: ast.expr, dims: tuple[int, ...] = ()
    ) -> ast.expr:
        """Returns the code for dropout of an array, at a rate, in training or not.

        Args:
            file: The file.
            function: The function that calls it.
            given: The code for the array, the rate, and whether it is in training.
            dims: The dimensions that are dropped as one.

        Raises:
            NotTranscribed: The target has none of dimensions.
        """

    @abstractmethod
    def read(self, array: ast.expr, value: Any, *, constructs: bool) -> ast.expr:
        """Returns the code for the value of an array of a module."""

    @abstractmethod
    def write(
        self, file: File, function: Function, array: ast.expr, value: ast.expr, sign: str = ""
    ) -> str:
        """Returns the statement that gives an array of a module a value, or changes it by one."""

    @abstractmethod
    def initialize(self, array: ast.expr, initializer: ast.expr) -> str:
        """Returns the statement that gives an array of a module first values."""

    @abstractmethod
    def fields(self, file: File, cls: type) -> list[str]:
        """Returns the declarations of a class's attributes."""

    @abstractmethod
    def open(self, net: types.ModuleType, name: str, weights: Mapping[str, Any]) -> Any:
        """Returns a file's model in evaluation: its arrays, and the function that takes them."""

    def keys_of_scan(self, function: Function, lines: list[str]) -> tuple[str, list[str], str]:
        """Returns the random keys of a scan's body: a parameter, first lines, and an argument."""
        return "", [], ""

    def give_keys(self, call: ast.expr) -> ast.expr:
        """Returns the call that makes a model, with random numbers for modules that it is given."""
        return call

    def draw(self) -> ast.expr:
        """Returns the code for a random key when a model is made."""
        return literal(self.source().value)

    def array(self, kind: str, *codes: ast.expr) -> ast.expr:
        """Returns the code for an array of a module in a constructor; see `arrays`."""
        return expr(self.arrays[kind], *codes)
