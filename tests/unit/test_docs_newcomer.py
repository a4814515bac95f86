"""What a newcomer is told first: links lead somewhere, and lists are complete."""

import re
from pathlib import Path

import pytest

from services.cli.app import COMMANDS
from services.cli.lab.tuning import takes_alpha
from services.cli.workload import load_fleet
from shared import errors
from shared.domain.instance import InstanceSpec
from shared.scheduling.policies import REGISTRY

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
OWN_WORDS = {"cancelled", "stalled", "attempts_exhausted"}


def table(page: str) -> dict[str, str]:
    """Return the rows of a page's tables: first cell, without ticks, to the rest."""
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", (ROOT / page).read_text(), re.MULTILINE)
    return {name.strip("`"): rest for name, rest in rows}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    """A relative link names a file of the repository."""
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    dead = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert dead == []


def test_the_readme_names_every_command():
    """Whatever `hexflow --help` lists has its row."""
    named = {name.split()[1] for name in table("README.md") if name.startswith("hexflow ")}
    assert named == set(COMMANDS) - {"version"}


def test_the_policy_page_names_every_policy_and_which_are_tuned():
    """One row for each name of the registry; α where the policy has one."""
    rows = table("docs/policies.md")
    rows = {name: rest for name, rest in rows.items() if name not in ("name", "---")}
    assert set(rows) == set(REGISTRY)
    tuned = {name for name, rest in rows.items() if rest.rpartition("|")[2].strip() == "α"}
    assert tuned == {name for name in REGISTRY if takes_alpha(name)}


@pytest.mark.parametrize("name", ["hetero-1", "hetero-2", "homogeneous"])
def test_the_fleet_page_names_the_ids_of_built_in_fleets(name: str):
    """`WORKER_INSTANCE_ID` takes one of them."""
    fleet: tuple[InstanceSpec, ...] = load_fleet(name)
    assert re.findall(r"`(.*?)`", table("docs/fleets.md")[name]) == [
        spec.instance_id for spec in fleet
    ]


def test_the_producer_page_knows_every_reason_it_names():
    """The words of the outcome table are the error tree's, or the services' own."""
    reasons = {
        error.reason for error in vars(errors).values() if hasattr(error, "reason")
    } | OWN_WORDS
    page = (ROOT / "docs/producers.md").read_text()
    named = set(re.findall(r"^\| `\w+` \| `(\w+)` \|", page, re.MULTILINE))
    assert len(named) >= 12
    assert named <= reasons
