"""Somebody's own conversion function as rules: `Rules.record`.

record      runs a function on arrays without data, and makes rules of what they became
recorder    the interface of a framework for that
arithmetic  sums and products of lazy arrays and numbers
abstract    arrays of which only shape and dtype are known
storage     what lies in memory that arrays share, as lazy arrays
graph       lazy arrays as nodes, equal ones once
steps       nodes as one rule per array
general     rules for one layer each as one rule for all
"""
