"""ATen in JAX: one function per operation, in a table by name, in files by kind."""
