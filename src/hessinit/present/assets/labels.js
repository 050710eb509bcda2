// Labels of lines and marks: where they hide the least.
const LONGEST_LABEL = 60; // letters

// Rows for labels above a chart, so that no two overlap: each goes to the first row with room for it.
function stackLabels(labels, left, right) {
  const ends = [];
  return labels.map((label, number) => ({ ...label, number })).sort((one, other) => one.x - other.x).map((label) => {
    const width = widthOf(label.text) + 10;
    const start = Math.max(left, Math.min(label.x - width / 2, right - width));
    let row = ends.findIndex((end) => end <= start);
    if (row < 0) row = ends.length;
    ends[row] = start + width;
    return { ...label, row, center: start + width / 2 };
  });
}

// The label of a level line goes where the fewest points and lines are: above or below it, at either end.
function labelLevels(rules, curves, box, scaleX, scaleY) {
  const ink = curves.flatMap((curve) => inkOf(curve, scaleX, scaleY)), taken = [];
  const isIn = (place) => ([x, y]) => x >= place.x1 && x <= place.x2 && y >= place.y1 && y <= place.y2;
  const overlaps = (place) => (other) => place.x1 < other.x2 && other.x1 < place.x2 && place.y1 < other.y2 && other.y1 < place.y2;
  const isCrossed = (place) => (rule) => rule !== place.rule && scaleY(rule.value) > place.y1 && scaleY(rule.value) < place.y2;
  const hidden = (place) => ink.filter(isIn(place)).length + 20 * rules.filter(isCrossed(place)).length + 1000 * taken.filter(overlaps(place)).length;
  return d3.sort(rules, (rule) => -rule.value).map((rule) => {
    const text = shorten(rule.label, LONGEST_LABEL), width = widthOf(text) + 4, at = scaleY(rule.value);
    const places = ["right", "left"].flatMap((end) => [-8, 9].map((dy) => {
      const x1 = end === "right" ? box.right - width : box.left + 2;
      // As far as the halo reaches, which is to the line itself: a curve that hugs it would be broken.
      return { rule, end, dy, x1: x1 - 4, x2: x1 + width + 4, y1: at + dy - 11, y2: at + dy + 10 };
    }));
    const inside = places.filter((place) => place.y1 >= box.top - 6 && place.y2 <= box.bottom + 4);
    const place = d3.least(inside.length ? inside : places, hidden);
    taken.push(place);
    return Plot.text([rule], {
      y: "value", text: () => text, frameAnchor: place.end, textAnchor: place.end === "right" ? "end" : "start",
      dx: place.end === "right" ? -2 : 4, dy: place.dy, fill: "currentColor", stroke: "var(--card)", strokeWidth: 5, className: "muted rule-label",
    });
  });
}

// Where a curve is, in pixels: its points, and its line in steps of a few.
function inkOf(curve, scaleX, scaleY) {
  const found = curve.points.map((point) => [scaleX(point.x), scaleY(point.y)]);
  const line = curve.isLine ? curve.path.map((point) => [scaleX(point.x), scaleY(point.y)]) : [];
  for (const [[x, y], [nextX, nextY]] of d3.pairs(line)) {
    const steps = Math.min(400, Math.ceil(Math.hypot(nextX - x, nextY - y) / 5));
    for (let step = 0; step < steps; step += 1) found.push([x + ((nextX - x) * step) / steps, y + ((nextY - y) * step) / steps]);
  }
  return found;
}

function drawUpright(label, y, scaleX, top) {
  const { rule } = label;
  return [
    Plot.ruleX([rule.value], { stroke: rule.color, strokeWidth: 1.3, strokeDasharray: "6 4" }),
    Plot.text([rule], {
      x: "value", text: () => label.text, frameAnchor: "top", lineAnchor: "bottom", dx: label.center - scaleX(rule.value), dy: -4 - 16 * label.row, className: "muted",
    }),
  ];
}
