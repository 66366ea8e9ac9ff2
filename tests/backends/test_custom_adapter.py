"""The extra adapter of examples/: it passes the suite, and is found as an entry point."""

from __future__ import annotations

import array as stdlib_array
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper.backends import Adapter

np = pytest.importorskip("numpy")

from support.conformance import AdapterConformance  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "custom_adapter.py"


def load(path: Path) -> Any:
    """A module by its path: examples/ is not on `sys.path`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


toy = load(EXAMPLE)


class TestToy(AdapterConformance):
    dtypes = tuple(toy.CODES)

    def make_adapter(self) -> Adapter:
        made: Adapter = toy.ToyAdapter()
        return made

    def make(self, array: Any) -> Any:
        native = array.astype(array.dtype.newbyteorder("="))
        numbers = stdlib_array.array(toy.CODES[native.dtype.name], native.tobytes())
        return toy.Tensor(numbers, native.shape)

    def values(self, array: Any) -> Any:
        dtype = toy.NAMES[array.numbers.typecode]
        flat = np.frombuffer(array.numbers, dtype) if array.numbers else np.empty(0, dtype)
        return flat.reshape(array.shape)

    def overwrite(self, array: Any) -> None:
        for i in range(len(array.numbers)):
            array.numbers[i] = 0


def first_code(page: Path) -> dict[str, Any]:
    """What the first code on a page defines, before it registers anything."""
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    scope: dict[str, Any] = {}
    exec(code.partition("register_adapter(Grid")[0], scope)
    return scope


guide = first_code(ROOT / "docs" / "howto" / "add-a-framework.md")


class TestGrid(AdapterConformance):
    """The adapter on the page `howto/add-a-framework.md`."""

    dtypes = ("float64",)

    def make_adapter(self) -> Adapter:
        made: Adapter = guide["GridAdapter"]()
        return made

    def make(self, array: Any) -> Any:
        return guide["Grid"](array.ravel(), array.shape)

    def values(self, array: Any) -> Any:
        return np.array(array.numbers).reshape(array.shape)

    def overwrite(self, array: Any) -> None:
        for i in range(len(array.numbers)):
            array.numbers[i] = 0


@pytest.fixture
def registered() -> Iterator[Adapter]:
    yield fmapper.backends.register_adapter(toy.ToyAdapter())
    fmapper.backends.unregister_adapter("toy")


def test_the_example_prints_the_same_numbers_everywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["custom_adapter.py"])
    toy.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) in (4, 5)
    assert {line[line.index("[[") :] for line in lines} == {"[[12.0, 9.0, 2.0]]"}
    assert all(" tied " in line for line in lines)
    assert "toy:acc:0" in lines[2]
    assert not any(d.backend == "toy" for d in fmapper.devices()), "main() cleans up behind itself"


def test_importing_the_example_registers_nothing() -> None:
    load(EXAMPLE)
    with pytest.raises(
        fmapper.BackendUnavailableError, match=r"no adapter for 'toy'.*Known:.*numpy"
    ):
        fmapper.backends.get_adapter("toy")


def test_device_words_of_an_adapter_are_good_words(registered: Adapter) -> None:
    """Adding a framework touches no file of the core, so no list there has to name `acc`."""
    w = np.ones(2, np.float32)
    for word in ("toy:acc:1", "acc:1"):
        moved = toy.to_toy(w, device=word)
        assert str(fmapper.get_device(moved)) == "toy:acc:1"
    assert str(fmapper.get_device(toy.to_toy(w, device="gpu"))) == "toy:acc:0"
    assert str(fmapper.get_device(fmapper.to_device("toy:acc:0")(toy.to_toy(w)))) == "toy:acc:0"


def test_a_bad_device_lists_those_of_the_adapter(registered: Adapter) -> None:
    with pytest.raises(fmapper.DeviceError, match=r"toy:cpu.*toy:acc:0.*toy:acc:1"):
        fmapper.to_device("toy:nonsense:0")


def test_every_device_string_that_an_error_offers_works(registered: Adapter) -> None:
    with pytest.raises(fmapper.DeviceError) as caught:
        fmapper.to_device("what?")
    offered = str(caught.value).partition("this machine: ")[2].rstrip(".").split(", ")
    assert "toy:acc:0" in offered
    for word in offered:
        fmapper.to_device(word)


def test_unregistered_arrays_are_no_arrays_any_more() -> None:
    fmapper.backends.register_adapter(toy.ToyAdapter())
    tensor = toy.to_toy(np.ones(2, np.float32))
    assert fmapper.get_device(tensor) is not None
    fmapper.backends.unregister_adapter("toy")
    assert fmapper.get_device(tensor) is None


def test_from_the_accelerator_to_another_backend(registered: Adapter) -> None:
    """Where the target has no accelerator, the error says so and what to write."""
    there = toy.to_toy(np.ones(2, np.float32), device=fmapper.Device("toy", "acc", 1))
    assert fmapper.to_numpy(there).tolist() == [1.0, 1.0]
    pytest.importorskip("torch")
    assert fmapper.to_torch(there, device="cpu").tolist() == [1.0, 1.0]


def test_an_adapter_that_was_removed_comes_back_by_name() -> None:
    array = np.ones(1)
    assert str(fmapper.get_device(array)) == "numpy:cpu"
    fmapper.backends.unregister_adapter("numpy")
    try:
        assert fmapper.get_device(array) is None
    finally:
        fmapper.backends.get_adapter("numpy")
    assert str(fmapper.get_device(array)) == "numpy:cpu"


# --- entry points --------------------------------------------------------------------------------


def install(where: Path, module: str) -> None:
    """The example as an installed package: a module and its dist-info, with the entry point."""
    shutil.copy(EXAMPLE, where / f"{module}.py")
    info = where / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fmapper.adapters]\n{module} = {module}:ToyAdapter\n")


def run(code: str, path: Path) -> str:
    """What a fresh interpreter prints that has `path` on `sys.path`."""
    head = f"import sys; sys.path.insert(0, {str(path)!r})\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + code],
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_entry_point_is_found_by_the_import_of_its_framework(tmp_path: Path) -> None:
    install(tmp_path, "toy")
    code = """
