"""Compares two models: the check of conversions, the proof of translations, and `verify`.

comparison   `verify`
report       its result
training     compares gradients, steps of an optimiser, and the arrays that a call changes
pairing      pairs the arrays of two models
alignment    pairs the results of two runs, by their values
outputs      compares outputs, and a model with itself after a rounding
differences  measures the difference of pairs of arrays
arrays       arrays as NumPy arrays, and their precision
models       calls, trains and watches models; `Trial` is for adapters
optimizers   optimisers by name
random       compares dropout and other random numbers, over seeds
location     finds the first operation where two models part
files        the proof of translated files
"""

from typing import TYPE_CHECKING

from fmapper.lazy import surface as _surface

if TYPE_CHECKING:
    from fmapper.verification.alignment import Alignment, align
    from fmapper.verification.comparison import verify
    from fmapper.verification.differences import Difference
    from fmapper.verification.models.draws import Draws, numpy_seeded
    from fmapper.verification.models.trial import Call, Loss, Slope, Stepper, Trial
    from fmapper.verification.report import Operation, Parting, Report

__all__ = [
    "Alignment",
    "Call",
    "Difference",
    "Draws",
    "Loss",
    "Operation",
    "Parting",
    "Report",
    "Slope",
    "Stepper",
    "Trial",
    "align",
    "numpy_seeded",
    "verify",
]

_PLACES = {
    "fmapper.verification.alignment": "Alignment align",
    "fmapper.verification.differences": "Difference",
    "fmapper.verification.models.draws": "Draws numpy_seeded",
    "fmapper.verification.report": "Operation Parting Report",
    "fmapper.verification.models.trial": "Call Loss Slope Stepper Trial",
    "fmapper.verification.comparison": "verify",
}
__getattr__, __dir__ = _surface(__name__, _PLACES.items())
