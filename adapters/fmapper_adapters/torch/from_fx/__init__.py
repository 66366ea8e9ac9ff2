"""Makes a program as plain data of the graph that torch recorded, and checks it."""
