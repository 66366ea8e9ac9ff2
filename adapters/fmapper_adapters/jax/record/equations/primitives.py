"""Facts about the primitives of JAX that reading a jaxpr needs."""

from __future__ import annotations

# Functions that are called where they stand: what they compute is part of the caller.
INLINED = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"}
INLINED |= {"custom_vmap_call", "run_state", "xla_metadata_call"}
# What says nothing about the values: layouts over devices, hints to compilers, names.
DROPPED = {"sharding", "out_sharding", "accuracy", "debug", "debug_info", "name", "mesh"}
DROPPED |= {"ctx_mesh", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "out_trees"}
DROPPED |= {"_split_transpose", "const_lengths", "linear", "unroll", "update_consts"}
DROPPED |= {"symbolic_zeros", "ft_in", "ft_out"}
# Of Equinox: what they compute is in a function among their parameters.
OPAQUE = {"maybe_set", "vprim"}
# What only shows values on the way.
SHOWN = {"debug_callback", "debug_print"}
# Behind which there are no derivatives.
STOPPING = {"stop_gradient", "nontraceable", "nondifferentiable_backward", "nondifferentiable"}
# What no other framework can run, and why.
HOST = {
    "pure_callback": "it calls back into Python on the host",
    "io_callback": "it calls back into Python on the host",
    "pallas_call": "it is a Pallas kernel, which only JAX can compile",
    "xla_pmap": "pmap maps it over devices",
    "shard_map": "shard_map maps it over devices",
    "infeed": "it reads from the host",
    "outfeed": "it writes to the host",
    "call_exported": "it calls an exported, compiled function; call the original function instead",
    "ffi_call": "it calls a foreign function of XLA",
}
