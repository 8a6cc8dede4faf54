/* The page of a run: tooltips on its charts. */
start(() => {
  const data = readData();
  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    const chart = data[svg.dataset.chart], tip = svg.parentNode.querySelector(".tip"), cursor = svg.querySelector(".cursor");
    const width = svg.viewBox.baseVal.width, [low, high] = chart.x;
    const epochs = [...new Set(chart.series.flatMap((line) => line.points.map((point) => point[0])))];
    const hide = () => { tip.hidden = true; cursor.classList.remove("on"); };
    if ("live" in svg.dataset) continue;
    svg.dataset.live = "";
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
      const asked = low + ((share - chart.left) / (chart.right - chart.left)) * (high - low);
      const epoch = epochs.reduce((a, b) => (Math.abs(b - asked) < Math.abs(a - asked) ? b : a));
      const place = chart.left + ((epoch - low) / (high - low || 1)) * (chart.right - chart.left);
      cursor.setAttribute("x1", place * width);
      cursor.setAttribute("x2", place * width);
      cursor.classList.add("on");
      tip.textContent = "";
      const add = (text, style) => {
        const row = document.createElement("div");
        row.textContent = text;
        if (style) row.className = style;
        tip.append(row);
      };
      add(chart.name + " " + epoch.toLocaleString("en"));
      for (const line of chart.series) {
        const point = line.points.find((pair) => pair[0] === epoch);
        if (point && point[1] !== null) add(line.name + " " + Number(point[1].toPrecision(5)) + chart.unit, line.style);
      }
      tip.hidden = false;
      const across = place * box.width;
      const flip = place > 0.55;
      tip.style.left = flip ? "auto" : 18 + across + 12 + "px";
      tip.style.right = flip ? 18 + box.width - across + 12 + "px" : "auto";
    });
  }
});
