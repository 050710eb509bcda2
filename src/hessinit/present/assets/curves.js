// Curves over a number, and numbers over the layers: one drawing for both.
const SYMBOLS = { circle: "circle", cross: "times", square: "square", diamond: "diamond", triangle: "triangle" };

function readCurves(chart) {
  const depth = chart.kind === "depth";
  return {
    ...chart,
    depth,
    bands: chart.bands.map((band) => ({ ...band, low: readNumber(band.low), high: readNumber(band.high) })),
    rules: chart.rules.map((rule) => ({ ...rule, value: readNumber(rule.value) })),
    series: chart.series.map((one) => ({
      ...one,
      isLine: !one.points && !one.hollow,
      x: depth ? one.y.map((_, at) => at) : readNumbers(one.x),
      y: readNumbers(one.y),
      low: readNumbers(one.low),
      high: readNumbers(one.high),
    })),
  };
}

function drawCurves(data, width) {
  const chart = readCurves(data);
  const level = chart.rules.filter((rule) => !rule.upright), upright = chart.rules.filter((rule) => rule.upright);
  const reach = chart.series.flatMap((one) => [...one.y, ...(one.low ?? []), ...(one.high ?? [])]);
  const ends = chart.bands.flatMap((band) => [band.low, band.high]);
  const y = makeAxis([...reach, ...ends, ...level.map((rule) => rule.value)], chart.log_y);
  if (chart.y_range) y.domain = readNumbers(chart.y_range);
  else leaveRoomForEdges(y, chart.series.flatMap((one) => one.y));
  const x = chart.depth
    ? { log: false, domain: [-0.5, Math.max(chart.layers.length, 1) - 0.5] }
    : makeAxis([...chart.series.flatMap((one) => one.x), ...upright.map((rule) => rule.value)], chart.log_x, 0.02);
  const yTicks = ticksOf(y, 6), yWidth = Math.max(widest(yTicks.map(formatTick)), 12) + 14;
  const names = chart.depth ? nameLayers(chart.layers, width, yWidth) : null;
  const left = Math.max(yWidth, names?.left ?? 0), right = 14, bottom = names ? names.height + 26 : 44;
  const scaleX = (x.log ? d3.scaleLog : d3.scaleLinear)(x.domain, [left, width - right]);
  const shown = upright.filter((rule) => isHeld(rule.value, x.log));
  const labels = stackLabels(shown.map((rule) => ({ x: scaleX(rule.value), text: shorten(rule.label, LONGEST_LABEL), rule })), left, width - right);
  const top = 26 + 16 * (labels.length ? 1 + Math.max(...labels.map((label) => label.row)) : 0);
  const height = Math.round(Math.min(300, Math.max(210, width * 0.42))) + top + bottom - 60;
  const scaleY = (y.log ? d3.scaleLog : d3.scaleLinear)(y.domain, [height - bottom, top]);
  const curves = chart.series.map((one, number) => placeSeries(chart, one, number, x, y));
  const levels = level.filter((rule) => isHeld(rule.value, y.log));
  const radius = chart.depth && chart.layers.length > 80 ? 2.4 : 3.8;
  const svg = Plot.plot({
    width, height, marginLeft: left, marginRight: right, marginTop: top, marginBottom: bottom,
    style: { background: "none", color: "inherit", fontFamily: "inherit", fontSize: "12px", overflow: "visible" },
    x: { type: x.log ? "log" : "linear", domain: x.domain, axis: null },
    y: { type: y.log ? "log" : "linear", domain: y.domain, axis: null },
    marks: [
      ...chart.bands.map((band) => drawBand(band, x, y, height - top - bottom)),
      Plot.ruleY(yTicks, { stroke: "var(--grid)" }),
      Plot.text(yTicks, { y: Plot.identity, text: formatTick, frameAnchor: "left", textAnchor: "end", dx: -8, className: "muted" }),
      Plot.text([chart.y_label], { frameAnchor: "top-left", dx: -left, dy: -top + 8, textAnchor: "start", className: "muted" }),
      ...drawXAxis(chart, x, names, width - left - right, bottom),
      ...levels.map((rule) =>
        Plot.ruleY([rule.value], { stroke: rule.color, strokeWidth: 1.3, strokeDasharray: "6 4" })),
      ...labels.flatMap((label) => drawUpright(label, y, scaleX, top)),
      ...d3.sort(curves, (curve) => !curve.isLine).flatMap((curve) => drawSeries(chart, curve, radius)),
      ...drawEdges(curves, y, scaleX),
      // Last, with a halo: a curve that went over the letters could not be told from them.
      ...labelLevels(levels, curves, { left, right: width - right, top, bottom: height - bottom }, scaleX, scaleY),
    ],
  });
  return { svg, points: curves.flatMap((curve) => curve.points).map((point) => locate(point, svg, y)) };
}

