// What pointer, wheel and keys do to a timeline, and what it answers: the words beside the pointer. In: events. Out: views and words.

// What lies under a place of the canvas: { title, facts }, or null outside the rows.
function describeAt(timeline, x, y) {
  const found = bandAt(timeline.layout, y - AXIS + timeline.scroller.scrollTop);
  if (!found || y < AXIS || x < timeline.area.left) return null;
  const { row, band } = found;
  const time = timeline.timeOf(x);
  const slack = (3 * (timeline.view.end - timeline.view.start)) / timeline.width;
  if (band.name === "memory") return describeMemory(timeline, row.track, time);
  const side = row.track[band.side];
  if (!side) return { title: `${row.track.label.replace(" (no record)", "")}: no record of this rank`, facts: [] };
  const exact = actionAt(side.lanes[band.name], time);
  if (exact >= 0) return describeAction(timeline, row.track, band, side.lanes[band.name].places[exact]);
  const wait = band.name === "compute" ? actionAt(side.lanes.waits, time, slack) : NOTHING;
  if (wait >= 0) return describeWait(row.track, band, side.columns, side.lanes.waits.places[wait]);
  const near = actionAt(side.lanes[band.name], time, slack);
  if (near >= 0) return describeAction(timeline, row.track, band, side.lanes[band.name].places[near]);
  return { title: band.name === "compute" ? "idle: nothing to compute" : "no transfer", facts: [[`${row.track.label}, ${band.side}, at`, timeline.timeText(time)]] };
}

function describeAction(timeline, track, band, place) {
  const { columns } = track[band.side];
  const kind = columns.kindOf(place);
  const name = columns.name(place);
  const moves = columns.group[place] >= 3;
  const facts = [
    ["start", secondsText(columns.start[place], 1e-6)],
    ["duration", secondsText(columns.end[place] - columns.start[place])],
    [moves ? "bytes moved" : "bytes saved", bytesText(columns.bytes[place])],
    ["host buffer", columns.slot[place] === NOTHING ? UNKNOWN : String(columns.slot[place])],
    ["wait", columns.wait[place] > 0 ? secondsText(columns.wait[place]) : moves ? "none" : UNKNOWN],
  ];
  const other = band.side === "measured" ? "simulated" : "measured";
  const twin = findTwin(track[other], name);
  if (twin >= 0) {
    const against = track[other].columns;
    facts.push([`${other} start`, secondsText(against.start[twin], 1e-6)], [`${other} duration`, secondsText(against.end[twin] - against.start[twin])]);
  }
  return { title: `${name}: ${KIND_TEXT[kind] ?? kind} of micro-batch ${columns.microbatch[place]}`, facts: [[track.label, band.side], ...facts] };
}

// Where the other side did the same thing.
function findTwin(side, name) {
  if (!side) return NOTHING;
  if (!side.byName) {
    side.byName = new Map();
    for (let place = 0; place < side.columns.kind.length; place++) side.byName.set(side.columns.name(place), place);
  }
  return side.byName.get(name) ?? NOTHING;
}

function describeWait(track, band, columns, place) {
  const facts = [[track.label, band.side], ["until", secondsText(columns.end[place], 1e-6)], ["wait", secondsText(columns.wait[place])]];
  return { title: `exposed: computation waits for ${columns.name(place)}`, facts };
}

function describeMemory(timeline, track, time) {
  const facts = [["at", timeline.timeText(time)]];
  for (const side of ["measured", "simulated"]) facts.push([side, track[side] ? bytesText(heldAt(track[side].memory, time)) : "no record"]);
  facts.push(["bound", bytesText(track.bound)]);
  return { title: `${track.label}: activations held`, facts };
}

