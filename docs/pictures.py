"""Draws the pictures of the home page and of README, for light and for dark pages.

    python docs/pictures.py --record    run the commands that the pictures show, then draw
    python docs/pictures.py             draw what was recorded

What the commands printed and wrote lies in docs/assets/demo; nothing in a picture is written by
hand but the map of frameworks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import (
    Comment,
    Keyword,
    Name,
    Number,
    String,
    Token,
    _TokenType,
)

ASSETS = Path(__file__).parent / "assets"
DEMO = ASSETS / "demo"
TRANSLATE = "fmapper translate net.py:Net --to flax --example 'randn(2,12,8)' --out net_flax.py"
COMMANDS = (
    TRANSLATE,
    "fmapper convert net.py:Net --to jax --example 'randn(2,12,8)'"
    " --seconds 0 --out net.safetensors",
    "fmapper checkpoint inspect net.safetensors",
)

Spans = list[tuple[str, str]]  # pieces of a line: kind, text

COLOURS = {
    "light": {
        "page": "#ffffff", "bar": "#eef0f6", "edge": "#d5d9e4", "text": "#24292f",
        "quiet": "#5f6672", "keyword": "#b3261e", "name": "#6639a6",
        "string": "#0a5c36", "number": "#0550ae",
        "comment": "#5f6672", "good": "#1a7f37", "accent": "#3949ab",
    },
    "dark": {
        "page": "#1b1e26", "bar": "#262a35", "edge": "#3a3f4d", "text": "#e2e4e9",
        "quiet": "#a5abb8", "keyword": "#ff8a80", "name": "#c7a6ff",
        "string": "#8ddb8c", "number": "#82b4ff",
        "comment": "#a5abb8", "good": "#5bd67a", "accent": "#9fa8ff",
    },
}  # fmt: skip
SIZE, LINE, PAD = 13, 18, 16  # of type, between lines, around text: pixels
COLUMN = SIZE * 0.602  # the width of a character in most fonts of one width
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SANS = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
)


# --- what the commands give ---------------------------------------------------------------------


def record() -> None:
    """Runs the commands in a folder of their own, and keeps what they print and write."""
    shown = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "net.py").write_text(
            (DEMO / "net.py").read_text("utf-8"), "utf-8"
        )
        for command in COMMANDS:
            program = [sys.executable, "-m", "fmapper"]
            words = re.findall(r"'[^']*'|\S+", command)[1:]
            done = subprocess.run(
                program + [word.strip("'") for word in words],
                cwd=folder,
                env={**os.environ, "COLUMNS": "78", "NO_COLOR": "1"},
                capture_output=True,
                text=True,
                check=True,
            )
            text = (done.stdout + done.stderr).replace(folder + "/", "")
            shown.append({"command": command, "output": text.rstrip()})
        written = Path(folder, "net_flax.py").read_text("utf-8")
    (DEMO / "net_flax.py").write_text(written, "utf-8")
    (DEMO / "translate.txt").write_text(shown[0]["output"] + "\n", "utf-8")
    (DEMO / "session.json").write_text(
        json.dumps(shown, indent=1) + "\n", "utf-8"
    )


def session() -> dict[str, str]:
    """Returns what each command printed."""
    recorded = json.loads((DEMO / "session.json").read_text("utf-8"))
    return {item["command"]: item["output"] for item in recorded}


def classes_of(path: Path) -> str:
    """Returns the classes of a file, without imports and helpers."""
    text = path.read_text("utf-8")
    return (
        text[text.index("class Block") :].split("\n\n\nTIED = ")[0].rstrip()
    )


# --- drawing ------------------------------------------------------------------------------------


def kind_of(token: _TokenType) -> str:
    """Returns the colour of a token of Python."""
    for kinds, colour in (
        ((Comment,), "comment"),
        ((Keyword,), "keyword"),
        ((Name.Class, Name.Function, Name.Function.Magic), "name"),
        ((String,), "string"),
        ((Number,), "number"),
    ):
        if any(token in kind for kind in kinds):
            return colour
    return "text"


def python(code: str) -> list[Spans]:
    """Splits code into lines of coloured pieces."""
    lines: list[Spans] = [[]]
    for token, text in PythonLexer(stripnl=False).get_tokens(code):
        for number, piece in enumerate(text.split("\n")):
            if number:
                lines.append([])
            if piece:
                lines[-1].append(
                    (
                        kind_of(token) if token is not Token.Text else "text",
                        piece,
                    )
                )
    while lines and not lines[-1]:
        lines.pop()
    return lines


def wrapped(text: str, width: int, kind: str) -> list[Spans]:
    """Breaks text at blanks into lines of at most `width` characters."""
    return [
        [(kind, line)]
        for given in text.splitlines()
        for line in textwrap.wrap(given, width, subsequent_indent="  ")
        or [""]
    ]


def text_at(
    x: float, y: float, spans: Spans, colours: dict[str, str], extra: str = ""
) -> str:
    """Draws a line of text."""
    pieces = "".join(
        f'<tspan fill="{colours[kind]}"{weight(kind)}>{escape(text)}</tspan>'
        for kind, text in spans
    )
    return f'<text x="{x:.0f}" y="{y:.0f}" xml:space="preserve"{extra}>{pieces}</text>'


def weight(kind: str) -> str:
    return ' font-weight="600"' if kind in ("good", "accent") else ""


def panel(
    x: float,
    y: float,
    width: float,
    title: str,
    lines: list[Spans],
    colours: dict[str, str],
) -> tuple[str, float]:
    """Draws a window with a title and lines of text; returns it with its height."""
    height = 30 + PAD + LINE * len(lines) + PAD / 2
    parts = [
        f'<rect x="{x}" y="{y}" width="{width:.0f}" height="{height:.0f}" rx="8" '
        f'fill="{colours["page"]}" stroke="{colours["edge"]}"/>',
        f'<path d="M{x} {y + 30}h{width:.0f}" stroke="{colours["edge"]}"/>',
        f'<text x="{x + PAD}" y="{y + 20}" font-weight="600" fill="{colours["quiet"]}">'
        f"{escape(title)}</text>",
    ]
    for number, spans in enumerate(lines):
        if spans:
            parts.append(
                text_at(
                    x + PAD,
                    y + 30 + PAD + LINE * (number + 0.5),
                    spans,
                    colours,
                )
            )
    return "\n".join(parts), height


def svg(
    width: float, height: float, body: str, title: str, style: str = ""
) -> str:
    """Wraps drawings into a file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="{FONT}" font-size="{SIZE}" '
        f'role="img">\n<title>{escape(title)}</title>\n{style}{body}\n</svg>\n'
    )


