"""The walk of a model's source, the same for all frameworks.

expressions  code for the expressions of a function
statements   code for its statements
files        a file: classes and functions
names        definitions of one name in several modules
errors       errors of a walk
"""
