"""Patches of torch while a module is recorded, so that everything it does is recorded."""
