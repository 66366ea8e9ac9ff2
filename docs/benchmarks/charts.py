"""Draws each chart of figures.json for light and for dark pages.

python docs/benchmarks/charts.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PAGES = {"light": "#222222", "dark": "#e6e6e6"}  # the colour of text
COLOURS = ("#3f51b5", "#f28e2b", "#4fa3a5", "#b07aa1")
DARK_COLOURS = ("#8c9eff", "#ffb300", "#80cbc4", "#ce93d8")


def draw(name: str, chart: dict[str, Any], page: str) -> None:
    """One chart for one kind of page."""
    colours = COLOURS if page == "light" else DARK_COLOURS
    series = chart.get("series", [""])
    rows = chart["rows"]
    settings = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"),
        PAGES[page],
    )
    settings |= {
        "svg.hashsalt": name,
        "svg.fonttype": "path",
        "font.size": 11,
    }
    with mpl.rc_context(settings):
        height = 1.0 + len(rows) * (0.2 + 0.16 * len(series))
        figure, axis = plt.subplots(figsize=(8, height), layout="constrained")
        for row, values in enumerate(rows.values()):
            given = values
            if chart["unit"] == "%":
                right, tried = values
                given = [100 * right / tried]
            for at, value in enumerate(given):
                place = row + 0.8 * ((at + 0.5) / len(series) - 0.5)
                label = (
                    chart.get("missing", "")
                    if value is None
                    else f"{value:.4g}"
                )
                if chart["unit"] == "%":
                    label = f"{value:.1f} %: {values[0]} of {values[1]}"
                start = axis.get_xlim()[0] if value is None else value
                if value is not None:
                    axis.barh(
                        place, value, 0.8 / len(series), color=colours[at]
                    )
                axis.annotate(
                    label,
                    (0 if value is None else start, place),
                    xycoords=("axes fraction", "data")
                    if value is None
                    else "data",
                    xytext=(4, 0) if chart["unit"] != "%" else (-6, 0),
                    textcoords="offset points",
                    ha="left" if chart["unit"] != "%" else "right",
                    va="center",
                    fontsize=8 if len(series) > 1 else 10,
                    color=PAGES[page]
                    if chart["unit"] != "%"
                    else ("#ffffff" if page == "light" else "#111111"),
                )
        axis.set_yticks(range(len(rows)), rows)
        axis.invert_yaxis()
        axis.set_xlabel(chart["unit"])
        if chart.get("log"):
            axis.set_xscale("log")
        axis.margins(x=0.12 if chart["unit"] != "%" else 0)
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
        axis.set_title(chart["title"], loc="left", fontsize=12)
        if len(series) > 1:
            handles = [
                plt.Rectangle((0, 0), 1, 1, color=colour)
                for colour in colours[: len(series)]
            ]
            figure.legend(
                handles,
                series,
                loc="outside lower center",
                ncols=len(series),
                frameon=False,
            )
        figure.savefig(
            HERE / f"{name}-{page}.svg",
            transparent=True,
            metadata={"Date": None},
        )
        plt.close(figure)


if __name__ == "__main__":
    for name, chart in json.loads(
        (HERE / "figures.json").read_text()
    ).items():
        for page in PAGES:
            draw(name, chart, page)
