"""Rights and certificates on real servers: what is refused is named, and nobody restarts in a rush.

A service that a server refuses says so, is never ready meanwhile, tries again after growing pauses,
and ends with the exit code of a wrong setting.
"""

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from services.cli.options import mesh_settings
from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_params import KafkaParams
from shared.adapters.local_process import LOOPBACK, LocalProcess, connect, free_port
from shared.runtime.lifecycle import FIRST_PAUSE_S, MAX_REFUSALS
from tests.support import kafka_acls as acl
from tests.support.certificates import EXPIRED, Authority
from tests.support.kafka_acls import Acls
from tests.support.refusals import ENDS_WITHIN_S, Case, Ended, ready_status, run_until_end
from tests.support.servers import KafkaServer, MissingServerError, do_without, start_kafka

pytestmark = [pytest.mark.real, pytest.mark.slow]
LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
PASSWORD = "correct-horse"  # noqa: S105 - the test's own servers
AT_ONCE = 3
PAUSES_S = [FIRST_PAUSE_S * 2**index for index in range(MAX_REFUSALS - 1)]

DENIED: dict[str, tuple[str, int, str, int, str]] = {
    "a topic that it may not see": (
        *("dispatcher", acl.TOPIC, "latency-events", acl.ALL),
        "hexflow.latency-events",
    ),
    "a topic that it may not read": (
        *("dispatcher", acl.TOPIC, "stage-requests", acl.READ),
        "hexflow.stage-requests",
    ),
    "a topic that it may not write": (
        *("dispatcher", acl.TOPIC, "instance-states", acl.WRITE),
        "hexflow.instance-states",
    ),
    "a group that it may not join": (
        *("dispatcher", acl.GROUP, "dispatcher", acl.READ),
        "hexflow.dispatcher",
    ),
    "a group that it may not join, while it serves": (
        *("gateway", acl.GROUP, "gateway-results", acl.READ),
        "hexflow.gateway-results",
    ),
    "a topic that it may not create": (
        *("worker", acl.TOPIC, "instance.a100-0", acl.CREATE),
        "hexflow.instance.a100-0",
    ),
}
"""What -> service, and the right that its user lacks; in the message there has to be the name."""
USERS = {what: f"user-{number}" for number, what in enumerate(DENIED)} | {"": "mesh"}
COMMANDS = "+@all -@admin -@dangerous +info +client"
REDIS_USERS = {
    "keys": f"~elsewhere:* &* {COMMANDS}",
    "scripts": f"~hexflow:* &* {COMMANDS} -eval -evalsha",
    "order": f"~hexflow:* &* {COMMANDS} -zadd",
}


class Servers(NamedTuple):
    """The servers of this module.

    Attributes:
        kafka: With rights, and with listeners for TLS.
        redis: Where its users log in.
        expired_redis: One whose certificate is over.
        strict_redis: One that wants certificates of its clients.
        folder: Of the certificates.
    """

    kafka: KafkaServer
    redis: str
    expired_redis: str
    strict_redis: str
    folder: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with certificates in date and expired ones."""
    found = tmp_path_factory.mktemp("refused")
    authority = Authority(found)
    for name in ("server", "client"):
        authority.sign(name)
        authority.sign(f"expired-{name}", days=EXPIRED)
    return found


@pytest.fixture(scope="module")
def kafka(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """Return a broker with rights, a listener for passwords, and two for certificates."""
    logins = " ".join(f'user_{user}="{PASSWORD}"' for user in USERS.values())
    tls = {}
    for listener, name in (("expired", "expired-server"), ("strict", "server")):
        prefix = f"listener.name.{listener}.ssl"
        tls[f"{prefix}.keystore.type"] = "PEM"
        tls[f"{prefix}.keystore.location"] = str(folder / f"{name}.pem")
    tls["listener.name.strict.ssl.truststore.type"] = "PEM"
    tls["listener.name.strict.ssl.truststore.location"] = str(folder / "authority.crt")
    tls["listener.name.strict.ssl.client.auth"] = "required"
    try:
        server = start_kafka(
            tmp_path_factory.mktemp("kafka"),
            extra_listeners={"LOGIN": "SASL_PLAINTEXT", "EXPIRED": "SSL", "STRICT": "SSL"},
            properties={
                **acl.PROPERTIES,
                **tls,
                "sasl.enabled.mechanisms": "PLAIN",
                "listener.name.login.plain.sasl.jaas.config": f"{LOGIN} required {logins};",
            },
        )
    except MissingServerError as missing:
        do_without(missing)
    yield server
    server.stop()


def start_own_redis(folder: Path, name: str, options: dict[str, str], rules: str) -> LocalProcess:
    """Start a Redis with options and rules of a test's own; its port is among the options."""
    if shutil.which("redis-server") is None:
        do_without(MissingServerError("no real Redis: there is no redis-server on PATH"))
    config = folder / f"{name}.conf"
    config.write_text(rules)
    common = {"bind": LOOPBACK, "dir": str(folder), "save": ""}
    words = [word for key, value in (common | options).items() for word in (f"--{key}", value)]
    server = LocalProcess("Redis", ["redis-server", str(config), *words], folder / f"{name}.log")
    server.start()
    port = int(options.get("tls-port", options["port"]))

    def listens() -> bool:
        connect(LOOPBACK, port).close()
        return True

    server.wait_until(listens, 20)
    return server


