"""Shows the progress of long work on stderr, in one line that is erased at the end.

Each phase of long work is a `step`. The outermost step starts a thread, because recording can block
Python for seconds; it waits two seconds, then shows the open steps four times a second. The thread
ends with that step, never keeps a process alive, and is not started where nobody would see the
line. Only one thread of the program is shown at a time: steps of the others are silent.
"""

from __future__ import annotations

import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Protocol, TextIO

from fmapper import warn
from fmapper.switches import settings

PATIENCE = 2.0  # seconds before the line appears
_PERIOD = 0.25  # seconds between two updates


class _Line(Protocol):
    def show(self, text: str) -> None: ...
    def erase(self) -> None: ...


class _Steps:
    """The open steps, outermost first, and the thread of the program that entered them."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Resets everything, since no thread shows the line in a forked child."""
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.open: list[str] = []
        self.stop: Callable[[], None] = _nothing
        self.drawing = threading.RLock()  # showing a warning may warn
        self.line: _Line | None = None

    def enter(self, what: str, *, shown: bool) -> int | None:
        """Opens a step and returns its depth; None in a background thread."""
        me = threading.get_ident()
        with self.lock:
            if self.owner is None and (not shown or is_wanted()):
                self.owner = me
                self.open = [what]
                self.stop = _start(self.open) if shown else _nothing
                return 0
            if self.owner != me:
                return None
            self.open.append(what)
            return len(self.open) - 1

    def leave(self, depth: int) -> None:
        if depth:
            del self.open[depth:]
            return
        try:
            self.stop()
        finally:
            self.open, self.stop, self.owner = [], _nothing, None


def _nothing() -> None:
    pass


_steps = _Steps()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_steps.renew)


class _Interrupts:
    """Keeps a Ctrl-C from being lost during the steps of the main thread.

    Python raises KeyboardInterrupt wherever the main thread is. In a callback of its garbage
    collector, such as the one that JAX installs, it is printed and ignored. So a handler notes the
    signal, and a lost interrupt is raised at the end of the step.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._pending = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        signal.default_int_handler(number, frame)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Raises KeyboardInterrupt after this block if one was lost in it; in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        is_first = not self._depth and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_first:
            signal.signal(signal.SIGINT, self._handle)
        self._depth += 1
        try:
            yield
            self.check()
        finally:
            self._depth -= 1
            if is_first:
                self._pending = False
                if signal.getsignal(signal.SIGINT) == self._handle:
                    signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raises KeyboardInterrupt in the main thread if one was lost."""
        if self._pending and threading.current_thread() is threading.main_thread():
            self._pending = False
            raise KeyboardInterrupt


_interrupts = _Interrupts()


@contextmanager
def step(what: str, *, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Shows a line about this block if it takes long; see `fmapper.settings`.

    Args:
        what: The work, such as `recording Net`. The line shows a nested step after its outer one.
        shown: False keeps this block and the steps in it silent, for measurements.

    Yields:
        A function that replaces the text when the next phase begins.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed in this block and was lost in a callback.
    """
    with _interrupts.guard():
        depth = _steps.enter(what, shown=shown)
        if depth is None:
            yield _ignore
            return

        def say(what: str) -> None:
            _interrupts.check()
            _steps.open[depth:] = [what]

        try:
            yield say
        finally:
            _steps.leave(depth)


def _ignore(what: str) -> None:
    _interrupts.check()


def is_wanted() -> bool:
    """Returns whether the line would be seen."""
    if not settings.progress:
        return False
    return _notebook() is not None or (sys.stderr is not None and sys.stderr.isatty())


@contextmanager
def without_line() -> Iterator[None]:
    """Erases the line, so that something else can be written to the terminal."""
    with _steps.drawing:
        line = _steps.line
        if line is not None:
            with suppress(ValueError, OSError):
                line.erase()
        yield


warn.without_line = without_line


def _start(steps: list[str]) -> Callable[[], None]:
    """Starts the thread that shows steps; returns a function that stops it."""
    done = threading.Event()
    # The context tells a notebook below which cell to print.
    run = contextvars.copy_context().run
    arguments = (_show, steps, done, sys.stderr)
    thread = threading.Thread(target=run, args=arguments, name="fmapper-progress", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # too many threads, or Python is shutting down
        return _nothing

    def stop() -> None:
        done.set()
        thread.join()

    return stop


def _show(steps: list[str], done: threading.Event, stderr: TextIO) -> None:
    start = time.monotonic()
    if done.wait(PATIENCE):
        return
    with suppress(ValueError, OSError):  # stderr was closed
        line: _Line = _TerminalLine(stderr) if _notebook() is None else _NotebookLine()
        _steps.line = line
        try:
            shown = ""
            while not done.is_set():
                text = f"fmapper: {': '.join(steps)} ({time.monotonic() - start:.0f} s)"
                if text != shown:
                    with _steps.drawing:
                        line.show(text)
                shown = text
                done.wait(_PERIOD)
        finally:
            _steps.line = None
            line.erase()


class _TerminalLine:
    """The last line of a terminal."""

    def __init__(self, stderr: TextIO) -> None:
        from rich.console import Console
        from rich.control import Control
        from rich.segment import ControlType
        from rich.text import Text

        self._console = Console(file=stderr, highlight=False)
        self._clear = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
        self._text = Text

    def show(self, text: str) -> None:
        fitting = self._text(text, style="dim", no_wrap=True, overflow="ellipsis")
        fitting.truncate(self._console.width - 1, overflow="ellipsis")
        self._console.control(self._clear)
        self._console.print(fitting, end="")

    def erase(self) -> None:
        self._console.control(self._clear)


class _NotebookLine:
    """A line below the cell; in the end it is empty."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        display = sys.modules["IPython"].display.display
        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)

    def erase(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)


def _notebook() -> Any | None:
    """Returns the notebook shell that this runs in, or None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None
