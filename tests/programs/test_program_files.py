"""Files of programs that nobody vouches for: they are data, and one error says what is wrong."""

from __future__ import annotations

import builtins
import io
import itertools
import json
import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fmapper
from fmapper.files import untrusted
from fmapper.programs import Polynomial, file, file_json

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("flax")

from support import program_files  # noqa: E402
from support.patience import no_hang  # noqa: E402
from sweeps import fuzz_files  # noqa: E402
from sweeps.fuzz_files import HOSTILE, KEY, SENTINEL  # noqa: E402

TESTS = Path(__file__).parents[1]
FILES = sorted(program_files.WRITTEN.glob("*.safetensors"))
NAMES = [path.stem for path in FILES]
INPUTS: dict[str, tuple[Any, ...]] = {
    "dense_torch": (np.ones((2, 3), np.float32),),
    "branches_torch": (np.array([[1, 2]]),),
    "sizes_torch": (np.ones((4, 6), np.float32), np.ones((4, 2), np.float32)),
    "training_torch": (np.ones((2, 1, 4, 4), np.float32),),
    "tiny_torch": (np.ones(2, np.float32),),
    "dense_jax": (np.ones((2, 3), np.float32),),
    "loops_jax": (np.ones((3, 2), np.float32), np.array(5, np.int32)),
    "sizes_jax": (np.ones((5, 2), np.float32), np.ones((2, 2), np.float32)),
    "training_jax": (np.ones((2, 3), np.float32),),
    "tiny_jax": (np.ones(2, np.float32),),
    "branch_jax": (np.ones(2, np.float32),),
}


@pytest.fixture
def untouched():
    """Asks afterwards whether any of the hostile texts was run."""
    yield
    assert not hasattr(builtins, SENTINEL)


def taken_apart(name: str) -> tuple[Any, Any, bytes]:
    """The header, the program and the arrays of a file."""
    return fuzz_files.taken_apart((program_files.WRITTEN / f"{name}.safetensors").read_bytes())


