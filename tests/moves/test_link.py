"""Tensors in batches between host and GPU: values, layouts, bounded staging, order, failure.

Without a GPU, copies between two places of host memory stand in for the link: they show values and
layouts, not order. What needs streams is marked `gpu`.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import ClassVar, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmapper import BatchError
from fmapper.backends import threads_for_memory

torch = pytest.importorskip("torch")

_link = pytest.importorskip("fmapper_adapters.torch.arrays.pinned")
_streaming = pytest.importorskip("fmapper_adapters.torch.arrays.streaming")

CPU = torch.device("cpu")
NAMES = """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"""
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]


class HostPieces(_link._Pieces):
    """Host memory at both ends; what follows the arrival of a piece is done as late as can be."""

    started: ClassVar[list[int]] = []  # bytes of every copy

    def __init__(self, device, are_bare):
        self.device, self.are_bare, self.must_wait, self.then = device, are_bare, False, []

    def allocate(self, like):
        self._wait(_link.UNDER_WAY - 1)
        return torch.empty(like.shape, dtype=like.dtype)

    def start(self, to, source, then=int):
        assert (to.dtype, to.shape) == (source.dtype, source.shape)
        to.copy_(source)
        self.started.append(to.nbytes)
        self.then.append(then)

    def _wait(self, left):
        while len(self.then) > left:
            self.then.pop(0)()


@pytest.fixture
def small_pieces(monkeypatch):
    """The same in small, so that few kilobytes make several pieces."""
    monkeypatch.setattr(_link, "PIECE", 1 << 12)
    monkeypatch.setattr(_link, "SMALL", 1 << 9)


@pytest.fixture
def on_host(monkeypatch, small_pieces) -> Iterator[list[int]]:
    """The batched path between two places of host memory, in small pieces: the bytes of each."""
    monkeypatch.setattr(_link, "_Pieces", HostPieces)
    monkeypatch.setattr(_link, "_is_plain", lambda tensors, remote: False)
    monkeypatch.setattr(HostPieces, "started", [])
    return HostPieces.started


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    return (
        plain.clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
        if tensor.numel()
        else b""
    )


def values(dtype, *shape):
    """Random bit patterns: NaNs with payloads and subnormal numbers among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).view(shape)


LAYOUTS = {
    "contiguous": lambda make, n: make(n, 3),
    "vector": lambda make, n: make(3 * n),
    "transposed": lambda make, n: make(3, n).t(),
    "channels_last": lambda make, n: make(2, 3, n, 2).to(memory_format=torch.channels_last),
    "permuted": lambda make, n: make(2, n, 3).permute(2, 0, 1),
    "odd strides of size one": lambda make, n: make(n, 1).as_strided((1, n), (7 * n + 1, 1)),
    "row slice": lambda make, n: make(n + 2, 3)[2:],
    "column slice": lambda make, n: make(n, 5)[:, 1:3],
    "steps": lambda make, n: make(2 * n, 3)[::2],
    "steps, transposed": lambda make, n: make(3, 2 * n).t()[::2],
    "expanded": lambda make, n: make(n, 1).expand(n, 4),
    "expanded rows": lambda make, n: make(1, n).expand(5, n),
    "0-d": lambda make, n: make(()) if n else make(1)[0],
    "empty": lambda make, n: make(0, n).t(),
    "empty slice": lambda make, n: make(0, 2 * n)[:, ::2],
}


def a_tensor(layout, dtype, n):
    return LAYOUTS[layout](lambda *shape: values(dtype, *(shape if shape != ((),) else ())), n)


def up(tensors):
    return _link.upload(tensors, CPU)


BOTH = pytest.mark.parametrize("go", [up, _link.download])


def agree(results, sources, expected):
    assert len(results) == len(sources)
    for result, source, wanted in zip(results, sources, expected, strict=True):
        reference = source.to("cpu", copy=True)
        assert (result.dtype, result.shape) == (source.dtype, source.shape)
        assert result.stride() == reference.stride()
        assert bits(result) == wanted
        assert not result._is_view()
        assert result.storage_offset() == 0
        assert result.untyped_storage().nbytes() == result.nbytes
    alive = [r.untyped_storage().data_ptr() for r in results if r.numel()]
    assert len(set(alive)) == len(alive)


