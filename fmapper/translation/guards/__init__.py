"""Conditions on sizes: which of them are checked, and what they say about other sizes."""
