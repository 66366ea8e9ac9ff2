"""`DeviceLoader`: the batches of a plain loop, moved ahead, and no thread that outlives its use."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fmapper
from fmapper import DeviceLoader, to_cpu, to_gpu, to_jax, to_torch

np = pytest.importorskip("numpy")

MODES = [0, 1, 2, 5]
NAME = "fmapper.DeviceLoader"
PATIENCE = 20.0  # seconds until a thread that should have ended counts as leaked


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def until(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true in the time that a slow machine needs."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


@pytest.fixture(autouse=True)
def no_thread_is_leaked() -> Iterator[None]:
    yield
    assert until(lambda: not threads())


def batches(count: int) -> list[dict[str, Any]]:
    return [{"x": np.full(3, i), "y": [np.float32(i), "name"]} for i in range(count)]


class Counting:
    """A source that can be read again and again, and knows how far it was read."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.count):
            self.read += 1
            yield np.full(2, i)


# --- the same batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", MODES)
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_the_same_batches_in_the_same_order(torch: Any, prefetch: int, count: int) -> None:
    loader = DeviceLoader(batches(count), to_torch, prefetch=prefetch)
    for _ in range(2):  # a list can be read again
        found = list(loader)
        assert [batch["x"].tolist() for batch in found] == [[i] * 3 for i in range(count)]
        assert all(type(batch["x"]) is torch.Tensor for batch in found)
        assert [batch["y"][1] for batch in found] == ["name"] * count


@pytest.mark.parametrize("prefetch", MODES)
def test_what_is_there_already_is_the_same_object(prefetch: int) -> None:
    source = batches(5)
    for old, new in zip(source, DeviceLoader(source, to_cpu, prefetch), strict=True):
        assert new["x"] is old["x"]


@pytest.mark.parametrize("prefetch", MODES)
def test_a_generator_is_read_once(prefetch: int) -> None:
    loader = DeviceLoader((np.full(1, i) for i in range(4)), to_cpu, prefetch)
    assert [int(batch[0]) for batch in loader] == [0, 1, 2, 3]
    assert list(loader) == []


@pytest.mark.parametrize("prefetch", MODES)
def test_a_mover_is_anything_that_can_be_called(prefetch: int) -> None:
    assert list(DeviceLoader([1, 2, 3], lambda n: n * 2, prefetch)) == [2, 4, 6]
    assert list(DeviceLoader([None, (), {}], lambda batch: batch, prefetch)) == [None, (), {}]


@pytest.mark.parametrize("prefetch", MODES)
def test_an_iterator_that_is_over_stays_over(prefetch: int) -> None:
    iterator = iter(DeviceLoader([1], to_cpu, prefetch))
    assert iter(iterator) is iterator
    assert list(iterator) == [1]
    for _ in range(3):
        assert next(iterator, "over") == "over"


def test_len() -> None:
    assert len(DeviceLoader(Counting(3), to_cpu)) == 3
    with pytest.raises(TypeError, match="generator does not know how many batches"):
        len(DeviceLoader((x for x in ()), to_cpu))
    assert list(DeviceLoader((x for x in [1]), to_cpu)) == [1], "list() asks for a length"


