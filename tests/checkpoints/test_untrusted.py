"""What is refused of checkpoints that anybody may have written, each with the one error."""

import argparse
import json
import os
import pickle
import re
import struct
import sys
import tracemalloc
import zipfile
from collections import defaultdict
from datetime import datetime
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

import fmapper
from fmapper.checkpoints import inspect
from support.patience import no_hang
from sweeps import fuzz_checkpoints

torch = pytest.importorskip("torch")
pytest.importorskip("flax")


@pytest.mark.nightly
def test_damaged_checkpoints_give_the_documented_error():
    findings = []
    outcomes = fuzz_checkpoints.run(300, seed=11, on_finding=findings.append)
    assert findings == []
    assert outcomes["refused"] > 200
    assert outcomes["read"] > 5


def header(path, fields, data=b"", length=None):
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("fields", "data", "said"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "its offsets do not fit"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "its offsets do not fit"),
        ({"a": entry(0, 8)}, 4, "longer or shorter"),
        ({"a": entry(0, 8)}, 12, "longer or shorter"),
        ({"a": entry(0, 4)}, 4, "its offsets do not fit"),
        ({"a": entry(0, 8, (2**62, 2**62))}, 8, "its offsets do not fit"),
        ({"a": entry(0, 0, (2**62, 2**62, 0))}, 0, "too large for any memory"),
        ({"a": entry(0, 0, (2**70, 0))}, 0, "too large for any memory"),
        ({"a": entry(0, 8, (-2,))}, 8, "an invalid size"),
        ({"a": entry(0, 8, (2.0,))}, 8, "an invalid size"),
        ({"a": entry(0, 8, (1,) * 65 + (2,))}, 8, "an invalid size"),
        ({"a": entry(0, 8, dtype="F 33")}, 8, "unknown dtype"),
        ({"a": entry(8, 0, dtype="F33")}, 8, "its offsets do not fit"),
        ({"a": entry(0, 80, dtype="F33")}, 8, "longer or shorter"),
        ({"a\x1b[2J": entry(0, 8)}, 8, "not printable"),
        ({"a" * 5000: entry(0, 8)}, 8, "a name that is too long or not printable"),
        (b'{"a": %b, "a": %b}' % ((json.dumps(entry(0, 8)).encode(),) * 2), 8, "a key twice"),
        (b'{"__metadata__": {"a": "b", "a": "c"}}', 0, "a key twice"),
        (b'{"a": ' + b"[" * 100_000, 0, "nested too deeply"),
        (b"[" * 100_000, 0, "not an object"),
        (b'{"a": ' + b"9" * 5000 + b"}", 0, "a number with too many digits"),
        (b"[]", 0, "not an object"),
        ({"a": entry(0, 8), "b": entry(100, 100, (0,))}, 8, "longer or shorter"),
        ({"b": entry(100, 100, (0,)), "a": entry(0, 8)}, 8, "longer or shorter"),
        *(({"__metadata__": {"a": value}}, 0, "not texts") for value in (1, None, ["b"], {})),
        ({"__metadata__": ["a"]}, 0, "not an object"),
    ],
)
def test_headers_of_safetensors(tmp_path, fields, data, said):
    path = header(tmp_path / "x.safetensors", fields, b"\0" * data)
    with pytest.raises(fmapper.CheckpointError, match=said):
        fmapper.load(path)


def test_metadata_may_be_null(tmp_path):
    path = header(tmp_path / "x.safetensors", {"__metadata__": None, "a": entry(0, 8)}, b"\0" * 8)
    assert list(fmapper.load(path)) == ["a"]


@pytest.mark.parametrize(
    "text",
    [
        b"(" * 30_000 + b")" * 30_000,
        b"{'descr': '" + b"[" * 60_000 + b"', 'fortran_order': False, 'shape': ()}",
        b"{'\x1b[2J': 1}",
    ],
)
def test_what_numpy_says_of_a_header_is_short_and_names_the_array(tmp_path, text):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    with pytest.raises(fmapper.CheckpointError, match=r"'a\.npy' has a damaged header") as caught:
        fmapper.load(tmp_path / "x.npz")
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_an_empty_array_of_another_format_is_no_larger_than_memory_either(tmp_path):
    shape = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 9, 0), }\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(shape)) + shape)
    with pytest.raises(fmapper.CheckpointError, match="'a' is too large for any memory"):
        fmapper.load(tmp_path / "x.npz")


def test_members_of_a_zip_file_lie_apart(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, aa=np.ones(3), bb=np.zeros(3))
    data = path.read_bytes()
    first, second = (at.start() for at in re.finditer(re.escape(b"PK\1\2"), data))
    place = data[first + 42 : first + 46]  # of the first member, in the list
    path.write_bytes(data[: second + 42] + place + data[second + 46 :])
    with pytest.raises(fmapper.CheckpointError, match=r"overlaps another member"):
        fmapper.load(path)


