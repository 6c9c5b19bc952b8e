// Draw the actions of one lane. In: typed arrays, a span of time and a place. Knows no pointer and no page.
//
// What is narrower than two pixels is not drawn as itself: its share of each pixel column is, forwards from below, backwards on top of
// them, and columns that look the same are one rectangle. So the work is bounded by the pixels, however many actions there are. Rectangles
// are collected and drawn colour by colour: changing the colour costs more than the rectangle.

const NARROW = 2;
const OUTLINED = 4;
const PATTERNED = 7;
const POINTED = 9;

// `area` is { left, right, y, height }, `view` { start, end }; `look` has the colours and patterns, and the font size of labels or 0.
function paintLane(g, lane, columns, area, view, look) {
  const at = placer(area, view);
  const last = firstBeyond(lane.start, view.end);
  const shares = new Shares(area);
  const plain = GROUPS.map(() => []);
  const outlined = GROUPS.map(() => []);
  const pointed = [];
  const labels = [];
  for (let index = firstBeyond(lane.reach, view.start, true); index < last; index++) {
    const from = Math.max(area.left - 4, at(lane.start[index]));
    const to = Math.min(area.right + 4, at(lane.end[index]));
    const group = lane.group[index];
    const width = to - from;
    if (width < NARROW) {
      shares.add(from, to, group);
    } else if (group >= 3 && width >= POINTED && area.height >= 6) {
      pointed.push(from, to, group);
    } else {
      (width >= OUTLINED && area.height >= 6 ? outlined : plain)[group].push(from, width);
      if (look.label) labels.push(index);
    }
  }
  shares.paint(g, look);
  GROUPS.forEach((_, group) => {
    paintBoxes(g, plain[group], area, 0, look.groups[group], look.groups[group]);
    paintBoxes(g, outlined[group], area, 0, look.lines[group], look.lines[group]);
    paintBoxes(g, outlined[group], area, 1, look.groups[group], area.height >= 8 ? look.patterns[group] : look.groups[group]);
  });
  for (let index = 0; index < pointed.length; index += 3) paintPointed(g, pointed[index], pointed[index + 1], area, pointed[index + 2], look);
  for (const index of labels) paintLabel(g, lane, index, columns, area, at, look);
}

// Starts and widths of one colour; wide ones with the pattern.
function paintBoxes(g, boxes, area, inset, colour, pattern) {
  for (const isWide of colour === pattern ? [null] : [false, true]) {
    g.fillStyle = isWide ? pattern : colour;
    for (let index = 0; index < boxes.length; index += 2) {
      if (isWide !== null && isWide !== boxes[index + 1] >= PATTERNED) continue;
      g.fillRect(boxes[index] + inset, area.y + inset, boxes[index + 1] - 2 * inset, area.height - 2 * inset);
    }
  }
}

// A transfer points to where it goes.
function paintPointed(g, from, to, area, group, look) {
  const tip = Math.min(6, (to - from) / 3);
  const [tail, neck, point] = group === 3 ? [from, to - tip, to] : [to, from + tip, from];
  const [top, middle, foot] = [area.y + 0.5, area.y + area.height / 2, area.y + area.height - 0.5];
  g.beginPath();
  for (const [x, y] of [[tail, top], [neck, top], [point, middle], [neck, foot], [tail, foot]]) g.lineTo(x, y);
  g.closePath();
  g.fillStyle = look.groups[group];
  g.fill();
  g.strokeStyle = look.lines[group];
  g.stroke();
}

function paintLabel(g, lane, index, columns, area, at, look) {
  const left = Math.max(area.left, at(lane.start[index]));
  const right = Math.min(area.right, at(lane.end[index]));
  const place = lane.places[index];
  const text = `${look.withStage ? columns.stage[place] : ""}${columns.kindOf(place)}${columns.microbatch[place]}`;
  const width = text.length * look.label * 0.6;
  if (right - left < width + 3) return;
  const middle = (left + right) / 2;
  const colour = look.groups[lane.group[index]];
  if (look.patterns[lane.group[index]] !== colour) fillBox(g, colour, middle - width / 2 - 1, area.y + 2, width + 2, area.height - 4);
  g.fillStyle = look["on-action"];
  g.fillText(text, middle, area.y + area.height / 2 + 0.5);
}

// Shares of pixel columns, and the rectangles they become.
class Shares {
  constructor(area) {
    this.area = area;
    this.column = NOTHING;
    this.shares = new Float64Array(GROUPS.length);
    this.heights = new Int32Array(GROUPS.length);
    this.run = { start: NOTHING, end: NOTHING, heights: new Int32Array(GROUPS.length) };
    this.rectangles = GROUPS.map(() => []);
  }

  add(from, to, group) {
    const last = Math.floor(to);
    for (let column = Math.floor(from); column <= last; column++) {
      if (column !== this.column) {
        this.closeColumn();
        this.column = column;
      }
      // Transfers lie in lanes of their own and may be far apart and short: each is a whole stroke, or it would vanish.
      this.shares[group] += group >= 3 ? 1 : Math.min(to, column + 1) - Math.max(from, column);
    }
  }

  // The column becomes part of the run before it, if it looks like it.
  closeColumn() {
    if (this.column === NOTHING) return;
    const { shares, heights, run } = this;
    let sum = 0;
    let most = 0;
    for (let group = 0; group < shares.length; group++) {
      sum += shares[group];
      if (shares[group] > shares[most]) most = group;
    }
    let same = run.end === this.column;
    for (let group = 0; group < shares.length; group++) {
      heights[group] = Math.round((shares[group] / Math.max(1, sum)) * this.area.height);
      // Something is there, so something is seen.
      if (group === most && heights[group] === 0) heights[group] = 1;
      same &&= heights[group] === run.heights[group];
      shares[group] = 0;
    }
    if (!same) {
      this.closeRun();
      run.heights.set(heights);
      run.start = this.column;
    }
    run.end = this.column + 1;
    this.column = NOTHING;
  }

  closeRun() {
    const { run, area } = this;
    const start = Math.max(area.left, run.start);
    const width = Math.min(area.right, run.end) - start;
    if (run.start === NOTHING || width <= 0) return;
    let floor = area.y + area.height;
    for (let group = 0; group < run.heights.length; group++) {
      if (!run.heights[group]) continue;
      floor -= run.heights[group];
      this.rectangles[group].push(start, floor, width, run.heights[group]);
    }
  }

  paint(g, look) {
    this.closeColumn();
    this.closeRun();
    this.rectangles.forEach((numbers, group) => {
      g.fillStyle = look.groups[group];
      for (let index = 0; index < numbers.length; index += 4) g.fillRect(numbers[index], numbers[index + 1], numbers[index + 2], numbers[index + 3]);
    });
  }
}
