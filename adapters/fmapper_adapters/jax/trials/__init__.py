"""Models as `verify` calls and trains them, with dropout and random numbers under control."""
