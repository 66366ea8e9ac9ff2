"""A plan says what a move does, before it is made and without making it."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
import warnings
from typing import Any

import pytest

import fmapper
from fmapper import Plan, plan, to_cpu, to_device, to_gpu, to_jax, to_numpy, to_torch

np = pytest.importorskip("numpy")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def jnp() -> Any:
    return pytest.importorskip("jax.numpy")


class Undeclared:
    def __init__(self) -> None:
        self.w = np.ones(3)


def rows(made: Plan) -> dict[str, tuple[Any, ...]]:
    return {str(leaf.path): (leaf.action, leaf.dtype, leaf.new_dtype, leaf.nbytes) for leaf in made}


def test_every_fate_of_a_leaf(torch: Any, jnp: Any) -> None:
    tree = {
        "w": np.ones((2, 3), np.float32),
        "wide": np.ones(5),
        "there": jnp.ones(2),
        "n": np.array([1], np.int64),
        "bad": np.array([None]),
        "meta": torch.ones(2, device="meta"),
        "f": len,
        "count": 3,
    }
    made = plan(to_jax, tree)
    assert rows(made) == {
        "w": ("moved", "float32", "float32", 24),
        "wide": ("cast", "float64", "float32", 20),
        "there": ("skipped", "float32", "float32", 0),
        "n": ("cast", "int64", "int32", 4),
        "bad": ("refused", None, None, 0),
        "meta": ("refused", "float32", "float32", 0),
        "f": ("skipped", None, None, 0),
    }
    why = {str(leaf.path): leaf.reason for leaf in made}
    assert "no counterpart" in why["bad"]
    assert "no values" in why["meta"]
    assert "there already" in why["there"]
    assert "jax does not support float64" in why["wide"]
    assert "builtin_function_or_method" in why["f"]
    assert {str(leaf.path) for leaf in made.refused} == {"bad", "meta"}
    assert made.nbytes == 48
    (way,) = made.bytes_by_way()
    assert (str(way[0]), way[1].backend, made.bytes_by_way()[way]) == ("numpy:cpu", "jax", 48)


def test_a_tied_leaf_takes_memory_once(torch: Any) -> None:
    w = np.ones(4)
    assert rows(plan(to_torch, [w, {"again": w}])) == {"[0]": ("moved", "float64", "float64", 32)}


def test_a_cycle_is_no_obstacle(torch: Any) -> None:
    tree: dict[str, Any] = {"w": np.ones(1)}
    tree["self"] = tree
    assert len(plan(to_torch, tree)) == 1


@pytest.mark.parametrize("copy", [None, True, False])
def test_it_says_what_shares(torch: Any, jnp: Any, copy: bool | None) -> None:
    """Held against the memory of what really comes out."""
    tree = {"t": torch.ones(64), "j": jnp.ones(64), "n": np.ones(64)}
    new = to_numpy(tree, copy=copy)
    made = {str(leaf.path): leaf for leaf in plan(to_numpy(copy=copy), tree)}
    assert made["n"].action == ("moved" if new["n"] is not tree["n"] else "skipped")
    shares = {
        "t": np.shares_memory(new["t"], tree["t"].numpy()),
        "j": np.shares_memory(new["j"], np.asarray(tree["j"])),
    }
    assert {key: made[key].action == "shared" for key in shares} == shares
    assert all(leaf.nbytes == 0 for leaf in made.values() if leaf.action == "shared")


def test_copy_false_is_tried(torch: Any) -> None:
    made = plan(to_torch(copy=False), {"w": np.ones(3), "flipped": np.ones(3)[::-1]})
    assert [leaf.action for leaf in made] == ["shared", "refused"]
    assert "stride" in made.leaves[1].reason


def test_what_it_says_is_what_happens(torch: Any, jnp: Any) -> None:
    """Refused is what raises; what is moved, cast or skipped comes out so."""
    leaves = [np.ones(3), np.array(["x"]), torch.ones(3), jnp.ones(3), torch.ones(3).to_sparse()]
    leaves += [np.ones(3, np.float32), np.int64(2), torch.ones(3, device="meta"), Undeclared()]
    for mover in (to_numpy, to_torch, to_jax, to_cpu, to_torch(dtype="float16"), to_cpu(copy=True)):
        for leaf in leaves:
            (said,) = plan(mover, [leaf])
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", fmapper.PrecisionWarning)
                    new = mover(leaf)
            except fmapper.FmapperError:
                assert said.action == "refused", (mover, leaf)
            else:
                assert (said.action == "skipped") == (new is leaf), (mover, leaf)
                assert said.action != "refused", (mover, leaf)


def test_the_real_move_reports_the_same(torch: Any) -> None:
    reports: list[Plan] = []
    tree = {"w": np.ones((2, 2)), "there": torch.ones(1), "n": np.arange(3)}
    mover = to_torch(dtype="float32", report=reports.append)
    made = plan(mover, tree)
    assert not reports, "a plan is no move"
    mover(tree)
    assert reports == [made]


def test_a_move_that_fails_reports_nothing(torch: Any) -> None:
    reports: list[Plan] = []
    with pytest.raises(fmapper.UnsupportedLeafError):
        to_torch([np.ones(1), np.array([None])], report=reports.append)
    assert not reports


def test_nothing_is_allocated(torch: Any) -> None:
    tree = {"w": np.ones(1 << 22), "v": torch.ones(1 << 22), "s": np.ones(1 << 22)[::-1]}
    plan(to_torch, tree)
    tracemalloc.start()
    try:
        for mover in (to_torch(dtype="float16"), to_jax, to_numpy(copy=True)):
            plan(mover, tree)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.nightly
def test_between_devices_of_jax(jnp: Any) -> None:
    """Eight make-believe CPUs: what goes from one to another, or is spread over all, is copied."""
    script = """
