// Reading a chart: the pointer, a finger or the arrow keys choose a point; a tip and a line of text say it.
const NEAR = 48; // pixels
const LONGEST_TIP = 240; // letters of a name

function attachReading(figure, state) {
  const drawing = figure.querySelector(".drawing"), picture = figure.querySelector(".picture");
  const readout = figure.querySelector(".readout");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  drawing.append(tip);
  let chosen = null, ring = null;

  function choose(point) {
    chosen = point;
    ring?.remove();
    tip.hidden = !point;
    if (!point) {
      readout.textContent = "";
      return;
    }
    const head = shorten(point.head, LONGEST_TIP);
    tip.replaceChildren(...[["b", "", head], ["span", "value", point.text], ["span", "detail", point.detail]]
      .filter(([, , text]) => text).map(([tag, name, text]) => Object.assign(document.createElement(tag), { className: name, textContent: text })));
    readout.textContent = [head, point.text, point.detail].filter(Boolean).join(" · ");
    ring = d3.select(state.svg).append("circle").attr("cx", point.px).attr("cy", point.py).attr("r", 7)
      .attr("fill", "none").attr("stroke", "currentColor").attr("stroke-width", 2).attr("pointer-events", "none").node();
    place(point);
  }

  function place(point) {
    const x = point.px - picture.scrollLeft, width = drawing.clientWidth;
    const left = Math.max(0, Math.min(x - tip.offsetWidth / 2, width - tip.offsetWidth));
    const above = point.py - tip.offsetHeight - 14;
    tip.style.left = `${left}px`;
    tip.style.top = `${above < -40 ? point.py + 16 : above}px`;
  }

  function nearest(event) {
    const box = picture.getBoundingClientRect();
    const x = event.clientX - box.left + picture.scrollLeft, y = event.clientY - box.top;
    let found = null, least = NEAR ** 2;
    for (const point of state.points) {
      const distance = (point.px - x) ** 2 + (point.py - y) ** 2;
      if (distance < least) [found, least] = [point, distance];
    }
    return found;
  }

  for (const kind of ["pointermove", "pointerdown"]) {
    drawing.addEventListener(kind, (event) => {
      const point = nearest(event);
      if (point !== chosen) choose(point);
    });
  }
  drawing.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && choose(null));
  // Not blur, which does not bubble: a click puts the focus on the picture inside.
  drawing.addEventListener("focusout", (event) => drawing.contains(event.relatedTarget) || choose(null));
  drawing.addEventListener("keydown", (event) => {
    const point = step(state.points, chosen, event.key);
    if (point === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(point);
    if (point) {
      if (point.px < picture.scrollLeft || point.px > picture.scrollLeft + picture.clientWidth) {
        picture.scrollLeft = point.px - picture.clientWidth / 2;
        place(point);
      }
    }
  });
  drawing.tabIndex = 0;
  drawing.setAttribute("role", "application");
  drawing.setAttribute("aria-roledescription", "chart, read with the arrow keys");
  return { forget: () => choose(null) };
}

// Left and right along a series, up and down between them; undefined where the key means something else.
function step(points, chosen, key) {
  if (!points.length) return undefined;
  const series = points.filter((point) => point.series === (chosen ?? points[0]).series);
  const at = chosen ? series.indexOf(chosen) : -1;
  if (key === "Escape") return chosen ? null : undefined;
  if (key === "ArrowRight") return series[Math.min(at + 1, series.length - 1)];
  if (key === "ArrowLeft") return series[Math.max(at - 1, 0)];
  if (key === "Home") return series[0];
  if (key === "End") return series[series.length - 1];
  if (key !== "ArrowUp" && key !== "ArrowDown") return undefined;
  if (!chosen) return points[0];
  const all = d3.sort(new Set(points.map((point) => point.series)));
  const next = all[all.indexOf(chosen.series) + (key === "ArrowDown" ? 1 : -1)];
  if (next === undefined) return chosen;
  return d3.least(points.filter((point) => point.series === next), (point) => Math.abs(point.px - chosen.px));
}
