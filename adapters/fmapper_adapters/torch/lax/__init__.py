"""Lowerings of JAX's primitives to torch, one function per primitive, in files by kind.

A function takes the operands of the primitive as tensors and its parameters by keyword, and returns
a tensor, or a tuple if the primitive has several results. It is recorded: its arguments are proxies
(`Value`) that know their shape and dtype, but not their values.

Unsigned integers of 16 bits and more, for which torch has few operations, are represented by signed
integers with the same bits; see `types`.
"""
