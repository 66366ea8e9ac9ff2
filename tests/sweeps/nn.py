"""Layers of torch.nn with their options, converted to JAX and compared with eager PyTorch.

`nox -s layers` runs all of them; `nox -s layers -- Conv --out layers` runs some.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from sweeps import sweeping
from sweeps import zoo as sweep_zoo


def nn_case(name: str) -> dict[str, Any]:
    import copy

    import torch

    from models import nn_cases
    from support import converting

    torch.set_num_threads(1)
    make, inputs = nn_cases.CASES[name]
    module = nn_cases.build(make)
    if not isinstance(module, torch.nn.Module):
        module = converting.Function(module)
    module.eval()
    twin = copy.deepcopy(module)
    try:
        with torch.no_grad():
            want = twin(*copy.deepcopy(inputs))
    except Exception as error:
        return {"class": "not built", "reason": sweeping.reason(error)}
    return sweep_zoo.converted_case(module, inputs, {}, want)


def main() -> None:
    options = sweeping.arguments(__doc__ or "", "layers").parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    sweep_zoo.prepare()
    from models import nn_cases

    cases = {name: functools.partial(nn_case, name) for name in nn_cases.CASES}
    sweeping.sweep(cases, options, "Layers of torch.nn")


if __name__ == "__main__":
    main()
