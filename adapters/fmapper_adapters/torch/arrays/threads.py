"""Tensors that are made in one thread and used in another: settings, and the order on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch


def settings() -> Callable[[], AbstractContextManager[object]]:
    """Returns the settings of torch that a thread has and a move looks at, for another thread.

    These are the grad and inference mode, the default device and the current CUDA device. On a GPU
    the other thread works on a stream of its own, so that its copies do not wait for what this
    thread has told the GPU to compute since; it starts after what has been told up to now.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    default = torch.get_default_device()
    cuda: Any = torch.cuda
    stream = None
    if cuda.is_initialized():  # it is not for a loader to take a GPU that nobody has used
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            if default.type != "cpu":  # the mode costs time in every call, and the CPU needs none
                stack.enter_context(default)
            if stream is not None:
                stack.enter_context(cuda.stream(stream))
            yield

    return enter


def handed_over(tensors: Sequence[torch.Tensor]) -> Callable[[], object] | None:
    """Returns what the thread that is going to use these tensors must call first.

    Its streams wait for the streams that they were made on, and the allocator is told that they are
    used there too; else it could give their memory away while the GPU still reads it.
    """
    there = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    if not there:
        return None
    made = {
        device: torch.cuda.current_stream(device).record_event()
        for device in {tensor.device for tensor in there}
    }

    def receive() -> None:
        for device, event in made.items():
            torch.cuda.current_stream(device).wait_event(event)
        for tensor in there:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    return receive
