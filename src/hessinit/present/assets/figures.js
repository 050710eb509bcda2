// Every chart of the page: drawn as wide as its place is, and again when that changes.
const DRAW = { depth: drawCurves, lines: drawCurves, heat: drawHeat, rates: drawRates };
const PAPER = { alone: 640, several: 295 }; // pixels, on A4 or Letter between the margins
const drawAgain = [];

for (const figure of document.querySelectorAll("figure.chart")) {
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const picture = figure.querySelector(".picture"), state = { svg: null, points: [] };
  figure.classList.add("drawn");
  const reading = attachReading(figure, state);
  attachListing(figure, state, chart);
  let drawn = 0;

  const draw = (width) => {
    if (width < 40 || Math.abs(width - drawn) < 1) return;
    drawn = width;
    reading.forget();
    const { svg, points, ramp } = DRAW[chart.kind](chart, width);
    Object.assign(state, { svg, points });
    svg.setAttribute("aria-hidden", "true"); // the text beside it says it all, and the readout every number
    picture.replaceChildren(svg);
    if (ramp) showRamp(figure, ramp);
  };

  draw(Math.floor(picture.clientWidth));
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (!matchMedia("print").matches) draw(Math.floor(picture.clientWidth));
  })).observe(picture);
  const onPaper = figure.closest(".several") ? PAPER.several : PAPER.alone;
  drawAgain.push((isPaper) => draw(isPaper ? onPaper : Math.floor(picture.clientWidth)));
}

function showRamp(figure, ramp) {
  if (figure.querySelector(".legend")) return;
  const legend = Object.assign(document.createElement("p"), { className: "legend" });
  const swatch = Object.assign(document.createElement("span"), { className: "swatch ramp" });
  swatch.style.background = `linear-gradient(to right, ${ramp.colors.join(", ")})`;
  const item = document.createElement("span");
  item.append(`${ramp.label}: ${formatNumber(ramp.low, 3)}`, swatch, formatNumber(ramp.high, 3));
  legend.append(item);
  figure.querySelector("figcaption").after(legend);
}

// On paper everything is open, and charts are as wide as the sheet.
const opened = [];
function forPaper(isPaper) {
  if (isPaper) {
    for (const details of document.querySelectorAll("details.facts:not([open])")) {
      details.open = true;
      opened.push(details);
    }
  } else {
    for (const details of opened.splice(0)) details.open = false;
  }
  for (const draw of drawAgain) draw(isPaper);
  for (const frame of document.querySelectorAll("main > section > .table")) fitOnPaper(frame, isPaper);
}
matchMedia("print").addEventListener("change", (event) => forPaper(event.matches));
addEventListener("beforeprint", () => forPaper(true));
addEventListener("afterprint", () => forPaper(false));
