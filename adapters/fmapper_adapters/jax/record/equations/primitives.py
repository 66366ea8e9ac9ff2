"""Facts about the primitives of JAX that reading a jaxpr needs."""

from __future__ import annotations

# Calls of functions that are inlined into the caller.
INLINED = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"}
INLINED |= {"custom_vmap_call", "run_state", "xla_metadata_call"}
# Operations without an effect on values: layouts over devices, hints to compilers, names.
DROPPED = {"sharding", "out_sharding", "accuracy", "debug", "debug_info", "name", "mesh"}
DROPPED |= {"ctx_mesh", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "out_trees"}
DROPPED |= {"_split_transpose", "const_lengths", "linear", "unroll", "update_consts"}
DROPPED |= {"symbolic_zeros", "ft_in", "ft_out"}
# Primitives of Equinox whose computation is a function among their parameters.
OPAQUE = {"maybe_set", "vprim"}
# Operations that only display values.
SHOWN = {"debug_callback", "debug_print"}
# Operations that end derivatives.
STOPPING = {"stop_gradient", "nontraceable", "nondifferentiable_backward", "nondifferentiable"}
# Operations that no other framework can run, and why.
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
