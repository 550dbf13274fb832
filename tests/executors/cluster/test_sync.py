"""`--sync`: what of a folder is sent, that nothing of the user's is written over, and that what was sent goes again."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autotune
from autotune.errors import UserError
from autotune.executors.cluster import rpc as wires
from autotune.executors.cluster.cluster import Cluster, NodeRequirements
from autotune.executors.cluster.rpc import AgentConnection, NoGreeting
from autotune.executors.cluster.sync import PathMap, ReceivedFolder, has_identical_files, sync_manifest
from autotune.executors.cluster.transports import BOOT, PACKAGE, Host, preamble
from tests.conftest import SCRIPTS, wait_until
from tests.executors.cluster.hosts import HIDDEN, Hosts
from tests.tiny_training import trainer_words, write_trainers_config

ROOT = Path(autotune.__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


def project(folder: Path) -> Path:
    """A folder as people train in."""
    for name in (
        "train.py",
        "lib/data.py",
        "conf/ds.json",
        ".git/HEAD",
        "runs/old/study.db",
        "env/pyvenv.cfg",
        "lib/__pycache__/x.pyc",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"of {name}")
    (folder / "run.sh").write_text("#!/bin/sh")
    (folder / "run.sh").chmod(0o755)
    (folder / "data").symlink_to("/shared/data")
    return folder


def test_what_is_sent_and_what_is_left_out(tmp_path: Path) -> None:
    made = sync_manifest(project(tmp_path / "proj"))
    assert sorted(made.files) == ["conf/ds.json", "lib/data.py", "run.sh", "train.py"]
    assert made.links == {"data": "/shared/data"}
    assert made.left_out == [".git", "env", "runs"]
    assert str(made).startswith(f"4 files of {tmp_path / 'proj'} (")
    assert "; left out: .git, env, runs; links" in str(made)


def test_a_folder_with_data_is_refused_with_what_is_large(tmp_path: Path) -> None:
    folder = project(tmp_path / "proj")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "big.bin").write_bytes(bytes(5000))
    with pytest.raises(
        UserError,
        match=r"--sync: .*proj has .* \(corpus/ .*, and at most .* are sent\. Keep data where all nodes see it",
    ):
        sync_manifest(folder, most_bytes=4096)


def test_links_are_sent_as_links_and_those_that_lead_out_are_named(tmp_path: Path) -> None:
    """A link may lead to data or credentials: no file is sent in its place."""
    folder, place = project(tmp_path / "proj"), tmp_path / "node" / "proj"
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "util.py").write_text("import x")
    for name, target in {
        "common": "../common",
        "again": "lib/data.py",
        "conf/up": "../lib",
        "lib/out": "../..",
    }.items():
        (folder / name).symlink_to(target)
    made = sync_manifest(folder)
    assert has_identical_files(made.manifest)
    assert str(made).endswith(
        "; links whose targets are not sent: common -> ../common, data -> /shared/data, lib/out -> ../.."
    )
    ReceivedFolder(place).unpack(made.archive)
    assert (place / "again").read_text() == (place / "conf" / "up" / "data.py").read_text() == "of lib/data.py"
    assert os.readlink(place / "common") == "../common"
    assert not (place / "common").exists()


@pytest.mark.parametrize("name", ["a b.py", "ä*.py", "[x].py", "-n", "a -> b.py", "new\nline.py"])
def test_any_name_of_a_file_arrives(tmp_path: Path, name: str) -> None:
    folder, place = tmp_path / "proj", tmp_path / "node" / "proj"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / name).write_text("text")
    made = sync_manifest(folder)
    ReceivedFolder(place).unpack(made.archive)
    assert (place / "sub" / name).read_text() == "text"
    assert has_identical_files(made.manifest)


def test_without_rsync_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sync_manifest(project(tmp_path / "proj"))
    assert made.archive
    monkeypatch.setenv("PATH", str(tmp_path))
    for use in (
        lambda: sync_manifest(tmp_path / "proj"),
        lambda: ReceivedFolder(tmp_path / "node").unpack(made.archive),
    ):
        with pytest.raises(UserError, match=r"^--sync needs rsync, which is not installed\. Install it: "):
            use()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = project(tmp_path / "proj")
    (folder / "train.py").chmod(0)
    if os.access(folder / "train.py", os.R_OK):
        pytest.skip("root reads any file")
    with pytest.raises(UserError, match=r"^--sync: .*train\.py.*Permission denied"):
        sync_manifest(folder)


def test_a_home_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    project(tmp_path / "home" / "me" / "proj")
    (tmp_path / "link").symlink_to("home/me")
    for folder in (Path("/"), tmp_path / "home", tmp_path / "home" / "me", tmp_path / "link"):
        with pytest.raises(
            UserError,
            match=r"--sync: \S+ is or contains your home folder.*\. Call autotune from the folder of the code",
        ):
            sync_manifest(folder)
    assert len(sync_manifest(tmp_path / "home" / "me" / "proj").files) == 4


def test_logins_are_not_sent_and_secrets_are_named(tmp_path: Path) -> None:
    folder = project(tmp_path / "proj")
    logins = (".ssh/id_rsa", "conf/.netrc", ".git-credentials", ".aws/credentials", ".pgpass")
    secrets = (".env", "certs/server.pem", "lib/my.key", ".env.local")
    for name in (*logins, *secrets):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    (folder / "keys").symlink_to(folder.parent / ".ssh")
    made = sync_manifest(folder)
    assert not {name for name in made.files if name.startswith((".ssh", ".aws", ".git", ".pgpass", "keys"))}
    assert "conf/.netrc" not in made.files
    assert set(secrets) <= made.files.keys()
    assert "keys" in made.outward_links, "a link, not the files behind it"
    assert {".aws", ".git-credentials", ".pgpass", ".ssh", "conf/.netrc"} <= set(made.left_out)
    assert "; possible secrets: .env, .env.local, certs/server.pem, lib/my.key" in str(made)


def test_it_arrives_as_it_was_and_goes_again(tmp_path: Path) -> None:
    folder, place = project(tmp_path / "proj"), tmp_path / "node" / "proj"
    made = sync_manifest(folder)
    assert has_identical_files(made.manifest)
    deposit = ReceivedFolder(place)
    assert deposit.unpack(made.archive) == []
    assert {path.relative_to(place).as_posix() for path in place.rglob("*") if not path.is_dir()} == {
        *made.files,
        "data",
    }
    assert (place / "train.py").read_text() == "of train.py"
    assert os.access(place / "run.sh", os.X_OK)
    assert os.readlink(place / "data") == "/shared/data"
    (place / "out").mkdir()
    (place / "out" / "model.pt").write_text("weights")
    (place / "train.py").write_text("edited there")
    assert deposit.clear() == 2
    assert {path.name for path in place.rglob("*")} == {"out", "model.pt", "train.py"}
    shutil.rmtree(place)
    deposit.unpack(made.archive)
    assert deposit.clear() == 0
    assert not any(place.parent.iterdir())


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_training_wrote_outlives_what_is_sent_next(tmp_path: Path, killed: bool) -> None:
    """The tuner's folder may have the same names: it trains, too."""
    folder, place = project(tmp_path / "proj"), tmp_path / "node" / "proj"
    (folder / "out").mkdir()
    (folder / "out" / "latest").write_text("global_step100")
    (folder / "old.py").write_text("gone later")
    first = sync_manifest(folder)
    agent = ReceivedFolder(place)
    agent.unpack(first.archive)
    (place / "out" / "latest").write_text("global_step900")
    (place / "out" / "loss.txt").write_text("of the node")
    (place / "last").symlink_to("out")
    if not killed:
        assert agent.clear() == 3
    (folder / "out" / "latest").write_text("global_step950")
    (folder / "out" / "loss.txt").write_text("of the tuner")
    (folder / "last").mkdir()
    (folder / "last" / "new.txt").write_text("not through a link")
    (folder / "train.py").write_text("edited here")
    (folder / "old.py").unlink()
    for _ in range(2):
        made = sync_manifest(folder)
        agent = ReceivedFolder(place)
        assert agent.unpack(made.archive) == ["last/new.txt", "out/latest", "out/loss.txt"]
        assert (place / "out" / "latest").read_text() == "global_step900"
        assert (place / "out" / "loss.txt").read_text() == "of the node"
        assert not (place / "out" / "new.txt").exists()
        assert (place / "train.py").read_text() == "edited here"
        assert not (place / "old.py").exists()
    (place / "out" / "latest").write_text("global_step950")  # as the tuner's is, and none the less the node's own
    assert agent.clear() == 3
    assert (place / "out" / "latest").exists()