def cross(go, tensors):
    expected = [bits(tensor) for tensor in tensors]
    results = go(tensors)
    agree(results, tensors, expected)
    return results


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_in_every_layout_small_and_large(go, layout, on_host):
    sizes = (1, 7, 7, 90, 1000, 5000)
    cross(go, [a_tensor(layout, dtype, n) for dtype in DTYPES for n in sizes])


@BOTH
def test_empty_tensors_are_not_sent(go, on_host, monkeypatch):
    """CUDA's `split_with_sizes_copy` ends the process where all sizes are zero."""
    split = torch.split_with_sizes_copy

    def checked(tensor, sizes, **rest):
        assert all(sizes)
        return split(tensor, sizes, **rest)

    monkeypatch.setattr(torch, "split_with_sizes_copy", checked)
    empty = [torch.empty(0, n, dtype=dtype) for n in range(40) for dtype in DTYPES]
    cross(go, empty)
    cross(go, [*empty, torch.ones(3), torch.empty(0)])


@BOTH
def test_pieces_of_the_real_size(go, on_host, monkeypatch):
    monkeypatch.setattr(_link, "PIECE", 8 << 20)
    monkeypatch.setattr(_link, "SMALL", 512 << 10)
    sizes = [1, 255, 256, 257, 16_000, 524_288, 524_289, 9 << 20, 8 << 20]
    cross(go, [values(torch.uint8, size) for size in sizes])
    assert max(on_host) == 8 << 20


@st.composite
def batches(draw):
    kinds = st.tuples(
        st.sampled_from(sorted(LAYOUTS)), st.sampled_from(DTYPES), st.integers(1, 700)
    )
    some = draw(st.lists(kinds, max_size=8))
    return draw(st.permutations([kind for kind in some for _ in range(draw(st.integers(1, 40)))]))


@BOTH
@settings(max_examples=25)
@given(batch=batches())
def test_any_mixture(go, batch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_link, "PIECE", 1 << 12)
        patch.setattr(_link, "SMALL", 1 << 9)
        patch.setattr(_link, "_Pieces", HostPieces)
        patch.setattr(_link, "_is_plain", lambda tensors, remote: False)
        patch.setattr(HostPieces, "started", [])
        cross(go, [a_tensor(*kind) for kind in batch])
        assert max(HostPieces.started, default=0) <= _link.PIECE


@BOTH
@pytest.mark.parametrize("n", [3, 5000])
def test_lazy_conjugates_and_negatives(go, n, on_host):
    z = torch.randn(n, dtype=torch.complex64)
    tensors = [z.conj(), z.conj().imag, z.clone().view(1, n).mH, z.clone()]
    expected = [tensor.clone().resolve_conj().resolve_neg().tolist() for tensor in tensors]
    results = go(tensors)
    assert [result.tolist() for result in results] == expected
    assert not any(result.is_conj() or result.is_neg() for result in results)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@BOTH
def test_complex_halves(go, on_host):
    made = [values(torch.int32, n).view(torch.complex32) for n in (1, 40, 40, 5000)]
    expected = [tensor.view(torch.int32).tolist() for tensor in made]
    assert [result.view(torch.int32).tolist() for result in go(made)] == expected


class HostWorkers(_streaming.Workers):
    """Threads between two places of host memory, where a copy is done when it returns."""

    def __init__(self, device):
        self.device, self._is_inference, self._jobs = device, False, deque()
        self._pool = ThreadPoolExecutor(2)

    def wait(self): ...


@pytest.fixture
def host_workers(monkeypatch):
    """Threads where there is no device, and pieces of 4 KiB."""
    monkeypatch.setattr(_streaming, "Workers", HostWorkers)
    monkeypatch.setattr(_streaming, "PIECE", 1 << 12)
    pageable = partial(torch.empty, dtype=torch.uint8)
    monkeypatch.setattr(_streaming, "_pinned_bytes", pageable)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_downloads_by_several_threads(layout, on_host, host_workers, monkeypatch):
    monkeypatch.setattr(_link, "_workers", lambda *_: HostWorkers(CPU))
    fetched = []

    def fetch(*given):
        fetched.append(given)
        _streaming.fetch(*given)

    monkeypatch.setattr(_link, "fetch", fetch)
    cross(_link.download, [a_tensor(layout, dtype, n) for dtype in DTYPES for n in (7, 5000)])
    if layout in ("contiguous", "vector", "transposed", "channels_last", "permuted", "row slice"):
        assert len(fetched) > len(DTYPES)


