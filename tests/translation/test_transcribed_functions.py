"""Functions in files that are transcribed: their own derivatives, rows of a mask, and errors."""

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from fmapper_translate.libraries import infrastructure as library  # noqa: E402


def make(made):
    """The model of a file, with the weights of the source."""
    space = {}
    exec(made.code, space)
    exec(f"def make(rngs):\n    return {made.example}", space)
    twin = space["make"](nnx.Rngs(0))
    return space["load_weights"](twin, {name: x.numpy() for name, x in made.weights.items()})


def rounded(x):
    return torch.round(x)


class Rounded(torch.autograd.Function):
    """Rounds, with three times the gradient of the identity within a width."""

    @staticmethod
    def forward(ctx, x, width, scale):
        ctx.save_for_backward(x)
        ctx.width = width
        return rounded(x.clamp(-width, width)) * scale

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
        return gradient * (x.abs() < ctx.width) * 3, None, (gradient * rounded(x)).sum()


class Net(nn.Module):
    def __init__(self, width=2.0):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.width = width

    def forward(self, x):
        return Rounded.apply(3 * self.layer(x), self.width, self.scale)


def test_a_derivative_of_the_sources_own_is_that_of_the_file():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 4)
    made = transcribe(model, (x,))
    assert "class Rounded(Function):" in made.code
    assert "        (x,) = ctx.saved_tensors" in made.code
    twin, x_jax = make(made), jnp.array(x)
    assert jnp.allclose(twin(x_jax), model(x).detach().numpy(), atol=1e-5)
    model(x).square().sum().backward()
    slopes = nnx.grad(lambda twin: (twin(x_jax) ** 2).sum())(twin)
    np.testing.assert_allclose(slopes.layer.kernel[...].T, model.layer.weight.grad, rtol=1e-4)
    np.testing.assert_allclose(slopes.scale[...], model.scale.grad, rtol=1e-4)


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Dirty(nn.Module):
    def forward(self, x):
        return Marked.apply(x * 1)


def test_what_a_context_has_beyond_tensors_is_refused():
    with pytest.raises(NotTranscribed, match="mark_dirty of the context"):
        transcribe(Dirty(), (torch.ones(2),))


@pytest.mark.nightly
def test_no_mask_of_a_library_is_left_out_for_its_values():
    masks = pytest.importorskip("transformers.masking_utils")
    x, ones = torch.ones(2, 3, 4), torch.ones(2, 3)
    assert masks.create_recurrent_attention_mask(None, x, ones) is None
    with library.masks_traced():
        assert masks.create_recurrent_attention_mask(None, x, ones).shape == (2, 3)
    assert masks.create_recurrent_attention_mask(None, x, ones) is None


@pytest.mark.nightly
def test_a_mask_that_may_not_be_left_out_is_made():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.FalconConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    model, ids = transformers.FalconModel(config).eval(), torch.arange(6)[None]
    made = transcribe(model, (ids,))
    expected = model(ids).last_hidden_state.detach().numpy()
    twin = make(made)
    twin.eval()
    assert jnp.allclose(twin(jnp.array(ids)).last_hidden_state, expected, atol=1e-5)
    assert not made.fallen


class Masked(nn.Module):
    """Computes the rows under a mask."""

    def __init__(self):
        super().__init__()
        self.layer, self.token = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x):
        y, mask = x.clone(), x[..., 0] > 0
        y[mask] = self.layer(x[mask])
        y[x[..., 1] > 0] = self.token
        y[mask] += 2 * y[mask]
        return y


class Mixed(Masked):
    """Rows depend on each other."""

    def forward(self, x):
        y, mask = x.clone(), x[..., 0] > 0
        rows = self.layer(x[mask])
        y[mask] = rows - rows.mean(0)
        return y


class Picked(Masked):
    """The number of rows depends on values."""

    def forward(self, x):
        return self.layer(x[x[..., 0] > 0])


class Counted(Masked):
    """Computes with indices."""

    def forward(self, x):
        (rows,) = torch.where(x[:, 0] > 0)
        return torch.bincount(rows, minlength=len(x))


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(0)
    return torch.randn(2, 5, 4)


def test_rows_under_a_mask_are_as_many_as_a_compiled_file_can_have(batch):
    model = Masked()
    made = transcribe(model, (batch,))
    assert "y = y.at[nonzero(mask)].set(self.layer(x.at[nonzero(mask)]" in made.code
    assert not made.fallen
    run = nnx.jit(lambda model, x: model(x))
    for x in (batch, -batch, batch.abs(), -batch.abs()):  # all rows, and none
        expected = model(x).detach().numpy()
        np.testing.assert_allclose(run(make(made), jnp.array(x)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Mixed, "give something else"), (Picked, "give something else"), (Counted, "bincount")],
)
def test_rows_that_do_more_than_go_to_their_places_are_refused(kind, reason, batch):
    with pytest.raises(NotTranscribed, match=reason):
        transcribe(kind(), (batch[0],))


