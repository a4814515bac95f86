"""`hexflow topics`: create what is missing, check what is there, say what to do."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from services.cli.console import EXIT_FAILED, counted, print_json, stderr_console, stdout_console
from services.cli.interrupts import run_until_stopped
from services.cli.options import JsonOption, KafkaOption, configure_logs, mesh_settings
from services.cli.prune import Departed, prune
from services.cli.remote import NAMED_BY_OPTION_OR_VARIABLE, connect
from shared.contracts.topics import INSTANCE_PREFIX, Topics, TopicSpec
from shared.ports import Broker

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What was found about one topic.

    Attributes:
        name: Full name.
        state: `ok`, `created`, `missing` or `wrong`.
        partitions: Its partitions; 0 when missing.
        compacted: Whether it is compacted.
        retention_s: Age after which records are deleted, seconds.
        max_message_bytes: Largest record, bytes.
        problems: What is wrong and what to do, one sentence each.
    """

    name: str
    state: str
    partitions: int = 0
    compacted: bool = False
    retention_s: int = 0
    max_message_bytes: int = 0
    problems: tuple[str, ...] = ()


def problems_of(wanted: TopicSpec, found: TopicSpec) -> tuple[str, ...]:
    """Return how a topic falls short of what the mesh needs, each with what to do.

    More partitions, longer retention and larger records than wanted are fine, except that a topic
    with one partition is read in one order and must keep it.
    """
    alter = f"kafka-configs.sh --alter --entity-type topics --entity-name {wanted.name}"
    problems = []
    if wanted.partitions == 1 and found.partitions != 1:
        problems.append(
            f"has {found.partitions} partitions and must have 1: delete it while the mesh is "
            "stopped, then run hexflow topics"
        )
    elif wanted.compacted and found.partitions != wanted.partitions:
        # More of them would split a key's records, and epochs compare within one partition only.
        problems.append(
            f"has {found.partitions} partitions where the settings say {wanted.partitions}, and "
            "must never be given more: change the setting, or delete the topic while the mesh is "
            "stopped, then run hexflow topics"
        )
    elif found.partitions < wanted.partitions:
        problems.append(
            f"has {found.partitions} partitions of {wanted.partitions}: kafka-topics.sh --alter "
            f"--topic {wanted.name} --partitions {wanted.partitions}"
        )
    if found.compacted != wanted.compacted:
        policy = "compact" if wanted.compacted else "delete"
        problems.append(
            f"cleanup.policy is not {policy}: {alter} --add-config cleanup.policy={policy}"
        )
    if not wanted.compacted and found.retention_s < wanted.retention_s:
        problems.append(
            f"keeps records {found.retention_s:,} s, needs {wanted.retention_s:,} s: {alter} "
            f"--add-config retention.ms={wanted.retention_s * 1_000}"
        )
    if found.max_message_bytes < wanted.max_message_bytes:
        problems.append(
            f"takes records up to {found.max_message_bytes:,} bytes, needs "
            f"{wanted.max_message_bytes:,}: {alter} "
            f"--add-config max.message.bytes={wanted.max_message_bytes}"
        )
    return tuple(problems)


async def examine(broker: Broker, topics: Topics, *, create: bool) -> list[Finding]:
    """Return a finding for every topic of the mesh, and for every instance's topic that exists.

    Args:
        broker: Where to look.
        topics: What the mesh needs.
        create: Whether to create what is missing first.
    """
    created = set(await broker.create_topics(topics.specs())) if create else set()
    found = await broker.describe_topics()
    instance_prefix = topics.name(INSTANCE_PREFIX)
    wanted = [
        *topics.specs(),
        *(
            topics.instance_spec(name.removeprefix(instance_prefix))
            for name in sorted(found)
            if name.startswith(instance_prefix)
        ),
    ]
    return [_finding(spec, found.get(spec.name), spec.name in created) for spec in wanted]


def _finding(wanted: TopicSpec, found: TopicSpec | None, is_new: bool) -> Finding:
    if found is None:
        return Finding(
            name=wanted.name, state="missing", problems=("does not exist: run hexflow topics",)
        )
    problems = problems_of(wanted, found)
    state = "wrong" if problems else "created" if is_new else "ok"
    return Finding(
        name=wanted.name,
        state=state,
        partitions=found.partitions,
        compacted=found.compacted,
        retention_s=found.retention_s,
        max_message_bytes=found.max_message_bytes,
        problems=problems,
    )


def is_fine(findings: Sequence[Finding]) -> bool:
    """Return whether the mesh can run on these topics."""
    return all(finding.state in ("ok", "created") for finding in findings)


def advice(address: str, findings: Sequence[Finding]) -> list[str]:
    """Return what to do, one sentence each; nothing when all is fine."""
    num_missing = sum(finding.state == "missing" for finding in findings)
    lines = [
        f"{finding.name} {problem}"
        for finding in findings
        if finding.state == "wrong"
        for problem in finding.problems
    ]
    if num_missing:
        are = "is" if num_missing == 1 else "are"
        missing = f"{counted(num_missing, 'topic')} {are} missing"
        lines.append(f"{missing}: run hexflow topics --kafka {address}")
    return lines


def as_json(address: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the command's JSON object."""
    return {
        "kafka": address,
        "ok": is_fine(findings),
        "topics": [msgspec.to_builtins(finding) for finding in findings],
    }


def as_table(address: str, findings: Sequence[Finding]) -> Table:
    """Return the command's table."""
    table = Table(title=f"topics at {address}", title_justify="left")
    table.add_column("topic", no_wrap=True)
    for name in ("parts", "keeps", "max record"):
        table.add_column(name, justify="right")
    table.add_column("state")
    colours = {"ok": "green", "created": "cyan", "missing": "red", "wrong": "red"}
    for one in findings:
        keeps = "last per key" if one.compacted else f"{one.retention_s / 3_600:g} h"
        size = f"{one.max_message_bytes / 1_048_576:.1f} MiB"
        numbers = (str(one.partitions), keeps, size) if one.partitions else ("–", "–", "–")
        colour = colours[one.state]
        table.add_row(one.name, *numbers, f"[{colour}]{one.state}[/{colour}]")
    return table


@app.command()
def topics(
    kafka: KafkaOption = None,
    check: Annotated[bool, typer.Option("--check", help="Create nothing; only look.")] = False,
    remove_gone: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Delete topics of instances that are gone for good, once all is handed on.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Create the mesh's missing Kafka topics and check all of them.

    Exits with 1 when a topic is missing or unfit, and says what to do.
    """
    configure_logs(verbose=False)
    settings = mesh_settings(kafka=kafka)
    address = settings.kafka.bootstrap_servers

    async def main(_: asyncio.Event) -> tuple[list[Departed], list[Finding]]:
        names = settings.topics.topics()
        async with connect(
            settings, "hexflow-topics", remedy=NAMED_BY_OPTION_OR_VARIABLE
        ) as broker:
            gone = await prune(broker, names) if remove_gone and not check else []
            return gone, await examine(broker, names, create=not check)

    gone, findings = run_until_stopped(main, is_graceful=False)
    for one in gone:
        what = f"kept: {one.reason}" if one.reason else "removed"
        stderr_console().print(f"instance {one.instance_id} {what}", soft_wrap=True)
    if json:
        removed = [one.instance_id for one in gone if not one.reason]
        print_json({**as_json(address, findings), "removed": removed})
    else:
        stdout_console().print(as_table(address, findings))
    for line in advice(address, findings):
        stderr_console().print(line, soft_wrap=True)
    if not is_fine(findings):
        raise typer.Exit(EXIT_FAILED)
