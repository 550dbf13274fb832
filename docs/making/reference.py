"""Pages that are made from the code when the site is built, so that they cannot lag behind it.

`python docs/making/reference.py options|knobs|spaces|modules` prints one as Markdown. `hooks.py` inserts it at
`<!-- made: NAME -->` in a document.
"""

from __future__ import annotations

import ast
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from autotune.cli.app import parser
from autotune.commands.request import parameters
from autotune.errors import ExitCode
from autotune.problem.candidate import Candidate, describe, short_name
from autotune.problem.knobs import KNOBS, facts
from autotune.problem.space import DS_TOP_LEVEL, DS_ZERO_KEYS, Domain, SearchSpace, load_space, shipped_spaces

ROOT = Path(__file__).parents[2]
KINDS = {int: "number", float: "number", Path: "file", str: "text"}


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return '<div class="made" markdown>\n\n' + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n</div>\n"


# -- options -------------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, Any]]:
    """(words, command) of every command of the command line, those of `autotune spaces` included."""
    for name, command in parser().commands.items():
        inner = getattr(command, "commands", None)
        yield from ((f"{name} {one}", found) for one, found in inner.items()) if inner else [(name, command)]


def kind_of(command: Any, parameter: Any) -> str:
    """Return the kind of an option's value in a word; empty for a switch."""
    hint = typing.get_type_hints(command.callback)[parameter.name]
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (kind,) = [one for one in options if one is not type(None)]
    if kind is bool:
        return ""
    inner = typing.get_args(kind)
    return f"{KINDS[inner[0]]}, repeatable" if inner else KINDS[kind]


def command_section(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    words = [one.metavar or one.name.upper() for one in arguments]
    # `[STUDY] -- SCRIPT` and `[-- SCRIPT]`: what stands after the dashes stands last
    lines = [f"## autotune {name}\n", command.help.split("\n\n\f")[0], ""]
    lines += [f"```text\nautotune {' '.join([name, '[OPTIONS]', *words])}\n```", ""]
    lines += [f"- `{word}`: {one.help}" for word, one in zip(words, arguments, strict=True) if one.help]
    rows = []
    for one in options:
        default = "" if one.default in (None, False) or one.multiple else f"`{one.default}`"
        rows.append([", ".join(f"`{text}`" for text in one.opts), kind_of(command, one), default, one.help])
    if rows:
        lines += ["", table(["option", "takes", "default", ""], rows)]
    return "\n".join(lines)


def options_page() -> str:
    """Every command with every argument and option."""
    return "\n\n".join(command_section(name, command) for name, command in commands())


# -- exit codes and variables --------------------------------------------------------------------------------------------


def exit_codes_page() -> str:
    """Return the table of the exit codes."""
    return table(["exit code", "meaning"], [[f"`{code.value}`", code.meaning] for code in ExitCode])


def constants(tree: ast.Module) -> dict[str, str]:
    """Return the constants of a module that may name a variable, by their own names."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = (
                    zip(target.elts, node.value.elts, strict=False)
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    else [(target, node.value)]
                )
                found.update(
                    {ast.unparse(name): value.value for name, value in pairs if isinstance(value, ast.Constant)}
                )
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, str) and re.fullmatch(r"[A-Z][A-Z0-9_]+", value)
    }


def looked_up(node: ast.AST) -> ast.expr | None:
    """Return the name of the variable that an expression reads from `os.environ`, as an expression."""
    match node:
        case ast.Call(func=ast.Attribute(value=found, attr="get"), args=[name, *_]):
            pass
        case ast.Subscript(value=found, slice=name, ctx=ast.Load()):
            pass
        case ast.Compare(left=name, comparators=[found]):
            pass
        case _:
            return None
    match found:
        case ast.Name(id="environment") | ast.Attribute(value=ast.Name(id="os"), attr="environ"):
            return name
    return None


def variables_read() -> set[str]:
    """Environment variables that the package reads by a name in its code."""
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "autotune").rglob("*.py")}
    of = {".".join(path.relative_to(ROOT).with_suffix("").parts): constants(tree) for path, tree in trees.items()}
    found = set()
    for path, tree in trees.items():
        known = dict(of[".".join(path.relative_to(ROOT).with_suffix("").parts)])
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                known.update(
                    {
                        one.asname or one.name: of[node.module][one.name]
                        for one in node.names
                        if node.module in of and one.name in of[node.module]
                    }
                )
        for name in filter(None, map(looked_up, ast.walk(tree))):
            value = name.value if isinstance(name, ast.Constant) else known.get(ast.unparse(name))
            if isinstance(value, str):
                found.add(value)
    return found | {
        one.option.variable
        for command in ("run", "plan", "launch")
        for one in parameters(command)
        if one.option.variable
    }


# -- knobs ---------------------------------------------------------------------------------------------------------------


def domain_text(domain: Domain) -> str:
    shown = [
        f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        for value in domain.values
    ]
    if domain.is_range:
        shown = [shown[0], "…", shown[-1]]
    return ", ".join(shown).replace("True", "true").replace("False", "false")


def turned_in(name: str, spaces: dict[str, SearchSpace]) -> str:
    return "; ".join(
        f"`{space}`: {domain_text(found.knobs[name])}" for space, found in spaces.items() if name in found.knobs
    )


def knobs_page() -> str:
    """Every knob with what is known of it, as `autotune spaces knobs` says it, and the other keys that shipped spaces turn."""
    spaces = {name: load_space(name) for name in shipped_spaces()}
    dotted = sorted({short_name(name) for space in spaces.values() for name in space.knobs} - set(KNOBS))
    rows = []
    for name, knob in KNOBS.items():
        told = facts(knob)
        where = "" if knob.path == name else f"`{knob.path}`" if knob.path else "the model's or the environment's"
        releases = [f"since {told['since deepspeed']}"] if "since deepspeed" in told else []
        changes = f"**changes what is computed**: {knob.lossy}" if knob.lossy else ""
        needs = "; ".join(filter(None, [told.get("needs", ""), *releases, changes]))
        rows.append(
            [f"`{name}`<br>{where}", told.get("values", "text"), knob.read.where, needs, turned_in(name, spaces)]
        )
    rows += [[f"`{name}`", "see DeepSpeed", "", "", turned_in(name, spaces)] for name in dotted]
    return table(
        ["knob, and its key in DeepSpeed's config", "values", "read at", "needs", "in the shipped spaces"], rows
    ) + (
        f"\nAny other key is a knob by its dotted path: the {len(DS_ZERO_KEYS)} keys under `zero_optimization.`, and those below "
        f"the {len(DS_TOP_LEVEL)} of the top level, are known by name, and a misspelt one is refused with its line.\n"
    )


def short_forms() -> list[list[str]]:
    """How a candidate's line writes each knob: `z2 mb8 ga4 ckpt …`."""
    rows = []
    for name, knob in KNOBS.items():
        if isinstance(knob.kind, tuple):
            value: Any = knob.kind[1]
        else:
            value = {bool: True, int: 2, float: 0.5}.get(knob.kind, "r=16")
            if value is True and not describe({name: value}):  # DeepSpeed's default is left out of a line
                value = False
        rows.append([f"`{describe({name: value})}`", f"`{name}`: {str(value).lower()}"])
    return rows


def spaces_page() -> str:
    """Every shipped space as its file stands."""
    lines = []
    for name, path in shipped_spaces().items():
        space = load_space(name)
        engines = sum(1 for _ in space.families())
        lines += [
            f"### {name}\n",
            f"{space.about}; {engines} engines before batch shapes\n",
            f"```yaml\n{path.read_text()}```\n",
        ]
    return "\n".join(lines)


def short_forms_page() -> str:
    example = Candidate.of({"zero_stage": 2, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4})
    return f"`{example}` is stage 2 with micro-batches of 8, four of them a step.\n\n" + table(
        ["in a line", "means"], short_forms()
    )


# -- files of the repository ---------------------------------------------------------------------------------------------

LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".json": "json", ".yaml": "yaml"}


