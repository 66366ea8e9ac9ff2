"""Files made of many small things: refused before they are parsed, and how that is lifted."""

import contextlib
import json
import os
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

import fmapper
from fmapper.checkpoints import inspect
from fmapper.files import bounds
from support.patience import no_hang
from sweeps import hostile_files

torch = pytest.importorskip("torch")
pytest.importorskip("flax")

QUICK = {  # files at a hundredth of their size, beside bounds of a hundredth
    name: (make, max(40, count // 100))
    for name, (make, count) in hostile_files.FILES.items()
    if not name.startswith("honest") and "within" not in name and "blanks" not in name
}


@pytest.fixture
def low(monkeypatch):
    """Bounds of a hundredth, which do not grow with the files."""
    for name, most in bounds._MOST.items():
        monkeypatch.setitem(bounds._MOST, name, most // 100)
    monkeypatch.setattr(bounds, "_BYTES_OF_ONE", {})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", QUICK)
def test_many_small_things_are_refused_or_read_in_little_memory(name, tmp_path, low):
    make, count = QUICK[name]
    path = make(tmp_path, count)
    tracemalloc.start()
    with no_hang(), contextlib.suppress(fmapper.CheckpointError):
        inspect(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (hostile_files.arrays, "3,000 arrays; 1,000 are allowed"),
        (hostile_files.members, "3,000 members; 500 are allowed"),
        (hostile_files.tensors, "members"),
        (hostile_files.packed_arrays, "1,001 arrays; 1,000 are allowed"),
        (hostile_files.gguf_arrays, "3,000 arrays; 1,000 are allowed"),
        (hostile_files.gguf_values, "3,000 values; 1,500 are allowed"),
    ],
)
def test_settings_lift_the_bounds(make, said, tmp_path, low, monkeypatch):
    path = make(tmp_path, 3000)
    with pytest.raises(fmapper.CheckpointError, match=said) as caught:
        fmapper.load(path)
    assert "fmapper.settings.bounds = False" in str(caught.value)
    assert "FMAPPER_BOUNDS=0" in str(caught.value)
    monkeypatch.setattr(fmapper.settings, "bounds", False)
    found = inspect(path)
    assert len(found.rows) + len(found.metadata) == 3000


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (hostile_files.vocabulary, 5000),
        (hostile_files.long_vocabulary, 5000),
        (hostile_files.gguf_text, 5_000_000),
    ],
)
def test_vocabularies_are_skipped(make, count, tmp_path):
    path = make(tmp_path, count)
    tracemalloc.start()
    assert inspect(path).rows == ()
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_views_of_one_storage_are_not_taken_for_ties(tmp_path):
    whole = torch.arange(8.0).reshape(4, 2)
    torch.save({"a": whole[:2], "b": whole[2:], "c": whole[2:]}, tmp_path / "x.pt")
    found = fmapper.load(tmp_path / "x.pt")
    assert found["a"].read().tolist() == [[0, 1], [2, 3]]
    assert found["b"].read().tolist() == [[4, 5], [6, 7]]
    assert found["c"] is found["b"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, 3, device="meta"), "without memory"),
        (torch.zeros(1).expand(10**12), "was expanded"),
    ],
)
def test_tensors_whose_values_do_not_lie_there_leave_the_others(value, said, tmp_path):
    torch.save({"net": {"w": value, "v": torch.ones(2)}}, tmp_path / "x.pt")
    found = fmapper.load(tmp_path / "x.pt")
    assert found["net.v"].read().tolist() == [1, 1]
    assert found["net.w"].shape == tuple(value.shape)
    assert found["net.w"].dtype == np.float32
    for read in (
        lambda: found["net.w"].read(((0, 1),) * value.ndim),
        lambda: fmapper.to_numpy(found["net.w"]) if value.numel() < 100 else found["net.w"].read(),
        lambda: fmapper.checkpoints.convert_checkpoint(tmp_path / "x.pt", tmp_path / "y.npz"),
    ):
        with pytest.raises(fmapper.CheckpointError, match=rf"x\.pt: net\.w: .*{said}"):
            read()


