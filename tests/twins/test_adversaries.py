"""`transfer` where names lie or say nothing: nothing is sure that only one witness says."""

import numpy as np
import pytest

import fmapper

torch = pytest.importorskip("torch")


def with_values(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def tower():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


class Critics(torch.nn.Module):
    """Two towers of equal shapes, whose names say nothing."""

    def __init__(self, first, second):
        super().__init__()
        self.names = first, second
        for name in sorted(self.names):
            self.add_module(name, tower())

    def forward(self, x):
        return tuple(getattr(self, name)(x) for name in self.names)


def test_outputs_are_compared_in_their_order():
    source, x = with_values(Critics("a", "b")), torch.randn(3, 4)
    for inputs in (None, (x,)):
        filled, _ = fmapper.transfer(source, Critics("d", "c"), example_inputs=inputs)
        for mine, theirs in zip(source(x), filled(x), strict=True):
            assert torch.allclose(mine, theirs)


class Towers(torch.nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.names = first, second
        for name in sorted(self.names):
            self.add_module(name, tower())

    def forward(self, x, y):
        first, second = (getattr(self, name) for name in self.names)
        return first(x) + second(y)


class OtherArguments(Towers):
    def forward(self, query, document):
        return super().forward(query, document)


def test_models_of_several_inputs_are_not_called_with_guesses():
    source = with_values(Towers("a", "b"))
    with pytest.raises(fmapper.AmbiguousTransferError):
        fmapper.transfer(source, Towers("d", "c"))


def test_the_order_of_inputs_is_not_guessed():
    source = with_values(Towers("a", "b"))
    with pytest.raises(fmapper.AmbiguousTransferError):
        fmapper.transfer(source, OtherArguments("d", "c"))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    filled, _ = fmapper.transfer(source, OtherArguments("d", "c"), example_inputs=(x, y))
    assert torch.allclose(source(x, y), filled(x, y))


class Exchanged(Towers):
    def forward(self, document, query):
        return super().forward(query, document)


@pytest.mark.parametrize("target", [OtherArguments, Exchanged])
def test_inputs_tell_the_roles_of_equal_towers(target):
    source, given = with_values(Towers("a", "b")), (torch.randn(3, 4), torch.randn(3, 4))
    order = given if target is OtherArguments else given[::-1]
    filled, report = fmapper.transfer(
        source, target("d", "c"), example_inputs=given, target_inputs=order
    )
    assert torch.allclose(source(*given), filled(*order))
    matrices = [array for array in report.arrays if "weight" in array.targets[0]]
    assert all("role" in array.witnesses for array in matrices)


class BothWays(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 3, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.lstm(x)[0]


class TwoCells(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ahead, self.back = torch.nn.LSTMCell(3, 3), torch.nn.LSTMCell(3, 3)

    def forward(self, x):
        return torch.cat([run(self.ahead, x), run(self.back, x.flip(1)).flip(1)], -1)


def run(cell, x):
    state = x.new_zeros(2, len(x), 3).unbind()
    states = [state := cell(x[:, at], state) for at in range(x.shape[1])]
    return torch.stack([hidden for hidden, _ in states], 1)


def test_terms_of_one_sum_are_told_apart_by_their_names():
    source, x = with_values(BothWays()), torch.randn(2, 4, 3)
    filled, report = fmapper.transfer(source, TwoCells(), example_inputs=(x,))
    assert torch.allclose(source(x), filled(x), atol=1e-6)
    assert torch.equal(filled.back.bias_hh, source.lstm.bias_hh_l0_reverse)
    assert "Sum(" not in str(report.rules)


class OfRank(torch.nn.Module):
    def __init__(self, name, ndim):
        super().__init__()
        self.name, self.ndim = name, ndim
        self.add_module(name, torch.nn.Sequential(tower(), torch.nn.Linear(1, 3)))

    def forward(self, x):
        assert x.ndim == self.ndim
        return getattr(self, self.name)(x)


@pytest.mark.parametrize("ranks", [(3, 2), (2, 3)])
def test_one_side_takes_a_batch_and_the_other_does_not(ranks):
    source = with_values(OfRank("a", ranks[0]))
    x = torch.randn(1, 5, 4)
    mine, theirs = (x if ndim == 3 else x[0] for ndim in ranks)
    for inputs in ({"example_inputs": mine, "target_inputs": theirs}, {}):
        filled, report = fmapper.transfer(source, OfRank("b", ranks[1]), **inputs)
        assert report.proved
        assert torch.equal(filled(theirs).squeeze(), source(mine).squeeze())


class Wider(Critics):
    def forward(self, x):
        first, second = super().forward(x)
        return first, second.expand(-1, 2)


def test_each_output_has_its_shape_on_the_other_side():
    source = with_values(Critics("a", "b"))
    with pytest.raises(fmapper.TransferError, match="have other shapes"):
        fmapper.transfer(source, Wider("d", "c"), example_inputs=(torch.randn(3, 4),))


class Glu(torch.nn.Module):
    def __init__(self, curved, straight, **more):
        super().__init__()
        self.names, self.more = (curved, straight), more
        for name in sorted(self.names):
            self.add_module(name, torch.nn.Linear(4, 4))

    def forward(self, x):
        first, second = (getattr(self, name) for name in self.names)
        return torch.tanh(first(x)) * torch.sigmoid(second(x))


class Masked(Glu):
    def forward(self, batch, *, gain):
        return super().forward(batch["x"] * gain)


class OtherMasked(Masked):
    pass


def test_names_that_lie_are_not_believed_alone():
    source, x = with_values(Glu("gate", "filter")), torch.randn(3, 4)
    filled, report = fmapper.transfer(
        source,
        Masked("filter", "gate"),
        example_inputs=(x,),
        target_inputs=({"x": x},),
        target_kwargs={"gain": 1.0},
    )
    assert torch.equal(filled.filter.weight, source.gate.weight)
    assert report.proved
    masked = with_values(Masked("gate", "filter"))
    with pytest.raises(fmapper.AmbiguousTransferError):  # no inputs are guessed for such models
        fmapper.transfer(masked, OtherMasked("filter", "gate"))


class Kernel(torch.nn.Module):
    """A weight with the name that it has in Flax, and torch's layout."""

    def __init__(self):
        super().__init__()
        self.kernel = torch.nn.Parameter(torch.zeros(4, 4))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.kernel)


def test_a_layout_that_a_name_promises_is_checked():
    source, x = with_values(Kernel()), torch.randn(3, 4)
    target = torch.nn.Linear(4, 4, bias=False)
    filled, _ = fmapper.transfer(source, target)
    assert torch.allclose(filled(x), source(x))


def test_another_activation_is_named_without_inputs_too():
    source = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    target = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.SiLU(), torch.nn.Linear(3, 2))
    before = {name: array.clone() for name, array in target.state_dict().items()}
    with pytest.raises(fmapper.TransferError, match=r"first difference is at 1: .*sigmoid.*inputs"):
        fmapper.transfer(source, target)
    assert all(torch.equal(array, before[name]) for name, array in target.state_dict().items())


def test_weights_that_outputs_do_not_depend_on_need_two_other_witnesses():
    """Zeros show nothing of the weights that they are multiplied by."""
    source, target = with_values(Glu("gate", "filter")), OtherGlu("filter", "gate")
    with pytest.raises(fmapper.AmbiguousTransferError):
        fmapper.transfer(source, target, example_inputs=(torch.zeros(3, 4),))


class OtherGlu(Glu):
    pass


def test_infinite_outputs_are_not_called_random():
    class Roots(torch.nn.Linear):
        def forward(self, x):
            return torch.sqrt(-super().forward(x).square() - 1)

    with pytest.raises(fmapper.TransferError, match="infinities or NaN"):
        fmapper.transfer(Roots(3, 2), Roots(3, 2), example_inputs=np.ones((1, 3), "f4"))


class Routed(torch.nn.Module):
    """Each row goes to one of two experts of equal shape; a call may leave one without a row."""

    def __init__(self, first, second):
        super().__init__()
        self.names = first, second
        self.router = torch.nn.Linear(3, 2)
        for name in sorted(self.names):
            self.add_module(name, torch.nn.Linear(3, 3))

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for at, name in enumerate(self.names):
            rows = chosen == at
            if rows.any():
                out[rows] = getattr(self, name)(x[rows])
        return out


class OtherRouted(Routed):
    pass


def test_experts_without_a_row_are_not_paired_by_names_that_lie():
    source, target = with_values(Routed("e1", "e2")), OtherRouted("e2", "e1")
    with pytest.raises(fmapper.TransferError, match=r"e[12]"):  # unsure, or another role
        fmapper.transfer(source, target, example_inputs=(torch.ones(1, 3),))


def test_experts_with_rows_are_paired_though_names_lie():
    source, target = with_values(Routed("e1", "e2")), OtherRouted("e2", "e1")
    filled, _ = fmapper.transfer(source, target, example_inputs=(torch.randn(50, 3),))
    x = torch.randn(20, 3)
    assert torch.allclose(filled(x), source(x))


class Attention(torch.nn.Module):
    """Attention without a projection of its values, with the elements of heads together."""

    heads, size = 2, 3
    axes = 0, 2, 1, 3  # of (rows, positions, heads, elements)

    def __init__(self):
        super().__init__()
        self.q, self.k = torch.nn.Linear(5, 6), torch.nn.Linear(5, 6)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, self.size).permute(*self.axes)

    def forward(self, x):
        return (self.split(self.q(x)) @ self.split(self.k(x)).mT).softmax(-1) @ x[:, None]


class HeadsInside(Attention):
    heads, size = 3, 2
    axes = 0, 3, 1, 2


def test_heads_are_turned_in_queries_and_keys_together():
    source, x = with_values(Attention()), torch.randn(2, 4, 5)
    filled, report = fmapper.transfer(source, HeadsInside(), example_inputs=(x,))
    assert report.proved
    assert torch.allclose(source(x), filled(x), atol=1e-6)


class Normalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.tanh(self.norm(self.first(x)))


def test_statistics_have_roles_where_names_say_nothing():
    jax = pytest.importorskip("jax")

    def normalised(p, x):
        y = (x @ p["c0"] + p["c1"] - p["c2"]) * jax.lax.rsqrt(p["c3"] + 1e-5)
        return jax.numpy.tanh(y * p["c5"] + p["c4"])

    source, x = with_values(Normalised()).eval(), torch.randn(3, 5)
    target = {f"c{i}": np.ones(shape, "f4") for i, shape in enumerate([(5, 4), *[(4,)] * 5])}
    (_, filled), _ = fmapper.transfer(source, (normalised, target), example_inputs=(x,))
    wanted = source(x).detach().numpy()
    np.testing.assert_allclose(normalised(filled, x.numpy()), wanted, atol=1e-5)


class Queries(Attention):
    """Queries that are learned, which no input leads to before the attention."""

    def __init__(self, names="abc"):
        super().__init__()
        self.names = names
        for name in sorted(names):
            self.add_module(name, torch.nn.Linear(5, 5))
        self.learned = torch.nn.Parameter(torch.zeros(4, 5))

    def forward(self, x):
        first, second, third = (getattr(self, name) for name in self.names)
        queries = third(torch.tanh(second(first(self.learned.expand(len(x), -1, -1)))))
        return super().forward(queries + x)


def test_learned_queries_have_roles():
    source, x = with_values(Queries()), torch.randn(2, 4, 5)
    filled, report = fmapper.transfer(source, Queries("cab"), example_inputs=(x,))
    assert report.proved
    assert torch.allclose(source(x), filled(x), atol=1e-6)


class Opaque(Critics):
    """Two towers whose calls cannot be recorded."""

    def forward(self, x):
        return super().forward(torch.from_numpy(x.detach().numpy()))


def test_outputs_that_differ_are_not_believed_where_nothing_can_be_recorded():
    source, x = with_values(Opaque("a", "b")), torch.randn(3, 4)
    with pytest.raises(fmapper.TransferError, match="outputs differ, and the operations of Opaque"):
        fmapper.transfer(source, Opaque("b", "a"), example_inputs=(x,))


class Numbered(torch.nn.Module):
    """Layers of one shape, called in an order that their numbers do not say."""

    def __init__(self, *order):
        super().__init__()
        self.order = order
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in order)

    def forward(self, x, y):
        for at in self.order:
            x = torch.tanh(self.layers[at](x))
        return x * y


