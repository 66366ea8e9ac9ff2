"""Models of Flax NNX as repositories write them; each module has `build`."""
