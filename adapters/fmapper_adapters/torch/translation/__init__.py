"""How models of JAX are written for torch: modules, layers, functions, and the file around them."""
