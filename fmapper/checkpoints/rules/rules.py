"""Sequences of rules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fmapper.checkpoints.extras.values import is_value
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.rules.rule import Change, Rule
from fmapper.errors import CheckpointError


class Rules:
    """Rules for the arrays of a checkpoint, applied in order.

    Arrays that no rule matches stay as they are. Nothing is read: the results are lazy arrays.

    Args:
        rules: The rules: `Rename`, `Tie`, `Drop`, `Lack`, `AddConstant`, `Transpose`, `Reshape`,
            `Interleave`, `Cast`, `Offset`, `Scale`, `Split`, `Concatenate`, `Stack`, `Unstack`,
            `Sum`.

    Examples:
        >>> import numpy as np
        >>> rules = Rules([
        ...     Rename("layers.{i}.dense.kernel", "blocks.{i}.w"),
        ...     Transpose("blocks.{i}.w"),
        ...     Stack("blocks.{i}.w", "blocks.w", over="i"),
        ... ])
        >>> given = {f"layers.{i}.dense.kernel": np.zeros((2, 3)) for i in range(4)}
        >>> rules.apply(given)
        {'blocks.w': <Concatenate float64[4, 3, 2]>}
        >>> sorted(rules.inverse().apply(rules.apply(given)))[0]
        'layers.0.dense.kernel'
    """

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = tuple(rules)
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"Rules takes rules such as Rename, not {rule!r}")

    def __iter__(self) -> Iterator[Rule]:
        """Returns the rules in order."""
        return iter(self.rules)

    def __len__(self) -> int:
        """Returns the number of rules."""
        return len(self.rules)

    def __add__(self, other: Rules) -> Rules:
        """Returns these rules followed by the others."""
        return Rules([*self.rules, *other.rules]) if isinstance(other, Rules) else NotImplemented

    def __eq__(self, other: object) -> bool:
        """Returns whether both have the same rules."""
        return isinstance(other, Rules) and self.rules == other.rules

    def __hash__(self) -> int:
        """Returns the hash of the rules."""
        return hash(self.rules)

    def __repr__(self) -> str:
        """Returns the rules as Python code, one per line."""
        return "".join(["Rules([", *(f"\n    {rule}," for rule in self.rules), "\n])"])

    def apply(
        self, arrays: Mapping[str, Any], *, strict: bool = True, reversible: bool = False
    ) -> dict[str, Any]:
        """Applies the rules lazily; reads nothing.

        Args:
            arrays: Arrays by name, lazy or of NumPy; and numbers and texts, as in a checkpoint,
                which only `Rename` and `Drop` see.
            strict: Whether a rule that matches nothing is an error. Of a rule with several names,
                one must match.
            reversible: Whether it is an error if the inverse would not restore names, shapes and
                dtypes, because it would match an array that no rule has made.

        Raises:
            CheckpointError: A rule matches nothing, does not fit an array, finds only some of the
                arrays that it needs, or creates a name that already exists. Names the rule and the
                array.
        """
        results = {
            name: array if isinstance(array, LazyArray) or is_value(array) else LazyArray.of(array)
            for name, array in arrays.items()
        }
        given = results
        for number, rule in enumerate(self.rules, 1):
            results = _one(rule, number, results, strict)
        if reversible:
            back = self.inverse().apply(results, strict=strict)
            for name in given.keys() | back.keys():
                before, new = given.get(name), back.get(name)
                if before is None or new is None or _outline(before) != _outline(new):
                    raise CheckpointError(
                        f"the inverse of these rules does not give {name} back: "
                        f"{before} became {new}"
                    )
        return results

    def inverse(self) -> Rules:
        """Returns the rules that undo these.

        Raises:
            CheckpointError: A rule has no inverse; says which, and what is lost.
        """
        return Rules([rule.inverse() for rule in reversed(self.rules)])

    @classmethod
    def record(
        cls,
        function: Callable[..., Any],
        state: Any,
        *args: Any,
        backend: str | None = None,
        **kwargs: Any,
    ) -> Rules:
        """Records a conversion function as rules.

        The function is called once, with arrays without data that record operations on them. It may
        rename arrays, move and join elements, cast, add numbers and arrays, and multiply by
        numbers, with functions of NumPy, torch and JAX, and write into arrays that it creates.

        Args:
            function: Takes the state, and returns the new one: arrays by name, nested or not, or a
                model with the arrays. If it returns None, the modified state is used.
            state: Arrays by name, a model, or the path of a checkpoint, of which only headers are
                read. Only shapes and dtypes matter, and nothing is changed.
            *args: Further arguments of the function.
            backend: The framework whose arrays the function takes: numpy, torch or jax; None for
                that of the arrays in the state, or NumPy if they are in a file.
            **kwargs: Further arguments of the function.

        Returns:
            The rules from the names of `fmapper.state(state)` to those of `fmapper.state(result)`.
            Arrays that the function does not use are dropped by a rule that names them, and the
            inverse names what it cannot restore.

        Raises:
            CheckpointError: The function needs values, such as for a condition or to sort, at the
                line that the message names; or an output has elements that depend on no array of
                the state and are not the same everywhere.

        Examples:
            >>> import numpy as np
            >>> def convert(state):
            ...     return {name.replace("weight", "kernel"): w.T for name, w in state.items()}
            >>> given = {f"layers.{i}.weight": np.ones((2, 3)) for i in range(4)}
            >>> Rules.record(convert, given)
            Rules([
                Transpose('layers.{i}.weight'),
                Rename(['layers.{i}.weight'], ['layers.{i}.kernel']),
            ])
        """
        from fmapper.checkpoints.recording.record import record  # it imports this module

        return record(function, state, backend, *args, **kwargs)

    def to_toml(self) -> str:
        """Returns the rules as TOML, from which `from_toml` reads them."""
        from fmapper.checkpoints.rules.toml import write_toml

        return write_toml(self.rules)

    @classmethod
    def from_toml(cls, source: str | os.PathLike[str]) -> Rules:
        """Reads rules from untrusted TOML: nothing in it is run or opened.

        Args:
            source: The text, or the path of a file: a `Path`, or a string that ends in `.toml`.

        Raises:
            CheckpointError: The text is not TOML, or an entry is not a rule.
            OSError: The file does not exist, or may not be read.
        """
        from fmapper.checkpoints.rules.toml import read_file, read_toml

        if isinstance(source, str) and ("\n" in source or not source.endswith(".toml")):
            return cls(read_toml(source))
        return cls(read_file(Path(source)))


def _outline(array: Any) -> Any:
    """Returns shape and dtype of an array; a number or text itself."""
    return (array.shape, array.dtype) if isinstance(array, LazyArray) else array


def _one(rule: Rule, number: int, arrays: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Applies one rule to the arrays, in order."""
    relevant = arrays
    if not rule.of_names and any(map(is_value, arrays.values())):
        relevant = {name: array for name, array in arrays.items() if not is_value(array)}
    at: dict[str, Change] = {}
    added: list[Change] = []
    removed: set[str] = set()
    matched = False
    for change in rule.changes(relevant):
        matched = True
        for name in change.names:
            if name in removed:
                raise CheckpointError(f"rule {number}, {rule}: takes {name} twice")
            removed.add(name)
        if change.names:
            at[change.names[0]] = change
        else:
            added.append(change)
    if not matched and strict:
        examples = ", ".join(list(arrays)[:3])
        raise CheckpointError(
            f"rule {number}, {rule}: matches nothing. "
            + (
                f"There are {len(arrays)} arrays: {examples}, ..."
                if arrays
                else "There are no arrays."
            )
        )
    results: dict[str, Any] = {}
    for name, array in arrays.items():
        if name in at:
            pairs = at[name].arrays
        elif name in removed:
            continue
        else:
            pairs = ((name, array),)
        for new, value in pairs:
            if new in results:
                raise CheckpointError(f"rule {number}, {rule}: two arrays would be named {new}")
            results[new] = value
    for change in added:
        for new, value in change.arrays:
            if new in results:
                raise CheckpointError(f"rule {number}, {rule}: {new} exists already")
            results[new] = value
    return results
