"""The bounds of what a file of anybody's may hold, all in one place.

What is large in an honest checkpoint are its arrays, of which only headers are read. What can be
made to take time and memory are many small things: names, numbers, texts, lists. They are counted
before they are parsed. The bounds keep each file within a second and 200 MB, and are well above
what is known of honest files: the largest models have some 200,000 arrays, in files of a few
thousand each.
"""

from __future__ import annotations

from fmapper.files.untrusted import Misfit
from fmapper.switches import settings

_MOST = {
    "arrays": 150_000,  # of a file
    "arrays in all files": 500_000,
    "arrays of Orbax": 20_000,  # which takes a quarter of a millisecond for each
    "members": 160_000,  # of a zip file, in which each array is one
    "values": 150_000,  # numbers and texts beside the arrays of a file
    "parts": 400_000,  # arrays and values, and the dicts and lists in which they lie
    "texts in lists": 2_000_000,  # that are skipped; vocabularies have less than half a million
    "bytes of pickled values": 250_000_000,  # as Python has them, by an estimate
    "unusual headers": 10_000,  # of `.npy`, of which each takes NumPy 50 microseconds
}
_LONGEST_NAME = 4096  # characters, with the names of all that it lies in
_DEEPEST = 100
WAY_OUT = (
    "For a file that you trust, fmapper.settings.bounds = False lifts this, as does "
    "FMAPPER_BOUNDS=0 in the environment"
)


def check_count(count: int, what: str) -> None:
    """Raises for more than a file may have.

    Args:
        count: How many there are, or at least.
        what: What they are: `arrays`, `values`, `parts` (arrays, values, and the dicts and lists
            in which they lie), `members` (of a zip file), `texts in lists`, `unusual headers`,
            `bytes of pickled values`, `arrays of Orbax`, `arrays in all files` (of a checkpoint).

    Raises:
        Misfit: There are too many, and `settings.bounds` is not off.
    """
    most = _MOST[what]
    if count > most and settings.bounds:
        raise Misfit(f"has {count:,} {what}; {most:,} are allowed. {WAY_OUT}")


def check_depth(depth: int) -> None:
    """Raises for dicts and lists within each other, as many as no checkpoint has.

    Raises:
        Misfit: They are.
    """
    if depth > _DEEPEST:
        raise Misfit("is nested too deeply")


def check_name(name: str) -> None:
    """Raises for a name that cannot be shown: too long, or with control characters.

    Raises:
        Misfit: It is one.
    """
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise Misfit("has a name that is too long, or not for reading")
