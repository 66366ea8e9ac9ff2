"""Sizes that vary: their names, and questions that need not restrict them."""
