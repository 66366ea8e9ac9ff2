"""Tensors divided among the devices of a mesh, and the plans of models for that."""
