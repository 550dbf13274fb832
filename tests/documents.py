"""What documents and examples say that can be checked: commands, links, paths."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from autotune.cli.app import parser
from autotune.problem.gpu_specs import named_gpu
from autotune.problem.job import parse_lora
from autotune.problem.models import shipped_models
from autotune.problem.space import shipped_spaces
from autotune.results.export import FORMATS
from autotune.util.units import parse_bytes, parse_count, parse_duration, parse_share
from tests.sources import tree_of

ROOT = Path(__file__).parents[1]
TEXTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.yml")),
]
SCRIPTS = [*sorted((ROOT / "examples").rglob("*.sh")), *sorted((ROOT / "examples").rglob("*.sbatch"))]
_BLOCK = re.compile(r"^```\w*\n(.*?)^```$|((?:^    [^\n]*\n)+)", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def blocks(text: str) -> Iterator[str]:
    """Code blocks of a Markdown text, fenced or indented."""
    for found in _BLOCK.finditer(text):
        yield found[1] or re.sub(r"^    ", "", found[2], flags=re.MULTILINE)


def words_of(line: str) -> list[list[str]]:
    """What stands behind `autotune` in a line of a shell, a list for each command in it, without what stands for something."""
    try:
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
    except ValueError:  # prose with an apostrophe
        return []
    found: list[list[str]] = []
    for end, group in itertools.groupby(words, lambda word: word in ("&&", "|", ">", ";")):
        rest = [] if end else [_filled(word) for word in group if word != "…"]
        rest = rest[rest.index("--ntasks=1") + 1 :] if rest[:1] == ["srun"] else rest
        rest = rest[1:] if rest[:1] == ["exec"] else rest
        rest = rest[3:] if rest[:2] == ["uvx", "--from"] else rest
        while rest and re.fullmatch(r"[A-Z_]+=.*", rest[0]):
            rest = rest[1:]
        if rest[:1] == ["autotune"] and len(rest) > 1:
            found.append(rest[1:])
    return found


def _filled(word: str) -> str:
    """A word of a shell with something in the place of its variables: their defaults, where they have any."""
    return re.sub(r"\$(?:\{\w+(?:\[@\])?(?::-([^}]*))?\}|\w+|@)", lambda variable: variable[1] or "X", word)


def commands_in(text: str) -> Iterator[list[str]]:
    """Every whole `autotune` command of a Markdown text's code blocks."""
    for block in blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield from words_of(line)


def mentions_in(text: str) -> Iterator[list[str]]:
    """Every `autotune` command in backticks within prose: often only its name and the option that matters."""
    for found in _INLINE.finditer(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        if re.match(r"(?:[A-Z_]+=\S+ )*autotune [a-z]", found[1]):
            yield found[1].replace("[", " ").replace("]", " ").split()[found[1].split().index("autotune") + 1 :]


def parsed(words: list[str]) -> dict[str, Any]:
    """The parameters that the command line makes of a command's words.

    Raises:
        AssertionError: there is no such command, or the words do not fit it.
    """
    group: Any = parser()
    if words[0].startswith("-"):
        assert words[0] in ("--help", "--version"), words
        return {}
    name, *rest = words
    assert name in group.commands, f"autotune has no command {name}"
    command = group.commands[name]
    while hasattr(command, "commands") and rest != ["--help"]:
        assert set(rest[:1]) & set(command.commands), f"autotune {name} has no command {rest[:1]}"
        command, rest = command.commands[rest[0]], rest[1:]
    if "--help" in rest:
        return {}
    try:
        context = command.make_context(name, list(rest), parent=group.make_context("autotune", list(words)))
        hidden = {one.name for one in command.params if getattr(one, "hidden", False)}
        return {key: value for key, value in context.params.items() if key not in hidden}
    except Exception as error:
        said = error.format_message() if hasattr(error, "format_message") else str(error)
        raise AssertionError(f"autotune {' '.join(words)}: {said}") from None


def options_of(words: list[str]) -> set[str]:
    """Options of the command that these words begin with."""
    command: Any = parser()
    for word in words:
        if not hasattr(command, "commands") or word not in command.commands:
            break
        command = command.commands[word]
    return {
        name for one in command.params for name in one.opts if name in words or not getattr(one, "hidden", False)
    } | {"--help"}


def check_values(given: dict[str, Any]) -> None:
    """Values that a person typed are what `run` would take: durations, sizes, and names of spaces, GPUs and models."""
    readers = {
        "budget": parse_duration,
        "hang_timeout": parse_duration,
        "memory_cap": parse_bytes,
        "host_memory": parse_bytes,
        "headroom": parse_share,
        "tokens": lambda text: parse_count(text, "--tokens"),
        "lora": parse_lora,
    }
    for name, read in readers.items():
        if given.get(name) is not None:
            read(given[name])
    for gpu in (given.get("gpu") or "").split(","):
        assert not gpu or named_gpu(gpu)
    space, model = given.get("space"), given.get("model")
    assert not isinstance(space, str) or space in shipped_spaces() or space.endswith(".yaml"), space
    assert not model or model in shipped_models() or model.startswith("./"), model
    assert given.get("style", "hf") in FORMATS


# -- paths ---------------------------------------------------------------------------------------------------------------

_LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"^(?:\.\.?/)?[\w.*-]+(?:/[\w.*-]+)*/?$")
_TOPS = ("docs", "benchmarks", "tests", "examples", "environments", "autotune", "search_spaces", ".ci", ".github")


