"""The lines of code that operations come from, for names and comments."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from types import CodeType, FrameType

import torch

from fmapper.programs.reading import statements_at

_SKIPPED = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, __file__)
)
_OF_OTHERS = (_SKIPPED[0], os.path.dirname(os.path.dirname(_SKIPPED[1])) + os.sep)
_PATCHES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "patches", "")

# Classes here are written to files as well, so their own lines are shown, not their caller's.
_WRITTEN = "/torch/nn/modules/transformer.py"


def is_of_torch(code: CodeType) -> bool:
    """Returns whether a function belongs to torch, or to its recording."""
    return code.co_filename.startswith(_SKIPPED)


def line_of_method(frame: FrameType | None) -> str:
    """Returns the line of the innermost running method of a module, as `file:line`.

    It is empty for `forward`, whose lines torch notes itself. A line that only returns a result
    counts as the line that called the method.
    """
    while frame is not None:
        code, owner = frame.f_code, frame.f_locals.get("self")
        if not isinstance(owner, torch.nn.Module) or is_of_torch(code):
            frame = frame.f_back
            continue
        if code.co_name == "forward":
            return ""
        line = f"{code.co_filename}:{frame.f_lineno}"
        if not statements_at([line]).get(line, "").startswith("return "):
            return line
        frame = frame.f_back
        while frame is not None and frame.f_locals.get("self") is not owner:
            frame = frame.f_back
        if frame is not None and frame.f_code.co_name == "forward":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


def innermost_line(frame: FrameType | None, outermost: CodeType | None) -> str:
    """Returns the innermost line outside of torch within a running function, as `file:line`.

    It is empty if the function has not called the frame.
    """
    place = ""
    while frame is not None:
        code, file = frame.f_code, frame.f_code.co_filename
        if not place and (_WRITTEN in file or not file.startswith(_OF_OTHERS)):
            place = f"{file}:{frame.f_lineno}"
        if code is outermost:
            return place
        frame = frame.f_back
    return ""


def lines_in(frame: FrameType | None, codes: Sequence[CodeType]) -> list[str]:
    """Returns the current line in each of some functions that call one another.

    Args:
        frame: The innermost frame.
        codes: The code of the functions, outer ones first.
    """
    lines: list[str] = []
    left = [*codes]
    while frame is not None and left:
        if frame.f_code is left[-1]:
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            left.pop()
        frame = frame.f_back
    return [*[""] * len(left), *reversed(lines)]


@functools.lru_cache(maxsize=1024)
def line_of_stack(stack: str | None) -> str:
    """Returns the innermost line of a stack trace outside of torch, as `file:line`; or empty.

    Patches of the recording are skipped.
    """
    lines = [line for line in (stack or "").splitlines() if re.match(r' *File "', line)]
    lines = [line for line in lines if _PATCHES not in line]
    written = (
        [line for line in lines if "/torch/nn/" not in line or _WRITTEN in line] or lines or [""]
    )
    match = re.match(r' *File "(.*)", line (\d+)', written[-1])
    return f"{match[1]}:{match[2]}" if match else ""
