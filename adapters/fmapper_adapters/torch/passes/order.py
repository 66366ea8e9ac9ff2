"""The passes over a program from torch, in their order.

A pass takes a program, or one graph, and returns an equivalent one. It sees names, calls, shapes
and constants, and torch's facts about an operation by its name. From torch's own graph it gets only
plain data and symbols of SymPy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from fmapper.programs import Program
from fmapper_adapters.torch.from_fx.size_facts import SizeFacts
from fmapper_adapters.torch.passes.assertions import fold_assertions
from fmapper_adapters.torch.passes.branches import explain_assertions
from fmapper_adapters.torch.passes.one_form import one_form
from fmapper_adapters.torch.passes.permutes import cancel_permutes
from fmapper_adapters.torch.passes.static_sizes import fix_sizes
from fmapper_adapters.torch.passes.unchanged import drop_unchanged

Pass = Callable[[Program], Program]


def run(program: Program, *, other_forms: Collection[str], facts: SizeFacts) -> Program:
    """Runs all passes on a program.

    Args:
        program: The program.
        other_forms: The names of operations in it that are variants of another one.
        facts: torch's facts about its sizes.
    """
    passes: tuple[Pass, ...] = (
        drop_unchanged,
        partial(one_form, ops=other_forms),
        partial(fix_sizes, facts=facts),
        cancel_permutes,
        fold_assertions,
        explain_assertions,
    )
    for rewrite in passes:
        program = rewrite(program)
    return program
