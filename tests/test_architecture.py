"""docs/architecture.md and docs/modules.md: packages and modules are described, and named files exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

from tests.sources import tree_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autotune"
TEXT, ARCHITECTURE = ((ROOT / "docs" / name).read_text() for name in ("modules.md", "architecture.md"))
_NAME = re.compile(r"`((?:[\w-]+/)*\w+\.py)`")


def holds_code(path: Path) -> bool:
    """Return False for an `__init__.py` that is empty or only a docstring."""
    if path.name != "__init__.py":
        return True
    return any(not isinstance(line, ast.Expr) for line in ast.parse(path.read_text()).body)


MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py") if holds_code(path)}


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "making" / "reference.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_has_a_line_in_the_generated_table() -> None:
    assert "<!-- made: modules -->" in TEXT
    page = reference().modules_page()
    folders = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    named = [
        f"{re.match(r'`autotune/(.*)`', folder)[1]}{name}"  # type: ignore[index]
        for folder in folders
        for name in re.findall(r"^\| `(\w+\.py)` \| \S", folder, re.MULTILINE)
    ]
    assert sorted(named) == sorted(MODULES)


def test_every_module_has_a_docstring() -> None:
    """Its first paragraph is the module's line in the table."""
    assert [name for name, path in MODULES.items() if not ast.get_docstring(tree_of(path))] == []


def test_every_package_has_a_paragraph() -> None:
    folders = {path.relative_to(PACKAGE).parts[0] for path in MODULES.values() if path.parent != PACKAGE}
    described = re.findall(r"^\*\*`(\w+)/`\*\*", ARCHITECTURE, re.MULTILINE)
    assert sorted(described) == sorted(folders)
    assert len(ARCHITECTURE.splitlines()) <= 120, "two screens"


def test_every_file_that_is_named_is_there() -> None:
    """A module may be named by the end of its path."""
    ends = {
        name
        for name in set(_NAME.findall(ARCHITECTURE))
        if any(f"/{module}".endswith(f"/{name}") for module in MODULES)
    }
    assert {name for name in set(_NAME.findall(ARCHITECTURE)) - ends if not (ROOT / name).exists()} == set()


def test_commands_pass_all_that_objects_need_to_their_constructors() -> None:
    """A command composes executors, clusters and observers. None is changed after its construction, nor asked for its class."""
    for path in sorted(path for folder in ("commands", "cli") for path in (ROOT / "autotune" / folder).rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not node.attr.startswith("__"):
                assert ast.unparse(node.value) == "self", f"{path}:{node.lineno} sets {ast.unparse(node)}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                assert "Executor" not in ast.unparse(node.args[1]), f"{path}:{node.lineno} asks for an executor's class"


def _takes_interpreter(function: ast.FunctionDef) -> int | None:
    """Return the position of an optional parameter that is an interpreter or its path; None if there is none."""
    arguments = function.args
    for at, one in enumerate([*arguments.args, *arguments.kwonlyargs]):
        if one.arg == "interpreter" and one.annotation is not None and ast.unparse(one.annotation) == "Interpreter":
            return at if at < len(arguments.args) else 1000
    return None


def test_every_call_in_the_package_passes_the_interpreter() -> None:
    """The tuner's own Python is only the default of callers outside of the package, such as tests."""
    trees = {f"autotune.{name[:-3].replace('/', '.')}": tree_of(path) for name, path in MODULES.items()}
    optional = {
        (module, node.name): at
        for module, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and (at := _takes_interpreter(node)) is not None
    }
    assert ("autotune.util.interpreter", "console_script") in optional
    omitted = []
    for module, tree in trees.items():
        names = {name: at for (home, name), at in optional.items() if home == module}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                found = {one.name: optional.get((str(node.module), one.name)) for one in node.names}
                names |= {name: at for name, at in found.items() if at is not None}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and (name := node.func.id) in names:
                passed = any(one.arg == "interpreter" for one in node.keywords)
                passed |= any(isinstance(one, ast.Starred) for one in node.args)
                if not passed and len(node.args) <= names[name]:
                    omitted.append(f"{module}:{node.lineno} {name}")
    assert omitted == []
