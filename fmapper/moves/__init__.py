"""Moves the leaves of a tree between devices and backends.

Every move takes four steps: collect the leaves of a tree, route each to a target, carry them there
in batches, all or none, and refill the tree, which `fmap` does. Planning stops after the second;
placing routes by rules.

    mover      `to_gpu`, `to_jax(dtype="bfloat16")` and the like
    place      parts of a model to devices and dtypes of their own
    patterns   which rule a leaf falls under
    plan       what a mover would do
    inplace    `move_`
    loader     `DeviceLoader`
    router     the steps, the same for every mover and placement
    collect    the leaves of a tree, each once
    route      the target backend and device of a leaf
    carry      cast, copy, share: all leaves or none
    host_copy  copies on the host, on several threads where that pays
    view_ties  arrays that are other objects on the same memory
"""
