"""Records modules where what they do depends on the values of tensors, not on their sizes alone."""
