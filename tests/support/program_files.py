"""Small models of both directions whose programs are saved: the corpus of the tests of files.

`python tests/support/program_files.py FOLDER` writes them. Those in `tests/data/programs` were
written by version 1 of the format and are never written again: such files must stay readable.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fmapper

WRITTEN = Path(__file__).parents[1] / "data" / "programs"
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


def operations() -> dict[str, Callable[[], Any]]:
    """Models of one operation each, which are fuzzed beside the files."""
    import jax

    jnp, lax = jax.numpy, jax.lax
    x, y = jnp.ones((4, 6)), jnp.arange(24.0).reshape(4, 6)
    n, image = jnp.arange(6), jnp.ones((1, 2, 5, 5))
    key = jax.random.key_data(jax.random.key(0))
    one: dict[str, tuple[Any, ...]] = {
        "slice": (lambda x: x[1:3, ::2], x),
        "dynamic": (lambda x, n: lax.dynamic_slice(x, (n[0], n[1]), (2, 2)), x, n),
        "gather": (lambda x, n: x[n % 4, n], x, n),
        "scatter": (lambda x, n: x.at[n % 4].set(2.0, mode="drop"), x, n),
        "scattered": (lambda x, n: x.at[n % 4].add(x[0, 0]), x, n),
        "sort": (lambda x: lax.sort((x, x * 2), dimension=1, num_keys=1), x),
        "topk": (lambda x: lax.top_k(x, 2), x),
        "argmax": (lambda x: jnp.argmax(x, 1), x),
        "cumsum": (lambda x: lax.cumsum(x, 1, reverse=True), x),
        "cummax": (lambda x: lax.cummax(x + 1j, 1), x),
        "window": (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 2), "SAME"), x),
        "windows": (lambda x: lax.reduce_window(x + 1j, 1j, lax.mul, (2, 2), (1, 1), "SAME"), x),
        "extreme": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"), x),
        "own": (lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * 2, (0,)), x),
        "conv": (lambda x: lax.conv_general_dilated(x, x[:, :, :3, :3], (1, 1), "SAME"), image),
        "spread": (lambda x: lax.conv_transpose(x, x[:, :, :3, :3], (2, 2), "SAME",
                   dimension_numbers=("NCHW", "OIHW", "NCHW")), image),
        "dot": (lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))), x, y),
        "batch": (lambda x: jnp.einsum("bij,bkj->bik", x[0], x[0]), image),
        "pad": (lambda x: lax.pad(x, 0.0, ((1, 2, 1), (-1, 0, 0))), x),
        "concatenate": (lambda x: jnp.concatenate([x, x], 1), x),
        "reshape": (lambda x: jnp.transpose(x.reshape(2, 2, 6), (2, 0, 1)), x),
        "broadcast": (lambda x: jnp.broadcast_to(x, (3, 4, 6)), x),
        "squeeze": (lambda x: jnp.squeeze(x[None], 0)[..., None], x),
        "rev": (lambda x: lax.rev(x, (0, 1)), x),
        "split": (lambda x: jnp.split(x, 3, 1), x),
        "tril": (lambda x: jnp.where(jnp.tril(jnp.ones((6, 6), bool)), x[0], 0), x),
        "eye": (lambda x: x @ jnp.eye(6), x),
        "power": (lambda x: lax.integer_pow(x, 5) + lax.pow(x, 2.5), x),
        "precision": (lambda x: lax.reduce_precision(x, 5, 4), x),
        "convert": (lambda x: x.astype(jnp.int8).astype(jnp.uint32) >> 3, x),
        "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), x),
        "clamp": (lambda x: lax.clamp(0.0, x, 2.0), x),
        "select": (lambda x: lax.select_n(x > 0, x, -x), x),
        "fft": (jnp.fft.rfft, x),
        "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.T), x),
        "eigh": (lambda x: jnp.linalg.eigh(x @ x.T), x),
        "solve": (lambda x: jnp.linalg.solve(x @ x.T, x), x),
        "qr": (jnp.linalg.qr, x),
        "random": (lambda k: jax.random.normal(jax.random.wrap_key_data(k), (3,)), key),
        "permuted": (lambda k: jax.random.permutation(jax.random.wrap_key_data(k), 5), key),
        "loop": (lambda x: lax.fori_loop(0, 3, lambda i, a: a * i, x), x),
        "while": (lambda x: lax.while_loop(lambda a: a.sum() < 99, lambda a: a + 1, x), x),
        "scan": (lambda x: lax.scan(lambda c, r: (c + r, c * r), x[0], x), x),
        "map": (lambda x: lax.map(jnp.sin, x), x),
        "switch": (lambda n: lax.switch(n[0], [jnp.sin, jnp.cos], 1.0), n),
        "own_gradient": (lambda x: jax.nn.silu(x) + jax.nn.logsumexp(x) + jax.nn.relu6(x), x),
        "softmax": (lambda x: jax.nn.softmax(x @ x.T) @ x, x),
        "special": (lambda x: lax.erf(x) + lax.lgamma(x) + lax.digamma(x) + lax.igamma(x, x), x),
        "norm": (lambda x: (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True)), x),
        "popcount": (lambda n: lax.population_count(n) + lax.clz(n), n),
        "associative": (lambda x: lax.associative_scan(jnp.add, x), x),
    }  # fmt: skip

    def maker(function: Any, *args: Any) -> Callable[[], Any]:
        return lambda: fmapper.convert(function, "torch", args, check=False)

    return {f"{name}_jax": maker(*given) for name, given in one.items()}


def targets(name: str) -> tuple[str, ...]:
    """What a file of the corpus is converted to."""
    return ("jax", "torch", "flax") if name.endswith("_torch") else ("torch",)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in MODELS.items():
        make().save(folder / f"{name}.safetensors")
