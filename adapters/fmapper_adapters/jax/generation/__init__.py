"""Generates text: a program for prompts, one for steps, and a loop that is compiled as a whole."""
