"""A model's computation as plain data, for authors of lowerings and of target frameworks.

A source framework records a `Program`; a target lowers each `Call` in it and binds the arrays.
Nothing here depends on a framework: a program can be saved, checked, and loaded elsewhere.

    program       the data: graphs of calls, inputs, arrays
    reading       for recorders: source text, arguments, constructors, calls of submodules
    treespec      the structure of arguments and results
    sizes         sizes that are computed from others
    bind          arguments of a call to inputs of a program
    echoes        outputs with the classes of arguments, such as caches
    lowering      the tables of lowerings
    convert       `convert`: record, lower, check
    steps         each of these steps, one thread at a time
    check_target  compares the converted model with its source, at several sizes
    check_source  compares the recording with its source
    file          programs as files
    file_grammar  the values that each field of a file may have
    file_json     programs as JSON
"""

from typing import TYPE_CHECKING

from fmapper.lazy import surface as _surface

if TYPE_CHECKING:
    from fmapper.programs.echoes import Echoes
    from fmapper.programs.lowering import Facts, Lowering, LoweringTable
    from fmapper.programs.program import (
        Call,
        Graph,
        Guard,
        Input,
        Output,
        Parameter,
        Part,
        Program,
        map_arguments,
        refs_in,
        substitute,
    )
    from fmapper.programs.sizes import Polynomial, names_in, reshape_groups, size_of
    from fmapper.programs.steps import lower
    from fmapper.programs.treespec import (
        DType,
        Other,
        Record,
        Ref,
        Scalar,
        Size,
        TreeSpec,
        record_type,
    )
    from fmapper.states.plain import PlainState, warn_of_changes

__all__ = [
    "Call",
    "DType",
    "Echoes",
    "Facts",
    "Graph",
    "Guard",
    "Input",
    "Lowering",
    "LoweringTable",
    "Other",
    "Output",
    "Parameter",
    "Part",
    "PlainState",
    "Polynomial",
    "Program",
    "Record",
    "Ref",
    "Scalar",
    "Size",
    "TreeSpec",
    "lower",
    "map_arguments",
    "names_in",
    "record_type",
    "refs_in",
    "reshape_groups",
    "size_of",
    "substitute",
    "warn_of_changes",
]

_PLACES = {
    "fmapper.programs.echoes": "Echoes",
    "fmapper.programs.lowering": "Facts Lowering LoweringTable",
    "fmapper.programs.program": (
        "Call Graph Guard Input Output Parameter Part Program map_arguments refs_in substitute"
    ),
    "fmapper.programs.sizes": "Polynomial names_in reshape_groups size_of",
    "fmapper.programs.steps": "lower",
    "fmapper.programs.treespec": "DType Other Record Ref Scalar Size TreeSpec record_type",
    "fmapper.states.plain": "PlainState warn_of_changes",
}
__getattr__, __dir__ = _surface(__name__, _PLACES.items())
