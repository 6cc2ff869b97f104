"""`lossdsl` and `python -m lossdsl`: the command line as a process of its own."""

import gc
import sys

from lossdsl.cli import main  # type: ignore[import-not-found]  # `cli` is mapped into the package when installed


def run() -> int:
    """Run the command line once, then exit; returns the exit code.

    What the imports made lives as long as the process, and the process ends with the command: no collection looks
    through the first again, and none frees the last piece by piece at exit. That is an eighth of a short command.
    """
    gc.freeze()
    try:
        code: int = main()
        return code
    finally:
        gc.freeze()


if __name__ == "__main__":
    sys.exit(run())
