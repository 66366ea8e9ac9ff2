"""To a GPU and back through movers: exact, apart, tied, all or nothing. Skipped without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper
from fmapper import functor, to_cpu, to_device, to_gpu, to_jax, to_numpy, to_torch

np = pytest.importorskip("numpy")

on_torch = pytest.mark.gpu("torch")
on_jax = pytest.mark.gpu("jax")
on_both = pytest.mark.gpu("torch", "jax")

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float64"),
    *("complex64", "complex128"),
)
LAYOUTS = {
    "whole": lambda a: a,
    "transposed": lambda a: a.T,
    "strided": lambda a: a[::2, 1::3],
    "row": lambda a: a[3],
    "none": lambda a: a[:0],
}


def matrix(dtype: str) -> Any:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    real = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = np.random.default_rng(0).integers(0, 256, 40 * 36 * real.itemsize, np.uint8)
    return (raw & 1 if dtype == "bool" else raw).view(real).reshape(40, 36)


@functor
class Layer:
    def __init__(self, weight: Any, bias: Any) -> None:
        self.weight, self.bias = weight, bias


@on_torch
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_there_and_back_bit_by_bit(dtype: str) -> None:
    tree = {name: view(matrix(dtype)) for name, view in LAYOUTS.items()}
    here = to_torch(tree)
    there = to_gpu(here, strict=True)
    assert str(fmapper.get_device(there)) == "torch:cuda:0"
    for name, old in here.items():
        assert there[name].dtype == old.dtype, name
        assert there[name].stride() == old.to("cuda").stride(), name
    for back in (to_numpy(there), to_numpy(to_cpu(there))):
        assert all(back[name].tobytes() == tree[name].tobytes() for name in tree)


@on_jax
@pytest.mark.parametrize("dtype", [d for d in DTYPES if "64" not in d and d != "complex128"])
def test_jax_there_and_back_bit_by_bit(dtype: str) -> None:
    tree = {name: view(matrix(dtype)) for name, view in LAYOUTS.items()}
    there = to_jax(tree, device="gpu:0")
    assert str(fmapper.get_device(there)) == "jax:gpu:0"
    back = to_numpy(there)
    assert all(back[name].tobytes() == tree[name].tobytes() for name in tree)


@on_both
@pytest.mark.parametrize("copy", [None, True, False])
def test_between_torch_and_jax_on_the_gpu(copy: bool | None) -> None:
    import torch

    for size in (7, 1 << 20):
        old = torch.arange(size, dtype=torch.float32, device="cuda")
        new = to_jax({"w": old}, copy=copy)["w"]
        assert str(fmapper.get_device(new)) == "jax:gpu:0"
        shares = new.unsafe_buffer_pointer() == old.data_ptr()
        assert shares == (copy is False)
        if copy is not False:
            old.fill_(-1)
            torch.cuda.synchronize()
        assert np.asarray(new)[-1] == size - 1
        back = to_torch(new, copy=copy)
        assert back.device.type == "cuda"
        assert back[-1].item() == size - 1
        assert (back.data_ptr() == new.unsafe_buffer_pointer()) == (copy is False)


@on_torch
def test_a_model_goes_with_its_ties_parameters_and_gradients() -> None:
    import torch

    w = torch.nn.Parameter(torch.randn(64, 64))
    w.grad = torch.randn(64, 64)
    frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    model = {"a": Layer(w, frozen), "b": Layer(w, w.detach()[:, 0]), "big": torch.randn(3 << 20)}
    there = to_gpu(model, strict=True)
    new = there["a"].weight
    assert type(new) is torch.nn.Parameter
    assert new.is_leaf
    assert new.requires_grad
    assert torch.equal(new.grad.cpu(), w.grad)
    assert new.grad.device.type == "cuda"
    assert not there["a"].bias.requires_grad
    assert there["b"].weight is new
    with torch.no_grad():
        new[5, 0] = 42.0
    assert there["b"].bias[5].item() == 42.0, "a view of the new weight"
    assert torch.equal(there["big"].cpu(), model["big"])
    assert w.device.type == "cpu"
    assert to_gpu(there)["a"].weight is new, "it is there already"


def unusual(kind: str) -> Any:
    """A tensor about which a batch has to ask more than about an ordinary one."""
    import torch

    w = torch.nn.Parameter(torch.randn(6, 4))
    if kind == "attribute":
        w.scale = torch.ones(3)  # type: ignore[attr-defined]
    elif kind == "hook":
        w.register_hook(lambda gradient: 2 * gradient)
    elif kind == "gradient":
        w.grad = torch.randn(6, 4)
    elif kind == "history":
        return 2 * w
    elif kind == "conjugate":
        return torch.randn(6, 4, dtype=torch.complex64).conj()
    elif kind == "negative":
        return torch._neg_view(torch.randn(6, 4))
    elif kind == "slice":
        return torch.randn(8, 4)[2:]
    elif kind == "transposed":
        return torch.nn.Parameter(torch.randn(4, 6).t())
    elif kind == "inference":
        with torch.inference_mode():
            return torch.randn(6, 4)
    elif kind == "subclass":
        return type("Named", (torch.nn.Parameter,), {})(torch.randn(6, 4))
    elif kind == "unsigned":
        return torch.arange(24).to(torch.uint16)
    else:
        assert kind == "frozen"
        w.requires_grad_(False)
    return w


KINDS = """attribute hook gradient history conjugate negative slice transposed inference
subclass unsigned frozen"""


@on_torch
@pytest.mark.parametrize("kind", KINDS.split())
def test_one_unusual_tensor_among_many_is_moved_as_alone(kind: str) -> None:
    import torch

    plain = [torch.nn.Parameter(torch.randn(n)) for n in range(1, 40)]
    odd = unusual(kind)
    *there, new = to_gpu([*plain, odd], strict=True)
    assert all(type(x) is torch.nn.Parameter and x.requires_grad for x in there)
    assert all(torch.equal(x.detach().cpu(), old) for x, old in zip(there, plain, strict=True))
    assert (type(new), new.dtype, new.layout) == (type(odd), odd.dtype, odd.layout)
    assert (new.is_leaf, new.requires_grad) == (odd.is_leaf, odd.requires_grad)
    assert new.device.type == "cuda"
    assert torch.equal(new.detach().cpu(), odd.detach().resolve_conj())
    if kind == "attribute":
        assert new.scale.device.type == "cuda"
    elif kind == "gradient":
        assert torch.equal(new.grad.cpu(), odd.grad)
    elif kind == "hook":
        new.sum().backward()
        assert (new.grad == 2).all()
    elif kind == "history":
        assert new.grad_fn is not None


@on_torch
def test_parameters_move_as_tensors_while_a_gradient_is_taken() -> None:
    import torch

    layer = torch.nn.Linear(2, 2)

    def loss(model: Any) -> Any:
        return to_gpu(model, strict=True)(torch.ones(1, 2, device="cuda")).sum()

    gradient = fmapper.grad(loss)(layer)
    assert torch.equal(gradient.bias.cpu(), torch.ones(2))


@on_torch
def test_numpy_goes_to_the_backend_that_is_chosen() -> None:
    with fmapper.use_backend("torch"):
        new = to_gpu({"w": np.ones(3, np.float32), "frozen": np.frombuffer(b"abcd", np.uint8)})
    assert new["w"].device.type == "cuda"
    assert new["frozen"].tolist() == [97, 98, 99, 100]


@on_torch
def test_the_source_may_change_as_soon_as_the_move_returns() -> None:
    import torch

    for size in (100, 20 << 20):
        old = torch.ones(size)
        host = np.ones(size, np.float32)
        for _ in range(3):
            new = to_gpu([old], strict=True)[0], to_torch([host], device="cuda")[0]
            old.fill_(2)
            host.fill(2)
            assert all((array == 1).all().item() for array in new)
            old.fill_(1)
            host.fill(1)


@on_torch
def test_results_are_ready_on_the_current_stream() -> None:
    import torch

    tree = [torch.full((1 << 22,), float(i)) for i in range(8)] + [torch.ones(9) for _ in range(50)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = to_gpu(tree, strict=True)
        sums = [array.sum().item() for array in there]
    assert sums == [array.sum().item() for array in tree]


@on_torch
def test_out_of_memory_leaves_nothing_behind() -> None:
    import torch

    _, total = torch.cuda.mem_get_info()
    small = [torch.ones(1 << 20) for _ in range(8)]
    huge = torch.ones(1).expand(total)  # as many floats as the GPU has bytes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with pytest.raises(fmapper.MoveError, match=r"model\.last.*out of memory"):
        to_gpu({"first": small, "last": huge}, strict=True)
    assert torch.cuda.memory_allocated() == before
    assert all(array.device.type == "cpu" for array in small)


@on_torch
def test_casts_on_the_way() -> None:
    import torch

    tree = {"w": torch.randn(5), "n": torch.arange(3)}
    there = to_gpu(tree, strict=True, dtype="bfloat16")
    assert there["w"].dtype == torch.bfloat16
    assert there["n"].dtype == torch.int64
    assert torch.equal(there["w"].cpu(), tree["w"].bfloat16())
    with pytest.raises(fmapper.LossyCastError):
        to_device("cuda:0", dtype="float16")({"w": torch.tensor([1e6], device="cuda")})


@on_jax
def test_one_array_of_jax_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX notices after its call has returned, when the array is waited for."""
    import jax

    wait = jax.block_until_ready

    def fail(arrays: Any) -> Any:
        if any(x.shape == (7,) for x in (arrays if isinstance(arrays, list) else [arrays])):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return wait(arrays)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(jax, "block_until_ready", fail)
    tree = {"small": np.ones(3, np.float32), "large": np.ones(7, np.float32)}
    with pytest.raises(fmapper.MoveError, match=r"model\.large.*RESOURCE_EXHAUSTED"):
        to_jax(tree, device="gpu:0")


