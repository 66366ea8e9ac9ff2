"""Writes the page of messages that name a way out: `python docs/messages.py`.

It reads them from the `raise` statements of the code. What a message fills in is an ellipsis.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGE = DOCS / "messages.md"
HEAD = """# Errors by message

Search this page for the text of a message; `…` stands for what it fills in, such as the name of
your class. Each message is divided where its way out begins. [FAQ](faq.md) has the causes of each
class, and the [reference](reference/errors.md) the classes.
"""
VERBS = (
    "Pass|Use|Write|Convert|Set|Omit|Call|Declare|Decorate|Move|Give|"
    "Install|Load|Keep|Name|Take|Remove|Put|Choose|Rename|Leave|Make|"
    "Add|Shard|Pad|Gather|Increase|Create|Restore|Copy|Store|"
    "Dequantize|Dequantise|Start|Fill|Update|Read|Import|Assign"
)
WAY = re.compile(rf"(?<=[.:;] )(?:(?i:{VERBS})|To \w+ |pip install)\b")
GUIDES = {  # where the code is -> the guide to it
    "checkpoints": "howto/checkpoints.md",
    "files": "howto/checkpoints.md",
    "pretrained": "howto/checkpoints.md",
    "generation": "howto/decode-text.md",
    "goldens": "howto/goldens.md",
    "meshes": "howto/meshes.md",
    "moves": "howto/move-and-place.md",
    "arrays": "howto/move-and-place.md",
    "sync": "howto/sync.md",
    "twins": "howto/fill-from-checkpoint.md",
    "training": "howto/resume-training.md",
    "verification": "howto/debug-a-difference.md",
    "profiles": "howto/profile.md",
    "transforms": "howto/train-anywhere.md",
    "tree": "concepts/leaves-and-nodes.md",
    "nn": "reference/functional.md",
    "random": "reference/random.md",
    "cli": "reference/command-line.md",
    "varying": "howto/sizes-that-vary.md",
    "equinox": "howto/translate.md",
    "jax": "howto/torch-to-flax.md",
    "flax": "howto/torch-to-flax.md",
    "torch": "howto/torch-to-flax.md",
    "programs": "howto/torch-to-flax.md",
}


def text_of(node: ast.expr) -> str:
    """Returns the text of a message with an ellipsis for each value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"


def messages() -> Iterator[tuple[str, str, Path]]:
    """Yields the class, the text and the file of each message with a way out."""
    files = [*ROOT.glob("fmapper/**/*.py"), *ROOT.glob("adapters/**/*.py")]
    for path in sorted(files):
        if {"translation", "aten", "lax"} & {*path.parts}:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and node.exc.args
            ):
                name = ast.unparse(node.exc.func).rpartition(".")[2]
                text = re.sub(r"\s+", " ", text_of(node.exc.args[0]))
                text = re.sub("…(…)+", "…", text)
                if re.fullmatch(r"[A-Z]\w*Error", name) and WAY.search(text):
                    yield name, text, path


def guide(path: Path) -> str:
    """Returns the page that explains what a file does."""
    parts = [*path.relative_to(ROOT).parts[:-1], path.stem]
    return next(
        (GUIDES[part] for part in reversed(parts) if part in GUIDES), "faq.md"
    )


def row(text: str, path: Path) -> str:
    """Returns a row of a table: the message, its way out, and the guide."""
    match = WAY.search(text)
    assert match is not None
    cells = (text[: match.start()].rstrip(" :;"), text[match.start() :])
    message, way = (f"`{cell}`".replace("|", r"\|") for cell in cells)
    return f"| {message} | {way} | [guide]({guide(path)}) |"


def page() -> str:
    """Returns the text that the page should have."""
    classes: dict[str, list[str]] = defaultdict(list)
    for name, text, path in messages():
        line = row(text, path)
        if line not in classes[name]:
            classes[name].append(line)
    parts = [HEAD]
    for name, lines in sorted(classes.items()):
        parts.append(
            f"## {name}\n\n| message | way out | |\n|---|---|---|\n"
            + "\n".join(lines)
            + "\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
