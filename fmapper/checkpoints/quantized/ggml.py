"""The block types of GGUF: Q8_0, Q4_0, Q4_K, Q6_K and all others of the `gguf` package."""

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
    """Dequantises rows of GGUF blocks to float32.

    `gguf.quants.dequantize` computes the values.

    Args:
        data: uint8[..., bytes of a row].
        kind: The type of the blocks, such as `"Q4_K"`.

    Raises:
        CheckpointError: The type does not exist, or rows do not consist of whole blocks.
        BackendUnavailableError: The package is not installed.
    """

    def __init__(self, data: LazyArray, kind: str) -> None:
        import numpy as np

        gguf = _package()
        expect(data, "the blocks", None, ("uint8",))
        self.kind = kind
        number = getattr(gguf.GGMLQuantizationType, kind, None)
        if number is None or not data.ndim:
            raise CheckpointError(f"GGUF has no block type {kind!r}")
        elements, self._bytes = gguf.GGML_QUANT_SIZES[number]
        if data.shape[-1] % self._bytes:
            raise CheckpointError(
                f"a row of {data.shape[-1]} bytes does not consist of whole blocks of {kind}, "
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

        gguf = _package()
        number = gguf.GGMLQuantizationType[self.kind]
        with np.errstate(all="ignore"):
            try:
                values = gguf.quants.dequantize(np.ascontiguousarray(arrays[0]), number)
            except NotImplementedError:
                raise CheckpointError(f"gguf does not dequantise blocks of {self.kind}") from None
        return np.asarray(values, np.float32)


def row_bytes(number: int, elements: int) -> tuple[str, int] | None:
    """Returns the name of a block type and the bytes of a row; None for an unknown type.

    Raises:
        CheckpointError: The row does not consist of whole blocks.
        BackendUnavailableError: The gguf package is not installed.
    """
    gguf = _package()
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        return None
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if elements % block:
        raise CheckpointError(
            f"a row of {elements} does not consist of whole blocks of {kind.name}"
        )
    return str(kind.name), elements // block * size


def _package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise BackendUnavailableError(
            "blocks of GGUF need the package gguf, which is not installed: pip install gguf"
        ) from None
    return gguf
