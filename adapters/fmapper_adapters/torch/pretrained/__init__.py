"""Folders of the Hub: how the names and layouts in them become those of a model.

tables     runs transformers' own conversions on descriptions of tensors
recording  what was done to them
steps      that, as rules for one array each
general    rules for one layer as rules for all
"""
