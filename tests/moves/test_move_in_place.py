"""`move_` changes everything or nothing, whenever it is interrupted."""

import signal
import sys
import threading
from collections import OrderedDict, deque
from typing import Any

import pytest

import fmapper
from fmapper import functor, move_, to_cpu

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

WIDE = to_cpu(dtype="float64")


@functor
class Own:
    def __init__(self) -> None:
        self.w, self.rest = torch.ones(2), [np.ones(1, np.float32), "text"]


class Slotted:
    __slots__ = ("b", "w")

    def __init__(self) -> None:
        self.w, self.b = torch.ones(1), torch.zeros(1, requires_grad=True)


functor(Slotted)


def everything() -> dict[str, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    net.extra = [torch.ones(1)]
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    return {
        "net": net,
        "optimizer": optimizer,
        "own": Own(),
        "slots": Slotted(),
        "tuple": (torch.ones(1), [torch.ones(1)]),
        "more": OrderedDict(a=deque([torch.ones(1)])),
    }


def picture(tree: Any) -> dict[str, Any]:
    """All that could be half moved: dtypes, values, identities and gradients."""
    model, optimizer = tree["net"], tree["optimizer"]
    found: dict[str, Any] = {
        str(path): (leaf.dtype, leaf.tolist())
        for path, leaf in walked(tree)
        if hasattr(leaf, "dtype")
    }
    for name, p in model.named_parameters():
        found["grad of " + name] = (p.grad.dtype, p.grad.tolist())
        found["id of " + name] = id(p)
    found["keys of state"] = [id(key) for key in optimizer.state]
    found["groups"] = [id(p) for group in optimizer.param_groups for p in group["params"]]
    found["attributes"] = [sorted(vars(node)) for node in (model, optimizer, tree["own"])]
    return found


def walked(tree: Any) -> list[Any]:
    found: list[Any] = []
    fmapper.fmap_with_path(lambda path, leaf: found.append((path, leaf)), tree, cache=None)
    return found


class Interrupt:
    """Raises once, at a line with a number, in the files that change the tree."""

    files = ("inplace.py", "parameters.py", "module_nodes.py", "optimizer_nodes.py")

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self


def run(at: int) -> tuple[int, dict[str, Any]]:
    """How many lines have run, and the tree that an interrupt at one of them has left."""
    tree = everything()
    ids = {name: id(p) for name, p in tree["net"].named_parameters()}
    moved = fmapper.fmap(WIDE, tree)  # so that only the change itself is interrupted
    trace = Interrupt(at)
    change = fmapper.moves.inplace._Change()
    change.adopt(tree, moved)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fmapper.moves.inplace.carry_out(change.steps)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    assert {name: id(p) for name, p in tree["net"].named_parameters()} == ids
    return trace.count, without_ids(picture(tree))


def without_ids(found: dict[str, Any]) -> dict[str, Any]:
    """A picture that can be compared with that of another tree."""
    names = {value: name for name, value in found.items() if name.startswith("id of ")}
    shown = {name: value for name, value in found.items() if name not in names.values()}
    for name in ("keys of state", "groups"):
        shown[name] = [names[value] for value in shown[name]]
    return shown


@pytest.mark.nightly
def test_an_interrupt_at_any_line_leaves_all_or_nothing() -> None:
    lines, new = run(0)
    old = without_ids(picture(everything()))
    assert old != new
    assert lines > 100
    seen = []
    for at in range(1, lines + 1, 3):
        _, left = run(at)
        assert left in (old, new), f"half moved by an interrupt at line {at} of {lines}"
        seen.append(left == new)
    assert set(seen) == {False, True}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_node_that_is_interrupted_itself(error: type[BaseException]) -> None:
    class Late(dict):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            if value.dtype is torch.float64:
                raise error

    tree = everything()
    before = picture(tree)
    with pytest.raises(error):
        move_([tree, Late(a=torch.ones(1))], WIDE)
    assert picture(tree) == before


def test_ctrl_c_counts_after_the_change() -> None:
    class Pressing(dict):
        def __setitem__(self, key: Any, value: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            super().__setitem__(key, value)

    tree = [Pressing(a=torch.ones(1)), torch.nn.Linear(1, 1)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            move_(tree, WIDE)
        assert tree[0]["a"].dtype is tree[1].weight.dtype is torch.float64
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread() -> None:
    tree = everything()
    thread = threading.Thread(target=move_, args=(tree, WIDE))
    thread.start()
    thread.join()
    assert tree["net"][0].weight.dtype is torch.float64
