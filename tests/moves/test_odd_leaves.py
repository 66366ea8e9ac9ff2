"""Leaves whose classes answer oddly, and tensors that have no plain values: every walk goes on."""

import contextlib
import warnings

import pytest

import fmapper
from fmapper import functor

np = pytest.importorskip("numpy")


class Meta(type):
    def __getattr__(cls, name):
        raise RuntimeError(name)


def makers():
    """What makes each; the classes are in no module, since doctest asks those for attributes."""

    class OddClass(metaclass=Meta):
        pass

    class OddTuple(tuple, metaclass=Meta):
        __slots__ = ()

    class OddAnswers:
        def __getattr__(self, name):
            raise RuntimeError(name)

    class OddSlots:
        __slots__ = ("unset",)

        def __getattr__(self, name):
            raise RuntimeError(name)

    class OddItself:
        @property
        def __class__(self):
            raise RuntimeError("__class__")

    return {
        "metaclass": OddClass,
        "the class": lambda: OddClass,
        "tuple": lambda: OddTuple((1,)),
        "instance": OddAnswers,
        "slots": OddSlots,
        "class of instance": OddItself,
    }


LEAVES = makers()
WALKS = {
    "fmap": lambda tree: fmapper.fmap(lambda x: x, tree),
    "fleaves": fmapper.fleaves,
    "fcollect": fmapper.fcollect,
    "fmapstructure": lambda tree: fmapper.fmapstructure(lambda x: x, tree),
    "to_numpy": fmapper.to_numpy,
    "copy": fmapper.to_cpu(copy=True),
    "plan": lambda tree: fmapper.plan(fmapper.to_numpy, tree),
    "place": lambda tree: fmapper.place(tree, {"*": "float32"}),
    "move_": lambda tree: fmapper.move_(tree, fmapper.to_cpu(copy=True)),
    "state": fmapper.state,
    "summary": lambda tree: str(fmapper.summary(tree)),
    "destructure": fmapper.destructure,
    "get_device": fmapper.get_device,
    "holds_arrays": fmapper.backends.holds_arrays,
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_a_leaf_that_raises_breaks_no_walk(walk, leaf):
    walk({"w": np.ones(1), "odd": [leaf()]})


def test_a_class_that_raises_can_be_declared_and_called():
    class Odd(metaclass=Meta):
        def __init__(self):
            self.w = 1

        def __call__(self, x):
            return x + 1

    functor(Odd)
    assert fmapper.fmap(Odd(), [Odd()])[0].w == 2
    bare = functor(Meta("Bare", (), {}), children=())
    assert fmapper.fleaves([bare()]) == []


# --- tensors without plain values -----------------------------------------------------------------


def without_memory(torch):
    """As FSDP leaves a parameter between uses; to read one ends the process."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(torch):
    with torch._subclasses.FakeTensorMode():
        return torch.ones(3)


KINDS = {
    "sparse": (lambda t: t.eye(2).to_sparse(), "to_dense"),
    "csr": (lambda t: t.eye(2).to_sparse_csr(), "to_dense"),
    "nested": (lambda t: t.nested.nested_tensor([t.ones(1), t.ones(2)]), "nested"),
    "jagged": (
        lambda t: t.nested.nested_tensor([t.ones(1), t.ones(2)], layout=t.jagged),
        "nested",
    ),
    "lazy": (lambda t: t.nn.LazyLinear(2).weight, "no values yet"),
    "lazy buffer": (lambda t: t.nn.UninitializedBuffer(), "no values yet"),
    "mkldnn": (lambda t: t.ones(3, 4).to_mkldnn(), "to_dense"),
    "freed": (without_memory, "storage of the tensor was freed"),
    "fake": (fake, "shape but no values"),
    "masked": (
        lambda t: t.masked.masked_tensor(t.ones(1), t.ones(1, dtype=t.bool)),
        "MaskedTensor",
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    torch = pytest.importorskip("torch")
    make, words = KINDS[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some of these kinds experimental
        yield {"ok": torch.ones(1), "w": [make(torch)]}, words


def test_destructure_names_what_has_no_place_in_a_vector(kind):
    tree, words = kind
    with pytest.raises(fmapper.UnsupportedLeafError, match=rf"^model\.w\[0\]: .*{words}"):
        fmapper.destructure(tree)


def test_destructure_names_what_does_not_promote():
    torch = pytest.importorskip("torch")
    tree = {"a": torch.ones(1).to(torch.float8_e4m3fn), "b": [torch.ones(1)]}
    with pytest.raises(
        fmapper.UnsupportedLeafError,
        match=r"^model\.b\[0\]: .*float32, and float8_e4m3fn at model\.a",
    ):
        fmapper.destructure(tree)


def test_save_names_what_it_cannot_write(kind, tmp_path):
    tree, words = kind
    with pytest.raises(fmapper.CheckpointError, match=rf"^w\.0: .*{words}"):
        fmapper.save(tree, tmp_path / "odd.safetensors")
    assert not list(tmp_path.iterdir())


def test_load_state_names_an_array_that_was_deleted():
    jax = pytest.importorskip("jax")
    tree = {"w": [jax.numpy.ones(2)]}
    given = {"w.0": jax.numpy.ones(2)}
    tree["w"][0].delete()
    with pytest.raises(fmapper.StructureMismatchError, match=r"w\.0: .*deleted"):
        fmapper.load_state(tree, given)


def test_destructure_names_the_devices_by_the_paths_of_the_tree():
    torch = pytest.importorskip("torch")
    tree = {"a": torch.ones(1), "b": [torch.ones(1, device="meta")]}
    with pytest.raises(fmapper.MixedDevicesError, match=r"torch:meta: model\.b\[0\]"):
        fmapper.destructure(tree)


@pytest.mark.parametrize(
    "mover",
    [
        fmapper.to_numpy,
        fmapper.to_torch(dtype="float16"),
        fmapper.to_cpu(copy=True),
        fmapper.to_torch(device="meta"),
    ],
    ids=["numpy", "float16", "copy", "meta"],
)
def test_a_plan_says_what_a_move_does(kind, mover):
    tree, words = kind
    plan = fmapper.plan(mover, tree)
    assert str(plan)
    if plan.refused:
        assert words in plan.refused[0].reason
        assert str(plan.refused[0].path) == "w[0]"
        with pytest.raises(fmapper.MoveError, match=r"^model\.w\[0\]"):
            mover(tree)
    else:
        with contextlib.suppress(fmapper.MoveError):  # a plan does not look at values
            mover(tree)


def test_load_state_goes_on_or_names_what_it_cannot_compare(kind):
    tree, _ = kind
    try:
        fmapper.load_state(tree, fmapper.state(tree))
    except fmapper.FmapperError as error:
        message = str(error)
    else:
        return
    assert "w.0" in message or "model.w[0]" in message
