"""`vtc`: fair shares per tenant by virtual token counters, behind the fewest calls in progress.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024, arXiv 2401.00588) and
its artifact (Ying1123/VTC-artifact, slora/server/router/vtc_req_queue.py and
vtc_pred_len_req_queue.py). The server takes next the earliest call of the tenant with the smallest
counter and charges the counter 1 per prompt token and 2 per output token. A tenant who begins to
wait has its counter lifted to the smallest counter of those who wait: idling earns no credit.

Here queues are kept by a constant score, so the order is written down in advance, as start-time
fair queueing does (Goyal, Vin, Cheng, 1996): a call's score is the value its tenant's counter will
have when the call is taken, given that the calls before it are charged as predicted. The tenant
with the smallest counter is then the one whose first call has the smallest score, so that among
tenants that go on waiting the order is exactly the source's with predicted lengths. The smallest
counter of those who wait is the smallest score at the head of any line (`InstanceView.head_score`).

Differences: outputs are charged as predicted when the call is bound, and never corrected (the
artifact corrects them as tokens come; scores that are out cannot change). Lines are per instance
and counters span the pool: a tenant is served fairly over the fleet, not on every instance. When
nobody waits all tenants are level (the paper lifts newcomers to the counter of the last who left).
Each dispatcher has counters of its own; lines whose head is not known lift nobody. (HexGen-Flow's
authors, who compare with VTC, count per query; here it is per tenant, as in the source, and with a
single tenant the policy is `least-outstanding`.) Dispatching is
none of the source's business; calls go to the instance with the fewest in progress.

Scores are instants: a virtual second is 100,000 charged tokens, more than a pool serves one tenant
in a second. So the virtual clock falls behind the real one while calls wait and catches up when
none does; a dispatcher that starts anew sorts in behind what waits.
"""

import math
from collections.abc import Mapping, Sequence

from shared.scheduling.policies.first_come import FirstCome, choice_of
from shared.scheduling.policies.least_outstanding import least_outstanding
from shared.scheduling.policy import Choice, Cost, InstanceView, WaitingCall

MAX_TENANTS = 10_000


def charge_s(input_tokens: float, output_tokens: float) -> float:
    """Return what a call costs its tenant, virtual seconds (leaf).

    Args:
        input_tokens: Prompt length, tokens.
        output_tokens: Predicted output length, tokens.
    """
    return (1.0 * input_tokens + 2.0 * output_tokens) / 100_000.0


def virtual_time_s(
    previous_s: float, num_waiting: int, smallest_score: float, now_s: float
) -> float:
    """Return the counter that a tenant who begins to wait is lifted to, virtual seconds (leaf).

    Args:
        previous_s: The same at the call before.
        num_waiting: Calls that wait anywhere.
        smallest_score: Smallest queue score among them; infinite when not known.
        now_s: Present instant.
    """
    if num_waiting == 0:
        return max(previous_s, now_s)
    if smallest_score < math.inf:
        return max(previous_s, smallest_score)
    return previous_s


def start_tag_s(counter_s: float, virtual_s: float) -> float:
    """Return the counter at which a call will be taken: its queue score (leaf)."""
    return max(counter_s, virtual_s)


class VirtualTokenCounter(FirstCome):
    """Fair shares of tokens among tenants."""

    name = "vtc"

    def __init__(self) -> None:
        self._counters_s: dict[str, float] = {}
        self._virtual_s: float | None = None
        self._latest: tuple[str, float] = ("", 0.0)

    def choose(
        self,
        call: WaitingCall,
        views: Sequence[InstanceView],
        costs: Mapping[str, Cost],  # noqa: ARG002 - fairness counts tokens, not seconds
        now_s: float,
    ) -> Choice | None:
        """Return the instance with the fewest calls in progress, and charge the tenant."""
        self._advance(views, now_s)
        tag_s = self._tag_s(call)
        self._counters_s[call.tenant] = tag_s + charge_s(call.input_tokens, call.output_tokens)
        self._latest = (call.request_id, tag_s)
        return choice_of(*least_outstanding(call, views))

    def queue_score(self, call: WaitingCall, t_comp_s: float) -> float:  # noqa: ARG002
        """Return the tenant's counter when this call is taken."""
        request_id, tag_s = self._latest
        return tag_s if request_id == call.request_id else self._tag_s(call)

    def _advance(self, views: Sequence[InstanceView], now_s: float) -> None:
        num_waiting = sum(view.num_waiting for view in views)
        heads = [view.head_score for view in views if view.head_score is not None]
        smallest = min(heads, default=math.inf)
        previous_s = self._virtual_s
        if previous_s is None:
            previous_s = min(smallest, now_s)
        self._virtual_s = virtual_time_s(previous_s, num_waiting, smallest, now_s)
        if len(self._counters_s) > MAX_TENANTS:
            self._forget_level_tenants(self._virtual_s)

    def _tag_s(self, call: WaitingCall) -> float:
        virtual_s = self._virtual_s if self._virtual_s is not None else call.ready_at_s
        return start_tag_s(self._counters_s.get(call.tenant, virtual_s), virtual_s)

    def _forget_level_tenants(self, virtual_s: float) -> None:
        """Drop counters that would be lifted anyway."""
        self._counters_s = {
            tenant: counter_s
            for tenant, counter_s in self._counters_s.items()
            if counter_s > virtual_s
        }
