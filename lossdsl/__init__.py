"""lossdsl: policy-gradient losses from ten-line specs, compiled to readable PyTorch.

    import lossdsl

    lossdsl.builtins()                             # names of the built-in methods
    method = lossdsl.load("my_method.yaml")        # the checked method: .name .title .params .level ...
    text = lossdsl.build("my_method.yaml")         # the generated module's source
    loss_fn = lossdsl.compile("my_method.yaml")    # an instance of the generated torch.nn.Module

torch is imported only by `compile` and by the generated files themselves.
"""

from __future__ import annotations

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
    map_methods,
    map_text,
    module,
    new,
    overview,
    page,
    params,
    plan,
    plot,
    show,
    verify,
)
from .describe import Description, describe
from .errors import Diagnostic, SpecError, explain, render
from .method import Method
from .plan import Plan
from .specdoc import json_schema


def __getattr__(name: str) -> str:
    """`__version__`, looked up when it is asked for: the look-up takes longer than most commands."""
    if name != "__version__":
        raise AttributeError(f"module 'lossdsl' has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lossdsl")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0"


__all__ = [
    "Description",
    "Diagnostic",
    "Method",
    "Plan",
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
    "map_methods",
    "map_text",
    "module",
    "new",
    "overview",
    "page",
    "params",
    "plan",
    "plot",
    "render",
    "show",
    "verify",
]
