"""Checkpoints behind URLs, on fsspec's file systems of memory and of this machine."""

import json
import sys

import numpy as np
import pytest

import fmapper
from fmapper.checkpoints import Rules, Transpose, convert_checkpoint, diff, inspect
from fmapper.checkpoints.formats import safetensors

fsspec = pytest.importorskip("fsspec")
TREE = {
    "a": {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "n": np.arange(5)},
    "b": np.full((2, 3), 0.5, np.float16),
    "step": 7,
}


@pytest.fixture
def place():
    """A folder in memory."""
    system = fsspec.filesystem("memory")
    system.makedirs("/here", exist_ok=True)
    yield "memory://here"
    system.rm("/here", recursive=True)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(safetensors, "MOST_BYTES_OF_A_SHARD", 50)


def same(checkpoint):
    assert checkpoint["step"] == 7
    for name, array in (("a.w", TREE["a"]["w"]), ("a.n", TREE["a"]["n"]), ("b", TREE["b"])):
        np.testing.assert_array_equal(checkpoint[name].read(), array)


def test_a_file_is_saved_loaded_and_inspected(place):
    fmapper.save(TREE, f"{place}/x.safetensors")
    found = fmapper.load(f"{place}/x.safetensors")
    same(found)
    assert found["a.w"].read(((1, 2), (2, 4))).tolist() == [[6, 7]]
    filled = fmapper.load(f"{place}/x.safetensors", like=TREE)
    np.testing.assert_array_equal(filled["b"], TREE["b"])
    seen = inspect(f"{place}/x.safetensors")
    assert (seen.format, seen.nbytes, len(seen.rows)) == ("safetensors", 100, 3)
    assert "memory://here/x.safetensors: safetensors, 3 arrays" in str(seen)
    assert not diff(f"{place}/x.safetensors", TREE)


def test_what_is_read_is_what_was_asked_for(place, monkeypatch):
    fmapper.save({"w": np.zeros((1000, 1000))}, f"{place}/x.safetensors")
    from fmapper.files.urls import Url

    ranges = []
    read = Url.read_range
    monkeypatch.setattr(Url, "read_range", lambda self, *at: ranges.append(at) or read(self, *at))
    fmapper.load(f"{place}/x.safetensors")["w"].read(((5, 7), (0, 1000)))
    assert [stop - start for start, stop in ranges] == [16_000]


@pytest.mark.usefixtures("small_shards")
def test_a_folder_of_shards_goes_from_disk_to_a_url_and_back(place, tmp_path):
    fmapper.save(TREE, tmp_path / "in", "safetensors")
    assert (tmp_path / "in" / safetensors.INDEX).exists()
    done = convert_checkpoint(tmp_path / "in", f"{place}/model", "safetensors")
    assert done.arrays == 3
    assert len(inspect(f"{place}/model").files) == 3
    same(fmapper.load(f"{place}/model"))
    rules = Rules([Transpose("a.w")])
    convert_checkpoint(f"{place}/model", tmp_path / "out.npz", rules=rules)
    assert fmapper.load(tmp_path / "out.npz")["a.w"].shape == (4, 3)
    convert_checkpoint(f"{place}/model", f"{place}/again", "safetensors", dtype="bfloat16")
    assert fmapper.load(f"{place}/again")["a.w"].dtype.name == "bfloat16"
    convert_checkpoint(tmp_path / "in", f"{place}/model", "safetensors")  # it is complete
    with pytest.raises(FileExistsError, match="dtype"):
        convert_checkpoint(tmp_path / "in", f"{place}/model", "safetensors", dtype="float16")
    with pytest.raises(FileExistsError):
        fmapper.save(TREE, f"{place}/model", "safetensors")


def test_bytes_that_stay_as_they_are_are_copied_from_a_url(place, tmp_path):
    fmapper.save(TREE, f"{place}/x.safetensors")
    convert_checkpoint(f"{place}/x.safetensors", tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").read_bytes() == fsspec.filesystem("memory").cat_file(
        "/here/x.safetensors"
    )


