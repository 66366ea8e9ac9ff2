"""What every adapter must do: subclass `AdapterConformance`, fill in the hooks, run pytest.

    class TestMine(AdapterConformance):
        dtypes = ("float32", "int64")

        def make_adapter(self):
            return MyAdapter()

        def make(self, array):            # any NumPy array -> an array of this backend
            return mine.array(array.copy())

        def values(self, array):          # back, as a NumPy view of its memory if there is one
            return array.numpy()

        def overwrite(self, array):       # all bits to zero, where `array[...] = 0` does not do it
            array.fill(0)

The file needs pytest, NumPy and fmapper only, so that it can be copied into another project.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

import fmapper
from fmapper import Device, Mover
from fmapper.backends import Adapter, Exchange

np = pytest.importorskip("numpy")

NUMPY_DTYPES = (
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
ML_DTYPES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
HOST = Device("numpy", "cpu")

# Bit patterns that a conversion by value would not bring through: NaNs with payloads (quiet and
# signalling, of both signs), -0.0, the infinities, the least and the greatest number.
SPECIAL = {
    "float16": "7e01 7d55 fe2a 8000 7c00 fc00 0001 7bff",
    "bfloat16": "7fc1 7fa5 ffd5 8000 7f80 ff80 0001 7f7f",
    "float32": "7fc00001 7fa12345 ffd55555 80000000 7f800000 ff800000 00000001 7f7fffff",
    "float64": "7ff8000000000001 7ff4123456789abc fffd555555555555 8000000000000000 "
    "7ff0000000000000 fff0000000000000 0000000000000001 7fefffffffffffff",
}
SPECIAL["complex64"] = SPECIAL["float32"]
SPECIAL["complex128"] = SPECIAL["float64"]


def host_dtype(name: str) -> Any:
    """The NumPy dtype of a name; skips the test where ml_dtypes is needed and is not there."""
    if name in ML_DTYPES:
        return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    return np.dtype(name)


def sample(dtype: str, size: int = 120) -> Any:
    """A vector of arbitrary bits, the special patterns of its dtype first."""
    made = host_dtype(dtype)
    bits = np.random.default_rng(0).integers(0, 256, size * made.itemsize, dtype=np.uint8)
    if dtype == "bool":
        return (bits & 1).astype(bool)
    words = [bytes.fromhex(word)[::-1] for word in SPECIAL.get(dtype, "").split()]
    special = np.frombuffer(b"".join(words), np.uint8)
    bits[: special.size] = special
    return bits.view(made)


def _misaligned(flat: Any) -> Any:
    raw = np.empty(flat.nbytes + 1, np.uint8)
    new = raw[1:].view(flat.dtype)
    new[:] = flat
    return new


def _read_only(array: Any) -> Any:
    new = array.copy()
    new.flags.writeable = False
    return new


def _big_endian(array: Any) -> Any:
    if array.dtype.name in ML_DTYPES:  # they have one byte order
        return array
    return array.byteswap().view(array.dtype.newbyteorder(">"))


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda flat: flat[:24].reshape(4, 6),
    "fortran": lambda flat: np.asfortranarray(flat[:24].reshape(2, 3, 4)),
    "transposed": lambda flat: flat[:24].reshape(2, 3, 4).transpose(2, 0, 1),
    "row_slice": lambda flat: flat[:24].reshape(4, 6)[1:3],
    "column_slice": lambda flat: flat[:24].reshape(4, 6)[:, 1:4],
    "strided": lambda flat: flat.reshape(10, 12)[::2, 1::3],
    "negative": lambda flat: flat.reshape(10, 12)[::-1, ::-2],
    "broadcast": lambda flat: np.broadcast_to(flat[:6], (4, 6)),
    "zero_d": lambda flat: flat[:1].reshape(()),
    "size_one": lambda flat: flat[:1].reshape(1, 1),
    "empty": lambda flat: flat[:0].reshape(0, 3),
    "offset": lambda flat: flat[1:25],
    "misaligned": _misaligned,
    "read_only": lambda flat: _read_only(flat[:24].reshape(4, 6)),
    "big_endian": lambda flat: _big_endian(flat[:24].reshape(4, 6)),
}


@contextlib.contextmanager
def noting(what: str) -> Iterator[None]:
    """Adds a note to what fails in the block: which layout it was."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def assert_exact(got: Any, want: Any) -> None:
    """Fails unless two NumPy arrays agree in dtype (but for byte order), shape, and every bit."""
    native = want if want.dtype.isnative else want.byteswap().view(want.dtype.newbyteorder("="))
    assert isinstance(got, np.ndarray), f"{type(got)} is no NumPy array"
    assert got.dtype == native.dtype, f"dtype {got.dtype}, wanted {native.dtype}"
    assert got.shape == native.shape, f"shape {got.shape}, wanted {native.shape}"
    same = got.tobytes() == native.tobytes()
    assert same, f"the bits differ:\n{got!r}\nwanted\n{native!r}"


