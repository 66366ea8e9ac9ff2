"""Every private name of torch that fmapper uses: what it needs has no public one.

They are known to work in torch 2.11, 2.13 and 2.15. `tests/house/test_private_apis.py` says what
each promises, so that a release which changes one fails there, under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._guards import TracingContext
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _WrappedHook as WrappedHook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "TorchDispatchMode",
    "TracingContext",
    "WrappedHook",
    "is_traceable_wrapper_subclass",
    "pytree",
    "scan",
    "while_loop",
]

_core: Any = torch._C
_functorch: Any = torch._C._functorch
_hooks: Any = torch._C._autograd
_torch: Any = torch

OpOverload = torch._ops.OpOverload
BatchNorm: Any = torch.nn.modules.batchnorm._BatchNorm
COMPOSITE: Any = torch._C.DispatchKey.CompositeImplicitAutograd


# --- tensors --------------------------------------------------------------------------------------

is_functional: Callable[[torch.Tensor], bool] = torch._is_functional_tensor
may_take_values_of: Callable[[torch.Tensor, torch.Tensor], bool]
may_take_values_of = torch._has_compatible_shallow_copy_type
make_parameter: Callable[[type, torch.Tensor, bool], torch.Tensor] = torch.Tensor._make_subclass
gamma_gradient: Callable[..., torch.Tensor] = torch._standard_gamma_grad
assert_async: Callable[[torch.Tensor, str], None] = torch._assert_async


def is_fork_of_user(kind: str) -> bool:
    """Tells whether this process was forked from one that had used devices of a kind."""
    check = getattr(getattr(torch, kind, None), "_is_in_bad_fork", None)
    return bool(check and check())


def identity_of(content: Any) -> int:
    """Returns the address of what a tensor or a storage of Python stands for in C++."""
    address: int = content._cdata
    return address


def version_of(tensor: Any) -> int:
    """Returns how often a tensor was written to in place."""
    version: int = tensor._version
    return version


def is_view(tensor: Any) -> bool:
    """Tells whether a tensor is a view of another one, as far as autograd knows."""
    found: bool = tensor._is_view()
    return found


def storage_place(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns where the storage of a tensor lies that was loaded without memory, and its bytes.

    In bytes from the beginning of the file that `torch.load` has read under a `FakeTensorMode`.
    """
    storage: Any = tensor.untyped_storage()
    return storage._checkpoint_offset or 0, storage.nbytes()


# --- transformations ------------------------------------------------------------------------------

is_wrapped: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor
is_batched: Callable[[torch.Tensor], bool] = _functorch.is_batchedtensor
unwrap: Callable[[torch.Tensor], torch.Tensor] = _functorch.get_unwrapped
leave_level: Callable[[], Any] = _functorch.pop_dynamic_layer_stack


def is_in_transformation() -> bool:
    """Tells whether a function of `torch.func` is under way."""
    return _functorch.peek_interpreter_stack() is not None


def count_levels() -> int:
    """Returns how many functions of `torch.func` are under way, one through the other."""
    return _functorch.maybe_current_level() or 0


def is_dual() -> bool:
    """Tells whether derivatives are being taken forwards."""
    return forward_ad._current_level >= 0


def enter_dual_level() -> None:
    """Begins a derivative forwards; a RuntimeError where one is under way already."""
    _core._enter_dual_level()


def exit_dual_level() -> None:
    """Ends the derivative forwards that is under way."""
    _core._exit_dual_level(level=0)


def has_saved_tensors_hooks() -> bool:
    """Tells whether hooks for saved tensors are allowed."""
    found: bool = _hooks._saved_tensors_hooks_is_enabled()
    return found


def allow_saved_tensors_hooks() -> None:
    """Allows hooks for saved tensors again."""
    _hooks._saved_tensors_hooks_enable()


def set_grad_enabled(mode: bool) -> None:
    """Switches gradients on or off, unseen by what records functions."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(mode)


def is_set_grad_enabled(target: Any) -> bool:
    """Tells whether a recorded function is the one that switches gradients on and off."""
    return target is torch._C._set_grad_enabled


def get_engine() -> Any:
    """Returns what `torch.autograd.grad` and `backward` call."""
    module: Any = torch.autograd
    return module._engine_run_backward


def set_engine(engine: Any) -> None:
    """Puts something in the place of what `torch.autograd.grad` and `backward` call."""
    module: Any = torch.autograd
    module._engine_run_backward = engine


# --- modules --------------------------------------------------------------------------------------


def is_dynamo_context(value: Any) -> bool:
    """Tells whether an object is what `module.compile()` calls the module by."""
    return isinstance(value, torch._dynamo.eval_frame._TorchDynamoContext)


def get_call(module: Any) -> Callable[..., Any]:
    """Returns what a module does when it is called, hooks and all, not compiled."""
    call: Callable[..., Any] = module._call_impl
    return call


def initialize_compiled(module: Any) -> None:
    """Lets a compiled module compile what it wraps, anew."""
    module._initialize()


def note_step(optimizer: Any) -> None:
    """Tells the schedulers of an optimizer that it has made a step."""
    optimizer._opt_called = True


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the table of a module's own parameters."""
    return module._parameters


