"""Records models that generate text: one program for a prompt, one for each token after it."""