def test_rows_that_no_example_leaves_out_are_refused(batch):
    with pytest.raises(NotTranscribed, match="all elements of the mask hold"):
        transcribe(Masked(), (batch.abs(),))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


class Listed(nn.Module):
    """Experts as repositories write them; some have no rows."""

    def __init__(self, experts=7):
        super().__init__()
        self.gate = nn.Linear(4, experts)
        self.experts = nn.ModuleList([Expert() for _ in range(experts)])

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, nth = torch.where(chosen == i)
            if token.numel() == 0:
                continue
            out[token] += weights[token, nth, None] * expert(flat[token])
        return out.view(x.shape)


class Hit(nn.Module):
    """Experts as libraries write them: a loop over those that have rows."""

    def __init__(self, experts=9):
        super().__init__()
        self.router = nn.Linear(4, experts)
        self.expert = nn.Parameter(torch.randn(experts, 4, 4))
        self.experts = experts

    def part(self, rows, w):
        return nn.functional.gelu(rows @ w)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        with torch.no_grad():
            mask = nn.functional.one_hot(chosen, num_classes=self.experts).permute(2, 1, 0)
            hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
        out = torch.zeros_like(x)
        for row in hit:
            place, token = torch.where(mask[row[0]])
            rows = self.part(x[token], self.expert[row[0]])
            out.index_add_(0, token, rows * weights[token, place, None])
        return out


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [Listed, Hit])
def test_experts_compute_the_rows_that_chose_them(kind, batch):
    torch.manual_seed(1)
    model, x = kind(), batch[0, :3]
    made = transcribe(model, (x,))
    proof = made.prove(model, (x,))
    assert proof, str(proof)
    for x in (batch[1], 3 * batch[0]):
        expected = model(x).detach().numpy()
        np.testing.assert_allclose(make(made)(jnp.array(x)), expected, atol=1e-5)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, ids):
        try:
            x = self.table(ids[:, 0])
            x += self.table(ids[:, 1])
        except IndexError as error:
            raise IndexError("numbers are below 5") from error
        return x * 2


def test_an_error_that_is_another_one_stays_so():
    model, ids = Table(), torch.tensor([[1, 2], [3, 4]])
    made = transcribe(model, (ids,))
    assert (
        "            x += self.table(ids[:, 1])\n        except IndexError as error:\n" in made.code
    )
    assert not made.fallen
    np.testing.assert_allclose(make(made)(jnp.array(ids)), model(ids).detach().numpy(), atol=1e-6)


SQUARES = {"once": lambda x: x}


def square(x):
    return x**2


SQUARES["square"] = square


class Powers(nn.Module):
    def __init__(self, kind="square"):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return SQUARES[self.kind](x)


def test_functions_of_a_table_are_the_sources():
    made = transcribe(Powers(), (torch.ones(2),), ((), {}))
    assert "def square(x):" in made.code
    assert float(make(made)(jnp.array(3.0))) == 9


def slow(x):
    return x + 1


SCALES = {"whole": 1.0, "half": 0.5}


class Lazy(nn.Module):
    """Names functions that it does not call, and tries a table."""

    def __init__(self, kind="half"):
        super().__init__()
        self.kind, self.kernel = kind, slow
        make = self.default
        if kind != "default":
            make = self.scale
        try:
            self.factor = make(kind)
        except KeyError:
            self.factor = 1.0

    def default(self, kind):
        return 1.0

    def scale(self, kind):
        return SCALES[kind]

    def forward(self, x):
        return x * self.factor


def test_functions_that_no_example_calls_raise_if_they_are_called():
    made = transcribe(Lazy(), (torch.ones(2),), (("half",), {}))
    assert "self.kernel = kind, not_written" in made.code
    assert "        except KeyError:\n            self.factor = 1.0" in made.code
    twin = make(made)
    assert float(twin(jnp.array(3.0))) == 1.5
    with pytest.raises(NotImplementedError):
        twin.kernel(jnp.ones(2))


@pytest.mark.nightly
def test_arguments_are_found_for_a_model_that_computes_in_another_way():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    model, ids = transformers.BertModel(config).eval(), torch.arange(6)[None]
    assert config._attn_implementation == "sdpa"  # files have the attention of the source
    made = transcribe(model, (ids,))
    expected = model(ids).last_hidden_state.detach().numpy()
    twin = make(made)
    twin.eval()
    assert jnp.allclose(twin(jnp.array(ids)).last_hidden_state, expected, atol=1e-5)
