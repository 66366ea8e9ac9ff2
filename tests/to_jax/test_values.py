"""Modules whose way depends on the values of tensors, recorded for the values of the examples."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support import converting  # noqa: E402


def check_for_values(forward: Any, args: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    """Converts for some inputs; is right for them, and refuses those that lead elsewhere."""
    module = converting.Function(forward)
    found = fmapper.convert(module, "jax", args)
    given = [arg.numpy() for arg in args]
    converting.compare(found(*given), module(*args))
    with pytest.raises(fmapper.ProgramInputError, match="asserts"):
        found(*[arg.numpy() for arg in others])
    converting.compare(jax.jit(found)(*given), module(*args))


def patches(x: Any, grid: Any) -> Any:
    """As vision towers cut a row of patches into images, each of which attends to itself alone."""
    ends = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]).cumsum(0, dtype=torch.int32)
    ends = torch.nn.functional.pad(ends, (1, 0))
    sizes = (ends[1:] - ends[:-1]).tolist()
    found = [part.softmax(0) for part in torch.split(x, sizes)]
    rows = [torch.arange(h * w).reshape(h, w).sum() for _, h, w in grid.tolist()]
    return torch.cat(found), torch.stack(rows)


@pytest.mark.nightly
@pytest.mark.parametrize("grid", [[[1, 4, 4]], [[2, 2, 2], [1, 2, 4]]])
def test_sizes_and_numbers_that_python_reads(grid: Any) -> None:
    args = torch.randn(16, 3), torch.tensor(grid)
    check_for_values(patches, args, (args[0], torch.tensor([[1, 2, 8], [1, 4, 4]][: len(grid)])))


@pytest.mark.nightly
def test_sums_of_int32_whose_size_depends_on_values() -> None:
    def forward(x: Any, n: Any) -> Any:
        total = n[n > 0].to(torch.int32).sum(dtype=torch.int32)
        return (x * 2 if total > 3 else x), total

    args = torch.randn(3), torch.tensor([1, 0, 3])
    check_for_values(forward, args, (args[0], torch.tensor([1, 0, 1])))


QUESTIONS: dict[str, Any] = {
    "equal": lambda x, n: x + 1 if torch.equal(n, n.sort()[0]) else x,
    "allclose": lambda x, n: x + 1 if torch.allclose(n.float(), n.sort()[0].float()) else x,
    "contains": lambda x, n: x + 1 if 3 in n else x,
    "bool of an integer": lambda x, n: x + 1 if n[-1] - 2 else x,
    "int": lambda x, n: x.reshape(int(n[-1]), -1),
    "index": lambda x, n: [x + i for i in range(n[-1])],
}


@pytest.mark.nightly_cases("equal", "contains", "index")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", QUESTIONS)
def test_every_way_to_ask_for_a_value(name: str) -> None:
    args = torch.randn(6), torch.tensor([1, 2, 3])
    check_for_values(QUESTIONS[name], args, (args[0], torch.tensor([1, 0, 2])))


def put(x: Any, n: Any) -> Any:
    y = x.clone()
    y[n > 1] = x[:2] * 5
    y[n == 1] = 7.0
    return y


def assigned(x: Any, n: Any) -> Any:
    y = x.clone()
    y[n[0] : n[2]] = n[1]
    return y


SIZED: dict[str, Any] = {
    "tensors in lists": lambda x, n: (
        x[n > 1],
        torch.tensor([[n.max(), 2], [n[0] > 0, 3]]),
        torch.tensor([x[0], 1.5, n[0]]),
        torch.tensor([one > 1 for one in n]),
        torch.tensor([n[1], 3], dtype=torch.float16),
    ),
    "sizes": lambda x, n: torch.nn.functional.pad(x, (n[0], n[2])).reshape(n[0], 7),
    "bounds": lambda x, n: x[n[0] : n[2]].reshape(2),
    "bounds of what is assigned": assigned,
    "mask": lambda x, n: x[n > 1],
    "mask among others": lambda x, n: x[None, :, None][:, n > 1, 0],
    "mask of a matrix": lambda x, n: torch.outer(n, n)[torch.outer(n, n) > 3],
    "two masks": lambda x, n: torch.outer(x, x)[n > 1, n > 1],
    "assignment": put,
    "masked_select": lambda x, n: torch.outer(x, x).masked_select(n > 1),
    "nonzero": lambda x, n: (n - 1).nonzero(),
    "nonzero as a tuple": lambda x, n: torch.outer(n, n - 1).nonzero(as_tuple=True),
    "argwhere": lambda x, n: torch.argwhere(n - 1),
    "where": lambda x, n: torch.where(n > 1)[0] + torch.where(n > 1, 1, 0).sum(),
    "repeat_interleave": lambda x, n: x.repeat_interleave(n),
    "repeat_interleave in a dimension": lambda x, n: torch.outer(x, x).repeat_interleave(n, dim=-1),
    "repeat_interleave by one": lambda x, n: torch.repeat_interleave(x, n[1:2]),
    "repeat_interleave of indices": lambda x, n: torch.repeat_interleave(n),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SIZED)
def test_results_whose_size_depends_on_values_compile(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(x: Any, n: Any) -> Any:
        return SIZED[name](x * 2 if n[0] == 1 else x, n)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(torch.export, "draft_export", refuse)
    args = torch.randn(3), torch.tensor([1, 2, 3])
    check_for_values(forward, args, (args[0], torch.tensor([1, 1, 1])))


@pytest.mark.nightly
def test_a_module_that_calls_more_while_it_is_recorded() -> None:
    def forward(x: Any, n: Any) -> Any:
        if torch.compiler.is_compiling():
            n = n + (n > 0).sum() * 0
        counts = [int(i) for i in n]
        return torch.cat([x[:i].reshape(i, 1) for i in counts])

    args = torch.randn(6), torch.tensor([1, 2, 3])
    check_for_values(forward, args, (args[0], torch.tensor([1, 2, 4])))


class Regulator(torch.nn.Module):
    """Repeats each element as often as it says, as text is stretched to the length of speech."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Any) -> Any:
        counts = (x * self.scale).round().clamp(min=0).long()
        if counts.sum() == 0:
            counts[counts.sum(dim=1).eq(0)] = 1
        found = torch.zeros(2, counts.sum(dim=1).max())
        for i, (row, times) in enumerate(zip(x, counts, strict=True)):
            repeated = torch.repeat_interleave(row, times, dim=0)
            found[i, : repeated.size(0)] = repeated
        return found


