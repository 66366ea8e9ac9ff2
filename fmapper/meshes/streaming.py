"""`offload`: a converted model whose weights are stored elsewhere and fetched ahead of use."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmapper.backends.arrays import Arrays, Device
from fmapper.backends.device import parse_device
from fmapper.backends.discovery import adapter_of
from fmapper.backends.models import Models
from fmapper.errors import DeviceError, DeviceUnavailableError, PlacementError, ProgramInputError
from fmapper.meshes.stages import Stage, split
from fmapper.moves.loader import DeviceLoader
from fmapper.moves.mover import Mover
from fmapper.programs.echoes import Echoes
from fmapper.programs.program import Program
from fmapper.programs.treespec import Ref
from fmapper.render import readable_bytes
from fmapper.states.materialize import is_abstract
from fmapper.tracebacks import short_traceback

if TYPE_CHECKING:
    from fmapper.meshes.device_maps import DeviceMap

_FILE = "offloaded.safetensors"


@short_traceback
def offload(
    model: Any,
    plan: DeviceMap,
    *,
    state: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    room: int | None = None,
) -> OffloadedModel:
    """Returns a converted model that runs with its arrays distributed as planned.

    Arrays on devices stay there. Arrays on "cpu" or "disk" are fetched to the first device while
    the preceding layers are computed, and released after use. Fetched arrays never take more than
    the plan's room: two pieces of half the room, one in use and one on its way, if the layers are
    small enough. If JAX supports it, arrays on "cpu" are in `pinned_host` memory, which devices can
    read by themselves.

    Args:
        model: A converted model of JAX, Flax or torch, for evaluation. Its arrays may be abstract
            if `state` has their values.
        plan: The devices of its parts; see `device_map`. Devices are named as in the framework,
            such as "gpu:1", or by the number of a GPU.
        state: Arrays by name for those that the model lacks: of any backend, or of a checkpoint,
            where those planned for "disk" stay in its files. Arrays that the checkpoint lacks, such
            as computed buffers, stay in memory.
        folder: A folder for arrays that are planned for "disk" but are in memory now.
        room: Bytes of the first device for fetched arrays; None for the plan's value.

    Returns:
        A model with the same call signature, for outputs only: it cannot be differentiated or
        compiled as a whole. It does not follow later changes of the original model.

    Raises:
        PlacementError: The model has no program; arrays have no values and `state` lacks them; a
            device does not exist; the folder is missing; or an operation needs more than the room.
        ConversionError: The program modifies arrays, as in training, or draws random numbers.

    Examples:
        >>> import fmapper, torch
        >>> from fmapper.meshes import device_map, offload
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> model = fmapper.convert(net, "jax", (torch.ones(2, 8),))
        >>> plan = device_map(model, {"cpu:0": 900, "cpu": None})
        >>> small = offload(model, plan)
        >>> small(torch.ones(2, 8).numpy()).shape, small.room
        ((2, 8), 288)
    """
    program, weights = _program(model), _own_arrays(model)
    arrays = _fill(program, weights, state or {})
    if folder is not None or not any(map(_is_stored, arrays.values())):
        arrays = _write(arrays, plan, folder)
    options = _options(model)
    return OffloadedModel(
        program, arrays, plan, backend=_adapter(weights), room=room, options=options
    )


@dataclass(frozen=True, slots=True)
class Offload:
    """Limits for the weights of a loaded model, for `offload=` of `fmapper.from_pretrained`.

    Attributes:
        max_memory: The bytes that weights may take on each device, as for `device_map`.
        ahead: The number of layers to fetch ahead of use.

    Examples:
        >>> from fmapper.meshes import Offload
        >>> small = Offload({"gpu:0": "8GiB", "cpu": "24GiB", "disk": None}, ahead=1)
        >>> # fmapper.from_pretrained(folder, "jax", offload=small)
    """

    max_memory: Mapping[Any, int | str | None]
    ahead: int = 0

    def __call__(self, model: Any, state: Mapping[str, Any]) -> OffloadedModel:
        """Plans for a converted model without values, and takes the values from a state.

        Arrays of a checkpoint that are planned for "disk" stay in its files.

        Raises:
            PlacementError: The model is not converted, or does not fit.
        """
        from fmapper.meshes.device_maps import device_map  # not needed with a plan

        _program(model)
        return offload(model, device_map(model, self.max_memory, ahead=self.ahead), state=state)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A stage with its model, its device, and its arrays: resident ones and those to fetch."""

    stage: Stage
    model: Any
    mover: Mover
    device: Device
    resident: dict[str, Any]
    brought: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0