def views():
    base, pair = torch.arange(24.0).reshape(4, 6), torch.tensor([1 + 2j, 3 - 1j])
    return {
        "steps": base[::2, 1::2],
        "turned steps": base.t()[::3],
        "expanded": torch.arange(3.0).expand(4, 3),
        "one": torch.ones(()).expand(7),
        "overlapping": torch.as_strided(base, (3, 3), (1, 2)),
        "conjugate": pair.conj(),
        "negative": (2 * pair).conj().imag,
        "both": torch.as_strided((3 * pair).conj(), (2, 2), (0, 1)),
        "dense": torch.ones(2, 1),
    }


@pytest.mark.parametrize("name", views())
def test_views_of_storages_are_read(name, tmp_path):
    view = views()[name]
    torch.save({"w": view}, tmp_path / "x.pt")
    found = fmapper.load(tmp_path / "x.pt")["w"]
    wanted = view.resolve_conj().resolve_neg().numpy()
    assert np.array_equal(found.read(), wanted)
    box = tuple((n // 2, n) for n in view.shape)
    assert np.array_equal(found.read(box), wanted[tuple(slice(*pair) for pair in box)])
    fmapper.checkpoints.convert_checkpoint(tmp_path / "x.pt", tmp_path / "y.npz")
    assert np.array_equal(np.load(tmp_path / "y.npz")["w"], wanted)


def big_endian(path, tree):
    """Saves as torch does on a machine that is big-endian."""
    torch.save(tree, path)
    names, swapped = {}, path.with_name("big")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(swapped, "w") as new:
        for name in old.namelist():
            names[name] = b"big" if name.endswith("byteorder") else old.read(name)
        for at, tensor in enumerate(tree.values()):
            values = tensor.numpy()
            big = values.astype(values.dtype.newbyteorder(">"))
            names[f"{path.stem}/data/{at}"] = big.tobytes()
        for name, data in names.items():
            new.writestr(name, data)
    swapped.rename(path)


def test_files_of_machines_that_are_big_endian_are_read(tmp_path):
    tree = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.arange(3), "c": torch.tensor([1 + 2j])}
    big_endian(tmp_path / "x.pt", tree)
    found = fmapper.load(tmp_path / "x.pt")
    assert all(np.array_equal(found[name].read(), tree[name].numpy()) for name in tree)
    assert found["w"].read(((1, 2), (0, 2))).tolist() == [[3, 4]]


def test_files_of_torch_before_its_zip_files_are_read(tmp_path):
    tied = torch.arange(6.0).reshape(2, 3)
    tree = {"w": tied, "again": tied, "row": tied[1], "n": {"half": torch.ones(3).half().t()}}
    tree |= {"lr": 0.1, "many": [torch.full((2,), at) for at in range(5)]}
    torch.save(tree, tmp_path / "x", _use_new_zipfile_serialization=False)
    found = fmapper.load(tmp_path / "x")
    assert found.format == "pt"
    assert found["again"] is found["w"]
    assert found["row"].read().tolist() == [3, 4, 5]
    assert (found["n.half"].dtype.name, found["lr"]) == ("float16", 0.1)
    assert [found[f"many.{at}"].read().tolist() for at in range(5)] == [[at] * 2 for at in range(5)]
    fmapper.save(found, tmp_path / "y.pt")
    assert torch.equal(torch.load(tmp_path / "y.pt")["w"], tied)


def test_files_of_torch_before_its_zip_files_have_bounds(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "x.pt").read_bytes()
    count = data.index((3).to_bytes(8, "little"), 100)
    for changed, said in [
        (data[:-4], "another size"),
        (data[:30], "truncated|damaged"),
        (data[:count] + (1 << 60).to_bytes(8, "little") + data[count + 8 :], "another size"),
        (
            data.replace(b"FloatStorage", b"system\nStora"),
            "an object of torch.system|damaged",
        ),
        (data.replace(b"\x4d\xe9\x03", b"\x4d\xe9\x04", 1), "unknown version"),
    ]:
        (tmp_path / "x.pt").write_bytes(changed)
        with no_hang(), pytest.raises(fmapper.CheckpointError, match=said):
            fmapper.load(tmp_path / "x.pt")["w"].read()


@pytest.mark.parametrize(
    ("value", "legacy", "said"),
    [
        (np.ones(1), False, "array of NumPy.*weights_only=False"),
        ({("a", 1): torch.ones(1)}, False, "has a dict at 'v' with keys"),
        (np.ones(1), True, "array of NumPy.*weights_only=False"),
    ],
)
def test_what_torch_saves_and_is_not_read_has_a_way_out(value, legacy, said, tmp_path):
    torch.save({"v": value}, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(fmapper.CheckpointError, match=said):
        fmapper.load(tmp_path / "x.pt")


def test_what_torch_saves_beside_tensors_is_read_or_left_out(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2, 3).t())
    weight.note = "kept by torch"
    tree = {
        "w": weight,
        "u": torch.ones(3, dtype=torch.uint16),
        "half": torch.ones(2, dtype=torch.bfloat16)[1:],
        "size": torch.Size([1, 2]),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "bytes": b"1",
        "set": {1},
        "numbers": [1, 2.5, True, "text", 2**70, None],
        3: torch.zeros((), dtype=torch.int64),
    }
    torch.save(tree, tmp_path / "x.pt")
    found = fmapper.load(tmp_path / "x.pt")
    assert found["w"].read().tolist() == [[1, 1]] * 3
    assert (found["u"].dtype.name, found["half"].dtype.name) == ("uint16", "bfloat16")
    assert found["3"].shape == ()
    assert [found[f"numbers.{at}"] for at in range(5)] == [1, 2.5, True, "text", 2**70]
    assert "set" not in found


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle_is_read(protocol, tmp_path):
    torch.save({"a" * 300: torch.ones(2)}, tmp_path / "x.pt", pickle_protocol=protocol)
    assert fmapper.load(tmp_path / "x.pt")["a" * 300].read().tolist() == [1, 1]


@pytest.mark.parametrize(
    "name", ["torch.serialization\n_get_layout", "pathlib\nPosixPath", "collections\nOrderedDict"]
)
def test_pickles_of_dcp_change_no_class(name, tmp_path):
    """`BUILD` on a class sets its attributes, of which others would have been affected."""
    fmapper.save({"w": np.ones(2)}, tmp_path / "x.dcp")
    data = b"\x80\x02c" + name.encode() + b"\nN}X\x08\x00\x00\x00fmapper_K\x01s\x86b."
    (tmp_path / "x.dcp" / ".metadata").write_bytes(data)
    with pytest.raises(fmapper.CheckpointError):
        fmapper.load(tmp_path / "x.dcp")
    module, _, attribute = name.partition("\n")
    assert not hasattr(getattr(__import__(module, fromlist=["x"]), attribute), "fmapper_")


def test_pickles_of_tensors_change_no_stand_in_of_others():
    from fmapper_adapters.torch.checkpoints import pickled

    data = b"\x80\x02ctorch\nTensor\nN}X\x04\x00\x00\x00markK\x01s\x86b."
    first, second = (pickled.unpickle(data, pickled.names_of_tensors()) for _ in range(2))
    assert first.mark == second.mark == 1
    assert first is not second
    assert not hasattr(pickled.Record, "mark")


def test_messages_of_msgpack_name_the_file(tmp_path):
    def array(count, dtype=b"float32"):
        about = b"\x93\x91" + bytes([count]) + bytes([0xA0 + len(dtype)]) + dtype
        about += b"\xc4" + bytes([4 * count]) + b"\0" * 4 * count
        return b"\xc7" + struct.pack(">Bb", len(about), 1) + about

    def chunks(*parts):
        inner = b"".join(b"\xa1%d" % at + part for at, part in enumerate(parts))
        chunked = b"\xb9__msgpack_chunked_array__\xc3\xa5shape\x81\xa10\x04\xa6chunks"
        return b"\x81\xa1w\x83" + chunked + bytes([0x80 + len(parts)]) + inner

    path = tmp_path / "x.msgpack"
    path.write_bytes(chunks(array(2), array(2)))
    assert fmapper.load(path)["w"].shape == (4,)
    for data, said in (
        (chunks(array(2), array(2, b"int32")), "cannot be concatenated"),
        (chunks(array(2), array(1)), "pieces that do not fit"),
        (b"\x81\xa1w" + array(1, b"F\x1b33333"), "of unknown dtype 'F.*33333'"),
        (b"\x81\xa1w\xc7\x04\x01\x93\x90\x90\xc4\x00", "in place of a text or number"),
        (b"\x81\xa3a\x1bb\x01", "not printable"),
    ):
        path.write_bytes(data)
        with pytest.raises(fmapper.CheckpointError, match=rf"x\.msgpack: at byte \d+: .*{said}"):
            fmapper.load(path)


def test_names_with_control_characters_are_refused_and_quoted(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("a\x1b[2J.npy", b"")
    torch.save({"a\x1b[2J": torch.ones(1)}, tmp_path / "x.pt")
    for name in ("x.npz", "x.pt"):
        with pytest.raises(fmapper.CheckpointError, match="not printable") as caught:
            fmapper.load(tmp_path / name)
        assert "\x1b" not in str(caught.value)


def test_pieces_of_dcp_that_overlap_are_refused(tmp_path):
    from torch.distributed.checkpoint import metadata

    fmapper.save({"w": np.ones(4, np.float32)}, tmp_path / "x.dcp")
    place = tmp_path / "x.dcp" / ".metadata"
    about = pickle.loads(place.read_bytes())
    whole = about.state_dict_metadata["w"]
    whole.size = torch.Size([8])
    whole.chunks = [metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))] * 2
    place.write_bytes(pickle.dumps(about))
    with pytest.raises(fmapper.CheckpointError, match="w: its pieces overlap"):
        fmapper.load(tmp_path / "x.dcp")


