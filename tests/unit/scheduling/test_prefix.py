"""The model of an instance's prefix cache."""

from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.prefix import PrefixCacheModel
from tests.support.scheduling import chain

chains = st.lists(
    st.tuples(st.sampled_from("abcde"), st.integers(1, 400)), min_size=1, max_size=4
).map(lambda parts: chain(*parts))


def test_a_cold_instance_holds_nothing() -> None:
    """Before the first call no prompt token is expected in the cache."""
    assert PrefixCacheModel(10_000).expected_cached_tokens(chain(("t", 640)), 1_000) == 0


def test_a_touched_prefix_is_expected() -> None:
    """A second call with the same template finds it."""
    cache = PrefixCacheModel(10_000)
    cache.touch(chain(("t", 640)))
    assert cache.expected_cached_tokens(chain(("t", 640)), 1_000) == 640


def test_only_whole_blocks_hit() -> None:
    """213 shared tokens are 13 blocks of 16: 208 tokens."""
    cache = PrefixCacheModel(10_000, block_tokens=16)
    cache.touch(chain(("t", 213)))
    assert cache.expected_cached_tokens(chain(("t", 213)), 306) == 208


def test_a_gap_in_the_chain_ends_the_hit() -> None:
    """Text after a part that is not held cannot be reused."""
    cache = PrefixCacheModel(10_000, block_tokens=1)
    cache.touch(chain(("t", 100), ("schema", 200)))
    assert cache.expected_cached_tokens(chain(("t", 100), ("other", 50), ("schema", 200)), 999) == (
        100
    )


def test_one_token_is_always_computed() -> None:
    """A prompt that is entirely cached still hits at most all but one token."""
    cache = PrefixCacheModel(10_000, block_tokens=1)
    cache.touch(chain(("t", 100)))
    assert cache.expected_cached_tokens(chain(("t", 100)), 100) == 99


def test_the_least_recently_used_prefix_goes_first() -> None:
    """With room for two, touching a third evicts the one not used for longest."""
    cache = PrefixCacheModel(200, block_tokens=1)
    for name in ("a", "b", "a", "c"):
        cache.touch(chain((name, 100)))
    held = {
        name: cache.expected_cached_tokens(chain((name, 100)), 1_000) for name in ("a", "b", "c")
    }
    assert held == {"a": 100, "b": 0, "c": 100}


def test_the_shared_head_of_a_chain_outlives_its_tail() -> None:
    """Where both do not fit, the part more calls share stays: without it the tail is useless."""
    cache = PrefixCacheModel(250, block_tokens=1)
    cache.touch(chain(("template", 200), ("query", 100)))
    assert cache.expected_cached_tokens(chain(("template", 200)), 1_000) == 200


def test_no_capacity_holds_nothing() -> None:
    """Capacity 0 switches the model off."""
    cache = PrefixCacheModel(0)
    cache.touch(chain(("t", 640)))
    assert cache.expected_cached_tokens(chain(("t", 640)), 1_000) == 0


def test_a_new_life_begins_empty() -> None:
    """After a reset nothing is expected."""
    cache = PrefixCacheModel(10_000)
    cache.touch(chain(("t", 640)))
    cache.clear()
    assert cache.expected_cached_tokens(chain(("t", 640)), 1_000) == 0


@given(
    touched=st.lists(chains, max_size=20),
    asked=chains,
    capacity=st.integers(0, 1_500),
    input_tokens=st.integers(1, 2_000),
)
def test_a_hit_is_bounded_by_prompt_chain_and_capacity(
    touched: list[tuple[object, ...]],
    asked: tuple[object, ...],
    capacity: int,
    input_tokens: int,
) -> None:
    """A hit is whole blocks, below the prompt's length, within the chain."""
    cache = PrefixCacheModel(capacity, block_tokens=16)
    for one in touched:
        cache.touch(one)
    hit = cache.expected_cached_tokens(asked, input_tokens)
    assert 0 <= hit < input_tokens
    assert hit % 16 == 0
    assert hit <= sum(part.tokens for part in asked)
