"""Models of libraries: their infrastructure, which a file has counterparts for or does without.

infrastructure  what is infrastructure, and the counterparts of its functions and classes
configs         configurations and records as dataclasses
omissions       parameters, variables and classes that a file does without
ties            arrays that a library ties when a model is complete
requests        expressions on configurations, and calls of infrastructure
"""