def test_headers_of_compressed_arrays_are_unpacked_alone(tmp_path):
    arrays = {f"a{at}": np.zeros(10_000_000, np.uint8) for at in range(2)}
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    tracemalloc.start()
    assert len(fmapper.load(tmp_path / "x.npz")) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300_000  # a mebibyte of each was unpacked


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">u2"])
def test_arrays_of_npz_that_are_big_endian_are_read(tmp_path, dtype, save):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    save(tmp_path / "x.npz", a=array, b=np.asfortranarray(array), c=np.ones(2))
    found = fmapper.load(tmp_path / "x.npz")
    for name in "ab":
        assert found[name].dtype == np.dtype(dtype).newbyteorder("<")
        assert found[name].read().tolist() == array.tolist()
        assert found[name].read(((1, 2), (1, 3))).tolist() == array[1:, 1:].tolist()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([{"a": 1}], object), "is a pickle of objects"),
        (np.array(["a", "bc"]), "contains text"),
        (np.zeros(2, [("a", "f4")]), "contains text or records"),
        (np.array(["2020-01-01"], "M8[D]"), "contains text"),
    ],
)
def test_arrays_of_npz_that_are_not_numbers_leave_the_others(tmp_path, value, said):
    np.savez(tmp_path / "x.npz", good=np.ones(2), w=value)
    found = fmapper.load(tmp_path / "x.npz")
    assert found["good"].read().tolist() == [1, 1]
    assert fmapper.load(tmp_path / "x.npz", like={"good": np.zeros(2)}, strict=False)
    with pytest.raises(fmapper.CheckpointError, match=rf"x\.npz: 'w\.npy': {said}"):
        found["w"].read()
    for move in (fmapper.to_numpy, lambda tree: fmapper.save(tree, tmp_path / "y.npz")):
        with pytest.raises((TypeError, ValueError), match=rf"w: .*(no dtype|npz has no|{said})"):
            move(found)


def test_long_headers_of_many_arrays_are_refused(tmp_path):
    shape = b"{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }" + b" " * 60_000 + b"\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for at in range(400):
            head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(shape))
            file.writestr(f"a{at}.npy", head + shape)
    with pytest.raises(fmapper.CheckpointError, match=r"bytes of long headers.*settings\.bounds"):
        fmapper.load(tmp_path / "x.npz")


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "x.pt", "x.msgpack", "x.gguf", "x"])
def test_files_without_a_size_are_not_read(tmp_path, name, monkeypatch):
    (tmp_path / name).touch()  # as are those of /proc, which may block or never end
    monkeypatch.setattr(Path, "open", lambda *args: pytest.fail("was opened"))
    for format in (None, "safetensors", "pt"):
        with pytest.raises(fmapper.CheckpointError, match="is empty"):
            fmapper.load(tmp_path / name, format=format)


def test_an_index_longer_than_that_of_the_largest_models_is_refused(tmp_path):
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(41_000_000)
    with no_hang(), pytest.raises(fmapper.CheckpointError, match="is too long"):
        fmapper.load(tmp_path)


def test_many_arrays_are_listed_without_rich(tmp_path, monkeypatch):
    np.savez(tmp_path / "x.npz", w=np.ones((2, 3)), long_name=np.ones(1))
    monkeypatch.setitem(sys.modules, "rich.console", None)
    lines = str(inspect(tmp_path / "x.npz")).splitlines()
    assert lines[:2] == ["array      dtype    shape   bytes", "w          float64  [2, 3]  48"]


def test_a_long_header_of_nothing_is_read_in_little_time(tmp_path):
    fields = (
        b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}' + b" " * 40_000_000 + b"}"
    )
    path = header(tmp_path / "x.safetensors", fields)
    with no_hang():
        assert fmapper.load(path)["a"].shape == (0,)


def test_a_header_longer_than_the_file_is_not_read(tmp_path):
    path = header(tmp_path / "x.safetensors", {}, length=2**63)
    with pytest.raises(fmapper.CheckpointError, match="header would be too long"):
        fmapper.load(path)