@pytest.mark.parametrize("where", ["../x", "/etc/passwd", "/dev/zero", "pipe", "gone", "link"])
def test_pieces_of_dcp_lie_in_files_of_the_folder(where, tmp_path):
    folder = tmp_path / "x.dcp"
    fmapper.save({"w": np.ones(4, np.float32)}, folder)
    about = pickle.loads((folder / ".metadata").read_bytes())
    for info in about.storage_data.values():
        (folder / info.relative_path).rename(tmp_path / "x")
        info.relative_path = where
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(tmp_path / "x")
    (folder / ".metadata").write_bytes(pickle.dumps(about))
    with no_hang(), pytest.raises(fmapper.CheckpointError, match=r"x\.dcp"):
        fmapper.load(folder)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (hostile_files.pickled_shape, "has a tensor with an invalid size"),
        (hostile_files.pickled_long_names, "bytes of names; 200,000 are allowed"),
        (hostile_files.packed_long_names, "bytes of names; 200,000 are allowed"),
        (hostile_files.dcp_names, "pieces; 500 are allowed"),
        (hostile_files.dcp_ties, "pieces; 500 are allowed"),
        (hostile_files.dcp_parts, "pieces; 500 are allowed"),
        (hostile_files.dcp_sizes, "w0: has an invalid size"),
        (hostile_files.dcp_values, "bytes of pickles; 160,000 are allowed"),
    ],
)
def test_what_is_shared_counts_each_time(make, said, tmp_path, low):
    with pytest.raises(fmapper.CheckpointError, match=said):
        fmapper.load(make(tmp_path, 600 if "pieces" in said else 400))


