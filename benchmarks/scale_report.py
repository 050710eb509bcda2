"""The record of `scale.py` as tables and as one picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reading import RIGHT, count_text, fitted_exponent
from scale_cells import PEERS, Cell
from scale_problems import CASES, SERIES, Case, Limit, Series

NETWORK = "hessinit + network"
MOST_MEMORY = 2.5  # training steps
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
Record = dict[str, Cell]


# --- Reading the record -------------------------------------------------------------------------------------


def case_cell(record: Record, device: str, case: str, contestant: str, tolerance: float) -> Cell | None:
    cell = record.get(f"case/{device}/{case}/{contestant}/{tolerance}")
    return cell if cell and cell["status"] == "ok" else None


def measured_cases(record: Record) -> Iterator[tuple[str, Case, float, Limit, Cell]]:
    for case in CASES:
        for device in DEVICES:
            for tolerance, limit in case.limits.items():
                cell = case_cell(record, device, case.name, "hessinit", tolerance)
                if cell:
                    yield device, case, tolerance, limit, cell


def race(record: Record, device: str, case: Case) -> dict[str, dict[str, Any]]:
    """By contestant: seconds, gradients and products a layer, the worst error, and whether it is a bound."""
    cells = {name: record.get(f"race/{device}/{case.name}/{name}") for name in ("hessinit", *PEERS, "truth")}
    ours, truth = cells["hessinit"], (cells.pop("truth") or {}).get("norms", {})
    if not ours or ours["status"] != "ok":
        return {}
    found = {}
    for name, cell in cells.items():
        if cell is None:
            continue
        rows = cell.get("rows", {})
        norms = cell.get("norms") or {layer: row["norm"] for layer, row in rows.items() if "norm" in row}
        errors = [abs(norm / truth[layer] - 1) for layer, norm in norms.items() if layer in truth]
        count = len(rows) if "rows" in cell else cell.get("layers", 0)
        seconds = cell.get("seconds") or sum(row["seconds"] for row in rows.values())
        products = cell.get("products") or sum(row["products"] for row in rows.values())
        found[name] = {
            "status": cell["status"],
            "message": cell.get("message", ""),
            "layers": count,
            "seconds": seconds / count if count else math.nan,
            "gradients": seconds / count / cell["gradient_seconds"] if count else math.nan,
            "products": products / count if count else math.nan,
            "error": max(errors, default=math.nan),
            "memory": cell["peak_mib"] / cell["step_mib"] if cell.get("step_mib") else math.nan,
            "same matrix": name not in PEERS or PEERS[name][3] or case.piecewise_linear,
        }
    return found


def faster_peer(found: dict[str, dict[str, Any]]) -> tuple[str, float] | None:
    """The faster of those that finished with the same matrix, and hessinit's seconds over its."""
    peers = {
        name: row["seconds"]
        for name, row in found.items()
        if name in PEERS and row["same matrix"] and row["status"] in ("ok", "capped")
    }
    if not peers:
        return None
    name = min(peers, key=lambda name: peers[name])
    return name, found["hessinit"]["seconds"] / peers[name]


def growth(record: Record, series: Series, device: str, contestant: str) -> list[tuple[int, float, float]]:
    """(size, cost in gradients, seconds of a gradient) of the finished ones, in rising order."""
    rows = []
    for size in series.sizes[device]:
        cell = record.get(f"growth/{device}/{series.name}/{contestant}/{size}")
        ours = record.get(f"growth/{device}/{series.name}/hessinit/{size}")
        if not cell or not ours or cell["status"] != "ok" or ours["status"] != "ok":
            continue
        seconds = cell.get("seconds") or sum(row["seconds"] for row in cell["rows"].values())
        rows.append((size, seconds / cell["gradient_seconds"], ours["gradient_seconds"]))
    return sorted(rows)


def all_growth(record: Record) -> Iterator[tuple[Series, str, str, list[tuple[int, float, float]], float]]:
    for series in SERIES:
        for device in DEVICES:
            for contestant in ("hessinit", *PEERS):
                rows = growth(record, series, device, contestant)
                if len(rows) > 1:
                    sizes, gradients, _ = zip(*rows, strict=True)
                    yield series, device, contestant, rows, fitted_exponent(sizes, gradients)


# --- Tables -------------------------------------------------------------------------------------------------


