"""Which dispatchers have died, as their probes tell."""

from services.dispatcher.peers import Peers
from shared.contracts.messages import RecoveryProbe


def hear(peers: Peers, now_s: float, *owners: str) -> None:
    """Let probes come."""
    for owner in owners:
        peers.heard(RecoveryProbe(owner_id=owner, seq=1), now_s)


def test_who_stops_probing_is_dead_once():
    """While our own probes come, one who was silent for too long is named, once."""
    peers = Peers("me", 2.0)
    hear(peers, 0.0, "me.1", "other.1", "host.with.dots.2")
    hear(peers, 1.9, "me.1")
    assert peers.take_dead(1.9) == []
    hear(peers, 2.5, "me.1", "host.with.dots.2")
    assert peers.take_dead(2.5) == ["other"]
    assert peers.take_dead(3.0) == []


def test_nobody_is_dead_while_our_own_probes_do_not_come():
    """The broker is away, or this process was paused: others' silence proves nothing."""
    peers = Peers("me", 2.0)
    hear(peers, 0.0, "me.1", "other.1")
    assert peers.take_dead(10.0) == []
    hear(peers, 10.0, "other.1", "me.1")
    assert peers.take_dead(10.1) == []


def test_who_has_withdrawn_its_probe_is_not_dead():
    """A dispatcher that stops in order leaves its groups itself."""
    peers = Peers("me", 2.0)
    hear(peers, 0.0, "me.1", "other.1")
    peers.left("probe/other.1")
    hear(peers, 5.0, "me.1")
    assert peers.take_dead(5.0) == []


def test_a_new_life_of_the_same_dispatcher_is_alive():
    """What is withdrawn of its earlier life does not touch it."""
    peers = Peers("me", 2.0)
    hear(peers, 0.0, "me.1", "other.1")
    hear(peers, 1.0, "other.2", "me.1")
    peers.left("probe/other.1")
    hear(peers, 2.9, "me.1")
    assert peers.take_dead(2.9) == []
    hear(peers, 3.1, "me.1")
    assert peers.take_dead(3.1) == ["other"]
