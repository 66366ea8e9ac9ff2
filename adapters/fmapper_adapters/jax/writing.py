"""The part of the adapter for JAX that writes files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from fmapper.programs import Program
    from fmapper.translation import Source


class Writing:
    """Models as files of functions."""

    def translate(self, program: Program, *, modes: bool = False) -> Source:
        """Returns a file of functions.

        Raises:
            ConversionError: A call of the model changes its arrays.
        """
        from fmapper.translation import write
        from fmapper_adapters.jax.translation.dialect import refuse_changes
        from fmapper_adapters.jax.translation.functions.dialect import FunctionsDialect
        from fmapper_adapters.jax.translation.layers import prepare_program
        from fmapper_adapters.jax.translation.print_numbers import draws

        refuse_changes(program, "JAX")
        program, slices = prepare_program(program)
        dialect = FunctionsDialect(slices, keys=program.train or draws(program))
        return write(program, dialect)

    def open_file(
        self, net: ModuleType, name: str, weights: Mapping[str, Any], *, train: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the model of a file, filled with the arrays of its source, and options."""
        from fmapper_adapters.jax.translation.functions import opening as _opening

        return _opening.open_file(net, name, weights, train=train)
