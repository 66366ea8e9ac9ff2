"""Modules that cannot be recorded as they are: without values, offloaded, quantised, compiled."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from torch.utils._python_dispatch import return_and_correct_aliasing  # noqa: E402

from support import converting  # noqa: E402


class Net(torch.nn.Module):
    """With ties, statistics, and a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.arange(8.0), persistent=False)

    def forward(self, ids: Any) -> Any:
        places = torch.arange(ids.shape[0], device=ids.device)
        return self.head(self.norm(self.embedding(ids) * self.scale)) + places[:, None]


IDS = torch.tensor([0, 2, 4])


def hollow() -> Any:
    with torch.device("meta"):
        return Net().eval()


@pytest.mark.nightly_cases("real-jax")
@pytest.mark.parametrize("to", ["jax", "flax"])
@pytest.mark.parametrize("ids", [IDS, IDS.to("meta")], ids=["real", "meta"])
def test_a_module_without_values_becomes_a_model_that_is_filled(to: str, ids: Any) -> None:
    if to == "flax":
        pytest.importorskip("flax")
    module = Net().eval()
    empty = fmapper.convert(hollow(), to, (ids,))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in fmapper.state(empty).values())
    with pytest.raises(fmapper.ProgramInputError, match="materialize"):
        empty(IDS.numpy())
    values = fmapper.state(fmapper.convert(module, to, (IDS,)))
    assert fmapper.verify(module, fmapper.materialize(empty, values), IDS)


def test_the_state_dict_of_torch_fills_it() -> None:
    module = torch.nn.Linear(8, 5)
    with torch.device("meta"):
        empty = fmapper.convert(torch.nn.Linear(8, 5), "jax", (torch.ones(2, 8),))
    assert fmapper.verify(module, empty.load_state_dict(module.state_dict()), torch.ones(2, 8))


def test_values_that_are_there_stay() -> None:
    module = hollow()
    module.norm = torch.nn.BatchNorm1d(8)
    found = fmapper.convert(module, "jax", (IDS,))
    kinds = {name: type(x) is jax.ShapeDtypeStruct for name, x in fmapper.state(found).items()}
    assert kinds["embedding.weight"]
    assert not kinds["norm.weight"]
    assert module.embedding.weight.is_meta
    assert module.norm.weight.device.type == "cpu"


def test_offloaded_weights_are_named_in_the_first_line() -> None:
    """As accelerate has them: on `meta`, with a hook that brings the values at each call."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, device="meta"))
    module[1]._hf_hook = types.SimpleNamespace(offload=True)
    with pytest.raises(fmapper.ConversionError, match=r"^Sequential: 1\.weight is offloaded"):
        fmapper.convert(module, "jax", (torch.ones(2, 4),))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_packed_weights_are_named() -> None:
    module = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 4)).eval()
    quantised = torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(fmapper.ConversionError, match=r"^Sequential: 1 is quantized by torch\.ao"):
        fmapper.convert(quantised, "jax", (torch.ones(2, 4),))


@pytest.mark.parametrize(
    ("function", "shapes", "words"),
    [
        (lambda x, y: torch.einsum("ai,bi->ab", x, y.half()), [(1, 3), (0, 3)], "Cast one of them"),
        (
            lambda x, y: (x > y).pow_(True),
            [(3,), (3,)],
            r"Write the cast explicitly, as in x = x\.pow",
        ),
    ],
)
def test_what_torch_runs_but_does_not_record_has_a_remedy(
    function: Any, shapes: Any, words: str
) -> None:
    given = tuple(torch.ones(shape) for shape in shapes)
    function(*given)
    with pytest.raises(fmapper.ConversionError, match=words):
        fmapper.convert(converting.Function(function), "jax", given)


class Scaled(torch.Tensor):
    """Integers and a scale: a tensor that consists of others, as those of torchao do."""

    integers: Any
    scale: Any

    @staticmethod
    def __new__(cls, integers: Any, scale: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype)

    def __init__(self, integers: Any, scale: Any) -> None:
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self) -> Any:
        return ["integers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, _: Any, __: Any, ___: Any) -> Any:
        return Scaled(parts["integers"], parts["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            x, weight, *rest = args
            return func(x, weight.integers.to(x.dtype) * weight.scale, *rest)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [
            func(part, *args[1:], **(kwargs or {})) for part in (args[0].integers, args[0].scale)
        ]
        return return_and_correct_aliasing(func, args, kwargs or {}, Scaled(*inner))


@pytest.mark.parametrize("to", ["jax", "flax"])
def test_quantised_weights_are_put_together_in_the_program(to: str) -> None:
    if to == "flax":
        pytest.importorskip("flax")
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    integers = torch.randint(-127, 127, (3, 4), dtype=torch.int8)
    weight = Scaled(integers, torch.rand(3, 1))
    module[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    x = torch.randn(2, 4)
    found = fmapper.convert(module, to, (x,))
    converting.compare(found(x.numpy()), module(x))
    assert type(module[0].weight.data) is Scaled
    arrays = fmapper.state(found)
    assert sum(x.dtype == np.int8 for x in arrays.values()) == 1
    if to == "jax":
        assert all(np.issubdtype(x.dtype, np.floating) for x in found.params.values())


class Compiled(torch.nn.Module):
    """Compiled parts of every kind; recording must not run the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.compile(torch.nn.Linear(4, 4))
        self.in_place = torch.nn.Linear(4, 4)
        self.in_place.compile()
        self.function = torch.compile(torch.cos)

    def forward(self, x: Any) -> Any:
        return self.function(self.in_place(self.module(x)))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_parts_run_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Compiled()
    compiled: list[Any] = []
    convert_frame: Any = pytest.importorskip("torch._dynamo.convert_frame")
    monkeypatch.setattr(convert_frame, "compile_frame", lambda *a, **k: compiled.append(a))
    x = torch.randn(2, 4)
    found = fmapper.convert(module, "jax", (x,))
    assert not compiled
    wanted = torch.cos(module.in_place.forward(module.module._orig_mod(x)))
    converting.compare(found(x.numpy()), wanted)
    assert sys.modules["torch._dynamo.eval_frame"]._stance.stance == "default"
