"""`fmapper verify A B --inputs INPUTS`: are two models the same model?"""

from __future__ import annotations

import json as json_
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fmapper.cli.convert import example_args, example_kwargs
from fmapper.cli.output import PATH, check_folders, write_text
from fmapper.cli.target import load_model
from fmapper.errors import TargetError
from fmapper.progress import step

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.verification.report import Report

SAME, DIFFERENT, NOT_COMPARED = 0, 1, 2
SCHEMA = 1
_ARRAYS = (".npz", ".safetensors")

EXAMPLES = """
\b
Examples:
  fmapper verify net.py:model net_flax.py:model --inputs 'randn(2,3,32,32)'
  fmapper verify net.py:model net_jax.py:make --inputs batch.npz --rules net.toml --gradients
  fmapper verify old.py:Net new.py:Net --inputs 'randn(8,16)' --train --steps 5 --json report.json
  fmapper verify net.goldens.safetensors net_flax.py:model --rules net.toml --html report.html
"""


@click.command(epilog=EXAMPLES)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--inputs",
    "--example",
    "inputs",
    metavar="INPUTS",
    multiple=True,
    help="Inputs of both: 'randn(1,3,32,32)', 'randint(0,99,(1,8)), 2.0', FILE:INPUTS "
    "for an array, a tuple, or a function without arguments, or a file .npz or .safetensors, whose "
    "arrays arr_0, arr_1, ... or 0, 1, ... are by position and all others by keyword; may be "
    "repeated. Goldens hold their own.",
)
@click.option(
    "--example-kwargs",
    "--kwargs",
    "kwargs",
    metavar="DICT",
    help="Inputs by keyword: \"{'input_ids': randint(0,99,(1,8))}\", or FILE:KWARGS.",
)
@click.option("--gradients", is_flag=True, help="Compare the gradient of every parameter.")
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Compare the parameters after each of N steps of the optimizer.",
)
@click.option(
    "--optimizer", default="sgd", show_default=True, help="The optimizer of the steps, by name."
)
@click.option(
    "--rules",
    metavar="RULES",
    help="How names and layouts of A's arrays become those of B: a file of rules, as TOML, or "
    "'transfer' to find them. Not needed where they are the same, or A or B was converted.",
)
@click.option(
    "--train/--eval",
    default=None,
    help="Call both in this mode (default: the current mode of each).",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="The difference allowed, relative to the largest element (default: as measured).",
)
@click.option(
    "--to",
    metavar="FRAMEWORK",
    help="The framework for a checkpoint, or for a program that was saved for none.",
)
@click.option(
    "--json",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Write the result to this file as JSON; with - print it instead of the report.",
)
@click.option("--html", type=PATH, help="Write a page with the errors of all layers to this file.")
def verify(
    a: str,
    b: str,
    inputs: tuple[str, ...],
    kwargs: str | None,
    gradients: bool,
    steps: int,
    optimizer: str,
    rules: str | None,
    train: bool | None,
    tolerance: float | None,
    to: str | None,
    json: Path | None,
    html: Path | None,
) -> int:
    """Compare two models, in any two frameworks, and name the first place where they differ.

    A and B are each FILE:MODEL or MODULE:MODEL (an instance, a class, a function that makes one, or
    a pair of a function and its parameters), a folder with a checkpoint as of the Hub, or a file of
    a converted model. A may also be goldens, which `fmapper.record_goldens` writes: then nothing of
    A needs to be installed.

    How far apart two sound models may be is measured: A is run with weights moved by a rounding,
    and in double precision.

    Exit status: 0 the same, 1 different, 2 could not be compared, with the reason on stderr.

    The JSON has schema (1), status, a, b and error (why they could not be compared, or null); and
    where they were: first (the first difference, or null), loss (a difference, or null), outputs,
    weights, gradients, buffers, draws and layers (lists of differences), steps (a list of those for
    each step), divergence (of logits, in nats, or null), exact (the errors of A and B against A in
    float64, or null), modes (a text) and undecided (texts). A difference has path, ok, error,
    scale, allowed (null if infinite), note and size; the first one also stage, name, step and mode,
    and the operations a and b with module, op, source and loop.
    """
    is_printed = json is not None and str(json) == "-"
    about: dict[str, Any] = {"schema": SCHEMA, "a": a, "b": b}
    try:
        check_folders(None if is_printed else json, html)
        args, given = _inputs(inputs)
        with step(f"loading {a}"):
            first = _load(a, to)
        with step(f"loading {b}"):
            second = _load(b, to)
        report = _compare(
            first,
            second,
            *args,
            example_kwargs={**given, **example_kwargs(kwargs)},
            gradients=gradients,
            steps=steps,
            optimizer=optimizer,
            rules=_rules(rules),
            train=train,
            rtol=tolerance,
            layers=html is not None,
        )
    except Exception as error:
        if json is not None:
            _write({**about, "status": NOT_COMPARED, "error": str(error)}, json)
        raise
    problem = _problem(report, gradients, steps)
    status = NOT_COMPARED if problem else SAME if report else DIFFERENT
    if not is_printed:
        click.echo(str(report))
    if problem:
        click.echo(f"fmapper verify: {problem}", err=True)
    if json is not None:
        _write({**about, "status": status, "error": problem or None, **as_data(report)}, json)
    if html is not None:
        write_text(html, as_page(report, f"{a} and {b}"))
    return status


