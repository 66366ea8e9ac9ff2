"""Checkpoints as users of Flax have them: msgpack files, and Orbax's folders."""
