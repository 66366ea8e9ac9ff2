"""Makes a `torch.nn.Module` of a program: its tree, its code, and what the code calls."""
