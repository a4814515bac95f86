"""What a policy is told of a call."""

import msgspec
import pytest

from services.dispatcher.intake import QueryMemory
from services.dispatcher.params import DispatcherParams
from services.dispatcher.preparation import prepare
from shared.contracts.messages import Needs, SimulatedLengths, StageRequest
from shared.scheduling.dispatch import is_eligible
from shared.scheduling.policy import WaitingCall
from shared.scheduling.profiles import Predictor
from tests.support.dispatching import make_request
from tests.support.scheduling import make_view

SMALL = make_view(max_context_tokens=2_048)


def waiting_call(request: StageRequest) -> WaitingCall:
    """Return a call as the policy sees it."""
    ready = msgspec.structs.replace(request, ready_at_s=0.0, arrival_s=0.0)
    params = DispatcherParams(dispatcher_id="d")
    return prepare(ready, (SMALL,), Predictor(), params, QueryMemory(10)).call


def test_a_text_whose_length_is_only_predicted_rules_no_instance_out():
    """8,712 bytes with 859 tokens: 2,178 are predicted, and surely there are 544.

    With 5 tokens of output 549 must fit, and 2,183 likely do; costs go by the prediction.
    """
    call = waiting_call(make_request("r", prompt="x" * 8_712, max_tokens=5))
    assert call.input_tokens == 2_178
    assert (call.context_tokens, call.expected_context_tokens) == (549, 2_183)
    assert is_eligible(call, SMALL)


@pytest.mark.parametrize(
    "request_",
    [
        make_request("r", prompt="x" * 8_712, input_tokens_estimate=2_100),
        make_request("r", prompt="x" * 8_712, needs=Needs(context_tokens=2_049)),
        make_request("r", prompt="x" * 8_712, max_tokens=2_000),
        make_request("r", prompt="x" * 16 * 2_048),
        make_request(
            "r",
            prompt=None,
            messages=(),
            input_tokens_estimate=2_048,
            simulated=SimulatedLengths(input_tokens=9, output_tokens=9),
        ),
    ],
    ids=["claimed", "needed", "long answer", "surely too long", "replayed"],
)
def test_what_surely_does_not_fit_is_no_candidate(request_: StageRequest):
    """The producer's own counts are hard limits, and so is what so much text must have."""
    assert not is_eligible(waiting_call(request_), SMALL)


def test_a_count_of_the_producers_is_no_low_count():
    """There is nothing to prefer a larger instance for."""
    call = waiting_call(make_request("r", prompt="x" * 8_712, needs=Needs(context_tokens=1_000)))
    assert (call.context_tokens, call.expected_context_tokens) == (1_000, 0)
