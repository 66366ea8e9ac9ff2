"""A conversion gives a model of the target or raises: it is never a no-op."""

import functools
import os
import subprocess
import sys

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

W = jnp.arange(3.0)


def scaled(params, x=2.0):
    return x * params["w"]


WITHOUT_INPUTS = {
    "a function": lambda: jnp.sin(W),
    "jitted": jax.jit(lambda: jnp.sin(W)),
    "partial": functools.partial(jnp.sin, W),
    "with its parameters": (lambda params: jnp.sin(params["w"]), {"w": W}),
}


@pytest.mark.parametrize("name", WITHOUT_INPUTS)
def test_what_takes_no_arguments_is_converted(name):
    model = fmapper.convert(WITHOUT_INPUTS[name], "torch")
    assert isinstance(model, torch.nn.Module)
    np.testing.assert_allclose(model().detach(), np.sin(np.arange(3.0)), rtol=1e-6)


@pytest.mark.parametrize(
    "model", [lambda x: x + W, jax.jit(lambda x: x), (lambda p, x: p * x, W), jnp.sin]
)
def test_what_takes_arguments_is_refused_without(model):
    with pytest.raises(fmapper.ConversionError, match="pass its inputs as"):
        fmapper.convert(model, "torch")


def test_modules_of_equinox_are_programs():
    eqx = pytest.importorskip("equinox")
    with pytest.raises(fmapper.ConversionError, match="pass its inputs as"):
        fmapper.convert(eqx.nn.Linear(2, 3, key=jax.random.key(0)), "torch")


@pytest.mark.parametrize("to", ["jax", "flax"])
@pytest.mark.parametrize("inputs", [(), (W,)])
def test_functions_are_not_given_back(to, inputs):
    if to == "flax":
        pytest.importorskip("flax")
    with pytest.raises(fmapper.ConversionError, match="no framework can record it"):
        fmapper.convert(lambda x=W: jnp.sin(x), to, inputs)


def in_torch(params, x=2.0):
    return torch.sin(torch.as_tensor(params["w"]) * x)


@pytest.mark.parametrize("to", ["jax", "flax"])
@pytest.mark.parametrize("inputs", [(), (torch.ones(3),)])
@pytest.mark.parametrize("params", [torch.ones(3), np.ones(3), W])
def test_functions_with_parameters_are_not_given_back(to, inputs, params):
    if to == "flax":
        pytest.importorskip("flax")
    with pytest.raises(fmapper.ConversionError, match="no framework can record it"):
        fmapper.convert((in_torch, {"w": params}), to, inputs)


@pytest.mark.parametrize("model", [{"a": (scaled, W)}, [scaled, W, W], (scaled, W, W)])
def test_functions_in_a_tree_are_not_called(model):
    with pytest.raises(fmapper.ConversionError, match=r"Convert each .* or omit the inputs"):
        fmapper.convert(model, "torch", (W,))


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["jax", "flax"])
def test_a_model_that_computes_with_the_target_already_is_refused(to):
    nnx = pytest.importorskip("flax.nnx")
    linear = torch.nn.Linear(2, 3)
    x = torch.ones(1, 2)
    for model in (
        fmapper.convert(linear, "jax", (x,)),
        fmapper.convert(linear, "flax", (x,)),
        nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(fmapper.ConversionError, match=r"is already a model of (jax|flax)"):
            fmapper.convert(model, to, (jnp.ones((1, 2)),))


def test_arrays_of_a_model_are_moved_to_where_it_computes():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    moved = fmapper.convert(fmapper.to_numpy(model), "jax")
    assert all(isinstance(leaf, jax.Array) for leaf in fmapper.fleaves(moved))


def test_a_functor_that_is_moved_computes_there_or_is_refused():
    @fmapper.functor
    class Scale:
        def __init__(self, function):
            self.w, self.function = torch.ones(3), function

        def __call__(self, x):
            return self.function(x * self.w)

    assert isinstance(fmapper.convert(Scale(abs), "jax", (torch.ones(3),)), Scale)
    for function in (torch.sin, lambda x: torch.ones(3)):
        with pytest.raises(fmapper.ConversionError, match="does not run there"):
            fmapper.convert(Scale(function), "jax", (torch.ones(3),))


@pytest.mark.parametrize("to", ["torch", "jax", "numpy"])
@pytest.mark.parametrize("nothing", ["text", 3, None, {}, [1, 2.0]])
def test_what_holds_no_arrays_is_refused(nothing, to):
    with pytest.raises(fmapper.ConversionError, match="nothing to convert"):
        fmapper.convert(nothing, to)


def test_declared_classes_are_moved_without_inputs():
    @fmapper.functor
    class Scale:
        def __init__(self):
            self.w = W

        def __call__(self, x):
            return x * self.w

    moved = fmapper.convert(Scale(), "torch")
    assert isinstance(moved, Scale)
    assert torch.equal(moved(torch.ones(3)), torch.arange(3.0))


@pytest.mark.nightly
def test_jax_need_not_be_imported():
    code = """
import sys, torch, fmapper
def f(x):
    import jax.numpy as jnp
    return jnp.sin(x)
assert "jax" not in sys.modules
model = fmapper.convert(f, "torch", (torch.ones(3),))
assert isinstance(model, torch.nn.Module)
torch.testing.assert_close(model(torch.ones(3)), torch.ones(3).sin())
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_lines_of_users_are_shown_wherever_they_lie():
    """A folder is not a library's for its name."""
    for file in ("/home/me/fmapper/jax/flax/model.py", "/home/me/fmapper_study/numpy/model.py"):
        space = {"jnp": jnp}
        exec(compile("def f(x):\n    return jnp.tanh(x)\n", file, "exec"), space)
        model = fmapper.convert(space["f"], "torch", (W,))
        assert [call.source for call in model.program.graph.calls] == [f"{file}:2"]
        exec(compile("def g(x):\n    return x.absent\n", file, "exec"), space)
        with pytest.raises(fmapper.ConversionError, match=f"at {file}:2"):
            fmapper.convert(space["g"], "torch", (W,))