@pytest.mark.nightly
def test_torch_may_record_a_way_that_the_examples_do_not_go() -> None:
    """`draft_export` asserts here that all counts are 0: its program fails for its own examples."""
    x = torch.tensor([[1.0, 0.0, 0.0], [2.0, 3.0, 1.0]])
    module = Regulator()
    found = fmapper.convert(module, "jax", (x,))
    converting.compare(found(x.numpy()), module(x))


class Experts(torch.nn.ModuleDict):
    """Chosen by names that are made of indices, and cast in `forward`, as transformers has them."""

    def __init__(self) -> None:
        super().__init__({f"expert_{i}": torch.nn.Linear(3, 3) for i in range(4)})

    def forward(self, x: Any) -> Any:
        found = torch.zeros_like(x)
        chosen = torch.argmax(x, dim=-1)
        for i in torch.bincount(chosen, minlength=4).nonzero():
            name = f"expert_{i[0]}"
            self[name] = self[name].to(torch.float32)
            rows = torch.where(chosen == i)[0]
            found.index_add_(0, rows, self[name](x[rows]))
        return found


@pytest.mark.nightly
def test_indices_in_the_names_of_modules() -> None:
    module = Experts()
    x = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [3.0, 1.0, 2.0]])
    found = fmapper.convert(module, "jax", (x,))
    converting.compare(found(x.numpy()), module(x))
    with pytest.raises(fmapper.ProgramInputError, match="asserts"):
        found(x.numpy()[:, ::-1])
    assert all(isinstance(p, torch.nn.Parameter) for p in module.parameters())


def test_lists_of_tensors_as_indices() -> None:
    def forward(x: Any, pairs: Any) -> Any:
        rows, columns = zip(*pairs, strict=True)
        y = x.clone()
        y[rows, columns] = 0
        return y, x[list(columns[:1]), 1:]

    args = torch.randn(3, 4), torch.tensor([[0, 1], [2, 3]])
    converting.check(forward, *args)


class LeavesOutWhatMasksNothing(torch.nn.Module):
    def forward(self, x: Any, mask: Any) -> Any:
        if not torch.compiler.is_compiling() and mask.all():
            mask = None
        for width in (4, 2):
            if mask is not None and mask.shape[0] != width:
                raise ValueError("the mask is of another size")
            x = x[:width] + (0 if mask is None else mask)
        return x


@pytest.mark.nightly
def test_what_fails_only_while_it_is_recorded_is_recorded_as_it_runs() -> None:
    args = torch.randn(4), torch.ones(4, dtype=torch.bool)
    module = LeavesOutWhatMasksNothing()
    found = fmapper.convert(module, "jax", args)
    given = [arg.numpy() for arg in args]
    converting.compare(found(*given), module(*args))
    with pytest.raises(fmapper.ProgramInputError, match="asserts"):
        found(given[0], np.array([True, False, True, True]))