def translated(colours: dict[str, str], *, stacked: bool) -> str:
    """Draws source and translated file beside each other, above the command and its proof."""
    source, target = (
        python(classes_of(DEMO / name)) for name in ("net.py", "net_flax.py")
    )
    columns = [
        max(sum(len(text) for _, text in line) for line in side)
        for side in (source, target)
    ]
    widths = [column * COLUMN + 2 * PAD for column in columns]
    if not stacked:
        rows = max(len(source), len(target))
        source, target = (
            [*side, *[[]] * (rows - len(side))] for side in (source, target)
        )
    else:
        widths = [max(widths)] * 2
    left, height = panel(
        0.5, 0.5, widths[0], "net.py: PyTorch, yours", source, colours
    )
    x, y = (0.5, height + 12.5) if stacked else (widths[0] + 16.5, 0.5)
    right, below = panel(
        x, y, widths[1], "net_flax.py: Flax NNX, written", target, colours
    )
    width = widths[0] + (0 if stacked else widths[1] + 16)
    room = int((width - 2 * PAD) / COLUMN)
    proof, *rest = session()[TRANSLATE].splitlines()
    lines = wrapped("$ " + TRANSLATE, room, "quiet") + wrapped(
        proof, room, "good"
    )
    lines += [
        line
        for text in rest
        if "parameters" in text
        for line in wrapped(text, room, "text")
    ]
    top = y + below + 12
    bottom, more = panel(0.5, top, width, "terminal", lines, colours)
    title = "A PyTorch module and the Flax module that fmapper translate wrote, with its proof"
    return svg(
        width + 1, top + more + 1, "\n".join((left, right, bottom)), title
    )


def terminal(colours: dict[str, str]) -> str:
    """Draws a session in a terminal that appears line by line, once."""
    width, pause, steps = 78, 0.0, []
    for command, output in session().items():
        for spans in wrapped("$ " + command, width, "accent"):
            steps.append((pause, spans))
            pause += 0.9
        for spans in wrapped(output, width, "text"):
            steps.append((pause, spans))
            pause += 0.12
        steps.append((pause, []))
        pause += 0.9
    steps.pop()
    outer = width * COLUMN + 2 * PAD
    frame, height = panel(
        0.5, 0.5, outer, "terminal", [[]] * len(steps), colours
    )
    lines = [
        text_at(
            0.5 + PAD,
            30.5 + PAD + LINE * (number + 0.5),
            spans,
            colours,
            f' class="line" style="animation-delay:{start:.2f}s"',
        )
        for number, (start, spans) in enumerate(steps)
        if spans
    ]
    style = (
        "<style>@keyframes show{to{opacity:1}}"
        "@media (prefers-reduced-motion:no-preference){"
        ".line{opacity:0;animation:show .1s forwards}}</style>\n"
    )
    title = "A session in a terminal: translate, convert, inspect"
    return svg(
        outer + 1, height + 1, "\n".join((frame, *lines)), title, style
    )


