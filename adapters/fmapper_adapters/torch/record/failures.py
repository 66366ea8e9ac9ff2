"""Explains why torch could not record a module, where, and what to do."""

from __future__ import annotations

import os
import traceback
from typing import Any

import torch

from fmapper import ConversionError, fleaves
from fmapper_adapters.torch.record.patches.restore import restore_after


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, to be quoted in a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


# Parts of torch's messages, and the remedies.
_REMEDIES = (
    (
        ("GuardOnDataDependentSymNode", "Could not guard on data-dependent"),
        "The forward branches on the value of a tensor. Use torch.where or torch.cond, or state "
        "known facts with torch._check. If it compares a float that it has read, as in x.item() > "
        "0, compare the tensor instead, x > 0: the program then checks which branch is taken.",
    ),
    (
        ("ConstraintViolation", "Constraints violated", "specialized"),
        "A size that dynamic_shapes lets vary is fixed by the code. Remove it from "
        "dynamic_shapes, or mark it torch.export.Dim.AUTO.",
    ),
    (
        ("missing a required argument", "positional argument", "unexpected keyword"),
        "Pass the inputs of forward as example_inputs and example_kwargs; to a command as "
        "--example and --kwargs.",
    ),
    (
        ("pytree", "is not supported as an input", "Unsupported input type"),
        "Register the class of the input with torch.export.register_dataclass, or pass tensors in "
        "tuples, lists and dicts.",
    ),
    (
        ("expected scalar type", "to have the same dtype"),
        "The factors of a product have different dtypes. In eager mode, torch accepts this if "
        "there is nothing to multiply, but a recording is for other sizes too. Cast one of them, "
        "as in x.to(y.dtype).",
    ),
    (
        ("to out tensor with dtype",),
        "An in-place operation has another result dtype than its tensor. torch casts it in eager "
        "mode, but refuses to record it. Write the cast explicitly, as in x = "
        "x.pow(2).to(x.dtype).",
    ),
)


def failure(
    module: torch.nn.Module, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ConversionError:
    """Translates an error of torch to an error of fmapper, with the original as its cause.

    For an unknown error, the module is called with the examples, which may be wrong. The error for
    a branch on a value has no cause: it names the line, and torch's message only describes its own
    symbols at length.
    """
    message, has_cause = _message(module, error, args, kwargs)
    translated = ConversionError(message)
    translated.__cause__ = error if has_cause else None
    return translated


def _message(
    module: torch.nn.Module, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, bool]:
    """Returns the message, and whether torch's error should be shown as its cause."""
    text = f"{type(error).__name__}: {error}"
    name = type(module).__name__
    remedies = [advice for signs, advice in _REMEDIES if any(sign in text for sign in signs)]
    call_error = None if remedies else _error_of_call(module, args, kwargs)
    if call_error is not None:
        at = module_of(module, call_error)
        return (
            f"{name}: it cannot be called with the examples{f', in {at}' if at else ''}. "
            f"{type(call_error).__name__}: {first_line(call_error)}. Pass inputs that it accepts."
        ), True
    remedy = (
        *remedies,
        "Call torch.export.export(module, args, kwargs) directly to investigate; rewrite the part "
        "that cannot be recorded, or move it to the caller.",
    )[0]
    where = module_of(module, error)
    if any(sign in text for sign in _REMEDIES[0][0]) and (line := _line_of(error)):
        inside = f" in {where}" if where else ""
        return (
            f"{name}: its code decides by the value of a tensor{inside}, at {line}, which cannot "
            f"be recorded.\n{remedy}"
        ), False
    at = f" in {where}" if where else ""
    return f"{name}: torch.export could not record it{at}. {_first_lines(text)}\n{remedy}", True


def _line_of(error: Exception) -> str:
    """Returns the innermost line of the user's code that an error came through, with its text."""
    prefixes = (os.path.dirname(torch.__file__) + os.sep, _OWN, "<")
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith(prefixes)]
    return f"{of_user[-1].filename}:{of_user[-1].lineno}: {of_user[-1].line}" if of_user else ""


_OWN = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


def _error_of_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """Returns the error that a call with the examples raises, if it does."""
    if any(leaf.is_meta for leaf in fleaves((args, kwargs)) if isinstance(leaf, torch.Tensor)):
        return None
    try:
        with restore_after(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
            module(*args, **kwargs)
    except Exception as error:  # the module may raise anything
        return error
    return None


def _first_lines(text: str, most: int = 12) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:most])


def place_of(module: torch.nn.Module, error: Exception) -> str:
    """Returns the class of a module, and the path of the submodule that an error came from."""
    return ": ".join(filter(None, (type(module).__name__, module_of(module, error))))


def module_of(module: torch.nn.Module, error: Exception) -> str:
    """Returns the path of the innermost submodule whose forward the error came through."""
    paths = {id(inner): path for path, inner in module.named_modules()}
    innermost = ""
    frames = error.__traceback__
    while frames is not None:
        owner = frames.tb_frame.f_locals.get("self")
        if frames.tb_frame.f_code.co_name == "forward" and id(owner) in paths:
            innermost = paths[id(owner)] or innermost
        frames = frames.tb_next
    return innermost
