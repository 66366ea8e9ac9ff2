"""A model of Flax Linen as a file for PyTorch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen

from fmapper.translation import expr, literal, text
from fmapper.translation.source import format_code
from fmapper_translate.functions import Function
from fmapper_translate.recording import record
from fmapper_translate.sources.linen import LinenSource
from fmapper_translate.torch.linen.compact import STILL, TRAINING
from fmapper_translate.torch.linen.files import File, settings_of
from fmapper_translate.torch.nnx.transcription import Inputs, flags_of, refuse_keys, rules_of
from fmapper_translate.torch.tables import is_library_module
from fmapper_translate.torch.witness import functions_that_differ
from fmapper_translate.transcription import Transcription
from fmapper_translate.walk.errors import NotTranscribed


class _Bound:
    """A module with its variables, whose calls are in the mode that was set.

    Args:
        module: The module.
        variables: Its variables.
        source: Notes the classes of its parts.
    """

    def __init__(self, module: linen.Module, variables: Any, source: LinenSource) -> None:
        self.module, self._source = module, source
        self._variables = linen.meta.unbox(variables)
        self._is_training = False

    def eval(self) -> None:
        """Sets the mode."""
        self._is_training = False

    def train(self) -> None:
        """Sets the mode."""
        self._is_training = True

    def options(self, inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keywords of a call in the mode, which its flags set."""
        signature = inspect.signature(type(self.module).__call__)
        positional = signature.bind_partial(self.module, *inputs).arguments
        flags = dict.fromkeys(TRAINING, self._is_training)
        flags |= dict.fromkeys(STILL, not self._is_training)
        free = {name: value for name, value in flags.items()
                if name in signature.parameters and name not in positional}  # fmt: skip
        return {**options, **free}

    def __call__(self, inputs: Inputs, options: Mapping[str, Any]) -> Any:
        """Calls the module."""
        keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(0)), strict=True))
        given = self.options(inputs, options)
        keys |= given.pop("rngs", {})
        mutable = given.pop("mutable", [name for name in self._variables if name != "params"])
        with linen.intercept_methods(self._source.note):
            result = self.module.apply(
                self._variables, *inputs, rngs=keys, mutable=mutable, **given
            )
        collected = result[1].keys() - self._variables.keys() if mutable else ()
        if collected:
            raise NotTranscribed(
                f"its call collects {', '.join(sorted(collected))}, which a file does not give: "
                "leave that out of mutable="
            )
        return result


def from_linen(
    model: Any, inputs: Inputs | list[Inputs], options: Mapping[str, Any] | None
) -> Transcription:
    """Writes a module of Linen with its variables as a file for PyTorch; see `transcribe`."""
    module, variables = model if isinstance(model, tuple) else _unbind(model)
    if not isinstance(module, linen.Module):
        raise NotTranscribed("only modules of Linen with their variables are transcribed")
    cls = type(module)
    if is_library_module(cls):
        raise NotTranscribed(
            f"{cls.__name__} is Flax's own: only classes of a model are transcribed"
        )
    if "method" in (options or {}):
        raise NotTranscribed("a method other than `__call__` is not transcribed as the model")
    refuse_keys(cls, inputs)
    source = LinenSource()
    examples = inputs if isinstance(inputs, list) else [inputs]
    calls = [functools.partial(_call, example, options or {}) for example in examples]
    recording, bound = record(source, lambda: _Bound(module, variables, source), calls)
    weights = {
        ".".join(str(step.key) for step in path): value
        for path, value in jax.tree_util.tree_leaves_with_path(linen.meta.unbox(variables))
    }
    bound.eval()
    given = bound.options(examples[0], options or {})
    given = {name: x for name, x in given.items() if name not in ("rngs", "mutable")}
    file = File(recording, module)
    first = [_code_of(x) for x in examples[0]]

    def differ(code: str, example: str) -> dict[Function, str]:
        made = _with_sizes(example, first, given)
        return functions_that_differ(code, made, recording, weights, examples, given)

    title = f"{cls.__name__} for PyTorch, transcribed from {cls.__module__}"
    code, example = file.write(title, (), settings_of(module), differ)
    example = _with_sizes(example, first, given)
    rules = rules_of(code, example, weights)
    return Transcription(
        format_code(code), cls.__name__, example, weights, {}, rules=rules, target="torch",
        flags=flags_of(cls, examples[0], module), keys={"rngs": {"dropout": jax.random.key(0)}},
    )  # fmt: skip


def _unbind(model: Any) -> tuple[Any, Any]:
    if model.scope is None:
        raise NotTranscribed(f"{type(model).__name__} is without its variables")
    return model.unbind()  # type: ignore[no-any-return]


def _call(inputs: Inputs, options: Mapping[str, Any], model: _Bound) -> object:
    return model(inputs, options)


def _code_of(value: Any) -> str:
    """Returns the code for an input, zeros in the place of an array."""
    if hasattr(value, "dtype"):
        return f"torch.zeros({tuple(value.shape)}, dtype=torch.{value.dtype})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_code_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        inner = "".join(f"{_code_of(item)}, " for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return text(literal(value))


def _with_sizes(example: str, inputs: Sequence[str], options: Mapping[str, Any]) -> str:
    """Returns the code for a model that knows its sizes."""
    more = [f"{name}={_code_of(value)}" for name, value in options.items()]
    return text(expr(f"initialize({', '.join([example, *inputs, *more])})"))
