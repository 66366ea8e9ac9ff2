"""Tensors in batches between host and GPU: values, layouts, bounded staging, order, failure.

Without a GPU, a link whose copies are done as late as it allows stands in for it: whoever reuses a
buffer or changes a source too early corrupts a result. What is CUDA's own is marked `gpu`.
"""

import gc
import itertools
import threading
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

_link = pytest.importorskip("fmapper_adapters.torch._link")

CPU = torch.device("cpu")
NAMES = """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"""
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]


class Point:
    """A mark in the queue of a `LateLink`."""

    def __init__(self, link, at):
        self.link, self.at = link, at

    def synchronize(self):
        self.link.do(self.at)

    def query(self):
        return self.link.done >= self.at


class LateLink(_link.Link):
    """Host memory at both ends; a copy is done when somebody waits for it, and no sooner."""

    def __init__(self, limit=_link.BUFFERS):
        self.device = CPU
        self.made = []
        self.pool = _link.Pool(self.make, limit)
        self.queue = []
        self.done = 0
        self.is_open = False
        self.copies = 0
        self.pinned = ()
        self.lock = threading.Lock()  # whoever takes a buffer over waits for this link

    def make(self, nbytes):
        self.made.append(torch.full((nbytes,), 0xA5, dtype=torch.uint8))
        return self.made[-1]

    def begin(self):
        self.is_open = True

    def end(self):
        self.is_open = False

    def copy(self, pairs):
        assert self.is_open, "copies before the link waits for the current stream"
        for to, source in pairs:
            assert self.is_pinned(source) or (to.is_contiguous() and source.is_contiguous())
            assert (to.dtype, to.shape) == (source.dtype, source.shape)
            self.queue.append(lambda to=to, source=source: to.copy_(source))
            self.copies += 1

    def copy_all(self, to, source):
        assert self.is_open
        assert len({tensor.dtype for tensor in (*to, *source)}) == 1
        self.queue.append(lambda: torch._foreach_copy_(list(to), list(source)))

    def mark(self):
        return Point(self, len(self.queue))

    def is_pinned(self, tensor):
        return any(tensor is one for one in self.pinned)

    def do(self, upto=None):
        with self.lock:
            while self.done < (len(self.queue) if upto is None else upto):
                self.queue[self.done]()
                self.queue[self.done] = None
                self.done += 1


@pytest.fixture
def small_chunks(monkeypatch):
    """The same in small, so that few kilobytes fill several buffers."""
    shrink(monkeypatch)


def shrink(monkeypatch):
    for name, value in {
        "CHUNK": 1 << 14,
        "SMALL": 1 << 11,
        "PIECE": 1 << 12,
        "_STACKED": 1 << 10,
        "_SERIAL": 255,
        "_SLICE": 1 << 10,
    }.items():
        monkeypatch.setattr(_link, name, value)


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


def there(tensors, link):
    expected = [bits(tensor) for tensor in tensors]
    originals = [tensor.clone() for tensor in tensors]
    results = _link.upload(tensors, link.device, link=link)
    assert not link.is_open
    spoil(tensors)  # all was read when it returned
    link.do()  # as late as can be
    agree(results, originals_like(originals, tensors), expected)
    return results


def originals_like(originals, tensors):
    """The values from before in the layout of the sources, to compare strides with `to`."""
    return [t if t.numel() else o for t, o in zip(tensors, originals, strict=True)]


def back(tensors, link):
    expected = [bits(tensor) for tensor in tensors]
    results = _link.download(tensors, link=link)
    assert not link.is_open
    spoil(tensors)
    agree(results, tensors, expected)
    return results


def spoil(tensors):
    for tensor in tensors:
        tensor.untyped_storage().fill_(0x5A)


def run(go, tensors, link):
    return (
        _link.upload(tensors, CPU, link=link) if go is there else _link.download(tensors, link=link)
    )


BOTH = pytest.mark.parametrize("go", [there, back])


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_in_every_layout_small_and_large(go, layout, small_chunks):
    sizes = (1, 7, 7, 90, 1000, 5000)
    go([a_tensor(layout, dtype, n) for dtype in DTYPES for n in sizes], LateLink())


@BOTH
def test_chunks_of_the_real_size(go):
    sizes = [1, 255, 256, 257, 16_000, 20_000, 131_072, 131_073, 9 << 20, 1 << 20]
    go([values(torch.uint8, size) for size in sizes], LateLink())


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
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink(monkeypatch)
        link = LateLink(limit=3)
        go([a_tensor(*kind) for kind in batch], link)
        assert len(link.made) <= 3