def show(record: Record) -> None:
    show_cases(record)
    show_races(record)
    show_growth(record)
    failed = [(key, cell) for key, cell in record.items() if cell["status"] in ("error", "missing")]
    if failed:
        print("\nNot measured:")
    for key, cell in failed:
        print(f"  {key}: {cell['status']}: {cell.get('message', '')[:160]}")
    busy = [key for key, cell in record.items() if is_busy(cell)]
    if busy:
        print(f"\n{len(busy)} CPU cells were made beside other work (*: load above threads + 1).")


def is_busy(cell: Cell) -> bool:
    run = cell["run"]
    return cell["device"] == "cpu" and run["load"] > run["hardware"]["threads"] + 1


def within(value: float, limit: float) -> str:
    """A cost beside its limit, with an exclamation mark if it is above.

    >>> within(45.2, 40), within(12, math.inf)
    ('45.2 (40) !', '12')
    """
    text = count_text(value)
    return text if math.isinf(limit) else f"{text} ({limit:g}){' !' if value > limit else ''}"


def show_cases(record: Record) -> None:
    head = ["case", "tolerance", "gradient", "cost (limit)", "+ network", "memory", "products", "engine"]
    rows = []
    for device, case, tolerance, limit, cell in measured_cases(record):
        whole = case_cell(record, device, case.name, NETWORK, tolerance)
        memory = cell["peak_mib"] / cell["step_mib"] if cell["step_mib"] else math.nan
        rows.append([
            f"{case.name}, {DEVICES[device]}{' *' if is_busy(cell) else ''}", f"{tolerance:g}",
            f"{1000 * cell['gradient_seconds']:.3g} ms",
            within(cell["gradients"], limit.layers),
            within(whole["gradients"], limit.network) if whole else "–",
            within(memory, MOST_MEMORY), str(cell["products"]), "+".join(cell["engines"]),
        ])  # fmt: skip
    print_table("All layers: cost in gradients, memory in training steps", head, rows)


def show_races(record: Record) -> None:
    head = ["case, contestant", "layers", "seconds a layer", "gradients", "products", "error", "memory", ""]
    rows = []
    for case in CASES:
        for device in DEVICES:
            found = race(record, device, case)
            for name, row in found.items():
                bound = "> " if row["status"] == "capped" else ""
                remark = "" if row["same matrix"] else "exact Hessian"
                remark = row["message"][:60] if row["status"] in ("error", "missing") else remark
                wrong = " !" if row["error"] > RIGHT and row["same matrix"] else ""
                rows.append([
                    f"{case.name}, {DEVICES[device]}: {name}", str(row["layers"]),
                    f"{bound}{row['seconds']:.3g}", f"{bound}{row['gradients']:.3g}",
                    f"{row['products']:.3g}", f"{row['error']:.0e}{wrong}",
                    f"{row['memory']:.2g}", remark,
                ])  # fmt: skip
            faster = faster_peer(found)
            if faster:
                bound = "≤ " if found[faster[0]]["status"] == "capped" else ""
                rows.append([f"  hessinit / {faster[0]}", "", f"{bound}{faster[1]:.2f}", "", "", "", "", ""])
    if rows:
        print()
        print_table("Race: the same layers, tolerance 1e-3", head, rows)


def show_growth(record: Record) -> None:
    head = ["series", "contestant", "exponent (limit)", "gradients", "smallest gradient"]
    rows = []
    for series, device, contestant, points, power in all_growth(record):
        most = series.most if contestant == "hessinit" else math.inf
        limit = "" if math.isinf(most) else f" ({most:g}){' !' if power > most else ''}"
        curve = ", ".join(f"{size}: {count_text(cost)}" for size, cost, _ in points)
        smallest = f"{1000 * min(point[2] for point in points):.3g} ms"
        rows.append([f"{series.name}, {DEVICES[device]}", contestant, f"{power:.2f}{limit}", curve, smallest])
    if rows:
        print()
        print_table("Growth of the cost in gradients", head, rows)


