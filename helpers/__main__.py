"""`python -m helpers COMMAND …`: see `python -m helpers --help`."""

import sys

from .ladder.errors import CheckoutError, ToolkitError

try:
    from .commands import main
except (CheckoutError, ToolkitError) as error:
    sys.exit(str(error))

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack some of the letters
    sys.exit(main())