class Dtype(NamedTuple):
    name: str


class Stored:
    """An array as a file has it."""

    def __init__(self, tensor, at=0):
        self.shape = tuple(tensor.shape)
        self.dtype = Dtype(str(tensor.dtype).removeprefix("torch."))
        self.nbytes, self.bytes, self.extent = tensor.nbytes, bits(tensor), ("file", at)

    def read_bytes(self, out, start):
        if self.bytes is None:
            raise OSError("the disk is gone")
        assert len(out) <= max(_streaming.PIECE, self.nbytes - start)
        out[:] = self.bytes[start : start + len(out)]


def test_files_are_read_into_the_memory_of_a_device(host_workers):
    tensors = [values(dtype, *shape) for dtype in DTYPES
               for shape in ((), (3, 5), (0, 2), (700,), (40, 400))]  # fmt: skip
    order = torch.randperm(len(tensors)).tolist()
    results = _streaming.fill([Stored(x, at) for x, at in zip(tensors, order, strict=True)], CPU)
    agree(results, tensors, list(map(bits, tensors)))
    assert _streaming.fill([], CPU) == []


@pytest.mark.parametrize("n", [3, 4000])
def test_a_file_that_fails_names_the_array_and_leaves_nothing(n, host_workers, monkeypatch):
    stored = [Stored(values(torch.float32, size), at) for at, size in enumerate((5, n, 9000))]
    stored[1].bytes = None
    alive, empty = [], torch.empty

    def watched(*given, **options):
        result = empty(*given, **options)
        alive.append(weakref.ref(result))
        return result

    monkeypatch.setattr(torch, "empty", watched)
    with pytest.raises(BatchError) as caught:
        _streaming.fill(stored, CPU)
    assert caught.value.index == 1
    assert isinstance(caught.value.__cause__, OSError)
    assert [ref() for ref in alive] == [None] * len(alive)  # while the error is held


@BOTH
def test_no_tensors(go, on_host):
    assert go([]) == []


def test_tensors_that_share_memory_get_their_own(on_host):
    base = values(torch.float32, 10, 10)
    cross(up, [base, base, base.t(), base[2:4], base.view(100)])


@BOTH
def test_small_tensors_cross_together(go, on_host):
    cross(go, [values(torch.float32, 16) for _ in range(500)])
    assert len(on_host) == -(-500 * 64 // _link.PIECE)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    limit=st.integers(1, 200),
    order=st.permutations(range(4)),
)
def test_blocks_cover_every_element_once(shape, limit, order):
    source = torch.arange(torch.Size(shape).numel()).view(shape)
    source = source.permute([dim for dim in order if dim < len(shape)])
    result = torch.empty_like(source)
    found = list(_link._rows(source, result, limit))
    for block, place in found:
        assert block.numel() <= limit
        place.copy_(block)
    assert torch.equal(source, result)
    assert sum(block.numel() for block, _ in found) == source.numel()


# --- failure -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("nth", range(8))
def test_out_of_memory_names_the_tensor_and_leaves_nothing(go, nth, on_host, monkeypatch):
    tensors = [values(torch.uint8, size) for size in (100, 3000, 5, 40_000, 17, 1, 2500, 9)]
    real, made, alive, failed = torch.empty_like, count(), [], []

    def fail(tensor, *args, **kwargs):
        if "device" not in kwargs or next(made) == nth:
            failed.append(tensor.shape)
            raise torch.OutOfMemoryError("out of memory: tried to allocate 1 tensor")
        result = real(tensor, *args, **kwargs)
        alive.append(weakref.ref(result))
        return result

    monkeypatch.setattr(torch, "empty_like", fail)
    with pytest.raises(BatchError) as caught:
        go(tensors)
    assert tensors[caught.value.index].shape == failed[0]
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert [ref() for ref in alive] == [None] * len(alive)  # while the error is held


def test_one_by_one_also_names_the_tensor():
    tensors = [torch.ones(1), torch.ones(1, device="meta"), torch.ones(1)]
    with pytest.raises(BatchError) as caught:
        _link.upload(tensors, CPU)
    assert caught.value.index == 1
    with pytest.raises(BatchError) as caught:
        _link.download(tensors)
    assert caught.value.index == 1


