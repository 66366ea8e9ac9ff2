"""Modules, optimizers and caches as nodes, and the search for references to them."""
