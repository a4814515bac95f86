"""Lives of an instance: which record of `instance-states` belongs to which epoch.

An epoch is named by the offset of the record that began it, so epochs of one instance are unique
and grow without a counter anywhere. Two kinds of record begin an epoch, both written with
`epoch=-1`:

- `begin`: a worker starts (or, having been fenced, starts anew) and takes calls from here on;
- `gone`: the *fence* that a recovery owner writes for an instance it takes for dead. The epoch it
  begins has no worker: whoever wrote states of a lower epoch has lost its work.

Readers keep, per instance, the last record of the highest epoch and ignore records of lower ones.
A worker that reads a record of its own instance with an epoch above its own has been fenced: it
drops its waiting calls, aborts its running ones and publishes a new `begin`.
"""

from shared.contracts.messages import InstanceState


def begins_epoch(state: InstanceState) -> bool:
    """Return whether the record begins an epoch: a worker's `begin` or a recovery owner's fence."""
    return state.epoch < 0


def epoch_of(record_offset: int, state: InstanceState) -> int:
    """Return the epoch that a state belongs to.

    Args:
        record_offset: Offset of the record that carries it on `instance-states`.
        state: The state.
    """
    return record_offset if begins_epoch(state) else state.epoch
