// The list of queries, newest arrival first, with filters.

import { el, Rows, seconds, setClass, setText } from "./text.js";

const MOST = 1000;
const AT_ONCE = 150;
const body = document.querySelector("#queries tbody");
const rows = new Rows(body, makeRow);
const data = new Map();
const order = []; // ids, newest arrival first
const filters = { tenant: "", outcome: "", id: "" };
const tenants = new Set();
let chosen = "";
let filling = 0;

export function resetQueries(list) {
  data.clear();
  order.length = 0;
  list.sort((a, b) => b.arrival_s - a.arrival_s).slice(0, MOST).forEach((one) => {
    data.set(one.query_id, one);
    order.push(one.query_id);
    noteTenant(one.tenant);
  });
  rows.keepOnly([]);
  fill();
}

export function changeQueries(list) {
  list.sort((a, b) => a.arrival_s - b.arrival_s).forEach((one) => {
    if (!data.has(one.query_id)) insert(one);
    data.set(one.query_id, one);
    noteTenant(one.tenant);
    show(one);
  });
  while (order.length > MOST) {
    const gone = order.pop();
    data.delete(gone);
    rows.remove(gone);
  }
  count();
}

export function chooseQuery(id) {
  rows.known.get(chosen)?.row.classList.remove("chosen");
  chosen = id;
  rows.known.get(chosen)?.row.classList.add("chosen");
}

function insert(one) {
  const place = order.findIndex((id) => data.get(id).arrival_s < one.arrival_s);
  order.splice(place < 0 ? order.length : place, 0, one.query_id);
}

function show(one) {
  if (!isWanted(one)) {
    rows.remove(one.query_id);
    return;
  }
  if (rows.known.has(one.query_id)) {
    rows.update(one.query_id, one);
    return;
  }
  const after = order.slice(order.indexOf(one.query_id) + 1).find((id) => rows.known.has(id));
  rows.update(one.query_id, one, after ? rows.known.get(after).row : null);
}

function isWanted(one) {
  return (!filters.tenant || one.tenant === filters.tenant)
    && (!filters.id || one.query_id.includes(filters.id))
    && (!filters.outcome || one.outcome === filters.outcome || (filters.outcome === "late" && one.is_late));
}

// Long lists are filled a piece per frame, so that the page answers meanwhile.
function fill() {
  cancelAnimationFrame(filling);
  const wanted = order.filter((id) => isWanted(data.get(id)));
  let next = 0;
  const step = () => {
    wanted.slice(next, next + AT_ONCE).forEach((id) => data.has(id) && rows.update(id, data.get(id)));
    next += AT_ONCE;
    if (next < wanted.length) filling = requestAnimationFrame(step);
    count();
  };
  step();
}

function count() {
  document.getElementById("no-queries").hidden = rows.size > 0;
  setText(document.getElementById("no-queries"), data.size ? "No query fits the filters." : "No query has ended a call yet.");
  setText(document.getElementById("query-count"), `${rows.size} of ${data.size} shown`);
}

function makeRow(id) {
  const button = el("button", { type: "button", title: id }, el("bdi", {}, id));
  button.addEventListener("click", () => { location.hash = `#/queries/${encodeURIComponent(id)}`; });
  const cells = Array.from({ length: 5 }, (_, index) => el("td", { role: "cell", className: index > 1 ? "num" : "" }));
  const row = el("tr", { role: "row", className: id === chosen ? "chosen" : "" }, el("td", { role: "cell" }, button), ...cells);
  return {
    row,
    update: (one) => {
      setText(cells[0], one.tenant);
      setText(cells[1], stateOf(one));
      setClass(cells[1], one.is_late || !["running", "completed"].includes(one.outcome) ? "bad" : one.outcome === "completed" ? "good" : "");
      setText(cells[2], seconds(one.took_s));
      setText(cells[3], seconds(one.slo_s));
      setText(cells[4], `${one.calls_ended}`);
    },
  };
}

function stateOf(one) {
  if (!one.is_late) return one.outcome;
  return { completed: "late", running: "running late" }[one.outcome] ?? one.outcome;
}

function noteTenant(name) {
  if (tenants.has(name)) return;
  tenants.add(name);
  document.getElementById("filter-tenant").append(el("option", {}, name));
}

for (const name of Object.keys(filters)) {
  document.getElementById(`filter-${name}`).addEventListener("input", (event) => {
    filters[name] = event.target.value;
    rows.keepOnly([]);
    fill();
  });
}
