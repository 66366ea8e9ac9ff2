"""Goldens: what a model computed, in a file that stands for it where it is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

import fmapper
from fmapper.checkpoints import Rename, Rules, Transpose
from fmapper.files.arrays import read_arrays, write_arrays
from fmapper.files.safetensors import read_header
from fmapper.verification.goldens import file
from fmapper.verification.goldens.file import KEY, holds_goldens, read_goldens
from sweeps import hostile_files

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

RULES = Rules([Transpose("{name...}.weight"), Rename("{name...}", "1.{name...}")])
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 5)
        self.last = torch.nn.Linear(5, 2)

    def forward(self, x, scale=1.0):
        return {"y": self.last(torch.tanh(self.first(x))) * scale, "scale": scale}


def twin(params, x, scale=1.0):
    x = jnp.tanh(x @ params["first"]["weight"] + params["first"]["bias"])
    return {"y": (x @ params["last"]["weight"] + params["last"]["bias"]) * scale, "scale": scale}


def bias_twice(params, x, scale=1.0):
    x = jnp.tanh(x @ params["first"]["weight"] + 2 * params["first"]["bias"])
    return {"y": (x @ params["last"]["weight"] + params["last"]["bias"]) * scale, "scale": scale}


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def params(net):
    found = {"first": {}, "last": {}}
    for name, x in net.named_parameters():
        layer, kind = name.split(".")
        found[layer][kind] = jnp.asarray(x.detach().numpy().T)
    return found


@pytest.fixture(scope="module")
def path(net, tmp_path_factory):
    made = tmp_path_factory.mktemp("goldens") / "net.safetensors"
    kwargs = {"example_kwargs": {"scale": 2.0}}
    fmapper.record_goldens(net, X, made, gradients=True, steps=2, **kwargs)
    return made


def test_the_model_is_the_same_as_its_goldens(net, path):
    report = fmapper.verify(path, net)
    assert report, report
    assert len(report.gradients) == 4
    assert len(report.steps) == 2


def test_a_twin_in_another_framework_is_the_same(params, path):
    assert fmapper.verify(path, (twin, params), rules=RULES)


def test_the_first_operation_that_differs_is_named(params, path):
    report = fmapper.verify(path, (bias_twice, params), rules=RULES)
    assert not report
    assert "in first" in str(report.first)


def test_gradients_are_compared(params, path):
    def stopped(params, x, scale=1.0):
        return twin(jax.lax.stop_gradient({"first": params["first"]}) | {"last": params["last"]},
                    x, scale)  # fmt: skip

    report = fmapper.verify(path, (stopped, params), rules=RULES)
    assert all(one.ok for one in report.outputs)
    assert "first" in str(report.first)


def test_without_gradients_outputs_alone_are_compared(net, params, tmp_path):
    fmapper.record_goldens(net, (X,), tmp_path / "x.safetensors")
    report = fmapper.verify(tmp_path / "x.safetensors", (twin, params))
    assert report
    assert not report.gradients


def test_the_framework_of_the_goldens_is_not_needed(path):
    code = """
        import sys

        class Blocked:
            def find_spec(self, name, *rest):
                if name.partition(".")[0] == "torch":
                    raise ModuleNotFoundError(name, name=name)

        sys.meta_path.insert(0, Blocked())
        import fmapper, jax.numpy as jnp
        from fmapper.checkpoints import load
        from fmapper.verification.goldens.file import read_goldens

        weights = read_goldens(sys.argv[1]).weights
        def twin(p, x, scale=1.0):
            x = jnp.tanh(x @ p["first.weight"].T + p["first.bias"])
            return {"y": (x @ p["last.weight"].T + p["last.bias"]) * scale, "scale": scale}
        params = {name: jnp.asarray(x) for name, x in weights.items()}
        report = fmapper.verify(sys.argv[1], (twin, params))
        assert report, report
        assert len(report.steps) == 2
        assert "torch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr


def test_inputs_and_modes_are_those_of_the_goldens(net, path):
    with pytest.raises(fmapper.ConversionError, match="goldens hold their inputs"):
        fmapper.verify(path, net, X)
    with pytest.raises(fmapper.ConversionError, match="without loss"):
        fmapper.verify(path, net, loss=lambda y: y["y"].sum())


