"""Long work says in one line on a terminal what it does; it leaves nothing behind."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings

import pytest

import fmapper
from fmapper import progress
from fmapper.backends import step
from fmapper.warn import warn


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal in the place of stderr, on which the line appears at once."""
    made = Terminal()
    # pytest puts its own stderr there when the test begins
    place = types.SimpleNamespace(stderr=made, modules=sys.modules)
    monkeypatch.setattr(progress, "sys", place)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_PERIOD", 0.01)
    monkeypatch.setattr(fmapper.settings, "progress", True)
    monkeypatch.delenv("TERM", raising=False)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    return made


def wait_for(terminal, text):
    end = time.monotonic() + 10
    while text not in terminal.getvalue():
        assert time.monotonic() < end, terminal.getvalue()
        time.sleep(0.005)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "fmapper-progress"]


def test_the_line_names_the_steps_that_are_open_and_is_gone_at_the_end(terminal):
    with step("converting Net") as say:
        with step("recording"):
            wait_for(terminal, "fmapper: converting Net: recording (0 s)")
        say("comparing")
        wait_for(terminal, "fmapper: comparing (0 s)")
        assert "\n" not in terminal.getvalue()
    lines = terminal.getvalue().split("\r")
    assert lines[-1] == "\x1b[2K"
    assert all(line.startswith("\x1b[2K") for line in lines[1:])
    assert threads() == []


