"""The interface of a target for which source code is generated."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fmapper.errors import ConversionError
from fmapper.translation.code import expr, literal

if TYPE_CHECKING:
    from fmapper.programs.program import Call
    from fmapper.translation.classes import Class
    from fmapper.translation.functions.forms import Statement
    from fmapper.translation.printing import Printer
    from fmapper.translation.scans.derivatives import Derived
    from fmapper.translation.units import Structure, Unit


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the target that replaces calls of the program.

    Attributes:
        made: The code that makes it.
        inputs: The values that it is called with.
        output: The value that it gives.
        arrays: The inputs of the graph that it holds -> what it calls them, and the order of the
            dimensions that it has them in; None for that of the source.
        kind: The class, as the code names it.
        name: What to call it where the source has no submodule for it.
        drops: Values that it gives beside, which it keeps itself, as running statistics.
        results: Where it gives a tuple: the values in it; empty for those that nobody uses.
        inner: The layers in it whose arrays these are, by their paths there -> the class.
        draws: Whether it draws random numbers.
        names: The keywords that the last of its inputs are given by.
        options: Further keywords of the call -> what they are.
    """

    made: ast.expr
    inputs: tuple[str, ...]
    output: str
    arrays: Mapping[str, tuple[str, tuple[int, ...] | None]]
    kind: str
    name: str = ""
    drops: frozenset[str] = frozenset()
    results: tuple[str, ...] = ()
    inner: Mapping[str, str] = field(default_factory=dict)
    draws: bool = False
    names: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)

    def gives(self) -> tuple[str, ...]:
        """Returns the values that it computes."""
        return tuple(filter(None, self.results)) or (self.output,)


@dataclass(frozen=True, slots=True)
class Helper:
    """A function or class of the file that is not part of the model.

    Attributes:
        source: Its code.
        needs: Other helpers that it calls.
    """

    source: str
    needs: frozenset[str] = field(default_factory=frozenset)


# What the code of every target calls: its source.
CHECK_SHAPES = '''def check_shapes(*expected):
    """Raises where arrays have other shapes than those that the code is written for."""
    sizes = {}
    for array, shape in expected:
        for size, name in zip(array.shape, shape.split(), strict=True):
            known = int(name) if name.isdigit() else sizes.setdefault(name, size)
            if size != known and name != "_":
                known = "" if name.isdigit() else f", with {name} = {known}"
                raise ValueError(f"{tuple(array.shape)} is not ({shape}){known}")'''