@on_jax
def test_keys_and_deleted_arrays_on_a_gpu_are_refused_by_name() -> None:
    import jax

    there = to_jax({"a": np.ones(3, np.float32), "b": np.ones(4, np.float32)}, device="gpu:0")
    key = jax.device_put(jax.random.key(0), there["a"].device)
    with pytest.raises(fmapper.UnsupportedLeafError, match=r"model\.key.*PRNG key"):
        to_numpy({**there, "key": key})
    there["b"].delete()
    with pytest.raises(fmapper.FmapperError, match=r"model\.b.*deleted"):
        to_numpy(there)


@on_both
@pytest.mark.parametrize("copy", [None, False])
def test_memory_does_not_grow_over_a_thousand_moves(copy: bool | None) -> None:
    import torch

    tree = {name: torch.randn(64, n, device="cuda") for n, name in enumerate("ab", start=1)}

    def there_and_back() -> Any:
        there = fmapper.fmap(to_jax(copy=copy), tree)
        return fmapper.fmap(to_torch(copy=copy), there)

    for _ in range(3):
        back = there_and_back()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        back = there_and_back()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    shares = [back[name].data_ptr() == old.data_ptr() for name, old in tree.items()]
    assert all(shares) == any(shares) == (copy is False)
    assert all(torch.equal(back[name].cpu(), old.cpu()) for name, old in tree.items())


