"""Records modules whose behaviour depends on the values of tensors."""
