"""`python -m lossdsl`: the command line."""

import sys

from lossdsl.cli import main  # type: ignore[import-not-found]  # `cli` is mapped into the package when installed

sys.exit(main())
