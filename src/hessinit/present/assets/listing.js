// The numbers of a chart as a table, made when it is asked for.
function attachListing(figure, state, chart) {
  const details = document.createElement("details");
  details.className = "listing";
  details.append(Object.assign(document.createElement("summary"), { textContent: "Numbers" }));
  details.addEventListener("toggle", () => {
    details.querySelector(".table")?.remove();
    if (details.open) details.append(listPoints(state.points, figure.querySelector("figcaption").textContent, headingsOf(chart)));
  });
  figure.querySelector(".foot").append(details);
}

function headingsOf(chart) {
  if (chart.kind === "depth") return ["layer", chart.y_label];
  if (chart.kind === "heat") return [`${chart.y_label}, ${chart.x_label}`, chart.value_label];
  return chart.kind === "rates" ? ["mark", "learning rate"] : [chart.x_label, chart.y_label];
}

function listPoints(points, caption, headings) {
  const frame = document.createElement("div"), table = document.createElement("table");
  Object.assign(frame, { className: "table long", tabIndex: 0 });
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", `Numbers of: ${caption}`);
  const isDetailed = points.some((point) => point.detail), head = table.createTHead().insertRow();
  for (const text of [...headings, ...(isDetailed ? ["more"] : [])]) {
    head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: shorten(text, 80) }));
  }
  const body = table.createTBody();
  for (const point of points) {
    const row = body.insertRow(), short = shorten(point.head, 80);
    row.append(Object.assign(document.createElement("th"), { scope: "row", textContent: short, title: short === point.head ? "" : point.head }));
    for (const text of [point.text, ...(isDetailed ? [point.detail] : [])]) row.insertCell().textContent = text;
  }
  frame.append(table);
  return frame;
}
