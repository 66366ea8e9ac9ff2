"""Transforms functions of trees: gradients, compiled functions and functions of batches.

Each transformation takes its arguments apart into arrays and a static key, hands the arrays to the
framework that they belong to, and puts the results together again.

    arguments   what all transformations ask of their arguments
    static_key  a tree as a list of arrays and a rest that can be compared
    grad        `grad` and `value_and_grad`
    jit         `jit`
    vmap        `vmap`
    trainable   which arrays are trained
"""