def test_a_link_that_was_sent_becomes_a_folder_and_a_link_again(tmp_path: Path) -> None:
    folder, place = tmp_path / "proj", tmp_path / "node" / "proj"
    (tmp_path / "theirs").mkdir()
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "x.py").write_text("sent")
    as_folder = sync_manifest(folder)
    assert as_folder.archive
    shutil.rmtree(folder / "data")
    (folder / "data").symlink_to("/shared/data")
    as_link = sync_manifest(folder)
    for made in (as_link, as_folder, as_link):
        assert ReceivedFolder(place).unpack(made.archive) == []
        assert (place / "data").is_symlink() == (made is as_link)


@pytest.mark.parametrize("change", ["edited", "gone", "another link"])
def test_a_node_that_has_something_else_is_sent_it(tmp_path: Path, change: str) -> None:
    folder = project(tmp_path / "proj")
    manifest = sync_manifest(folder).manifest
    if change == "another link":
        (folder / "data").unlink()
        (folder / "data").symlink_to("/elsewhere")
    elif change == "gone":
        (folder / "lib" / "data.py").unlink()
    else:
        (folder / "train.py").write_text("OF train.py")
    assert not has_identical_files(manifest)


def test_mentions_of_the_old_place() -> None:
    moved = PathMap({"/home/u/proj": "/tmp/a/proj-1"})
    spec = {
        "argv": ["/home/u/proj/train.py", "--deepspeed=/home/u/proj/ds.json", "/home/u/project"],
        "n": 3,
        "none": None,
    }
    assert moved.all_of(spec) == {
        "argv": ["/tmp/a/proj-1/train.py", "--deepspeed=/tmp/a/proj-1/ds.json", "/home/u/project"],
        "n": 3,
        "none": None,
    }
    assert moved.path("/home/u/proj/src:/x:/home/u/proj") == "/tmp/a/proj-1/src:/x:/tmp/a/proj-1"
    assert moved.all_of({"/home/u/proj/out": {"/home/u/proj/out/a": 1}}) == {
        "/tmp/a/proj-1/out": {"/tmp/a/proj-1/out/a": 1}
    }
    assert moved.back.all_of(moved.all_of(spec)) == spec
    assert moved.path("/data/home/u/proj/x") == "/data/home/u/proj/x"


