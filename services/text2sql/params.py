"""What the agent goes by."""

from dataclasses import dataclass, field

from services.text2sql.sql.drivers import Limits

GROUP = "text2sql"


@dataclass(frozen=True, kw_only=True)
class AgentParams:
    """How an agent behaves."""

    agent_id: str
    """Unique per process."""
    model: str = "default"
    """Model of questions that name none."""
    databases: dict[str, str] = field(default_factory=dict)
    """Name -> address."""
    workflow_files: tuple[str, ...] = ()
    """Further workflow definitions; one named like a built-in takes its place."""
    limits: Limits = field(default_factory=Limits)
    """What one statement may use."""
    schema_tokens: int = 3_000
    """Most tokens of schema in a prompt."""
    max_rows: int = 100
    """Most rows of an answer, where the question names no number."""
    is_structured: bool = False
    """Whether engines hold to a JSON schema."""
    max_open: int = 32
    """Most questions under way at a time."""
    margin: float = 0.02
    """Share of a question's SLO that is kept for sending the result."""
    commit_interval_s: float = 0.5
    """Time between commits, wall seconds."""
    lease_s: float = 60.0
    """How long it counts as there after it last said so, wall seconds."""
    drain_s: float = 20.0
    """Time that open questions get to finish at the end, wall seconds; others are resumed."""
