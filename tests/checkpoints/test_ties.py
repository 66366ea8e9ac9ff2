"""Tied arrays are one array in every format, and the library of each format reads its files."""

import json

import numpy as np
import pytest
import torch

import fmapper
from fmapper.checkpoints import convert_checkpoint, inspect

flax_serialization = pytest.importorskip("flax.serialization")
ocp = pytest.importorskip("orbax.checkpoint")

FORMATS = {
    "safetensors": "x.safetensors",
    "folder": "x",
    "npz": "x.npz",
    "pt": "x.pt",
    "msgpack": "x.msgpack",
    "orbax": "x.orbax",
    "dcp": "x.dcp",
}
EVERY = pytest.mark.parametrize("form", FORMATS)
TWICE = ("msgpack", "orbax")  # their libraries read each name


def tree(w, other):
    return {"b": np.ones(3, np.float32), "embed": {"w": w}, "head": {"w": other}, "step": 3}


def weights(seed=0):
    return np.random.default_rng(seed).normal(size=(1500, 1500)).astype(np.float32)


def saved(tmp_path, form, tree):
    path = tmp_path / FORMATS[form]
    fmapper.save(tree, path, "safetensors" if form == "folder" else form)
    return path


def size(path):
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)


@EVERY
def test_a_tied_array_is_one_array_again(tmp_path, form):
    w = weights()
    path = saved(tmp_path, form, tree(w, w))
    stored = fmapper.load(path)
    assert stored["embed.w"] is stored["head.w"]
    assert stored["step"] == 3
    np.testing.assert_array_equal(stored["head.w"].read(), w)
    moved = fmapper.to_torch(stored)
    assert moved["embed.w"] is moved["head.w"]
    assert [(row.name, row.tied_to) for row in inspect(path).rows][-1] == ("head.w", "embed.w")
    empty = np.zeros_like(w)
    filled = fmapper.load(path, like=tree(empty, empty))
    assert filled["embed"]["w"] is filled["head"]["w"]
    np.testing.assert_array_equal(filled["head"]["w"], w)
    copies = 2 if form in TWICE else 1
    assert size(path) < (copies + 0.2) * w.nbytes


@EVERY
def test_equal_arrays_are_not_tied(tmp_path, form):
    path = saved(tmp_path, form, tree(weights(), weights()))
    stored = fmapper.load(path)
    assert stored["embed.w"] is not stored["head.w"]
    assert all(row.tied_to is None for row in inspect(path).rows)


@pytest.mark.sampled(2)
@EVERY
def test_ties_survive_conversions(tmp_path, form):
    w = weights()
    path = saved(tmp_path, form, tree(w, w))
    for target in ("y.msgpack", "y.orbax", "y.dcp", "y.safetensors"):
        convert_checkpoint(path, tmp_path / target)
        stored = fmapper.load(tmp_path / target)
        assert stored["embed.w"] is stored["head.w"]


def test_flax_reads_what_is_tied(tmp_path):
    w = weights()
    path = saved(tmp_path, "msgpack", tree(w, w))
    found = flax_serialization.msgpack_restore(path.read_bytes())
    assert [*found] == ["b", "embed", "head", "step"]
    assert found["step"] == 3
    for name in ("embed", "head"):
        np.testing.assert_array_equal(found[name]["w"], w)
    empty = tree(np.zeros_like(w), np.zeros_like(w))
    filled = flax_serialization.from_bytes(empty, path.read_bytes())
    np.testing.assert_array_equal(filled["head"]["w"], w)
    np.testing.assert_array_equal(filled["b"], np.ones(3))


def test_orbax_reads_what_is_tied(tmp_path):
    w = weights()
    path = saved(tmp_path, "orbax", tree(w, w))
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(path)
    assert {*found} == {"b", "embed", "head", "step"}
    for name in ("embed", "head"):
        np.testing.assert_array_equal(found[name]["w"], w)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_what_is_tied(tmp_path):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    w = weights()  # in two pieces
    path = saved(tmp_path, "dcp", tree(w, w))
    state = {"embed.w": torch.zeros(w.shape), "head.w": torch.zeros(w.shape)}
    checkpoint.load(state, checkpoint_id=path, no_dist=True)
    for found in state.values():
        np.testing.assert_array_equal(found.numpy(), w)
    dcp_to_torch_save(path, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    np.testing.assert_array_equal(found["head.w"].numpy(), w)


@pytest.mark.parametrize(
    ("ties", "said"),
    [
        ({"head.w": "gone"}, "one of them is missing"),
        ({"gone": "embed.w"}, "one of them is missing"),
        ({"head.w": "b"}, "another array"),
        ({"head.w": "head.w"}, "another array"),
        ({"head.w": "embed.w", "embed.w": "head.w"}, "another array"),
        ({"head.w": 3}, "one of them is missing"),
        (3, "cannot read"),
    ],
)
@pytest.mark.parametrize("form", TWICE)
def test_ties_that_a_file_cannot_have_are_refused(tmp_path, form, ties, said, monkeypatch):
    module = pytest.importorskip(f"fmapper_adapters.flax.checkpoints.{form}")
    text = json.dumps({"version": 1, "ties": ties})
    monkeypatch.setattr(module, "tied_to_text", lambda contents: text)
    w = np.ones((2, 2), np.float32)
    path = saved(tmp_path, form, tree(w, w))
    with pytest.raises(fmapper.CheckpointError, match=said):
        fmapper.load(path)


def test_many_ties_are_said_in_pieces(tmp_path):
    w = np.ones(1, np.float32)
    names = [f"{at}{'n' * 3000}" for at in range(500)]
    path = saved(tmp_path, "msgpack", dict.fromkeys(names, w))
    stored = fmapper.load(path)
    assert len({id(array) for array in stored.values()}) == 1
    assert [*stored] == names
    assert [*flax_serialization.msgpack_restore(path.read_bytes())] == names


def test_ties_of_msgpack_that_are_not_text_are_refused(tmp_path):
    w = np.ones((2, 2), np.float32)
    path = saved(tmp_path, "msgpack", tree(w, w))
    path.write_bytes(path.read_bytes().replace(b'"version"', b'"v\xff\xff\xffion"'))
    with pytest.raises(fmapper.CheckpointError, match="utf-8"):
        fmapper.load(path)
