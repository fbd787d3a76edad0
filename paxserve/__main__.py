"""`python -m paxserve`, the same as the command `paxserve`."""

import sys

from paxserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
