"""`python -m fmapper`: lists devices, profiles models and converts them."""

import sys

from fmapper.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
