"""Models as source code for Equinox."""
