"""What a notebook shows: aligned HTML in which everything is escaped, and pictures."""

import html
import importlib
import pickle
import re
import sys

import pytest

import fmapper

np = pytest.importorskip("numpy")

NASTY = "<script>alert('x')</script>[bold]&amp;"


@fmapper.functor(repr=True)
class Net:
    def __init__(self, **parts):
        self.__dict__.update(parts)


def text_of(shown):
    """The lines that a browser shows of HTML, which must be `pre` and `span` alone."""
    made = shown._repr_html_()
    assert made.startswith("<pre style=")
    assert set(re.findall(r"</?(\w+)", made)) <= {"pre", "span"}
    return [line.rstrip() for line in html.unescape(re.sub(r"<[^>]+>", "", made)).splitlines()]


def net():
    w = np.ones((2, 3))
    made = Net(layers=[Net(w=np.ones(2)) for _ in range(12)], head=Net(w=w, tied=w), name=NASTY)
    made.me = made
    return made


def test_a_summary_and_a_plan_show_what_they_print():
    tree = {NASTY: np.ones(2)}
    for shown in (fmapper.summary(tree), fmapper.plan(fmapper.to_numpy, tree)):
        assert "\n".join(text_of(shown)).strip() == str(shown).strip()
        assert "<script>" in str(shown)
        assert "<script>" not in shown._repr_html_()


def test_devices_are_a_list_that_is_shown_as_a_table():
    found = fmapper.devices()
    assert isinstance(found, list)
    lines = text_of(found)
    assert lines[0].split() == ["device", "backend", "kind", "index"]
    assert "numpy:cpu" in {line.split()[0] for line in lines[1:]}
    assert len(lines) == 1 + len(found)


def test_columns_are_aligned():
    lines = text_of(fmapper.devices())
    at = lines[0].index("backend")
    assert all(line[at - 1] == " " and line[at] != " " for line in lines)


def test_a_functor_prints_as_a_tree_if_it_is_asked_to():
    text = repr(net())
    assert "[0..11]  12 x Net" in text
    assert "same as model.head.w" in text
    assert "Net, same as model" in text, "a cycle ends"
    assert "\n".join(text_of(net())) == text

    @fmapper.functor
    class Plain:
        pass

    assert repr(Plain()).startswith("<")
    assert not hasattr(Plain, "_repr_html_")


def test_a_large_functor_is_cut():
    lines = repr(Net(**{f"w{i}": np.ones(i) for i in range(100)})).splitlines()
    assert len(lines) < 46
    assert "... cut after 40 lines: 101 rows in all" in lines


def test_a_class_that_is_not_ones_own_can_print_as_a_tree():
    class Theirs:
        def __init__(self):
            self.w = np.ones(2)

        def __repr__(self):
            return "theirs"

    fmapper.functor(Theirs, children=("w",), repr=True)
    assert "ndarray" in repr(Theirs())
    with pytest.raises(fmapper.DeclarationError, match="repr=True"):
        fmapper.functor(Theirs, children=("w",))


def models():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    pytest.importorskip("flax")
    module, x = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()), torch.ones(4, 2)

    def line(params, x):
        return jax.numpy.tanh(x @ params["w"])

    yield fmapper.convert(module, "jax", (x,))
    yield fmapper.convert(module, "flax", (x,))
    yield fmapper.convert(module, "linen", (x,))
    yield fmapper.convert((line, {"w": np.ones((2, 3), np.float32)}), "torch", (x,))


@pytest.mark.nightly
def test_models_and_programs_show_what_they_compute_and_hold():
    kinds = []
    for model in models():
        text = "\n".join(text_of(model))
        kinds.append(type(model).__name__)
        assert "float32 [4, 2]" in text
        assert ("aten::linear" in text) != ("lax::tanh" in text)
        assert "(2, 3)" in text or "(3, 2)" in text
        assert "trained" in text
    assert kinds == ["JaxModel", "FlaxModel", "LinenModel", "TorchModel"]
    program = next(models()).as_program()
    text = text_of(program)
    assert text[0] == "Sequential"
    assert "parameters  2" in [line.rstrip() for line in text]


# --- reports and pictures -----------------------------------------------------------------------


@pytest.fixture
def agg():
    matplotlib = pytest.importorskip("matplotlib")
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    yield pyplot
    pyplot.close("all")
    matplotlib.use(before)


def reports():
    torch = pytest.importorskip("torch")
    pytest.importorskip("jax")
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    x = torch.ones(4, 2)
    model = fmapper.convert(module, "jax", (x,))
    bias = model.params["2.bias"] + 1
    wrong = model.replace(params={**model.params, "2.bias": bias})
    for one in (model, wrong):
        yield fmapper.verify(module, one, x, layers=True)


@pytest.mark.nightly
def test_a_report_by_layer_has_the_layers_in_order():
    good, bad = reports()
    assert [one.path for one in good.layers] == ["0", "1", "2"]
    assert all(one.ok for one in good.layers)
    assert good
    assert [one.ok for one in bad.layers] == [True, True, False]
    assert bad.layers[2].error == pytest.approx(1, rel=1e-4)
    assert not bad
    assert bad.first.path.startswith("in 2: ")
    text = text_of(bad)
    assert text[0] == "0 of 1 outputs agree"
    assert any(re.match(r"2 +1\.00e\+00 +\d.*differs$", line) for line in text)
    assert pickle.loads(pickle.dumps(bad)) == bad


@pytest.mark.nightly
def test_a_report_draws_its_layers(agg):
    good, bad = reports()
    axes = bad.plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "largest difference / largest element"
    assert "2 of 3 agree, 2 differs most" in axes.get_label()
    assert axes.get_label().endswith("beyond what is allowed are 2.")
    low, high = axes.get_xlim()
    (allowed,) = axes.get_lines()
    assert all(low < limit < high for limit in allowed.get_xdata())
    figure, given = agg.subplots()
    assert good.plot(given) is given
    figure.canvas.draw()
    with pytest.raises(fmapper.ConversionError, match=r"verify\(\.\.\., layers=True\)"):
        fmapper.Report(good.outputs).plot()


def test_a_plan_draws_memory_by_part_and_device(agg):
    tree = {"encoder": [np.ones(1 << 17), np.ones(1 << 17)], "head": np.ones(1 << 16), "n": 3}
    axes = fmapper.plan(fmapper.to_numpy(copy=True), tree).plot()
    assert axes.get_xlabel() == "new memory in MiB"
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "model.encoder",
        "model.head",
    ]
    assert [bar.get_width() for bar in axes.patches] == [2.0, 0.5]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["numpy:cpu"]
    assert axes.get_label().endswith("by part: model.encoder 2 MiB, model.head 0.5 MiB.")
    deeper = fmapper.plan(fmapper.to_numpy(copy=True), tree).plot(depth=2)
    names = ["model.encoder[0]", "model.encoder[1]", "model.head"]
    assert [label.get_text() for label in deeper.get_yticklabels()] == names


def test_a_plan_in_which_nothing_moves_draws_nothing(agg):
    axes = fmapper.plan(fmapper.to_numpy, {"w": np.ones(2)}).plot()
    assert axes.get_label().endswith("by part: none.")
    axes.figure.canvas.draw()


def test_without_matplotlib_an_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(fmapper.BackendUnavailableError, match="Install it: pip install"):
        fmapper.plan(fmapper.to_numpy, {}).plot()
