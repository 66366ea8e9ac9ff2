"""Movers: leaves and trees to another device or backend, as DESIGN.md section 4 says."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper import (
    Device,
    Mover,
    fmap,
    to_cpu,
    to_device,
    to_gpu,
    to_jax,
    to_numpy,
    to_torch,
)

np = pytest.importorskip("numpy")

MOVERS = {"numpy": to_numpy, "torch": to_torch, "jax": to_jax}
PAIRS = [(a, b) for a in MOVERS for b in MOVERS if a != b]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


@pytest.fixture
def ml_dtypes() -> Any:
    return pytest.importorskip("ml_dtypes")


@contextlib.contextmanager
def x64() -> Iterator[None]:
    """JAX with 64-bit dtypes, in this block."""
    import jax

    if hasattr(jax, "enable_x64"):
        with jax.enable_x64(True):
            yield
    else:
        from jax.experimental import enable_x64

        with enable_x64():
            yield


def run(code: str, **env: str) -> str:
    """What a fresh interpreter prints that sees no GPU and for which warnings are errors."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **hidden, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make(backend: str, values: Any, dtype: str = "float32") -> Any:
    """An array of a backend, without the help of a mover."""
    if backend == "numpy":
        return np.array(values, dtype)
    if backend == "torch":
        torch = pytest.importorskip("torch")
        return torch.tensor(values, dtype=getattr(torch, dtype))
    return pytest.importorskip("jax.numpy").array(values, dtype)


def numbers(array: Any) -> Any:
    """The values as a nested list."""
    return array.tolist()


def address(array: Any) -> int:
    """Where an array's first element is."""
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    if hasattr(array, "unsafe_buffer_pointer"):
        return int(array.unsafe_buffer_pointer())
    return int(array.ctypes.data)


def backend_of(tree: Any) -> str:
    device = fmapper.get_device(tree)
    assert device is not None
    return device.backend


