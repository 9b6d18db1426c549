"""`python -m failurelab.diagnose`: the same as `failurelab diagnose`."""

import sys

from failurelab.diagnose.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
