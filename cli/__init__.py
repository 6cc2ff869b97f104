"""The command line: `lossdsl COMMAND ...`. It uses nothing but lossdsl's public API."""

from .main import main

__all__ = ["main"]
