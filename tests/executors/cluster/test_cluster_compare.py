"""Nodes that are not alike, and the network that they share."""

import pytest

from autotune.errors import UserError
from autotune.executors.cluster.cluster import check_versions_and_clocks, combined, rendezvous_network
from autotune.problem.hardware import Hardware
from autotune.search.fingerprint import fingerprint, identity
from autotune.util.units import GIB
from tests.conftest import make_job

OURS = {"torch": "2.13.0", "deepspeed": "0.19.8"}


def survey(device: str = "A100", ahead: float = 0.0, **versions: str | None) -> dict[str, object]:
    return {
        "versions": {**OURS, "driver": "570.1", **versions},
        "ahead_seconds": ahead,
        "hardware": {"name": device},
        "hostname": "x",
    }


def complaint(*surveys: dict[str, object]) -> str:
    """What is said of nodes. Empty where they are alike."""
    names = [f"n{at}" for at in range(len(surveys))]
    try:
        check_versions_and_clocks(names, surveys, OURS)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def test_nodes_that_are_alike() -> None:
    assert complaint(survey(), survey()) == ""


@pytest.mark.parametrize(("ahead", "said"), [(20.0, ""), (-20.0, ""), (40.0, "40 s ahead"), (-40.0, "40 s behind")])
def test_clocks_may_be_half_a_minute_apart(ahead: float, said: str) -> None:
    found = complaint(survey(ahead=ahead))
    assert said in found
    assert bool(found) == bool(said)


def test_everything_that_differs_is_in_one_line() -> None:
    said = complaint(survey(), survey(driver="560.2", torch="2.12.0"), survey(ahead=-90.0), survey("H100"))
    assert "driver: n1 has 560.2 where the others have 570.1" in said
    assert "torch: n1 has 2.12.0 where this machine has 2.13.0" in said
    assert "clock: n2's is 90 s behind" in said
    assert "device: n3 has H100 where the others have A100" in said


def test_a_package_that_all_nodes_have_in_another_version_than_this_machine() -> None:
    assert "deepspeed: n0 has none, n1 has 0.16.0 where this" in complaint(
        survey(deepspeed=None), survey(deepspeed="0.16.0")
    )


def test_the_node_with_least_decides_what_fits() -> None:
    parts = [
        Hardware("cuda", "A", 2, 24 * GIB, None, 100 * GIB, taken_bytes=1 * GIB, gpus=("a", "b"), headroom=0.1),
        Hardware("cuda", "A", 2, 24 * GIB, None, 60 * GIB, taken_bytes=4 * GIB, gpus=("c", "d"), headroom=0.1),
    ]
    whole = combined(parts, 6)
    assert (whole.count, whole.nodes, whole.per_node, whole.threads) == (4, 2, 2, 6)
    assert whole.capacity_bytes == 20 * GIB
    assert whole.host_memory_bytes == 60 * GIB
    assert whole.gpus == ("a", "b", "c", "d")


def at(*addresses: tuple[str, str, str], reached: str = "", hostname: str = "") -> dict[str, object]:
    lo = ("lo", "127.0.0.1", "255.0.0.0")
    return {"addresses": [lo, *addresses], "reached_at": [reached], "hostname": hostname or str(addresses)}


ADMIN, FAST = "255.255.255.0", "255.255.0.0"


def test_ranks_meet_where_ssh_reached_the_first_node() -> None:
    nodes = [
        at(("ib0", "10.1.0.1", FAST), ("eno1", "192.168.7.1", ADMIN), reached="192.168.7.1"),
        at(("eth0", "192.168.7.2", ADMIN), ("ib0", "10.1.0.2", FAST)),
    ]
    found = rendezvous_network(["a", "b"], nodes)
    assert (found.host, found.interfaces) == ("192.168.7.1", ("eno1", "eth0"))
    given = rendezvous_network(["a", "b"], nodes, "ib0")
    assert (given.host, given.interfaces) == ("10.1.0.1", ("ib0", "ib0"))
    with pytest.raises(
        UserError, match="--interface eno1: node b has no such interface that is up; it has eth0, ib0, lo"
    ):
        rendezvous_network(["a", "b"], nodes, "eno1")


def test_a_first_node_that_ssh_reached_by_its_loopback() -> None:
    """The tuner runs on it: the others do not reach it there."""
    nodes = [at(("eno1", "192.168.7.1", ADMIN), reached="127.0.0.1"), at(("eth0", "192.168.7.2", ADMIN))]
    found = rendezvous_network(["a", "b"], nodes)
    assert (found.host, found.interfaces) == ("192.168.7.1", ("eno1", "eth0"))


@pytest.mark.parametrize("reached", ["10.0.1.5", ""])
def test_a_bridge_that_every_machine_has_is_no_network(reached: str) -> None:
    """docker0 has the same address everywhere; each node would find itself there."""
    bridge = ("docker0", "172.17.0.1", "255.255.0.0")
    nodes = [at(bridge, ("eth0", f"10.0.1.{number}", "255.255.255.255"), reached=reached) for number in (5, 6)]
    found = rendezvous_network(["a", "b"], nodes)
    assert (found.host, found.interfaces) == ("10.0.1.5", ("", ""))


def test_networks_with_a_router_in_between() -> None:
    nodes = [at(("eth0", "10.0.1.5", ADMIN)), at(("eth0", "10.0.2.5", ADMIN))]
    found = rendezvous_network(["a", "b"], nodes)
    assert (found.host, found.interfaces) == ("10.0.1.5", ("", "")), "each library finds its own way"


def test_a_node_without_a_network() -> None:
    with pytest.raises(UserError, match="node a has no address at which the other nodes could reach it"):
        rendezvous_network(["a", "b"], [at(hostname="a"), at(("eth0", "10.0.2.5", ADMIN))])


def test_two_agents_of_one_machine_meet_on_its_loopback() -> None:
    assert rendezvous_network(["a", "b"], [at(hostname="one"), at(hostname="one")]).host == "127.0.0.1"


def test_a_study_of_several_nodes_is_another_than_one_of_as_many_devices() -> None:
    one = Hardware("cpu", "c", 4, 8 * GIB, None, 8 * GIB)
    two = combined([Hardware("cpu", "c", 2, 8 * GIB, None, 8 * GIB)] * 2, 3)
    assert "nodes" not in identity(make_job(4), one)["hardware"], "as studies of before have it"
    assert identity(make_job(4), two)["hardware"]["nodes"] == 2
    assert fingerprint(make_job(4), two)["threads_per_rank"] == 3, "of the nodes, not of this machine"
    assert Hardware.from_json(two.to_json()) == two
