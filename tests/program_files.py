"""Small models of both directions whose programs are saved: the corpus of the tests of files.

`python tests/program_files.py FOLDER` writes them. Those in `tests/data/programs` were written by
version 1 of the format and are never written again: such files must stay readable.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fmapper

WRITTEN = Path(__file__).parent / "data" / "programs"
Pair = namedtuple("Pair", "first second")


def _dense_torch() -> Any:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    return fmapper.convert(net, "jax", (torch.ones(2, 3),))


def _branches_torch() -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Embedding(5, 3)
            self.second = torch.nn.Linear(3, 5, bias=False)
            self.second.weight = self.first.weight
            self.register_buffer("b", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
            self.register_buffer("hidden", torch.tensor(2), persistent=False)

        def forward(self, ids: Any, *, flag: bool = True) -> Any:
            x = self.second(self.first(ids))
            y = torch.cond(ids.sum() > 0, lambda y: y + 1, lambda y: y * 2, (x,))
            constant = torch.tensor([float("inf"), 1.0, 2.0])
            return {"y": y * self.hidden, "b": self.b.float(), "c": constant, "n": None}

    torch.manual_seed(0)
    return fmapper.convert(Net(), "jax", (torch.tensor([[1, 2]]),), {"flag": True})


def _sizes_torch() -> Any:
    import torch

    class Net(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            z = torch.cat([x, y], 1)
            return Pair(z.reshape(-1), torch.full((x.shape[0], 2), float("-inf")) + z.shape[1])

    n, m = torch.export.Dim("n"), torch.export.Dim("m")
    shapes = {"x": {0: n, 1: m}, "y": {0: n}}
    return fmapper.convert(
        Net(), "jax", (torch.ones(3, 5), torch.ones(3, 2)), dynamic_shapes=shapes
    )


def _training_torch() -> Any:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Dropout(0.5)
    )
    return fmapper.convert(net, "flax", (torch.ones(2, 1, 4, 4),))


def _dense_jax() -> Any:
    import jax

    params = {"w": jax.numpy.full((3, 2), 0.5), "b": jax.numpy.zeros(2)}

    def net(params: Any, x: Any) -> Any:
        return jax.nn.softmax(jax.nn.relu(x @ params["w"] + params["b"]))

    return fmapper.convert((net, params), "torch", (jax.numpy.ones((2, 3)),))


def _loops_jax() -> Any:
    import jax

    jnp = jax.numpy

    def net(x: Any, n: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            carry = jax.lax.cond(row.sum() > 0, lambda c: c + row, lambda c: c * 2, carry)
            return carry, jnp.tanh(carry)

        carry, rows = jax.lax.scan(step, jnp.zeros(2), x)
        count = jax.lax.while_loop(lambda i: i < n, lambda i: i + 2, jnp.int32(0))
        mask = jnp.tril(jnp.ones((3, 3), bool))
        held = jnp.asarray([1.0, 2.0, 3.0])
        return {"rows": rows, "last": Pair(carry, count), "m": jnp.where(mask, held, -jnp.inf)}

    return fmapper.convert(net, "torch", (jnp.ones((3, 2)), jnp.int32(5)))


def _sizes_jax() -> Any:
    import jax

    jnp = jax.numpy

    def net(x: Any, y: Any, scale: Any = 2.0) -> Any:
        z = jnp.concatenate([x, y], 0)
        return z.reshape(-1)[None] * scale, jnp.arange(2 * x.shape[0] + 1) // 2

    return fmapper.convert(
        net, "torch", (jnp.ones((4, 2)), jnp.ones((3, 2))), dynamic_shapes=["b, _", "c, _"]
    )


def _training_jax() -> Any:
    import jax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.dense = nnx.Linear(3, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.drop(nnx.gelu(self.norm(self.dense(x))))

    return fmapper.convert(Net(nnx.Rngs(0)), "torch", (jax.numpy.ones((2, 3)),))


def _tiny_torch() -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: Any, n: int = 2) -> Any:
            return [torch.arange(2) + x * self.scale * n]

    return fmapper.convert(Net(), "jax", (torch.ones(2),))


def _tiny_jax() -> Any:
    import jax

    jnp = jax.numpy

    def net(params: Any, x: Any) -> Any:
        return {"out": jnp.arange(2) + x * params["scale"], "none": None}

    return fmapper.convert((net, {"scale": jnp.ones(2)}), "torch", (jnp.ones(2),))


def _branch_jax() -> Any:
    import jax

    def net(x: Any) -> Any:
        return jax.lax.cond(x[0] > 0, lambda x: x + 1, lambda x: -x, x)

    return fmapper.convert(net, "torch", (jax.numpy.ones(2),))


MODELS: dict[str, Callable[[], Any]] = {
    "dense_torch": _dense_torch,
    "branches_torch": _branches_torch,
    "sizes_torch": _sizes_torch,
    "training_torch": _training_torch,
    "dense_jax": _dense_jax,
    "loops_jax": _loops_jax,
    "sizes_jax": _sizes_jax,
    "training_jax": _training_jax,
    "tiny_torch": _tiny_torch,
    "tiny_jax": _tiny_jax,
    "branch_jax": _branch_jax,
}


def targets(name: str) -> tuple[str, ...]:
    """What a file of the corpus is converted to."""
    return ("jax", "flax") if name.endswith("_torch") else ("torch",)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in MODELS.items():
        make().save(folder / f"{name}.safetensors")