def test_objects_are_refused(tmp_path):
    with pytest.raises(fmapper.GoldensError, match=r"output\.kind is of type type"):
        fmapper.record_goldens(Odd(), X, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


class Odd(Net):
    def forward(self, x):
        return {**super().forward(x), "kind": Odd}


# --- files of anybody -----------------------------------------------------------------------------


def contents(path):
    with path.open("rb") as opened:
        header = read_header(opened, path.stat().st_size)
        return read_arrays(opened, header.entries), json.loads(header.metadata[KEY])


def damage(path, tmp_path, change):
    arrays, about = contents(path)
    change(arrays, about)
    damaged = tmp_path / "damaged.safetensors"
    write_arrays(damaged, arrays, {KEY: json.dumps(about)})
    return damaged


def put(key, value):
    return lambda arrays, about: about.__setitem__(key, value)


def nested(arrays, about):
    for _ in range(200):
        about["output"] = {"list": [about["output"]]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("version", 2), "has version 2"),
        (put("version", "1"), "has no version"),
        (put("args", [{"array": "args.1"}]), "no array 'args.1'"),
        (put("args", [{"array": "output.y"}]), "in two places"),
        (put("args", {"array": "args.0"}), "args: is not a list"),
        (put("weights", ["first.weight"]), "is not used"),
        (put("weights", ["none"]), "no array 'weights.none'"),
        (put("unit", -1.0), "unit: is negative"),
        (put("train", 1), "neither true nor false"),
        (put("model", "a\nb"), "not printable"),
        (put("aliases", {"a": 1}), "is not a text"),
        (put("operations", [[1, 2]]), r"operations\[0\]: is not an operation"),
        (put("output", {"module": "os"}), "not a kind of structure"),
        (put("output", {"dict": [["a", {"value": 1}], ["a", {"value": 2}]]}), "a key twice"),
        (put("rates", ["x"]), "is not a number"),
        (nested, "nested too deeply"),
        (lambda arrays, about: about.pop("training"), "training: is missing"),
        (lambda arrays, about: about["training"].pop("loss"), r"training.loss: is missing"),
        (lambda arrays, about: arrays.pop("gradients.first.bias"), "no array"),
        (lambda arrays, about: arrays.update(more=np.zeros(1)), "'more' is not used"),
    ],
)
def test_what_is_damaged_is_refused(path, tmp_path, change, words):
    with pytest.raises(fmapper.GoldensError, match=words):
        read_goldens(damage(path, tmp_path, change))


def test_shapes_that_do_not_fit_are_a_difference(net, path, tmp_path):
    def wrong(arrays, about):
        arrays["weights.first.weight"] = np.zeros((4, 5), np.float32)

    with pytest.raises(fmapper.StructureMismatchError):
        fmapper.verify(damage(path, tmp_path, wrong), net)


@pytest.mark.parametrize("name", [*hostile_files.GOLDENS])
def test_many_small_things_are_refused_or_read(name, tmp_path, monkeypatch):
    monkeypatch.setattr(file, "MOST_JSON", file.MOST_JSON // 100)
    make, count = hostile_files.GOLDENS[name]
    path = make(tmp_path, count // 100)
    if name.startswith("honest"):
        assert len(read_goldens(path).operations) == count // 100
    else:
        with pytest.raises(fmapper.GoldensError, match=r"too many values|no array"):
            read_goldens(path)


def test_files_without_goldens(tmp_path):
    arrays, text = tmp_path / "arrays.safetensors", tmp_path / "text.safetensors"
    fmapper.save({"w": np.zeros(2)}, arrays)
    text.write_text("no file of arrays")
    for path in (arrays, text):
        assert not holds_goldens(path)
        with pytest.raises(fmapper.GoldensError, match=path.name):
            read_goldens(path)
    with pytest.raises(FileNotFoundError):
        fmapper.verify(tmp_path / "none.safetensors", twin)


class Noisy(torch.nn.Module):
    def __init__(self, rate=0.3):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.drop = torch.nn.BatchNorm1d(6), torch.nn.Dropout(rate)
        self.up = torch.nn.Linear(6, 8)

    def forward(self, x):
        return self.up(self.drop(self.norm(x)))


@pytest.mark.nightly
def test_goldens_of_training_leave_dropout_out_and_hold_its_rate(tmp_path):
    x, path = torch.randn(4, 6), tmp_path / "goldens.safetensors"
    fmapper.record_goldens(Noisy(), (x,), path, gradients=True, steps=2)
    assert fmapper.verify(path, Noisy())
    report = fmapper.verify(path, Noisy(0.5))
    assert not report
    assert "a draws dropout of 0.3, b draws dropout of 0.5" in str(report)
    converted = fmapper.convert(Noisy(), "flax", (x,), train=True, structure=True)
    report = fmapper.verify(path, converted)
    assert report, report
    flat = fmapper.convert(Noisy(), "jax", (x,), train=True)
    report = fmapper.verify(path, flat)
    assert not report
    assert "whose dropout cannot be left out" in str(report)


@pytest.mark.nightly
def test_goldens_in_double_precision_are_compared_with_a_model_in_single(tmp_path):
    x, path = torch.randn(4, 6), tmp_path / "goldens.safetensors"
    fmapper.record_goldens(Noisy().eval(), (x,), path, gradients=True, steps=2)
    report = fmapper.verify(path, fmapper.convert(Noisy().eval(), "jax", (x,)))
    assert report, report