@BOTH
@pytest.mark.parametrize("n", [3, 5000])
def test_lazy_conjugates_and_negatives(go, n, small_chunks):
    z = torch.randn(n, dtype=torch.complex64)
    tensors = [z.conj(), z.conj().imag, z.clone().view(1, n).mH, z.clone()]
    expected = [tensor.clone().resolve_conj().resolve_neg().tolist() for tensor in tensors]
    link = LateLink()
    results = run(go, tensors, link)
    link.do()
    assert [result.tolist() for result in results] == expected
    assert not any(result.is_conj() or result.is_neg() for result in results)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@BOTH
def test_complex_halves(go, small_chunks):
    made = [values(torch.int32, n).view(torch.complex32) for n in (1, 40, 40, 5000)]
    expected = [tensor.view(torch.int32).tolist() for tensor in made]
    link = LateLink()
    results = run(go, made, link)
    link.do()
    assert [result.view(torch.int32).tolist() for result in results] == expected


@BOTH
def test_no_tensors(go):
    assert go([], LateLink()) == []


def test_tensors_that_share_memory_get_their_own(small_chunks):
    base = values(torch.float32, 10, 10)
    there([base, base, base.t(), base[2:4], base.view(100)], LateLink())


# --- staging -------------------------------------------------------------------------------------


@BOTH
def test_small_tensors_cross_together(go, small_chunks):
    link = LateLink()
    go([values(torch.float32, 16) for _ in range(500)], link)
    assert link.copies == -(-500 * _link.ALIGN // _link.CHUNK)


@BOTH
def test_staging_is_bounded_and_used_again(go, small_chunks):
    link = LateLink()
    go(
        [values(torch.uint8, 50 * _link.CHUNK), *(values(torch.int16, 9) for _ in range(2000))],
        link,
    )
    assert 2 <= len(link.made) <= _link.AHEAD
    assert all(memory.nbytes == _link.CHUNK for memory in link.made)
    made = list(link.made)
    go([values(torch.uint8, 50 * _link.CHUNK)], link)
    assert list(map(id, link.made)) == list(map(id, made))


@BOTH
def test_one_buffer_is_enough(go, small_chunks):
    link = LateLink(limit=1)
    go([values(torch.uint8, 5 * _link.CHUNK), *(values(torch.int16, 9) for _ in range(500))], link)
    assert len(link.made) == 1


def test_released_buffers_are_made_again(small_chunks):
    link = LateLink()
    _link.upload([values(torch.uint8, 5 * _link.CHUNK)], CPU, link=link)
    held = [weakref.ref(memory) for memory in link.made]
    link.made.clear()
    link.pool.release()
    assert link.done == len(link.queue)  # a buffer is not freed while copies read it
    assert link.pool.made == 0
    link.queue.clear()
    link.done = 0
    assert [ref() for ref in held] == [None] * len(held)
    there([values(torch.uint8, 100) for _ in range(9)], link)
    assert link.pool.made == 1


def test_threads_share_the_buffers(small_chunks):
    pool_of = LateLink(limit=2)
    errors, busy = [], threading.Barrier(4)

    def work(seed):
        try:
            link = LateLink()
            link.pool = pool_of.pool
            made = [
                torch.full((n,), seed * 50 + n % 50, dtype=torch.uint8) for n in range(1, 9000, 300)
            ]
            busy.wait()
            for _ in range(5):
                up = _link.upload(made, CPU, link=link)
                link.do()
                down = _link.download(up, link=link)
                assert all(map(torch.equal, made, down))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert len(pool_of.made) <= 2


def test_pinned_sources_go_directly_and_are_read_before_it_returns(small_chunks):
    link = LateLink()
    pinned = values(torch.float32, 60, 70).t()
    link.pinned = [pinned]
    expected = bits(pinned)
    other = values(torch.float32, 3000)
    [result, _] = _link.upload([pinned, other], CPU, link=link)
    spoil([pinned])
    link.do()
    assert bits(result) == expected
    assert result.stride() == pinned.stride()
    assert link.copies == 1 + -(-other.nbytes // _link.PIECE)


def test_dlpack_views_have_storages_of_their_own(small_chunks, monkeypatch):
    monkeypatch.setattr(_link, "SPLIT", "dlpack")
    link = LateLink()
    tensors = [values(dtype, n) for dtype in DTYPES for n in (1, 4, 4)]
    expected = [bits(tensor) for tensor in tensors]
    results = _link.upload(tensors, CPU, link=link)
    link.do()
    assert [bits(result) for result in results] == expected
    assert all(result.untyped_storage().nbytes() == result.nbytes for result in results)
    assert all(result.data_ptr() % 64 == 0 for result in results)


def test_buffers_made_in_inference_mode_serve_outside_of_it(monkeypatch):
    empty = torch.empty

    def without_pinning(*args, pin_memory, **kwargs):
        assert pin_memory
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", without_pinning)
    with torch.inference_mode():
        assert not _link._pin(64).is_inference()


# --- the shares of the threads -------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 9000), max_size=30), threads=st.integers(1, 9))
def test_the_threads_copy_every_byte_once(sizes, threads):
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink(monkeypatch)
        starts = [0, *itertools.accumulate(sizes)]
        moves = [(at, at + 7, size) for at, size in zip(starts, sizes, strict=False)]
        jobs = _link._shares(moves, threads)
    assert len(jobs) <= threads
    copied = [i for job in jobs for to, _, nbytes in job for i in range(to, to + nbytes)]
    assert copied == list(range(sum(sizes)))
    assert all(source == to + 7 for job in jobs for to, source, _ in job)


@given(
    shape=st.lists(st.integers(1, 9), max_size=4),
    limit=st.integers(1, 200),
)
def test_blocks_follow_each_other(shape, limit):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    found = list(_link._blocks(tensor, limit))
    assert torch.cat([block.reshape(-1) for block in found]).tolist() == tensor.reshape(-1).tolist()
    assert all(block.numel() <= limit for block in found)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=4))
