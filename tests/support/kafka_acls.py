"""Rights in a test's own Kafka: granted and taken away as its administrator."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest

PROPERTIES = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",  # whoever comes over the plain listener, the broker too
}
TOPIC, GROUP = 2, 3
LITERAL, PREFIXED = 3, 4
ALL, READ, WRITE, CREATE = 2, 3, 4, 5
DENY, ALLOW = 2, 3


class Acls:
    """Changes rights.

    Args:
        client: An administrator's.
    """

    def __init__(self, client: AIOKafkaAdminClient) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(cls, bootstrap: str) -> AsyncIterator[Self]:
        """Connect over the plain listener."""
        client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await client.start()
        try:
            yield cls(client)
        finally:
            await client.close()

    async def allow_all(self, user: str, prefix: str) -> None:
        """Let a user do everything with topics and groups of a prefix."""
        for kind in (TOPIC, GROUP):
            await self._create(kind, prefix, PREFIXED, user, ALL, ALLOW)

    async def deny(self, user: str, kind: int, name: str, operation: int) -> None:
        """Take a right away; this wins over what is allowed."""
        await self._create(kind, name, LITERAL, user, operation, DENY)

    async def deny_no_more(self, user: str, kind: int, name: str, operation: int) -> None:
        """Give a right back that was taken away."""
        request = DeleteAclsRequest(kind, name, LITERAL, f"User:{user}", "*", operation, DENY)
        response: Any = await self._client._send_request(request)
        ((code, _, matching),) = response.filter_responses
        assert code == 0
        assert len(matching) == 1

    async def _create(
        self, kind: int, name: str, pattern: int, user: str, operation: int, permission: int
    ) -> None:
        request = CreateAclsRequest(kind, name, pattern, f"User:{user}", "*", operation, permission)
        response: Any = await self._client._send_request(request)
        assert [code for code, _ in response.creation_responses] == [0]