def written(header: Any, about: Any, arrays: bytes) -> bytes:
    """A file of these parts."""
    text = json.dumps({"__metadata__": {KEY: json.dumps(about)}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + arrays


def load(data: bytes) -> fmapper.programs.Program:
    """The program in a file that is only in memory."""
    return file.read_program(io.BytesIO(data), len(data))


def called(name: str, target: str) -> Any:
    """What the model in a file gives."""
    model = fmapper.convert(
        fmapper.load_program(program_files.WRITTEN / f"{name}.safetensors"), target
    )
    inputs = INPUTS[name]
    if target == "torch":
        model, inputs = model.eval(), fmapper.to_torch(inputs)
    keywords = {"flag": True} if name == "branches_torch" else {}
    return fmapper.to_numpy(model(*inputs, **keywords))


# --- honest files ---------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.nightly_cases("branch_jax")
@pytest.mark.parametrize("name", NAMES)
def test_files_that_were_written_before_stay_readable(name):
    first = [called(name, target) for target in program_files.targets(name)]
    for found in first[1:]:  # of two frameworks, up to rounding
        got, want = fmapper.fleaves(found)[0], fmapper.fleaves(first[0])[0]
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    if name == "tiny_jax":
        assert first[0]["out"].tolist() == [1, 2]
        assert first[0]["none"] is None
    if name == "sizes_torch":
        assert first[0].first.shape == (4 * 8,)


@pytest.mark.parametrize("name", ["branches_torch", "loops_jax", "training_jax"])
def test_what_is_read_is_written_as_it_was(name, tmp_path):
    before = program_files.WRITTEN / f"{name}.safetensors"
    fmapper.save_program(fmapper.load_program(before), tmp_path / "again")
    assert taken_apart(name) == fuzz_files.taken_apart((tmp_path / "again").read_bytes())


def save_linear(path, to):
    linear, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    fmapper.convert(linear, to, (x,), check=False).save(path)
    return linear(x).detach().numpy(), x.numpy()


@pytest.mark.parametrize(("to", "cls"), [("jax", "JaxModel"), ("flax", "FlaxModel")])
def test_load_gives_the_model_in_a_file(to, cls, tmp_path):
    path = tmp_path / "model.safetensors"
    want, x = save_linear(path, to)
    again = fmapper.load(path)
    assert type(again).__name__ == cls
    np.testing.assert_allclose(again(x), want, atol=1e-6)
    other = fmapper.load(path, to="torch")
    np.testing.assert_allclose(other(torch.from_numpy(x)).detach(), want, atol=1e-6)
    assert type(fmapper.load(path, to="linen")).__name__ == "LinenModel"


def test_load_gives_the_arrays_of_a_model_where_they_are_asked_for(tmp_path):
    path = tmp_path / "model.safetensors"
    save_linear(path, "jax")
    assert set(fmapper.load(path, format="safetensors")) == {"weight", "bias"}
    assert set(fmapper.load(path, rules=fmapper.checkpoints.Rules())) == {"weight", "bias"}
    filled = fmapper.load(path, like=torch.nn.Linear(3, 2, device="meta"))
    assert filled.weight.shape == (2, 3)


def test_load_of_a_program_for_no_target_asks_for_one(tmp_path):
    path = tmp_path / "model.safetensors"
    save_linear(path, "jax")
    fmapper.save_program(fmapper.load_program(path), path)
    with pytest.raises(fmapper.ProgramFileError, match="pass to=, such as to='torch'"):
        fmapper.load(path)
    with pytest.raises(fmapper.BackendUnavailableError, match="Did you mean 'flax'"):
        fmapper.load(path, to="flx")
    assert type(fmapper.load(path, to="jax")).__name__ == "JaxModel"


def test_a_target_of_a_file_without_a_program_is_refused(tmp_path):
    path = tmp_path / "arrays.safetensors"
    fmapper.save({"w": np.ones(2)}, path)
    with pytest.raises(fmapper.CheckpointError, match="this one holds arrays and no program"):
        fmapper.load(path, to="jax")
    with pytest.raises(TypeError, match="omit one"):
        fmapper.load(path, {"w": np.ones(2)}, to="jax")


@pytest.mark.parametrize("target", ["{}", '{"to": 1}', '{"to": "os.path"}', '"jax"', "{"])
def test_the_target_in_a_file_is_checked(target, tmp_path):
    path = tmp_path / "model.safetensors"
    save_linear(path, "jax")
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    head["__metadata__"]["fmapper.target"] = target
    new = json.dumps(head).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + size :])
    with pytest.raises(fmapper.ProgramFileError, match=r"fmapper\.target"):
        fmapper.load(path)


def test_a_program_of_jax_does_not_go_back_where_it_comes_from():
    program = fmapper.load_program(program_files.WRITTEN / "tiny_jax.safetensors")
    with pytest.raises(
        fmapper.UnsupportedOpsError, match=r"was recorded from .* Convert the program"
    ):
        fmapper.convert(program, "jax")


# --- nothing is run -------------------------------------------------------------------------------


def strings(tree: Any) -> list[tuple[Any, Any]]:
    return [
        (holder, key) for holder, key in fuzz_files.places(tree) if isinstance(holder[key], str)
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "step"),
    [("tiny_torch", 3), ("tiny_jax", 5), ("branch_jax", 23), ("branches_torch", 17)],
)
def test_hostile_text_in_any_field_of_a_file_is_an_error_or_text(name, step, untouched):
    """One in so many of the texts at each place, at the next place others."""
    header, about, arrays = taken_apart(name)
    count = 0
    for holder, key in strings(about):
        before = holder[key]
        for text in HOSTILE:
            count += 1
            if count % step == 0:
                holder[key] = text if count % (2 * step) else before + text
                fuzz_files.run_case(name, written(header, about, arrays))
        holder[key] = before
    assert count > 1000


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "step"), [("tiny_torch", 7), ("tiny_jax", 4), ("branch_jax", 23), ("loops_jax", 103)]
)
def test_a_program_that_was_never_checked_runs_nothing_either(name, step, untouched):
    """The second wall: who writes code quotes what it is given, checked or not.

    A text takes the place of another one wherever that is, so that what refers to it still does.
    """
    header, about, arrays = taken_apart(name)
    whole = load(written(header, about, arrays))
    texts = [text for text in HOSTILE if SENTINEL in text]
    ways = ("{0}{1}", "{1}{0}", "{1}", "{0}{1}:1", "a{1}:1")
    models = 0
    plain = json.dumps(about)
    changes = itertools.product(sorted({h[k] for h, k in strings(about["program"])}), texts, ways)
    for count, (before, text, way) in enumerate(changes):
        if count % step == 0:
            new = way.replace("{0}", before).replace("{1}", text)
            changed = json.loads(plain.replace(json.dumps(before), json.dumps(new)))
            models += converted_unchecked(name, changed, whole, call=models % 16 == 0)
    assert models > 5


