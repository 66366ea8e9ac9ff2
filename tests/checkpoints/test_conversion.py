"""`convert_checkpoint`: whole or absent, continued after a kill, nothing held."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import fmapper
from fmapper.checkpoints import (
    Cast,
    LazyArray,
    Rename,
    Rules,
    concatenate,
    convert_checkpoint,
    diff,
    stack,
)
from fmapper.checkpoints.formats import safetensors, writer

SHAPES = {"a": (300, 70), "b": (7,), "c": (64, 33, 5), "empty": (0, 4), "scalar": ()}


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


@pytest.fixture
def source(tmp_path):
    fmapper.save({**arrays(), "step": 3}, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


@pytest.fixture
def small(monkeypatch):
    """Panels and shards of a few hundred bytes."""
    monkeypatch.setattr(writer, "_PANEL", 512)
    monkeypatch.setattr(writer, "_COPY", 1000)
    monkeypatch.setattr(safetensors, "MOST_BYTES_OF_A_SHARD", 20_000)


@pytest.mark.parametrize("target", ["x.safetensors", "x.npz", "x", "x.pt", "x.msgpack"])
@pytest.mark.usefixtures("small")
def test_every_format_has_the_same_arrays(source, tmp_path, target):
    form = "safetensors" if target == "x" else None
    done = convert_checkpoint(source, tmp_path / target, form)
    assert not diff(source, tmp_path / target)
    assert (done.arrays, done.nbytes) == (5, sum(array.nbytes for array in arrays().values()))
    assert sorted(os.listdir(tmp_path)) == sorted(["source.safetensors", target])


@pytest.mark.usefixtures("small")
def test_shards_have_an_index_that_others_read(source, tmp_path):
    convert_checkpoint(source, tmp_path / "x", "safetensors")
    names = sorted(path.name for path in (tmp_path / "x").iterdir())
    assert names[-1] == "model.safetensors.index.json"
    assert len(names) == 5
    from safetensors.numpy import load_file

    found = {}
    for path in (tmp_path / "x").glob("*.safetensors"):
        found |= load_file(path)
    assert not diff(found, arrays())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.usefixtures("small")
def test_a_dtype_is_cast_as_numpy_casts(source, tmp_path, dtype):
    convert_checkpoint(source, tmp_path / "x.safetensors", dtype=dtype)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    wanted = {name: array.astype(kind) for name, array in arrays().items()}
    assert not diff(tmp_path / "x.safetensors", {**wanted, "step": 3})


def test_what_becomes_infinite_is_refused_by_name(tmp_path):
    fmapper.save({"ok": np.ones(2), "big": np.full(3, 1e30)}, tmp_path / "s.safetensors")
    with pytest.raises(fmapper.LossyCastError, match="big"):
        convert_checkpoint(tmp_path / "s.safetensors", tmp_path / "x.npz", dtype="float16")
    assert not (tmp_path / "x.npz").exists()


def test_places_that_cannot_be_are_refused(source, tmp_path):
    (tmp_path / "there").write_text("mine")
    with pytest.raises(FileExistsError, match="already exists"):
        convert_checkpoint(source, tmp_path / "there", "npz")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match="no such folder"):
        convert_checkpoint(source, tmp_path / "no" / "x.npz")
    convert_checkpoint(source, tmp_path / "folder", "safetensors")
    with pytest.raises(fmapper.CheckpointError, match="would be inside its source"):
        convert_checkpoint(tmp_path / "folder", tmp_path / "folder" / "x.npz")


class Stop(Exception):
    pass


@pytest.mark.parametrize("target", ["x.safetensors", "x", "x.pt", "x.npz", "x.msgpack"])
@pytest.mark.usefixtures("small")
def test_an_interrupted_run_is_continued(source, tmp_path, monkeypatch, target):
    form = "safetensors" if target == "x" else None
    written = []
    original = writer.write_piece

    def write(handle, piece, check):
        written.append((piece.name, piece.offset))
        return original(handle, piece, check)

    monkeypatch.setattr(writer, "write_piece", write)
    convert_checkpoint(source, tmp_path / f"whole-{target}", form)
    whole, stopped = len(written), 0
    written.clear()
    for stop_after in (3, 40, 80, 10_000):
        left = [stop_after]

        def stopping(self, nbytes, left=left):
            left[0] -= 1
            if not left[0]:
                raise Stop

        with monkeypatch.context() as patch:
            patch.setattr("fmapper.checkpoints.conversion._Meter.__call__", stopping)
            try:
                convert_checkpoint(source, tmp_path / target, form)
            except Stop:
                stopped += 1
                assert not (tmp_path / target).exists()
                assert (tmp_path / f"{target}.partial").exists()
    assert stopped >= 1
    assert not diff(source, tmp_path / target)
    assert not (tmp_path / f"{target}.partial").exists()
    if target != "x.npz":
        assert len(written) <= whole + 12, "what was written was written again"


def test_other_arguments_begin_anew(source, tmp_path, monkeypatch):
    def stop(self, nbytes):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("fmapper.checkpoints.conversion._Meter.__call__", stop)
        with pytest.raises(Stop):
            convert_checkpoint(source, tmp_path / "x.safetensors", dtype="float16")
    convert_checkpoint(source, tmp_path / "x.safetensors")
    assert not diff(source, tmp_path / "x.safetensors")


def test_two_processes_do_not_write_one_target(source, tmp_path, monkeypatch):
    def again(self, nbytes):
        with pytest.raises(fmapper.CheckpointError, match="another process is writing"):
            convert_checkpoint(source, tmp_path / "x.safetensors")
        raise Stop

    monkeypatch.setattr("fmapper.checkpoints.conversion._Meter.__call__", again)
    with pytest.raises(Stop):
        convert_checkpoint(source, tmp_path / "x.safetensors")


def test_what_reads_otherwise_than_it_was_written_is_found(source, tmp_path, monkeypatch):
    original = writer.write_piece

    def spoil(handle, piece, check):
        done = original(handle, piece, check)
        if piece.name == "c":
            os.pwrite(handle, b"\xff", piece.offset + 17)
        return done

    monkeypatch.setattr(writer, "write_piece", spoil)
    for dtype in (None, "float16"):
        with pytest.raises(
            fmapper.CheckpointError, match="c: reads back differently than it was written"
        ):
            convert_checkpoint(source, tmp_path / "x.safetensors", dtype=dtype)
    assert not (tmp_path / "x.safetensors").exists()


def test_a_full_disk_loses_nothing(source, tmp_path, monkeypatch):
    def full(handle, piece, check):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_piece", full)
        with pytest.raises(OSError, match=r"No space left.*make room.*run this again") as caught:
            convert_checkpoint(source, tmp_path / "x.safetensors")
        assert caught.value.filename == str(tmp_path / "x.safetensors.partial")
    assert not (tmp_path / "x.safetensors").exists()
    convert_checkpoint(source, tmp_path / "x.safetensors")
    assert not diff(source, tmp_path / "x.safetensors")


def kill_at_random(source: Path, target: Path, kills: int, seed: int) -> int:
    """Kills conversions, each in a process of its own; tells how many were killed at work."""
    code = (
        "import sys; from fmapper.checkpoints import convert_checkpoint; "
        "print('ready', flush=True); "
        "convert_checkpoint(sys.argv[1], sys.argv[2], dtype='float64')"
    )
    rng = random.Random(seed)
    killed = 0
    for _ in range(kills):
        command = [sys.executable, "-c", code, str(source), str(target)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if target.exists():
            assert not diff(source, target, values=False).differences[3:], "half a checkpoint"
            target.unlink()
        else:
            killed += 1
    return killed


@pytest.mark.nightly
@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.nightly)])
def test_a_killed_run_leaves_the_target_whole_or_absent(tmp_path, kills):
    source, target = tmp_path / "s.safetensors", tmp_path / "x.safetensors"
    big = {name: np.ones((1000, 4000), np.float32) * at for at, name in enumerate("abc")}
    fmapper.save(big, source)
    killed = kill_at_random(source, target, kills, seed=0)
    assert killed
    convert_checkpoint(source, target, dtype="float64")
    assert not diff(target, {name: array.astype(np.float64) for name, array in big.items()})


def test_panels_of_a_stack_of_transposed_matrices_do_not_grow_with_their_number():
    from fmapper.checkpoints.formats.writer import panels

    matrix = LazyArray.full((4096, 3000), 1, np.float16)
    for stacked in (
        stack([matrix.transpose()] * 50),
        stack([matrix.astype("float32")] * 50).transpose((0, 2, 1)),
        concatenate([matrix.transpose()] * 50),
    ):
        sizes = [nbytes for _, nbytes in panels(stacked)]
        assert sum(sizes) == stacked.nbytes
        assert max(sizes) <= 16 << 20
    first = LazyArray.full((128, 256, 600), 1, np.float16).transpose((2, 0, 1))
    two = [nbytes for _, nbytes in panels(first)]  # not more than with runs of 1 KiB, and alike
    assert two == [300 * 128 * 256 * 2] * 2


def test_a_folder_of_the_hub_keeps_what_stands_beside_its_weights(tmp_path):
    folder = tmp_path / "llama"
    fmapper.save({"w": np.ones(3, np.float32)}, folder, "safetensors")
    own = {
        "router_dtype": "float32",
        "text_config": {"torch_dtype": "float32", "ssm_dtype": "float32"},
    }
    settings = {"model_type": "llama", "dtype": "float32", **own}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "modeling_own.py").write_text("raise SystemExit")
    (tmp_path / "secret.txt").write_text("secret")
    convert_checkpoint(folder, tmp_path / "half", "safetensors", dtype="float16")
    names = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "half").iterdir()} == names
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    text = {"torch_dtype": "float16", "ssm_dtype": "float32"}  # only that of weights
    assert config == {**settings, "dtype": "float16", "text_config": text}
    convert_checkpoint(folder, tmp_path / "same", "safetensors")
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "same" / name).read_bytes() == (folder / name).read_bytes()
    renamed = Rules([Rename("w", "v")])
    convert_checkpoint(folder, tmp_path / "renamed", "safetensors", rules=renamed)
    assert [path.name for path in (tmp_path / "renamed").iterdir()] == ["model.safetensors"]
    (folder / "merges.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(fmapper.CheckpointError, match="a link that leads out of the folder"):
        convert_checkpoint(folder, tmp_path / "again", "safetensors")
    assert not (tmp_path / "again").exists()
    assert not (tmp_path / "again.partial").exists()


@pytest.fixture
def fp8(tmp_path):
    """A folder with blocks of 16 that are cut off at the end, and what it stands for."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((24, 20)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1, 2, (2, 2)).astype(np.float32)
    dense = values.astype(np.float32) * scales.repeat(16, 0).repeat(16, 1)[:24, :20]
    weights = {"w": values, "w_scale_inv": scales, "norm": np.ones(3, np.float32), "step": 3}
    fmapper.save(weights, tmp_path / "fp8", "safetensors")
    method = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    settings = {"model_type": "llama", "dtype": "float32", "quantization_config": method}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(settings))
    return tmp_path / "fp8", dense


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_quantised_arrays_are_dequantised(fp8, tmp_path, dtype):
    folder, dense = fp8
    convert_checkpoint(folder, tmp_path / "out", "safetensors", dtype=dtype, dequantize=True)
    norm = np.ones(3, dtype or np.float32)
    weight = dense.astype(dtype or ml_dtypes.bfloat16)
    assert not diff(tmp_path / "out", {"w": weight, "norm": norm, "step": 3})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "llama", "dtype": dtype or "float32"}
    convert_checkpoint(folder, tmp_path / "same", "safetensors")
    assert not diff(folder, tmp_path / "same")
    assert fmapper.load(tmp_path / "same").quantization is not None