def test_pieces_of_dcp_that_share_a_place_are_opened_as_they_are_read(tmp_path):
    path = hostile_files.dcp_parts(tmp_path, 8)
    found = fmapper.load(path)
    assert found["layers.1.weight"].read().tolist() == [1, 1, 1, 1]
    for place in path.glob("*.distcp"):
        before, data = place.stat(), place.read_bytes()
        place.write_bytes(data.replace(b"FloatStorage", b"HalfStorage\n"))
        os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(fmapper.CheckpointError, match=r"distcp: 'layers.0.weight': "):
        fmapper.load(path)["layers.0.weight"].read()


def test_bounds_grow_with_the_files_where_each_takes_some_room(tmp_path, monkeypatch):
    for name in bounds._BYTES_OF_ONE:
        monkeypatch.setitem(bounds._MOST, name, 0)
    tree = {"w": np.ones(2), **{f"v{at}": at for at in range(20)}, "x": np.zeros((2, 2))}
    for form in ("dcp", "orbax"):
        fmapper.save(tree, tmp_path / f"x.{form}")
        found = fmapper.load(tmp_path / f"x.{form}")
        assert len(found) == 22
        assert found["v7"] == 7
        assert found["w"].read().tolist() == [1, 1]
    monkeypatch.setattr(bounds, "_BYTES_OF_ONE", {})
    for form in ("dcp", "orbax"):
        with pytest.raises(fmapper.CheckpointError, match="0 are allowed"):
            fmapper.load(tmp_path / f"x.{form}")


