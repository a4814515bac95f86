"""The Redis client is bounded, timed and cancellable, and survives the server's restarts."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from shared.adapters.embedded_redis import EmbeddedRedis, EmbeddedRedisParams
from shared.adapters.local_process import LOOPBACK, free_port
from shared.adapters.redis_client import RedisClient, RedisParams, load_script
from shared.adapters.redis_store import RedisStore
from shared.errors import ConfigError, StateUnavailable
from tests.support.redis_proxy import RedisProxy
from tests.support.urgency import entry


@pytest.fixture(scope="module")
def shared_server() -> Iterator[EmbeddedRedis]:
    """Return a server on a loopback port that the tests of this module share."""
    with EmbeddedRedis(EmbeddedRedisParams(port=0)) as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[EmbeddedRedis]:
    """Return a server that one test may kill."""
    with EmbeddedRedis(EmbeddedRedisParams(port=0, appendfsync="always")) as server:
        yield server


@pytest.fixture
async def proxy(shared_server: EmbeddedRedis) -> AsyncIterator[RedisProxy]:
    """Return a proxy before the shared server."""
    port = int(shared_server.url.split(":")[2].split("/")[0])
    async with RedisProxy.open(port, seed=7) as opened:
        yield opened


async def echo(client: RedisClient, word: str) -> None:
    """Send a word and expect it back."""
    assert await client.command("ECHO", word) == word.encode()


async def cancel_at_random(client: RedisClient, rng: random.Random, num_commands: int) -> int:
    """Run commands at the same time and cancel some; returns how many were cancelled."""
    tasks = set()
    async with asyncio.TaskGroup() as group:
        for number in range(num_commands):
            task = group.create_task(echo(client, f"word-{number}"), name=f"echo-{number}")
            tasks.add(task)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.uniform(0, 0.002))
                rng.choice(list(tasks)).cancel()
    return sum(task.cancelled() for task in tasks)


async def test_cancelled_commands_leave_no_reply_behind(proxy: RedisProxy) -> None:
    """Whenever commands are cancelled, every other one gets its own reply."""
    proxy.delay_s = 0.004
    rng = random.Random(11)
    async with RedisClient.open(RedisParams(url=proxy.url, max_connections=3)) as client:
        for _ in range(4):
            assert await cancel_at_random(client, rng, 60) > 5
            # Each connection is used again, at the same time and alone.
            await asyncio.gather(*(echo(client, f"after-{i}") for i in range(12)))
            for i in range(6):
                await echo(client, f"alone-{i}")


async def test_cancelled_commands_free_their_connections(proxy: RedisProxy) -> None:
    """Cancelled commands, waiters for a connection among them, use none up."""
    proxy.delay_s = 0.01
    async with RedisClient.open(RedisParams(url=proxy.url, max_connections=2)) as client:
        for _ in range(10):
            tasks = [asyncio.ensure_future(echo(client, f"word-{i}")) for i in range(20)]
            await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(echo(client, "one"), echo(client, "two"))


async def test_cancelling_is_never_swallowed(proxy: RedisProxy) -> None:
    """A cancelled task ends as cancelled, even when its reply has just arrived."""
    async with RedisClient.open(RedisParams(url=proxy.url)) as client:
        for step in range(60):
            task = asyncio.ensure_future(client.command("PING"))
            for _ in range(step % 12):
                await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task


async def test_connections_are_bounded(shared_server: EmbeddedRedis) -> None:
    """More commands than connections wait their turn instead of failing."""
    params = RedisParams(url=shared_server.url, max_connections=2)
    async with RedisClient.open(params) as client, Redis.from_url(shared_server.url) as raw:
        await asyncio.gather(*(echo(client, f"word-{i}") for i in range(100)))
        ours = [one for one in await raw.client_list() if one["name"] == "hexflow"]
        assert 1 <= len(ours) <= 2


async def test_readers_of_chunks_leave_commands_alone(shared_server: EmbeddedRedis) -> None:
    """However many readers wait for chunks, commands find a connection."""
    params = RedisParams(url=shared_server.url, max_connections=1, stream_connections=2)

    async def read(store: RedisStore, call: str) -> list[str]:
        return [chunk[3] async for chunk in store.chunks(call, timeout_s=0.6)]

    async with RedisStore.open(params) as store, asyncio.TaskGroup() as group:
        readers = [group.create_task(read(store, f"r{i}"), name=f"r{i}") for i in range(4)]
        await asyncio.sleep(0.05)
        assert await store.ping() < params.timeout_s
        for i in range(4):
            await store.append_chunk(f"r{i}", 0, 0, str(i))
    assert [reader.result() for reader in readers] == [["0"], ["1"], ["2"], ["3"]]


async def test_server_that_is_not_there() -> None:
    """To open a store where nobody listens fails with the address and what to do."""
    params = RedisParams(url=f"redis://{LOOPBACK}:{free_port()}/0", timeout_s=0.1)
    with pytest.raises(StateUnavailable, match=r"127\.0\.0\.1:\d+/0: .*check that it runs"):
        async with RedisStore.open(params):
            pass


async def test_server_that_never_answers() -> None:
    """A server that takes the connection and says nothing is given up in time."""

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(keep_silent, LOOPBACK, 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent:
        params = RedisParams(url=f"redis://{LOOPBACK}:{port}/0", timeout_s=0.1)
        with pytest.raises(StateUnavailable, match="no reply in time"):
            async with RedisClient.open(params):
                pass


async def test_crashed_server_is_reported_and_found_again(own_server: EmbeddedRedis) -> None:
    """Commands fail with StateUnavailable while the server is away and work when it is back."""
    params = RedisParams(url=own_server.url, timeout_s=0.2)
    async with RedisStore.open(params) as store:
        line = store.urgency_set("a")
        await line.add([entry("kept")])
        await asyncio.to_thread(own_server.kill)
        for failing in (line.sizes(), line.add([entry("b")]), line.claim(1, limit=1, now_s=0.0)):
            with pytest.raises(StateUnavailable):
                await failing
        await asyncio.to_thread(own_server.start)
        assert await line.sizes() == (1, 0, 0)


async def test_short_absence_goes_unnoticed(own_server: EmbeddedRedis) -> None:
    """A command that is safe to repeat waits for a server that restarts within its time-out."""
    async with RedisStore.open(RedisParams(url=own_server.url, timeout_s=20.0)) as store:
        line = store.urgency_set("a")
        await line.add([entry("a")])
        await asyncio.to_thread(own_server.kill)
        async with asyncio.TaskGroup() as group:
            adding = group.create_task(line.add([entry("b", arrival=1)]), name="add")
            await asyncio.sleep(0.05)
            await asyncio.to_thread(own_server.start)
        assert adding.result() == [True]
        assert await line.sizes() == (2, 0, 0)


async def test_lost_reply_is_asked_for_again(proxy: RedisProxy) -> None:
    """An addition whose reply was lost is sent again and leaves one entry."""
    async with RedisStore.open(RedisParams(url=proxy.url)) as store:
        line = store.urgency_set("lost-reply")
        await line.add([entry("first")])
        proxy.losses_left, proxy.num_requests = 2, 0
        assert await line.add([entry("a")]) == [False]
        assert proxy.num_requests == 3
        assert await line.sizes() == (2, 0, 0)
        await line.drop()


async def test_lost_claim_is_not_repeated(proxy: RedisProxy) -> None:
    """A claim whose reply was lost fails at once; what it took shows among the claimed."""
    async with RedisStore.open(RedisParams(url=proxy.url)) as store:
        line = store.urgency_set("lost-claim")
        await line.add([entry("a"), entry("b", arrival=1)])
        await line.claim(1, limit=0, now_s=0.0)
        proxy.losses_left, proxy.num_requests = 1, 0
        with pytest.raises(StateUnavailable):
            await line.claim(1, limit=1, now_s=0.0)
        assert proxy.num_requests == 1
        assert list(await line.claimed()) == ["a"]
        await line.drop()


async def test_idle_connections_that_were_closed(shared_server: EmbeddedRedis) -> None:
    """Connections that the server closed while idle are replaced without an error."""
    params = RedisParams(url=shared_server.url)
    async with RedisClient.open(params) as client, Redis.from_url(shared_server.url) as raw:
        await asyncio.gather(*(echo(client, f"word-{i}") for i in range(8)))
        for one in await raw.client_list():
            if one["name"] == "hexflow":
                await raw.client_kill_filter(_id=one["id"])
        await asyncio.gather(*(echo(client, f"again-{i}") for i in range(8)))
        # A claim is not repeated, so this shows that no dead connection is handed out.
        assert await client.run(load_script("begin"), [f"{{x}}{i}" for i in range(5)], ["1"]) == 1


async def test_wrong_password(own_server: EmbeddedRedis) -> None:
    """A refused password is a configuration error that does not show it."""
    async with Redis.from_url(own_server.url) as raw:
        await raw.config_set("requirepass", "right")
    for secret in ("wrong-one", None):
        params = RedisParams.model_validate({"url": own_server.url, "password": secret})
        with pytest.raises(ConfigError, match="refuses access") as caught:
            async with RedisStore.open(params):
                pass
        assert "wrong-one" not in str(caught.value)
    async with RedisStore.open(
        RedisParams.model_validate({"url": own_server.url, "password": "right"})
    ) as store:
        assert await store.urgency_set("a").sizes() == (0, 0, 0)


LEAST_RIGHTS = (
    "+ping +eval +evalsha +hgetall +del +xread +xadd +expire +client|setname +client|setinfo "
    "+get +set +hget +hset +hdel +zadd +zrem +zscore +zcard +zrange +zrangebyscore +zpopmin"
)


async def test_least_rights_suffice(own_server: EmbeddedRedis) -> None:
    """A user who may run these commands on the prefix's keys can do everything."""
    async with Redis.from_url(own_server.url) as raw:
        rights = LEAST_RIGHTS.split()
        await raw.acl_setuser(
            "mesh", enabled=True, passwords="+pw", keys=["hexflow:*"], commands=rights
        )
    params = RedisParams.model_validate(
        {"url": own_server.url, "username": "mesh", "password": "pw"}
    )
    async with RedisStore.open(params) as store:
        line = store.urgency_set("a")
        await line.add([entry("a"), entry("b", arrival=1)])
        await line.claim_leased(1, limit=2, now_s=0.0, lease_s=1.0)
        await line.renew([("a", entry("a").token)], now_s=0.0, lease_s=2.0)
        await line.park("a", entry("a").token, due_s=9.0)
        await line.reclaim(now_s=5.0)
        assert (await line.members()).keys() == {"a", "b"}
        await line.remove(["a", "b"])
        await store.append_chunk("a", 0, 0, "x")
        assert [chunk[3] async for chunk in store.chunks("a", timeout_s=0.01)] == ["x"]
        await line.drop()
    elsewhere = params.model_copy(update={"prefix": "other:"})
    async with RedisStore.open(elsewhere) as store:
        with pytest.raises(ConfigError, match="refuses access"):
            await store.urgency_set("a").begin(1)


