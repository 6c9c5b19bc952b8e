// Put the page together: tables and bars once, the timeline for the chosen iteration, and what the controls do.
//
// For tests and the curious: `window.bpipeTimings` says how long drawing took, `window.bpipeTimeline` where things are.

// How many ranks still have room for large rows with curves, and for medium ones.
const MOST_LARGE = 12;
const MOST_MEDIUM = 24;

function drawLegend({ colours, ratio, data }) {
  const area = { left: 0, right: 28, y: 0, height: 13 };
  const box = (g, group) => {
    paintBoxes(g, [0, 28], area, 0, colours.lines[group], colours.lines[group]);
    paintBoxes(g, [0, 28], area, 1, colours.groups[group], colours.patterns[group]);
  };
  const entries = [
    ["forward", (g) => box(g, 0)],
    ["backward", (g) => box(g, 1)],
    ["eviction, return", (g) => paintPointed(g, 0, 28, area, 3, colours)],
    ["load, hosting", (g) => paintPointed(g, 0, 28, area, 4, colours)],
    ["exposed transfer time", (g) => fillBox(g, colours.barrier, 0, 0, 28, 13)],
    ["measured memory", (g) => { fillBox(g, colours.held, 0, 3, 28, 10); fillBox(g, colours["held-line"], 0, 3, 28, 1); }],
    ["simulated memory", (g) => fillBox(g, colours.predicted, 0, 6, 28, 2)],
    ["bound", (g) => { fillBox(g, colours.bound, 0, 6, 11, 2); fillBox(g, colours.bound, 16, 6, 12, 2); }],
  ];
  byId("legend").replaceChildren(...entries.map(([text, paint]) => {
    const canvas = element("canvas", { width: 28 * ratio, height: 13 * ratio, style: "width:28px;height:13px", "aria-hidden": "true" });
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    paint(g);
    return element("span", {}, canvas, text);
  }));
}

function setUpTheme(timeline) {
  const button = byId("theme");
  const root = document.documentElement;
  const apply = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
    button.setAttribute("aria-pressed", String(theme === "dark"));
    timeline.readLook();
    drawLegend(timeline);
    if (timeline.layout) timeline.request("theme");
  };
  let chosen = false;
  button.addEventListener("click", () => {
    chosen = true;
    apply(root.dataset.theme === "dark" ? "light" : "dark");
    try {
      localStorage.setItem("bpipe-theme", root.dataset.theme);
    } catch {
      // The theme is then chosen again next time.
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => { if (!chosen) apply(event.matches ? "dark" : "light"); });
  apply(root.dataset.theme ?? "light");
}

// The iteration that the largest difference is about, else the last: the first recorded one may have been a warm-up.
function firstShown({ iterations, differences }) {
  const named = iterations.findIndex(({ iteration }) => iteration === differences[0]?.iteration);
  return named < 0 ? iterations.length - 1 : named;
}

function setUpControls(timeline, iterations, first) {
  const chooser = byId("iteration");
  chooser.append(...iterations.map(({ iteration }, index) => element("option", { value: String(index) }, String(iteration))));
  chooser.value = String(first);
  byId("iteration-label").hidden = iterations.length < 2;
  chooser.addEventListener("change", () => timeline.show(iterations[Number(chooser.value)]));
  for (const name of ["sides", "size"]) {
    byId(name).value = timeline.options[name];
    byId(name).addEventListener("change", () => { timeline.options[name] = byId(name).value; timeline.pick = null; timeline.arrange(name); });
  }
  byId("curves").checked = timeline.options.curves;
  byId("curves").addEventListener("change", () => { timeline.options.curves = byId("curves").checked; timeline.pick = null; timeline.arrange("curves"); });
  const clicks = {
    "zoom-in": () => timeline.zoom(0.6), "zoom-out": () => timeline.zoom(1 / 0.6), "pan-left": () => timeline.pan(-0.3),
    "pan-right": () => timeline.pan(0.3), reset: () => timeline.reset(),
  };
  for (const [id, click] of Object.entries(clicks)) byId(id).addEventListener("click", click);
  addEventListener("beforeprint", () => timeline.printInto(byId("printed")));
  new ResizeObserver(() => { if (timeline.resize()) timeline.request("resize"); }).observe(timeline.scroller);
}

// Where a time lies on a lane of the row of this number, in pixels of the window; brings the lane into sight first.
function placeOf(timeline, number, side, name, time) {
  const row = timeline.layout.rows[number];
  const band = row.bands.find((one) => one.name === name && (one.side === side || name === "memory"));
  const room = timeline.height - AXIS;
  if (band.y < timeline.scroller.scrollTop || band.y + band.height > timeline.scroller.scrollTop + room) timeline.scroller.scrollTop = band.y - room / 2;
  const box = timeline.plot.getBoundingClientRect();
  return { x: box.left + timeline.xOf(time), y: box.top + AXIS + band.y + band.height / 2 - timeline.scroller.scrollTop };
}

function main() {
  const begun = performance.now();
  const data = JSON.parse(byId("data").textContent);
  fillHead(data);
  fillDifferences(data.differences);
  fillStages(data.stages);
  // As wide as its section is by now.
  fillBars(data.stages);
  const timeline = new Timeline(data);
  const most = Math.max(0, ...data.iterations.map(({ ranks }) => ranks.length));
  timeline.options.size = most <= MOST_LARGE ? "large" : most <= MOST_MEDIUM ? "medium" : "small";
  timeline.options.curves = most <= MOST_MEDIUM;
  setUpTheme(timeline);
  if (!data.iterations.length) {
    byId("timeline").replaceWith(element("p", {}, "No iteration was recorded."));
    return;
  }
  const first = firstShown(data);
  timeline.show(data.iterations[first]);
  setUpControls(timeline, data.iterations, first);
  timeline.reveal(timeline.fullest);
  listenToPointer(timeline);
  listenToKeys(timeline);
  window.bpipeTimings = { script_ms: begun, draws: timeline.timings };
  window.bpipeTimeline = {
    range: () => [timeline.view.start, timeline.view.end],
    show: (start, end) => timeline.setView(start, end, "zoom"),
    place: (row, side, name, time) => placeOf(timeline, row, side, name, time),
  };
  requestAnimationFrame(() => requestAnimationFrame(() => { window.bpipeTimings.first_draw_ms = performance.now(); }));
}

main();
