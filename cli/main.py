"""Arguments in, text and exit codes out.

Exit codes: 0 all is well (diff: equal); 1 a spec has errors, a generated file is not current, or two methods differ; 2 the
request itself makes no sense (diff: any trouble).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lossdsl

Command = Callable[[argparse.Namespace], int]


class _Usage(Exception):
    """A request that cannot be carried out; the message says what to do instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.version:
        print(f"lossdsl {lossdsl.__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    try:
        run: Command = args.run
        code = run(args)
        sys.stdout.flush()  # a reader that left early is met here, not at exit
        return code
    except lossdsl.SpecError as error:
        if args.traceback:
            raise
        if getattr(args, "json", False):
            _print_json({"diagnostics": [d.json() for d in error.diagnostics]})
        else:
            print(lossdsl.render(error.diagnostics, colour=_colour(sys.stderr)), file=sys.stderr)
        asked = all(d.code.startswith("E06") or d.code == "E0101" for d in error.diagnostics)
        return 2 if asked or args.command in ("diff", "map") else 1
    except _Usage as error:
        print(f"lossdsl: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `lossdsl list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lossdsl",
        description="Policy-gradient losses for LLM RL, compiled from ten-line specs to readable PyTorch.",
        epilog="examples:\n  lossdsl list\n  lossdsl show icepop\n"
        "  lossdsl new my_method --from grpo > my_method.yaml\n  lossdsl check my_method.yaml\n"
        "  lossdsl build my_method.yaml            # writes my_method.py here\n\n"
        "exit codes: 0 all is well, 1 a spec has errors, a file is not current or two methods differ, 2 trouble with the request",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    parser.add_argument(
        "--traceback", action="store_true", default=bool(os.environ.get("LOSSDSL_TRACEBACK")), help=argparse.SUPPRESS
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, run: Command, help: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=help,
            description=help,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        return sub

    spec_help = "a built-in's name, or the path of a spec file"
    p = add("check", _check, "Find every mistake in specs.", "lossdsl check my_method.yaml")
    p.add_argument("specs", nargs="+", metavar="SPEC", help=spec_help)
    p.add_argument("--json", action="store_true", help="diagnostics as JSON")

    p = add(
        "build",
        _build,
        "Write the PyTorch module of each spec.",
        "lossdsl build grpo my_method.yaml -o losses/ --set eps=0.3",
    )
    p.add_argument("specs", nargs="+", metavar="SPEC", help=spec_help)
    p.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        help="a file, or a folder (ends in /) that becomes a package; default: NAME.py here",
    )
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another default for a parameter; may be repeated",
    )
    p.add_argument("--json", action="store_true", help="what was written, as JSON")

    p = add(
        "list",
        _list,
        "The built-in methods: level, ratio controlled, masked or truncated, log-probs needed.",
        "lossdsl list",
    )
    p.add_argument("--json", action="store_true", help="the same rows as JSON")

    p = add(
        "show", _show, "A method for a reader: its maths, parameters, needs and source.", "lossdsl show gspo --latex"
    )
    p.add_argument("spec", metavar="SPEC", help=spec_help)
    p.add_argument("--latex", action="store_true", help="the maths as LaTeX")
    p.add_argument("--emit", choices=["ast", "ir", "schedule", "py"], help="one stage of the compiler instead")
    p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another default for a parameter")

    p = add(
        "new",
        _new,
        "Print a new spec that starts as a copy of a built-in.",
        "lossdsl new my_method --from grpo > my_method.yaml",
    )
    p.add_argument("name", metavar="NAME", help="the new method's name")
    p.add_argument(
        "--from", dest="origin", default="grpo", metavar="METHOD", help="the built-in to start from (default: grpo)"
    )

    add(
        "schema",
        _schema,
        "The JSON Schema of spec files, for an editor to complete and check them.",
        "lossdsl schema > lossdsl.schema.json",
    )

    p = add(
        "diff",
        _diff,
        "Where the gradients of two methods differ: proved, with a witness, case by case.",
        'lossdsl diff grpo dapo --set b.eps_high=0.2 --assume "A > 0"',
    )
    p.add_argument("a", metavar="A", help=spec_help)
    p.add_argument("b", metavar="B", help=spec_help)
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.NAME=VALUE",
        help="a parameter's value on one side (a. or b.) or, without a prefix, on every side that has it",
    )
    p.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="CONDITION",
        help='what may be taken for granted: "c = 1", on_policy, "A > 0", "r < 2"; may be repeated',
    )
    _data_options(p)
    _look_options(p)

    p = add(
        "map",
        _map,
        "Many methods at once: which are equal, and how near the others' gradients point.",
        'lossdsl map --assume "c = 1"',
    )
    p.add_argument("specs", nargs="*", metavar="SPEC", help=f"{spec_help}; none for all built-ins")
    p.add_argument("--assume", action="append", default=[], metavar="CONDITION", help="as for diff; may be repeated")
    _data_options(p)
    _look_options(p)

    p = add("explain", _explain, "What a diagnostic code means, with a bad and a good spec.", "lossdsl explain E0405")
    p.add_argument("code", metavar="CODE")

    p = add(
        "plan",
        _plan,
        "What a step from hidden states costs: passes, matrix products, bytes, and why.",
        "lossdsl plan gspo --tokens 8192 --hidden 4096 --vocab 151936 --longest 4096",
    )
    p.add_argument("spec", metavar="SPEC", help="a built-in's name or a spec file")
    p.add_argument("--tokens", type=int, required=True, help="live tokens of the batch")
    p.add_argument("--hidden", type=int, required=True, help="width of the model")
    p.add_argument("--vocab", type=int, required=True, help="entries of the vocabulary")
    p.add_argument("--dtype", default="bf16", help="bf16 (the default), fp16, fp32 or fp64")
    p.add_argument("--budget", default="256MiB", metavar="BYTES", help="of the logits buffer (default: 256MiB)")
    p.add_argument("--longest", type=int, help="tokens of the longest answer (default: all are one answer)")
    p.add_argument("--frozen-head", action="store_true", help="the head takes no gradient")
    p.add_argument("--json", action="store_true", help="the plan as JSON")

    p = add("verify", _verify, "Is a generated file current, stale or edited by hand?", "lossdsl verify my_method.py")
    p.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a generated .py file; its spec is NAME.yaml beside it, else the built-in NAME",
    )
    p.add_argument("--spec", help="the spec it should come from")
    p.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="parameter values it was built with"
    )
    p.add_argument("--json", action="store_true", help="the verdicts as JSON")
    return parser


