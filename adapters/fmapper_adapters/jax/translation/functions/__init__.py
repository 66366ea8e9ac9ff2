"""Models as source code for plain JAX: functions, and their arrays in dicts and lists."""
