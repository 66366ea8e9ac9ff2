"""ATen operations that compute element by element."""
