"""Turns a user's conversion function into rules: `Rules.record`.

record      runs a function on arrays without data, and derives rules from the results
recorder    the interface of a framework for that
arithmetic  sums and products of lazy arrays and numbers
abstract    arrays with only a shape and a dtype
storage     memory that arrays share, with lazy arrays as contents
graph       lazy arrays as nodes, equal ones once
steps       nodes as one rule per array
general     merges rules for single layers into one rule for all
"""
