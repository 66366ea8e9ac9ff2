"""Tensors that are created in one thread and used in another: settings, and order on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from fmapper_adapters.torch.arrays import devices


def settings() -> Callable[[], AbstractContextManager[object]]:
    """Captures the thread-local settings of torch that affect a move.

    These are the grad and inference mode, the default device and the current accelerator. On the
    accelerator, the other thread uses its own stream, so that its copies wait for the work that
    this thread has submitted so far, but not for later work.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    default = torch.get_default_device()
    stream: Any = None
    if devices.is_started():  # a loader must not initialise an unused GPU
        stream = torch.Stream()
        stream.wait_stream(torch.accelerator.current_stream())

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            if default.type != "cpu":  # the mode slows every call, and the CPU does not need it
                stack.enter_context(default)
            if stream is not None:
                stack.enter_context(stream)
            yield

    return enter


def hand_over(tensors: Sequence[torch.Tensor]) -> Callable[[], object] | None:
    """Returns the function that the consuming thread must call before it uses these tensors.

    Its streams wait for the streams on which the tensors were created, and the allocator learns
    that they are used there too; otherwise it could reuse their memory while the GPU still reads
    it.
    """
    on_devices = [tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
    if not on_devices:
        return None
    made = {
        device: torch.accelerator.current_stream(device).record_event()
        for device in {tensor.device for tensor in on_devices}
    }

    def receive() -> None:
        for device, event in made.items():
            torch.accelerator.current_stream(device).wait_event(event)
        for tensor in on_devices:
            stream: Any = torch.accelerator.current_stream(tensor.device)
            tensor.record_stream(stream)

    return receive
