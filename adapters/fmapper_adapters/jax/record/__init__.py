"""Records what a model of JAX computes, as a program with its arrays."""