def converted_unchecked(
    name: str, about: Any, whole: fmapper.programs.Program, *, call: bool
) -> int:
    """Converts a program without asking whether it says what it may; how many models that gave."""
    try:
        program = file_json.decode_program(about["program"])
    except untrusted.Misfit:
        return 0
    program.parameters, program.buffers = dict(whole.parameters), dict(whole.buffers)
    program.constants = dict(whole.constants)
    models = 0
    for target in program_files.targets(name):
        try:
            model = fmapper.convert(program, target)
            models += 1
            if target == "torch":
                assert model.code
            if call or target == "torch":
                model(*(fmapper.to_torch(INPUTS[name]) if target == "torch" else INPUTS[name]))
        except (fmapper.FmapperError, TypeError, ValueError, RuntimeError, KeyError):
            continue
    return models


def test_names_of_arrays_are_quoted_in_code(untouched):
    header, about, arrays = taken_apart("tiny_jax")
    program = load(written(header, about, arrays))
    for text in HOSTILE:
        name = f"a{text}"
        (array,) = program.parameters.values()
        inputs = [
            fmapper.programs.Input("parameter", name, "float32", (2,))
            if given.kind == "parameter"
            else given
            for given in program.inputs
        ]
        hostile = fmapper.programs.Program(
            program.graph, tuple(inputs), program.outputs, program.in_spec, program.out_spec,
            program.signature, {name: array}, name=text,
        )  # fmt: skip
        try:
            model = fmapper.convert(hostile, "torch")
        except fmapper.ConversionError:
            continue
        assert model(fmapper.to_torch(np.ones(2, np.float32)))["out"].tolist() == [1, 2]


def test_a_line_of_a_source_stays_a_comment(untouched):
    header, about, arrays = taken_apart("tiny_jax")
    for call in about["program"]["graph"]["graph"][1]:
        call["Call"][5] = f"x.py:1\r{fuzz_files.RUN}:1"
    with pytest.raises(untrusted.Misfit, match=r"graph.calls\[0\].source: .* is not a file and"):
        load(written(header, about, arrays))


def test_an_input_is_no_code(untouched):
    header, about, arrays = taken_apart("tiny_jax")
    text = json.dumps(about).replace('"x"', json.dumps(f"x={fuzz_files.RUN},**kw"))
    with pytest.raises(untrusted.Misfit, match=r"graph.inputs\[1\]: .* is not a name"):
        load(written(header, json.loads(text), arrays))


@pytest.mark.parametrize("given", [["mask"], {"map": [["mask", "a b"]]}, {"map": [["mask", 1]]}])
def test_what_is_filled_with_ones_is_named(given):
    header, about, arrays = taken_apart("tiny_jax")
    about["program"]["ones_like"] = given
    with pytest.raises(untrusted.Misfit, match="ones_like"):
        load(written(header, about, arrays))


# --- nothing is opened ----------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.skipif(os.name != "posix", reason="pipes and devices are of POSIX")
def test_files_that_a_program_names_are_not_opened(tmp_path):
    """In a process of its own, which would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    paths = [str(tmp_path / "pipe"), "/dev/zero", "/etc/passwd"]
    for i, path in enumerate(paths):
        header, about, arrays = taken_apart("tiny_jax")
        for call in about["program"]["graph"]["graph"][1]:
            call["Call"][5] = f"{path}:1"
        (tmp_path / f"{i}").write_bytes(written(header, about, arrays))
    code = f"""
