"""Arrays of JAX: devices, memory shared with the host, random keys, meshes."""
