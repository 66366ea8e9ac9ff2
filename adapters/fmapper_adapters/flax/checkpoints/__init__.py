"""The checkpoint formats of Flax: msgpack files and Orbax folders."""
