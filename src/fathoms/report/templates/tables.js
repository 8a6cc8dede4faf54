/* Tables that sort by a column and are filtered by words and status. */
const collator = new Intl.Collator("en", { numeric: true });
function sortTable(table, column, down) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => {
    const cell = row.cells[column];
    return [row, cell.dataset.v === undefined ? null : Number(cell.dataset.v), cell.textContent];
  });
  /* Where numbers are to be had, rows without one come last either way. */
  const numeric = rows.some((row) => row[1] !== null), sign = down ? -1 : 1;
  rows.sort((a, b) => {
    if (!numeric) return sign * collator.compare(a[2], b[2]);
    if (a[1] === null || b[1] === null) return (a[1] === null) - (b[1] === null);
    return sign * (a[1] - b[1]);
  });
  body.append(...rows.map((row) => row[0]));
  [...table.tHead.rows[0].cells].forEach((cell, i) => {
    if (i === column) cell.setAttribute("aria-sort", down ? "descending" : "ascending"); else cell.removeAttribute("aria-sort");
  });
  page.state["sort-" + table.id] = [column, down];
}
function filterTables() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean), status = byId("status-filter").value;
  let shown = 0, all = 0;
  for (const table of document.querySelectorAll("table.sortable")) {
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      const fits = words.every((word) => text.includes(word)) && (!status || row.dataset.status === undefined || row.dataset.status === status);
      row.hidden = !fits;
      if (table.id === "cells") { all += 1; shown += fits; }
    }
  }
  byId("filter-count").textContent = shown === all ? all + " runs" : shown + " of " + all + " runs";
}
function drawTables() {
  for (const table of document.querySelectorAll("table.sortable")) {
    if (!("ready" in table.dataset)) {
      table.dataset.ready = "";
      [...table.tHead.rows[0].cells].forEach((cell, i) => cell.firstElementChild.addEventListener("click", () => {
        const now = page.state["sort-" + table.id];
        sortTable(table, i, now && now[0] === i ? !now[1] : i > 0 && i !== 2);
      }));
      const before = page.state["sort-" + table.id];
      if (before) sortTable(table, ...before);
    }
  }
  byId("filter").oninput = filterTables;
  byId("status-filter").onchange = filterTables;
  filterTables();
}
