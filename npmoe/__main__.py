"""`python -m npmoe`."""

import sys

from npmoe.cli import main

if __name__ == "__main__":
    sys.exit(main())
