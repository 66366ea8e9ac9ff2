"""Folders of Orbax that anybody may have written: damaged, or leading to other places."""

import json
import os
import shutil

import numpy as np
import pytest

import fmapper
from fmapper.checkpoints import inspect
from fmapper.files import bounds
from support.patience import no_hang

pytest.importorskip("flax")
ocp = pytest.importorskip("orbax.checkpoint")


@pytest.fixture(params=[False, True], ids=["files", "ocdbt"])
def folder(request, tmp_path):
    path = tmp_path / "x"
    tree = {"a": {"w": np.arange(6, dtype=np.float32)}, "b": np.ones(4, np.float32), "step": 3}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=request.param)) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree))
    assert len(inspect(path).rows) == 2
    return path


def read(folder):
    for array in fmapper.load(folder).values():
        np.asarray(array)


def refused(folder, said):
    with no_hang(), pytest.raises(fmapper.CheckpointError, match=said) as caught:
        read(folder)
    assert str(folder) in str(caught.value)


def files(folder):
    """Where chunks lie: an array's own file, or those of the database."""
    return [*folder.glob("d/*")] or [folder / "b" / "0"]


def rows(folder, *keys):
    about = json.loads((folder / "_METADATA").read_text())
    for key in keys:
        about["tree_metadata"][f"('{key}',)"] = {
            "key_metadata": [{"key": key, "key_type": 2}],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    (folder / "_METADATA").write_text(json.dumps(about))


def test_missing_chunks_are_not_zeros(folder):
    for file in files(folder):
        file.unlink()
    refused(folder, "is missing|tensorstore cannot read it: NOT_FOUND")


def test_missing_arrays_are_said(folder):
    rows(folder, "gone")
    refused(folder, "gone: orbax finds no array of this name")


def test_metadata_are_there(folder):
    (folder / "_METADATA").unlink()
    refused(folder, "has no _METADATA")


def test_metadata_have_bounds(folder):
    for text, said in [
        ("[" * 100_000, "has no tree_metadata"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "[" * 50_000 + "]" * 50_000 + "}}", "nested too deeply"),
        ('{"a": [' + "1," * 50_000 + "1]}}", "has an entry of more than 65,536"),
        ("{}, " + '"tree_metadata": {"a": 1}}', "a key twice"),
        ('{"a": {}}}', "lists something that is not an array"),
        ('{"a": 1' + "1" * 60_000 + "}}", "JSON at character 19"),
        ("{}", "is not JSON"),
    ]:
        (folder / "_METADATA").write_text('{"tree_metadata": ' + text)
        refused(folder, said)


def test_more_arrays_than_orbax_reads_in_time_are_refused(folder, monkeypatch):
    monkeypatch.setitem(bounds._MOST, "arrays of Orbax", 20)
    monkeypatch.setitem(bounds._BYTES_OF_ONE, "arrays of Orbax", 1 << 40)
    rows(folder, *(f"w{at}" for at in range(21)))
    refused(folder, "arrays of Orbax; 20 are allowed.*settings.bounds")


@pytest.mark.parametrize("name", ["../secret", "/etc", "a/../../b"])
def test_names_lead_to_the_folder(folder, name):
    rows(folder, name)
    refused(folder, "out of the folder")


def test_links_lead_to_the_folder(folder, tmp_path):
    for file in files(folder):
        shutil.move(file, tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    refused(folder, "a link that leads out of the folder")


def test_links_lead_to_the_blobs_of_the_same_repository(folder, tmp_path):
    snapshot, blobs = tmp_path / "repo" / "snapshots" / "1", tmp_path / "repo" / "blobs"
    blobs.mkdir(parents=True)
    shutil.copytree(folder, snapshot)
    for file in files(snapshot):
        shutil.move(file, blobs / file.name)
        file.symlink_to(blobs / file.name)
    assert fmapper.load(snapshot)["b"].read().tolist() == [1, 1, 1, 1]


def test_a_folder_elsewhere_is_not_the_item(folder, tmp_path):
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "default").symlink_to(folder)
    refused(tmp_path / "y", "a link that leads out of the folder")


def test_pipes_are_not_opened(folder):
    for file in files(folder):
        file.unlink()
        os.mkfifo(file)
    refused(folder, "not a regular file")


def test_metadata_of_steps_have_bounds(folder):
    os.truncate(folder / "_CHECKPOINT_METADATA", 2_000_000)
    refused(folder, "_CHECKPOINT_METADATA: is too long")


def test_arrays_that_are_not_to_be_read_are_said(folder):
    about = json.loads((folder / "_METADATA").read_text())
    for row in about["tree_metadata"].values():
        row["value_metadata"]["skip_deserialize"] = True
    (folder / "_METADATA").write_text(json.dumps(about))
    refused(folder, "not stored in this folder")


def zarray(folder, **changes):
    """Changes what is said of the array `b`; chunks lie in files of their own."""
    about = json.loads((folder / "b" / ".zarray").read_text())
    (folder / "b" / ".zarray").write_text(json.dumps({**about, **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": [1 << 40], "chunks": [1 << 40]}, "b: has chunks of 4,398,046,511,104 bytes"),
        ({"chunks": [1 << 40]}, "more than its files can hold"),
        ({"shape": [1 << 40]}, "more than its files can hold"),
        ({"shape": [1 << 70]}, "an invalid size"),
        ({"shape": [-1]}, "an invalid size"),
        ({"shape": "4"}, "an invalid size"),
        ({"chunks": [0]}, "an invalid size"),
        ({"shape": [1] * 100, "chunks": [1] * 100}, "an invalid size"),
        ({"shape": [2, 2]}, "has 2 dimensions, and chunks of 1"),
        ({"dtype": "|V1000000000000"}, "the unknown dtype"),
        ({"dtype": [["a", "<f4"]]}, "the unknown dtype"),
        ({"dtype": "[" * 60_000}, "the unknown dtype"),
        ({"filters": [{"id": "x" * 5000}]}, "filters are not supported"),
    ],
)
@pytest.mark.parametrize("folder", [False], indirect=True, ids=["files"])
def test_what_is_said_of_an_array_fits_its_files(folder, changes, said):
    zarray(folder, **changes)
    refused(folder, said)


@pytest.mark.parametrize("folder", [False], indirect=True, ids=["files"])
def test_an_array_of_an_unknown_dtype_is_refused_alone(folder):
    zarray(folder, dtype="int4")
    loaded = fmapper.load(folder)
    with pytest.raises(fmapper.CheckpointError, match=r"'b': has the unknown dtype 'int4'"):
        loaded["b"].read()


@pytest.mark.parametrize("folder", [False], indirect=True, ids=["files"])
def test_an_array_of_zeros_without_chunks_is_read_in_parts(folder):
    about = json.loads((folder / "_METADATA").read_text())
    about["store_array_data_equal_to_fill_value"] = False
    (folder / "_METADATA").write_text(json.dumps(about))
    (folder / "b" / "0").unlink()
    zarray(folder, shape=[1 << 40])
    assert fmapper.load(folder)["b"].read([(1 << 39, (1 << 39) + 2)]).tolist() == [0, 0]


def test_a_folder_that_is_unfinished_is_said(folder):
    unfinished = folder.with_name("y.orbax-checkpoint-tmp")
    shutil.copytree(folder, unfinished / "default")
    refused(unfinished, "is unfinished")
    refused(unfinished / "default", "is unfinished")
    about = json.loads((folder / "_CHECKPOINT_METADATA").read_text())
    assert about["commit_timestamp_nsecs"]
    (folder / "_CHECKPOINT_METADATA").write_text(
        json.dumps({**about, "commit_timestamp_nsecs": None})
    )
    refused(folder, "is unfinished: the process that saved it")


@pytest.mark.parametrize("is_database", [False, True])
def test_kinds_of_orbax(is_database, tmp_path):
    tree = {"w": np.ones(2), "n": {}, "none": None, "l": [np.zeros((2, 1)), {"k": 1.5, "t": "x"}]}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=is_database, use_zarr3=is_database)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "x", args=ocp.args.PyTreeSave(tree))
    found = fmapper.load(tmp_path / "x")
    assert found["w"].read().tolist() == [1, 1]
    assert found["l.0"].read().tolist() == [[0], [0]]
    assert {n: v for n, v in found.items() if n[-1] in "kt"} == {"l.1.k": 1.5, "l.1.t": "x"}
    assert len(found) == 4


