// One query: where its time went, call by call, and why each call ran where it did.

import { call as ask } from "./api.js";
import { el, seconds, setText } from "./text.js";

const title = document.getElementById("query-title");
const body = document.getElementById("query-body");
const PARTS = [["between calls", "p-between", "between calls (the agent's own time)"], ["on the way", "p-way", "on the way (messages)"],
  ["waiting", "p-wait", "waiting for an instance"], ["running", "p-run", "running"]];
let shown = "";
let version = -1;

export async function showQuery(id, { focus = false } = {}) {
  let query;
  try {
    query = await ask(`../api/queries/${encodeURIComponent(id)}`);
  } catch (error) {
    setText(title, id);
    body.replaceChildren(el("p", { className: "empty" }, error.message));
    return;
  }
  if (query.change !== version || shown !== id) render(query);
  shown = id;
  version = query.change;
  if (focus) document.getElementById("query").focus({ preventScroll: false });
}

export const shownQuery = () => shown;

function render(query) {
  const open = new Set([...body.querySelectorAll("details[open]")].map((one) => one.dataset.id));
  const end = Math.max(query.took_s, 1e-3);
  const span = Math.max(end, Math.min(query.slo_s, end * 1.6)) * 1.02;
  const critical = new Set(query.explanation.critical);
  setText(title, query.query_id);
  body.replaceChildren(
    el("p", { className: "quiet" }, `${query.workflow} · tenant ${query.tenant} · model ${query.model} · ${query.outcome} · ${seconds(query.took_s)} of ${seconds(query.slo_s)}`),
    el("p", { className: `why ${query.is_late ? "bad" : ""}` }, query.explanation.text),
    partsBar(query.explanation),
    legend(query.explanation.parts_s),
    axis(span),
    ...inOrder(query.calls).map((one) => callRow(one, query, span, critical.has(one.request_id), open.has(one.request_id))),
  );
}

// Stages as they began, the calls of one by their number.
function inOrder(calls) {
  const key = (one) => `${one.stage}/${one.iteration}`;
  const begun = new Map();
  for (const one of calls) begun.set(key(one), Math.min(begun.get(key(one)) ?? Infinity, one.ready_s));
  return [...calls].sort((a, b) => begun.get(key(a)) - begun.get(key(b)) || a.sibling - b.sibling || a.ready_s - b.ready_s);
}

function partsBar({ parts_s: parts, total_s: total }) {
  const bar = el("div", { className: "parts", role: "img", "aria-label": PARTS.map(([name]) => `${name} ${seconds(parts[name])}`).join(", ") });
  for (const [name, style] of PARTS) {
    const piece = el("i", { className: style });
    piece.style.width = `${(100 * parts[name]) / Math.max(total, 1e-9)}%`;
    bar.append(piece);
  }
  return bar;
}

function legend(parts) {
  const items = PARTS.map(([name, style, text]) => el("li", {}, el("span", { className: `key ${style}` }), `${text}: ${seconds(parts[name])}`));
  return el("ul", { className: "legend" }, ...items,
    el("li", {}, el("span", { className: "key s-prefill" }), "running, before the first token"),
    el("li", {}, el("span", { className: "tick" }), "latest start within the budget"),
    el("li", {}, el("span", { className: "tick end" }), "the query's deadline"),
    el("li", {}, "underlined: the end waited for it"));
}

function axis(span) {
  const marks = [0, 0.25, 0.5, 0.75, 1].map((part) => el("span", {}, seconds(part * span)));
  return el("div", { className: "axis", "aria-hidden": "true" }, el("span", {}, "Call"), el("span", { className: "scale" }, ...marks),
    el("span", { className: "num" }, "waited"), el("span", { className: "num" }, "ran"), el("span", { className: "num" }, "slack"));
}

