"""Measures one instance through the engine port: a short designed experiment, call by call.

Prompts are made of common words, so that a word is about a token; what counts is the engine's own
count. Every prompt begins with words of its own unless it is meant to be found in the cache.
Outputs are held at their length by `ignore_eos`, which vLLM, SGLang and llama.cpp know.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

import msgspec
import numpy as np

from shared.adapters.replayed_prompts import as_chat, prompt_of
from shared.contracts.messages import BoundCall, ScoreTerms, StageRequest, Usage
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.domain.trace import PrefixPart
from shared.errors import GenerationFailed, WrongServer
from shared.ports import Engine, Finished, FirstToken
from shared.simulation.latency_fit import ProbedCall

OPENING_WORDS = 6
MIXED_CALLS = 24
LONGEST_PROMPT_S = 3.0
STEPS_BETWEEN = 4.0
JOINING_REPEATS = 2
LARGE_BATCHES = 3
"""Sizes of batches beyond four that are measured, the largest ones."""
LONG_BATCH = 4
"""Calls in the batch of long contexts; more would take a slow engine minutes."""


class PlannedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the experiment.

    Attributes:
        after_s: When it is handed to the engine, seconds after its run began.
        input_tokens: Length of its prompt, about, tokens.
        output_tokens: Length of its output, tokens.
        prefix: Name of what its prompt begins with; empty: a beginning of its own.
        prefix_tokens: Length of that, tokens.
    """

    after_s: float = 0.0
    input_tokens: int
    output_tokens: int
    prefix: str = ""
    prefix_tokens: int = 0


