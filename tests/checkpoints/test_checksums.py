"""Checksums of zip files: verified wherever an array is read whole, in whatever order."""

import random
import zlib

import numpy as np
import pytest

import fmapper
from fmapper.checkpoints import convert_checkpoint, diff
from fmapper.checkpoints.formats import writer
from fmapper.files.checksums import Checksum, join_checksums
from fmapper.files.untrusted import Misfit


def damage(path, array):
    """Flips a bit in the middle of the bytes of an array, which lie there uncompressed."""
    data = bytearray(path.read_bytes())
    at = data.find(array.tobytes())
    data[at + array.nbytes // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(params=["stored", "fortran", "of fmapper"])
def damaged(request, tmp_path):
    array = np.random.default_rng(0).normal(size=(40, 30)).astype("float32")
    path = tmp_path / "x.npz"
    if request.param == "of fmapper":
        fmapper.save({"good": np.ones(3), "w": array}, path)
    else:
        order = "F" if request.param == "fortran" else "C"
        np.savez(path, good=np.ones(3), w=np.asarray(array, order=order))
    damage(path, array.T.copy() if request.param == "fortran" else array)
    return path


READS = {
    "read": lambda path: fmapper.load(path)["w"].read(),
    "moved": lambda path: fmapper.to_numpy(fmapper.load(path)),
    "filled": lambda path: fmapper.load(
        path, like={"good": np.ones(3), "w": np.ones((40, 30), "float32")}
    ),
    "panels": lambda path: [*fmapper.load(path)["w"].panels(1000)],
    "converted": lambda path: convert_checkpoint(path, path.with_name("y.safetensors")),
    "converted without comparing": lambda path: convert_checkpoint(
        path, path.with_name("y.safetensors"), check=False
    ),
    "compared": lambda path: diff(path, path),
}


@pytest.mark.parametrize("read", READS)
def test_a_stored_array_that_is_read_whole_is_verified(damaged, read, monkeypatch):
    monkeypatch.setattr(writer, "_PANEL", 1 << 10)
    with pytest.raises(fmapper.CheckpointError, match=r"w\.npy' is damaged: the checksum differs"):
        READS[read](damaged)


def test_arrays_beside_a_damaged_one_and_parts_are_read(tmp_path):
    array = np.arange(60.0).reshape(6, 10)
    np.savez(tmp_path / "x.npz", good=np.ones(3), w=array)
    damage(tmp_path / "x.npz", array)
    found = fmapper.load(tmp_path / "x.npz")
    assert found["good"].read().tolist() == [1, 1, 1]
    assert found["w"].read([(0, 2), (0, 10)]).tolist() == array[:2].tolist()


def test_a_compressed_array_that_is_read_in_parts_is_verified(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, w=np.arange(1000))
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\1\2") + 16  # its checksum, in the list of members
    data[at] ^= 1
    path.write_bytes(data)
    array = fmapper.load(path)["w"]
    with pytest.raises(fmapper.CheckpointError, match="the checksum differs"):
        [*array.panels(800)]


def test_the_header_of_an_empty_array_is_verified(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, w=np.ones((0, 3), "float32"))
    path.write_bytes(path.read_bytes().replace(b"(0, 3)", b"(0, 4)", 1))
    with pytest.raises(fmapper.CheckpointError, match="the checksum differs"):
        fmapper.load(path)


def test_torch_may_write_no_checksums(tmp_path):
    torch = pytest.importorskip("torch")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(3.0), "step": 7}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    found = fmapper.load(tmp_path / "x.pt")
    assert found["w"].read().tolist() == [0, 1, 2]
    assert found["step"] == 7


@pytest.mark.parametrize("is_damaged", [False, True])
def test_parts_in_any_order_are_joined(is_damaged):
    choose = random.Random(7)
    for _ in range(100):
        data = choose.randbytes(choose.randint(1, 200))
        head = choose.randint(0, len(data) - 1)
        checksum = Checksum("x", len(data), zlib.crc32(data) ^ is_damaged, data[:head])
        left, raised = {*range(head, len(data))}, False
        while left:
            start = choose.randrange(len(data))
            stop = start + choose.randint(1, 40)
            left -= {*range(start, stop)}
            try:
                checksum.add(data[start:stop], start)
            except Misfit:
                raised = True
        assert raised == is_damaged


def test_checksums_of_long_runs_are_joined():
    first, second = b"abc" * 5, bytes(1_000_003)
    joined = join_checksums(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)
    assert join_checksums(zlib.crc32(first), 0, 0) == zlib.crc32(first)
