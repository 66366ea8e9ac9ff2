"""Writes models of JAX for torch: modules, layers, functions, and the file around them."""
