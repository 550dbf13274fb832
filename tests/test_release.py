"""What a release needs: version, notes, citation, templates and workflows that fit each other and the repository."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import autotune
from autotune._version import ON_PYPI
from autotune.versions import RANGES
from tests.documents import check_values, parsed, words_of

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
CITATION = (ROOT / "CITATION.cff").read_text()
VERSION_FILE = (ROOT / "autotune" / "_version.py").read_text()
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (GITHUB / "workflows").glob("*.yml")}


def release() -> Any:
    spec = importlib.util.spec_from_file_location("release", GITHUB / "release.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ADDRESS = "https://github.com/someone/autotune"
WITH_URLS = release().with_urls((ROOT / "pyproject.toml").read_text(), ADDRESS)


def troubles(tag: str, **changed: Any) -> list[str]:
    on_pypi = VERSION_FILE.replace("ON_PYPI = False", "ON_PYPI = True")
    texts = {"version_file": on_pypi, "changelog": CHANGELOG, "citation": CITATION, "pyproject": WITH_URLS, "texts": {}}
    texts |= changed
    return list(release().troubles(tag, **texts))


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


def test_documents_install_from_a_checkout_until_a_release_switches_them() -> None:
    found = {path.relative_to(ROOT).as_posix(): path.read_text() for path in release().documents()}
    changed = {name for name, text in found.items() if release().switched(text) != text}
    version, dated = f"v{autotune.__version__}", re.sub(r"\(.+\)", "(2026-12-01)", CHANGELOG, count=1)
    refused = troubles(version, version_file=VERSION_FILE, changelog=dated, texts=found)
    if ON_PYPI:
        assert changed == set()
        assert refused == []
    else:
        assert {"README.md", "docs/index.md", "docs/environments.md"} <= changed
        assert [name for name, text in found.items() if "install deepspeed-autotune" in text] == []
        assert "autotune/_version.py, README.md" in refused[0]
        assert "--switch" in refused[0]
    after = {name: release().switched(text) for name, text in found.items()}
    assert "relative links" in troubles(version, changelog=dated, texts=after)[0]
    after["README.md"] = release().with_absolute_links(after["README.md"], ADDRESS)
    assert f"({ADDRESS}/blob/main/docs/limits.md)" in after["README.md"]
    assert f"({ADDRESS}/raw/main/docs/images/run.svg)" in after["README.md"]
    assert "has no URLs" in troubles(version, changelog=dated, pyproject="[project]", texts=after)[0]
    assert tomllib.loads(WITH_URLS)["project"]["urls"]["Issues"] == f"{ADDRESS}/issues"
    assert troubles(version, changelog=dated, texts=after) == []
    for text in after.values():
        assert not re.search(r"install '?\.[\s\[]|<!-- unreleased", text)


# -- packages ------------------------------------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMAGES = {path.suffix[1:]: path.read_text() for path in (ROOT / "packaging" / "docker").glob("Dockerfile.*")}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_holds_all_packages_and_supported_versions(name: str) -> None:
    text = IMAGES[name]
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()}
    assert all((ROOT / word).exists() for word in copied)
    folders = {"autotune", *(path.split("/")[0] for path in PROJECT["tool"]["setuptools"]["package-dir"].values())}
    assert folders | {"pyproject.toml", PROJECT["project"]["readme"]} <= copied
    for package, version in re.findall(r"^ARG (TORCH|DEEPSPEED|TRANSFORMERS)=(\S+)$", text, re.MULTILINE):
        oldest, newest = RANGES[package.lower()]
        assert oldest <= tuple(map(int, version.split(".")[:2])) <= newest
    assert all("--no-cache-dir" in line for line in text.splitlines() if "pip install" in line), "hadolint DL3042"
    assert f"-f packaging/docker/Dockerfile.{name} " in text


def test_the_conda_recipe_requires_what_the_package_requires() -> None:
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == autotune.__version__
    renamed = {"hjson": "hjson-py"}

    def requirement(text: str) -> tuple[str, str]:
        name, version = re.fullmatch(r"([\w.-]+?)\s*(>=.*)", text).groups()  # type: ignore[union-attr]
        return renamed.get(name.lower(), name.lower()), version

    run = [one for one in recipe["requirements"]["run"] if not one.startswith("python ")]
    assert sorted(map(requirement, run)) == sorted(map(requirement, PROJECT["project"]["dependencies"]))
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert entry.split(" = ") == list(*PROJECT["project"]["scripts"].items())
    (script,) = [test["script"] for test in recipe["tests"] if "script" in test]
    for line in script:
        check_values(parsed(words_of(line)[0]))


# -- workflows -----------------------------------------------------------------------------------------------------------


def steps(workflow: str) -> list[dict[str, Any]]:
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job.get("steps", [])]


def test_workflows_run_the_gate_the_long_set_and_check_what_is_published() -> None:
    commands = [step["run"] for name in ("test", "nightly") for step in steps(name) if "run" in step]
    assert {".ci/run", "make nightly", "python -m build", "python -m twine check --strict dist/*"} <= set(commands)
    assert "schedule" in WORKFLOWS["nightly"][True], "`on` is YAML's true"
    pythons = [
        job["strategy"]["matrix"]["python"] for job in WORKFLOWS["nightly"]["jobs"].values() if "strategy" in job
    ]
    newest = ".".join(map(str, RANGES["python"][1]))
    assert pythons[0][-1] == newest
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
