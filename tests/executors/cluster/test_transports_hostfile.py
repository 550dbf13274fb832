"""DeepSpeed's hostfile and its launcher's filters, as people write them."""

from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.executors.cluster.transports import Host, evenly_filled_hosts, read_hostfile


def written(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_text(text)
    return path


ALL = (0, 1, 2, 3)
FOUR = "worker-0 slots=4\nworker-1 slots=4\nworker-2 slots=2  # an older one\n\n# worker-3 slots=8\n"


def test_hosts_with_comments_and_empty_lines(tmp_path: Path) -> None:
    hosts = read_hostfile(written(tmp_path, FOUR))
    assert [(host.name, len(host.slots), host.hides_devices) for host in hosts] == [
        ("worker-0", 4, False),
        ("worker-1", 4, False),
        ("worker-2", 2, False),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker-0\n", r":1: 'worker-0' does not parse: expected a line like `worker-1 slots=8`"),
        ("worker-0 slots=4\nworker-1 slots = 4\n", ":2: "),
        ("worker-0 slots=four", ":1: "),
        ("a slots=1\nb slots=1\na slots=2\n", ":3: a a second time"),
        ("me@a slots=1\na slots=2\n", ":2: a a second time"),
        ("a slots=0", "a has no slots"),
        ("-oProxyCommand=reboot slots=1", "does not parse"),
        ("", "names no host"),
    ],
)
def test_what_does_not_parse_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        read_hostfile(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is no UTF-8 text"):
        read_hostfile(tmp_path / "binary")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("worker-1", None, {"worker-1": ALL}),
        ("worker-1@worker-0:2,0", None, {"worker-0": (0, 2), "worker-1": ALL}),
        (None, "worker-2", {"worker-0": ALL, "worker-1": ALL}),
        (None, "worker-0:0@worker-2", {"worker-0": (1, 2, 3), "worker-1": ALL}),
    ],
)
@pytest.mark.parametrize("user", ["", "me@"])
def test_filters_are_deepspeeds_and_name_a_host_without_its_user(
    tmp_path: Path, user: str, include: str | None, exclude: str | None, left: dict[str, tuple[int, ...]]
) -> None:
    hosts = read_hostfile(written(tmp_path, FOUR.replace("worker-1", f"{user}worker-1")), include, exclude)
    assert {host.name.removeprefix(user): host.slots for host in hosts} == left
    for host in hosts:  # what a filter leaves of a host is all that its ranks may see
        assert host.hides_devices == (":" in f"{include}{exclude}" and len(host.slots) < 4)


def test_a_mark_at_a_files_beginning_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_bytes(b"\xef\xbb\xbf" + FOUR.encode())
    assert read_hostfile(tmp_path / "hostfile")[0].name == "worker-0"


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("worker-1", "worker-2", "give one of them"),
        ("worker-9", None, "has no host 'worker-9'; did you mean worker-"),
        (None, "worker-2:7", "has no slot 7, its 2 count from 0"),
        ("worker-1:a", None, "does not parse"),
        (None, "worker-0@worker-1@worker-2", "no host of .* is left"),
    ],
)
def test_filters_that_are_none(tmp_path: Path, include: str | None, exclude: str | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_hostfile(written(tmp_path, FOUR), include, exclude)


def of(*slots: int) -> list[Host]:
    return [Host(f"n{at}", tuple(range(many))) for at, many in enumerate(slots)]


def test_as_many_of_each() -> None:
    assert [host.slots for host in evenly_filled_hosts(of(4, 4), "h", None, None)] == [(0, 1, 2, 3)] * 2
    assert [host.slots for host in evenly_filled_hosts(of(4, 8, 8), "h", 2, 2)] == [(0, 1)] * 2
    with pytest.raises(UserError, match="n0 has 4 slots and n1 8; autotune takes as many of each: --gpus 4 takes"):
        evenly_filled_hosts(of(4, 8), "h", None, None)
    with pytest.raises(UserError, match="--gpus 5: n0 has 4 slots; give 1 to 4"):
        evenly_filled_hosts(of(4, 8), "h", None, 5)
    with pytest.raises(UserError, match="--nodes 3: h has 2 hosts; give 1 to 2"):
        evenly_filled_hosts(of(4, 8), "h", 3, None)
