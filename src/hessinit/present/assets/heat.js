// A number for each row and column, as coloured cells that say it.
const CELL = 46; // pixels: narrower cells do not hold a number, so the map scrolls instead

function drawHeat(chart, width) {
  const values = chart.values.map(readNumbers);
  const held = values.flat().filter((value) => isHeld(value, chart.log_color));
  const [low, high] = held.length ? d3.extent(held) : [1, 1];
  const share = (value) => {
    if (high <= low) return 0.5;
    return chart.log_color ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  };
  // Both ends of the ramp are left out: its palest is lost on a light page, its darkest on a dark one.
  const colour = (value) => d3.interpolateYlGnBu(0.1 + 0.8 * (1 - share(value)));
  const cells = chart.rows.flatMap((row, down) => chart.columns.map((column, across) => {
    const value = values[down][across], known = isHeld(value, chart.log_color), fill = known ? colour(value) : null;
    return {
      series: down, at: across, x: across, y: down, value, known, fill, ink: fill && inkOn(fill),
      text: chart.texts[down][across], detail: chart.details?.[down]?.[across] ?? "",
      head: `${row}, ${chart.x_label} ${column}`, marked: Boolean(chart.marked?.[down]?.[across]),
      color: "var(--ink)",
    };
  }));
  const rows = shortenTo(chart.rows, Math.max(60, width * 0.36)), left = widest(rows) + 12;
  const full = Math.max(width, left + chart.columns.length * CELL + 2);
  const across = (full - left - 2) / chart.columns.length;
  const columns = chart.columns.map((name) => shorten(name, 24)), sideways = widest(columns) > across;
  const bottom = sideways ? widest(columns) + 34 : 44;
  const height = chart.rows.length * 34 + bottom + 24;
  const band = { padding: 0.06, round: true, axis: null };
  const svg = Plot.plot({
    width: full, height, marginLeft: left, marginRight: 2, marginTop: 24, marginBottom: bottom,
    style: { background: "none", color: "inherit", fontFamily: "inherit", fontSize: "12px", overflow: "visible" },
    x: { type: "band", domain: d3.range(chart.columns.length), ...band },
    y: { type: "band", domain: d3.range(chart.rows.length), ...band },
    marks: [
      Plot.cell(cells.filter((cell) => cell.known), { x: "x", y: "y", fill: (cell) => cell.fill, rx: 3 }),
      Plot.cell(cells.filter((cell) => !cell.known && cell.text), { x: "x", y: "y", fill: "var(--tint)", stroke: "var(--line)", rx: 3 }),
      Plot.cell(cells.filter((cell) => cell.marked), { x: "x", y: "y", fill: "none", stroke: "var(--vermilion)", strokeWidth: 2.4, rx: 3 }),
      Plot.text(cells.filter((cell) => widthOf(cell.text) <= across), { x: "x", y: "y", text: "text", className: "cells", fill: (cell) => cell.ink ?? "var(--muted)" }),
      Plot.axisX(d3.range(chart.columns.length), {
        tickFormat: (at) => columns[at], tickSize: 0, label: null, className: "muted",
        ...(sideways ? { tickRotate: -90, textAnchor: "end" } : {}),
      }),
      Plot.axisY(d3.range(chart.rows.length), { tickFormat: (at) => rows[at], tickSize: 0, label: null }),
      Plot.text([chart.y_label], { frameAnchor: "top-left", dx: -left, dy: -14, textAnchor: "start", className: "muted" }),
      Plot.text([chart.x_label], { frameAnchor: "bottom", dy: bottom - 8, className: "muted" }),
    ],
  });
  const middle = (name) => svg.scale(name).bandwidth / 2;
  const points = cells.filter((cell) => cell.text).map((cell) => ({
    ...cell,
    text: cell.known ? `${chart.value_label} ${formatNumber(cell.value)}` : cell.text,
    px: svg.scale("x").apply(cell.x) + middle("x"), py: svg.scale("y").apply(cell.y) + middle("y"),
  }));
  const ramp = held.length ? { label: chart.value_label, low, high, colors: d3.range(9).map((step) => colour(chart.log_color ? low * (high / low) ** (step / 8) : low + ((high - low) * step) / 8)) } : null;
  return { svg, points, ramp };
}

// As many letters of each name as there is room for.
function shortenTo(names, width) {
  for (let most = 28; most > 6; most -= 1) {
    const short = names.map((name) => shorten(name, most));
    if (widest(short) <= width) return short;
  }
  return names.map((name) => shorten(name, 6));
}

// Black or white, whichever is easier to read on that colour (by WCAG's relative luminance).
function inkOn(color) {
  const { r, g, b } = d3.rgb(color);
  const [red, green, blue] = [r, g, b].map((part) => {
    const value = part / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.179 ? "#ffffff" : "#1a1a1a";
}