def test_dense_means_what_torch_means_by_it(dims):
    shape, strides = [size for size, _ in dims], [stride for _, stride in dims]
    tensor = torch.empty_strided(shape, strides)
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    assert _link._is_dense(shape, strides) == dense


# --- failure -------------------------------------------------------------------------------------

MIXED = [100, 3000, 5, 40_000, 17, 1, 2500, 9]


def failing(monkeypatch, name, nth, alive):
    """Lets the nth tensor that is made run out of memory; keeps an eye on the others."""
    real = getattr(torch, name)
    made = itertools.count()

    def make(tensor, *args, **kwargs):
        if kwargs.get("device") == "meta":
            return real(tensor, *args, **kwargs)
        if next(made) == nth:
            failing.shape = tensor.shape
            raise torch.OutOfMemoryError("out of memory: tried to allocate 1 tensor")
        result = real(tensor, *args, **kwargs)
        alive.append(weakref.ref(result))
        return result

    monkeypatch.setattr(torch, name, make)


@BOTH
@pytest.mark.parametrize("nth", range(len(MIXED)))
def test_out_of_memory_names_the_tensor_and_leaves_nothing(go, nth, small_chunks, monkeypatch):
    link, alive = LateLink(), []
    tensors = [values(torch.uint8, size) for size in MIXED]
    if go is there:
        failing(monkeypatch, "empty_like", nth, alive)
        with pytest.raises(_link.LinkError, match="tried to allocate") as caught:
            _link.upload(tensors, CPU, link=link)
    else:
        failing(monkeypatch, *(("clone", nth) if nth < 5 else ("empty_like", nth - 5)), alive)
        with pytest.raises(_link.LinkError, match="tried to allocate") as caught:
            _link.download(tensors, link=link)
    assert tensors[caught.value.index].shape == failing.shape
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert not link.is_open
    link.do()  # the copies under way end in memory that is still there
    link.queue.clear()
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)  # while the error is held
    monkeypatch.undo()
    assert link.pool.made == len(link.pool._idle)


def test_out_of_memory_amid_a_pack(monkeypatch):
    link, alive = LateLink(), []
    tensors = [values(torch.float32, 8) for _ in range(40)]
    failing(monkeypatch, "empty_like", 23, alive)
    with pytest.raises(_link.LinkError) as caught:
        _link.upload(tensors, CPU, link=link)
    assert caught.value.index == 23
    assert [ref() for ref in alive] == [None] * 23


