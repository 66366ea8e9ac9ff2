"""Values with one scale per block: FP8, MXFP4, and torchao's integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fmapper.checkpoints.boxes import Box
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.quantized.blocks import Arrays, Dequantize, expect, expect_shape
from fmapper.errors import CheckpointError
from fmapper.files.dtypes import numpy_dtype

if TYPE_CHECKING:
    import numpy as np

_FLOATS = ("float32", "float16", "bfloat16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_EXPONENTS = ("float8_e8m0fnu", "uint8")  # exponents of two are stored plus 127
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP4_PER_BYTE = 2


class _Scaled(Dequantize):
    """Values whose last dimensions are divided into blocks, each with a scale."""

    def __init__(
        self,
        values: LazyArray,
        scales: LazyArray,
        shape: Sequence[int],
        block: Sequence[int] | None,
        dtype: str,
        more: Sequence[LazyArray] = (),
        *,
        may_be_cut: bool = False,
    ) -> None:
        super().__init__([values, scales, *more], shape, numpy_dtype(dtype))
        if scales.ndim == 0 or scales.size == 1:
            scales = scales.reshape((1,) * len(shape))
        if scales.ndim != len(shape):
            raise CheckpointError(
                f"scales of shape {list(scales.shape)} do not fit values of {list(shape)}"
            )
        if block is None:
            self.block = _block_of_grid(shape, scales.shape, may_be_cut)
        else:
            self.block = _block(shape, scales.shape, block)
        self.operands = (values, scales, *more)
        self.grain = (1,) * len(shape)

    def _scale_box(self, box: Box) -> Box:
        return tuple(
            (start // size, -(-stop // size))
            for (start, stop), size in zip(box, self.block, strict=True)
        )

    def _spread(self, scales: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
        """Spreads scales over the values, by broadcasting where possible."""
        import numpy as np

        for axis, ((start, stop), size) in enumerate(zip(box, self.block, strict=True)):
            if size > 1 and scales.shape[axis] > 1:
                skip = start % size
                part = (*[slice(None)] * axis, slice(skip, skip + stop - start))
                scales = np.repeat(scales, size, axis)[part]
        return scales


def _block_of_grid(shape: Sequence[int], grid: Sequence[int], may_be_cut: bool) -> tuple[int, ...]:
    """Returns the unique block sizes that divide a shape into a grid.

    Raises:
        CheckpointError: No sizes do so, or several do, because the last block may be cut off.
    """
    sizes = []
    for size, count in zip(shape, grid, strict=True):
        if count == 1:
            sizes.append(max(size, 1))
            continue
        least = math.ceil(size / count) if count else 0
        most = math.ceil(size / (count - 1)) - 1 if count and may_be_cut else least
        if most > least:
            raise CheckpointError(
                f"values of {list(shape)} with {list(grid)} scales may have blocks of several "
                "sizes, as those at the end may be cut off: pass the quantization_config of "
                "config.json, which has their size, such as {'weight_block_size': [128, 128]}"
            )
        if math.ceil(size / max(least, 1)) != count or (least * count != size and not may_be_cut):
            raise CheckpointError(
                f"values of {list(shape)} have no {list(grid)} equal blocks: pass the block size"
            )
        sizes.append(max(least, 1))
    return tuple(sizes)


def _block(shape: Sequence[int], grid: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    sizes = [1] * (len(shape) - len(block)) + [int(size) for size in block]
    if len(sizes) != len(shape) or min(sizes, default=1) < 1:
        raise CheckpointError(f"blocks of {list(block)} do not fit values of {list(shape)}")
    counts = [math.ceil(size / length) for size, length in zip(shape, sizes, strict=True)]
    if counts != list(grid):
        raise CheckpointError(
            f"values of {list(shape)} in blocks of {sizes} need {counts} scales, not {list(grid)}"
        )
    return tuple(sizes)


class ScaledFloats(_Scaled):
    """FP8 with a scale for each block, row or tensor: `values * scales`, in float32.

    Computed like `Fp8Dequantize` of transformers and `Float8Tensor` of torchao. Blocks at the end
    may be cut off, as in DeepSeek's checkpoints, if `block` states their size.

    Args:
        values: float8, of any dimensions.
        scales: A scale for each block: float32 and the like, or exponents as float8_e8m0fnu or
            uint8. Its shape is that of the grid of blocks.
        block: The sizes of a block in the last dimensions; None to derive them from the grid, if it
            determines them.
        dtype: The dtype of the result.

    Raises:
        CheckpointError: The parts do not fit together.
    """

    def __init__(
        self,
        values: LazyArray,
        scales: LazyArray,
        block: Sequence[int] | None = None,
        dtype: str = "bfloat16",
    ) -> None:
        expect(values, "values", None, _FLOAT8)
        expect(scales, "scales", None, (*_FLOATS, *_EXPONENTS))
        super().__init__(values, scales, values.shape, block, dtype, may_be_cut=True)

    def _operand_boxes(self, box: Box) -> Sequence[Box]:
        return box, self._scale_box(box)

    def _values(self, arrays: Arrays, box: Box) -> np.ndarray[Any, Any]:
        import numpy as np

        values, scales = arrays
        if scales.dtype == np.uint8:
            scales = np.exp2(scales.astype(np.float32) - np.float32(127))
        table = np.arange(256, dtype=np.uint8).view(values.dtype).astype(np.float32)
        floats = table[values.view(np.uint8)]  # four times as fast as a cast
        with np.errstate(all="ignore"):
            floats *= self._spread(scales.astype(np.float32), box)
            result: np.ndarray[Any, Any] = floats.astype(self.dtype, copy=False)
        return result


class ScaledIntegers(_Scaled):
    """Integers with a scale and a zero for each block: `(values - zeros) * scales`.

    Computed like torchao's `dequantize_affine`, for `Int8Tensor` and `IntxUnpackedToInt8Tensor`,
    which store integers of 1 to 8 bits in a byte each: the difference has the result's dtype.

    Args:
        values: int8 or uint8, of any dimensions.
        scales: A scale for each block. Its shape is that of the grid of blocks.
        zeros: The zero of each block, if it is not 0.
        block: The sizes of a block in the last dimensions; None to derive them from the grid.
        dtype: The dtype of the result.

    Raises:
        CheckpointError: The parts do not fit together.
    """

    def __init__(
        self,
        values: LazyArray,
        scales: LazyArray,
        zeros: LazyArray | None = None,
        block: Sequence[int] | None = None,
        dtype: str = "bfloat16",
    ) -> None:
        expect(values, "values", None, ("int8", "uint8"))
        expect(scales, "scales", None, _FLOATS)
        if scales.ndim == values.ndim - 1 == 1:  # one for each row
            scales = scales.reshape((*scales.shape, 1))
        if zeros is not None:
            expect(zeros, "zeros", None, ("int8", "uint8", "int32", "int64", *_FLOATS))
            zeros = zeros.reshape(scales.shape)
        super().__init__(
            values, scales, values.shape, block, dtype, () if zeros is None else (zeros,)
        )

    def _operand_boxes(self, box: Box) -> Sequence[Box]:
        grid = self._scale_box(box)
        return (box, *[grid] * (len(self.operands) - 1))

    def _values(self, arrays: Arrays, box: Box) -> np.ndarray[Any, Any]:
        import numpy as np

        values, scales, *zeros = arrays
        with np.errstate(all="ignore"):
            floats = values.astype(self.dtype)
            if zeros:
                floats = floats - self._spread(zeros[0].astype(self.dtype), box)
            wide = self.dtype if scales.dtype == self.dtype else np.dtype(np.float32)
            floats = floats.astype(wide) * self._spread(scales.astype(wide), box)
            result: np.ndarray[Any, Any] = floats.astype(self.dtype, copy=False)
        return result


class Mxfp4(Dequantize):
    """MXFP4: nibbles for sixteen values, and an exponent for every 32 of them.

    Computed like transformers' `convert_moe_packed_tensors`, but not yet transposed.

    Args:
        blocks: uint8[..., G, 16]; the low nibble comes first.
        scales: uint8[..., G], exponents of two with 127 added.
        dtype: Of the result, which has the shape [..., 32 * G].

    Raises:
        CheckpointError: The parts do not fit together.
    """

    def __init__(self, blocks: LazyArray, scales: LazyArray, dtype: str = "bfloat16") -> None:
        expect(blocks, "blocks", None, ("uint8",))
        expect(scales, "scales", None, ("uint8",))
        if blocks.ndim < 2:
            raise CheckpointError(f"blocks have the unexpected shape {list(blocks.shape)}")
        expect_shape(scales, "scales", blocks.shape[:-1])
        *rows, groups, width = blocks.shape
        self.width = width * FP4_PER_BYTE
        super().__init__([blocks, scales], (*rows, groups * self.width), numpy_dtype(dtype))
        self.grain = (*[1] * len(rows), self.width)

    def _operand_boxes(self, box: Box) -> Sequence[Box]:
        start, stop = box[-1]
        groups = *box[:-1], (start // self.width, stop // self.width)
        return (*groups, (0, self.width // FP4_PER_BYTE)), groups

    def _values(self, arrays: Arrays, box: Box) -> np.ndarray[Any, Any]:
        import numpy as np

        blocks, scales = arrays
        table = np.array([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)], np.float32)
        floats = table.view(np.uint64)[:, 0][blocks].view(np.float32)
        exponents = scales.astype(np.int32)[..., None] - 127
        first = exponents // 2  # the power may be infinite although the value is not
        with np.errstate(all="ignore"):
            floats *= np.ldexp(np.float32(1), first)
            floats *= np.ldexp(np.float32(1), exponents - first)
            return floats.astype(self.dtype).reshape((*blocks.shape[:-2], -1))
