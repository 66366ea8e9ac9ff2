"""Code that is read: the statements of a model's own, and functions that files take along."""
