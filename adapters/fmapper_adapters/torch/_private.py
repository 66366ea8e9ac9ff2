"""All private names of torch that fmapper uses, where no public one exists.

They are known to work in torch 2.11, 2.13 and 2.15. `tests/house/test_private_apis.py` tests the
behaviour that fmapper relies on, so that a release which changes one fails there, under its name.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import ShapeEnv
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
    "enable_python_dispatcher",
    "is_traceable_wrapper_subclass",
    "pytree",
    "scan",
    "while_loop",
]

_core: Any = torch._C
_functorch: Any = torch._C._functorch
_hooks: Any = torch._C._autograd
_torch: Any = torch
_transformer: Any = torch.nn.modules.transformer

OpOverload = torch._ops.OpOverload
BatchNorm: Any = torch.nn.modules.batchnorm._BatchNorm
COMPOSITE: Any = torch._C.DispatchKey.CompositeImplicitAutograd
# The function that orders the dimensions of a tensor like those of a view: its owner and name.
VIEW_RULE: tuple[Any, str] = (torch._refs, "_reshape_view_helper_core_alg")


# --- tensors --------------------------------------------------------------------------------------

copy_each: Callable[[list[Any], list[Any]], object] = torch._foreach_copy_
is_functional: Callable[[torch.Tensor], bool] = torch._is_functional_tensor
may_take_values_of: Callable[[torch.Tensor, torch.Tensor], bool]
may_take_values_of = torch._has_compatible_shallow_copy_type
make_parameter: Callable[[type, torch.Tensor, bool], torch.Tensor] = torch.Tensor._make_subclass
gamma_gradient: Callable[..., torch.Tensor] = torch._standard_gamma_grad
assert_async: Callable[[torch.Tensor, str], None] = torch._assert_async


def is_fork_of_user(kind: str) -> bool:
    """Returns whether this process was forked from a process that had used devices of a kind."""
    check = getattr(getattr(torch, kind, None), "_is_in_bad_fork", None)
    return bool(check and check())


def identity_of(content: Any) -> int:
    """Returns the address of the C++ object behind a tensor or storage."""
    address: int = content._cdata
    return address


def version_of(tensor: Any) -> int:
    """Returns the number of in-place writes to a tensor."""
    version: int = tensor._version
    return version


def is_view(tensor: Any) -> bool:
    """Returns whether a tensor is a view of another one, as far as autograd knows."""
    return bool(tensor._is_view())


# --- transformations ------------------------------------------------------------------------------

is_wrapped: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor
is_batched: Callable[[torch.Tensor], bool] = _functorch.is_batchedtensor
unwrap: Callable[[torch.Tensor], torch.Tensor] = _functorch.get_unwrapped
leave_level: Callable[[], Any] = _functorch.pop_dynamic_layer_stack


def is_in_transformation() -> bool:
    """Returns whether a function transformation of `torch.func` is active."""
    return _functorch.peek_interpreter_stack() is not None


def count_levels() -> int:
    """Returns how many transformations of `torch.func` are nested here."""
    return _functorch.maybe_current_level() or 0


def is_dual() -> bool:
    """Returns whether forward-mode differentiation is active for a tensor."""
    return forward_ad._current_level >= 0


def enter_dual_level() -> None:
    """Enters a forward-mode level; raises RuntimeError inside another one."""
    _core._enter_dual_level()


def exit_dual_level() -> None:
    """Exits the forward-mode level."""
    _core._exit_dual_level(level=0)


def has_saved_tensors_hooks() -> bool:
    """Returns whether hooks for saved tensors are allowed."""
    return bool(_hooks._saved_tensors_hooks_is_enabled())


def allow_saved_tensors_hooks() -> None:
    """Allows hooks for saved tensors again."""
    _hooks._saved_tensors_hooks_enable()


def set_grad_enabled(mode: bool) -> None:
    """Switches gradients on or off without function modes noticing."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(mode)


def is_set_grad_enabled(target: Any) -> bool:
    """Returns whether a recorded function switches gradients on or off."""
    return target is torch._C._set_grad_enabled