def test_devices_without_a_link_get_plain_copies():
    source = torch.ones(4)
    [result] = _link.upload([source], CPU)
    [down] = _link.download([source])
    assert torch.equal(result, source)
    assert len({result.data_ptr(), source.data_ptr(), down.data_ptr()}) == 3


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    return torch.device("cuda", torch.cuda.current_device())


def busy(device, cycles=200_000_000):
    """Keeps the current stream busy for about a tenth of a second."""
    torch.cuda._sleep(cycles)


@pytest.mark.gpu("torch")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuda_values_and_strides_are_those_of_to(layout, cuda, small_pieces):
    sizes = (1, 7, 7, 90, 1000, 5000)
    tensors = [a_tensor(layout, dtype, n) for dtype in DTYPES for n in sizes]
    up = _link.upload(tensors, cuda)
    down = _link.download(up)
    for source, there_, back_ in zip(tensors, up, down, strict=True):
        reference = source.to(cuda)
        assert there_.device == cuda
        assert (there_.dtype, there_.shape) == (source.dtype, source.shape)
        assert there_.stride() == reference.stride()
        assert bits(there_) == bits(source)
        assert there_.untyped_storage().nbytes() == there_.nbytes
        assert not there_._is_view()
        assert (back_.dtype, back_.stride()) == (source.dtype, reference.cpu().stride())
        assert bits(back_) == bits(source)
        assert not back_.is_pinned()


@pytest.mark.gpu("torch")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuda_downloads_every_layout_of_the_device(layout, cuda, small_pieces):
    shapes = [(dtype, n) for dtype in DTYPES for n in (1, 7, 7, 1000, 5000)]
    sources = [
        LAYOUTS[layout](
            lambda *shape, d=dtype: values(d, *(shape if shape != ((),) else ())).to(cuda), n
        )
        for dtype, n in shapes
    ]
    for source, result in zip(sources, _link.download(sources), strict=True):
        assert result.stride() == source.to("cpu").stride()
        assert bits(result) == bits(source)


@pytest.mark.gpu("torch")
def test_cuda_real_pieces(cuda):
    sizes = [1, 255, 16_000, 131_072, 131_073, 9 << 20, 100 << 20]
    tensors = [values(torch.uint8, size) for size in sizes] * 2
    for tensor, result in zip(tensors, _link.upload(tensors, cuda), strict=True):
        assert torch.equal(result.cpu(), tensor)
    down = _link.download([tensor.to(cuda) for tensor in tensors])
    assert all(map(torch.equal, down, tensors))


@pytest.mark.gpu("torch")
def test_cuda_results_may_be_used_at_once_and_sources_changed(cuda, small_pieces):
    stream = torch.cuda.Stream(cuda)
    for _ in range(20):
        tensors = [torch.full((n,), 1.0) for n in (5, 5, 300, 100_000, 3)]
        with torch.cuda.stream(stream):
            garbage = [torch.full((n,), 7.0, device=cuda) for n in (5, 5, 300, 100_000, 3)]
            busy(cuda, 20_000_000)
            for tensor in garbage:
                tensor.mul_(2)  # still queued when its memory is given out again
            del garbage, tensor
            results = _link.upload(tensors, cuda)
            for tensor in tensors:
                tensor.fill_(-1)
            sums = [result.sum() for result in results]
        stream.synchronize()
        assert [total.item() for total in sums] == [tensor.numel() for tensor in tensors]


@pytest.mark.gpu("torch")
def test_cuda_pinned_sources_may_be_changed_at_once(cuda):
    source = torch.ones(8 << 20, pin_memory=True)
    busy(cuda)
    [result] = _link.upload([source], cuda)
    source.fill_(5)
    assert result.min().item() == result.max().item() == 1


@pytest.mark.gpu("torch")
def test_cuda_downloads_what_is_queued_before(cuda, small_pieces):
    stream = torch.cuda.Stream(cuda)
    with torch.cuda.stream(stream):
        sources = [torch.zeros(n, device=cuda) for n in (5, 5, 300, 100_000)]
        busy(cuda)
        for tensor in sources:
            tensor.add_(3)
        results = _link.download(sources)
        for tensor in sources:
            tensor.zero_()
    assert all((result == 3).all() for result in results)


