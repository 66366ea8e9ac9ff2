"""Comments and docstrings."""

from __future__ import annotations

import inspect
import io
import tokenize
from collections.abc import Iterator


def is_of_tools(comment: str) -> bool:
    """Returns whether a comment is of tools, as `# type: ignore`."""
    return comment.startswith(("# type:", "# noqa", "# fmt:", "# pylint:"))


def quote(words: str) -> str:
    """Returns the text of a docstring as code."""
    document = inspect.cleandoc(words)
    is_long = "\n" in document
    begin = 'r"""' if "\\" in document else '"""'
    begin += "\n" * (is_long and words.startswith("\n"))
    return begin + document + ('\n"""' if is_long else '"""')


def comments_beside(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Returns the comments beside statements, by line."""
    code = "\n".join(lines)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT and not token.line.strip().startswith("#"):
            yield token.start[0], token.string
