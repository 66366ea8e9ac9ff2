"""Tensors that keep their values in other tensors, moved with everything in them."""

import warnings

import pytest

import fmapper
from fmapper import to_cpu, to_device, to_jax, to_numpy, to_torch

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

to_meta = to_device("torch:meta")


class Base(torch.Tensor):
    """Codes and a scale, no memory of its own, no `to`."""

    @staticmethod
    def __new__(cls, codes, scale, note="", requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device, requires_grad=requires_grad
        )

    def __init__(self, codes, scale, note="", requires_grad=False):
        self.codes, self.scale, self.note = codes, scale, note

    def __repr__(self):
        return f"{type(self).__name__}({self.note})"

    def dequantize(self):
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            (old,) = args
            return cls(old.codes, old.scale, old.note)
        raise NotImplementedError(f"{func} of {cls.__name__}")


class Quantised(Base):
    """Like those of torchao: it says what is in it."""

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], context["note"])


class Opaque(Base):
    """One that does not say what is in it, and moves only a part of itself."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            old = args[0]
            return cls(old.codes.to(kwargs["device"]), old.scale, old.note)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Whole(Opaque):
    """One that does not say what is in it, but moves all of itself."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            old = args[0]
            to = kwargs.get("device", old.codes.device)
            scale = old.scale.to(to, kwargs.get("dtype", old.scale.dtype))
            return cls(old.codes.to(to), scale, old.note)
        return super().__torch_dispatch__(func, types, args, kwargs)


def codes():
    return torch.arange(4, dtype=torch.int8).reshape(2, 2)


def quantised(cls=Quantised, **options):
    return cls(codes(), torch.tensor(0.5), note="n", **options)


def nested():
    return Quantised(quantised(), torch.tensor(2.0), note="outer")


def devices_in(tensor):
    parts = [
        getattr(tensor, name) for name in ("codes", "scale", "a", "b") if hasattr(tensor, name)
    ]
    inner = {device for part in parts for device in devices_in(part)}
    return {tensor.device.type} | inner


def two():
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(2), torch.zeros(2))


