/* The page of a run: its curves by epoch and by update. */
start(() => {
  charts.forEach((chart) => chart.destroy());
  charts = [];
  const paint = paints();
  for (const [id, group] of Object.entries(readData())) byId(id).replaceChildren(...group.charts.map((chart) => drawChart(group, chart, paint)));
  document.body.dataset.ready = "";
});
