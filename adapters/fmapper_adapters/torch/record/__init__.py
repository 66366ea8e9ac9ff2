"""Records a module with `torch.export`, and removes obstacles to that."""