@pytest.mark.slow
@given(st.text(alphabet="/ab:=x", max_size=30))
def test_a_text_without_the_old_place_stays(text: str) -> None:
    assert PathMap({"/ab/x": "/new"}).path(text) == text or "/ab/x" in text
    assert PathMap({"/ab/x": "/new"}).path(f"/ab/x/{text.replace('x', 'y')}") == f"/new/{text.replace('x', 'y')}"


# -- the package -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Agents' folders where no other test has its own, and whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="at", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield


def sent_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("autotune-agent-*/autotune"))


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("has", [False, True])
def test_an_agent_from_a_package_that_was_sent(tmp_path: Path, has: bool) -> None:
    before = sent_folders()
    place = PACKAGE if has else Path("/nowhere/autotune")
    with closing(
        AgentConnection("n1", [sys.executable, "-c", BOOT], tmp_path / "log", preamble(PACKAGE, place))
    ) as wire:
        wire.greet(60)
        made = sent_folders() - before
        assert len(made) == (0 if has else 1)
        assert wire.ask("exists", 20, path="/")["there"]
        cmdline = Path(f"/proc/{wire.greeting['pid']}/cmdline").read_text().split("\0")
        assert Path(cmdline[1]) in ({PACKAGE} if has else made)
    assert not made & sent_folders(), (tmp_path / "log").read_text()


