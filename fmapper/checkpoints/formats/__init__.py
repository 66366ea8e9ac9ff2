"""Formats of checkpoints: what one is, what it writes through, those without a framework."""
