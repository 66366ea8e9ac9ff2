"""Evaluates loops and branches of JAX one operation after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from fmapper.backends import Observation
from fmapper_adapters.jax.record import parts
from fmapper_adapters.jax.record.equations import custom_derivatives, plain, primitives

# The most operations to run one by one; of longer loops only the results are shown.
_MOST = 10_000

Value = tuple[Any, str]  # an array, and the name of its result or ""


class _TooLong(Exception):
    """Raised by a loop with too many operations to run one by one."""


@dataclass
class Steps:
    """Evaluates a loop or a branch step by step.

    Args:
        name: The name of its result, the prefix of the names inside.
        show: Converts a result to the form in which it is reported.

    Attributes:
        seen: The operations inside, in order.
    """

    name: str
    show: Callable[[Any], Any]
    seen: list[Observation] = field(default_factory=list)

    def run(
        self, eqn: Any, operands: Sequence[Value], path: str, source: str
    ) -> list[Value] | None:
        """Evaluates the equation, and returns its results with their names.

        None if the equation is neither a loop nor a branch, or has too many steps.
        """
        if eqn.primitive.name not in ("scan", "while", "cond"):
            return None
        try:
            return self._equation(eqn, operands, "", path, source)
        except _TooLong:
            return None

    def _equation(
        self, eqn: Any, operands: Sequence[Value], loop: str, path: str, source: str
    ) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(eqn, operands, loop, path, source)
        if name == "while":
            return self._while(eqn, operands, loop, path, source)
        if name == "cond":
            last = len(params["branches"]) - 1
            branch = params["branches"][min(max(int(operands[0][0]), 0), last)]
            return self._jaxpr(branch, operands[1:], loop, path, source)
        if name in primitives.INLINED:
            inner = params.get("jaxpr", params.get("call_jaxpr", params.get("call")))
            return self._jaxpr(inner, operands, loop, path, source)
        function = custom_derivatives.function_of(eqn)
        if function is not None:
            return self._jaxpr(function.body, operands, loop, path, source)
        results = custom_derivatives.results_of(eqn)([x for x, _ in operands])
        return self._note(f"lax::{name}", results, operands, loop, path, source)

    def _note(
        self, op: str, results: Sequence[Any], operands: Sequence[Value], loop: str, path: str,
        source: str,
    ) -> list[Value]:  # fmt: skip
        if len(self.seen) == _MOST:
            raise _TooLong
        at = f"{self.name}/{len(self.seen)}"
        names = tuple(dict.fromkeys(name for _, name in operands if name))
        shown = tuple(map(self.show, results))
        part = parts.part_in(path)
        self.seen.append(Observation(part, op, source, shown, at, names, loop))
        return [(x, at) for x in results]

    def _jaxpr(
        self, closed: Any, operands: Sequence[Value], loop: str, path: str, source: str
    ) -> list[Value]:
        jaxpr = getattr(closed, "jaxpr", closed)
        env: dict[Any, Value] = dict(zip(jaxpr.invars, operands, strict=True))
        consts = getattr(closed, "consts", ())
        env |= {var: (x, "") for var, x in zip(jaxpr.constvars, consts, strict=True)}

        def value(var: Any) -> Value:
            if isinstance(var, core.Literal):
                return jnp.asarray(var.val, getattr(var.aval, "dtype", None)), ""
            return env[var]

        for eqn in jaxpr.eqns:
            given = [value(var) for var in eqn.invars]
            place = plain.path(eqn, path), plain.source(eqn) or source
            env.update(zip(eqn.outvars, self._equation(eqn, given, loop, *place), strict=True))
        return [value(var) for var in jaxpr.outvars]

    def _scan(
        self, eqn: Any, operands: Sequence[Value], loop: str, path: str, source: str
    ) -> list[Value]:
        params = eqn.params
        split = params["num_consts"]
        carries = params["num_carry"]
        fixed, carry = operands[:split], list(operands[split : split + carries])
        rows = operands[split + carries :]
        count = params["length"]
        gathered: list[list[Value]] = []
        for step in reversed(range(count)) if params["reverse"] else range(count):
            inside = f"{loop}scan[{step}]"
            slices = [
                self._note("lax::slice", [x[step]], [(x, name)], inside, path, source)[0]
                for x, name in rows
            ]
            results = self._jaxpr(params["jaxpr"], [*fixed, *carry, *slices], inside, path, source)
            carry = results[:carries]
            gathered.append(results[carries:])
        if params["reverse"]:
            gathered.reverse()
        stacked = []
        for i, var in enumerate(eqn.outvars[carries:]):
            parts = [row[i] for row in gathered]
            whole = jnp.stack([x for x, _ in parts]) if parts else _empty(var.aval)
            stacked += self._note("lax::scan", [whole], parts, loop, path, source)
        return [*carry, *stacked]

    def _while(
        self, eqn: Any, operands: Sequence[Value], loop: str, path: str, source: str
    ) -> list[Value]:
        params = eqn.params
        tests = operands[: params["cond_nconsts"]]
        first = params["cond_nconsts"] + params["body_nconsts"]
        fixed, carry = operands[params["cond_nconsts"] : first], list(operands[first:])
        step = 0
        while True:
            inside = f"{loop}while[{step}]"
            ((going, _),) = self._jaxpr(
                params["cond_jaxpr"], [*tests, *carry], inside, path, source
            )
            if not going.any():
                return carry
            new = self._jaxpr(params["body_jaxpr"], [*fixed, *carry], inside, path, source)
            pairs = zip(new, carry, strict=True)
            carry = [(_where(going, x, old), name) for (x, name), (old, _) in pairs]
            step += 1


def _where(going: Any, x: Any, old: Any) -> Any:
    """Returns the elements of a batch whose loop goes on, and the old ones of the others."""
    if not going.ndim:
        return x
    return jnp.where(going.reshape(going.shape + (1,) * (x.ndim - going.ndim)), x, old)


def _empty(aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype)
