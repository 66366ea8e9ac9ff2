"""Records the computation of a JAX model as a program with its arrays."""