@pytest.mark.usefixtures("apart")
def test_a_file_in_the_folder_of_a_login_stands_in_for_no_library(tmp_path: Path) -> None:
    for name in ("random", "tarfile", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the library')")
    there = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), sys.executable, "-c", BOOT]
    with closing(AgentConnection("n1", there, tmp_path / "log", preamble(PACKAGE, Path("/nowhere/autotune")))) as wire:
        wire.greet(60)
        assert wire.ask("exists", 20, path="/")["there"]


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
def test_what_a_killed_agent_was_sent_goes_with_the_next(tmp_path: Path) -> None:
    before, words = sent_folders(), [sys.executable, "-c", BOOT]
    with closing(AgentConnection("n1", words, tmp_path / "log", preamble(PACKAGE, Path("/nowhere/autotune")))) as wire:
        os.kill(int(wire.greet(60)["pid"]), signal.SIGKILL)
        wait_until(lambda: bool(wire.failure), "its death to be known")
        left = sent_folders() - before
        assert len(left) == 1
    with closing(AgentConnection("n1", words, tmp_path / "log", preamble(PACKAGE))) as wire:
        wire.greet(60)
        assert not left & sent_folders()


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
def test_a_stream_that_ends_halfway_leaves_nothing(tmp_path: Path) -> None:
    before = sent_folders()
    half = preamble(PACKAGE, Path("/nowhere/autotune"))[:-1000]
    with closing(AgentConnection("n1", [sys.executable, "-c", BOOT], tmp_path / "log", half)) as wire:
        wire._closing.set()  # no beats after it
        with pytest.raises(NoGreeting):
            wire.greet(1)
    assert sent_folders() == before


