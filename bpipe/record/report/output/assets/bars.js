// Bars of memory per stage: without balancing beside this run, as in figure 8 of the BPipe paper. In: the view's stages. Out: one SVG.

// As wide as there is room, so that words keep their size. `line`: the height of one line of the legend.
const BARS = { widest: 860, narrowest: 300, height: 300, left: 64, right: 8, top: 14, line: 20, bottom: 36 };

function niceStep(size, count) {
  const rough = size / count;
  const power = 2 ** Math.floor(Math.log2(rough));
  return rough > power * 1.42 ? 2 * power : power;
}

function barTitle(stage, text, bytes) {
  return drawing("title", {}, `stage ${stage.stage}, ${text}: ${bytesText(bytes)}`);
}

// The legend, in as many lines as its entries need; `lines` says how many.
function barLegend(balanced, bounded, compared, width) {
  const entries = [
    compared ? ["without balancing: measured", [["rect", { class: "before" }]]]
      : ["without balancing: predicted", [["rect", { class: "before" }], ["rect", { fill: "url(#stripes)" }]]],
    [balanced ? "this run, balanced: measured" : "this run: measured", [["rect", { class: "after" }]]],
    ["predicted", [["rect", { class: "expected" }]]],
  ];
  if (bounded) entries.push(["bound", [["line", { class: "bound", x1: -1, x2: 17, y1: 6, y2: 6 }]]]);
  return legendOf(entries, width);
}

function legendOf(entries, width) {
  const group = drawing("g", { transform: `translate(${BARS.left}, 4)` });
  let x = 0;
  let lines = 1;
  for (const [text, shapes] of entries) {
    const room = 42 + text.length * 6.3;
    if (x > 0 && x + room > width - BARS.left) {
      x = 0;
      lines += 1;
    }
    const entry = drawing("g", { transform: `translate(${x}, ${(lines - 1) * BARS.line})` });
    for (const [name, attributes] of shapes) entry.append(drawing(name, name === "rect" ? { width: 16, height: 12, ...attributes } : attributes));
    const label = drawing("text", { x: 22, y: 10.5 });
    label.textContent = text;
    entry.append(label);
    group.append(entry);
    x += room;
  }
  return { group, lines };
}

function stageBars(stage, x, room, y) {
  const group = drawing("g");
  const width = Math.min(34, room * 0.36);
  const floor = y(0);
  const middle = x + room / 2;
  const bar = (left, bytes, attributes, text) => {
    if (bytes === null) return;
    group.append(drawing("rect", { x: left, y: y(bytes), width, height: Math.max(0, floor - y(bytes)), ...attributes }, barTitle(stage, text, bytes)));
  };
  const compared = (stage.baseline_bytes ?? null) !== null;
  const [before, beforeText] = compared
    ? [stage.baseline_bytes, "without balancing, measured"] : [stage.unbalanced_bytes, "without balancing, predicted"];
  bar(middle - width - 1, before, { class: "before" }, beforeText);
  if (!compared) bar(middle - width - 1, before, { fill: "url(#stripes)" }, beforeText);
  bar(middle + 1, stage.measured_bytes, { class: "after" }, "measured");
  // Dashes around narrow bars would be nothing but noise: there a line on top says the same.
  if (width >= 9) bar(middle + 1, stage.predicted_bytes, { class: "expected" }, "predicted");
  else if (stage.predicted_bytes !== null) {
    const height = y(stage.predicted_bytes);
    const ends = { x1: middle, x2: middle + width + 2, y1: height, y2: height };
    group.append(drawing("line", { class: "expected", ...ends }, barTitle(stage, "predicted", stage.predicted_bytes)));
  }
  if (stage.bound_bytes !== null) {
    const height = y(stage.bound_bytes);
    const [x1, x2] = [middle - width - 4, middle + width + 4];
    group.append(drawing("line", { class: "bound", x1, x2, y1: height, y2: height }, barTitle(stage, "bound", stage.bound_bytes)));
  }
  return group;
}

function fillBars(stages) {
  const sizes = stages.flatMap((stage) => [stage.baseline_bytes ?? stage.unbalanced_bytes, stage.measured_bytes, stage.predicted_bytes, stage.bound_bytes]);
  const top = Math.max(1, ...sizes.filter((size) => size !== null)) * 1.04;
  const { height, left, right, bottom } = BARS;
  const width = Math.min(BARS.widest, Math.max(BARS.narrowest, byId("bars").clientWidth));
  const balanced = stages.some((stage) => stage.evictions > 0);
  const legend = barLegend(balanced, stages.some((stage) => stage.bound_bytes !== null), stages.some((stage) => (stage.baseline_bytes ?? null) !== null), width);
  const y = (bytes) => height - bottom - (bytes / top) * (height - bottom - BARS.top - legend.lines * BARS.line);
  const size = (stage) => stage?.measured_bytes ?? 0;
  const most = stages.reduce((found, stage) => (size(stage) > (found ? size(found) : 0) ? stage : found), null);
  const summary = `Bars of saved activations, ${stages.length} stages, without balancing and in this run.`
    + (most ? ` The most, ${bytesText(size(most))}, is on stage ${most.stage}.` : "") + " The same numbers are in the table of stages.";
  const stripes = drawing("pattern", { id: "stripes", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    drawing("line", { class: "stripes", x1: 0, y1: 0, x2: 0, y2: 6 }));
  const picture = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary }, drawing("defs", {}, stripes));
  const write = (x, height, text, attributes) => {
    const word = drawing("text", { x, y: height, ...attributes });
    word.textContent = text;
    picture.append(word);
  };
  for (let bytes = 0, step = niceStep(top, 4); bytes <= top; bytes += step) {
    picture.append(drawing("line", { class: "rule", x1: left, x2: width - right, y1: y(bytes), y2: y(bytes) }));
    write(left - 8, y(bytes) + 4, bytes ? bytesText(bytes).replace(/\.0+ /, " ") : "0", { "text-anchor": "end", class: "quiet" });
  }
  const room = (width - left - right) / Math.max(1, stages.length);
  const every = Math.ceil(18 / room);
  stages.forEach((stage, index) => {
    picture.append(stageBars(stage, left + index * room, room, y));
    if (index % every === 0) write(left + (index + 0.5) * room, height - bottom + 16, String(stage.stage), { "text-anchor": "middle" });
  });
  write(left + (width - left - right) / 2, height - 5, "stage", { "text-anchor": "middle", class: "quiet" });
  picture.append(legend.group);
  byId("bars").replaceChildren(picture);
}
