"""Recognises quantised arrays by the names of their parts and the checkpoint's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from fmapper.checkpoints.checkpoint import Checkpoint
from fmapper.checkpoints.extras.values import is_value
from fmapper.checkpoints.lazy import LazyArray, is_narrow
from fmapper.checkpoints.quantized.array import QuantizedArray, QuantizedLayout
from fmapper.checkpoints.quantized.ggml import Ggml
from fmapper.errors import CheckpointError
from fmapper.files.bounded_json import read_json
from fmapper.files.untrusted import Misfit, show

Arrays: TypeAlias = Mapping[str, LazyArray]
Config: TypeAlias = Mapping[str, Any]
_NARROW = ("int8", "uint8", "int16", "uint16")
_METADATA = " metadata"  # besides the keys of a quantization_config
_OF_TORCHAO = {
    "Float8Tensor": "float8",
    "Int8Tensor": "integers",
    "IntxUnpackedToInt8Tensor": "integers",
}


class _Found(NamedTuple):
    """A quantised array.

    Attributes:
        name: The name of the dense array.
        layout: The layout of its parts.
        parts: The names of values, scales, zeros and index, without missing ones.
    """

    name: str
    layout: QuantizedLayout
    parts: tuple[str, ...]


def find_quantized(
    arrays: Arrays, config: Config | None = None, metadata: Mapping[str, str] | None = None
) -> dict[str, LazyArray | QuantizedArray]:
    """Returns the arrays of a checkpoint, each quantised one as a single array.

    Parts are recognised by their names:

    - FP8: `W` and `W_scale_inv` or `W_scale`;
    - MXFP4: `W_blocks` and `W_scales`;
    - AWQ, GPTQ: `L.qweight`, `L.qzeros`, `L.scales` and `L.g_idx`, for `L.weight`;
    - GGUF: each array of blocks that was read from such a file;
    - torchao: `L._w_qdata`, `L._w_scale` and `L._w_zero_point`, for `L.w`.

    Args:
        arrays: The arrays by name.
        config: The `quantization_config` of the checkpoint's `config.json`: the sizes of blocks,
            bits, the version of a format. None for that of the folder, if `arrays` is a
            `Checkpoint`.
        metadata: The texts in the checkpoint's files, in which torchao states layouts; None for
            those of a `Checkpoint`.

    Raises:
        CheckpointError: A part is missing, has the wrong shape or dtype, or is ambiguous without a
            configuration. Names the array.
    """
    if isinstance(arrays, Checkpoint):
        config = arrays.quantization if config is None else config
        metadata = arrays.metadata if metadata is None else metadata
    arrays = {name: array for name, array in arrays.items() if not is_value(array)}
    about = {**(config or {}), _METADATA: metadata or {}}
    entries: dict[str, _Found] = {}
    used: set[str] = set()
    for name in arrays:
        for suffix, look in _SUFFIXES.items():
            if not name.endswith(suffix):
                continue
            entry = look(name.removesuffix(suffix), arrays, about)
            if entry is not None:
                entries[name] = entry
                used.update(entry.parts)
                break
    result: dict[str, LazyArray | QuantizedArray] = {}
    for name, array in arrays.items():
        if name not in entries and name in used:
            continue
        new = entries[name].name if name in entries else name
        if new in result:
            raise CheckpointError(f"{new}: a quantised array and another array have this name")
        if name in entries:
            result[new] = _make(entries[name], arrays)
        elif isinstance(array, Ggml):
            layout = QuantizedLayout("ggml", type=array.kind)
            result[new] = QuantizedArray(layout, array.operands[0])
        else:
            result[new] = array
    return result


def dequantize(
    arrays: Arrays,
    config: Config | None = None,
    dtype: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, LazyArray]:
    """Returns the arrays of a checkpoint, with quantised ones made dense.

    Nothing is read; values are computed panel by panel when they are read.

    Args:
        arrays: The arrays by name.
        config: The `quantization_config` of the checkpoint's `config.json`, as for
            `find_quantized`.
        dtype: The dtype of the dequantised arrays. None for the one that the file states; otherwise
            bfloat16, or that of the scales for AWQ and GPTQ, which compute in it.
        metadata: The texts in the checkpoint's files, as for `find_quantized`.

    Raises:
        CheckpointError: As for `find_quantized`; or the kind of arrays that the configuration calls
            quantised is unknown.
    """
    if config is None and isinstance(arrays, Checkpoint):
        config = arrays.quantization
    result: dict[str, LazyArray] = {}
    for name, array in find_quantized(arrays, config or {}, metadata).items():
        if isinstance(array, LazyArray):
            result[name] = array
        elif dtype is None:
            result[name] = array.dequantize()
        else:
            # Products of floats are cast like all arrays, so that none silently becomes infinite.
            is_product = array.layout.kind in ("float8", "mxfp4")
            layout = dataclasses.replace(array.layout, dtype="float32" if is_product else dtype)
            parts = array.values, array.scales, array.zeros, array.index
            result[name] = QuantizedArray(layout, *parts).dequantize().astype(dtype, name)
    if config:
        _check_nothing_is_left(result, config)
    return result


def _check_nothing_is_left(arrays: Arrays, config: Config) -> None:
    """Raises for quantised arrays of an unknown kind.

    If the configuration says that weights are quantised, a matrix of narrow numbers is a part of
    one.
    """
    for name, array in arrays.items():
        if is_narrow(array) or (array.ndim > 1 and array.dtype.name in _NARROW):
            method = config.get("quant_method")
            raise CheckpointError(
                f"{name}: {array.dtype.name}{list(array.shape)} is quantised by {show(method)} in "
                "a way that is not supported, or its scales are missing. Supported: FP8, MXFP4, "
                "AWQ, GPTQ and torchao."
            )


def _make(entry: _Found, arrays: Arrays) -> QuantizedArray:
    parts = [arrays.get(name) for name in entry.parts]
    for name, part in zip(entry.parts[:2], parts, strict=False):
        if part is None:
            raise CheckpointError(f"{entry.name}: there is {entry.parts[0]}, but no {name}")
    try:
        array = QuantizedArray(entry.layout, *parts)
        array.dequantize()
    except CheckpointError as error:
        raise CheckpointError(f"{entry.name}: {error}") from None
    return array


def _float8(name: str, arrays: Arrays, config: Config) -> _Found | None:
    if not arrays[name].dtype.name.startswith("float8"):
        return None
    scales = f"{name}_scale_inv" if f"{name}_scale_inv" in arrays else f"{name}_scale"
    if scales not in arrays:  # plain float8
        return None
    block = _block_size(config)
    is_cut = block is not None and arrays[scales].size > 1
    layout = QuantizedLayout("float8", block=_sizes(block) if is_cut else None)
    return _Found(name, layout, (name, scales))


def _block_size(config: Config) -> Any:
    """Returns the block size that a configuration states for all weights; None if it states none.

    Raises:
        CheckpointError: It states several sizes, for different layers.
    """
    if config.get("weight_block_size") is not None:
        return config["weight_block_size"]
    if config.get("quant_method") == "mxfp8":
        return [1, 32]  # of the Open Compute Project's Microscaling Formats (MX), version 1.0
    groups = config.get("config_groups")  # of compressed_tensors
    schemes = (
        [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    )
    sizes = [scheme.get("block_structure") for scheme in schemes if isinstance(scheme, dict)]
    sizes = [size for size in sizes if size is not None]
    if any(size != sizes[0] for size in sizes):
        raise CheckpointError(
            f"the configuration has groups of layers with blocks of different sizes, "
            f"{', '.join(map(show, map(str, sizes)))}, which is not supported"
        )
    return sizes[0] if sizes else None


def _sizes(block: Any) -> tuple[int, ...]:
    if not isinstance(block, list | tuple) or not all(type(size) is int for size in block):
        raise CheckpointError(f"{show(block)} is not a valid block size")
    return tuple(block)


def _mxfp4(name: str, arrays: Arrays, config: Config) -> _Found | None:
    if f"{name}_scales" not in arrays:
        return None
    layout = QuantizedLayout("mxfp4", transposed=True)
    return _Found(name, layout, (f"{name}_blocks", f"{name}_scales"))


def _torchao(name: str, arrays: Arrays, config: Config) -> _Found | None:
    """Reads torchao's description of an array from the metadata of its file."""
    module, dot, parameter = name.rpartition(".")
    if not parameter.startswith("_"):
        return None
    new = f"{module}{dot}{parameter[1:]}"
    values, scales, zeros = (f"{name}_{part}" for part in ("qdata", "scale", "zero_point"))
    is_float = arrays[values].dtype.name.startswith("float8")
    layout = QuantizedLayout("float8" if is_float else "integers")
    about = config.get(_METADATA, {}).get(new)
    if about is not None:
        layout = _as_torchao_says(layout, new, about)
    elif zeros in arrays and arrays[zeros].dtype.kind not in "iu":  # the parts of an Int4Tensor
        raise CheckpointError(
            f"{new}: the meaning of its zeros is stated in the metadata of its file: pass the "
            f"checkpoint itself"
        )
    return _Found(new, layout, (values, scales) if is_float else (values, scales, zeros))