import sys, fmapper, torch
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
for i, path in enumerate({paths!r}):
    model = fmapper.convert(fmapper.load_program({str(tmp_path)!r} + f"/{{i}}"), "torch")
    assert path in model.code and "root:" not in model.code
    assert path not in opened, opened
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes and devices are of POSIX")
def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / "link"):
        with pytest.raises(fmapper.ProgramFileError, match="is not a regular file"):
            fmapper.load_program(path)
    with pytest.raises(FileNotFoundError):
        fmapper.load_program(tmp_path / "nothing")


# --- bounds ---------------------------------------------------------------------------------------


def test_sizes_are_bounded():
    for text in ("9**9**9", "2**2**2**2**2**2", "9" * 30, "9*" * 100 + "9", "((9**9)**9)**9"):
        assert fmapper.programs.size_of(text, {"b": 3}) is None
    for text in ("(" * 10000, "-" * 100000 + "1", "1+" * 100000 + "1", "1" * 100000):
        assert fmapper.programs.size_of(text, {"b": 3}) is None
    for text, found in (("2*(b - 1)**2 % 5", 3), ("-b//2", -2), ("max(b, 2*b^2)", 18), ("b", 3)):
        assert fmapper.programs.size_of(text, {"b": 3}) == found


def test_polynomials_of_hostile_sizes_are_bounded():
    doubled = "b"
    for _ in range(24):
        doubled = f"max({doubled}, 1)*(b + c)"
    for text in (doubled, "(b + c)**50", "(b + c)**60 % 3", "1+" * 1000 + "b"):
        with no_hang():
            read = Polynomial.read(text)
            assert read == Polynomial.read(text)
            assert len(f"{read}") < 10_000


SIZES = st.recursive(
    st.sampled_from(["b", "c", "n", "1", "2", "7"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*%"), inner).map(lambda x: f"({' '.join(x)})"),
        st.tuples(st.sampled_from(["max", "min", "floordiv"]), inner, inner).map(
            lambda x: f"{x[0]}({x[1]}, {x[2]})"
        ),
        inner.map(lambda x: f"-({x})^2"),
    ),
    max_leaves=8,
)


@given(SIZES, SIZES, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_polynomials_calculate_as_sizes_do(one, other, b, c, n):
    names = {"b": b, "c": c, "n": n}
    for op in "+-*":
        made = {"+": operator.add, "-": operator.sub, "*": operator.mul}[op](
            Polynomial.read(one), Polynomial.read(other)
        )
        wanted = fmapper.programs.size_of(f"({one}) {op} ({other})", names)
        assert made == Polynomial.read(f"({one}) {op} ({other})")
        if made.number is not None and wanted is not None:
            assert made.number == wanted
    assert Polynomial.read(f"({one}) + ({other})") == Polynomial.read(f"({other}) + ({one})")
    if Polynomial.read(one) == Polynomial.read(other):
        values = [fmapper.programs.size_of(text, names) for text in (one, other)]
        assert None in values or values[0] == values[1]


@pytest.mark.parametrize("name", ["sizes_jax", "sizes_torch"])
def test_a_size_beyond_all_bounds_costs_nothing(name):
    header, about, arrays = taken_apart(name)
    text = json.dumps(about).replace('"2*c + 2*b"', '"9**9**9"').replace('"s27 + 2"', '"9**9**9"')
    with no_hang():
        fuzz_files.run_case(name, written(header, json.loads(text), arrays))


@pytest.mark.parametrize(
    "shape",
    [[2**30], [2**40], [2**20, 2**20], [2**62, 2**62], [2**62] * 64, [-1], [1] * 65, ["x y;"]],
)
def test_large_constants_are_computed_when_they_are_called_for(shape, tmp_path):
    """What is larger than any array is refused, what is large is not made at conversion."""
    for name, old in (("tiny_jax", '["shape", [2]]'), ("tiny_torch", "[2]")):
        header, about, arrays = taken_apart(name)
        first = about["program"]["graph"]["graph"][1][0]["Call"]
        assert first[1] in ("lax::iota", "aten::arange.start_step", "aten::arange.default")
        changed = json.dumps(first).replace(
            old, json.dumps(["shape", shape] if "sh" in old else shape)
        )
        about["program"]["graph"]["graph"][1][0]["Call"] = json.loads(changed)
        about["program"]["graph"]["graph"][1][0]["Call"][6] = [["float32", shape]]
        before = peak_memory()
        with no_hang():
            fuzz_files.run_case(name, written(header, about, arrays))
        assert peak_memory() - before < 200 * 2**20


def test_a_slice_of_a_large_constant_is_not_made_of_the_whole_at_conversion():
    header, about, arrays = taken_apart("tiny_jax")
    calls = about["program"]["graph"]["graph"][1]
    iota = calls[0]["Call"]
    wide = json.loads(json.dumps(iota).replace('["shape", [2]]', f'["shape", [{2**30}]]'))
    wide[0], wide[6] = "wide", [[iota[6][0][0], [2**30]]]
    limits = {"map": [["start_indices", [7]], ["limit_indices", [9]]]}
    cut = [iota[0], "lax::slice", [{"ref": "wide"}], limits, "", "", iota[6]]
    calls[:1] = [{"Call": wide}, {"Call": cut}]
    before = peak_memory()
    model = fmapper.convert(load(written(header, about, arrays)), "torch")
    assert peak_memory() - before < 200 * 2**20
    assert str(2**30) in model.code


def peak_memory() -> int:
    resource = pytest.importorskip("resource")
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


# --- one error ------------------------------------------------------------------------------------


def refused(data: bytes, tmp_path: Path, match: str | None = None) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(fmapper.ProgramFileError, match=match) as caught:
        fmapper.load_program(tmp_path / "file")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, fmapper.ConversionError)
    assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="elsewhere the file is written in full")
