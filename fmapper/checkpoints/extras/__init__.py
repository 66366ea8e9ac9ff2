"""Numbers, texts and the configuration that accompany the arrays of a checkpoint.

values            numbers and texts, and their places in a tree
settings          the configuration in a folder of the Hub
"""
