"""Lowerings of JAX's primitives to torch, one function per primitive, in files by kind.

A function takes the operands of the primitive as tensors and its parameters by keyword, and returns
a tensor, or a tuple where the primitive has several results. It is recorded: what it is given are
proxies (`Value`) that know their shape and dtype, so it may ask for those but not for values.

Unsigned integers of 16 bits and more, for which torch has next to no operations, are carried as
the signed integers of the same bits; see `_types`.
"""