def test_arrays_larger_than_memory_are_not_read(tmp_path):
    header, about, arrays = taken_apart("tiny_jax")
    size = 1 << 39
    place = {"dtype": "U8", "shape": [size], "data_offsets": [len(arrays), len(arrays) + size]}
    for name, names in (("more", []), ("constant/more", ["more"])):
        changed = {**about, "constants": [*about["constants"], *names]}
        data = written({**header, name: place}, changed, arrays)
        with open(tmp_path / "file", "wb") as sparse:
            sparse.write(data)
            sparse.truncate(len(data) + size)
        if names:
            with pytest.raises(fmapper.ProgramFileError, match="memory"):
                fmapper.load_program(tmp_path / "file")
        else:  # nothing that the program names
            assert fmapper.load_program(tmp_path / "file").name == about["program"]["name"]


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path):
    data = FILES[0].read_bytes()
    for length in range(0, len(data), 7):
        refused(data[:length], tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a["program"].pop("graph"), "program: graph is missing"),
        (lambda a: a["program"].update(more=1), "a program has no 'more'"),
        (lambda a: a.pop("program"), "program: is not an object"),
        (lambda a: a.update(version=2), "newer fmapper"),
        (lambda a: a.update(version="1"), "has no version"),
        (lambda a: a.update(parameters=["nobody"]), r"parameters\[0\]: there is no array 'nobody'"),
        (lambda a: a.update(parameters=[]), r"program.inputs\[0\].target: there is no parameter"),
        (lambda a: a["program"].update(train=1), "program.train: 1 is not a bool"),
        (lambda a: a["program"].update(aliases={"map": [["b", "c"]]}), "program.aliases"),
        (
            lambda a: a["program"].update(in_spec={"TreeSpec": ["leaf"]}),
            "program.in_spec: is not a tuple",
        ),
        (
            lambda a: a["program"]["out_spec"].update(
                TreeSpec=["record", [], [], "A", [], [["x", [1]]]]
            ),
            r"program.out_spec.fixed\[0\]: .* is not a number, a string or None",
        ),
        (lambda a: a["program"].update(symbols={"map": [["b", [1, "x"]]]}), "program.symbols.b"),
        (lambda a: a["program"].update(name="\x1b[2J"), r"program.name: '\\x1b\[2J'"),
    ],
)
def test_errors_say_where(change, match, tmp_path):
    header, about, arrays = taken_apart("tiny_jax")
    change(about)
    refused(written(header, about, arrays), tmp_path, match)


