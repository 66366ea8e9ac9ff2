"""Folders for `sweeps.hostile_files`: of many shards, of DCP, of Orbax."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def header(path: Path, text: str, data: int = 0) -> Path:
    """Writes a file of safetensors with a header and so many zeros."""
    head = text.encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * data)
    return path


def entries(count: int, prefix: str = "model.layers.") -> str:
    """Returns what a header says of so many arrays."""
    about = '.weight":{"dtype":"F32","shape":[1],"data_offsets":'
    places = ((4 * at, 4 * at + 4) for at in range(count))
    return ",".join(f'"{prefix}{a // 4}{about}[{a},{b}]}}' for a, b in places)


def pickled(folder: Path, data: bytes) -> Path:
    """Writes a file as `torch.save` does, with a pickle of one's own."""
    with zipfile.ZipFile(folder / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + data + b".")
        archive.writestr("x/byteorder", "little")
        archive.writestr("x/version", "3\n")
    return folder / "x.pt"


def index(folder: Path, count: int) -> Path:
    """Writes an index of many names."""
    place = folder / "x"
    place.mkdir()
    header(place / "model.safetensors", "{}")
    text = ",".join(f'"layers.{at}.weight":"model.safetensors"' for at in range(count))
    (place / "model.safetensors.index.json").write_text(f'{{"weight_map":{{{text}}}}}')
    return place


def shards(folder: Path, count: int) -> Path:
    """Writes a folder of many shards, which is honest."""
    place = folder / "x"
    place.mkdir()
    names = {}
    for at in range(count):
        name = f"model-{at + 1:05d}-of-{count:05d}.safetensors"
        header(place / name, f"{{{entries(30, f'{at}.')}}}", 120)
        names.update({f"{at}.{n}.weight": name for n in range(30)})
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return place


def large_shards(folder: Path, count: int) -> Path:
    """Writes a folder of shards with 8,000 arrays each, which is honest."""
    place = folder / "x"
    place.mkdir()
    names = {}
    for at in range(count):
        name = f"model-{at + 1:05d}-of-{count:05d}.safetensors"
        header(place / name, f"{{{entries(8000, f'{at}.')}}}", 32_000)
        names.update(dict.fromkeys((f"{at}.{n}.weight" for n in range(8000)), name))
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return place


def _dcp(folder: Path, change: Callable[[Any], None]) -> Path:
    """Writes a folder of `torch.distributed.checkpoint`, and changes its metadata."""
    import numpy as np

    import fmapper

    place = folder / "x.dcp"
    fmapper.save({"w": np.ones(1, np.float32), "step": 1}, place)
    about = pickle.loads((place / ".metadata").read_bytes())
    change(about)
    (place / ".metadata").write_bytes(pickle.dumps(about, 4))
    return place


def dcp_names(folder: Path, count: int, places: int = 6000) -> Path:
    """Writes many arrays, each in one of some thousand places; those in one place are tied."""

    def change(about: Any) -> None:
        index, info = next((i, info) for i, info in about.storage_data.items() if i.fqn == "w")
        row = about.state_dict_metadata["w"]
        about.state_dict_metadata = {f"w{at}": row for at in range(count)}
        file = folder / "x.dcp" / info.relative_path
        data = file.read_bytes()[info.offset : info.offset + info.length]
        file.write_bytes(data * places)
        about.storage_data = {
            type(index)(f"w{at}", index.offset, index.index): type(info)(
                info.relative_path, at % places * len(data), len(data)
            )
            for at in range(count)
        }

    return _dcp(folder, change)


def dcp_ties(folder: Path, count: int) -> Path:
    """Writes many arrays that all lie in one place."""
    return dcp_names(folder, count, 1)


def dcp_parts(folder: Path, count: int) -> Path:
    """Writes arrays in four pieces each, as four processes do that have a part of all."""

    def change(about: Any) -> None:
        import torch
        from torch.distributed.checkpoint import metadata

        index, info = next((i, info) for i, info in about.storage_data.items() if i.fqn == "w")
        properties = about.state_dict_metadata["w"].properties
        about.state_dict_metadata, about.storage_data = {}, {}
        for at in range(count // 4):
            chunks = [
                metadata.ChunkStorageMetadata(torch.Size([n]), torch.Size([1])) for n in range(4)
            ]
            row = metadata.TensorStorageMetadata(properties, torch.Size([4]), chunks)
            about.state_dict_metadata[f"layers.{at}.weight"] = row
            for n in range(4):
                place = type(index)(f"layers.{at}.weight", torch.Size([n]), n)
                about.storage_data[place] = info

    return _dcp(folder, change)


def dcp_shared(folder: Path, count: int) -> Path:
    """Writes many arrays that share a list of as many pieces."""

    def change(about: Any) -> None:
        index, info = next((i, info) for i, info in about.storage_data.items() if i.fqn == "w")
        row = about.state_dict_metadata["w"]
        row.chunks = row.chunks * count
        about.state_dict_metadata = {f"w{at}": row for at in range(count)}
        indices = (type(index)(f"w{at}", index.offset, index.index) for at in range(count))
        about.storage_data = dict.fromkeys(indices, info)

    return _dcp(folder, change)


def dcp_sizes(folder: Path, count: int) -> Path:
    """Writes many arrays that share a shape of as many dimensions."""

    def change(about: Any) -> None:
        import torch

        row = about.state_dict_metadata["w"]
        row.size = torch.Size([1] * count)
        about.state_dict_metadata = {f"w{at}": row for at in range(count)}

    return _dcp(folder, change)


def dcp_values(folder: Path, count: int) -> Path:
    """Writes many values that are all one text of half a megabyte."""

    def change(about: Any) -> None:
        index, info = next((i, info) for i, info in about.storage_data.items() if i.fqn == "step")
        place = folder / "x.dcp" / info.relative_path
        inner = pickled(folder, b"X" + struct.pack("<I", 500_000) + b"a" * 500_000)
        data = inner.read_bytes()
        info.offset, info.length = place.stat().st_size, len(data)
        place.write_bytes(place.read_bytes() + data)
        row = about.state_dict_metadata["step"]
        about.state_dict_metadata = {f"v{at}": row for at in range(count)}
        indices = (type(index)(f"v{at}", index.offset, index.index) for at in range(count))
        about.storage_data = dict.fromkeys(indices, info)

    return _dcp(folder, change)


def dcp_pieces(folder: Path, count: int) -> Path:
    """Writes an array in pieces, as processes do that have a part of it each; it is honest."""
    import numpy as np

    import fmapper

    arrays = {f"layers.{at}.weight": np.ones(2, np.float32) for at in range(count)}
    fmapper.save(arrays, folder / "x.dcp")
    return folder / "x.dcp"


def orbax(folder: Path, count: int) -> Path:
    """Writes a folder of Orbax, by itself."""
    import numpy as np
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        arrays = {f"layer{at}": {"w": np.ones(2, np.float32)} for at in range(count)}
        checkpointer.save((folder / "x.orbax").absolute(), arrays)
    return folder / "x.orbax"
