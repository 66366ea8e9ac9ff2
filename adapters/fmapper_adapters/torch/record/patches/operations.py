"""Operations for functions that torch cannot record, because it does not know their shapes.

While a module is recorded, calls of such functions become custom operations of fmapper.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.record.patches import (
    autograd,
    encoders,
    packed,
    quantiles,
    recurrent,
)
from fmapper_adapters.torch.record.varying import sizes


@torch.library.custom_op("fmapper::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """Computes `torch.ctc_loss`, whose shape of forward probabilities depends on the lengths."""
    return torch.ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
    )


@ctc_loss.register_fake
def _(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> torch.Tensor:
    batched = reduction == 0 and log_probs.ndim == 3
    return log_probs.new_empty((log_probs.shape[1],) if batched else ())


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int | str = 1,
    zero_infinity: bool = False,
) -> Any:
    if isinstance(reduction, str):
        reduction = ("none", "mean", "sum").index(reduction)
    lengths = [
        given if isinstance(given, torch.Tensor) else torch.tensor(list(given), dtype=torch.int64)
        for given in (input_lengths, target_lengths)
    ]
    return ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> Any:
    """Computes `masked_select` on arrays of one shape, whose size then bounds the result."""
    together: Any = torch.broadcast_tensors  # untyped in torch
    return torch.masked_select(*together(x, mask))


def _where(condition: Any, *both: Any, **options: Any) -> Any:
    """Computes `where` of a condition alone, without an operation that torch must decompose."""
    if both or options:
        return torch.where(condition, *both, **options)
    return _places(condition)


def _nonzero(input: Any, *, as_tuple: bool = False, **options: Any) -> Any:
    """Computes `nonzero`, split into columns for `as_tuple`."""
    return _places(input) if as_tuple else torch.nonzero(input, **options)


def _places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    places = torch.nonzero(x.reshape(1) if x.ndim == 0 else x)
    return tuple(places.select(1, dim) for dim in range(places.shape[1]))


def _split(
    tensor: Any, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None
) -> Any:
    """Computes `split` of zero rows, for which torch 2.11 has no shapes."""
    size = split_size if split_size_or_sections is None else split_size_or_sections
    if isinstance(size, int) and isinstance(tensor.shape[dim], int) and tensor.shape[dim] == 0:
        return (tensor.narrow(dim, 0, 0),)
    return tensor.split(size, dim)


def _tensor_split(x: Any, indices_or_sections: Any, dim: int = 0) -> Any:
    """Computes `tensor_split` at positions in a tensor, whose values torch would read."""
    at = indices_or_sections
    if isinstance(at, torch.Tensor):
        at = at.item() if at.ndim == 0 else at.tolist()
    return torch.tensor_split(x, at, dim)


def _one_hot(input: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Computes `one_hot` with as many classes as the largest index needs."""
    if num_classes != -1:
        return torch.nn.functional.one_hot(input, num_classes)
    classes = torch.arange(input.max().item() + 1, device=input.device)
    return (input.unsqueeze(-1) == classes).to(torch.int64)


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Computes `instance_norm` without averages as a `group_norm` of single channels.

    torch would record the batch norm of a view, with its weights repeated for each example.

    Raises:
        ValueError: Channels have only one element, as in torch.
    """
    given = (input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if not use_input_stats or running_mean is not None or running_var is not None:
        return torch.nn.functional.instance_norm(*given)
    if math.prod(input.shape[2:]) == 1:
        raise ValueError(f"Expected more than 1 spatial element, got input size {input.shape}")
    return torch.nn.functional.group_norm(input, int(input.shape[1]), weight, bias, eps)


_NO_CHANGE = {"padding": 0, "dilation": 1, "return_indices": False}  # defaults of a pool


def _pool(pool: Callable[..., Any], dims: int, reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a pool that reduces whole dimensions of any size, as for `x.size()[2:]`."""

    def call(x: Any, kernel_size: Any, *args: Any, **options: Any) -> Any:
        is_one = isinstance(kernel_size, int | torch.SymInt)
        window = [kernel_size] * dims if is_one else [*kernel_size]
        is_whole = [*map(str, window)] == [*map(str, x.shape[-dims:])]
        is_plain = not args and all(options.get(k, v) == v for k, v in _NO_CHANGE.items())
        varies = any(isinstance(size, torch.SymInt) for size in window)
        if not (varies and is_whole and is_plain and not options.get("divisor_override")):
            return pool(x, kernel_size, *args, **options)
        return reduce(x, dims)

    return call


