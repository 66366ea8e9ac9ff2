"""Models as source code: a file in the words of another framework, with the model's own classes.

units     a program, taken apart by its submodules
code      expressions made of templates
printing  the tables that say how a target writes an operation
"""

from fmapper.programs.program import Call, DType, Ref
from fmapper.translation.classes import Class
from fmapper.translation.code import Value, attribute, expr, identifier, literal, text
from fmapper.translation.dialect import Dialect, Helper, Layer
from fmapper.translation.printing import PrinterTable, Printing
from fmapper.translation.units import Structure, Unit, local_array
from fmapper.translation.writer import Source, write

__all__ = [
    "Call",
    "Class",
    "DType",
    "Dialect",
    "Helper",
    "Layer",
    "PrinterTable",
    "Printing",
    "Ref",
    "Source",
    "Structure",
    "Unit",
    "Value",
    "attribute",
    "expr",
    "identifier",
    "literal",
    "local_array",
    "text",
    "write",
]
