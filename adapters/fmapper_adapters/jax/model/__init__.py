"""Makes a pytree that is called like a model of a program, and runs it well on XLA."""
