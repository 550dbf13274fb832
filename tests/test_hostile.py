"""A stranger's study and space: reading them runs nothing, and shows texts as texts."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from autotune.problem.models import resolve_model
from autotune.problem.outcome import OutcomeKind
from autotune.recovery.ladder import ladder_path, stored_ladder
from tests.cli_call import call
from tests.hostile import SHADOWS, TEXT, Trap, controls, lay, live, space
from tests.studies import study_of_every_kind

SLOW = pytest.mark.slow
READING = [
    ("show", "s"),
    ("report", "s"),
    *(
        pytest.param(words, marks=SLOW)
        for words in (
            ("export", "s"),
            ("show", "s", "--json"),
            ("export", "s", "--format", "accelerate"),
            ("export", "s", "--format", "hf"),
            ("export", "s", "--format", "sbatch"),
        )
    ),
]


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Trap:
    return lay(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_reading_a_hostile_study_runs_nothing_and_prints_no_control_character(
    trap: Trap, words: tuple[str, ...]
) -> None:
    before = set(trap.folder.rglob("*"))
    done = trap.call(*words)
    assert trap.executed == []
    assert trap.started() == []
    assert controls(done.stdout + done.stderr) == []
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for path in set(trap.folder.rglob("*")) - before:
        if path.is_file() and path.suffix != ".gz":
            assert controls(path.read_text()) == [], path
        if path.suffix == ".html":
            assert list(live(path.read_text())) == []
            assert "&lt;img src=x onerror=owned()&gt;" in path.read_text()
            assert "\\u001b]0;owned" in path.read_text()


@pytest.mark.slow
def test_a_terminal_with_colours_gets_none_of_the_studys(trap: Trap) -> None:
    done = trap.call("show", "s", env={"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "150"})
    assert "\x1b[" in done.stdout, "rich's own"
    assert controls(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)) == []


LAUNCH = ("launch", "s", "--", "train.py")


def test_a_launch_without_the_studys_python_says_what_to_type(trap: Trap) -> None:
    (trap.folder / "train.py").touch()
    done = trap.call(*LAUNCH)
    assert (done.returncode, trap.executed, trap.started()) == (2, [], [])
    assert len(done.stderr.strip().splitlines()) == 1
    assert f"study s was measured in {trap.folder}/evil/python. Add --python {trap.folder}/evil/python" in done.stderr


def test_a_launch_in_the_readers_python_runs_no_code_of_the_study(trap: Trap) -> None:
    (trap.folder / "train.py").touch()
    done = trap.call("launch", "s", "--python", sys.executable, *LAUNCH[2:])
    assert (done.returncode, trap.executed) == (2, [])
    assert not any("evil" in line for line in trap.started())
    for named in ("a study supplies no code", "workload evil_workload:build", "remote code of", "kernel "):
        assert named in done.stderr


def test_a_run_with_a_hostile_study_does_not_take_its_python(trap: Trap) -> None:
    done = trap.call("run", "--study", "s", "--model", "tiny-llama", "--device", "cpu", "--gpus", "2")
    assert (done.returncode, trap.executed, trap.started()) == (2, [], [])
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Add --python" in done.stderr


@pytest.mark.slow
def test_a_typed_python_runs(tmp_path: Path) -> None:
    """The trap snaps."""
    trap = lay(tmp_path)
    (trap.folder / "train.py").touch()
    trap.call("launch", "s", "--python", str(trap.folder / "evil" / "python"), *LAUNCH[2:])
    assert trap.executed == ["python"]
    assert any("evil/python" in line for line in trap.started())


# -- spaces -----------------------------------------------------------------------------------------------


def test_a_hostile_space_is_refused_in_one_line(trap: Trap) -> None:
    (trap.folder / "space.yaml").write_text(space(trap.marks))
    for words in (("spaces", "validate", "space.yaml"), ("spaces", "show", "space.yaml")):
        done = trap.call(*words)
        assert (done.returncode, trap.executed, trap.started()) == (2, [], []), words
        assert controls(done.stdout + done.stderr) == []
        assert "Traceback" not in done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("aliases", ["lists", "merged", "itself"])
def test_a_small_file_that_expands_to_a_large_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], aliases: str
) -> None:
    """Ten aliases of ten aliases, and so on, are as many values as no memory holds."""
    one, many = {"lists": ("[1, 2]", "[{}]"), "merged": ("{a: 1}", "{{<<: [{}]}}"), "itself": ("[*l0]", "[{}]")}[
        aliases
    ]
    rows = [f"l0: &l0 {one}", *(f"l{n}: &l{n} {many.format(', '.join([f'*l{n - 1}'] * 9))}" for n in range(1, 12))]
    (tmp_path / "bomb.yaml").write_text("knobs:\n  zero_stage: [0]\n" + "\n".join(rows))
    monkeypatch.chdir(tmp_path)
    for words in (("spaces", "validate", "bomb.yaml"), ("run", "bomb.yaml")):
        code, _, err = call(monkeypatch, capsys, *words)
        assert (code, len(err.strip().splitlines())) == (2, 1), err
        assert ("lies within what it names" if aliases == "itself" else "expand to more than") in err


@pytest.mark.slow
def test_a_plan_of_a_hostile_model_shows_texts(trap: Trap) -> None:
    model = trap.folder / "<img src=x onerror=owned()>"
    model.mkdir()
    config = {**resolve_model("tiny-llama").config, "x": TEXT}
    (model / "config.json").write_text(json.dumps(config))
    done = trap.call("plan", "--model", str(model), "--gpu", "rtx3090", "--global-batch-size", "8", "--seq-len", "16")
    assert trap.executed == []
    assert controls(done.stdout + done.stderr) == []


@pytest.mark.parametrize(
    "words", [("report", "s"), *(pytest.param(w, marks=SLOW) for w in (("export", "s", "--format", "sbatch"),))]
)
def test_no_file_of_the_reader_is_written_through_a_link_in_the_studys_folder(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    trap, mine = lay(tmp_path), tmp_path / "bashrc"
    mine.write_text("mine")
    for name in ("s.html", "s.sbatch", "s.sbatch.meta.json"):
        (trap.study / name).symlink_to(mine)
    done = trap.call(*words)
    assert (done.returncode, mine.read_text()) == (2, "mine")
    assert "is a link" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "planted",
    [
        "create trigger t after update on studies begin delete from trials; end",
        "alter table trial_user_attributes rename to x; create view trial_user_attributes as with recursive n(i) as "
        "(select 1 union all select i + 1 from n) select i as trial_user_attribute_id, 1 as trial_id, 'k' || i as key, "
        "'1' as value_json from n",
        "alter table trial_user_attributes rename to x; create table trial_user_attributes (trial_user_attribute_id integer "
        "primary key, trial_id integer, key varchar(512), value_json text generated always as (hex(zeroblob(400000000))))",
        "create index ix on trial_user_attributes (hex(zeroblob(1000)))",
        "create index ix on trial_user_attributes (trial_id * trial_id)",
        "alter table studies add column n integer check (n > hex(zeroblob(1000)))",
        "alter table trial_heartbeats add column n integer default (random())",
    ],
    ids=[
        "trigger",
        "endless view",
        "generated column",
        "index of a function",
        "index of a product",
        "check",
        "default",
    ],
)
def test_a_study_with_a_program_in_its_database_is_refused(tmp_path: Path, planted: str) -> None:
    trap = lay(tmp_path)
    with closing(sqlite3.connect(trap.study / "study.db")) as connection:
        connection.executescript(planted)
    done = trap.call("show", "s")
    assert done.returncode == 2
    assert "that no study has: name the database of a study" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_planted_journal_deletes_no_file_of_the_reader(tmp_path: Path) -> None:
    """SQLite deletes the file that a rollback journal names as its super-journal."""
    trap, mine = lay(tmp_path), tmp_path / "thesis"
    mine.write_text("mine")
    base, name, magic = trap.study / "study.db", os.fsencode(mine), bytes.fromhex("d9d505f920a163d7")
    page_bytes = int.from_bytes(base.read_bytes()[16:18], "big")
    head = magic + struct.pack(">IIIII", 0, 1, base.stat().st_size // page_bytes, 512, page_bytes)
    tail = struct.pack(">I", 0x40000000 // page_bytes + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    journal = Path(f"{base}-journal")
    journal.write_bytes(head.ljust(512, b"\0") + tail)
    done = trap.call("show", "s")
    assert (done.returncode, mine.read_text()) == (2, "mine")
    assert "would have SQLite delete another file" in done.stderr
    with closing(sqlite3.connect(base)) as connection:  # that the trap snaps
        connection.execute("select count(*) from sqlite_master").fetchone()
    assert not mine.exists()


ODD_FILES = {
    "process memory": lambda path: path.symlink_to("/proc/self/mem"),
    "kernel text": lambda path: path.symlink_to("/proc/self/environ"),
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "sparse file": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
}


@pytest.mark.parametrize("kind", ODD_FILES)
def test_a_study_that_is_no_file_of_a_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    study_of_every_kind(tmp_path / "runs", (OutcomeKind.OK,))
    database = tmp_path / "runs/s/study.db"
    database.unlink()
    ODD_FILES[kind](database)
    for words in (("show", "s"), ("show", "s", "--storage", f"journal:{database}")):
        code, _, err = call(monkeypatch, capsys, *words)
        assert (code, len(err.strip().splitlines())) == (2, 1), err
        assert "make room" not in err
        assert "study.db" in err


@pytest.mark.timeout(120)  # a writer of the pipe never comes
@pytest.mark.parametrize("kind", ODD_FILES)
def test_an_odd_file_in_the_place_of_a_ladder_is_none(tmp_path: Path, kind: str) -> None:
    ODD_FILES[kind](ladder_path(tmp_path, "s"))
    assert stored_ladder(tmp_path, "s") == []


def test_a_link_beside_a_database_is_named(tmp_path: Path) -> None:
    trap, mine = lay(tmp_path), tmp_path / "thesis"
    mine.write_text("mine")
    with closing(sqlite3.connect(trap.study / "study.db")) as connection:
        connection.execute("pragma journal_mode = wal")
    for end in ("-wal", "-shm"):
        Path(f"{trap.study}/study.db{end}").symlink_to(mine)
    done = trap.call("show", "s")
    assert (done.returncode, mine.read_text(), len(done.stderr.strip().splitlines())) == (2, "mine", 1)
    assert "study.db-wal is a link" in done.stderr


def test_every_shadow_would_be_imported_by_a_program_in_the_folder(trap: Trap, tmp_path: Path) -> None:
    """That the planted modules leave marks."""
    subprocess.run([sys.executable, "-c", "import yaml"], cwd=trap.folder, check=True)
    assert trap.executed == ["yaml"]
    (trap.marks / "yaml").unlink()
    assert "yaml" in SHADOWS


# -- values of any type ----------------------------------------------------------------------------------------------------

MALFORMED = ("null", "-1", '"x"', "[1]", '{"a": 1}', "NaN")
COMMANDS = (("show", "s"), ("show", "s", "--json"), ("report", "s"), ("export", "s"))


@pytest.mark.parametrize(
    ("owner", "part"),
    [
        ("study", slice(0, None, 3)),
        pytest.param("study", slice(1, None, 3), marks=SLOW),
        pytest.param("study", slice(2, None, 3), marks=SLOW),
        pytest.param("trial", slice(None), marks=SLOW),
    ],
)
@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=SLOW)], ids=["values", "values-in-values"])
def test_a_malformed_value_of_a_study_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    owner: str,
    nested: bool,
    part: slice,
) -> None:
    monkeypatch.chdir(tmp_path)
    study_of_every_kind(tmp_path / "runs", (OutcomeKind.OK, OutcomeKind.CRASH))
    base, refused = tmp_path / "runs" / "s" / "study.db", 0
    good = base.read_bytes()
    with closing(sqlite3.connect(base)) as connection:
        stored = dict(connection.execute(f"select key, value_json from {owner}_user_attributes"))
    for at, (key, value) in [*enumerate(_malformed(stored, nested))][part]:
        base.write_bytes(good)
        with closing(sqlite3.connect(base)) as connection:
            connection.execute(f"update {owner}_user_attributes set value_json = ? where key = ?", (value, key))
            connection.commit()
        code, _, err = call(monkeypatch, capsys, *COMMANDS[at % len(COMMANDS)])
        assert code in (0, 2), (key, value, err)
        assert len(err.strip().splitlines()) == (code == 2), (key, value, err)
        refused += code == 2
    assert refused > 5


def test_a_deeply_nested_value_of_a_study_is_one_line(tmp_path: Path) -> None:
    trap = lay(tmp_path)
    deep = "[" * 5000 + "]" * 5000
    with closing(sqlite3.connect(trap.study / "study.db")) as connection:
        connection.execute("update study_user_attributes set value_json = ? where key = 'hardware'", (deep,))
        connection.commit()
    done = trap.call("show", "s")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "RecursionError" in done.stderr


def _malformed(stored: dict[str, str], nested: bool) -> Iterator[tuple[str, str]]:
    """Yield (key, value in JSON): each value, or each value of each object, replaced by each malformed one."""
    for key, text in stored.items():
        value = json.loads(text)
        for bad in MALFORMED:
            if not nested:
                yield key, bad
            elif isinstance(value, dict):
                for name in value:
                    kept = json.dumps({other: one for other, one in value.items() if other != name})
                    yield key, f'{kept[:-1]}{"," * (len(value) > 1)} "{name}": {bad}}}'


def test_a_linked_folder_of_a_study_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    study_of_every_kind(tmp_path / "runs", (OutcomeKind.OK,))
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs" / "s" / "logs").symlink_to(tmp_path / "disk")
    code, _, err = call(monkeypatch, capsys, "report", "s")
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "runs/s/logs is a link" in err
