"""`save` and `load` of trees with rare dtypes, names and values: all comes back, or is said."""

import ml_dtypes
import numpy as np
import pytest
import torch

import fmapper

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

FORMATS = {
    "safetensors": "x.safetensors",
    "npz": "x.npz",
    "pt": "x.pt",
    "msgpack": "x.msgpack",
    "orbax": "x.orbax",
    "dcp": "x.dcp",
}
EVERY = pytest.mark.parametrize("form", FORMATS)
RARE = (
    "complex128",
    "int4",
    "uint4",
    "int2",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3b11fnuz",
)


def numbers():
    return np.arange(2, dtype=np.float32)


def refusal(tree, path):
    """Saves a tree; returns why not, or an empty text."""
    try:
        fmapper.save(tree, path)
    except fmapper.CheckpointError as error:
        return str(error)
    return ""


@EVERY
@pytest.mark.parametrize("dtype", RARE)
def test_an_array_of_a_rare_dtype_comes_back_or_is_refused(tmp_path, form, dtype):
    path = tmp_path / FORMATS[form]
    array = np.array([0, 1], getattr(ml_dtypes, dtype, dtype))
    message = refusal({"w": array}, path)
    if message:
        assert message.startswith("w: ")
        assert dtype in message
        assert form != "npz"
        assert dtype != "complex128" or form == "safetensors"
        return
    again = fmapper.load(path)["w"].read()
    assert again.dtype == array.dtype
    assert again.tobytes() == array.tobytes()


@EVERY
@pytest.mark.parametrize("name", ["a\nb", "a\0b", "n" * 5000, "a\ud800"])
def test_a_name_that_could_not_be_read_again_is_not_written(tmp_path, form, name):
    path = tmp_path / FORMATS[form]
    with pytest.raises(fmapper.CheckpointError, match="Rename the key"):
        fmapper.save({name: numbers()}, path)
    with pytest.raises(fmapper.CheckpointError, match="Rename the key"):
        fmapper.save({"w": numbers(), name: 3}, path)
    assert not path.exists()


def test_the_name_of_the_metadata_of_safetensors_is_not_one_of_an_array(tmp_path):
    with pytest.raises(fmapper.CheckpointError, match="__metadata__: safetensors keeps"):
        fmapper.save({"__metadata__": numbers()}, tmp_path / "x.safetensors")
    for metadata in ({"fmapper": "1"}, {"epoch": 1}, {"text": "\ud800"}):
        with pytest.raises(fmapper.CheckpointError, match=r"metadata|text"):
            fmapper.save({"w": numbers()}, tmp_path / "x.safetensors", metadata=metadata)


@EVERY
def test_names_with_dots_at_their_ends_come_back(tmp_path, form):
    path = tmp_path / FORMATS[form]
    for at, tree in enumerate(
        ({".b": numbers()}, {"": {"c": numbers()}}, {"a.": numbers(), ".b": numbers() + 1})
    ):
        path = path.with_stem(f"x{at}")
        fmapper.save(tree, path)
        assert fmapper.load(path).keys() == fmapper.state(tree).keys()
        assert fmapper.load(path, like=tree).keys() == tree.keys()


@EVERY
def test_two_things_of_one_name_are_refused(tmp_path, form):
    path = tmp_path / FORMATS[form]
    for other in (2, numbers()):
        with pytest.raises(fmapper.CheckpointError, match=r"a\.b.*Rename one"):
            fmapper.save({"a.b": 1, "a": {"b": other}}, path)
    assert not path.exists()


@EVERY
def test_a_value_comes_back_or_is_refused(tmp_path, form):
    values = {"large": 2**70, "long": "x" * 3_000_000, "complex": 1j, "bytes": b"a"}
    values |= {"false": False, "true": True, "nan": float("nan"), "half": "\ud800"}
    for name, value in values.items():
        path = tmp_path / f"{name}-{FORMATS[form]}"
        message = refusal({"w": numbers(), name: value}, path)
        if message:
            assert name in message
            assert name in ("large", "long", "complex", "bytes", "half")
            continue
        like = {"w": numbers(), name: type(value)()}
        assert repr(fmapper.load(path, like=like)[name]) == repr(value)


