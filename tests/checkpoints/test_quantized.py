"""Dequantised values against those of each format's own library, to the bit."""

import json
import math
from unittest import mock

import pytest

import fmapper
from fmapper.checkpoints import (
    LazyArray,
    QuantizedArray,
    QuantizedLayout,
    Rename,
    Rules,
    Transpose,
    dequantize,
    find_quantized,
)
from fmapper.checkpoints.quantized import blocks

np = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")
torch = pytest.importorskip("torch")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
RNG = np.random.default_rng(0)


def to_torch(array):
    names = {BFLOAT16: torch.bfloat16, E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
    names[E8M0] = torch.float8_e8m0fnu
    plain = np.ascontiguousarray(array)
    if plain.dtype not in names:
        return torch.from_numpy(plain.copy())
    bits = torch.from_numpy(plain.view(f"i{plain.itemsize}").copy())
    return bits.view(names[plain.dtype])


def to_numpy(tensor):
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def every_byte(shape, dtype):
    """All values that a byte may be, in some order."""
    count = math.prod(shape)
    values = np.resize(np.arange(256, dtype=np.uint8), count)
    return RNG.permutation(values).reshape(shape).view(dtype)


def assert_same(lazy, wanted):
    """The same bits, as a whole and in boxes that end where blocks do not; NaN is NaN."""
    assert (lazy.shape, lazy.dtype) == (wanted.shape, wanted.dtype)
    wide = wanted.astype(np.float32)
    bits = f"u{wanted.itemsize}"
    whole = lazy.read()
    known = ~np.isnan(wide)
    assert known.any()
    np.testing.assert_array_equal(np.isnan(whole.astype(np.float32)), ~known)
    np.testing.assert_array_equal(whole.view(bits)[known], wanted.view(bits)[known])
    with mock.patch.object(blocks, "_PART", 100):  # some rows at a time
        few = lazy.read()
    np.testing.assert_array_equal(few.view(bits)[known], wanted.view(bits)[known])
    for _ in range(20):
        box = [sorted(RNG.integers(0, size + 1, 2).tolist()) for size in wanted.shape]
        part = tuple(slice(*bound) for bound in box)
        got = lazy.read([tuple(bound) for bound in box])
        assert got.shape == wanted[part].shape
        np.testing.assert_array_equal(
            got.view(bits)[known[part]], wanted[part].view(bits)[known[part]]
        )


def lazy(**arrays):
    return {name.replace("__", "."): LazyArray.of(array) for name, array in arrays.items()}


# --- FP8 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("values", [E4M3, E5M2])
@pytest.mark.parametrize("scales", [np.float32, BFLOAT16, E8M0, np.uint8])
def test_fp8_with_scales_of_blocks(values, scales, dtype):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = every_byte((6, 32, 48), values)
    grid = RNG.uniform(0.01, 1 if dtype == "float16" else 4, (6, 2, 3)).astype(np.float32)
    exponents = (100, 127) if dtype == "float16" else (100, 140)
    grid = (
        RNG.integers(*exponents, grid.shape, np.uint8)
        if scales is np.uint8
        else grid.astype(scales)
    )
    reference = fp8.Fp8Dequantize(None)._dequantize_one(
        to_torch(weight), to_torch(grid), getattr(torch, dtype)
    )
    found = dequantize(lazy(w=weight, w_scale_inv=grid), {"weight_block_size": [16, 16]}, dtype)
    assert list(found) == ["w"]
    assert_same(found["w"], to_numpy(reference))


def test_what_becomes_infinite_is_refused_by_name():
    arrays = lazy(w=np.full((1, 2), 448, E4M3), w_scale=np.full(1, 1000, np.float32))
    with pytest.raises(fmapper.LossyCastError, match=r"w: .* infinite"):
        dequantize(arrays, dtype="float16")["w"].read()
    assert dequantize(arrays, dtype="float32")["w"].read().tolist() == [[448000, 448000]]


def test_blocks_at_the_end_may_be_cut_off():
    """As in DeepSeek's: 576 rows in blocks of 128."""
    weight, scales = every_byte((36, 40), E4M3), RNG.uniform(0, 4, (5, 3)).astype(np.float32)
    found = dequantize(
        lazy(w=weight, w_scale_inv=scales), {"weight_block_size": [8, 16]}, "float32"
    )
    spread = scales.repeat(8, 0).repeat(16, 1)[:36, :40]
    assert_same(found["w"], weight.astype(np.float32) * spread)
    with pytest.raises(fmapper.CheckpointError, match=r"w: .* may have blocks of several sizes"):
        dequantize(lazy(w=weight, w_scale_inv=scales))
    with pytest.raises(fmapper.CheckpointError, match=r"w: .* need .* scales"):
        dequantize(lazy(w=weight, w_scale_inv=scales), {"weight_block_size": [8, 8]})


@pytest.mark.parametrize(
    ("grid", "block"),
    [((1, 1), (36, 40)), ((36, 1), (1, 40)), ((5, 40), (8, 1)), ((12, 14), (3, 3))],
)
def test_without_a_configuration_only_one_size_of_blocks_may_fit(grid, block):
    weight, scales = every_byte((36, 40), E4M3), RNG.uniform(0, 4, grid).astype(np.float32)
    spread = scales.repeat(block[0], 0).repeat(block[1], 1)[:36, :40]
    found = dequantize(lazy(w=weight, w_scale=scales), dtype="float32")
    assert_same(found["w"], weight.astype(np.float32) * spread)


def test_blocks_that_would_divide_evenly_are_not_assumed_to():
    """192 rows in blocks of 128 have as many scales as in blocks of 96."""
    weight, scales = every_byte((192, 4), E4M3), np.ones((2, 1), np.float32)
    with pytest.raises(fmapper.CheckpointError, match=r"w: .*pass the quantization_config"):
        dequantize(lazy(w=weight, w_scale_inv=scales))
    with pytest.raises(fmapper.CheckpointError, match=r"w: .* have no \[36, 1\] equal blocks"):
        dequantize(lazy(w=every_byte((35, 4), E4M3), w_scale=np.ones((36, 1), np.float32)))


def test_blocks_of_compressed_tensors():
    weight, scales = every_byte((24, 4), E4M3), RNG.uniform(0, 4, (2, 1)).astype(np.float32)
    groups = {"a": {"weights": {"strategy": "block", "block_structure": [16, 16]}}, "b": {}}
    arrays = lazy(w=weight, w_scale=scales)
    found = dequantize(arrays, {"config_groups": groups}, "float32")
    assert_same(found["w"], weight.astype(np.float32) * scales.repeat(16, 0)[:24])
    groups["b"] = {"weights": {"block_structure": [8, 8]}}
    with pytest.raises(fmapper.CheckpointError, match="blocks of different sizes"):
        dequantize(arrays, {"config_groups": groups})


def test_blocks_of_mxfp8_have_32_values():
    weight, scales = every_byte((4, 48), E4M3), RNG.integers(120, 130, (4, 2), np.uint8)
    found = dequantize(lazy(w=weight, w_scale=scales), {"quant_method": "mxfp8"}, "float32")
    spread = np.exp2(scales.astype(np.float32) - 127).repeat(32, 1)[:, :48]
    assert_same(found["w"], weight.astype(np.float32) * spread)


@pytest.mark.parametrize(
    ("method", "arrays"),
    [
        ("bitsandbytes", {"w": np.ones((8, 1), np.uint8), "w.absmax": np.ones(2, np.float32)}),
        ("nvfp4", {"w": np.ones((2, 8), np.uint8), "w_scale": np.ones((2, 1), E4M3)}),
        ("compressed-tensors", {"w": np.ones((2, 2), np.int8), "w_scale": np.ones((2, 1))}),
        ("fp8", {"w": np.ones((2, 2), E4M3), "w_s": np.ones((1, 1))}),
    ],
)
def test_what_a_configuration_calls_quantised_does_not_stay_so(method, arrays):
    stored = {name: LazyArray.of(array) for name, array in arrays.items()}
    with pytest.raises(fmapper.CheckpointError, match=rf"w: .* quantised by '{method}'"):
        dequantize(stored, {"quant_method": method})


@pytest.mark.parametrize("part", ["model", "text"])
def test_a_checkpoint_carries_its_configuration(tmp_path, part):
    weight, scales = every_byte((24, 4), E4M3), RNG.uniform(0, 4, (2, 1)).astype(np.float32)
    fmapper.save({"a.w": weight, "a.w_scale_inv": scales, "step": 3}, tmp_path / "m", "safetensors")
    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    settings = settings if part == "model" else {"text_config": settings}
    (tmp_path / "m" / "config.json").write_text(json.dumps(settings))
    wanted = weight.astype(np.float32) * scales.repeat(16, 0)[:24]
    rules = Rules([Rename("a.{rest...}", "{rest...}")])
    for loaded in (fmapper.load(tmp_path / "m"), fmapper.load(tmp_path / "m", rules=rules)):
        (name,) = found = dequantize(loaded, dtype="float32")
        assert_same(found[name], wanted)
        with pytest.raises(fmapper.CheckpointError, match=r"pass the quantization_config"):
            dequantize(dict(loaded))
    alone = fmapper.load(tmp_path / "m" / "model.safetensors")
    with pytest.raises(fmapper.CheckpointError, match=r"pass the quantization_config"):
        dequantize(alone)
    (tmp_path / "m" / "config.json").write_text("[")
    with pytest.raises(fmapper.CheckpointError, match=r"config\.json: is not JSON"):
        dequantize(fmapper.load(tmp_path / "m"))


def test_a_checkpoint_carries_the_metadata_of_torchao(tmp_path):
    values = every_byte((32, 64), np.int8)
    arrays = {"a._weight_qdata": values, "a._weight_scale": np.ones((4, 4), np.float32)}
    arrays["a._weight_zero_point"] = np.zeros((4, 4), np.float32)
    about = torchao_says("Int8Tensor", [8, 16], "float32")
    fmapper.save(arrays, tmp_path / "m.safetensors", metadata=about)
    found = dequantize(fmapper.load(tmp_path / "m.safetensors"))
    assert_same(found["a.weight"], values.astype(np.float32))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_all(shape):
    weight, scale = every_byte((16, 16), E4M3), np.full(shape, 0.3, np.float32)
    found = dequantize(lazy(w=weight, w_scale_inv=scale), {"weight_block_size": [4, 4]}, "float32")
    assert_same(found["w"], weight.astype(np.float32) * np.float32(0.3))


# --- MXFP4 --------------------------------------------------------------------------------------


def test_mxfp4_with_every_scale():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = every_byte((2, 64, 4, 16), np.uint8)
    scales = every_byte((2, 64, 4), np.uint8)
    reference = mxfp4.convert_moe_packed_tensors(to_torch(blocks), to_torch(scales))
    found = dequantize(lazy(experts__up_blocks=blocks, experts__up_scales=scales))
    assert list(found) == ["experts.up"]
    assert_same(found["experts.up"], to_numpy(reference))


# --- torchao ------------------------------------------------------------------------------------


def affine(values, block, scales, zeros, dtype):
    """`torchao.quantization.quant_primitives._dequantize_affine_no_dtype_check`, for a matrix."""
    rows, columns = values.shape
    shape = rows // block[0], block[0], columns // block[1], block[1]
    grid = shape[0], 1, shape[2], 1
    found = values.view(shape).to(dtype, copy=True)
    if zeros is not None:
        found = found - zeros.view(grid).to(dtype)
    return (found * scales.view(grid)).view(values.shape).to(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("scales", [np.float32, BFLOAT16])
@pytest.mark.parametrize("zeros", [None, np.int8, np.int32])
@pytest.mark.parametrize("block", [(1, 64), (1, 16), (8, 16)])
def test_integers_as_torchao_has_them(block, zeros, scales, dtype):
    values = every_byte((32, 64), np.int8)
    grid = 32 // block[0], 64 // block[1]
    scale = RNG.uniform(0.001, 0.1, grid).astype(scales)
    zero = None if zeros is None else RNG.integers(-8, 8, grid).astype(zeros)
    given = {"a._weight_qdata": values, "a._weight_scale": scale, "a.bias": np.zeros(3)}
    if zero is not None:
        given["a._weight_zero_point"] = zero
    found = dequantize({name: LazyArray.of(x) for name, x in given.items()}, None, dtype)
    assert list(found) == ["a.weight", "a.bias"]
    arguments = to_torch(scale), None if zero is None else to_torch(zero), getattr(torch, dtype)
    assert_same(found["a.weight"], to_numpy(affine(to_torch(values), block, *arguments)))


def torchao_says(kind, block, dtype="bfloat16"):
    about = {"_type": kind, "_data": {"block_size": block, "dtype": {"_data": dtype}}}
    return {"a.weight": json.dumps(about), "tensor_names": '["a.weight"]'}


def test_the_metadata_of_torchao_is_followed():
    values, scales = every_byte((32, 64), np.int8), np.ones((4, 4), np.float32)
    zeros = RNG.integers(-8, 8, (4, 4)).astype(np.float32)
    arrays = {
        f"a._weight_{part}": LazyArray.of(x) for part, x in (("qdata", values), ("scale", scales))
    }
    arrays["a._weight_zero_point"] = LazyArray.of(zeros)
    found = dequantize(arrays, metadata=torchao_says("Int8Tensor", [8, 16], "float16"))
    wanted = affine(to_torch(values), (8, 16), to_torch(scales), to_torch(zeros), torch.float16)
    assert_same(found["a.weight"], to_numpy(wanted))
    for metadata, message in (
        (None, "a.weight: the meaning of its zeros is stated in the metadata"),
        (torchao_says("Int4Tensor", [1, 32]), "a.weight: torchao's 'Int4Tensor' is not supported"),
        (torchao_says("Float8Tensor", [1, 64]), "describes torchao's 'Float8Tensor', but"),
        (torchao_says("Int8Tensor", [8, 32]), r"a.weight: .* need \[4, 2\] scales"),
        (torchao_says("Int8Tensor", "x"), "'x' is not a valid block size"),
        (torchao_says("Int8Tensor", [8, 16], "int8"), "has the unsupported dtype 'int8'"),
        ({"a.weight": "["}, "its metadata is not torchao's"),
        ({"a.weight": "[]"}, "its metadata is not torchao's"),
    ):
        with pytest.raises(fmapper.CheckpointError, match=message):
            dequantize(arrays, metadata=metadata)


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["Int8", "Intx", "Float8"])
def test_what_torchao_writes(config):
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    options = {"weight_dtype": torch.int4} if config == "Intx" else {"version": 2}
    model = torch.nn.Sequential(torch.nn.Linear(64, 32).bfloat16())
    quantization.quantize_(model, getattr(quantization, f"{config}WeightOnlyConfig")(**options))
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    arrays = {}
    for name, tensor in tensors.items():
        array = tensor.detach()
        is_float8 = array.dtype == torch.float8_e4m3fn
        arrays[name] = LazyArray.of(
            array.view(torch.int8).numpy().view(E4M3) if is_float8 else to_numpy(array)
        )
    found = dequantize(arrays, metadata=metadata)
    assert found.keys() == {"0.weight", "0.bias"}
    assert_same(found["0.weight"], to_numpy(model[0].weight.dequantize().detach()))


@pytest.mark.nightly
def test_torchao_itself():
    quantization = pytest.importorskip("torchao.quantization.quant_primitives")
    values = to_torch(every_byte((32, 64), np.int8))
    scales, zeros = torch.rand(32, 4) / 100, torch.randint(-8, 8, (32, 4), dtype=torch.int8)
    wanted = quantization.dequantize_affine(
        values, (1, 16), scales, zeros, torch.int8, output_dtype=torch.bfloat16
    )
    assert torch.equal(wanted, affine(values, (1, 16), scales, zeros, torch.bfloat16))


def test_float8_as_torchao_has_it():
    values, scales = every_byte((32, 64), E4M3), RNG.uniform(0, 1, (32, 1)).astype(np.float32)
    arrays = {"a._weight_qdata": LazyArray.of(values), "a._weight_scale": LazyArray.of(scales)}
    wanted = (to_torch(values).to(torch.float32) * to_torch(scales)).to(torch.bfloat16)
    assert_same(dequantize(arrays)["a.weight"], to_numpy(wanted))


# --- AWQ and GPTQ -------------------------------------------------------------------------------


def words(shape):
    return RNG.integers(-(2**31), 2**31, shape).astype(np.int32)


def awq_reference(qweight, qzeros, scales, group):
    """`awq.utils.packing_utils.dequantize_gemm` of AutoAWQ 0.2.9, for 4 bits."""
    shifts = torch.arange(0, 32, 4)

    def unpack(packed):
        found = torch.bitwise_right_shift(packed[:, :, None], shifts[None, None, :]).to(torch.int8)
        found = found.view(found.shape[0], -1)
        order = torch.arange(found.shape[-1]).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].view(-1)
        return torch.bitwise_and(found[:, order], 15)

    scales = scales.repeat_interleave(group, dim=0)
    return (unpack(qweight) - unpack(qzeros).repeat_interleave(group, dim=0)) * scales


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_awq(dtype):
    weight, zeros = words((64, 6)), words((4, 6))
    scales = RNG.uniform(0.001, 0.1, (4, 48)).astype(dtype)
    reference = awq_reference(to_torch(weight), to_torch(zeros), to_torch(scales), 16)
    arrays = lazy(a__qweight=weight, a__qzeros=zeros, a__scales=scales, a__bias=np.zeros(48))
    for config in ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, None):
        found = dequantize(arrays, config)
        assert list(found) == ["a.weight", "a.bias"]
        assert_same(found["a.weight"], np.ascontiguousarray(to_numpy(reference).T))
    with pytest.raises(fmapper.CheckpointError, match="a: AWQ is supported only with 4 bits"):
        dequantize(arrays, {"quant_method": "awq", "version": "exllama"})