// What the axis cannot hold is a gap in the line, and stands at the edge; of a stretch the first is named.
function placeSeries(chart, one, number, x, y) {
  const points = [], path = [], isCurve = !chart.depth && one.isLine;
  let before = "";
  for (let at = 0; at < one.y.length; at += 1) {
    const value = one.y[at], where = one.x[at], held = isHeld(value, y.log);
    if (!isHeld(where, x.log)) continue;
    path.push({ x: where, y: held ? value : NaN });
    const beyond = held || value === null ? "" : formatNumber(value), again = isCurve && beyond && beyond === before;
    before = beyond;
    if (value === null) continue;
    if (held && !isWithin(value, y)) continue;
    if (!isWithin(where, x)) continue;
    const head = chart.depth ? chart.layers[at] : `${chart.x_label} ${formatNumber(where)}`;
    points.push({
      series: number, at, x: where, color: one.color, head, value, held, again,
      y: held ? value : edgeOf(value, y.log) === "low" ? y.domain[0] : y.domain[1],
      low: one.low?.[at] ?? null, high: one.high?.[at] ?? null,
      name: one.name, detail: one.details?.[at] ?? "",
      text: `${one.name ? shorten(one.name, LONGEST_LABEL) + ": " : ""}${formatNumber(value)}`,
    });
  }
  return { ...one, points, path };
}

function leaveRoomForEdges(y, values) {
  const [low, high] = y.domain, room = y.log ? Math.max((high / low) ** 0.18, 2) : (high - low) * 0.18;
  const beyond = values.filter((value) => value !== null && !isHeld(value, y.log)).map((value) => edgeOf(value, y.log));
  y.domain = [
    beyond.includes("low") ? (y.log ? low / room : low - room) : low,
    beyond.includes("high") ? (y.log ? high * room : high + room) : high,
  ];
}

// A narrow band on a long axis is drawn a little wider than it is, to be seen at all.
function drawBand(band, x, y, pixels) {
  const within = (value, end) => (isHeld(value, y.log) ? Math.max(y.domain[0], Math.min(y.domain[1], value)) : y.domain[end]);
  const y1 = within(band.low, 0), y2 = within(band.high, 1), [low, high] = y.domain;
  const share = y.log ? Math.log(y2 / y1) / Math.log(high / low) : (y2 - y1) / (high - low);
  const narrow = share * pixels < 8, inset = narrow ? (share * pixels - 8) / 2 : 0;
  return Plot.rect([band], {
    x1: x.domain[0], x2: x.domain[1], y1, y2, insetTop: inset, insetBottom: inset, fill: band.color, fillOpacity: narrow ? 0.3 : 0.13,
  });
}

function drawSeries(chart, curve, radius) {
  const { points, path, isLine } = curve, clip = Boolean(chart.y_range);
  const marks = [];
  const bars = points.filter((point) => isHeld(point.low, chart.log_y) && isHeld(point.high, chart.log_y) && point.high > point.low);
  if (chart.depth || !isLine) {
    marks.push(Plot.ruleX(bars, { x: "x", y1: "low", y2: "high", stroke: curve.color, strokeWidth: 3, strokeOpacity: 0.4 }));
  } else if (bars.length) {
    marks.push(Plot.areaY(bars, { x: "x", y1: "low", y2: "high", fill: curve.color, fillOpacity: 0.16, clip }));
  }
  if (isLine) {
    marks.push(Plot.line(path, {
      clip, x: "x", y: "y", stroke: curve.color, strokeWidth: chart.depth ? 1.2 : 1.9, strokeDasharray: curve.dashed ? "6 4" : null, strokeLinejoin: "round",
      strokeLinecap: "round", // a number between two gaps is a dot
    }));
  }
  if (chart.depth || !isLine || points.length < 12) {
    const cross = curve.symbol === "cross", hollow = curve.hollow || cross;
    const dots = (stroke, strokeWidth) => Plot.dot(points.filter((point) => cross || point.held), {
      x: "x", y: "y", r: hollow ? radius + 1.4 : radius, symbol: SYMBOLS[curve.symbol] ?? "circle",
      fill: hollow ? "none" : curve.color, stroke, strokeWidth,
    });
    if (cross) marks.push(dots("var(--card)", 6));
    marks.push(dots(curve.color, hollow ? 2.2 : 1));
  }
  return marks;
}