import jax, numpy as np, fmapper
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()), ("x",))
spread = jax.device_put(np.arange(16.0, dtype="float32"), NamedSharding(mesh, PartitionSpec("x")))
one = jax.device_put(np.ones(3, "float32"), jax.devices()[1])
for mover in (fmapper.to_device("cpu:3"), fmapper.to_numpy):
    print(*(leaf.action for leaf in fmapper.plan(mover, [spread, one])))
new = fmapper.to_jax(spread, copy=True)
print(new is spread, new.sharding == spread.sharding)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["moved moved", "moved shared", "False True"], done.stderr


def test_undeclared_holders_are_refused_by_path() -> None:
    (said,) = plan(to_numpy, {"a": [Undeclared()]})
    assert (str(said.path), said.action) == ("a[0]", "refused")
    assert "@fmapper.functor" in said.reason
    (said,) = plan(to_numpy(strict=False), [Undeclared()])
    assert said.action == "skipped"


def test_a_container_that_holds_arrays_beside_its_items_is_refused() -> None:
    class Named(dict):  # type: ignore[type-arg]
        pass

    named = Named(w=np.ones(1))
    named.extra = np.ones(2)
    made = plan(to_cpu, [named])
    assert [(str(leaf.path), leaf.action) for leaf in made] == [
        ("[0]", "refused"),
        ("[0].w", "skipped"),
    ]