@pytest.fixture(scope="module")
def servers(kafka: KafkaServer, folder: Path) -> Iterator[Servers]:
    """Return all servers; topics and rights are there."""
    rules = "".join(
        f"user {name} on >{PASSWORD} {rights}\n" for name, rights in REDIS_USERS.items()
    )
    ports = [str(free_port()) for _ in range(3)]

    def tls(port: str, certificate: str, *, asks: str) -> dict[str, str]:
        both = str(folder / f"{certificate}.pem")
        return {
            "port": "0",
            "tls-port": port,
            "tls-auth-clients": asks,
            "tls-cert-file": both,
            "tls-key-file": both,
            "tls-ca-cert-file": str(folder / "authority.crt"),
        }

    own = [
        start_own_redis(folder, "rules", {"port": ports[0]}, rules),
        start_own_redis(folder, "expired", tls(ports[1], "expired-server", asks="no"), ""),
        start_own_redis(folder, "strict", tls(ports[2], "server", asks="yes"), ""),
    ]
    asyncio.run(prepare(kafka.bootstrap))
    yield Servers(
        kafka,
        f"redis://{LOOPBACK}:{ports[0]}/0",
        f"rediss://{LOOPBACK}:{ports[1]}/0",
        f"rediss://{LOOPBACK}:{ports[2]}/0",
        folder,
    )
    for server in own:
        server.kill()


async def prepare(bootstrap: str) -> None:
    """Create the topics, and let every user do all but what its case denies."""
    topics = mesh_settings(kafka=bootstrap).topics.topics()
    async with KafkaBroker.open(KafkaParams(bootstrap_servers=bootstrap)) as broker:
        await broker.create_topics(topics.specs())
    async with Acls.open(bootstrap) as acls:
        for user in USERS.values():
            await acls.allow_all(user, topics.prefix)
        for what, (_, kind, name, operation, _) in DENIED.items():
            await acls.deny(USERS[what], kind, topics.prefix + name, operation)


def login(servers: Servers, user: str) -> dict[str, str]:
    """Return the environment of a service that logs in as a user of Kafka's."""
    return {
        "HEXFLOW_KAFKA__BOOTSTRAP_SERVERS": servers.kafka.address("LOGIN"),
        "HEXFLOW_KAFKA__SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "HEXFLOW_KAFKA__SASL_USERNAME": user,
        "HEXFLOW_KAFKA__SASL_PASSWORD": PASSWORD,
        "HEXFLOW_REDIS__URL": servers.redis,
    }


