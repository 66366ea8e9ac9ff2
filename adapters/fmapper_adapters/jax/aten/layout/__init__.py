"""ATen operations that make, move, pick and place elements."""
