"""ATen operations that create, move, select and place elements."""
