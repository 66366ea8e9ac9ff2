"""Every architecture of transformers: its folder as transformers writes it, by rules and back.

`nox -s pretrained` runs one class of each; `nox -s pretrained -- Mixtral` runs some. With
`--to flax` each folder becomes a model of Flax, which is saved as a folder again; the example
inputs are those made from its configuration, where the model runs with them. What is compared is
names, shapes, dtypes and bits.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from sweeps import sweeping, zoo


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


def folder_case(name: str, kind: str, to: str) -> dict[str, Any]:
    """One class: a folder, the model that is made of it, and the folder that is made of that."""
    import torch

    import fmapper
    from fmapper.checkpoints import diff
    from models import tiny_models

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        tiny = tiny_models.build(name, kind)
    except tiny_models.CannotBuild as error:
        return {"class": "not built", "reason": str(error)}
    with tempfile.TemporaryDirectory() as place:
        folder, back = Path(place) / "folder", Path(place) / "back"
        try:
            tiny.model.save_pretrained(folder)
            kept = type(tiny.model).from_pretrained(folder).state_dict()
        except Exception as error:  # a configuration whose heads do not divide what is permuted
            return {"class": "torch", "reason": sweeping.reason(error)}
        options: dict[str, Any] = {"dynamic_shapes": None}
        are_made = _takes_what_is_made(tiny.model)
        if not are_made:
            options["example_kwargs"] = tiny.inputs
        try:
            model = fmapper.from_pretrained(folder, to, **options)
        except fmapper.UnsupportedOpsError as error:
            return {"class": "unsupported", "reason": sweeping.reason(error)}
        except fmapper.ConversionError as error:
            export = "torch.export could not record it" in str(error)
            kind = "torch.export" if export else "refused"
            return {"class": kind, "reason": sweeping.reason(error)}
        fmapper.save_pretrained(model, back, like=folder)
        found = diff(folder, back)
        if found:
            return {"class": sweeping.MISMATCH, "reason": str(found)[:700]}
        opened = type(tiny.model).from_pretrained(back).state_dict()
        wrong = [n for n in kept.keys() | opened.keys() if not _same(kept.get(n), opened.get(n))]
        if wrong:
            return {"class": sweeping.MISMATCH, "reason": f"transformers reads otherwise: {wrong}"}
    examples = "from the configuration" if are_made else "given"
    return {"class": sweeping.OK, "arrays": found.compared, "examples": examples}


def _takes_what_is_made(model: Any) -> bool:
    """Whether a model runs with the inputs that are made from its configuration."""
    import torch

    from fmapper_adapters.torch.pretrained import inputs

    made = inputs.example_kwargs(model)
    try:
        with torch.no_grad():
            model(**made)
    except Exception:
        return False
    return bool(made)


def _same(a: Any, b: Any) -> bool:
    from support.hub_folders import numpy_of

    if a is None or b is None:
        return False
    a, b = numpy_of(a), numpy_of(b)
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


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
    parser.add_argument("--to", choices=["flax", "jax"], help="through a model of this framework")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    from models import tiny_models

    if options.to:
        zoo.prepare()
    gc.freeze()  # or each process would copy all of it
    seen: set[str] = set()
    cases = {}
    for name, kind in tiny_models.classes().items():
        if kind not in seen:  # the first class is the richest
            seen.add(kind)
            of = name.rpartition("/")[2], kind
            cases[name] = (
                functools.partial(folder_case, *of, options.to)
                if options.to
                else functools.partial(pretrained_case, *of)
            )
    sweeping.sweep(cases, options, "Folders of transformers")


if __name__ == "__main__":
    main()
