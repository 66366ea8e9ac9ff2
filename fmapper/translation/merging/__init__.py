"""One class for submodules that differ: in keywords, in numbers, in a few statements."""
