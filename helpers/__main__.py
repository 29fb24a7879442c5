"""`python -m helpers COMMAND …`: see `python -m helpers --help`."""

import sys

from .ladder.errors import CheckoutError

try:
    from .commands import main
except CheckoutError as error:
    sys.exit(str(error))

if __name__ == "__main__":
    sys.exit(main())
