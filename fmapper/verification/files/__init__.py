"""The proof of translated files: a process of its own that compares one with its model."""
