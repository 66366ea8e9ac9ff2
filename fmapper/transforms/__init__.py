"""Transforms functions of trees: gradients, compiled functions and functions of batches.

Each transformation flattens its arguments into arrays and a static key, passes the arrays to their
framework, and rebuilds the results.

    arguments   checks of arguments, for all transformations
    static_key  a tree as a list of arrays and a comparable rest
    grad        `grad` and `value_and_grad`
    jit         `jit`
    vmap        `vmap`
    trainable   finds the arrays that are trained
"""
