"""Moves the leaves of a tree between devices and backends.

Every move takes four steps: collect the leaves of a tree, route each to a target, carry them there
in batches, all or none, and refill the tree, which `fmap` does. Plans stop after the second step;
`place` routes by rules.

    mover      `to_gpu`, `to_jax(dtype="bfloat16")` and the like
    place      devices and dtypes for parts of a model
    patterns   finds the rule that applies to a leaf
    plan       the plan of a move
    inplace    `move_`
    loader     `DeviceLoader`
    router     the steps, the same for every mover and placement
    collect    the leaves of a tree, each once
    route      the target backend and device of a leaf
    carry      cast, copy, share: all leaves or none
    host_copy  copies on the host, on several threads if that is faster
    view_ties  arrays that are other objects on the same memory
"""
