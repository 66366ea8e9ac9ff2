"""Switches modules between training and evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fmapper import ConversionError

_WITH_MODES = (
    *(torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d),
    *(torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout, torch.nn.RReLU, torch.nn.RNNBase),
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
    *(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d),
    *(torch.nn.MultiheadAttention, torch.nn.Transformer, torch.nn.TransformerEncoder),
    *(torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer),
)


@contextlib.contextmanager
def mode(module: torch.nn.Module, *, train: bool, only_layers: bool = False) -> Iterator[None]:
    """Switches the module to training or evaluation mode within the block.

    With `only_layers`, only torch's own layers that have modes are in training.

    Raises:
        ConversionError: The module refuses training.
    """
    before = {inner: inner.training for inner in module.modules()}
    try:
        with contextlib.suppress(NotImplementedError):  # exported modules have a fixed mode
            if not train:
                module.eval()
            elif not module.training or only_layers:
                _train(module)
            for inner in module.modules() if only_layers else ():
                inner.training = isinstance(inner, _WITH_MODES)
        yield
    finally:
        for inner, training in before.items():
            inner.training = training


def _train(module: torch.nn.Module) -> None:
    try:
        module.train()
    except NotImplementedError:
        raise
    except Exception as error:  # from a class without such a mode
        name = type(module).__name__
        raise ConversionError(f"{name} cannot be put into training: {error}") from error
