"""`python -m paged`."""

import sys

if __name__ == "__main__":
    try:
        from paged.app import main

        code = main()
    except KeyboardInterrupt:
        # Before there was anything to tell or to keep.
        code = 130
    sys.exit(code)
