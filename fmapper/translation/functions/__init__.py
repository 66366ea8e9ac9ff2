"""The functions of a file: statements for what one call of a submodule computes."""