@pytest.mark.nightly
def test_bounds_that_come_from_arrays_in_a_result_of_known_size() -> None:
    def forward(x: Any, n: Any) -> Any:
        return x[n[0] : n[0] + 2].reshape(2) * 3

    args = torch.randn(6), torch.tensor([1])
    model = fmapper.convert(converting.Function(forward), "jax", args)
    for at in (1, 3):
        given = torch.tensor([at])
        converting.compare(model(args[0].numpy(), given.numpy()), forward(args[0], given))


ASKED: dict[str, Any] = {
    "is_compiling": lambda x: torch.compiler.is_compiling(),
    "is_exporting": lambda x: torch.compiler.is_exporting(),
    "a fake tensor": lambda x: isinstance(x, torch._subclasses.FakeTensor),
}


@pytest.mark.nightly_cases("a fake tensor")
@pytest.mark.parametrize("name", ASKED)
def test_a_module_that_does_something_else_while_it_is_recorded(name: str) -> None:
    def forward(x: Any, mask: Any) -> Any:
        if not ASKED[name](mask) and mask.all():
            return x * 3
        return torch.where(mask, x, -x)

    fakes = type(torch._subclasses), torch.compiler.is_compiling
    args = torch.randn(3), torch.ones(3, dtype=torch.bool)
    check_for_values(forward, args, (args[0], torch.tensor([True, False, True])))
    assert fakes == (type(torch._subclasses), torch.compiler.is_compiling)


