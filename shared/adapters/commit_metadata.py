"""The one limit on commit metadata that every broker adapter enforces alike."""

from collections.abc import Mapping

from shared.ports import Committed, TopicPartition

METADATA_BYTES = 4_096


def check_metadata(positions: Mapping[TopicPartition, Committed]) -> None:
    """Refuse commit metadata above the size that brokers store.

    Raises:
        ValueError: More than 4,096 bytes of UTF-8.
    """
    for tp, position in positions.items():
        size = len(position.metadata.encode())
        if size > METADATA_BYTES:
            raise ValueError(f"commit metadata of {tp}: {size} bytes, at most {METADATA_BYTES}")