def test_floats_of_8_bits_are_not_cast_without_their_scales(fp8, tmp_path):
    folder, _ = fp8
    with pytest.raises(fmapper.CheckpointError, match=r"w: to cast .* Pass dequantize=True"):
        convert_checkpoint(folder, tmp_path / "out", "safetensors", dtype="bfloat16")
    renamed = Rules([Rename("w_scale_inv", "w.s")])
    convert_checkpoint(folder, tmp_path / "other", "safetensors", rules=renamed)
    assert not (tmp_path / "other" / "config.json").exists()
    for options in ({"dtype": "float32"}, {"dequantize": True}):
        with pytest.raises(fmapper.CheckpointError, match=r"w: |no quantised arrays"):
            convert_checkpoint(tmp_path / "other", tmp_path / "x.npz", **options)
    back = Rules([Rename("w.s", "w_scale_inv")])
    convert_checkpoint(tmp_path / "other", tmp_path / "again", "safetensors", rules=back)
    with pytest.raises(fmapper.CheckpointError, match=r"w: .* blocks of several sizes"):
        convert_checkpoint(tmp_path / "again", tmp_path / "x.npz", dequantize=True)
    assert not (tmp_path / "x.npz").exists()


def test_plain_floats_of_8_bits_are_cast_by_a_rule(tmp_path):
    plain = np.arange(8).astype(ml_dtypes.float8_e5m2)
    scaled = {"v": plain, "v_scale": np.full(1, 2, np.float32)}
    fmapper.save({"w": plain, **scaled}, tmp_path / "x.npz")
    with pytest.raises(
        fmapper.CheckpointError, match=r"x.npz: w: floats of 8 bits without recognised scales"
    ):
        convert_checkpoint(tmp_path / "x.npz", tmp_path / "y.npz", dequantize=True)
    cast = Rules([Cast("w", "float32")])
    convert_checkpoint(
        tmp_path / "x.npz", tmp_path / "y.npz", rules=cast, dequantize=True, dtype="float32"
    )
    wide = plain.astype(np.float32)
    assert not diff(tmp_path / "y.npz", {"w": wide, "v": 2 * wide})


