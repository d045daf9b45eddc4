"""`python -m paged`."""

import sys

from paged.app import main

if __name__ == "__main__":
    sys.exit(main())
