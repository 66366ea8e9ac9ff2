"""`python -m fmapper`: what this machine has, from the command line."""

import argparse
import sys
from collections.abc import Sequence

from fmapper._device import devices


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fmapper", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("devices", help="every device of every installed backend")
    parser.parse_args(arguments)
    found = devices()
    if not found:
        print("No backend is installed. Install one: pip install 'fmapper[torch]'")
    for device in found:
        print(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
