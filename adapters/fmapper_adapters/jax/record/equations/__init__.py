"""Reads single equations of a jaxpr: what they are, where they come from, and in what form."""
