// The data as typed arrays, and which of a lane's actions lie at a time. In: columns as `bpipe.record.report.page` packs them. Draws nothing.

const NOTHING = -1;
const AWAY = new Set(["EVICT", "RETURN"]);
const TOWARDS = new Set(["LOAD", "HOST"]);

function unpackColumn(differences) {
  let sum = 0;
  return Float64Array.from(differences, (difference) => (sum += difference));
}

// A lane: actions in order of start. `reach[i]` is the latest end of the actions up to i, which lets a search begin where it may.
function makeLane(columns, places) {
  places.sort((one, other) => columns.start[one] - columns.start[other]);
  const lane = { count: places.length, places: Int32Array.from(places) };
  for (const name of ["start", "end", "group"]) {
    lane[name] = Float64Array.from(places, (place) => columns[name][place]);
  }
  lane.reach = new Float64Array(lane.count);
  let latest = -Infinity;
  for (let index = 0; index < lane.count; index++) {
    latest = Math.max(latest, lane.end[index]);
    lane.reach[index] = latest;
  }
  return lane;
}

// The first index whose value is more than `limit` (or, with `orEqual`, at least `limit`) in numbers that never fall.
function firstBeyond(numbers, limit, orEqual = false) {
  let low = 0;
  let high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] > limit || (orEqual && numbers[middle] === limit)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Which action of the lane lies at a time, or within `slack` of it; of several the nearest, and of those the one that started last.
function actionAt(lane, time, slack = 0) {
  let best = NOTHING;
  let distance = Infinity;
  for (let index = firstBeyond(lane.start, time + slack) - 1; index >= 0 && lane.reach[index] >= time - slack; index--) {
    const away = Math.max(0, lane.start[index] - time, time - lane.end[index]);
    if (away <= slack && away < distance) {
      best = index;
      distance = away;
      if (away === 0) break;
    }
  }
  return best;
}

const GROUPS = ["forward", "backward", "weight", "away", "towards"];
const GROUP_OF = { F: 0, B: 1, I: 1, W: 2, S: 2, T: 2, IF: 2, IB: 2, EVICT: 3, RETURN: 3, LOAD: 4, HOST: 4 };

function unpackTrack(packed, kinds, tick) {
  const columns = { name: (place) => `${columns.stage[place]}${columns.kindOf(place)}${columns.microbatch[place]}` };
  columns.kindOf = (place) => kinds[columns.kind[place]];
  for (const name of ["kind", "stage", "microbatch", "start", "length", "wait", "bytes", "slot"]) columns[name] = unpackColumn(packed[name]);
  const count = columns.kind.length;
  columns.end = new Float64Array(count);
  columns.group = new Uint8Array(count);
  const places = { compute: [], away: [], towards: [] };
  const waits = [];
  for (let place = 0; place < count; place++) {
    const kind = columns.kindOf(place);
    columns.end[place] = (columns.start[place] + columns.length[place]) * tick;
    columns.start[place] *= tick;
    columns.wait[place] *= tick;
    columns.group[place] = GROUP_OF[kind] ?? 2;
    places[AWAY.has(kind) ? "away" : TOWARDS.has(kind) ? "towards" : "compute"].push(place);
    if (columns.wait[place] > 0) waits.push(place);
  }
  const lanes = { compute: makeLane(columns, places.compute), away: makeLane(columns, places.away), towards: makeLane(columns, places.towards) };
  // A wait ends when its transfer does: that is what the computation waited for.
  const waiting = { ...columns, start: columns.end.map((end, place) => end - columns.wait[place]) };
  lanes.waits = makeLane(waiting, waits);
  const times = unpackColumn(packed.memory_time).map((time) => time * tick);
  const memory = { times, held: unpackColumn(packed.memory_held) };
  return { columns, lanes, memory, peak: memory.held.reduce((most, held) => Math.max(most, held), 0) };
}

// One iteration, unpacked when it is first shown; a track that several have, once.
function unpackIteration(data, iteration) {
  if (iteration.unpacked) return iteration.unpacked;
  const unpack = (place) => {
    if (place === null) return null;
    data.unpacked ??= new Map();
    if (!data.unpacked.has(place)) data.unpacked.set(place, unpackTrack(data.tracks[place], data.kinds, data.tick_s));
    return data.unpacked.get(place);
  };
  const tracks = iteration.ranks.map((rank) => ({
    rank: rank.rank,
    label: rank.label,
    bound: rank.bound_bytes,
    measured: unpack(rank.measured),
    simulated: unpack(rank.simulated),
  }));
  let end = iteration.end_s;
  let peak = 1;
  let transfers = false;
  for (const track of tracks) {
    peak = Math.max(peak, track.bound ?? 0);
    for (const side of [track.measured, track.simulated]) {
      if (!side) continue;
      peak = Math.max(peak, side.peak);
      for (const lane of Object.values(side.lanes)) if (lane.count) end = Math.max(end, lane.reach[lane.count - 1]);
      transfers ||= side.lanes.away.count + side.lanes.towards.count > 0;
    }
  }
  iteration.unpacked = { ranks: tracks, end: end || 1, peak, transfers };
  return iteration.unpacked;
}

// What a rank holds at a time: the last step that is not after it.
function heldAt(memory, time) {
  const index = firstBeyond(memory.times, time) - 1;
  return index < 0 ? 0 : memory.held[index];
}