class OffloadedModel:
    """A converted model with its arrays distributed as planned; created by `offload`.

    Attributes:
        program: The program of the model.
        plan: The devices of its parts.
        room: The largest number of bytes of fetched arrays on their device.
    """

    def __init__(
        self,
        program: Program,
        arrays: Mapping[str, Any],
        plan: DeviceMap,
        *,
        backend: Arrays,
        room: int | None,
        options: Mapping[str, Any],
    ) -> None:
        self.program, self.plan = program, plan
        self.room = plan.room if room is None else room
        self._echoes = Echoes(program)
        self._adapter = backend
        self._devices = _Devices(backend, plan)
        self._stages = self._place(arrays, dict(options))
        self._last = _last_uses(self._stages, program)

    def __repr__(self) -> str:
        away = sum(stage.nbytes for stage in self._stages)
        return (
            f"OffloadedModel({self.program.name}, {readable_bytes(away)} fetched in "
            f"{len(self._stages)} stages, at most {readable_bytes(self.room)} at a time)"
        )

    # --- placement ------------------------------------------------------------------------------

    def _place(self, arrays: Mapping[str, Any], options: dict[str, Any]) -> list[_Placed]:
        """Divides the program into stages, and moves resident arrays to their devices."""
        sizes = {name: _nbytes(array) for name, array in arrays.items()}

        def ends(so_far: Sequence[str], more: Sequence[str]) -> bool:
            if self._device(so_far) != self._device(more):
                return True
            before, after = set(filter(self._is_away, so_far)), set(filter(self._is_away, more))
            if not (before and after):
                return before != after
            return sum(map(sizes.__getitem__, before | after)) > self.room // 2

        from fmapper.programs.convert import convert

        moved: dict[Any, Any] = {}
        models: dict[str, Any] = {}
        stages: list[_Placed] = []
        for stage in split(self.program, ends):
            key = self._device(stage.arrays)
            mover, device = self._devices.of(key)
            resident: dict[str, Any] = {}
            brought: dict[str, Any] = {}
            for name in stage.arrays:
                if self._is_away(name) and key == self._devices.first:
                    brought[name] = self._prepare(name, arrays[name], moved)
                else:
                    if (name, key) not in moved:
                        moved[name, key] = mover(arrays[name])
                    resident[name] = moved[name, key]
            if stage.form not in models:
                to: Any = self._adapter.name
                models[stage.form] = convert(stage.program, to, **options)
            nbytes = sum(map(sizes.__getitem__, brought))
            if nbytes > self.room:
                raise PlacementError(
                    f"{next(iter(brought))} and the arrays used with it need "
                    f"{readable_bytes(nbytes)}, but the room is {readable_bytes(self.room)}. Pass "
                    "a larger room=, or plan with more memory for the first device."
                )
            placed = _Placed(stage, models[stage.form], mover, device, resident, brought, nbytes)
            stages.append(placed)
        return stages

    def _is_away(self, name: str) -> bool:
        return not self.plan.computes(self.plan.device_of(name))

    def _device(self, names: Sequence[str]) -> Any:
        """Returns the device for a stage with these arrays."""
        first = next(iter(names), None)
        if first is None or self._is_away(first):
            return self._devices.first
        return self.plan.device_of(first)

    def _prepare(self, name: str, array: Any, moved: dict[Any, Any]) -> Any:
        """Returns an array in the form that is kept until use; a stored one is read each time."""
        if self.plan.device_of(name) == "disk" and _is_stored(array):
            return array
        if (name, "cpu") not in moved:
            moved[name, "cpu"] = self._devices.waiting(array)
        return moved[name, "cpu"]

    # --- calls ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output for the arguments of the model's forward.

        Raises:
            ProgramInputError: The program was recorded for other inputs, or an argument is a
                tracer, as inside `jax.jit`.
        """
        values = self._bind(args, kwargs)
        gate = _Gate(self.room)
        coming = iter(DeviceLoader(self._source(gate), _bring, prefetch=1))
        try:
            for at, placed in enumerate(self._stages):
                self._run(at, placed, values, coming, gate)
        finally:
            gate.close()
            coming.close()  # type: ignore[attr-defined]
        outputs = [values[v.name] if isinstance(v, Ref) else v for v in self.program.graph.outputs]
        output = self.program.out_spec.unflatten(outputs)
        return self._echoes.put(output, args, kwargs)

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        program = self.program
        users = [
            (name, spec)
            for name, spec in zip(program.graph.inputs, program.inputs, strict=True)
            if spec.kind in ("user", "static")
        ]
        values: dict[str, Any] = {}
        paths, leaves = program.input_paths(), program.bind(args, kwargs)
        for (name, spec), path, leaf in zip(users, paths, leaves, strict=True):
            where = f"{program.name}: {path}"
            if spec.kind == "static" and not spec.accepts(leaf):
                raise ProgramInputError(
                    f"{where} is {leaf!r}, but the program was recorded for {spec.value!r}. "
                    "Convert the model again with the other value."
                )
            adapter = adapter_of(leaf)
            if adapter is not None and adapter.is_traced(leaf):
                raise ProgramInputError(
                    f"{where} is a tracer: an offloaded model cannot run inside a function that "
                    "is compiled, differentiated or mapped. Call it outside."
                )
            values[name] = leaf
        return values

    def _run(
        self, at: int, placed: _Placed, values: dict[str, Any], coming: Iterator[Any], gate: _Gate
    ) -> None:
        """Runs a stage: adds its outputs to the values, and drops those no longer needed."""
        brought = next(coming) if placed.brought else {}
        arrays = [placed.resident.get(n, brought.get(n)) for n in placed.stage.arrays]
        given = [
            values[name] if adapter_of(values[name]) is None else placed.mover(values[name])
            for name in placed.stage.values
        ]
        outputs = placed.model(*given, *arrays)
        if placed.brought:
            self._adapter.wait(placed.device, outputs)
            del arrays, brought, given
            gate.give(placed.nbytes)
        values.update(zip(placed.stage.outputs, outputs, strict=True))
        for name in self._last.get(at, ()):
            values.pop(name, None)

    def _source(self, gate: _Gate) -> Iterator[tuple[Mover, dict[str, Any]]]:
        for placed in self._stages:
            if placed.brought and not gate.take(placed.nbytes):
                return
            if placed.brought:
                yield placed.mover, placed.brought


class _Gate:
    """Limits the bytes in flight to the room."""

    def __init__(self, room: int) -> None:
        self._free = room
        self._is_open = True
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> bool:
        """Waits until there is room; returns False once the gate is closed."""
        with self._changed:
            self._changed.wait_for(lambda: nbytes <= self._free or not self._is_open)
            self._free -= nbytes
            return self._is_open

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._free += nbytes
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify_all()


class _Devices:
    """The devices of a plan in a framework."""

    def __init__(self, adapter: Arrays, plan: DeviceMap) -> None:
        self._adapter = adapter
        self.first = next(iter(plan.nbytes))
        self._known = {key: self._find(key) for key in plan.nbytes if plan.computes(key)}
        host = Mover("offload", adapter.name, spec=parse_device("cpu"))
        pinned = adapter.host_memory(self._known[self.first][1])
        self.waiting = host if pinned is None else self._mover(str(pinned))

    def of(self, key: Any) -> tuple[Mover, Device]:
        """Returns the mover to a device of the plan, and the device."""
        return self._known[key]

    def _find(self, key: Any) -> tuple[Mover, Device]:
        if key == "disk":
            raise PlacementError(
                "the first device of the plan is the disk, which cannot compute. Put a "
                'device or "cpu" first.'
            )
        text = f"gpu:{key}" if isinstance(key, int) else str(key)
        try:
            mover = self._mover(text)
            assert mover.spec is not None
            return mover, self._adapter.find_device(mover.spec.kind, mover.spec.index)
        except (DeviceError, DeviceUnavailableError) as error:
            raise PlacementError(f"the device {key!r} of the plan: {error}") from error

    def _mover(self, text: str) -> Mover:
        spec = parse_device(text)
        if spec.backend not in (None, self._adapter.name):
            raise PlacementError(f"{text} is not a device of {self._adapter.name}")
        return Mover("offload", self._adapter.name, spec=spec)


def _bring(batch: tuple[Mover, dict[str, Any]]) -> dict[str, Any]:
    mover, arrays = batch
    moved: dict[str, Any] = mover(arrays)
    return moved


def _program(model: Any) -> Program:
    from fmapper.meshes.derivation import program_of

    program = program_of(model) or getattr(model, "program", None)
    if not isinstance(program, Program):
        raise PlacementError(
            f"a {type(model).__name__} has no program to run in stages: convert it first. A "
            "transformers model that is not converted takes the plan as device_map=dict(plan)."
        )
    return program


def _own_arrays(model: Any) -> Mapping[str, Any]:
    """Returns the parameters and buffers of a converted model by their names in its program."""
    from fmapper.meshes.rules import arrays_of

    if not hasattr(model, "as_program"):
        return arrays_of(model)
    filled = model.as_program()
    return {**filled.parameters, **filled.buffers}


def _fill(program: Program, arrays: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays that a program takes.

    Raises:
        PlacementError: Some arrays have no values.
    """
    if program.few_bits:
        raise PlacementError(
            f"{next(iter(program.few_bits))} has integers of less than a byte, which cannot be "
            "offloaded. Convert the model with weights of another dtype."
        )
    others: dict[str, list[str]] = {}
    for alias, name in program.aliases.items():
        others.setdefault(name, []).append(alias)
    filled: dict[str, Any] = {}
    missing: list[str] = []
    for name in (str(i.target) for i in program.inputs if i.kind in ("parameter", "buffer")):
        names = (name, *others.get(name, ()))
        array = next((state[n] for n in names if n in state), arrays.get(name))
        if array is None or is_abstract(array):
            missing.append(name)
        else:
            filled[name] = array
    if missing:
        more = f" and {len(missing) - 5} more" * (len(missing) > 5)
        raise PlacementError(
            f"{', '.join(missing[:5])}{more} have no values. Pass them by name as state=, for "
            "example state=fmapper.load(path)."
        )
    return filled