def print_table(title: str, head: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    print(title)
    for row in [head, ["─" * width for width in widths], *rows]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def show_markdown(record: Record) -> None:
    """The two tables of docs/concepts/cost.md."""
    tolerances = sorted({tolerance for case in CASES for tolerance in case.limits})
    print("| | gradient |", " | ".join(f"{one:g}" for one in tolerances), "| with the network | memory |")
    print("|---" * (len(tolerances) + 4) + "|")
    rows: dict[tuple[str, str], dict[float, Cell]] = {}
    for device, case, tolerance, _, cell in measured_cases(record):
        rows.setdefault((f"{case.title}, {DEVICES[device]}", f"{device}/{case.name}"), {})[tolerance] = cell
    for (title, place), cells in rows.items():
        finest = min(cells)
        whole = record.get(f"case/{place}/{NETWORK}/{finest}", {})
        costs = [count_text(cells[one]["gradients"]) if one in cells else "" for one in tolerances]
        network = count_text(whole["gradients"]) if "gradients" in whole else ""
        memory = cells[finest]["peak_mib"] / cells[finest]["step_mib"]
        columns = [title, f"{1000 * cells[finest]['gradient_seconds']:.3g} ms", *costs, network]
        print("|", " | ".join([*columns, f"{memory:.2g}"]), "|")
    print()
    names = ["hessinit", *PEERS]
    print("| | layers |", " | ".join(names), "|")
    print("|---" * (len(names) + 2) + "|")
    for case in CASES:
        for device in DEVICES:
            found = race(record, device, case)
            if found:
                columns = [race_text(found[name]) if name in found else "" for name in names]
                head = f"{case.title}, {DEVICES[device]}"
                print("|", " | ".join([head, str(found["hessinit"]["layers"]), *columns]), "|")


def race_text(row: dict[str, Any]) -> str:
    if row["status"] in ("error", "missing"):
        return "fails" if row["status"] == "error" else "not run"
    bound = "> " if row["status"] == "capped" else ""
    error = f"{row['error']:.0e}".replace("e-0", "e-") if row["same matrix"] else "other matrix"
    return f"{bound}{count_text(row['gradients'])} · {error}"


# --- The picture --------------------------------------------------------------------------------------------

COLOURS = {
    "hessinit": "#0072b2", "PyHessian": "#d55e00", "hessian-eigenthings": "#009e73",
    "curvlinops + eigsh": "#cc79a7",
}  # fmt: skip
TOLERANCES = {1e-3: ("o", "#0072b2"), 1e-2: ("s", "#3f9bd1"), 1e-1: ("D", "#8cc6ea")}
LEGEND_ABOVE = {
    "fontsize": 7.5, "ncols": 4, "frameon": False, "loc": "lower right", "bbox_to_anchor": (1.1, 1),
    "borderaxespad": 0.2, "handletextpad": 0.1, "handlelength": 1.4, "columnspacing": 0.8,
}  # fmt: skip
PANELS = {
    "layers": ("layers", "layers-1000"),
    "outputs": ("outputs",),
    "batch": ("batch",),
    "width": ("width",),
}


def draw(record: Record, path: Path) -> None:
    """Costs beside their limits, the race, and growth with its slopes; made for 700 pixels of width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(measured_cases(record))
    races = [(case, device) for case in CASES for device in DEVICES if race(record, device, case)]
    lists = [0.24 * len(cases) + 0.9, 0.26 * len(races) + 1.1 if races else 0]
    heights = [sum(lists), 5.0]
    with pyplot.rc_context({"font.size": 9}):
        figure = pyplot.figure(figsize=(7, sum(heights)), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=heights)
        panels = above.subplots(2 if races else 1, 1, squeeze=False, height_ratios=lists[: 1 + bool(races)])
        draw_cases(panels[0, 0], cases)
        if races:
            draw_races(panels[1, 0], record, races)
        growing = below.subplots(2, 2, sharey=True).flat
        for axes, (label, names) in zip(growing, PANELS.items(), strict=True):
            draw_growth(axes, record, label, names)
        low, high = growing[0].get_ylim()
        growing[0].set_ylim(low, high * (high / low) ** 0.45)  # room for the legends
        below.suptitle(
            "Growth of the cost in gradients (dashed, hollow: CPU)", x=0.01, ha="left", weight="bold"
        )
        figure.savefig(path, dpi=200)
        pyplot.close(figure)


def set_title(axes: Any, text: str) -> None:
    """At the left edge of the picture, above the labels of the rows."""
    title = axes.annotate(
        text, (0.01, 1), xycoords=("figure fraction", "axes fraction"), xytext=(0, 4),
        textcoords="offset points", weight="bold", fontsize=10,
    )  # fmt: skip
    title.set_in_layout(False)


def label_plainly(axis: Any) -> None:
    """1, 2, 5, 10, … instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_cases(axes: Any, cases: list[tuple[str, Case, float, Limit, Cell]]) -> None:
    labels = []
    for row, (device, case, tolerance, limit, cell) in enumerate(cases):
        marker, colour = TOLERANCES[tolerance]
        axes.plot(cell["gradients"], row, marker, color=colour, markeredgecolor="black", markersize=7)
        beside = f" of {limit.layers:g}" if math.isfinite(limit.layers) else ""
        axes.annotate(
            f"{count_text(cell['gradients'])}{beside}", (1.0, row), xycoords=("axes fraction", "data"),
            xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
        if math.isfinite(limit.layers):
            axes.plot([limit.layers] * 2, [row - 0.4, row + 0.4], color="0.35", linewidth=2)
        repeated = row and cases[row - 1][:2] == (device, case)
        labels.append("" if repeated else f"{case.title}, {DEVICES[device]}")
    for tolerance, (marker, colour) in TOLERANCES.items():
        axes.plot([], [], marker, color=colour, markeredgecolor="black", label=f"tolerance {tolerance:g}")
    axes.plot([], [], color="0.35", linewidth=2, label="limit")
    axes.set(xscale="log", ylim=(len(cases) - 0.4, -0.6), xlabel="gradients")
    label_plainly(axes.xaxis)
    axes.set_yticks(range(len(cases)), labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.9")
    axes.legend(**LEGEND_ABOVE)
    axes.spines[["top", "right", "left"]].set_visible(False)
    set_title(axes, "‖H‖ of all layers")


def draw_races(axes: Any, record: Record, races: list[tuple[Case, str]]) -> None:
    """Gradients a layer; hollow where the matrix is another one or the number only a lower bound."""
    seen: set[str] = set()
    for row, (case, device) in enumerate(races):
        found = race(record, device, case)
        costs = {name: one["gradients"] for name, one in found.items() if math.isfinite(one["gradients"])}
        axes.plot([min(costs.values()), max(costs.values())], [row, row], color="0.8", zorder=1)
        for name, cost in costs.items():
            whole = found[name]["same matrix"] and found[name]["status"] == "ok"
            face = COLOURS[name] if whole else "white"
            axes.plot(
                cost, row, "o" if found[name]["status"] == "ok" else ">", color=COLOURS[name], markersize=7,
                markerfacecolor=face, label=None if name in seen else name, zorder=2,
            )  # fmt: skip
            seen.add(name)
    labels = [f"{case.title}, {DEVICES[device]}" for case, device in races]
    axes.set(xscale="log", ylim=(len(races) - 0.4, -0.6), xlabel="gradients a layer")
    label_plainly(axes.xaxis)
    axes.set_yticks(range(len(races)), labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.9")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(**LEGEND_ABOVE)
    set_title(axes, "Beside peers")


def draw_growth(axes: Any, record: Record, label: str, names: tuple[str, ...]) -> None:
    """Cost against size with the fitted line; filled and solid on a GPU, hollow and dashed on a CPU."""
    sizes: set[int] = set()
    for series, device, contestant, points, power in all_growth(record):
        if series.name not in names:
            continue
        x, y, _ = zip(*points, strict=True)
        sizes |= set(x)
        colour, gpu = COLOURS[contestant], device == "cuda"
        square = series.name != names[0]
        middle = sum(map(math.log, x)) / len(x), sum(map(math.log, y)) / len(y)
        line = [math.exp(middle[1] + power * (math.log(size) - middle[0])) for size in x]
        axes.plot(x, line, "-" if gpu else "--", color=colour, linewidth=1.3)
        kind = ", 1,000 classes" if square else ", 10 classes" if len(names) > 1 else ""
        axes.plot(
            x, y, "s" if square else "o", color=colour, markersize=5,
            markerfacecolor=colour if gpu else "white",
            label=f"{contestant}, {DEVICES[device]}{kind}: slope {power:.2f}",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel=label)
    label_plainly(axes.yaxis)
    if sizes:
        from matplotlib.ticker import NullLocator

        shown = sorted(sizes) if len(sizes) < 7 else sorted(sizes)[::2]
        axes.set_xticks(shown, [f"{size:,}" for size in shown], fontsize=7.5)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(
            fontsize=7, frameon=False, loc="upper left", borderpad=0, handlelength=1, labelspacing=0.2
        )
    axes.grid(color="0.92")
