"""Folders of the Hub: the class without memory, its example inputs, and rules for the weights.

folder     a class of transformers and its configuration, without code
inputs     example inputs, from the configuration
tables     runs transformers' own conversions on descriptions of tensors
recording  records what the conversions do
steps      the recording as rules for one array each
general    rules for one layer as rules for all
"""
