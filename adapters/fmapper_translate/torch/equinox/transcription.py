"""A model of Equinox as a file for PyTorch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax

from fmapper import state
from fmapper.translation.source import format_code
from fmapper_adapters.jax.libraries import train_flags
from fmapper_translate.constructors.arguments import find_arguments
from fmapper_translate.functions import Function
from fmapper_translate.recording import record
from fmapper_translate.sources.equinox import EquinoxSource
from fmapper_translate.torch.equinox.arguments import EQUINOX
from fmapper_translate.torch.equinox.files import File
from fmapper_translate.torch.nnx.transcription import Inputs, flags_of, rules_of
from fmapper_translate.torch.tables import is_library_module, is_random
from fmapper_translate.torch.witness import functions_that_differ
from fmapper_translate.transcription import Transcription
from fmapper_translate.walk.errors import NotTranscribed


class _Bound:
    """A model whose calls are in the mode that was set."""

    def __init__(self, module: eqx.Module) -> None:
        self.module: Any = module

    def eval(self) -> None:
        """Sets the mode."""
        self.module = eqx.nn.inference_mode(self.module, value=True)

    def train(self) -> None:
        """Sets the mode."""
        self.module = eqx.nn.inference_mode(self.module, value=False)

    def __call__(self, inputs: Inputs, options: Mapping[str, Any]) -> Any:
        """Calls the model, with a key if it takes one."""
        return self.module(*inputs, **{**_keys_of(type(self.module)), **options})


def name_keys(
    model: Any, inputs: Inputs, options: Mapping[str, Any] | None
) -> tuple[Inputs, dict[str, Any]]:
    """Returns inputs, of which those by position end before the first key or mode; and keywords."""
    names = [*inspect.signature(type(model).__call__).parameters][1:]
    named = zip(names, inputs, strict=False)
    by_name = {"key", *train_flags.NAMES}
    is_key = [is_random(x) or (name in by_name and x is not None) for name, x in named]
    at = is_key.index(True) if True in is_key else len(inputs)
    given = {**dict(zip(names[at:], inputs[at:], strict=False)), **(options or {})}
    if getattr(given.get("key"), "dtype", None) == "uint32":  # of `jax.random.PRNGKey`
        given["key"] = jax.random.wrap_key_data(given["key"])
    return inputs[:at], given


def _keys_of(cls: type) -> dict[str, Any]:
    """Returns a key for the calls of a class, if those take one."""
    parameters = inspect.signature(cls.__call__).parameters
    return {"key": jax.random.key(0)} if "key" in parameters else {}


def from_equinox(
    model: Any,
    inputs: Inputs | list[Inputs],
    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
) -> Transcription:
    """Writes a module of Equinox as a file for PyTorch; see `transcribe`."""
    cls = type(model)
    if is_library_module(cls):
        raise NotTranscribed(
            f"{cls.__name__} is Equinox's own: only classes of a model are transcribed"
        )
    args, kwargs = find_arguments(model, EQUINOX) if arguments is None else arguments

    def make() -> _Bound:
        made = EQUINOX.make(cls, args, kwargs)
        leaves = zip(jax.tree.leaves(made), jax.tree.leaves(model), strict=True)
        whole = [theirs if eqx.is_array(theirs) else ours for ours, theirs in leaves]
        return _Bound(jax.tree.unflatten(jax.tree.structure(made), whole))

    named = [
        name_keys(model, x, options) for x in (inputs if isinstance(inputs, list) else [inputs])
    ]
    examples, options = [x for x, _ in named], named[0][1]
    given = {name: x for name, x in options.items() if name != "key" and not is_random(x)}
    calls = [functools.partial(_call, example, options) for example in examples]
    recording, bound = record(EquinoxSource(), make, calls)
    weights = {name: x for name, x in state(model).items() if not is_random(x)}
    file = File(recording, bound.module)

    def differ(code: str, example: str) -> dict[Function, str]:
        return functions_that_differ(code, example, recording, weights, examples, given)

    title = f"{cls.__name__} for PyTorch, transcribed from {cls.__module__}"
    code, example = file.write(title, args, kwargs, differ)
    rules = rules_of(code, example, weights)
    return Transcription(
        format_code(code), cls.__name__, example, weights, {}, rules=rules, target="torch",
        flags=flags_of(cls, examples[0]), keys=_keys_of(cls),
    )  # fmt: skip


def _call(inputs: Inputs, options: Mapping[str, Any], model: _Bound) -> object:
    return model(inputs, options)
