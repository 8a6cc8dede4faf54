/* The page of a comparison: tables and curves. */
start(() => {
  const data = readData();
  drawTables();
  drawCurves(data);
  const copy = byId("copy");
  if (copy) {
    copy.hidden = false;
    copy.onclick = async () => {
      getSelection().selectAllChildren(byId("command"));
      try { await navigator.clipboard.writeText(byId("command").textContent); copy.textContent = "copied"; } catch { copy.textContent = "selected"; }
    };
  }
  document.body.dataset.ready = "";
});
