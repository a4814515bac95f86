"""Generates Text-to-SQL queries that match published statistics, seeded.

Lengths are drawn from quantile splines: piecewise linear inverse distribution functions through
the published 5th, 50th and 95th percentile, with outer and intermediate knots set so that the
mean matches too. The lengths of one query hang together: a hidden *schema size* moves the prompts
of candidates and revisions; the two candidates' prompts differ by exactly the difference of their
templates, and their outputs rise and fall together; prompts of parallel evaluations are nearly
equal.

Source: `shared.domain.text2sql`.
"""

import math
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from shared.domain import text2sql
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.simulation.traces import build_stages

Mode = Literal["natural", "stress"]
Floats = npt.NDArray[np.float64]
Lengths = tuple[int, int]
Groups = list[tuple[str, list[Lengths]]]

ROUTER_INPUTS = (301, 304, 308, 312)
ROUTER_OUTPUTS = (5, 5, 5, 4)
ROUTER_LONG_PROBABILITY = 1 / 3
UNIT_TESTER_CALLS = ((271, 6), (275, 4), (278, 4))
EVALUATE_OUTPUT = 22
EVALUATE_LONG_PROBABILITY = 0.07
EVALUATE_JITTER = 6
REVISE_JITTER = 20

# (probability, tokens) knots.
ROUTER_LONG_OUTPUT = ((0, 22), (0.4, 32), (1, 46))
KEYWORDS_INPUT = ((0, 635), (0.05, 635), (0.5, 666), (0.95, 702), (1, 706))
KEYWORDS_OUTPUT = ((0, 15), (0.05, 15), (0.25, 38), (0.5, 47), (0.95, 58), (1, 86))
CANDIDATE_INPUT_ABOVE_TEMPLATE = ((0, 2_580), (0.1, 2_587), (0.5, 2_740), (0.9, 2_987), (1, 3_130))
CANDIDATE_LONG_OUTPUT = ((0, 420), (0.167, 670), (0.5, 840), (0.9, 1_010), (1, 1_012))
CANDIDATE_SHORT_OUTPUT = ((0, 350), (0.1, 413), (0.5, 520), (0.833, 670), (1, 772))
REVISE_INPUT = ((0, 5_700), (0.05, 5_712), (0.5, 5_918), (0.95, 6_274), (1, 6_900))
REVISE_OUTPUT = ((0, 11), (0.05, 20), (0.5, 81), (0.95, 144), (1, 190))
UNIT_TEST_INPUT = ((0, 768), (0.05, 932), (0.5, 1_130), (0.95, 1_226), (1, 1_387))
UNIT_TEST_OUTPUT = ((0, 42), (0.05, 42), (0.25, 90), (0.5, 106), (0.75, 124), (0.95, 134), (1, 136))
EVALUATE_INPUT = (
    (0, 650),
    (0.05, 794),
    (0.25, 870),
    (0.5, 1_005),
    (0.75, 1_040),
    (0.95, 1_090),
    (1, 1_213),
)
EVALUATE_LONG_OUTPUT = ((0, 66), (0.3, 74), (1, 250))

# Rank correlations within a query.
SCHEMA_TO_REVISE = 0.85
BETWEEN_CANDIDATE_OUTPUTS = 0.7
BETWEEN_KEYWORD_LENGTHS = 0.6


def generate(
    num_queries: int, rng: np.random.Generator, mode: Mode = "natural"
) -> tuple[TraceQuery, ...]:
    """Return generated queries, without arrivals and SLOs.

    Args:
        num_queries: How many, >= 1.
        rng: Source of randomness; equal seeds give equal queries.
        mode: `natural`: 70% of queries need no revision, each further round is needed with
            probability one half; `stress`: the number of revisions is uniform in 0..10.

    Raises:
        ConfigError: `num_queries` or `mode` is out of range.
    """
    if num_queries < 1:
        raise ConfigError(f"the number of queries must be at least 1, is {num_queries}")
    if mode not in get_args(Mode):
        raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}, is {mode!r}")
    schema = rng.standard_normal(num_queries)
    revisions = _revision_counts(num_queries, rng, mode)
    return tuple(
        TraceQuery(
            query_id=f"q{index:05d}",
            workflow=text2sql.WORKFLOW,
            stages=build_stages(_query(float(schema[index]), int(revisions[index]), rng)),
        )
        for index in range(num_queries)
    )


def _revision_counts(
    num_queries: int, rng: np.random.Generator, mode: Mode
) -> npt.NDArray[np.int64]:
    if mode == "stress":
        return rng.integers(0, text2sql.MAX_REVISE + 1, num_queries)
    needed = rng.random(num_queries) < text2sql.NATURAL_REVISE_PROBABILITY
    rounds = rng.geometric(1.0 - text2sql.NATURAL_REVISE_AGAIN_PROBABILITY, num_queries)
    return np.where(needed, np.minimum(rounds, text2sql.MAX_REVISE), 0).astype(np.int64)


