"""Generated text -> an imported module, without a file on disk."""

from __future__ import annotations

import linecache
import sys
from types import ModuleType


def import_text(text: str, name: str) -> ModuleType:
    """Import a generated file's text, once per name; tracebacks, pickling and torch.compile see its lines."""
    name = f"lossdsl.generated.{name}"
    if name in sys.modules:
        return sys.modules[name]
    made = ModuleType(name)
    made.__file__ = f"<{name}>"
    linecache.cache[made.__file__] = (len(text), None, text.splitlines(keepends=True), made.__file__)
    sys.modules[name] = made  # before it runs: pickling and dynamo look the module up by name
    try:
        exec(compile(text, made.__file__, "exec"), made.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return made
