"""The built-in adapters pass the suite that every adapter must pass."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest

import fmapper
from fmapper.backends import Adapter, discovery

np = pytest.importorskip("numpy")

from support import conformance  # noqa: E402
from support.conformance import ML_DTYPES, NUMPY_DTYPES, AdapterConformance  # noqa: E402

WIDE = ("int64", "uint64", "float64", "complex128")


def native(array: Any) -> Any:
    """A contiguous, writable copy in native byte order."""
    own = array if array.dtype.isnative else array.byteswap().view(array.dtype.newbyteorder("="))
    return own.copy()


class TestNumpy(AdapterConformance):
    dtypes = ("float32", *(name for name in NUMPY_DTYPES if name != "float32"), *ML_DTYPES)
    has_views = True
    shares_host_memory = True

    def make_adapter(self) -> Adapter:
        return fmapper.backends.get_adapter("numpy")

    def make(self, array: Any) -> Any:
        return native(array)

    def values(self, array: Any) -> Any:
        return np.asarray(array)

    def overwrite(self, array: Any) -> None:
        conformance.wipe(array)

    def variants(self, array: Any) -> Mapping[str, Any]:
        return {name: layout(array.ravel()) for name, layout in LOCAL_LAYOUTS.items()}


LOCAL_LAYOUTS = {
    name: layout
    for name, layout in conformance.LAYOUTS.items()
    if name not in ("big_endian", "strided", "negative")
} | {
    "strided": lambda flat: flat.reshape(4, 6)[::2, 1::3],
    "negative": lambda flat: flat.reshape(4, 6)[::-1, ::-2],
}


def test_an_unpickled_array_is_not_frozen() -> None:
    """Its memory is that of a bytes object, too, but it can be written to."""
    made = pickle.loads(pickle.dumps(np.arange(4096, dtype=np.float32)))
    view = made.view()
    view.flags.writeable = False
    assert not fmapper.backends.get_adapter("numpy").export([view], conformance.HOST).frozen
    new = fmapper.to_numpy(view, copy=True)
    made[:] = -1.0
    assert new[7] == 7.0


class TestTorch(AdapterConformance):
    dtypes = TestNumpy.dtypes
    has_views = True
    shares_host_memory = True

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch")

    def make_adapter(self) -> Adapter:
        return fmapper.backends.get_adapter("torch")

    def make(self, array: Any) -> Any:
        import torch

        own = native(array)
        if own.dtype.name not in ML_DTYPES:
            return torch.from_numpy(own)
        bits = own.view(f"int{8 * own.itemsize}")
        return torch.from_numpy(bits).view(getattr(torch, own.dtype.name))

    def values(self, array: Any) -> Any:
        import torch

        plain = array.detach().cpu()
        name = str(plain.dtype).removeprefix("torch.")
        if name not in ML_DTYPES:
            return plain.numpy()
        bits = {1: torch.int8, 2: torch.int16}[plain.element_size()]
        return plain.view(bits).numpy().view(conformance.host_dtype(name))

    def overwrite(self, array: Any) -> None:
        import torch

        (array.view(torch.int8) if array.dtype.itemsize == 1 else array).zero_()

    def variants(self, array: Any) -> Mapping[str, Any]:
        return {
            "transposed": array.T,
            "row_slice": array[1:],
            "column_slice": array[:, 1:4],
            "strided": array[::2, 1::2],
            "expanded": array[0].expand(3, 6),
            "zero_d": array[1, 2],
            "empty": array[:0],
            "offset": array.reshape(-1)[1:],
            "permuted": array.reshape(2, 3, 2, 2).permute(3, 0, 2, 1),
            "requires_grad": (
                array.clone().requires_grad_()
                if array.is_floating_point() or array.is_complex()
                else array
            ),
        }


class TestJax(AdapterConformance):
    """Under the default settings, which know no 64-bit dtypes."""

    dtypes = tuple(name for name in TestNumpy.dtypes if name not in WIDE)
    immutable = True
    shares_host_memory = True

    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        pytest.importorskip("jax")

    def make_adapter(self) -> Adapter:
        return fmapper.backends.get_adapter("jax")

    def make(self, array: Any) -> Any:
        import jax.numpy as jnp

        return jnp.array(native(array)).block_until_ready()

    def values(self, array: Any) -> Any:
        return np.asarray(array)

    def variants(self, array: Any) -> Mapping[str, Any]:
        return {"transposed": array.T, "strided": array[::2, 1::2], "zero_d": array[1, 2]}


class TestJaxWide(TestJax):
    """With 64-bit dtypes, in a scope: nothing else in this process is touched."""

    dtypes = WIDE

    @pytest.fixture(autouse=True)
    def _x64(self, _jax: None) -> Iterator[None]:
        with x64():
            yield


@contextlib.contextmanager
def x64() -> Iterator[None]:
    """JAX with 64-bit dtypes, in this block."""
    import jax

    if hasattr(jax, "enable_x64"):
        with jax.enable_x64(True):
            yield
    else:
        from jax.experimental import enable_x64

        with enable_x64():
            yield


def test_a_thread_waits_for_the_adapter_that_another_one_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it the first calls of several threads would find no arrays in a model."""
    inside = threading.Event()
    loaded: list[str] = []

    def load() -> None:
        inside.set()
        time.sleep(0.2)
        loaded.append("adapter")
        raise ImportError("a test")

    monkeypatch.setitem(sys.modules, "slow_framework", ModuleType("slow_framework"))
    monkeypatch.setattr(discovery, "_sources", lambda: {"slow_framework": load})
    monkeypatch.setattr(discovery, "_by_framework", {})
    monkeypatch.setattr(discovery, "warn", lambda *_: None)
    first = threading.Thread(target=discovery.load_new)
    first.start()
    inside.wait()
    discovery.load_new()
    assert loaded == ["adapter"]
    first.join()
    discovery.load_new()
    assert loaded == ["adapter"]
