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
    refused(folder, "is missing|orbax finds")


def test_missing_arrays_are_said(folder):
    rows(folder, "gone")
    refused(folder, r"orbax finds \d of the 4 arrays")


def test_metadata_are_there(folder):
    (folder / "_METADATA").unlink()
    refused(folder, "has no _METADATA")


def test_metadata_have_bounds(folder):
    (folder / "_METADATA").write_text('{"tree_metadata": ' + "[" * 100_000)
    refused(folder, "nested too deeply")


def test_more_arrays_than_orbax_reads_in_time_are_refused(folder, monkeypatch):
    monkeypatch.setitem(bounds._MOST, "arrays of Orbax", 20)
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
    refused(folder, "_CHECKPOINT_METADATA that is too large")


def test_arrays_that_are_not_to_be_read_are_said(folder):
    about = json.loads((folder / "_METADATA").read_text())
    for row in about["tree_metadata"].values():
        row["value_metadata"]["skip_deserialize"] = True
    (folder / "_METADATA").write_text(json.dumps(about))
    refused(folder, "finds no array of this name")
