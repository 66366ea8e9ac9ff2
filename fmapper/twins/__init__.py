"""Weights between models that were written by different people: `transfer`."""
