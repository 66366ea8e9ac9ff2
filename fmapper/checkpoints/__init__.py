"""Checkpoints: arrays in files, read when they are asked for, renamed and reshaped by rules.

A stored array is an array of a backend of its own: it moves like any other, and reads only what
is needed.

    lazy        arrays that are described and not read
"""

__all__: list[str] = []
