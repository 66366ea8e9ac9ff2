"""Reads an optax transformation: which algorithm it is, with which settings, and its state.

A transformation is two functions, whose closures hold the settings. What cannot be named by them is
refused, and so is what torch's optimizers do not have.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import ConversionError
from fmapper.training import SETTINGS, Group, OptimizerState, Schedule, check_settings
from fmapper_adapters.jax.training import averages
from fmapper_adapters.jax.training.build import Rate, is_masked
from fmapper_adapters.jax.training.transformations import Moments

_CORES = {
    "scale_by_adam": "adam",
    "scale_by_adamax": "adamax",
    "scale_by_rms": "rmsprop",
    "scale_by_stddev": "rmsprop",
    "scale_by_adadelta": "adadelta",
    "scale_by_lion": "lion",
}
# Where the states of optax hold what torch calls otherwise: algorithm -> state -> field -> slot.
_ADAM = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_SLOTS: dict[str, dict[str, dict[str, str]]] = {
    "sgd": {
        "TraceState": {"trace": "momentum_buffer"},
        "EmaState": {"ema": "momentum_buffer"},
    },
    "adam": {"ScaleByAdamState": _ADAM},
    "adamax": {"ScaleByAdamState": {"mu": "exp_avg", "nu": "exp_inf"}},
    "rmsprop": {
        "ScaleByRmsState": {"nu": "square_avg"},
        "ScaleByRStdDevState": {"mu": "grad_avg", "nu": "square_avg"},
        "TraceState": {"trace": "momentum_buffer"},
    },
    "adadelta": {"ScaleByAdaDeltaState": {"e_g": "square_avg", "e_x": "acc_delta"}},
    "lion": {"ScaleByLionState": {"mu": "exp_avg"}},
}
_NOTHING = ("identity",)
_RATES = ("scale", "scale_by_schedule")
_INSTEAD = {
    "scale_by_rss": "torch's Adagrad adds eps to the root, and optax's within",
    "scale_by_radam": "torch's RAdam adds eps to the root before its bias is corrected",
    "scale_by_amsgrad": "torch's AMSGrad keeps the largest moment before its bias is corrected",
    "scale_by_factored_rms": "torch's Adafactor has another rate and clips otherwise",
    "scale_by_muon": "torch's Muon rounds to bfloat16 in between",
    "ema": "torch's momentum begins with the first gradient, and its bias is not corrected",
}


# What torch does outside of the optimizer, before it.
_OUTSIDE = {
    "MultiSteps": "accumulate gradients. Before each step call ({loss}).backward() {every} times",
    "clip_by_global_norm": "clip gradients. Before each step call "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), {max_norm})",
    "clip": "clip gradients. Before each step call "
    "torch.nn.utils.clip_grad_value_(model.parameters(), {max_delta})",
}


@dataclass(slots=True)
class _Piece:
    """One transformation of a chain: its name, its settings, its state and its parameters."""

    name: str
    settings: Mapping[str, Any]
    state: Any
    members: frozenset[int]


def read(params: Any, tx: Any, opt_state: Any) -> OptimizerState:
    """Returns an optimizer as plain data; see `Optimizers.read_optimizer`.

    Args:
        params: The tree of parameters that it was made for.
        tx: The transformation.
        opt_state: Its state.

    Raises:
        ConversionError: Something in it has no counterpart; says what.
    """
    leaves = jax.tree.leaves(params)
    if any(jnp.iscomplexobj(leaf) for leaf in leaves):
        raise ConversionError("optimizers of complex parameters cannot be converted")
    everything = frozenset(range(len(leaves)))
    pieces = [*_pieces(tx.update, opt_state, params, everything)]
    if len(pieces) == 1 and pieces[0].name in ("ema", "average"):
        return averages.read(pieces[0].settings, pieces[0].state, leaves)
    chains: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for at in sorted(everything):
        chain = tuple(i for i, piece in enumerate(pieces) if at in piece.members)
        if not chain or pieces[chain[-1]].name != "set_to_zero":  # whose input does not matter
            chains[chain].append(at)
    groups, slots = [], defaultdict[str, dict[int, Any]](dict)
    axes: dict[int, tuple[int, ...]] = {}
    algorithms = set()
    notes: tuple[str, ...] = ()
    for chain, members in chains.items():
        reading = _Reading([pieces[i] for i in chain], len(leaves))
        reading.collect(members, leaves, slots)
        axes |= reading.axes
        notes += reading.warnings
        algorithms.add(reading.algorithm)
        given = reading.settings, reading.step, reading.numbers, reading.schedules
        groups.append(Group(tuple(members), *given))
    if len(algorithms) > 1:
        raise ConversionError(
            f"the parameters are divided among {', '.join(sorted(algorithms))}, and an optimizer "
            "of torch has one algorithm for all. Convert each part with a model of its own."
        )
    algorithm = algorithms.pop() if algorithms else "sgd"
    notes = tuple(dict.fromkeys(notes))
    return OptimizerState(algorithm, tuple(groups), dict(slots), axes, notes)


def _pieces(update: Any, state: Any, params: Any, members: frozenset[int]) -> Iterator[_Piece]:
    """Yields the transformations within one, with their parts of the state."""
    name = getattr(update, "__qualname__", type(update).__name__).partition(".")[0]
    inner = _closure(update)
    if name == "with_extra_args_support":
        yield from _pieces(inner["tx"].update, state, params, members)
    elif name == "chain":
        for function, part in zip(inner["update_fns"], state, strict=True):
            yield from _pieces(function, part, params, members)
    elif name == "named_chain":
        for key, transformation in inner["transforms"]:
            yield from _pieces(transformation.update, state[key], params, members)
    elif name in ("partition", "multi_transform"):
        labels = inner["param_labels"]
        named = jax.tree.leaves(labels(params) if callable(labels) else labels)
        if len(named) != len(jax.tree.leaves(params)):
            raise ConversionError("partition: its labels are not one for each parameter")
        for label, part in state.inner_states.items():
            chosen = frozenset(at for at in members if named[at] == label)
            yield from _pieces(inner["transforms"][label].update, part.inner_state, params, chosen)
    elif name == "masked":
        mask = inner["mask"]
        flags = jax.tree.leaves(mask(params) if callable(mask) else mask)
        if len(flags) != len(jax.tree.leaves(params)):
            raise ConversionError("masked: its mask has not one value for each parameter")
        chosen = frozenset(at for at in members if flags[at])
        yield from _pieces(inner["inner"].update, state.inner_state, params, chosen)
    elif name == "inject_hyperparams":
        values = {key: _number(value) for key, value in state.hyperparams.items()}
        moving = dict(getattr(state, "hyperparams_states", {}))
        rate, count = inner["sched_hps"].get("learning_rate"), moving.pop("learning_rate", None)
        if moving or (not hasattr(rate, "schedule_fn") and count is not None):
            raise ConversionError(
                f"inject_hyperparams: {', '.join(moving) or 'learning_rate'} follows a schedule, "
                "and only learning_rate has a counterpart that does, as a function of the step"
            )
        if count is not None:
            values["learning_rate"] = rate.schedule_fn
        made = inner["inner_factory"](**inner["other_hps"], **values)
        for piece in _pieces(made.update, state.inner_state, params, members):
            # Its state is one for a number in place of the schedule.
            yield replace(piece, state=count) if piece.name == "scale_by_schedule" else piece
    elif name == "MultiSteps":
        steps = vars(update.__self__)  # which has no public names for them
        every = _closure(steps["_every_k_schedule"]).get("every_k_schedule")
        skips = not steps["_should_skip_update_fn"].__qualname__.startswith("MultiSteps.")
        if not isinstance(every, int) or skips or int(state.mini_step):
            raise ConversionError(
                "MultiSteps: only a constant number of steps, of which none is skipped, has a "
                "counterpart, and only between two updates, when no gradients are accumulated"
            )
        loss = f"loss / {every}" if steps["_use_grad_mean"] else "loss"
        yield _Piece(name, {"every": every, "loss": loss}, state, members)
        yield from _pieces(steps["_opt"].update, state.inner_opt_state, params, members)
    elif name not in _NOTHING:
        yield _Piece(name, inner, state, members)


@dataclass(frozen=True, slots=True)
class _OfCount:
    """A schedule of optax, called as optax calls it: with an int32."""

    schedule: Callable[[Any], Any]

    def __call__(self, step: Any) -> Any:
        return self.schedule(jnp.asarray(step, jnp.int32))


def _closure(function: Any) -> dict[str, Any]:
    """Returns the variables that a function holds; none for what is not written in Python."""
    try:
        return dict(inspect.getclosurevars(function).nonlocals)
    except TypeError:
        return {}


def _number(value: Any) -> Any:
    return np.asarray(value).item() if np.ndim(value) == 0 else value


@dataclass(slots=True)
class _Reading:
    """A chain, read as an algorithm of torch with its settings.

    Attributes:
        pieces: Its transformations, in order.
        count: How many parameters the optimizer has.
        algorithm: Its name in `fmapper.training.SETTINGS`.
        settings: Its settings.
        schedules: That of the rate, and of the momentum.
        step: How many updates there were.
        is_whole: Whether a transformation has been read that has its rate in it.
        numbers: State that is one number.
        axes, warnings: As those of an `OptimizerState`.
    """

    pieces: Sequence[_Piece]
    count: int
    algorithm: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    schedules: dict[str, Schedule] = field(default_factory=dict)
    step: int = 0
    is_whole: bool = False
    numbers: dict[str, float] = field(default_factory=dict)
    axes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        decays: list[tuple[bool, float]] = []
        is_negative = False
        end = len(self.pieces)
        while end and self.pieces[end - 1].name in _RATES:
            end -= 1
        for at, piece in enumerate(self.pieces[:end]):
            given = piece.settings
            if piece.name in _OUTSIDE and at == len(self.warnings):
                if len(piece.members) != self.count:
                    raise ConversionError(
                        f"{piece.name} of some of the parameters has no counterpart in torch. "
                        "Do it for all of them, or outside of the optimizer."
                    )
                what = _OUTSIDE[piece.name].format(**given)
                self.warnings += (f"{piece.name}: torch's optimizers do not {what}",)
                self.step = int(getattr(piece.state, "gradient_step", 0))
            elif self.is_whole:
                raise ConversionError(
                    f"{piece.name} after {self.algorithm} has no counterpart in torch: "
                    "its rate has been applied"
                )
            elif piece.name in _RATES:
                is_sign = piece.name == "scale" and _number(given["step_size"]) == -1.0
                if not is_sign or self.algorithm or decays:
                    later = self.pieces[at + 1].name
                    raise ConversionError(
                        f"{piece.name} before {later} has no counterpart: torch's optimizers "
                        "scale by the learning rate last"
                    )
                is_negative = not is_negative
            elif piece.name == "add_decayed_weights":
                value = _number(given["weight_decay"])
                if not isinstance(value, int | float):
                    raise ConversionError(
                        f"add_decayed_weights: a weight decay of {value!r} has no counterpart in "
                        "torch, which has a number for each group"
                    )
                decays.append((bool(self.algorithm), value))
            else:
                self._core(piece)
        if self.is_whole:
            if decays or is_negative or self.pieces[end:]:
                raise ConversionError(f"{self.algorithm} with a second rate, sign or decay")
            return
        rate = 1.0
        for piece in self.pieces[end:]:
            if piece.name == "scale":
                rate *= float(piece.settings["step_size"])
            elif not self.schedules:
                self._schedule(piece.settings["step_size_fn"], piece.state)
            else:
                raise ConversionError("two schedules of the rate have no counterpart in torch")
        self.algorithm = self.algorithm or "sgd"
        known = SETTINGS[self.algorithm]
        self.settings = {**known, **self.settings}
        decays = [(after, value) for after, value in decays if value]
        if self.algorithm == "sgd" and not self.settings["momentum"]:
            decays = [(False, value) for _, value in decays]  # the same for both
        if len(decays) > 1:
            raise ConversionError("weights decay twice, which no optimizer of torch does")
        for after, value in decays:
            self.settings["weight_decay"] = value
            if after and "decoupled" not in known and self.algorithm != "lion":
                raise ConversionError(
                    f"{self.algorithm}: weights decay after the gradient was scaled, which torch's "
                    "does not: put add_decayed_weights first"
                )
            if "decoupled" in known:
                self.settings["decoupled"] = after
        if not self.schedules:
            if rate > 0:
                raise ConversionError(
                    "the update is added with a positive sign: scale by a negative rate, as "
                    "optax.scale_by_learning_rate does"
                )
            self.settings["lr"] = -rate
        elif rate != 1.0:
            raise ConversionError(f"the schedule of the rate is scaled by {rate}")
        self.settings["maximize"] = is_negative

    def _schedule(self, function: Any, state: Any) -> None:
        """Reads the function of a learning rate: that of `scale_by_learning_rate`."""
        inner = _closure(function)
        rate = inner.get("learning_rate")
        if rate is None or inner.get("m") != -1:
            raise ConversionError(
                "scale_by_schedule: only optax.scale_by_learning_rate(schedule) has a counterpart"
            )
        position = int(state.count)
        if isinstance(rate, Rate):
            self.settings["lr"] = rate.base
            self.schedules["lr"] = replace(rate.schedule, position=position)
        else:
            self.settings["lr"] = float(rate(state.count))
            self.schedules["lr"] = Schedule("function", {"function": _OfCount(rate)}, position)

    def _core(self, piece: _Piece) -> None:
        given, name = piece.settings, piece.name
        if isinstance(piece.state, Moments):
            self._take(given["algorithm"], given["settings"])
            self.is_whole = True
            self.numbers = {key: float(value) for key, value in piece.state.numbers.items()}
            self.step = int(piece.state.count)
            position = int(piece.state.position)
            self.schedules = {
                name: replace(rate.schedule, position=position)
                for name, rate in given["rates"].items()
            }
            if given["axes"] is not None:
                self.axes = dict(zip(sorted(piece.members), given["axes"], strict=True))
            return
        if name == "trace":
            if self.algorithm not in ("", "rmsprop"):
                raise ConversionError(f"trace after {self.algorithm} has no counterpart in torch")
            check_settings("trace", given, {"accumulator_dtype": None})
            if self.algorithm == "rmsprop":
                check_settings("trace after scale_by_rms", given, {"nesterov": False})
                self.settings["momentum"] = float(given["decay"])
            else:
                momentum = {"momentum": float(given["decay"]), "nesterov": given["nesterov"]}
                self._take("sgd", momentum)
            return
        if name == "ema" and not given["debias"]:
            # The state begins at 0, so that its first step is like the others.
            self.step = max(1, int(piece.state.count))
            decay = float(given["decay"])
            self._take("sgd", {"momentum": decay, "dampening": decay})
            return
        if name not in _CORES:
            why = _INSTEAD.get(name, "torch's optimizers have no such step")
            raise ConversionError(f"{name} has no counterpart in torch: {why}")
        settings = self._settings(name, given)
        self._take(_CORES[name], settings)
        if "count" in piece.state._fields:
            self.step = int(piece.state.count)

    def _settings(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of one of optax's own, by torch's names."""
        if name in ("scale_by_adam", "scale_by_adamax", "scale_by_lion"):
            settings: dict[str, Any] = {"betas": (float(given["b1"]), float(given["b2"]))}
            fixed = {"eps_root": 0.0, "nesterov": False, "mu_dtype": None, "mode": "hard"}
            check_settings(name, given, fixed)
            return settings | ({"eps": float(given["eps"])} if "eps" in given else {})
        if name == "scale_by_adadelta":
            return {"rho": float(given["rho"]), "eps": float(given["eps"])}
        check_settings(name, given, {"eps_in_sqrt": False, "bias_correction": False})
        return {
            "alpha": float(given["decay"]),
            "eps": float(given["eps"]),
            "centered": name == "scale_by_stddev",
        }

    def _take(self, algorithm: str, settings: Mapping[str, Any]) -> None:
        if self.algorithm:
            raise ConversionError(
                f"{self.algorithm} is followed by {algorithm}, and torch's optimizers have one"
            )
        self.algorithm = algorithm
        self.settings |= settings

    def collect(
        self, members: Sequence[int], params: Sequence[Any], slots: Mapping[str, dict[int, Any]]
    ) -> None:
        """Adds the arrays that the states hold for some parameters.

        Raises:
            ConversionError: The state is one for other parameters, or of another dtype.
        """
        for piece in self.pieces:
            if isinstance(piece.state, Moments):
                # Before its first step dampened SGD has no buffer in torch, which is not 0.
                is_new = self.algorithm == "sgd" and not self.step
                trees = {} if is_new else piece.state.arrays
            else:
                fields = _SLOTS.get(self.algorithm, {}).get(type(piece.state).__name__, {})
                trees = {slot: getattr(piece.state, name) for name, slot in fields.items()}
            for slot, tree in trees.items():
                leaves = jax.tree.leaves(tree, is_leaf=is_masked)
                if len(leaves) != len(params):  # those of `eqx.is_array`, with integers
                    leaves = [x for x in leaves if is_masked(x) or jnp.issubdtype(x, jnp.inexact)]
                if len(leaves) != len(params):
                    raise ConversionError(
                        f"the optimizer has {slot} for {len(leaves)} parameters, and the model has "
                        f"{len(params)}. Pass the model that it was made for."
                    )
                for at in members:
                    leaf, like = leaves[at], params[at]
                    if leaf.dtype != like.dtype:
                        raise ConversionError(
                            f"{slot} of parameter {at} is of {leaf.dtype}, and the parameter of "
                            f"{like.dtype}; torch has one dtype for both"
                        )
                    if self.algorithm != "adafactor" and leaf.shape != like.shape:
                        raise ConversionError(
                            f"{slot} of parameter {at} has the shape {leaf.shape}, and the "
                            f"parameter {like.shape}. Pass the model that it was made for."
                        )
                    if leaf.size:
                        slots[slot][at] = leaf
