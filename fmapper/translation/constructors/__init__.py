"""Constructors: what the model's own call the numbers of parts, and the arguments of those here."""
