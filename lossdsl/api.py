"""The public functions, each a short walk along the pipeline: text -> SpecDoc -> Method -> Schedule -> source -> module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from . import ast, ir
from .describe import Description, describe
from .errors import Diagnostic, Source, SpecError, suggest
from .loading import import_text
from .method import Method, lower_spec, with_params
from .parse import parse_expression
from .plan import BUDGET, Plan, parse_bytes, plan_of
from .prove import prove
from .schedule import Schedule
from .specdoc import SpecDoc, read_source, read_spec, texts

if TYPE_CHECKING:
    import torch

    from .diff.map import Map
    from .diff.report import Diff
    from .diff.rollouts import Rollouts

Spec = str | Path


# --- finding specs --------------------------------------------------------------------------------------------------


def _specs_folder() -> Path:
    """Inside the package once installed, beside it in a checkout."""
    installed = Path(__file__).parent / "specs"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "specs"


def groups() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The built-in methods under their headings, in the order of the review's own table."""
    found: list[tuple[str, list[str]]] = []
    for line in (_specs_folder() / "ORDER").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            found.append((line.lstrip("# ").strip(), []))
        elif line.strip():
            found[-1][1].append(line.strip())
    return tuple((heading, tuple(names)) for heading, names in found if names)


def builtins() -> tuple[str, ...]:
    """The names of the built-in methods."""
    return tuple(name for _, names in groups() for name in names)


def find(spec: Spec) -> Source:
    """The text of a built-in (by name) or of a spec file (by path).

    Raises:
        SpecError: E0601 if it is neither; E01xx if the file cannot be read.
    """
    text = str(spec)
    if isinstance(spec, Path) or text.endswith((".yaml", ".yml")) or "/" in text or "\\" in text:
        return read_source(Path(spec))
    path = _specs_folder() / f"{text}.yaml"
    if text in builtins():
        return replace(read_source(path), name=f"{text}.yaml")
    hint = suggest(text, builtins()) or "`lossdsl list` names the built-ins; a file's name ends in .yaml"
    raise SpecError((Diagnostic("E0601", f"there is no built-in method `{text}`", None, hint),))


# --- the pipeline ---------------------------------------------------------------------------------------------------


def method_of(doc: SpecDoc) -> tuple[Method, tuple[Diagnostic, ...]]:
    """The method of a spec, and warnings.

    Raises:
        SpecError: the spec has errors; all those of the stage that found them.
    """
    method, found = prove(lower_spec(doc))
    if any(d.severity == "error" for d in found):
        raise SpecError(found)
    return method, found


def load(spec: Spec, **params: float) -> Method:
    """The checked method of a built-in or a spec file, with other parameter values where given.

    Raises:
        SpecError: no such spec, an error in it, or a parameter it does not have.
    """
    if isinstance(spec, str) and not params and spec in builtins():
        return _builtin(spec)
    return method_of(with_params(read_spec(find(spec)), params))[0]


@cache
def _builtin(name: str) -> Method:
    return method_of(read_spec(find(name)))[0]


def params(spec: Spec) -> dict[str, float | None]:
    """A spec's parameters and their defaults (None for a required one); nothing else of it is checked.

    Raises:
        SpecError: no such spec, or a structure that cannot be read.
    """
    doc = read_spec(find(spec))
    return {p.name.value: None if p.default is None else p.default.value for p in doc.params}


def check_text(text: str, name: str = "spec.yaml") -> tuple[Diagnostic, ...]:
    """Every error and warning of a spec given as text; empty if it is sound."""
    return _diagnose(Source(name, text))


def check(spec: Spec) -> tuple[Diagnostic, ...]:
    """Every error and warning of a built-in or a spec file; empty if it is sound."""
    try:
        source = find(spec)
    except SpecError as error:
        return error.diagnostics
    return _diagnose(source)


def _diagnose(source: Source) -> tuple[Diagnostic, ...]:
    from .lint import lint

    try:
        doc = read_spec(source)
        method, found = method_of(doc)
    except SpecError as error:
        return error.diagnostics
    found += lint(method)
    return tuple(d for d in found if not _allowed(d, doc))


