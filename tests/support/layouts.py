"""Arrays of NumPy, torch and JAX of every dtype and layout, made and read without fmapper.

Every array comes with what a move must give: a NumPy array of the same bits, as `want`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("ml_dtypes")

from support import conformance  # noqa: E402
from support.conformance import ML_DTYPES, host_dtype, sample  # noqa: E402

DTYPES: tuple[str, ...] = (*conformance.NUMPY_DTYPES, *ML_DTYPES)
WIDE = ("int64", "uint64", "float64", "complex128")
FLOATS = (*(d for d in DTYPES if "float" in d), "complex64", "complex128")

MOVERS = {"numpy": fmapper.to_numpy, "torch": fmapper.to_torch, "jax": fmapper.to_jax}
CELLS = [(source, target) for source in MOVERS for target in MOVERS]
PAIRS = [(source, target) for source, target in CELLS if source != target]

Made = dict[str, tuple[Any, Any]]  # layout -> (array, want)


@contextlib.contextmanager
def x64(on: bool = True) -> Iterator[None]:
    """JAX with 64-bit dtypes, or without, in this block."""
    if hasattr(jax, "enable_x64"):
        with jax.enable_x64(on):
            yield
    else:
        from jax.experimental import enable_x64

        with enable_x64(on):
            yield


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """JAX makes its arrays on the CPU in this block, also where it sees a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def native(array: Any) -> Any:
    """A contiguous copy in native byte order, a plain and writable array."""
    plain = np.array(array, order="C", copy=True, subok=False)
    return plain if plain.dtype.isnative else plain.byteswap().view(plain.dtype.newbyteorder("="))


def make(backend: str, host: Any) -> Any:
    """An array of a backend with the bits of a NumPy array, in C order and memory of its own."""
    own = native(host)
    if backend == "numpy":
        return own
    if backend == "torch":
        return tensor_on(own)
    made = jax.device_put(own.copy()).block_until_ready()
    assert np.asarray(made).tobytes() == own.tobytes(), "JAX could not take these bits"
    return made


def tensor_on(host: Any) -> Any:
    """A tensor on the memory of a native NumPy array, whatever its dtype."""
    if host.dtype.name not in ML_DTYPES:
        return torch.from_numpy(host)
    integers = torch.from_numpy(host.view(f"int{8 * host.itemsize}"))
    return integers.view(getattr(torch, host.dtype.name))


def bits(array: Any) -> Any:
    """An array of any backend as NumPy sees it; a view of its memory where there can be one."""
    if isinstance(array, jax.Array):
        return np.asarray(array)
    if not isinstance(array, torch.Tensor):
        return np.asarray(array)
    plain = array.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    name = str(plain.dtype).removeprefix("torch.")
    if name not in ML_DTYPES:
        return plain.numpy()
    integer = {1: torch.int8, 2: torch.int16}[plain.element_size()]
    return plain.view(integer).numpy().view(host_dtype(name))


def assert_exact(array: Any, want: Any, backend: str) -> None:
    """Fails unless an array is of a backend and has the dtype, the shape and the bits of `want`."""
    assert backend_of(array) == backend
    assert tuple(array.shape) == want.shape
    assert dtype_of(array) == want.dtype.name
    conformance.assert_exact(native(bits(array)), want)


def backend_of(array: Any) -> str:
    """Whose array it is."""
    if isinstance(array, jax.Array):
        return "jax"
    if isinstance(array, torch.Tensor):
        return "torch"
    assert isinstance(array, np.ndarray | np.generic), f"{type(array)} is not an array"
    return "numpy"


def dtype_of(array: Any) -> str:
    """The name of its dtype."""
    return str(getattr(array.dtype, "name", array.dtype)).removeprefix("torch.")


def address(array: Any) -> int:
    """Where the first element of an array is."""
    if isinstance(array, jax.Array):
        return int(array.unsafe_buffer_pointer())
    if isinstance(array, torch.Tensor):
        return int(array.data_ptr())
    return int(array.__array_interface__["data"][0])


