"""What every state store does for those who say that they are there.

`store` is empty; it comes from the class that binds the suite.
"""

import asyncio

from shared.ports import StateStore

PATIENCE_S = 30.0


async def gone(store: StateStore, kind: str, name: str) -> bool:
    """Return whether a member is forgotten within a generous time."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while name in await store.announced(kind):
                await asyncio.sleep(0.01)
    except TimeoutError:
        return False
    return True


class PresenceContract:
    """Leases."""

    async def test_nobody_is_there_at_first(self, store: StateStore) -> None:
        """A kind that nobody announced is an empty one."""
        assert await store.announced("agents") == {}

    async def test_members_say_what_they_like(self, store: StateStore) -> None:
        """What was said last counts, per name; kinds are apart."""
        await store.announce("agents", "a", "one", lease_s=600.0)
        await store.announce("agents", "a", "twö", lease_s=600.0)
        await store.announce("agents", "b", '{"x": 1}', lease_s=600.0)
        await store.announce("others", "c", "", lease_s=600.0)
        assert await store.announced("agents") == {"a": "twö", "b": '{"x": 1}'}
        assert await store.announced("others") == {"c": ""}

    async def test_a_lease_that_ends_is_forgotten_alone(self, store: StateStore) -> None:
        """One that stops saying so is gone; the others stay."""
        await store.announce("agents", "dead", "x", lease_s=0.05)
        await store.announce("agents", "alive", "y", lease_s=600.0)
        assert await gone(store, "agents", "dead")
        assert await store.announced("agents") == {"alive": "y"}

    async def test_a_shorter_lease_does_not_shorten_others(self, store: StateStore) -> None:
        """The end of the last lease said is not the end of all."""
        await store.announce("agents", "long", "x", lease_s=600.0)
        await store.announce("agents", "short", "y", lease_s=0.05)
        assert await gone(store, "agents", "short")
        assert await store.announced("agents") == {"long": "x"}
