"""The Kafka adapter with credentials and certificates, on real Apache Kafka."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_params import KafkaParams
from shared.errors import BrokerUnavailable, ConfigError
from tests.support.broker import make_topic, numbers, publish_all, take, tps
from tests.support.servers import KafkaServer

pytestmark = [pytest.mark.real, pytest.mark.slow]

PASSWORD = "correct-horse"  # noqa: S105 - the test's own broker
WRONG_PASSWORD = "wr0ng"  # noqa: S105
LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
JAAS = f'{LOGIN} required user_mesh="{PASSWORD}";'


def issue(folder: Path, name: str, *, days: int) -> Path:
    """Make a self-signed certificate for loopback; returns a PEM file with key and certificate."""
    key, certificate, both = (folder / f"{name}.{end}" for end in ("key", "crt", "pem"))
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", str(days)),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    both.write_text(key.read_text() + certificate.read_text())
    return both


@pytest.fixture
def secured(kafka_factory: Callable[..., KafkaServer], tmp_path: Path) -> KafkaServer:
    """Return a broker with a listener that wants TLS and a password."""
    certificate = issue(tmp_path, "broker", days=1)
    return kafka_factory(
        extra_listeners={"SECURE": "SASL_SSL"},
        properties={
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.secure.plain.sasl.jaas.config": JAAS,
            "listener.name.secure.ssl.keystore.type": "PEM",
            "listener.name.secure.ssl.keystore.location": str(certificate),
        },
    )


def params(server: KafkaServer, folder: Path, **changes: object) -> KafkaParams:
    """Return parameters of a client that trusts the broker and knows the password."""
    settings: dict[str, object] = {
        "bootstrap_servers": server.address("SECURE"),
        "security_protocol": "SASL_SSL",
        "sasl_username": "mesh",
        "sasl_password": PASSWORD,
        "ssl_cafile": str(folder / "broker.crt"),
        "connect_timeout_s": 5.0,
        **changes,
    }
    return KafkaParams(**settings)  # type: ignore[arg-type]


async def test_password_and_certificate(secured: KafkaServer, tmp_path: Path) -> None:
    """With the right ones everything works; what is wrong is named, and never shown."""
    async with KafkaBroker.open(params(secured, tmp_path)) as broker:
        topic = await make_topic(broker, "secured")
        await publish_all(broker, topic, range(3))
        async with (
            broker.partition_consumer(tps(topic), start="beginning") as reader,
            broker.group_consumer([topic], "g") as member,
        ):
            assert numbers(await take(reader, 3)) == [0, 1, 2]
            assert numbers(await take(member, 3)) == [0, 1, 2]

    issue(tmp_path, "stranger", days=1)
    wrong = {
        "uthentication failed": params(secured, tmp_path, sasl_password=WRONG_PASSWORD),
        "UnsupportedSaslMechanism": params(secured, tmp_path, sasl_mechanism="SCRAM-SHA-512"),
        "certificate verify failed": params(
            secured, tmp_path, ssl_cafile=str(tmp_path / "stranger.crt")
        ),
        "cannot use the certificate files": params(
            secured, tmp_path, ssl_cafile=str(tmp_path / "nowhere.crt")
        ),
    }
    for message, refused in wrong.items():
        with pytest.raises(ConfigError, match=message) as raised:
            async with KafkaBroker.open(refused):
                pass
        assert PASSWORD not in str(raised.value)
        assert WRONG_PASSWORD not in str(raised.value)
    plain = KafkaParams(bootstrap_servers=secured.address("SECURE"), connect_timeout_s=5.0)
    with pytest.raises(BrokerUnavailable, match="security protocol"):
        async with KafkaBroker.open(plain):
            pass