def get_engine() -> Any:
    """Returns the autograd engine that `grad` and `backward` call."""
    module: Any = torch.autograd
    return module._engine_run_backward


def set_engine(engine: Any) -> None:
    """Replaces the autograd engine that `grad` and `backward` call."""
    module: Any = torch.autograd
    module._engine_run_backward = engine


# --- modules --------------------------------------------------------------------------------------


def is_dynamo_context(value: Any) -> bool:
    """Returns whether an object is the compiled call of `module.compile()`."""
    return isinstance(value, torch._dynamo.eval_frame._TorchDynamoContext)


def get_call(module: Any) -> Callable[..., Any]:
    """Returns the uncompiled call of a module, with its hooks."""
    call: Callable[..., Any] = module._call_impl
    return call


def initialize_compiled(module: Any) -> None:
    """Makes a compiled module compile its original again."""
    module._initialize()


def note_step(optimizer: Any) -> None:
    """Notifies the schedulers of an optimizer of a step."""
    optimizer._opt_called = True


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the table of a module's own parameters."""
    return module._parameters


def original_of(module: Any) -> Any:
    """Returns the module that `torch.compile` has wrapped; None if it is not such a wrapper."""
    return getattr(module, "_orig_mod", None)


def buffer_hooks() -> dict[Any, Any]:
    """Returns the global hooks for the registration of buffers."""
    hooks: dict[Any, Any] = torch.nn.modules.module._global_buffer_registration_hooks
    return hooks


def is_scheduled(step: Any) -> bool:
    """Returns whether a scheduler of learning rates has wrapped the step of an optimizer."""
    return bool(getattr(step, "_wrapped_by_lr_sched", False))


def mark_scheduled(step: Any) -> None:
    """Marks a step as wrapped by a learning rate scheduler."""
    step._wrapped_by_lr_sched = True


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Parses the arguments of `Module.to` to device, dtype and so on."""
    parsed: tuple[Any, ...] = _core._nn._parse_to(*args, **kwargs)
    return parsed


def check_input_dim(module: Any, x: torch.Tensor) -> None:
    """Raises ValueError for an input with the wrong number of dimensions for a norm."""
    module._check_input_dim(x)


def get_recurrent(name: str) -> Callable[..., Any]:
    """Returns the function of a packed recurrent layer: lstm, gru, rnn_tanh or rnn_relu."""
    function: Callable[..., Any] = getattr(_torch._VF, name)
    return function


def get_nesting() -> tuple[Any, Any]:
    """Returns the functions by which an encoder skips padding."""
    return _torch._nested_tensor_from_mask, _torch._nested_tensor_from_mask_left_aligned


def set_nesting(nest: Any, is_aligned: Any) -> None:
    """Replaces the functions by which an encoder skips padding."""
    _torch._nested_tensor_from_mask = nest
    _torch._nested_tensor_from_mask_left_aligned = is_aligned


def replace_causal_check(find: Any) -> Any:
    """Replaces the check of encoders and decoders for causal masks; returns the old check."""
    before, _transformer._detect_is_causal_mask = _transformer._detect_is_causal_mask, find
    return before


def get_attention_kernels() -> dict[str, Any]:
    """Returns the kernels for inference of attention and of a layer of an encoder, by name."""
    names = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
    return {name: getattr(torch, name) for name in names}


def set_attention_kernels(kernels: Mapping[str, Any]) -> None:
    """Replaces the kernels for inference of attention and of a layer of an encoder."""
    for name, kernel in kernels.items():
        setattr(torch, name, kernel)


def unwrap_parameters(module: torch.nn.Module) -> None:
    """Replaces wrapper subclasses among a module's parameters by their inner tensors, in place."""
    from torch._functorch._aot_autograd import subclass_parametrization

    subclass_parametrization.unwrap_tensor_subclass_parameters(module)


