// Starts the dashboard: views by hash, theme, key, snapshot, then live events.

import { showAlphaNow, showAlphas } from "./alpha.js";
import { call, follow, key, NeedsKey } from "./api.js";
import { restyleCharts } from "./charts.js";
import { refresh as refreshLetters, setUp as setUpLetters, showLetters } from "./letters.js";
import { showHistory, showPresent, showSample } from "./overview.js";
import { changeQueries, chooseQuery, resetQueries } from "./queries.js";
import { setClass, setText } from "./text.js";
import { showQuery, shownQuery } from "./waterfall.js";

const RETRY_MS = 2000;
const views = ["overview", "queries", "alpha", "letters"];
const paths = { "": "overview", queries: "queries", alpha: "alpha", "dead-letters": "letters" };
const connection = document.getElementById("connection");
let view = "overview";
let change = -1;

function route() {
  const [, path = "", rest] = location.hash.split("/");
  view = paths[path] ?? "overview";
  for (const name of views) {
    document.getElementById(`view-${name}`).hidden = name !== view;
    const link = document.querySelector(`[data-view=${name}]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${document.querySelector(`[data-view=${view}]`).textContent.trim().split(" ")[0]} · hexflow`;
  if (view === "queries" && rest) {
    chooseQuery(decodeURIComponent(rest));
    showQuery(decodeURIComponent(rest), { focus: true });
  }
  if (view === "letters") refreshLetters().catch(() => {});
}

function say(state, text) {
  setClass(connection, state);
  setText(connection, text);
}

async function begin() {
  const present = await call("../api/mesh");
  change = present.change;
  setUpLetters(present);
  showHistory(present.history, present.target_s, present.time_scale);
  showPresent(present);
  resetQueries(present.queries);
  showAlphaNow(present.alpha_now);
  showAlphas(present.alpha, present.now_s, present.time_scale);
  await showLetters(present.dead_letters, view === "letters");
}

function take(news) {
  if (news.since > change) {
    begin().catch(() => {}); // something was missed
    return;
  }
  change = Math.max(change, news.change);
  showSample(news.sample, news.target_s, news.time_scale);
  showPresent(news);
  changeQueries(news.queries);
  showAlphaNow(news.alpha_now);
  showAlphas(news.alpha, news.now_s, news.time_scale);
  showLetters(news.dead_letters, view === "letters").catch(() => {});
  const id = shownQuery();
  if (view === "queries" && id && news.queries.some((one) => one.query_id === id)) showQuery(id);
}

const wait = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

async function run() {
  for (;;) {
    try {
      await begin();
      document.getElementById("key-form").hidden = true;
      say("live", "live");
      await follow("../api/events", take);
      say("down", "reconnecting");
    } catch (error) {
      if (error instanceof NeedsKey) {
        await askForKey();
        continue;
      }
      say("down", "the gateway does not answer");
    }
    await wait(RETRY_MS);
  }
}

function askForKey() {
  const form = document.getElementById("key-form");
  setText(document.getElementById("key-error"), key.get() ? "This key is not an administrator's." : "");
  key.drop();
  say("", "waiting for a key");
  form.hidden = false;
  document.getElementById("key").focus();
  return new Promise((resolve) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      key.set(document.getElementById("key").value.trim());
      document.getElementById("key").value = "";
      resolve();
    }, { once: true });
  });
}

const THEMES = ["auto", "light", "dark"];
const MARKS = { auto: "◐", light: "☀", dark: "☾" };
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("hexflow-theme") ?? "auto";

function paint() {
  const isDark = theme === "dark" || (theme === "auto" && prefersDark.matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  document.documentElement.style.colorScheme = isDark ? "dark" : "light";
  const button = document.getElementById("theme");
  setText(button, `${MARKS[theme]} ${theme}`);
  button.setAttribute("aria-label", `Change colours: ${theme}`);
  restyleCharts();
}

document.getElementById("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("hexflow-theme", theme);
  paint();
});
prefersDark.addEventListener("change", paint);
addEventListener("hashchange", route);
paint();
route();
run();
