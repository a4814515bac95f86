"""What a scheduling policy is: who gets a call, in which order calls wait, who is let in.

A policy sees predictions only. It may keep small deterministic state of its own (a round-robin
counter, service per tenant); it never reads a clock and never draws randomness: what a source
draws at random is derived from the call's id. It hears of no starts and no ends: what it needs to
know of them is in the views (docs/adr/0006-policy-interface.md).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from shared.domain.instance import InstanceSpec
from shared.domain.trace import PrefixPart


class WaitingCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that is not bound to an instance yet.

    Attributes:
        request_id: The call.
        query_id: Its query.
        tenant: Who asks.
        model: Model or adapter it needs.
        features: Abilities it needs.
        input_tokens: Predicted prompt length, tokens.
        output_tokens: Predicted output length, tokens.
        context_tokens: Prompt plus longest output that must fit, tokens: the producer's count, or
            the fewest that a prompt of this size can have.
        expected_context_tokens: The same as predicted; instances with that much room go before
            smaller ones. 0 where `context_tokens` is no low count.
        prefix: Prefix chain.
        ready_at_s: When it became ready, seconds.
        t_slo_s: Its stage's budget, seconds.
        deadline_s: Its query's deadline, seconds.
        remaining_s: Expected duration of everything after its stage, seconds.
        avoid: Instances that get it only when no other may take it: they failed it before.
    """

    request_id: str
    query_id: str
    tenant: str = "default"
    model: str = "default"
    features: tuple[str, ...] = ()
    input_tokens: int
    output_tokens: float
    context_tokens: int = 0
    expected_context_tokens: int = 0
    prefix: tuple[PrefixPart, ...] = ()
    ready_at_s: float
    t_slo_s: float
    deadline_s: float
    remaining_s: float = 0.0
    avoid: tuple[str, ...] = ()


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """What the dispatcher knows of an instance at this moment.

    Attributes:
        spec: Static description.
        backlog_s: Sum of t_comp of the calls bound to it and not finished, plus foreign load,
            seconds.
        num_waiting: Calls bound and not in the engine.
        num_running: Calls in the engine.
        capacity: Most calls its engine is given at a time.
        queue_bound: Most calls it lets wait.
        speed_factor: Learned correction of its latency model.
        hit_factor: Learned share of the expected prefix-cache hits that happen, in [0, 1].
        kv_used_tokens: KV cache in use by its engine, tokens.
        head_score: Queue score of the first call of its line, the one it takes next; None when
            none waits there or nobody told.
    """

    spec: InstanceSpec
    backlog_s: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    capacity: int = 1
    queue_bound: int = 10_000
    speed_factor: float = 1.0
    hit_factor: float = 1.0
    kv_used_tokens: int = 0
    head_score: float | None = None

    @property
    def num_outstanding(self) -> int:
        """Calls bound to it and not finished."""
        return self.num_waiting + self.num_running


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Expected cost of one call on one instance.

    Attributes:
        t_comp_s: Expected service time, seconds, > 0.
        cached_tokens: Prompt tokens expected in the prefix cache, tokens.
    """

    t_comp_s: float
    cached_tokens: int = 0


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A policy's choice for one call, with the numbers that made it.

    Attributes:
        instance_id: The instance.
        score: Winning score on the policy's own scale.
        t_queue_s: Queue term used, seconds.
        alpha: α in force, or None.
        beta_s2: β in force, seconds squared, or None.
    """

    instance_id: str
    score: float
    t_queue_s: float = 0.0
    alpha: float | None = None
    beta_s2: float | None = None


class Policy(Protocol):
    """Dispatch, queue order and admission behind one interface."""

    @property
    def name(self) -> str:
        """Registry name."""
        ...

    def choose(
        self,
        call: WaitingCall,
        views: Sequence[InstanceView],
        costs: Mapping[str, Cost],
        now_s: float,
    ) -> Choice | None:
        """Return the instance for a call, or None to leave it unassigned for now.

        A choice is final: a policy that keeps accounts charges the call here.

        Args:
            call: The call.
            views: The eligible instances, at least one, sorted by id.
            costs: instance_id -> cost of this call there.
            now_s: Present instant, seconds.
        """
        ...

    def queue_score(self, call: WaitingCall, t_comp_s: float) -> float:
        """Return the call's constant position in an instance's queue, smallest first.

        Asked once `choose` has bound the call; asking again changes nothing. Equal scores wait in
        the order of their arrival at the instance.

        Args:
            call: The call.
            t_comp_s: Its cost on the instance chosen, seconds.
        """
        ...

    def admit(self, call: WaitingCall, views: Sequence[InstanceView], now_s: float) -> str | None:
        """Return None to let the call in, or the reason word for refusing it."""
        ...

    def set_alpha(self, alpha: float) -> None:
        """Use a new α from now on; policies without one ignore it."""
        ...
