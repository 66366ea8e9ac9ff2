"""Weights between models that were written by different people.

words     the vocabulary of names of parameters
sides     the arrays of both sides, without their values
groups    parameters whose names differ in numbers alone
layouts   what layouts an array may have in two models
matches   the ways in which groups become others
assign    the pairs of groups
writing   decisions as `Rules`
report    the result
transferring  all of it
"""