def _allowed(diagnostic: Diagnostic, doc: SpecDoc) -> bool:
    """Whether `# lossdsl: allow CODE` stands on the diagnostic's line or the one above."""
    if diagnostic.severity == "error" or diagnostic.span is None:
        return False
    line = diagnostic.span.source.line_col(diagnostic.span.start)[0]
    return any(code == diagnostic.code and at in (line, line - 1) for code, at in doc.allow)


def build(spec: Spec, out: Path | str | None = None, **params: float) -> str:
    """The generated module's text; written to `out` (a file, or a folder to put NAME.py in) where given.

    Raises:
        SpecError: as `load`.
    """
    from .emit.module import module_text

    method = load(spec, **params)
    text = module_text(method)
    if out is not None:
        path = Path(out)
        path = path / f"{method.name}.py" if path.is_dir() else path
        path.write_text(text, encoding="utf-8", newline="\n")
    return text


def build_all(specs: Iterable[Spec], folder: Path | str, params: Mapping[str, float] | None = None) -> list[Path]:
    """Several modules in one folder, a package: what they share stands once, in `_lossdsl.py`.

    Raises:
        SpecError: as `load`, with the diagnostics of all specs; nothing is written then.
    """
    from .emit.module import COMMON_MODULE, member_text, shared_text

    methods: list[Method] = []
    errors: list[Diagnostic] = []
    for spec in specs:
        try:
            methods.append(load(spec, **(params or {})))
        except SpecError as error:
            errors.extend(error.diagnostics)
    if errors:
        raise SpecError(tuple(errors))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{m.name}.py": member_text(m) for m in methods} | {f"{COMMON_MODULE}.py": shared_text()}
    if not (folder / "__init__.py").exists():
        files["__init__.py"] = '"""Losses generated by lossdsl: `from THIS_FOLDER.NAME import Loss`."""\n'
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return [folder / f"{m.name}.py" for m in methods]


def module(spec: Spec, **params: float) -> ModuleType:
    """The generated module, imported without a file on disk.

    Raises:
        SpecError: as `load`.
    """
    from .emit.module import module_text, spec_hash

    method = load(spec, **params)
    return import_text(module_text(method), f"{method.name}_{spec_hash(method.doc)}")


def compile(spec: Spec, *, compile: bool = True, **params: float) -> torch.nn.Module:
    """An instance of the generated class, without a file on disk.

    Args:
        spec: a built-in's name or a spec file.
        compile: whether torch.compile is used (False to debug).
        params: the loss's parameters; required ones must be given.

    Raises:
        SpecError: as `load`.
        TypeError, ValueError: an unknown, missing or out-of-range parameter.
    """
    made: torch.nn.Module = module(spec).Loss(compile=compile, **params)
    return made


# --- looking at a method ----------------------------------------------------------------------------------------------

STAGES = ("ast", "ir", "schedule", "py")


def show(spec: Spec, emit: str | None = None, latex: bool = False, **params: float) -> str:
    """A method for a reader: its objective and gradient, knobs, parameters and source; or one stage of the pipeline.

    Args:
        emit: one of "ast", "ir", "schedule", "py" for that stage's stable text dump.
        latex: the maths as LaTeX.

    Raises:
        SpecError: as `load`.
        ValueError: an unknown stage.
    """
    from .mathtext import as_latex, as_text

    method = load(spec, **params)
    match emit:
        case None:
            return as_latex(method) if latex else as_text(method)
        case "ast":
            return dump_ast(method.doc)
        case "ir":
            return dump_ir(method)
        case "schedule":
            return Schedule(method).dump()
        case "py":
            from .emit.module import class_part, method_part

            return "\n".join(
                [method_part(method), "", "# (what is the same in every module stands here)", "", class_part(method)]
            )
    raise ValueError(f"unknown stage {emit!r}; one of {', '.join(STAGES)}")


def plan(
    spec: Spec,
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: str = "bf16",
    budget: int | str = BUDGET,
    longest: int | None = None,
    frozen_head: bool = False,
    **params: float,
) -> Plan:
    """What a step of `from_hidden` costs: passes, matrix products and bytes above the inputs, beside full logits, and why.

    Args:
        tokens, hidden, vocab: live tokens, width of the model, entries of the vocabulary.
        dtype: bf16, fp16, fp32 or fp64. budget: of the logits buffer, bytes or text such as "512MiB".
        longest: tokens of the longest answer (default: one answer holds all). frozen_head: it takes no gradient.

    Raises:
        SpecError: as `load`.
        ValueError: an unknown dtype, or a size that is none.
    """
    size = parse_bytes(budget) if isinstance(budget, str) else budget
    return plan_of(load(spec, **params), tokens, hidden, vocab, dtype, size, longest, frozen_head)


