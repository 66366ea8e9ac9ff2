"""Files of llama.cpp, written by the gguf package and read here."""

import struct

import pytest

import fmapper
from fmapper.checkpoints import QuantizedArray, convert_checkpoint, dequantize, find_quantized
from support.patience import no_hang

np = pytest.importorskip("numpy")
pytest.importorskip("ml_dtypes")
gguf = pytest.importorskip("gguf")

RNG = np.random.default_rng(0)
KINDS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")


@pytest.fixture
def path(tmp_path):
    """A file with arrays of several types, and the vocabulary of a large model."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_token_list([f"token {i}" for i in range(50_000)])
    writer.add_token_scores([0.5] * 50_000)
    writer.add_tensor("token_embd.weight", RNG.standard_normal((6, 256)).astype(np.float32))
    writer.add_tensor("norm.weight", np.arange(5, dtype=np.float16))
    bfloat16 = gguf.GGMLQuantizationType.BF16
    bits = RNG.integers(0, 0x7F00, (3, 8), np.uint16)
    writer.add_tensor("bf16", bits.view(np.uint8), raw_dtype=bfloat16)
    for kind in KINDS:
        number = gguf.GGMLQuantizationType[kind]
        elements, size = gguf.GGML_QUANT_SIZES[number]
        blocks = RNG.integers(0, 127, (6, 256 // elements * size), np.uint8)
        writer.add_tensor(f"blk.0.{kind}", blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.nightly
def test_a_file_is_what_its_own_reader_reads(path):
    wanted = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = fmapper.load(path)
    assert [*found] == [*wanted]
    for name, tensor in wanted.items():
        values = found[name].read()
        assert values.shape == tuple(tensor.shape.tolist()[::-1]), name
        if name.startswith("blk"):
            with np.errstate(all="ignore"):
                plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(values, plain)
        else:
            assert values.tobytes() == tensor.data.tobytes()


def test_quantised_arrays_are_kept_or_converted(path, tmp_path):
    found = find_quantized(dict(fmapper.load(path)))
    kept = {name: array for name, array in found.items() if isinstance(array, QuantizedArray)}
    assert [array.layout.type for array in kept.values()] == list(KINDS)
    assert kept["blk.0.Q4_K"].values.dtype == np.uint8
    plain = dequantize(dict(fmapper.load(path)), dtype="bfloat16")
    assert {
        name: array.dtype.name for name, array in plain.items() if "blk" in name
    } == dict.fromkeys(kept, "bfloat16")
    target = tmp_path / "model.safetensors"
    convert_checkpoint(path, target)
    again = fmapper.load(target)
    for name, array in fmapper.load(path).items():
        np.testing.assert_array_equal(again[name].read(), array.read())
    with pytest.raises(fmapper.CheckpointError, match="GGUF can be read, but not written"):
        convert_checkpoint(target, tmp_path / "new.gguf")


def text(value):
    return struct.pack("<Q", len(value)) + value


def file_of(arrays=b"", values=b"", counts=(1, 0), rest=b"\0" * 64, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + values + arrays + rest


def array_of(name=b"w", shape=(4,), kind=0, start=0, dims=None):
    head = struct.pack("<I", len(shape) if dims is None else dims)
    return text(name) + head + struct.pack(f"<{len(shape)}QIQ", *shape, kind, start)


HOSTILE = {
    "empty": b"GGUF",
    "version": file_of(version=1),
    "other byte order": b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + b"\0" * 99,
    "counts": file_of(counts=(1 << 60, 1 << 60)),
    "no arrays": file_of(counts=(5, 0)),
    "twice": file_of(array_of() * 2, counts=(2, 0)),
    "dimensions": file_of(array_of(dims=1 << 31)),
    "large": file_of(array_of(shape=(1 << 62, 4))),
    "overflow": file_of(array_of(shape=(1 << 33, 1 << 33))),
    "beyond": file_of(array_of(shape=(1 << 20,))),
    "offset": file_of(array_of(start=1 << 40)),
    "unaligned": file_of(array_of(start=1)),
    "overlap": file_of(
        array_of(shape=(16,)) + array_of(b"v", start=32), counts=(2, 0), rest=b"\0" * 200
    ),
    "blocks": file_of(array_of(kind=12)),
    "no dimensions, blocks": file_of(array_of(shape=(), kind=12), rest=b"\0" * 8),
    "name": file_of(array_of(name=b"\xff")),
    "no name": file_of(array_of(name=b"")),
    "long name": file_of(array_of(name=b"w" * 5000)),
    "value": file_of(array_of(), text(b"a") + struct.pack("<I", 77), (1, 1)),
    "list": file_of(array_of(), text(b"a") + struct.pack("<IIQ", 9, 8, 1 << 50), (1, 1)),
    "list of lists": file_of(array_of(), text(b"a") + struct.pack("<IIQ", 9, 9, 4), (1, 1)),
    "numbers": file_of(array_of(), text(b"a") + struct.pack("<IIQ", 9, 4, 1 << 61), (1, 1)),
    "value twice": file_of(array_of(), (text(b"a") + struct.pack("<II", 4, 1)) * 2, (1, 2)),
    "alignment": file_of(array_of(), text(b"general.alignment") + struct.pack("<II", 4, 3), (1, 1)),
    "text": file_of(array_of(), text(b"a") + struct.pack("<IQ", 8, 1 << 62), (1, 1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_error_and_no_time(name, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[name])
    with no_hang(), pytest.raises(fmapper.CheckpointError, match=r"x\.gguf: "):
        fmapper.load(path)


@pytest.mark.parametrize("kind", [4, 999])  # a type that was removed, and one that never was
def test_an_array_of_an_unknown_type_is_refused_alone(tmp_path, kind):
    path = tmp_path / "x.gguf"
    known = array_of(b"v", shape=(4,), start=32)
    path.write_bytes(file_of(array_of(kind=kind) + known, counts=(2, 0), rest=b"\0" * 64))
    loaded = fmapper.load(path)
    assert loaded["v"].read().shape == (4,)
    with pytest.raises(fmapper.CheckpointError, match=r"x\.gguf: 'w': has the unknown dtype"):
        loaded["w"].read()


def test_every_cut_is_an_error(path):
    data = path.read_bytes()
    for size in (*range(60), 1000, len(data) // 2, len(data) - 40):
        path.write_bytes(data[:size])
        with pytest.raises(fmapper.CheckpointError):
            fmapper.load(path)
