"""Loops over equal blocks as scans over one block with stacked arrays."""
