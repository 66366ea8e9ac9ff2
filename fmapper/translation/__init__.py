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
    elements,
    expr,
    identifier,
    literal,
    text,
)
from fmapper.translation.dialect import CHECK_SHAPES, Dialect, Helper, Layer
from fmapper.translation.functions.forms import Statement
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
from fmapper.translation.printing import PrinterTable, Printing
from fmapper.translation.reading.embed import Embedded
from fmapper.translation.reading.files import run_file
from fmapper.translation.reading.helpers import (
    helpers_of,
    names_in,
    print_docstring,
    print_imports,
)
from fmapper.translation.reading.structured import build_transcribed
from fmapper.translation.reading.weights import arrays_from_source, source_weights
from fmapper.translation.scans.derivatives import Derived
from fmapper.translation.scans.derived_functions import Functions
from fmapper.translation.source_file import Source
from fmapper.translation.units import Structure, Unit, is_of_library, local_array
from fmapper.translation.writer import write

__all__ = [
    "CHECK_NAMES",
    "CHECK_SHAPES",
    "NOT_SAVED",
    "Call",
    "Class",
    "DType",
    "Derived",
    "Dialect",
    "Embedded",
    "Functions",
    "Helper",
    "Layer",
    "Loading",
    "Loop",
    "Method",
    "PrinterTable",
    "Printing",
    "Ref",
    "Source",
    "Statement",
    "Structure",
    "Unit",
    "Value",
    "arrays_from_source",
    "attribute",
    "attribute_name",
    "build_transcribed",
    "by_suffix",
    "elements",
    "expr",
    "helpers_of",
    "identifier",
    "is_of_library",
    "literal",
    "local_array",
    "names_beside",
    "names_in",
    "print_checks",
    "print_docstring",
    "print_imports",
    "run_file",
    "shortest_parts",
    "source_weights",
    "tables_of",
    "text",
    "whole_arrays",
    "with_lists",
    "write",
]