def _look_options(p: argparse.ArgumentParser) -> None:
    """How to see it, besides the terminal."""
    p.add_argument("--html", metavar="FILE", help="one page that opens offline, its curves or its table alive")
    p.add_argument("--plot", metavar="FILE", help="a picture for a paper: .png, .svg or .pdf (needs matplotlib)")
    p.add_argument("--json", action="store_true", help="everything, as JSON")


def _data_options(p: argparse.ArgumentParser) -> None:
    """Rollouts from a file, or what a synthetic batch is like."""
    p.add_argument("--data", metavar="FILE", help="rollouts to take both gradients on: .safetensors, .jsonl, .parquet")
    p.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="NAME=COLUMN",
        help="a column's name in the file, e.g. logp=policy_logprobs",
    )
    p.add_argument("--seed", type=int, default=0, help="of the synthetic batch that stands in for --data (default: 0)")
    p.add_argument("--staleness", type=float, default=0.2, help="its standard deviation of log r (default: 0.2)")
    p.add_argument("--mismatch", type=float, default=0.1, help="its standard deviation of log c (default: 0.1)")


# --- commands -----------------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    found = [d for spec in args.specs for d in lossdsl.check(spec)]
    errors = [d for d in found if d.severity == "error"]
    if args.json:
        _print_json({"ok": not errors, "diagnostics": [d.json() for d in found]})
    elif found:
        print(lossdsl.render(found, colour=_colour(sys.stdout)))
        print(
            f"{_count(len(errors), 'error')}, {_count(len(found) - len(errors), 'warning')}; `lossdsl explain {found[0].code}` says more"
        )
    else:
        names = ", ".join(Path(spec).name for spec in args.specs)
        print(f"{names}: no mistakes found")
    if errors and all(d.code in ("E0101", "E0601") for d in errors):
        return 2
    return 1 if errors else 0


def _build(args: argparse.Namespace) -> int:
    params = _assignments(args.set)
    if args.output is not None and (args.output.endswith(("/", os.sep)) or Path(args.output).is_dir()):
        written = lossdsl.build_all(args.specs, args.output, params)
    elif args.output is not None:
        if len(args.specs) > 1:
            raise _Usage(f"several specs cannot go into one file; name a folder: -o {args.output}/")
        if not Path(args.output).parent.is_dir():
            raise _Usage(f"there is no folder {Path(args.output).parent}")
        lossdsl.build(args.specs[0], args.output, **params)
        written = [Path(args.output)]
    else:
        texts = {
            Path(f"{lossdsl.load(spec, **params).name}.py"): lossdsl.build(spec, None, **params) for spec in args.specs
        }
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8", newline="\n")
        written = list(texts)
    if args.json:
        _print_json({"written": [str(p) for p in written]})
    else:
        for path in written:
            print(f"wrote {path}")
    return 0


