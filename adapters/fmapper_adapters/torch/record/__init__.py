"""Records a module with `torch.export`, and removes what keeps a module from being recorded."""
