"""The process in which the tuner replays."""

import signal

from services.tuner.app import replay_processes


def test_ctrl_c_does_not_end_the_replay_process():
    """It ignores SIGINT: a terminal sends that to all, and the tuner ends its process in order."""
    with replay_processes() as executor:
        handler = executor.submit(signal.getsignal, signal.SIGINT).result()
    assert handler == signal.SIG_IGN
