"""Writes the page of the examples from their docstrings: `python docs/examples.py`."""

import ast
from pathlib import Path

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
PAGE = DOCS / "start" / "examples.md"
SOURCE = """??? example "`examples/{0}`"

    ``` {{ .python data-search-exclude }}
    --8<-- "examples/{0}"
    ```
"""
HEAD = """# Examples

Whole programs on data that is generated or ships with scikit-learn, so nothing is downloaded.
Each runs on its own in a clone, as `python examples/quickstart.py`, and takes `--help`.
"""


def page() -> str:
    """Returns the text that the page should have."""
    parts = [HEAD]
    for path in sorted(
        EXAMPLES.glob("*.py"),
        key=lambda path: (path.stem != "quickstart", path),
    ):
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        title = path.stem.replace("_", " ").capitalize()
        for word in ("Cnn", "cnn", "Rnn", "nnx"):
            title = title.replace(word, word.upper())
        parts.append(
            f"## {title}\n\n{text.strip()}\n\n{SOURCE.format(path.name)}"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
