"""What a workflow is: stages, what each waits for, how often and how widely it may call a model.

A definition is data (TOML). A stage names the *step* that makes its prompts and reads its answers;
the step `prompt` needs no code: it fills templates. Everything else about a stage is here, so
limits and fan-out can be changed, and stages added or left out, without touching code.

    name = "review"
    slo_s = 60.0
    answer = "verdict"

    [[stages]]
    name = "findings"
    for_each = "aspects"          # one call per item of this input, in parallel
    siblings = 4                  # but at most so many
    prompts = ["Look for $item in: $question"]

    [[stages]]
    name = "verdict"
    after = ["findings"]          # a join: several may be named; left out: the stage above
    prompts = ["Findings: $findings. Your verdict?"]
"""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[1] / "workflows"
Word = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]


class StageDef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage.

    Attributes:
        name: Unique within the workflow.
        stage: Stage name on the mesh, which stages may share; empty: `name`.
        step: What makes its prompts and reads its answers.
        after: Stages it waits for; None: the one above, `[]`: none.
        siblings: Most parallel calls of one round.
        rounds: Most rounds, one after the other.
        optional: Whether it is left out where the time that remains cannot pay for it.
        max_tokens: Longest answer, tokens.
        temperature: Sampling temperature; each sibling after the first may differ by its prompt.
        stop: Texts that end an answer.
        prompts: Templates; a sibling uses its own, or the last. `$name` is an input or the output
            of an earlier stage, `$item` the item of `for_each`.
        system: Template of the system message; empty: none.
        for_each: Input or earlier output to fan out over: one call per item or line.
        keep: `text`: the answer is the output; `lines`: the list of its lines.
    """

    name: Word
    stage: Annotated[str, Meta(max_length=128)] = ""
    step: Word = "prompt"
    after: tuple[Word, ...] | None = None
    siblings: Annotated[int, Meta(ge=1, le=64)] = 1
    rounds: Annotated[int, Meta(ge=1, le=100)] = 1
    optional: bool = False
    max_tokens: Annotated[int, Meta(ge=1, le=100_000)] = 256
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    stop: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    system: str = ""
    for_each: str = ""
    keep: Literal["text", "lines"] = "text"

    @property
    def mesh_stage(self) -> str:
        """Stage name on the mesh."""
        return self.stage or self.name


class WorkflowDef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workflow.

    Attributes:
        name: Its name on the mesh.
        stages: In an order in which each comes after those it waits for.
        slo_s: Deadline of questions that name none, seconds.
        answer: Stage whose output is the answer; empty: the last.
        inputs: Inputs that a question need not give.
        description: One sentence for people.
    """

    name: Word
    stages: Annotated[tuple[StageDef, ...], Meta(min_length=1, max_length=100)]
    slo_s: Annotated[float, Meta(gt=0, le=1e9)] = 120.0
    answer: str = ""
    inputs: dict[str, str | tuple[str, ...]] = {}
    description: str = ""

    def parents(self, index: int) -> tuple[int, ...]:
        """Return the indices of the stages that a stage waits for."""
        named = self.stages[index].after
        if named is None:
            return (index - 1,) if index else ()
        names = [stage.name for stage in self.stages]
        return tuple(names.index(name) for name in named)

    def iteration_base(self, index: int) -> int:
        """Return the iteration of a stage's first round: stages that share a name take turns."""
        stage = self.stages[index]
        before = self.stages[:index]
        return sum(one.rounds for one in before if one.mesh_stage == stage.mesh_stage)

    @property
    def answer_stage(self) -> str:
        """Name of the stage whose output is the answer."""
        return self.answer or self.stages[-1].name


def parse_definition(text: str, source: str = "workflow") -> WorkflowDef:
    """Return the workflow that a TOML text defines.

    Args:
        text: The text.
        source: Where it is from, for error messages.

    Raises:
        ConfigError: Says what is wrong, and where.
    """
    try:
        found = msgspec.convert(tomllib.loads(text), WorkflowDef)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as exc:
        raise ConfigError(f"{source}: {exc}") from exc
    seen: set[str] = set()
    for stage in found.stages:
        where = f"{source}: stage {stage.name!r}"
        if stage.name in seen:
            raise ConfigError(f"{where} is defined twice")
        missing = [name for name in stage.after or () if name not in seen]
        if missing:
            raise ConfigError(f"{where} waits for {missing[0]!r}, which no stage above is")
        if stage.step == "prompt" and not stage.prompts:
            raise ConfigError(f"{where} needs prompts, or a step that makes them")
        seen.add(stage.name)
    if found.answer and found.answer not in seen:
        raise ConfigError(f"{source}: answer names {found.answer!r}, which is no stage")
    return found


def load_definition(path: Path) -> WorkflowDef:
    """Return the workflow that a file defines.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    return parse_definition(text, str(path))


def built_in() -> dict[str, WorkflowDef]:
    """Return the workflows that come with the agent, by name."""
    found = [load_definition(path) for path in sorted(FOLDER.glob("*.toml"))]
    return {one.name: one for one in found}
