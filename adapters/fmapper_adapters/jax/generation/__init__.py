"""Generates text with a program for prompts, one for steps, and a loop compiled as a whole."""