def wipe(array: Any) -> None:
    """Overwrites a NumPy array in place with zero bits."""
    array[...] = np.zeros((), array.dtype)


def carried(arrays: Sequence[Any], source: Adapter, target: Adapter, device: Device) -> list[Any]:
    """Takes arrays from one adapter to another as movers do: by way of private memory."""
    exchange = source.export(arrays, device)
    if exchange.device is None:
        data = [
            array if at in exchange.private else array.copy(target.order)
            for at, array in enumerate(exchange.data)
        ]
        exchange = Exchange(data, private=range(len(data)))
    return list(target.take(exchange, device, share=False))


class AdapterConformance:
    """The tests. Attributes and methods up to `variants` are the hooks.

    Attributes:
        dtypes: The dtypes that the backend holds, by NumPy's or ml_dtypes' names.
        has_views: `memory` and `view` are there.
        immutable: Nobody can write to an array of this backend.
        shares_host_memory: An aligned, contiguous, writable NumPy array can be shared.
    """

    dtypes: ClassVar[Sequence[str]] = ()
    has_views: ClassVar[bool] = False
    immutable: ClassVar[bool] = False
    shares_host_memory: ClassVar[bool] = False

    def make_adapter(self) -> Adapter:
        """The adapter under test."""
        raise NotImplementedError

    def make(self, array: Any) -> Any:
        """An array of this backend, on its CPU, with the bits of a NumPy array of any layout."""
        raise NotImplementedError

    def values(self, array: Any) -> Any:
        """The bits of an array of this backend, on any device, as a NumPy array.

        For an array on the CPU this is a view of its memory if the backend can give one.
        """
        raise NotImplementedError

    def overwrite(self, array: Any) -> None:
        """Sets all bits of an array of this backend to zero, in place."""
        array[...] = 0

    def variants(self, array: Any) -> Mapping[str, Any]:
        """Layouts that only this backend can make of one of its matrices: views, for example."""
        return {"as_made": array}

    # --- set-up ----------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes)

    @pytest.fixture
    def adapter(self) -> Iterator[Adapter]:
        """The adapter, known to fmapper while the test runs."""
        adapter = self.make_adapter()
        try:
            known = fmapper.backends.get_adapter(adapter.name) is adapter
        except fmapper.BackendUnavailableError:
            known = False
        if known:
            yield adapter
            return
        fmapper.backends.register_adapter(adapter)
        try:
            yield adapter
        finally:
            fmapper.backends.unregister_adapter(adapter.name)

    @pytest.fixture
    def cpu(self, adapter: Adapter) -> Device:
        return adapter.devices()[0]

    @pytest.fixture
    def mover(self, adapter: Adapter) -> Mover:
        return Mover(f"to_{adapter.name}", backend=adapter.name)

    @pytest.fixture
    def matrix(self) -> Any:
        """A 4 x 6 matrix of a dtype that every backend has: the first of `dtypes`."""
        return sample(self.dtypes[0])[:24].reshape(4, 6).copy()

    # --- arrays ----------------------------------------------------------------------------------

    def test_is_array_type(self, adapter: Adapter, matrix: Any) -> None:
        assert adapter.is_array_type(type(self.make(matrix)))
        for other in (int, float, complex, bool, str, bytes, list, dict, tuple, object, type(None)):
            assert not adapter.is_array_type(other)
        assert adapter.is_array_type(np.ndarray) == (adapter.name == "numpy")

    def test_fmapper_takes_its_arrays_for_leaves(self, adapter: Adapter, matrix: Any) -> None:
        array = self.make(matrix)
        assert fmapper.is_leaf(array)
        assert fmapper.fleaves({"a": [array]})[0] is array

    def test_device_dtype_shape(self, adapter: Adapter, cpu: Device, dtype: str) -> None:
        array = self.make(sample(dtype)[:24].reshape(2, 3, 4))
        assert adapter.device(array) == cpu
        assert adapter.dtype(array) == dtype
        shape = adapter.shape(array)
        assert shape == (2, 3, 4)
        assert type(shape) is tuple
        assert adapter.shape(self.make(sample(dtype)[:1].reshape(()))) == ()

    def test_nbytes(self, adapter: Adapter, dtype: str) -> None:
        host = sample(dtype)[:24].reshape(4, 6)
        assert adapter.nbytes(self.make(host)) == host.nbytes

    def test_shapes_without_values(self, adapter: Adapter, dtype: str) -> None:
        """They are on `meta`, or there are none; their values cannot leave, and get none."""
        if adapter.storable(dtype) != dtype:
            pytest.skip(f"{adapter.name} does not hold {dtype}")
        try:
            array = adapter.abstract((2, 3), dtype)
        except TypeError:
            return
        meta = Device(adapter.name, "meta")
        assert adapter.find_device("meta", None) == adapter.device(array) == meta
        assert (adapter.shape(array), adapter.dtype(array)) == ((2, 3), dtype)
        assert adapter.is_array_type(type(array))
        assert adapter.unusable([array]) is None
        assert adapter.nbytes(array) == 6 * sample(dtype).itemsize
        (again,) = adapter.to_device([self.make(sample(dtype)[:6].reshape(2, 3))], meta, copy=None)
        assert (adapter.shape(again), adapter.dtype(again)) == ((2, 3), dtype)
        with pytest.raises(TypeError, match="no values"):
            adapter.check(array)
        with pytest.raises(TypeError, match="no values"):
            adapter.export([array], Device("numpy", "cpu"))

    def test_immutable(self, adapter: Adapter, matrix: Any) -> None:
        array = self.make(matrix)
        if self.immutable:
            with pytest.raises((TypeError, ValueError, AttributeError)):
                self.overwrite(array)
            assert_exact(self.values(array), matrix)
        else:
            self.overwrite(array)
            assert_exact(self.values(array), np.zeros_like(matrix))

    # --- devices ---------------------------------------------------------------------------------

    def test_devices(self, adapter: Adapter) -> None:
        found = list(adapter.devices())
        assert found, "there is always the CPU"
        assert found[0].kind == "cpu"
        assert len(set(found)) == len(found)
        assert all(isinstance(device, Device) for device in found)
        assert all(device.backend == adapter.name for device in found)
        assert set(found) <= set(fmapper.devices())

    def test_find_device(self, adapter: Adapter, cpu: Device) -> None:
        assert adapter.find_device("cpu", None) == cpu
        for device in adapter.devices():
            assert isinstance(device.index, int | None)
            assert adapter.find_device(device.kind, device.index) == device
        for alias, kind in adapter.aliases.items():
            here = [device for device in adapter.devices() if device.kind == kind]
            if here:
                assert adapter.find_device(alias, None) in here

    @pytest.mark.parametrize(("kind", "index"), [("cpu", 10_000), ("nosuch", None), ("nosuch", 3)])
    def test_device_unavailable(self, adapter: Adapter, kind: str, index: int | None) -> None:
        with pytest.raises(fmapper.DeviceUnavailableError) as caught:
            adapter.find_device(kind, index)
        text = str(caught.value)
        assert str(Device(adapter.name, kind, index)) in text, "says what was wanted"
        for device in adapter.devices():
            assert str(device) in text, "lists what is here"
        assert adapter.why_not(kind, index).rstrip(".") in text, "says why"

    def test_device_strings(self, adapter: Adapter, mover: Mover, matrix: Any) -> None:
        """Every device can be named by its printed form, qualified or not, and as a `Device`."""
        array = self.make(matrix)
        for device in adapter.devices():
            for spelt in (str(device), str(device).partition(":")[2], device):
                assert adapter.device(mover(array, device=spelt)) == device
            assert adapter.device(fmapper.to_device(str(device))(array)) == device

    def test_as_device(self, adapter: Adapter) -> None:
        for other in (None, "cpu", 0, object(), HOST):
            assert adapter.as_device(other) is None

    # --- there and back --------------------------------------------------------------------------

    def test_round_trip_with_itself(self, adapter: Adapter, cpu: Device, dtype: str) -> None:
        for name, layout in LAYOUTS.items():
            with noting(name):
                want = layout(sample(dtype))
                array = self.make(want)
                (new,) = carried([array], adapter, adapter, cpu)
                assert new is not array
                assert adapter.is_array_type(type(new))
                assert (adapter.dtype(new), adapter.device(new)) == (dtype, cpu)
                assert_exact(self.values(new), want)
                assert_exact(self.values(array), want)

    def test_from_numpy(self, adapter: Adapter, cpu: Device, dtype: str) -> None:
        for name, layout in LAYOUTS.items():
            with noting(name):
                want = layout(sample(dtype))
                given = want.copy()
                (new,) = carried([want], fmapper.backends.get_adapter("numpy"), adapter, cpu)
                assert adapter.is_array_type(type(new))
                assert (adapter.dtype(new), adapter.device(new)) == (dtype, cpu)
                assert_exact(self.values(new), want)
                assert want.tobytes() == given.tobytes()

    def test_to_numpy(self, adapter: Adapter, dtype: str) -> None:
        for name, layout in LAYOUTS.items():
            with noting(name):
                want = layout(sample(dtype))
                array = self.make(want)
                (new,) = carried([array], adapter, fmapper.backends.get_adapter("numpy"), HOST)
                assert type(new) is np.ndarray
                assert_exact(new, want)

    def test_its_own_layouts(self, adapter: Adapter, cpu: Device, dtype: str) -> None:
        made = self.variants(self.make(sample(dtype)[:24].reshape(4, 6)))
        for name, array in made.items():
            want = np.array(self.values(array))
            (host,) = carried([array], adapter, fmapper.backends.get_adapter("numpy"), HOST)
            (own,) = carried([array], adapter, adapter, cpu)
            (copy,) = adapter.to_device([array], cpu, copy=True)
            for new in (host, self.values(own), self.values(copy)):
                with noting(name):
                    assert_exact(new, want)

    def test_many_at_once(self, adapter: Adapter, cpu: Device, matrix: Any) -> None:
        """Order is kept, and none at all is fine."""
        wanted = [matrix, matrix[1:], matrix[:, 2:], matrix[:0]]
        new = carried([self.make(array) for array in wanted], adapter, adapter, cpu)
        assert len(new) == len(wanted)
        for got, want in zip(new, wanted, strict=True):
            assert_exact(self.values(got), want)
        assert list(adapter.export([], HOST).data) == []
        assert list(adapter.take(Exchange([]), cpu, share=False)) == []
        assert list(adapter.to_device([], cpu, copy=True)) == []

    def test_every_device_takes(self, adapter: Adapter, matrix: Any) -> None:
        for device in adapter.devices():
            (new,) = carried([matrix], fmapper.backends.get_adapter("numpy"), adapter, device)
            assert adapter.device(new) == device
            assert_exact(np.array(self.values(new)), matrix)
            (back,) = carried([new], adapter, fmapper.backends.get_adapter("numpy"), HOST)
            assert_exact(back, matrix)

    def test_exchange_tells_the_truth(self, adapter: Adapter, dtype: str) -> None:
        """Host data is native NumPy; private memory is nobody else's, frozen memory unwritable."""
        for name, layout in LAYOUTS.items():
            with noting(name):
                want = layout(sample(dtype))
                array = self.make(want)
                exchange = adapter.export([array], HOST)
                (data,) = exchange.data
                assert exchange.device is None
                assert type(data) is np.ndarray
                assert data.dtype.isnative
                assert_exact(data, want)
                if exchange.frozen:
                    assert not data.flags.writeable
                    with pytest.raises(ValueError, match="WRITEABLE"):
                        data.flags.writeable = True
                elif 0 in exchange.private and data.flags.writeable:
                    wipe(data)
                    assert_exact(self.values(array), want)

    # --- who shares memory -----------------------------------------------------------------------

    def moved(self, mover: Mover, source: Any, copy: bool | None) -> Any:
        """What a NumPy array becomes; it is there already if the backend is NumPy."""
        return mover(source, copy=True if mover.backend == "numpy" else copy)

    @pytest.mark.parametrize("copy", [None, True])
    def test_writing_to_the_source_does_not_show(
        self, adapter: Adapter, cpu: Device, mover: Mover, dtype: str, copy: bool | None
    ) -> None:
        source = sample(dtype)[:24].reshape(4, 6).copy()
        want = source.copy()
        new = self.moved(mover, source, copy)
        wipe(source)
        assert_exact(self.values(new), want)

    @pytest.mark.parametrize("copy", [None, True])
    def test_writing_to_the_result_does_not_show(
        self, adapter: Adapter, cpu: Device, mover: Mover, dtype: str, copy: bool | None
    ) -> None:
        if self.immutable:
            pytest.skip("nobody can write to the result")
        source = sample(dtype)[:24].reshape(4, 6).copy()
        want = source.copy()
        new = self.moved(mover, source, copy)
        self.overwrite(new)
        assert_exact(source, want)
        array = self.make(want)
        (other,) = adapter.to_device([array], cpu, copy=True)
        self.overwrite(other)
        assert_exact(self.values(array), want)

    @pytest.mark.parametrize("copy", [None, True])
    def test_numpy_does_not_write_through(
        self, adapter: Adapter, dtype: str, copy: bool | None
    ) -> None:
        array = self.make(sample(dtype)[:24].reshape(4, 6))
        want = np.array(self.values(array))
        to_numpy = fmapper.to_numpy(copy=True if adapter.name == "numpy" else copy)
        new = to_numpy(array)
        if copy:
            assert new.flags.writeable, "a copy that was asked for is one's own"
        if new.flags.writeable:
            wipe(new)
        assert_exact(self.values(array), want)
        if not self.immutable:
            new = to_numpy(array)
            self.overwrite(array)
            assert_exact(new, want)

    @pytest.mark.parametrize("copy", [None, True])
    def test_a_read_only_view_of_writable_memory_is_not_shared(
        self, mover: Mover, matrix: Any, copy: bool | None
    ) -> None:
        view = matrix.view()
        view.flags.writeable = False
        want = matrix.copy()
        new = self.moved(mover, view, copy)
        wipe(matrix)
        assert_exact(self.values(new), want)

    @pytest.mark.parametrize("copy", [None, True])
    @pytest.mark.parametrize("offset", [0, 4, 16, 32])
    def test_large_arrays_are_read_before_the_mover_returns(
        self, mover: Mover, copy: bool | None, offset: int
    ) -> None:
        """JAX copies memory of a megabyte and more behind one's back if it is not aligned."""
        dtype = host_dtype(self.dtypes[0])
        for _ in range(4):
            raw = np.empty((1 << 22) + 128, np.uint8)
            start = -raw.ctypes.data % 64 + offset
            source = raw[start : start + (1 << 22)].view(dtype)
            source[:] = np.ones((), dtype)
            new = self.moved(mover, source, copy)
            wipe(source)
            assert (self.values(new) == np.ones((), dtype)).all()

    def test_copy_false_shares_or_refuses(self, adapter: Adapter, cpu: Device, dtype: str) -> None:
        for name, layout in LAYOUTS.items():
            with noting(name):
                source = layout(sample(dtype))
                if not source.dtype.isnative:
                    continue
                try:
                    (new,) = adapter.take(Exchange([source]), cpu, share=True)
                except BufferError:
                    continue
                assert_exact(self.values(new), source)
                if source.size:
                    assert np.shares_memory(self.values(new), source), (
                        "copied in spite of copy=False"
                    )
                if not source.flags.writeable and not self.immutable:
                    with pytest.raises((TypeError, ValueError)):
                        self.overwrite(new)

    def test_copy_false_shares_what_can_be_shared(
        self, adapter: Adapter, cpu: Device, mover: Mover, dtype: str
    ) -> None:
        raw = np.empty(4096, np.uint8)
        start = -raw.ctypes.data % 64
        flat = sample(dtype)
        source = raw[start : start + flat.nbytes].view(flat.dtype)
        source[:] = flat
        if not self.shares_host_memory:
            with pytest.raises(fmapper.CopyNeededError, match=r"model\.w"):
                mover({"w": source}, copy=False)
            return
        (new,) = adapter.take(Exchange([source]), cpu, share=True)
        assert np.shares_memory(self.values(new), source)
        assert self.values(new).ctypes.data == source.ctypes.data
        moved = mover({"w": source}, copy=False)["w"]
        assert self.values(moved).ctypes.data == source.ctypes.data
        assert_exact(self.values(moved), flat)

    # --- dtypes ----------------------------------------------------------------------------------

    def test_storable(self, adapter: Adapter, cpu: Device, dtype: str) -> None:
        host_dtype(dtype)  # skips where ml_dtypes is needed and not there
        assert adapter.storable(dtype) == dtype

    def test_storable_is_honest(self, adapter: Adapter, cpu: Device) -> None:
        """What `storable` says is held as it is, `take` holds, or it raises TypeError."""
        for dtype in (*NUMPY_DTYPES, "float8_e4m3fn", "bfloat16"):
            if dtype in self.dtypes or adapter.storable(dtype) != dtype:
                continue
            want = sample(dtype)
            try:
                (new,) = carried([want], fmapper.backends.get_adapter("numpy"), adapter, cpu)
            except TypeError:
                continue
            assert adapter.dtype(new) == dtype
            assert_exact(self.values(new), want)
        assert adapter.storable("no_such_dtype") is None

    CASTS: ClassVar[Sequence[tuple[str, str, list[Any], bool]]] = (
        ("float32", "float16", [1.5, -0.0, 1 / 3, 65504.0], True),
        ("float32", "float16", [1.0, 1e6], False),
        ("float32", "float16", [np.inf, -np.inf, np.nan, 1.0], True),
        ("float32", "bfloat16", [1 / 3, -1e38], True),
        ("float32", "bfloat16", [np.finfo(np.float32).max], False),
        ("float32", "float8_e5m2", [1.0, -3.0], True),
        ("float32", "float8_e5m2", [1.0, 1e6], False),
        ("float32", "float8_e4m3fn", [1.0, 448.0], True),
        ("float32", "float8_e4m3fn", [1.0, 1000.0], False),
        ("float64", "float32", [1 / 3, 1e-300], True),
        ("float64", "float32", [1e300], False),
        ("float32", "float64", [1 / 3, 3e38], True),
        ("complex128", "complex64", [1 / 3 + 1j], True),
        ("complex128", "complex64", [complex(0.0, 1e300)], False),
        ("complex128", "complex64", [complex(np.inf, 1e300)], False),
        ("int64", "int32", [2**31 - 1, -(2**31)], True),
        ("int64", "int32", [2**40], False),
        ("int64", "int32", [2**31], False),
        ("int32", "int16", [70_000], False),
        ("uint64", "uint32", [2**32 - 1], True),
        ("uint64", "uint32", [2**32], False),
        ("uint32", "uint16", [2**16], False),
        ("int32", "float32", [2**24, -(2**31), 0], True),
        ("int32", "float32", [2**24 + 1], False),
        ("int32", "float32", [2**31 - 1], False),
        ("int64", "float64", [2**53, -(2**63)], True),
        ("int64", "float64", [2**63 - 1], False),
        ("uint8", "bfloat16", [255], True),
        ("int16", "bfloat16", [257], False),
        ("int32", "float16", [70_000], False),
        ("uint8", "float8_e4m3fn", [16, 0], True),
        ("uint8", "float8_e4m3fn", [17], False),
        ("int64", "complex64", [2**24 + 1], False),
    )

    @pytest.mark.parametrize(("old", "new", "numbers", "survives"), CASTS)
    def test_cast(
        self, adapter: Adapter, old: str, new: str, numbers: list[Any], survives: bool
    ) -> None:
        if not {old, new} <= set(self.dtypes):
            pytest.skip(f"{adapter.name} does not hold both {old} and {new}")
        source, target = np.array(numbers, host_dtype(old)), host_dtype(new)
        array = self.make(source)
        got, survived = adapter.cast(array, new)
        assert survived is survives
        assert adapter.dtype(got) == new
        assert_exact(self.values(array), source)
        if survives:
            with np.errstate(all="ignore"):
                want = source.astype(target)
            np.testing.assert_array_equal(np.array(self.values(got)), want)

    @pytest.mark.parametrize(("old", "new", "numbers", "survives"), CASTS)
    def test_many_casts_are_as_each_alone(
        self, adapter: Adapter, old: str, new: str, numbers: list[Any], survives: bool
    ) -> None:
        if not {old, new} <= set(self.dtypes):
            pytest.skip(f"{adapter.name} does not hold both {old} and {new}")
        arrays = [self.make(np.array(x, host_dtype(old))) for x in ([1], numbers, [0, 1])]
        found = list(adapter.casts(arrays, new))
        alone = [adapter.cast(array, new) for array in arrays]
        assert survives is all(survived for _, survived in found)
        assert [survived for _, survived in found] == [survived for _, survived in alone]
        for (one, _), (other, _) in zip(found, alone, strict=True):
            assert_exact(self.values(one), self.values(other))

    def test_the_mover_refuses_what_a_cast_would_lose(self, mover: Mover) -> None:
        if not {"float32", "float16"} <= set(self.dtypes):
            pytest.skip(f"{mover.backend} does not hold float32 and float16")
        with pytest.raises(fmapper.LossyCastError, match=r"model\.a\.b"):
            mover({"a": {"b": self.make(np.array([1e6], np.float32))}}, dtype="float16")

    # --- ties by view ----------------------------------------------------------------------------

    def test_no_views(self, adapter: Adapter, matrix: Any) -> None:
        if self.has_views:
            pytest.skip("the backend has views")
        array = self.make(matrix)
        assert adapter.memory(array) is None
        with pytest.raises(TypeError):
            adapter.view(array, (24,), (1,), 0, array)

    def test_memory(self, adapter: Adapter, dtype: str) -> None:
        if not self.has_views:
            pytest.skip("the backend has no views")
        host = sample(dtype)[:24].reshape(4, 6)
        array = self.make(host)
        memory = adapter.memory(array)
        assert memory is not None
        assert (memory.strides, memory.itemsize) == ((6, 1), host.itemsize)
        assert memory.start == self.values(array).ctypes.data

    def test_view(self, adapter: Adapter, dtype: str) -> None:
        if not self.has_views:
            pytest.skip("the backend has no views")
        host = sample(dtype)[:24].reshape(4, 6)
        cases = (
            ((6, 4), (1, 6), 0, lambda a: a.T),
            ((2, 6), (6, 1), 6, lambda a: a[1:3]),
            ((24,), (1,), 0, lambda a: a.reshape(-1)),
            ((2, 3), (12, 2), 1, lambda a: a[::2, 1::2]),
            ((), (), 23, lambda a: a[3, 5]),
        )
        for shape, strides, offset, same in cases:
            base = self.make(host)
            view = adapter.view(base, shape, strides, offset, base)
            assert adapter.shape(view) == shape
            assert_exact(np.array(self.values(view)), np.array(same(host)))
            memory, whole = adapter.memory(view), adapter.memory(base)
            assert memory is not None
            assert whole is not None
            assert memory.start == whole.start + offset * host.itemsize
            self.overwrite(base)
            assert not any(np.array(self.values(view)).tobytes()), "not a view of the base"

    def test_a_tie_by_view_survives_a_move(
        self, adapter: Adapter, mover: Mover, dtype: str
    ) -> None:
        if not self.has_views:
            pytest.skip("the backend has no views")
        host = sample(dtype)[:24].reshape(4, 6).copy()
        for tree in ({"w": host, "t": host.T}, {"t": host.T, "w": host}):
            new = mover(tree, copy=True)
            assert_exact(np.array(self.values(new["t"])), np.array(host.T))
            self.overwrite(new["w"])
            assert not any(np.array(self.values(new["t"])).tobytes()), "not a view of the base"

    # --- devices and trees -----------------------------------------------------------------------

    def test_to_device(self, adapter: Adapter, cpu: Device, dtype: str) -> None:
        wanted = [sample(dtype)[:24].reshape(4, 6), sample(dtype)[:1].reshape(())]
        arrays = [self.make(want) for want in wanted]
        for device in adapter.devices():
            new = list(adapter.to_device(arrays, device, copy=True))
            assert [adapter.device(array) for array in new] == [device, device]
            back = new if device == cpu else list(adapter.to_device(new, cpu, copy=None))
            for got, want in zip(back, wanted, strict=True):
                assert adapter.dtype(got) == dtype
                assert_exact(np.array(self.values(got)), want)

    def test_to_device_copies(self, adapter: Adapter, cpu: Device, matrix: Any) -> None:
        array = self.make(matrix)
        (new,) = adapter.to_device([array], cpu, copy=True)
        assert new is not array
        assert not np.shares_memory(self.values(new), self.values(array))
        if not self.immutable:
            self.overwrite(new)
            assert_exact(self.values(array), matrix)

    def test_to_device_copies_between_devices(self, adapter: Adapter, matrix: Any) -> None:
        if self.immutable:
            pytest.skip("nobody can tell")
        for first, second in itertools.permutations(adapter.devices(), 2):
            (source,) = carried([matrix], fmapper.backends.get_adapter("numpy"), adapter, first)
            (new,) = adapter.to_device([source], second, copy=None)
            self.overwrite(new)
            assert adapter.device(source) == first
            assert_exact(self.values(source), matrix)

    def test_a_tree(self, adapter: Adapter, cpu: Device, mover: Mover, matrix: Any) -> None:
        """A model goes in and out: ties kept, the input untouched, its device known."""
        tree = {"w": matrix, "layers": [matrix, {"b": matrix[0].copy()}], "n": 3}
        want = matrix.copy()
        new = mover(tree)
        if adapter.name != "numpy":
            assert new["w"] is not matrix
        assert new["w"] is new["layers"][0]
        assert new["n"] == 3
        assert fmapper.get_device(new) == cpu
        assert tree["w"] is matrix
        assert_exact(matrix, want)
        back = fmapper.to_numpy(new)
        assert back["w"] is back["layers"][0]
        assert_exact(np.array(back["w"]), want)

    def test_already_there(self, adapter: Adapter, cpu: Device, mover: Mover, matrix: Any) -> None:
        array = self.make(matrix)
        for move in (mover, mover(device=cpu), fmapper.to_cpu, fmapper.to_device(cpu)):
            assert move(array) is array
            assert move({"a": [array]})["a"][0] is array
        assert mover(array, copy=False) is array
        assert mover(array, copy=True) is not array
