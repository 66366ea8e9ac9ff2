"""For recorders: reads a model's source code, arguments, constructors, and submodules."""

from fmapper.programs.reading.arguments import Arguments, arguments_of
from fmapper.programs.reading.parts import keep_results_of_parts
from fmapper.programs.reading.statements import parameters_at, statements_at
from fmapper.programs.reading.titles import class_name
from fmapper.programs.reading.written import (
    origin_of_written,
    source_of_class,
    source_of_model,
)

__all__ = [
    "Arguments",
    "arguments_of",
    "class_name",
    "keep_results_of_parts",
    "origin_of_written",
    "parameters_at",
    "source_of_class",
    "source_of_model",
    "statements_at",
]
