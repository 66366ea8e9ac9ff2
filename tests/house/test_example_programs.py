"""The programs in examples/: the same numbers on every backend and in loops written by hand."""

import importlib.util
import io
import itertools
import pickle
import sys
import tarfile
from pathlib import Path

import pytest

import fmapper
from fmapper import fmap, to_jax, to_numpy, to_torch

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
random = pytest.importorskip("fmapper.random")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def program(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


rnn = program("rnn_sine")
cnn = program("cifar_cnn")
agent = program("actor_critic")


# --- rnn_sine -------------------------------------------------------------------------------------


def rnn_arguments():
    inputs, targets = rnn.series()
    return rnn.ContextRNN(random.key(0)), list(inputs), list(targets), np.zeros((1, 6))


def plain_torch_trace(epochs, lr=0.1):
    """The same training as a torch user writes it, with nothing of fmapper but the weights."""
    fresh = rnn.ContextRNN(random.key(0))
    w1 = torch.tensor(fresh.w1, requires_grad=True)
    w2 = torch.tensor(fresh.w2, requires_grad=True)
    wave = torch.sin(torch.linspace(2, 10, 21, dtype=torch.float64)).reshape(-1, 1, 1)
    trace = []
    for _ in range(epochs):
        context = torch.zeros(1, 6, dtype=torch.float64)
        total = 0.0
        for x, y in itertools.pairwise(wave):
            context = torch.tanh(torch.cat((x, context), 1).mm(w1))
            loss = (context.mm(w2) - y).pow(2).sum() / 2
            total += loss.item()
            loss.backward()
            w1.data -= lr * w1.grad.data
            w2.data -= lr * w2.grad.data
            w1.grad.data.zero_()
            w2.grad.data.zero_()
            context = context.detach()
        trace.append(total)
    return trace


@pytest.mark.nightly
def test_the_recurrent_network_learns_the_same_on_torch_jax_and_by_hand():
    epochs = 200
    model, trace = rnn.train(*fmap(to_torch, rnn_arguments()), epochs=epochs)
    np.testing.assert_allclose(trace, plain_torch_trace(epochs), rtol=1e-10)
    with jax.enable_x64(True):
        there = fmap(to_jax, rnn_arguments())
        other, jax_trace = rnn.train(*there, epochs=epochs, compile=True)
        assert other.w1.dtype == "float64"
        other = fmap(to_numpy, other)
    np.testing.assert_allclose(jax_trace, trace, rtol=1e-5)
    assert trace[-1] < trace[0] / 10
    _, inputs, targets, context = rnn_arguments()
    ours = rnn.predictions(fmap(to_numpy, model), inputs, context)
    theirs = rnn.predictions(other, inputs, context)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert np.abs(ours - np.ravel(targets)).mean() < 0.15


def test_the_step_of_the_recurrent_network_is_recorded_once():
    calls = []

    def loss_of(*args):
        calls.append(args)
        return rnn.loss_of(*args)

    def step(model, x, context, y, lr):
        (loss, context), gradient = fmapper.value_and_grad(loss_of, has_aux=True)(
            model, x, context, y
        )
        return fmap(lambda p, g: p - lr * g, model, gradient), context, loss

    update = fmapper.jit(step)
    with jax.enable_x64(True):
        model, inputs, targets, context = fmap(to_jax, rnn_arguments())
        for x, y in zip(inputs, targets, strict=True):
            model, context, _ = update(model, x, context, y, 0.1)
    assert len(calls) == 1


def test_the_recurrent_network_predicts_the_same_on_all_backends():
    fresh, inputs, _, context = rnn_arguments()
    expected = rnn.predictions(fresh, inputs, context)
    there = rnn.predictions(*fmap(to_torch, (fresh, inputs, context)))
    np.testing.assert_allclose(there, expected, rtol=1e-12)
    with jax.enable_x64(True):
        there = rnn.predictions(*fmap(to_jax, (fresh, inputs, context)))
    np.testing.assert_allclose(there, expected, rtol=1e-12)


def test_a_free_forecast_is_fed_with_itself():
    fresh, inputs, _, context = rnn_arguments()
    expected, state = [], context
    for x in inputs:
        value, state = fresh(x, state)
    for _ in range(3):
        expected.append(value.item())
        value, state = fresh(value, state)
    np.testing.assert_array_equal(rnn.forecast(fresh, inputs, context, 3), expected)


@pytest.mark.nightly
def test_the_plot_of_the_recurrent_network_is_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rnn.main(["--epochs", "2", "--out", str(tmp_path / "runs")])
    assert (tmp_path / "runs/forecast.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "training on torch:cpu: 80 values, 2 epochs" in shown
    assert "running freely" in shown


# --- actor_critic ---------------------------------------------------------------------------------


def test_a_pole_that_is_pushed_one_way_falls_the_other():
    """The first step from rest, worked out by hand from the equations."""
    carts = agent.CartPole(2, seed=0)
    carts.state[:] = 0
    reached, fell, late = carts.step(np.array([1, 0]))
    turn = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    expected = 0.02 * np.array([0, 10 / 1.1 - 0.05 * turn / 1.1, 0, turn])
    np.testing.assert_allclose(reached, [expected, -expected], rtol=1e-12)
    assert not (fell | late).any()
    carts.age[:] = agent.LONGEST - 1
    carts.state[1, 0] = 3
    _, fell, late = carts.step(np.array([1, 0]))
    assert (fell.tolist(), late.tolist()) == ([False, True], [True, False])
    assert carts.age.tolist() == [0, 0]
    assert (np.abs(carts.state) <= 0.05).all()


@pytest.mark.nightly
def test_the_actor_learns_to_balance_and_the_critic_stays():
    fresh = agent.Agent(agent.Actor(random.key(0)), agent.Critic(np.random.default_rng(0)))
    moved = fmap(to_torch, fresh)
    trained, curve = agent.train(moved, agent.CartPole(32, seed=0), to_torch, rounds=12)
    assert trained.critic is fresh.critic
    assert fmapper.get_device(trained) == fmapper.get_device(moved)
    assert isinstance(fresh.actor.w1, np.ndarray)
    assert curve[-1] > 4 * curve[0]


@pytest.mark.nightly
def test_the_learning_curve_is_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    agent.main(["--rounds", "2", "--out", str(tmp_path / "runs")])
    assert (tmp_path / "runs/learning_curve.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "Forgetful holds arrays in .actor, .critic but is not a functor" in shown


# --- cifar_cnn ------------------------------------------------------------------------------------


def some_digits(count):
    pytest.importorskip("sklearn")
    (images, labels), _ = cnn.digits()
    return images[:count], labels[:count]


def cnn_losses(mover, steps=4, compile=False):
    model = cnn.CNN(random.key(0))
    _, losses, _ = cnn.train(
        model, cnn.Adam(model), some_digits(32 * steps), mover, size=32, compile=compile
    )
    return losses


class TorchCNN(torch.nn.Module):
    """The network as a torch user writes it."""

    def __init__(self, model):
        super().__init__()
        sizes = [(3, 6, 5, 0), (6, 16, 5, 3), (16, 16, 5, 0), (16, 16, 3, 0)]
        self.convs = torch.nn.ModuleList(
            torch.nn.Conv2d(i, o, k, padding=p) for i, o, k, p in sizes
        )
        sizes = [(64, 120), (120, 84), (84, 10)]
        self.linears = torch.nn.ModuleList(torch.nn.Linear(i, o) for i, o in sizes)
        values = fmapper.state(model)
        self.load_state_dict({name: torch.tensor(value) for name, value in values.items()})

    def forward(self, x):
        pool, relu = torch.nn.functional.max_pool2d, torch.nn.functional.relu
        first, second, third, fourth = self.convs
        x = pool(relu(first(x)), 2)
        x = relu(second(x))
        x = pool(relu(third(x)), 2)
        x = pool(relu(fourth(x)), 2).flatten(1)
        x = relu(self.linears[0](x))
        return self.linears[2](relu(self.linears[1](x)))


def by_hand(steps):
    net = TorchCNN(cnn.CNN(random.key(0)))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    images, labels = some_digits(32 * steps)
    losses = []
    for x, y in cnn.batches(images, labels, 32, random.fold_in(random.key(1), 0)):
        loss = torch.nn.functional.cross_entropy(net(torch.tensor(x)), torch.tensor(y).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.nightly
def test_the_convolutional_network_learns_as_one_of_torch_with_its_adam():
    np.testing.assert_allclose(cnn_losses(to_torch), by_hand(4), rtol=1e-4)


@pytest.mark.nightly
def test_the_convolutional_network_learns_the_same_on_jax():
    expected = cnn_losses(to_torch)
    np.testing.assert_allclose(cnn_losses(to_jax, compile=True), expected, rtol=1e-4)


@pytest.mark.nightly
def test_the_convolutional_network_computes_the_same_on_all_backends():
    model = cnn.CNN(random.key(0))
    images, _ = some_digits(4)
    with torch.no_grad():
        expected = TorchCNN(model)(torch.tensor(images)).numpy()
    for mover in (to_numpy, to_torch, to_jax):
        there, x = fmap(mover, (model, images))
        np.testing.assert_allclose(to_numpy(there(x)), expected, rtol=1e-4, atol=1e-5)


def archive(path, *, extra=None):
    """A small archive in the layout of CIFAR-10."""
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w:gz") as tar:
        names = ["data_batch_1", "data_batch_2", "test_batch"]
        for name in [*names, "batches.meta"]:
            batch = {
                b"data": rng.integers(0, 256, (3, 3072), dtype=np.uint8),
                b"labels": [1, 2, 3],
                b"filenames": [b"a.png"] * 3,
            }
            if extra is not None:
                batch[b"extra"] = extra
            content = pickle.dumps(batch, protocol=2)
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_the_archive_of_cifar_is_read(tmp_path):
    path = archive(tmp_path / "cifar-10-python.tar.gz")
    (images, labels), (test_images, test_labels) = cnn.cifar10(path, checksum=None)
    first = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    assert images.shape == (6, 3, 32, 32)
    assert test_images.shape == (3, 3, 32, 32)
    assert images.dtype == np.float32
    np.testing.assert_allclose(images[:3].reshape(3, -1), first / 127.5 - 1, atol=1e-6)
    np.testing.assert_array_equal(labels, [1, 2, 3, 1, 2, 3])
    np.testing.assert_array_equal(test_labels, [1, 2, 3])


class Evil:
    def __reduce__(self):
        return print, ("run by the archive",)


def test_an_archive_that_would_run_code_is_refused(tmp_path, capsys):
    path = archive(tmp_path / "evil.tar.gz", extra=Evil())
    with pytest.raises(pickle.UnpicklingError, match="print has no business"):
        cnn.cifar10(path, checksum=None)
    assert capsys.readouterr().out == ""


def test_a_missing_or_damaged_archive_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="kriz/cifar"):
        cnn.cifar10(tmp_path / "nowhere.tar.gz")
    path = archive(tmp_path / "cifar-10-python.tar.gz")
    with pytest.raises(ValueError, match="MD5 checksum"):
        cnn.cifar10(path)


def test_digits_are_pictures_of_the_size_of_cifar():
    pytest.importorskip("sklearn")
    (images, labels), (test_images, test_labels) = cnn.digits()
    assert images.shape == (1344, 3, 32, 32)
    assert test_images.shape == (453, 3, 32, 32)
    assert (images.min(), images.max()) == (-1, 1)
    assert sorted(set(labels)) == sorted(set(test_labels)) == list(range(10))


@pytest.mark.nightly
def test_loss_and_accuracy_go_to_tensorboard(tmp_path, capsys):
    pytest.importorskip("sklearn")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    cnn.main(["--epochs", "1", "--batch", "1024", "--devices", "cpu", "--logdir", str(tmp_path)])
    found = events.EventAccumulator(str(tmp_path / "torch-cpu")).Reload()
    assert sorted(found.Tags()["scalars"]) == ["accuracy", "loss"]
    table = capsys.readouterr().out
    assert f"accuracy {found.Scalars('accuracy')[-1].value:.1%}" in table
    assert "1st epoch" in table
    assert "cpu" in table


@pytest.mark.gpu("torch")
def test_the_convolutional_network_learns_the_same_on_a_gpu():
    there = cnn_losses(fmapper.to_torch(device="gpu"))
    np.testing.assert_allclose(there, cnn_losses(to_torch), rtol=1e-3)


@pytest.mark.gpu("jax")
def test_the_convolutional_network_learns_the_same_on_a_gpu_in_jax():
    import jax

    with jax.default_matmul_precision("float32"):  # else products have ten bits, 1e-3 each
        there = cnn_losses(to_jax(device="gpu"), compile=True)
    np.testing.assert_allclose(there, cnn_losses(to_torch), rtol=1e-3)
