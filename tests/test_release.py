"""What a release needs: version, notes, citation, templates and workflows that fit each other and the repository."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import autotune

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
CITATION = (ROOT / "CITATION.cff").read_text()
VERSION_FILE = (ROOT / "autotune" / "_version.py").read_text()
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (GITHUB / "workflows").glob("*.yml")}


def troubles(tag: str, **changed: str) -> list[str]:
    spec = importlib.util.spec_from_file_location("release", GITHUB / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts = {"version_file": VERSION_FILE, "changelog": CHANGELOG, "citation": CITATION, **changed}
    return list(module.troubles(tag, **texts))


def test_notes_and_citation_are_of_this_version() -> None:
    heading = re.findall(r"^## (\S+) \((.+)\)$", CHANGELOG, re.MULTILINE)[0]
    assert heading[0] == autotune.__version__
    assert heading[1] == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1])
    cited = yaml.safe_load(CITATION)
    assert cited["version"] == autotune.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(cited), "what the format asks for"


def test_a_tag_is_published_only_when_all_say_the_same() -> None:
    version = autotune.__version__
    dated = re.sub(r"^## .+$", f"## {version} (2026-12-01)", CHANGELOG, count=1, flags=re.MULTILINE)
    assert troubles(f"v{version}", changelog=dated) == []
    assert "the tag is v9.9.9" in troubles("v9.9.9", changelog=dated)[0]
    undated = re.sub(r"^## .+$", f"## {version} (unreleased)", CHANGELOG, count=1, flags=re.MULTILINE)
    assert "YYYY-MM-DD" in troubles(f"v{version}", changelog=undated)[0]
    assert "CITATION.cff has version 0.0.1" in troubles(f"v{version}", changelog=dated, citation="version: 0.0.1")[0]
    done = subprocess.run([sys.executable, str(GITHUB / "release.py"), "v9.9.9"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the tag is v9.9.9" in done.stderr


def steps(workflow: str) -> list[dict[str, Any]]:
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job.get("steps", [])]


def test_workflows_test_newest_and_oldest_and_what_is_published() -> None:
    commands = [step["run"] for step in steps("test") if "run" in step]
    assert {".ci/run", "make test-oldest", "python -m build", "python -m twine check --strict dist/*"} <= set(commands)
    for command in commands:
        for target in re.findall(r"make ([\w-]+)", command):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in re.findall(r"-c (\S+)", " ".join(commands)):
        assert (ROOT / name).exists()


def test_publishing_has_no_token_and_only_its_job_may_ask_for_an_identity() -> None:
    publish = WORKFLOWS["publish"]
    assert publish[True] == {"push": {"tags": ["v*"]}}, "`on` is YAML's true"
    jobs = publish["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert jobs["publish"]["needs"] == "test"
    assert jobs["test"]["needs"] == "ready"
    assert jobs["publish"]["environment"] == "pypi"
    text = (GITHUB / "workflows" / "publish.yml").read_text()
    assert "secrets." not in text
    assert "password" not in text


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_permissions_few(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    used = [step["uses"] for step in steps(name) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one) for one in used)


def test_issues_ask_for_what_one_needs_to_help() -> None:
    templates = {path.stem: path.read_text() for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml")}
    for name in ("bug", "wish"):
        form = yaml.safe_load(templates[name])
        assert {"name", "description", "body"} <= set(form)
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids))
        assert "autotune doctor --json" in templates[name]
        assert "autotune share STUDY" in templates[name]
    needed = [
        part["id"] for part in yaml.safe_load(templates["bug"])["body"] if part.get("validations", {}).get("required")
    ]
    assert needed == ["happened", "doctor", "report"]