def test_nothing_is_checksummed_where_nothing_is_compared(source, tmp_path, monkeypatch):
    def fail(*_):
        raise AssertionError("a checksum")

    monkeypatch.setattr(writer.zlib, "crc32", fail)
    convert_checkpoint(source, tmp_path / "x.safetensors", dtype="float16", check=False)
    with pytest.raises(AssertionError, match="a checksum"):
        convert_checkpoint(source, tmp_path / "y.safetensors", dtype="float16")


@pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="Linux has it")
@pytest.mark.parametrize(("start", "offset"), [(4096, 8192), (100, 4196), (100, 200)])
def test_the_kernel_copies_what_lies_alike_in_pages(tmp_path, monkeypatch, start, offset):
    data = np.random.default_rng(0).bytes(3 << 20)
    (tmp_path / "a").write_bytes(data)
    calls = []
    copy = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda *args: calls.append(args) or copy(*args))
    with (tmp_path / "a").open("rb") as source, (tmp_path / "b").open("w+b") as target:
        count = len(data) - start
        writer._copy(source.fileno(), target.fileno(), start, offset, count)
        target.seek(offset)
        assert target.read() == data[start:]
    assert bool(calls) == ((start - offset) % 4096 == 0)


@pytest.mark.parametrize("target", ["x.safetensors", "x.npz", "x", "x.pt", "x.msgpack", "x.dcp"])
def test_a_conversion_that_is_complete_succeeds_again(source, tmp_path, target, monkeypatch):
    form = "safetensors" if target == "x" else None
    first = convert_checkpoint(source, tmp_path / target, form)
    place = tmp_path / target
    before = {path: path.stat().st_mtime_ns for path in [place, *place.rglob("*")]}
    monkeypatch.setattr(writer.Writer, "__init__", lambda *args, **kw: pytest.fail("wrote"))
    again = convert_checkpoint(source, tmp_path / target, form, check=False)
    assert (again.path, again.arrays, again.nbytes) == (place, first.arrays, first.nbytes)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"w": np.ones(4), "step": 3}, "w: 2 elements differ"),
        ({"w": np.ones(3), "step": 3}, r"w: shape \[3\] and \[4\]"),
        ({"w": np.ones(4)}, "step: only in the second"),
        ({"w": np.array([1.0, 2, 3, 1]), "step": 4}, "step: value 4 and 3"),
    ],
)
def test_a_target_that_is_something_else_is_kept(tmp_path, tree, said):
    fmapper.save({"w": np.array([1.0, 2, 3, 1]), "step": 3}, tmp_path / "s.safetensors")
    fmapper.save(tree, tmp_path / "x.npz")
    data = (tmp_path / "x.npz").read_bytes()
    with pytest.raises(FileExistsError, match=said):
        convert_checkpoint(tmp_path / "s.safetensors", tmp_path / "x.npz")
    assert (tmp_path / "x.npz").read_bytes() == data


