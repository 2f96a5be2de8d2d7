"""The program `npmoe`, also as `python -m npmoe`.

The command line is imported inside `main`, so that Ctrl-C while that takes its time ends the
program as it does later, without a traceback.
"""

import sys
from importlib import import_module

INTERRUPTED = 130


def main() -> int:
    """Runs the command line of this process; its exit code."""
    try:
        return int(import_module("npmoe.cli").main())
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
