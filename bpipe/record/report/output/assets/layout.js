// Where the lanes of every rank lie, from the top of the first. In: an unpacked iteration and what to show. Knows no canvas.

const AXIS = 26;
// The names left of the lanes: on a telephone they must leave room for what they name.
const gutterOf = (width) => (width < 600 ? 96 : 190);
const SIZES = {
  large: { compute: 20, transfer: 9, memory: 46, gap: 14, label: 11 },
  medium: { compute: 13, transfer: 6, memory: 28, gap: 8, label: 9 },
  small: { compute: 7, transfer: 3, memory: 14, gap: 3, label: 0 },
};

// Rows { track, top, height, bands }, a band { name, side, y, height }: a lane of one side, or the memory of both.
function layOut(unpacked, options) {
  const size = SIZES[options.size];
  const sides = options.sides === "both" ? ["measured", "simulated"] : [options.sides];
  const rows = [];
  let y = size.gap / 2;
  for (const track of unpacked.ranks) {
    const row = { track, top: y, height: 0, bands: [] };
    const moves = ["away", "towards"].filter((name) => sides.some((side) => track[side]?.lanes[name].count));
    for (const side of sides) {
      const add = (name, height) => {
        row.bands.push({ name, side, y, height });
        y += height + 1;
      };
      add("compute", size.compute);
      for (const name of moves) add(name, size.transfer);
      y += size.gap > 3 ? 2 : 0;
    }
    if (options.curves) {
      row.bands.push({ name: "memory", side: null, y, height: size.memory });
      y += size.memory;
    }
    row.height = y - row.top;
    y += size.gap;
    rows.push(row);
  }
  return { rows, height: y, size };
}

// The row and band at a height, or of the nearest band of that row.
function bandAt(layout, y) {
  const row = layout.rows.find((one) => y < one.top + one.height + layout.size.gap / 2);
  if (!row) return null;
  const distance = (band) => Math.max(0, band.y - y, y - band.y - band.height);
  const band = row.bands.reduce((nearest, one) => (distance(one) < distance(nearest) ? one : nearest));
  return { row, band };
}