def cases(servers: Servers) -> dict[str, Case]:
    """Return everything that is refused."""
    authority = str(servers.folder / "authority.crt")

    def kafka_tls(listener: str, client: str = "") -> dict[str, str]:
        found = {
            "HEXFLOW_KAFKA__BOOTSTRAP_SERVERS": servers.kafka.address(listener),
            "HEXFLOW_KAFKA__SECURITY_PROTOCOL": "SSL",
            "HEXFLOW_KAFKA__SSL_CAFILE": authority,
        }
        if client:
            found["HEXFLOW_KAFKA__SSL_CERTFILE"] = str(servers.folder / f"{client}.crt")
            found["HEXFLOW_KAFKA__SSL_KEYFILE"] = str(servers.folder / f"{client}.key")
        return found

    def redis_tls(url: str, client: str = "") -> dict[str, str]:
        found = {"HEXFLOW_REDIS__URL": url, "HEXFLOW_REDIS__SSL_CAFILE": authority}
        if client:
            found["HEXFLOW_REDIS__SSL_CERTFILE"] = str(servers.folder / f"{client}.crt")
            found["HEXFLOW_REDIS__SSL_KEYFILE"] = str(servers.folder / f"{client}.key")
        return found

    def redis_user(name: str) -> dict[str, str]:
        return {"HEXFLOW_REDIS__USERNAME": name, "HEXFLOW_REDIS__PASSWORD": PASSWORD}

    found = {
        what: Case(
            service,
            {**login(servers, USERS[what]), "GATEWAY_PORT": str(free_port())},
            (said, "ACL"),
        )
        for what, (service, _, _, _, said) in DENIED.items()
    }
    own = "does not accept this client's certificate"
    found |= {
        "Kafka's certificate is over": Case("dispatcher", kafka_tls("EXPIRED"), ("has expired",)),
        "Kafka finds ours over": Case(
            "dispatcher", kafka_tls("STRICT", "expired-client"), (own, "SSL_CERTFILE")
        ),
        "Kafka wants one": Case("dispatcher", kafka_tls("STRICT"), (own, "SSL_CERTFILE")),
        "Redis' certificate is over": Case(
            "worker", redis_tls(servers.expired_redis), ("has expired",)
        ),
        "Redis finds ours over": Case(
            "worker", redis_tls(servers.strict_redis, "expired-client"), (own,)
        ),
    }
    for name, said in (("keys", "key"), ("scripts", "evalsha"), ("order", "ZADD")):
        found[f"Redis denies {name}"] = Case("worker", redis_user(name), (said, "Redis", "ACL"))
    return found


@pytest.fixture(scope="module")
def ended(servers: Servers) -> dict[str, tuple[Case, Ended]]:
    """Return what became of every case; a few run at a time."""
    environment = login(servers, USERS[""])
    wanted = cases(servers)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda case: run_until_end(case, environment), wanted.values())
        return {what: (case, end) for (what, case), end in zip(wanted.items(), found, strict=True)}


NAMES = [
    *DENIED,
    "Kafka's certificate is over",
    "Kafka finds ours over",
    "Kafka wants one",
    "Redis' certificate is over",
    "Redis finds ours over",
    "Redis denies keys",
    "Redis denies scripts",
    "Redis denies order",
]


@pytest.mark.parametrize("what", NAMES)
def test_what_is_refused_is_named_and_tried_again_in_peace(
    ended: dict[str, tuple[Case, Ended]], what: str
):
    """One reason in words, never ready, growing pauses between few tries, then exit code 2."""
    case, end = ended[what]
    assert end.code == 2, end.output
    (last,) = [line for line in end.output.splitlines() if line.startswith("hexflow: ")]
    for part in case.said:
        assert part in last, end.output
    assert "Traceback" not in end.output
    assert PASSWORD not in end.output
    assert 200 not in end.statuses
    assert end.pauses_s == PAUSES_S, end.output


async def test_a_right_that_is_given_back_lets_the_service_go_on(servers: Servers, tmp_path: Path):
    """A worker that loses a right while it works is unready, and works again when it has it."""
    port = free_port()
    environment = {
        "PATH": os.environ["PATH"],
        "HEXFLOW_PROBES__PORT": str(port),
        "WORKER_INSTANCE_ID": "l40s-0",
        **login(servers, USERS[""]),
    }
    worker = LocalProcess(
        "worker", [sys.executable, "-m", "services.worker"], tmp_path / "worker.log", environment
    )
    worker.start()
    right = (USERS[""], acl.TOPIC, "hexflow.instance-states", acl.WRITE)
    try:
        await until(lambda: ready_status(port) == 200, worker)
        pid = worker.pid
        async with Acls.open(servers.kafka.bootstrap) as acls:
            await acls.deny(*right)
            await until(lambda: ready_status(port) != 200, worker)
            await acls.deny_no_more(*right)
        await until(lambda: ready_status(port) == 200, worker)
        assert worker.pid == pid
    finally:
        worker.stop()
    assert "access_refused" in worker.log_path.read_text()


async def until(condition: Callable[[], bool], worker: LocalProcess) -> None:
    """Wait for a condition while a process runs."""
    give_up_s = time.monotonic() + ENDS_WITHIN_S
    while not await asyncio.to_thread(condition):
        assert worker.is_running, worker.log_tail()
        assert time.monotonic() < give_up_s, worker.log_tail()
        await asyncio.sleep(0.05)
