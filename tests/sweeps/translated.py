"""Measures of a written file against the classes of its source: lines, repeats, layers."""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_UNCOUNTED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
}  # fmt: skip


def file_lines(code: str, helpers: frozenset[str]) -> int:
    """Counts the lines of code of a file's classes, but those of its helpers."""
    classes = [one for one in ast.parse(code).body if isinstance(one, ast.ClassDef)]
    kept = _lines_of_code(code)
    return sum(_count(kept, cls) for cls in classes if cls.name not in helpers)


def repeats(code: str) -> list[str]:
    """Names the classes of a file whose statements another class has, too."""
    first: dict[str, str] = {}
    found = []
    for cls in ast.parse(code).body:
        if isinstance(cls, ast.ClassDef) and len(cls.body) > 1:
            body = "\n".join(map(ast.unparse, cls.body))
            if first.setdefault(body, cls.name) != cls.name:
                found.append(f"{cls.name} as {first[body]}")
    return found


def source_lines(model: Any, run: Callable[[], object]) -> tuple[int, int]:
    """Counts the lines of code of the classes of a model of torch that are not torch's own.

    Returns:
        All, and those that ran: what a run of the model and making it anew had statements of.
    """
    kinds = {type(one) for one in model.modules() if not type(one).__module__.startswith("torch.")}
    files = {inspect.getfile(kind) for kind in kinds}
    seen = _trace(run, files)
    counts = [_lines_of_class(kind, seen) for kind in kinds]
    return sum(one for one, _ in counts), sum(one for _, one in counts)


def bare_parameters(model: Any) -> tuple[int, int]:
    """Counts the parameters that a module with submodules holds itself, and all of them."""
    seen: set[int] = set()
    bare = total = 0
    for module in model.modules():
        is_bare = any(True for _ in module.children())
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                total += parameter.numel()
                bare += parameter.numel() * is_bare
    return bare, total


def _trace(run: Callable[[], object], files: set[str]) -> set[tuple[str, int]]:
    seen: set[tuple[str, int]] = set()

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return seen


def _lines_of_class(kind: type, seen: set[tuple[str, int]]) -> tuple[int, int]:
    file = inspect.getfile(kind)
    lines, start = inspect.getsourcelines(kind)
    code = inspect.cleandoc("\n" + "".join(lines))
    cls = ast.parse(code).body[0]
    kept = _lines_of_code(code)
    ran = {line - start + 1 for name, line in seen if name == file}
    used = sum(_ran(one, kept, ran) for one in cls.body if isinstance(one, ast.FunctionDef))
    return _count(kept, cls), used + 1


def _ran(node: ast.AST, kept: set[int], ran: set[int]) -> int:
    """Counts the lines of statements that ran."""
    inner = [*_statements(node)]
    if not inner:
        return _count(kept, node) if _span(node) & ran else 0
    head = {line for line in _span(node) if line < min(one.lineno for one in inner)}
    below = sum(_ran(one, kept, ran) for one in inner)
    return below + len(head & kept) if below or head & ran else 0


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for name in ("body", "orelse", "finalbody"):
        yield from (one for one in getattr(node, name, ()) if isinstance(one, ast.stmt))
    for handler in getattr(node, "handlers", ()):
        yield from handler.body


def _span(node: ast.AST) -> set[int]:
    first = min((one.lineno for one in getattr(node, "decorator_list", ())), default=node.lineno)  # type: ignore[attr-defined]
    return set(range(first, node.end_lineno + 1))  # type: ignore[attr-defined]


def _count(kept: set[int], node: ast.AST) -> int:
    return len(kept & _span(node))


def _lines_of_code(code: str) -> set[int]:
    """Returns the lines that are neither blank nor comments nor docstrings."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type not in _UNCOUNTED:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(code)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            found -= _span(first)
    return found
