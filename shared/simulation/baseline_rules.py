"""Baseline policies as compiled rules; see `rules`.

Formulas are the leaf functions of the policies themselves. What a policy remembers lies in `notes`:
`NOTES` numbers per dispatcher, then one per instance.
"""

from shared.scheduling.latency import batch_extra_s, prefill_s
from shared.scheduling.policies.earliest_finish import (
    MEMORY,
    decode_slowdown,
    stretch,
    time_to_start_s,
)
from shared.scheduling.policies.least_outstanding import outstanding_score
from shared.scheduling.policies.power_of_two import two_candidates
from shared.scheduling.policies.prefix_queue import kv_share, prefix_share, queue_share, scorer_sum
from shared.scheduling.policies.qlm import token_throughput, waiting_time_s
from shared.scheduling.policies.ratio import ratio_score
from shared.simulation.choosing import best_scored
from shared.simulation.fleet_state import UNASSIGNED, RunState
from shared.simulation.tables import Tables

NOTES = 2


def notes_of(run: RunState, dispatcher: int) -> int:
    """Return where a dispatcher's notes begin."""
    return dispatcher * (NOTES + run.num_instances)


def num_running(tables: Tables, run: RunState, dispatcher: int, instance: int) -> int:
    """Return how many of the calls a dispatcher knows of are in an engine, as it believes."""
    view = tables.views[dispatcher * run.num_instances + instance]
    return min(view.outstanding, tables.lines[instance].inside)


def num_waiting(tables: Tables, run: RunState, dispatcher: int, instance: int) -> int:
    """Return how many of the calls a dispatcher knows of wait in front of an engine."""
    view = tables.views[dispatcher * run.num_instances + instance]
    return view.outstanding - num_running(tables, run, dispatcher, instance)


def count_score(tables: Tables, run: RunState, dispatcher: int, instance: int) -> float:
    """Return the score of an instance by calls in progress."""
    return outstanding_score(
        num_waiting(tables, run, dispatcher, instance),
        num_running(tables, run, dispatcher, instance),
    )


def choose_fewest(tables: Tables, run: RunState, index: int, dispatcher: int) -> int:
    """Return the instance with the fewest calls in progress (`least-outstanding`)."""
    for instance in range(run.num_instances):
        tables.scores[instance] = count_score(tables, run, dispatcher, instance)
    return best_scored(tables, run, index)


def choose_of_two(tables: Tables, run: RunState, index: int, dispatcher: int) -> int:
    """Return the less busy of two instances drawn for a call (`power-of-two`)."""
    eligible = 0
    for instance in range(run.num_instances):
        if tables.costs_s[instance] >= 0.0:
            eligible += 1
    first, second = two_candidates(tables.plans[index].tie_key, eligible)
    one = nth_eligible(tables, run, first)
    other = nth_eligible(tables, run, second)
    if count_score(tables, run, dispatcher, other) > count_score(tables, run, dispatcher, one):
        return other
    return one


def nth_eligible(tables: Tables, run: RunState, position: int) -> int:
    """Return the instance at a position among those that can run the call."""
    for instance in range(run.num_instances):
        if tables.costs_s[instance] >= 0.0:
            if position == 0:
                return instance
            position -= 1
    return UNASSIGNED


def choose_by_prefix_and_queue(tables: Tables, run: RunState, index: int, dispatcher: int) -> int:
    """Return the instance of the highest weighted sum (`prefix-queue`)."""
    shortest = -1
    longest = 0
    for instance in range(run.num_instances):
        if tables.costs_s[instance] >= 0.0:
            waiting = num_waiting(tables, run, dispatcher, instance)
            if shortest < 0 or waiting < shortest:
                shortest = waiting
            longest = max(longest, waiting)
    input_tokens = tables.calls[index].input_tokens
    for instance in range(run.num_instances):
        engine = tables.engines[instance]
        unused = engine.free_blocks + engine.evictable_blocks
        used_tokens = (engine.total_blocks - unused) * engine.block_tokens
        tables.scores[instance] = scorer_sum(
            queue_share(num_waiting(tables, run, dispatcher, instance), shortest, longest),
            kv_share(used_tokens, tables.lines[instance].kv_tokens),
            prefix_share(tables.cached_tokens[instance], input_tokens, engine.block_tokens),
        )
    return best_scored(tables, run, index)


def choose_earliest_finish(tables: Tables, run: RunState, index: int, dispatcher: int) -> int:
    """Return the instance on which a call is estimated to end first (`earliest-finish`)."""
    share = prefill_share(tables, run, index, dispatcher)
    for instance in range(run.num_instances):
        if tables.costs_s[instance] >= 0.0:
            start_s = start_in_s(tables, run, index, dispatcher, instance, share)
            run_s = run_for_s(tables, run, index, dispatcher, instance, share)
            tables.scores[instance] = -(start_s + run_s)
    best = best_scored(tables, run, index)
    notes = notes_of(run, dispatcher)
    own_s = own_prefill_s(tables, index, best)
    tables.notes[notes] = MEMORY * tables.notes[notes] + own_s
    tables.notes[notes + 1] = MEMORY * tables.notes[notes + 1] + tables.costs_s[best]
    return best