def gptq_reference(qweight, qzeros, scales, index, bits):
    """`auto_gptq.nn_modules.qlinear.qlinear_cuda_old` of AutoGPTQ 0.7.1, by the groups of rows."""
    wide = torch.int16 if bits == 8 else torch.int8
    shifts = torch.arange(0, 32, bits)
    zeros = torch.bitwise_right_shift(qzeros.unsqueeze(2), shifts[None, None, :]).to(wide)
    zeros = torch.bitwise_and(zeros + 1, (2**bits) - 1).reshape(scales.shape)
    weight = torch.bitwise_right_shift(qweight.unsqueeze(1), shifts[None, :, None]).to(wide)
    weight = torch.bitwise_and(weight, (2**bits) - 1).reshape(-1, qweight.shape[1])
    return scales[index.long()] * (weight - zeros[index.long()])


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("order", ["none", "in order", "any"])
def test_gptq(bits, order):
    pack = 32 // bits
    weight, zeros = words((64 // pack, 48)), words((4, 48 // pack))
    scales = RNG.uniform(0.001, 0.1, (4, 48)).astype(np.float16)
    index = np.arange(64, dtype=np.int32) // 16
    if order == "any":
        index = RNG.permutation(index)
    reference = gptq_reference(*map(to_torch, (weight, zeros, scales, index)), bits)
    arrays = lazy(a__qweight=weight, a__qzeros=zeros, a__scales=scales)
    if order != "none":
        arrays["a.g_idx"] = LazyArray.of(index)
    found = dequantize(arrays, {"quant_method": "gptq", "bits": bits})
    assert list(found) == ["a.weight"]
    assert_same(found["a.weight"], np.ascontiguousarray(to_numpy(reference).T))


def test_gptq_of_the_second_version_has_its_zeros_as_they_are():
    weight, scales = words((8, 16)), np.ones((4, 16), np.float16)
    arrays = lazy(
        a__qweight=weight, a__qzeros=np.full((4, 2), 0x11111111, np.int32), a__scales=scales
    )
    config = {"quant_method": "gptq", "bits": 4}
    first = dequantize(arrays, config)["a.weight"].read()
    second = dequantize(arrays, {**config, "checkpoint_format": "gptq_v2"})["a.weight"].read()
    np.testing.assert_array_equal(second, first + 1)
    for unclear in (None, {}, {"quant_method": "gptq"}):
        with pytest.raises(fmapper.CheckpointError, match="a: only the quantization_config"):
            dequantize(arrays, unclear)
    with pytest.raises(fmapper.CheckpointError, match="'marlin' is not supported"):
        dequantize(arrays, {**config, "checkpoint_format": "marlin"})
    with pytest.raises(fmapper.CheckpointError, match="by 'auto-round' are not supported"):
        dequantize(arrays, {**config, "quant_method": "auto-round"})


def test_a_group_that_is_not_there_is_said():
    arrays = lazy(
        a__qweight=words((8, 16)),
        a__qzeros=words((4, 2)),
        a__scales=np.ones((4, 16), np.float16),
        a__g_idx=np.full(64, 4, np.int32),
    )
    with pytest.raises(
        fmapper.CheckpointError, match="g_idx names a group that does not exist: there are 4"
    ):
        dequantize(arrays, {"quant_method": "gptq", "bits": 4})["a.weight"].read()


# --- GGUF ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K"])
def test_ggml_blocks(kind):
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    data = every_byte((5, 3, 4 * size), np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, number)
    assert wanted.shape == (5, 3, 4 * elements)
    array = QuantizedArray(QuantizedLayout("ggml", type=kind), data)
    assert repr(array) == f"QuantizedArray(ggml, float32[5, 3, {4 * elements}])"
    assert_same(array.dequantize(), wanted)
    with pytest.raises(fmapper.CheckpointError, match="whole blocks"):
        QuantizedArray(QuantizedLayout("ggml", type=kind), data[..., 1:]).dequantize()
    with pytest.raises(fmapper.CheckpointError, match="no block type 'Q9'"):
        QuantizedArray(QuantizedLayout("ggml", type="Q9"), data).dequantize()


# --- one node -----------------------------------------------------------------------------------


def quantized():
    values = every_byte((16, 32), np.int8)
    scales = RNG.uniform(0, 1, (16, 2)).astype(np.float32)
    return QuantizedArray(QuantizedLayout("integers", "float32"), values, scales)


def test_a_quantised_array_is_one_node():
    array = quantized()
    assert (array.shape, array.ndim, array.dtype) == ((16, 32), 2, np.float32)
    moved = fmapper.to_torch({"w": array})["w"]
    assert type(moved) is QuantizedArray
    assert moved.values.dtype == torch.int8
    assert moved.layout == array.layout
    assert repr(moved) == "QuantizedArray(integers, float32[16, 32])"
    np.testing.assert_array_equal(moved.dequantize().read(), array.dequantize().read())
    assert list(fmapper.state({"w": array})) == ["w.values", "w.scales"]
    halved = fmapper.to_numpy(array, dtype="bfloat16")  # the integers are left alone
    assert (halved.values.dtype, halved.scales.dtype) == (np.int8, BFLOAT16)


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_a_quantised_array_is_saved_and_loaded_as_one(tmp_path, ending):
    array = quantized()
    path = tmp_path / f"model.{ending}"
    fmapper.save({"w": array}, path)
    empty = QuantizedArray(array.layout, np.zeros_like(array.values), np.zeros_like(array.scales))
    loaded = fmapper.load(path, like={"w": empty})["w"]
    assert type(loaded) is QuantizedArray
    np.testing.assert_array_equal(loaded.dequantize().read(), array.dequantize().read())


def test_fp8_of_a_mixture_of_experts_into_the_model():
    """Dequantised, stacked and fused, without a value being read before that."""
    transformers = pytest.importorskip("transformers")
    from fmapper_adapters.torch.pretrained.tables import transformers_rules
    from support.hub_folders import saved

    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        head_dim=8,
        vocab_size=64,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    folder, plain = {}, {}
    for name, array in saved(model).items():
        folder[name] = plain[name] = array
        if ".experts." in name:
            folder[name] = array.astype(E4M3)
            scales = RNG.uniform(1, 2, (array.shape[0] // 8, array.shape[1] // 8))
            folder[f"{name}_scale_inv"] = scales = scales.astype(np.float32)
            plain[name] = folder[name].astype(np.float32) * scales.repeat(8, 0).repeat(8, 1)
    arrays = {name: LazyArray.of(array) for name, array in folder.items()}
    found = dequantize(arrays, {"weight_block_size": [8, 8]}, "float32")
    rules = transformers_rules(model, found)
    got, wanted = rules.apply(found), rules.apply(plain)
    assert got.keys() == wanted.keys() == model.state_dict().keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name].read(), array.read())


@pytest.mark.parametrize("shape", [(16, 1), (1,)])
def test_fp8_of_compressed_tensors(shape):
    """`compressed_tensors` has `weight_scale`, for each row or for all."""
    weight, scale = every_byte((16, 32), E4M3), RNG.uniform(0, 1, shape).astype(BFLOAT16)
    found = dequantize(lazy(a__weight=weight, a__weight_scale=scale))
    assert list(found) == ["a.weight"]
    wanted = to_torch(weight).to(torch.bfloat16) * to_torch(scale)
    assert_same(found["a.weight"], to_numpy(wanted))


def test_a_quantised_array_is_found_and_kept():
    given = quantized()
    arrays = lazy(a___weight_qdata=given.values, a___weight_scale=given.scales, b=np.ones(2))
    found = find_quantized({name.replace("a._", "a._"): x for name, x in arrays.items()})
    assert {name: type(x).__name__ for name, x in found.items()} == {
        "a.weight": "QuantizedArray",
        "b": "_InMemory",
    }
    assert found["a.weight"].layout.kind == "integers"


def test_rules_take_what_is_dequantised():
    weight, scales = every_byte((8, 4), E4M3), np.ones((1, 1), np.float32)
    found = dequantize(lazy(w=weight, w_scale_inv=scales), dtype="float32")
    turned = Rules([Transpose("w")]).apply(found)["w"]
    np.testing.assert_array_equal(turned.read(), weight.astype(np.float32).T)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"a.qweight": np.zeros((2, 8), np.int32)},
            "a.weight: there is a.qweight, but no a.scales",
        ),
        (
            {"a.qweight": np.zeros((2, 8), np.int32), "a.scales": np.zeros((1, 8), np.float16)},
            "a.weight: an array of gptq needs zeros",
        ),
        (
            {"a_blocks": np.zeros((2, 8), np.int32), "a_scales": np.zeros(2, np.uint8)},
            r"a: blocks are int32\[2, 8\], not uint8",
        ),
        (
            {"a_blocks": np.zeros((2, 16), np.uint8), "a_scales": np.zeros(3, np.uint8)},
            r"a: scales have shape \[3\], not \[2\]",
        ),
        (
            {
                "a._weight_qdata": np.zeros((2, 8), np.int8),
                "a._weight_scale": np.zeros((2, 1), np.float32),
                "a.weight": np.zeros(1),
            },
            "a.weight: a quantised array and another array have this name",
        ),
        ({"a._weight_qdata": np.zeros((2, 8), np.int8)}, "but no a._weight_scale"),
    ],
)
def test_what_does_not_go_together_names_the_array(arrays, message):
    with pytest.raises(fmapper.CheckpointError, match=message):
        dequantize({name: LazyArray.of(array) for name, array in arrays.items()})
