"""`python -m failurelab_preflight`: the same as `failurelab preflight`."""

import sys

from failurelab_preflight.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