def placed(host: Any, offset: int = 0) -> Any:
    """A writable copy that starts `offset` bytes behind a multiple of 64."""
    raw = np.empty(host.nbytes + 64 + offset, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    new = raw[start : start + host.nbytes].view(host.dtype).reshape(host.shape)
    new[...] = host
    return new


def shares_bytes(a: Any, b: Any) -> bool:
    """Whether two arrays on the host have memory in common."""
    return bool(np.may_share_memory(_bytes(a), _bytes(b)))


def _bytes(array: Any) -> Any:
    host = bits(array)
    return host.view(np.ndarray) if host.dtype.kind != "V" else host.view(f"u{host.itemsize}")


def flip_sign(host: Any, *, imaginary: bool = False) -> Any:
    """A copy with the sign bits flipped, of all numbers or of the imaginary parts alone."""
    new = native(host)
    part = new.itemsize // (2 if new.dtype.kind == "c" else 1)
    words = new.reshape(-1).view(f"u{part}")
    words[1 if imaginary else 0 :: 2 if imaginary else 1] ^= words.dtype.type(1 << (8 * part - 1))
    return new


# --- layouts of NumPy ----------------------------------------------------------------------------


def _windows(flat: Any, width: int) -> Any:
    """Overlapping rows; not by `sliding_window_view`, which does not know all of ml_dtypes."""
    size = flat.itemsize
    rows = flat.size - width + 1
    return np.ndarray((rows, width), flat.dtype, flat.view(np.uint8), 0, (size, size))


class Subarray(np.ndarray):
    """A subclass with nothing of its own."""


def _packed_field(flat: Any) -> Any:
    """A field of packed records: its strides are no multiple of the item size."""
    records = np.zeros(24, np.dtype([("x", flat.dtype), ("y", "i1")]))
    records["x"] = flat[:24]
    return records["x"]


def _matrix(flat: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.matrix(flat[:24].reshape(4, 6))


def _locked(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


NUMPY_LAYOUTS: dict[str, Callable[[Any], Any]] = {
    **conformance.LAYOUTS,
    "column": lambda flat: flat.reshape(10, 12)[:, 3],
    "negative_1d": lambda flat: flat[::-1],
    "negative_step": lambda flat: flat[::-3],
    "negative_fortran": lambda flat: np.asfortranarray(flat.reshape(10, 12))[::-1],
    "broadcast_0d": lambda flat: np.broadcast_to(flat[0], (3, 4)),
    "overlapping": lambda flat: _windows(flat, 7),
    "newaxis": lambda flat: flat[:24].reshape(4, 1, 6)[:, :, None, ::2],
    "empty_1d": lambda flat: flat[:0],
    "empty_negative": lambda flat: flat.reshape(10, 12)[::-1, :0],
    "empty_misaligned": lambda flat: conformance._misaligned(flat)[:0],
    "misaligned_strided": lambda flat: conformance._misaligned(flat)[1::3],
    "misaligned_locked": lambda flat: _locked(conformance._misaligned(flat)),
    "locked_view": lambda flat: _locked(flat.reshape(10, 12)),
    "locked_negative": lambda flat: _locked(flat[::-1]),
    "bytes": lambda flat: np.frombuffer(flat.tobytes(), flat.dtype),
    "bytes_misaligned": lambda flat: np.frombuffer(b"x" + flat.tobytes(), flat.dtype, offset=1),
    "big_endian_strided": lambda flat: conformance._big_endian(flat)[::-2],
    "big_endian_0d": lambda flat: conformance._big_endian(flat)[:1].reshape(()),
    "big_endian_locked": lambda flat: _locked(conformance._big_endian(flat)),
    "packed_field": _packed_field,
    "subclass": lambda flat: flat[:24].reshape(4, 6).view(Subarray),
    "matrix": _matrix,
    "scalar": lambda flat: flat[3],
}


def numpy_layouts(dtype: str, directory: Path) -> Made:
    """Every layout of NumPy, each on memory of its own."""
    found = {name: layout(sample(dtype)) for name, layout in NUMPY_LAYOUTS.items()}
    flat = sample(dtype)
    for mode in ("r", "r+", "c"):
        path = directory / f"{dtype}_{mode}.bin"
        path.write_bytes(b"?" + flat.tobytes())
        found[f"memmap_{mode}"] = np.memmap(path, flat.dtype, mode, offset=1, shape=(10, 12))
    return {name: (array, native(array)) for name, array in found.items()}


# --- layouts of torch ----------------------------------------------------------------------------


class Subtensor(torch.Tensor):
    """A subclass with nothing of its own."""


# These mean the same to a tensor and to a NumPy array.
COMMON_LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda flat: flat[:24].reshape(4, 6),
    "transposed": lambda flat: flat[:24].reshape(4, 6).T,
    "row_slice": lambda flat: flat[:24].reshape(4, 6)[1:3],
    "column_slice": lambda flat: flat[:24].reshape(4, 6)[:, 1:4],
    "column": lambda flat: flat.reshape(10, 12)[:, 3],
    "strided": lambda flat: flat.reshape(10, 12)[::2, 1::3],
    "offset": lambda flat: flat[1:25],
    "zero_d": lambda flat: flat.reshape(10, 12)[1, 2],
    "size_one": lambda flat: flat[5:6].reshape(1, 1),
    "empty": lambda flat: flat[:0].reshape(0, 3),
    "empty_strided": lambda flat: flat.reshape(10, 12)[::3, 5:5],
}


def torch_layouts(dtype: str) -> Made:
    """Every layout of torch, each on memory of its own."""
    found: Made = {}

    def add(name: str, change: Callable[[Any], Any], want: Callable[[Any], Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = (change(make("torch", sample(dtype))), native(want(sample(dtype))))

    for name, layout in COMMON_LAYOUTS.items():
        add(name, layout, layout)
    add("expanded", lambda t: t[:6].expand(4, 6), lambda a: np.broadcast_to(a[:6], (4, 6)))
    add("expanded_0d", lambda t: t[0].expand(3, 4), lambda a: np.broadcast_to(a[0], (3, 4)))
    add(
        "permuted",
        lambda t: t[:24].reshape(2, 3, 4).permute(2, 0, 1),
        lambda a: a[:24].reshape(2, 3, 4).transpose(2, 0, 1),
    )
    add(
        "channels_last",
        lambda t: t.reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        lambda a: a.reshape(2, 3, 4, 5),
    )
    add("windows", lambda t: t.unfold(0, 7, 2), lambda a: _windows(a, 7)[::2])
    add("subclass", lambda t: t.as_subclass(Subtensor), lambda a: a)
    add("buffer", torch.nn.Buffer, lambda a: a)
    add("frozen", lambda t: torch.nn.Parameter(t, requires_grad=False), lambda a: a)
    misaligned = conformance._misaligned(sample(dtype))
    found["misaligned"] = tensor_on(misaligned), misaligned.copy()
    with torch.inference_mode():
        add("inference", lambda t: t.clone(), lambda a: a)
    if dtype in FLOATS:
        add("requires_grad", lambda t: t.requires_grad_(), lambda a: a)
        add("not_a_leaf", lambda t: t.requires_grad_()[3:9], lambda a: a[3:9])
        add("parameter", torch.nn.Parameter, lambda a: a)
        add("parameter_view", lambda t: torch.nn.Parameter(t)[::2], lambda a: a[::2])
    if dtype.startswith("complex"):
        add("conj", lambda t: t.conj(), lambda a: flip_sign(a, imaginary=True))
        add(
            "conj_strided",
            lambda t: t.reshape(10, 12).conj().T[::2],
            lambda a: flip_sign(a.reshape(10, 12), imaginary=True).T[::2],
        )
        add("conj_0d", lambda t: t.conj()[3], lambda a: flip_sign(a, imaginary=True)[3])
        add(
            "conj_grad", lambda t: t.requires_grad_().conj(), lambda a: flip_sign(a, imaginary=True)
        )
    if dtype in ("float32", "float64"):
        imag: Callable[[Any], Any] = lambda t: torch.view_as_complex(t.reshape(60, 2)).conj().imag  # noqa: E731
        add("neg", imag, lambda a: flip_sign(a[1::2]))
        add("neg_strided", lambda t: imag(t)[::7], lambda a: flip_sign(a[1::2])[::7])
    return found


# --- layouts of JAX ------------------------------------------------------------------------------


def jax_layouts(dtype: str) -> Made:
    """What there is in JAX: sizes, memory of others, layouts that are not the default."""
    host = sample(dtype)
    found: Made = {}
    for name, layout in COMMON_LAYOUTS.items():
        found[name] = make("jax", layout(host)), native(layout(host))
    matrix = host[:24].reshape(4, 6)
    found["committed"] = jax.device_put(matrix.copy(), jax.devices("cpu")[0]), matrix
    found["on_numpy"] = jax.device_put(placed(matrix)), matrix
    found["turned"] = make("jax", matrix).T, native(matrix.T)
    # DLPack keeps the strides of a Fortran array: the layout of the result is not the default one.
    found["fortran"] = jax.dlpack.from_dlpack(tensor_on(placed(matrix)).T), native(matrix.T)
    return found


def layouts(backend: str, dtype: str, directory: Path) -> Made:
    """Every layout of a backend."""
    if backend == "numpy":
        return numpy_layouts(dtype, directory)
    return torch_layouts(dtype) if backend == "torch" else jax_layouts(dtype)
