// Numbers and actions as words, and elements. Everything written into the page goes through `textContent`.

const UNKNOWN = "–";

function bytesText(bytes) {
  if (bytes === null || bytes === undefined || bytes === NOTHING) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = bytes;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit++;
  }
  return `${unit === 0 ? size : size.toFixed(size >= 100 ? 1 : 2)} ${units[unit]}`;
}

// Seconds with as many digits as `step` seconds ask for; without it, four significant ones.
function secondsText(seconds, step = null) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  const size = Math.max(Math.abs(seconds), step ?? 0);
  const [factor, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
  const value = seconds * factor;
  if (value === 0) return "0";
  const digits = step ? Math.ceil(-Math.log10(step * factor) - 1e-9) : 3 - Math.floor(Math.log10(Math.abs(value)));
  return `${value.toFixed(Math.min(6, Math.max(0, digits)))} ${unit}`;
}

function shareText(share) {
  return share === null || share === undefined ? UNKNOWN : `${(100 * share).toFixed(1)} %`;
}

function rateText(rate) {
  return rate === null || rate === undefined ? UNKNOWN : `${(rate / 1e9).toFixed(rate >= 1e10 ? 1 : 2)} GB/s`;
}

function countText(count) {
  return count === null || count === undefined ? UNKNOWN : String(count);
}

const KIND_TEXT = {
  F: "forward", B: "backward", I: "backward of inputs", W: "backward of weights", EVICT: "eviction to the partner",
  S: "shard of the output layer, logits", T: "shard of the output layer, gradients",
  IF: "shard of the embedding", IB: "shard of the embedding, gradients", LOAD: "load from the partner", HOST: "hosting for the partner", RETURN: "return to the partner",
};

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function drawing(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function byId(id) {
  return document.getElementById(id);
}
