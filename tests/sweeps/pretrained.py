"""Every architecture of transformers: its folder as transformers writes it, by rules and back.

`nox -s pretrained` runs one class of each; `nox -s pretrained -- '^mixtral'` runs some. Nothing is
computed with the models; what is compared is names, shapes, dtypes and bits.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import warnings
from typing import Any

from sweeps import sweeping


def pretrained_case(name: str, kind: str) -> dict[str, Any]:
    """One class: built, saved, and its arrays taken there and back."""
    import torch
    import transformers

    from support.hub_folders import rules_against_transformers, saved

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cls = getattr(transformers, name, None)
    if cls is None or getattr(cls, "is_dummy", False):
        return {"class": "not built", "reason": "needs a package that is not installed"}
    try:
        model = small_model(cls, kind)
    except Exception as error:
        return {"class": "not built", "reason": sweeping.reason(error)}
    try:
        folder = saved(model)
    except Exception as error:  # a configuration whose heads do not divide what is permuted
        return {"class": "torch", "reason": sweeping.reason(error)}
    rules, wrong = rules_against_transformers(model, folder)
    if wrong:
        return {"class": sweeping.MISMATCH, "reason": wrong}
    return {"class": sweeping.OK, "rules": len(rules)}


def small_model(cls: Any, kind: str) -> Any:
    """A model of a class, by the first rule that makes one; it need not compute anything."""
    from models import tiny_configs, tiny_models

    defaults = tiny_models._defaults(cls, kind)
    reasons: list[Exception] = []
    for rule in (*tiny_models.RULES, *tiny_models.MORE_RULES):
        config = copy.deepcopy(defaults)
        if rule.complete:
            config = tiny_configs.completed(config, cls)
        try:
            return tiny_models._model(
                cls, kind, tiny_models.shrunk(config, rule), complete=rule.complete
            )
        except Exception as error:
            reasons.append(error)
    raise reasons[0]


def main() -> None:
    parser = sweeping.arguments(__doc__ or "", "pretrained")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    from models import tiny_models

    gc.freeze()  # or each process would copy all of it
    seen: set[str] = set()
    cases = {}
    for name, kind in tiny_models.classes().items():
        if kind not in seen:  # the first class is the richest
            seen.add(kind)
            cases[name] = functools.partial(pretrained_case, name.rpartition("/")[2], kind)
    sweeping.sweep(cases, options, "Folders of transformers")


if __name__ == "__main__":
    main()
