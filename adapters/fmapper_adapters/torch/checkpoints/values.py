"""Stand-ins for the values that training scripts save with tensors: NumPy's numbers, settings.

`torch.load(weights_only=True)` refuses them, unless they are named in
`torch.serialization.add_safe_globals`. The stand-ins need no such list: they run no code of NumPy
or of the original classes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from fmapper.checkpoints import Misfit

_NUMBERS = {"b1": "?", "f2": "e", "f4": "f", "f8": "d"}  # codes of NumPy and of `struct`
_NUMBERS |= {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
_FACTORIES = ("int", "long", "float", "bool", "str", "list", "dict", "tuple")
_LONGEST = 16  # bytes of a number
_MOST = 1 << 17  # entries of settings and characters of paths that one pickle may copy
_MODULE = "torch.save(module.state_dict(), path)"


def values_beside_tensors() -> dict[str, Callable[..., Any]]:
    """Returns new stand-ins by full name for one pickle, which can set their attributes."""
    left = _MOST

    def take(count: int) -> None:
        """Counts copies, since a pickle may refer to the same object many times."""
        nonlocal left
        left -= count
        if left < 0:
            raise Misfit(f"has more than {_MOST} entries of settings and characters of paths")

    class Settings(dict[Any, Any]):
        """Stands for a namespace: its attributes are the items of a dict."""

        def __init__(self, *_: Any, **items: Any) -> None:  # drops the factory of a defaultdict
            take(len(items))
            super().__init__(items)

        def __setstate__(self, state: Any) -> None:
            if type(state) is not dict:
                raise Misfit("has settings whose state is not a dict")
            take(len(state) + 1)
            self.update(state)

    class NumberDtype:
        """Stands for a dtype of NumPy."""

        def __init__(self, code: Any, *_: Any) -> None:
            self.code = _NUMBERS.get(code) if type(code) is str else None
            self.order = "<"

        def __setstate__(self, state: Any) -> None:
            is_big = type(state) is tuple and len(state) > 1 and state[1] == ">"
            self.order = ">" if is_big else "<"

    def number(dtype: Any, data: Any) -> Any:
        if not isinstance(dtype, NumberDtype) or type(data) is not bytes or dtype.code is None:
            return None  # a complex number or a text
        try:
            return struct.unpack(dtype.order + dtype.code, data)[0]
        except struct.error:
            raise Misfit("has a number of NumPy without its bytes") from None

    def factory(*_: Any) -> None:
        """Stands for the factory of a `defaultdict`, which is never called."""
        raise Misfit("calls a type of Python, which checkpoints do not")

    def path(*parts: Any) -> str:
        texts = [part for part in parts if type(part) is str]
        take(sum(map(len, texts)) + len(parts))
        return "/".join(texts)

    return {
        "numpy._core.multiarray.scalar": number,
        "numpy.core.multiarray.scalar": number,
        "numpy.dtype": NumberDtype,
        "argparse.Namespace": Settings,
        "types.SimpleNamespace": Settings,
        "collections.defaultdict": Settings,
        **{
            f"{room}.{name}": factory for room in ("builtins", "__builtin__") for name in _FACTORIES
        },
        "_codecs.encode": _encode,
        **{f"pathlib.{name}Path": path for name in ("", "Posix", "Windows", "PurePosix", "Pure")},
        **{f"pathlib._local.{name}Path": path for name in ("", "Posix", "Windows", "PurePosix")},
        "datetime.datetime": lambda *_: None,
        "datetime.date": lambda *_: None,
        "datetime.timedelta": lambda *_: None,
    }


def _encode(text: Any, *_: Any) -> bytes | None:
    """Decodes bytes in the form of torch's pickles; drops long ones, which are not numbers."""
    if type(text) is not str or len(text) > _LONGEST:
        return None
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        return None


def way_out(module: str, name: str) -> str:
    """Describes an object that is not read, and how to get at the tensors of its pickle."""
    full = f"{module[:60]}.{name[:60]}"
    if not full.isprintable() or not full.isascii():
        full = ascii(full)
    trusted = "If you trust the file, load it with torch.load(path, weights_only=False)"
    if module.startswith("torch.nn.") or name == "_rebuild_module":
        return f"holds a whole module, of class {full}. {trusted} and write its arrays: {_MODULE}"
    if full.startswith(("numpy._core.multiarray._", "numpy.core.multiarray._", "numpy.ndarray")):
        return f"holds an array of NumPy. {trusted} and save it as torch.from_numpy(array)"
    return (
        f"holds an object of {full}. It is not created, because a pickle could run code. "
        f"{trusted}, or with weights_only=True within torch.serialization.safe_globals("
        f"[{name[:60]}]) if its class is harmless, and save the tensors alone, in a dict"
    )
