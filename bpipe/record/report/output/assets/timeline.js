// The timeline: what span of time and which rows are shown, and what pointer and keys do to that. In: the data. Out: a drawn canvas.

class Timeline {
  constructor(data) {
    this.data = data;
    this.plot = byId("plot");
    this.marks = byId("marks");
    this.scroller = byId("timeline");
    this.options = { size: "large", sides: "both", curves: true };
    this.hover = null;
    this.drag = null;
    this.pick = null;
    this.pending = null;
    this.timings = [];
    this.readLook();
  }

  readLook() {
    this.ratio = window.devicePixelRatio || 1;
    this.looks = readLooks(this.ratio);
    this.colours = this.looks.measured;
  }

  show(iteration) {
    this.unpacked = unpackIteration(this.data, iteration);
    this.view = { start: 0, end: this.unpacked.end };
    this.pick = null;
    this.fullest = this.unpacked.ranks[this.data.bottleneck ?? NOTHING] ?? null;
    // Where a rank computes several stages, an action must say of which it is.
    this.withStage = this.unpacked.ranks.some(({ measured, simulated }) => {
      const side = measured ?? simulated;
      return side && new Set(Array.from(side.lanes.compute.places, (place) => side.columns.stage[place])).size > 1;
    });
    this.arrange("iteration");
  }

  // Scroll within the timeline so that this rank's row can be seen, where it cannot.
  reveal(track) {
    const row = this.layout.rows.find((one) => one.track === track);
    if (!row) return;
    const room = this.height - AXIS;
    const { scrollTop } = this.scroller;
    if (row.top < scrollTop || row.top + row.height > scrollTop + room) this.scroller.scrollTop = row.top + row.height - room + 4;
  }

  // A picture of every row, not only of those that fit: paper does not scroll.
  printInto(paper) {
    const shown = this.height;
    this.fit(this.width, this.layout.height + AXIS);
    this.draw(0);
    Object.assign(paper, { width: this.plot.width, height: this.plot.height });
    paper.getContext("2d").drawImage(this.plot, 0, 0);
    this.fit(this.width, shown);
    this.draw();
    this.drawMarks();
  }

  // The rows anew, after their number or size has changed.
  arrange(why) {
    this.layout = layOut(this.unpacked, this.options);
    byId("extent").style.height = `${this.layout.height + AXIS}px`;
    this.resize();
    this.request(why);
  }

  // Whether that changed anything.
  resize() {
    const [width, height] = [this.scroller.clientWidth, Math.min(this.scroller.clientHeight, this.layout.height + AXIS)];
    // On paper the timeline is hidden and has no size: its picture keeps the one it was drawn at.
    if (!width || (this.width === width && this.height === height)) return false;
    this.fit(width, height);
    return true;
  }

  fit(width, height) {
    Object.assign(this, { width, height });
    for (const canvas of [this.plot, this.marks]) {
      canvas.width = Math.round(this.width * this.ratio);
      canvas.height = Math.round(this.height * this.ratio);
      canvas.style.height = `${this.height}px`;
    }
  }

  get area() {
    return { left: gutterOf(this.width), right: this.width - 12 };
  }

  // Draw with the next frame, however often it is asked for until then.
  request(why) {
    if (this.pending) return;
    const asked = performance.now();
    this.pending = requestAnimationFrame(() => {
      this.pending = null;
      const begun = performance.now();
      this.draw();
      this.drawMarks();
      const timing = { why, draw_ms: performance.now() - begun, frame_ms: null };
      this.timings.push(timing);
      requestAnimationFrame(() => { timing.frame_ms = performance.now() - asked; });
    });
  }

  draw(scrollTop = this.scroller.scrollTop) {
    const g = this.plot.getContext("2d");
    const { colours } = this;
    const { left, right } = this.area;
    g.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    fillBox(g, colours.card, 0, 0, this.width, this.height);
    paintAxis(g, { left, right, y: AXIS - 4, height: this.height }, this.view, this.colours);
    const shift = AXIS - scrollTop;
    this.within(g, [0, AXIS, this.width, this.height - AXIS], () => {
      for (const row of this.layout.rows) {
        if (row.top + row.height + shift >= AXIS && row.top + shift <= this.height) this.drawRow(g, row, shift);
      }
    });
    byId("range").textContent = `${this.timeText(this.view.start)} to ${this.timeText(this.view.end)}`;
  }