def test_another_format_or_a_damaged_file_is_not_what_would_be_written(source, tmp_path):
    fmapper.save({"w": np.ones(2)}, tmp_path / "x.npz")
    os.rename(tmp_path / "x.npz", tmp_path / "x")
    with pytest.raises(FileExistsError, match="it is in the format npz"):
        convert_checkpoint(source, tmp_path / "x", "safetensors")
    (tmp_path / "y.npz").write_bytes(b"PK\3\4")
    with pytest.raises(FileExistsError, match="is not a zip file"):
        convert_checkpoint(source, tmp_path / "y.npz")


def test_a_folder_keeps_its_format_under_a_name_without_an_ending(source, tmp_path):
    convert_checkpoint(source, tmp_path / "llama-3.1", "safetensors")
    assert (
        convert_checkpoint(tmp_path / "llama-3.1", tmp_path / "llama-3.2").format == "safetensors"
    )
    (tmp_path / "old").mkdir()
    fmapper.save({"w": np.ones(2)}, tmp_path / "old" / "pytorch_model.bin")
    assert convert_checkpoint(tmp_path / "old", tmp_path / "new").format == "pt"
    assert (tmp_path / "new" / "pytorch_model.bin").is_file()
    assert convert_checkpoint(tmp_path / "old", tmp_path / "new.npz").format == "npz"
    with pytest.raises(fmapper.CheckpointError, match="cannot determine the format"):
        convert_checkpoint(source, tmp_path / "z")