@pytest.mark.gpu("torch")
def test_cuda_threads(cuda, small_pieces):
    errors = []

    def work(seed):
        try:
            with torch.cuda.stream(torch.cuda.Stream(cuda)):
                made = [torch.full((n,), n + seed) for n in range(1, 9000, 300)]
                for _ in range(10):
                    down = _link.download(_link.upload(made, cuda))
                    assert all(map(torch.equal, made, down))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors


@pytest.mark.gpu("torch")
def test_cuda_a_failure_leaves_no_memory_allocated(cuda):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    total = torch.cuda.get_device_properties(cuda).total_memory
    huge = torch.zeros(1, 1, dtype=torch.uint8).expand(2, total)
    tensors = [torch.ones(10), torch.ones(10), torch.ones(9 << 20), huge, torch.ones(3)]
    with pytest.raises(BatchError) as caught:
        _link.upload(tensors, cuda)
    assert caught.value.index == 3
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert torch.cuda.memory_allocated(cuda) == before  # while the error is held
    assert torch.equal(_link.upload(tensors[:3], cuda)[2].cpu(), tensors[2])


@pytest.mark.gpu("torch")
@pytest.mark.parametrize("inference", [False, True])
def test_cuda_downloads_by_several_threads(cuda, small_pieces, monkeypatch, inference):
    monkeypatch.setattr(_link, "_MUCH", 1)
    with torch.inference_mode(inference), torch.cuda.stream(torch.cuda.Stream(cuda)):
        for _ in range(5):
            sources = [torch.zeros(n, device=cuda) for n in (5, 5, 300, 100_000, 20_000)]
            busy(cuda, 20_000_000)
            for tensor in sources:
                tensor.add_(3)
            results = _link.download(sources)
            for tensor in sources:
                tensor.zero_()
            assert all((result == 3).all() for result in results)


@pytest.mark.gpu("torch")
def test_cuda_reads_files_for_the_current_stream(cuda, monkeypatch):
    monkeypatch.setattr(_streaming, "PIECE", 1 << 12)
    tensors = [values(torch.uint8, n) for n in (1, 7, 300, 3000, 100_000, 30)]
    stored = [Stored(x, at) for at, x in enumerate(tensors)]
    with torch.cuda.stream(torch.cuda.Stream(cuda)):
        for _ in range(5):
            garbage = [torch.full_like(x, 7, device=cuda) for x in tensors]
            busy(cuda, 20_000_000)
            for tensor in garbage:
                tensor.mul_(2)  # still queued when its memory is given out again
            del garbage, tensor
            results = _streaming.fill(stored, cuda)
            sums = [result.sum() for result in results]
            assert all(torch.equal(x.cpu(), y) for x, y in zip(results, tensors, strict=True))
            assert [int(x) for x in sums] == [int(x.sum()) for x in tensors]


@pytest.mark.gpu("torch")
def test_cuda_pinned_memory_is_bounded(cuda):
    source = torch.ones(96 << 20)
    if not hasattr(torch._C, "_cuda_resetPeakHostMemoryStats"):
        pytest.skip("this torch does not count pinned memory")
    torch.cuda.reset_peak_host_memory_stats()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    results = _link.upload([source] * 3, cuda)
    down = _link.download(results)
    peak = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    assert peak > 0  # `before` has what earlier copies have not given back yet
    assert peak - before <= 2 * max(_link.UNDER_WAY + 1, threads_for_memory()) * _link.PIECE
    assert all(map(torch.equal, down, [source] * 3))


@pytest.mark.gpu("torch")
def test_cuda_peak_memory_is_the_result_and_a_piece(cuda):
    tensors = [torch.ones(256) for _ in range(2000)] + [torch.ones(32 << 20)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    results = _link.upload(tensors, cuda)
    peak = torch.cuda.max_memory_allocated(cuda) - before
    assert peak <= sum(tensor.nbytes for tensor in tensors) + _link.PIECE
    del results


@pytest.mark.gpu("torch")
def test_cuda_another_device_than_the_current(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1 - cuda.index)
    tensors = [torch.full((n,), float(n)) for n in (5, 5, 300, 9 << 20)]
    results = _link.upload(tensors, other)
    assert {result.device for result in results} == {other}
    assert torch.cuda.current_device() == cuda.index
    mixed = [results[0], tensors[3].to(cuda), results[3], tensors[1]]
    down = _link.download(mixed)
    assert all(map(torch.equal, down, [tensors[0], tensors[3], tensors[3], tensors[1]]))
