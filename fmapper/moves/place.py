"""Chooses devices and dtypes for parts of a model, selected by path or class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from fmapper.backends.device import parse_device
from fmapper.backends.discovery import adapter_of
from fmapper.backends.dtypes import dtype_name
from fmapper.errors import DeviceError, FmapperError, PlacementError
from fmapper.moves.carry import UNTOUCHED, Where
from fmapper.moves.mover import Mover, to_device
from fmapper.moves.patterns import Found, Rules, Selector
from fmapper.moves.plan import Plan
from fmapper.moves.router import Router
from fmapper.moves.view_ties import find_view_ties
from fmapper.tracebacks import short_traceback, shorten_traceback
from fmapper.tree.fmap import fmap
from fmapper.tree.keypath import format_link
from fmapper.tree.nodes import node_type_of, sync

T = TypeVar("T")


class Keep:
    """The class of `keep`, which excludes leaves in the rules of `place` and `cast`.

    Put such a rule before one that would match the same leaves.
    """

    def __repr__(self) -> str:
        return "keep"

    def __reduce__(self) -> str:
        return "keep"  # the same object again, also for copy.copy and pickle


keep: Final = Keep()
"""The target of rules of `place` and `cast` whose leaves stay as they are."""


class Placement(Router):
    """A mover that moves each part of a tree according to rules.

    `place(tree, rules)` is `Placement(rules)(tree)`. Create a placement to use it more than once,
    to plan it (`plan(placement, tree)`), or to pass it to a `DeviceLoader`.

    Args:
        rules: Path patterns or classes -> targets; see `place`.
        strict: False leaves objects alone that hold arrays but are not declared.
        report: Called after a move with the `Plan` of what was done, such as `print`.

    Raises:
        PlacementError: A rule cannot be read.
        DeviceError: A target is neither a device nor a dtype.

    Examples:
        >>> import fmapper, numpy as np
        >>> placement = fmapper.Placement({"head": "float16", "*": "float32"})
        >>> new = placement({"head": np.ones(1), "body": [np.ones(2)]})
        >>> new["head"].dtype.name, new["body"][0].dtype.name
        ('float16', 'float32')
    """

    def __init__(
        self,
        rules: Mapping[Any, Any],
        *,
        strict: bool | None = None,
        report: Callable[[Plan], object] | None = None,
    ) -> None:
        if not isinstance(rules, Mapping) or not rules:
            raise PlacementError(
                "rules must be a dict from path patterns or classes to targets, such as "
                f'{{"encoder.*": "cpu", "head": fmapper.keep}}, not {rules!r}.'
            )
        sync()
        self.rules: dict[Selector, Mover | Keep] = {
            pattern: _target(target, strict) for pattern, target in rules.items()
        }
        self.strict, self.report = strict, report
        self._rules = Rules(tuple(rules))
        self._shown = dict(rules)

    def __repr__(self) -> str:
        rules = ", ".join(
            f"{key.__qualname__ if isinstance(key, type) else repr(key)}: {target!r}"
            for key, target in self._shown.items()
        )
        return f"Placement({{{rules}}})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Placement)
            and [*self.rules.items()] == [*other.rules.items()]
            and (self.strict, self.report) == (other.strict, other.report)
        )

    def __hash__(self) -> int:
        return hash(tuple(self.rules))

    def __reduce__(self) -> Any:
        return _placement, (self._shown, self.strict, self.report)

    def __call__(self, tree: T) -> T:
        """Returns the tree with each part moved according to the rules."""
        try:
            return fmap(self, tree)
        except Exception as error:
            shorten_traceback(error)
            raise

    @property
    def on_report(self) -> Callable[[Plan], object] | None:
        """The function given as `report=`."""
        return self.report

    def for_tree(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Router:
        """Resolves the rules for one tree."""
        return _Placing(self, self._rules.find_matches(tree, is_leaf))


def _placement(rules: dict[Any, Any], strict: Any, report: Any) -> Placement:
    return Placement(rules, strict=strict, report=report)


@short_traceback
def place(
    tree: T,
    rules: Mapping[Any, Any],
    *,
    strict: bool | None = None,
    report: Callable[[Plan], object] | None = None,
) -> T:
    """Returns a new tree whose parts are moved according to rules.

    The first rule that matches a leaf applies; `"*"` matches the rest, and is tried last at any
    position. Leaves without a rule stay as they are, unless they are tied to arrays that move:
    these move along. Either everything is moved or, if something fails, nothing.

    A rule selects leaves by a class, which matches its instances and everything below them, or by a
    path pattern, which matches that path and everything below it. `encoder[1].weight`, as in
    messages, and `encoder.1.weight`, as in a state, are equivalent, with or without a leading
    `model`. `*` matches anything, dots included: `*norm*`, `layers.*.weight`. `layers[2:5]` is a
    slice of a list; `['a.b']` is a literal key, and `{i:0-3}` or `{part:q|k}` are alternatives, as
    in the rules for checkpoints.

    Args:
        tree: Anything.
        rules: `{pattern or class: target}`, where a target is a device, a dtype, a mover
            (`to_jax(device="gpu:0")`), or `keep`.
        strict: False leaves objects alone that hold arrays but are not declared.
        report: Called after the move with the `Plan` of what was done, such as `print`.

    Raises:
        PlacementError: A rule matches nothing or comes too late, or rules send a tied array, or
            views of one array, to different places; the message names paths and rules.
        DeviceUnavailableError: A device is not available.
        MoveError: A leaf could not be moved.

    Examples:
        >>> import fmapper, numpy as np
        >>> model = {"encoder": {"w": np.ones(2), "norm": np.ones(2)}, "head": np.ones(1)}
        >>> new = fmapper.place(model, {"*norm": fmapper.keep, "encoder": fmapper.to_torch})
        >>> new["encoder"]["w"], new["encoder"]["norm"] is model["encoder"]["norm"]
        (tensor([1., 1.], dtype=torch.float64), True)
    """
    return Placement(rules, strict=strict, report=report)(tree)


@short_traceback
def cast(
    tree: T,
    dtype: Any,
    *,
    strict: bool | None = None,
    report: Callable[[Plan], object] | None = None,
) -> T:
    """Casts the floating and complex arrays of a tree, each on its device.

    Values are rounded, very small ones to zero; a value that would become infinite is an error.

    Args:
        tree: Anything.
        dtype: A dtype for all arrays, or rules as for `place`: `{"*": "bfloat16", "*norm*":
            "float32"}`. `"*"` matches the rest.
        strict: False leaves objects alone that hold arrays but are not declared.
        report: Called after the cast with the `Plan` of what was done, such as `print`.

    Raises:
        ValueError: `dtype` is not a floating or complex dtype.
        PlacementError: As for `place`.
        LossyCastError: A finite value would become infinite.

    Examples:
        >>> import fmapper, numpy as np
        >>> model = {"w": np.ones(2), "norm": np.ones(2), "n": np.arange(2)}
        >>> new = fmapper.cast(model, {"*": "float16", "*norm*": "float32"})
        >>> [array.dtype.name for array in new.values()]
        ['float16', 'float32', 'int64']
    """
    rules = dtype if isinstance(dtype, Mapping) else {"*": dtype}
    for target in rules.values():
        if target is not keep:
            dtype_name(target)
    return Placement(rules, strict=strict, report=report)(tree)


def _target(target: Any, strict: bool | None) -> Mover | Keep:
    if isinstance(target, Keep):
        return keep
    if isinstance(target, Mover):
        mover: Mover = target
        return mover if strict is None else dataclasses.replace(mover, strict=strict)
    if isinstance(target, Placement):
        raise PlacementError(
            "the target of a rule must be a device, a dtype, a mover or keep, not further rules."
        )
    try:
        dtype = dtype_name(target)
    except ValueError:
        pass
    else:
        return Mover("cast", dtype=dtype, strict=strict)
    try:
        spec = parse_device(target)
    except DeviceError as error:
        raise DeviceError(
            f"{target!r} is neither a device nor a dtype nor a mover nor fmapper.keep: {error}"
        ) from None
    return to_device(spec, strict=strict)


class _Placing(Router):
    """A placement that is applied to one tree."""

    def __init__(self, placement: Placement, found: Found) -> None:
        self.placement = placement
        self.found = found
        self._movers = tuple(placement.rules.values())
        self._split: dict[int, str] | None = None
        self._base_of: dict[int, Any] = {}  # a view -> its base, which has the same target

    def __repr__(self) -> str:
        return repr(self.placement)

    @property
    def on_report(self) -> Callable[[Plan], object] | None:
        """The function given to the placement."""
        return self.placement.report

    def mover_of_node(self, node: Any) -> Mover | None:
        """Returns the mover of the first rule that matches a node."""
        for rule in self.found.rules.get(id(node), ()):
            mover = None if rule is None else self._movers[rule]
            if isinstance(mover, Mover):
                return mover
        return None

    def groups(self, leaves: Sequence[Any], where: Where) -> Iterable[tuple[Mover, list[int]]]:
        """Groups leaves by mover; equal movers count as one."""
        groups: dict[Hashable, tuple[Mover, list[int]]] = {}
        for at, leaf in enumerate(leaves):
            mover = self._mover_of(leaf, where, at)
            if isinstance(mover, Mover):
                groups.setdefault(mover, (mover, []))[1].append(at)
        return groups.values()

    def why_kept(self, leaf: Any) -> str:
        """Explains which rule keeps a leaf."""
        rule = next(iter(self.found.rules[id(leaf)]))
        return "no rule names it" if rule is None else f"the rule {self._name(rule)} keeps it"

    # --- the rule of a leaf ----------------------------------------------------------------------

    def _mover_of(self, leaf: Any, where: Where, at: int) -> Mover | Keep | None:
        if self._split is None:
            self._split = self._split_views()
        leaf = self._base_of.get(id(leaf), leaf)
        places = self.found.rules.get(id(leaf))
        if places is None:
            raise PlacementError(
                f"{format_link(where(at))}: this {type(leaf).__name__} is created each time its "
                f"parent is read, so rules cannot refer to it. Store it in the parent. {UNTOUCHED}"
            )
        if id(leaf) in self._split:
            raise PlacementError(self._split[id(leaf)])
        rules = [rule for rule in places if rule is not None]
        for other in rules[1:]:
            first = rules[0]
            if self._end(leaf, self._movers[first]) != self._end(leaf, self._movers[other]):
                raise PlacementError(
                    f"{format_link(places[first])} and {format_link(places[other])} are the same "
                    f"object, but {self._says(first)} and {self._says(other)}. Send both to the "
                    f"same place, or untie them. {UNTOUCHED}"
                )
        return self._movers[rules[0]] if rules else None

    def _end(self, leaf: Any, mover: Mover | Keep | None) -> Any:
        """Returns the target device and dtype of a leaf."""
        adapter = adapter_of(leaf)
        if isinstance(mover, Mover):
            if adapter is None:
                generator = None
                if node_type_of(leaf) is None:
                    generator = mover.generator(leaf, lambda _: None, 0)
                return mover if generator is None else generator.device
            (route,), _ = mover.routes([leaf], lambda _: None)
            return route.target.name, route.device, route.held
        if adapter is None:
            return None
        return adapter.name, adapter.device(leaf), adapter.dtype(leaf)

    def _split_views(self) -> dict[int, str]:
        """Finds arrays that share memory but are sent to several places; explains each."""
        if len(set(self._movers)) < 2 and all(None not in of for of in self.found.rules.values()):
            return {}
        arrays: dict[str, list[Any]] = {}
        for leaf in self.found.objects.values():
            adapter = adapter_of(leaf)
            if adapter is not None:
                arrays.setdefault(adapter.name, []).append(leaf)
        split = {}
        for group in arrays.values():
            adapter = adapter_of(group[0])
            assert adapter is not None
            for tie in find_view_ties(group, adapter) if adapter.may_share_memory(group) else ():
                ends, described = [], []
                for leaf in (group[tie.view], group[tie.base]):
                    rule, link = next(iter(self.found.rules[id(leaf)].items()))
                    described.append((link, self._says(rule)))
                    try:
                        ends.append(self._end(leaf, None if rule is None else self._movers[rule]))
                    except FmapperError:  # the move itself raises this error
                        break
                one_rule = len(self.found.rules[id(group[tie.view])]) == 1
                if one_rule and len(set(ends)) == 1:  # in one batch with its base
                    self._base_of[id(group[tie.view])] = group[tie.base]
                if len(set(ends)) > 1:
                    (view, target), (base, other_target) = described
                    split[id(group[tie.view])] = (
                        f"{format_link(view)} is a view of {format_link(base)}, but {target} and "
                        f"{other_target}. Send both to the same place, or copy one. {UNTOUCHED}"
                    )
        return split

    def _says(self, rule: int | None) -> str:
        if rule is None:
            return "no rule names it"
        target = list(self.placement._shown.values())[rule]
        return f"the rule {self._name(rule)} says {target!r}"

    def _name(self, rule: int) -> str:
        return self.found.name(rule)
