"""`python -m lossdsl`: the command line."""

import sys

from lossdsl.cli import main

sys.exit(main())