def _compare(*models: Any, **options: Any) -> Report:
    from fmapper.verification.comparison import verify as compare

    return compare(*models, **options)


def _problem(report: Report, gradients: bool, steps: int) -> str:
    """Describes requested comparisons that were not possible; empty if there are none."""
    reasons = "; ".join(report.undecided)
    if not report.size:
        return "nothing was compared: the outputs hold no elements"
    if report and gradients and not report.gradients:
        return f"the gradients could not be compared. {reasons}"
    if report and len(report.steps) < steps:
        return f"the steps could not be compared. {reasons}"
    return ""


# --- the models and inputs ------------------------------------------------------------------------


def _load(text: str, to: str | None) -> Any:
    """Returns a model, or the path of goldens."""
    from fmapper.verification.goldens.file import holds_goldens

    path = Path(text)
    if path.is_dir():
        from fmapper.checkpoints.pretrained import from_pretrained

        return from_pretrained(path, to)
    if path.suffix == ".safetensors":
        from fmapper.checkpoints.load import load

        if holds_goldens(path):
            return path
        loaded = load(path) if to is None else load(path, to=to)
        if isinstance(loaded, Mapping):
            raise TargetError(
                f"{text} holds arrays, but neither a model nor goldens. Name a model that has "
                "loaded them, as FILE:MODEL."
            )
        return loaded
    return load_model(text)


def _inputs(texts: Iterable[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the inputs by position and by keyword."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for seed, text in enumerate(texts):
        if Path(text).suffix not in _ARRAYS:
            args += example_args([text], seed)
            continue
        for name, array in _arrays(text).items():
            if name.removeprefix("arr_") == str(len(args)):
                args.append(array)
            elif name.isidentifier() and not name.startswith("arr_"):
                kwargs[name] = array
            else:
                raise TargetError(
                    f"{text}: the array {name!r} is neither the input {len(args)} by position, nor "
                    "is its name one of a keyword."
                )
    return tuple(args), kwargs


def _arrays(text: str) -> dict[str, Any]:
    """Reads the arrays of a file; numeric names are sorted."""
    from fmapper.checkpoints.load import load
    from fmapper.moves.mover import to_numpy

    loaded = load(text)
    if not isinstance(loaded, Mapping):
        raise TargetError(f"{text} holds a model. Pass a file of arrays.")
    numbered = sorted(loaded, key=lambda name: (len(name), name))
    return {name: to_numpy(loaded[name].read()) for name in numbered}


def _rules(text: str | None) -> Rules | str | None:
    from fmapper.checkpoints.rules.rules import Rules

    if text is None or text == "transfer":
        return text
    return Rules.from_toml(Path(text))


# --- the result -----------------------------------------------------------------------------------


def as_data(report: Report) -> dict[str, Any]:
    """Returns a report as data for JSON; see the help of the command."""
    data = _plain(report.to_dict())
    data.pop("ok")
    return data  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        plain = {key: _plain(inner) for key, inner in value.items()}
        if {"path", "error", "allowed", "note"} <= plain.keys():
            is_within = value["error"] <= value["allowed"]
            plain["ok"] = not value["note"] and is_within
        return plain
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(data: Mapping[str, Any], path: Path) -> None:
    text = json_.dumps(data, indent=1, allow_nan=False)
    if str(path) == "-":
        click.echo(text)
    else:
        write_text(path, text + "\n")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 2rem }}
svg {{ max-width: 100%; height: auto }}
</style>
</head>
<body>
<h1>{title}: {verdict}</h1>
{picture}
{tables}
</body>
</html>
"""


def as_page(report: Report, title: str) -> str:
    """Returns a self-contained HTML page."""
    from html import escape

    return _PAGE.format(
        title=escape(title),
        verdict="the same" if report else "different",
        picture=_picture(report),
        tables=report._repr_html_(),
    )


def _picture(report: Report) -> str:
    """Returns the errors of all layers as SVG; empty without layers or matplotlib."""
    import io
    from importlib.util import find_spec

    if not report.layers or find_spec("matplotlib") is None:
        return ""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.25 * len(report.layers)), layout="constrained")
    report.plot(figure.subplots())
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]
