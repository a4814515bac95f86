// α over time, with the tuner's reason for each change.

import { Series } from "./charts.js";
import { clock, el, seconds, setText } from "./text.js";

const body = document.querySelector("#alphas tbody");
const COLOURS = ["--decode", "--wait", "--late", "--good", "--way"];
const known = new Map(); // "pool/revision" -> update
let chart = null;
let pools = [];

export function showAlphas(updates, now, scale) {
  let isNew = false;
  for (const one of updates) {
    const key = `${one.pool}/${one.revision}`;
    if (known.has(key)) continue;
    known.set(key, one);
    body.prepend(row(one, scale));
    isNew = true;
  }
  const none = known.size === 0;
  document.getElementById("no-alphas").hidden = !none;
  document.getElementById("alpha-changes").hidden = none;
  if (!none && (isNew || !document.getElementById("view-alpha").hidden)) draw(now, scale);
}

export function showAlphaNow(values) {
  const texts = Object.entries(values).map(([model, alpha]) => `${model} ${Number(alpha.toPrecision(3))}`);
  setText(document.getElementById("alpha-now"), texts.length ? texts.join(", ") : "not known yet");
}

function draw(now, scale) {
  const all = [...known.values()].sort((a, b) => a.at_s - b.at_s);
  const names = [...new Set(all.map((one) => one.pool))].slice(0, COLOURS.length);
  if (chart === null || names.length !== pools.length) {
    pools = names;
    const lines = names.map((label, index) => ({ label, colour: COLOURS[index], step: true, value: (v) => v.toPrecision(3) }));
    document.getElementById("chart-alpha").replaceChildren();
    chart = new Series("chart-alpha", lines, (_, __, high) => [0, Math.max(0.05, (high ?? 0) * 1.15)]);
  }
  const times = [];
  const columns = pools.map(() => []);
  const last = new Map();
  const point = (at) => {
    times.push(at / scale);
    pools.forEach((pool, index) => columns[index].push(last.get(pool) ?? null));
  };
  for (const one of all) {
    if (!last.has(one.pool) && one.previous_alpha !== null) {
      last.set(one.pool, one.previous_alpha);
      point(one.at_s - 30 * scale);
    }
    last.set(one.pool, one.alpha);
    point(one.at_s);
  }
  point(now);
  chart.reset(...ordered(times, columns));
  chart.describe(`α now: ${pools.map((pool) => `${pool} ${last.get(pool)}`).join(", ")}; the table below has every change`);
}

// uPlot needs rising times.
function ordered(times, columns) {
  const places = times.map((_, index) => index).sort((a, b) => times[a] - times[b]);
  return [places.map((place) => times[place]), columns.map((column) => places.map((place) => column[place]))];
}

function row(one, scale) {
  const predicted = one.predicted_p95_s === null ? "–"
    : seconds(one.predicted_p95_s) + (one.predicted_low_s === null ? "" : ` (${seconds(one.predicted_low_s)} to ${seconds(one.predicted_high_s)})`);
  const number = (value) => (value === null ? "–" : `${Number(value.toPrecision(3))}`);
  const made = el("tr", {}, el("td", {}, clock(one.at_s, scale)), el("td", {}, one.pool), el("td", { className: "num" }, number(one.previous_alpha)),
    el("td", { className: "num" }, number(one.alpha)), el("td", { className: "num" }, predicted), el("td", { className: "wrap" }));
  setText(made.lastChild, one.reason);
  return made;
}
