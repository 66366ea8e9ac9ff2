"""Makes a `torch.nn.Module` from a program: its tree, its code, and the functions that it calls."""