def _query(schema: float, revisions: int, rng: np.random.Generator) -> Groups:
    groups = _retrieve(rng)
    groups.append((text2sql.GENERATE_CANDIDATE, _candidates(schema, rng)))
    groups += [(text2sql.REVISE, [lengths]) for lengths in _revise(schema, revisions, rng)]
    return groups + _test(rng)


def _retrieve(rng: np.random.Generator) -> Groups:
    outputs = list(ROUTER_OUTPUTS)
    if rng.random() < ROUTER_LONG_PROBABILITY:
        outputs[0] = _sample(ROUTER_LONG_OUTPUT, rng)
    routers: Groups = [
        (text2sql.INFORMATION_RETRIEVER, [lengths])
        for lengths in zip(ROUTER_INPUTS, outputs, strict=True)
    ]
    if rng.random() >= text2sql.KEYWORDS_PROBABILITY:
        return routers
    first = rng.standard_normal()
    second = _correlated(first, BETWEEN_KEYWORD_LENGTHS, rng)
    lengths = (_at(KEYWORDS_INPUT, first), _at(KEYWORDS_OUTPUT, second))
    return [routers[0], (text2sql.EXTRACT_KEYWORDS, [lengths]), *routers[1:]]


def _candidates(schema: float, rng: np.random.Generator) -> list[Lengths]:
    above = _at(CANDIDATE_INPUT_ABOVE_TEMPLATE, schema)
    first = rng.standard_normal()
    second = _correlated(first, BETWEEN_CANDIDATE_OUTPUTS, rng)
    long_tokens, short_tokens = text2sql.CANDIDATE_TEMPLATE_TOKENS
    return [
        (above + long_tokens, _at(CANDIDATE_LONG_OUTPUT, first)),
        (above + short_tokens, _at(CANDIDATE_SHORT_OUTPUT, second)),
    ]


def _revise(schema: float, revisions: int, rng: np.random.Generator) -> list[Lengths]:
    base = _at(REVISE_INPUT, _correlated(schema, SCHEMA_TO_REVISE, rng))
    jitters = rng.integers(-REVISE_JITTER, REVISE_JITTER + 1, revisions)
    return [(base + int(jitter), _sample(REVISE_OUTPUT, rng)) for jitter in jitters]


def _test(rng: np.random.Generator) -> Groups:
    testers: Groups = [(text2sql.UNIT_TESTER, [lengths]) for lengths in UNIT_TESTER_CALLS]
    if rng.random() >= text2sql.UNIT_TEST_PROBABILITY:
        return testers
    lengths = (_sample(UNIT_TEST_INPUT, rng), _sample(UNIT_TEST_OUTPUT, rng))
    evaluations = (text2sql.EVALUATE, _evaluations(rng))
    return [
        testers[0],
        (text2sql.GENERATE_UNIT_TEST, [lengths]),
        testers[1],
        evaluations,
        testers[2],
    ]


def _evaluations(rng: np.random.Generator) -> list[Lengths]:
    counts, weights = zip(*text2sql.EVALUATE_SIBLINGS.items(), strict=True)
    siblings = int(rng.choice(counts, p=weights))
    base = _sample(EVALUATE_INPUT, rng)
    jitters = rng.integers(-EVALUATE_JITTER, EVALUATE_JITTER + 1, siblings)
    return [(base + int(jitter), _evaluate_output(rng)) for jitter in jitters]


def _evaluate_output(rng: np.random.Generator) -> int:
    if rng.random() < EVALUATE_LONG_PROBABILITY:
        return _sample(EVALUATE_LONG_OUTPUT, rng)
    return EVALUATE_OUTPUT


def _correlated(normal: float, correlation: float, rng: np.random.Generator) -> float:
    """Return a standard normal with the given correlation to another one."""
    other = rng.standard_normal()
    return correlation * normal + math.sqrt(1.0 - correlation**2) * other


def _at(spline: tuple[tuple[float, int], ...], normal: float) -> int:
    """Return the tokens at the rank of a standard normal draw."""
    return _quantile(spline, 0.5 * (1.0 + math.erf(normal / math.sqrt(2.0))))


def _sample(spline: tuple[tuple[float, int], ...], rng: np.random.Generator) -> int:
    return _quantile(spline, rng.random())


def _quantile(spline: tuple[tuple[float, int], ...], probability: float) -> int:
    low_p, low = spline[0]
    for high_p, high in spline[1:]:
        if probability <= high_p:
            return round(low + (high - low) * (probability - low_p) / (high_p - low_p))
        low_p, low = high_p, high
    return low
