"""The agent's own settings (prefix `TEXT2SQL_`); see `AgentParams` for each."""

import secrets
import socket

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.text2sql.params import AgentParams
from services.text2sql.sql.drivers import MIB, Limits


def _unique_id() -> str:
    return f"{socket.gethostname()[:100]}-{secrets.token_hex(4)}"


class AgentSettings(BaseSettings):
    """How a Text-to-SQL agent behaves; `_s` without another word are wall seconds."""

    model_config = SettingsConfigDict(
        env_prefix="TEXT2SQL_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    agent_id: str = Field(default_factory=_unique_id, min_length=1, max_length=120)
    """Unique per process; host name and random digits unless set."""
    databases: dict[str, SecretStr] = {}
    """Name -> address, `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST:PORT/NAME`."""
    model: str = Field(default="default", min_length=1, max_length=128)
    """Model of questions that name none."""
    workflow_files: tuple[str, ...] = ()
    """Further workflow definitions (TOML); one named like a built-in takes its place."""
    structured_output: bool = False
    """Whether the engines hold to a JSON schema, and statements are asked for with one."""
    schema_tokens: int = Field(default=3_000, ge=100, le=1_000_000)
    """Most tokens of schema in a prompt."""
    sql_timeout_s: float = Field(default=10.0, gt=0, le=3_600)
    """Longest run of one statement, wall seconds."""
    sql_max_rows: int = Field(default=1_000, ge=1, le=1_000_000)
    """Most rows of one statement."""
    sql_max_bytes: int = Field(default=MIB, ge=1_000, le=64 * MIB)
    """Most bytes of one statement's rows; with the rest it must fit into one message."""
    max_rows: int = Field(default=100, ge=1, le=1_000_000)
    """Most rows of an answer, where the question names no number."""
    max_open: int = Field(default=32, ge=1, le=10_000)
    """Most questions under way at a time."""
    commit_interval_s: float = Field(default=0.5, gt=0, le=60)
    """Time between commits, wall seconds."""
    lease_s: float = Field(default=60.0, ge=1, le=86_400)
    """How long gateways take questions for an agent that has ended, wall seconds: more than a
    restart takes."""

    def params(self, drain_s: float) -> AgentParams:
        """Return these settings as the core takes them.

        Args:
            drain_s: Time from the stop signal until the process is cut off, wall seconds.
        """
        return AgentParams(
            agent_id=self.agent_id,
            model=self.model,
            databases={name: url.get_secret_value() for name, url in self.databases.items()},
            workflow_files=self.workflow_files,
            limits=Limits(
                timeout_s=self.sql_timeout_s,
                max_rows=self.sql_max_rows,
                max_bytes=self.sql_max_bytes,
            ),
            schema_tokens=self.schema_tokens,
            max_rows=self.max_rows,
            is_structured=self.structured_output,
            max_open=self.max_open,
            commit_interval_s=self.commit_interval_s,
            lease_s=self.lease_s,
            drain_s=drain_s * 0.7,
        )
