"""Turns the graph that torch recorded into a program of plain data, and checks it."""
