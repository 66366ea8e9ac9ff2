"""The blocks of GGUF: Q8_0, Q4_0, Q4_K, Q6_K and what else the `gguf` package knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fmapper.checkpoints.boxes import Box
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.quantized.blocks import Arrays, Dequantize, expect
from fmapper.errors import BackendUnavailableError, CheckpointError

if TYPE_CHECKING:
    import numpy as np


class Ggml(Dequantize):
    """Rows of blocks as GGUF has them, as float32.

    `gguf.quants.dequantize` computes the values.

    Args:
        data: uint8[..., bytes of a row].
        kind: The type of the blocks, such as `"Q4_K"`.

    Raises:
        CheckpointError: There is no such type, or the rows have no whole blocks.
        BackendUnavailableError: The package is not installed.
    """

    def __init__(self, data: LazyArray, kind: str) -> None:
        import numpy as np

        try:
            import gguf
        except ImportError:
            raise BackendUnavailableError(
                "the blocks of GGUF are read with gguf, which is not installed: pip install gguf"
            ) from None
        expect(data, "the blocks", None, ("uint8",))
        self._kind: Any = getattr(gguf.GGMLQuantizationType, kind, None)
        if self._kind is None or not data.ndim:
            raise CheckpointError(f"GGUF has no blocks of the type {kind!r}")
        elements, self._bytes = gguf.GGML_QUANT_SIZES[self._kind]
        if data.shape[-1] % self._bytes:
            raise CheckpointError(
                f"a row of {data.shape[-1]} bytes has no whole blocks of {kind}, "
                f"which have {self._bytes}"
            )
        shape = (*data.shape[:-1], data.shape[-1] // self._bytes * elements)
        super().__init__([data], shape, np.dtype(np.float32))
        self.grain = (*[1] * (data.ndim - 1), elements)

    def _operand_boxes(self, box: Box) -> Sequence[Box]:
        start, stop = (place // self.grain[-1] * self._bytes for place in box[-1])
        return [(*box[:-1], (start, stop))]

    def _values(self, arrays: Arrays, box: Box) -> np.ndarray[Any, Any]:
        import numpy as np
        from gguf import quants

        with np.errstate(all="ignore"):
            found = quants.dequantize(np.ascontiguousarray(arrays[0]), self._kind)
        return found.astype(np.float32, copy=False)
