"""Reads single equations of a jaxpr, and rewrites special ones in terms of ordinary ones."""
