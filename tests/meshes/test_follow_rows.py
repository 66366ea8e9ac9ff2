"""Rows that operations of torch compute each from one row, by the rules for their dimensions."""

from __future__ import annotations

from typing import Any

import pytest

from fmapper.meshes import dimension_rule, follow_rows
from fmapper.programs import Call, Ref

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

X = torch.randn(5, 4, 6)
CUBE = torch.ones(4, 4, 3)
LAST = torch.ones(6)


def run(op: str, x: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    packet, _, overload = op.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")
    results = function(x, *args, **kwargs)
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def follow(op: str, x: Any, *args: Any, **kwargs: Any) -> list[int] | None:
    arrays = {"x": x}

    def named(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(named, value))
        if not isinstance(value, torch.Tensor):
            return value
        name = "x" if value is x else f"other_{len(arrays)}"
        arrays[name] = value
        return Ref(name)

    first, *others = map(named, ([x, x] if op == "cat" else x, *args))
    results = tuple(("", tuple(y.shape)) for y in run(op, [x, x] if op == "cat" else x, *args))
    op = op if "." in op else f"{op}.default"
    call = Call("y", f"aten::{op}", (first, *others), kwargs, "", "", results)
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    return follow_rows(call, shapes, {"x": 0}, dimension_rule(call.op))


KEPT = [
    ("mul.Tensor", LAST), ("relu",), ("clone",), ("full_like", 2.0),
    ("_softmax", -1, False), ("sum.dim_IntList", [-1], True), ("amax", [1, 2]), ("argmax", 1),
    ("any.dim", -1), ("all.dim", -1, True), ("max.dim", -1), ("min.dim", 1, True), ("sort", -1),
    ("topk", 2, -1), ("logsumexp", [2]), ("linalg_vector_norm", 2, [1]), ("var.correction", [1]),
    ("flip", [1]), ("glu", -1), ("roll", [1], [1]), ("cumsum", 1), ("cumprod", 2), ("cat", 1),
    ("split_with_sizes", [2, 4], -1), ("select.int", 1, 0), ("slice.Tensor", 1, 1, 3),
    ("unfold", 2, 3, 1), ("view", [5, 24]), ("view", [20, 6]), ("unsqueeze", 1),
    ("linear", torch.ones(3, 6)), ("matmul", torch.ones(6, 2)),
    ("native_layer_norm", [6], LAST, LAST, 0.1), ("native_group_norm", None, None, 5, 4, 6, 2, 0.1),
    ("convolution", CUBE, None, [1], [0], [1], False, [0], 1),
    ("bucketize.Tensor", LAST), ("avg_pool1d", [2]),
]  # fmt: skip
MIXED = [
    ("_softmax", 0, False), ("sum",), ("sum.dim_IntList", [0]), ("amax", [-3], True), ("argmax",),
    ("max.dim", 0, True), ("sort", 0), ("topk", 5, 0), ("logsumexp", [0, 1]), ("var", False),
    ("linalg_vector_norm",), ("flip", [0]), ("roll", [1]), ("roll", [1], [0]), ("cumsum", 0),
    ("cat", 0), ("split_with_sizes", [2, 3], 0), ("select.int", 0, 0), ("slice.Tensor", 0, 1, 3),
    ("unfold", 0, 2, 1), ("bmm", torch.ones(5, 6, 2)), ("mul.Tensor", torch.ones(5, 1, 1)),
    ("_native_batch_norm_legit.no_stats", None, None, True, 0.1, 0.1),
]  # fmt: skip


def name_of(case: Any) -> str:
    return (
        case if isinstance(case, str) else "-".join(str(x) for x in case if not hasattr(x, "ndim"))
    )


@pytest.mark.parametrize("case", KEPT, ids=name_of)
def test_a_row_of_the_result_depends_on_one_row(case: Any) -> None:
    op, *args = case
    kept = follow(op, X, *args)
    assert kept is not None
    assert {*kept} == {0}
    other = torch.cat([X[:3], torch.randn(2, 4, 6)])
    pair = [run(op, [x, x] if op == "cat" else x, *args) for x in (X, other)]
    for y, z in zip(*pair, strict=True):
        rows = len(y) * 3 // 5
        torch.testing.assert_close(y[:rows], z[:rows])


@pytest.mark.parametrize("case", MIXED, ids=name_of)
def test_rows_that_are_combined_or_ordered_are_not_followed(case: Any) -> None:
    op, *args = case
    assert follow(op, X, *args) is None


def test_rows_of_indices_are_rows_of_what_they_look_up() -> None:
    shapes = {"x": (5, 4), "at": (5, 2), "few": (3, 2), "row": (7,)}
    gather = "aten::gather.default"
    looked = Call("y", gather, (Ref("x"), 1, Ref("at")), {}, "", "", (("", (5, 2)),))
    rule = dimension_rule(gather)
    assert follow_rows(looked, shapes, {"x": 0, "at": 0}, rule) == [0]
    assert follow_rows(looked, shapes, {"x": 0}, rule) is None
    fewer = Call("y", gather, (Ref("x"), 1, Ref("few")), {}, "", "", (("", (3, 2)),))
    assert follow_rows(fewer, shapes, {"x": 0}, rule) is None
    assert follow_rows(fewer, shapes, {"few": 0}, rule) is None
    along = Call("y", gather, (Ref("x"), 0, Ref("at")), {}, "", "", (("", (5, 2)),))
    assert follow_rows(along, shapes, {"at": 0}, rule) == [0]
    assert follow_rows(along, shapes, {"x": 0, "at": 0}, rule) is None
    select = "aten::index_select.default"
    chosen = Call("y", select, (Ref("x"), 1, Ref("row")), {}, "", "", (("", (5, 7)),))
    assert follow_rows(chosen, shapes, {"x": 0}, rule) == [0]
    assert follow_rows(chosen, shapes, {"row": 0}, rule) == [1]


def test_rows_of_several_operands_must_meet() -> None:
    shapes = {"a": (5, 4), "b": (4, 5), "w": (4, 5)}
    product = Call("y", "aten::mm", (Ref("a"), Ref("w")), {}, "", "", (("", (5, 5)),))
    rule = dimension_rule(product.op)
    assert follow_rows(product, shapes, {"a": 0}, rule) == [0]
    assert follow_rows(product, shapes, {"w": 1}, rule) == [1]
    assert follow_rows(product, shapes, {"a": 0, "w": 1}, rule) is None
    assert follow_rows(product, shapes, {"w": 0}, rule) is None
    assert follow_rows(product, shapes, {"a": 0}, None) is None
