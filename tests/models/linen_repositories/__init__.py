"""Models of Linen as public repositories write them."""
