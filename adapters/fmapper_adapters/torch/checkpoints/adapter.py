"""The facet of torch's adapter for files: formats, folders of transformers, transient buffers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fmapper_adapters.torch import _private

if TYPE_CHECKING:  # avoids a circular import
    from pathlib import Path

    from fmapper import Device
    from fmapper.checkpoints import Format, LazyArray, Pretrained, Recorder, Recording


class Files:
    """The part of the adapter for files."""

    def reads(self, device: Device) -> bool:
        """Returns whether host memory can be pinned for a device, into which files are read."""
        return device.kind not in ("cpu", "meta", "mps")

    def formats(self) -> Sequence[Format]:
        """Returns the formats of `torch.save` and `torch.distributed.checkpoint`."""
        from fmapper_adapters.torch.checkpoints.dcp import Dcp
        from fmapper_adapters.torch.checkpoints.pt import PtFile, PtFolder

        return (PtFile(), PtFolder(), Dcp())

    def recorder(self, recording: Recording) -> Recorder:
        """Returns the recorder for tensors."""
        from fmapper_adapters.torch.checkpoints.recording import TorchRecorder

        return TorchRecorder(recording)

    def read_pretrained(
        self, folder: Path, dtype: str | None, arrays: Mapping[str, LazyArray]
    ) -> Pretrained | None:
        """Reads a folder of transformers, if transformers is installed."""
        if importlib.util.find_spec("transformers") is None:
            return None
        from fmapper_adapters.torch.pretrained import folder as _folder

        return _folder.read(folder, dtype, arrays)

    def transient(self, node: Any) -> Iterable[Any]:
        """Returns the buffers of a module that are not persistent."""
        return _private.transient_buffers(node) if isinstance(node, torch.nn.Module) else ()
