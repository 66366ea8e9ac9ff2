"""Moves the leaves of a tree between devices and backends.

A mover collects the leaves of a tree, chooses the target of each (`route`), and carries them there
in batches, all or none (`carry`). Planning and placing are the same three steps, with less done or
with other choices.

    mover      `to_gpu`, `to_jax(dtype="bfloat16")` and the like
    route      the target backend and device of each leaf
    carry      cast, copy, share: all leaves or none
    host_copy  copies on the host, on several threads where that pays
    view_ties  arrays that are other objects on the same memory
    plan       what a mover would do
    place      parts of a model to devices and dtypes of their own
    patterns   which rule a leaf falls under
    inplace    `move_`
    loader     `DeviceLoader`
"""
