"""What a program asserts: each fact once, and buffers that nothing writes in one comparison."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support import converting  # noqa: E402


def assertions(model: Any) -> list[Any]:
    return [call for call in model.program.graph.calls if call.op.startswith("aten::_assert")]


class Padded(torch.nn.Module):
    """Computes sizes with tensors, as audio codecs do."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(4):
            self.register_buffer(f"kernel_{i}", torch.tensor(i + 3), persistent=False)
            self.register_buffer(f"stride_{i}", torch.tensor(i + 1), persistent=False)

    def forward(self, x: Any) -> Any:
        for i in range(4):
            kernel, stride = getattr(self, f"kernel_{i}"), getattr(self, f"stride_{i}")
            extra = torch.ceil((x.shape[-1] - kernel) / stride + 1).to(torch.int64) * stride
            x = torch.nn.functional.pad(x, (int(kernel - stride), int(extra) % 3))
            x = x * int(stride)
        return x


class Split(torch.nn.Module):
    """Has one size that its inputs give, and reads it twice."""

    def forward(self, x: Any, lengths: Any) -> Any:
        first = x[: int(lengths[0])]
        second = x[int(lengths[0]) :]
        return torch.cat([second * 2, first]) * int(lengths[1])


@pytest.mark.nightly
def test_sizes_from_buffers_are_compared_once() -> None:
    x = torch.randn(2, 9)
    module = Padded()
    model = fmapper.convert(module, "jax", (x,))
    compiled = jax.jit(lambda params, x: model.replace(params=params)(x))
    converting.compare(compiled(model.params, x.numpy() * 2), module(x * 2))
    assert len(assertions(model)) == 1


@pytest.mark.nightly
def test_another_buffer_is_refused() -> None:
    x = torch.randn(2, 9)
    model = fmapper.convert(Padded(), "jax", (x,))
    other = {**model.buffers, "kernel_2": np.int32(7)}
    with pytest.raises(fmapper.ProgramInputError, match="buffers hold the numbers"):
        model.replace(buffers=other)(x.numpy())


@pytest.mark.nightly
def test_a_buffer_that_is_written_is_read_in_each_call() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.tensor(1))
            self.register_buffer("more", torch.tensor(2))

        def forward(self, x: Any) -> Any:
            x = torch.nn.functional.pad(x, (int(self.steps), int(self.more)))
            self.steps += 1
            return x

    model = fmapper.convert(Counting(), "jax", (torch.ones(3),))
    assert len(assertions(model)) == 2
    _, after = model(np.ones(3, "float32"), mutable=True)
    with pytest.raises(fmapper.ProgramInputError, match=r"u[0-9]+, 1"):
        after(np.ones(3, "float32"))


@pytest.mark.nightly
def test_each_fact_is_asserted_once() -> None:
    x, lengths = torch.randn(6, 2), torch.tensor([4, 3])
    model = fmapper.convert(Split(), "jax", (x, lengths), specialize=True)
    converting.compare(model(x.numpy(), lengths.numpy()), Split()(x, lengths))
    conditions = [str(call.args[0]) for call in assertions(model)]
    assert len(conditions) == len(set(conditions)) <= 3
    with pytest.raises(fmapper.ProgramInputError, match="asserts"):
        model(x.numpy(), np.array([3, 3]))