function callRow(one, query, span, isCritical, isOpen) {
  const waited = difference(one.started_s ?? one.finished_s, one.ready_s);
  const ran = one.started_s === null ? null : difference(one.finished_s, one.started_s);
  const which = `${one.iteration}${one.siblings > 1 ? ` · ${one.sibling + 1}/${one.siblings}` : ""}`;
  const name = `${one.stage} ${which}`;
  const where = one.instance_id || "no instance";
  const slack = el("span", { className: one.slack_s !== null && one.slack_s < 0 ? "num bad" : "num" }, seconds(one.slack_s));
  const summary = el("summary", {},
    el("span", { className: "name", title: `${name} on ${where}` }, el("b", {}, el("span", { className: "stage" }, one.stage), el("span", {}, which)), el("small", {}, one.kind === "completed" ? where : `${one.kind}: ${one.reason} · ${where}`)),
    track(one, query, span), el("span", { className: "num" }, seconds(waited)), el("span", { className: "num" }, seconds(ran)), slack);
  const details = el("details", { className: `call${isCritical ? " critical" : ""}`, open: isOpen }, summary);
  details.dataset.id = one.request_id;
  const fill = () => details.open && details.children.length === 1 && details.append(detail(one));
  details.addEventListener("toggle", fill);
  fill();
  return details;
}

const difference = (later, earlier) => (later === null || earlier === null ? null : Math.max(0, later - earlier));

function track(one, query, span) {
  const box = el("span", { className: "track" });
  const place = (className, from, to, text) => {
    if (from === null || to === null || to < from) return;
    const piece = el("i", { className, title: text });
    piece.style.left = `${(100 * from) / span}%`;
    piece.style.width = `${(100 * (to - from)) / span}%`;
    box.append(piece);
  };
  const begun = one.started_s ?? one.finished_s;
  place("s-way", one.ready_s, one.queued_s ?? begun, "on the way");
  place("s-wait", one.queued_s, begun, "waiting");
  place("s-prefill", one.started_s, one.first_token_s ?? one.finished_s, "running, before the first token");
  place("s-decode", one.first_token_s, one.finished_s, "running, generating");
  mark(box, "start-by", one.latest_start_s, span, "latest start within the budget");
  mark(box, "deadline", query.slo_s, span, "the query's deadline");
  return box;
}

function mark(box, className, at, span, text) {
  if (at === null || at < 0 || at > span) return;
  const line = el("i", { className, title: text });
  line.style.left = `${(100 * at) / span}%`;
  box.append(line);
}

function detail(one) {
  const facts = [
    ["Ready", seconds(one.ready_s)], ["Dispatched", seconds(one.dispatched_s)], ["Queued", seconds(one.queued_s)],
    ["Started", seconds(one.started_s)], ["First token", seconds(one.first_token_s)], ["Result", seconds(one.finished_s)],
    ["Budget", seconds(one.budget_s)], ["Expected to run", seconds(one.expected_s)], ["Slack at its start", seconds(one.slack_s)],
    ["Prompt tokens", `${one.input_tokens} (${one.cached_tokens} cached, ${one.expected_cached_tokens} expected)`],
    ["Output tokens", `${one.output_tokens} (${one.expected_output_tokens.toFixed(0)} expected)`], ["Attempt", `${one.attempt}`],
  ];
  const box = el("div", { className: "detail" }, el("dl", { className: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  if (one.choice) box.append(el("p", {}, one.choice));
  if (one.scores.length) box.append(scoreTable(one));
  return box;
}

function scoreTable(one) {
  const cell = (text) => el("td", { className: "num" }, text);
  const rows = one.scores.map((offer) => el("tr", { className: offer.is_chosen ? "chosen" : "" },
    el("td", {}, offer.instance_id + (offer.is_chosen ? " (chosen)" : "")), cell(seconds(offer.t_queue_s)), cell(seconds(offer.t_comp_s)),
    cell(offer.score === null ? "–" : offer.score.toPrecision(4))));
  const caption = one.alpha === null ? `policy ${one.policy}` : `policy ${one.policy}, α = ${one.alpha}${one.beta_s2 === null ? "" : `, β = ${one.beta_s2.toPrecision(3)} s²`}`;
  return el("table", {}, el("caption", { className: "quiet" }, caption),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Instance"), el("th", { scope: "col", className: "num" }, "bound work"),
      el("th", { scope: "col", className: "num" }, "this call"), el("th", { scope: "col", className: "num" }, "score"))),
    el("tbody", {}, ...rows));
}
