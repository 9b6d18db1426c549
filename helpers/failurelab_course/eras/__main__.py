"""`python -m failurelab_course.eras`: make environments before anything is installed."""

import sys

from failurelab_course.eras.install import main

sys.exit(main())