BOXES = {  # name -> x, y, width, height, lines
    "torch": (10, 150, 130, 90, ("PyTorch", "nn.Module")),
    "jax": (380, 20, 150, 62, ("JAX", "a pytree")),
    "nnx": (380, 102, 150, 62, ("Flax NNX", "nnx.Module")),
    "linen": (380, 184, 150, 62, ("Linen", "(module, variables)")),
    "equinox": (380, 266, 150, 62, ("Equinox", "eqx.Module")),
    "files": (
        10,
        400,
        200,
        72,
        ("files", "safetensors, Orbax,", "DCP, GGUF, .pt, npz"),
    ),
    "own": (230, 400, 150, 72, ("your classes", "@functor")),
    "gpu": (400, 400, 130, 72, ("GPU, mesh", "cuda:0, tpu:0")),
}
ARROWS = (  # from x, y, to x, y, label, its x, y, anchor
    (140, 170, 380, 51, 'convert(m, "jax")', 250, 92, "middle"),
    (140, 184, 380, 133, 'convert(m, "flax")', 262, 146, "middle"),
    (140, 206, 380, 215, 'convert(m, "linen")', 262, 202, "middle"),
    (140, 220, 380, 297, 'convert(m, "equinox")', 292, 254, "middle"),
    (380, 318, 100, 240, 'convert(m, "torch")', 196, 292, "middle"),
    (60, 240, 60, 400, "save(m, path)", 66, 372, "start"),
    (36, 400, 36, 240, "from_pretrained(path)", 42, 352, "start"),
    (300, 400, 300, 340, "to_torch, to_jax", 290, 366, "end"),
    (465, 340, 465, 400, "to_gpu, shard", 455, 374, "end"),
)


def overview(colours: dict[str, str]) -> str:
    """Draws what can be taken where, with the call on each arrow."""
    parts = [
        f'<rect x="370" y="10" width="170" height="330" rx="10" fill="none" '
        f'stroke="{colours["edge"]}" stroke-dasharray="4 4"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colours["accent"]}"/>'
        "</marker></defs>",
    ]
    for x, y, to_x, to_y, *_ in ARROWS:
        parts.append(
            f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{colours["accent"]}" stroke-width="1.5" '
            'marker-end="url(#tip)" opacity="0.75"/>'
        )
    for *_, label, x, y, anchor in ARROWS:
        parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12" '
            f'fill="{colours["text"]}" stroke="{colours["page"]}" stroke-width="4" '
            f'paint-order="stroke">{escape(label)}</text>'
        )
    for x, y, width, height, (name, *lines) in BOXES.values():
        middle = x + width / 2
        top = y + height / 2 - 9 * len(lines) + 5
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" '
            f'fill="{colours["bar"]}" stroke="{colours["edge"]}"/>'
            f'<text x="{middle}" y="{top}" text-anchor="middle" font-family="{SANS}" '
            f'font-weight="600" font-size="15" fill="{colours["text"]}">{escape(name)}</text>'
        )
        for number, line in enumerate(lines, 1):
            parts.append(
                f'<text x="{middle}" y="{top + 18 * number}" text-anchor="middle" font-size="11.5" '
                f'fill="{colours["quiet"]}">{escape(line)}</text>'
            )
    title = "What fmapper takes where: PyTorch, JAX, Flax, Linen, Equinox, files, devices"
    return svg(542, 484, "\n".join(parts), title)


def pictures() -> dict[str, str]:
    """Returns the text of each picture by the name of its file."""
    drawn = {}
    for page, colours in COLOURS.items():
        drawn[f"translated-wide-{page}.svg"] = translated(
            colours, stacked=False
        )
        drawn[f"translated-narrow-{page}.svg"] = translated(
            colours, stacked=True
        )
        drawn[f"terminal-{page}.svg"] = terminal(colours)
        drawn[f"overview-{page}.svg"] = overview(colours)
    return drawn


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        record()
    for name, text in pictures().items():
        (ASSETS / name).write_text(text, "utf-8")