def _mean(x: Any, dims: int) -> Any:
    return x.mean(tuple(range(-dims, 0)), keepdim=True)


def _largest(x: Any, dims: int) -> Any:
    return x.flatten(-dims).max(-1, keepdim=True).values.unflatten(-1, (1,) * dims)


def _tensor(data: Any, **options: Any) -> Any:
    """Computes `torch.tensor` of a list of tensors without reading their values."""
    leaves = [] if isinstance(data, torch.Tensor) else pytree.tree_leaves(data)
    if not any(isinstance(x, torch.Tensor) for x in leaves):
        return torch.tensor(data, **options)
    kinds = {_kind(x) for x in leaves}
    dtype = options.get("dtype") or next(kind for kind in _kinds() if kind in kinds)
    tensor = _stack(data, dtype).detach()
    if options.get("device") is not None:
        tensor = tensor.to(options["device"])
    return tensor.requires_grad_() if options.get("requires_grad") else tensor


def _kinds() -> tuple[torch.dtype, ...]:
    """Returns the dtypes of Python numbers, the widest first."""
    default = torch.get_default_dtype()
    return (
        torch.complex128 if default is torch.float64 else torch.complex64,
        default,
        torch.int64,
        torch.bool,
    )


def _kind(x: Any) -> torch.dtype:
    wide, default, whole, truth = _kinds()
    if isinstance(x, torch.Tensor):
        if x.dtype is torch.bool:
            return truth
        return wide if x.is_complex() else default if x.is_floating_point() else whole
    if isinstance(x, bool | torch.SymBool):
        return truth
    if isinstance(x, complex):
        return wide
    return default if isinstance(x, float | torch.SymFloat) else whole


def _stack(data: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stack(inner, dtype) for inner in data])
    if isinstance(data, torch.Tensor):
        return data.to(dtype)
    return torch.tensor(data, dtype=dtype)


def _get(x: Any, index: Any) -> Any:
    return x[_indices(index)]


def _put(x: Any, index: Any, value: Any) -> None:
    x[_indices(index)] = value


def _indices(index: Any) -> Any:
    """Replaces lists of tensors in an index by tensors.

    It replaces only lists within a tuple, as torch converts a single list itself. Bounds that are
    tensors become sizes, which torch 2.11 does not do.
    """
    if not isinstance(index, tuple):
        return _bounds(index) if isinstance(index, slice) else index
    return tuple(
        _tensor(list(item))
        if isinstance(item, list | tuple) and any(isinstance(x, torch.Tensor) for x in item)
        else _bounds(item)
        if isinstance(item, slice)
        else item
        for item in index
    )


def _bounds(index: slice) -> slice:
    return slice(
        *[
            x.item() if isinstance(x, torch.Tensor) else x
            for x in (index.start, index.stop, index.step)
        ]
    )


