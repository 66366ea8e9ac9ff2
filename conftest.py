"""The examples in README.md and docs/ are tests; pytest itself runs those in docstrings."""

import os
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE

# JAX would take three quarters of the GPU when it first looks at it, and leave torch the rest.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[
        PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE),
        SkipParser(),
    ],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
).pytest()
