"""Checks a site that Zensical has built: links, anchors, headings, pictures, assets, search.

python docs/check_site.py SITE [--browser [CHROMIUM]] [--pictures FOLDER]

With `--browser` (needs `pip install playwright` and a Chromium) it also opens every page, wide and
narrow, light and dark, and types the questions into the search box, whose first answer must be the
page named here.
"""

import argparse
import functools
import http.server
import itertools
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# What a reader types, and the page that answers it.
QUESTIONS = {
    "train flax optimizer": "howto/torch-to-flax/",
    "NotAFunctorError": "messages/",
    "dynamic_shapes": "howto/sizes-that-vary/",
    "bfloat16": "howto/precision/",
    "safetensors": "howto/save-and-load/",
    "threads": "howto/threads/",
    "torchax": "migrate/torchax/",
    "onnx": "migrate/onnx/",
    "Functors.jl": "migrate/functors-jl/",
    "custom operation": "howto/add-an-operation/",
    "batches ahead": "howto/gpu/",
    "gpu": "howto/gpu/",
    "dropout": "howto/batchnorm-and-dropout/",
    "batch norm": "howto/batchnorm-and-dropout/",
    "linen": "howto/linen/",
    "optional arguments": "howto/optional-arguments/",
    "from_pretrained": "howto/checkpoints/",
    "lora": "howto/lora/",
    "generate text": "howto/decode-text/",
    "tied": "concepts/ties/",
    "train": "howto/torch-to-flax/",
    "jit": "reference/transforms/",
    "device": "reference/devices/",
    "convert": "reference/convert/",
    "mesh": "reference/meshes/",
}


class Page(HTMLParser):
    """What a page holds that can be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.headings = 0
        self.faults: list[str] = []

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        """Notes ids, links, assets, headings and pictures without words."""
        given = dict(attrs)
        for name in ("id", "name"):
            if given.get(name):
                self.ids.add(str(given[name]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if tag in ("img", "script", "iframe", "source") and given.get("src"):
            self.assets.append(str(given["src"]))
        if tag == "link" and given.get("rel") not in (
            "canonical",
            "next",
            "prev",
        ):
            self.assets.append(str(given["href"]))
        if tag == "h1":
            self.headings += 1
        if tag == "img" and not given.get("alt"):
            self.faults.append(f"picture without alt: {given.get('src')}")
        if tag == "html" and not given.get("lang"):
            self.faults.append("no lang")


def read(site: Path) -> dict[Path, Page]:
    """All pages."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Page()
        pages[path].feed(path.read_text("utf-8"))
    return pages


def target(site: Path, page: Path, link: str) -> Path:
    """The file that a link leads to."""
    path = unquote(urlsplit(link).path)
    found = (
        (
            site / path.lstrip("/")
            if path.startswith("/")
            else page.parent / path
        )
        if path
        else page
    )
    return (found / "index.html" if found.is_dir() else found).resolve()


def faults(site: Path) -> Iterator[str]:
    """What is wrong with the files."""
    pages = read(site)
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name}: {fault}" for fault in page.faults)
        if page.headings != 1 and name.name != "404.html":
            yield f"{name}: {page.headings} headings of level 1"
        for asset in page.assets:
            if re.match(r"(https?:)?//", asset):
                yield f"{name}: asset from elsewhere: {asset}"
            elif (
                not asset.startswith("data:")
                and not target(site, path, asset).exists()
            ):
                yield f"{name}: no asset {asset}"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name.name == "404.html":
                continue
            there = target(site, path, link)
            if there not in pages:
                if not there.exists():
                    yield f"{name}: dead link {link}"
            elif (
                parts.fragment
                and unquote(parts.fragment) not in pages[there].ids
            ):
                yield f"{name}: dead anchor {link}"
    for sheet in (*site.rglob("*.css"), *site.rglob("*.svg")):
        for url in re.findall(
            r"url\([\"']?((?:https?:)?//[^)\"']+)", sheet.read_text("utf-8")
        ):
            yield f"{sheet.relative_to(site)}: asset from elsewhere: {url}"
    index = json.loads((site / "search.json").read_text("utf-8"))["items"]
    for question, page in QUESTIONS.items():
        words = question.lower().split()
        texts = [
            re.sub(r"<[^>]+>", "", f"{doc['title']} {doc['text']}").lower()
            for doc in index
            if doc["location"].partition("#")[0] == page
        ]
        if not all(word in " ".join(texts) for word in words):
            yield f"search: {page} says nothing of {question!r}"