import array, fmapper
fmapper.fmap(len, [""])                     # before the framework is there
assert "toy" not in sys.modules
import toy
tree = {"w": toy.Tensor(array.array("f", [1, 2]), (2,))}
print(fmapper.get_device(tree), fmapper.to_numpy(tree)["w"].tolist())
"""
    assert run(code, tmp_path) == "toy:cpu [1.0, 2.0]\n"


def test_an_entry_point_is_found_by_name(tmp_path: Path) -> None:
    install(tmp_path, "toy")
    code = """
import fmapper
assert "toy" not in sys.modules
adapter = fmapper.backends.get_adapter("toy")
print(type(adapter).__name__, "toy" in sys.modules, fmapper.backends.get_adapter("toy") is adapter)
"""
    assert run(code, tmp_path) == "ToyAdapter True True\n"


@pytest.mark.nightly
def test_an_entry_point_counts_among_the_devices(tmp_path: Path) -> None:
    install(tmp_path, "toy")
    out = run("import fmapper; print(*fmapper.devices())", tmp_path)
    assert "toy:cpu toy:acc:0 toy:acc:1" in out


def test_a_framework_module_may_have_another_name_than_the_backend(tmp_path: Path) -> None:
    """`toykit` is the module, `toy` the backend: as `cupy_backends` or `mlx.core` would be."""
    install(tmp_path, "toykit")
    code = """
