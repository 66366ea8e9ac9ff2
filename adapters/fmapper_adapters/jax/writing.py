"""The part of the adapter for JAX that writes files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fmapper.programs import Program
    from fmapper.translation import Source
    from fmapper.verification import Runner


class Writing:
    """Models as files of functions."""

    def translate(self, program: Program, *, scan: bool = False, modes: bool = False) -> Source:
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
        return write(program, dialect, scan=scan)

    def file_runner(self) -> type[Runner]:
        """Returns what runs a file for this framework."""
        from fmapper_adapters.jax.translation.functions.proof import FunctionRunner

        return FunctionRunner
