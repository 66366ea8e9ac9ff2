"""Turns a program into a pytree that is called like the model, and makes it fast on XLA."""
