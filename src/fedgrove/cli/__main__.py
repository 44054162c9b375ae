"""``python -m fedgrove.cli``: the command line without its script."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
