"""Where the time of a model goes: numbers mean what they say, counts and predictions hold."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper import Profile, ProfileCell, Timing
from fmapper.backends import Counts
from fmapper.profiles import bench as _profile_bench
from fmapper.profiles import timing
from fmapper.profiles.accelerator import ACCELERATORS, find_accelerator
from fmapper.profiles.predict import Curve, Traffic, break_even, counts_between, predict
from fmapper.profiles.verdict import measured_bounds, verdicts

np = pytest.importorskip("numpy")

X = np.ones((1, 4), np.float32)
QUICK: dict[str, Any] = {"seconds": 0.02, "predict": False}


@fmapper.functor
class Dense:
    """One product, one sum, one tanh."""

    def __init__(self, w: Any, b: Any) -> None:
        self.w, self.b = w, b

    def __call__(self, x: Any) -> Any:
        return fmapper.array_namespace(x).tanh(x @ self.w + self.b)


def dense(n: int = 4, m: int = 3) -> Dense:
    random = np.random.default_rng(0)
    return Dense(random.normal(size=(n, m)).astype("float32"), np.zeros(m, np.float32))


class Clock:
    """A clock that goes on only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timing, "clock", lambda: self.now)

    def takes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# --- what a number means -------------------------------------------------------------------------


@pytest.mark.nightly
def test_times_are_of_what_they_are_called(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving in takes 2 s, computing 5 s and 1 s per sample, the first run 100 s more, back 1 s."""
    pytest.importorskip("torch")
    real_loader, real_fetch = _profile_bench.loader, _profile_bench.fetch

    def loader(*arguments: Any) -> Any:
        load = real_loader(*arguments)
        return lambda: (clock.takes(2), load())[1]

    def fetch(*arguments: Any) -> None:
        clock.takes(1)
        real_fetch(*arguments)

    monkeypatch.setattr(_profile_bench, "loader", loader)
    monkeypatch.setattr(_profile_bench, "fetch", fetch)
    seen: set[int] = set()

    def model(x: Any) -> Any:
        clock.takes(5 + len(x) + (0 if len(x) in seen else 100))
        seen.add(len(x))
        return x

    made = fmapper.profile(model, X, ["torch:cpu"], (1, 12), seconds=100, predict=False)
    for size, compute in ((1, 6.0), (12, 17.0)):
        cell = made.cell("torch:cpu", size)
        assert cell.transfer_in == Timing(2, 2, 2, cell.total.n)
        assert cell.compute == Timing(compute, compute, compute, cell.total.n)
        assert cell.transfer_out == Timing(1, 1, 1, cell.total.n)
        assert cell.total.median == 3 + compute
        assert cell.share_moving.median == pytest.approx(3 / (3 + compute), rel=1e-12)
        assert cell.first_call == 100 + compute
        assert cell.bytes_in == cell.bytes_out == 16 * size
        # A warm-up of one round comes off the time.
        assert cell.total.n == -(-(100 - (3 + compute)) // (3 + compute))
    assert made.cell("torch:cpu", 1).bound == "launch"
    assert made.cell("torch:cpu", 12).bound == "compute"


@pytest.mark.nightly
def test_a_real_sleep_is_seen() -> None:
    def model(x: Any) -> Any:
        time.sleep(0.02)
        return x

    made = fmapper.profile(model, X, ["numpy:cpu"], [1], seconds=0.2, predict=False)
    cell = made.cell("numpy:cpu", 1)
    assert cell.compute.lower >= 0.02
    assert cell.first_call is not None
    assert cell.first_call >= 0.02
    assert 1 <= cell.total.n <= 9, "0.2 s, less a round to warm up"


@pytest.mark.nightly
@pytest.mark.parametrize("jitter", [0.0, 4.0])
def test_times_that_vary_are_noted(clock: Clock, jitter: float) -> None:
    runs = 0

    def model(x: Any) -> Any:
        nonlocal runs
        runs += 1
        clock.takes(2.0 + jitter * (runs % 2))
        return x

    made = fmapper.profile(model, X, ["numpy:cpu"], [1], seconds=50, predict=False)
    noted = [note for note in made.notes if "vary a lot: numpy:cpu at 1." in note]
    assert len(noted) == (1 if jitter else 0)


def test_rounds_keep_to_their_time(clock: Clock) -> None:
    def once() -> tuple[float]:
        clock.takes(1.0)
        return (1.0,)

    assert len(timing.rounds(once, 10.0)) == 9
    assert len(timing.rounds(once, 0.5)) == 1, "a round that takes too long is run to its end"
    assert clock.now == 11.0
    assert len(timing.rounds(once, 1e9)) == 200


def test_the_collector_is_off_while_it_counts() -> None:
    seen: list[bool] = []
    timing.rounds(lambda: (seen.append(gc.isenabled()), (1.0,))[1], 1e-4)
    assert seen
    assert not any(seen)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        timing.rounds(lambda: (1 / 0,), 1e-4)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([4.0], Timing(4, 4, 4, 1)),
        ([1.0, 2.0, 3.0, 4.0, 5.0], Timing(3, 2, 4, 5)),
        ([5.0, 1.0], Timing(3, 2, 4, 2)),
    ],
)
def test_medians_and_quartiles(values: list[float], expected: Timing) -> None:
    assert Timing.of(values) == expected


class Accelerated:
    """An accelerator that takes two seconds for whatever it is waited for."""

    def __init__(self, clock: Clock) -> None:
        path = Path(__file__).resolve().parents[2] / "examples" / "custom_adapter.py"
        spec = importlib.util.spec_from_file_location("custom_adapter_of_profile", path)
        assert spec is not None
        assert spec.loader is not None
        self.toy: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.toy)

        class Waiting(self.toy.ToyAdapter):  # type: ignore[misc]
            def wait(self, device: fmapper.Device, results: Any) -> None:
                clock.takes(2 if device.kind == "acc" else 0)

        fmapper.backends.register_adapter(Waiting())


@pytest.fixture
def accelerated(clock: Clock) -> Iterator[Accelerated]:
    yield Accelerated(clock)
    fmapper.backends.unregister_adapter("toy")


@pytest.mark.nightly
def test_an_accelerator_of_any_adapter_is_waited_for(
    accelerated: Accelerated, clock: Clock
) -> None:
    def model(x: Any) -> Any:
        clock.takes(1.0 * x.shape[0])
        return x

    made = fmapper.profile(model, X, ["numpy:cpu", "toy:acc:1"], (1, 4), seconds=50, predict=False)
    for size in (1, 4):
        cell = made.cell("toy:acc:1", size)
        assert cell.transfer_in.median == 2, "moving is waited for"
        assert cell.compute.median == 2 + size, "so is computing"
        assert cell.first_call == 2 + size
        assert cell.transfer_out.median == 0
        assert cell.counts is None, "this adapter counts nothing"
        assert made.cell("numpy:cpu", size).total.median == size
    (verdict,) = made.verdicts
    assert (verdict.device, verdict.against) == ("toy:acc:1", "numpy:cpu")
    assert verdict.pays == {1: "no", 4: "no"}
    assert verdict.batch_size is None


# --- the model and its inputs --------------------------------------------------------------------


@pytest.mark.nightly
def test_a_functor_goes_everywhere_and_stays_untouched() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    model = dense()
    w, values = model.w, model.w.copy()
    made = fmapper.profile(model, X, batch_sizes=(1, 2), **QUICK)
    assert {"numpy:cpu", "torch:cpu", "jax:cpu:0"} <= set(made.devices)
    assert made.batch_sizes == (1, 2)
    assert model.w is w
    assert (w == values).all()
    assert made.model == "Dense"
    assert set(made.fastest) == {1, 2}


@pytest.mark.nightly
def test_a_torch_module_stays_in_torch_and_is_run_for_inference() -> None:
    torch = pytest.importorskip("torch")
    seen: list[tuple[bool, bool]] = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x: Any) -> Any:
            seen.append((self.norm.training, torch.is_grad_enabled()))
            return self.norm(x)

    model = Net()
    made = fmapper.profile(model, X, batch_sizes=(1, 2), **QUICK)
    assert {device.partition(":")[0] for device in made.devices} == {"torch"}
    assert set(seen) == {(False, False)}
    assert model.norm.training, "it is a copy that is told to evaluate"
    assert model.norm.num_batches_tracked == 0


@pytest.mark.nightly
def test_an_nnx_module_stays_in_jax_and_is_run_for_inference() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.drop(self.norm(x))

    model = Net()
    made = fmapper.profile(model, X, batch_sizes=(1, 2), **QUICK)
    assert {device.partition(":")[0] for device in made.devices} == {"jax"}
    assert not model.drop.deterministic
    assert (np.asarray(model.norm.mean[...]) == 0).all()


@pytest.mark.nightly
def test_what_a_run_writes_to_is_a_copy() -> None:
    torch = pytest.importorskip("torch")

    def model(own: Any, x: Any) -> Any:
        own["w"] += 1
        x += 1
        return own["w"] + x

    for backend in (np, torch):
        own, x = {"w": backend.zeros(4)}, backend.ones((1, 4))
        fmapper.profile(own, x, ["numpy:cpu", "torch:cpu"], [1], call=model, **QUICK)
        assert (own["w"] == 0).all()
        assert (x == 1).all()


@pytest.mark.nightly
def test_jax_is_compiled_once_for_each_size_unless_told_otherwise() -> None:
    pytest.importorskip("jax")
    calls = {None: 0, False: 0}

    def run(compile: bool | None) -> None:
        def model(x: Any) -> Any:
            calls[compile] += 1
            return x + 1

        fmapper.profile(model, X, ["jax:cpu"], (1, 2, 3), compile=compile, **QUICK)

    run(None)
    run(False)
    assert calls[None] == 3
    assert calls[False] > 9


@pytest.mark.nightly_cases("False")
@pytest.mark.parametrize("compile", [None, False, True])
def test_torch_is_compiled_on_request(
    compile: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda f: (compiled.append(f), f)[1])
    fmapper.profile(torch.nn.Linear(4, 2), X, ["torch:cpu"], [1], compile=compile, **QUICK)
    assert len(compiled) == (1 if compile else 0)


@pytest.mark.nightly
def test_equinox_needs_no_declaration() -> None:
    eqx = pytest.importorskip("equinox")
    import jax

    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    made = fmapper.profile(model, X, batch_sizes=(1, 2), call=lambda m, x: jax.vmap(m)(x), **QUICK)
    assert {device.partition(":")[0] for device in made.devices} == {"jax"}
    assert made.cell("jax:cpu:0", 2).bytes_out == 2 * 2 * 4


@pytest.mark.nightly
def test_inputs_are_cut_and_repeated_along_the_first_axis() -> None:
    seen: list[Any] = []

    def model(x: Any, more: Any, scale: float) -> Any:
        seen.append((x.copy(), more["y"].shape, more["k"].shape, scale))
        return x

    x = np.arange(3.0)[:, None]
    inputs = (x, {"y": np.ones((3, 2)), "k": np.ones(())}, 2.0)
    fmapper.profile(model, inputs, ["numpy:cpu"], (2, 5), **QUICK)
    by_size = {len(x): (x, *rest) for x, *rest in seen}
    assert by_size[2][0].tolist() == [[0], [1]]
    assert by_size[5][0].tolist() == [[0], [1], [2], [0], [1]]
    assert [entry[1:] for entry in by_size.values()] == [((2, 2), (), 2.0), ((5, 2), (), 2.0)]


@pytest.mark.nightly
def test_inputs_can_be_a_function_and_of_any_backend() -> None:
    torch = pytest.importorskip("torch")
    sizes: list[int] = []

    def inputs(n: int) -> Any:
        sizes.append(n)
        return torch.ones(n, 4), torch.ones(7)

    made = fmapper.profile(
        lambda x, k: x * k[0], inputs, ["numpy:cpu", "torch:cpu"], (1, 4), **QUICK
    )
    assert sizes == [1, 4]
    assert made.cell("torch:cpu", 4).bytes_in == made.cell("numpy:cpu", 4).bytes_in == (16 + 7) * 4
    assert made.cell("torch:cpu", 4).arrays_in == 2


@pytest.mark.nightly
def test_what_jax_narrows_is_noted() -> None:
    pytest.importorskip("jax")
    made = fmapper.profile(lambda x: x, X.astype("float64"), ["jax:cpu"], [1], **QUICK)
    assert any("float64 became float32" in note for note in made.notes)


# --- what goes wrong -----------------------------------------------------------------------------


class Undeclared:
    def __init__(self) -> None:
        self.w = np.ones((4, 3), np.float32)

    def __call__(self, x: Any) -> Any:
        return x @ self.w


@fmapper.functor
class Holder:
    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, x: Any) -> Any:
        return self.part(x)


@pytest.mark.nightly_cases(
    "model10-inputs10-options10-ProfileError-numpy:cpu: the model failed at batch size 1",
    "model11-inputs11-options11-ProfileError-^numpy:cpu: .[*]ValueError",
)
@pytest.mark.parametrize(
    ("model", "inputs", "options", "error", "words"),
    [
        ({"w": X}, X, {}, fmapper.ProfileError, r"a dict cannot be called\. Pass call="),
        (Holder(Undeclared()), X, {}, fmapper.NotAFunctorError, r"model\.part: Undeclared .* \.w"),
        (dense(), (X, X[:0]), {}, fmapper.ProfileError, r"1 at inputs\[0\], 0 at inputs\[1\]"),
        (dense(), X[:0], {}, fmapper.ProfileError, "empty along the first axis"),
        (dense(), X, {"batch_sizes": ()}, ValueError, "at least one"),
        (dense(), X, {"batch_sizes": (0,)}, ValueError, "all of them at least 1"),
        (dense(), X, {"devices": []}, fmapper.ProfileError, "no device"),
        (
            dense(),
            X,
            {"devices": ["torch:meta"]},
            fmapper.DeviceError,
            "arrays on meta have no values",
        ),
        (dense(), X, {"seconds": 0}, ValueError, "must be greater than 0"),
        (dense(), X, {"accelerator": "Z80"}, ValueError, "'Z80' is not in the table. Known: H200"),
        (dense(5), X, {}, fmapper.ProfileError, r"numpy:cpu: the model failed at batch size 1"),
        (dense(5), X, {"devices": ["numpy:cpu"]}, fmapper.ProfileError, "^numpy:cpu: .*ValueError"),
        (dense(), lambda n: 1 / 0, {}, fmapper.ProfileError, r"inputs\(1\) failed: ZeroDivision"),
    ],
)
def test_errors_say_what_and_where(
    model: Any, inputs: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    pytest.importorskip("torch")
    with pytest.raises(error, match=words):
        fmapper.profile(model, inputs, **{"batch_sizes": [1], **QUICK, **options})


def test_a_torch_module_cannot_be_asked_for_in_numpy() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(fmapper.ProfileError, match=r"its Linear at model\.part .*torch only"):
        fmapper.profile(Holder(torch.nn.Linear(4, 2)), X, ["numpy:cpu"], [1], **QUICK)


def test_parts_of_two_frameworks_cannot_be_computed() -> None:
    torch = pytest.importorskip("torch")
    nnx = pytest.importorskip("flax.nnx")
    both = [torch.nn.Linear(4, 2), nnx.Linear(4, 2, rngs=nnx.Rngs(0))]
    with pytest.raises(fmapper.ProfileError, match=r"Linear at model\[0\].*Linear at model\[1\]"):
        fmapper.profile(both, X, call=lambda m, x: x, **QUICK)


@pytest.mark.nightly
def test_a_backend_that_fails_is_left_out_and_noted() -> None:
    pytest.importorskip("torch")

    def model(x: Any) -> Any:
        return x.numpy()  # tensors have it

    made = fmapper.profile(model, X, batch_sizes=[1], seconds=0.02)
    assert "torch:cpu" in made.devices
    assert "numpy:cpu" not in made.devices
    for name in ("numpy:cpu", "jax:cpu:0"):
        said = [note for note in made.notes if name in note]
        assert len(said) <= 1, "not again for the prediction"
    assert any(note.startswith("numpy:cpu: the model failed at batch") for note in made.notes)


@pytest.mark.nightly
def test_a_batch_that_is_too_large_leaves_what_was_measured() -> None:
    def model(x: Any) -> Any:
        if len(x) > 4:
            raise MemoryError("no room")
        return x

    made = fmapper.profile(model, X, ["numpy:cpu"], (1, 4, 8, 9), **QUICK)
    assert made.batch_sizes == (1, 4)
    assert any("numpy:cpu: the model failed at batch size 8: MemoryError" in n for n in made.notes)


# --- training ------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_training_takes_the_gradient() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("jax")
    model, x1 = dense(64, 32), np.full((1, 64), 0.1, np.float32)
    made = fmapper.profile(model, x1, batch_sizes=(2,), train=True, seconds=0.02)
    assert {"jax:cpu:0", "torch:cpu"} <= set(made.devices)
    assert "numpy:cpu" not in made.devices
    assert any(note.startswith("numpy cannot train: ") for note in made.notes)
    assert made.cell("torch:cpu", 2).bytes_out == 4, "the loss comes back, the gradient stays"
    products = 2 * 2 * 64 * 32
    for adapter, framework in (("jax", fmapper.to_jax), ("torch", fmapper.to_torch)):
        bench = _profile_bench.Bench(
            model, lambda m, x: m(x), {1: (x1,)}, train=True, compile=None, seconds=1
        )
        x = framework(np.repeat(x1, 2, axis=0))
        placed = framework(model, copy=True)
        found = fmapper.backends.get_adapter(adapter).count(bench.call, placed, (x,))
        assert found is not None
        elementwise = found.flops - 2 * products
        assert 0 < elementwise < products, "one product forward, one backward"
        run = fmapper.backends.get_adapter(adapter).runner(bench.call, placed, compile=None)
        loss, gradient = run(x)
        w, b = (torch.tensor(a, requires_grad=True) for a in (model.w, model.b))
        expected = (torch.tanh(torch.full((2, 64), 0.1) @ w + b) ** 2).mean()
        expected.backward()
        assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
        for own, reference in zip(gradient, (w.grad, b.grad), strict=True):
            assert np.asarray(own) == pytest.approx(reference.numpy(), rel=1e-5)


@pytest.mark.nightly
def test_training_is_done_in_training_mode_on_a_copy() -> None:
    torch = pytest.importorskip("torch")
    seen: list[bool] = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x: Any) -> Any:
            seen.append(self.norm.training)
            return self.norm(x).sum()

    model = Net()
    fmapper.profile(model, X, batch_sizes=(2, 4), train=True, **QUICK)
    assert set(seen) == {True}
    assert model.norm.num_batches_tracked == 0
    assert model.norm.weight.grad is None


def test_numpy_cannot_be_asked_to_train() -> None:
    with pytest.raises(fmapper.ProfileError, match="numpy:cpu cannot train: "):
        fmapper.profile(dense(), X, ["numpy:cpu"], train=True, **QUICK)


# --- counting ------------------------------------------------------------------------------------


def counted(backend: str, model: Any, *inputs: Any) -> Counts:
    adapter = fmapper.backends.get_adapter(backend)
    found = adapter.count(lambda model, *inputs: model(*inputs), model, inputs)
    assert found is not None
    return found


def test_torch_kernels_by_hand() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 2)
    )
    found = counted("torch", model, torch.ones(4, 8))
    assert found.launches == 3, "two addmm and a relu; transposing and flattening start nothing"
    assert found.syncs == 0
    products = 2 * 4 * (8 * 16 + 16 * 2)
    assert found.flops == products + 4 * 16 + 4 * 16 + 4 * 2, "and one per element of each result"
    first, relu, second = 4 * 8 + 8 * 16 + 16 + 4 * 16, 2 * 4 * 16, 4 * 16 + 16 * 2 + 2 + 4 * 2
    assert found.nbytes == 4 * (first + relu + second)


@pytest.mark.parametrize(
    ("read", "syncs", "launches"),
    [
        (lambda x: x.sum().item(), 1, 1),
        (lambda x: bool(x[0, 0] > 0), 1, 1),
        (lambda x: float(x[0, 0]) + int(x[0, 1]), 2, 0),
        (lambda x: x.cpu(), 1, 0),
        (lambda x: x.to("cpu"), 1, 0),
        (lambda x: x.to(device="cpu"), 1, 0),
        (lambda x: x.numpy(), 1, 0),
        (lambda x: x.tolist(), 1, 0),
        (lambda x: x.nonzero(), 1, 1),
        (lambda x: x[x > 0], 1, 3),
        (lambda x: x.view(4).view(2, 2).T.detach(), 0, 0),
        (lambda x: x.new_empty(3), 0, 0),
        (lambda x: x.add_(1).mul(2), 0, 2),
    ],
)
def test_torch_waits_by_hand(read: Any, syncs: int, launches: int) -> None:
    torch = pytest.importorskip("torch")
    found = counted("torch", read, torch.ones(2, 2))
    assert found.syncs == syncs
    assert found.launches == launches


def test_jax_kernels_by_hand() -> None:
    jnp = pytest.importorskip("jax.numpy")
    import jax

    def mlp(w: Any, x: Any) -> Any:
        return jax.nn.relu(jnp.tanh(x @ w[0] + 1) * 2) @ w[1]

    weights = [jnp.ones((8, 16)), jnp.ones((16, 2))]
    adapter = fmapper.backends.get_adapter("jax")
    found = adapter.count(mlp, weights, (jnp.ones((4, 8)),))
    assert found is not None
    assert found.launches == 3, "a product, the elementwise part in one, a product"
    assert found.compiled
    assert found.flops == 2 * 4 * (8 * 16 + 16 * 2) + 4 * (4 * 16)
    first, middle, second = 4 * 8 + 8 * 16 + 4 * 16, 2 * 4 * 16, 4 * 16 + 16 * 2 + 4 * 2
    assert found.nbytes == 4 * (first + middle + second)


def test_a_fused_kernel_reads_what_goes_into_it_not_what_is_between() -> None:
    jnp = pytest.importorskip("jax.numpy")
    found = counted("jax", lambda v: ((v[:, None] + v[None, :]) * 2).sum(), jnp.ones(50))
    assert (found.launches, found.nbytes) == (1, 4 * (50 + 1)), "not the 50 x 50 sums"


def test_jax_flops_are_those_of_xla() -> None:
    jnp = pytest.importorskip("jax.numpy")
    import jax

    def model(w: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, w[0], (1, 1), "VALID", feature_group_count=2)
        return jax.nn.relu(y).reshape(len(x), -1) @ w[1]

    w = [jnp.ones((6, 2, 3, 3)), jnp.ones((6 * 36, 5))]
    x = jnp.ones((3, 4, 8, 8))
    found = fmapper.backends.get_adapter("jax").count(model, w, (x,))
    assert found is not None
    compiled = jax.jit(model).lower(w, x).compile()
    told: Any = compiled.cost_analysis()
    assert found.flops == told["flops"]
    assert found.launches == 3


@pytest.mark.parametrize(
    ("function", "launches"),
    [
        (lambda x: x, 0),
        (lambda x: x.reshape(-1), 0),
        (lambda x: x + x, 1),
        (lambda x: (x * 2, x + 1), 2),
        (lambda x: x.sum(), 1),
        (lambda x: (x * 2 + 1).sum(), 1),
        (lambda x: x / x.sum(), 2),
        (lambda x: x @ x, 1),
        (lambda x: (x + 1) @ (x + 1).T, 3),
    ],
)
def test_what_fuses_in_jax(function: Any, launches: int) -> None:
    jnp = pytest.importorskip("jax.numpy")
    found = counted("jax", function, jnp.ones((2, 2)))
    assert found.launches == launches


def test_loops_count_every_round_in_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    from jax import lax

    def scanned(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, length=7)[0]

    once = counted("jax", lambda x: jnp.tanh(x @ x), jnp.ones((3, 3)))
    many = counted("jax", scanned, jnp.ones((3, 3)))
    assert (many.launches, many.flops) == (7 * once.launches, 7 * once.flops)
    endless = counted(
        "jax", lambda x: lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 1, x), jnp.ones((3, 3))
    )
    assert "one iteration" in endless.unseen[0]
    cond = counted(
        "jax",
        lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x),
        jnp.ones((3, 3)),
    )
    assert cond.launches == 3, "the predicate, and the longer branch"


# --- predicting ----------------------------------------------------------------------------------

CARD = dataclasses.replace(
    ACCELERATORS["H200"],
    flops={"float32": 1e12},
    memory=1e12,
    link=1e9,
    compute_share=(0.25, 0.5, 1.0),
    memory_share=(0.25, 0.5, 1.0),
    link_share=(0.25, 0.5, 1.0),
    launch=(5e-6, 10e-6, 20e-6),
    copy=(0.0, 1e-6, 2e-6),
    sync=(0.0, 3e-6, 9e-6),
)


def test_the_formula() -> None:
    counts, traffic = Counts(100, 1e9, 4e9, syncs=2), Traffic(1e6, 2e6, 2, 1)
    made = predict(counts, traffic, CARD)
    assert made.transfer_in.median == pytest.approx(2e-3 + 2e-6)
    assert made.transfer_in.lower == pytest.approx(1e-3)
    assert made.transfer_in.upper == pytest.approx(4e-3 + 4e-6)
    assert made.transfer_out.median == pytest.approx(4e-3 + 1e-6)
    assert made.compute.median == pytest.approx(8e-3 + 6e-6), "memory is the slowest of the three"
    launching = predict(Counts(1000, 0, 0), traffic, CARD).compute
    assert launching.median == pytest.approx(10e-3)
    assert launching.lower == pytest.approx(4.5e-3), "a tenth fewer kernels, 5 us each"
    assert launching.upper == pytest.approx(24e-3), "a fifth more, 20 us each"
    assert made.total.median == pytest.approx(14e-3 + 9e-6)
    assert made.total.n == 0


@pytest.mark.parametrize(
    ("counts", "traffic", "bound"),
    [
        (Counts(1000, 1e6, 1e6), Traffic(1e3, 1e3), "launch"),
        (Counts(10, 1e6, 1e6, syncs=1000), Traffic(1e3, 1e3), "launch"),
        (Counts(10, 1e6, 1e6), Traffic(1e7, 1e3), "transfer"),
        (Counts(10, 1e11, 1e6), Traffic(1e3, 1e3), "compute"),
        (Counts(10, 1e3, 1e11), Traffic(1e3, 1e3), "compute"),
        (Counts(1, 1e3, 1e3), Traffic(10, 10), "launch"),
    ],
)
def test_what_a_prediction_is_bound_by(counts: Counts, traffic: Traffic, bound: str) -> None:
    assert predict(counts, traffic, CARD).bound == bound


def test_a_curve_is_straight_between_and_beyond() -> None:
    curve = Curve({1: 2.0, 3: 4.0, 5: 10.0})
    assert [curve(n) for n in (1, 2, 4, 5, 7)] == [2, 3, 7, 10, 16]
    assert Curve({4: 8.0})(2) == 4.0
    assert Curve({4: 8.0}, constant=True)(2) == 8.0
    falling = Curve({1: 2.0, 3: 4.0, 5: 3.0})
    assert falling(9) == 4.0, "noise at the end does not make large batches cheap: 3 + 4 * 0.25"


def test_counts_between_sizes() -> None:
    at = counts_between({1: Counts(10, 1.0, 5.0), 3: Counts(10, 3.0, 9.0)})
    assert at(2) == Counts(10, 2.0, 7.0)
    assert at(101) == Counts(10, 101.0, 205.0)


@pytest.mark.parametrize("cost", [0.5, 1.0, 7.0, 99.0, 1234.0])
@pytest.mark.parametrize("most", [8, 4096])
def test_break_even_is_the_first_size_that_pays(cost: float, most: int) -> None:
    found = break_even(lambda n: cost, float, 1, most)
    assert found == int(cost) + 1
    assert break_even(lambda n: 2.0 * n, float, 1, most) is None


def cell(device: str, size: int, seconds: float, **more: Any) -> ProfileCell:
    exact, nothing = Timing(seconds, seconds, seconds, 9), Timing(0, 0, 0, 9)
    return ProfileCell(device, size, nothing, exact, nothing, exact, nothing, 0.0, 84, 84, **more)


def advised(
    cpu_ms: dict[int, float], launches: dict[int, int], syncs: int = 0, flops: float = 1e4
) -> fmapper.Verdict:
    """The verdict on the H200 for times measured on a CPU and kernels counted there."""
    card = find_accelerator("H200")
    measured = [cell("torch:cpu", size, ms / 1e3) for size, ms in cpu_ms.items()]
    predicted = []
    for size, n in launches.items():
        counts = Counts(n, flops * size, flops * size, syncs=syncs)
        made = predict(counts, Traffic(84.0 * size, 4.0), card)
        predicted.append(
            ProfileCell(
                "torch:cuda", size, made.transfer_in, made.compute, made.transfer_out, made.total,
                Timing(0, 0, 0, 0), None, 84 * size, 4, bound=made.bound, predicted=True,
                counts=counts,
            )
        )  # fmt: skip
    (verdict,) = verdicts([*measured, *predicted], {"torch:cuda": card})
    return verdict


def test_acceptance_the_context_rnn() -> None:
    """An epoch of 20 steps, 419 kernels: too little for a GPU at batch 1 and 64."""
    times = {1: 1.50, 64: 1.61, 1024: 1.91, 16384: 11.44}
    verdict = advised(times, dict.fromkeys(times, 419))
    assert verdict.pays[1] == verdict.pays[64] == "no"
    assert verdict.pays[16384] == "yes"
    assert verdict.batch_size is not None
    assert 1500 <= verdict.batch_size <= 5000
    assert verdict.low is not None
    assert verdict.high is not None
    assert verdict.low < verdict.batch_size < verdict.high
    assert verdict.bound == "launch"
    assert verdict.reason.startswith("pays from batch 2,")
    assert "419 kernels" in verdict.reason
    assert "stay on torch:cpu" in verdict.advice


def test_acceptance_the_cnn() -> None:
    """A training step of 157 to 215 kernels: hard to say at batch 1, a GPU from 8 on."""
    times = {1: 1.99, 8: 3.5, 32: 7.5, 128: 24.9, 512: 96.5}
    verdict = advised(times, {1: 188, 8: 160, 32: 160, 128: 160, 512: 160}, flops=1.2e7)
    assert verdict.pays == {1: "grey", 8: "yes", 32: "yes", 128: "yes", 512: "yes"}
    assert verdict.high is not None
    assert verdict.high <= 8


def rnn_epoch(weights: list[Any], data: Any) -> Any:
    """The context RNN of the acceptance case: 20 steps, each with its update."""
    import torch

    w1, w2 = weights
    with torch.enable_grad():
        context = torch.zeros(data.shape[1], 6)
        for step in range(20):
            hidden = torch.tanh(torch.cat([data[step][:, None], context], 1) @ w1)
            loss = ((hidden @ w2 - data[step + 1][:, None]) ** 2).sum() / 2
            loss.backward()
            with torch.no_grad():
                for w in (w1, w2):
                    w.sub_(w.grad, alpha=0.1)
                    w.grad.zero_()
            context = hidden.detach()
    return loss


def test_acceptance_kernels_of_the_rnn_are_about_those_that_a_profiler_saw() -> None:
    torch = pytest.importorskip("torch")
    weights = [torch.ones(7, 6, requires_grad=True), torch.ones(6, 1, requires_grad=True)]
    found = fmapper.backends.get_adapter("torch").count(rnn_epoch, weights, (torch.ones(21, 2),))
    assert found is not None
    assert 0.85 * 419 <= found.launches <= 1.15 * 419
    assert found.syncs == 0


@pytest.mark.nightly
def test_where_no_gpu_is_the_rows_are_predicted_and_say_so(clock: Clock) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: nothing of torch is predicted")

    class Quick(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            clock.takes(5e-6)  # less than to launch anything
            return super().forward(x)

    model = Quick(4, 3)
    made = fmapper.profile(model, X, batch_sizes=(1, 8), seconds=1e-3, accelerator="t4")
    assert made.accelerator == "NVIDIA T4"
    assert made.devices == ("torch:cpu", "torch:cuda")
    found = made.cell("torch:cuda", 8)
    assert found.predicted
    assert found.first_call is None
    assert found.counts is not None
    assert found.counts.launches == 1
    assert found.bytes_in == 8 * 16
    assert found.bytes_out == 8 * 12
    assert found.total.lower < found.total.median < found.total.upper
    assert any("torch:cuda is predicted, not measured" in note for note in made.notes)
    (verdict,) = made.verdicts
    assert verdict.predicted
    assert verdict.pays[1] == "no"
    asked = fmapper.profile(model, X, ["torch:cuda"], [1], seconds=1e-3)
    assert asked.devices == ("torch:cpu", "torch:cuda")
    assert asked.accelerator == "NVIDIA H200 SXM"
    with pytest.raises(fmapper.DeviceUnavailableError, match="torch:cuda is not available"):
        fmapper.profile(model, X, ["torch:cuda"], [1], **QUICK)
    unseen = fmapper.profile(model, X, batch_sizes=[1], **QUICK)
    assert unseen.devices == ("torch:cpu",)
    assert unseen.verdicts == ()


@pytest.mark.nightly
def test_a_prediction_for_a_card_of_ones_own() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: nothing of torch is predicted")
    slow = dataclasses.replace(CARD, name="slow", launch=(1.0, 2.0, 3.0))
    made = fmapper.profile(torch.nn.ReLU(), X, batch_sizes=(1, 8), seconds=0.02, accelerator=slow)
    assert made.cell("torch:cuda", 1).compute.median == 2.0
    (verdict,) = made.verdicts
    assert verdict.batch_size is None
    assert verdict.reason.startswith("does not pay up to batch 2,000; at 1 it is launch-bound")


def test_bounds_of_what_was_measured() -> None:
    cells = measured_bounds(
        [cell("d:x", 1, 1.0), cell("d:x", 11, 2.0), cell("d:x", 101, 11.0), cell("e:x", 1, 1.0)]
    )
    assert [c.bound for c in cells] == ["launch", "compute", "compute", None]
    moving = Timing(0.9, 0.9, 0.9, 9)
    large = dataclasses.replace(cell("d:x", 1, 1.0), share_moving=moving, bytes_in=1 << 21)
    assert measured_bounds([large])[0].bound == "transfer"


def test_a_measured_accelerator_is_compared_with_the_fastest_cpu() -> None:
    cells = [
        *(cell("numpy:cpu", n, s) for n, s in ((1, 1.0), (10, 10.0))),
        *(cell("torch:cpu", n, s) for n, s in ((1, 3.0), (10, 5.0))),
        *(cell("torch:cuda:0", n, s) for n, s in ((1, 4.0), (10, 4.0))),
    ]
    (verdict,) = verdicts(measured_bounds(cells), {})
    assert verdict.pays == {1: "no", 10: "yes"}
    assert verdict.against == "numpy:cpu"
    assert verdict.batch_size == 8, "1 + 4/9 n crosses 4 between 7 and 8"
    assert not verdict.predicted
    assert "a run takes 4 s, however small" in verdict.reason


# --- what is made of it --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> Profile:
    pytest.importorskip("torch")
    return fmapper.profile(dense(), X, ["numpy:cpu", "torch:cpu"], (1, 8), seconds=0.02)


@pytest.mark.nightly
def test_json_and_back(made: Profile) -> None:
    text = made.to_json()
    assert Profile.from_json(text) == made
    assert json.loads(text)["cells"][0]["batch_size"] == 1
    with pytest.raises(ValueError, match="not the JSON of a profile"):
        Profile.from_json('{"format": "other"}')


def test_it_prints_as_a_table(made: Profile) -> None:
    lines = str(made).splitlines()
    assert lines[0] == "Where the time of Dense goes"
    assert lines[1].split() == [
        "device", "batch", "in", "compute", "out", "total", "moving", "first", "bytes", "bound",
    ]  # fmt: skip
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith(("numpy:cpu  ", "torch:cpu  ")) for line in lines) == 2
    assert "<pre" in made._repr_html_()
    assert "Where the time of Dense goes" in made._repr_html_()
    assert repr(made).startswith("<Profile of Dense: numpy:cpu, torch:cpu")
    for verdict in made.verdicts:
        assert any(line.startswith(f"{verdict.device}: ") for line in lines)
        assert any("~" in line for line in lines if line.startswith(verdict.device))


def test_a_cell_that_is_not_there(made: Profile) -> None:
    with pytest.raises(KeyError, match="torch:cpu at batch size 3 is not in this profile"):
        made.cell("torch:cpu", 3)


@pytest.mark.nightly
def test_the_plot_is_a_picture(made: Profile, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    made.plot(tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib(made: Profile, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(fmapper.BackendUnavailableError, match=r"pip install 'matplotlib>=[\d.]+'$"):
        made.plot(tmp_path / "p.png")


@pytest.mark.nightly
def test_the_bar_is_on_stderr_and_only_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fmapper.profiles import progress

    monkeypatch.setattr(progress, "_PATIENCE", -1.0)
    fmapper.profile(lambda x: x, X, ["numpy:cpu"], (1, 2), progress=True, **QUICK)
    shown = capsys.readouterr()
    assert "numpy:cpu, batch size 2" in shown.err
    assert shown.out == ""
    fmapper.profile(lambda x: x, X, ["numpy:cpu"], (1, 2), **QUICK)
    assert capsys.readouterr().err == "", "stderr is not a terminal here"


def test_nothing_of_it_is_loaded_before_it_is_asked_for() -> None:
    script = """
import sys, fmapper, fmapper.cli.main
own = [name for name in sys.modules if name.startswith("fmapper.profiles.")]
assert not own, own
assert "rich" not in sys.modules and "click" in sys.modules
fmapper.profile
assert "fmapper.profiles.profile" in sys.modules and "matplotlib" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# --- with a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu("torch")
def test_a_gpu_is_measured_and_waited_for() -> None:
    torch = pytest.importorskip("torch")

    class Squares(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4096, 4096) / 4096)

        def forward(self, x: Any) -> Any:
            for _ in range(20):
                x = x @ self.w
            return x

    made = fmapper.profile(
        Squares(), np.ones((4096, 4096), np.float32), ["torch:cpu", "torch:cuda"], (64, 4096),
        seconds=0.5,
    )  # fmt: skip
    (name,) = {device for device in made.devices if "cuda" in device}
    found = made.cell(name, 4096)
    assert not found.predicted
    # 20 products of 137 GFLOP: nothing that exists does them in a tenth of this without waiting.
    assert found.compute.median > 20 * 2 * 4096**3 / 1e15
    assert found.counts is not None
    assert found.counts.launches == 20
    (verdict,) = made.verdicts
    assert verdict.pays[4096] == "yes"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_gpu_is_calibrated_in_five_seconds(backend: str) -> None:
    from fmapper.profiles.calibrate import calibrate

    pytest.importorskip(backend)
    found = [d for d in fmapper.devices() if d.backend == backend and d.kind in ("cuda", "gpu")]
    if not found:
        pytest.skip(f"{backend} sees no GPU")
    calibrate.cache_clear()
    start = time.perf_counter()
    card = calibrate(found[0])
    assert time.perf_counter() - start < 10, "five, and what the backend takes to start"
    assert card.flops["float32"] > 1e12
    assert card.memory > 1e11
    assert 1e9 < card.link < 1e12
    assert 5e-7 < card.launch[1] < 1e-4
    assert calibrate(found[0]) is card


@pytest.mark.nightly
def test_calibration_gives_ranges_in_order() -> None:
    """On a CPU it is of no use, but runs the same way."""
    pytest.importorskip("torch")
    from fmapper.profiles.calibrate import calibrate

    card = calibrate(fmapper.Device("torch", "cpu"))
    for least, likely, most in (card.launch, card.copy, card.sync, card.link_share):
        assert 0 <= least <= likely <= most
    assert card.flops["float32"] > 1e8
    assert card.name.endswith("measured here")


@pytest.mark.nightly
def test_one_device_and_one_batch_size_need_no_list() -> None:
    made = fmapper.profile(
        np.negative, np.ones((1, 4)), "numpy:cpu", 4, seconds=0.01, predict=False
    )
    assert [(str(cell.device), cell.batch_size) for cell in made.cells] == [("numpy:cpu", 4)]