def test_calls_are_checked_with_their_place(tmp_path):
    for at, value, match in (
        (0, "a b", "name: 'a b' is not a name"),
        (1, "os.system", "op: 'os.system' is not an operation"),
        (2, [{"ref": "nobody"}], r"args\[0\]: 'nobody' is used before it is defined"),
        (4, "a\nb", "module"),
        (5, "a", "source"),
        (6, [["object", []]], r"result\[0\].dtype: 'object' is not a dtype"),
        (
            6,
            [["float32", [2**50]]],
            r"result\[0\]\[0\]: 1125899906842624 is too large for an array",
        ),
    ):
        header, about, arrays = taken_apart("tiny_jax")
        about["program"]["graph"]["graph"][1][1]["Call"][at] = value
        refused(written(header, about, arrays), tmp_path, rf"program.graph.calls\[1\].{match}")


def test_json_is_bounded(tmp_path):
    header, about, arrays = taken_apart("tiny_jax")
    text = json.dumps(about)
    deep = written(header, about, arrays)
    for inner, match in (
        ("[" * 10**6, "nested too deeply"),
        ('"' + "\\" * 10**6, "is not JSON"),
        ("9" * 10**6, "too many digits"),
        (text.replace('"train"', '"train": false, "train"'), "has a key twice"),
        (text.replace('"train": false', '"train": NaN'), "NaN is not a number"),
        (text.replace('"train": false', '"train": "\\ud800"'), "half of a surrogate pair"),
    ):
        head = json.dumps({"__metadata__": {KEY: inner}, **header}).encode()
        with no_hang():
            refused(len(head).to_bytes(8, "little") + head + arrays, tmp_path, match)
    deep = b'{"a": ' + b"[" * 10**6
    refused(len(deep).to_bytes(8, "little") + deep, tmp_path, "nested too deeply")
    refused((2**62).to_bytes(8, "little") + deep, tmp_path, "header would be too long")


def test_a_bool_is_true_or_false(tmp_path):
    header, about, arrays = taken_apart("loops_jax")
    fmapper.save_program(load(written(header, about, arrays)), tmp_path / "file")
    header["constant/flag"] = {"dtype": "BOOL", "shape": [2], "data_offsets": [len(arrays)] * 2}
    header["constant/flag"]["data_offsets"][1] += 2
    about["constants"].append("flag")  # or it would not be read
    load(written(header, about, arrays + b"\0\1"))
    with pytest.raises(untrusted.Misfit, match="neither true nor false"):
        load(written(header, about, arrays + b"\0\2"))


def test_a_deep_stack_is_no_other_error(tmp_path):
    def down(depth: int) -> None:
        if depth:
            down(depth - 1)
        else:
            fmapper.load_program(FILES[0])

    for depth in range(10, sys.getrecursionlimit(), 10):
        try:
            down(depth)
        except fmapper.ProgramFileError:
            break
        except RecursionError:  # there was no room for the call itself
            break


@pytest.mark.nightly
def test_files_damaged_at_random():
    """A sample of what `nox -s fuzz_files` runs a million of."""
    command = [sys.executable, "-m", "sweeps.fuzz_files", "--count", "1500", "--seed", "20"]
    paths = (str(TESTS), os.environ.get("PYTHONPATH", ""))
    found = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert found.returncode == 0, found.stdout + found.stderr


# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="elsewhere nobody can tell whether a process lives")
def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path):
    program = fmapper.load_program(FILES[0])
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"net.{gone.pid}.tmp", f"net.{gone.pid}-123.tmp"):
        (tmp_path / name).write_bytes(b"half")
    kept = [
        f"net.{os.getppid()}.tmp",
        f"other.{gone.pid}.tmp",
        f"net.{gone.pid}.tmp.tmp",
        "net.x.tmp",
    ]
    for name in kept:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / f"net.{gone.pid}0.tmp").mkdir()
    fmapper.save_program(program, tmp_path / "net")
    assert sorted(os.listdir(tmp_path)) == sorted(["net", f"net.{gone.pid}0.tmp", *kept])
    fmapper.load_program(tmp_path / "net")


def test_a_model_is_not_a_program(tmp_path):
    with pytest.raises(TypeError, match=r"takes a Program, not a dict\. .* model\.save\(path\)"):
        fmapper.save_program({}, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_save_that_fails_leaves_nothing(tmp_path):
    program = fmapper.load_program(FILES[0])
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "full").touch()
    with pytest.raises(OSError, match="net"):
        fmapper.save_program(program, tmp_path / "net")
    assert os.listdir(tmp_path) == ["net"]
