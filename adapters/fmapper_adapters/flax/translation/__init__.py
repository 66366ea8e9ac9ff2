"""Writes models for Flax NNX: layers, classes, and the file around them."""
