// Numbers as people read them, and as they travel: JSON has no word for inf and nan.
// Looked up with Object.hasOwn: a text such as "constructor" is in every object.
const WORDS = { nan: NaN, inf: Infinity, "-inf": -Infinity };

function readNumber(value) {
  return typeof value === "string" ? WORDS[value] : value;
}

function readNumbers(values) {
  return values === null ? null : values.map(readNumber);
}

// As hessinit.present.words.format_number writes them, with one figure more: hovering asks for detail.
function formatNumber(number, digits = 4) {
  if (Number.isNaN(number)) return "nan";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  const rounded = Number(number.toExponential(digits - 1));
  if (rounded === 0) return "0";
  if (Math.abs(rounded) >= 1e-4 && Math.abs(rounded) < 1e5) {
    const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(rounded)) + 1e-12));
    const text = rounded.toFixed(decimals);
    return decimals ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
  }
  return number.toExponential(digits - 2).replace(/e([-+])(\d)$/, "e$10$2");
}

// Cut the middle out of a long name: its beginning and its end say most.
function shorten(name, most) {
  const letters = Array.from(name);
  if (letters.length <= most) return name;
  const half = Math.floor((most - 1) / 2);
  return letters.slice(0, most - 1 - half).join("") + "…" + letters.slice(letters.length - half).join("");
}