def aligned(values: Any, dtype: Any = "float32") -> Any:
    """A NumPy array at an address that JAX can take over."""
    wanted = np.array(values, dtype)
    raw = np.empty(wanted.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    new = raw[start : start + wanted.nbytes].view(wanted.dtype).reshape(wanted.shape)
    new[...] = wanted
    return new


@fmapper.functor
class Dense:
    def __init__(self, weight: Any, bias: Any, name: str = "dense") -> None:
        self.weight, self.bias, self.name = weight, bias, name


class Plain:
    """Nobody declared it."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def model() -> dict[str, Any]:
    """Containers, a functor class, a tied leaf, a tied node, an integer array, and settings."""
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    dense = Dense(w, np.zeros(3, np.float32))
    return {
        "encoder": dense,
        "layers": [dense, (Dense(w, None), np.array([1, 2], np.int32))],
        "settings": {"rate": 0.5, "name": "m", "none": None},
    }


# --- leaves, trees, configured movers ------------------------------------------------------------


@pytest.mark.parametrize("backend", MOVERS)
def test_leaf_and_tree(backend: str) -> None:
    pytest.importorskip(backend)
    mover = MOVERS[backend]
    leaf = mover(np.array([1.0, 2.0], np.float32))
    assert backend_of(leaf) == backend
    assert numbers(leaf) == [1.0, 2.0]
    for new in (mover(model()), fmap(mover, model())):
        assert backend_of(new) == backend
        assert numbers(new["encoder"].weight) == [[0, 1, 2], [3, 4, 5]]
        assert new["settings"] == {"rate": 0.5, "name": "m", "none": None}
        assert new["encoder"].name == "dense"


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_ties_survive_and_the_input_is_untouched(source: str, target: str) -> None:
    pytest.importorskip(source)
    pytest.importorskip(target)
    old = MOVERS[source](model())
    before = fmapper.fleaves(old)
    new = fmap(MOVERS[target], old)
    assert new["encoder"] is new["layers"][0]
    assert new["encoder"].weight is new["layers"][1][0].weight
    assert new["encoder"].bias is not new["encoder"].weight
    assert backend_of(new) == target
    assert backend_of(old) == source
    after = fmapper.fleaves(old)
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert numbers(old["encoder"].weight) == [[0, 1, 2], [3, 4, 5]]
    assert "int32" in str(new["layers"][1][1].dtype)


def test_a_cycle_of_nodes_moves(torch: Any) -> None:
    parent, child = Dense(np.ones(2), None), Dense(None, None)
    parent.bias, child.weight = child, parent
    new = to_torch(parent)
    assert new.bias.weight is new
    assert type(new.weight) is torch.Tensor


def test_things_without_arrays_come_through() -> None:
    for x in (None, 3, "text", (), {}, [], {"a": None}, len, range(3), object, np.float32, np):
        new = to_numpy(x)
        assert new == x
        assert type(new) is type(x)


def test_keywords_alone_configure(torch: Any) -> None:
    half = to_torch(dtype="float16")
    assert isinstance(half, Mover)
    assert half(np.ones(2)).dtype is torch.float16
    assert fmap(half, {"w": np.ones(2)})["w"].dtype is torch.float16
    again = half(copy=True)
    assert (again.dtype, again.copy) == ("float16", True)
    assert to_torch.dtype is None, "the mover that everybody shares is not changed"
    assert half == to_torch(dtype=torch.float16) == to_torch(dtype=np.float16)
    assert repr(half) == "to_torch(dtype=float16)"
    assert repr(to_gpu(strict=True)) == "to_gpu(strict=True)"
    assert half(np.ones(2), dtype="float64").dtype is torch.float64


def test_functools_partial_of_a_mover(torch: Any) -> None:
    half = functools.partial(to_torch, dtype="float16")
    assert fmap(half, {"w": np.ones(2)})["w"].dtype is torch.float16


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"dtyp": "float16"},
            TypeError,
            r"to_torch has no option 'dtyp'.*copy, device, dtype.*Did you mean 'dtype'",
        ),
        ({"dtype": "int8"}, ValueError, r"'int8' is not a floating.*float16.*complex64"),
        ({"dtype": "half"}, ValueError, r"'half' is not a floating or complex dtype"),
        ({"dtype": np.int32}, ValueError, r"not a floating or complex dtype"),
        ({"copy": "yes"}, TypeError, r"copy is True, False or None, not 'yes'"),
        ({"strict": "yes"}, TypeError, r"strict is True, False or None, not 'yes'"),
        ({"device": "jax:cpu:0"}, ValueError, r"to_torch creates arrays of torch.*to_jax\(device="),
    ],
)
def test_bad_options(
    torch: Any, jax: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        to_torch(**options)


@pytest.mark.parametrize("copy", [0, 1, np.False_])
def test_a_copy_that_is_nearly_a_bool_is_not_taken_for_none(torch: Any, copy: Any) -> None:
    """`0 == False`, but `0 is not False`: either means what it says, or is refused."""
    w = np.ones(3, np.float32)
    try:
        new = to_torch(w, copy=copy)
    except TypeError:
        return
    assert (address(new) == address(w)) is not bool(copy)


def test_to_cpu_takes_no_device() -> None:
    with pytest.raises(TypeError, match="to_cpu has no option 'device'"):
        to_cpu(device="cpu")


def test_a_mover_takes_one_tree() -> None:
    with pytest.raises(TypeError, match="takes one tree, but got 2"):
        fmap(to_numpy, {"a": 1}, {"a": 2})


# --- all leaves at once --------------------------------------------------------------------------


def test_a_mover_is_given_all_leaves_at_once() -> None:
    seen: list[list[str]] = []

    class Spy(Mover):
        def routes(self, leaves: Sequence[Any], where: Any) -> Any:
            seen.append([type(leaf).__name__ for leaf in leaves])
            return super().routes(leaves, where)

    w = np.ones(2)
    fmap(Spy("spy", backend="numpy"), {"a": w, "b": [w, np.zeros(3)], "n": 3})
    assert seen == [["ndarray", "ndarray"]], "each distinct leaf once, in one call"


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_an_adapter_is_asked_once_per_tree(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(backend)
    cls = type(fmapper.backends.get_adapter(backend))
    calls: list[int] = []
    take = cls.take

    def spy(self: Any, exchange: Any, device: Device, *, share: bool) -> Any:
        calls.append(1)
        return take(self, exchange, device, share=share)

    monkeypatch.setattr(cls, "take", spy)
    fmap(MOVERS[backend], [np.full(3, i, np.float32) for i in range(50)])
    assert len(calls) == 1


def test_jax_puts_the_whole_tree_at_once(jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(fmapper.backends.get_adapter("jax"))
    calls: list[int] = []
    to_device = cls.to_device

    def spy(self: Any, arrays: Any, device: Device, *, copy: bool | None) -> Any:
        calls.append(len(arrays))
        return to_device(self, arrays, device, copy=copy)

    monkeypatch.setattr(cls, "to_device", spy)
    tree = [jax.numpy.full(3, i) for i in range(20)]
    new = to_jax(tree, copy=True)
    assert calls == [20]
    assert all(a is not b for a, b in zip(tree, new, strict=True))


# --- already there -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", MOVERS)
def test_already_there_is_the_very_same_leaf(backend: str) -> None:
    pytest.importorskip(backend)
    tree = MOVERS[backend](model())
    old = fmapper.fleaves(tree)
    device = fmapper.get_device(tree)
    for mover in (MOVERS[backend], to_cpu, to_device("cpu"), to_device(device), to_cpu(copy=False)):
        new = fmapper.fleaves(fmap(mover, tree))
        assert all(a is b for a, b in zip(old, new, strict=True))
    assert MOVERS[backend](old[0], dtype="float32") is old[0]


@pytest.mark.parametrize("backend", MOVERS)
def test_already_there_asks_no_adapter(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(backend)
    tree = MOVERS[backend](model())
    cls = type(fmapper.backends.get_adapter(backend))
    for method in ("to_device", "take", "export", "cast"):
        monkeypatch.setattr(cls, method, lambda *_, **__: pytest.fail("the device was asked"))
    MOVERS[backend](tree)


@pytest.mark.parametrize("backend", MOVERS)
def test_copy_true_copies_what_is_there(backend: str) -> None:
    pytest.importorskip(backend)
    old = MOVERS[backend](np.arange(6, dtype=np.float32))
    new = MOVERS[backend](old, copy=True)
    assert new is not old
    assert address(new) != address(old)
    assert numbers(new) == numbers(old)


def test_copy_true_keeps_wide_jax_arrays_wide(jax: Any) -> None:
    with x64():
        wide = jax.numpy.array([1 / 3, 1e300])
        count = jax.numpy.array([2**40])
    for new in (to_jax([wide, count], copy=True), to_jax([wide, count])):
        assert [str(array.dtype) for array in new] == ["float64", "int64"]
        assert [numbers(array) for array in new] == [[1 / 3, 1e300], [2**40]]


# --- ties by view --------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda w: w.T,
    "rows": lambda w: w[1:3],
    "columns": lambda w: w[:, 1:4],
    "steps": lambda w: w[::2, 1::2],
    "reshape": lambda w: w.reshape(-1),
    "new_axis": lambda w: w[None],
    "element": lambda w: w[2:3, 1:2].reshape(()),
    "itself": lambda w: w[:],
}


@pytest.mark.parametrize("base_first", [True, False], ids=["base_first", "view_first"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("source", ["numpy", "torch"])
@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_views_stay_views(
    torch: Any, source: str, target: str, view: str, base_first: bool
) -> None:
    w = make(source, np.arange(24.0).reshape(4, 6).tolist())
    v = VIEWS[view](w)
    tree = {"w": w, "v": v} if base_first else {"v": v, "w": w}
    new = MOVERS[target](tree, copy=True)
    assert numbers(new["v"]) == numbers(v)
    assert numbers(new["w"]) == numbers(w)
    new["w"][...] = -1.0
    assert (np.array(numbers(new["v"])) == -1.0).all(), "the view does not see its new base"
    assert w[0, 1] == 1.0
    new["v"][...] = 5.0
    assert numbers(VIEWS[view](new["w"])) == numbers(new["v"])


@pytest.mark.parametrize("base_first", [True, False], ids=["base_first", "view_first"])
def test_views_with_negative_strides_stay_views_in_numpy(base_first: bool) -> None:
    w = np.arange(24.0).reshape(4, 6)
    tree = {"w": w, "v": w[::-1, ::-2]} if base_first else {"v": w[::-1, ::-2], "w": w}
    new = to_numpy(tree, copy=True)
    assert new["v"].tolist() == w[::-1, ::-2].tolist()
    new["w"][...] = -1.0
    assert (new["v"] == -1.0).all()


@pytest.mark.parametrize("base_first", [True, False], ids=["base_first", "view_first"])
def test_a_whole_array_reversed_stays_a_view_in_numpy(base_first: bool) -> None:
    """Base and view have the same span: whichever comes first, the dense one is the base."""
    w = np.arange(4.0)
    tree = {"w": w, "v": w[::-1]} if base_first else {"v": w[::-1], "w": w}
    new = to_numpy(tree, copy=True)
    assert new["v"].tolist() == [3.0, 2.0, 1.0, 0.0]
    new["w"][0] = 9.0
    assert new["v"][-1] == 9.0


@pytest.mark.parametrize("base_first", [True, False], ids=["base_first", "view_first"])
def test_torch_has_no_negative_strides_and_says_so(torch: Any, base_first: bool) -> None:
    w = np.arange(4.0)
    tree = {"w": w, "v": w[::-1]} if base_first else {"v": w[::-1], "w": w}
    with pytest.warns(fmapper.TieWarning, match=r"model\.[vw] with model\.[vw]"):
        new = to_torch(tree)
    assert new["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert new["v"].tolist() == [3.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_a_view_of_a_slice_stays_a_view(torch: Any, target: str) -> None:
    """The base need not be contiguous: `w` is half of a fused matrix, `t` its transpose."""
    fused = np.arange(24.0).reshape(4, 6)
    tree = {"w": fused[:, :3], "t": fused[:, :3].T}
    new = MOVERS[target](tree, copy=True)
    assert numbers(new["t"]) == fused[:, :3].T.tolist()
    new["w"][...] = -1.0
    assert (np.array(numbers(new["t"])) == -1.0).all()


@pytest.mark.parametrize("target", MOVERS)
def test_interleaved_slices_that_share_nothing_are_no_tie(
    torch: Any, jax: Any, target: str
) -> None:
    """q and k of a fused matrix lie in the same span of memory, but have no element in common."""
    fused = np.arange(24, dtype=np.float32).reshape(4, 6)
    new = MOVERS[target]({"q": fused[:, :3], "k": fused[:, 3:]}, copy=True)  # no TieWarning
    assert numbers(new["q"]) == fused[:, :3].tolist()
    assert numbers(new["k"]) == fused[:, 3:].tolist()


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_partial_overlap_is_reported(torch: Any, target: str) -> None:
    w = np.arange(10, dtype=np.float32)
    with pytest.warns(fmapper.TieWarning, match=r"model\.b with model\.a"):
        new = MOVERS[target]({"a": w[:6], "b": w[4:]}, copy=True)
    assert numbers(new["a"]) == w[:6].tolist()
    assert numbers(new["b"]) == w[4:].tolist()


def test_slices_side_by_side_are_no_tie(torch: Any) -> None:
    w = np.arange(10, dtype=np.float32)
    new = to_torch({"a": w[:5], "b": w[5:]})
    new["a"][...] = -1.0
    assert new["b"].tolist() == [5, 6, 7, 8, 9]


def test_several_views_of_several_bases(torch: Any) -> None:
    a, b = np.arange(6.0).reshape(2, 3), np.arange(8.0)
    tree = {"a": a, "at": a.T, "ar": a[1], "b": b, "b1": b[4:], "c": np.zeros(2)}
    new = to_torch(tree)
    new["a"].zero_()
    new["b"].fill_(7.0)
    assert not new["at"].any()
    assert not new["ar"].any()
    assert new["b1"].tolist() == [7.0] * 4
    assert new["c"].tolist() == [0.0, 0.0]


def test_views_of_a_cast_stay_views(torch: Any) -> None:
    w = np.arange(6.0).reshape(2, 3)
    new = to_torch({"w": w, "t": w.T}, dtype="float16")
    assert new["t"].dtype is torch.float16
    new["w"].zero_()
    assert not new["t"].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_views_of_ml_dtypes_stay_views(ml_dtypes: Any, torch: Any, dtype: str) -> None:
    w = np.arange(6.0).reshape(2, 3).astype(getattr(ml_dtypes, dtype))
    for mover in (to_numpy(copy=True), to_torch):
        new = mover({"w": w, "t": w.T})
        new["w"][0, 1] = 4.0
        assert float(new["t"][1, 0]) == 4.0


@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_jax_cannot_hold_views_and_says_so_once(torch: Any, jax: Any, source: str) -> None:
    w = make(source, np.arange(6.0).reshape(2, 3).tolist())
    with pytest.warns(fmapper.TieWarning) as caught:
        new = to_jax({"w": w, "t": w.T, "row": w[0]})
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "jax" in text
    assert "model.t with model.w" in text
    assert "model.row with model.w" in text
    assert numbers(new["t"]) == [[0, 3], [1, 4], [2, 5]]
    assert numbers(new["row"]) == [0, 1, 2]


def test_conjugate_views_are_reported(torch: Any) -> None:
    """`w` and `w.conj()` share memory; NumPy cannot say so."""
    w = torch.tensor([1 + 2j, 3 - 1j])
    with pytest.warns(fmapper.TieWarning):
        new = to_numpy({"w": w, "c": w.conj()})
    assert new["c"].tolist() == [1 - 2j, 3 + 1j]


def test_tied_parameters_that_are_views(torch: Any) -> None:
    w = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    t = torch.nn.Parameter(w.detach().T)
    w.grad, t.grad = torch.ones(2, 3), torch.full((3, 2), 2.0)
    t.tag = "decoder"
    new = to_torch({"w": w, "t": t}, copy=True)
    assert type(new["t"]) is torch.nn.Parameter
    with torch.no_grad():
        new["w"].zero_()
    assert not new["t"].any()
    assert new["t"].tag == "decoder"
    assert new["w"].grad.tolist() == w.grad.tolist()
    assert new["t"].grad is not None, ".grad goes with a parameter that is a view, too"
    assert new["t"].grad.tolist() == t.grad.tolist()


def test_a_tied_leaf_of_autograd_still_wants_a_gradient(torch: Any) -> None:
    w = torch.ones(2, 3, requires_grad=True)
    t = w.detach().T.requires_grad_()
    new = to_torch({"w": w, "t": t}, copy=True)
    assert new["w"].requires_grad
    assert new["t"].requires_grad


# --- the forgotten functor -----------------------------------------------------------------------


def _closure() -> Any:
    w = np.ones(2)
    return lambda x: x @ w


ONES = np.ones(2)


def _default(x: Any, w: Any = ONES) -> Any:
    return x @ w


class Slotted:
    __slots__ = ("w",)

    def __init__(self) -> None:
        self.w = np.ones(2)


class Bound:
    def __init__(self) -> None:
        self.w = np.ones(2)

    def call(self) -> Any:
        return self.w


@dataclasses.dataclass
class Record:
    w: Any
    n: int = 0


class NamedList(list[Any]):
    pass


def _named_list() -> Any:
    made = NamedList([1])
    made.scale = np.ones(2)
    return made


def _extra_field() -> Any:
    made = fmapper.functor(dataclasses.make_dataclass("Extra", ["w"]))(np.ones(2))
    made.cache = np.ones(3)
    return made


HOLDERS: dict[str, tuple[Callable[[], Any], str]] = {
    "attribute": (
        lambda: Plain(w=np.ones(2), n=3),
        r"Plain holds arrays in \.w.*@fmapper\.functor",
    ),
    "two": (lambda: Plain(w=np.ones(2), b=[np.ones(2)]), r"\.w, \.b"),
    "nested": (lambda: Plain(inner=Plain(w=np.ones(2))), r"\.inner"),
    "in_a_container": (lambda: Plain(layers={"a": [np.ones(2)]}), r"\.layers"),
    "slots": (Slotted, r"Slotted holds arrays in \.w"),
    "dataclass": (lambda: Record(np.ones(2)), r"Record holds arrays in \.w"),
    "closure": (_closure, r"closure \(w\)"),
    "defaults": (lambda: _default, r"its defaults"),
    "partial": (lambda: functools.partial(_default, w=np.ones(2)), r"keywords\['w'\]"),
    "partial_args": (lambda: functools.partial(print, np.ones(2)), r"args\[0\]"),
    "partial_func": (lambda: functools.partial(_closure()), r"func"),
    "bound_method": (lambda: Bound().call, r"the object it is bound to"),
    "set": (lambda: {Plain(w=np.ones(2))}, r"set holds arrays in its items"),
    "frozenset": (lambda: frozenset([Plain(w=np.ones(2))]), r"frozenset holds arrays"),
    "mapping_proxy": (lambda: types.MappingProxyType({"w": np.ones(2)}), r"mappingproxy.*\['w'\]"),
    "list_attribute": (_named_list, r"NamedList holds arrays in \.scale, besides its items"),
    "beside_the_fields": (_extra_field, r"Extra holds arrays in \.cache, besides its fields"),
    "wrapped": (lambda: functools.lru_cache(_closure()), r"holds arrays in"),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_undeclared_holder_of_arrays_is_an_error(holder: str) -> None:
    made, text = HOLDERS[holder]
    tree = {"actor": [made()]}
    for mover in (to_numpy, to_cpu, to_device("cpu")):
        with pytest.raises(fmapper.NotAFunctorError, match=r"^model\.actor\[0\].*" + text):
            fmap(mover, tree)
    with pytest.raises(fmapper.NotAFunctorError, match=r"^model\.actor\[0\].*" + text):
        to_cpu(tree, strict=True)


@pytest.mark.parametrize("holder", HOLDERS)
def test_strict_false_leaves_it_alone(holder: str) -> None:
    one = HOLDERS[holder][0]()
    new = to_numpy({"actor": one, "w": np.ones(2)}, strict=False)
    assert type(new["actor"]) is type(one)
    if fmapper.is_leaf(one):
        assert new["actor"] is one


def test_the_error_gives_the_line_to_add() -> None:
    with pytest.raises(fmapper.NotAFunctorError) as caught:
        to_numpy({"net": Plain(w=np.ones(2), b=np.ones(2), n=1)})
    text = str(caught.value)
    assert "Decorate it with @fmapper.functor, or mark it with @fmapper.leaf" in text
    assert "fmapper.functor(Plain, children=('w', 'b'))" in text


def test_the_error_names_all_classes_that_must_be_declared() -> None:
    class Outer(Plain): ...

    class Inner(Plain): ...

    tree = {
        "a": Plain(w=np.ones(2)),
        "b": [Outer(inner=Inner(v=np.ones(2)), n=1)],
        "c": Plain(other=np.ones(3)),
    }
    for look in (to_numpy, fmapper.state):
        with pytest.raises(fmapper.NotAFunctorError) as caught:
            look(tree)
        text = str(caught.value)
        assert "model.a: Plain holds arrays in .w" in text or "a: Plain" in text
        assert "So must these classes be declared: " in text
        assert "Outer holds arrays in .inner" in text
        assert "Inner holds arrays in .v" in text
    with pytest.raises(fmapper.NotAFunctorError) as caught:
        to_numpy({"a": Plain(w=np.ones(2)), "c": Plain(w=np.ones(3))})
    assert "So must" not in str(caught.value)


def test_arrays_of_every_backend_count(torch: Any, jax: Any) -> None:
    for w in (torch.ones(2), jax.numpy.ones(2), torch.nn.Linear(1, 1)):
        with pytest.raises(fmapper.NotAFunctorError, match=r"\.w"):
            to_cpu({"a": Plain(w=w)})


def test_a_long_list_before_the_array_does_not_hide_it() -> None:
    """A silent no-op is what this check is there to prevent; a vocabulary is a common neighbour."""
    names = [str(i) for i in range(20_000)]
    for inner in (Plain(names=names, w=np.ones(2)), Plain(w=np.ones(2), names=names)):
        with pytest.raises(fmapper.NotAFunctorError):
            to_numpy({"net": Plain(inner=inner)})


def test_holders_without_arrays_are_fine() -> None:
    for x in (
        Plain(n=3),
        functools.partial(print, 1),
        Bound,
        {1, 2},
        frozenset(),
        Plain().__init__,
    ):
        assert to_numpy({"x": x})["x"] is x


def test_a_declared_leaf_is_respected() -> None:
    @fmapper.leaf
    class Opaque:
        def __init__(self) -> None:
            self.w = np.ones(2)

    one = Opaque()
    assert to_cpu({"a": one}, strict=True)["a"] is one
    assert to_cpu({"a": one, "b": Plain(inner=one)})["a"] is one


def test_children_say_what_moves(torch: Any) -> None:
    @fmapper.functor(children=("w",))
    class Part:
        def __init__(self) -> None:
            self.w, self.scratch = np.ones(2), np.ones(3)

    part = Part()
    new = to_torch(part)
    assert type(new.w) is torch.Tensor
    assert new.scratch is part.scratch, "what is not a child is carried over"


def test_nothing_has_moved_when_it_raises(torch: Any) -> None:
    tree = {"w": np.ones(2), "net": Plain(w=np.ones(2))}
    before = dict(tree)
    with pytest.raises(fmapper.NotAFunctorError):
        to_torch(tree)
    assert all(tree[key] is before[key] for key in before)


# --- devices -------------------------------------------------------------------------------------


def test_devices_lists_every_backend(torch: Any, jax: Any) -> None:
    found = fmapper.devices()
    assert {"numpy:cpu", "torch:cpu", "jax:cpu:0"} <= set(map(str, found))
    assert all(isinstance(device, Device) for device in found)
    assert len(set(found)) == len(found)


def test_get_device(torch: Any) -> None:
    assert fmapper.get_device({"n": 1, "s": "x", "none": None}) is None
    assert str(fmapper.get_device(np.ones(2))) == "numpy:cpu"
    assert str(fmapper.get_device([torch.nn.Linear(1, 1)])) == "torch:cpu"
    assert str(fmapper.get_device([torch.ones(1, device="meta")])) == "torch:meta"
    assert fmapper.get_device(np.float32(3)) == Device("numpy", "cpu")


def test_get_device_of_a_mixed_tree_lists_the_paths(torch: Any) -> None:
    tree = {"a": np.ones(1), "b": [torch.ones(1), torch.ones(1)], "n": 2}
    with pytest.raises(fmapper.MixedDevicesError) as caught:
        fmapper.get_device(tree)
    text = str(caught.value)
    assert "numpy:cpu: model.a" in text
    assert "torch:cpu: model.b[0], model.b[1]" in text


def test_get_device_of_a_deleted_array_names_the_path(jax: Any) -> None:
    gone = jax.numpy.ones(2)
    gone.delete()
    with pytest.raises(fmapper.FmapperError, match=r"model\.a\[0\].*deleted"):
        fmapper.get_device({"a": [gone]})


@pytest.mark.parametrize(
    "bad", ["gpux", "cud:0", "cuda:x", "cuda:-1", "torch", "jax:", "", ":0", "tf:gpu:0", 3, None]
)
def test_a_bad_device_lists_the_good_ones(torch: Any, jax: Any, bad: Any) -> None:
    with pytest.raises(fmapper.DeviceError) as caught:
        to_device(bad)
    text = str(caught.value)
    assert repr(bad) in text
    for good in ("cpu", "numpy:cpu", "torch:cpu", "jax:cpu:0"):
        assert good in text
    if bad is not None:
        with pytest.raises(fmapper.DeviceError, match="is not a device"):
            to_jax(device=bad)


@pytest.mark.parametrize(
    "good", ["cpu", "gpu", "gpu:1", "cuda", "cuda:0", "mps", "tpu:0", "meta", "torch:cuda:0"]
)
def test_good_device_strings(torch: Any, jax: Any, good: str) -> None:
    assert good in repr(to_device(good))


def test_device_objects_of_the_frameworks(torch: Any, jax: Any) -> None:
    w = torch.ones(2)
    assert to_device(torch.device("cpu"))(w) is w
    assert to_torch(np.ones(2), device=torch.device("cpu")).device.type == "cpu"
    first = jax.devices("cpu")[0]
    assert to_jax(np.ones(2, np.float32), device=first).devices() == {first}
    with pytest.raises(fmapper.DeviceError, match="to_torch"):
        to_jax(device=torch.device("cpu"))


def test_a_qualified_device_of_another_backend(torch: Any, jax: Any) -> None:
    with pytest.raises(fmapper.DeviceError, match=r"model\.a.*to_jax\(device='jax:cpu:0'\)"):
        to_device("jax:cpu:0")({"a": torch.ones(2)})


def test_meta_gives_shapes_without_values(torch: Any) -> None:
    new = to_device("meta")({"w": torch.ones(2, 3)})["w"]
    assert (new.device.type, tuple(new.shape)) == ("meta", (2, 3))


NO_GPU = """
    import numpy as np, torch, jax, jax.numpy as jnp, warnings, fmapper
    from fmapper import to_gpu, to_device, to_torch, to_jax, to_cpu

    for word, tree in {
        "cuda:0": [torch.ones(1)], "torch:cuda:1": [torch.ones(1)], "gpu": [jnp.ones(1)],
        "jax:gpu:1": [jnp.ones(1)], "cuda": [np.ones(1)], "tpu:0": [jnp.ones(1)],
    }.items():
        try:
            to_device(word)(tree)
        except fmapper.DeviceUnavailableError as error:
            print(word, "|", error)
    for call in (
        lambda: to_torch([np.ones(1)], device="cuda"),
        lambda: to_jax([np.ones(1)], device="gpu"),
        lambda: to_gpu(strict=True)([np.ones(1)]),
        lambda: to_gpu([jnp.ones(1)], strict=True),
        lambda: to_gpu([torch.ones(1)], strict=True),
        lambda: to_torch([1], device="cpu:7"),
        lambda: to_torch([np.ones(1)], device="cpu:7"),
    ):
        try:
            print("moved", call())
        except fmapper.DeviceUnavailableError as error:
            print("raised", "|", error)
    t, n = torch.ones(1), np.ones(1)
    quiet = to_gpu({"t": t, "n": n}, strict=False)
    assert quiet["t"] is t and quiet["n"] is n
    cast = to_gpu({"t": t, "n": n}, strict=False, dtype="float16")
    print("cast", cast["t"].dtype, cast["n"].dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one = to_gpu({"t": t, "n": n, "j": jnp.ones(1)})
        two = fmapper.fmap(to_gpu, [t])
        assert one["t"] is t and one["n"] is n and two[0] is t
    first = caught[0]
    print("warned", len(caught), first.category.__name__, first.filename, "|", first.message)
"""


@pytest.fixture(scope="module")
def no_gpu() -> list[str]:
    """What the script prints; one interpreter for all of it, since it imports both frameworks."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    return run(NO_GPU).splitlines()


@pytest.mark.nightly
def test_an_explicit_device_that_is_not_here_says_why(no_gpu: list[str]) -> None:
    said = dict(line.split(" | ", 1) for line in no_gpu[:6])
    assert set(said) == {"cuda:0", "torch:cuda:1", "gpu", "jax:gpu:1", "cuda", "tpu:0"}
    for word in ("cuda:0", "torch:cuda:1"):
        assert "CPU-only build" in said[word] or "no driver or no GPU" in said[word]
        assert "Here: torch:cpu" in said[word]
    for word in ("gpu", "jax:gpu:1", "tpu:0"):
        assert "runs on the CPU only" in said[word]
        assert "Here: jax:cpu:0" in said[word]
    assert "no installed backend sees a GPU" in said["cuda"]
    assert "torch:" in said["cuda"]
    assert "jax:" in said["cuda"]


@pytest.mark.nightly
def test_to_gpu_with_strict_and_too_high_an_index_raise(no_gpu: list[str]) -> None:
    outcomes = [line.partition(" ")[0] for line in no_gpu[6:13]]
    assert outcomes == ["raised"] * 5 + ["moved", "raised"]
    assert "torch:cpu:7" in no_gpu[12]


@pytest.mark.nightly
def test_to_gpu_warns_once(no_gpu: list[str]) -> None:
    words, text = no_gpu[14].split(" | ", 1)
    assert words.split() == ["warned", "1", "NoGPUWarning", "<string>"]
    assert "to_gpu leaves the model on the CPU" in text
    assert "to_gpu(strict=True) raises" in text


@pytest.mark.nightly
def test_to_gpu_casts_where_it_cannot_move(no_gpu: list[str]) -> None:
    assert no_gpu[13] == "cast torch.float16 float16"


def test_to_gpu_without_any_gpu_framework() -> None:
    code = (
        HIDE
        + """
    hide("torch", "jax")
    import warnings, numpy as np, fmapper
    w = np.ones(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fmapper.to_gpu(w) is w
    print(len(caught), caught[0].message)
    """
    )
    assert "no installed framework computes on one" in run(code)


# --- where NumPy arrays go -----------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, type]]:
    """NumPy and two make-believe backends, `alpha` and `beta`, each with a GPU; nothing else."""
    arrays: dict[str, type] = {}

    def backend(name: str) -> fmapper.backends.Adapter:
        class Array:
            def __init__(self, data: Any, device: Device) -> None:
                self.data, self.device = data, device

        class Made(fmapper.backends.Adapter):
            def is_array_type(self, cls: type) -> bool:
                return cls is Array

            def device(self, array: Any) -> Device:
                return array.device

            def dtype(self, array: Any) -> str:
                return str(array.data.dtype.name)

            def shape(self, array: Any) -> tuple[int, ...]:
                return tuple(array.data.shape)

            def devices(self) -> list[Device]:
                return [Device(name, "cpu"), Device(name, "gpu", 0), Device(name, "gpu", 1)]

            def to_device(self, arrays: Any, device: Device, *, copy: Any) -> Iterator[Any]:
                for array in arrays:
                    yield Array(array.data.copy(), device)

            def export(self, arrays: Any, target: Device) -> fmapper.backends.Exchange:
                return fmapper.backends.Exchange([array.data for array in arrays])

            def take(self, exchange: Any, device: Device, *, share: bool) -> Iterator[Any]:
                for data in exchange.data:
                    yield Array(data.copy(), device)

        Made.name = name
        arrays[name] = Array
        return Made()

    for name in ("alpha", "beta"):
        fmapper.backends.register_adapter(backend(name))
    monkeypatch.setattr(
        "fmapper.backends.discovery.installed_backends", lambda: ["numpy", "alpha", "beta"]
    )
    yield arrays
    fmapper.use_backend(None)
    for name in ("alpha", "beta"):
        fmapper.backends.unregister_adapter(name)


def test_two_backends_with_a_gpu_need_a_choice(two_gpus: dict[str, type]) -> None:
    with pytest.raises(fmapper.DeviceError, match=r"model\.w.*alpha, beta.*use_backend\('alpha'\)"):
        to_gpu({"w": np.ones(2)})
    assert to_gpu({"n": 3}) == {"n": 3}, "no NumPy array, no question"


def test_use_backend(two_gpus: dict[str, type]) -> None:
    fmapper.use_backend("beta")
    w = np.ones(2)
    new = to_gpu({"w": w, "again": w})
    assert type(new["w"]) is two_gpus["beta"]
    assert new["w"] is new["again"]
    assert str(fmapper.get_device(new)) == "beta:gpu:0"
    assert str(fmapper.get_device(to_device("gpu:1")(w))) == "beta:gpu:1"
    with fmapper.use_backend("alpha"):
        assert type(to_gpu(w)) is two_gpus["alpha"]
    assert type(to_gpu(w)) is two_gpus["beta"]
    fmapper.use_backend(None)
    with pytest.raises(fmapper.DeviceError):
        to_gpu(w)


def test_use_backend_ends_with_its_block_when_that_raises(two_gpus: dict[str, type]) -> None:
    with pytest.raises(RuntimeError, match="inside"), fmapper.use_backend("alpha"):
        raise RuntimeError("inside")
    with pytest.raises(fmapper.DeviceError):
        to_gpu(np.ones(2))


def test_the_only_backend_with_a_gpu_is_taken(
    two_gpus: dict[str, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fmapper.backends.discovery.installed_backends", lambda: ["numpy", "beta"])
    assert type(to_gpu(np.ones(2))) is two_gpus["beta"]


def test_a_chosen_backend_without_a_gpu_is_not_replaced_in_silence(
    two_gpus: dict[str, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who says `alpha` must not get arrays of `beta`."""
    alpha = type(fmapper.backends.get_adapter("alpha"))
    monkeypatch.setattr(alpha, "devices", lambda self: [Device("alpha", "cpu")])
    fmapper.use_backend("alpha")
    with pytest.raises((fmapper.DeviceError, fmapper.DeviceUnavailableError), match="alpha"):
        to_gpu(np.ones(2), strict=True)


def test_arrays_of_a_backend_stay_with_it(two_gpus: dict[str, type]) -> None:
    fmapper.use_backend("beta")
    here = to_gpu(np.ones(2), strict=True)
    fmapper.use_backend("alpha")
    assert to_gpu(here) is here
    assert type(to_device("gpu:1")(here)) is two_gpus["beta"]
    assert str(fmapper.get_device(to_cpu(here))) == "beta:cpu"


def test_use_backend_that_is_not_here() -> None:
    with pytest.raises(fmapper.BackendUnavailableError, match="no adapter for 'tensorflow'"):
        fmapper.use_backend("tensorflow")


def test_gpu_means_mps_on_a_mac(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = torch.accelerator
    monkeypatch.setattr(there, "current_accelerator", lambda *_, **__: torch.device("mps"))
    monkeypatch.setattr(there, "device_count", lambda: 1)
    monkeypatch.setattr(there, "current_device_index", lambda: 0)
    assert Device("torch", "mps", 0) in fmapper.backends.get_adapter("torch").devices()
    assert fmapper.backends.get_adapter("torch").find_device("gpu", None) == Device(
        "torch", "mps", 0
    )


# --- frameworks that are not installed -----------------------------------------------------------

HIDE = """
    import importlib.machinery, sys

    def hide(*names):
        class Hiding(importlib.machinery.PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                if name.partition(".")[0] in names:
                    return None
                return super().find_spec(name, path, target)
        at = sys.meta_path.index(importlib.machinery.PathFinder)
        sys.meta_path[at] = Hiding
"""


@pytest.mark.nightly
@pytest.mark.parametrize("missing", ["torch", "jax"])
def test_a_backend_that_is_not_installed(missing: str) -> None:
    code = (
        HIDE
        + f"""
    hide({missing!r})
    import numpy as np, fmapper
    try:
        fmapper.to_{missing}({{"w": np.ones(2)}})
    except fmapper.BackendUnavailableError as error:
        print(isinstance(error, ImportError), error)
    print({missing!r} in {{device.backend for device in fmapper.devices()}})
    print(fmapper.to_numpy([np.ones(1)])[0].tolist())
    """
    )
    lines = run(code).splitlines()
    assert lines[0].startswith("True ")
    assert f"Install it: pip install '{missing}>=" in lines[0]
    assert lines[1:] == ["False", "[1.0]"]


@pytest.mark.nightly
def test_a_backend_that_is_blocked_in_sys_modules() -> None:
    """`sys.modules["jax"] = None` is Python's own way to say that there is no such module."""
    code = """
    import sys
    sys.modules["jax"] = None
    import numpy as np, fmapper
    print(fmapper.to_numpy([np.ones(1)])[0].tolist(), "numpy:cpu" in map(str, fmapper.devices()))
    try:
        fmapper.to_jax(np.ones(2))
    except fmapper.BackendUnavailableError as error:
        print(error)
    """
    lines = run(code).splitlines()
    assert lines[0] == "[1.0] True"
    assert "Install it: pip install 'jax>=" in lines[1]


@pytest.mark.nightly
def test_torch_without_numpy(torch: Any) -> None:
    """NumPy is not among torch's requirements. It works without, or it says that NumPy is missing.

    What it must not do is to take tensors for things that are no arrays and leave them as they are.
    """
    code = (
        HIDE
        + """
    import warnings
    warnings.simplefilter("ignore")     # torch itself says that there is no NumPy
    hide("numpy", "jax")
    import torch, fmapper
    w = torch.ones(2)
    try:
        new = fmapper.to_torch({"w": w}, dtype="float16", copy=True)
        print(fmapper.get_device(new), new["w"].dtype, fmapper.to_cpu([w])[0] is w)
    except fmapper.BackendUnavailableError as error:
        print(error)
    """
    )
    out = run(code)
    assert out == "torch:cpu torch.float16 True\n" or "numpy" in out.lower()


# --- precision -----------------------------------------------------------------------------------


def test_integers_that_fit_are_narrowed_in_silence(jax: Any) -> None:
    new = to_jax({"a": np.array([2**31 - 1, -(2**31)]), "b": np.array([2**32 - 1], np.uint64)})
    assert [str(new[key].dtype) for key in "ab"] == ["int32", "uint32"]
    assert numbers(new["a"]) == [2**31 - 1, -(2**31)]
    assert numbers(new["b"]) == [2**32 - 1]


@pytest.mark.parametrize(
    "values",
    [np.array([1, 2**31]), np.array([-(2**31) - 1]), np.array([2**32], np.uint64)],
    ids=["too_large", "too_small", "unsigned"],
)
@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_integers_that_do_not_fit_are_refused(jax: Any, source: str, values: Any) -> None:
    tree = {"a": [MOVERS[source](values)]} if pytest.importorskip(source) else {}
    with pytest.raises(fmapper.LossyCastError, match=r"^model\.a\[0\]: integers do not fit.*x64"):
        to_jax(tree)


def test_an_error_is_not_its_own_cause(jax: Any) -> None:
    """Walking `__cause__` must come to an end."""
    with pytest.raises(fmapper.LossyCastError) as caught:
        to_jax(np.array([2**40]))
    assert caught.value.__cause__ is not caught.value


def test_floats_are_narrowed_with_one_warning(jax: Any) -> None:
    tree = {
        "a": np.array([1 / 3]),
        "b": [np.array([1j]), np.ones(1, np.float32)],
        "n": np.arange(2),
    }
    with pytest.warns(fmapper.PrecisionWarning) as caught:
        new = to_jax(tree)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "model.a" in text
    assert "model.b[0]" in text
    assert "model.b[1]" not in text
    assert "model.n" not in text
    assert str(new["a"].dtype) == "float32"
    assert str(new["b"][0].dtype) == "complex64"
    assert numbers(new["a"]) == [float(np.float32(1 / 3))]


def test_a_complex_leaf_is_not_called_a_float(jax: Any) -> None:
    with pytest.warns(fmapper.PrecisionWarning, match="complex128 became complex64") as caught:
        to_jax({"b": np.array([1j]), "a": np.array([1 / 3])})
    assert "float64 became float32" in str(caught[0].message)


@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_a_float_that_would_become_infinite_is_refused(jax: Any, source: str) -> None:
    pytest.importorskip(source)
    w = make(source, [1.0, 1e300], "float64")
    with pytest.raises(fmapper.LossyCastError, match=r"^model\.a: finite values become infinite"):
        to_jax({"a": w})
    with pytest.raises(fmapper.LossyCastError, match=r"^model\.a: finite values become infinite"):
        to_jax({"a": w}, dtype="float32")


def test_infinities_and_nans_pass(jax: Any) -> None:
    new = to_jax(np.array([np.inf, -np.inf, np.nan, -0.0]), dtype="float32")
    got = np.asarray(new)
    assert got[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(got[2])
    assert np.signbit(got[3])


def test_x64(jax: Any) -> None:
    tree = {"i": np.array([2**40]), "f": np.array([1e300, 1 / 3]), "c": np.array([1e300j])}
    with x64():
        new = to_jax(tree)
        assert [str(new[key].dtype) for key in "ifc"] == ["int64", "float64", "complex128"]
        back = to_numpy(new)
    for key, want in tree.items():
        assert back[key].dtype == want.dtype
        assert back[key].tolist() == want.tolist()


def test_what_jax_has_wide_leaves_it_wide(jax: Any, torch: Any) -> None:
    with x64():
        wide = {"f": jax.numpy.array([1e300]), "i": jax.numpy.array([2**40])}
    for mover in (to_numpy, to_torch):
        new = mover(wide)
        assert "float64" in str(new["f"].dtype)
        assert numbers(new["f"]) == [1e300]
        assert numbers(new["i"]) == [2**40]
    assert to_jax(wide)["f"] is wide["f"]


@pytest.mark.parametrize("backend", MOVERS)
def test_dtype_touches_floating_and_complex_leaves_only(backend: str, ml_dtypes: Any) -> None:
    pytest.importorskip(backend)
    tree = {
        "f": np.ones(2, np.float32),
        "d": np.ones(2),
        "c": np.ones(2, np.complex128),
        "i": np.ones(2, np.int8),
        "b": np.ones(2, bool),
        "u": np.ones(2, np.uint8),
    }
    same = {"i": "int8", "b": "bool", "u": "uint8"}
    for asked, real, complexes in (
        ("float32", "float32", "complex64"),
        ("float16", "float16", "complex64"),
        ("bfloat16", "bfloat16", "complex64"),
        ("complex64", "float32", "complex64"),
    ):
        new = MOVERS[backend](tree, dtype=asked)
        found = {key: str(array.dtype).removeprefix("torch.") for key, array in new.items()}
        assert found == {"f": real, "d": real, "c": complexes, **same}
        assert numbers(new["i"]) == [1, 1]
    assert tree["d"].dtype == np.float64


@pytest.mark.parametrize("backend", MOVERS)
def test_an_explicit_dtype_is_meant_but_not_at_any_price(backend: str) -> None:
    pytest.importorskip(backend)
    new = MOVERS[backend](np.array([1 / 3]), dtype="float32")  # no PrecisionWarning
    assert numbers(new) == [float(np.float32(1 / 3))]
    with pytest.raises(fmapper.LossyCastError, match=r"model\.w.*float16"):
        MOVERS[backend]({"w": np.array([1e6], np.float32)}, dtype="float16")


@pytest.mark.parametrize("source", MOVERS)
@pytest.mark.parametrize("target", MOVERS)
def test_a_float8_that_cannot_hold_a_number_is_refused(
    ml_dtypes: Any, source: str, target: str
) -> None:
    """e4m3 has no infinity: some make 1000 into 448, others into NaN. Neither will do."""
    pytest.importorskip(source)
    pytest.importorskip(target)
    w = MOVERS[source](np.array([1.0, 1000.0], np.float32))
    with pytest.raises(fmapper.LossyCastError, match=r"model\.w"):
        MOVERS[target]({"w": w}, dtype="float8_e4m3fn")
    fine = MOVERS[source](np.array([1.0, 448.0], np.float32))
    new = to_numpy(MOVERS[target](fine, dtype="float8_e4m3fn"))
    assert new.astype(np.float32).tolist() == [1.0, 448.0]


def test_an_asked_width_that_jax_lacks(jax: Any) -> None:
    with pytest.warns(fmapper.PrecisionWarning, match="float64 became float32"):
        to_jax(np.ones(1, np.float32), dtype="float64")


def test_widening_is_exact(torch: Any, jax: Any) -> None:
    third = np.array([1 / 3], np.float32)
    for w in (third, torch.from_numpy(third.copy()), jax.numpy.array(third)):
        for mover in (to_numpy, to_torch):
            new = mover(w, dtype="float64")
            assert "float64" in str(new.dtype)
            assert numbers(new) == [float(third[0])]


# --- parameters, modules and what hangs on them --------------------------------------------------


def test_a_parameter_stays_a_parameter(torch: Any) -> None:
    class Marked(torch.nn.Parameter):
        pass

    p = Marked(torch.arange(3.0), requires_grad=False)
    p.tag = {"decay": False}
    q = torch.nn.Parameter(torch.arange(3.0))
    q.grad = torch.ones(3)
    for mover in (to_torch(copy=True), to_torch(dtype="float64"), to_cpu(copy=True)):
        new_p, new_q = mover([p, q])
        assert type(new_p) is Marked
        assert isinstance(new_p, torch.nn.Parameter)
        assert not new_p.requires_grad
        assert new_p.tag == {"decay": False}
        assert type(new_q) is torch.nn.Parameter
        assert new_q.requires_grad
        assert new_q.is_leaf
        assert new_q.grad is not q.grad
        assert new_q.grad.dtype is new_q.dtype
        assert new_q.grad.tolist() == [1.0, 1.0, 1.0]
        with torch.no_grad():
            new_q.zero_()
        assert q.tolist() == [0.0, 1.0, 2.0]
    assert q.grad.tolist() == [1.0, 1.0, 1.0]


def test_leaves_and_inner_tensors_of_autograd(torch: Any) -> None:
    leaf = torch.ones(2, requires_grad=True)
    inner = leaf * 2
    new_leaf, new_inner = to_torch([leaf, inner], dtype="float64")
    assert new_leaf.is_leaf
    assert new_leaf.requires_grad
    assert not new_inner.is_leaf
    new_inner.sum().backward()
    assert leaf.grad.tolist() == [2.0, 2.0], "the graph goes on through a move"


def test_tensor_subclasses_and_their_attributes(torch: Any) -> None:
    class Named(torch.Tensor):
        pass

    old = torch.ones(2).as_subclass(Named)
    old.label = "x"
    new = to_torch(old, copy=True)
    assert type(new) is Named
    assert new.label == "x"
    assert type(to_numpy(old)) is np.ndarray


def test_a_module_moves_within_torch(torch: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    net[0].weight.grad = torch.ones(2, 2)
    new = to_torch(net, dtype="float64")
    assert type(new) is torch.nn.Sequential
    assert {p.dtype for p in new.parameters()} == {torch.float64}
    assert all(isinstance(p, torch.nn.Parameter) for p in new.parameters())
    assert set(dict(new.named_buffers())) == set(dict(net.named_buffers()))
    assert new[1].num_batches_tracked.dtype is torch.int64
    assert new[0].weight.grad.dtype is torch.float64
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert set(new.state_dict()) == set(net.state_dict())


def test_tied_parameters_of_a_module_stay_tied(torch: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].weight = net[0].weight
    new = to_torch(net, copy=True)
    assert new[0].weight is new[1].weight
    assert new[0].weight is not net[0].weight


def test_a_module_cannot_hold_other_arrays(torch: Any, jax: Any) -> None:
    for mover in (to_numpy, to_jax):
        with pytest.raises(fmapper.RebuildError, match=r"model\.net.*state.*convert"):
            mover({"net": torch.nn.Linear(1, 1)})


# --- all or nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("nth", [0, 3, 6])
def test_the_nth_leaf_fails(backend: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that runs full after n leaves: the error names the one that did not fit."""
    pytest.importorskip(backend)
    cls = type(fmapper.backends.get_adapter(backend))
    take = cls.take

    def until_full(self: Any, exchange: Any, device: Device, *, share: bool) -> Iterator[Any]:
        for at, new in enumerate(take(self, exchange, device, share=share)):
            if at == nth:
                raise MemoryError("out of memory")
            yield new

    monkeypatch.setattr(cls, "take", until_full)
    tree = {"layers": [Dense(np.full(2, i, np.float32), None) for i in range(7)]}
    before = fmapper.fleaves(tree)
    where = rf"^model\.layers\[{nth}\]\.weight: .*numpy:cpu to {backend}:cpu.*out of memory"
    with pytest.raises(fmapper.MoveError, match=where) as caught:
        fmap(MOVERS[backend], tree)
    assert "the tree is as it was" in str(caught.value)
    assert isinstance(caught.value.__cause__, MemoryError)
    after = fmapper.fleaves(tree)
    assert all(a is b for a, b in zip(before, after, strict=True))
    monkeypatch.undo()
    assert numbers(fmap(MOVERS[backend], tree)["layers"][6].weight) == [6.0, 6.0]


def test_the_bad_leaf_is_the_one_that_is_named(torch: Any) -> None:
    """Sound leaves of the same and of another backend before and behind it."""
    tree = {
        "a": np.ones(2),
        "b": torch.ones(2),
        "bad": [np.ones(1), np.array([object()])],
        "c": np.ones(3),
    }
    with pytest.raises(fmapper.UnsupportedLeafError, match=r"^model\.bad\[1\]"):
        to_torch(tree)


# --- leaves that cannot go -----------------------------------------------------------------------


def _record(fields: Any) -> Any:
    return np.zeros(2, fields)


REFUSED_BY_TORCH_AND_JAX: dict[str, Callable[[], Any]] = {
    "object": lambda: np.array([None, 1], object),
    "text": lambda: np.array(["a", "b"]),
    "bytes": lambda: np.array([b"a", b"b"]),
    "datetime": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "timedelta": lambda: np.array([1], "timedelta64[s]"),
    "structured": lambda: _record([("x", "f4"), ("y", "i4")]),
    "recarray": lambda: np.rec.array([(1.0, 2)], dtype=[("x", "f4"), ("y", "i4")]),
    "masked": lambda: np.ma.masked_array(np.array([1.0, 2.0], np.float32), mask=[True, False]),
    "masked_wide": lambda: np.ma.masked_array([1.0, 2.0], mask=[True, False]),
    "longdouble": lambda: np.ones(1, np.longdouble),
}


@pytest.mark.parametrize("kind", REFUSED_BY_TORCH_AND_JAX)
@pytest.mark.parametrize("target", ["torch", "jax"])
@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_numpy_arrays_without_a_counterpart(target: str, kind: str, dtype: str | None) -> None:
    pytest.importorskip(target)
    if kind == "longdouble" and (dtype is not None or np.dtype(np.longdouble).itemsize == 8):
        pytest.skip("that can be done")
    tree = {"ok": np.ones(1, np.float32), "x": REFUSED_BY_TORCH_AND_JAX[kind]()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fmapper.PrecisionWarning)
        with pytest.raises(fmapper.UnsupportedLeafError, match=r"^model\.x: "):
            MOVERS[target](tree, dtype=dtype)


def test_a_walk_of_ones_own_puts_every_array_in_its_place(torch: Any) -> None:
    def backwards(recurse: Any, node: Any) -> Any:
        have = fmapper.children(node)
        new = {key: recurse(child) for key, child in reversed(have.items())}
        return fmapper.rebuild(node, {key: new[key] for key in have})

    new = fmapper.fmap(to_torch, {"a": np.ones(1), "b": np.zeros(2)}, walk=backwards)
    assert (numbers(new["a"]), numbers(new["b"])) == ([1.0], [0.0, 0.0])


def test_none_made_a_leaf_does_not_shift_the_arrays(torch: Any) -> None:
    tree = {"a": None, "b": None, "c": np.ones(1)}
    new = fmapper.fmap(to_torch, tree, is_leaf=lambda x: x is None)
    assert (new["a"], new["b"], numbers(new["c"])) == (None, None, [1.0])


def test_a_mask_is_never_dropped() -> None:
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    assert to_numpy(masked) is masked
    assert to_numpy(masked, copy=True).mask.tolist() == [True, False]
    try:
        new = to_numpy(masked, dtype="float32")
    except fmapper.UnsupportedLeafError:
        return
    assert np.ma.getmaskarray(new).tolist() == [True, False]


def _fake(torch: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


TORCH_ONLY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "sparse_coo": (lambda t: t.eye(2).to_sparse(), "to_dense"),
    "sparse_csr": (lambda t: t.eye(2).to_sparse_csr(), "to_dense"),
    "meta": (lambda t: t.zeros(2, device="meta"), "meta"),
    "quantized": (lambda t: t.quantize_per_tensor(t.ones(2), 0.1, 0, t.qint8), "qint8|dequantize"),
    "nested": (lambda t: t.nested.nested_tensor([t.ones(1), t.ones(2)]), "nested"),
    "jagged": (
        lambda t: t.nested.nested_tensor([t.ones(1), t.ones(2)], layout=t.jagged),
        "nested|jagged",
    ),
    "fake": (_fake, "no values"),
    "lazy": (lambda t: t.nn.LazyLinear(2).weight, "no values yet"),
    "complex32": (lambda t: t.ones(2, dtype=t.complex32), "complex32"),
}


@pytest.mark.parametrize("kind", TORCH_ONLY)
@pytest.mark.parametrize("target", ["numpy", "jax"])
def test_tensors_without_a_counterpart(torch: Any, target: str, kind: str) -> None:
    pytest.importorskip(target)
    build, text = TORCH_ONLY[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls most of these kinds experimental
        tensor = build(torch)
    tree = {"ok": np.ones(1, np.float32), "x": [tensor]}
    with pytest.raises(fmapper.FmapperError, match=rf"(?s)^model\.x\[0\]: .*({text})") as caught:
        MOVERS[target](tree)
    expected = (fmapper.UnsupportedLeafError, fmapper.DeviceUnavailableError)
    assert isinstance(caught.value, expected)
    assert to_torch(tensor) is tensor, "in torch it may stay"


def test_meta_tensors_have_nothing_to_bring(torch: Any) -> None:
    with pytest.raises(fmapper.MoveError, match=r"^model\.w.*meta"):
        to_cpu({"w": torch.zeros(2, device="meta")})


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_tracers(jax: Any, torch: Any, target: str) -> None:
    def inside(x: Any) -> Any:
        MOVERS[target]({"x": x})
        return x

    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(fmapper.UnsupportedLeafError, match=r"^model\.x: .*tracer"):
            transform(inside)(jax.numpy.ones(2) if transform is not jax.grad else 1.0)


def test_tracers_stay_in_jax(jax: Any) -> None:
    @jax.jit
    def inside(tree: Any) -> Any:
        return to_jax(to_cpu(to_jax(tree, dtype="float16"), dtype="float32"))

    assert numbers(inside({"x": jax.numpy.ones(2)})["x"]) == [1.0, 1.0]


def test_a_copy_of_a_tracer_is_itself_or_a_tracer(jax: Any) -> None:
    new = jax.jit(lambda x: to_jax(x, copy=True) * 2)(jax.numpy.ones(2))
    assert numbers(new) == [2.0, 2.0]


def test_numpy_constants_go_to_jax_inside_jit(jax: Any) -> None:
    w = np.arange(3, dtype=np.float32)
    assert numbers(jax.jit(lambda x: to_jax(w) * x)(2.0)) == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("target", MOVERS)
def test_deleted_arrays(jax: Any, torch: Any, target: str) -> None:
    gone = jax.numpy.ones(2)
    gone.delete()
    with pytest.raises(fmapper.UnsupportedLeafError, match=r"^model\.x: .*deleted"):
        MOVERS[target]({"x": gone})


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_prng_keys_stay_in_jax(jax: Any, torch: Any, target: str) -> None:
    key = jax.random.key(0)
    assert to_jax(key) is key
    assert to_cpu({"key": key})["key"] is key
    again = to_jax(key, copy=True)
    assert jax.random.key_data(again).tolist() == jax.random.key_data(key).tolist()
    with pytest.raises(fmapper.UnsupportedLeafError, match=r"^model\.key: .*key_data"):
        MOVERS[target]({"key": key, "w": jax.numpy.ones(2)})


@pytest.mark.parametrize("target", ["torch", "jax"])
def test_numpy_four_bit_integers(ml_dtypes: Any, target: str) -> None:
    """Exact, or refused for what it is."""
    pytest.importorskip(target)
    w = np.array([1, -2, 7], ml_dtypes.int4)
    try:
        new = MOVERS[target]({"w": w})["w"]
    except fmapper.UnsupportedLeafError as error:
        assert str(error).startswith("model.w: ")  # noqa: PT017
    else:
        assert to_numpy(new).astype(int).tolist() == [1, -2, 7]


# --- scalars and odd arrays that can go ----------------------------------------------------------


@pytest.mark.parametrize(
    "scalar",
    [np.float32(1.5), np.float64(0.1), np.int8(-3), np.uint16(9), np.bool_(True), np.complex64(1j)],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("target", ["torch", "jax"])
def test_numpy_scalars_are_arrays(target: str, scalar: Any) -> None:
    pytest.importorskip(target)
    with x64() if target == "jax" else contextlib.nullcontext():
        new = MOVERS[target]({"a": scalar})["a"]
        assert backend_of(new) == target
        assert tuple(new.shape) == ()
        assert str(new.dtype).removeprefix("torch.") == scalar.dtype.name
        assert new.item() == scalar
    assert to_numpy(scalar) is scalar
    assert str(fmapper.get_device(scalar)) == "numpy:cpu"


def test_numpy_scalars_are_cast(torch: Any) -> None:
    assert to_numpy(np.float64(0.5), dtype="float16").dtype == np.float16
    assert to_torch(np.float64(0.5), dtype="float16").dtype is torch.float16


@pytest.mark.parametrize("target", ["torch", "jax"])
def test_python_numbers_are_settings(target: str) -> None:
    pytest.importorskip(target)
    for number in (True, 3, 2.5, 1j):
        assert MOVERS[target]([number]) == [number]
        assert type(MOVERS[target]([number])[0]) is type(number)


@pytest.mark.parametrize("target", ["torch", "jax"])
def test_numpy_subclasses_and_files(tmp_path: Path, target: str) -> None:
    pytest.importorskip(target)
    mapped = np.memmap(tmp_path / "w.bin", np.float32, "w+", shape=(64,))
    mapped[:] = 1.0
    new = MOVERS[target](mapped)
    mapped[:] = 2.0
    assert set(numbers(new)) == {1.0}, "the file does not show through"
    again = MOVERS[target](np.memmap(tmp_path / "w.bin", np.float32, "r", shape=(64,)))
    mapped[:] = 3.0
    assert set(numbers(again)) == {2.0}, "nor does a read-only map of it"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        matrix = np.matrix([[1, 2]], dtype=np.float32)
    assert numbers(MOVERS[target](matrix)) == [[1.0, 2.0]]


def test_conjugate_and_negative_views_of_torch(torch: Any, jax: Any) -> None:
    c = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    for mover in (to_numpy, to_jax):
        assert numbers(mover(c.conj())) == [1 - 2j, 3 + 1j]
        assert numbers(mover(c.conj().imag)) == [-2.0, 1.0]
    assert not to_torch(c.conj(), copy=True).is_meta


def test_inference_tensors(torch: Any) -> None:
    with torch.inference_mode():
        w = torch.ones(2)
    assert numbers(to_numpy(w)) == [1.0, 1.0]
    assert numbers(to_torch(w, copy=True)) == [1.0, 1.0]


# --- warnings ------------------------------------------------------------------------------------


def _here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_warnings_point_at_the_line_of_the_caller(torch: Any, jax: Any) -> None:
    w = np.ones((2, 2), np.float32)
    wide = np.ones(2)
    calls: list[Callable[[], int]] = []

    def called() -> int:
        to_jax({"w": wide})
        return _here() - 1

    def mapped() -> int:
        fmap(to_jax, {"w": wide})
        return _here() - 1

    def inside_a_leaf() -> int:
        fmap(lambda x: to_jax(x, strict=False), {"w": wide})
        return _here() - 1

    def tie() -> int:
        to_jax({"w": w, "t": w.T})
        return _here() - 1

    calls += [called, mapped, inside_a_leaf, tie]
    for call in calls:
        with pytest.warns(fmapper.FmapperWarning) as caught:
            line = call()
        assert (caught[0].filename, caught[0].lineno) == (__file__, line), call.__name__


# --- copy=False: nothing is touched --------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_zero_copy(source: str, target: str) -> None:
    pytest.importorskip(source)
    pytest.importorskip(target)
    old = MOVERS[source](aligned(np.arange(32.0).reshape(4, 8)), copy=False)
    new = MOVERS[target]({"w": old}, copy=False)["w"]
    assert backend_of(new) == target
    assert address(new) == address(old)
    assert numbers(new) == numbers(old)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_zero_copy_of_narrow_floats(ml_dtypes: Any, source: str, target: str, dtype: str) -> None:
    pytest.importorskip(source)
    pytest.importorskip(target)
    host = aligned(np.arange(64) / 8, getattr(ml_dtypes, dtype))
    old = MOVERS[source](host, copy=False)
    new = MOVERS[target](old, copy=False)
    assert address(new) == address(old) == address(host)
    assert str(new.dtype).removeprefix("torch.") == dtype


def test_zero_copy_writes_through_between_numpy_and_torch(torch: Any) -> None:
    w = np.zeros(3, np.float32)
    new = to_torch(w, copy=False)
    new[0] = 7.0
    assert w[0] == 7.0
    back = to_numpy(new, copy=False)
    back[1] = 8.0
    assert w.tolist() == [7.0, 8.0, 0.0]


def test_zero_copy_keeps_views(torch: Any) -> None:
    w = np.arange(6.0).reshape(2, 3)
    new = to_torch({"w": w, "t": w.T}, copy=False)
    assert address(new["w"]) == address(new["t"]) == address(w)
    assert new["t"].tolist() == w.T.tolist()


def test_zero_copy_of_a_parameter_is_detached(torch: Any) -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    new = to_numpy(p, copy=False)
    assert new.ctypes.data == p.data_ptr()


@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_a_cast_cannot_be_shared(target: str) -> None:
    pytest.importorskip(target)
    with pytest.raises(
        fmapper.CopyNeededError, match=r"^model\.w: .*float32 to float16.*needs a copy"
    ):
        MOVERS[target]({"w": np.ones(2, np.float32)}, copy=False, dtype="float16")


UNSHARED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "torch_reversed": ("torch", lambda w: w[::-1]),
    "torch_broadcast": ("torch", lambda w: np.broadcast_to(w[0], (4, 8))),
    "torch_big_endian": ("torch", lambda w: w.astype(w.dtype.newbyteorder(">"))),
    "jax_reversed": ("jax", lambda w: w[::-1]),
    "jax_transposed": ("jax", lambda w: w.T),
    "jax_columns": ("jax", lambda w: w[:, 1:]),
    "jax_unaligned": ("jax", lambda w: w.reshape(-1)[1:]),
    "jax_wide": ("jax", lambda w: w.astype(np.float64)),
    "numpy_conjugate": ("numpy", lambda w: _conj(w, imaginary=False)),
    "numpy_negative": ("numpy", lambda w: _conj(w, imaginary=True)),
}


def _conj(w: Any, *, imaginary: bool) -> Any:
    """A lazily conjugated tensor, or the imaginary part of one, which is lazily negated."""
    torch = pytest.importorskip("torch")
    conj = torch.from_numpy(w.astype(np.complex64)).conj()
    return conj.imag if imaginary else conj


@pytest.mark.parametrize("case", UNSHARED)
def test_what_cannot_be_shared_is_refused(case: str) -> None:
    """Not copied: who asks for no copy may rely on writing to both sides, or on no memory taken."""
    target, layout = UNSHARED[case]
    pytest.importorskip(target)
    source = layout(aligned(np.arange(32.0).reshape(4, 8)))
    with pytest.raises(fmapper.CopyNeededError, match=r"^model\.w: .*Leave copy=False out"):
        MOVERS[target]({"w": source}, copy=False)


def test_a_read_only_array_is_not_made_writable(torch: Any) -> None:
    w = np.ones(2)
    w.flags.writeable = False
    with pytest.raises(fmapper.CopyNeededError, match="read-only"):
        to_torch(w, copy=False)
    new = to_torch(w)
    new[0] = 5.0
    assert w[0] == 1.0


# --- copy=None: nobody sees the writes of another ------------------------------------------------


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_writes_do_not_show(source: str, target: str, copy: bool | None) -> None:
    pytest.importorskip(source)
    pytest.importorskip(target)
    old = MOVERS[source](aligned(np.arange(32.0)), copy=True)
    new = MOVERS[target](old, copy=copy)
    want = np.arange(32.0).tolist()
    if target != "jax" and not (target == "numpy" and not new.flags.writeable):
        new[0] = 99.0
        assert numbers(old) == want
        new[0] = 0.0
    if source != "jax":
        old[1] = 99.0
        assert numbers(new) == want
    if copy and target == "numpy":
        assert new.flags.writeable


@pytest.mark.parametrize("source", ["torch", "jax"])
def test_copy_true_with_a_cast_is_ones_own(source: str) -> None:
    pytest.importorskip(source)
    new = to_numpy(MOVERS[source](np.ones(2, np.float32)), dtype="float16", copy=True)
    new[0] = 3.0
    assert new.tolist() == [3.0, 1.0]


def test_jax_memory_is_lent_to_numpy_for_reading(jax: Any) -> None:
    """Neither side can write, so nothing need be copied."""
    j = jax.numpy.arange(4.0)
    new = to_numpy(j)
    assert address(new) == address(j)
    with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
        new.flags.writeable = True


def test_large_unaligned_arrays_are_read_at_once(jax: Any, torch: Any) -> None:
    for _ in range(5):
        raw = np.ones((1 << 20) + 32, np.float32)
        start = (-raw.ctypes.data % 64) // 4 + 1
        source = raw[start : start + (1 << 20)]
        from_numpy = to_jax({"w": source})["w"]
        from_torch = to_jax({"w": torch.from_numpy(source)})["w"]
        source[:] = -1.0
        assert (np.asarray(from_numpy) == 1.0).all()
        assert (np.asarray(from_torch) == 1.0).all()


@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("left", [0, 64])
def test_a_storage_that_was_shrunk_is_refused(torch: Any, target: str, left: int) -> None:
    """FSDP frees storages in this way; what is behind their end is somebody else's."""
    pytest.importorskip(target)
    whole = torch.ones(1 << 16)
    shifted = torch.ones(1 << 16)[5:]
    strided = torch.ones(1 << 8, 1 << 8)[:, ::2]
    for tensor in (whole, shifted, strided, whole.bfloat16()):
        tensor.untyped_storage().resize_(left)
        with pytest.raises(fmapper.UnsupportedLeafError, match=r"model\.w: .*storage .* was freed"):
            MOVERS[target]({"ok": torch.ones(2), "w": tensor}, copy=True)


@pytest.mark.parametrize("source", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("bad", [0, 7, 39])
def test_one_overflow_among_many_small_leaves_is_named(torch: Any, source: str, bad: int) -> None:
    """Small casts are checked together, and still each by itself where one of them is lost."""
    pytest.importorskip(source)
    model = [make(source, [1.0, float("inf")], "float32") for _ in range(40)]
    assert [numbers(leaf) for leaf in to_torch(model, dtype="float16")] == [[1.0, np.inf]] * 40
    model[bad] = make(source, [1.0, 1e5], "float32")
    for mover in (to_torch, MOVERS[source]):
        with pytest.raises(fmapper.LossyCastError, match=rf"^model\[{bad}\]: finite values"):
            mover(model, dtype="float16")


def test_a_cast_looks_at_large_and_small_leaves(torch: Any) -> None:
    large = torch.ones((1 << 18) + 3)
    for lost in (False, True):
        model = {"a": torch.ones(3), "b": large, "c": torch.ones(2), "d": large.clone()}
        model["d"][-1] = 1e5 if lost else 6e4
        if lost:
            with pytest.raises(fmapper.LossyCastError, match=r"^model\.d: finite values"):
                to_torch(model, dtype="float16")
        else:
            new = to_torch(model, dtype="float16")
            assert all(torch.equal(new[key], model[key].half()) for key in model)


def test_a_shrunk_storage_is_refused_by_a_cast_of_many(torch: Any) -> None:
    model = [torch.ones(64) for _ in range(9)]
    model[5].untyped_storage().resize_(8)
    with pytest.raises(fmapper.MoveError, match=r"model\[5\]: .*storage .* was freed"):
        to_torch(model, dtype="bfloat16")


def test_a_flat_dict_keeps_its_order_its_ties_and_its_source() -> None:
    """A dict of arrays alone is moved without a loop over it."""
    w, b = np.ones(2), np.zeros(3)
    inner = {"b": b, "w": w, "again": b}
    tree = {"first": inner, "second": {"w": w}, "third": inner, "none": {}}
    new = to_numpy(tree, copy=True)
    assert list(new) == list(tree)
    assert list(new["first"]) == list(inner)
    assert new["first"] is new["third"] is not inner
    assert new["first"]["b"] is new["first"]["again"] is not b
    assert new["second"]["w"] is new["first"]["w"] is not w
    assert new["none"] == {}
    assert new["none"] is not tree["none"]
    assert inner == {"b": b, "w": w, "again": b}


def test_the_quick_look_for_shared_memory_is_right_for_dense_tensors(torch: Any) -> None:
    """All triples of spans, empty ones and one that is larger than the others included."""
    adapter = fmapper.backends.get_adapter("torch")
    memory = torch.zeros(6, dtype=torch.uint8)
    spans = [(low, high) for low in range(6) for high in range(low, min(low + 3, 6))] + [(0, 6)]
    for chosen in itertools.combinations_with_replacement(spans, 3):
        pairs = itertools.combinations(chosen, 2)
        meet = any(max(a, c) < min(b, d) for (a, b), (c, d) in pairs)
        assert adapter.may_share_memory([memory[a:b] for a, b in chosen]) is meet, chosen