@pytest.mark.slow
def test_a_login_may_take_longer_than_a_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent first is more than a pipe holds, so that nothing is taken of the rest until somebody reads."""
    monkeypatch.setattr(wires, "SILENT_SECONDS", 0.2)
    assert len(preamble(PACKAGE)) > 2**17
    slow = ["sh", "-c", 'sleep 1; exec "$0" "$@"', sys.executable, "-c", BOOT]
    with closing(AgentConnection("n1", slow, tmp_path / "log", preamble(PACKAGE))) as wire:
        wire.greet(60)


@pytest.mark.slow
def test_a_login_that_never_ends_is_named(tmp_path: Path) -> None:
    with closing(AgentConnection("n1", ["sleep", "600"], tmp_path / "log", preamble(PACKAGE))) as wire:
        with pytest.raises(NoGreeting, match=r"no agent within 1 s, and what --sync sends was not taken: the login"):
            wire.greet(1)
        wire._process.kill()


class Booted:
    """Agents of this machine whose package is sent."""

    def command(self, node: str) -> list[str]:
        return [sys.executable, "-c", BOOT]

    def complaint(self, node: str, failure: NoGreeting) -> str:
        return f"{node}: {failure.log}"


@pytest.mark.few(1)
@pytest.mark.parametrize("lasting", [False, True])
def test_a_folder_that_a_node_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool) -> None:
    """It is sent, named wherever the old one was, and gone at the end but for what a training wrote."""
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_PLACE", str(tmp_path / "proj" / "hub"))
    folder, said = project(tmp_path / "proj"), []
    made = sync_manifest(folder)
    assert made.archive
    folder.rename(tmp_path / "elsewhere")
    requirements = NodeRequirements(
        "cpu", path=str(folder), parcels=(made,), preamble=preamble(PACKAGE), lasting=lasting
    )
    cluster = Cluster([Host("n1", (0,))], Booted(), requirements, tmp_path / "nodes", print_line=said.append)
    with closing(cluster):
        cluster.reach()
        assert len(said) == 1
        place = Path(said[0].split(", into ")[1].split(":")[0])
        assert place.name.startswith("proj-")
        assert (place / "lib" / "data.py").exists()
        cwd = os.readlink(f"/proc/{cluster.nodes[0].connection.greeting['pid']}/cwd")
        assert Path(cwd) in (place, Path.cwd())
        (place / "written").write_text("by a training")
    assert (place / "written").exists() == lasting
    assert not (place / "train.py").exists()
    assert not folder.exists()


def test_a_node_without_rsync_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["env", f"PATH={tmp_path}", sys.executable, "-c", BOOT]
    monkeypatch.setattr(Booted, "command", lambda self, node: words)
    folder = project(tmp_path / "proj")
    made = sync_manifest(folder)
    assert made.archive
    folder.rename(tmp_path / "elsewhere")
    requirements = NodeRequirements("cpu", path=str(folder), parcels=(made,), preamble=preamble(PACKAGE))
    said = r"^node n1: --sync needs rsync, which is not installed\. Install it: "
    cluster = Cluster([Host("n1", (0,))], Booted(), requirements, tmp_path / "nodes")
    with closing(cluster), pytest.raises(UserError, match=said):
        cluster.reach()


# -- over ssh, where hosts do not see the folder -------------------------------------------------------------------------------


@pytest.mark.slow
def test_package_and_script_are_sent_to_hosts_that_have_neither(hosts: Hosts) -> None:
    if not hosts.own_links:
        pytest.skip("hosts have this machine's folders where this process may make no namespaces")
    hidden = hosts.folder / HIDDEN
    package, folder = hidden / "package" / "autotune", hidden / "proj"
    shutil.copytree(ROOT / "autotune", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "search_spaces", package / "search_spaces")
    folder.mkdir()
    shutil.copy(SCRIPTS / "trainer.py", folder / "train.py")
    write_trainers_config(folder / "ds.json", 1)
    script = trainer_words(folder / "train.py", folder / "ds.json", 20)
    words = ["run", "--hostfile", str(hosts.hostfile()), "--device", "cpu", "--budget", "6m"]
    words += ["--max-trials", "1", "--yes", "--study", "sent"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def call(*more: str) -> subprocess.CompletedProcess[str]:
        everything = [sys.executable, str(package), *words, *more, "--", *script]
        return subprocess.run(everything, cwd=folder, capture_output=True, text=True, timeout=400, env=env)

    refused = call()
    assert refused.returncode == 2
    assert f"autotune is not at {package} there" in refused.stderr
    assert "--sync" in refused.stderr
    done = call("--sync")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"2 files of {folder}" in done.stdout
    assert (folder / "runs" / "sent" / "sent.json").exists()
    wait_until(lambda: not list(Path(tempfile.gettempdir()).glob("autotune-agent-*/sent")), "an end of what was sent")
    script[script.index("no")] = "steps"
    words = ["launch", "sent", "--hostfile", str(hosts.hostfile()), "--sync", "--", *script, "--save_steps", "10"]
    trained = subprocess.run(
        [sys.executable, str(package), *words], cwd=folder, capture_output=True, text=True, timeout=400, env=env
    )
    assert trained.returncode == 0, trained.stderr
    assert re.search(r"autotune: \d+ files that the training wrote are left in \S+ on node1", trained.stderr), (
        trained.stderr
    )
    (saved,) = hosts[0].cache.glob("autotune/sent/node1/proj-*/out/checkpoint-20")
    assert not list(saved.parents[1].glob("*.py")), "what was sent is gone"