  // What is drawn outside of this rectangle is not seen.
  within(g, rectangle, draw) {
    g.save();
    g.beginPath();
    g.rect(...rectangle);
    g.clip();
    draw();
    g.restore();
  }

  timeText(seconds) {
    return secondsText(seconds, (this.view.end - this.view.start) / 1000);
  }

  drawRow(g, row, shift) {
    const { colours } = this;
    const { left, right } = this.area;
    g.lineWidth = 1;
    for (const band of row.bands) {
      const area = { left, right, y: band.y + shift, height: band.height };
      this.within(g, [left, area.y - 2, right - left, area.height + 4], () => {
        if (band.name === "memory") this.drawMemory(g, row.track, area);
        else this.drawLane(g, row.track[band.side], band, area);
      });
    }
    this.drawNames(g, row, shift);
    const foot = row.top + row.height + shift + this.layout.size.gap / 2;
    fillBox(g, colours.line, 0, Math.round(foot), this.width, this.layout.size.gap > 3 ? 1 : 0.5);
  }

  drawLane(g, side, band, area) {
    const { colours } = this;
    const { label } = this.layout.size;
    fillBox(g, colours.lane, area.left, area.y, area.right - area.left, area.height);
    if (!side) {
      if (band.name === "compute" && area.height >= 9) {
        g.fillStyle = colours.muted;
        setType(g, 11, "left", "italic");
        g.fillText("no record of this rank", area.left + 8, area.y + area.height / 2);
      }
      return;
    }
    const isCompute = band.name === "compute";
    if (isCompute) paintWaits(g, side.lanes.waits, area, this.view, this.colours, 0);
    const look = { ...this.looks[band.side], label: isCompute ? label : 0, withStage: this.withStage };
    setType(g, label || 9, "center");
    paintLane(g, side.lanes[band.name], side.columns, area, this.view, look);
    if (isCompute) paintWaits(g, side.lanes.waits, area, this.view, this.colours, area.height > 10 ? 4 : 2);
  }

  drawMemory(g, track, area) {
    const { colours, memoryTop: top } = this;
    for (const bytes of this.memoryTicks(area)) {
      fillBox(g, colours.grid, area.left, Math.round(area.y + area.height * (1 - bytes / top)) - (bytes ? 0 : 1), area.right - area.left, 1);
    }
    if (track.measured) {
      paintCurve(g, track.measured.memory, area, this.view, top, { fill: colours.held, line: colours["held-line"], width: 1 });
    }
    if (track.simulated) paintCurve(g, track.simulated.memory, area, this.view, top, { line: colours.predicted, width: 1.75 });
    if (track.bound !== null) {
      const y = area.y + area.height * (1 - track.bound / top);
      g.setLineDash([7, 4]);
      strokeLine(g, colours.bound, 1.5, [[area.left, y], [area.right, y]]);
      g.setLineDash([]);
    }
    g.lineWidth = 1;
  }

  // All ranks' memory is drawn to one scale, so that they can be compared.
  get memoryTop() {
    return this.unpacked.peak * 1.06;
  }

  // What the memory's axis names: zero and a round number of bytes or two, as its height allows.
  memoryTicks(area) {
    const step = niceStep(this.memoryTop, area.height >= 40 ? 2 : 1);
    const ticks = [];
    for (let bytes = 0; bytes <= this.memoryTop; bytes += step) ticks.push(bytes);
    return ticks;
  }

