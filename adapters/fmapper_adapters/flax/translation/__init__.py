"""How models are written for Flax NNX: layers, classes, and the file around them."""
