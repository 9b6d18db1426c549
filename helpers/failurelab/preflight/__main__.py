"""`python -m failurelab.preflight`: the same as `failurelab preflight`."""

import sys

from failurelab.preflight.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
