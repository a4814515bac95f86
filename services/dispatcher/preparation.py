"""What a policy needs to know of a call: predicted lengths, its SLO, its stage's budget.

The budget freezes here, when the stage becomes ready, and travels with the call: a call that is
handed back keeps `ready_at_s`, `slo_s` and `t_slo_s`, and only its costs are computed anew.
"""

from collections.abc import Sequence

import msgspec

from services.dispatcher.intake import QueryMemory
from services.dispatcher.params import DispatcherParams
from shared.contracts.messages import StageRequest
from shared.scheduling.budget import stage_budget_s
from shared.scheduling.policy import InstanceView, WaitingCall
from shared.scheduling.profiles import Predictor

MAX_SLO_S = 1e9


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A call ready to be planned.

    Attributes:
        request: The call with SLO and budget filled in.
        call: What the policy sees.
    """

    request: StageRequest
    call: WaitingCall


def prepare(
    request: StageRequest,
    members: Sequence[InstanceView],
    predictor: Predictor,
    params: DispatcherParams,
    memory: QueryMemory,
) -> Prepared:
    """Return a call with its predictions and budget.

    Args:
        request: The call, with `ready_at_s` and `arrival_s` filled in.
        members: The instances that may serve it.
        predictor: Lengths and times.
        params: SLO defaults and floor.
        memory: SLOs chosen for earlier calls of the same query.
    """
    ready_at_s = request.ready_at_s or 0.0
    arrival_s = request.arrival_s if request.arrival_s is not None else ready_at_s
    if request.t_slo_s is None or request.slo_s is None:
        slo_s, is_default = _slo_s(request, members, predictor, params, memory)
        if is_default:
            memory.remember(request.query_id, arrival_s, slo_s)
        workflow, stage, iteration = request.workflow, request.stage, request.iteration
        t_slo_s = stage_budget_s(
            slo_s,
            ready_at_s - arrival_s,
            predictor.stage_s(workflow, stage, iteration, members),
            remaining_s(request, predictor, members),
        )
        request = msgspec.structs.replace(
            request, slo_s=slo_s, t_slo_s=t_slo_s, slo_defaulted=is_default
        )
    left_s = remaining_s(request, predictor, members)
    return Prepared(request=request, call=_waiting_call(request, arrival_s, predictor, left_s))


def remaining_s(
    request: StageRequest, predictor: Predictor, members: Sequence[InstanceView]
) -> float:
    """Return the expected time of what comes after a call, seconds; nothing after one alone."""
    if request.is_alone:
        return 0.0
    return predictor.remaining_s(request.workflow, request.stage, request.iteration, members)


def _waiting_call(
    request: StageRequest, arrival_s: float, predictor: Predictor, remaining_s: float
) -> WaitingCall:
    workflow, stage, prompt_bytes = request.workflow, request.stage, request.prompt_bytes
    claimed, longest_output = request.input_tokens_estimate, request.max_tokens or 1
    input_tokens = predictor.input_tokens(workflow, stage, claimed, prompt_bytes=prompt_bytes)
    least_tokens = predictor.least_input_tokens(workflow, stage, claimed, prompt_bytes)
    is_low_count = least_tokens < input_tokens and not request.needs.context_tokens
    return WaitingCall(
        request_id=request.request_id,
        query_id=request.effective_query_id,
        tenant=request.tenant,
        model=request.model,
        features=request.needs.features,
        input_tokens=input_tokens,
        output_tokens=predictor.output_tokens(workflow, stage, request.max_tokens),
        context_tokens=request.needs.context_tokens or least_tokens + longest_output,
        expected_context_tokens=input_tokens + longest_output if is_low_count else 0,
        prefix=request.prefix,
        ready_at_s=request.ready_at_s or 0.0,
        t_slo_s=request.t_slo_s or 0.0,
        deadline_s=arrival_s + (request.slo_s or 0.0),
        remaining_s=remaining_s,
        avoid=request.failed_on,
    )


def _slo_s(
    request: StageRequest,
    members: Sequence[InstanceView],
    predictor: Predictor,
    params: DispatcherParams,
    memory: QueryMemory,
) -> tuple[float, bool]:
    """Return the query's SLO and whether the mesh chose it; never below the floor."""
    if request.slo_s is not None:
        return max(request.slo_s, params.slo_floor_s), False
    known_s = memory.slo_s(request.query_id)
    if known_s is not None:
        return known_s, True
    tenant_s = params.tenant_slo_s.get(request.tenant)
    if tenant_s is None:
        if request.is_alone:
            isolated_s = predictor.stage_s(request.workflow, request.stage, 0, members)
        else:
            isolated_s = predictor.isolated_s(request.workflow, request.stage, members)
        # Messages take time too, beside which a very short call would always be late.
        tenant_s = max(params.slo_factor * isolated_s, params.default_slo_floor_s)
    return min(max(tenant_s, params.slo_floor_s), MAX_SLO_S), True
