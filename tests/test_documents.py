"""README, documents and examples: every command in them is parsed, every file that they name is there, every page is whole."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from autotune.cli.app import app, parser
from autotune.commands.environment import named_nodes
from autotune.commands.request import Request
from autotune.commands.setup import launch_setup, run_setup
from autotune.errors import ExitCode
from autotune.problem.candidate import KNOBS
from autotune.problem.space import load_space, parse_space, shipped_spaces
from autotune.search.study import StudyStore
from autotune.util.units import parse_duration
from tests.documents import (
    ROOT,
    SCRIPTS,
    SOURCES,
    TEXTS,
    blocks,
    check_values,
    commands_in,
    links_of,
    mentions_in,
    misplaced,
    missing_files,
    missing_members,
    options_of,
    parsed,
    paths_of,
    words_of,
)
from tests.studies import study_of_every_kind

ALL = [pytest.param(path, id=str(path.relative_to(ROOT))) for path in TEXTS]
MAKING = ROOT / "docs" / "making"


def made(name: str) -> Any:
    """A module of docs/making, which is no package: mkdocs loads its hooks by their path."""
    spec = importlib.util.spec_from_file_location(name, MAKING / f"{name}.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- commands ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL)
def test_every_command_is_one(path: Path) -> None:
    for words in commands_in(path.read_text()):
        check_values(parsed(words))


@pytest.mark.parametrize("path", ALL)
def test_every_command_that_is_mentioned_exists_with_its_options(path: Path) -> None:
    if path.name == "CHANGELOG.md":  # what was
        return
    for words in mentions_in(path.read_text()):
        ours = words[: words.index("--")] if "--" in words else words
        parsed([*words[: 2 if words[0] == "spaces" else 1], "--help"])
        named = {word.partition("=")[0] for word in ours if word.startswith("--") and word != "--json"}
        assert named <= options_of(ours), f"{' '.join(words)}: no {named - options_of(ours)}"


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in SCRIPTS])
def test_every_command_of_a_script_is_one(path: Path) -> None:
    lines = path.read_text().replace("\\\n", " ").splitlines()
    found = [words for line in lines if not line.startswith("#") for words in words_of(line)]
    assert found
    for words in found:
        check_values(parsed(words))
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_commands_to_look_at() -> None:
    """That the readers above read."""
    counts = {str(path.relative_to(ROOT)): len(list(commands_in(path.read_text()))) for path in TEXTS}
    assert counts["README.md"] >= 10
    assert counts["docs/oom.md"] >= 5
    assert counts["docs/tune.md"] >= 10
    assert sum(len(list(mentions_in(path.read_text()))) for path in TEXTS) > 40


def test_spaces_in_documents_are_valid() -> None:
    found = [
        block for path in TEXTS for block in blocks(path.read_text()) if re.search(r"^knobs:", block, re.MULTILINE)
    ]
    assert found
    for text in found:
        parse_space(text)


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in TEXTS:
        text = path.read_text()
        used = {found for block in blocks(text) for found in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)}
        assert used | set(re.findall(r"`make ([a-z-]+)", text)) <= targets, path


# -- links and paths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL)
def test_what_a_document_links_to_is_there(path: Path) -> None:
    assert {target for target in links_of(path) if not (path.parent / target).exists()} == set()


@pytest.mark.parametrize("path", ALL)
def test_what_a_document_names_is_there(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        return
    there = {name for name in paths_of(path) if any(ROOT.glob(name.rstrip("/")))}
    assert paths_of(path) - there == set()


HOW_TOS = re.findall(r"^## (How to .*)\n((?:(?!## ).*\n?)*)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)


def identifiers(text: str) -> set[str]:
    """Names of Python code in backticks, without paths, commands and file names."""
    words = re.findall(r"`([^`\n]+)`", text)
    return {
        word
        for word in words
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", word) and not re.search(r"\.(py|md|toml)$", word)
    }


@pytest.mark.parametrize(("title", "text"), HOW_TOS, ids=[title for title, _ in HOW_TOS])
def test_a_how_to_names_code_that_exists(title: str, text: str) -> None:
    code = " ".join(path.read_text() for path in sorted((ROOT / "autotune").rglob("*.py")))
    words = set(re.findall(r"\w+", code)) | {"Makefile"}
    named = identifiers(text)
    assert named, title
    assert {name for name in named if not set(name.split(".")) <= words} == set()


def unknown_names(row: str) -> set[str]:
    """Names of code in a row of the table that are in none of its files."""
    files = [ROOT / word for word in re.findall(r"`([\w/.]+)`", row) if (ROOT / word).is_file()]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    return {name for name in identifiers(row) if not set(name.split(".")) <= words} - {"Makefile"}


def test_the_table_of_where_to_look_names_at_most_three_files_and_what_is_in_them() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Where to look")[2].partition("\n## ")[0]
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and "question" not in line and "---" not in line
    ]
    assert len(rows) >= 6
    for row in rows:
        files = {
            word for word in re.findall(r"`([\w/.]+)`", row) if "/" in word or ("." in word and (ROOT / word).is_file())
        }
        assert 1 <= len(files) <= 3, row
        assert unknown_names(row) == set(), row
    assert unknown_names(rows[0].replace("CandidatePool", "Openings")) == {"Openings.observe"}


MAINTAINERS = [ROOT / "docs" / "architecture.md", ROOT / "docs" / "internals.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("path", MAINTAINERS, ids=[path.name for path in MAINTAINERS])
def test_files_and_members_in_a_document_for_maintainers_exist(path: Path) -> None:
    text = path.read_text()
    assert missing_files(text) == set()
    assert missing_members(text) == set()


def test_a_name_with_a_file_is_defined_in_that_file() -> None:
    """In documents for maintainers, and in docstrings and comments of the package."""
    wrong = {str(path.relative_to(ROOT)): misplaced(path.read_text()) for path in [*MAINTAINERS, *SOURCES]}
    assert {path: names for path, names in wrong.items() if names} == {}


# -- the site ------------------------------------------------------------------------------------------------------------

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
TABS = {name: section for tab in SITE["nav"] for name, section in tab.items()}
LONGEST_GUIDE = 900  # words


def pages_in(section: Any) -> list[str]:
    """Return the files of a part of the navigation."""
    if isinstance(section, str):
        return [section]
    parts = section.values() if isinstance(section, dict) else section
    return [page for part in parts for page in pages_in(part)]


GUIDES = pages_in(TABS["Guides"])


def test_four_tabs_hold_every_page_once() -> None:
    assert list(TABS) == ["Start", "Guides", "Reference", "Design"]
    pages = pages_in(SITE["nav"])
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert len(pages) == len(set(pages))


def prose_words(text: str) -> int:
    """Number of words that a guide's author has written: without figures that benchmarks insert."""
    return len(re.sub(r"<!-- benchmark: .*?<!-- end -->|<!--.*?-->", "", text, flags=re.DOTALL).split())


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_is_short(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    assert prose_words(text) <= LONGEST_GUIDE
    assert prose_words(text + " word" * LONGEST_GUIDE) > LONGEST_GUIDE


def test_exit_codes_are_those_of_the_code_and_only_there() -> None:
    page = made("hooks").filled((ROOT / "docs" / "exit-codes.md").read_text())
    assert re.findall(r"^\| `(\d+)` \|", page, re.MULTILINE) == [str(code.value) for code in ExitCode]
    numbers = {}
    for path in [*(ROOT / "autotune" / "cli").glob("*.py"), *(ROOT / "autotune" / "commands").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "typer.Exit", "fail"):
                numbers[f"{path.name}:{node.lineno}"] = [
                    one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and type(one.value) is int
                ]
    assert len(numbers) >= 8
    assert {place: found for place, found in numbers.items() if found} == {}, "name the code: errors.ExitCode"


def test_environment_variables_are_those_that_the_code_reads() -> None:
    page = (ROOT / "docs" / "environment-variables.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(made("reference").variables_read())


@pytest.fixture
def at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files that the examples name, and a study STUDY."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "sft.py"):
        (tmp_path / name).write_text("import deepspeed\n")
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}')
    (tmp_path / "x.yaml").write_text("deepspeed: ds.json\nper_device_train_batch_size: 8\n")
    job = (ROOT / "docs" / "job-files.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "hosts").write_text("worker-1 slots=8\nworker-2 slots=8\n")
    study_of_every_kind(tmp_path / "runs", name="STUDY")
    return tmp_path


@pytest.mark.few(5)
@pytest.mark.parametrize("name", GUIDES)
def test_the_example_of_a_guide_works(name: str, at_work: Path) -> None:
    """Plans and reports run; of a run and a launch, all is done that comes before the first rank."""
    after = (ROOT / "docs" / name).read_text().partition("<!-- example -->\n")[2]
    words = next(commands_in(after))
    if words[0] not in ("run", "launch"):
        result = CliRunner().invoke(app, words)
        assert result.exit_code in (0, 3), result.output
        return
    request = Request(**{key: value for key, value in parsed(words).items() if value is not None})
    if words[0] == "launch":
        setup = launch_setup(request.model_copy(update={"study": request.script[0], "script": request.script[1:]}))
        assert StudyStore.load(str(setup.request.study)).winner
        assert setup.typed.script.path
        return
    with named_nodes(request, print) as nodes:
        if nodes is not None:
            assert request.hostfile is not None
            return
    found = run_setup(request.model_copy(update={"device": "cpu", "gpus": 2, "parallel": 1}))
    assert found.candidates
    assert found.budget_seconds == parse_duration(request.budget)


def test_the_tutorial_quotes_its_recorded_run() -> None:
    recorded = (MAKING / "tutorial.txt").read_text().splitlines()
    text = (ROOT / "docs" / "tutorial.md").read_text()
    quoted = [line for block in re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S) for line in block.splitlines()]
    assert len(quoted) > 15
    assert [line for line in quoted if line not in recorded] == []
    assert recorded[0].removeprefix("$ ") in [line.strip() for line in text.splitlines()]


def test_every_option_is_on_its_page() -> None:
    page = made("reference").options_page()
    sections = dict(re.findall(r"^## autotune ([\w ]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    group: Any = parser()
    names = [name for name, one in group.commands.items() if not hasattr(one, "commands")]
    inner = [f"{outer} {name}" for outer, one in group.commands.items() for name in getattr(one, "commands", ())]
    assert set(sections) == {*names, *inner}
    for name, section in sections.items():
        for option in options_of(name.split()) - {"--help"}:
            assert not option.startswith("-") or f"`{option}`" in section, (name, option)


def test_every_knob_and_space_is_on_its_page() -> None:
    reference = made("reference")
    page = reference.knobs_page()
    spaces = [load_space(name) for name in shipped_spaces()]
    for name in {*KNOBS, *(knob for space in spaces for knob in space.knobs)}:
        assert f"\n| `{name}`" in page, name
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert "| everywhere |" in rows["zero_stage"]
    assert "| stage 3 |" in rows["offload_param"]
    assert "| stages 1 and 2 |" in rows["allgather_bucket_size"]
    assert "changes what is computed" in rows["zero_optimization.zero_quantized_weights"]
    assert all(path.read_text() in reference.spaces_page() for path in shipped_spaces().values())


@pytest.mark.parametrize("name", made("reference").PAGES)
def test_tables_that_are_made_have_as_many_cells_in_every_row(name: str) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", made("reference").PAGES[name](), re.MULTILINE):
        assert len({len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table[:300]


def test_markers_are_filled_and_paths_become_links() -> None:
    hooks = made("hooks")
    for path in (ROOT / "docs").glob("*.md"):
        text = path.read_text()
        filled = hooks.filled(text)
        assert "<!-- made:" not in filled
        assert (filled == text) is ("<!-- made:" not in text)
    with pytest.raises(KeyError, match="nothing"):
        hooks.filled("<!-- made: nothing -->")
    assert hooks.linked("see `docs/deepspeed-facts.md`.") == "see [deepspeed facts](deepspeed-facts.md)."
    assert hooks.linked("[`docs/x.md`](x.md)") == "[`docs/x.md`](x.md)"


def test_what_the_python_page_names_is_there() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    assert "::: autotune" in page
    for entry in re.finditer(r"^::: ([\w.]+)\n((?:    .*\n)*)", page, re.MULTILINE):
        options = yaml.safe_load(entry[2]) or {}
        found = importlib.import_module("autotune")
        for part in entry[1].split(".")[1:]:
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)
        for member in options.get("options", {}).get("members", []):
            assert hasattr(found, member), f"{entry[1]}.{member}"


def test_code_on_the_python_page_compiles() -> None:
    found = [
        (path, code)
        for path in (ROOT / "docs").glob("*.md")
        for code in re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert "python.md" in {path.name for path, _ in found}
    for path, code in found:
        compile(code, str(path), "exec")


def built(folder: Path) -> Path:
    """Build the site into a folder. mkdocs is strict about pages, links, anchors, and what is in no navigation."""
    pytest.importorskip("mkdocs")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_works_from_disk(tmp_path: Path) -> None:
    """Links name files, nothing comes from other servers, and the search finds pages."""
    site = built(tmp_path / "site")
    pages = {path.stem: path.read_text() for path in site.glob("*.html")}
    assert "--global-batch-size" in pages["options"]
    assert "Expected" not in pages["python"]
    assert 'id="autotune.tune"' in pages["python"]
    assert 'href="search.html"' in pages["internals"]
    for name, page in pages.items():  # a link to a folder opens its listing if the site is read from disk
        assert re.findall(r'<a [^>]*href="(?!https?:|mailto:|#)[^"#]*/(?:#[^"]*)?"', page) == [], name
    for name, page in pages.items():
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"([^\"]+)|<link[^>]* href=\"([^\"]+)", page)
        assert not [one for pair in loaded for one in pair if one.startswith(("http:", "https:", "//"))], name
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("all but the search was tested, which needs chromium: apt-get install chromium")

    def results(folder: Path) -> int:
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=20000",
        ]
        command = [chromium, *flags, "--dump-dom", f"{(folder / 'index.html').as_uri()}?q=landlock"]
        page = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        assert "md-search__input" in page
        return len(re.findall(r'href="[^"]+" class="md-search-result__link"', page))

    assert results(site) >= 2
    without = shutil.copytree(site, tmp_path / "without")
    (without / "iframe-worker.js").unlink()
    assert results(without) == 0


# -- the picture ---------------------------------------------------------------------------------------------------------


def test_the_picture_is_of_the_recorded_run() -> None:
    picture = made("picture")
    recorded = picture.RECORDED.read_text()
    assert recorded.startswith(f"$ {picture.COMMAND}\n")
    check_values(parsed(words_of(picture.COMMAND)[0]))

    def words(svg: str) -> list[str]:
        return re.findall(r"<text[^>]*>([^<]*)</text>", svg)

    drawn, kept = picture.drawn(recorded), picture.PICTURE.read_text()
    assert words(drawn) == words(kept), "python docs/making/picture.py"
    assert not re.search(r"(?:url\(|href=|src=|@import)\W*(?:https?:)?//", kept), "it asks somebody for something"
    shown = "\n".join(words(kept)).replace("&#160;", " ")
    for expected in ("winner:", "OOM in", "wrote runs/demo/demo.json"):
        assert expected in shown
