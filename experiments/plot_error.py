"""Plot what lowkey error measured: damage against bits per element.

    plot_error.py ROWS OUT.png [TITLE]

ROWS is what lowkey error --csv wrote (its name ends in .csv) or --json printed. One point a format, softmax KL on the
left, relative output error on the right. Formats whose labels differ in their first number alone (nuq4, nuq3, nuq2) are
one family: one colour, one line. A format of 16 bits is a number in the corner, not a point, so that the low bits have
the room."""
import csv
import json
import re
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

METRICS = (("softmax_kl", "softmax KL from exact attention, nats", lambda y, _: f"{y:.10g}"),
           ("relative_output_error", "relative error of attention's output", lambda y, _: f"{100 * y:.10g} %"))
MARKERS = "osD^vP*Xhp"
NUMBERS = ("layer", "head", "bits_payload", "n_tokens", "fit_overlap") + tuple(metric for metric, *_ in METRICS)


def read(path):
    with open(path, newline="") as f:
        if not path.endswith(".csv"):
            return json.load(f)
        return [row | {name: float(row[name]) if row[name] else None for name in NUMBERS} for row in csv.DictReader(f)]


def families(rows):
    """{family: rows by bits}, in the order of the rows; and the 16-bit formats."""
    found, wide = {}, []
    for row in rows:
        if row["layer"] is not None or row["head"] is not None:
            continue
        if row["bits_payload"] > 12:
            wide.append(row)
        else:
            found.setdefault(re.sub(r"\d+", "", row["format"], count=1), []).append(row)
    for members in found.values():
        members.sort(key=lambda row: row["bits_payload"])
    return found, wide


def family_name(rows):
    """nuq2 nuq3 nuq4 -> nuq2/3/4; a lone format keeps its label"""
    labels = [row["format"] for row in rows]
    numbers = [re.search(r"\d+", label).group() for label in labels if re.search(r"\d+", label)]
    if len(rows) == 1 or len(numbers) < len(rows):
        return labels[0]
    stem, rest = re.split(r"\d+", labels[0], maxsplit=1)
    return f"{stem}{'/'.join(numbers)}{rest}"


def draw(axes, metric, name, write_tick, found, wide):
    colours = plt.get_cmap("tab10")
    for i, members in enumerate(found.values()):
        drawn = [row for row in members if row[metric]]
        axes.plot([row["bits_payload"] for row in drawn], [row[metric] for row in drawn], color=colours(i % 10),
                  marker=MARKERS[i % len(MARKERS)], markersize=8, linewidth=1.2, alpha=0.9, label=family_name(members))
    below = [f"{row['format']}, {row['bits_payload']:.0f} bits: {row[metric]:.2g}" for row in wide if row[metric] is not None]
    axes.text(0.02, 0.03, "\n".join(below), transform=axes.transAxes, fontsize=9, color="0.25",
              bbox=dict(facecolor="white", edgecolor="0.8", boxstyle="round,pad=0.4") if below else None)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(write_tick))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda y, at: write_tick(y, at) if f"{y:e}"[0] in "235" else ""))
    axes.tick_params(axis="y", which="minor", labelsize=8, labelcolor="0.35")
    axes.set_xlabel("bits payload per element (codes, scales, outliers)")
    axes.set_title(name, fontsize=11)
    axes.grid(which="major", color="0.85")
    axes.grid(which="minor", axis="y", color="0.93")
    axes.set_axisbelow(True)


def what(rows):
    settings, overlap = rows[0], any(row["fit_overlap"] for row in rows)
    layers = str(settings["layers"]).split()
    layers = f"layers {' '.join(layers)}" if len(layers) <= 8 else f"{len(layers)} layers"
    return (f"Attention damage: {settings['model_name']}, {layers}, {settings['n_tokens']:,.0f} tokens of "
            f"{settings['text_name']}, {'some of them fitted on' if overlap else 'none of them fitted on'}")


def main(rows_path, out_path, title=None):
    rows = read(rows_path)
    found, wide = families(rows)
    figure, axes = plt.subplots(1, 2, figsize=(12.5, 5.6), layout="constrained")
    for ax, metric in zip(axes, METRICS):
        draw(ax, *metric, found, wide)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", title="format", frameon=False)
    figure.suptitle(title or what(rows))
    figure.savefig(out_path, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