@pytest.mark.parametrize("size", [20_000, "20kB", "20 KB"])
def test_shards_have_the_size_that_is_asked_for(source, tmp_path, size):
    convert_checkpoint(source, tmp_path / "x", "safetensors", max_shard_size=size)
    fmapper.save(fmapper.load(source), tmp_path / "y", "safetensors", max_shard_size=size)
    for folder in (tmp_path / "x", tmp_path / "y"):
        assert len([*folder.glob("*.safetensors")]) > 1
        assert not diff(source, folder)
    convert_checkpoint(source, tmp_path / "x", "safetensors", max_shard_size=size)
    with pytest.raises(FileExistsError, match="its shards differ"):
        convert_checkpoint(source, tmp_path / "x", "safetensors")


@pytest.mark.parametrize("size", [0, -1, "much", 1.5, True])
def test_sizes_of_shards_are_bytes(tmp_path, size):
    with pytest.raises(fmapper.CheckpointError, match="max_shard_size="):
        fmapper.save({"w": np.ones(2)}, tmp_path / "x", "safetensors", max_shard_size=size)


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "x.dcp"])
def test_other_formats_have_no_shards(tmp_path, name):
    with pytest.raises(fmapper.CheckpointError, match="is not written in shards"):
        fmapper.save({"w": np.ones(2)}, tmp_path / name, max_shard_size="1GB")
