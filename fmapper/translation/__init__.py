"""Models as source code for another framework, with classes like those of the original.

units     a program, taken apart by its submodules
code      expressions made of templates
printing  the tables that say how a target writes an operation
"""

from fmapper.programs.program import Call
from fmapper.programs.treespec import DType, Ref
from fmapper.translation.classes import Class, Method
from fmapper.translation.code import (
    Value,
    attribute,
    attribute_name,
    construct,
    elements,
    expr,
    identifier,
    literal,
    text,
)
from fmapper.translation.constructors.defaults import omit_defaults, print_parameters
from fmapper.translation.constructors.makers import titles_of_sequences
from fmapper.translation.constructors.reading import Settings, settings_of
from fmapper.translation.dialect import CHECK_SHAPES, Dialect, Helper, Layer
from fmapper.translation.functions.forms import Statement
from fmapper.translation.functions.results import with_results
from fmapper.translation.lists import with_lists
from fmapper.translation.loading import (
    CHECK_NAMES,
    NOT_SAVED,
    Loading,
    by_suffix,
    names_beside,
    print_checks,
    shortest_parts,
    tables_of,
    whole_arrays,
)
from fmapper.translation.merging.comprehensions import with_comprehensions
from fmapper.translation.places import class_name
from fmapper.translation.printing import PrinterTable, Printing
from fmapper.translation.proving.draws import Draws
from fmapper.translation.proving.script import proof_script
from fmapper.translation.reading.arguments import Arguments, arguments_of
from fmapper.translation.reading.embed import Embedded
from fmapper.translation.reading.files import run_file
from fmapper.translation.reading.helpers import (
    helpers_of,
    names_in,
    print_docstring,
    print_imports,
)
from fmapper.translation.reading.statements import other_names, parameters_at, statements_at
from fmapper.translation.reading.weights import origin_of_built, rows_in, source_weights
from fmapper.translation.scans.derivatives import Derived
from fmapper.translation.scans.derived_functions import Functions
from fmapper.translation.scans.loop import Loop
from fmapper.translation.source_file import Source
from fmapper.translation.statements.own_functions import FunctionStack, with_own_functions
from fmapper.translation.units import Structure, Unit, is_of_library, local_array
from fmapper.translation.writer import write

__all__ = [
    "CHECK_NAMES",
    "CHECK_SHAPES",
    "NOT_SAVED",
    "Arguments",
    "Call",
    "Class",
    "DType",
    "Derived",
    "Dialect",
    "Draws",
    "Embedded",
    "FunctionStack",
    "Functions",
    "Helper",
    "Layer",
    "Loading",
    "Loop",
    "Method",
    "PrinterTable",
    "Printing",
    "Ref",
    "Settings",
    "Source",
    "Statement",
    "Structure",
    "Unit",
    "Value",
    "arguments_of",
    "attribute",
    "attribute_name",
    "by_suffix",
    "class_name",
    "construct",
    "elements",
    "expr",
    "helpers_of",
    "identifier",
    "is_of_library",
    "literal",
    "local_array",
    "names_beside",
    "names_in",
    "omit_defaults",
    "origin_of_built",
    "other_names",
    "parameters_at",
    "print_checks",
    "print_docstring",
    "print_imports",
    "print_parameters",
    "proof_script",
    "rows_in",
    "run_file",
    "settings_of",
    "shortest_parts",
    "source_weights",
    "statements_at",
    "tables_of",
    "text",
    "titles_of_sequences",
    "whole_arrays",
    "with_comprehensions",
    "with_lists",
    "with_own_functions",
    "with_results",
    "write",
]
