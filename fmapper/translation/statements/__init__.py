"""The statements of a function once they are written: views, and comments on them."""
