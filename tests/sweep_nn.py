"""Layers of torch.nn with their options, converted to JAX and compared with eager PyTorch.

`nox -s layers` runs all of them; `nox -s layers -- Conv --out layers` runs some.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import sweep_zoo


def nn_case(name: str) -> dict[str, Any]:
    import copy

    import torch

    torch.set_num_threads(1)
    converting, cases = sweep_zoo.load("converting"), sweep_zoo.load("nn_cases")
    make, inputs = cases.CASES[name]
    module = cases.build(make)
    if not isinstance(module, torch.nn.Module):
        module = converting.Function(module)
    module.eval()
    twin = copy.deepcopy(module)
    try:
        with torch.no_grad():
            want = twin(*copy.deepcopy(inputs))
    except Exception as error:
        return {"class": "not built", "reason": sweep_zoo.sweeping.reason(error)}
    return sweep_zoo.converted_case(module, inputs, {}, want)


def main() -> None:
    options = sweep_zoo.sweeping.arguments(__doc__ or "", "layers").parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    sweep_zoo.prepare()
    cases = sweep_zoo.load("nn_cases").CASES
    sweep_zoo.sweeping.sweep(
        {name: functools.partial(nn_case, name) for name in cases}, options, "Layers of torch.nn"
    )


if __name__ == "__main__":
    main()
