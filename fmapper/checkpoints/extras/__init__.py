"""What a checkpoint has besides arrays.

values            numbers and texts, and their places in a tree
settings          the configuration in a folder of the Hub
"""
