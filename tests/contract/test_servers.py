"""The real servers that tests are given: restartable, replaceable by one's own, never left over."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError
from redis.asyncio import Redis

from shared.adapters.local_process import LOOPBACK, free_port
from tests.support.processes import dies_within
from tests.support.servers import (
    KAFKA_VARIABLE,
    REDIS_VARIABLE,
    REQUIRE_VARIABLE,
    KafkaServer,
    MissingServerError,
    NotOursError,
    RedisServer,
    kafka_for_tests,
    redis_for_tests,
    start_kafka,
)

REPO = Path(__file__).resolve().parents[2]
TOPIC = "test-servers"


async def create_topic(bootstrap: str, topic: str = TOPIC) -> None:
    """Create a topic of one partition."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)])
    finally:
        await admin.close()


async def produce(bootstrap: str, value: bytes, **options: object) -> None:
    """Write one record, acknowledged by all replicas."""
    limit = 5 * 1024 * 1024
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all", max_request_size=limit, **options
    )
    try:  # A producer that cannot start has to be stopped all the same.
        await producer.start()
        await producer.send_and_wait(TOPIC, value)
    finally:
        await producer.stop()


async def read(bootstrap: str, count: int) -> list[bytes]:
    """Read a number of records from the beginning."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=5 * 1024 * 1024,
    )
    await consumer.start()
    try:
        consumer.assign([TopicPartition(TOPIC, 0)])
        async with asyncio.timeout(60):
            return [(await consumer.getone()).value for _ in range(count)]
    finally:
        await consumer.stop()


def run_pytest(test: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run one test of this file in a pytest of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"{__file__}::{test}"],
        env=dict(environ),
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.chaos
async def test_kafka_keeps_records_over_kill_and_stop(own_kafka: KafkaServer):
    """Acknowledged records are there after SIGKILL and after an orderly stop, at one address."""
    await create_topic(own_kafka.bootstrap)
    await produce(own_kafka.bootstrap, b"before the kill")
    first = own_kafka.pid
    own_kafka.kill()
    assert own_kafka.pid is None
    await asyncio.to_thread(own_kafka.start)
    assert own_kafka.pid not in (None, first)
    await produce(own_kafka.bootstrap, b"after the kill")
    await asyncio.to_thread(own_kafka.stop)
    await asyncio.to_thread(own_kafka.start)
    await produce(own_kafka.bootstrap, b"after the stop")
    values = await read(own_kafka.bootstrap, 3)
    assert values == [b"before the kill", b"after the kill", b"after the stop"]


@pytest.mark.chaos
async def test_redis_keeps_keys_over_kill_and_stop(own_redis: RedisServer):
    """Keys are there after SIGKILL and after an orderly stop, at one address."""
    for step, end in enumerate((own_redis.kill, own_redis.stop, lambda: None)):
        async with Redis.from_url(own_redis.url) as redis:
            assert await redis.incr("steps") == step + 1
        end()
        own_redis.start()


async def test_kafka_takes_large_messages_and_creates_no_topic_by_itself(kafka_server: KafkaServer):
    """A record of 4 MiB passes; a topic that nobody created is an error."""
    with pytest.raises(KafkaError):
        await produce(kafka_server.bootstrap, b"", request_timeout_ms=500)
    await create_topic(kafka_server.bootstrap)
    value = os.urandom(4 * 1024 * 1024)
    await produce(kafka_server.bootstrap, value)
    assert await read(kafka_server.bootstrap, 1) == [value]


@pytest.mark.slow
async def test_kafka_runs_with_properties_and_listeners_of_ones_own(
    kafka_factory: Callable[..., KafkaServer],
):
    """A further listener with SASL lets in who knows the password and nobody else."""
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    prefix = "listener.name.secure"
    server = kafka_factory(
        extra_listeners={"SECURE": "SASL_PLAINTEXT"},
        properties={
            f"{prefix}.sasl.enabled.mechanisms": "PLAIN",
            f"{prefix}.plain.sasl.jaas.config": f'{login} user_alice="right";',
        },
    )
    await create_topic(server.bootstrap)
    sasl = {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "alice",
    }
    wrong, right = ({**sasl, "sasl_plain_password": word} for word in ("wrong", "right"))
    with pytest.raises(KafkaError):
        await produce(server.address("SECURE"), b"no", **wrong)
    await produce(server.address("SECURE"), b"yes", **right)
    assert await read(server.bootstrap, 1) == [b"yes"]


def test_an_address_in_the_environment_wins(kafka_server: KafkaServer, redis_server: RedisServer):
    """Named servers are used as they are, and the tests never stop or kill them."""
    with kafka_for_tests({KAFKA_VARIABLE: kafka_server.bootstrap}) as kafka:
        assert kafka.bootstrap == kafka_server.bootstrap
        with pytest.raises(NotOursError):
            kafka.kill()
    with redis_for_tests({REDIS_VARIABLE: redis_server.url}) as redis:
        assert redis.url == redis_server.url
        with pytest.raises(NotOursError):
            redis.stop()


def test_a_named_server_that_does_not_answer_is_an_error():
    """A wrong address fails the run, required or not, instead of starting another server."""
    nowhere = f"{LOOPBACK}:{free_port()}"
    with pytest.raises(ConnectionError, match=nowhere), kafka_for_tests({KAFKA_VARIABLE: nowhere}):
        pass
    url = f"redis://{nowhere}/0"
    with pytest.raises(ConnectionError, match=nowhere), redis_for_tests({REDIS_VARIABLE: url}):
        pass


@pytest.mark.parametrize(
    ("test", "missing"),
    [
        ("test_kafka_takes_large_messages_and_creates_no_topic_by_itself", "Apache Kafka"),
        ("test_redis_keeps_keys_over_kill_and_stop", "Redis"),
    ],
)
def test_a_missing_server_is_told_loudly_or_fails(test: str, missing: str, tmp_path: Path):
    """Without a server a test is listed as not run with the remedy; where required it fails."""
    bare = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    lenient = run_pytest(test, bare)
    assert lenient.returncode == 0, lenient.stdout
    assert "TESTS NOT RUN: 1" in lenient.stdout
    assert f"no real {missing}" in lenient.stdout
    assert "apt-get install" in lenient.stdout
    assert f"not run: tests/contract/test_servers.py::{test}" in lenient.stdout
    assert lenient.stdout.rstrip().splitlines()[-1].strip("= ").startswith("1 skipped")
    strict = run_pytest(test, {**bare, REQUIRE_VARIABLE: "1"})
    assert strict.returncode == 1, strict.stdout
    assert f"{REQUIRE_VARIABLE} is set, and no real {missing}" in strict.stdout


@pytest.mark.chaos
def test_no_kafka_outlives_a_killed_run(kafka_server: KafkaServer, tmp_path: Path):
    """A broker whose parent dies by SIGKILL ends within seconds."""
    assert kafka_server.bootstrap
    script = f"""
import pathlib, time
from tests.support.servers import start_kafka
print(start_kafka(pathlib.Path({str(tmp_path)!r})).pid, flush=True)
time.sleep(3600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=REPO
    ) as parent:
        assert parent.stdout is not None
        broker = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    assert dies_within(broker, 20)


def test_a_broker_that_cannot_start_says_why(kafka_server: KafkaServer, tmp_path: Path):
    """A broken property ends the start at once, with the broker's own words."""
    assert kafka_server.bootstrap
    with pytest.raises(MissingServerError, match=r"(?s)no real Apache Kafka: .*num\.io\.threads"):
        start_kafka(tmp_path, properties={"num.io.threads": "none"})
