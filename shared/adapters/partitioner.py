"""Which partition a key belongs to: Kafka's default partitioner (murmur2).

Source: Apache Kafka, `org.apache.kafka.common.utils.Utils.murmur2` and `BuiltInPartitioner`;
fixed vectors in the contract suite keep it equal to the real client.
"""

_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Return the 32-bit MurmurHash2 of some bytes, unsigned, with Kafka's seed."""
    length = len(data)
    whole = length & ~3
    hashed = _SEED ^ length
    for start in range(0, whole, 4):
        word = int.from_bytes(data[start : start + 4], "little") * _MULTIPLIER & _MASK
        word = (word ^ word >> 24) * _MULTIPLIER & _MASK
        hashed = (hashed * _MULTIPLIER & _MASK) ^ word
    if length != whole:
        hashed = (hashed ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    hashed = (hashed ^ hashed >> 13) * _MULTIPLIER & _MASK
    return hashed ^ hashed >> 15


def partition_for(key: bytes, partitions: int) -> int:
    """Return the partition that Kafka's default partitioner gives a key.

    Args:
        key: Record key.
        partitions: Number of partitions of the topic, > 0.
    """
    return (murmur2(key) & 0x7FFFFFFF) % partitions
