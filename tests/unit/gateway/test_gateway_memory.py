"""What a replica works out about a query's calls."""

from services.gateway.query_memory import QueryMemory


def _end(memory: QueryMemory, name: str, stage: str, parents: tuple[str, ...], at_s: float) -> None:
    memory.end("q", stage, request_id=name, parents=parents, at_s=at_s)


def test_a_chain_of_stages():
    """Each call waited for the one before it; time in between is the agent's."""
    memory = QueryMemory(10)
    first = memory.begin("q", "a", 0.0)
    memory.arrived("q", 0.5)
    assert (first.parents, first.iteration, first.arrival_s) == ((), 0, None)
    _end(memory, "a1", "a", first.parents, 4.0)
    second = memory.begin("q", "b", 6.0)
    assert (second.parents, second.think_s, second.arrival_s) == (("a1",), 2.0, 0.5)
    _end(memory, "b1", "b", second.parents, 7.0)
    third = memory.begin("q", "a", 7.0)
    assert (third.parents, third.iteration) == (("b1",), 1)


def test_parallel_calls_are_siblings_and_all_are_waited_for():
    """Two calls open at once share their parents and round; the next waits for both."""
    memory = QueryMemory(10)
    pair = [memory.begin("q", "a", 0.0) for _ in range(2)]
    assert [place.iteration for place in pair] == [0, 0]
    _end(memory, "a1", "a", (), 1.0)
    _end(memory, "a2", "a", (), 2.0)
    joined = memory.begin("q", "b", 3.0)
    assert set(joined.parents) == {"a1", "a2"}
    assert joined.think_s == 1.0


def test_memory_is_bounded():
    """The queries used least recently are forgotten, and their ends are harmless."""
    memory = QueryMemory(3)
    for number in range(10):
        memory.begin(f"q{number}", "a", 0.0)
    assert len(memory) == 3
    memory.end("q0", "a", request_id="x", parents=(), at_s=1.0)
    memory.arrived("q0", 1.0)
    assert memory.begin("q0", "a", 2.0).parents == ()
