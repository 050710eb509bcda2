// The learning rates that matter, on one logarithmic line: stable to the left of the limit, not to the right.
function drawRates(chart, width) {
  const best = readNumber(chart.best), stable = readNumber(chart.stable);
  const marks = [
    { value: best, label: `${chart.best_label} =`, color: "var(--green)", digits: 2 },
    { value: stable, label: `${chart.stable_label} =`, color: "var(--vermilion)", digits: 2 },
    ...chart.marks.map((mark) => ({ ...mark, value: readNumber(mark.value), digits: 3 })),
  ].map((mark) => ({ ...mark, text: `${mark.label} ${formatNumber(mark.value, mark.digits)}` }));
  const held = marks.filter((mark) => isHeld(mark.value, true)), others = marks.filter((mark) => !isHeld(mark.value, true));
  const axis = makeAxis(held.flatMap((mark) => [mark.value / 3, mark.value * 3]), true, 0);
  const left = 12, right = 12, scale = d3.scaleLog(axis.domain, [left, width - right]);
  const labels = stackLabels(held.map((mark) => ({ ...mark, x: scale(mark.value) })), 0, width);
  const top = 30 + 18 * (labels.length ? Math.max(...labels.map((label) => label.row)) : 0);
  const note = others.map((mark) => mark.text).join("; ");
  const bottom = note ? 62 : 44, height = top + 26 + bottom;
  const limit = isHeld(stable, true) ? stable : stable > 1 ? axis.domain[1] : axis.domain[0];
  const zone = (from, to, color) => Plot.rect([0], { x1: from, x2: to, y1: 0, y2: 1, fill: color, fillOpacity: 0.18 });
  const svg = Plot.plot({
    width, height, marginLeft: left, marginRight: right, marginTop: top, marginBottom: bottom,
    style: { background: "none", color: "inherit", fontFamily: "inherit", fontSize: "12px", overflow: "visible" },
    x: { type: "log", domain: axis.domain, axis: null },
    y: { domain: [0, 1], axis: null },
    marks: [
      zone(axis.domain[0], limit, "var(--green)"),
      zone(limit, axis.domain[1], "var(--vermilion)"),
      ...["stable", "unstable"].filter((word) => isFree(word, labels, left, width - right)).map((word) =>
        Plot.text([word], { ...(word === "stable" ? { frameAnchor: "left", dx: 8 } : { frameAnchor: "right", dx: -8 }), fill: "var(--ink)" })),
      ...drawTicks(ticksOf(axis, Math.max(3, Math.floor(width / 90)))),
      Plot.text(["learning rate"], { frameAnchor: "bottom", dy: 36, className: "muted" }),
      ...(note ? [Plot.text([note], { frameAnchor: "bottom", dy: 54, className: "bad" })] : []),
      ...labels.map((label) => Plot.tickX([label], { x: "value", insetTop: -6 - 18 * label.row, stroke: label.color, strokeWidth: 2.2 })),
      ...labels.map((label) => Plot.text([label], {
        x: "value", frameAnchor: "top", lineAnchor: "bottom", text: "text", dx: label.center - label.x, dy: -9 - 18 * label.row,
        fill: "currentColor", stroke: "var(--card)", strokeWidth: 5,
      })),
    ],
  });
  const points = [...held].sort((one, other) => one.value - other.value).map((mark, at) => ({
    series: 0, at, x: mark.value, color: mark.color, value: mark.value, head: mark.label,
    text: `learning rate ${formatNumber(mark.value)}`, detail: "", px: scale(mark.value), py: top + 13,
  }));
  return { svg, points };
}

// A word at the end of the line is left out where a mark would go through it.
function isFree(word, labels, from, to) {
  const room = widthOf(word) + 16;
  return labels.every((label) => (word === "stable" ? label.x > from + room : label.x < to - room));
}