@on_both
def test_between_the_frameworks_there_is_one_copy() -> None:
    import torch

    old = torch.randn(1 << 20, device="cuda")

    def growth(move: Any) -> tuple[Any, int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = move()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before

    there, grown = growth(lambda: to_jax([old]))
    assert grown == 0, "JAX copies from torch's own memory"
    (back,), grown = growth(lambda: to_torch(there))
    assert grown == old.nbytes
    assert torch.equal(back, old)
    _, grown = growth(lambda: to_torch(to_jax([old], copy=False), copy=False))
    assert grown == 0


@on_torch
def test_a_model_is_whole_after_it_did_not_fit() -> None:
    import torch

    total = torch.cuda.mem_get_info()[1]
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model.big = torch.nn.Parameter(torch.ones(1).expand(total), requires_grad=False)  # of 4 bytes
    before = {name: value.clone() for name, value in model.state_dict().items() if name != "big"}
    parameters = list(model.parameters())
    held = torch.cuda.memory_allocated()
    with pytest.raises(fmapper.MoveError, match=r"model\.big.*out of memory"):
        to_gpu(model, strict=True)
    assert torch.cuda.memory_allocated() == held
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    del model.big
    there = to_gpu(model, strict=True)
    assert torch.equal(there[0].weight.cpu(), model[0].weight)


@on_torch
@pytest.mark.parametrize("size", [100, 12 << 20])
def test_the_default_device_of_torch_changes_nothing(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    empty = torch.empty
    with torch.device("cuda"):
        empty(1)  # torch looks up which functions obey the default device

    def as_cuda_does(*shape: Any, **options: Any) -> Any:
        result = empty(*shape, **options)
        if options.get("pin_memory") and not result.is_cpu:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return result

    monkeypatch.setattr(torch, "empty", as_cuda_does)
    here = [torch.randn(size) for _ in range(20 if size < 1000 else 1)]
    with torch.device("cuda"):
        there = to_gpu(here, strict=True)
        back = to_cpu(there)
    assert all(new.device.type == "cuda" for new in there)
    assert all(map(torch.equal, back, here))
