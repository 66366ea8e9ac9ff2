"""Formats of checkpoints: the interface, the writers, and the formats without a framework."""
