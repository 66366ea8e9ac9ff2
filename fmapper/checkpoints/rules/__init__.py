"""Rules that change the names and layouts of a checkpoint's arrays.

pattern  names with captures, matched in linear time
rule     the interface of a rule, and its changes
naming   rules for names: rename, tie, drop, add a constant
layout   rules for one array each: transpose, reshape, interleave, cast
arithmetic  rules that compute: add a number, multiply, add arrays
joining  rules for several: split, concatenate, stack, unstack
rules    sequences of rules
toml     rules as TOML
"""

from fmapper.checkpoints.rules.rules import Rules

__all__ = ["Rules"]