class Counting(torch.nn.Module):
    """Changes a buffer, and gives as many values as it has drawn above a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any, n: Any) -> Any:
        self.calls += 1
        return x[: int(n.max())] * self.calls


def test_looking_at_the_values_changes_nothing() -> None:
    module = Counting()
    seed = torch.get_rng_state()
    forward = module.forward
    converted = fmapper.convert(module, "jax", (torch.ones(4), torch.tensor([1, 3])))
    assert module.calls == 0
    assert module.forward == forward
    assert torch.equal(torch.get_rng_state(), seed)
    found = converted(np.ones(4, np.float32), np.array([1, 3]))
    np.testing.assert_array_equal(found, [1, 1, 1])
    assert module(torch.ones(4), torch.tensor([1, 3])).tolist() == [1, 1, 1]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", ["grad", "jacrev", "hessian"])
def test_torch_is_as_it_was_after_a_module_that_cannot_be_recorded(name: str) -> None:
    def nested(x: Any) -> Any:
        inner = getattr(torch.func, name)(lambda z: z.sin().sum())
        return torch.func.vmap(inner)(x * x.sum())

    with pytest.raises(fmapper.ConversionError):
        fmapper.convert(converting.Function(nested), "jax", (torch.ones(2, 3),))
    torch.randn(2)  # refused inside of torch.func.vmap
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():  # refused inside of torch.func.grad
        x.sin().sum().backward()
    torch.func.jvp(torch.sin, (x.detach(),), (x.detach(),))  # as inside of another


@pytest.mark.nightly
@pytest.mark.parametrize("start", [-3.0, 3.0])
def test_branches_on_floats_go_no_way_that_is_not_checked(start: float) -> None:
    def read(x: Any) -> Any:
        return x * 2 if x.sum().item() > 0 else x - 1

    def compared(x: Any) -> Any:
        return x * 2 if x.sum() > 0 else x - 1

    x = torch.full((3,), start)
    with pytest.raises(fmapper.ConversionError, match="compare the tensor"):
        fmapper.convert(converting.Function(read), "jax", (x,))
    check_for_values(compared, (x,), (-x,))


def test_tables_that_forward_makes_of_sizes_are_no_questions_about_values() -> None:
    def grid(x: Any) -> Any:
        sizes = torch.tensor([[1, x.shape[0], x.shape[1]]])
        places = [torch.arange(h * w) for _, h, w in sizes.tolist()]
        return x.flatten() * torch.cat(places)

    model = fmapper.convert(converting.Function(grid), "jax", (torch.ones(3, 2),))
    got = jax.jit(model)(2 * np.ones((3, 2), "float32"))
    np.testing.assert_array_equal(got, 2.0 * np.arange(6))


@pytest.mark.parametrize("way", ["index", "view", "alias", "sparse"])
def test_numbers_read_from_a_table_that_was_written_are_those_written(way: str) -> None:
    def table(x: Any) -> Any:
        known = torch.tensor([1, 2])
        part = known[:1]
        if way == "index":
            known[0] = x.sum().long()
            return x * known.tolist()[0]
        if way == "view":
            known += x.long()[:2]
            return x * part.item()
        if way == "sparse":  # it has no memory of its own
            torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.tensor([1.0]), (2, 2))
        part.copy_(x.long()[:1])
        return x * known[0].item()

    module, x = converting.Function(table), torch.tensor([3.0, 4.0, 5.0])
    model = fmapper.convert(module, "jax", (x,))
    np.testing.assert_array_equal(
        model(np.asarray([6, 7, 9], "float32")), module(x.new_tensor([6, 7, 9]))
    )


@pytest.mark.nightly
def test_sizes_that_are_tensors_given_by_name_are_fixed() -> None:
    def cropped(x: Any, mask: Any) -> Any:
        height, width = mask.sum(0)[0], mask.sum(1)[0]
        size = (height, width)
        return torch.nn.functional.interpolate(x, size=size, mode="bilinear", align_corners=True)

    module = converting.Function(cropped)
    x, mask = torch.randn(1, 2, 4, 4), torch.ones(3, 5, dtype=torch.int64)
    model = fmapper.convert(module, "jax", (x, mask), specialize=True)
    got = jax.jit(model)(x.numpy(), mask.numpy())
    np.testing.assert_allclose(got, module(x, mask), rtol=1e-5, atol=1e-6)
    with pytest.raises(fmapper.ProgramInputError):
        model(x.numpy(), np.ones((3, 5), "int64") * (np.arange(5) < 4))


class Pictures(torch.nn.Module):
    """Puts the features of pictures that are not empty in the places of a token."""

    def forward(self, ids, pixels):
        x = ids.unsqueeze(-1).float().expand(-1, -1, 2)
        flat = pixels.flatten(0, 1)
        real = (flat == 0).sum((-1, -2)) != flat.shape[1:].numel()
        real[0] |= ~torch.any(real)
        counts = real.view(pixels.shape[:2]).sum(1)
        features = [part.reshape(-1, 2) for part in flat[real].split(counts.tolist())]
        return x.masked_scatter((ids == 7).unsqueeze(-1), torch.cat(features)), features


@pytest.mark.nightly
def test_shapes_are_shapes_where_values_are_those_of_the_examples():
    pixels = torch.arange(1, 25.0).reshape(2, 3, 2, 2)
    pixels[0, 2] = pixels[1, 1:] = 0
    ids = torch.tensor([[7, 7, 7, 7, 1], [7, 7, 0, 1, 2]])
    model = fmapper.convert(Pictures(), "jax", (ids, pixels), specialize=True)
    found, features = jax.jit(model)(fmapper.to_jax(ids), fmapper.to_jax(pixels))
    want, parts = Pictures()(ids, pixels)
    np.testing.assert_array_equal(found, want)
    assert [part.shape for part in features] == [part.shape for part in parts] == [(4, 2), (2, 2)]
    other = pixels.clone()
    other[0, 1] = 0
    with pytest.raises(fmapper.ProgramInputError):
        model(fmapper.to_jax(ids), fmapper.to_jax(other))


class Decides(torch.nn.Module):
    """Decides by values; what it only refuses is no decision."""

    def forward(self, x: Any, n: Any) -> Any:
        assert (x > -9).all()
        if (n < 0).any():
            raise ValueError("n is to be positive")
        if x.sum() > 0:
            x = x + 1
        return x[: int(n)]


@pytest.mark.nightly
def test_code_that_decides_by_values_is_named_with_its_lines() -> None:
    module = Decides()
    x, n = torch.ones(4), torch.tensor(2)
    with pytest.warns(fmapper.ConversionWarning, match="asks for values of tensors") as caught:
        converted = fmapper.convert(module, "jax", (x, n))
    (message,) = (str(one.message) for one in caught)
    lines = [line.partition(": ")[2] for line in message.splitlines()[1:]]
    assert lines == ["if x.sum() > 0:", "return x[: int(n)]"]
    with pytest.raises(fmapper.ProgramInputError, match=r"test_values.py:\d+: its code took the"):
        converted(-x.numpy(), n.numpy())
    with pytest.raises(fmapper.ProgramInputError, match="reads there is 2 for the examples"):
        converted(x.numpy(), np.array(3))


class DecidesByANumber(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 1 if x.sum().item() > 0.5 else x


def test_a_decision_that_cannot_be_recorded_is_refused_with_its_line() -> None:
    with pytest.raises(fmapper.ConversionError, match=r"test_values.py:\d+: return x \+ 1") as e:
        fmapper.convert(DecidesByANumber(), "jax", (torch.ones(3),))
    assert "zuf" not in str(e.value)


def test_sizes_in_errors_are_those_of_inputs() -> None:
    class Larger(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x if max(x.shape[0], 3) % 7 == 4 else x + 1

    converted = fmapper.convert(Larger(), "jax", (torch.ones(4, 2),), dynamic_shapes=["b, _"])
    with pytest.raises(
        fmapper.ProgramInputError, match=r"x: expected shape \(_, 2\), got \(4, 3\)"
    ):
        converted(np.ones((4, 3), "float32"))
    with pytest.raises(fmapper.ProgramInputError, match=r"x.shape\[0\] is 5: .* \(\(max\(3, x.sh"):
        converted(np.ones((5, 2), "float32"))
