"""Integers of a few bits in words of 32 bits, with scales and zeros for groups: AWQ and GPTQ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fmapper.checkpoints.boxes import Box
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.quantized.blocks import Arrays, Dequantize, expect, expect_shape
from fmapper.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

_WORD = 32
_FLOATS = ("float16", "bfloat16", "float32")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position of each of eight columns in a word


def _unpack(words: np.ndarray[Any, Any], shifts: Sequence[int], axis: int) -> np.ndarray[Any, Any]:
    """Unpacks the integers in words, at the given shifts, along a dimension."""
    import numpy as np

    words = words.view(np.uint32)
    bits = _WORD // len(shifts)
    mask = np.uint32((1 << bits) - 1)
    codes = np.empty((*words.shape[: axis + 1], len(shifts), *words.shape[axis + 1 :]), np.int16)
    for at, shift in enumerate(shifts):
        codes[(slice(None),) * (axis + 1) + (at,)] = words >> np.uint32(shift) & mask
    shape = list(words.shape)
    shape[axis] *= len(shifts)
    return codes.reshape(shape)


def _scale(
    codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], at: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Multiplies codes by the scales of their rows, in the dtype of the scales."""
    import numpy as np

    scaled: np.ndarray[Any, Any] = codes.astype(np.float32)
    with np.errstate(all="ignore"):
        scaled *= scales.astype(np.float32)[at]
        return scaled.astype(scales.dtype, copy=False)


def _groups(rows: int, count: int, what: str) -> int:
    if not count or rows % count:
        raise CheckpointError(f"{rows} rows cannot be divided into {count} equal groups of {what}")
    return rows // count


class Awq(Dequantize):
    """AWQ with 4 bits: `(weight - zeros) * scales`.

    Computed like AutoAWQ's `dequantize_gemm`. The result has the shape [in, out]; the weight of a
    linear layer is its transpose.

    Args:
        weight: int32[in, out / 8], eight columns in a word, in AWQ's order.
        zeros: int32[in / group, out / 8], likewise.
        scales: float16[in / group, out].

    Raises:
        CheckpointError: The parts do not fit together.
    """

    def __init__(self, weight: LazyArray, zeros: LazyArray, scales: LazyArray) -> None:
        expect(weight, "qweight", 2, ("int32", "uint32"))
        expect(zeros, "qzeros", 2, ("int32", "uint32"))
        expect(scales, "scales", 2, _FLOATS)
        rows, words = weight.shape
        columns = words * len(_AWQ_ORDER)
        self.group = _groups(rows, scales.shape[0], "scales")
        expect_shape(scales, "scales", (rows // self.group, columns))
        expect_shape(zeros, "qzeros", (rows // self.group, words))
        super().__init__([weight, zeros, scales], (rows, columns), scales.dtype)
        self.grain = (1, len(_AWQ_ORDER))

    def _operand_boxes(self, box: Box) -> Sequence[Box]:
        rows, (start, stop) = box
        words = start // len(_AWQ_ORDER), stop // len(_AWQ_ORDER)
        groups = rows[0] // self.group, -(-rows[1] // self.group)
        return (rows, words), (groups, words), (groups, (start, stop))

    def _values(self, arrays: Arrays, box: Box) -> np.ndarray[Any, Any]:
        import numpy as np

        weight, zeros, scales = arrays
        start, stop = box[0]
        at = np.arange(start, stop) // self.group - start // self.group
        shifts = [4 * place for place in _AWQ_ORDER]
        return _scale(_unpack(weight, shifts, 1) - _unpack(zeros, shifts, 1)[at], scales, at)


class Gptq(Dequantize):
    """GPTQ with 2, 4 or 8 bits: `scales * (weight - zeros)`.

    Computed like AutoGPTQ, whose files store zeros less by one, and GPTQModel. The result has the
    shape [in, out]; the weight of a linear layer is its transpose.

    Args:
        weight: int32[in * bits / 32, out], with consecutive rows in a word.
        zeros: int32[groups, out * bits / 32].
        scales: float16[groups, out].
        index: int32[in], the group of each row; None for equal groups in order.
        bits: The bits of an integer.
        version: 2 if zeros are stored unchanged, as in the format `gptq_v2`.

    Raises:
        CheckpointError: The parts do not fit together.
    """

    def __init__(
        self,
        weight: LazyArray,
        zeros: LazyArray,
        scales: LazyArray,
        index: LazyArray | None = None,
        bits: int = 4,
        version: int = 1,
    ) -> None:
        if bits not in (2, 4, 8):
            raise CheckpointError(f"GPTQ is supported with 2, 4 and 8 bits, not {bits}")
        expect(weight, "qweight", 2, ("int32", "uint32"))
        expect(zeros, "qzeros", 2, ("int32", "uint32"))
        expect(scales, "scales", 2, _FLOATS)
        self.bits, self.version, self.count = bits, version, _WORD // bits
        rows, columns = weight.shape[0] * self.count, weight.shape[1]
        groups = scales.shape[0]
        expect_shape(scales, "scales", (groups, columns))
        expect_shape(zeros, "qzeros", (groups, -(-columns // self.count)))
        if index is not None:
            expect(index, "g_idx", 1, ("int32", "int64"))
            expect_shape(index, "g_idx", (rows,))
        self.group = 0 if index is not None else _groups(rows, groups, "scales")
        parts = [weight, zeros, scales, *([] if index is None else [index])]
        super().__init__(parts, (rows, columns), scales.dtype)
        self.grain = (self.count, self.count)

    def _operand_boxes(self, box: Box) -> Sequence[Box]:
        (top, bottom), (start, stop) = box
        groups = (0, self.operands[2].shape[0])
        if self.group:
            groups = top // self.group, -(-bottom // self.group)
        words = start // self.count, -(-stop // self.count)
        parts: list[Box] = [((top // self.count, bottom // self.count), (start, stop))]
        parts += [(groups, words), (groups, (start, stop))]
        return parts if self.group else [*parts, ((top, bottom),)]

    def _values(self, arrays: Arrays, box: Box) -> np.ndarray[Any, Any]:
        import numpy as np

        weight, zeros, scales, *index = arrays
        top, bottom = box[0]
        if index:
            at = index[0]
            if at.min() < 0 or at.max() >= len(scales):
                raise CheckpointError(
                    f"g_idx names a group that does not exist: there are {len(scales)}"
                )
        else:
            at = np.arange(top, bottom) // self.group - top // self.group
        shifts = range(0, _WORD, self.bits)
        zero = _unpack(zeros, shifts, 1)[:, : scales.shape[1]]
        if self.version == 1:
            zero = (zero + 1) & ((1 << self.bits) - 1)
        return _scale(_unpack(weight, shifts, 0) - zero[at], scales, at)
