"""Tensors divided among the devices of a mesh, and what models say of that."""