def _as_torchao_says(layout: QuantizedLayout, name: str, text: str) -> QuantizedLayout:
    try:
        about = read_json(text)
        data = about["_data"]
        block, dtype, kind = data["block_size"], data["dtype"]["_data"], about["_type"]
    except (Misfit, KeyError, TypeError):
        raise CheckpointError(f"{name}: its metadata is not torchao's") from None
    if kind not in _OF_TORCHAO:
        raise CheckpointError(
            f"{name}: torchao's {show(kind)} is not supported. Supported: {', '.join(_OF_TORCHAO)}"
        )
    if _OF_TORCHAO[kind] != layout.kind:
        raise CheckpointError(
            f"{name}: its metadata describes torchao's {show(kind)}, but its parts are those of "
            f"{layout.kind}"
        )
    if dtype not in ("bfloat16", "float16", "float32"):
        raise CheckpointError(f"{name}: has the unsupported dtype {show(dtype)}")
    return dataclasses.replace(layout, block=_sizes(block), dtype=dtype)


def _find_packed(name: str, arrays: Arrays, config: Config) -> _Found | None:
    parts = tuple(f"{name}.{part}" for part in ("qweight", "scales", "qzeros", "g_idx"))
    scales, weight = arrays.get(parts[1]), arrays[parts[0]]
    method = config.get("quant_method")
    if method is None and scales is not None and weight.ndim == scales.ndim == 2:
        method = "gptq" if weight.shape[1] == scales.shape[1] else "awq"
    if method == "awq":
        if config.get("version", "gemm").lower() != "gemm" or config.get("bits", 4) != 4:
            raise CheckpointError(
                f"{name}: AWQ is supported only with 4 bits and in its version gemm"
            )
        return _Found(f"{name}.weight", QuantizedLayout("awq", transposed=True), parts[:3])
    if method not in (None, "gptq"):
        raise CheckpointError(
            f"{name}: arrays packed by {show(method)} are not supported, only by gptq and awq"
        )
    if parts[2] in arrays and type(config.get("bits")) is not int:
        raise CheckpointError(
            f"{name}: only the quantization_config of config.json says what a zero of GPTQ means: "
            "pass it, such as {'quant_method': 'gptq', 'bits': 4, 'checkpoint_format': 'gptq'}"
        )
    form = config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"{name}: the checkpoint_format {show(form)} is not supported, only gptq and gptq_v2"
        )
    version = 2 if form == "gptq_v2" else 1
    layout = QuantizedLayout("gptq", bits=config.get("bits", 4), version=version, transposed=True)
    return _Found(f"{name}.weight", layout, parts)


_SUFFIXES: dict[str, Callable[[str, Arrays, Config], _Found | None]] = {
    ".qweight": _find_packed,
    "_blocks": _mxfp4,
    "_qdata": _torchao,
    "": _float8,
}
