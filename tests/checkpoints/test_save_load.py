"""`save` and `load`: every format gives back what it got, to its own library as well."""

import dataclasses
import io
import json
import os
import pickle
import struct
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

import fmapper
from fmapper.checkpoints import (
    Checkpoint,
    Drop,
    LazyArray,
    Rename,
    Reshape,
    Rules,
    convert_checkpoint,
    diff,
)

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
flax_serialization = pytest.importorskip("flax.serialization")

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


def place(tmp_path, form):
    return tmp_path / FORMATS[form], "safetensors" if form == "folder" else form


def net():
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    made.head = made[0]
    return made


def a_tree():
    return {
        "net": net(),
        "jax": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float64(2.5),
        "bool": np.array([True, False]),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "complex": np.array([1 + 2j], np.complex64),
        "step": 7,
        "rate": float("inf"),
        "name": "π",
        "flag": True,
    }


@EVERY
def test_what_was_saved_is_loaded_with_ties_numbers_and_strings(tmp_path, form):
    path, name = place(tmp_path, form)
    tree = a_tree()
    if form == "orbax":
        with pytest.raises(
            fmapper.CheckpointError, match="empty: orbax does not support arrays without"
        ):
            fmapper.save(tree, path, name)
        del tree["empty"]
    fmapper.save(tree, path, name)
    like = {**tree, "step": 0, "rate": 0.0, "name": "", "flag": False}
    found = fmapper.load(path, like=like)
    assert not diff(tree, {**found, "flag": bool(found["flag"])})
    assert found["net"].head is found["net"][0]
    assert found["net"].head is not tree["net"].head
    assert type(found["jax"]) is type(tree["jax"])
    assert (found["step"], found["rate"], found["name"]) == (7, float("inf"), "π")
    assert bool(found["flag"]) is True
    assert not [p.name for p in tmp_path.iterdir() if p != path], "something was left beside it"


@EVERY
def test_without_a_model_arrays_are_named_and_not_read(tmp_path, form):
    path, name = place(tmp_path, form)
    tree = a_tree()
    if form == "orbax":
        del tree["empty"]
    fmapper.save(tree, path, name)
    found = fmapper.load(path)
    assert isinstance(found, Checkpoint)
    assert found["step"] == 7
    assert isinstance(found["net.0.weight"], LazyArray)
    assert found["jax"].dtype == ml_dtypes.bfloat16
    assert found["jax"].read(((1, 2), (0, 2))).astype(float).tolist() == [[3.0, 4.0]]
    moved = fmapper.to_numpy(found)
    assert moved["fortran"].tolist() == [[0, 1, 2], [3, 4, 5]]
    if form in ("safetensors", "folder", "npz", "pt"):
        assert found["net.head.weight"] is found["net.0.weight"]
        assert moved["net.head.weight"] is moved["net.0.weight"]


@EVERY
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_narrow_dtypes_survive(tmp_path, form, dtype):
    path, name = place(tmp_path, form)
    kind = np.dtype(dtype) if hasattr(np, dtype) else np.dtype(getattr(ml_dtypes, dtype))
    array = np.arange(-8, 8).astype(kind).reshape(4, 4)
    fmapper.save({"w": array}, path, name)
    found = fmapper.load(path)["w"].read()
    assert (found.dtype, found.tobytes()) == (array.dtype, array.tobytes())


def test_a_model_without_memory_is_filled(tmp_path):
    path = tmp_path / "x.safetensors"
    real = torch.nn.Linear(3, 2)
    fmapper.save(real, path)
    found = fmapper.load(path, like=torch.nn.Linear(3, 2, device="meta"))
    assert isinstance(found.weight, torch.nn.Parameter)
    assert torch.equal(found.weight, real.weight)
    half = fmapper.load(path, like=torch.nn.Linear(3, 2, device="meta"), dtype="bfloat16")
    assert torch.equal(half.weight, real.weight.bfloat16())