// What the axis cannot hold stands at its edge, with its name where there is room for one.
function drawEdges(curves, y, scaleX) {
  const beyond = curves.flatMap((curve) => curve.points.filter((point) => curve.symbol !== "cross" && !point.held));
  const marks = [];
  for (const edge of ["low", "high"]) {
    const low = edge === "low";
    const found = beyond.filter((point) => (point.y === y.domain[0]) === low);
    const named = [];
    let end = -Infinity;
    for (const point of d3.sort(found.filter((one) => !one.again), (one) => one.x)) {
      if (scaleX(point.x) < end + 30) continue;
      end = scaleX(point.x);
      named.push(point);
    }
    for (const [color, points] of d3.group(found, (point) => point.color)) { // one mark each: Plot would map a list of colours to its own
      marks.push(Plot.dot(points, { x: "x", y: "y", r: 4.5, symbol: "triangle", rotate: low ? 180 : 0, dy: low ? -6 : 6, fill: color, stroke: "var(--bad)" }));
    }
    marks.push(Plot.text(named, {
      x: "x", y: "y", dy: low ? -14 : 14, lineAnchor: low ? "bottom" : "top", text: (point) => formatNumber(point.value), className: "bad", fontWeight: 600,
    }));
  }
  return marks;
}

function drawXAxis(chart, x, names, pixels, bottom) {
    const marks = [
    Plot.frame({ anchor: "bottom", stroke: "var(--muted)", strokeOpacity: 0.6 }),
    Plot.text([chart.x_label], { frameAnchor: "bottom", dy: bottom - 8, className: "muted" }),
  ];
  if (names) {
    marks.push(Plot.axisX(names.places, {
      tickFormat: (at) => names.texts[at], tickRotate: names.rotate, tickSize: 4, label: null, className: "muted",
      ...(names.rotate ? { textAnchor: "end" } : {}),
    }));
  } else {
    const whole = chart.series.every((one) => one.x.every((at) => !isHeld(at, false) || Number.isInteger(at)));
    const ticks = ticksOf(x, Math.max(3, Math.floor(pixels / 75)));
    marks.push(...drawTicks(whole && !x.log ? ticks.filter(Number.isInteger) : ticks));
  }
  return marks;
}

// Not Plot's own axis: on a logarithmic scale that leaves out labels of ticks that were asked for.
function drawTicks(ticks) {
  return [
    Plot.vectorX(ticks, { x: Plot.identity, frameAnchor: "bottom", length: 5, anchor: "start", rotate: 180, shape: { draw: (path, length) => { path.moveTo(0, 0); path.lineTo(0, -length); } }, stroke: "var(--muted)", strokeWidth: 1, strokeOpacity: 0.6 }),
    Plot.text(ticks, { x: Plot.identity, text: formatTick, frameAnchor: "bottom", lineAnchor: "top", dy: 8, className: "muted" }),
  ];
}

// Side by side where they fit, else slanted, else on end; every second or tenth where there are too many.
function nameLayers(layers, width, left) {
  const each = (width - left - 14) / Math.max(layers.length, 1);
  if (layers.length * 10 < width && widest(layers) + 10 <= each) {
    return { places: d3.range(layers.length), texts: layers, rotate: 0, height: 16, left };
  }
  const texts = layers.map((name) => shorten(name, 24));
  const places = d3.range(0, layers.length, Math.max(1, Math.ceil(16 / each)));
  const lengths = places.map((at) => widthOf(texts[at])), longest = Math.max(...lengths);
  const slant = Math.max(...places.map((at, number) => lengths[number] * 0.71 + 4 - each * (at + 0.5)));
  if (slant <= left + width * 0.04) return { places, texts, rotate: -45, height: longest * 0.71 + 16, left: Math.max(left, slant) };
  return { places, texts, rotate: -90, height: longest + 10, left };
}

function locate(point, svg, y) {
  const edge = point.held ? 0 : point.y === y.domain[0] ? -6 : 6;
  return { ...point, px: svg.scale("x").apply(point.x), py: svg.scale("y").apply(point.y) + edge };
}
