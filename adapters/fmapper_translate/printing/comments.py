"""Comments and docstrings."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator


def is_of_tools(comment: str) -> bool:
    """Returns whether a comment is of tools, as `# type: ignore`."""
    return comment.startswith(("# type:", "# noqa", "# fmt:", "# pylint:"))


def quote(document: str) -> str:
    """Returns a docstring as code."""
    lines = document.splitlines()
    return '"""' + "\n".join(lines) + ('\n"""' if len(lines) > 1 else '"""')


def comments_beside(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Returns the comments beside statements, by line."""
    code = "\n".join(lines)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT and not token.line.strip().startswith("#"):
            yield token.start[0], token.string