def test_a_long_line_is_cut_to_the_width_of_the_terminal(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    with step("converting " + "x" * 100):
        wait_for(terminal, "…")
    shown = terminal.getvalue().split("\r\x1b[2K")
    assert max(map(len, shown)) < 30 + len("\x1b[2m\x1b[0m")


def test_short_work_shows_nothing_and_does_not_import_rich():
    code = """
import sys
class Terminal:
    def isatty(self): return True
    def write(self, text): raise AssertionError(text)
    def flush(self): pass
stderr, sys.stderr = sys.stderr, Terminal()
from fmapper.backends import step
with step("short"):
    pass
sys.stderr = stderr
assert "rich" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("switch", ["not a terminal", "setting", "not shown"])
def test_where_nobody_would_see_it_there_is_no_thread(terminal, monkeypatch, switch):
    if switch == "not a terminal":
        monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    if switch == "setting":
        monkeypatch.setattr(fmapper.settings, "progress", False)
    with step("work", shown=switch != "not shown"), step("inside"):
        assert threads() == []
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("text", "wanted"), [("0", False), ("off", False), ("1", True), ("", True)]
)
def test_the_environment_switches_it(monkeypatch, text, wanted):
    monkeypatch.setenv("FMAPPER_PROGRESS", text)
    assert type(fmapper.settings)().progress is bool(wanted)


def test_a_setting_that_does_not_exist_is_refused():
    with pytest.raises(AttributeError):
        fmapper.settings.progres = False


def test_a_warning_stands_on_a_line_of_its_own(terminal, monkeypatch):
    def show(message, *_, **__):
        terminal.write(f"warned: {message}\n")

    monkeypatch.setattr(warnings, "showwarning", show)
    with step("work"), warnings.catch_warnings():
        warnings.simplefilter("always")
        wait_for(terminal, "work")
        warn("look", fmapper.FmapperWarning)
        wait_for(terminal, "look")
    assert "\r\x1b[2Kwarned: look\n" in terminal.getvalue()


def test_a_thread_that_cannot_be_started_does_no_harm(terminal, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with step("work"), step("inside"):
        pass
    assert terminal.getvalue() == ""


def test_steps_of_another_thread_are_silent(terminal):
    def work():
        with step("elsewhere"):
            time.sleep(0.1)

    with step("here"):
        other = threading.Thread(target=work)
        other.start()
        wait_for(terminal, "here")
        other.join()
    assert "elsewhere" not in terminal.getvalue()
    assert "fmapper: here (" in terminal.getvalue()


def test_an_error_or_an_interrupt_passes_and_the_line_is_gone(terminal):
    def work(error):
        with step("work"), step("inside"):
            wait_for(terminal, "work: inside")
            raise error

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            work(error)
        assert terminal.getvalue().endswith("\r\x1b[2K")
        assert threads() == []
    with step("next"):
        wait_for(terminal, "fmapper: next (")


def test_a_stderr_that_is_closed_meanwhile_does_no_harm(terminal):
    with step("work"):
        wait_for(terminal, "work")
        terminal.close()
        time.sleep(0.05)


def test_a_notebook_has_the_line_below_the_cell(terminal, monkeypatch):
    shown = []
    handle = types.SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))

    def display(data, raw, display_id):
        shown.append(data["text/plain"])
        return handle

    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(
        get_ipython=lambda: shell, display=types.SimpleNamespace(display=display)
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with step("work"):
        while not shown:
            time.sleep(0.005)
    assert shown[0] == "fmapper: work (0 s)"
    assert shown[-1] == ""
    assert terminal.getvalue() == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_of_a_fork_starts_anew_and_no_thread_keeps_a_process_alive():
    code = """
import os, signal, sys
class Terminal:
    def isatty(self): return True
    def write(self, text): return len(text)
    def flush(self): pass
sys.stderr = Terminal()
from fmapper.backends import step
opened = step("for ever")
opened.__enter__()
child = os.fork()
if not child:
    with step("in the child"):
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""  # and the step is never left
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_a_conversion_says_what_it_does(terminal):
    torch = pytest.importorskip("torch")
    pytest.importorskip("jax")

    class Slow(torch.nn.Module):
        def forward(self, x):
            wait_for(terminal, "converting Slow to jax: ")
            return 2 * x

    model = fmapper.convert(Slow(), "jax", (torch.ones(2),))
    assert "converting Slow to jax: recording" in terminal.getvalue()
    terminal.truncate(0)

    class Waits(torch.nn.Module):
        def forward(self, x):
            wait_for(terminal, "comparing Waits and JaxModel (")
            return 2 * x

    assert fmapper.verify(Waits(), model, torch.ones(2))


def test_a_large_move_says_how_much_it_moves(terminal, monkeypatch):
    torch = pytest.importorskip("torch")
    from fmapper.moves import carry

    monkeypatch.setattr(carry, "_LARGE", 1)
    adapter = fmapper.backends.get_adapter("torch")
    taken = type(adapter).take

    def take(self, *args, **kwargs):
        wait_for(terminal, "fmapper: moving 0.0 GiB")
        return taken(self, *args, **kwargs)

    monkeypatch.setattr(type(adapter), "take", take)
    np = pytest.importorskip("numpy")
    assert torch.equal(fmapper.to_torch(np.ones(3)), torch.ones(3, dtype=torch.float64))


CALLS = {
    "convert": lambda module, x: fmapper.convert(module, "jax", (x,)),
    "verify": lambda module, x: fmapper.verify(module, module, x),
    "convert to torch": lambda module, x: fmapper.convert(module.forward, "torch", (x,)),
    "jit": lambda module, x: fmapper.jit(module.forward)(x),
    "grad": lambda module, x: fmapper.grad(module.forward)(x),
}


def lose_an_interrupt():
    """Ctrl-C in a callback of the garbage collector, which Python prints and ignores."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("stage", ["next", "inner", "outer"])
def test_an_interrupt_that_was_lost_comes_after_the_stage(stage):
    done = []

    def work():
        with step("outer") as say:
            if stage == "next":
                lose_an_interrupt()
                say("next")
                done.append("next")
            with step("inner"):
                if stage == "inner":
                    lose_an_interrupt()
            done.append("inner")
            lose_an_interrupt()
        done.append("outer")

    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == {"next": [], "inner": [], "outer": ["inner"]}[stage]
    assert signal.getsignal(signal.SIGINT) is before
    with step("later"), step("and within"):
        pass  # it comes once


def test_a_handler_of_the_user_stays():
    before = signal.getsignal(signal.SIGINT)
    calls = []

    def handler(number, frame):
        calls.append(number)

    signal.signal(signal.SIGINT, handler)
    try:
        with step("outer"):
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_passes_through_and_everything_is_as_before(call):
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    pytest.importorskip("jax.numpy")

    class Interrupted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x):
            raise KeyboardInterrupt

    module, x = Interrupted(), torch.ones(2)
    fmapper.convert(module.linear, "jax", (x,))  # what torch does when it is first asked to record
    places = torch, torch.Tensor, torch.nn.Module, torch.nn.functional, jax.lax, jax.numpy
    before = [dict(vars(place)) for place in places]
    with pytest.raises(KeyboardInterrupt):
        CALLS[call](module, x)
    assert module.training
    for place, names in zip(places, before, strict=True):  # modules may have been imported
        assert all(vars(place)[name] is value for name, value in names.items())
    done = []
    thread = threading.Thread(  # no lock is held
        target=lambda: done.append(fmapper.convert(module.linear, "jax", (x,)))
    )
    thread.start()
    thread.join()
    assert done