  drawNames(g, row, shift) {
    const { colours } = this;
    const { compute, label } = this.layout.size;
    const gutter = this.area.left;
    const isNarrow = gutter < 150;
    const fullest = row.track === this.fullest;
    g.fillStyle = fullest ? colours.bound : colours.text;
    setType(g, label ? label + 1 : 9, "left", "600");
    const line = row.top + shift + Math.max(compute, 8) / 2;
    const name = isNarrow ? row.track.label.replace(/ \(rank .*/, "") : row.track.label;
    g.fillText(fullest && !label ? `${name}, bottleneck` : name, 8, line, gutter - (label && !isNarrow ? 74 : 16));
    if (!label) return;
    setType(g, label, "left");
    if (fullest) g.fillText("bottleneck", 8, line + label + 4, gutter - 16);
    g.fillStyle = colours.muted;
    setType(g, label - 1, "right");
    for (const band of row.bands) {
      if (band.name === "memory") this.drawMemoryAxis(g, band, shift, gutter);
      else if (band.name === "compute" && !isNarrow) g.fillText(band.side, gutter - 7, band.y + shift + Math.min(band.height, 20) / 2);
    }
  }

  drawMemoryAxis(g, band, shift, gutter) {
    const area = { y: band.y + shift, height: band.height };
    for (const bytes of this.memoryTicks(area)) {
      const y = area.y + area.height * (1 - bytes / this.memoryTop);
      g.fillText(bytes ? bytesText(bytes).replace(/\.0+ /, " ") : "0", gutter - 7, Math.min(Math.max(y, area.y + 5), area.y + area.height - 4));
    }
    if (gutter < 150) return;
    g.textAlign = "left";
    g.fillText("memory", 8, area.y + area.height / 2);
    g.textAlign = "right";
  }

  // --- What is above the drawing: the pointer's line, what is being selected, what was picked -------------------------------------------

  drawMarks() {
    const g = this.marks.getContext("2d");
    const { colours } = this;
    const { left, right } = this.area;
    g.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    g.clearRect(0, 0, this.width, this.height);
    if (this.drag?.select) {
      g.globalAlpha = 0.22;
      fillBox(g, colours.pick, Math.min(this.drag.x, this.drag.from), AXIS, Math.abs(this.drag.x - this.drag.from), this.height);
      g.globalAlpha = 1;
    }
    if (this.hover !== null && this.hover >= left && this.hover <= right) fillBox(g, colours.muted, Math.round(this.hover), AXIS - 4, 1, this.height);
    if (this.pick) this.markPick(g, left, right);
  }

  markPick(g, left, right) {
    const { band, lane, index } = this.pick;
    const y = band.y + AXIS - this.scroller.scrollTop;
    if (y + band.height < AXIS) return;
    const from = Math.max(left, index < 0 ? left : this.xOf(lane.start[index]));
    const to = Math.min(right, index < 0 ? right : this.xOf(lane.end[index]));
    g.strokeStyle = this.colours.pick;
    g.lineWidth = 2.5;
    if (to >= from) g.strokeRect(from - 1, y - 1, Math.max(2, to - from) + 2, band.height + 2);
  }

  // --- Time and place -------------------------------------------------------------------------------------------------------------------

  xOf(time) {
    return placer(this.area, this.view)(time);
  }

  timeOf(x) {
    const { left, right } = this.area;
    return this.view.start + ((x - left) / (right - left)) * (this.view.end - this.view.start);
  }

  // Show a span, kept within the iteration and no shorter than ten ticks.
  setView(start, end, why) {
    const whole = this.unpacked.end;
    const length = Math.min(whole, Math.max(end - start, 10 * this.data.tick_s));
    const from = Math.min(Math.max(0, start), whole - length);
    this.view = { start: from, end: from + length };
    this.request(why);
  }

  zoom(factor, around = (this.view.start + this.view.end) / 2) {
    this.setView(around - (around - this.view.start) * factor, around + (this.view.end - around) * factor, "zoom");
  }

  pan(share) {
    const by = (this.view.end - this.view.start) * share;
    this.setView(this.view.start + by, this.view.end + by, "pan");
  }

  reset() {
    this.setView(0, this.unpacked.end, "zoom");
  }
}