async def test_keys_of_another_application(shared_server: EmbeddedRedis) -> None:
    """Keys that hold something else are a configuration error that names the prefix."""
    params = RedisParams(url=shared_server.url, prefix="taken:")
    async with RedisStore.open(params) as store, Redis.from_url(shared_server.url) as raw:
        await raw.hset("taken:{a}:epoch", "a", "hash")
        with pytest.raises(ConfigError, match="'taken:'; set another prefix"):
            await store.urgency_set("a").add([entry("a")])


async def test_full_server_is_unavailable(own_server: EmbeddedRedis) -> None:
    """A server out of memory refuses to add, and the error carries its reason."""
    async with (
        RedisStore.open(RedisParams(url=own_server.url, timeout_s=0.1)) as store,
        Redis.from_url(own_server.url) as raw,
    ):
        line = store.urgency_set("a")
        await line.begin(1)
        await raw.config_set("maxmemory", 1)
        with pytest.raises(StateUnavailable, match="maxmemory"):
            await line.add([entry("a")])


async def test_keys_of_a_set_share_a_slot(shared_server: EmbeddedRedis) -> None:
    """All keys of a set carry one hash tag, so a cluster keeps them on one node."""
    params = RedisParams(url=shared_server.url, prefix="slots:")
    async with RedisStore.open(params) as store, Redis.from_url(shared_server.url) as raw:
        line = store.urgency_set("gpu-1.a")
        await line.add([entry("a"), entry("b"), entry("c")])
        await line.claim(1, limit=2, now_s=0.0)
        await line.park("a", entry("a").token, due_s=0.0)
        keys = {key.decode() async for key in raw.scan_iter("slots:*")}
        assert {key.split("{")[1].split("}")[0] for key in keys} == {"gpu-1.a"}
        assert len(keys) == 5


