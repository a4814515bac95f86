"""Which dispatchers have died, as their probes tell."""

from services.dispatcher.params import DispatcherParams
from services.dispatcher.peers import LONGEST_GAP_S, OUTAGE_GRACE_S, Peers
from shared.contracts.messages import RecoveryProbe

SILENCE_S = 2.0


class Listening:
    """Peers, and the time; something is heard every half second unless told otherwise."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self.peers = Peers("me", silence_s)
        self.now_s = 0.0

    def hear(self, *owners: str) -> None:
        """Let probes come now."""
        for owner in owners:
            self.peers.listen(self.now_s)
            self.peers.heard(RecoveryProbe(owner_id=owner, seq=1), self.now_s)

    def go_on(self, seconds: float, *owners: str, hears: bool = True) -> list[str]:
        """Let time pass; return who died meanwhile."""
        dead = []
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            if hears:
                self.peers.listen(self.now_s)
            self.hear(*owners)
            dead += self.peers.take_dead(self.now_s)
        return dead


def test_who_stops_probing_is_dead_once():
    """Whoever is silent for too long while others are heard is named, once."""
    one = Listening()
    one.hear("me.1", "other.1", "host.with.dots.2")
    assert one.go_on(2.0, "host.with.dots.2") == []
    assert one.go_on(0.5, "host.with.dots.2") == ["other"]
    assert one.go_on(5.0, "host.with.dots.2") == []


def test_we_are_never_dead_to_ourselves():
    """Without a partition of our own we write no probes, and still see who dies."""
    one = Listening()
    one.hear("me.1", "other.1")
    assert one.go_on(5.0) == ["other"]


def test_nobody_is_dead_while_nothing_is_heard():
    """The broker was away, or this process paused: silence before it proves nothing.

    Others may need longer than this process to reach the broker again, and get the time for it.
    """
    one = Listening()
    one.hear("me.1", "other.1", "third.1")
    assert one.go_on(10.0, hears=False) == []
    assert one.go_on(OUTAGE_GRACE_S - 0.5, "third.1") == []  # not heard again for long enough
    assert one.go_on(0.5, "third.1", "other.1") == []
    assert one.go_on(2.0, "third.1") == []
    assert one.go_on(0.5, "third.1") == ["other"]


def test_who_has_withdrawn_its_probe_is_not_dead():
    """A dispatcher that stops in order leaves its groups itself."""
    one = Listening()
    one.hear("me.1", "other.1")
    one.peers.left("probe/other.1")
    assert one.go_on(5.0) == []


def test_a_new_life_of_the_same_dispatcher_is_alive():
    """What is withdrawn of its earlier life does not touch it."""
    one = Listening()
    one.hear("other.1")
    one.go_on(1.0)
    one.hear("other.2")
    one.peers.left("probe/other.1")
    assert one.go_on(2.0) == []
    assert one.go_on(0.5) == ["other"]


def test_an_unnoticed_gap_condemns_nobody():
    """The longest gap that is no deafness, with a probe before it, is shorter than the silence."""
    params = DispatcherParams(dispatcher_id="me")
    assert LONGEST_GAP_S + params.probe_interval_s < params.peer_silence_s
    one = Listening(params.peer_silence_s)
    one.hear("me.1", "other.1")
    assert one.go_on(5.0, "me.1", "other.1") == []
    one.now_s += params.probe_interval_s  # the other's probe is about to come
    one.hear("me.1")
    one.now_s += LONGEST_GAP_S
    one.hear("me.1")
    assert one.peers.take_dead(one.now_s) == []
