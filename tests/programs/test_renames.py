"""Pickles that version 0.1 wrote, when its modules had other names, are read as they were."""

import pickle
from pathlib import Path
from types import ModuleType

import pytest

import fmapper
from fmapper.renames import RENAMES, install

np = pytest.importorskip("numpy")

BEFORE = Path(__file__).parents[1] / "data" / "before_rooms"


def read(name: str) -> object:
    return pickle.loads((BEFORE / f"{name}.pkl").read_bytes())


@pytest.fixture
def results():
    return np.load(BEFORE / "results.npz")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("device", "Device"),
        ("error", "NotAFunctorError"),
        ("keypath", "KeyPath"),
        ("mover", "Mover"),
        ("plan", "Plan"),
        ("profile", "Profile"),
        ("program", "Program"),
        ("report", "Report"),
        ("summary", "Summary"),
    ],
)
def test_what_fmapper_returns(name, kind):
    if name == "plan":
        pytest.importorskip("torch")
    value = read(name)
    assert type(value) is getattr(fmapper, kind)
    assert repr(value) or str(value)


@pytest.mark.parametrize("name", ["keep", "no_gradient"])
def test_what_there_is_one_of(name):
    assert read(name) is getattr(fmapper, name)


def test_what_they_say():
    assert str(read("keypath")) == "layers[0].weight"
    assert bool(read("report"))
    assert repr(read("to_gpu")) == repr(fmapper.to_gpu)


def test_models_of_jax(results):
    pytest.importorskip("jax")
    model = read("jax_model")
    np.testing.assert_allclose(model(results["x"]), results["net"], rtol=1e-6)


@pytest.mark.parametrize("name", ["flax_model", "linen_model"])
def test_models_of_flax(name, results):
    pytest.importorskip("flax")
    model = read(name)
    if name == "linen_model":
        import jax

        x = results["x"]
        variables = model.init(jax.random.key(0), x)
        np.testing.assert_allclose(model.apply(variables, x), results["net"], rtol=1e-6)
    else:
        np.testing.assert_allclose(model(results["x"]), results["net"], rtol=1e-6)


def test_models_of_torch(results):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(results["x"])
    for model in (read("torch_model"), torch.load(BEFORE / "torch_model.pt", weights_only=False)):
        np.testing.assert_allclose(model(x).detach(), results["linear"], rtol=1e-6)


@pytest.mark.parametrize("name", RENAMES)
def test_a_name_of_before_is_the_module_of_today(name):
    pytest.importorskip(RENAMES[name].split(".")[1] if "_adapters" in name else "fmapper")
    before = __import__(name, fromlist=["_"])
    assert isinstance(before, ModuleType)
    today = __import__(RENAMES[name], fromlist=["_"])
    own = [n for n in vars(today) if not n.startswith("__")]
    assert own
    assert all(getattr(before, n) is getattr(today, n) for n in own)
    with pytest.raises(AttributeError):
        _ = before.nothing_of_this_name


def test_it_is_installed_once():
    import sys

    before = list(sys.meta_path)
    install()
    assert sys.meta_path == before
