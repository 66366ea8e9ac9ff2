"""Executes the notebooks in place, and writes the page and the pictures of each.

python docs/notebooks/run.py [NAME ...]
"""

import os
import re
import shutil
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

HERE = Path(__file__).parent
os.environ["FMAPPER_PROGRESS"] = (
    "0"  # how long a step takes differs from run to run
)


def run(path: Path) -> None:
    """One notebook."""
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute(
        cwd=str(HERE)
    )
    for cell in (
        notebook.cells
    ):  # times and kernels differ from run to run; what is shown does not
        cell.metadata.clear()
        if (
            cell.cell_type == "code"
        ):  # warnings of other packages name paths of this machine
            cell.outputs = [
                out for out in cell.outputs if out.get("name") != "stderr"
            ]
            for out in cell.outputs:
                if "text" in out:
                    out["text"] = re.sub(
                        r"/\S*/site-packages/", "", out["text"]
                    )
    notebook.metadata.pop("widgets", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    nbformat.write(notebook, path)
    resources = {
        "output_files_dir": f"{path.stem}_files",
        "unique_key": path.stem,
    }
    text, resources = MarkdownExporter().from_notebook_node(
        notebook, resources
    )
    folder = path.with_name(f"{path.stem}_files")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in resources["outputs"].items():
        (HERE / name).write_bytes(data)
    texts = iter(notebook.metadata.get("pictures", []))
    pieces = text.split("![png](")
    text = pieces[0] + "".join(
        f"![{next(texts)}]({piece}" for piece in pieces[1:]
    )
    path.with_suffix(".md").write_text(text.strip() + "\n")
    print(f"{path.name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    chosen = sys.argv[1:] or sorted(
        path.stem for path in HERE.glob("*.ipynb")
    )
    for name in chosen:
        run(HERE / f"{name}.ipynb")
