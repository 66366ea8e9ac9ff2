"""One small language for the names and layouts of a checkpoint's arrays.

pattern  names with captures, matched in linear time
rule     a rule, and what it makes of the arrays whose names it matches
naming   rules for names: rename, tie, drop, add a constant
layout   rules for one array each: transpose, reshape, interleave, cast
arithmetic  rules that compute: add a number, multiply, add arrays
joining  rules for several: split, concatenate, stack, unstack
rules    rules one after the other
toml     rules as TOML
"""

from fmapper.checkpoints.rules.rules import Rules

__all__ = ["Rules"]
