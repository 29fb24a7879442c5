"""`python -m helpers COMMAND …`: see `python -m helpers --help`."""

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main())
