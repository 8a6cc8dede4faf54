/* Norms of every branch over the updates, an arm a map, all on one colour scale. */
function shades(ramp) {
  const parts = ramp.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return (share) => {
    const place = Math.min(Math.max(share, 0), 1) * (parts.length - 1), index = Math.min(Math.floor(place), parts.length - 2);
    return parts[index].map((low, k) => Math.round(low + (parts[index + 1][k] - low) * (place - index)));
  };
}
function drawDepth(data) {
  const depth = data.depth, field = byId("depth-field"), holder = byId("depth");
  byId("depth-section").hidden = !depth.maps.length;
  if (!depth.maps.length) return;
  const maps = depth.maps.filter((map) => !page.state.shown || page.state.shown.has(map.arm));
  if (!field.options.length) {
    for (const [value, title] of depth.fields) { const option = element("option", "", title); option.value = value; field.append(option); }
    field.value = page.state.field || depth.fields[0][0];
  }
  field.onchange = () => { page.state.field = field.value; drawDepth(data); };
  page.state.field = field.value;
  const values = maps.map((map) => floats(map.fields[field.value]));
  let low = Infinity, high = -Infinity;
  for (const list of values) for (const value of list) if (value > 0) { low = Math.min(low, value); high = Math.max(high, value); }
  const shade = shades(depth.ramp), known = high > 0, span = Math.log(high / low) || 1;
  const scale = byId("depth-scale");
  scale.textContent = "";
  if (known) scale.append(element("span", "", low.toPrecision(3)), gradient(shade), element("span", "", high.toPrecision(3)));
  else scale.append(element("span", "", "nothing was measured"));
  holder.textContent = "";
  maps.forEach((map, i) => holder.append(depthMap(data.arms[map.arm], map, values[i], (value) => shade(Math.log(value / low) / span))));
}
function gradient(shade) {
  const canvas = element("canvas", "ramp"), context = canvas.getContext("2d");
  [canvas.width, canvas.height] = [64, 1];
  const pixels = context.createImageData(64, 1);
  for (let x = 0; x < 64; x++) pixels.data.set([...shade(x / 63), 255], 4 * x);
  context.putImageData(pixels, 0, 0);
  return canvas;
}
function depthMap(arm, map, values, shade) {
  const rows = map.rows.length, columns = map.updates.length, figure = element("figure", "depth-map");
  const caption = element("figcaption"), title = element("span", "key c" + arm.colour);
  title.append(element("bdi", "", arm.name));
  caption.append(title);
  const canvas = element("canvas"), context = canvas.getContext("2d"), pixels = context.createImageData(columns, rows);
  [canvas.width, canvas.height] = [columns, rows];
  values.forEach((value, i) => { if (value > 0) pixels.data.set([...shade(value), 255], 4 * i); });
  context.putImageData(pixels, 0, 0);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", arm.name + ", " + rows + " branches by " + columns + " measurements");
  const height = Math.min(14, Math.max(5, 340 / rows)), every = Math.ceil(12 / height), labels = element("div", "labels"), body = element("div", "body");
  canvas.style.height = rows * height + "px";
  map.rows.forEach((name, i) => {
    if (i % every) return;
    const label = element("span", "", name);
    label.style.height = label.style.lineHeight = height * Math.min(every, rows - i) + "px";
    labels.append(label);
  });
  const foot = element("div", "foot"), note = element("div", "foot");
  foot.append(element("span", "", "update " + map.updates[0]), element("span", "", map.updates[columns - 1]));
  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.min(columns - 1, Math.floor(((event.clientX - box.left) / box.width) * columns)), y = Math.min(rows - 1, Math.floor(((event.clientY - box.top) / box.height) * rows));
    const value = values[y * columns + x];
    note.textContent = map.rows[y] + ", update " + map.updates[x] + ": " + (value > 0 ? value.toPrecision(4) : "not a finite number above zero");
  };
  canvas.onpointerleave = () => { note.textContent = "\u00a0"; };
  note.textContent = "\u00a0";
  body.append(labels, canvas);
  figure.append(caption, body, foot, note);
  return figure;
}
