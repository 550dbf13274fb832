"""What a script in a trial writes, makes and removes leaves the user's files as they were."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import sqlite3
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from autotune.linux import started_at
from autotune.rank.hooks.patches import Patches
from autotune.rank.links import MAKING, Links, link_entries
from autotune.rank.made import Made, trial_of_mine
from autotune.rank.writes import Writes

FORK = multiprocessing.get_context("fork")


class Project:
    """A user's folder, and a trial's that shows it."""

    def __init__(self, root: Path) -> None:
        self.root, self.study = root / "project", root / "project" / "runs" / "mine"
        self.cwd = self.root
        self.scratch = self.study / "trials" / "1" / "scratch"
        for name in (
            "log.txt",
            "out/old/vocab.json",
            "out/model.pt",
            "out/old/a.txt",
            "out/old/deep/b.txt",
            "data/1.bin",
            "train.py",
        ):
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"the user's {name}")
        (self.root / "out" / "latest").symlink_to("old")
        (self.root / "out" / "empty").mkdir()
        (self.root / "gone").symlink_to(self.root / "nowhere")
        self.by = trial_of_mine(self.scratch)
        self.anew()

    def anew(self) -> None:
        self.scratch.mkdir(parents=True)
        link_entries(str(self.scratch), str(self.root), lambda entry: entry.name == "runs")

    def theirs(self) -> dict[str, str]:
        """All that the user has, with its content, mode and time."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            if "runs" not in path.parts:
                kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "a folder"
                found[str(path.relative_to(self.root))] = f"{kind} {path.lstat().st_mode} {path.lstat().st_mtime_ns}"
        return found

    def start(self, text: str, script: Path | None = None) -> Callable[[], list[str]]:
        """Runs the text in a rank's place; what is given waits for its end and says what was refused, what was told, and how it
        failed."""
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=self._run, args=(textwrap.dedent(text), script or self.root / "train.py", theirs))
        process.start()

        def end() -> list[str]:
            said: list[str] = ours.recv()
            process.join()
            Made(self.study, self.by).settle()
            return said

        return end

    def run(self, text: str, script: Path | None = None) -> list[str]:
        return self.start(text, script)()

    def _run(self, text: str, script: Path, pipe: Any) -> None:
        said: list[str] = []
        try:
            os.chdir(self.scratch)
            writes = Writes(Links(self.scratch), self.cwd, script, Made(self.study, self.by), _refuse)
            writes.install(Patches())
            exec(compile(text, str(script), "exec"), {"__file__": str(script), "__name__": "__main__"})
            said += [f"left {os.path.relpath(path, self.root)}" for path in writes.left()]
        except Refused as refused:
            said.append(f"refused {os.path.relpath(str(refused), self.root)}")
        except BaseException:
            said.append(traceback.format_exc())
        pipe.send(said)


class Refused(BaseException):
    """In place of the rank's end."""


def _refuse(path: str) -> None:
    raise Refused(path)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path.resolve())


