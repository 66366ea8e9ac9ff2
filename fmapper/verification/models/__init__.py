"""Calls, trains and watches models of any framework for comparisons."""
