"""Proves translated files: compares each with its model in a separate process."""
