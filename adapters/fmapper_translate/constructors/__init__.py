"""The making of models: arguments of constructors, initial values, and numbers.

arguments       the arguments of a model's constructor, read from the model
initial_values  `nn.init`, methods such as `normal_`, and loops over parameters
numbers         numbers that are computed with tensors
"""
