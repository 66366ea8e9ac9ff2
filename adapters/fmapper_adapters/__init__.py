"""The adapters: one package per framework, loaded with it."""

# Frameworks that have classes but no arrays of their own, and so are not backends. They are listed
# here because asking their adapters would import the frameworks.
WITHOUT_ARRAYS = frozenset({"flax", "optree"})

# The framework of each target in `Models.targets`, listed here for the same reason.
TARGETS = {"nnx": "flax", "linen": "flax"}
