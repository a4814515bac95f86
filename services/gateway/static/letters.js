// Dead letters, and sending one again.

import { call } from "./api.js";
import { clock, el, Rows, setText } from "./text.js";

const rows = new Rows(document.querySelector("#letters tbody"), makeRow);
const status = document.getElementById("letter-status");
const dialog = document.getElementById("letter-text");
let scale = 1;
let showsText = false;
let seen = -1;

export function setUp(present) {
  scale = present.time_scale;
  showsText = present.shows_text === true;
}

export async function showLetters(count, isShown) {
  const badge = document.getElementById("letter-count");
  badge.hidden = count === 0;
  setText(badge, `${count}`);
  if (isShown && count !== seen) await refresh();
}

export async function refresh() {
  const { data, seen: total } = await call("../api/dead-letters");
  seen = total;
  rows.keepOnly(data.map((one) => one.offset));
  let before = null;
  for (const one of data.toReversed()) before = rows.update(one.offset, one, before).row;
  document.getElementById("no-letters").hidden = data.length > 0;
}

function makeRow(offset) {
  const cells = Array.from({ length: 7 }, (_, index) => el("td", { className: index === 4 ? "wrap" : index === 6 ? "num" : "" }));
  const replay = el("button", { type: "button" }, "Replay");
  const show = el("button", { type: "button", hidden: !showsText }, "Show text");
  replay.addEventListener("click", () => send(offset, replay));
  show.addEventListener("click", () => text(offset));
  const row = el("tr", {}, ...cells, el("td", {}, replay, " ", show));
  return {
    row,
    update: (one) => {
      [clock(one.at_s, scale), `${one.topic} @ ${one.source_offset}`, one.service, one.error, one.detail, one.request_id || "–", `${one.size_bytes}`]
        .forEach((value, index) => setText(cells[index], value));
      replay.dataset.again = one.replayed_at_s === null ? "" : "true";
      setText(replay, one.replayed_at_s === null ? "Replay" : "Replay again");
      replay.setAttribute("aria-label", `${replay.textContent}: the message of ${one.topic} at ${one.source_offset}`);
    },
  };
}

async function send(offset, button) {
  button.disabled = true;
  try {
    const sent = await call(`../api/dead-letters/${offset}/replay${button.dataset.again ? "?again=true" : ""}`, { method: "POST" });
    setText(status, `Sent again: ${sent.topic}, partition ${sent.partition}, offset ${sent.offset}.`);
    await refresh();
  } catch (error) {
    setText(status, `Not sent: ${error.message}`);
  } finally {
    button.disabled = false;
    button.focus();
  }
}

async function text(offset) {
  try {
    dialog.querySelector("pre").textContent = (await call(`../api/dead-letters/${offset}/text`)).text;
    dialog.showModal();
  } catch (error) {
    setText(status, error.message);
  }
}
