"use strict";
/* Shared by all pages: theme, and refreshing itself while `fathoms watch` serves it. */
const page = { draw() {}, state: {} };
const byId = (id) => document.getElementById(id);
const readData = () => JSON.parse(byId("data").textContent);
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
function themed() {
  byId("theme").textContent = isDark() ? "light" : "dark";
  page.draw();
}
function start(draw) {
  page.draw = draw;
  byId("theme").hidden = false;
  byId("theme").addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; themed(); });
  dark.addEventListener("change", themed);
  let before;
  addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; document.documentElement.dataset.theme = "light"; page.draw(); });
  addEventListener("afterprint", () => {
    if (before) document.documentElement.dataset.theme = before; else delete document.documentElement.dataset.theme;
    page.draw();
  });
  themed();
  if ("live" in document.body.dataset) setTimeout(refresh, 3000);
}
let tag = "";
async function refresh() {
  let wait = 3000;
  try {
    const answer = await fetch(location.href, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") || "";
      swap(new DOMParser().parseFromString(await answer.text(), "text/html"));
      byId("live").textContent = "live, changed " + new Date().toLocaleTimeString();
    } else if (answer.status === 304) {
      byId("live").classList.remove("lost");
    } else {
      byId("live").textContent = await answer.text();
      wait = 10000;
    }
  } catch {
    byId("live").textContent = "the server has ended";
    byId("live").classList.add("lost");
    wait = 10000;
  }
  setTimeout(refresh, wait);
}
/* Scripts of a parsed document never run; only its text and its data are taken over. */
function swap(fresh) {
  const open = [...document.querySelectorAll("main details")].map((details) => details.open);
  const kept = [...document.querySelectorAll("main input, main select")].map((field) => [field.id, field.value, field.checked]);
  const focus = document.activeElement && document.activeElement.id, across = scrollX, down = scrollY;
  document.title = fresh.title;
  byId("data").textContent = fresh.getElementById("data").textContent;
  document.querySelector("main").replaceWith(document.adoptNode(fresh.querySelector("main")));
  const details = [...document.querySelectorAll("main details")];
  if (details.length === open.length) details.forEach((one, i) => { one.open = open[i]; });
  for (const [id, value, checked] of kept) {
    const field = id && byId(id);
    if (!field) continue;
    if (field.type === "checkbox") field.checked = checked; else field.value = value;
  }
  page.draw();
  if (focus && byId(focus)) byId(focus).focus({ preventScroll: true });
  scrollTo(across, down);
}