class Dialect(ABC):
    """The dialect of a target.

    Attributes:
        passes_keys: Whether all that draws is given a key: its functions have a parameter `key`,
            and call `Keys(key)`, a helper, for several.
        own_key: Where keys are not passed: the code for one, by an object's own `random_state`.
        random_state: The attributes that an object which draws has for that -> their code.
        ones_like: The code of integers that are ones, in the shape of the array `{0}`.
        mode: The attribute that an object has for its mode, which the framework sets; empty where
            all objects have it.
        in_evaluation: The code that says that an object is in evaluation.
        told_in_training: Layers -> the keywords that a program for evaluation does not know.
        holds_constants: Whether objects hold the arrays that code has, so that they move with them.
        has_sequences: Whether parts that are called in order can be one object.
    """

    passes_keys: ClassVar[bool] = False
    own_key: ClassVar[str] = ""
    random_state: ClassVar[Mapping[str, str]] = {}
    mode: ClassVar[str] = ""
    in_evaluation: ClassVar[str] = ""
    told_in_training: ClassVar[Mapping[str, Sequence[str]]] = {}
    ones_like: ClassVar[str] = "{0} * 0 + 1"
    holds_constants: ClassVar[bool] = False
    has_sequences: ClassVar[bool] = True

    @abstractmethod
    def reserved_names(self) -> frozenset[str]:
        """Returns the names that a file of this target uses itself."""

    def own_methods(self) -> frozenset[str]:
        """Returns the methods that all classes have there; a model's own get other names."""
        return frozenset()

    def state_name(self, draft: Any, path: str) -> str:
        """Returns the name that `state` gives an array, by its path in the source."""
        return ".".join(draft.place(path))

    @abstractmethod
    def make(self, cls: Class) -> ast.expr:
        """Returns the code that creates an instance of a class of the file."""

    @abstractmethod
    def parts(self, made: Sequence[ast.expr]) -> ast.expr:
        """Returns the code for a list of submodules."""

    def arrays(self, made: Sequence[ast.expr]) -> ast.expr:
        """Returns the code for a list of arrays."""
        return self.parts(made)

    def mapping(self, made: Mapping[str, ast.expr]) -> ast.expr | None:
        """Returns the code for submodules by name, as attributes; None where that needs a class."""
        return None

    @abstractmethod
    def sequence(self, made: Sequence[ast.expr | None]) -> ast.expr:
        """Returns the code for parts that are called in order; None is the identity."""

    @abstractmethod
    def file(self, draft: Any, classes: Sequence[Class], root: Class) -> str:
        """Returns the file with these classes."""

    @abstractmethod
    def printer(self, op: str) -> Printer | None:
        """Returns the printer of an operation, if there is one."""

    @abstractmethod
    def helper(self, name: str) -> Helper | None:
        """Returns a helper function or class by name."""

    @abstractmethod
    def fallback(self, call: Call) -> str:
        """Returns the name of a helper that computes an operation, from its lowering.

        Raises:
            ConversionError: It cannot be written.
        """

    def call_derived(
        self, function: Derived, given: Sequence[ast.expr], taken: Collection[str]
    ) -> ast.expr:
        """Returns the call of a function with a derivative of its own; the file then has that.

        Args:
            function: The function.
            given: What it is given.
            taken: Names that mean something else where it is called.

        Raises:
            ConversionError: Files for this target cannot say what its derivative is.
        """
        raise ConversionError(
            f"{function.label} has a derivative of its own, which these files cannot say. "
            "Use convert without structure=True"
        )

    def draws(self, op: str) -> bool:
        """Returns whether an operation draws random numbers: its helper takes a key."""
        return False

    @abstractmethod
    def layer_of_unit(self, structure: Structure, unit: Unit) -> Layer | None:
        """Returns the layer that computes a whole submodule, if there is one."""

    @abstractmethod
    def layer_of_call(self, structure: Structure, unit: Unit, call: Call) -> Layer | None:
        """Returns the layer that computes one operation on arrays of the submodule."""

    @abstractmethod
    def dtype(self, name: str) -> ast.expr:
        """Returns the code for a dtype."""

    def dtype_argument(self, name: str) -> ast.expr:
        """Returns the code for a dtype argument of a lowering."""
        return expr("np.dtype({0})", name)

    @abstractmethod
    def read_array(self, node: ast.expr, order: tuple[int, ...] | None) -> ast.expr:
        """Returns the code that reads an array of a submodule.

        Args:
            node: The attribute.
            order: The order of its dimensions that is wanted; None for its own.
        """

    @abstractmethod
    def write_array(self, node: ast.expr, value: ast.expr) -> Statement:
        """Returns the statement that writes an array of a submodule."""

    @abstractmethod
    def stack(self, node: ast.expr, dim: int) -> ast.expr:
        """Returns the code that stacks a list of rows along a dimension."""

    @abstractmethod
    def rows(self, node: ast.expr, dim: int, *, reverse: bool) -> ast.expr:
        """Returns the code for the rows of an array along a dimension, to iterate over them."""

    @abstractmethod
    def parameter(self, array: Any) -> ast.expr:
        """Returns the code that creates a parameter like an array."""

    @abstractmethod
    def frozen_array(self, array: Any, *, kind: str, saved: bool = False) -> ast.expr:
        """Returns the code that creates a buffer, or an array that is not trained.

        Args:
            array: The array.
            kind: `FrozenParam`, `Buffer` or `Constant`.
            saved: Whether the state dict has it: what is computed here may be rounded otherwise.
        """

    def is_loaded(self, array: Any, *, varies: bool) -> bool:
        """Returns whether the values of an array are left to `load_weights`.

        Args:
            array: The array.
            varies: Whether other modules of its class have other values there.
        """
        return False

    def loaded_array(self, array: Any) -> ast.expr:
        """Returns the code for an array that is not trained and that `load_weights` has to fill."""
        raise NotImplementedError

    def check(self, condition: ast.expr, message: str) -> ast.expr:
        """Returns the code that raises where a condition does not hold; `check` is a helper."""
        return expr("check({0}, {1})", condition, message)

    def check_shapes(self, arrays: Sequence[tuple[ast.expr, str]]) -> ast.expr:
        """Returns the code that raises where arrays have unexpected shapes.

        A shape is its sizes and the names of those that vary: `batch length 64`; `_` for any.
        """
        return ast.Call(expr("check_shapes"), [literal(pair) for pair in arrays], [])

    @abstractmethod
    def constant(self, array: Any) -> ast.expr:
        """Returns the code for a constant array in the model's code."""