def links_of(path: Path) -> set[str]:
    """Files that a document links to, by paths relative to it."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    targets = {found[1].partition("#")[0] for found in _LINK.finditer(text)}
    return {target for target in targets if target and "://" not in target and not target.startswith("mailto:")}


def paths_of(path: Path) -> set[str]:
    """Files and folders of the repository that a document names in backticks."""
    words = {word for found in _INLINE.finditer(path.read_text()) for word in found[1].split()}
    named = {word for word in words if _PATH.match(word) and word.split("/")[0] in _TOPS and "/" in word}
    return {word for word in named if not {"NAME", "STUDY", "FILE"} & set(re.split(r"[/.-]", word))}


# -- code that a text names ----------------------------------------------------------------------------------------------

PACKAGE = ROOT / "autotune"
SOURCES = sorted(PACKAGE.rglob("*.py"))
_CODE_FILE = re.compile(r"`((?:[\w.]+/)*\w+\.py)(?::[^`]*)?`")
_SUFFIXES = ("py", "ninja")  # of files, whose names look like those of members
_DOTTED = re.compile(r"`((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*)`")
_PLACED = re.compile(
    r"`([A-Za-z_][\w.]*)`(?: \(| in )`?((?:\w+/)*\w+\.py)\b"
)  # `name` (`file.py`), `name` in `file.py`


def _file_of(name: str) -> Path | None:
    """The file of a name like `autotune/search/tuner.py`, `search/tuner.py`, or `tuner.py` if no other has that name."""
    for base in (ROOT, PACKAGE):
        if (base / name).is_file():
            return base / name
    found = [path for path in SOURCES if path.name == name]
    return found[0] if len(found) == 1 else None


def _names(node: ast.AST) -> set[str]:
    """Names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def _set_attributes(node: ast.AST) -> set[str]:
    return {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)}


@cache
def _members() -> dict[str, set[str]]:
    """Names that each class, by its name, and each module, by its file's name, defines or inherits."""
    found: dict[str, set[str]] = {path.stem: set() for path in SOURCES}
    bases: dict[str, set[str]] = {}
    for path in SOURCES:
        found[path.stem] |= {name for node in tree_of(path).body for name in _names(node)}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                own = {name for inner in node.body for name in _names(inner)} | _set_attributes(node)
                found.setdefault(node.name, set()).update(own)
                above = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                bases.setdefault(node.name, set()).update(above)
    for _ in bases:
        before = sum(map(len, found.values()))
        for name, above in bases.items():
            found[name] |= {one for base in above for one in found.get(base, ())}
        if before == sum(map(len, found.values())):
            break
    return found


def missing_files(text: str) -> set[str]:
    """Names of Python files in backticks that are not there."""
    named = {name for name in _CODE_FILE.findall(text) if not name.endswith("NAME.py")}
    return {name for name in named if _file_of(name) is None}


def missing_members(text: str) -> set[str]:
    """Names like `Class.method` and `package.module.function` in backticks whose class or module lacks the last part."""
    found = set()
    for name in _DOTTED.findall(text):
        *packages, owner, member = name.split(".")
        is_ours = owner in _members() and (not packages or _file_of("/".join([*packages, f"{owner}.py"])))
        if is_ours and member not in {*_members()[owner], *_SUFFIXES}:
            found.add(name)
    return found


def misplaced(text: str) -> set[tuple[str, str]]:
    """Names in backticks, each with the file of this package in which the text says that it is, and in which it is not."""
    found = set()
    for name, file in _PLACED.findall(re.sub(r"\s*\n\s*(?:# )?", " ", text)):
        top, is_inner, _ = file.removeprefix("autotune/").partition("/")
        paths = [path for path in SOURCES if path.as_posix().endswith(f"/{file}")]
        if not paths and not (is_inner and (PACKAGE / top).is_dir()):  # DeepSpeed's, or another package's
            continue
        known = {Path(file).stem}
        for tree in map(tree_of, paths):
            known |= {one for node in ast.walk(tree) for one in _names(node)} | _set_attributes(tree)
        if not set(name.split(".")) <= known:
            found.add((name, file))
    return found