def _to(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Handles a `Module.to` in `forward` that changes nothing.

    torch would replace the parameters that are being recorded.
    """
    device, dtype, *_ = _private.parse_to(*args, **kwargs)
    for x in (*module.parameters(), *module.buffers()):
        is_cast = dtype is not None and (x.is_floating_point() or x.is_complex())
        if (is_cast and x.dtype is not dtype) or (device is not None and x.device != device):
            return _MODULE_TO(module, *args, **kwargs)
    return module


_MODULE_TO = torch.nn.Module.to


def _batch_norm(module: Any, x: Any) -> Any:
    """Computes a batch norm with cumulative averages without reading its counter."""
    is_cumulative = module.momentum is None and module.track_running_stats
    if not (is_cumulative and module.training):
        return _BATCH_NORM(module, x)
    _private.check_input_dim(module, x)
    module.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
    y = torch.nn.functional.batch_norm(
        x, mean, var, module.weight, module.bias, True, 1.0, module.eps
    )
    with torch.no_grad():
        for average, new in (module.running_mean, mean), (module.running_var, var):
            average.add_((new - average) / module.num_batches_tracked)
    return y


_Norm: Any = _private.BatchNorm
_BATCH_NORM = _Norm.forward


def _data(x: Any) -> Any:
    """Computes `x.data` as an alias, so that in-place changes are recorded."""
    if not isinstance(x, autograd.TRACED):
        return _DATA.__get__(x)
    alias: Any = x.detach()
    alias.is_data_of_computed = x.grad_fn is not None
    return alias


def _set_data(x: Any, values: Any) -> None:
    """Sets `x.data = values` for values of the same shape."""
    if not isinstance(x, autograd.TRACED) or x.shape != values.shape or x.dtype is not values.dtype:
        _DATA.__set__(x, values)
        return
    if x.grad_fn is not None:
        raise _behind_gradients("x.data = ...")
    with torch.no_grad():
        x.copy_(values)


def _is_changed_behind_gradients(func: Any, args: Any) -> bool:
    """Returns whether a function writes to the `.data` of a computed tensor."""
    name = getattr(func, "__name__", "")
    if not name.endswith("_") or not args or not isinstance(args[0], autograd.TRACED):
        return False
    is_in_place = not name.endswith("__") or name == "__setitem__" or name.startswith("__i")
    return is_in_place and getattr(args[0], "is_data_of_computed", False)


def _behind_gradients(operation: str) -> packed.Refused:
    return packed.Refused(
        f"{operation} modifies a computed value without updating its gradient, which JAX cannot "
        "represent. State the gradient explicitly: x + (new - x).detach() has the values of new "
        "and the gradient of x."
    )


_DATA: Any = torch.Tensor.data

_DEEPCOPY: Any = torch.Tensor.__deepcopy__


def _deepcopy(x: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Computes `copy.deepcopy` of a tensor without asking for its memory."""
    if not isinstance(x, autograd.TRACED):
        return _DEEPCOPY(x, memo)
    if id(x) not in memo:
        memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return memo[id(x)]


# Includes callers of these functions, since a mode is off while it handles a call.
_STAND_INS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ctc_loss: _ctc_loss,
    torch.nn.functional.ctc_loss: _ctc_loss,
    torch.tensor: _tensor,
    torch.tensor_split: _tensor_split,
    torch.Tensor.tensor_split: _tensor_split,
    torch.nn.functional.instance_norm: _instance_norm,
    torch.nn.functional.one_hot: _one_hot,
    torch.masked_select: _masked_select,
    torch.Tensor.masked_select: _masked_select,
    torch.where: _where,
    torch.nonzero: _nonzero,
    torch.Tensor.nonzero: _nonzero,
    torch.split: _split,
    torch.Tensor.split: _split,
    torch.Tensor.__getitem__: _get,
    torch.Tensor.__setitem__: _put,
    _DATA.__get__: _data,
    _DATA.__set__: _set_data,
    _DEEPCOPY: _deepcopy,
}
for _dims in (1, 2, 3):
    for _name, _reduce in (("avg", _mean), ("max", _largest)):
        _original = getattr(torch.nn.functional, f"{_name}_pool{_dims}d")
        _STAND_INS[_original] = _pool(_original, _dims, _reduce)
if torch.__version__ < "2.13":
    _STAND_INS |= {
        torch.quantile: quantiles.quantile,
        torch.Tensor.quantile: quantiles.quantile,
        torch.nanquantile: quantiles.nanquantile,
        torch.Tensor.nanquantile: quantiles.nanquantile,
    }


class _StandIns(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the stand-in, if there is one.

        Raises:
            Refused: The call would be recorded with a wrong gradient.
            TooManyOperations: A size of the result is too complex.
        """
        if _is_changed_behind_gradients(func, args):
            raise _behind_gradients(f"x.data.{func.__name__}()")
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            return packed.pack(*args)
        if (lengths := packed.lengths_in(args, kwargs or {})) is not None:
            return packed.call_packed(func, args, kwargs or {}, lengths)
        call = _STAND_INS.get(func) or recurrent.stand_in(func, args)
        result = call(*args, **(kwargs or {}))
        sizes.check(result)
        return result


_CONSTANTS = 1024  # elements of a table that forward creates from numbers, such as sizes of images


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replaces functions that cannot be recorded by operations that can."""
    before = torch.nn.Module.to, _Norm.forward  # inside another recording, these are stand-ins
    try:
        torch.nn.Module.to = _to  # type: ignore[method-assign, assignment]
        _Norm.forward = _batch_norm
        with (
            _private.follow_constants(_CONSTANTS),
            _StandIns(),
            autograd.record_functions(),
            encoders.stand_ins(),
        ):
            yield
    finally:
        torch.nn.Module.to, _Norm.forward = before  # type: ignore[method-assign]