@pytest.mark.parametrize("name", ["a/", "/.", "a/b/", "n.a/", "a~1b", "a/0"])
def test_names_that_are_paths(name, tmp_path):
    if name == "/.":
        with pytest.raises(fmapper.CheckpointError, match="leads out of the folder"):
            fmapper.save({name: np.ones(2)}, tmp_path / "x.orbax")
        return
    for kind, value in enumerate([np.arange(3.0), 7, "text"]):
        fmapper.save({name: value}, tmp_path / f"{kind}.orbax")
        found = fmapper.load(tmp_path / f"{kind}.orbax")[name]
        assert np.array_equal(np.asarray(found), np.asarray(value))


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a": np.ones(2), "a/": np.zeros(2)}, "a/: orbax stores it in the same place as a"),
        ({"a~b": "text"}, "a~b: orbax has no string under a name with ~"),
        ({"a": "t", "a/b": "u"}, "a/b: orbax would put it inside the string a"),
    ],
)
def test_names_that_orbax_cannot_keep_are_refused(tree, said, tmp_path):
    with pytest.raises(fmapper.CheckpointError, match=said):
        fmapper.save(tree, tmp_path / "x.orbax")
    assert not any(tmp_path.iterdir())


def test_many_small_arrays_are_written_at_once_and_read(tmp_path, monkeypatch):
    tensorstore = pytest.importorskip("tensorstore")
    made = []
    transaction = tensorstore.Transaction
    monkeypatch.setattr(
        tensorstore, "Transaction", lambda **kw: made.append(1) or transaction(**kw)
    )
    monkeypatch.setitem(bounds._MOST, "arrays of Orbax", 0)  # there may be one for so many bytes
    tree = {f"w{at}": np.full(2, at, np.float32) for at in range(200)}
    fmapper.save({**tree, "large": np.zeros((3000, 3000))}, tmp_path / "x.orbax")
    assert len(made) == 2  # and that of Orbax
    found = fmapper.load(tmp_path / "x.orbax")
    assert all(found[name].read().tolist() == array.tolist() for name, array in tree.items())