def compiled_from(module: Any) -> Any:
    """Returns the module that `torch.compile` has wrapped; None if it is not such a wrapper."""
    return getattr(module, "_orig_mod", None)


def buffer_hooks() -> dict[Any, Any]:
    """Returns the hooks that are called with every buffer that any module registers."""
    hooks: dict[Any, Any] = torch.nn.modules.module._global_buffer_registration_hooks
    return hooks


def is_scheduled(step: Any) -> bool:
    """Tells whether a scheduler of learning rates has wrapped the step of an optimizer."""
    return bool(getattr(step, "_wrapped_by_lr_sched", False))


def mark_scheduled(step: Any) -> None:
    """Lets schedulers of learning rates take a step for one that they have wrapped."""
    step._wrapped_by_lr_sched = True


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Returns the device, the dtype and so on that arguments of `Module.to` mean."""
    found: tuple[Any, ...] = _core._nn._parse_to(*args, **kwargs)
    return found


def check_input_dim(module: Any, x: torch.Tensor) -> None:
    """Raises a ValueError where an input has not the dimensions that a normalisation wants."""
    module._check_input_dim(x)


def get_recurrent(name: str) -> Callable[..., Any]:
    """Returns the function of a packed recurrent layer: lstm, gru, rnn_tanh or rnn_relu."""
    function: Callable[..., Any] = getattr(_torch._VF, name)
    return function


def get_nesting() -> tuple[Any, Any]:
    """Returns the functions by which an encoder leaves padding out."""
    return _torch._nested_tensor_from_mask, _torch._nested_tensor_from_mask_left_aligned


def set_nesting(nest: Any, is_aligned: Any) -> None:
    """Puts others in the place of the functions by which an encoder leaves padding out."""
    _torch._nested_tensor_from_mask = nest
    _torch._nested_tensor_from_mask_left_aligned = is_aligned


def unwrap_parameters(module: torch.nn.Module) -> None:
    """Gives a module the inner tensors of its wrapper subclasses as parameters, in place."""
    from torch._functorch._aot_autograd import subclass_parametrization

    subclass_parametrization.unwrap_tensor_subclass_parameters(module)


def make_pretrained_class(cls: Any, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """Makes a model of a class of transformers, with parameters of a dtype."""
    made: torch.nn.Module = cls._from_config(config, dtype=dtype)
    return made


def transient_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the buffers of a module itself that its `state_dict` leaves out."""
    buffers = (module._buffers[name] for name in sorted(module._non_persistent_buffers_set))
    return [buffer for buffer in buffers if buffer is not None]


# --- recording ------------------------------------------------------------------------------------


def has_kernel(op: str, key: str) -> bool:
    """Tells whether an operation has a kernel for a dispatch key of its own."""
    found: bool = _core._dispatch_has_kernel_for_dispatch_key(op, key)
    return found


def schema_of(op: Any) -> Any:
    """Returns the schema of an operation; None for what is not one."""
    return getattr(op, "_schema", None)


def report_of(exported: Any) -> Any:
    """Returns what draft export has to say of a program; None for what it did not record."""
    return getattr(exported, "_report", None)


def get_support(name: str) -> Callable[..., bool] | None:
    """Returns the function that tells whether oneDNN computes with bf16 or fp16 here."""
    return getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)


def get_fakes() -> Any:
    """Returns the module in which libraries find the class of the tensors of a recording."""
    return torch._subclasses


def register_node(cls: type, flatten: Any, unflatten: Any, **options: Any) -> None:
    """Enters a class into torch's pytree registry in Python, and there only."""
    pytree._private_register_pytree_node(cls, flatten, unflatten, **options)


def deregister_node(cls: type) -> None:
    """Takes a class out of torch's pytree registry."""
    pytree._deregister_pytree_node(cls)


def combine_args(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a module by the names that `forward` has for them."""
    from torch.export import dynamic_shapes

    found: dict[str, Any] = dynamic_shapes._combine_args(module, args, kwargs)
    return found


def walk_shapes(look: Callable[..., Any], tree: Any, dynamic_shapes: Any) -> None:
    """Calls `look(path, leaf, shape)` for each leaf and what `dynamic_shapes` says of it."""
    from torch.export import dynamic_shapes as module

    module._tree_map_with_path(look, tree, dynamic_shapes, tree_name="inputs")


def get_replace_symbol() -> Any:
    """Returns the method by which a `ShapeEnv` notes what a symbol is equal to."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv._set_replacement


def set_replace_symbol(method: Any) -> None:
    """Puts another method in the place of the one by which a `ShapeEnv` notes equality."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    ShapeEnv._set_replacement = method  # type: ignore[method-assign]


def expression_of(symbol: Any) -> Any:
    """Returns the expression of a symbolic number, with what is known not put in."""
    return symbol._expr


# --- transformers ---------------------------------------------------------------------------------


def names_not_to_save(model: Any) -> list[str]:
    """Returns the names that `save_pretrained` leaves out of a state dict."""
    return list(model._keys_to_ignore_on_save or ())