def changes_page() -> str:
    """The changelog, without its own heading."""
    return (ROOT / "CHANGELOG.md").read_text().partition("\n")[2]


def examples_page() -> str:
    """Return the text of `examples/README.md`, and the files of each example."""
    folder = ROOT / "examples"
    lines = [(folder / "README.md").read_text().partition("\n")[2]]
    for path in sorted(folder.glob("*/*")):
        if path.suffix in LANGUAGES:
            lines.append(f"## {path.relative_to(folder)}\n\n```{LANGUAGES[path.suffix]}\n{path.read_text()}```\n")
    return "\n".join(lines)


def modules_page() -> str:
    """Table of the modules of each package, by the first paragraph of their docstrings."""
    folders: dict[str, list[list[str]]] = {}
    for path in sorted((ROOT / "autotune").rglob("*.py")):
        tree = ast.parse(path.read_text())
        doc = ast.get_docstring(tree) or ""
        if path.name != "__init__.py" or len(tree.body) > bool(doc):
            folder = path.parent.relative_to(ROOT).as_posix()
            folders.setdefault(folder, []).append([f"`{path.name}`", " ".join(doc.partition("\n\n")[0].split())])
    return "\n".join(f"### `{folder}/`\n\n{table(['module', ''], rows)}" for folder, rows in folders.items())


PAGES: dict[str, Callable[[], str]] = {
    "options": options_page,
    "exit-codes": exit_codes_page,
    "knobs": knobs_page,
    "spaces": spaces_page,
    "short-forms": short_forms_page,
    "changes": changes_page,
    "examples": examples_page,
    "modules": modules_page,
}

if __name__ == "__main__":
    print(PAGES[sys.argv[1]]())
