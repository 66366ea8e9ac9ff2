"""A quantised array as one node: values, scales, zeros, and their layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fmapper.backends.dtypes import bare_name
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.quantized.ggml import Ggml
from fmapper.checkpoints.quantized.packed import Awq, Gptq
from fmapper.checkpoints.quantized.scaled import Mxfp4, ScaledFloats, ScaledIntegers
from fmapper.errors import CheckpointError
from fmapper.files.dtypes import numpy_dtype
from fmapper.moves.mover import to_numpy
from fmapper.tree.functor import functor

Kind: TypeAlias = Literal["float8", "integers", "mxfp4", "awq", "gptq", "ggml"]


@dataclass(frozen=True)
class QuantizedLayout:
    """The layout of the parts of a quantised array.

    Attributes:
        kind: The format.
        dtype: The dtype of the values, if the parts do not determine it: for `float8`, `integers`,
            `mxfp4`.
        block: The sizes of a block, if the shape of the scales does not determine them.
        bits: The bits of an integer, for `gptq`.
        version: The version of the format, for `gptq`: in 1 stored zeros are less by one.
        type: The type of blocks, for `ggml`.
        transposed: Whether the last two dimensions of the result are swapped: AWQ, GPTQ and MXFP4
            store the weight of a linear layer as (in, out).
    """

    kind: Kind
    dtype: str = "bfloat16"
    block: tuple[int, ...] | None = None
    bits: int = 4
    version: int = 1
    type: str = ""
    transposed: bool = False


@functor(children=("values", "scales", "zeros", "index"))
class QuantizedArray:
    """A quantised array, moved, saved and placed as a unit; it takes the memory of its parts.

    The parts may be of any backend, or not yet read.

    Attributes:
        layout: The layout of the parts.
        values: The integers, or the words that pack them.
        scales: The scales.
        zeros: The zeros, if there are any.
        index: The group of each row, if groups are not in order.

    Examples:
        >>> import numpy as np
        >>> layout = QuantizedLayout("integers", "float32")
        >>> values, scales = np.array([[1, -2], [3, 4]], np.int8), np.array([[0.5], [2]], "f4")
        >>> array = QuantizedArray(layout, values, scales)
        >>> array
        QuantizedArray(integers, float32[2, 2])
        >>> array.dequantize().read()
        array([[ 0.5, -1. ],
               [ 6. ,  8. ]], dtype=float32)
    """

    def __init__(
        self,
        layout: QuantizedLayout,
        values: Any,
        scales: Any = None,
        zeros: Any = None,
        index: Any = None,
    ) -> None:
        self.layout = layout
        self.values, self.scales, self.zeros, self.index = values, scales, zeros, index

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the dense array."""
        return self._as_lazy().shape

    @property
    def dtype(self) -> Any:
        """Returns NumPy's dtype of the dense array."""
        return self._as_lazy().dtype

    @property
    def ndim(self) -> int:
        """Returns the number of dimensions of the dense array."""
        return len(self.shape)

    def __repr__(self) -> str:
        """Shows format, dtype and shape."""
        array = self._as_lazy()
        shape = ", ".join(map(str, array.shape))
        return f"QuantizedArray({self.layout.kind}, {array.dtype.name}[{shape}])"

    def dequantize(self) -> LazyArray:
        """Returns the dense array, lazily: values are computed as they are read.

        Raises:
            CheckpointError: The parts do not fit together.
        """
        return self._with(*(None if part is None else _lazy(part) for part in self._parts()))

    def _parts(self) -> tuple[Any, Any, Any, Any]:
        return self.values, self.scales, self.zeros, self.index

    def _as_lazy(self) -> LazyArray:
        return self._with(*(None if part is None else _outline(part) for part in self._parts()))

    def _with(
        self,
        values: LazyArray | None,
        scales: LazyArray | None,
        zeros: LazyArray | None,
        index: LazyArray | None,
    ) -> LazyArray:
        layout = self.layout
        if values is None or (scales is None and layout.kind != "ggml"):
            raise CheckpointError(f"an array of {layout.kind} needs values and scales")
        array: LazyArray
        if layout.kind == "ggml":
            array = Ggml(values, layout.type)
        else:
            assert scales is not None
            if layout.kind == "float8":
                array = ScaledFloats(values, scales, layout.block, layout.dtype)
            elif layout.kind == "integers":
                array = ScaledIntegers(values, scales, zeros, layout.block, layout.dtype)
            elif layout.kind == "mxfp4":
                array = Mxfp4(values, scales, layout.dtype)
            elif zeros is None:
                raise CheckpointError(f"an array of {layout.kind} needs zeros")
            elif layout.kind == "awq":
                array = Awq(values, zeros, scales)
            else:
                array = Gptq(values, zeros, scales, index, layout.bits, layout.version)
        if not layout.transposed or array.ndim < 2:
            return array
        axes = [*range(array.ndim - 2), array.ndim - 1, array.ndim - 2]
        return array.transpose(axes)


def _lazy(part: Any) -> LazyArray:
    return part if isinstance(part, LazyArray) else LazyArray.of(to_numpy(part))


def _outline(part: Any) -> LazyArray:
    """Returns a lazy array with the shape and dtype of a part of any backend."""
    if isinstance(part, LazyArray):
        return part
    return LazyArray.full(tuple(part.shape), 0, numpy_dtype(bare_name(part.dtype)))
