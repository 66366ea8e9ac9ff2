"""Reads an optax transformation: which algorithm it is, with which settings, and its state.

A transformation is two functions, whose closures hold the settings. What cannot be named by them is
refused, and so is what torch's optimizers do not have.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fmapper import ConversionError, ConversionWarning
from fmapper.backends import warn
from fmapper.training import ALGORITHMS, Group, OptimizerState, Schedule
from fmapper_adapters.jax.training.transformations import OfCount, Rate, transformation


class _Core(NamedTuple):
    """A transformation of optax that an algorithm of torch has."""

    algorithm: str
    settings: Mapping[str, str | tuple[str, str]]  # by the names of torch, with those of optax
    slots: Mapping[str, str]  # fields of its state -> slots
    fixed: Mapping[str, Any] = {}  # settings that torch does not have, with their values there


_BETAS: dict[str, str | tuple[str, str]] = {"betas": ("b1", "b2"), "eps": "eps"}
_ALPHA = {"alpha": "decay", "eps": "eps"}
_ROOT = {"eps_in_sqrt": False, "bias_correction": False}
_CORES = {
    "scale_by_adam": _Core(
        "adam", _BETAS, {"mu": "exp_avg", "nu": "exp_avg_sq"},
        {"eps_root": 0.0, "nesterov": False, "mu_dtype": None},
    ),
    "scale_by_adamax": _Core("adamax", _BETAS, {"mu": "exp_avg", "nu": "exp_inf"}),
    "scale_by_rms": _Core("rmsprop", _ALPHA, {"nu": "square_avg"}, _ROOT),
    "scale_by_stddev": _Core("rmsprop", _ALPHA, {"mu": "grad_avg", "nu": "square_avg"}, _ROOT),
    "scale_by_adadelta": _Core(
        "adadelta", {"rho": "rho", "eps": "eps"}, {"e_g": "square_avg", "e_x": "acc_delta"}
    ),
    "trace": _Core(
        "sgd", {"momentum": "decay", "nesterov": "nesterov"}, {"trace": "momentum_buffer"},
        {"accumulator_dtype": None},
    ),
    "ema": _Core(
        "sgd", {"momentum": "decay", "dampening": "decay"}, {"ema": "momentum_buffer"},
        {"debias": False, "accumulator_dtype": None},
    ),
}  # fmt: skip
_INSTEAD = {
    "scale_by_lion": "torch.optim has no Lion",
    "scale_by_rss": "torch's Adagrad adds eps to the root, and optax's within",
    "scale_by_radam": "torch's RAdam adds eps to the root before its bias is corrected",
    "scale_by_amsgrad": "torch's AMSGrad keeps the largest moment before its bias is corrected",
    "scale_by_factored_rms": "torch's Adafactor has another rate and clips otherwise",
    "scale_by_muon": "torch's Muon corrects no bias, and rounds to bfloat16 in between",
}
# A chain in letters, which is one of torch's where it has this order: what torch does outside, then
# a sign, a decay, a scaling, a decay, and rates.
_ORDER = re.compile(r"a?o*(m|(?P<sign>s(?=.))?d?(c|vt?|t|e)?d?[rs]*)")
_LETTERS = dict.fromkeys(_CORES, "c") | {
    "MultiSteps": "a", "clip": "o", "clip_by_global_norm": "o", "add_decayed_weights": "d",
    "scale_by_rms": "v", "scale_by_stddev": "v", "trace": "t", "ema": "e", "scale": "r",
    "scale_by_schedule": "r", transformation.__name__: "m",
}  # fmt: skip

# What torch does outside of the optimizer, before it.
_OUTSIDE = {
    "MultiSteps": "accumulate gradients. Before each step call ({loss}).backward() {every} times",
    "clip_by_global_norm": "clip gradients. Before each step call "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), {max_norm})",
    "clip": "clip gradients. Before each step call "
    "torch.nn.utils.clip_grad_value_(model.parameters(), {max_delta})",
}


class _Piece(NamedTuple):
    """One transformation of a chain: its name, its settings, its state and its parameters."""

    name: str
    settings: Mapping[str, Any]
    state: Any
    members: frozenset[int]


_Reading = tuple[str, Group, Mapping[str, Any]]  # of a chain: its algorithm, and trees of arrays


def read(
    params: Any, tx: Any, opt_state: Any, places: Sequence[int] | None = None, steps: int = 0
) -> OptimizerState:
    """Returns an optimizer as plain data; see `Optimizers.read_optimizer`.

    Its parameters are those at `places`, else all. Where optax counts no steps there were `steps`.
    """
    leaves = jax.tree.leaves(params)
    if any(jnp.iscomplexobj(leaf) for leaf in leaves):
        raise ConversionError("optimizers of complex parameters cannot be converted")
    places = range(len(leaves)) if places is None else places
    pieces = [*_pieces(tx.update, opt_state, params, frozenset(range(len(leaves))))]
    chains: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for at in range(len(leaves)):
        chain = tuple(i for i, piece in enumerate(pieces) if at in piece.members)
        if not chain or pieces[chain[-1]].name != "set_to_zero":  # whose input does not matter
            chains[chain].append(at)
    for piece in (piece for piece in pieces if piece.name in _OUTSIDE):
        if len(piece.members) != len(leaves):
            raise ConversionError(
                f"{piece.name} of some of the parameters has no counterpart in torch. "
                "Do it for all of them, or outside of the optimizer."
            )
        what = _OUTSIDE[piece.name].format(**piece.settings)
        warn(f"{piece.name}: torch's optimizers do not {what}", ConversionWarning)
    groups, slots, algorithms = [], defaultdict[str, dict[int, Any]](dict), set[str]()
    for chain, members in chains.items():
        algorithm, group, trees = _read_chain([pieces[i] for i in chain], steps)
        for slot, tree in trees.items():
            arrays = _leaves(slot, tree, len(leaves))
            slots[slot] |= {places[at]: arrays[at] for at in members if arrays[at].size}
        algorithms.add(algorithm)
        groups.append(replace(group, members=tuple(places[at] for at in members)))
    if len(algorithms) > 1:
        raise ConversionError(
            f"the parameters are divided among {', '.join(sorted(algorithms))}, and an optimizer "
            "of torch has one algorithm for all. Make one transformation for each, with "
            "optax.set_to_zero for the parameters of the others, and pass both as a tuple."
        )
    return OptimizerState(next(iter(algorithms), "sgd"), tuple(groups), dict(slots))


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
    elif name in ("partition", "multi_transform", "masked"):
        is_mask = name == "masked"
        tree = inner["mask" if is_mask else "param_labels"]
        labels = jax.tree.leaves(tree(params) if callable(tree) else tree)
        if len(labels) != len(jax.tree.leaves(params)):
            raise ConversionError(f"{name}: its labels or flags are not one for each parameter")
        parts = {True: state} if is_mask else state.inner_states
        for label, part in parts.items():
            chosen = frozenset(at for at in members if labels[at] == label)
            made = inner["inner"] if is_mask else inner["transforms"][label]
            yield from _pieces(made.update, part.inner_state, params, chosen)
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
            yield piece._replace(state=count) if piece.name == "scale_by_schedule" else piece
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
    elif name != "identity":
        yield _Piece(name, inner, state, members)


def _closure(function: Any) -> dict[str, Any]:
    """Returns the variables that a function holds; none for what is not written in Python."""
    try:
        return dict(inspect.getclosurevars(function).nonlocals)
    except TypeError:
        return {}


def _number(value: Any) -> Any:
    return np.asarray(value).item() if np.ndim(value) == 0 else value


def _read_chain(pieces: Sequence[_Piece], step: int) -> _Reading:
    """Reads a chain as an algorithm of torch with its settings."""
    algorithm, rate = "sgd", 1.0
    settings: dict[str, Any] = {}
    trees: dict[str, Any] = {}
    schedules: dict[str, Schedule] = {}
    letters = "".join(
        "s"
        if piece.name == "scale" and _number(piece.settings["step_size"]) == -1.0
        else _LETTERS.get(piece.name, "x")
        for piece in pieces
    )
    if [piece.name for piece in pieces] == ["ema"]:
        return _read_average(pieces[0])
    order = _ORDER.fullmatch(letters)
    if order is None:
        at = next(at for at in range(len(letters)) if not _ORDER.fullmatch(letters[: at + 1]))
        name = pieces[at].name
        why = _INSTEAD.get(name, "torch's optimizers have no such step")
        if letters[at] != "x":
            name += f" after {pieces[at - 1].name}" * bool(at)
            why = "its optimizers decay weights, scale by one algorithm, and last by the rate"
        raise ConversionError(f"{name} has no counterpart in torch: {why}")
    if letters.endswith("m"):  # one of ours, which has decay and rate in it
        given, state = pieces[-1].settings, pieces[-1].state
        algorithm, step, at = given["algorithm"], int(state.count), int(state.position)
        rates = given["rates"].items()
        schedules = {name: replace(rate.schedule, position=at) for name, rate in rates}
        numbers = {key: float(value) for key, value in state.numbers.items()}
        # Before its first step dampened SGD has no buffer in torch, which is not 0.
        trees = {} if algorithm == "sgd" and not step else state.arrays
        return algorithm, Group((), given["settings"], step, numbers, schedules), trees
    decays = []
    for at, (letter, (name, given, state, _)) in enumerate(zip(letters, pieces, strict=True)):
        if letter == "a":
            step = int(state.gradient_step)
        elif letter == "d":
            decay = _number(given["weight_decay"])
            if not isinstance(decay, int | float):
                raise ConversionError(
                    f"add_decayed_weights: a weight decay of {decay!r} has no counterpart in "
                    "torch, which has a number for each group"
                )
            decays += [(bool(trees), decay)] if decay else []
        elif letter in "cvte":
            core, is_second = _CORES[name], bool(trees)  # the momentum of RMSprop
            settings |= _settings(pieces[at], is_second)
            algorithm = algorithm if is_second else core.algorithm
            trees |= {slot: getattr(state, key) for key, slot in core.slots.items()}
            step = int(state.count) if "count" in state._fields else step
            if name == "ema":  # begins at 0, so that its first step is like the others
                step = max(1, step)
        elif name == "scale_by_schedule":
            if schedules:
                raise ConversionError("two schedules of the rate have no counterpart in torch")
            inner = _closure(given["step_size_fn"])
            base = inner.get("learning_rate")
            if base is None or inner.get("m") != -1:
                raise ConversionError(
                    "scale_by_schedule: only optax.scale_by_learning_rate(schedule) has a "
                    "counterpart"
                )
            if not isinstance(base, Rate):
                base = Rate(1.0, Schedule("LambdaLR", {"function": OfCount(base)}))
            settings["lr"] = base.base
            schedules["lr"] = replace(base.schedule, position=int(state.count))
        elif letter in "rs" and at != order.start("sign"):
            rate *= float(given["step_size"])
    settings = {"lr": -rate, **ALGORITHMS[algorithm].settings, **settings}
    settings["maximize"] = bool(order["sign"])
    if len(decays) > 1:
        raise ConversionError("weights decay twice, which no optimizer of torch does")
    for after, decay in decays:
        settings["weight_decay"] = decay
        if "decoupled" in settings:
            settings["decoupled"] = after
        elif after:
            raise ConversionError(
                f"{algorithm}: weights decay after the gradient was scaled, which torch's "
                "does not: put add_decayed_weights first"
            )
    if schedules and rate != 1.0:
        raise ConversionError(f"the schedule of the rate is scaled by {rate}")
    if not schedules and rate > 0:
        raise ConversionError(
            "the update is added with a positive sign: scale by a negative rate, as "
            "optax.scale_by_learning_rate does"
        )
    return algorithm, Group((), settings, step, schedules=schedules), trees


def _settings(piece: _Piece, is_second: bool) -> dict[str, Any]:
    """Returns the settings of one of optax's own, by the names of torch."""
    core, given = _CORES[piece.name], piece.settings
    fixed = {**core.fixed, **({"nesterov": False} if is_second else {})}
    wrong = [
        f"{name}={given[name]!r} (only {value!r})"
        for name, value in fixed.items()
        if given.get(name, value) != value
    ]
    if wrong:
        raise ConversionError(f"{piece.name}: there is no counterpart for {', '.join(wrong)}")
    return {
        name: tuple(float(given[key]) for key in keys)
        if isinstance(keys, tuple)
        else _number(given[keys])
        for name, keys in core.settings.items()
        if name not in fixed
    } | ({"centered": True} if "grad_avg" in core.slots.values() else {})


def _read_average(piece: _Piece) -> _Reading:
    """Reads `optax.ema` of the parameters."""
    count, decay = int(piece.state.count), piece.settings["decay"]
    kind = "unbiased" if piece.settings["debias"] else "ema"
    if kind == "ema" and not count:
        raise ConversionError(
            "ema with debias=False begins at 0, and torch's averages with the first parameters: "
            "use debias=True, or update it once"
        )
    share = 1 - decay**count if kind == "unbiased" and count else 1
    trees = {"average": jax.tree.map(lambda array: array / share, piece.state.ema)}
    return "average", Group((), {"kind": kind, "decay": decay}, count), trees


def _leaves(slot: str, tree: Any, count: int) -> list[Any]:
    """Returns the arrays of a slot, one for each parameter; those of other groups are masked."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if len(leaves) != count:  # those of `eqx.is_array`, with integers
        leaves = [
            x for x in leaves if not hasattr(x, "dtype") or jnp.issubdtype(x.dtype, jnp.inexact)
        ]
    if len(leaves) != count:
        raise ConversionError(
            f"the optimizer has {slot} for {len(leaves)} parameters, and the model has "
            f"{count}. Pass the model that it was made for."
        )
    return leaves