def test_orbax_says_that_it_writes_nothing_of_nothing_and_no_paths_out_of_it(tmp_path):
    with pytest.raises(fmapper.CheckpointError, match="without arrays"):
        fmapper.save({}, tmp_path / "x.orbax")
    for name in ("/x", "../x", "a/../../x"):
        with pytest.raises(fmapper.CheckpointError, match="leads out"):
            fmapper.save({name: numbers()}, tmp_path / "x.orbax")


class Noisy(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.layer = nnx.Linear(3, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.layer(x))


@pytest.mark.nightly_cases("pt", "npz", "safetensors")
@EVERY
def test_the_random_keys_of_a_model_come_back(tmp_path, form):
    path, x = tmp_path / FORMATS[form], np.ones((8, 3), np.float32)
    model = Noisy(0)
    model(x)
    fmapper.save(model, path)
    wanted = model(x)
    again = fmapper.load(path, like=Noisy(5))
    np.testing.assert_array_equal(again(x), wanted)
    shapes = nnx.eval_shape(lambda: Noisy(7))
    np.testing.assert_array_equal(fmapper.load(path, like=shapes)(x), wanted)


def test_keys_of_other_generators_and_ties_come_back(tmp_path):
    keys = {"many": jax.random.split(jax.random.key(3, impl="rbg"), (2, 3)), "w": numbers()}
    keys["one"] = keys["same"] = jax.random.key(1)
    fmapper.save(keys, tmp_path / "x.npz")
    again = fmapper.load(tmp_path / "x.npz", like=keys)
    assert again["one"] is again["same"]
    assert again["many"].dtype == keys["many"].dtype
    assert (jax.random.key_data(again["many"]) == jax.random.key_data(keys["many"])).all()
    other = {**keys, "new": jax.random.key(2)}
    assert fmapper.load(tmp_path / "x.npz", like=other, strict=False)["new"] == other["new"]
    with pytest.raises(fmapper.StructureMismatchError, match="many"):
        fmapper.load(tmp_path / "x.npz", like={**keys, "many": jax.random.key(1)})


def test_torch_reads_complex128_and_is_read(tmp_path):
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    torch.save({"w": tensor}, tmp_path / "x.pt")
    assert fmapper.load(tmp_path / "x.pt")["w"].read().tolist() == tensor.tolist()
    fmapper.save({"w": tensor}, tmp_path / "y.pt")
    assert torch.equal(torch.load(tmp_path / "y.pt")["w"], tensor)


@fmapper.functor
class Before:
    def __init__(self):
        self.weight = np.ones(2)


@fmapper.functor
class Since(Before):
    def __init__(self):
        super().__init__()
        self.step = 7


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_an_object_lacks_none_of_its_numbers_if_it_was_saved_as_one(ending, tmp_path):
    path = tmp_path / f"net.{ending}"
    fmapper.save({"net": Before(), "epoch": 1}, path)
    like = {"net": Since(), "epoch": 0}
    with pytest.raises(fmapper.StructureMismatchError, match=r"net\.step: missing"):
        fmapper.load(path, like=like)
    assert fmapper.load(path, like=like, strict=False)["epoch"] == 1
    fmapper.save({"net": fmapper.state(Since()), "epoch": 1}, path)  # its arrays alone
    assert fmapper.load(path, like=like)["net"].step == 7
    copied = tmp_path / f"copy.{ending}"
    fmapper.save({"net": Before()}, path)
    fmapper.save(fmapper.load(path), copied)
    with pytest.raises(fmapper.StructureMismatchError, match=r"net\.step: missing"):
        fmapper.load(copied, like={"net": Since()})
