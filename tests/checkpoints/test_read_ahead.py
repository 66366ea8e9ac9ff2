"""Weights that are read while a program is recorded."""

import threading

import pytest

import fmapper
from fmapper.checkpoints import pretrained
from fmapper.checkpoints.backend import read_ahead
from fmapper.checkpoints.stored import StoredArray

np = pytest.importorskip("numpy")

SOON = 30  # seconds


@pytest.fixture
def stored(tmp_path):
    """Arrays in a file, and their values; one is empty, one has no dimensions."""
    values = {f"a{i}": np.random.rand(i, 40_000) for i in range(5)} | {"one": np.float32(3)}
    fmapper.save(values, tmp_path / "file.safetensors")
    return fmapper.load(tmp_path / "file.safetensors"), values


@pytest.fixture
def reads(monkeypatch):
    """Counts the bytes that are read; the event is set when the first are."""
    counted = []
    begun = threading.Event()
    original = StoredArray.read_into

    def read_into(array, out, box):
        counted.append(out.nbytes)
        begun.set()
        original(array, out, box)

    monkeypatch.setattr(StoredArray, "read_into", read_into)
    return counted, begun


def test_arrays_are_there_when_they_are_moved_and_read_once(stored, reads):
    arrays, values = stored
    counted, begun = reads
    with read_ahead(arrays.values()):
        assert begun.wait(SOON)
        moved = fmapper.to_numpy(dict(arrays))
    for name, value in values.items():
        np.testing.assert_array_equal(moved[name], value)
        assert moved[name].dtype == value.dtype
        assert moved[name].flags.writeable
    assert sum(counted) == sum(value.nbytes for value in values.values())


def test_what_is_moved_twice_is_two_arrays(stored):
    arrays, values = stored
    with read_ahead(arrays.values()):
        first, second = (fmapper.to_numpy({"a4": arrays["a4"]})["a4"] for _ in range(2))
    first[:] = 0
    np.testing.assert_array_equal(second, values["a4"])


def test_what_nobody_moves_is_dropped(stored):
    arrays, values = stored
    with pytest.raises(KeyError, match="of the block"), read_ahead(arrays.values()):
        raise KeyError("of the block")
    np.testing.assert_array_equal(fmapper.to_numpy({"a": arrays["a3"]})["a"], values["a3"])


def test_a_file_that_changes_meanwhile_is_said_where_it_is_moved(stored, tmp_path):
    arrays, _ = stored
    (tmp_path / "file.safetensors").write_bytes(b"shorter")
    with (
        read_ahead(arrays.values()),
        pytest.raises(fmapper.CheckpointError, match=r"file\.safetensors: has changed"),
    ):
        fmapper.to_numpy(dict(arrays))


@pytest.mark.nightly
def test_weights_are_read_while_the_program_is_recorded(tmp_path, reads, monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jax")
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    module = transformers.BertModel(config).eval()
    module.save_pretrained(tmp_path)
    counted, begun = reads
    convert = pretrained._convert

    def wait_and_convert(*args, **options):
        assert begun.wait(SOON)
        return convert(*args, **options)

    monkeypatch.setattr(pretrained, "_convert", wait_and_convert)
    model = fmapper.from_pretrained(tmp_path, "jax", device="cpu")
    for name, value in module.state_dict().items():
        assert torch.equal(torch.from_numpy(np.array(model.params[name])), value)
    saved = sum(value.nbytes for value in fmapper.load(tmp_path).values())
    assert sum(counted) == saved
