// Tables on paper: as large as the sheet allows; what does not fit even in small letters is counted.
const SHEET = 680, LETTERS = 12, SMALLEST = 7.5; // pixels: the width of A4 between the margins, and two sizes
const LAST = 3; // columns at the end that stay: they say what came of it

function fitOnPaper(frame, isPaper) {
  const table = frame.querySelector("table");
  frame.classList.toggle("on-paper", isPaper);
  frame.classList.remove("squeezed");
  table.style.fontSize = "";
  for (const cell of table.querySelectorAll(".left-out")) cell.classList.remove("left-out");
  if (frame.nextElementSibling?.matches(".counted")) frame.nextElementSibling.remove();
  if (!isPaper) return;
  frame.style.width = `${SHEET + 2}px`; // measured on that sheet: before printing, the page is still on a screen
  const isFlat = table.tHead.rows.length === 1;
  shrink(table, isFlat ? SMALLEST : SMALLEST / 2);
  if (isFlat && table.offsetWidth > SHEET + 1) leaveOut(frame, table);
  frame.style.width = "";
}

function shrink(table, least) {
  for (let letters = LETTERS; letters >= least; letters -= 0.5) {
    table.style.fontSize = `${letters}px`;
    if (table.offsetWidth <= SHEET + 1) return;
  }
}

function leaveOut(frame, table) {
  frame.classList.add("squeezed"); // headings break anywhere: more columns fit
  const widths = Array.from(table.tHead.rows[0].cells, (cell) => cell.offsetWidth), last = widths.length - LAST;
  let room = SHEET - widths[0] - d3.sum(widths.slice(last));
  const left = d3.range(1, last).filter((place) => (room -= widths[place]) < 0);
  for (const row of table.rows) for (const place of left) row.cells[place]?.classList.add("left-out");
  const columns = left.length === 1 ? "1 column is" : `${left.length} columns are`;
  frame.after(Object.assign(document.createElement("p"), { className: "words small counted", textContent: `${columns} on the page only: this sheet is too narrow for them.` }));
}