def test_a_missing_gpu_is_said_without_a_warning(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (said,) = plan(to_gpu, [torch.ones(2)])
    assert said.action == "skipped"
    assert "torch:cuda is not available" in said.reason
    (said,) = plan(to_gpu(strict=True), [torch.ones(2)])
    assert said.action == "refused"
    (said,) = plan(to_device("cuda:0"), [torch.ones(2)])
    assert said.action == "refused"


def test_it_prints_as_a_table(torch: Any) -> None:
    text = str(plan(to_torch, {"layer": [np.ones((1024, 256), np.float32)], "bad": np.array([""])}))
    lines = text.splitlines()
    assert lines[0] == "plan of to_torch()"
    (moved,) = [line for line in lines if "model.layer[0]" in line]
    assert all(word in moved for word in ("numpy:cpu", "torch:cpu", "float32", "1.0 MiB", "moved"))
    assert next(i for i, line in enumerate(lines) if "model.bad" in line) < lines.index(moved)
    assert "1 moved, 1 refused" in text
    assert "numpy:cpu -> torch:cpu: 1.0 MiB" in text


def test_a_long_table_is_cut() -> None:
    text = str(plan(to_cpu(copy=True), [np.ones(1) for _ in range(1000)]))
    assert len(text.splitlines()) < 60
    assert "leaves more" in text
    assert "1000 moved" in text


def test_it_takes_the_mover_first() -> None:
    with pytest.raises(TypeError, match=r"a mover as its first"):
        plan({"w": np.ones(1)}, to_cpu)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="report="):
        to_cpu(report="yes")  # type: ignore[arg-type]


# --- random generators ---------------------------------------------------------------------------


def test_a_generator_that_is_there_stays_itself(torch: Any) -> None:
    tree = {"np": np.random.default_rng(0), "old": np.random.RandomState(0), "t": torch.Generator()}
    for mover in (to_cpu, to_device("cpu"), to_torch, to_numpy):
        new = mover(tree)
        assert all(new[key] is tree[key] for key in tree)
    (said,) = plan(to_cpu, [tree["np"]])
    assert said.action == "skipped"
    assert "random generator" in said.reason


def test_a_copied_generator_draws_the_same_on_its_own(torch: Any) -> None:
    numpy_rng, torch_rng = np.random.default_rng(5), torch.Generator().manual_seed(5)
    numpy_rng.random(3)
    torch.rand(3, generator=torch_rng)
    new = to_cpu({"np": numpy_rng, "t": torch_rng, "again": numpy_rng}, copy=True)
    assert new["np"] is not numpy_rng
    assert new["t"] is not torch_rng
    assert new["again"] is new["np"]
    drawn = new["np"].random(4).tolist(), torch.rand(4, generator=new["t"]).tolist()
    assert drawn == (numpy_rng.random(4).tolist(), torch.rand(4, generator=torch_rng).tolist())


def test_a_key_leaves_jax_as_data_or_not_at_all(jnp: Any) -> None:
    jax = pytest.importorskip("jax")
    tree = {"key": jax.random.key(0), "w": jnp.ones(2)}
    with pytest.raises(fmapper.UnsupportedLeafError, match=r"model\.key: .*key_data.*strict=False"):
        to_numpy(tree)
    new = to_numpy(tree, strict=False)
    assert new["key"] is tree["key"]
    assert type(new["w"]) is np.ndarray
    key, w = plan(to_numpy(strict=False), tree)
    assert (key.action, w.action) == ("skipped", "shared")
    assert "PRNG key" in key.reason


@pytest.mark.gpu
def test_a_generator_goes_to_the_gpu_with_its_model(torch: Any) -> None:
    old = torch.Generator().manual_seed(3)
    drawn = []
    for _ in range(2):
        new = to_device("cuda:0")({"g": old, "again": old})
        assert new["g"] is new["again"]
        assert new["g"].device.type == "cuda"
        drawn.append(torch.rand(4, device="cuda", generator=new["g"]).tolist())
    assert drawn[0] == drawn[1], "the seed is made from the state"
    torch.rand(1, generator=old)
    other = to_device("cuda:0")(old)
    assert torch.rand(4, device="cuda", generator=other).tolist() != drawn[0]
    again = to_cpu(new["g"])
    assert again.device.type == "cpu"


def test_a_generator_has_no_place_on_meta(torch: Any) -> None:
    tree = {"w": torch.ones(2), "g": torch.Generator().manual_seed(1)}
    assert [leaf.action for leaf in plan(to_device("meta"), tree)] == ["moved", "skipped"]
    moved = to_device("meta")(tree)
    assert moved["g"] is tree["g"]
    assert moved["w"].device.type == "meta"
