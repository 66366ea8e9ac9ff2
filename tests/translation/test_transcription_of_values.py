"""Transcribed models whose course depends on values of tensors, or on random numbers."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")
pytest.importorskip("flax")

from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402

from fmapper_translate import NotTranscribed, transcribe  # noqa: E402


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)


def model_of(made, source):
    """Returns the model of a file with the weights of its source, in evaluation."""
    space = {}
    exec(made.code, space)
    model = eval(made.example, space | {"rngs": nnx.Rngs(0)})
    space["load_weights"](model, {name: x.numpy() for name, x in source.state_dict().items()})
    model.eval()
    return model


class Chooses(Layered):
    def forward(self, x):
        x = self.fc(x)
        if self.training:  # noqa: SIM102
            if not torch.isfinite(x).all():
                top = torch.finfo(x.dtype).max - 1000
                x = torch.clamp(x, min=-top, max=top)
        if x.sum() > 0 and x.max() > 0.5:
            x = x / x.sum()
            y = x * 2
        else:
            y = x - 1
            y += 3
        return y


def test_a_condition_on_a_tensor_decides_when_the_model_runs():
    torch.manual_seed(0)
    source, ones = Chooses(), torch.ones(2, 3)
    made = transcribe(source, (ones,))  # of which only one side has run
    model = model_of(made, source)
    assert "jax.lax.cond(condition, lambda: jnp.clip(x, -top, top), lambda: x)" in made.code
    results = []
    for scale in (1.0, -3.0, 5.0):
        results.append(source(ones * scale).detach())
        assert jnp.allclose(model(jnp.ones((2, 3)) * scale), results[-1].numpy(), atol=1e-6)
    assert {bool(abs(y.sum() - 2) < 1e-5) for y in results} == {True, False}  # both sides


class Calls(Layered):
    def forward(self, x):
        for _ in range(2):
            skips = False
            if self.training:
                skips = torch.rand([]) < 0.5
            if not skips:
                x = self.fc(x)
        if x.sum() > 0:
            x = self.fc(x)
        return x


def test_layers_that_a_drawn_number_skips_run_and_are_chosen():
    source, ones = Calls().eval(), torch.ones(2, 3)
    made = transcribe(source, (ones,))
    assert not made.only_evaluation
    assert "x = jnp.where(condition, self.fc(x), x)" in made.code
    model = model_of(made, source)
    for scale in (1.0, -3.0):
        results = model(jnp.ones((2, 3)) * scale)
        assert jnp.allclose(results, source(ones * scale).detach().numpy(), atol=1e-6)
    model.train()
    assert len({float(model(jnp.ones((2, 3))).sum()) for _ in range(20)}) > 1


class Normalises(Layered):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        if self.fc(x).sum() > 0:
            x = self.norm(x)
        return x


class Keeps(Layered):
    def forward(self, x):
        best = None
        for i in range(3):
            if x.sum() > i:
                best = x + i
        return x if best is None else best


class Counts(Layered):
    def forward(self, x):
        return self.fc(x) * int(x.sum() > 0)


class Scales(Layered):
    def forward(self, x):
        return self.fc(x) * x.sum().item()


class Loops(Layered):
    def forward(self, x):
        while x.sum() < 100:
            x = x * x + 1
        return self.fc(x)


class Leaves(Layered):
    def forward(self, x):
        return self.fc(x) * float(x.detach().numpy().max())


@pytest.mark.parametrize("kind", [Normalises, Keeps, Counts, Scales, Loops, Leaves])
def test_a_value_of_a_tensor_never_becomes_a_constant(kind):
    with pytest.raises(NotTranscribed, match=f"{kind.__name__}.forward"):
        transcribe(kind(), (torch.ones(2, 3),))


class Skips(Layered):
    def forward(self, x):
        """Skips its layer at times."""
        if self.training and random.random() < 0.5:
            return x
        return self.fc(x)


def test_a_file_refuses_training_that_draws_numbers_in_python():
    source = Skips().eval()
    made = transcribe(source, (torch.ones(2, 3),))
    assert "random.random()" in made.only_evaluation
    model = model_of(made, source)
    assert jnp.allclose(model(jnp.ones((2, 3))), source(torch.ones(2, 3)).detach().numpy())
    model.train()
    with pytest.raises(NotImplementedError, match=r"for evaluation alone: Skips\.forward"):
        model(jnp.ones((2, 3)))


def random_columns(shape, share):
    """Returns a mask of columns."""
    count = max(int(share * shape[1] + np.random.rand()), 1)
    mask = np.zeros(shape, dtype=bool)
    mask[:, np.random.choice(shape[1], count, replace=False)] = True
    return mask


class Masked(Layered):
    def forward(self, x):
        if self.training:
            mask = random_columns(tuple(x.shape), share=0.5)
            x = x.masked_fill(torch.from_numpy(mask), 0.0)
        return self.fc(x)


def test_a_function_that_draws_with_numpy_runs_each_time():
    source, x = Masked(), torch.ones(2, 3)
    made = transcribe(source.eval(), (x,))
    assert not made.only_evaluation
    model = model_of(made, source)
    source.train()
    model.train()
    run, results = nnx.jit(lambda model, x: model(x)), []
    run(model, x.numpy())
    for seed in range(6):
        np.random.seed(seed)
        results.append(source(x).detach().numpy())
        np.random.seed(seed)
        assert np.allclose(run(model, x.numpy()), results[-1], atol=1e-6)
    assert len({float(y.sum()) for y in results}) > 1


class Asks(Layered):
    def forward(self, x, mask=None):
        if mask is not None and mask.any().item():
            if mask.dim() == 1:  # noqa: SIM108
                x = x.masked_fill(mask[:, None], 0.0)
            else:
                x = x.masked_fill(mask, 0.5)
        return self.fc(x)


def test_a_condition_on_values_within_others_decides_when_the_model_runs():
    torch.manual_seed(0)
    source, x = Asks().eval(), torch.randn(2, 3)
    none, some, rows = torch.zeros(2, 3).bool(), x > 0, torch.tensor([True, False])
    made = transcribe(source, [(x, some), (x, none), (x, rows), (x,)])
    assert not made.fallen
    model = model_of(made, source)
    for masks in ((some,), (none,), (rows,), (~rows,), ()):
        ours = model(x.numpy(), *(mask.numpy() for mask in masks))
        assert jnp.allclose(ours, source(x, *masks).detach().numpy(), atol=1e-5)


class Masks(Layered):
    def forward(self, x):
        order = torch.rand(2, 3).argsort(dim=1)
        return self.fc(x).gather(1, order), order


def test_functions_that_draw_are_the_sources_though_each_call_gives_something_else():
    made = transcribe(Masks(), [(torch.ones(2, 3),)])  # of this size alone
    assert not made.fallen
    assert "jax.random.uniform(self.rngs.noise(), (2, 3))" in made.code


class Remembers(Layered):
    """Keeps a table for each number of rows."""

    def __init__(self):
        super().__init__()
        self._tables = {}

    def table(self, x):
        if self.training:
            return self.fc.weight[: len(x)]
        key = str(len(x))
        if key not in self._tables:
            self._tables[key] = self.fc.weight[: len(x)] * 2
        return self._tables[key]

    def forward(self, x):
        return self.fc(x) + self.table(x)


def test_what_calls_keep_by_a_key_is_computed_in_each_call():
    source, x = Remembers().eval(), torch.randn(2, 3)
    made = transcribe(source, [(x,), (x[:1],)])
    assert not made.fallen
    assert not made.only_evaluation
    assert "tables = self.fc.kernel[...].T[: len(x)] * 2\n        return tables" in made.code
    assert "key = str" not in made.code
    model = model_of(made, source)
    for rows in (2, 1):
        ours = nnx.jit(lambda model, x: model(x))(model, x[:rows].numpy())
        assert jnp.allclose(ours, source(x[:rows]).detach().numpy(), atol=1e-5)
