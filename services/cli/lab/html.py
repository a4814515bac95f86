"""The comparison as one HTML file: no network, no scripts, images inside."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

from services.cli.lab.comparison import TARGET, Comparison
from services.cli.lab.grids import Grid, grids_of, overview_grid, setting_title
from services.cli.lab.headlines import headlines
from services.cli.lab.setting import Setting
from shared.domain.trace import TraceQuery
from shared.simulation.workload import DEFAULT_SLO_SCALES

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --quiet: #555; --line: #e6e6e6;
  --rule: #bbb; --card: #eef5f8; --accent: #0b6e99; --link: #0b5f85; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e8; --paper: #16181b; --quiet: #a3a9ae;
  --line: #2c3035; --rule: #565c62; --card: #1b2a32; --accent: #4fa3c7; --link: #7cc4e4; } }
body { font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
  color: var(--ink); background: var(--paper); margin: 0 auto; max-width: 1240px;
  padding: 24px 20px 64px; overflow-wrap: break-word; }
a { color: var(--link); }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 20px; margin: 44px 0 8px;
  border-top: 1px solid var(--line); padding-top: 24px; }
h3 { font-size: 15px; margin: 26px 0 6px; }
p, li { max-width: 80ch; } .quiet { color: var(--quiet); font-size: 13px; }
ul.take { background: var(--card); border-left: 4px solid var(--accent);
  padding: 12px 16px 12px 34px; margin: 12px 0; }
figure { margin: 16px 0; } img { max-width: 100%; height: auto; display: block;
  background: #fff; border-radius: 4px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 4px 8px; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { border-bottom: 2px solid var(--rule); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
.ours tbody tr:first-child { font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: 14px; }
dt { color: var(--quiet); } dd { margin: 0; min-width: 0; }
nav a { display: inline-block; margin-right: 16px; }
details { margin: 12px 0; } summary { cursor: pointer; }
@media (max-width: 600px) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 6px; } }
"""

_HOW = f"""
<details><summary>How these numbers come about</summary><ul>
<li>Every run simulates a whole fleet of batching engines call by call. Queries are drawn from the
trace; a seed fixes their order, their SLOs and the randomness of their arrivals, so all policies
meet the very same queries.</li>
<li>Queries that arrive while the fleet warms up, and the last ones, while it drains, are simulated
but not measured. Measured or not, every query runs to its end. Above the rate that a policy
sustains there is no steady state: the longer the run, the longer the times.</li>
<li>Policies never see an output length before it is produced; they see what history says of the
stage (unless the oracle is on).</li>
<li>α (and the token budget, where asked) is chosen per policy, setting and rate by the lowest P95
on seeds that are not measured.</li>
<li>The upper bound is the fleet's fluid capacity: the best any placement of calls could do with
full batches, perfect caching and no queueing. It holds for every policy.</li>
<li>A policy sustains a rate when {TARGET:.0%} of the queries are answered within their SLO.
Queries that are not answered count as missed; percentiles are over answered ones.</li>
</ul></details>
"""

_SHOWN = {
    "overview": "share of the upper bound that each sustains, by setting",
    "load": "P95, share within the SLO and goodput against the rate",
    "limits": "sustained rates and tightest SLOs",
    "ablation": "what each half of the policy brings",
    "instances": "use of the instances",
    "alpha": "P95 over α",
}


def page(
    found: Comparison,
    images: Mapping[Setting, Mapping[str, bytes]],
    command: str,
    overview: bytes | None = None,
) -> str:
    """Return the report.

    Args:
        found: The comparison.
        images: Setting -> plot's name -> PNG.
        command: The command that made it; empty where there was none.
        overview: A plot of all settings.
    """
    settings = found.plan.settings
    links = "".join(
        f'<a href="#s{number}">{escape(setting_title(one))}</a>'
        for number, one in enumerate(settings)
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(_title(found))}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(_title(found))}</h1>",
        f'<p class="quiet">Made by <code>{escape(command)}</code></p>' if command else "",
        f"<nav>{links}</nav>" if len(settings) > 1 else "",
        _facts(found),
        _HOW,
        _html_grid(overview_grid(found), "all") if len(settings) > 1 else "",
        _image({"overview": overview} if overview else {}, "overview", _title(found)),
    ]
    for number, setting in enumerate(settings):
        parts += _section(found, setting, number, images[setting])
    return "\n".join([*parts, "</body></html>", ""])


