"""Parts of printing the source's code.

operands    what an expression's operations were given
folding     conditions that constants decide
choices     expressions with sides, and buffers
conditions  `if`
comments    comments and docstrings
rows        rows that a function picks by values
"""
