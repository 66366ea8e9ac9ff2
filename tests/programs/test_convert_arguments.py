"""A target or an option that does not exist is refused before anything is recorded."""

import pytest

import fmapper

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("flax")


class Unrecordable(torch.nn.Module):
    def forward(self, x):
        raise AssertionError("it was recorded")


MODEL, X = Unrecordable(), torch.ones(2)


@pytest.mark.parametrize(
    ("target", "meant"), [("pytorch", "torch"), ("Jax", "jax"), ("flaxx", "flax")]
)
def test_a_target_that_does_not_exist_is_refused_with_those_that_do(target, meant):
    with pytest.raises(fmapper.BackendUnavailableError) as caught:
        fmapper.convert(MODEL, target, (X,))
    message = str(caught.value)
    assert message.startswith(f"{target!r} is not a target. Did you mean {meant!r}? Available")
    for name in ("flax", "jax", "linen", "nnx", "torch"):
        assert repr(name) in message
    assert "numpy" not in message


def test_a_backend_without_models_is_no_target():
    with pytest.raises(fmapper.BackendUnavailableError, match="'numpy' is not a target"):
        fmapper.convert(MODEL, "numpy", (X,))


def test_inputs_in_the_place_of_the_target_are_told_from_it():
    with pytest.raises(
        fmapper.ConversionError, match="takes the name of the target as its second argument"
    ):
        fmapper.convert(MODEL, (X,), "jax")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("jax", {"precison": None}, "has no option 'precison'. Did you mean 'precision'?"),
        ("jax", {"dynamic_shape": "auto"}, "Did you mean 'dynamic_shapes'?"),
        ("jax", {"example_input": (X,)}, "Did you mean 'example_inputs'?"),
        ("jax", {"fused": False}, "convert to jax has no option 'fused'. It takes check, "),
        ("flax", {"rng": 1}, "Did you mean 'rngs'?"),
        ("torch", {"precision": None}, "convert to torch has no option 'precision'"),
        ("jax", {"precision": "hihgest"}, "precision='hihgest'"),
        ("flax", {"precision": "hihgest"}, "precision='hihgest'"),
        ("linen", {"rngs": 1}, "a Linen module does not store rngs"),
        ("linen", {"structure": True}, "structure=True writes modules of NNX"),
        ("flax", {"linen": True}, "convert to flax has no option 'linen'"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_with_those_that_do(target, options, message):
    with pytest.raises(fmapper.ConversionError) as caught:
        fmapper.convert(MODEL, target, (X,), **options)
    assert message in str(caught.value)


def test_an_exported_program_is_converted_as_its_module():
    linear = torch.nn.Linear(2, 2)
    exported = torch.export.export(linear, (X,))
    for target, more in (("torch", r" It is a program of torch already\."), ("jax", "")):
        for inputs in ((), (X,)):
            with pytest.raises(
                fmapper.ConversionError,
                match=r"^ExportedProgram is not a model: convert its module, exported\.module\(\)\."
                + more,
            ):
                fmapper.convert(exported, target, inputs)
    for train in (False, True):
        model = fmapper.convert(exported.module(), "jax", (X,), train=train)
        torch.testing.assert_close(fmapper.to_torch(model(X.numpy())), linear(X).detach())


def test_the_program_of_a_converted_model_is_not_converted_without_its_arrays():
    model = fmapper.convert(torch.nn.Linear(2, 2), "jax", (X,))
    for target in ("torch", "jax", "flax"):
        with pytest.raises(
            fmapper.ConversionError, match=r"Linear has no values for weight, bias.*Convert that"
        ):
            fmapper.convert(model.program, target)


def test_the_program_of_a_converted_model_is_not_saved_without_its_arrays(tmp_path):
    model = fmapper.convert(torch.nn.Linear(2, 2), "jax", (X,))
    with pytest.raises(fmapper.ConversionError, match=r"has no values for weight.*model\.save"):
        fmapper.save_program(model.program, tmp_path / "linear.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_function_in_a_list_with_its_parameters_is_no_tree():
    with pytest.raises(fmapper.ConversionError, match=r"\(function, params\), not as a list"):
        fmapper.convert([lambda p: p["w"], {"w": X}], "jax")
