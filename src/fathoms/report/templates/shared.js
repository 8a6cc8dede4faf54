"use strict";
/* Shared by all pages: theme, and the reload of a page that is followed. */
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
  restore();
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
  if (document.body.dataset.reload) setTimeout(reload, 1000 * document.body.dataset.reload);
}
/* What a reader has chosen outlives the reload of a page that `fathoms report --follow` writes again. */
const fields = () => [...document.querySelectorAll("main input, main select")].filter((field) => field.id);
function reload() {
  if (document.hidden || (document.activeElement && document.activeElement.type === "search")) return void setTimeout(reload, 1000);
  const open = [...document.querySelectorAll("main details")].map((one) => one.open);
  const kept = fields().map((field) => [field.id, field.value, field.checked]);
  const state = { ...page.state, shown: page.state.shown && [...page.state.shown] };
  const theme = document.documentElement.dataset.theme;
  try { sessionStorage.setItem(location.pathname, JSON.stringify({ open, kept, state, theme, at: [scrollX, scrollY] })); } catch { /* Choices are lost. */ }
  location.reload();
}
/* Take up what was chosen before a reload, ahead of the first drawing. */
function restore() {
  let before = null;
  try { before = JSON.parse(sessionStorage.getItem(location.pathname)); sessionStorage.removeItem(location.pathname); } catch { /* Nothing was chosen. */ }
  if (!before) return;
  if (before.theme) document.documentElement.dataset.theme = before.theme;
  Object.assign(page.state, before.state);
  if (before.state.shown) page.state.shown = new Set(before.state.shown);
  const details = [...document.querySelectorAll("main details")];
  if (details.length === before.open.length) details.forEach((one, i) => { one.open = before.open[i]; });
  for (const [id, value, checked] of before.kept) {
    const field = byId(id);
    if (field && field.type === "checkbox") field.checked = checked; else if (field) field.value = value;
  }
  addEventListener("load", () => scrollTo(...before.at));
}