def test_a_conversion_from_a_url_is_continued(place, tmp_path, monkeypatch):
    fmapper.save(TREE, f"{place}/x.safetensors")
    from fmapper.checkpoints.formats import writer

    def fail(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_piece", fail)
        with pytest.raises(OSError, match="full"):
            convert_checkpoint(f"{place}/x.safetensors", tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors.partial").is_dir()
    convert_checkpoint(f"{place}/x.safetensors", tmp_path / "x.safetensors")
    same(fmapper.load(tmp_path / "x.safetensors"))


def test_file_urls_are_paths(tmp_path):
    url = f"file://{tmp_path}/x%20y.safetensors"
    fmapper.save(TREE, url)
    same(fmapper.load(url))
    assert inspect(url).path == tmp_path / "x y.safetensors"
    fmapper.save(TREE, f"file://{tmp_path}/x.npz")
    same(fmapper.load(f"file://{tmp_path}/x.npz"))
    with pytest.raises(fmapper.CheckpointError, match="write file:///folder/name"):
        fmapper.load("file://host/x.npz")


@pytest.mark.usefixtures("small_shards")
def test_nothing_appears_where_writing_fails(place):
    class Broken(fmapper.checkpoints.LazyArray):
        shape, dtype = (30,), np.dtype("f4")

        def _read(self, box):
            raise fmapper.CheckpointError("is broken")

    with pytest.raises(fmapper.CheckpointError, match=r"z: .*broken"):
        fmapper.save({"a": np.zeros(20), "z": Broken()}, f"{place}/model", "safetensors")
    assert not fsspec.filesystem("memory").exists("/here/model")


def test_what_reads_otherwise_is_removed(place, tmp_path, monkeypatch):
    fmapper.save(TREE, tmp_path / "x.safetensors")
    from fmapper.files.urls import Url

    monkeypatch.setattr(Url, "read_range", lambda self, start, stop: bytes(stop - start))
    with pytest.raises(
        fmapper.CheckpointError,
        match=r"a\.w: reads back differently than it was "
        "written",
    ):
        convert_checkpoint(tmp_path / "x.safetensors", f"{place}/x.safetensors")
    assert not fsspec.filesystem("memory").exists("/here/x.safetensors")


@pytest.mark.parametrize("more", [b"", b"more"])
def test_a_host_that_gives_other_bytes_is_noticed(place, monkeypatch, more):
    fmapper.save(TREE, f"{place}/x.safetensors")
    system = type(fsspec.filesystem("memory"))
    found = fmapper.load(f"{place}/x.safetensors")
    whole = system.cat_file
    monkeypatch.setattr(
        system, "cat_file", lambda self, *a, **k: whole(self, *a, **k)[: 4 * len(more)] + more
    )
    with pytest.raises(
        fmapper.CheckpointError, match=r"x.safetensors: its host returned \d+ bytes"
    ):
        found["a.n"].read()


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "file:///etc/x.safetensors", "a/b.safetensors"]
)
def test_an_index_behind_a_url_names_files_of_its_folder_only(place, name):
    fmapper.save(TREE, f"{place}/x.safetensors")
    index = {"weight_map": {"a.w": name}}
    with fsspec.open(f"{place}/model/{safetensors.INDEX}", "w") as file:
        json.dump(index, file)
    with pytest.raises(fmapper.CheckpointError, match="not a file of the folder"):
        fmapper.load(f"{place}/model")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"\xff" * 20, lambda _: b""]
)
def test_a_damaged_file_behind_a_url_is_the_one_error(place, damage):
    fmapper.save(TREE, f"{place}/x.safetensors")
    system = fsspec.filesystem("memory")
    system.pipe_file("/here/x.safetensors", damage(system.cat_file("/here/x.safetensors")))
    with pytest.raises(fmapper.CheckpointError, match=r"memory://here/x\.safetensors"):
        fmapper.load(f"{place}/x.safetensors")


def test_formats_that_need_a_file_say_so(place, tmp_path):
    fsspec.filesystem("memory").pipe_file("/here/x.npz", b"PK")
    for work in (
        lambda: fmapper.save(TREE, f"{place}/y.npz"),
        lambda: fmapper.load(f"{place}/x.npz"),
        lambda: fmapper.load(f"{place}/x.npz", format="npz"),
    ):
        with pytest.raises(fmapper.CheckpointError, match="npz needs a local file or folder"):
            work()
    with pytest.raises(fmapper.CheckpointError, match="from_pretrained needs a local folder"):
        fmapper.from_pretrained("s3://bucket/llama", "torch")
    with pytest.raises(fmapper.CheckpointError, match="contains no safetensors"):
        fmapper.load(place)
    with pytest.raises(FileNotFoundError, match="memory://here/nothing"):
        fmapper.load(f"{place}/nothing")
    with pytest.raises(fmapper.CheckpointError, match="pass it as a string"):
        fmapper.load(tmp_path.__class__("s3://bucket/x.safetensors"))


def test_without_fsspec_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(fmapper.BackendUnavailableError, match="pip install fsspec"):
        fmapper.load("s3://bucket/x.safetensors")


def test_a_kind_of_url_that_is_not_there_is_said():
    with pytest.raises(fmapper.CheckpointError, match="fsspec does not support it"):
        fmapper.load("nowhere://bucket/x.safetensors")