def test_pieces_of_dcp_are_opened_when_they_are_read(tmp_path, monkeypatch):
    from fmapper_adapters.torch.checkpoints import archive

    opened = []
    init = archive.Archive.__init__
    monkeypatch.setattr(
        archive.Archive, "__init__", lambda self, *a: opened.append(a) or init(self, *a)
    )
    fmapper.save({f"w{at}": np.full(3, at) for at in range(9)}, tmp_path / "x.dcp")
    found = fmapper.load(tmp_path / "x.dcp")
    assert not opened
    assert found["w7"].read([(1, 3)], np.zeros((2, 2), int)[:, 0]).tolist() == [7, 7]
    assert found["w7"].read().tolist() == [7, 7, 7]
    assert len(opened) == 1


def test_json_is_counted_before_it_is_parsed(tmp_path):
    from fmapper.files.bounded_json import read_json
    from fmapper.files.untrusted import Misfit

    text = json.dumps({'a\\"b': ['\\"', "x" * 10, {"n": [1, 2]}], "\\": "]]]["})
    assert read_json(text) == json.loads(text)
    assert read_json(json.dumps({"a": "\\" * 2_000_001}))["a"] == "\\" * 2_000_001
    for many in ("{}", "[]", '"a"', '{"a":1}', "1000.5"):
        with pytest.raises(Misfit, match="too many values"):
            read_json(f"[{','.join([many] * 50_000)}]", 1_000_000)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_arrays_of_all_shards_are_counted_together(kind, tmp_path, monkeypatch):
    parts = {f"part-{i}": {f"{i}.{name}": torch.ones(2) for name in "ab"} for i in (1, 2)}
    if kind == "safetensors":
        for name, arrays in parts.items():
            fmapper.save(arrays, tmp_path / f"{name}.safetensors")
    else:
        places = {}
        for i, arrays in enumerate(parts.values(), 1):
            file = f"pytorch_model-0000{i}-of-00002.bin"
            torch.save(arrays, tmp_path / file)
            places |= dict.fromkeys(arrays, file)
        index = json.dumps({"weight_map": places})
        (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    assert len(fmapper.load(tmp_path)) == 4
    monkeypatch.setitem(bounds._MOST, "arrays in all files", 3)
    with pytest.raises(fmapper.CheckpointError, match="has 4 arrays in all files; 3 are allowed"):
        fmapper.load(tmp_path)
