"""One instance of the reference simulator, see `reference_simulator`."""

import math
from dataclasses import dataclass, field

MAX_PASSES = 16


@dataclass
class Speed:
    """Seconds per unit of work."""

    overhead: float
    weights: float
    prefill: float
    seq: float
    kv: float
    waste: float
    attention: float
    pair: float
    trio: float
    batched: float
    joined: float


@dataclass
class Call:
    """One call and everything that happens to it."""

    number: int
    stage: int
    tokens_in: int
    tokens_out: int
    prefix: tuple[tuple[str, int], ...]
    predicted: float
    tie_key: int
    model: str
    instance: int = -1
    ready: float = math.nan
    assigned: float = math.nan
    started: float = math.nan
    first_token: float = math.nan
    end: float = math.nan
    cost: float = 0.0
    score: float = 0.0
    order: int = -1
    admitted: int = -1
    cached: int = 0
    generated: int = 0
    computed: int = 0
    chunk: int = 0
    passes: int = 0
    warm: bool = False

    def target(self) -> int:
        """Tokens that prefill has to cover."""
        return self.tokens_in + self.generated

    def kv(self) -> int:
        """Tokens in memory while decoding: all but the newest one."""
        return self.tokens_in + self.generated - 1


@dataclass
class Part:
    """A prefix part in one instance's cache."""

    start: int
    end: int
    resident: int = 0
    users: list[int] = field(default_factory=list)