def test_arguments() -> None:
    with pytest.raises(ValueError, match="prefetch is a number of batches, 0 or more, not -1"):
        DeviceLoader([], to_cpu, prefetch=-1)
    with pytest.raises(TypeError):
        DeviceLoader([], to_cpu, prefetch=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not 'gpu'. Write fmapper.to_gpu"):
        DeviceLoader([], "gpu")  # type: ignore[arg-type]
    assert repr(DeviceLoader([1], to_cpu, prefetch=3)) == "DeviceLoader([1], to_cpu(), prefetch=3)"


@pytest.mark.parametrize("prefetch", MODES)
def test_two_iterations_at_once(prefetch: int) -> None:
    loader = DeviceLoader(Counting(4), to_cpu, prefetch)
    pairs = [(int(a[0]), int(b[0])) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_two_iterations_of_one_generator_share_it() -> None:
    """As in a plain loop each batch goes to one of them; the generator is never entered twice."""

    def slow() -> Iterator[int]:
        for i in range(20):
            time.sleep(0.001)
            yield i

    loader = DeviceLoader(slow(), to_cpu)
    one, two = iter(loader), iter(loader)
    found = [*one, *two]
    assert sorted(found) == list(range(20))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_torch_dataloader(torch: Any, workers: int, prefetch: int) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10) * 2)
    # A fork of this process, which has threads of JAX and torch, may hang for ever.
    apart = {"multiprocessing_context": "forkserver", "timeout": 240} if workers else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on the number of processors
        source = torch.utils.data.DataLoader(
            data, batch_size=4, num_workers=workers, persistent_workers=workers > 0, **apart
        )
        loader = DeviceLoader(source, to_torch(dtype="float32"), prefetch)
        assert len(loader) == 3
        for _ in range(2):
            for x, _ in loader:  # left early: persistent workers are one iterator for all epochs
                assert x.tolist() == [0, 1, 2, 3]
                break
            assert [x.tolist() for x, _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# --- ahead, and not too far ----------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_batches_are_moved_before_they_are_asked_for(prefetch: int) -> None:
    source = Counting(20)
    iterator = iter(DeviceLoader(source, to_cpu, prefetch))
    for used in range(1, 6):
        next(iterator)
        assert until(lambda used=used: source.read == used + prefetch)
    time.sleep(0.05)
    assert source.read == 5 + prefetch, "no more than that"
    del iterator


@pytest.mark.parametrize("prefetch", MODES)
def test_batches_that_are_alive_at_once(prefetch: int) -> None:
    """`prefetch`, and the one in use."""

    class Batch:
        pass

    alive: weakref.WeakSet[Batch] = weakref.WeakSet()
    most = 0

    def move(_: int) -> Batch:
        nonlocal most
        batch = Batch()
        alive.add(batch)
        most = max(most, len(alive))
        return batch

    left = iter(range(30, 0, -1))  # enumerate() would keep a batch of its own
    for batch in DeviceLoader(range(30), move, prefetch):
        at_least = min(prefetch + 1, next(left))
        assert until(lambda: len(alive) >= at_least)  # noqa: B023  (called at once)
        del batch  # else the loop holds one while it is handed the next
    assert most <= prefetch + 1
    assert not alive, "nothing is kept at the end"


def test_without_prefetch_nothing_runs_ahead() -> None:
    source = Counting(3)
    iterator = iter(DeviceLoader(source, to_cpu, prefetch=0))
    assert (source.read, threads()) == (0, [])
    next(iterator)
    assert (source.read, threads()) == (1, [])


def test_the_source_is_asked_for_its_iterator_in_the_thread_of_the_consumer() -> None:
    """There a DataLoader starts its processes and draws its seed."""
    asked = []

    class Source:
        def __iter__(self) -> Iterator[int]:
            asked.append(threading.current_thread())
            return iter([1])

    assert list(DeviceLoader(Source(), to_cpu)) == [1]
    assert asked == [threading.current_thread()]


# --- errors --------------------------------------------------------------------------------------


def collect(found: list[Any], loop: Any) -> None:
    """A loop that has got so far when it is broken off."""
    for batch in loop:
        found.append(batch)


def failing_source(at: int) -> Iterator[Any]:
    for i in range(at):
        yield np.full(1, i)
    raise OSError("disk on fire")


@pytest.mark.parametrize("prefetch", MODES)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_error_of_the_source_comes_in_its_place(prefetch: int, at: int) -> None:
    found: list[Any] = []
    iterator = iter(DeviceLoader(failing_source(at), to_cpu, prefetch))
    with pytest.raises(OSError, match="disk on fire") as caught:
        collect(found, iterator)
    assert [int(batch[0]) for batch in found] == list(range(at))
    assert caught.value.__notes__ == [f"while a DeviceLoader read batch {at} from its source"]
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[0] == "test_an_error_of_the_source_comes_in_its_place"
    assert frames[-1] == "failing_source"
    assert next(iterator, "over") == "over"


@pytest.mark.parametrize("prefetch", MODES)
def test_an_error_of_the_mover_names_the_batch_and_the_path(torch: Any, prefetch: int) -> None:
    source = batches(5)
    source[2]["y"] = [np.array(["text"])]
    found: list[Any] = []
    with pytest.raises(fmapper.UnsupportedLeafError, match=r"^model\.y\[0\]") as caught:
        collect(found, DeviceLoader(source, to_torch, prefetch))
    assert [int(batch["x"][0]) for batch in found] == [0, 1]
    assert "while a DeviceLoader moved batch 2" in caught.value.__notes__


@pytest.mark.parametrize("prefetch", MODES)
@pytest.mark.parametrize("error", [StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt])
def test_errors_that_python_gives_a_meaning(prefetch: int, error: type[BaseException]) -> None:
    """None of them ends the loop as if there were no more batches."""

    def move(batch: int) -> int:
        if batch == 1:
            raise error
        return batch

    expected = RuntimeError if error is StopIteration else error
    found: list[Any] = []
    with pytest.raises(expected):
        collect(found, DeviceLoader([0, 1, 2], move, prefetch))
    assert found == [0]


@pytest.mark.parametrize("prefetch", MODES)
def test_an_error_of_iter_comes_at_once(prefetch: int) -> None:
    with pytest.raises(TypeError, match="not iterable"):
        iter(DeviceLoader(3, to_cpu, prefetch))  # type: ignore[arg-type]


@pytest.mark.parametrize("prefetch", MODES)
def test_an_error_leaves_nothing_behind(prefetch: int) -> None:
    """It holds the frames that it came through; none may hold it, nor the batches, in a cycle."""

    class Batch:
        pass

    class Failure(Exception):
        pass

    made: list[weakref.ref[Any]] = []

    def move(number: int) -> Batch:
        if number == 2:
            made.append(weakref.ref(failure := Failure()))
            try:
                raise failure
            finally:
                del failure
        made.append(weakref.ref(batch := Batch()))
        return batch

    gc.disable()
    try:
        with contextlib.suppress(Failure):
            for _ in DeviceLoader(range(5), move, prefetch):
                pass
        del _
        assert len(made) == 3
        assert until(lambda: all(ref() is None for ref in made))
    finally:
        gc.enable()


# --- the end -------------------------------------------------------------------------------------


def test_a_loop_that_is_left_early() -> None:
    source = Counting(1000)
    for _ in DeviceLoader(source, to_cpu, prefetch=3):
        break
    assert until(lambda: not threads())
    assert source.read <= 5


def test_an_iterator_that_was_never_used() -> None:
    iterator = iter(DeviceLoader(Counting(1000), to_cpu))
    assert threads()
    del iterator
    assert until(lambda: not threads())


def test_an_iterator_in_a_cycle() -> None:
    holder: list[Any] = [iter(DeviceLoader(Counting(1000), to_cpu))]
    holder.append(holder)
    del holder
    gc.collect()
    assert until(lambda: not threads())


def test_close() -> None:
    iterator: Any = iter(DeviceLoader(Counting(1000), to_cpu))
    next(iterator)
    with contextlib.closing(iterator):
        pass
    assert next(iterator, "over") == "over"
    assert until(lambda: not threads())


def test_close_wakes_who_waits() -> None:
    gate = threading.Event()

    def waiting() -> Iterator[int]:
        gate.wait(PATIENCE)
        yield 1

    iterator: Any = iter(DeviceLoader(waiting(), to_cpu))
    found: list[Any] = []
    consumer = threading.Thread(target=lambda: found.extend(iterator))
    consumer.start()
    time.sleep(0.01)
    iterator.close()
    consumer.join(PATIENCE)
    assert not consumer.is_alive()
    assert found == []
    gate.set()


def test_leaving_does_not_wait_for_a_slow_source() -> None:
    gate = threading.Event()

    def slow() -> Iterator[int]:
        yield 0
        gate.wait(PATIENCE)
        yield 1

    begun = time.monotonic()
    for _ in DeviceLoader(slow(), to_cpu):
        break
    assert time.monotonic() - begun < PATIENCE / 2
    gate.set()


def test_going_on_with_a_generator_after_leaving() -> None:
    """What was read ahead is lost, the rest comes in order, and nobody enters it twice."""

    def source() -> Iterator[int]:
        for i in range(100):
            time.sleep(0.0005)
            yield i

    loader = DeviceLoader(source(), to_cpu, prefetch=2)
    seen: list[int] = []
    while True:
        taken = [batch for batch, _ in zip(loader, range(3), strict=False)]
        if not taken:
            break
        seen += taken
    assert seen == sorted(set(seen))
    assert len(seen) >= 40


def test_what_is_ready_is_let_go_when_the_loop_is_left() -> None:
    class Batch:
        pass

    made: list[weakref.ref[Batch]] = []

    def move(_: int) -> Batch:
        made.append(weakref.ref(batch := Batch()))
        return batch

    loader = DeviceLoader(range(100), move, prefetch=4)
    for _ in range(20):
        for _ in loader:
            break
    del _
    assert until(lambda: all(ref() is None for ref in made))


def test_what_is_being_moved_when_the_loop_is_left_is_let_go() -> None:
    class Batch:
        pass

    begun, gate = threading.Event(), threading.Event()
    made: list[weakref.ref[Batch]] = []

    def move(_: int) -> Batch:
        begun.set()
        gate.wait(PATIENCE)
        made.append(weakref.ref(batch := Batch()))
        return batch

    loader = DeviceLoader(range(5), move)
    iterator = iter(loader)
    assert begun.wait(PATIENCE)
    del iterator
    gate.set()
    assert until(lambda: not threads())
    assert [ref() for ref in made] == [None]
    assert len(loader) == 5, "it remembers its last thread"


def run(code: str) -> float:
    """How long a fresh interpreter takes that must end by itself and in peace."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-c", textwrap.dedent(code)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.endswith("end\n")
    return time.monotonic() - begun


@pytest.mark.nightly
@pytest.mark.parametrize(
    "tail",
    [
        pytest.param("it = iter(loader); next(it)", id="an iterator in a global"),
        pytest.param("it = iter(loader); next(it); keep = [it]; keep.append(keep)", id="a cycle"),
        pytest.param("[b for b, _ in zip(loader, range(3))]", id="left early"),
        pytest.param("import sys; it = iter(loader); sys.stdout.write(''); next(it)", id="fresh"),
    ],
)
def test_the_program_ends(torch: Any, tail: str) -> None:
    run(f"""
    import atexit, threading, numpy as np, torch, fmapper
    def at_the_end():  # entered first, so called last: the thread is gone while Python is still up
        assert threading.enumerate() == [threading.main_thread()]
        print("end")
    atexit.register(at_the_end)
    big = np.ones(1_000_000, np.float32)
    loader = fmapper.DeviceLoader((big for _ in range(10**9)), fmapper.to_torch(copy=True), 3)
    {tail}
    """)


@pytest.mark.nightly
def test_the_program_ends_with_a_source_that_waits_forever() -> None:
    run("""
    import threading, fmapper
    def source():
        yield 1
        threading.Event().wait()
    it = iter(fmapper.DeviceLoader(source(), fmapper.to_cpu))
    print(next(it), "end", flush=True)
    """)


@pytest.mark.nightly
def test_the_program_ends_with_jax_at_work(jax: Any) -> None:
    run("""
    import numpy as np, jax, fmapper
    big = np.ones(1_000_000, np.float32)
    it = iter(fmapper.DeviceLoader((big for _ in range(10**9)), fmapper.to_jax))
    print(next(it).shape, "end", flush=True)
    """)


# --- what belongs to the thread ------------------------------------------------------------------

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


@pytest.mark.parametrize("prefetch", MODES)
def test_context_variables(prefetch: int) -> None:
    token = WHO.set("consumer")
    try:
        assert list(DeviceLoader(range(3), lambda _: WHO.get(), prefetch)) == ["consumer"] * 3
    finally:
        WHO.reset(token)
    assert list(DeviceLoader(range(3), lambda _: WHO.get(), prefetch)) == ["nobody"] * 3


def test_they_are_those_of_the_start_of_the_iteration() -> None:
    token = WHO.set("start")
    iterator = iter(DeviceLoader(range(5), lambda _: WHO.get()))
    WHO.reset(token)
    assert list(iterator) == ["start"] * 5


def test_numpy_error_state() -> None:
    """NumPy 2 keeps it in a context variable."""
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        list(DeviceLoader([np.zeros(1)], lambda x: 1 / x))


@pytest.mark.parametrize("prefetch", MODES)
def test_settings_of_jax(jax: Any, prefetch: int) -> None:
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    wide = [np.full(2, 1e300)] * 3
    with x64(True):
        assert {str(x.dtype) for x in DeviceLoader(wide, to_jax, prefetch)} == {"float64"}
    with pytest.raises(fmapper.LossyCastError):
        list(DeviceLoader(wide, to_jax, prefetch))

    def settings(_: int) -> Any:
        config = jax.config
        return (
            config.jax_enable_x64,
            config.jax_default_device,
            config.jax_transfer_guard_host_to_device,
            config.jax_transfer_guard_device_to_device,
            config.jax_transfer_guard_device_to_host,
        )

    cpu = jax.devices("cpu")[0]
    with x64(True), jax.default_device(cpu), jax.transfer_guard_host_to_device("log"):
        assert list(DeviceLoader([0], settings, prefetch)) == [(True, cpu, "log", None, None)]
    outside = settings(0)
    assert list(DeviceLoader([0], settings, prefetch)) == [outside]


@pytest.mark.parametrize("prefetch", MODES)
def test_settings_of_torch(torch: Any, prefetch: int) -> None:
    def settings(_: int) -> Any:
        device = torch.empty(0).device.type
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), device

    def found() -> Any:
        (only,) = DeviceLoader([0], settings, prefetch)
        return only

    assert found() == (True, False, "cpu")
    with torch.no_grad():
        assert found() == (False, False, "cpu")
    with torch.inference_mode():
        assert found() == (False, True, "cpu")
        with torch.enable_grad():
            assert found() == (True, True, "cpu")
    with torch.device("meta"):
        assert found() == (True, False, "meta")
    assert found() == (True, False, "cpu")


def test_settings_that_cannot_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        raise OSError("no such setting")
        yield

    cls = type(fmapper.backends.get_adapter("numpy"))
    monkeypatch.setattr(cls, "thread_settings", lambda self: broken)
    with pytest.raises(OSError, match="no such setting"):
        list(DeviceLoader([1], to_cpu))


# --- warnings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", MODES)
def test_warnings_reach_the_loop(jax: Any, prefetch: int) -> None:
    """At the line of the loop, one for each batch as in a plain loop, when the batch is there."""
    source = [np.ones(1, np.float32), np.full(1, 0.1), np.ones(1, np.float32), np.full(1, 0.1)]
    counts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DeviceLoader(source, to_jax, prefetch)
        for _ in loader:
            counts.append(len(caught))
    assert counts == [0, 1, 1, 2]
    assert {w.category for w in caught} == {fmapper.PrecisionWarning}
    assert {w.filename for w in caught} == {__file__}


@pytest.mark.parametrize("prefetch", MODES)
def test_a_warning_that_is_an_error_is_one_of_its_batch(jax: Any, prefetch: int) -> None:
    source = [np.ones(1, np.float32), np.full(1, 0.1), np.ones(1, np.float32)]
    iterator = iter(DeviceLoader(source, to_jax, prefetch))
    next(iterator)
    with pytest.raises(fmapper.PrecisionWarning):
        next(iterator)
    assert next(iterator, "over") == "over"


@pytest.mark.parametrize("prefetch", MODES)
def test_warnings_of_others_are_raised_where_they_are_given(prefetch: int) -> None:
    def move(batch: int) -> int:
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return batch

    with pytest.warns(DeprecationWarning, match="old"):
        assert list(DeviceLoader([1], move, prefetch)) == [1]
    with pytest.raises(DeprecationWarning, match="old"):
        list(DeviceLoader([1], move, prefetch))


def test_warnings_of_other_threads_are_left_alone(jax: Any) -> None:
    """While a batch is moved in the background, the program itself can still warn."""
    gate = threading.Event()

    def move(batch: Any) -> Any:
        gate.wait(PATIENCE)
        return to_jax(batch)

    iterator = iter(DeviceLoader([np.full(1, 0.1)], move))
    with pytest.warns(fmapper.PrecisionWarning):
        to_jax(np.full(1, 0.1))
    gate.set()
    with pytest.warns(fmapper.PrecisionWarning):
        next(iterator)


@pytest.mark.nightly
def test_without_a_gpu_it_says_so_once(torch: Any) -> None:
    code = """
    import warnings, numpy as np, torch, fmapper
    source = [{"x": torch.ones(1)}] * 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = list(fmapper.DeviceLoader(source, fmapper.to_gpu))
    assert len(found) == 3 and all(b["x"] is source[0]["x"] for b in found)
    assert [w.category for w in caught] == [fmapper.NoGPUWarning], caught
    assert caught[0].filename == "<string>", caught[0]
    try:
        list(fmapper.DeviceLoader(source, fmapper.to_gpu(strict=True)))
    except fmapper.DeviceUnavailableError as error:
        assert "while a DeviceLoader moved batch 0" in error.__notes__
        print("end")
    """
    run(code)


# --- streams -------------------------------------------------------------------------------------


def test_arrays_are_handed_over_to_the_thread_that_uses_them(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each backend gets its arrays of the batch in one thread, and its word in the other."""
    said: list[Any] = []

    def hand_over(self: Any, arrays: Any) -> Any:
        said.append(("made", len(arrays), threading.current_thread().name))
        return lambda: said.append(("used", len(arrays), threading.current_thread().name))

    monkeypatch.setattr(type(fmapper.backends.get_adapter("torch")), "hand_over", hand_over)
    tie = torch.ones(1)
    (batch,) = DeviceLoader([{"a": tie, "b": [tie, torch.ones(2)], "c": np.ones(1)}], to_cpu)
    assert said == [("made", 2, NAME), ("used", 2, threading.current_thread().name)]
    assert batch["a"] is batch["b"][0]


def test_tensors_on_the_cpu_wait_for_nothing(torch: Any) -> None:
    assert fmapper.backends.get_adapter("torch").hand_over([torch.ones(1)]) is None


def test_the_order_of_streams(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch is told on a machine with two GPUs, of which the second is the current one."""
    log: list[str] = []
    current = threading.local()

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            log.append(f"event on {self.name}")
            return self.name

        def __enter__(self) -> None:
            current.stream = self

        def __exit__(self, *args: object) -> None:
            del current.stream

        def wait_event(self, event: str) -> None:
            log.append(f"{self.name} waits for event on {event}")

    class Tensor:
        def __init__(self, kind: str, index: int) -> None:
            self.device = torch.device(kind, index)

        def record_stream(self, stream: Stream) -> None:
            log.append(f"{self.device} used on {stream.name}")

    def current_stream(device: Any = None) -> Stream:
        if device is None or device.index == 1:
            return getattr(current, "stream", None) or Stream("main 1")
        return Stream("main 0")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "Stream", Stream)
    there = torch.accelerator
    monkeypatch.setattr(there, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(there, "current_stream", current_stream)
    adapter = fmapper.backends.get_adapter("torch")

    settings = adapter.thread_settings()
    assert log == ["side waits for main 1"], "at once, in the thread of the consumer"
    log.clear()
    with settings():
        receive = adapter.hand_over([Tensor("cpu", 0), Tensor("cuda", 1), Tensor("cuda", 0)])
    assert sorted(log) == ["event on main 0", "event on side"]
    log.clear()
    assert receive is not None
    receive()
    assert sorted(log[:2]) == [
        "main 0 waits for event on main 0",
        "main 1 waits for event on side",
    ]
    assert log[2:] == ["cuda:1 used on main 1", "cuda:0 used on main 0"]


@pytest.mark.gpu("torch")
@pytest.mark.parametrize("prefetch", MODES)
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("pin", [False, True])
def test_batches_on_a_gpu_are_ready_and_stay(
    torch: Any, prefetch: int, own_stream: bool, pin: bool
) -> None:
    """Wrong numbers here are a race between streams, or memory given away while it is read."""
    size, count = 1 << 22, 40
    torch.zeros(1, device="cuda")
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    batches = (torch.full((size,), float(i)) for i in range(count))
    source = ({"x": batch.pin_memory() if pin else batch} for batch in batches)
    sums = []
    with torch.cuda.stream(stream):
        for batch in DeviceLoader(source, to_gpu(strict=True), prefetch):
            torch.cuda._sleep(2_000_000)  # the GPU is behind: the batch is dropped before its use
            sums.append(batch["x"].sum(dtype=torch.float64))
            del batch
    torch.cuda.synchronize()
    assert [int(x) for x in sums] == [i * size for i in range(count)]


@pytest.mark.gpu("torch")
def test_the_thread_has_a_stream_and_the_device_of_the_consumer(torch: Any) -> None:
    torch.zeros(1, device="cuda")

    def where(_: int) -> Any:
        return torch.cuda.current_device(), torch.cuda.current_stream()

    ((device, stream),) = DeviceLoader([0], where)
    assert device == torch.cuda.current_device()
    assert stream != torch.cuda.current_stream()


@pytest.mark.gpu("torch")
def test_a_source_on_the_gpu_is_read_when_it_is_there(torch: Any) -> None:
    """What the consumer has told the GPU to compute before the iteration comes first."""
    values = torch.zeros(1 << 22, device="cuda")
    torch.cuda._sleep(100_000_000)
    values += 1
    (batch,) = DeviceLoader([values], to_cpu)
    assert bool((batch == 1).all())


@pytest.mark.gpu("jax")
@pytest.mark.parametrize("prefetch", MODES)
def test_batches_on_a_gpu_of_jax(jax: Any, prefetch: int) -> None:
    source = (np.full(1 << 20, i, np.float32) for i in range(20))
    loader = DeviceLoader(source, to_jax(device="gpu"), prefetch)
    assert [float(batch.mean()) for batch in loader] == list(range(20))
