"""PyTorch: tensors, parameters and modules."""

from fmapper_adapters.torch.adapter import TorchAdapter

__all__ = ["TorchAdapter", "adapter"]

adapter = TorchAdapter()
