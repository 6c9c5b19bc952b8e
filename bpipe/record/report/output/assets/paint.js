// Colours of the page for a canvas, and what lies around the lanes: waits, curves, the axis. Knows no pointer and no data of the page.

const SHADES = ["card", "text", "muted", "line", "lane", "grid", "held", "held-line", "predicted", "bound", "wait", "wait-line", "on-action", "pick"];
// How much of its colour a simulated action keeps: it is the same, less real.
const PALE = 0.62;

// A look has the page's shades by name, and for the groups of actions `groups` (fills), `lines` (outlines) and `patterns`.
function readLooks(ratio) {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const shades = Object.fromEntries(SHADES.map((name) => [name, read(name)]));
  const make = (share) => {
    const tint = (name) => mix(read(name), shades.lane, share);
    const groups = GROUPS.map(tint);
    const lines = GROUPS.map((name) => tint(`${name}-line`));
    // Backwards are hatched, waits striped like a barrier.
    const patterns = [...groups];
    patterns[1] = stripes(groups[1], lines[1], { size: 7, thickness: 1.1, alpha: 0.55 }, ratio);
    patterns[2] = stripes(groups[2], lines[2], { size: 4, thickness: 1, alpha: 0.6 }, ratio);
    return { ...shades, groups, lines, patterns };
  };
  const barrier = stripes(shades.wait, shades["wait-line"], { size: 8, thickness: 3, alpha: 1 }, ratio);
  return { measured: { ...make(1), barrier }, simulated: { ...make(PALE), barrier } };
}

// Between two #rrggbb colours, `share` of the first.
function mix(colour, ground, share) {
  const parts = (text) => [1, 3, 5].map((place) => parseInt(text.slice(place, place + 2), 16));
  const other = parts(ground);
  return `#${parts(colour).map((part, index) => Math.round(part * share + other[index] * (1 - share)).toString(16).padStart(2, "0")).join("")}`;
}

// Where a time lies on a lane, in pixels.
function placer(area, view) {
  const scale = (area.right - area.left) / (view.end - view.start);
  return (time) => area.left + (time - view.start) * scale;
}

function fillBox(g, colour, x, y, width, height) {
  g.fillStyle = colour;
  g.fillRect(x, y, width, height);
}

function strokeLine(g, colour, width, points) {
  g.beginPath();
  for (const [x, y] of points) g.lineTo(x, y);
  g.strokeStyle = colour;
  g.lineWidth = width;
  g.stroke();
}

// `style`: such as bold or italic.
function setType(g, size, align, style = "") {
  g.font = `${style} ${size}px system-ui, 'Liberation Sans', sans-serif`;
  g.textAlign = align;
  g.textBaseline = "middle";
}

function stripes(background, line, { size, thickness, alpha }, ratio) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(size * ratio);
  const g = tile.getContext("2d");
  g.scale(tile.width / size, tile.height / size);
  fillBox(g, background, 0, 0, size, size);
  g.globalAlpha = alpha;
  for (const shift of [-size, 0, size]) strokeLine(g, line, thickness, [[shift - 1, size + 1], [shift + size + 1, -1]]);
  const pattern = g.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

// Exposed time, in which computation waits: stripes across the lane in the gap (`band` 0), and a band along its foot over whatever is there.
function paintWaits(g, lane, area, view, look, band) {
  const at = placer(area, view);
  const last = firstBeyond(lane.start, view.end);
  let painted = -Infinity;
  for (let index = firstBeyond(lane.reach, view.start, true); index < last; index++) {
    const from = Math.max(area.left, at(lane.start[index]));
    const to = Math.min(area.right, Math.max(from + 1, at(lane.end[index])));
    if (to <= painted || (!band && to - from < NARROW)) continue;
    painted = to;
    const foot = area.y + area.height - band;
    if (!band) fillBox(g, look.barrier, from, area.y, to - from, area.height);
    else {
      fillBox(g, look["wait-line"], from, foot - 1, to - from, band + 1);
      fillBox(g, look.wait, from, foot, to - from, band);
    }
  }
}

// Steps of held bytes as a line, at most four points a pixel column; with `fill` the area under it.
function paintCurve(g, memory, area, view, top, { fill, line, width }) {
  const { left, right, y, height } = area;
  const at = placer(area, view);
  const floor = y + height;
  const level = (held) => floor - (held / top) * height;
  let index = firstBeyond(memory.times, view.start);
  let held = index ? memory.held[index - 1] : 0;
  g.beginPath();
  g.moveTo(left, level(held));
  while (index < memory.times.length && memory.times[index] <= view.end) {
    const x = at(memory.times[index]);
    const column = Math.floor(x);
    let [least, most] = [held, held];
    g.lineTo(x, level(held));
    do {
      held = memory.held[index];
      least = Math.min(least, held);
      most = Math.max(most, held);
      index++;
    } while (index < memory.times.length && at(memory.times[index]) < column + 1 && memory.times[index] <= view.end);
    g.lineTo(x, level(least));
    g.lineTo(x, level(most));
    g.lineTo(x, level(held));
  }
  g.lineTo(right, level(held));
  g.strokeStyle = line;
  g.lineWidth = width;
  g.stroke();
  if (fill) {
    g.lineTo(right, floor);
    g.lineTo(left, floor);
    g.fillStyle = fill;
    g.fill();
  }
}

// Times that divide the span well: 1, 2 or 5 times a power of ten, about one every 110 pixels.
function tickStep(view, width) {
  const rough = (view.end - view.start) / Math.max(1, width / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
}

function paintAxis(g, area, view, look) {
  const step = tickStep(view, area.right - area.left);
  const at = placer(area, view);
  setType(g, 11, "center");
  for (let number = Math.ceil(view.start / step); number * step <= view.end; number++) {
    const x = at(number * step);
    fillBox(g, look.grid, Math.round(x), area.y, 1, area.height);
    g.fillStyle = look.muted;
    if (x > area.left + 14 && x < area.right - 22) g.fillText(secondsText(number * step, step), x, 13);
  }
}
