"""Models of Equinox as public repositories write them; each module has `build`."""