def make_pretrained_class(cls: Any, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """Makes a model of a class of transformers, with parameters of a dtype."""
    made: torch.nn.Module = cls._from_config(config, dtype=dtype)
    return made


def transient_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """Returns a module's own buffers that its `state_dict` leaves out."""
    buffers = (module._buffers[name] for name in sorted(module._non_persistent_buffers_set))
    return [buffer for buffer in buffers if buffer is not None]


# --- recording ------------------------------------------------------------------------------------


def has_kernel(op: str, key: str) -> bool:
    """Returns whether an operation has its own kernel for a dispatch key."""
    return bool(_core._dispatch_has_kernel_for_dispatch_key(op, key))


def schema_of(op: Any) -> Any:
    """Returns the schema of an operation; None for anything else."""
    return getattr(op, "_schema", None)


def report_of(exported: Any) -> Any:
    """Returns the report of draft export on a program; None for other recordings."""
    return getattr(exported, "_report", None)


def get_support(name: str) -> Callable[..., bool] | None:
    """Returns the function that reports whether oneDNN supports bf16 or fp16 here."""
    return getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)


def get_fakes() -> Any:
    """Returns the module that defines the fake tensors of a recording."""
    return torch._subclasses


def register_node(cls: type, flatten: Any, unflatten: Any, **options: Any) -> None:
    """Registers a class with torch's Python pytree registry only."""
    pytree._private_register_pytree_node(cls, flatten, unflatten, **options)


def deregister_node(cls: type) -> None:
    """Removes a class from torch's pytree registry."""
    pytree._deregister_pytree_node(cls)