def _options(model: Any) -> Mapping[str, Any]:
    from fmapper.backends.discovery import adapters

    options = (adapter.options_of(model) for adapter in adapters(Models))
    return next((given for given in options if given is not None), {})


def _adapter(arrays: Mapping[str, Any]) -> Arrays:
    """Returns the adapter of the framework that computes."""
    for array in arrays.values():
        adapter = adapter_of(array)
        if isinstance(adapter, Models):
            return adapter
    raise PlacementError("the model has no arrays of a framework that can run it")


def _nbytes(array: Any) -> int:
    adapter = adapter_of(array)
    assert adapter is not None
    return adapter.nbytes(array)


def _write(arrays: dict[str, Any], plan: DeviceMap, folder: str | Path | None) -> dict[str, Any]:
    """Writes the arrays planned for the disk to a file; returns all arrays."""
    from fmapper.checkpoints.load import load
    from fmapper.checkpoints.save import save

    away = {n: a for n, a in arrays.items() if plan.device_of(n) == "disk" and not _is_stored(a)}
    if not away:
        return arrays
    if folder is None:
        raise PlacementError(
            f"{next(iter(away))} is planned for the disk, but is in memory. Pass folder= to write "
            "it to, or the arrays of a checkpoint as state=fmapper.load(path)."
        )
    path = Path(folder) / _FILE
    save(away, path)
    stored = load(path)
    return {**arrays, **{name: stored[name] for name in away}}


def _is_stored(array: Any) -> bool:
    from fmapper.checkpoints.lazy import LazyArray

    return isinstance(array, LazyArray)


def _last_uses(stages: Sequence[_Placed], program: Program) -> dict[int, tuple[str, ...]]:
    """Returns the values that are no longer needed after each stage."""
    seen = {value.name for value in program.graph.outputs if isinstance(value, Ref)}
    last = {}
    for at in reversed(range(len(stages))):
        stage = stages[at].stage
        names = dict.fromkeys((*stage.values, *stage.outputs))
        last[at] = tuple(name for name in names if name not in seen)
        seen.update(names)
    return last
