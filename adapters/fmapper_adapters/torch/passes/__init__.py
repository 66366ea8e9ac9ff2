"""Passes over programs that torch recorded; `order` has the list."""