Run = tuple[PlannedCall, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment: runs between which the instance is idle.

    Attributes:
        fitted: What the latency model is fitted to.
        held_out: Mixed runs, with random lengths and arrivals, on which it is judged.
    """

    fitted: tuple[Run, ...]
    held_out: tuple[Run, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """All of them, the held out ones last."""
        return self.fitted + self.held_out


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How large an experiment is.

    Attributes:
        lengths: Prompt lengths of lone calls, tokens.
        batches: Batch sizes.
        output_tokens: Output of a call, tokens.
        mixed_calls: Calls of each mixed run, with random lengths and arrivals.
        repeats: How often each lone call is made; at least twice beside mixed runs.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    output_tokens: int
    mixed_calls: int
    repeats: int = 2


def quick_scale(spec: InstanceSpec) -> Scale:
    """Return an experiment of a few seconds, good for a first guess."""
    longest = max(32, min(96, spec.max_context_tokens // 4))
    return Scale(
        lengths=(16, longest // 2, longest),
        batches=tuple(range(2, min(4, spec.max_num_seqs) + 1)),
        output_tokens=10,
        mixed_calls=0,
        repeats=1 if spec.max_num_seqs > 2 else 3,
    )


def full_scale(spec: InstanceSpec) -> Scale:
    """Return the experiment that a profile rests on: a few minutes.

    The longest prompt is one that the instance, by its description, computes in three seconds.
    """
    affordable = round(LONGEST_PROMPT_S / spec.latency.prefill_s_per_token)
    longest = max(64, min(spec.max_context_tokens // 2, affordable))
    lengths = sorted({12, 24, 48, longest // 4, longest // 2, longest})
    small = range(2, min(4, spec.max_num_seqs) + 1)
    large = {size for size in (8, 16, 32, 64) if size < spec.max_num_seqs} | {spec.max_num_seqs}
    return Scale(
        lengths=tuple(lengths),
        batches=tuple(sorted({*small, *sorted(large)[-LARGE_BATCHES:]} - {1})),
        output_tokens=24,
        mixed_calls=MIXED_CALLS,
        repeats=3,
    )


def plan_experiment(spec: InstanceSpec, scale: Scale, seed: int = 0) -> Plan:
    """Return prompt lengths × batch sizes × cached prefixes, prompts that join, two mixed runs.

    Args:
        spec: The instance.
        scale: How large.
        seed: Of the mixed runs.
    """
    room = spec.max_context_tokens - scale.output_tokens - OPENING_WORDS
    lengths = [min(length, room) for length in scale.lengths]
    out = scale.output_tokens
    lone: list[Run] = [(PlannedCall(input_tokens=length, output_tokens=out),) for length in lengths]
    per_call = spec.kv_tokens // max(1, max(scale.batches, default=1)) - out
    middle = lengths[len(lengths) // 2]
    batch_lengths = sorted({max(8, min(length, per_call)) for length in (lengths[0], middle)})
    batches = [
        _batch_run(spec, PlannedCall(input_tokens=length, output_tokens=out), batch)
        for batch in scale.batches
        for length in batch_lengths
    ]
    if not scale.mixed_calls:
        return Plan(fitted=(*lone * scale.repeats, *batches))
    if scale.batches:
        tokens = max(8, min(lengths[-1], per_call))
        long = PlannedCall(input_tokens=tokens, output_tokens=out)
        batches.append(_batch_run(spec, long, min(LONG_BATCH, scale.batches[-1])))
    joining = [
        _joining_run(spec, scale, batch, lengths)
        for batch in scale.batches
        for _ in range(JOINING_REPEATS)
    ]
    cached = _cached_runs(lengths, room) if spec.prefix_caching else []
    # Lone calls come back all through the experiment: a machine that changes its pace is noticed.
    again = lone * (scale.repeats - 2)
    mixed = (_mixed_run(spec, scale, lengths[0], most, seed) for most in (middle, lengths[-1]))
    return Plan(fitted=(*lone, *batches, *lone, *joining, *again, *cached), held_out=tuple(mixed))


def _batch_run(spec: InstanceSpec, call: PlannedCall, batch: int) -> Run:
    """Return equal calls, all but the first while the first one's prompt is computed.

    Calls that come at one instant may or may not begin together, by a race inside the engine; those
    that come during an iteration begin together after it.
    """
    other = msgspec.structs.replace(
        call, after_s=0.5 * call.input_tokens * spec.latency.prefill_s_per_token
    )
    return (call, *(other for _ in range(batch - 1)))


def _joining_run(spec: InstanceSpec, scale: Scale, batch: int, lengths: Sequence[int]) -> Run:
    """Return calls that decode, and prompts that come one after another meanwhile.

    Where an engine is busy nearly every prompt is computed beside calls that decode. Short prompts
    tell best what that costs, if they take longer than the rest of a step for which they wait.
    """
    model = spec.latency
    step_s = model.overhead_s + model.batched_s + model.weights_s + batch * model.seq_s
    longer = PlannedCall(input_tokens=lengths[0], output_tokens=2 * scale.output_tokens)
    decoding = _batch_run(spec, longer, batch - 1)
    at_s = len(decoding) * longer.input_tokens * model.prefill_s_per_token
    shortest = max(lengths[0], round(STEPS_BETWEEN * step_s / model.prefill_s_per_token))
    joining: list[PlannedCall] = []
    for length in (shortest, 2 * shortest, 4 * shortest):
        at_s += STEPS_BETWEEN * step_s
        tokens = min(length, lengths[-1])
        joining.append(PlannedCall(after_s=at_s, input_tokens=tokens, output_tokens=2))
        at_s += tokens * model.prefill_s_per_token
    return (*decoding, *joining)


def _cached_runs(lengths: Sequence[int], room: int) -> list[Run]:
    """Return pairs of calls that begin alike, the second after the first."""
    shared = max(32, lengths[-1] // 2)
    first = PlannedCall(
        input_tokens=min(room, shared + 8),
        output_tokens=4,
        prefix="shared",
        prefix_tokens=shared,
    )
    longer = msgspec.structs.replace(first, input_tokens=min(room, shared + shared // 2))
    return [(first,), (first,), (longer,)]


def _mixed_run(spec: InstanceSpec, scale: Scale, least: int, most: int, seed: int) -> Run:
    """Return calls with prompts of so many tokens that come when they come."""
    rng = np.random.default_rng([seed, most])
    calls = [
        PlannedCall(
            input_tokens=int(rng.integers(least, max(least + 1, most))),
            output_tokens=int(rng.integers(2, 2 * scale.output_tokens)),
        )
        for _ in range(scale.mixed_calls)
    ]
    alone_s = _rough_s(spec, calls)
    gaps = rng.exponential(alone_s, len(calls))
    return tuple(
        msgspec.structs.replace(call, after_s=float(at_s))
        for call, at_s in zip(calls, np.cumsum(gaps), strict=True)
    )


def _rough_s(spec: InstanceSpec, calls: Sequence[PlannedCall]) -> float:
    """Return about how long one of these calls takes alone, by the instance's own description."""
    model = spec.latency
    step_s = model.weights_s + model.overhead_s
    return sum(
        call.input_tokens * model.prefill_s_per_token + call.output_tokens * step_s
        for call in calls
    ) / len(calls)


def lone_tokens_per_s(latency: LatencyModel) -> float:
    """Return how fast one call alone decodes at a short context, tokens per second."""
    return 1.0 / max(1e-9, latency.weights_s + latency.overhead_s + latency.seq_s)


class Prober:
    """Runs planned calls on an engine and notes when things happened.

    The engine is given no more calls at a time than its description says it batches, as a worker
    does it: what else waits here, first come, first served, and has begun when it is handed in.

    Args:
        engine: What is measured; nothing else should use it meanwhile.
        name: Draws the prompts: an engine that has run an experiment remembers its prompts, and
            would answer those of the next one of the same name out of its prefix cache.
        is_strict: Whether calls without token counts, or of one token, are refused: nothing can be
            learned of them.
    """

    def __init__(self, engine: Engine, name: str, *, is_strict: bool = False) -> None:
        self._engine = engine
        self._name = name
        self._is_strict = is_strict
        self._places = asyncio.Semaphore(engine.spec.max_num_seqs)
        self._num_calls = 0
        self._has_chat_only = False

    async def warm_up(self) -> None:
        """Run one short call, whose time is not counted; learn whether the server only chats.

        Raises:
            GenerationFailed: The engine does not do its work.
        """
        planned = PlannedCall(input_tokens=16, output_tokens=4)
        try:
            await self._run_one(planned, time.perf_counter())
        except WrongServer as exc:
            self._has_chat_only = True
            try:
                await self._run_one(planned, time.perf_counter())
            except WrongServer:
                raise exc from None

    async def run(
        self, runs: Sequence[Run], advance: Callable[[], None] = lambda: None
    ) -> list[list[ProbedCall]]:
        """Return what happened to every call of every run.

        Args:
            runs: What to run.
            advance: Called after every run.

        Raises:
            GenerationFailed: A call failed: there is no profile then.
        """
        found = []
        for planned in runs:
            found.append(await self._run_together(planned))
            advance()
        return found

    async def _run_together(self, planned: Sequence[PlannedCall]) -> list[ProbedCall]:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._run_one(call, began_s), name=f"probe-{index}")
                for index, call in enumerate(planned)
            ]
        return [task.result() for task in tasks]

    async def _run_one(self, planned: PlannedCall, began_s: float) -> ProbedCall:
        await asyncio.sleep(max(0.0, began_s + planned.after_s - time.perf_counter()))
        async with self._places:
            return await self._generate(planned, began_s)

    async def _generate(self, planned: PlannedCall, began_s: float) -> ProbedCall:
        self._num_calls += 1
        call = probe_call(self._engine.spec, planned, self._name, self._num_calls)
        started_s = first_s = time.perf_counter()
        if self._has_chat_only:
            call = as_chat(call)
        engine_id = f"{call.request.request_id}:0"
        async with aclosing(self._engine.generate(call, engine_id)) as events:
            async for event in events:
                if isinstance(event, FirstToken):
                    first_s = time.perf_counter()
                if isinstance(event, Finished):
                    if self._is_strict:
                        _check_counts(event.usage, planned)
                    return ProbedCall(
                        started_s=started_s - began_s,
                        first_token_s=first_s - began_s,
                        finished_s=time.perf_counter() - began_s,
                        input_tokens=event.usage.input_tokens,
                        output_tokens=event.usage.output_tokens,
                        cached_tokens=event.usage.cached_tokens,
                    )
        raise GenerationFailed("the engine ended a call without a result")


