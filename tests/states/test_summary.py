"""Seeing a tree: rows, totals, ties, and what is printed."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmapper
from fmapper import KeyPath, functor, summary

np = pytest.importorskip("numpy")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


@functor(trainable=("w",))
class Block:
    def __init__(self, w: Any = None, eps: float = 1e-5) -> None:
        self.w = np.ones((2, 3), np.float32) if w is None else w
        self.scale = np.ones(3)
        self.eps = eps


def rows(tree: Any) -> dict[str, Any]:
    return {str(row.path): row for row in summary(tree).rows}


def lines(tree: Any, **options: Any) -> list[str]:
    return [line.rstrip() for line in str(summary(tree, **options)).splitlines()]


def test_rows_say_what_is_where() -> None:
    found = rows({"block": Block(), "n": np.arange(4, dtype=np.int16), "name": "x", "none": None})
    assert list(found) == ["", "block", "block.w", "block.scale", "block.eps", "n", "name", "none"]
    w = found["block.w"]
    assert (w.cls, w.shape, w.dtype, w.device) == ("ndarray", (2, 3), "float32", "numpy:cpu")
    assert (w.nbytes, w.trainable, w.same_as) == (24, True, None)
    assert found["block.scale"].trainable is False
    assert found["n"].trainable is False
    assert (found["block"].cls, found["block"].nbytes, found["block"].shape) == ("Block", 48, None)
    assert found["block"].trainable is None
    assert found[""].nbytes == 56
    assert found["name"].note == "'x'"


def test_totals_by_device_and_dtype(torch: Any) -> None:
    w = np.ones(3, np.float32)
    made = summary([w, w, np.ones(2, np.float32), np.ones(1), torch.ones(5, device="meta")])
    assert made.totals == {
        ("numpy:cpu", "float32"): (2, 5, 20),
        ("numpy:cpu", "float64"): (1, 1, 8),
        ("torch:meta", "float32"): (1, 5, 20),
    }
    assert made.nbytes == 48


def test_repeats_point_at_the_first_place_and_are_not_entered() -> None:
    shared = Block()
    tree: dict[str, Any] = {"a": [shared], "b": shared, "w": shared.w}
    tree["me"] = tree
    found = rows(tree)
    assert found["b"].same_as == KeyPath("a", 0)
    assert found["w"].same_as == KeyPath("a", 0, "w")
    assert found["me"].same_as == KeyPath()
    assert "b.w" not in found
    assert found[""].nbytes == found["a"].nbytes == 48
    text = "\n".join(lines(tree))
    assert "Block, same as model.a[0]" in text
    assert "ndarray, same as model.a[0].w" in text
    assert "dict, same as model\n" in text


def test_numbers_are_no_repeats() -> None:
    assert [row.same_as for row in summary([1, 1, "a", "a", None, None, (), ()]).rows] == [None] * 9


def test_views_take_no_memory_of_their_own(torch: Any) -> None:
    w = torch.ones(4, 2)
    found = summary({"w": w, "t": w.T, "row": w[0]})
    by_path = {str(row.path): row for row in found.rows}
    assert by_path["t"].view_of == by_path["row"].view_of == KeyPath("w")
    assert (found.nbytes, by_path["t"].nbytes) == (32, 0)
    assert found.totals == {("torch:cpu", "float32"): (3, 8, 32)}
    assert "Tensor, view of model.w" in str(found)


def test_like_items_are_folded_and_the_first_shown() -> None:
    tree = {"layers": [Block() for _ in range(12)], "pair": [Block(), Block()]}
    printed = lines(tree)
    (folded,) = [line for line in printed if ".." in line]
    assert folded.split() == ["│", "└─", "[0..11]", "12", "x", "Block", "576", "B"]
    assert sum("w " in line and "ndarray" in line for line in printed) == 3
    assert len(summary(tree).rows) == 3 + 12 * 4 + 1 + 2 * 4 - 1
    unfolded = lines(tree, fold=False)
    assert sum("Block" in line for line in unfolded) == 14


@pytest.mark.parametrize(
    "odd",
    [Block(np.ones((2, 4), np.float32)), Block(np.ones((2, 3))), Block(eps=1.0), np.ones(1), 3],
    ids=["shape", "dtype", "value", "class", "number"],
)
def test_what_differs_is_not_folded(odd: Any) -> None:
    like = [Block() for _ in range(3)]
    text = "\n".join(lines([*like, odd, *(Block() for _ in range(3))]))
    assert "[0..2]" in text
    assert "[4..6]" in text


def test_ties_and_trained_parts_are_not_folded_away() -> None:
    block = Block()
    text = "\n".join(lines([block, Block(), Block(), Block(), block]))
    assert "[0..3]" in text
    assert "Block, same as model[0]" in text
    one, two = np.ones(1), np.ones(1)
    text = "\n".join(lines([[one], [two], [one], [two], [one]]))
    assert ".." not in text


def test_depth_and_rows() -> None:
    tree = {"a": [Block()], "b": Block()}
    printed = lines(tree, depth=1)
    assert [line.split()[1] for line in printed[2:4]] == ["a", "b"]
    assert "list (1 inside)" in printed[2]
    assert "Block (3 inside)" in printed[3]
    assert not any("eps" in line for line in printed)
    printed = lines([{"x": i} for i in range(100)], max_rows=5, fold=False)
    assert "... cut after 5 lines: 201 rows in all" in printed
    assert len([line for line in printed if "─" in line]) == 4
    exact = lines([1, "a"], max_rows=3)
    assert not any("cut" in line for line in exact)
    assert "model  dict (2 inside)" in lines(tree, depth=0)[1]


def test_depth_costs_no_more_than_size() -> None:
    tree: Any = [np.ones(1)]
    for _ in range(20_000):
        tree = [tree]
    made = summary(tree, max_rows=3)
    assert len(made.rows) == 20_002
    assert "cut after 3" in str(made)


def test_torch_modules(torch: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    net[0].bias.requires_grad_(False)
    found = rows(net)
    trained = {path for path, row in found.items() if row.trainable}
    assert trained == {"[0].weight", "[1].weight", "[1].bias"}
    assert (found["[0].weight"].cls, found["[0].weight"].nbytes) == ("Parameter", 24)
    assert found["[1]"].cls == "BatchNorm1d"
    assert "; 12 numbers trained" in str(summary(net))


def test_odd_arrays_do_not_crash_it(torch: Any, jax: Any) -> None:
    deleted = jax.numpy.ones(2)
    deleted.delete()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = {
            "key": jax.random.key(0),
            "scalar": np.float32(3),
            "bool": np.True_,
            "object": np.array([None]),
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "csc": torch.eye(3).to_sparse_csc(),
            "quantized": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "jagged": torch.nested.nested_tensor(
                [torch.ones(2), torch.ones(3)], layout=torch.jagged
            ),
            "lazy": torch.nn.LazyLinear(2),
            "deleted": deleted,
            "shape": jax.ShapeDtypeStruct((2,), "float32"),
            "generator": torch.Generator(),
            "function": len,
        }
        found = rows(tree)
        text = str(summary(tree))
    sizes = {path: row.nbytes for path, row in found.items()}
    assert (sizes["key"], sizes["scalar"], sizes["shape"]) == (8, 4, 8)
    assert sizes["sparse"] == 3 * 2 * 8 + 3 * 4
    assert sizes["csr"] == sizes["csc"] == 4 * 8 + 3 * 8 + 3 * 4
    assert sizes["quantized"] == 3
    assert "deleted" in found["deleted"].note
    assert "no values yet" in found["lazy.weight"].note
    assert all(key in text for key in tree)


def test_a_tracer_is_seen_inside_of_jit(jax: Any) -> None:
    seen = []

    @jax.jit
    def step(x: Any) -> Any:
        seen.append(summary({"x": x}))
        return x

    step(jax.numpy.ones(3))
    assert seen[0].rows[1].shape == (3,)


def test_a_forgotten_functor_is_seen_and_no_error() -> None:
    class Undeclared:
        def __init__(self) -> None:
            self.w = np.ones(1)

    (_, row) = summary([Undeclared()]).rows
    assert row.note == "holds arrays but is not a functor"
    assert "Undeclared: holds arrays but is not a functor" in str(summary([Undeclared()]))


def test_it_prints_keys_as_they_are_and_html_for_notebooks() -> None:
    tree = {"[red]x[/red]": np.ones(2), "<b>": "<script>"}
    assert "['[red]x[/red]']" in str(summary(tree))
    html = summary(tree)._repr_html_()
    assert html.startswith("<pre")
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert "[red]x[/red]" in html
    assert repr(summary(tree)) == str(summary(tree))


def test_one_leaf_is_a_tree_too() -> None:
    assert summary(3).rows[0].note == "3"
    assert summary(np.ones(2)).nbytes == 16
    assert lines(np.ones(2))[1].split()[:2] == ["model", "ndarray"]


def test_long_values_are_cut() -> None:
    assert len(summary("x" * 1000).rows[0].note) == 40


@st.composite
def trees(draw: st.DrawFn) -> Any:
    pool: list[Any] = []

    def grow(depth: int) -> Any:
        if pool and draw(st.integers(0, 3)) == 0:
            return draw(st.sampled_from(pool))
        kind = draw(st.integers(0, 3 if depth else 1))
        new: Any
        if kind == 0:
            new = np.zeros(draw(st.integers(0, 3)), draw(st.sampled_from(["f4", "i2"])))
        elif kind == 1:
            return draw(st.sampled_from([1, "a", None]))
        elif kind == 2:
            new = [grow(depth - 1) for _ in range(draw(st.integers(0, 6)))]
        else:
            new = {key: grow(depth - 1) for key in draw(st.lists(st.sampled_from("abc")))}
        pool.append(new)
        return new

    return grow(3)


@pytest.mark.nightly
@given(trees())
@settings(max_examples=200)
def test_rows_are_the_places_and_bytes_are_the_arrays(tree: Any) -> None:
    made = summary(tree)
    for row in made.rows:
        thing = fmapper.get_path(tree, row.path)
        assert row.cls == type(thing).__name__
        if row.same_as is not None:
            assert fmapper.get_path(tree, row.same_as) is thing
    once = {id(x): x for x in fmapper.fcollect(tree) if isinstance(x, np.ndarray)}
    assert made.nbytes == made.rows[0].nbytes == sum(x.nbytes for x in once.values())
    firsts = [row for row in made.rows if row.same_as is None]
    nodes_and_leaves = fmapper.fcollect(tree)
    assert len(firsts) >= len({id(x) for x in nodes_and_leaves if isinstance(x, list | dict)})
    counted = sum(total.numbers for total in made.totals.values())
    assert counted == sum(math.prod(x.shape) for x in once.values())
    unfolded = str(summary(tree, fold=False, max_rows=10_000)).splitlines()
    footer = len(made.totals) + 1
    assert len(unfolded) == 1 + len(made.rows) + footer