def _list(args: argparse.Namespace) -> int:
    groups = lossdsl.overview()
    if args.json:
        _print_json([d.json() | {"group": heading} for heading, rows in groups for d in rows])
        return 0
    header = ("method", "level", "ratio", "masked or truncated", "needs besides logp")
    table = [
        (heading, [(d.name, d.level, d.ratio, d.treatment, ", ".join(d.needs) or "-") for d in rows])
        for heading, rows in groups
    ]
    widths = [max(len(row[i]) for _, rows in table for row in [header, *rows]) for i in range(len(header))]
    print(_row(header, widths))
    for heading, rows in table:
        print(f"\n{heading}")
        for row in rows:
            print(_row(row, widths))
    return 0


def _show(args: argparse.Namespace) -> int:
    print(lossdsl.show(args.spec, args.emit, args.latex, **_assignments(args.set)))
    return 0


def _new(args: argparse.Namespace) -> int:
    print(lossdsl.new(args.name, args.origin), end="")
    return 0


def _schema(args: argparse.Namespace) -> int:
    _print_json(lossdsl.json_schema())
    return 0


def _diff(args: argparse.Namespace) -> int:
    values = _sides(args.set, (args.a, args.b))
    diff = lossdsl.compare(
        args.a,
        args.b,
        assume=args.assume,
        params_a=values[0],
        params_b=values[1],
        data=args.data,
        columns=lossdsl.columns(args.columns),
        synthetic=_synthetic(args),
    )
    _tell(args, diff, lossdsl.diff_text)
    return 0 if diff.equal else 1


def _map(args: argparse.Namespace) -> int:
    found = lossdsl.map_methods(
        args.specs,
        assume=args.assume,
        data=args.data,
        columns=lossdsl.columns(args.columns),
        synthetic=_synthetic(args),
    )
    _tell(args, found, lossdsl.map_text)
    return 0


def _tell(args: argparse.Namespace, found: Any, text: Callable[..., str]) -> None:
    """The page and the picture that were asked for, then all of it as JSON or for the terminal."""
    try:
        if args.html:
            Path(args.html).write_text(lossdsl.page(found), encoding="utf-8", newline="\n")
        if args.plot:
            lossdsl.plot(found, args.plot)
    except OSError as error:
        raise _Usage(f"cannot write {error.filename}: {(error.strerror or 'failed').lower()}") from None
    if args.json:
        _print_json(found.json())
    else:
        print(text(found, colour=_colour(sys.stdout)))


def _synthetic(args: argparse.Namespace) -> dict[str, float]:
    return {"seed": args.seed, "staleness": args.staleness, "mismatch": args.mismatch}


def _sides(pairs: list[str], specs: tuple[str, str]) -> tuple[dict[str, float], dict[str, float]]:
    """`a.eps=0.3` for one side, `eps=0.3` for every side that has the parameter."""
    values: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for name, value in _assignments(pairs).items():
        side, dot, rest = name.partition(".")
        if dot and side in ("a", "b"):
            values[side == "b"][rest] = value
            continue
        having = [i for i, spec in enumerate(specs) if name in lossdsl.params(spec)]
        for i in having or (0, 1):  # where neither has it, both say so
            values[i][name] = value
    return values


def _explain(args: argparse.Namespace) -> int:
    print(lossdsl.explain(args.code), end="")
    return 0


def _verify(args: argparse.Namespace) -> int:
    params = _assignments(args.set)
    verdicts = [(file, lossdsl.verify(file, args.spec, **params)) for file in args.files]
    if args.json:
        _print_json([{"file": file, "status": v.status, "message": v.message} for file, v in verdicts])
    else:
        for _, verdict in verdicts:
            print(verdict.message)
    return 0 if all(v.status == "current" for _, v in verdicts) else 1


def _plan(args: argparse.Namespace) -> int:
    sizes = (args.tokens, args.hidden, args.vocab)
    try:
        plan = lossdsl.plan(args.spec, *sizes, args.dtype, args.budget, args.longest, args.frozen_head)
    except ValueError as error:
        if isinstance(error, lossdsl.SpecError):
            raise
        raise _Usage(str(error)) from None
    if args.json:
        _print_json(plan.json())
    else:
        print(plan.text())
    return 0


# --- small things ---------------------------------------------------------------------------------------------------


def _assignments(pairs: list[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        try:
            if not equals:
                raise ValueError
            values[name.strip()] = float(text)
        except ValueError:
            raise _Usage(f"--set takes NAME=NUMBER, e.g. --set eps=0.3, not {pair!r}") from None
    return values


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _colour(stream: Any) -> bool:
    return bool(stream.isatty()) and "NO_COLOR" not in os.environ
