"""Weights between models that were written by different people.

words     the vocabulary of names of parameters
sides     the arrays of both sides, without their values
groups    parameters whose names differ in numbers alone
layouts   what layouts an array may have in two models
matches   the ways in which groups become others
roles     what the programs of both models do with their parameters
assign    the pairs of groups
one_sided what one side alone has
guesses   inputs that both models may take
programs  the programs of both models, called or recorded
proof     what both models compute with the same random weights
search    changes pairs until both compute the same
writing   decisions as `Rules`
report    the result
transferring  all of it
"""