import fmapper
adapter = fmapper.backends.get_adapter("toykit")
again = [fmapper.backends.get_adapter(name) is adapter for name in ("toykit", "toy")]
print(adapter.name, *again)
"""
    assert run(code, tmp_path) == "toy True True\n"


@pytest.mark.nightly
def test_an_adapter_that_cannot_be_loaded_does_not_take_the_others_down(tmp_path: Path) -> None:
    """Its framework is there but broken: other backends go on, asking for it by name says why."""
    install(tmp_path, "toy")
    (tmp_path / "toy.py").write_text("raise ImportError('libtoy.so is missing')")
    code = """
import fmapper, numpy
print(fmapper.to_numpy([numpy.ones(1)])[0].tolist(), "numpy:cpu" in map(str, fmapper.devices()))
try:
    fmapper.backends.get_adapter("toy")
except fmapper.BackendUnavailableError as error:
    print(error)
"""
    out = run(code, tmp_path).splitlines()
    assert out[0] == "[1.0] True"
    assert "libtoy.so is missing" in out[1]
    assert "fmapper[toy]" not in out[1], "fmapper has no such extra"


def test_models_of_ones_own_backend_are_verified_and_converted(registered: Adapter) -> None:
    weight = np.array([[0.0, 1.0], [2.0, 0.0]], np.float32)
    x = np.ones((3, 2), np.float32)
    model = toy.Autoencoder(toy.Linear(weight))
    there = fmapper.convert(model, "toy")
    assert isinstance(there.encoder.weight, toy.Tensor)
    assert there.encoder is there.decoder
    for inputs in (x, toy.to_toy(x)):
        for a, b in ((model, there), (there, model), (there, there)):
            assert fmapper.verify(a, b, inputs)
    other = toy.Autoencoder(toy.Linear(toy.to_toy(2 * weight)))
    report = fmapper.verify(model, other, x)
    assert not report
    assert report.outputs[0].error == 6


class Programs(toy.ToyAdapter):  # type: ignore[misc, name-defined]
    """A backend that makes models of programs, and records some."""

    def from_program(self, program: Any, lowerings: Any, **options: Any) -> Any:
        (weight,) = program.parameters.values()
        return toy.Linear(toy.to_toy(weight))

    def is_model(self, x: Any) -> bool:
        return isinstance(x, toy.Linear) and isinstance(x.weight, toy.Tensor)


@pytest.mark.nightly
def test_the_convert_command_takes_a_backend_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from fmapper.cli.main import main

    file = tmp_path / "models.py"
    file.write_text("import torch\nlayer = torch.nn.Linear(2, 2, bias=False)\n")
    command = ["convert", f"{file}:layer", "--to", "toy", "--example", "randn(3, 2)"]
    fmapper.backends.register_adapter(Programs())
    try:
        # The toy multiplies without transposing: its outputs differ, which is found and said.
        assert main([*command, "--seconds", "0.01"]) == 1
        assert "the outputs differ" in capsys.readouterr().out
        assert main([*command, "--no-check", "--seconds", "0.01"]) == 0
    finally:
        fmapper.backends.unregister_adapter("toy")


@pytest.mark.nightly
def test_the_convert_command_says_what_cannot_be_lowered(
    registered: Adapter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from fmapper.cli.main import main

    file = tmp_path / "models.py"
    file.write_text("import torch\nlayer = torch.nn.Linear(2, 2)\n")
    assert main(["convert", f"{file}:layer", "--to", "toy", "--example", "randn(3, 2)"]) != 0
    assert "programs cannot be lowered to toy" in capsys.readouterr().err


def test_a_framework_without_arrays_says_so() -> None:
    class Bare(fmapper.backends.Models):
        name = "bare"

        def node_type(self, cls: type) -> None:
            return None

    fmapper.backends.register_adapter(Bare())
    try:
        with pytest.raises(fmapper.ConversionError, match="bare has no arrays of its own"):
            fmapper.convert({"w": np.ones(2)}, "bare")
    finally:
        fmapper.backends.unregister_adapter("bare")