WAYS = {
    "empties": "open('log.txt', 'w').write('mine'); assert open('log.txt').read() == 'mine'",
    "appends": "open('log.txt', 'a').write('!'); assert open('log.txt').read() == \"the user's log.txt!\"",
    "in place": "f = open('log.txt', 'r+b'); f.write(b'THE'); f.close(); assert open('log.txt').read().startswith('THE user')",
    "by a descriptor": "import os; os.write(os.open('out/model.pt', os.O_WRONLY | os.O_TRUNC), b'x')",
    "deep": "open('out/old/deep/b.txt', 'w').close(); assert open('out/old/a.txt').read()",
    "pathlib": "from pathlib import Path; Path('out/new.txt').write_text('x'); assert Path('out/new.txt').exists()",
    "back up through a link": "open('out/../log.txt', 'w').write('x'); assert open('log.txt').read() == 'x'",
    "its own absolute path": "import os; open(os.path.abspath('out/model.pt'), 'w').write('x')",
    "resolved": "from pathlib import Path; p = Path('log.txt').resolve(); p.write_text('x'); assert open('log.txt').read() == 'x'",
    "resolved through a neighbour": "import os; p = os.path.realpath('out/latest'); assert p.endswith('out/old'); open(p + '/a.txt', 'w')",
    "resolved, a folder": "from pathlib import Path; (Path('out').resolve(strict=True) / 'new').touch(); assert Path('out/new').exists()",
    "makes a folder": "import os; os.makedirs('out/x/y', exist_ok=True); open('out/x/y/z', 'w').close()",
    "removes": "import os; os.remove('out/model.pt'); assert sorted(os.listdir('out')) == ['empty', 'latest', 'old']",
    "removes a tree": "import shutil; shutil.rmtree('out/old'); import os; assert not os.path.exists('out/old')",
    "removes a tree at the top": "import shutil, os; shutil.rmtree('out'); os.mkdir('out'); assert not os.listdir('out')",
    "removes a folder": "import os; os.rmdir('out/empty'); assert not os.path.exists('out/empty')",
    "renames a file": "import os; os.rename('out/model.pt', 'out/best.pt'); open('out/best.pt', 'a').write('x')",
    "renames a folder": "import os; os.rename('out/old', 'out/older'); open('out/older/a.txt', 'w').close()",
    "replaces a file": "import os; open('t', 'w').write('x'); os.replace('t', 'out/model.pt'); assert open('out/model.pt').read() == 'x'",
    "moves into a folder": "import shutil; shutil.move('log.txt', 'out/old')",
    "copies over": "import shutil; shutil.copy('log.txt', 'out/model.pt'); assert 'log' in open('out/model.pt').read()",
    "copies a tree over": "import shutil; shutil.copytree('data', 'out/old', dirs_exist_ok=True)",
    "links": "import os; os.link('log.txt', 'out/again'); open('out/again', 'a').write('x')",
    "links symbolically": "import os; os.remove('out/latest'); os.symlink('empty', 'out/latest'); open('out/latest/x', 'w').close()",
    "through a neighbour": "open('out/latest/a.txt', 'w').write('x'); assert open('out/old/a.txt').read() == 'x'",
    "through a link of its own": "import os; os.symlink('out', 'there'); open('there/model.pt', 'w').write('x'); assert open('out/model.pt').read() == 'x'",
    "where a link leads nowhere": "open('gone', 'w').write('x'); assert open('gone').read() == 'x'",
    "truncates": "import os; os.truncate('log.txt', 3); assert open('log.txt').read() == 'the'",
    "changes the mode": "import os; os.chmod('log.txt', 0o600); os.chmod('out', 0o700)",
    "touches": "from pathlib import Path; Path('log.txt').touch(); Path('data').touch()",
    "from inside": "import os; os.chdir('out/old'); open('a.txt', 'w').close(); open('../model.pt', 'w').close()",
    "of a descriptor of a folder": "import os; fd = os.open('out', os.O_RDONLY | os.O_DIRECTORY); os.remove('model.pt', dir_fd=fd)",
    "a temporary file": "import tempfile; tempfile.mkdtemp(dir='out'); tempfile.NamedTemporaryFile(dir='data', delete=False)",
    "a database": "import sqlite3; c = sqlite3.connect('out/new.db'); c.execute('create table t (x)'); c.commit()",
    "a child in a folder": "import subprocess; subprocess.run(['touch', 'new'], cwd='out', check=True)",
    "a forked child": "import os; pid = os.fork()\nif not pid:\n    open('log.txt', 'w').close(); os._exit(0)\nos.waitpid(pid, 0)",
    "a thread": "import threading; t = threading.Thread(target=lambda: open('log.txt', 'w').write('x')); t.start(); t.join()",
    "bytes": "import os; open(b'log.txt', 'w').close(); os.mkdir(b'out/b')",
    "goes where it has made a folder": "import os; os.mkdir('new'); here = os.path.dirname(__file__); os.chdir(here + '/new'); open('x', 'w').close()",
    "makes the folder of the script its own": "import os; os.chdir(os.path.dirname(os.path.abspath(__file__))); open('log.txt', 'w').close(); open('data/new', 'w').close()",
    "goes below the folder of the script": "import os; os.chdir(os.path.dirname(__file__) + '/out'); open('model.pt', 'w').close()",
}  # fmt: skip
COMMANDS = [
    "rm -rf out/*",
    "rm -r out/old/",
    "rm out/ol*/a.txt",
    "rm -rf 'out/old' data",
    "find out/ -name '*.pt' -delete",
    "cd out && rm -rf *",
    "mv out/model.pt out/best.pt; mv log.txt out",
    "cp data/1.bin out/model.pt",
    "mkdir -p out/x/y && touch out/x/y/z log.txt",
    "echo new > out/model.pt",
    "echo new >>log.txt 2>/dev/null",
    "echo new | tee out/old/deep/b.txt",
    "sed -i s/user/me/ log.txt",
    "dd if=/dev/zero of=out/model.pt count=1 2>/dev/null",
    "X=out; export X; mkdir out/new",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_a_script_starts(project: Project, command: str) -> None:
    before = project.theirs()
    for start in (
        f"import os; assert not os.system({command!r})",
        f"import subprocess; subprocess.run({command!r}, shell=True)",
    ):
        assert project.run(start) == []
        assert project.theirs() == before
        project.scratch.rename(project.study / f"over-{len(os.listdir(project.study))}")
        project.anew()


def test_a_command_in_words_and_from_another_folder(project: Project) -> None:
    before = project.theirs()
    assert project.run("import subprocess; subprocess.check_call(['rm', '-r', 'old/deep'], cwd='out')") == []
    assert project.run("import subprocess, sys; subprocess.check_call(['/bin/cp', 'log.txt', 'out/model.pt'])") == []
    assert project.theirs() == before


def test_a_command_that_only_reads_makes_nothing_its_own(project: Project) -> None:
    assert (
        project.run(
            "import os; os.system('cat out/model.pt >/dev/null; ls out; cp -r data out/empty; find data/ -name x')"
        )
        == []
    )
    assert (project.scratch / "data").is_symlink()
    assert (project.scratch / "out" / "model.pt").is_symlink()


@pytest.mark.parametrize("way", WAYS)
def test_whatever_way_a_script_writes_by(project: Project, way: str) -> None:
    before = project.theirs()
    assert project.run(WAYS[way]) == []
    assert project.theirs() == before


FAILS = {
    "a new file where there is one": ("open('log.txt', 'x')", "FileExistsError"),
    "a folder where there is one": ("import os; os.mkdir('out')", "FileExistsError"),
    "a folder removed that holds something": ("import os; os.rmdir('out')", "OSError"),
    "a file in a folder that is none": ("open('none/x', 'w')", "FileNotFoundError"),
    "no path": ("open('log\\0txt', 'w')", "ValueError"),
}


@pytest.mark.parametrize("way", FAILS)
def test_what_fails_fails_as_ever(project: Project, way: str) -> None:
    before = project.theirs()
    text, error = FAILS[way]
    (said,) = project.run(text)
    assert said.splitlines()[-1].startswith(error)
    assert project.theirs() == before


def test_reading_makes_nothing_its_own(project: Project) -> None:
    before = sorted(os.listdir(project.scratch))
    text = "import os; open('log.txt').read(); os.listdir('out'); open('out/old/a.txt', 'rb'); os.stat('data')"
    assert project.run(text) == []
    assert sorted(os.listdir(project.scratch)) == before
    assert (project.scratch / "out").is_symlink()


def test_a_folder_that_is_there_and_made_again_stays_as_it_is(project: Project) -> None:
    """`os.walk` finds the folders in it, and nothing is linked entry by entry."""
    text = """
        import os
        from pathlib import Path
        os.makedirs("out", exist_ok=True)
        Path("data").mkdir(exist_ok=True)
        assert sorted(path.name for path in Path("out").rglob("*.txt")) == ["a.txt", "b.txt"]
        """
    assert project.run(text) == []
    assert (project.scratch / "out").is_symlink()
    assert (project.scratch / "data").is_symlink()


def test_what_leads_out_of_the_folders_that_are_shown_is_resolved_as_ever(project: Project) -> None:
    (project.root.parent / "far").mkdir()
    (project.scratch / "far").symlink_to(project.root.parent / "far")
    text = f"""
        import os
        assert os.path.realpath("far") == os.path.realpath({str(project.scratch / "far")!r}) == {str(project.root.parent / "far")!r}
        assert os.path.realpath({str(project.root / "data")!r}) == {str(project.root / "data")!r}
        assert os.path.realpath("new/x") == os.path.abspath("new/x")
        assert os.path.realpath(filename=b"data") == {str(project.root / "data")!r}.encode()
        """
    assert project.run(text) == []


def test_one_level_and_only_where_something_is_written(project: Project) -> None:
    assert project.run("open('out/new', 'w')") == []
    out = project.scratch / "out"
    assert not out.is_symlink()
    assert (out / "old").is_symlink()
    assert (project.scratch / "data").is_symlink()


def test_ranks_that_write_at_once(project: Project) -> None:
    """They share the folder; none finds a name missing that is there, and nothing of another is lost."""
    for number in range(500):
        (project.root / "data" / f"{number}.txt").write_text("")
    before = project.theirs()
    text = """
        import os
        while not os.path.exists('go'):
            pass
        for number in range(100):
            os.makedirs(f'data/{number % 7}', exist_ok=True)
            open(f'data/{number % 7}/RANK-{number}', 'w').write('x')
            open('out/old/a.txt', 'a').write('x')
            assert os.path.exists('data/499.txt') and open('data/1.bin').read()
        """
    ends = [project.start(text.replace("RANK", str(rank))) for rank in range(4)]
    (project.scratch / "go").write_text("")
    assert [end() for end in ends] == [[]] * 4
    assert project.theirs() == before
    assert len(list((project.scratch / "data").glob("?/*-*"))) == 400
    assert (project.scratch / "out/old/a.txt").read_text() == "the user's out/old/a.txt" + 400 * "x"
    assert [path.name for path in (project.scratch / ".autotune-links").iterdir()] == ["lock"]


def test_a_kernel_that_cannot_exchange_two_names(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.rank.links.ctypes.CDLL", lambda _: None)
    before = project.theirs()
    assert project.run("open('out/old/a.txt', 'w').write('x'); assert open('out/old/a.txt').read() == 'x'") == []
    assert project.theirs() == before


def test_who_writes_waits_where_two_names_cannot_be_exchanged(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(made: str, link: str) -> None:
        os.unlink(link)
        time.sleep(0.3)
        os.rename(made, link)

    monkeypatch.setattr("autotune.rank.links._exchange", exchange)
    first = project.start("open('out/a', 'w').close()")
    while (project.scratch / "out").is_symlink():
        pass
    assert project.run("open('out/b', 'w').close()") == []
    assert first() == []
    assert {"a", "b", "model.pt"} <= set(os.listdir(project.scratch / "out"))


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_file_system_without_locks(project: Project, monkeypatch: pytest.MonkeyPatch, everywhere: bool) -> None:
    """There one of the machine's own stands in, and where that has none either ranks go on without."""
    took, theirs = project.root.parent / "tmp", fcntl.flock
    took.mkdir()

    def flock(lock: int, how: int) -> None:
        if everywhere or ".autotune-links" in os.readlink(f"/proc/self/fd/{lock}"):
            raise OSError(errno.ENOLCK, "No locks available")
        theirs(lock, how)

    monkeypatch.setattr("autotune.rank.links.fcntl.flock", flock)
    monkeypatch.setattr("tempfile.tempdir", str(took))
    before = project.theirs()
    assert project.run("open('out/old/a.txt', 'w').write('x'); assert open('out/old/a.txt').read() == 'x'") == []
    assert project.theirs() == before
    assert os.listdir(took) == [f"autotune-links-{os.getuid()}"]


def test_a_copy_that_the_disk_has_no_room_for_is_an_error_before_anything_is_written(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.rank.links._FREE_LEFT", 0.0)
    before = project.theirs()
    (said,) = project.run("open('log.txt', 'a').write('x')")
    assert "OSError: [Errno 28] No space" in said
    assert project.theirs() == before


READS = "import sqlite3; c = sqlite3.connect(WHERE); assert c.execute('select x from t').fetchall() == [(1,)]\n"
INSERTS = READS + "c.execute('insert into t values (2)'); c.commit()"
DATABASES = ["'data/x.db'", "'file:data/x.db?mode=rw&cache=private', uri=True", "b'data/x.db', 5.0"]


@pytest.fixture
def database(project: Project) -> Path:
    where = project.root / "data" / "x.db"
    with closing(sqlite3.connect(where)) as connection:
        connection.executescript("create table t (x); insert into t values (1)")
    return where


@pytest.mark.parametrize("where", DATABASES)
@pytest.mark.parametrize("scarce", ["_MOST_DATABASE_BYTES", "_FREE_LEFT"])
def test_a_database_that_cannot_be_copied_is_only_read(
    project: Project, database: Path, monkeypatch: pytest.MonkeyPatch, where: str, scarce: str
) -> None:
    module = "writes" if scarce == "_MOST_DATABASE_BYTES" else "links"
    monkeypatch.setattr(f"autotune.rank.{module}.{scarce}", 1 if module == "writes" else 0.0)
    before = project.theirs()
    assert project.run(READS.replace("WHERE", where)) == []
    (said,) = project.run(INSERTS.replace("WHERE", where))
    assert "attempt to write a readonly database" in said
    assert project.theirs() == before


@pytest.mark.parametrize("shares", [True, False])
def test_a_file_is_copied_by_sharing_its_blocks_where_the_disk_can(
    project: Project, database: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    """However large; the call of the kernel's is played."""

    def ioctl(ours: Any, code: int, theirs: int) -> None:
        if not shares:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        ours.write(os.read(theirs, 1 << 20))

    monkeypatch.setattr("autotune.rank.links.fcntl.ioctl", ioctl)
    monkeypatch.setattr("autotune.rank.links.shutil.copy2", lambda *_: pytest.fail("copied"))
    monkeypatch.setattr("autotune.rank.writes._MOST_DATABASE_BYTES", 1)
    before = project.theirs()
    said = project.run(INSERTS.replace("WHERE", "'data/x.db'"))
    assert (said == []) is shares
    assert project.theirs() == before


def test_a_database_by_an_absolute_path_is_told_where_it_is_changed(project: Project, database: Path) -> None:
    assert project.run(READS.replace("WHERE", repr(str(database)))) == []
    assert project.run(INSERTS.replace("WHERE", repr(str(database)))) == ["left data/x.db"]
    new = repr(str(project.root / "new.db"))
    makes = f"import sqlite3; c = sqlite3.connect({new}); c.execute('create table if not exists t (x)'); c.commit(); c.close()"
    assert [project.run(makes), project.run(f"import os; os.remove({new})")] == [["left new.db"], []]


def test_a_device_is_written_to(project: Project) -> None:
    (project.root / "null").symlink_to(os.devnull)
    (project.scratch / "null").symlink_to(project.root / "null")
    assert project.run("open('null', 'w').write('x')") == []
    assert (project.scratch / "null").is_symlink()


# -- absolute paths --------------------------------------------------------------------------------------------------------

LOSES = {
    "overwrites": ("open(HERE / 'log.txt', 'w')", "log.txt"),
    "removes": ("(HERE / 'log.txt').unlink()", "log.txt"),
    "removes a tree": ("import shutil; shutil.rmtree(HERE / 'out')", "out"),
    "renames": ("(HERE / 'out').rename(HERE / 'out2')", "out"),
    "renames over": ("(HERE / 'new').write_text('x'); (HERE / 'new').replace(HERE / 'log.txt')", "log.txt"),
    "truncates": ("import os; os.truncate(HERE / 'log.txt', 0)", "log.txt"),
}


@pytest.mark.parametrize("way", LOSES)
def test_what_would_be_lost_by_an_absolute_path_is_refused(project: Project, way: str) -> None:
    before = project.theirs()
    text, path = LOSES[way]
    assert project.run(f"from pathlib import Path\nHERE = Path(__file__).parent\n{text}") == [f"refused {path}"]
    after = project.theirs()
    after.pop("new", None)
    assert after == before


def test_what_a_trial_has_made_the_next_may_overwrite_and_it_is_told(project: Project) -> None:
    text = """
        import shutil
        from pathlib import Path
        here = Path(__file__).parent
        (here / "made").mkdir(exist_ok=True)
        (here / "made" / "log.txt").write_text("x")
        (here / "new.txt").open("w").write("x")
        (here / "new.txt").replace(here / "newer.txt")
        (here / "train.py").open("a").close()
        """
    told = ["left made", "left made/log.txt", "left newer.txt", "left train.py"]
    assert project.run(text) == told
    assert project.run(textwrap.dedent(text) + "shutil.rmtree(here / 'made')") == told[2:]


MAKES = """
    import os, shutil
    from pathlib import Path
    made = Path(__file__).parent / "made"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    (made / "log.txt").write_text("a trial's")
    (made / "log.txt").open("a").write("!")
    os.mkdir(made / "deep")
    os.system(f"cp {made}/log.txt {made}/deep/copy; ln -s copy {made}/deep/link")
    """


def test_what_the_user_has_trained_into_since_is_theirs(project: Project) -> None:
    made = project.root / "made"
    names = ("", "/deep", "/deep/copy", "/deep/link", "/log.txt")
    assert project.run(MAKES)[:1] == ["left made"]
    assert project.run(MAKES) == [f"left made{name}" for name in names], "whatever wrote it in the trial's folder"
    (made / "deep" / "weights").write_text("of days")
    assert project.run(MAKES) == ["refused made"]
    assert project.run("") == ["left made/deep/copy", "left made/deep/link", "left made/log.txt"]
    (made / "deep" / "weights").rename(made / "log.txt")
    for text in ("here.write_text('')", "here.unlink()", "here.rename('x')", "import os; os.truncate(here, 0)"):
        said = project.run(f"from pathlib import Path; here = Path({str(made / 'log.txt')!r}); {text}")
        assert said == ["refused made/log.txt"]
    assert (made / "log.txt").read_text() == "of days"


def test_a_trial_that_adds_to_what_trials_made_leaves_it_theirs(project: Project) -> None:
    here = f"here = {str(project.root / 'made.txt')!r}; "
    assert project.run(f"{here}open(here, 'w').write('x')") == ["left made.txt"]
    commands = "os.system(f'cp train.py {here}')", "os.system(f'cp train.py new; mv new {here}')", "os.utime(here)"
    for text in (
        *(f"import os; {command}" for command in commands),
        "open(here, 'r+').write('xxxx')",
        "open(here, 'w').write('')",
    ):
        assert project.run(here + text) == ["left made.txt"]
    assert project.run(f"{here}open(here, 'a').write('x')") == ["left made.txt"]
    assert project.run(f"import os; {here}os.remove(here)") == []
    (project.root / "made.txt").write_text("the user's")
    assert project.run(f"{here}open(here, 'w')") == ["refused made.txt"]


def test_an_empty_file_that_a_trial_has_opened_is_the_users_once_they_fill_it(project: Project) -> None:
    (project.root / "empty.txt").touch()
    text = f"open({str(project.root / 'empty.txt')!r}, 'w')"
    assert project.run(text) == ["left empty.txt"]
    (project.root / "empty.txt").write_text("the user's")
    assert project.run(text) == ["refused empty.txt"]


@pytest.mark.parametrize("lives", [True, False])
def test_what_a_trial_of_another_tuner_is_making_is_a_trials_while_that_lives(project: Project, lives: bool) -> None:
    """One that was killed has not said how it left what it made."""
    other = FORK.Process(target=time.sleep, args=(600,))
    other.start()
    assert other.pid is not None
    host, _, _, folder = json.loads(project.by)
    (project.root / "made.txt").write_text("of another")
    Made(project.study, json.dumps([host, other.pid, started_at(other.pid), folder])).add(f"{project.root}/made.txt")
    if not lives:
        other.kill()
        other.join()
    said = project.run(f"open({str(project.root / 'made.txt')!r}, 'w')")
    other.kill()
    assert said == (["left made.txt"] if lives else ["refused made.txt"])


def test_a_torn_line_of_the_record_takes_no_other_along(project: Project) -> None:
    path = str(project.root / "made.txt")
    Made(project.study, project.by).add(str(project.root / "other.txt"))
    with (project.study / "made-outside.jsonl").open("a") as record:
        record.write('{"path": "/a/full/di')
    Made(project.study, project.by).add(path)
    Path(path).write_text("x")
    assert Made(project.study, project.by).holds(path, bool)


def test_trials_at_once_that_make_the_same_file(project: Project) -> None:
    """Slots of one call: what the first to end has noted is then changed by the other."""
    path = str(project.root / "same.txt")
    here, beside = (Made(project.study, trial_of_mine(project.study / name)) for name in ("1", "beside-2"))
    for slot, others in ((here, beside), (beside, here)):
        assert not os.path.exists(path) or slot.holds(path, bool)
        slot.add(path)
        Path(path).write_text("x")
        assert others.holds(path, bool)
    here.settle()
    Path(path).write_text("of the other's end")
    assert beside.holds(path, bool)
    assert Made(project.study, project.by).holds(path, bool)
    beside.settle()
    assert Made(project.study, project.by).holds(path, bool)
    Path(path).write_text("the user's")
    assert not Made(project.study, project.by).holds(path, bool)


def test_a_record_of_an_earlier_version_vouches_for_nothing(project: Project) -> None:
    (project.study / "made-outside.jsonl").write_text(json.dumps(str(project.root / "log.txt")) + "\n")
    assert project.run(f"open({str(project.root / 'log.txt')!r}, 'w')") == ["refused log.txt"]


def test_caches_below_the_users_folder_are_their_own(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(project.root / "hub"))
    monkeypatch.setenv("PROJECT_HOME", str(project.root))
    for name in (".cache/refs", "hub/refs", "pkg/__pycache__/a.pyc", "venv/lib/site-packages/x"):
        (project.root / name).parent.mkdir(parents=True)
        (project.root / name).write_text("old")
        text = f"import os; open(os.path.dirname(__file__) + '/{name}', 'w').write('new')"
        assert project.run(text) == []
    assert project.run("import os; open(os.path.dirname(__file__) + '/log.txt', 'w')") == ["refused log.txt"]


def test_a_script_from_elsewhere(project: Project, tmp_path: Path) -> None:
    """Its folder is shown as well, once it makes that the current one."""
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    (script.parent / "log.txt").write_text("old")
    goes = "import os; os.chdir(os.path.dirname(__file__)); "
    assert project.run(f"{goes}open('log.txt', 'w').write('x'); assert open('log.txt').read() == 'x'", script) == []
    assert project.run("import os; os.remove(os.path.dirname(__file__) + '/log.txt')", script) == [
        f"refused {os.path.relpath(tmp_path / 'scripts' / 'log.txt', project.root)}"
    ]
    assert (script.parent / "log.txt").read_text() == "old"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk of the cluster's: neither the folder of the call nor the script's, nor a temporary one, as `/tmp` is."""
    monkeypatch.setattr("autotune.rank.writes._PASSING", (str(tmp_path / "tmp"),))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    found = tmp_path.resolve() / "scratch" / "me"
    for name in ("out/checkpoint-1/w.bin", "out/model.pt", "log.txt"):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(f"the user's {name}")
    (found / "out" / "empty").touch()
    return found


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


LOSES_ELSEWHERE = {
    "overwrites": ("open(THERE / 'log.txt', 'w')", "log.txt"),
    "removes": ("(THERE / 'log.txt').unlink()", "log.txt"),
    "removes a checkpoint": ("import shutil; shutil.rmtree(THERE / 'out' / 'checkpoint-1')", "out/checkpoint-1"),
    "renames away": ("(THERE / 'out').rename(THERE / 'out2')", "out"),
    "renames over": ("(THERE / 'new').write_text('x'); (THERE / 'new').replace(THERE / 'log.txt')", "log.txt"),
    "truncates": ("import os; os.truncate(THERE / 'log.txt', 0)", "log.txt"),
    "from C++": ("import torch; torch.save({}, THERE / 'out' / 'model.pt')", "out/model.pt"),
    "rm": ("import os; os.system(f'rm -rf {THERE}/out/checkpoint-*')", "out/checkpoint-1"),
    "mv": ("import os; os.system(f'cd /; A=b mv {THERE}/log.txt {THERE}/new.txt')", "log.txt"),
    "mv over": ("import subprocess; subprocess.run(['mv', f'{THERE}/out/empty', f'{THERE}/log.txt'])", "log.txt"),
    "cp": ("import subprocess; subprocess.run(['cp', __file__, f'{THERE}/log.txt'])", "log.txt"),
    "a shell's >": ("import os; os.system(f'echo new > {THERE}/log.txt')", "log.txt"),
    "tee": ("import os; os.system(f'echo new | tee {THERE}/log.txt')", "log.txt"),
    "dd": ("import os; os.system(f'dd if=/dev/zero of={THERE}/log.txt count=1')", "log.txt"),
}


@pytest.mark.parametrize("way", LOSES_ELSEWHERE)
def test_what_would_be_lost_elsewhere_is_refused(project: Project, elsewhere: Path, way: str) -> None:
    before = content(elsewhere)
    text, path = LOSES_ELSEWHERE[way]
    said = project.run(f"from pathlib import Path\nTHERE = Path({str(elsewhere)!r})\n{text}")
    assert said == [f"refused {os.path.relpath(elsewhere / path, project.root)}"]
    after = content(elsewhere)
    after.pop("new", None)
    assert after == before


def test_commands_that_take_nothing_away(project: Project, elsewhere: Path) -> None:
    before = content(elsewhere)
    text = f"""
        import os
        for command in (
            "mkdir -p THERE/out", "ls THERE >/dev/null", "cd THERE/out && ls >/dev/null", "true >> THERE/log.txt",
            "printf '' | tee -a THERE/log.txt", "cp train.py THERE/out", "cp -n train.py THERE/log.txt || true",
            "touch THERE/log.txt", "echo rm THERE/log.txt >/dev/null",
        ):
            assert not os.system(command.replace("THERE", {str(elsewhere)!r})), command
        """
    assert [one for one in project.run(text) if not one.startswith("left")] == []
    assert {**content(elsewhere), "out/train.py": ""} == {**before, "out/train.py": ""}


def test_elsewhere_a_script_makes_and_adds(project: Project, elsewhere: Path) -> None:
    """What an earlier trial made goes with a later one; a log grows; a file that is empty loses nothing, nor does what a
    trial has written into it."""
    text = f"""
        import shutil
        from pathlib import Path
        there = Path({str(elsewhere)!r})
        shutil.rmtree(there / "out" / "checkpoint-2", ignore_errors=True)
        (there / "out" / "checkpoint-2").mkdir()
        (there / "out" / "checkpoint-2" / "w.bin").write_text("x")
        (there / "log.txt").open("a").write("!")
        (there / "out" / "empty").write_text("x")
        """
    names = ("log.txt", "out/checkpoint-2", "out/checkpoint-2/w.bin", "out/empty")
    told = [f"left {os.path.relpath(elsewhere / name, project.root)}" for name in names]
    assert [project.run(text), project.run(text)] == [told, told]
    assert (elsewhere / "log.txt").read_text() == "the user's log.txt!!"


def test_caches_elsewhere_are_their_own(project: Project, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(elsewhere / "hf"))
    monkeypatch.setenv("HOME", str(elsewhere))
    monkeypatch.setenv("MY_TMP", str(elsewhere))
    monkeypatch.setenv("ZZ_HOME", str(elsewhere / "hf"))
    monkeypatch.setenv("PROJECT_HOME", str(elsewhere / "out"))
    cached = ("hub/models--a--b/refs/main", ".cache/x", "hf/token", "data/cache-0f3a.arrow", "zero_stage_3/rank0/p.swp")
    for name in (*cached, "../../tmp/x", "late/x"):
        (elsewhere / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / name).write_text("old")
        names_it = f"os.environ['TORCH_HOME'] = {str(elsewhere / 'late')!r}; " if "late" in name else ""
        assert project.run(f"import os; {names_it}open({os.path.normpath(elsewhere / name)!r}, 'w').write('new')") == []
        assert (elsewhere / name).read_text() == "new"
    for name in ("log.txt", "out/model.pt"):  # whatever MY_TMP and PROJECT_HOME say
        assert project.run(f"open({str(elsewhere / name)!r}, 'w')")[0].startswith("refused")


# -- the folders above the current one ---------------------------------------------------------------------------------------


class Below(Project):
    """The user calls from `project/out/old`, and the trial shows what is above, too."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.whole = self.study / "scratch"
        (self.whole / MAKING).mkdir(parents=True)
        link_entries(str(self.whole), str(self.root), lambda entry: entry.name in ("runs", "out"))
        (self.whole / "out").mkdir()
        link_entries(str(self.whole / "out"), str(self.root / "out"), lambda entry: entry.name == "old")
        self.scratch, self.cwd = self.whole / "out" / "old", self.root / "out" / "old"
        self.scratch.mkdir()
        link_entries(str(self.scratch), str(self.cwd))


@pytest.fixture
def below(tmp_path: Path) -> Below:
    return Below(tmp_path.resolve())


WAYS_ABOVE = {
    "overwrites": "open('../../log.txt', 'w').write('x'); assert open('../../log.txt').read() == 'x'",
    "beside": "open('../model.pt', 'a').write('x'); open('../new', 'w').close(); assert open('../new').read() == ''",
    "in a folder": "open('../../data/new', 'w').close(); import os; assert sorted(os.listdir('../../data')) == ['1.bin', 'new']",
    "makes a folder": "import os; os.makedirs('../../results/x', exist_ok=True); open('../../results/x/y', 'w').close()",
    "removes": "import shutil; shutil.rmtree('../empty'); shutil.rmtree('../../data')",
    "by a command": "import os; assert not os.system('rm -r ../../data && echo x > ../../log.txt')",
    "by pathlib": "from pathlib import Path; (Path.cwd().parent.parent / 'log.txt').write_text('x')",
    "resolved": "from pathlib import Path; Path('../../log.txt').resolve().write_text('x'); assert open('../../log.txt').read() == 'x'",
    "resolved folders": "from pathlib import Path; (Path('../..').resolve() / 'log.txt').write_text('x')",
    "through a link": "open('../latest/a.txt', 'w').write('x'); assert open('a.txt').read() == 'x'",
    "goes there": "import os; os.chdir('../..'); open('log.txt', 'w').close(); os.chdir('out/old'); open('a.txt', 'w').close()",
    "goes to the script's": "import os; up = os.path.abspath('../..'); os.chdir(os.path.dirname(__file__)); assert os.getcwd() == up; open('log.txt', 'w').close()",
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS_ABOVE)
def test_what_lies_above_the_current_folder_is_left_as_it_was(below: Below, way: str) -> None:
    before = below.theirs()
    assert below.run(WAYS_ABOVE[way]) == []
    assert below.theirs() == before


def test_what_lies_above_is_still_refused_by_an_absolute_path(below: Below) -> None:
    assert below.run("import os; open(os.path.dirname(__file__) + '/log.txt', 'w')") == ["refused log.txt"]


# -- writers that Python does not hear of ------------------------------------------------------------------------------------

NATIVE = {
    "torch": "import torch; torch.save({}, 'out/model.pt'); torch.save(torch.ones(2), 'out/old/a.txt')",
    "a script of torch's": "import torch; torch.jit.script(torch.nn.Linear(1, 1)).save('out/model.pt')",
    "safetensors": "import torch; from safetensors.torch import save_file; save_file({'a': torch.ones(1)}, 'out/model.pt')",
    "Parquet": "import pyarrow as pa, pyarrow.parquet as pq; pq.write_table(pa.table({'a': [1]}), 'out/model.pt')",
    "CSV": "import pyarrow as pa, pyarrow.csv as csv; csv.write_csv(pa.table({'a': [1]}), 'out/model.pt')",
    "a tokenizer": "from tokenizers import Tokenizer, models as m; Tokenizer(m.BPE()).save('out/model.pt')",
    "a vocabulary": "from tokenizers import Tokenizer, models as m; Tokenizer(m.BPE()).model.save('out/old')",
    "a shelf": "import shelve; shelf = shelve.open('out/shelf'); shelf['a'] = 1; shelf.close()",
    "arrays": "import numpy; numpy.save('out/model.pt.npy', numpy.ones(2)); numpy.ones(2).tofile('out/model.pt')",
    "a map of memory": "import numpy; numpy.memmap('log.txt', dtype='u1')[:3] = 0",
}


@pytest.mark.parametrize("way", NATIVE)
def test_native_writers(project: Project, way: str) -> None:
    before = project.theirs()
    assert project.run(NATIVE[way]) == []
    assert project.theirs() == before


@pytest.mark.parametrize(
    "asks", ["", "import importlib.util as u; assert u.find_spec('h5py') and u.find_spec('h5py'); "]
)
def test_a_native_writer_that_is_imported_later(project: Project, monkeypatch: pytest.MonkeyPatch, asks: str) -> None:
    """As h5py, in whose place stands a module that writes where Python does not hear it. Transformers asks whether there are
    such modules, long before one is imported."""
    text = """
        class File:
            def __init__(self, name, mode="r"):
                import ctypes
                if mode != "r":
                    libc = ctypes.CDLL(None)
                    libc.close(libc.creat(name.encode(), 0o600))
        """
    (project.root.parent / "h5py.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(project.root.parent))
    monkeypatch.delitem(sys.modules, "h5py", raising=False)
    before = project.theirs()
    assert project.run(asks + "import h5py; h5py.File('log.txt'); h5py.File('out/model.pt', mode='w')") == []
    assert project.theirs() == before
    assert (project.scratch / "log.txt").is_symlink()
    assert (project.scratch / "out" / "model.pt").read_text() == ""