def prefill_share(tables: Tables, run: RunState, index: int, dispatcher: int) -> float:
    """Return the share of prefill learned so far, or that of the first call itself."""
    notes = notes_of(run, dispatcher)
    if tables.notes[notes + 1] > 0.0:
        return tables.notes[notes] / tables.notes[notes + 1]
    service_s = 0.0
    prefills_s = 0.0
    for instance in range(run.num_instances):
        if tables.costs_s[instance] >= 0.0:
            service_s += tables.costs_s[instance]
            prefills_s += own_prefill_s(tables, index, instance)
    return prefills_s / service_s if service_s > 0.0 else 0.0


def own_prefill_s(tables: Tables, index: int, instance: int) -> float:
    """Return the expected prefill time of a call on an instance."""
    engine = tables.engines[instance]
    belief = tables.beliefs[instance]
    own_s = prefill_s(
        tables.calls[index].input_tokens - tables.cached_tokens[instance],
        engine.max_batched_tokens,
        belief.weights_s,
        belief.overhead_s + belief.batched_s,
        belief.prefill_s_per_token,
        engine.chunk_waste_tokens,
        float(tables.cached_tokens[instance]),
        belief.attention_s_per_pair,
    )
    return min(own_s, tables.costs_s[instance])


def slots(tables: Tables, index: int, instance: int) -> float:
    """Return how many calls like this one an instance batches."""
    line = tables.lines[instance]
    predicted = tables.plans[index].predicted_tokens
    context_tokens = max(tables.calls[index].input_tokens + predicted, 1.0)
    return max(1.0, min(float(line.admission), line.kv_tokens / context_tokens))


def start_in_s(
    tables: Tables, run: RunState, index: int, dispatcher: int, instance: int, share: float
) -> float:
    """Return the estimated time until an instance has a place for a call."""
    view = tables.views[dispatcher * run.num_instances + instance]
    places = slots(tables, index, instance)
    return time_to_start_s(view.outstanding, places, view.backlog_s, share)


def run_for_s(
    tables: Tables, run: RunState, index: int, dispatcher: int, instance: int, share: float
) -> float:
    """Return the estimated time of a call among others in the batch."""
    belief = tables.beliefs[instance]
    view = tables.views[dispatcher * run.num_instances + instance]
    num_others = min(float(view.outstanding), slots(tables, index, instance) - 1.0)
    slowdown = decode_slowdown(
        num_others + 1.0,
        tables.calls[index].input_tokens + tables.plans[index].predicted_tokens / 2.0,
        belief.weights_s,
        belief.overhead_s,
        belief.seq_s,
        belief.kv_s_per_token,
        batch_extra_s(num_others + 1.0, belief.pair_s, belief.trio_s, belief.batched_s),
    )
    own_s = own_prefill_s(tables, index, instance)
    decode_s = tables.costs_s[instance] - own_s
    return stretch(num_others, share) * (own_s + decode_s * slowdown)


def choose_shortest_wait(tables: Tables, run: RunState, index: int, dispatcher: int) -> int:
    """Return the instance of the earliest estimated completion (`qlm`)."""
    notes = notes_of(run, dispatcher)
    tables.notes[notes] += 1.0
    tables.notes[notes + 1] += tables.plans[index].predicted_tokens
    mean_tokens = tables.notes[notes + 1] / tables.notes[notes]
    for instance in range(run.num_instances):
        view = tables.views[dispatcher * run.num_instances + instance]
        tokens_per_s = throughput(tables, index, instance)
        wait_s = waiting_time_s(view.outstanding, mean_tokens, tokens_per_s)
        tables.scores[instance] = -(wait_s + tables.costs_s[instance])
    return best_scored(tables, run, index)


def throughput(tables: Tables, index: int, instance: int) -> float:
    """Return output tokens per second of an instance full of calls like this one."""
    belief = tables.beliefs[instance]
    batch = slots(tables, index, instance)
    extra_s = batch_extra_s(batch, belief.pair_s, belief.trio_s, belief.batched_s)
    return token_throughput(
        batch,
        tables.calls[index].input_tokens + tables.plans[index].predicted_tokens,
        belief.weights_s,
        belief.overhead_s + extra_s,
        belief.seq_s,
        belief.kv_s_per_token,
    )


def choose_by_ratio(tables: Tables, run: RunState, dispatcher: int) -> int:
    """Return the instance of the released variant's highest priority (`ratio`)."""
    work = notes_of(run, dispatcher) + NOTES
    reference = nth_eligible(tables, run, 0)
    best = reference
    if tables.notes[work + reference] > 0.0:
        best_score = 0.0
        best = UNASSIGNED
        for instance in range(run.num_instances):
            if tables.costs_s[instance] < 0.0:
                continue
            score = ratio_score(
                run.alpha,
                tables.costs_s[instance],
                tables.costs_s[reference],
                tables.notes[work + instance] * tables.lines[instance].work_weight,
                tables.notes[work + reference],
            )
            if best < 0 or score > best_score:
                best = instance
                best_score = score
    tables.notes[work + best] += tables.costs_s[best]
    return best
