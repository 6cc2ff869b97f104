"""lossdsl: policy-gradient losses from ten-line specs, compiled to readable PyTorch.

    import lossdsl

    lossdsl.builtins()                             # names of the built-in methods
    method = lossdsl.load("my_method.yaml")        # the checked method: .name .title .params .level ...
    text = lossdsl.build("my_method.yaml")         # the generated module's source
    loss_fn = lossdsl.compile("my_method.yaml")    # an instance of the generated torch.nn.Module

torch is imported only by `compile` and by the generated files themselves.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .api import (
    Verdict,
    build,
    build_all,
    builtins,
    check,
    check_text,
    columns,
    compare,
    compile,
    diff_text,
    groups,
    load,
    module,
    new,
    overview,
    params,
    show,
    verify,
)
from .describe import Description, describe
from .errors import Diagnostic, SpecError, explain, render
from .method import Method
from .specdoc import json_schema

try:
    __version__ = version("lossdsl")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0"

__all__ = [
    "Description",
    "Diagnostic",
    "Method",
    "SpecError",
    "Verdict",
    "build",
    "build_all",
    "builtins",
    "check",
    "check_text",
    "columns",
    "compare",
    "compile",
    "describe",
    "diff_text",
    "explain",
    "groups",
    "json_schema",
    "load",
    "module",
    "new",
    "overview",
    "params",
    "render",
    "show",
    "verify",
]