def test_integers_of_many_digits_are_refused(tmp_path):
    torch.save({"w": torch.ones(2), "n": 10**6000}, tmp_path / "x.pt")
    with pytest.raises(fmapper.CheckpointError, match="an integer of 2,492 bytes"):
        fmapper.load(tmp_path / "x.pt")
    for format in ("safetensors", "npz", "pt", "msgpack"):
        with pytest.raises(fmapper.CheckpointError, match="an integer of more than 25 digits"):
            fmapper.save({"w": np.ones(2), "n": 10**6000}, tmp_path / format, format=format)
    for at, number in enumerate((10**25 - 1, 1 - 10**25)):
        for format in ("safetensors", "npz", "pt", "dcp"):
            path = tmp_path / f"{format}{at}"
            fmapper.save({"w": np.ones(2), "n": number}, path, format=format)
            assert fmapper.load(path)["n"] == number


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x", 3]
)
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
    fmapper.save({"w": np.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "folder").mkdir()
    index = tmp_path / "folder" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(fmapper.CheckpointError, match="not a file of the folder"):
        fmapper.load(tmp_path / "folder")


@pytest.mark.parametrize(
    "names", [["x.bin", ["x.bin"]], [["x.bin"]], ["x.bin", 3], ["../x.bin"], []]
)
def test_an_index_of_torch_names_files_of_its_folder_only(tmp_path, names):
    torch.save({"w": torch.ones(2)}, tmp_path / "x.bin")
    places = {f"w{at}": name for at, name in enumerate(names)}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(fmapper.CheckpointError, match="not in the folder"):
        fmapper.load(tmp_path)


def test_sparse_tensors_of_a_file_are_refused_by_name(tmp_path):
    torch.save({"net": {"w": torch.eye(3).to_sparse()}}, tmp_path / "x.pt")
    with pytest.raises(fmapper.CheckpointError, match=r"net\.w: is not a dense tensor.*to_dense"):
        fmapper.to_numpy(fmapper.load(tmp_path / "x.pt"))


def test_links_lead_to_the_folder_or_the_cache_of_the_hub(tmp_path):
    fmapper.save({"w": np.ones(2)}, tmp_path / "secret.safetensors")
    (tmp_path / "folder").mkdir()
    os.symlink(tmp_path / "secret.safetensors", tmp_path / "folder" / "model.safetensors")
    with pytest.raises(fmapper.CheckpointError, match="a link that leads out of the folder"):
        fmapper.load(tmp_path / "folder")
    snapshot, blobs = tmp_path / "repo" / "snapshots" / "1", tmp_path / "repo" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    os.rename(tmp_path / "secret.safetensors", blobs / "abc")
    os.symlink("../../blobs/abc", snapshot / "model.safetensors")
    assert fmapper.load(snapshot)["w"].read().tolist() == [1, 1]


def test_pipes_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(fmapper.CheckpointError):
        fmapper.load(tmp_path / "x.safetensors")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("was-run",)


def test_pickles_are_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "evil": Evil()}, tmp_path / "x.pt")
    with pytest.raises(fmapper.CheckpointError, match="could run code"):
        fmapper.load(tmp_path / "x.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(fmapper.CheckpointError, match="not a zip file"):
        fmapper.load(tmp_path / "old.pt")
    np.savez(tmp_path / "x.npz", w=np.array([Evil()], dtype=object))
    with pytest.raises(fmapper.CheckpointError, match="is a pickle of objects"):
        fmapper.load(tmp_path / "x.npz")["w"].read()
    with pytest.raises(ValueError, match="is a pickle of objects"):
        fmapper.to_numpy(fmapper.load(tmp_path / "x.npz"))
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    "code",
    [
        b"\x96" + (1 << 31).to_bytes(8, "little"),  # a bytearray of that size
        b"Nr" + (1 << 29).to_bytes(4, "little"),  # a place in the memo, of eight bytes each
        b"Np500000000\n",
    ],
)
def test_metadata_of_dcp_reserve_no_memory(tmp_path, code):
    fmapper.save({"w": np.ones(2)}, tmp_path / "x.dcp")
    (tmp_path / "x.dcp" / ".metadata").write_bytes(b"\x80\x05" + code + b".")
    tracemalloc.start()
    with pytest.raises(fmapper.CheckpointError, match=r"x\.dcp"):
        fmapper.load(tmp_path / "x.dcp")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_tensor_that_was_expanded_is_not_taken_for_a_large_one(tmp_path):
    torch.save({"w": torch.ones(1).expand(10**12)}, tmp_path / "x.pt")
    with pytest.raises(fmapper.CheckpointError, match=r"w: .*expanded"):
        fmapper.load(tmp_path / "x.pt")["w"].read(((0, 4),))


