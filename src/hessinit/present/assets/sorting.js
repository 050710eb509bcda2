// Tables that sort by any column: up, down, and back to the order they came in.
for (const table of document.querySelectorAll("main .table > table")) {
  const body = table.tBodies[0];
  if (!body || !table.tHead || body.rows.length < 2) continue;
  const original = Array.from(body.rows), headings = Array.from(table.querySelectorAll("thead th[data-column]"));
  for (const heading of headings) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...heading.childNodes);
    heading.append(button);
    const isNumber = heading.classList.contains("number");
    button.addEventListener("click", () => {
      const first = isNumber ? "descending" : "ascending", second = isNumber ? "ascending" : "descending";
      const was = heading.getAttribute("aria-sort"), next = was === first ? second : was === second ? null : first;
      for (const other of headings) other.removeAttribute("aria-sort");
      if (next) heading.setAttribute("aria-sort", next);
      body.append(...(next ? sortRows(original, Number(heading.dataset.column), next === "descending") : original));
    });
  }
}

// What has no number comes last whichever way the others go.
function sortRows(rows, column, down) {
  const keyed = rows.map((row) => ({ row, key: row.cells[column].dataset.key }));
  const areNumbers = keyed.every(({ key }) => key === "" || !Number.isNaN(toNumber(key)));
  const order = areNumbers
    ? (one, other) => d3.ascending(toNumber(one.key), toNumber(other.key))
    : (one, other) => one.key.localeCompare(other.key, "en", { numeric: true });
  const known = keyed.filter(({ key }) => key !== "").sort((one, other) => (down ? order(other, one) : order(one, other)));
  return [...known, ...keyed.filter(({ key }) => key === "")].map(({ row }) => row);
}

function toNumber(key) {
  return Object.hasOwn(WORDS, key) ? WORDS[key] : Number(key);
}
