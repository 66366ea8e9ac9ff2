"""The mode of a module, for a `forward` that is told the mode by an argument."""

from __future__ import annotations

import inspect


def follow_mode(model, flags):
    """Gives calls that lack an argument for the mode that of the module; returns the module.

    Args:
        model: The module.
        flags: Such arguments of its `forward` -> their values in training.
    """
    names = [*inspect.signature(type(model).forward).parameters][1:]
    known = [(name, names.index(name), value) for name, value in flags.items() if name in names]

    def add_mode(model, args, kwargs):
        mode = {
            name: model.training is value for name, at, value in known if at >= len(args)
        }  # fmt: skip
        return args, {**mode, **kwargs}

    if known:
        model.register_forward_pre_hook(add_mode, with_kwargs=True)
    return model
