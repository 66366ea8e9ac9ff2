"""For recorders: reads a model's source code, arguments, constructors, and submodules."""

from fmapper.programs.reading.arguments import Arguments, arguments_of
from fmapper.programs.reading.own_functions import FunctionStack, with_own_functions
from fmapper.programs.reading.parts import keep_results_of_parts
from fmapper.programs.reading.settings import Settings, settings_of
from fmapper.programs.reading.statements import other_names, parameters_at, statements_at
from fmapper.programs.reading.titles import class_name, titles_of_sequences
from fmapper.programs.reading.written import (
    origin_of_written,
    source_of_class,
    source_of_model,
)

__all__ = [
    "Arguments",
    "FunctionStack",
    "Settings",
    "arguments_of",
    "class_name",
    "keep_results_of_parts",
    "origin_of_written",
    "other_names",
    "parameters_at",
    "settings_of",
    "source_of_class",
    "source_of_model",
    "statements_at",
    "titles_of_sequences",
    "with_own_functions",
]