def _check_counts(usage: Usage, planned: PlannedCall) -> None:
    if not usage.input_tokens or not usage.output_tokens:
        raise GenerationFailed("the server tells no token counts, by which calls are judged")
    if usage.output_tokens < min(2, planned.output_tokens):
        raise GenerationFailed(
            f"the server gave {usage.output_tokens} of {planned.output_tokens} tokens: it knows no "
            "ignore_eos, and so says nothing of its time per token"
        )


def probe_call(spec: InstanceSpec, planned: PlannedCall, name: str, number: int) -> BoundCall:
    """Return a planned call as an engine takes it; name and number draw its prompt."""
    prefix = PrefixPart(f"{name}-{planned.prefix}", planned.prefix_tokens)
    return BoundCall(
        request=StageRequest(
            request_id=f"{name}-{number}",
            model=spec.model,
            prompt=prompt_of(
                f"{name}-{number}", planned.input_tokens, (prefix,) if planned.prefix else ()
            ),
            max_tokens=planned.output_tokens,
            sampling={"temperature": 0.0},
            extra={"ignore_eos": True},
        ),
        queue_score=float(number),
        t_comp_s=1.0,
        deadline_s=1e15,
        predicted_input_tokens=planned.input_tokens,
        predicted_output_tokens=float(planned.output_tokens),
        terms=ScoreTerms(policy="probe", score=0.0, t_queue_s=0.0, t_comp_s=1.0),
        dispatched_at_s=0.0,
        dispatcher_id="probe",
    )