class OtherNumbered(Numbered):
    pass


def test_layers_are_not_paired_by_their_numbers_alone():
    source, x, y = with_values(Numbered(0, 1, 2)), torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(fmapper.AmbiguousTransferError, match="but no second witness agrees"):
        fmapper.transfer(source, OtherNumbered(2, 1, 0))
    filled, _ = fmapper.transfer(source, OtherNumbered(2, 1, 0), example_inputs=(x, y))
    assert torch.equal(filled.layers[0].weight, source.layers[2].weight)
    assert torch.allclose(filled(x, y), source(x, y))


class Chosen(Numbered):
    """One of the layers, as of experts."""

    def forward(self, x, at):
        return self.layers[self.order[at]](x)


class OtherChosen(Chosen):
    pass


def test_each_layer_is_proved_by_outputs_that_depend_on_it():
    source, target = with_values(Chosen(0, 1, 2)), OtherChosen(0, 2, 1)
    with pytest.raises(fmapper.AmbiguousTransferError, match=r"layers\.\{i\}\.weight"):
        fmapper.transfer(source, target, example_inputs=(torch.randn(2, 4), 0))


def test_each_layer_of_a_stack_is_proved_by_outputs_that_depend_on_it():
    pytest.importorskip("jax")

    def stacked(params, x, at):
        return x @ params["kernel"][at] + params["bias"][at]

    source = with_values(Chosen(0, 1, 2))
    target = {"kernel": np.zeros((3, 4, 4), "f4"), "bias": np.zeros((3, 4), "f4")}
    inputs = torch.randn(2, 4), 0
    with pytest.raises(fmapper.AmbiguousTransferError, match="kernel"):
        fmapper.transfer(source, (stacked, target), example_inputs=inputs)
