"""The functions of a file: the statements for one call of a submodule."""