def serve(site: Path) -> tuple[http.server.ThreadingHTTPServer, str]:
    """A server of the site on a free port."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}/"


def faults_in_browser(
    site: Path, chromium: str, pictures: Path | None
) -> Iterator[str]:
    """What is wrong when a browser shows it."""
    from playwright.sync_api import sync_playwright

    server, address = serve(site)
    names = [
        path.parent.relative_to(site).as_posix()
        for path in sorted(site.rglob("index.html"))
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )
        for width, scheme in itertools.product(
            (1440, 390), ("light", "dark")
        ):
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            )
            tab = context.new_page()
            said: list[str] = []
            tab.on(
                "console",
                lambda m, said=said: (
                    said.append(m.text) if m.type == "error" else None
                ),
            )
            tab.on(
                "pageerror", lambda error, said=said: said.append(str(error))
            )
            tab.on(
                "request",
                lambda r, said=said: (
                    None
                    if r.url.startswith((address, "data:", "blob:"))
                    else said.append(r.url)
                ),
            )
            for name in names:
                said.clear()
                answer = tab.goto(
                    address + ("" if name == "." else name + "/")
                )
                tab.wait_for_load_state("networkidle")
                if answer is None or not answer.ok:
                    yield f"{name}: did not load"
                yield from (
                    f"{name}, {width} wide, {scheme}: {text}" for text in said
                )
                over = tab.evaluate(
                    "document.documentElement.scrollWidth - window.innerWidth"
                )
                if over > 1:
                    yield f"{name}: {over} pixels wider than a screen of {width}"
                if pictures is not None:
                    file = f"{name.replace('/', '-').strip('.') or 'index'}-{width}-{scheme}.png"
                    tab.screenshot(path=str(pictures / file))
            context.close()
        tab = browser.new_page(viewport={"width": 1440, "height": 900})
        for question, page in QUESTIONS.items():
            tab.goto(address)
            tab.click(".md-search__button")
            tab.locator("dialog input").first.fill(question)
            try:
                tab.wait_for_selector(
                    "dialog a[role=option]", timeout=20_000, state="attached"
                )
            except Exception as error:
                yield f"search for {question!r} finds nothing: {error}"
                continue
            tab.wait_for_timeout(300)
            links = [
                a.get_attribute("href") or ""
                for a in tab.locator("dialog a[role=option]").all()
            ]
            places = list(
                dict.fromkeys(
                    urlsplit(link).path.lstrip("/") for link in links
                )
            )
            if page != places[0]:
                yield f"search for {question!r}: {page} is not the first answer, {places[:5]}"
        browser.close()
    server.shutdown()


def main() -> int:
    """Prints what is wrong; the exit status says whether something is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", nargs="?", const="", metavar="CHROMIUM")
    parser.add_argument("--pictures", type=Path)
    options = parser.parse_args()
    site = options.site.resolve()
    found = list(faults(site))
    if options.browser is not None:
        names = ("chromium-headless-shell", "chromium", "google-chrome")
        chromium = options.browser or next(
            filter(None, map(shutil.which, names)), None
        )
        if chromium is None:
            found.append("no Chromium: give its path after --browser")
        else:
            if options.pictures is not None:
                options.pictures.mkdir(parents=True, exist_ok=True)
            found += faults_in_browser(site, chromium, options.pictures)
    for fault in found:
        print(fault, file=sys.stderr)
    pages = len(list(site.rglob("index.html")))
    print(f"{pages} pages, {len(found)} faults")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
