"""The proof of translated source: a process of its own that compares it with the model."""