function showTip(content, x, y) {
  const tip = byId("tip");
  tip.hidden = !content;
  if (!content) return;
  const facts = content.facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  tip.replaceChildren(element("strong", {}, content.title), element("dl", {}, ...facts));
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 16 + width > innerWidth ? x - width - 14 : x + 16)}px`;
  tip.style.top = `${Math.max(4, y + 18 + height > innerHeight ? y - height - 12 : y + 18)}px`;
}

function listenToPointer(timeline) {
  const { plot } = timeline;
  const place = (event) => {
    const box = plot.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  plot.addEventListener("pointerdown", (event) => {
    const { x } = place(event);
    if (x < timeline.area.left || event.button > 1) return;
    const moves = event.shiftKey || event.button === 1;
    timeline.drag = { from: x, x, select: !moves, view: { ...timeline.view } };
    plot.setPointerCapture(event.pointerId);
    showTip(null);
  });
  plot.addEventListener("pointermove", (event) => {
    const { x, y } = place(event);
    timeline.hover = x;
    const { drag } = timeline;
    if (drag) {
      drag.x = Math.min(timeline.area.right, Math.max(timeline.area.left, x));
      if (!drag.select) {
        const by = ((drag.from - x) / (timeline.area.right - timeline.area.left)) * (drag.view.end - drag.view.start);
        timeline.setView(drag.view.start + by, drag.view.end + by, "pan");
      }
    } else {
      showTip(describeAt(timeline, x, y), event.clientX, event.clientY);
    }
    timeline.drawMarks();
  });
  plot.addEventListener("pointerup", () => {
    const { drag } = timeline;
    timeline.drag = null;
    if (drag?.select && Math.abs(drag.x - drag.from) > 4) {
      const [from, to] = [drag.from, drag.x].sort((one, other) => one - other).map((x) => timeline.timeOf(x));
      timeline.setView(from, to, "zoom");
    }
    timeline.drawMarks();
  });
  plot.addEventListener("pointercancel", () => { timeline.drag = null; timeline.drawMarks(); });
  plot.addEventListener("pointerleave", () => { timeline.hover = null; showTip(null); timeline.drawMarks(); });
  plot.addEventListener("dblclick", () => timeline.reset());
  plot.addEventListener("wheel", (event) => onWheel(timeline, event, place(event)), { passive: false });
  window.addEventListener("scroll", () => showTip(null), { passive: true });
  timeline.scroller.addEventListener("scroll", () => { showTip(null); timeline.request("scroll"); });
}

function onWheel(timeline, event, { x }) {
  // Over the names, and where there is nothing more to zoom out of, the wheel does what it does everywhere: but not with the rest of the
  // turn that zoomed out.
  if (x < timeline.area.left) return;
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
  const isWhole = timeline.view.end - timeline.view.start >= timeline.unpacked.end;
  const isNewTurn = event.timeStamp - (timeline.turnedAt ?? -Infinity) > 300;
  if (isWhole && isNewTurn && (sideways || event.deltaY > 0)) return;
  timeline.turnedAt = event.timeStamp;
  event.preventDefault();
  const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 33 : 1;
  if (sideways) timeline.pan((sideways * lines) / timeline.width);
  else timeline.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * lines * 0.0022))), timeline.timeOf(x));
  showTip(null);
}

// --- Keys: the same without a pointer ---------------------------------------------------------------------------------------------------

function listenToKeys(timeline) {
  const actions = {
    "+": () => timeline.zoom(0.6), "=": () => timeline.zoom(0.6), "-": () => timeline.zoom(1 / 0.6), "0": () => timeline.reset(),
    Home: () => timeline.reset(), ArrowLeft: () => timeline.pan(-0.15), ArrowRight: () => timeline.pan(0.15),
    ArrowUp: () => pickLane(timeline, -1), ArrowDown: () => pickLane(timeline, 1),
    ",": () => pickAction(timeline, -1), ".": () => pickAction(timeline, 1),
    Escape: () => { timeline.pick = null; showTip(null); timeline.drawMarks(); },
  };
  timeline.plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  });
  timeline.plot.addEventListener("blur", () => showTip(null));
}

function pickLane(timeline, step) {
  const lanes = timeline.layout.rows.flatMap((row) => row.bands.filter((band) => row.track[band.side]?.lanes[band.name]?.count).map((band) => ({ row, band })));
  if (!lanes.length) return;
  const now = lanes.findIndex(({ band }) => band === timeline.pick?.band);
  const next = lanes[now < 0 ? 0 : Math.min(lanes.length - 1, Math.max(0, now + step))];
  const lane = next.row.track[next.band.side].lanes[next.band.name];
  timeline.pick = { ...next, lane, index: Math.min(lane.count - 1, firstBeyond(lane.reach, timeline.view.start)) };
  tellPick(timeline);
}

function pickAction(timeline, step) {
  const { pick } = timeline;
  if (!pick || !timeline.layout.rows.includes(pick.row)) {
    pickLane(timeline, 0);
    return;
  }
  pick.index = Math.min(pick.lane.count - 1, Math.max(0, pick.index + step));
  tellPick(timeline);
}

// Bring the picked action into sight, and say what it is.
function tellPick(timeline) {
  const { row, band, lane, index } = timeline.pick;
  const [start, end] = [lane.start[index], lane.end[index]];
  const length = timeline.view.end - timeline.view.start;
  if (start < timeline.view.start || end > timeline.view.end) timeline.setView((start + end - length) / 2, (start + end + length) / 2, "pan");
  const room = timeline.height - AXIS;
  const top = timeline.scroller.scrollTop;
  if (band.y < top || band.y + band.height > top + room) timeline.scroller.scrollTop = Math.max(0, band.y - room / 2);
  const content = describeAction(timeline, row.track, band, lane.places[index]);
  const box = timeline.plot.getBoundingClientRect();
  const x = Math.min(timeline.area.right, Math.max(timeline.area.left, timeline.xOf((start + end) / 2)));
  showTip(content, box.left + x, box.top + AXIS + band.y + band.height - timeline.scroller.scrollTop);
  byId("spoken").textContent = [content.title, ...content.facts.map((fact) => fact.join(" "))].join(", ");
  timeline.drawMarks();
}
