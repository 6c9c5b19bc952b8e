// The head of the page and its tables. In: the view. Out: elements in their places.

function fillHead(data) {
  byId("figures").append(...data.figures.map(([name, value, beside]) => element("div", {}, element("dt", {}, name), element("dd", {}, value), element("dd", {}, beside))));
  byId("answers").append(...data.answers.map((answer) => element("li", {}, answer)));
  byId("facts").append(...data.facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
  const missing = new Set();
  for (const iteration of data.iterations) for (const rank of iteration.ranks) if (rank.measured === null) missing.add(rank.label);
  if (missing.size) {
    const names = [...missing];
    const shown = names.slice(0, 8).join(", ") + (names.length > 8 ? ` and ${names.length - 8} more` : "");
    byId("missing").textContent = `Simulated only, because there is no record: ${shown}.`;
    byId("missing").hidden = false;
  }
}

function cell(text, kind = "") {
  const classes = [kind, text === UNKNOWN ? "unknown" : ""].filter(Boolean).join(" ");
  const made = element("td", classes ? { class: classes } : {}, text);
  if (text === UNKNOWN) made.setAttribute("aria-label", "unknown");
  return made;
}

function makeTable(caption, titles, rows) {
  const head = element("tr", {}, ...titles.map(([text, kind]) => element("th", { scope: "col", ...(kind ? { class: kind } : {}) }, text)));
  return element("table", {}, element("caption", {}, element("span", {}, caption)), element("thead", {}, head), element("tbody", {}, ...rows));
}

const STAGE_TITLES = [
  "Stage", "Rank", "Micro-batches held (predicted)", "Activations", "predicted", "bound", "without balancing", "Weights, optimizer",
  "Bubble", "Exposed transfers", "Evictions, loads", "Bandwidth",
];

function fillStages(stages) {
  const held = (stage) => stage.measured_bytes ?? stage.predicted_bytes ?? 0;
  const most = Math.max(...stages.map(held));
  const rows = stages.map((stage) => {
    const measured = cell(bytesText(stage.measured_bytes));
    if (stage.bound_bytes !== null && stage.measured_bytes !== null && stage.measured_bytes > stage.bound_bytes) {
      measured.classList.add("over");
      measured.title = "more than its bound";
    }
    const row = element("tr", {},
      element("th", { scope: "row" }, String(stage.stage)),
      cell(countText(stage.rank)),
      cell(`${countText(stage.measured_microbatches)} (${countText(stage.predicted_microbatches)})`),
      measured,
      ...[stage.predicted_bytes, stage.bound_bytes, stage.baseline_bytes ?? stage.unbalanced_bytes, stage.weights_bytes].map((bytes) => cell(bytesText(bytes))),
      cell(shareText(stage.bubble)),
      cell(secondsText(stage.exposed_s)),
      cell(stage.evictions === null ? UNKNOWN : `${stage.evictions}, ${stage.loads}`),
      cell(rateText(stage.bytes_per_s)));
    if (most > 0 && held(stage) === most) row.className = "peak";
    return row;
  });
  const caption = "Peaks of saved activations, measured and predicted; transfers of one iteration. Bold: the stage that holds most.";
  byId("stages").append(makeTable(caption, STAGE_TITLES.map((title) => [title, ""]), rows));
}

function fillDifferences(differences) {
  if (!differences.length) {
    byId("differences").append(element("p", {}, "None is large enough to list."));
    return;
  }
  // What was measured beside it is long: below its numbers there is room for it.
  const rows = differences.flatMap((difference) => [
    element("tr", { class: "led" }, element("th", { scope: "row" }, difference.what), cell(difference.measured), cell(difference.predicted)),
    element("tr", {}, element("td", { class: "text", colspan: "3" }, difference.beside)),
  ]);
  byId("differences").append(makeTable("Below each: what else was measured.", [["What", "text"], ["Measured", ""], ["Predicted", ""]], rows));
}