def combine_args(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a module by the parameter names of `forward`."""
    from torch.export import dynamic_shapes

    arguments: dict[str, Any] = dynamic_shapes._combine_args(module, args, kwargs)
    return arguments


def walk_shapes(look: Callable[..., Any], tree: Any, dynamic_shapes: Any) -> None:
    """Calls `look(path, leaf, shape)` for each leaf and its entry in `dynamic_shapes`."""
    from torch.export import dynamic_shapes as module

    module._tree_map_with_path(look, tree, dynamic_shapes, tree_name="inputs")


def get_replace_symbol() -> Any:
    """Returns the method of `ShapeEnv` that records the value of a symbol."""
    return ShapeEnv._set_replacement


def set_replace_symbol(method: Any) -> None:
    """Replaces the method of `ShapeEnv` that records the value of a symbol."""
    ShapeEnv._set_replacement = method  # type: ignore[method-assign]


@contextlib.contextmanager
def follow_constants(count: int) -> Iterator[None]:
    """Lets recordings within the block know the values of tensors that are created from numbers.

    torch itself knows the values of tensors of one element. After a write to a tensor, it still
    returns the old values of all tensors that share its memory; within the block they are
    forgotten.

    Args:
        count: The largest number of elements of such a tensor.
    """
    from torch.fx.experimental import proxy_tensor

    call = proxy_tensor.proxy_call
    limit = proxy_tensor.CONSTANT_NUMEL_LIMIT

    def forget_written(
        proxy_mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any
    ) -> Any:
        if not schema_of(func).is_mutable:
            return call(proxy_mode, func, pre_dispatch, args, kwargs)
        slots = proxy_mode.tracer.tensor_tracker
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_repeated = torch.Tag.nondeterministic_seeded not in func.tags and all(
            x in slots and slots[x].constant is not None for x in tensors
        )  # torch repeats it on the values
        result = call(proxy_mode, func, pre_dispatch, args, kwargs)
        if not is_repeated:
            memories = {*filter(None, map(_memory_of, tensors))}
            for x, slot in list(slots.items()):
                if slot.constant is not None and _memory_of(x) in memories:
                    slots[x] = proxy_tensor._ProxyTensor(slot.proxy, None)
        return result

    try:
        proxy_tensor.CONSTANT_NUMEL_LIMIT = count
        proxy_tensor.proxy_call = forget_written
        yield
    finally:
        proxy_tensor.CONSTANT_NUMEL_LIMIT = limit
        proxy_tensor.proxy_call = call


def _memory_of(x: torch.Tensor) -> int | None:
    """Returns the identity of a tensor's storage; None without one."""
    return x.untyped_storage()._cdata if x.layout is torch.strided else None


def expression_of(symbol: Any) -> Any:
    """Returns the unsimplified expression of a symbolic number."""
    return symbol._expr


def place_in_recording() -> tuple[str, str, list[str]] | None:
    """Returns the module call that `torch.export` is recording, its path, and the graph's inputs.

    Returns None outside of a recording. A call has the name of its path, with `@1` for the second
    call.
    """
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    stack = getattr(getattr(mode, "tracer", None), "module_stack", None)
    if mode is None or stack is None:
        return None
    key = next(reversed(stack), "")
    path = name_of_place(key, stack[key][0]) if key else ("", "")
    inputs = [node.name for node in mode.tracer.graph.nodes if node.op == "placeholder"]
    return (*path, inputs)


def name_of_place(key: str, path: str) -> tuple[str, str]:
    """Returns call name and path of an entry in torch's `nn_module_stack`."""
    path = _SELF.sub("", path)
    _, _, count = key.rpartition("@")
    return (f"{path}@{count}" if "@" in key and count.isdigit() else path), path


_SELF = re.compile(r"^(L\['self'\]|__self__|L__self__|_export_root(?=\.|$))\.?")


def node_in_recording(tensor: torch.Tensor) -> torch.fx.Node | None:
    """Returns the node that computed a tensor in a recording; None without one."""
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    if isinstance(tensor, FunctionalTensor):
        tensor = _torch._from_functional_tensor(tensor.elem)
    slot = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    node: torch.fx.Node | None = None if slot is None else slot.proxy.node
    return node


@contextlib.contextmanager
def any_batch_size() -> Iterator[None]:
    """Switches off the check of `batch_norm` in training that a channel has several values."""
    functions: Any = torch.nn.functional
    check = functions._verify_batch_size
    functions._verify_batch_size = lambda size: None
    try:
        yield
    finally:
        functions._verify_batch_size = check


def note_lines(code: Any, describe: Callable[[Any], dict[str, Any]]) -> None:
    """Notes source lines of recorded nodes, for which torch has none or only a line of `forward`.

    They are the lines of the outermost `forward`, whose code object is `code`, and the results of
    `describe` for the frame that creates a node.
    """
    from torch.fx.experimental import proxy_tensor

    tracer: Any = getattr(proxy_tensor.get_proxy_mode(), "tracer", None)
    if tracer is None or getattr(tracer, "_fmapper_lines", None) is code:
        return
    create = tracer.create_node

    def create_node(*args: Any, **kwargs: Any) -> Any:
        node = create(*args, **kwargs)
        if node.op != "call_function":
            return node
        frame: Any = sys._getframe(1)
        lines = describe(frame)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is not None:
            lines["fmapper_line"] = f"{code.co_filename}:{frame.f_lineno}"
        node.meta["custom"] = {**node.meta.get("custom", {}), **lines}
        return node

    tracer.create_node = create_node
    tracer._fmapper_lines = code


def line_of_node(node: torch.fx.Node, kind: str = "line") -> str:
    """Returns a `line` or `method` that `note_lines` has noted for a node; empty for none."""
    return str((node.meta.get("custom") or {}).get(f"fmapper_{kind}", ""))


# --- torch.distributed, 2.6 to 2.15 ---------------------------------------------------------------


def strided_shard(dim: int, parts: int) -> Any:
    """Returns a placement by which a mesh axis divides each of `parts` parts separately."""
    from torch.distributed.tensor.placement_types import _StridedShard

    make: Any = _StridedShard
    return make(dim, split_factor=parts)


def parts_before(placement: Any) -> int | None:
    """Returns the `parts` of such a placement; None for others."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


# --- transformers ---------------------------------------------------------------------------------


def names_not_to_save(model: Any) -> list[str]:
    """Returns the names that `save_pretrained` leaves out of a state dict."""
    return list(model._keys_to_ignore_on_save or ())
