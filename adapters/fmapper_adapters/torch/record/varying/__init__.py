"""Sizes that vary: how users name them, and what does not restrict them."""
