"""Orders the weights of convolutions in memory as torch reads them."""

from __future__ import annotations

import torch
from torch import fx

_CONVOLUTIONS = {
    torch.conv1d: torch.contiguous_format,
    torch.conv2d: torch.channels_last,
    torch.conv3d: torch.channels_last_3d,
}


def weights_of(graph: fx.Graph) -> dict[str, tuple[tuple[int, ...], torch.memory_format]]:
    """Returns the arrays that are only used as weights of convolutions, by name.

    Returns:
        The permutation to torch's shape, and the order in memory that its channels-last
        convolutions need; weights in another order would be copied in each call.
    """
    layouts = {}
    for node in graph.nodes:
        if node.op != "get_attr" or len(node.users) != 1:
            continue
        (moved,) = node.users
        if moved.op != "call_method" or moved.target != "permute" or len(moved.args) != 2:
            continue
        formats = {
            _CONVOLUTIONS.get(user.target) if user.args[1] is moved else None
            for user in moved.users
            if len(user.args) > 1
        }
        if len(formats) == 1 and None not in formats and all(len(u.args) > 1 for u in moved.users):
            layouts[str(node.target)] = tuple(moved.args[1]), formats.pop()
    return layouts  # type: ignore[return-value]


def arrange(
    tensor: torch.Tensor, order: tuple[int, ...], memory_format: torch.memory_format
) -> torch.Tensor:
    """Reorders the memory of weights; shapes stay."""
    back = tuple(order.index(i) for i in range(len(order)))
    return tensor.permute(order).contiguous(memory_format=memory_format).permute(back)
