"""Programs that are taken apart without being traced again: as torch's decompositions do it."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

from fmapper_adapters.jax.aten import table  # noqa: E402
from fmapper_adapters.torch.from_fx import decompositions, forms, gradient_ends, graph  # noqa: E402
from fmapper_adapters.torch.passes.static_sizes import find_remaining  # noqa: E402
from fmapper_adapters.torch.record import export  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch.export itself
x = torch.randn(2, 4, 6, 6)
F = torch.nn.functional


class Function(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.norm = torch.nn.BatchNorm2d(4)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def in_place(self: Any, x: Any) -> Any:
    y = self.norm(x)
    before = y * 2
    z = y.add_(x)
    between = z + y
    F.relu_(y)
    z.mul_(3)
    return before, between, y, z


def two_branches(self: Any, x: Any) -> Any:
    left, right = self.norm(x), x * 2
    left += right
    right /= left
    return left, right


def view_before(_: Any, x: Any) -> Any:
    y = x * 2
    seen = y.transpose(0, 1)
    y.add_(1)
    return seen


def view_of_one_name(_: Any, x: Any) -> Any:
    y = x * 2
    z = y.add_(1)
    seen = z[0]
    y.mul_(2)
    return seen


def unmarked_view_before(_: Any, x: Any) -> Any:
    y = x * 2
    same = F.dropout(y, 0.5, False)
    y.add_(1)
    return same, y


@torch.no_grad()
def without_gradients(_: Any, x: Any) -> Any:
    return x.sin().transpose(0, 1), x + 1


CASES: dict[str, Any] = {
    "arange": lambda _, x: x[0, 0, 0] * torch.arange(6) + torch.arange(1, 7),
    "filled": lambda _, x: (torch.zeros(3, 4, dtype=torch.int16), torch.ones(3), x),
    "constant": lambda _, x: x[0, 0, 0, :2] * torch.tensor([1.0, 2.0]),
    "dropout": lambda _, x: (F.dropout(x, 0.5, False) * 2, F.alpha_dropout(x + 1, 0.5)),
    "casts": lambda _, x: (x.double(), x.float(), x.to("cpu"), x.to(torch.int32), x.double() + 1),
    "type_as": lambda _, x: x.long().type_as(x),
    "transposed": lambda _, x: (x.transpose(1, -1), x[0, 0].t(), x.transpose(-3, 2)),
    "contiguous": lambda _, x: (x.contiguous(), x.transpose(1, 2).contiguous()),
    "reshaped": lambda _, x: (x.reshape(2, -1), x.transpose(1, 2).reshape(8, -1), x.flatten(1)),
    "flattened": lambda _, x: (x.transpose(1, 2).flatten(1, 2), x[0, 0, 0, 0].flatten()),
    "split": lambda _, x: (*x.chunk(3, 1), *x.split(4, -1), *x.split(3)),
    "squeezed": lambda _, x: (x[:, :1].squeeze(1), x[:1, :1].squeeze(), x.squeeze(1)),
    "stacked": lambda _, x: (torch.stack([x, x + 1], -1), torch.stack([x, x]), torch.stack([x], 2)),
    "chosen": lambda _, x: (torch.where(x > 0, x, 0.0), torch.where(x > 0, 1, x)),
    "chosen of ints": lambda _, x: (
        torch.where(x > 0, x.long(), 0.5),
        torch.where(x > 0, 0.5, x.long()),
    ),
    "logic": lambda _, x: ((x > 0) & (x < 1), (x > 0) | (x < -1)),
    "smaller": lambda _, x: (torch.min(x, x * 2), torch.max(x, x.long())),
    "subtracted": lambda _, x: (1 - x, 2.5 - x.long()),
    "normalised": lambda self, x: self.norm(x),
    "pooled": lambda _, x: (F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1, ceil_mode=True)),
    "detached": lambda _, x: x.detach() * x,
    "without gradients": without_gradients,
    "attention": lambda _, x: (
        F.scaled_dot_product_attention(x, x, x).transpose(1, 2).reshape(2, 6, -1)
    ),
    "in place": in_place,
    "in place, twice": two_branches,
    "in place, after dropout": unmarked_view_before,
    "returned as it is": lambda _, x: (x, x.contiguous(), x.float()),
}
LEFT: dict[str, Any] = {
    "in place on something else": lambda _, x: x.sin().add_(1),
    "in place on a view": lambda _, x: (x * 2).transpose(0, 1).mul_(2),
    "in place, of another dtype": lambda _, x: (x * 2).add_(x.double()),
    "in place, viewed": view_before,
    "in place, viewed by its other name": view_of_one_name,
    "in place on an input": lambda _, x: x.clone().add_(1) + x,
    "dropout": lambda _, x: F.dropout(x, 0.5, True),
    "complex": lambda _, x: torch.fft.fft(x),
    "taken apart otherwise": lambda _, x: F.instance_norm(x),
    "another memory format": lambda _, x: x.to(memory_format=torch.channels_last),
}


def recorded(function: Any, **options: Any) -> Any:
    module = Function(function).eval()
    exported = torch.export.export(module, (x,), strict=False, **options)
    gradient_ends.mark(exported)
    forms.drop_idle_dropout(exported)
    return exported


def other_forms(exported: Any) -> Any:
    return forms.other_forms(exported, chosen(exported))


def chosen(exported: Any) -> Any:
    return decompositions.choose(exported, table.lowers_whole({}))


def as_program(exported: Any, *others: Any) -> Any:
    whole = table.lowers_whole({})
    return graph.program(Function(None), exported, *others, train=False, whole=whole)


def operations(program: Any) -> list[Any]:
    """What is called with what, results by number; where values lie counts for nothing."""
    numbers: dict[str, Any] = {name: f"input {name}" for name in program.graph.inputs}
    rows: list[Any] = []
    for call in program.graph.calls:
        args = fmapper.programs.substitute(call.args, numbers)
        if call.op in ("aten::clone.default", "aten::contiguous.default"):
            numbers[call.name] = args[0]
            continue
        if call.op == "aten::view.default":
            args = (args[0], call.result[0][1])
        numbers[call.name] = f"result {len(rows)}"
        rows.append((call.op, repr(args), dict(call.kwargs), call.result, call.module))
    return [*rows, repr(fmapper.programs.substitute(program.graph.outputs, numbers))]


@pytest.mark.sampled(8)
@pytest.mark.nightly_cases("logic")
@pytest.mark.parametrize("name", CASES)
def test_as_the_decompositions_of_torch(name: str) -> None:
    direct, traced = (recorded(CASES[name]) for _ in range(2))
    others = other_forms(direct)
    assert others is not None
    traced = traced.run_decompositions(chosen(traced).table)
    program = as_program(direct, others)
    assert operations(program) == operations(as_program(traced))
    want = Function(CASES[name]).eval()(x)
    for target, given in (("jax", fmapper.to_jax(x)), ("torch", x.clone())):
        got = fmapper.to_torch(fmapper.convert(program, target)(given))
        exact = target == "torch"  # JAX has no 64 bits here
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, check_dtype=exact)


@pytest.mark.sampled(3)
@pytest.mark.nightly_cases("taken apart otherwise")
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_them(name: str) -> None:
    exported = recorded(LEFT[name])
    assert other_forms(exported) is None
    found = exported.run_decompositions(chosen(exported).table).module()(x)
    if name != "dropout":
        torch.testing.assert_close(found, Function(LEFT[name])(x), rtol=0, atol=0)


OF_ANY_SIZE: dict[str, Any] = {
    **{name: CASES[name] for name in CASES if name not in ("attention", "reshaped", "split")},
    "attention of any size": lambda _, x: (
        F.scaled_dot_product_attention(x, x, x).transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)
    ),
    "reshaped to any size": lambda _, x: (
        x.reshape(x.shape[0] * 2, -1),
        x.transpose(1, 2).reshape(-1, 4, 3, 2),
        x.flatten(1),
        x.flatten(2),
        x.flatten(0, 1),
        x.flatten(-3, -2),
    ),
    "split elsewhere": lambda _, x: (*x.chunk(3, 1), *x.split(4, -1)),
    "computed sizes": lambda _, x: (
        x.new_zeros(x.shape[2] + 1, x.shape[0] // 2),
        x[:, :, : x.shape[2] - 1],
        x * (x.shape[2] / 4),
    ),
}
ANY_SIZES = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC},)
LEFT_OF_ANY_SIZE: dict[str, Any] = {
    "split into parts that vary": lambda _, x: x.chunk(2, 2),
    "a size by a value": lambda _, x: torch.zeros(x[0, 0, 0, 0].long().abs().item()) + 1,
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_sizes_that_vary(name: str) -> None:
    exported = recorded(OF_ANY_SIZE[name], dynamic_shapes=ANY_SIZES)
    others = other_forms(exported)
    assert others is not None
    program = as_program(exported, others)
    for given in (x, torch.randn(3, 4, 9, 6)):
        want = Function(OF_ANY_SIZE[name]).eval()(given)
        for target, own in (("jax", fmapper.to_jax(given)), ("torch", given.clone())):
            got = fmapper.to_torch(fmapper.convert(program, target)(own))
            exact = target == "torch"  # JAX has no 64 bits here
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, check_dtype=exact)


def rows_that_are_added(_: Any, x: Any) -> Any:
    out = torch.zeros_like(x)
    for column in range(2):
        (rows,) = torch.where(x[:, column, 0, 0] > 0)
        out.index_add_(0, rows, x[rows] * 2)
    return out


def rows_that_are_put(_: Any, x: Any) -> Any:
    rows, columns = (x[..., 0, 0] > 0).nonzero(as_tuple=True)
    out = torch.zeros(x.shape)
    out[rows, columns] = x.sin().where(x > 0, x.cos())[rows, columns]
    out.add_(1)
    return out


def rows_that_are_added_in_place(_: Any, x: Any) -> Any:
    out = torch.zeros_like(x)
    for column in range(2):
        (rows,) = torch.where(x[:, column, 0, 0] > 0)
        before = out[rows]
        out[rows] += x[rows] * 2
        out[rows] *= before.cos()
    return out


BY_VALUES: dict[str, Any] = {
    "selected": lambda _, x: x[x > 0].sum(0),
    "rows that are added": rows_that_are_added,
    "rows that are added in place": rows_that_are_added_in_place,
    "rows that are put": rows_that_are_put,
    "rows that are flattened": lambda _, x: x[x[:, 0, 0, 0] > 0].flatten(1).sum(0),
    "rows that are reshaped": lambda _, x: x[x[:, 0, 0, 0] > 0].reshape(-1, 24, 6).sum(0),
    "rows that are chosen": lambda _, x: torch.where(x[x > 0] > 1, 0.5, x[x > 0]).sum(0),
    "rows that are stacked": lambda _, x: torch.stack([x[x > 0], x[x > 0] + 1]).sum(1),
    "rows that are pooled": lambda _, x: F.max_pool2d(x[x[:, 0, 0, 0] > 0], 2).sum(0),
    "a place of nothing": lambda _, x: torch.zeros(2).index_add(
        0, torch.where(x[0, 0, 0, 0] > 0)[0], torch.ones(1)[torch.where(x[0, 0, 0, 0] > 0)[0]]
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "a place of nothing" else pytest.mark.nightly)
        for name in BY_VALUES
    ],
)
def test_sizes_by_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Function(BY_VALUES[name]).eval()

    def decompose(*_: Any) -> Any:
        raise AssertionError("traced again")

    monkeypatch.setattr(export.output_order, "decompose", decompose)
    direct = export.export_program(module, (x,), {}, whole=table.lowers_whole({}))
    monkeypatch.undo()
    monkeypatch.setattr(forms, "other_forms", lambda *_: None)
    traced = export.export_program(module, (x,), {}, whole=table.lowers_whole({}))
    assert bool(find_remaining(direct)) == bool(find_remaining(traced))
    for given in (-x, x.abs()):
        for target, own in (("jax", fmapper.to_jax(given)), ("torch", given.clone())):
            got = fmapper.to_torch(fmapper.convert(direct, target)(own))
            exact = target == "torch"  # JAX has no 64 bits here
            torch.testing.assert_close(got, module(given), rtol=1e-5, atol=1e-5, check_dtype=exact)


@pytest.mark.parametrize("name", LEFT_OF_ANY_SIZE)
def test_what_is_left_to_them_where_sizes_vary(name: str) -> None:
    assert other_forms(recorded(LEFT_OF_ANY_SIZE[name], dynamic_shapes=ANY_SIZES)) is None


def test_the_way_of_convert() -> None:
    """That it is taken at all."""
    program = export.export_program(
        Function(CASES["transposed"]), (x,), {}, whole=table.lowers_whole({})
    )
    assert {call.op for call in program.graph.calls} >= {"aten::permute.default"}
