"""The adapters: one package per framework, loaded with it."""

# Frameworks with classes to take apart, and no arrays of their own: they are not backends. It says
# so here because asking their adapters would import the frameworks.
WITHOUT_ARRAYS = frozenset({"flax", "optree"})
