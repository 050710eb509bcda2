// Axes: which numbers they can hold, where they begin and end, and their ticks.
const HOLDS = [1e-100, 1e100]; // far beyond this the arithmetic of a logarithmic axis overflows

// How wide a text is, at the 12 pixels that charts are labelled with.
const pen = document.createElement("canvas").getContext("2d");
pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
const widthOf = (text) => pen.measureText(text).width;
const widest = (texts) => Math.max(0, ...texts.map(widthOf));

function isHeld(value, log) {
  if (value === null || value === undefined) return false;
  return log ? value >= HOLDS[0] && value <= HOLDS[1] : Math.abs(value) <= HOLDS[1];
}

const isWithin = (value, axis) => value >= axis.domain[0] && value <= axis.domain[1];

// Where a number that the axis cannot hold is drawn: nan is as bad as inf, and 0 lies below every power.
function edgeOf(value, log) {
  return value < (log ? HOLDS[0] : 0) ? "low" : "high";
}

function makeAxis(values, log, room = 0.06) {
  const held = values.filter((value) => isHeld(value, log));
  let [low, high] = held.length ? [Math.min(...held), Math.max(...held)] : log ? [0.1, 10] : [0, 1];
  if (log) {
    const factor = Math.max(1.25, (high / low) ** room);
    [low, high] = [low / factor, high * factor];
  } else {
    const gap = (high - low) * room || Math.abs(high) * 0.1 || 1;
    // A loss or a norm that is never negative does not get an axis that is.
    [low, high] = [low >= 0 && low - gap < 0 ? Math.min(low, 0) : low - gap, high + gap];
  }
  return { log, domain: [low, high] };
}

function ticksOf(axis, most) {
  const [low, high] = axis.domain;
  if (!axis.log) return d3.ticks(low, high, most);
  const decades = Math.log10(high / low);
  if (decades < 0.8) return d3.ticks(low, high, most);
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const steps = decades < 2.5 ? [1, 2, 5] : [1];
  const stride = steps.length > 1 ? 1 : Math.max(1, Math.ceil((last - first + 1) / most));
  const ticks = [];
  for (let power = first - 1; power <= last; power += 1) {
    if (stride > 1 && ((power % stride) + stride) % stride) continue;
    for (const step of steps) {
      const tick = Number(`${step}e${power}`);
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

function formatTick(number) {
  const power = number > 0 ? Math.log10(number) : 0;
  if (Number.isInteger(Math.round(power * 1e9) / 1e9) && (power < -3.5 || power > 4.5)) {
    const signs = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
    return "10" + Array.from(String(Math.round(power)), (sign) => signs[sign]).join("");
  }
  return formatNumber(number, 4).replace(/\.?0+e/, "e");
}