def test_shapes_of_jax_are_filled(tmp_path):
    import jax

    path = tmp_path / "x.npz"
    fmapper.save({"w": np.ones((2, 3), np.float32)}, path)
    found = fmapper.load(path, like={"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)})
    assert isinstance(found["w"], jax.Array)
    assert found["w"].sum() == 6


@pytest.mark.parametrize(
    "option",
    [
        {"dtype": "bfloat16"},
        {"device": "nonsense"},
        {"sharding": object()},
        {"default": {}},
        {"strict": False},
    ],
)
def test_options_of_filling_need_a_tree_to_fill(tmp_path, option):
    fmapper.save({"w": np.ones(2)}, tmp_path / "x.npz")
    with pytest.raises(TypeError, match=f"load: {next(iter(option))}= applies only with like="):
        fmapper.load(tmp_path / "x.npz", **option)
    for other in ({"format": "npz"}, {"rules": Rules()}, {"like": {}}):
        with pytest.raises(TypeError, match="to= is for the model in a file"):
            fmapper.load(tmp_path / "x.npz", to="jax", **other)


def test_what_does_not_fit_is_listed(tmp_path):
    path = tmp_path / "x.safetensors"
    fmapper.save({"a": np.ones(2), "b": np.ones(2), "d": np.ones(3)}, path)
    like = {"a": np.zeros(2), "c": np.zeros(2), "d": np.zeros(2)}
    with pytest.raises(fmapper.StructureMismatchError) as error:
        fmapper.load(path, like=like)
    for line in ("c: missing from the checkpoint", "b: in the checkpoint, but not in the tree"):
        assert line in str(error.value)
    with pytest.raises(fmapper.StructureMismatchError, match=r"d: shape \(3,\)"):
        fmapper.load(path, like=like, strict=False)
    assert like["a"].tolist() == [0, 0]


# --- numbers and texts --------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("array", [np.asarray, torch.tensor, jnp.asarray, jax.ShapeDtypeStruct])
def test_numbers_fill_arrays_without_dimensions_and_the_reverse(tmp_path, form, array):
    path, name = place(tmp_path, form)
    numbers = {"step": 1000, "rate": 0.5, "flag": True}
    arrays = {"count": np.array(7), "decay": np.array(0.25, np.float32), "on": np.array(True)}
    fmapper.save({**numbers, **arrays}, path, name)
    if array is jax.ShapeDtypeStruct:
        like = {n: array((), t) for n, t in zip(numbers, ("int32", "float32", "bool"), strict=True)}
    else:
        like = {"step": array(0), "rate": array(0.0), "flag": array(False)}
    loaded = fmapper.load(path, like={**like, "count": 0, "decay": 0.0, "on": False})
    for key, number in numbers.items():
        assert loaded[key].dtype == like[key].dtype
        assert loaded[key].item() == number
    assert [loaded[key] for key in arrays] == [7, 0.25, True]
    assert [type(loaded[key]) for key in arrays] == [int, float, bool]


@pytest.mark.parametrize(
    ("stored", "like", "said"),
    [
        (1000, np.zeros(1, int), "1000 in the checkpoint, an array in the tree"),
        (1000, np.zeros(()), "1000 in the checkpoint, an array in the tree"),
        (0.5, np.array(1), "0.5 in the checkpoint, an array in the tree"),
        ("a", np.array(1), "'a' in the checkpoint, an array in the tree"),
        (7, np.array(True), "7 in the checkpoint, an array in the tree"),
        (np.array([7]), 0, "an array in the checkpoint, 0 in the tree"),
        (np.array(0.5), 0, "an array in the checkpoint, 0 in the tree"),
        (np.array(7), "a", "an array in the checkpoint, 'a' in the tree"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_numbers_and_arrays_of_other_kinds_are_refused(tmp_path, stored, like, said, strict):
    fmapper.save({"w": np.ones(2), "x": stored}, tmp_path / "x.npz")
    with pytest.raises(fmapper.StructureMismatchError, match=f"x: {said}"):
        fmapper.load(tmp_path / "x.npz", like={"w": np.zeros(2), "x": like}, strict=strict)


def test_a_number_that_does_not_fit_its_array_is_refused(tmp_path):
    fmapper.save({"n": 2**40, "x": 1e300}, tmp_path / "x.npz")
    for like in ({"n": np.int32(0), "x": 0.0}, {"n": 0, "x": np.float32(0)}):
        with pytest.raises(fmapper.LossyCastError):
            fmapper.load(tmp_path / "x.npz", like=like)


@pytest.mark.parametrize(
    ("like", "said"),
    [
        ({}, "step: in the checkpoint, but not in the tree"),
        ({"step": 0, "epoch": 0}, "epoch: missing from the checkpoint"),
        ({"step": "none"}, "step: 1000 in the checkpoint, 'none' in the tree"),
        ({"step": False}, "step: 1000 in the checkpoint, False in the tree"),
    ],
)
def test_numbers_are_as_strict_as_arrays(tmp_path, like, said):
    fmapper.save({"w": np.ones(2), "step": 1000}, tmp_path / "x.npz")
    with pytest.raises(fmapper.StructureMismatchError, match=said):
        fmapper.load(tmp_path / "x.npz", like={"w": np.zeros(2), **like})


def test_a_file_of_arrays_does_not_give_a_step(tmp_path):
    fmapper.save({"w": np.ones(2)}, tmp_path / "x.npz")
    like = {"w": np.zeros(2), "step": 0}
    with pytest.raises(fmapper.StructureMismatchError, match="step: missing from the checkpoint"):
        fmapper.load(tmp_path / "x.npz", like=like)
    assert fmapper.load(tmp_path / "x.npz", like=like, strict=False)["step"] == 0
    assert fmapper.load(tmp_path / "x.npz", like=like, default={"step": 3})["step"] == 3


@fmapper.functor
@dataclasses.dataclass
class Block:
    w: np.ndarray
    heads: int = 8
    rate: float = 0.1


def test_settings_of_an_object_may_be_missing_all_together(tmp_path):
    fmapper.save({"net": {"w": np.ones(2)}, "step": 5}, tmp_path / "arrays.npz")
    fmapper.save({"net": {"w": np.ones(2), "heads": 4}, "step": 5}, tmp_path / "some.npz")
    like = {"net": Block(np.zeros(2)), "step": 0}
    loaded = fmapper.load(tmp_path / "arrays.npz", like=like)
    assert (loaded["step"], loaded["net"].heads, loaded["net"].w.tolist()) == (5, 8, [1, 1])
    with pytest.raises(fmapper.StructureMismatchError, match=r"net\.rate: missing"):
        fmapper.load(tmp_path / "some.npz", like=like)


def test_settings_that_a_module_keeps_to_itself_are_not_left_over(tmp_path):
    settings = {"0": {"weight": np.ones((1, 2)), "bias": np.ones(1), "rate": 0.5}}
    net = torch.nn.Sequential(torch.nn.Linear(2, 1).double())
    fmapper.save({"net": settings, "step": 5}, tmp_path / "x.npz")
    assert fmapper.load(tmp_path / "x.npz", like={"net": net, "step": 0})["step"] == 5


@pytest.mark.nightly
def test_settings_of_its_source_are_not_left_over_for_a_converted_model(tmp_path):
    source = torch.nn.Sequential(torch.nn.Linear(2, 1)).eval()
    fmapper.save({**fmapper.state(source), "0.rate": 0.5}, tmp_path / "x.npz")
    converted = fmapper.convert(source, "jax", (torch.ones(1, 2),))
    hollow = fmapper.to_jax(converted, device="meta")
    loaded = fmapper.load(tmp_path / "x.npz", like=hollow)
    assert fmapper.verify(source, loaded, torch.ones(1, 2))


def test_rules_rename_and_drop_numbers_too(tmp_path):
    saved = {"net.w": np.ones(2), "net.heads": 4, "step": 5, "host": "a"}
    fmapper.save(saved, tmp_path / "x.npz")
    rules = Rules([Drop("host"), Rename("net.{rest...}", "{rest...}")])
    like = {"w": np.zeros(2), "heads": 0, "step": 0}
    loaded = fmapper.load(tmp_path / "x.npz", like=like, rules=rules)
    assert (loaded["heads"], loaded["step"]) == (4, 5)
    convert_checkpoint(tmp_path / "x.npz", tmp_path / "y.npz", rules=rules)
    assert not diff(tmp_path / "y.npz", loaded)
    turned = fmapper.load(tmp_path / "x.npz", rules=Rules([Reshape("{any...}", [2, 1])]))
    assert (turned["net.w"].shape, turned["step"]) == ((2, 1), 5)


def test_floats_of_8_bits_are_not_read_without_their_scales(tmp_path):
    weight = np.ones(2, ml_dtypes.float8_e4m3fn)
    fmapper.save({"w": weight, "w_s": np.ones(1, np.float32)}, tmp_path / "x.npz")
    like = {"w": np.zeros(2, np.float32)}
    for strict in (True, False):
        with pytest.raises(fmapper.StructureMismatchError, match="w_s"):
            fmapper.load(tmp_path / "x.npz", like=like, strict=strict)
    plain = fmapper.load(tmp_path / "x.npz", like=like, rules=Rules([Drop("w_s")]))
    assert plain["w"].tolist() == [1, 1]


def test_a_default_is_given_for_arrays_with_values_too(tmp_path):
    fmapper.save({"w": np.ones(2)}, tmp_path / "x.npz")
    like = {"w": np.zeros(2), "b": np.zeros(2)}
    for default in ({"b": np.full(2, 3.0)}, lambda name, array: array + 3):
        assert fmapper.load(tmp_path / "x.npz", like, default=default)["b"].tolist() == [3, 3]


def test_buffers_that_torch_does_not_save_may_be_missing(tmp_path):
    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    path = tmp_path / "x.pt"
    torch.save(Positions().state_dict(), path)
    assert fmapper.load(path, like=Positions()).table.tolist() == [0, 1, 2]


@pytest.fixture(scope="module")
def writes_pt(tmp_path_factory):
    """The first file of torch imports much of it."""
    fmapper.save({"w": torch.ones(1)}, tmp_path_factory.mktemp("first") / "x.pt")


@pytest.mark.usefixtures("writes_pt")
def test_tensors_are_saved_from_the_host_whatever_the_default_device(tmp_path):
    weights = {"w": torch.randn(3, 2), "half": torch.ones(5).half()}
    with torch.device("meta"):
        fmapper.save(weights, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert all(torch.equal(loaded[name], old) for name, old in weights.items())


def test_narrowing_into_a_model_is_said(tmp_path):
    path = tmp_path / "x.safetensors"
    fmapper.save({"w": np.ones(2, np.float32)}, path)
    with pytest.warns(fmapper.PrecisionWarning, match="w"):
        fmapper.load(path, like={"w": np.ones(2, np.float16)})
    fmapper.save({"w": np.full(2, 1e6, np.float32)}, path)
    with pytest.raises(fmapper.LossyCastError):
        fmapper.load(path, like={"w": np.ones(2, np.float16)}, dtype="float16")


# --- the libraries of the formats -----------------------------------------------------------------


def test_safetensors_reads_what_is_saved_and_is_read(tmp_path):
    from safetensors.numpy import load_file, save_file

    ours, theirs = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    arrays = {"w": np.arange(6.0).reshape(2, 3), "n": np.arange(3)}
    fmapper.save(arrays, ours)
    save_file(arrays, theirs)
    assert not diff(load_file(ours), arrays)
    assert not diff(theirs, arrays)


def test_torch_reads_what_is_saved_and_is_read(tmp_path):
    path = tmp_path / "x.pt"
    module = net()
    fmapper.save(module, path)
    found = torch.load(path, weights_only=True)
    assert found["head.weight"].data_ptr() == found["0.weight"].data_ptr()
    assert all(torch.equal(found[k], v) for k, v in module.state_dict().items())
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"model": {"w": weight, "t": weight.t(), "row": weight[1]}, "step": 3}, path)
    read = fmapper.to_numpy(fmapper.load(path))
    assert read["model.t"].tolist() == weight.t().tolist()
    assert read["model.row"].tolist() == weight[1].tolist()
    assert read["step"] == 3


def test_flax_reads_what_is_saved_and_is_read(tmp_path):
    path = tmp_path / "x.msgpack"
    tree = {"params": {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(2, ml_dtypes.bfloat16)}}
    fmapper.save({**tree, "step": 3}, path)
    found = flax_serialization.msgpack_restore(path.read_bytes())
    assert found["step"] == 3
    assert not diff(found, {**tree, "step": 3})
    path.write_bytes(flax_serialization.to_bytes({**tree, "list": [1.5, None, "x"]}))
    assert not diff(path, {**tree, "list": [1.5, None, "x"]})


def test_flax_arrays_in_pieces(tmp_path, monkeypatch):
    from fmapper_adapters.flax.checkpoints import msgpack

    path = tmp_path / "x.msgpack"
    array = np.arange(35.0).reshape(5, 7)
    monkeypatch.setattr(msgpack, "_MOST_CHUNK", 64)
    fmapper.save({"a": {"w": array}, "b": np.ones(2)}, path)
    found = flax_serialization.msgpack_restore(path.read_bytes())
    assert found["a"]["w"].tolist() == array.tolist()
    assert not diff(path, {"a": {"w": array}, "b": np.ones(2)})


def test_orbax_reads_what_is_saved_and_is_read(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = {"params": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2, jnp.bfloat16)}}
    fmapper.save(tree, tmp_path / "ours", "orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "ours")
        checkpointer.save(tmp_path / "theirs", {**tree, "step": 3})
    assert not diff(found, tree)
    assert not diff(tmp_path / "theirs", {**tree, "step": 3})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_reads_what_is_saved_and_is_read(tmp_path):
    from torch.distributed import checkpoint

    module = net()
    fmapper.save({"net": module, "step": 3}, tmp_path / "ours", "dcp")
    found = {f"net.{name}": torch.empty_like(x) for name, x in module.state_dict().items()}
    checkpoint.load(found, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert all(torch.equal(found[f"net.{k}"], v) for k, v in module.state_dict().items())
    tree = {"net": module.state_dict(), "list": [torch.arange(6).view(2, 3).t(), 1.5], "step": 3}
    checkpoint.save(tree, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert not diff(tmp_path / "theirs", tree)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_array_in_pieces_of_several_ranks(tmp_path):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import metadata as parts

    whole = np.arange(35, dtype=np.float32).reshape(5, 7)
    checkpoint.save({"w": torch.from_numpy(whole)}, checkpoint_id=tmp_path / "x", no_dist=True)
    place = tmp_path / "x" / ".metadata"
    about = checkpoint.FileSystemReader(tmp_path / "x").read_metadata()
    data, storage, chunks = b"", {}, []
    for start, stop in ((0, 2), (2, 5)):
        file = io.BytesIO()
        torch.save(torch.from_numpy(whole[start:stop].copy()), file)
        offsets = torch.Size([start, 0])
        info = next(iter(about.storage_data.values()))
        info = dataclasses.replace(info, offset=len(data), length=len(file.getvalue()))
        storage[parts.MetadataIndex("w", offsets)] = info
        chunks.append(parts.ChunkStorageMetadata(offsets, torch.Size([stop - start, 7])))
        data += file.getvalue()
    about.state_dict_metadata["w"].chunks[:] = chunks
    about.storage_data = storage
    (tmp_path / "x" / "__0_0.distcp").write_bytes(data)
    place.write_bytes(pickle.dumps(about))
    found = fmapper.load(tmp_path / "x")["w"]
    assert found.read().tolist() == whole.tolist()
    assert found.read(((1, 4), (2, 5))).tolist() == whole[1:4, 2:5].tolist()
    place.write_bytes(pickle.dumps(os.system))
    with pytest.raises(fmapper.CheckpointError, match="is not part of a checkpoint"):
        fmapper.load(tmp_path / "x")


def test_numpy_reads_what_is_saved_and_is_read(tmp_path):
    path = tmp_path / "x.npz"
    arrays = {"w": np.arange(6.0).reshape(2, 3), "f": np.asfortranarray(np.eye(3, dtype="f4"))}
    fmapper.save(arrays, path)
    assert not diff({name: np.load(path)[name] for name in arrays}, arrays)
    for save in (np.savez, np.savez_compressed):
        save(path, **arrays)
        assert not diff(path, arrays)
        assert fmapper.load(path)["w"].read(((1, 2), (1, 3))).tolist() == [[4, 5]]


def test_an_unknown_format_lists_the_known(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'orbax'"):
        fmapper.save({}, tmp_path / "x", "orbx")
    with pytest.raises(ValueError, match="cannot determine the format"):
        fmapper.save({}, tmp_path / "x.unknown")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(fmapper.CheckpointError, match="not in a known format"):
        fmapper.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        fmapper.load(tmp_path / "nothing")


def test_an_array_without_values_is_not_saved(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(fmapper.CheckpointError, match="weight"):
        fmapper.save(torch.nn.Linear(2, 2, device="meta"), path)
    assert not list(tmp_path.iterdir())


def test_a_stored_array_moves_like_any_other(tmp_path):
    path = tmp_path / "x.safetensors"
    fmapper.save({"w": np.arange(4, dtype=np.float32)}, path)
    stored = fmapper.load(path)
    assert fmapper.get_device(stored).backend == "file"
    assert fmapper.to_torch(stored)["w"].tolist() == [0, 1, 2, 3]
    assert fmapper.to_torch(stored, dtype="bfloat16")["w"].dtype is torch.bfloat16
    row = fmapper.plan(fmapper.to_jax, stored)
    assert "w" in str(row)


def test_an_array_of_no_dimension_stays_an_array():
    lazy = LazyArray.of(np.array(3))
    assert fmapper.to_torch({"n": lazy})["n"].shape == ()
    assert fmapper.to_numpy({"n": lazy.transpose()})["n"].tolist() == 3


def test_two_loads_share_no_memory(tmp_path):
    path = tmp_path / "x.safetensors"
    fmapper.save({"w": np.zeros(4)}, path)
    stored = fmapper.load(path)
    one, two = fmapper.to_numpy(stored)["w"], fmapper.to_numpy(stored)["w"]
    one += 1
    assert two.tolist() == [0, 0, 0, 0]
    assert stored["w"].read().tolist() == [0, 0, 0, 0]


def test_an_array_begins_where_jax_takes_it_over(tmp_path):
    path = tmp_path / "x.safetensors"
    fmapper.save({"a": np.ones(3, np.float32), "w": np.ones(4)}, path)
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    assert (8 + length) % 64 == 0
    assert json.loads(data[8 : 8 + length])["__metadata__"]["format"] == "pt"


class Seen(LazyArray):
    """An array that notes which parts of it are read."""

    def __init__(self, array):
        self._array, self.shape, self.dtype, self.sizes = array, array.shape, array.dtype, []

    def _read(self, box):
        self.sizes.append(np.prod([stop - start for start, stop in box], dtype=int))
        return self._array[(*(slice(*pair) for pair in box), ...)]


def test_orbax_and_dcp_are_written_in_parts_and_read_by_their_libraries(tmp_path, monkeypatch):
    from torch.distributed import checkpoint as dcp

    from fmapper.checkpoints.formats import writer

    ocp = pytest.importorskip("orbax.checkpoint")
    monkeypatch.setattr(writer, "_PANEL", 800)
    monkeypatch.setattr(writer, "_SHORTEST_RUN", 1)
    arrays = {
        "rows": np.arange(30 * 17, dtype=np.float32).reshape(30, 17),
        "deep": np.arange(3 * 2 * 300, dtype=np.int16).reshape(3, 2, 300),
        "line": np.arange(1001, dtype=np.float64),
        "half": np.arange(1000).reshape(10, 100).astype(ml_dtypes.bfloat16),
        "one": np.array(3, np.float32),
    }
    for form in ("orbax", "dcp"):
        tree = {name: Seen(array) for name, array in arrays.items()}
        fmapper.save(tree, tmp_path / form, form)
        for name, array in tree.items():
            assert max(array.sizes) * array.dtype.itemsize <= 900, (form, name)
        assert not diff(tmp_path / form, arrays)
        part = fmapper.load(tmp_path / form)["deep"].read(((1, 3), (0, 1), (7, 299)))
        np.testing.assert_array_equal(part, arrays["deep"][1:3, :1, 7:299])
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "orbax")
    filled = {
        n: torch.empty(a.shape, dtype=getattr(torch, a.dtype.name)) for n, a in arrays.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(filled, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert not diff(restored, arrays)
    assert not diff(filled, arrays)


@pytest.mark.nightly
def test_a_large_chunk_of_orbax_is_unpacked_once(tmp_path, monkeypatch):
    ocp = pytest.importorskip("orbax.checkpoint")
    pytest.importorskip("flax")
    from fmapper_adapters.flax.checkpoints import zarr

    array = np.random.default_rng(0).standard_normal((2000, 2000))  # one chunk
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", {"w": array, "v": array + 1})
    opened = []
    stores = zarr.Stores._open_array
    monkeypatch.setattr(
        zarr.Stores, "_open_array", lambda self, *a: opened.append(a) or stores(self, *a)
    )
    stored = fmapper.load(tmp_path / "theirs")
    for start in range(0, 2000, 100):
        part = stored["w"].read(((start, start + 100), (0, 2000)))
        np.testing.assert_array_equal(part, array[start : start + 100])
    np.testing.assert_array_equal(stored["v"].read(), array + 1)
    assert len(opened) == 2


@pytest.mark.nightly
def test_arrays_that_are_read_in_pieces_are_whole(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "one": rng.integers(0, 1 << 16, 7_000_001).astype("u2"),
        "rows": rng.standard_normal((3, 1_500_000)).astype("f4"),
        "wide": rng.standard_normal((2, 3, 900_001)).astype("f4"),
        "scalar": np.float32(3),
        "none": np.zeros((0, 5), "f4"),
        "flags": rng.random(9_000_000) > 0.5,
    }
    fmapper.save(arrays, tmp_path / "a.safetensors")
    for move in (fmapper.to_numpy, fmapper.to_torch):
        read = fmapper.to_numpy(move(fmapper.load(tmp_path / "a.safetensors")))
        for name, array in arrays.items():
            np.testing.assert_array_equal(read[name], array, strict=True)


@pytest.mark.parametrize(("name", "wanted"), [("flax", "msgpack"), ("torch", "pt")])
def test_formats_are_called_by_their_framework_too(tmp_path, name, wanted):
    tree = {"weight": np.arange(3.0, dtype=np.float32)}
    path = tmp_path / f"net.{wanted}"
    fmapper.save(tree, path, format=name)
    for format in (None, name, wanted):
        found = fmapper.load(path, format=format)
        assert found.format == wanted
        assert np.array_equal(found["weight"].read(), tree["weight"])


def test_buffers_that_are_not_persistent_are_no_difference_from_a_checkpoint(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 3)
            self.register_buffer("angles", torch.ones(4), persistent=False)
            self.register_buffer("mean", torch.zeros(2))

    model = Net()
    states = model.state_dict()
    fmapper.save(states, tmp_path / "a.safetensors")
    for pair in ((model, tmp_path / "a.safetensors"), (tmp_path / "a.safetensors", model)):
        assert not fmapper.checkpoints.diff(*pair)
    del states["mean"]
    found = fmapper.checkpoints.diff(states, model)
    assert str(found).startswith("mean: only in the second\n")
    whole = {**model.state_dict(), "angles": torch.zeros(4)}
    assert "angles" in str(fmapper.checkpoints.diff(model, whole))


class Unreadable(LazyArray):
    """An array whose bytes cannot be read, as from a disk that fails."""

    shape, dtype = (3,), np.dtype(np.float32)

    def _read(self, box):
        raise OSError(5, "Input/output error")


@EVERY
def test_what_fails_leaves_nothing_behind(tmp_path, form):
    with pytest.raises(OSError, match="Input/output error"):
        fmapper.save({"w": np.ones(3, np.float32), "x": Unreadable()}, *place(tmp_path, form))
    assert not [*tmp_path.iterdir()]


def test_what_a_killed_process_left_of_a_pt_file_is_removed(tmp_path):
    for name in ("x.pt.4194305-1.tmp", "x.pt.4194305-1.tmp.layout"):
        (tmp_path / name).write_bytes(b"")
    fmapper.save({"w": np.ones(3)}, tmp_path / "x.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


def test_parts_of_a_compressed_array_are_unpacked_from_the_nearest_state(tmp_path, monkeypatch):
    from fmapper.files import zips

    monkeypatch.setattr(zips, "_APART", 1 << 16)
    monkeypatch.setattr(zips, "_PIECE", 1 << 14)
    w = np.random.default_rng(0).integers(0, 4, (100, 100, 100)).astype(np.uint8)
    np.savez_compressed(tmp_path / "x.npz", w=w)
    array = fmapper.load(tmp_path / "x.npz")["w"]
    seen = []
    read = zips.ZipMembers.bytes_at
    monkeypatch.setattr(
        zips.ZipMembers, "bytes_at", lambda self, *place: seen.append(place) or read(self, *place)
    )
    for row in (99, 3, 50, 0, 99):
        seen.clear()
        found = array.read(((row, row + 1), (5, 9), (0, 100)))
        np.testing.assert_array_equal(found, w[row : row + 1, 5:9])
    assert sum(count for _, count in seen) < os.path.getsize(tmp_path / "x.npz") / 2
    np.testing.assert_array_equal(array.read(), w)


def test_a_name_that_a_checkpoint_lacks_gets_the_nearest(tmp_path):
    path = tmp_path / "x.npz"
    fmapper.save({"layers": [{"weight": np.ones(2)}]}, path)
    checkpoint = fmapper.load(path)
    with pytest.raises(KeyError, match=r"'layer\.0\.weight' is not in .*Did you mean 'layers\.0"):
        checkpoint["layer.0.weight"]
    assert checkpoint.get("layer.0.weight") is None
    assert "layer.0.weight" not in checkpoint