def dump_ast(doc: SpecDoc) -> str:
    return "\n".join(f"{key} = {ast.dump(parse_expression(text))}" for key, text in texts(doc))


def dump_ir(method: Method) -> str:
    parts = {
        "T": method.T,
        "f": method.f,
        "kappa": method.kappa,
        "objective": method.objective,
        "normaliser": method.normaliser,
    }
    parts |= {f"term {t.name}": t.add for t in method.terms}
    parts |= {"gradient: d J / d log pi": method.gradient.coef}
    for term in method.gradient.sums:
        parts |= {
            f"gradient: d J / d {ir.dump(term.node).splitlines()[-2]}": term.cotangent,
            "gradient: d that / d log pi(v)": term.slope,
        }
    parts |= {"reward": method.reward, "advantage": method.advantage, "keep": method.keep}
    return "\n\n".join(f"{key}:\n{ir.dump(node)}" for key, node in parts.items() if node is not None)


def new(name: str, from_: str) -> str:
    """The text of a new spec: a copy of a built-in under another name, its title and citation left to be written.

    Raises:
        SpecError: no such built-in, or a name that no spec can have.
    """
    source = find(from_)
    doc = read_spec(source)
    start, end = doc.name.span.start, doc.name.span.end
    text = source.text[:start] + name + source.text[end:]
    lines = [line for line in text.splitlines() if not line.startswith(("cite:", "title:"))]
    at = next(i for i, line in enumerate(lines) if line.startswith("name:"))
    lines.insert(at + 1, f"title: {name}  # from {doc.name.value}")
    text = "\n".join(lines) + "\n"
    read_spec(Source(f"{name}.yaml", text))
    return text


@dataclass(frozen=True)
class Verdict:
    """Of a generated file: status is current, stale, edited or unknown; `message` says it in one line."""

    status: str
    message: str


def verify(path: Path | str, spec: Spec | None = None, **params: float) -> Verdict:
    """Whether a generated file is what the spec gives today, comes from an older spec or lossdsl, or was edited by hand.

    `spec` defaults to NAME.yaml beside the file, else to the built-in of that name.

    Raises:
        SpecError: the file cannot be read, or the spec has errors.
    """
    from .emit.module import content_hash, member_text, module_text

    path = Path(path)
    text = read_source(path).text
    facts = dict(line[2:].split(": ", 1) for line in text.splitlines() if line.startswith(("# spec: ", "# content: ")))
    if len(facts) != 2:
        return Verdict("unknown", f"{path.name} was not generated by lossdsl")
    name = facts["spec"].split(" ")[0]
    if facts["content"] != content_hash(text):
        return Verdict("edited", f"{path.name} was edited by hand after it was generated from {name}")
    if spec is None:
        beside = path.with_name(f"{name}.yaml")
        spec = beside if beside.exists() else name
    method = load(spec, **params)
    if text in (module_text(method), member_text(method)):
        return Verdict("current", f"{path.name} is current")
    return Verdict(
        "stale",
        f"{path.name} is not what {name} gives today: the spec, a parameter or lossdsl has changed; build it again",
    )


# --- two methods ------------------------------------------------------------------------------------------------------


def compare(
    a: Spec,
    b: Spec,
    *,
    assume: Sequence[str] = (),
    params_a: Mapping[str, float] | None = None,
    params_b: Mapping[str, float] | None = None,
    data: Path | str | None = None,
    columns: Mapping[str, str] | None = None,
    synthetic: Mapping[str, float] | None = None,
) -> Diff:
    """How the gradients of two methods differ: `lossdsl diff`.

    Args:
        assume: what may be taken for granted: `c = 1`, `on_policy`, `A > 0`, `r < 2`, ...
        params_a, params_b: other values for the parameters of one side.
        data: rollouts on which both gradients are taken (safetensors, JSON Lines, parquet).
        columns: our name -> the file's name of a column (see docs/diff.md for the names known).
        synthetic: `seed`, `staleness` (standard deviation of log r), `mismatch` (of log c) of a made batch instead.

    Raises:
        SpecError: as `load`; E0604 for what is wrong with a file, E0605 for an assumption that makes no sense.
    """
    from .diff.report import compare

    given = (params_a or {}, params_b or {})
    methods = [_method(spec, params) for spec, params in zip((a, b), given, strict=True)]
    labels = [
        " ".join([m.name, *(f"{name}={value:g}" for name, value in params.items())])
        for m, params in zip(methods, given, strict=True)
    ]
    rollouts = None if data is None and synthetic is None else _rollouts(methods, data, columns, synthetic or {})
    return compare(methods[0], methods[1], assume, (labels[0], labels[1]), rollouts)