@pytest.mark.parametrize("name", ["", "a b", "a{b}", "-a", "x" * 129, "a\n"])
async def test_names_that_break_keys(shared_server: EmbeddedRedis, name: str) -> None:
    """A set's name cannot hold what would break its keys."""
    async with RedisStore.open(RedisParams(url=shared_server.url)) as store:
        with pytest.raises(ValueError, match="no name of an urgency set"):
            store.urgency_set(name)


async def test_ping_measures(proxy: RedisProxy) -> None:
    """The round trip that `ping` reports lies within the time it took."""
    async with RedisStore.open(RedisParams(url=proxy.url)) as store:
        started_s = time.monotonic()
        rtt_s = await store.ping()
        assert 0 < rtt_s <= time.monotonic() - started_s


async def test_keys_of_another_application_are_told_apart_from_an_epoch(
    shared_server: EmbeddedRedis,
) -> None:
    """What no life of a worker wrote is no newer life; a person has to choose another prefix."""
    async with RedisStore.open(RedisParams(url=shared_server.url, prefix="foreign:")) as store:
        line = store.urgency_set("a")
        await line.begin(1)
        async with Redis.from_url(shared_server.url) as other:
            await other.set("foreign:{a}:epoch", "junk")
        with pytest.raises(ConfigError, match="another application uses keys"):
            await line.add([entry("x")])
        await line.drop()