def markdown(found: Comparison) -> str:
    """Return all tables and headlines as Markdown."""
    lines = []
    if len(found.plan.settings) > 1:
        lines += _markdown_grid(overview_grid(found))
    for setting in found.plan.settings:
        lines += [f"## {setting_title(setting)}", ""]
        lines += [f"- {line}" for line in headlines(found, setting)] + [""]
        for grid in grids_of(found, setting):
            lines += _markdown_grid(grid)
    return "\n".join(lines)


def _title(found: Comparison) -> str:
    return f"{len(found.plan.policies)} scheduling policies compared"


def _facts(found: Comparison) -> str:
    plan, setup = found.plan, found.plan.setup
    mesh = setup.mesh
    is_recorded = not setup.slo_scales and any(map(_records_slos, setup.traces.values()))
    scales = ", ".join(f"{scale:g}" for scale in setup.slo_scales or DEFAULT_SLO_SCALES)
    alone = "isolated time" if setup.slo_base == "own" else "the trace's mean isolated time"
    facts = {
        "policies": ", ".join(plan.policies),
        "queries per run": f"{setup.num_queries:,}" if setup.num_queries else "the trace, once",
        "measured": f"all but the first {setup.window.warm_up:.0%} and the last "
        f"{setup.window.cool_down:.0%} of the queries",
        "seeds": f"{len(plan.seeds)} measured, {len(plan.tuning_seeds)} for tuning",
        "SLOs": "as the trace records" if is_recorded else f"{scales} × {alone}",
        "α": "tuned" if plan.alpha is None else f"{plan.alpha:g}",
        "token budgets tried": ", ".join(map(str, plan.token_budgets)) or "the fleet's own",
        "policies know output lengths": "yes (oracle)" if mesh.oracle else "no",
        "dispatchers": f"{mesh.dispatchers}, state {mesh.state_delay_s:g} s old, "
        f"{mesh.hop_s:g} s per message",
    }
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items()
    )
    return f"<dl>{items}</dl>"


def _records_slos(queries: Sequence[TraceQuery]) -> bool:
    return any(query.slo_s is not None or query.slo_scale is not None for query in queries)


def _section(
    found: Comparison, setting: Setting, number: int, images: Mapping[str, bytes]
) -> list[str]:
    takeaways = "".join(f"<li>{escape(line)}</li>" for line in headlines(found, setting))
    limits, *others = grids_of(found, setting)
    title = setting_title(setting)
    parts = [
        f'<h2 id="s{number}">{escape(title)}</h2>',
        f'<ul class="take">{takeaways}</ul>',
        _image(images, "load", title),
        _html_grid(limits),
        _image(images, "limits", title),
        _image(images, "ablation", title),
        _image(images, "instances", title),
        _image(images, "alpha", title),
    ]
    return parts + [_html_grid(grid) for grid in others if grid.rows]


def _image(images: Mapping[str, bytes], name: str, title: str) -> str:
    if name not in images:
        return ""
    alt = f"{title}: {_SHOWN.get(name, name)}"
    data = base64.b64encode(images[name]).decode()
    return f'<figure><img alt="{escape(alt)}" src="data:image/png;base64,{data}"></figure>'


def _html_grid(grid: Grid, kind: str = "ours") -> str:
    head = "".join(f"<th>{_break(column)}</th>" for column in grid.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in grid.rows
    )
    note = f'<p class="quiet">{escape(grid.note)}</p>' if grid.note else ""
    return (
        f"<h3>{escape(grid.title)}</h3>"
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def _break(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def _markdown_grid(grid: Grid) -> list[str]:
    if not grid.rows:
        return []
    columns = [column.replace("\n", " ") for column in grid.columns]
    lines = [f"### {grid.title}", "", _markdown_row(columns)]
    lines.append(_markdown_row(["---", *["---:"] * (len(grid.columns) - 1)]))
    lines += [_markdown_row(row) for row in grid.rows]
    return [*lines, "", *([grid.note, ""] if grid.note else [])]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
