"""Folders of the Hub: the class without memory, its inputs, and what becomes of the weights.

folder     a class of transformers, its configuration, no code
inputs     what a model can be called with, from its configuration
tables     runs transformers' own conversions on descriptions of tensors
recording  what was done to them
steps      that, as rules for one array each
general    rules for one layer as rules for all
"""
