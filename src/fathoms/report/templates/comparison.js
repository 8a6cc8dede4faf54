/* The page of a comparison: tables and curves. */
start(() => {
  const data = readData();
  drawTables();
  drawCurves(data);
  for (const copy of document.querySelectorAll(".copy")) {
    const command = copy.parentElement.querySelector("code");
    copy.hidden = false;
    copy.onclick = async () => {
      getSelection().selectAllChildren(command);
      try { await navigator.clipboard.writeText(command.textContent); copy.textContent = "copied"; } catch { copy.textContent = "selected"; }
    };
  }
  document.body.dataset.ready = "";
});