def test_the_pinned_memory_that_cannot_be_had_is_not_counted():
    def make(nbytes):
        raise RuntimeError("cudaHostAlloc failed")

    link = LateLink()
    link.pool = _link.Pool(make)
    for _ in range(_link.BUFFERS + 1):
        with pytest.raises(_link.LinkError, match="cudaHostAlloc"):
            _link.upload([values(torch.uint8, 8) for _ in range(9)], CPU, link=link)
    assert link.pool.made == 0


def test_an_interrupted_call_leaves_a_usable_pool(small_chunks, monkeypatch):
    link = LateLink(limit=1)
    with monkeypatch.context() as inner:
        inner.setattr(_link.Buffer, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _link.upload([values(torch.uint8, 9000)], CPU, link=link)
    there([values(torch.uint8, 90_000)], link)


def interrupt(*args):
    raise KeyboardInterrupt


def test_one_by_one_also_names_the_tensor():
    with pytest.raises(_link.LinkError) as caught:
        _link._one_by_one([torch.ones(1), torch.ones(1, device="meta")], CPU)
    assert caught.value.index == 1
    with pytest.raises(_link.LinkError) as caught:
        _link.download([torch.ones(1), torch.ones(1, device="meta"), torch.ones(1)])
    assert caught.value.index == 1


def test_devices_without_a_link_get_plain_copies():
    source = torch.ones(4)
    [result] = _link.upload([source], CPU)
    [down] = _link.download([source])
    assert torch.equal(result, source)
    assert len({result.data_ptr(), source.data_ptr(), down.data_ptr()}) == 3


# --- CUDA ----------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["side stream", "current stream"])
def cuda(request, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    monkeypatch.setattr(_link, "SIDE_STREAM", request.param)
    return torch.device("cuda", torch.cuda.current_device())


def busy(device, cycles=200_000_000):
    """Keeps the current stream busy for about a tenth of a second."""
    torch.cuda._sleep(cycles)


@pytest.mark.gpu("torch")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuda_values_and_strides_are_those_of_to(layout, cuda, small_chunks):
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
def test_cuda_downloads_every_layout_of_the_device(layout, cuda, small_chunks):
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
def test_cuda_real_chunks(cuda):
    sizes = [1, 255, 16_000, 131_072, 131_073, 9 << 20, 100 << 20]
    tensors = [values(torch.uint8, size) for size in sizes] * 2
    for tensor, result in zip(tensors, _link.upload(tensors, cuda), strict=True):
        assert torch.equal(result.cpu(), tensor)
    down = _link.download([tensor.to(cuda) for tensor in tensors])
    assert all(map(torch.equal, down, tensors))


@pytest.mark.gpu("torch")
def test_cuda_results_may_be_used_at_once_and_sources_changed(cuda, small_chunks):
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
def test_cuda_downloads_what_is_queued_before(cuda, small_chunks):
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
def test_cuda_threads(cuda, small_chunks):
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
    assert _link._pinned.made <= _link.BUFFERS


@pytest.mark.gpu("torch")
def test_cuda_a_failure_leaves_no_memory_allocated(cuda):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    total = torch.cuda.get_device_properties(cuda).total_memory
    huge = torch.zeros(1, 1, dtype=torch.uint8).expand(2, total)
    tensors = [torch.ones(10), torch.ones(10), torch.ones(9 << 20), huge, torch.ones(3)]
    with pytest.raises(_link.LinkError) as caught:
        _link.upload(tensors, cuda)
    assert caught.value.index == 3
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert torch.cuda.memory_allocated(cuda) == before  # while the error is held
    assert torch.equal(_link.upload(tensors[:3], cuda)[2].cpu(), tensors[2])


@pytest.mark.gpu("torch")
def test_cuda_pinned_memory_is_bounded_and_given_back(cuda):
    _link.release()
    source = torch.ones(96 << 20)
    results = _link.upload([source] * 3, cuda)
    assert 2 <= _link._pinned.made <= _link.AHEAD
    assert all(buffer.memory.is_pinned() for buffer in _link._pinned._idle)
    assert torch.cuda.memory_allocated(cuda) >= 3 * source.nbytes
    del results
    _link.release()
    assert _link._pinned.made == 0


@pytest.mark.gpu("torch")
def test_cuda_peak_memory_is_the_result_and_a_chunk(cuda):
    tensors = [torch.ones(256) for _ in range(2000)] + [torch.ones(32 << 20)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    results = _link.upload(tensors, cuda)
    peak = torch.cuda.max_memory_allocated(cuda) - before
    assert peak <= sum(tensor.nbytes for tensor in tensors) + _link.CHUNK
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