def test_a_zip_bomb_is_looked_into_without_unpacking(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, w=np.zeros(10**8, np.uint8))
    assert path.stat().st_size < 200_000
    stored = fmapper.load(path)["w"]
    assert stored.shape == (10**8,)
    assert stored.read(((0, 3),)).tolist() == [0, 0, 0]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        head = (
            b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|u1', 'fortran_order': False, 'shape': (9,), }"
        )
        archive.writestr("w.npy", head.ljust(128) + b"0" * 10**7)
    with pytest.raises(fmapper.CheckpointError, match="its offsets do not fit"):
        fmapper.load(path)


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_without_bounds_is_refused(tmp_path, kind):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("__fmapper__.json", b" " * 10**6)
    with pytest.raises(
        fmapper.CheckpointError, match="uses a compression that NumPy does not write"
    ):
        fmapper.load(path)


def test_a_member_longer_than_the_file_takes_no_memory(tmp_path):
    path = tmp_path / "x.npz"
    fmapper.save({"w": np.ones(2), "step": 1}, path)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\1\2")  # of the member with what fmapper keeps
    data[at + 20 : at + 24] = (1_275_068_574).to_bytes(4, "little")
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(fmapper.CheckpointError, match="is longer than the file"):
        fmapper.load(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    fmapper.save({"w": np.ones(1000)}, path)
    stored = fmapper.load(path)
    with path.open("r+b") as file:
        file.truncate(500)
    with pytest.raises(fmapper.CheckpointError, match="has changed"):
        stored["w"].read()


def test_a_bool_is_true_or_false(tmp_path):
    path = header(tmp_path / "x.safetensors", {"a": entry(0, 2, dtype="BOOL")}, b"\1\2")
    with pytest.raises(fmapper.CheckpointError, match="neither true nor false"):
        fmapper.load(path)["a"].read()


@pytest.mark.parametrize("name", ["a\0b", "\0/b.npz", "a\ud800.safetensors", ""], ids=ascii)
def test_a_name_that_no_file_can_have(name):
    tree = {"w": np.ones(2)}
    checkpoints = fmapper.checkpoints
    for call in (
        fmapper.load,
        lambda path: fmapper.load(path, tree),
        lambda path: fmapper.save(tree, path),
        checkpoints.inspect,
        lambda path: checkpoints.diff(path, tree),
        lambda path: checkpoints.diff(tree, path),
        lambda path: fmapper.from_pretrained(path, "torch"),
        fmapper.load_program,
    ):
        with pytest.raises(
            ValueError, match=r"no file can have this name|the path is empty"
        ) as one:
            call(name)
        assert isinstance(one.value, fmapper.CheckpointError | fmapper.ProgramFileError)
        assert str(one.value).isprintable()


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.float64(3.5), {"x": 3.5}),
        (np.float32(0.25), {"x": 0.25}),
        (np.int64(-3), {"x": -3}),
        (np.bool_(True), {"x": True}),
        (argparse.Namespace(lr=0.1, name="a"), {"x.lr": 0.1, "x.name": "a"}),
        (defaultdict(int, {"a": 1}), {"x.a": 1}),
        (defaultdict(list, {"a": [1]}), {"x.a.0": 1}),
        (Path("runs") / "one", {"x": "runs/one"}),
        (datetime(2020, 1, 1), {}),
        (np.complex64(1j), {}),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_values_of_training_scripts_beside_tensors(tmp_path, value, wanted, protocol):
    place = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2), "x": value}, place, pickle_protocol=protocol)
    found = dict(fmapper.load(place))
    assert found.pop("w").shape == (2,)
    assert {name: (type(v), v) for name, v in found.items()} == {
        name: (type(v), v) for name, v in wanted.items()
    }


class Unknown:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(3), "holds an array of NumPy.*torch.from_numpy"),
        (torch.nn.Linear(1, 1), r"holds a whole module, of class torch.*Linear.*state_dict\(\)"),
        (Unknown(), r"an object of .*Unknown.*safe_globals\(\[Unknown\]\)"),
    ],
    ids=["array", "module", "object"],
)
def test_what_a_pickle_holds_is_named_with_the_way_out(tmp_path, value, message):
    torch.save({"w": torch.ones(2), "x": value}, tmp_path / "x.pt")
    with pytest.raises(fmapper.CheckpointError, match=message):
        fmapper.load(tmp_path / "x.pt")


class Reduced:
    """An object whose pickle is what it is given."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


LONG, SHARED = "a" * 1000, {f"a{i}": i for i in range(1000)}


@pytest.mark.parametrize(
    "value",
    [
        Reduced(PurePosixPath, (LONG,) * 1000),
        [Reduced(argparse.Namespace, (), SHARED) for _ in range(1000)],
    ],
    ids=["path", "settings"],
)
def test_what_settings_and_paths_share_counts_each_time(tmp_path, value):
    torch.save({"w": torch.ones(2), "x": value}, tmp_path / "x.pt")
    with pytest.raises(fmapper.CheckpointError, match="entries of settings and characters"):
        fmapper.load(tmp_path / "x.pt")
