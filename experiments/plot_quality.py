"""Plot what lowkey eval measured: added loss, and KL, against bits per element.

    plot_quality.py SUMMARY.csv OUT [TITLE]     writes OUT.png, OUT.svg (loss), OUT_kl.png, OUT_kl.svg

SUMMARY is of lowkey eval --summary. One line a family of formats, bars of 95 %. Filled: packed, attended over as it is stored.
Hollow and dashed: simulated. 16-bit formats are left out, as they lose nothing that could be seen; a format whose loss is not
above zero is a line in the corner, since a log scale has no room for it."""
import re
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from quality_results import read_summary

METRICS = (("loss", "", "added loss, nats per token"), ("kl", "_kl", "KL from 16-bit predictions, nats per token"))
MOST_BITS = 12
TICKS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)
# Labels and the family's name in the legend: the first that fits. Others are a family of their own.
FAMILIES = ((r"ours-.*", "ours"), (r"kvquant-nuq\d-1%-qnorm", "KVQuant, 1 % outliers, Q-Norm"), (r"kvquant-nuq\d-1%", "KVQuant, 1 % outliers"),
            (r"kvquant-nuq\d", "KVQuant"), (r"fp8-e4m3.*", "FP8 E4M3"),
            (r"fp8-e5m2.*", "FP8 E5M2"), (r"nvfp4.*", "NVFP4"), (r"q[48]_0", "llama.cpp"), (r"int-\d", "int per token"),
            (r"nf-\d", "NormalFloat"), (r"cq-.*", "CQ"), (r"kivi-.*", "KIVI"), (r"watersic-.*", "WaterSIC (entropy coded)"),
            (r"turboquant-\d", "TurboQuant"), (r"turboquant-prod-\d", "TurboQuant, products"), (r"kitty-.*", "Kitty"), (r"squat-.*", "SQuat"),
            (r"ratequant-.*", "RateQuant"), (r"block-gtq-.*", "Block-GTQ"), (r"oscar-.*", "OSCAR"))
MARKERS = "osD^vP*Xhp<>d8"


def family(label):
    if window := re.fullmatch(r"(.*)-w(\d+)", label):
        return f"{family(window[1])}, recent {window[2]} in 16 bits"
    return next((name for pattern, name in FAMILIES if re.fullmatch(pattern, label)), label)


def families(rows):
    """{name: rows by bits}: ours first, then KVQuant's, then in the order of the rows"""
    found = {}
    for row in rows:
        if row["bits_payload"] <= MOST_BITS:
            found.setdefault(family(row["label"]), []).append(row)
    rank = lambda name: 0 if name == "ours" else 1 if name.startswith("KVQuant") else 2
    return {name: sorted(found[name], key=lambda row: row["bits_payload"]) for name in sorted(found, key=rank)}


def style(i, name, rows):
    if name == "ours":
        return dict(color="black", marker="o", markersize=8, linewidth=2.6, zorder=5)
    if name.startswith("KVQuant"):
        return dict(color="crimson", marker="sD^"[i % 3], markersize=7, linewidth=1.8, zorder=4, linestyle=("-", "--", ":")[i % 3])
    return dict(color=plt.get_cmap("tab20")(i % 20), marker=MARKERS[i % len(MARKERS)], markersize=6, linewidth=1,
                **(dict(linestyle="--", markerfacecolor="white") if rows[0]["simulated"] else {}))


def error_bars(metric, rows):
    """how far the intervals reach below and above; one that reaches zero is cut at a tenth of the value"""
    if any(row[metric + "_low"] is None for row in rows):
        return None
    return [[row[metric] - max(row[metric + "_low"], row[metric] / 10) for row in rows], [row[metric + "_high"] - row[metric] for row in rows]]


def draw(axes, metric, found):
    left_out = []
    for i, (name, members) in enumerate(found.items()):
        drawn = [row for row in members if row[metric] > 0]
        left_out += [f"{row['label']}, {row['bits_payload']:.1f} bits: {row[metric]:.1e}" for row in members if row[metric] <= 0]
        if not drawn:
            continue
        axes.errorbar([row["bits_payload"] for row in drawn], [row[metric] for row in drawn], yerr=error_bars(metric, drawn), capsize=2.5,
                      elinewidth=1, label=name + (", simulated" if drawn[0]["simulated"] else ""), **style(i, name, drawn))
    if left_out:
        axes.text(0.02, 0.03, "not above zero:\n" + "\n".join(left_out), transform=axes.transAxes, fontsize=9, color="0.25")


def plot(metric, name, found, title, out):
    figure, axes = plt.subplots(figsize=(12, 7.5), layout="constrained")
    draw(axes, metric, found)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.10g}"))
    axes.set_xlabel("bits payload per element (codes, scales, outliers), log scale")
    axes.set_ylabel(name + ", log scale")
    axes.grid(which="major", color="0.85")
    axes.grid(which="minor", axis="y", color="0.94")
    axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=11)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    for ending in (".png", ".svg"):
        figure.savefig(out + ending, dpi=110, metadata={"Date": None} if ending == ".svg" else None)
    plt.close(figure)


def main(path, out, title=None):
    rows = read_summary(path)
    first = rows[0]
    title = title or (f"{first['model']}, {first['text']}, {first['n_windows']:.0f} x {first['window']:,.0f} tokens; everything quantized but "
                      "sinks and a format's recent window; bars: 95 %")
    plt.rcParams.update({"svg.hashsalt": "lowkey", "svg.fonttype": "none"})  # the same rows, the same bytes; text stays text
    for metric, ending, name in METRICS:
        plot(metric, name, families(rows), title, out + ending)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
