"""Measures the time of a model on each device at each batch size."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from fmapper.backends.arrays import DEVICE_KINDS, Device
from fmapper.backends.compute import Counts
from fmapper.backends.discovery import adapter_of
from fmapper.errors import FmapperError, NotAFunctorError, ProfileError
from fmapper.moves.mover import to_numpy
from fmapper.profiles.accelerator import Accelerator, find_accelerator
from fmapper.profiles.bench import Bench
from fmapper.profiles.example_inputs import at_batch_size
from fmapper.profiles.predict import Prediction, Traffic
from fmapper.profiles.predict import predict as predicted_run
from fmapper.profiles.progress import Progress
from fmapper.profiles.result import Profile, ProfileCell
from fmapper.profiles.timing import Timing
from fmapper.profiles.verdict import measured_bounds, verdicts
from fmapper.profiles.where import Places, places_for
from fmapper.progress import step
from fmapper.tracebacks import short_traceback
from fmapper.tree.nodes import sync
from fmapper.warn import keeping_warnings

_UNSTEADY = 0.5  # distance of the quartiles, relative to the median


@short_traceback
def profile(
    model: Any,
    inputs: Any,
    devices: str | Sequence[Any] | None = None,
    batch_sizes: int | Sequence[int] = (1, 8, 64, 512),
    *,
    call: Callable[..., Any] | None = None,
    train: bool = False,
    compile: bool | None = None,
    seconds: float = 0.5,
    predict: bool = True,
    accelerator: str | Accelerator | None = None,
    progress: bool | None = None,
) -> Profile:
    """Measures how a model divides its time between transfers and computing.

    The model is copied to each device; the original is not changed. A round begins and ends with
    NumPy arrays on the host: the inputs are moved, the model runs (for inference: torch without
    gradients and in evaluation mode, JAX under `jax.jit`), and the results are moved back; each
    step is awaited and timed. The times are medians of rounds after a warm-up, with quartiles. The
    very first run, in which compilers work, is reported separately.

    For an accelerator that a backend could use but that is not present, the kernels, operations,
    bytes and waits of a run are counted instead. These counts and a data sheet yield a prediction,
    which is marked as one and has a range. Kernels are counted on the CPU; a GPU may need a few
    more or fewer.

    Args:
        model: A callable: a functor, a torch or NNX module, a function.
        inputs: An array, a tuple of arguments, or a function `batch_size -> inputs`. Arrays are cut
            or repeated along their first axis to each batch size.
        devices: Devices as strings, `Device` or a framework's own; None for the first of each kind
            in every backend that can compute the model. A GPU that is not present is predicted.
        batch_sizes: Numbers of samples per run; a break-even needs at least two.
        call: A function that runs the model, `call(model, *inputs)`; None for `model(*inputs)`.
        train: Whether to run the model in training mode with its gradient (`value_and_grad`), but
            without an optimizer. The loss is the result of the call if that is one number, else the
            mean square of everything that the call returns.
        compile: True compiles in torch too (`torch.compile`), False does not compile in JAX either;
            None compiles in JAX alone.
        seconds: How long to measure each device at each batch size, without the first run. At least
            one round is run.
        predict: Whether to predict accelerators that are not present.
        accelerator: The accelerator to predict: a name (H200, H100, A100, L4, V100, T4) or an
            `Accelerator`; None for the one that another backend sees, which is measured in a few
            seconds, else the H200.
        progress: Whether to show a progress bar on stderr; None for a terminal only, unless
            `fmapper.settings` say otherwise.

    Returns:
        A `Profile`, which can be printed, plotted, and saved with `to_json`.

    Raises:
        ProfileError: The model cannot be called, or it failed on a requested device or on all
            devices; the message says where.
        NotAFunctorError: The model holds arrays in undeclared objects; the message names the path.
        DeviceUnavailableError: A requested device is not present and cannot be predicted.

    Examples:
        >>> import fmapper, numpy as np
        >>> def model(x):
        ...     return np.tanh(x)
        >>> measured = fmapper.profile(
        ...     model, np.ones((1, 4)), ["numpy:cpu"], [1, 2], seconds=0.01, predict=False
        ... )
        >>> measured.cell("numpy:cpu", 2).bytes_in
        64

    Predictions follow the roofline model, S. Williams et al., 2009,
    https://doi.org/10.1145/1498765.1498785, with launches as a third roof.
    """
    sizes = _checked_sizes([batch_sizes] if isinstance(batch_sizes, int) else batch_sizes)
    devices = [devices] if isinstance(devices, str) else devices
    if call is None and not callable(model):
        raise ProfileError(
            f"a {type(model).__name__} cannot be called. Pass call=, a function of the model and "
            "the inputs, or an instance of a class with __call__."
        )
    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r} must be greater than 0.")
    chosen = None if accelerator is None else find_accelerator(accelerator)
    sync()
    with keeping_warnings() as warned:
        places = places_for(model, devices, predict=predict, train=train)
        batches = _batches(inputs, sizes)
        bench = Bench(model, call or _call, batches, train=train, compile=compile, seconds=seconds)
        gc.collect()  # otherwise a collection could run during a measurement
        bar = Progress(len(places.measured) * len(sizes), progress)
        with step("profiling", shown=False), bar:
            cells, notes = _measure_all(places, bench, bar)
        cells = measured_bounds(cells)
        card = chosen or _card_here(places) or find_accelerator("H200")
        predicted, more = _predict_all(places, bench, card, {cell.device for cell in cells})
    notes += _unsteady(cells)
    names = {cell.device for cell in predicted}
    absent = [f"{why}; {_fate(name, names)}." for name, why in places.absent.items()]
    notes = [*absent, *places.notes, *notes, *more, *dict.fromkeys(text for text, _ in warned)]
    cards = {cell.device: card for cell in predicted}
    return Profile(
        _name(model),
        (*cells, *predicted),
        verdicts([*cells, *predicted], cards, bench.dtype),
        tuple(notes),
        card.name if predicted else None,
    )


def _call(model: Any, *inputs: Any) -> Any:
    return model(*inputs)


def _name(model: Any) -> str:
    return str(getattr(model, "__qualname__", None) or type(model).__qualname__)


def _unsteady(cells: Sequence[ProfileCell]) -> list[str]:
    """Returns a note on times that vary too much to compare."""
    places = [
        f"{cell.device} at {cell.batch_size:,}"
        for cell in cells
        if cell.total.upper - cell.total.lower > _UNSTEADY * cell.total.median
    ]
    if not places:
        return []
    return [
        f"the times vary a lot: {', '.join(places)}. Is something else running on this machine? "
        f"Larger seconds= give more stable medians."
    ]


def _fate(name: str, predicted: set[str]) -> str:
    """Says whether a missing accelerator is predicted."""
    return f"{name} is {'predicted, not measured' if name in predicted else 'not in the table'}"


def _checked_sizes(batch_sizes: Sequence[int]) -> list[int]:
    sizes = sorted({int(size) for size in batch_sizes})
    if not sizes or sizes[0] < 1:
        raise ValueError(f"batch_sizes={batch_sizes!r}: pass at least one, all of them at least 1.")
    return sizes


def _batches(inputs: Any, sizes: list[int]) -> dict[int, tuple[Any, ...]]:
    """Makes NumPy arrays for each batch size."""
    if callable(inputs) and adapter_of(inputs) is None:
        return {size: to_numpy(_tuple(_make_inputs(inputs, size))) for size in sizes}
    given = to_numpy(_tuple(inputs))
    return {size: at_batch_size(given, size) for size in sizes}


def _make_inputs(inputs: Callable[[int], Any], size: int) -> Any:
    try:
        return inputs(size)
    except Exception as error:  # anything that the user's code raises
        raise ProfileError(f"inputs({size}) failed: {_first_line(error)}.") from error


def _tuple(inputs: Any) -> tuple[Any, ...]:
    return inputs if type(inputs) is tuple else (inputs,)


# --- measuring -----------------------------------------------------------------------------------


def _measure_all(
    places: Places, bench: Bench, bar: Progress
) -> tuple[list[ProfileCell], list[str]]:
    cells: list[ProfileCell] = []
    notes: list[str] = []
    causes: list[Exception] = []
    first = next(iter(bench.batches))
    for device in places.measured:
        size = None
        try:
            placed = bench.on(device)
            for size in bench.batches:
                bar.at(f"{device}, batch size {size}")
                cells.append(placed.cell(size))
                bar.step()
        except NotAFunctorError:  # the same on every device
            raise
        except Exception as error:  # anything that the model raises
            text = _failure(device, size, error)
            if str(device) in places.asked and size in (None, first):
                raise ProfileError(text) from error
            causes.append(error)
            notes.append(text)
        finally:
            if device not in places.predicted.values():
                bench.forget(device)
    if not cells:
        lines = "\n".join(f"  {note}" for note in notes)
        raise ProfileError(f"the model ran on no device:\n{lines}") from causes[0]
    return cells, notes


def _failure(device: Device, size: int | None, error: Exception) -> str:
    doing = "could not be set up there" if size is None else f"failed at batch size {size}"
    return f"{device}: the model {doing}: {_first_line(error)}."


def _first_line(error: Exception) -> str:
    """Returns the first line of an error."""
    line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return line if isinstance(error, FmapperError) else f"{type(error).__name__}: {line}"


# --- accelerators that are not present -----------------------------------------------------------


def _card_here(places: Places) -> Accelerator | None:
    """Returns an accelerator that another backend sees, for predictions about this backend."""
    if places.predicted:
        for device in places.measured:
            if DEVICE_KINDS.get(device.kind) == "gpu":
                from fmapper.profiles.calibrate import calibrate

                return calibrate(device)
    return None


def _predict_all(
    places: Places, bench: Bench, card: Accelerator, ran: set[str]
) -> tuple[list[ProfileCell], list[str]]:
    cells: list[ProfileCell] = []
    notes: list[str] = []
    for name, device in places.predicted.items():
        if str(device) not in ran:  # the notes already say why
            continue
        unseen: dict[str, None] = {}
        size = None
        try:
            placed = bench.on(device)
            for size in bench.batches:
                counts = placed.count(size)
                if counts is None:
                    notes.append(f"{name}: the {device.backend} adapter cannot predict.")
                    break
                unseen |= dict.fromkeys(counts.unseen)
                traffic = placed.traffic(size)
                prediction = predicted_run(counts, traffic, card, bench.dtype)
                cells.append(_predicted_cell(name, size, counts, traffic, prediction))
        except Exception as error:  # anything that the model raises
            notes.append(f"{name} is not predicted. {_failure(device, size, error)}")
        notes += [f"{name}: {text}" for text in unseen]
    return cells, notes


def _predicted_cell(
    name: str, size: int, counts: Counts, traffic: Traffic, prediction: Prediction
) -> ProfileCell:
    come, compute, go = prediction.transfer_in, prediction.compute, prediction.transfer_out
    least, likely, most = (
        moving / (moving + computing)
        for moving, computing in (
            (come.lower + go.lower, compute.upper),
            (come.median + go.median, compute.median),
            (come.upper + go.upper, compute.lower),
        )
    )
    return ProfileCell(
        name,
        size,
        come,
        compute,
        go,
        prediction.total,
        Timing(likely, least, most, 0),
        first_call=None,
        bytes_in=int(traffic.bytes_in),
        bytes_out=int(traffic.bytes_out),
        arrays_in=traffic.arrays_in,
        arrays_out=traffic.arrays_out,
        host_in=traffic.host_in,
        host_out=traffic.host_out,
        bound=prediction.bound,
        predicted=True,
        counts=counts,
    )