def _rollouts(
    methods: Sequence[Method],
    data: Path | str | None,
    columns: Mapping[str, str] | None,
    synthetic: Mapping[str, float],
) -> Rollouts:
    """Those of a file, else made ones with every input that a method declares."""
    from .diff.rollouts import load_rollouts
    from .diff.synthetic import synthetic_rollouts

    if data is not None:
        return load_rollouts(data, columns)
    inputs = {i.name.value: i.axis.value for m in methods for i in m.doc.inputs if i.name.value != "A"}
    made = {key: synthetic[key] for key in ("staleness", "mismatch") if key in synthetic}
    return synthetic_rollouts(int(synthetic.get("seed", 0)), **made, inputs=inputs)


def map_methods(
    specs: Sequence[Spec] = (),
    *,
    assume: Sequence[str] = (),
    data: Path | str | None = None,
    columns: Mapping[str, str] | None = None,
    synthetic: Mapping[str, float] | None = None,
) -> Map:
    """Many methods at once, pairwise: `lossdsl map`. Without specs, the built-ins under their headings.

    Args:
        assume, data, columns, synthetic: as for `compare`.

    Raises:
        SpecError: as `compare`.
    """
    from .diff.map import make_map

    named = [("", tuple(specs))] if specs else list(groups())
    made = [(heading, [_method(spec, {}) for spec in found]) for heading, found in named]
    rollouts = _rollouts([m for _, ms in made for m in ms], data, columns, synthetic or {})
    return make_map(made, assume, rollouts)


def map_text(found: Map, colour: bool = False) -> str:
    """A map for the terminal: classes, and cosines or nearest neighbours."""
    from .diff.map_text import map_text

    return map_text(found, colour)


def columns(pairs: Sequence[str]) -> dict[str, str]:
    """`logp=policy_logprobs,mask=loss_mask`, as it is written on the command line, as a mapping.

    Raises:
        SpecError: E0604 for something else.
    """
    from .diff.rollouts import columns_of

    return columns_of(pairs)


def _method(spec: Spec, params: Mapping[str, float]) -> Method:
    """The checked method; the built-ins' proofs are this project's tests and are not run again."""
    if isinstance(spec, str) and spec in builtins():
        return lower_spec(with_params(read_spec(find(spec)), params))
    return load(spec, **params)


def diff_text(diff: Diff, colour: bool = False) -> str:
    """A diff for the terminal: verdict, knobs, cases."""
    from .diff.text import as_text

    return as_text(diff, colour)


def page(found: Diff | Map) -> str:
    """A diff or a map as one HTML page that needs nothing else.

    That of a diff has the report, its formulas typeset, and curves that follow the parameters; that of a map has the
    classes, a heat map and a table that can be sorted.
    """
    from .diff.map import Map

    if isinstance(found, Map):
        from .diff.map_page import map_page

        return map_page(found)
    from .diff.page import page

    return page(found)


def plot(found: Diff | Map, path: Path | str) -> None:
    """A diff or a map as a picture for a paper: .png, .svg or .pdf, the same bytes every time.

    Raises:
        SpecError: E0606, matplotlib is not installed (`pip install 'lossdsl[plot]'`), or another ending.
    """
    from .diff.map import Map

    if isinstance(found, Map):
        from .diff.map_plot import plot_map

        return plot_map(found, path)
    from .diff.plot import plot

    return plot(found, path)


def overview() -> tuple[tuple[str, tuple[Description, ...]], ...]:
    """The built-in methods as rows under their headings: what `lossdsl list` shows.

    The built-ins' proofs are this project's tests; they are not run again here.
    """
    return tuple(
        (heading, tuple(describe(lower_spec(read_spec(find(name)))) for name in names)) for heading, names in groups()
    )
