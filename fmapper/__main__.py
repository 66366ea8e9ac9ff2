"""`python -m fmapper`: what this machine has, where a model spends its time, and conversion."""

import sys

from fmapper.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
