// Tiles, charts and the fleet table.

import { Series } from "./charts.js";
import { el, percent, Rows, seconds, setClass, setText } from "./text.js";

const tiles = document.getElementById("tiles");
const known = new Map();
const fromZero = (_, low, high) => [0, Math.max(1e-3, (high ?? 1) * 1.08)];
const p95 = new Series("chart-p95", [
  { label: "queries", colour: "--decode", value: seconds },
  { label: "calls", colour: "--wait", value: seconds },
  { label: "target", colour: "--late", dash: [5, 5], value: seconds },
], fromZero);
const attainment = new Series("chart-attainment", [
  { label: "attainment", colour: "--decode", value: percent },
], () => [0, 1.05]);
const load = new Series("chart-load", [
  { label: "waiting", colour: "--wait", value: (v) => `${v}` },
  { label: "running", colour: "--decode", value: (v) => `${v}` },
], fromZero);
const fleet = new Rows(document.querySelector("#fleet tbody"), makeInstance);

export function showHistory(history, target, scale) {
  const times = history.map((one) => one.at_s / scale);
  p95.reset(times, [
    history.map((one) => one.p95_s), history.map((one) => one.call_p95_s), history.map(() => target),
  ]);
  attainment.reset(times.slice(), [history.map((one) => one.attainment)]);
  load.reset(times.slice(), [history.map((one) => one.waiting), history.map((one) => one.running)]);
}

export function showSample(sample, target, scale) {
  const at = sample.at_s / scale;
  p95.push(at, [sample.p95_s, sample.call_p95_s, target]);
  attainment.push(at, [sample.attainment]);
  load.push(at, [sample.waiting, sample.running]);
}

export function showPresent({ summary, fleet: instances, target_s: target }) {
  const sum = (name) => instances.reduce((total, one) => total + one[name], 0);
  const isOver = target !== null && summary.p95_s !== null && summary.p95_s > target;
  const live = instances.filter((one) => one.phase === "serving").length;
  tile("P95 of queries", seconds(summary.p95_s), target === null ? "no target set" : `target ${seconds(target)}`, isOver ? "bad" : "");
  tile("Attainment", percent(summary.attainment), `of the last ${summary.queries_ended} ended`, tone(summary.attainment));
  tile("Queries running", `${summary.queries_running}`, `${summary.queries} remembered`);
  tile("Calls running", `${sum("running")}`, `of ${sum("capacity")} places`);
  tile("Calls waiting", `${sum("waiting")}`, `${seconds(sum("backlog_s"))} of work`);
  tile("Instances", `${live}`, live === instances.length ? "all serve" : `${instances.length - live} do not serve`, live === instances.length ? "" : "warn");
  p95.describe(`P95 of queries now ${seconds(summary.p95_s)}, of calls ${seconds(summary.call_p95_s)}`);
  attainment.describe(`Attainment now ${percent(summary.attainment)}`);
  load.describe(`Calls: ${sum("waiting")} waiting, ${sum("running")} running`);
  fleet.keepOnly(instances.map((one) => one.instance_id));
  instances.forEach((one) => fleet.update(one.instance_id, one));
}

function tone(share) {
  if (share === null) return "";
  return share >= 0.95 ? "good" : share >= 0.8 ? "warn" : "bad";
}

function tile(name, value, note, tone = "") {
  if (!known.has(name)) {
    const number = el("span");
    const small = el("small");
    tiles.append(el("div", {}, el("dt", {}, name), el("dd", {}, number, small)));
    known.set(name, { number, small });
  }
  const { number, small } = known.get(name);
  setText(number, value);
  setClass(number, tone);
  setText(small, note);
}

function makeInstance() {
  const cells = Array.from({ length: 11 }, (_, index) => el("td", { className: index === 4 || index === 5 || index > 6 ? "num" : "" }));
  const urgency = el("div", { className: "urgency", role: "img" });
  const blocks = ["late", "soon", "near", "far"].map((name) => el("i", { className: name }));
  urgency.append(...blocks);
  const note = el("span", { className: "quiet" });
  cells[6].append(urgency, note);
  return { row: el("tr", {}, ...cells), update: (one) => showInstance(cells, urgency, blocks, note, one) };
}

function showInstance(cells, urgency, blocks, note, one) {
  const texts = [
    one.instance_id, one.gpu, one.model, one.phase, `${one.running}/${one.capacity}`, `${one.waiting}`, null,
    seconds(one.backlog_s), percent(one.kv_used), seconds(one.p95_s), one.drift === null ? "–" : `× ${one.drift.toFixed(2)}`,
  ];
  texts.forEach((text, index) => text === null || setText(cells[index], text));
  setClass(cells[3], one.phase === "serving" ? "good" : one.phase === "silent" ? "bad" : "warn");
  setClass(cells[10], one.drift !== null && (one.drift > 1.2 || one.drift < 0.8) ? "num warn" : "num");
  const counts = one.waiting_by_slack;
  urgency.hidden = counts === null || one.waiting === 0;
  setText(note, one.waiting === 0 ? "–" : counts === null ? "order not known" : "");
  if (urgency.hidden) return;
  const total = Math.max(1, counts.reduce((a, b) => a + b, 0));
  blocks.forEach((block, index) => { block.style.width = `${(100 * counts[index]) / total}%`; });
  const names = ["too late to start in time", "under 5 seconds", "under 30 seconds", "more"];
  urgency.setAttribute("aria-label", counts.map((count, index) => `${count} ${names[index]}`).join(", "));
}
