"""The bounds for the contents of untrusted files, all in one place.

Only the arrays of a genuine checkpoint are large, and only their headers are read. Many small items
(names, numbers, texts, lists) can take time and memory, so they are counted before they are parsed.
The bounds keep each file within one second and 200 MB, and are far above the counts of known files:
the largest models have some 200,000 arrays, in files of a few thousand each. Each bound is what a
second suffices for, on a processor that is half as fast as those of today.
"""

from __future__ import annotations

from fmapper.files.untrusted import Misfit
from fmapper.switches import settings

_MOST = {
    "arrays": 100_000,  # in a file
    "tensors": 75_000,  # in a pickle, which may all be views of one storage
    "arrays in all files": 210_000,  # a trillion parameters in int4 have 207,000
    "arrays of Orbax": 8_000,  # tensorstore takes a tenth of a millisecond for each
    "numbers of Orbax": 4_000,  # and a quarter of a millisecond to read one
    "pieces": 50_000,  # of arrays of `torch.distributed.checkpoint`
    "values in a piece each": 5_500,  # of `torch.distributed.checkpoint`, each a zip file
    "members": 50_000,  # of a zip file, where each array is a member
    "bytes of names": 20_000_000,  # of full dotted names, which may be longer than what is written
    "bytes of pickles": 16_000_000,  # of these
    "values": 150_000,  # numbers and texts besides the arrays of a file
    "parts": 400_000,  # arrays, values, and the dicts and lists that contain them
    "texts in lists": 2_000_000,  # skipped; vocabularies have less than half a million
    "bytes of pickled values": 250_000_000,  # of Python objects, estimated
    "bytes of long headers": 20_000_000,  # of `.npy`: headers too long to be read in one go
    "unusual headers": 10_000,  # of `.npy`; NumPy takes 50 microseconds for each
}
_BYTES_OF_ONE = {  # bytes of the files per further item; less than an item takes
    "arrays of Orbax": 128,
    "numbers of Orbax": 128,
    "pieces": 1024,
    "values in a piece each": 512,
    "bytes of pickles": 4,
}
_LONGEST_NAME = 4096  # characters of a full dotted name
_DEEPEST = 100
WAY_OUT = (
    "For a file or folder that you trust, fmapper.settings.bounds = False lifts this, as does "
    "FMAPPER_BOUNDS=0 in the environment"
)
"""The sentence with which errors about bounds end."""


def check_count(count: int, what: str, nbytes: int = 0) -> None:
    """Checks a count against its bound, which for some items grows with the size of the files.

    Args:
        count: The number of items, or a lower bound of it.
        what: The kind of item: `arrays`, `values`, `parts` (arrays, values, and the dicts and lists
            that contain them), `members` (of a zip file), `texts in lists`, `unusual headers`,
            `bytes of long headers`,
            `bytes of pickled values`, `arrays of Orbax`, `numbers of Orbax`,
            `arrays in all files` (of a checkpoint),
            `tensors` (of a pickle), `pieces` (of arrays of `torch.distributed.checkpoint`),
            `values in a piece each`, `bytes of pickles` (of these), `bytes of names`.
        nbytes: The bytes of the files that contain the items.

    Raises:
        Misfit: There are too many, and `settings.bounds` is not off.
    """
    most = _MOST[what]
    if what in _BYTES_OF_ONE:
        most += nbytes // _BYTES_OF_ONE[what]
    if count > most and settings.bounds:
        raise Misfit(f"has {count:,} {what}; {most:,} are allowed. {WAY_OUT}")


def check_depth(depth: int) -> None:
    """Checks the depth of nested dicts and lists.

    Raises:
        Misfit: It is greater than in any checkpoint.
    """
    if depth > _DEEPEST:
        raise Misfit("is nested too deeply")


def check_name(name: str) -> None:
    """Checks that a name can be printed.

    Raises:
        Misfit: It is too long, or contains control characters.
    """
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise Misfit("has a name that is too long or not printable")
