"""Loops in the place of statements that come again."""
