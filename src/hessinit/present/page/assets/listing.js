// The numbers of a chart as a table, made when it is asked for.
function attachListing(figure, state) {
  const details = document.createElement("details");
  details.className = "listing";
  details.append(Object.assign(document.createElement("summary"), { textContent: "Numbers" }));
  details.addEventListener("toggle", () => {
    details.querySelector(".table")?.remove();
    if (details.open) details.append(listPoints(state.points, figure.querySelector("figcaption").textContent));
  });
  figure.querySelector(".foot").append(details);
}

function listPoints(points, caption) {
  const frame = document.createElement("div"), table = document.createElement("table");
  Object.assign(frame, { className: "table long", tabIndex: 0 });
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", `Numbers of: ${caption}`);
  for (const point of points) {
    const row = table.insertRow();
    const name = Object.assign(document.createElement("th"), { scope: "row", textContent: point.head });
    row.append(name);
    for (const text of [point.text, point.detail]) row.insertCell().textContent = text;
  }
  frame.append(table);
  return frame;
}