class Instance:
    """One instance, iteration by iteration."""

    def __init__(
        self,
        number: int,
        model: str,
        speed: Speed,
        *,
        max_seqs: int,
        budget: int,
        block: int,
        blocks: int,
        limit: int,
        caches: bool,
        reuses: bool,
        hits: float,
        believed: Speed,
        admission: int,
        look_past: int,
        tie_key: int,
    ) -> None:
        self.number = number
        self.model = model
        self.speed = speed
        self.max_seqs = max_seqs
        self.budget = budget
        self.block = block
        self.blocks = blocks
        self.limit = limit
        self.caches = caches
        self.reuses = reuses
        self.hits = hits
        self.believed = believed
        self.admission = admission
        self.look_past = look_past
        self.tie_key = tie_key
        self.line: list[Call] = []
        self.waiting: list[Call] = []
        self.prefill: list[Call] = []
        self.decode: list[Call] = []
        self.parts: dict[tuple[tuple[str, int], ...], Part] = {}
        self.unused: list[tuple[tuple[str, int], ...]] = []
        self.end = math.inf
        self.num_admissions = 0
        self.num_preemptions = 0
        self.busy = 0.0

    # Memory

    def chain(self, call: Call) -> list[tuple[tuple[str, int], ...]]:
        """Keys of the call's prefix parts in memory, outermost first."""
        return self.believed_chain(call) if call.warm else []

    def believed_chain(self, call: Call) -> list[tuple[tuple[str, int], ...]]:
        """Keys of the prefix parts that policies believe to be cached."""
        keys = []
        if self.caches:
            total = 0
            for length in range(1, len(call.prefix) + 1):
                total += call.prefix[length - 1][1]
                if total > call.tokens_in:
                    break
                keys.append(call.prefix[:length])
        return keys

    def part(self, key: tuple[tuple[str, int], ...]) -> Part:
        """The part of a key, made when it is new."""
        if key not in self.parts:
            before = sum(tokens for _, tokens in key[:-1]) // self.block
            end = sum(tokens for _, tokens in key) // self.block
            self.parts[key] = Part(before, end)
        return self.parts[key]

    def chain_blocks(self, call: Call) -> int:
        """Whole blocks of the call's prefix chain."""
        keys = self.chain(call)
        return self.part(keys[-1]).end if keys else 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return math.ceil(tokens / self.block)

    def private_blocks(self, call: Call, grown: bool) -> int:
        """Blocks that a batched call holds for itself."""
        if call in self.decode:
            return self.blocks_for(call.kv() + (1 if grown else 0)) - self.chain_blocks(call)
        return self.blocks_for(call.target()) - self.chain_blocks(call)

    def free_blocks(self, grown: bool) -> int:
        """Blocks that hold nothing."""
        private = sum(self.private_blocks(call, grown) for call in self.prefill + self.decode)
        return self.blocks - private - sum(part.resident for part in self.parts.values())

    def evictable_blocks(self) -> int:
        """Blocks of prefix parts that nobody uses."""
        return sum(part.resident for part in self.parts.values() if not part.users)

    def resident_blocks(self, call: Call, *, believed: bool = False) -> int:
        """Blocks of the call's chain in memory, counted from the prompt's start."""
        total = 0
        for key in self.believed_chain(call) if believed else self.chain(call):
            part = self.part(key)
            total += part.resident
            if part.resident < part.end - part.start:
                break
        return total

    def evict_to(self, wanted: int, grown: bool) -> None:
        """Evict until so many blocks are free, least recently used first, from the end."""
        while self.free_blocks(grown) < wanted:
            part = self.parts[self.unused[0]]
            part.resident -= 1
            if part.resident == 0:
                self.unused.pop(0)

    def lacking(self, call: Call, tokens: int, grown: bool) -> int:
        """Blocks missing to hold so many tokens of a call that is not in the batch."""
        in_use = 0
        for key in self.chain(call):
            if self.part(key).users:
                in_use = self.part(key).end
        have = self.free_blocks(grown) + self.evictable_blocks()
        return self.blocks_for(tokens) - in_use - have

    def release(self, call: Call, computed: int) -> None:
        """Let go of the call's prefix parts; it has left the batch already."""
        for key in reversed(self.chain(call)):
            part = self.part(key)
            part.users.remove(call.number)
            if not part.users:
                useful = computed // self.block - part.start
                part.resident = max(0, min(useful, part.resident))
                if part.resident:
                    self.unused.append(key)

    # One iteration

    def start(self, now: float) -> None:
        """Plan the iteration that starts now."""
        if not self.waiting and not self.prefill and not self.decode:
            self.end = math.inf
            return
        preempted = self.make_room()
        left = self.budget - len(self.decode)
        for call in self.prefill:
            call.chunk = min(left, call.target() - call.computed)
            left -= call.chunk
        if not preempted:
            self.admit(left, now)
        tokens = sum(call.chunk for call in self.prefill)
        compute = (tokens + len(self.prefill) * self.speed.waste) * self.speed.prefill
        kv_after = sum(call.kv() + 1 for call in self.decode)
        pairs = sum(call.chunk * (call.computed + call.chunk / 2) for call in self.prefill)
        self.end = (
            now
            + self.speed.overhead
            + self.shared()
            + max(self.speed.weights, compute)
            + pairs * self.speed.attention
            + len(self.decode) * self.speed.seq
            + kv_after * self.speed.kv
        )
        self.busy += self.end - now

    def shared(self) -> float:
        """What the calls of the iteration cost because they share it."""
        if self.prefill:
            return self.speed.batched + self.speed.joined * (len(self.prefill + self.decode) - 1)
        few = {0: 0.0, 1: 0.0, 2: self.speed.pair, 3: self.speed.trio}
        return few.get(len(self.decode), self.speed.batched)

    def make_room(self) -> bool:
        """Preempt calls until the decoding ones can grow by a token each."""
        preempted = False
        while self.free_blocks(grown=True) + self.evictable_blocks() < 0:
            victim = max(self.prefill + self.decode, key=lambda c: (c.score, c.admitted))
            decoding = victim in self.decode
            computed = victim.kv() if decoding else victim.computed
            (self.decode if decoding else self.prefill).remove(victim)
            self.release(victim, computed)
            self.num_preemptions += 1
            self.enter(victim)
            preempted = True
        self.evict_to(0, grown=True)
        return preempted

    def enter(self, call: Call) -> None:
        """Put a call among those waiting inside."""
        call.computed = 0
        call.chunk = 0
        call.passes = 0
        self.waiting.append(call)
        self.waiting.sort(key=lambda c: (c.score, c.order))

    def admit(self, left: int, now: float) -> None:
        """Admit waiting calls while places, memory and tokens last."""
        for call in list(self.waiting):
            if left == 0 or len(self.prefill) + len(self.decode) == self.max_seqs:
                return
            if self.lacking(call, call.target(), grown=True) > 0:
                if call.passes >= MAX_PASSES:
                    return
                continue
            for passed in self.waiting[: self.waiting.index(call)]:
                passed.passes += 1
            self.waiting.remove(call)
            held = self.resident_blocks(call)
            for key in self.chain(call):
                part = self.part(key)
                if key in self.unused:
                    self.unused.remove(key)
                part.users.append(call.number)
            need = self.blocks_for(call.target()) - held
            self.evict_to(need, grown=True)
            for key in self.chain(call):
                part = self.part(key)
                part.resident = part.end - part.start
            call.computed = min(held, (call.target() - 1) // self.block) * self.block
            call.chunk = min(left, call.target() - call.computed)
            left -= call.chunk
            call.admitted = self.num_admissions
            self.num_admissions += 1
            if math.isnan(call.started):
                call.started = now
                call.cached = call.computed
            self.prefill.append(call)

    def finish_iteration(self) -> tuple[list[Call], bool]:
        """Do what the iteration brings; returns the calls that ended, and whether it showed."""
        now, self.end = self.end, math.inf
        ended, visible = [], False
        for call in self.decode:
            call.generated += 1
        for call in sorted(self.decode, key=lambda c: c.admitted):
            if call.generated == call.tokens_out:
                self.decode.remove(call)
                self.release(call, call.kv())
                ended.append(call)
        for call in list(self.prefill):
            call.computed += call.chunk
            if call.computed < call.target():
                continue
            computed = call.target()
            self.prefill.remove(call)
            call.generated += 1
            if call.generated == 1:
                call.first_token = now
                visible = True
            if call.generated == call.tokens_out:
                self.release(call, computed)
                ended.append(call)
            else:
                self.decode.append(call)
        for call in ended:
            call.end = now
        return ended, visible or bool(ended)

    # The gate

    def has_turn(self) -> bool:
        """Whether a call added now gets its turn for prefill next."""
        if len(self.waiting) + len(self.prefill) + len(self.decode) >= self.max_seqs:
            return False
        if not self.waiting:
            return True
        return not self.prefill and sum(c.target() for c in self.waiting) < self.budget

    def is_empty(self) -> bool:
        """Whether no call is inside the engine."""
        return not self.waiting and not self.prefill and not self.decode

    def feed(self, in_flight: bool, most: int | None = None) -> None:
        """Take calls from the line while they fit."""
        held: list[Call] = []
        inside = len(self.waiting) + len(self.prefill) + len(self.decode)
        most = self.admission if most is None else most
        while self.line and inside < most and self.has_turn():
            call = self.line.pop(0)
            tokens = min(
                call.tokens_in + max(0, math.ceil(call.predicted) - 1), self.blocks * self.block
            )
            promised = sum(self.blocks_for(c.target()) for c in self.waiting)
            if self.lacking(call, tokens, grown=in_flight) + promised > 0:
                held.append(call)
                if len(held) > self.look_past or call.passes >= MAX_PASSES:
                    break
                continue
            self.enter(call)
            inside += 1
            for passed in held:
                passed.passes += 1
        self.line += held
        self.line.sort(key=lambda c: (c.score, c.order))
