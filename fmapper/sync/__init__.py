"""Weights in step: from a model that is trained to one that runs.

delta        the elements that differ between two arrays, in few bytes
delta_files  deltas of whole states, in files
"""
