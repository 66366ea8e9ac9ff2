"""Files that a GPU's backend reads straight into its memory: which arrays, exactness, failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper import Device
from fmapper.checkpoints import LazyArray
from fmapper.checkpoints import backend as _backend

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

CUDA = Device("torch", "cuda", 0)
on_torch = pytest.mark.gpu("torch")


@pytest.fixture
def weights() -> dict[str, Any]:
    return {
        "large": torch.randn(3 << 20),
        **{f"layers.{n}": torch.randn(16, n) for n in range(40)},
        "half": torch.randn(300).bfloat16(),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }


@pytest.fixture
def path(tmp_path: Path, weights: dict[str, Any]) -> Path:
    fmapper.save(weights, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def test_only_arrays_that_are_stored_as_they_are_stay_in_their_file(path: Path) -> None:
    adapter = _backend.FileAdapter()
    stored = list(fmapper.load(path).values())
    assert adapter.export(stored, CUDA).data == stored
    computed = stored[0].astype("float16")
    mixed = adapter.export([computed, stored[0]], CUDA).data
    assert isinstance(mixed[0], np.ndarray)
    assert mixed[1] is stored[0]
    assert adapter.portion(stored, CUDA) is None
    assert adapter.portion([computed, stored[0]], CUDA) == 256 << 20
    assert adapter.portion(stored, None) == 256 << 20
    for other in (Device("torch", "cpu"), Device("torch", "mps", 0), Device("numpy", "cpu")):
        assert all(isinstance(data, np.ndarray) for data in adapter.export(stored, other).data)
        assert adapter.portion(stored, other) == 256 << 20


def test_a_bool_of_another_value_is_refused_in_bytes_too(tmp_path: Path) -> None:
    path = tmp_path / "flags.safetensors"
    fmapper.save({"flag": np.array([True, False, True])}, path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\x07")
    flag: Any = fmapper.load(path)["flag"]
    with pytest.raises(fmapper.CheckpointError, match="neither true nor false"):
        flag.read_bytes(memoryview(bytearray(3)), 0)


@on_torch
def test_a_file_goes_to_the_gpu_without_a_copy_on_the_host(
    path: Path, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(wanted: Any) -> list[Any]:
        assert not wanted
        return []

    monkeypatch.setattr(_backend, "host_buffers", none)
    like = {name: torch.empty_like(x, device="meta") for name, x in weights.items()}
    there: Any = fmapper.load(path, like=like, device="cuda:0")
    for name, old in weights.items():
        new = there[name]
        assert (new.device.type, new.dtype, new.shape) == ("cuda", old.dtype, old.shape)
        assert torch.equal(new.cpu(), old), name
        assert new.untyped_storage().nbytes() == old.nbytes


@on_torch
def test_what_is_cast_or_tied_goes_to_the_gpu(path: Path, weights: dict[str, Any]) -> None:
    like = {name: torch.empty_like(x, device="meta") for name, x in weights.items()}
    there: Any = fmapper.load(path, like=like, device="cuda:0", dtype="float16")
    assert there["large"].dtype == torch.float16
    assert torch.equal(there["large"].cpu(), weights["large"].half())
    assert there["scalar"].dtype == torch.int64
    moved: Any = fmapper.to_torch(fmapper.load(path), device="cuda:0")
    assert torch.equal(moved["large"].cpu(), weights["large"])


@on_torch
def test_a_file_that_shrinks_leaves_nothing_on_the_gpu(path: Path) -> None:
    arrays: dict[str, LazyArray] = fmapper.load(path)
    fmapper.to_torch(arrays["scalar"], device="cuda:0")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(fmapper.CheckpointError, match="has changed") as caught:
        fmapper.to_torch(arrays, device="cuda:0")
    assert torch.cuda.memory_allocated() == before  # while the error is held
    assert "model" in str(caught.value)


@on_torch
def test_a_file_too_large_for_the_gpu_leaves_nothing_there(path: Path, tmp_path: Path) -> None:
    total = torch.cuda.mem_get_info()[1] + 1
    large = tmp_path / "large.safetensors"
    header = f'{{"w":{{"dtype":"U8","shape":[{total}],"data_offsets":[0,{total}]}}}}'.encode()
    with large.open("wb") as file:  # a sparse file
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + total)
    tree = {"small": fmapper.load(path), "large": fmapper.load(large)}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with pytest.raises(fmapper.MoveError, match=r"model\.large\.w.*out of memory"):
        fmapper.to_torch(tree, device="cuda:0")
    assert torch.cuda.memory_allocated() == before
