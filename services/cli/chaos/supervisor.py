"""Carries out a plan of faults on a mesh of processes, and repairs what it broke.

Invariants: what was paused is resumed and what was stopped is started again, also when the run is
cut short; a process that ends by itself is started again too, as its orchestrator would, and told
of in the report.
"""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from services.cli.chaos.audit import Injected, effect_of
from services.cli.chaos.faults import QUIET_S, Fault
from services.cli.chaos.ledger import Ledger
from services.cli.chaos.producer import ProducerProcess
from services.cli.chaos.servers import AOF, Server, Servers
from services.cli.processes import ProcessMesh
from shared.adapters.redis_client import RedisClient, RedisParams
from shared.errors import MeshError, TransientError

POLL_S = 0.05
WAIT_IN_FLIGHT_S = 15.0
HOLD_S = 0.7
"""How long a dispatcher is held still until calls wait for it: well below its session time-out."""
SEEN_S = 0.25
"""Age from which an unbound call is known to wait, and not only to be unread here."""
MAX_TRIES = 4
LOST_S = 1.1
SETTLE_S = 1.0
READY_WITHIN_S = 60.0
STOP_GRACE_S = 40.0

Report = Callable[[str], None]


class Supervisor:
    """Strikes and repairs.

    Args:
        mesh: The processes.
        ledger: What the raw topics tell meanwhile, kept up to date by its reader.
        servers: Kafka and Redis, where they may be stopped.
        report: Told what happens, in a line each.
    """

    def __init__(self, mesh: ProcessMesh, ledger: Ledger, servers: Servers, report: Report) -> None:
        self.injected: list[Injected] = []
        self.unexpected: list[str] = []
        self.num_repeated = 0
        self.producer: ProducerProcess | None = None
        """The producer that a fault is to kill, once it runs."""
        self._mesh = mesh
        self._ledger = ledger
        self._servers = servers
        self._report = report
        self._down: set[str] = set()
        self._num_held = 0

    async def carry_out(self, plan: Sequence[Fault], before: Callable[[int], None]) -> None:
        """Do everything in the plan, one after the other.

        Args:
            plan: The faults in order.
            before: Told a fault's number before its quiet time begins.
        """
        for number, fault in enumerate(plan):
            before(number)
            await asyncio.sleep(fault.quiet_s)
            for _ in range(MAX_TRIES):
                self._report(fault.name)
                injected = await self._strike(fault)
                await asyncio.sleep(SETTLE_S)
                if effect_of(injected, self._ledger).counts:
                    break
                self.num_repeated += 1
                self._report(f"{fault.name}: no calls were in flight there; once more")
            self.injected.append(injected)

    async def watch_over(self) -> None:
        """Start again, until cancelled, what ends although nobody killed it."""
        while True:
            for name, tail in self._mesh.ended().items():
                if name not in self._down:
                    self.unexpected.append(name)
                    self._report(f"{name} has ended by itself:\n{tail}")
                    await asyncio.to_thread(self._mesh.processes[name].start)
            await asyncio.sleep(0.5)

    async def _strike(self, fault: Fault) -> Injected:
        strikes: dict[str, Callable[[Fault], Awaitable[tuple[float, float]]]] = {
            "kill-worker": self._kill_worker,
            "kill-dispatcher": self._kill_dispatcher,
            "kill-tuner": self._kill,
            "pause-worker": self._pause_worker,
            "hang-engine": self._break_engine,
            "fail-engine": self._break_engine,
            "partition-worker": self._partition_worker,
            "jump-clock": self._jump_clock,
            "stop-broker": self._stop_broker,
            "kill-broker": self._kill_broker,
            "lose-aof-second": self._lose_aof_second,
            "restart-redis": self._restart_redis,
            "flush-redis": self._flush_redis,
            "rolling-restart": self._roll,
            "kill-producer": self._kill_producer,
        }
        self._num_held = 0
        at_s, back_s = await strikes[fault.kind](fault)
        return Injected(
            kind=fault.kind, victim=fault.victim, at_s=at_s, back_s=back_s, held=self._num_held
        )

    # Services.

    async def _kill_worker(self, fault: Fault) -> tuple[float, float]:
        await self._until_held(fault.victim)
        return await self._kill(fault)

    async def _kill_dispatcher(self, fault: Fault) -> tuple[float, float]:
        """Hold a dispatcher still until calls wait for it, then kill it."""
        give_up_s = time.monotonic() + WAIT_IN_FLIGHT_S
        while True:
            async with self._held_still(fault.victim) as at_s:
                if await self._waits_for(fault.victim, at_s) or time.monotonic() > give_up_s:
                    return await self._kill(fault, at_s)
            await asyncio.sleep(HOLD_S)

    async def _waits_for(self, dispatcher_id: str, at_s: float) -> bool:
        while time.time() < at_s + HOLD_S:
            await asyncio.sleep(POLL_S)
            now_s = time.time()
            owned = [
                partition
                for partition, owner in self._ledger.owners(now_s).items()
                if owner == dispatcher_id
            ]
            waiting = self._ledger.unbound(owned, now_s - SEEN_S)
            if set(waiting) & set(self._ledger.unbound(owned, now_s)):
                return True
        return False

    async def _kill(self, fault: Fault, at_s: float | None = None) -> tuple[float, float]:
        process = self._mesh.processes[fault.victim]
        self._down.add(fault.victim)
        at_s = at_s or time.time()
        await asyncio.to_thread(process.kill)
        await asyncio.sleep(fault.down_s)
        return at_s, await self._start(fault.victim)

    async def _start(self, name: str) -> float:
        """Start a process again; returns when it is ready."""
        await asyncio.to_thread(self._mesh.processes[name].start)
        self._down.discard(name)
        give_up_s = time.monotonic() + READY_WITHIN_S
        while not await asyncio.to_thread(self._mesh.is_ready, name):
            if time.monotonic() > give_up_s:
                raise TransientError(
                    f"{name} did not become ready again within {READY_WITHIN_S:g} s:\n"
                    + self._mesh.processes[name].log_tail()
                )
            await asyncio.sleep(POLL_S)
        return time.time()

    async def _pause_worker(self, fault: Fault) -> tuple[float, float]:
        await self._until_held(fault.victim)
        async with self._held_still(fault.victim) as at_s:
            await asyncio.sleep(fault.down_s)
        return at_s, time.time()

    async def _break_engine(self, fault: Fault) -> tuple[float, float]:
        """Let an engine hang, or fail every call, for a while."""
        await self._until_held(fault.victim)
        instance_id = fault.victim.removeprefix("worker-")
        order = self._mesh.log_dir / f"{instance_id}.fault"
        at_s = time.time()
        await asyncio.to_thread(order.write_text, fault.kind.removesuffix("-engine"))
        try:
            await asyncio.sleep(fault.down_s)
        finally:
            order.unlink(missing_ok=True)
        return at_s, time.time()

    async def _partition_worker(self, fault: Fault) -> tuple[float, float]:
        """Cut a worker off from Kafka and Redis, and let it back."""
        await self._until_held(fault.victim)
        at_s = time.time()
        for proxy in self._servers.proxies:
            proxy.cut()
        try:
            await asyncio.sleep(fault.down_s)
        finally:
            for proxy in self._servers.proxies:
                proxy.heal()
        return at_s, time.time()

    async def _jump_clock(self, fault: Fault) -> tuple[float, float]:
        """Kill a process, and start it again on a host whose clock is an hour off."""
        process = self._mesh.processes[fault.victim]
        hours = 1 if fault.quiet_s > sum(QUIET_S) / 2 else -1
        process.set_variable("HEXFLOW_CLOCK_SHIFT_S", repr(3_600.0 * hours))
        if fault.victim.startswith("dispatcher"):
            return await self._kill_dispatcher(fault)
        return await self._kill_worker(fault)

    async def _kill_producer(self, fault: Fault) -> tuple[float, float]:
        """Kill the producer while calls of its own are under way, and start it again."""
        producer, give_up_s = self.producer, time.monotonic() + WAIT_IN_FLIGHT_S
        while producer is None or not producer.num_in_flight():
            is_over = producer is not None and producer.is_done
            if is_over or time.monotonic() > give_up_s:
                return time.time(), time.time()
            await asyncio.sleep(POLL_S)
            producer = self.producer
        at_s = time.time()
        await asyncio.to_thread(producer.kill)
        self._num_held = producer.num_in_flight()
        await asyncio.sleep(fault.down_s)
        await asyncio.to_thread(producer.start)
        return at_s, await producer.resumed_at_s(at_s, READY_WITHIN_S)

    async def _roll(self, _: Fault) -> tuple[float, float]:
        at_s = time.time()
        for name, process in self._mesh.processes.items():
            self._down.add(name)
            await asyncio.to_thread(process.stop, STOP_GRACE_S)
            await self._start(name)
        return at_s, time.time()

    async def _until_held(self, worker: str) -> None:
        """Wait until a worker holds calls, within a bound."""
        instance_id = worker.removeprefix("worker-")
        give_up_s = time.monotonic() + WAIT_IN_FLIGHT_S
        while time.monotonic() < give_up_s:
            if self._ledger.held_by(instance_id, time.time()):
                return
            await asyncio.sleep(POLL_S)

    @asynccontextmanager
    async def _held_still(self, name: str) -> AsyncIterator[float]:
        """Stop a process with SIGSTOP while the block lasts; yields since when, Unix seconds."""
        pid = self._mesh.processes[name].pid
        if pid is None:
            raise TransientError(f"{name} does not run:\n{self._mesh.processes[name].log_tail()}")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield time.time()
        finally:
            if self._mesh.processes[name].pid == pid:
                os.kill(pid, signal.SIGCONT)

    # Servers.

    async def _stop_broker(self, fault: Fault) -> tuple[float, float]:
        return await self._stop_for(self._servers.kafka, fault.down_s)

    async def _restart_redis(self, fault: Fault) -> tuple[float, float]:
        return await self._stop_for(self._servers.redis, fault.down_s)

    async def _stop_for(
        self,
        server: Server | None,
        down_s: float,
        *,
        kills: bool = False,
        before_start: Callable[[], None] = lambda: None,
    ) -> tuple[float, float]:
        if server is None:
            raise MeshError("a server of somebody else's cannot be stopped")
        at_s = time.time()
        await asyncio.to_thread(server.kill if kills else server.stop)
        try:
            await asyncio.sleep(down_s)
        finally:
            await asyncio.to_thread(before_start)
            await asyncio.to_thread(server.start)
        return at_s, time.time()

    async def _kill_broker(self, fault: Fault) -> tuple[float, float]:
        return await self._stop_for(self._servers.kafka, fault.down_s, kills=True)

    async def _lose_aof_second(self, fault: Fault) -> tuple[float, float]:
        """End Redis with SIGKILL and bring it back as it was a second before, or more."""
        folder = self._servers.redis_dir
        if folder is None:
            raise MeshError("a server of somebody else's cannot be stopped")
        copy = folder / f"{AOF}.before"
        await asyncio.to_thread(shutil.copytree, folder / AOF, copy)
        await asyncio.sleep(LOST_S)
        return await self._stop_for(
            self._servers.redis, fault.down_s, kills=True, before_start=lambda: self._rewind(copy)
        )

    def _rewind(self, copy: Path) -> None:
        self._servers.rewind(copy)

    async def _flush_redis(self, _: Fault) -> tuple[float, float]:
        async with RedisClient.open(RedisParams(url=self._servers.redis_url)) as client:
            at_s = time.time()
            await client.command("FLUSHALL")
        return at_s, time.time()
