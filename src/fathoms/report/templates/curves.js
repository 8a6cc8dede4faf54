/* Learning curves with bands over seeds, drawn by uPlot. */
const DASHES = [[], [7, 4], [2, 4]];
let charts = [];
function floats(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}
/* A colour of the style sheet as the canvas needs it, in the present theme. */
function colour(name) {
  const probe = element("span");
  probe.style.color = "var(--" + name + ")";
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
function faded(rgb, share) { return rgb.replace("rgb(", "rgba(").replace(")", ", " + share + ")"); }
function overSeeds(lines, length) {
  const mean = Array(length).fill(null), low = Array(length).fill(null), high = Array(length).fill(null);
  for (let i = 0; i < length; i++) {
    let sum = 0, count = 0, least = Infinity, most = -Infinity;
    for (const line of lines) {
      const value = line[i];
      if (Number.isNaN(value)) continue;
      sum += value; count += 1; least = Math.min(least, value); most = Math.max(most, value);
    }
    if (count) { mean[i] = sum / count; low[i] = least; high[i] = most; }
  }
  return [mean, low, high];
}
const plain = (line) => Array.from(line, (value) => (Number.isNaN(value) ? null : value));
function drawCurves(data) {
  const curves = data.curves;
  charts.forEach((chart) => chart.destroy());
  charts = [];
  byId("curves-section").hidden = !curves.charts.length;
  if (!curves.charts.length) return;
  page.state.shown ??= new Set(data.order.slice(0, 8));
  for (const id of ["every-seed", "log-scale"]) byId(id).onchange = () => drawCurves(data);
  const show = (arms) => { page.state.shown = new Set(arms); drawCurves(data); };
  byId("show-all").onclick = () => show(data.order);
  byId("show-best").onclick = () => show(data.order.slice(0, 8));
  drawLegend(data);
  const paint = paints(), group = { ...curves, arms: data.arms, x: "epoch" };
  byId("curves").replaceChildren(...curves.charts.map((chart) => drawChart(group, chart, paint)));
}
const paints = () => ({ ink: colour("soft"), rule: colour("rule"), arms: Array.from({ length: 7 }, (_, i) => colour("c" + i)) });
function drawLegend(data) {
  const legend = byId("curves-legend");
  legend.textContent = "";
  for (const index of data.order) {
    const arm = data.arms[index], button = element("button", "key c" + arm.colour + " d" + (arm.dash % 3));
    button.type = "button";
    button.append(element("bdi", "", arm.name));
    button.title = arm.name;
    button.setAttribute("aria-pressed", page.state.shown.has(index));
    button.onclick = () => {
      const place = [...legend.children].indexOf(button);
      if (!page.state.shown.delete(index)) page.state.shown.add(index);
      drawCurves(data);
      byId("curves-legend").children[place].focus();
    };
    legend.append(button);
  }
}
/* Columns and series of one chart: for each arm a mean between its lowest and highest seed. */
function columns(group, chart, paint) {
  const epochs = group.epochs, made = { data: [epochs], series: [{}], bands: [], rows: [] };
  const every = byId("every-seed")?.checked, dots = epochs.length <= 30;
  const add = (values, options) => { made.data.push(values); made.series.push({ points: { show: false }, ...options }); };
  group.arms.forEach((arm, index) => {
    if (page.state.shown && !page.state.shown.has(index)) return;
    const lines = group.cells.flatMap((cell, i) => (cell[0] === index && chart.lines[i] ? [floats(chart.lines[i])] : []));
    if (!lines.length) return;
    const stroke = paint.arms[arm.colour], dash = DASHES[arm.dash % 3], [mean, low, high] = overSeeds(lines, epochs.length);
    if (every) for (const line of lines) add(plain(line), { stroke: faded(stroke, 0.45), width: 1, dash });
    if (!every && lines.length > 1) {
      add(low, { stroke: "transparent" });
      add(high, { stroke: "transparent" });
      made.bands.push({ series: [made.series.length - 1, made.series.length - 2], fill: faded(stroke, 0.16) });
    }
    add(mean, { stroke, width: 2, dash, points: { show: dots, size: 5, fill: stroke } });
    made.rows.push({ arm, mean, low, high });
  });
  return made;
}
function drawChart(group, chart, paint) {
  const figure = element("figure", "chart curve"), caption = element("figcaption"), place = element("div", "plot"), tip = element("div", "tip");
  const title = element("span", "title", chart.title + " ");
  title.append(element("span", "unit", chart.unit));
  caption.append(title);
  tip.hidden = true;
  figure.append(caption, place, tip);
  figure.tabIndex = 0;
  figure.setAttribute("role", "img");
  figure.setAttribute("aria-label", chart.title + " by " + group.x + "; arrow keys move the cursor");
  const made = columns(group, chart, paint), epochs = group.epochs;
  if (!byId("curves-legend") && made.rows.length > 1) {
    const legend = element("span", "legend");
    for (const row of made.rows) legend.append(element("span", "key c" + row.arm.colour, row.arm.name));
    caption.append(legend);
  }
  const axis = { stroke: paint.ink, font: "11px system-ui, sans-serif", grid: { stroke: paint.rule, width: 1 }, ticks: { show: false } };
  const width = () => Math.max(240, figure.clientWidth - 24 || 460);
  const log = byId("log-scale")?.checked && made.data.slice(1).every((column) => column.every((value) => value === null || value > 0));
  requestAnimationFrame(() => {
    if (!figure.isConnected) return;
    const plot = new uPlot({
      width: width(), height: 250, legend: { show: false }, series: made.series, bands: made.bands,
      cursor: { sync: { key: group.x }, points: { show: false }, y: false },
      scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: log ? { distr: 3 } : { range: (_, low, high) => uPlot.rangeNum(Math.min(low, chart.floor ?? low), high, 0.1, true) } },
      axes: [{ ...axis, size: 34, incrs: [1, 2, 5].flatMap((step) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((scale) => step * scale)).sort((a, b) => a - b) }, { ...axis, size: 54, values: (_, marks) => marks.map((mark) => Number(mark.toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6 })) }],
      hooks: { setCursor: [(u) => tell(u, tip, made.rows, group, chart.unit)] },
    }, made.data, place);
    charts.push(plot);
    figure.dataset.ready = "";
    figure.onkeydown = (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const now = Math.min(Math.max((plot.cursor.idx ?? -move) + move, 0), epochs.length - 1);
      plot.setCursor({ left: plot.valToPos(epochs[now], "x"), top: 60 });
    };
    figure.onblur = () => plot.setCursor({ left: -10, top: -10 });
    new ResizeObserver(() => { if (figure.isConnected && plot.width !== width()) plot.setSize({ width: width(), height: 250 }); }).observe(figure);
  });
  return figure;
}
function tell(plot, tip, rows, group, unit) {
  const index = plot.cursor.idx;
  tip.hidden = index === null || index === undefined || plot.cursor.left < 0;
  if (tip.hidden) return;
  tip.textContent = "";
  tip.append(element("div", "", group.x + " " + group.epochs[index]));
  const known = rows.filter((row) => row.mean[index] !== null).sort((a, b) => b.mean[index] - a.mean[index]);
  const digits = (value) => Number(value.toPrecision(4));
  for (const row of known.slice(0, 12)) {
    const line = element("div", "key c" + row.arm.colour), value = digits(row.mean[index]) + (unit && "\u00a0" + unit);
    const spread = row.low[index] === row.high[index] ? "" : " (" + digits(row.low[index]) + " to " + digits(row.high[index]) + ")";
    line.append(element("bdi", "short", row.arm.name), " " + value + spread);
    tip.append(line);
  }
  const flip = plot.cursor.left > plot.width / 2 - 30, inset = plot.over.offsetLeft + 12;
  tip.style.left = flip ? "auto" : inset + plot.cursor.left + 14 + "px";
  tip.style.right = flip ? plot.width - inset - plot.cursor.left + 40 + "px" : "auto";
}
