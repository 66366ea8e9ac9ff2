"""Untrusted JSON: the memory that it would take is estimated before it is parsed."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fmapper.files.bounds import WAY_OUT
from fmapper.files.untrusted import Misfit, no_constant, object_of, open_regular
from fmapper.switches import settings

T = TypeVar("T")
MOST_JSON = 150_000_000  # bytes of memory for the parsed text, by the weights below
MOST_PROGRAM = 2_000_000_000  # the same for a program, where each call takes about five thousand
_MOST_FILE = 40_000_000  # bytes; an index of 210,000 arrays has some 25 million
_DEEPEST = 256  # nested lists and objects
_PIECE = 1 << 20  # characters that are counted at a time
_WEIGHTS = {b":": 150, b"{": 200, b"[": 72, b",": 34}  # bytes of the Python object of each
_OF_A_TEXT = 56
_BRACKETS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * 26
_LENGTHS_OF_AN_ENTRY = (1 << 11, 1 << 16)  # characters: the usual and the maximal length
_DECODER = json.JSONDecoder(object_pairs_hook=object_of, parse_constant=no_constant)
_NEXT = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")


def read_json(text: str, most: int = MOST_JSON) -> Any:
    """Parses JSON without duplicate keys, of bounded depth and memory.

    Args:
        text: The text.
        most: The bytes of memory that the result may take.

    Raises:
        Misfit: The text is not JSON, or exceeds a bound.
    """
    _check(text, most)
    try:
        return json.loads(text, object_pairs_hook=object_of, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise Misfit(f"is not JSON: {error}") from None


def _check(text: str, most: int) -> None:
    """Checks depth and memory, piece by piece."""
    width = 1 if text.isascii() and "\\u" not in text else 4  # bytes of a character
    takes = len(text) * width
    depth, is_text, at = 0, 0, 0
    while at < len(text):
        piece = text[at : at + _PIECE]
        if (len(piece) - len(piece.rstrip("\\"))) % 2:  # do not split an escape
            piece = text[at : at + _PIECE + 1]
        at += len(piece)
        plain = piece.encode("ascii", "replace")
        parts = plain.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        bare = b"".join(parts[is_text::2])
        is_text ^= (len(parts) - 1) & 1
        takes += len(parts) * _OF_A_TEXT // 2
        takes += sum(bare.count(sign) * weight for sign, weight in _WEIGHTS.items())
        if takes > most and settings.bounds:
            raise Misfit(f"has too many values. {WAY_OUT}")
        steps = map(_BRACKETS.__getitem__, bare.translate(None, _NO_BRACKETS))
        levels = list(itertools.accumulate(steps, initial=depth))
        depth = levels[-1]
        if max(levels) > _DEEPEST:
            raise Misfit("is nested too deeply")
        if _LONG_NUMBER in bare.translate(_AS_ZEROS):  # faster than a pattern
            raise Misfit("has a number with too many digits")


def read_json_file(path: Path, most: int = _MOST_FILE) -> Any:
    """Parses a JSON file of at most `most` bytes, by default 40 MB.

    Raises:
        Misfit: It is not a regular file, is too long, or is not JSON.
    """
    return read_json(_read_text(path, most))


def _read_text(path: Path, most: int) -> str:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise Misfit("is too long")
        data = file.read(size)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Misfit("is not text") from None


def read_json_table(
    path: Path, key: str, row: Callable[[Any], T]
) -> tuple[dict[str, Any], list[T]]:
    """Parses a JSON file of at most 40 MB with an object of many small entries, one at a time.

    Args:
        path: The file, which holds an object.
        key: The key in it under which the object of many entries is.
        row: Called with the value of each entry; returns what to keep of it.

    Returns:
        The other contents of the file, and the results of `row`.

    Raises:
        Misfit: It is not a regular file, is too long, has no such entries, or is not JSON.
    """
    text = _read_text(path, _MOST_FILE)
    blank = r"[ \t\n\r]*"
    match = re.search(rf'(?<!\\)"{re.escape(key)}"{blank}:{blank}\{{{blank}', text)
    if match is None:
        raise Misfit(f"has no {key}")
    at, rows = match.end(), []
    while not text.startswith("}", at):
        value, at = _entry(text, at)
        rows.append(row(value))
        more = _NEXT.match(text, at)
        if more is None:
            raise Misfit(f"is not JSON at character {at}")
        at = more.start(1) if more[1] == "}" else more.end()
    about = read_json(f"{text[: match.end()]}{text[at:]}")
    if type(about) is not dict or about.get(key) != {}:
        raise Misfit(f"has no {key}")
    return about, rows


def _entry(text: str, at: int) -> tuple[Any, int]:
    """Returns the value of an entry of an object, and where it ends."""
    for length in _LENGTHS_OF_AN_ENTRY:
        piece = text[at : at + length]
        try:
            name, end = _DECODER.raw_decode(piece)
            match = _COLON.match(piece, end)
            if match is not None and type(name) is str:
                value, end = _DECODER.raw_decode(piece, match.end())
                if end < len(piece):  # otherwise a number may continue
                    return value, at + end
        except RecursionError:
            raise Misfit("is nested too deeply") from None
        except ValueError:
            pass
    raise Misfit(f"is not JSON at character {at}, or has an entry of more than {length:,}")
