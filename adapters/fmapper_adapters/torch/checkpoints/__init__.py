"""Checkpoints in torch's own formats: `torch.save` and `torch.distributed.checkpoint`."""
