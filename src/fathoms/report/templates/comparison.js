/* The page of a comparison: tables, curves, maps. */
start(() => {
  const data = readData();
  drawTables();
  drawCurves(data);
  drawDepth(data);
  const axes = byId("axes"), maps = [...document.querySelectorAll(".axis-map")];
  if (axes) {
    const choose = () => maps.forEach((map, i) => { map.hidden = i !== Number(axes.value); });
    byId("axes-label").hidden = false;
    axes.onchange = choose;
    choose();
  }
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