MAKERS = {
    "own": quantised,
    "nested": nested,
    "moves itself": lambda: quantised(Whole),
    "torch's two": two,
    "parameter": lambda: torch.nn.Parameter(quantised(), requires_grad=False),
    "trained parameter": lambda: torch.nn.Parameter(quantised()),
    "parameter of two": lambda: torch.nn.Parameter(two()),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_everything_inside_moves_along(make):
    old = make()
    old.label = "x"
    tree = {"w": old, "again": [old], "plain": torch.ones(1)}
    new = to_meta(tree)
    assert new["w"] is new["again"][0]
    assert type(new["w"]) is type(old)
    assert isinstance(new["w"], torch.nn.Parameter) == isinstance(old, torch.nn.Parameter)
    assert new["w"].requires_grad == old.requires_grad
    assert devices_in(new["w"]) == {"meta"}
    assert devices_in(old) == {"cpu"}
    assert new["w"].label == "x"
    assert new["w"].shape == old.shape
    copied = to_cpu(old, copy=True)
    assert copied is not old
    assert devices_in(copied) == {"cpu"}
    if hasattr(old, "codes"):
        assert copied.note == old.note
        assert copied.codes is not old.codes
        assert new["w"].note == old.note
    assert to_cpu(old) is old


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("mover", ["numpy", "jax"])
def test_a_wrapper_does_not_leave_torch(make, mover):
    pytest.importorskip(mover)
    tree = {"ok": torch.ones(1), "w": [make()]}
    with pytest.raises(fmapper.UnsupportedLeafError, match=r"^model\.w\[0\].*other tensors.*move"):
        {"numpy": to_numpy, "jax": to_jax}[mover](tree)


def test_values_that_are_dequantised_go_anywhere():
    assert to_numpy(quantised().dequantize()).tolist() == [[0.0, 0.5], [1.0, 1.5]]


def test_what_would_stay_behind_is_refused_by_path():
    tree = {"ok": torch.ones(1), "w": [quantised(Opaque)]}
    with pytest.raises(
        fmapper.UnsupportedLeafError, match=r"^model\.w\[0\].*Opaque.*\.scale.*__tensor_flatten__"
    ):
        to_meta(tree)
    assert devices_in(tree["w"][0]) == {"cpu"}


def test_a_class_that_says_it_is_elsewhere_is_refused():
    class Fixed(Quantised):
        @classmethod
        def __tensor_unflatten__(cls, inner, context, size, stride):
            return cls(codes(), inner["scale"], context["note"])

    with pytest.raises(fmapper.UnsupportedLeafError, match=r"^model\.w.*afterwards.*on cpu"):
        to_meta({"w": quantised(Fixed)})


def test_a_fake_tensor_is_where_it_says():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = torch.ones(2)
        fake.label = "x"
        parameter = torch.nn.Parameter(torch.ones(2))
    for old in (fake, parameter):
        new = to_meta([old])[0]
        assert new.device.type == "meta"
        assert new.fake_mode is mode
        assert new.fake_device.type == "meta"
        assert old.fake_device.type == "cpu"
    assert to_meta(fake).label == "x"


def test_modules_with_wrapped_weights_move_and_move_in_place():
    for inner in (quantised, nested):
        layer = torch.nn.Linear(2, 2)
        layer.weight = torch.nn.Parameter(inner(), requires_grad=False)
        new = to_meta(layer)
        assert devices_in(new.weight) == {"meta"}
        assert type(new.weight) is Quantised
        assert isinstance(new.weight, torch.nn.Parameter)
        assert new.bias.device.type == "meta"
        weight = layer.weight
        assert fmapper.move_(layer, to_meta) is layer
        assert devices_in(layer.weight) == {"meta"}
        assert layer.weight is weight


def test_a_move_in_place_that_fails_leaves_wrapped_weights_as_they_were():
    class Unmovable(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Parameter(quantised(), requires_grad=False)
            self.second = torch.nn.Parameter(quantised(Opaque), requires_grad=False)

    module = Unmovable()
    with pytest.raises(fmapper.MoveError, match=r"model\.second"):
        fmapper.move_(module, to_meta)
    assert devices_in(module.first) == {"cpu"}


def test_casting_keeps_what_the_class_makes_of_it():
    new = to_torch(quantised(Whole), dtype="float64")
    assert new.scale.dtype is torch.float64
    assert new.dtype is torch.float64
    parameter = torch.nn.Parameter(two())
    new = to_torch(parameter, dtype="float64")
    assert (new.a.dtype, new.b.dtype, new.dtype) == (torch.float64,) * 3
    assert isinstance(new, torch.nn.Parameter)


def test_a_cast_that_makes_another_class_is_refused():
    class Scaled(Base):
        """A class whose operations are those of its base."""

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default:
                return Whole(args[0].codes, args[0].scale.to(kwargs["dtype"]), args[0].note)
            return super().__torch_dispatch__(func, types, args, kwargs)

    class Part(Scaled, Whole):
        pass

    tree = {"w": quantised(Part)}
    with pytest.raises(fmapper.MoveError, match=r"^model\.w.*a Part cannot be cast: .* a Whole"):
        to_torch(tree, dtype="float64")
    assert tree["w"].scale.dtype is torch.float32


def test_a_wrapper_in_the_place_of_a_parameter_stays_what_it_is():
    layer = torch.nn.Linear(2, 2)
    new = fmapper.fmap(lambda p: quantised() if p.ndim == 2 else p, layer)
    assert type(new.weight) is Quantised
    assert isinstance(new.weight, torch.nn.Parameter)
    back = fmapper.fmap(lambda p: p.dequantize() if type(p) is Quantised else p, new)
    assert type(back.weight) is torch.nn.Parameter
    assert not hasattr(back.weight, "codes")


def test_tensors_that_hang_on_tensors_move_along():
    scale = torch.ones(1)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.scale = scale
    weight.state = {"absmax": scale, "more": [torch.zeros(2), "text"]}
    weight.itself = weight
    new = to_meta({"scale": scale, "weight": weight})
    assert new["weight"].scale is new["scale"]
    assert new["weight"].state["absmax"] is new["scale"]
    assert new["weight"].state["more"][0].device.type == "meta"
    assert new["weight"].state["more"][1] == "text"
    assert new["weight"].itself is new["weight"]
    assert weight.scale is scale
    assert scale.device.type == "cpu"


def test_a_subclass_with_state_in_an_object_is_refused():
    class State:
        def __init__(self):
            self.absmax = torch.ones(2)

    class Params4bit(torch.nn.Parameter):
        pass

    weight = Params4bit(torch.ones(2), requires_grad=False)
    weight.quant_state = State()
    with pytest.raises(
        fmapper.UnsupportedLeafError, match=r"^model\.w.*\.quant_state.*State.*stay"
    ):
        to_meta({"w": weight})


def test_jagged_tensors_move_with_their_offsets():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
        new = to_cpu(old, copy=True)
        assert new._offsets.tolist() == old._offsets.tolist()
        assert new._values is not old._values
        assert new.is_nested
        there = to_meta(old)
        assert there._values.device.type == there._offsets.device.type == "meta"
