"""Write what lowkey eval measured as tables in Markdown.

    quality_table.py FOLDER

FOLDER has quality.csv, quality_full.csv, quality_texts.csv, quality_ablation.csv, as far as they were made (summaries), and
quality_windows.csv, quality_texts_windows.csv, quality_ablation_windows.csv (journals: scripts/quality.sh)."""
import os
import sys

import numpy as np

from quality_results import BITS_TOLERANCE, ours, ratio, read_journals, read_summary, sums

# The bars: KVQuant's recipe with 1 % outliers, the bits that ours may have (None: no more than it), the ratio to stay under.
BARS = (("kvquant-nuq2-1%", None, 1 / 10), ("kvquant-nuq3-1%", None, 1 / 8), ("kvquant-nuq4-1%", None, 1 / 4),
        ("kvquant-nuq2-1%", 2.0, 1 / 3), ("kvquant-nuq3-1%", 2.25, 1), ("kvquant-nuq4-1%", 3.0, 1))


def table(header, lines):
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)) + "\n"


def number(x, digits=4):
    return "" if x is None else f"{round(x, digits) + 0.0:.{digits}f}"  # + 0.0: no -0.0000


def with_interval(row, figure, digits=4):
    low, high = row[figure + "_low"], row[figure + "_high"]
    return number(row[figure], digits) + ("" if low is None else f" [{number(low, digits)}, {number(high, digits)}]")


def format_ratio(found):
    point, low, high = found
    return f"{point:.3f}" + ("" if np.isnan(low) else f" [{low:.3f}, {high:.3f}]")


def ratios(journal, row, other):
    """loss and KL of row over those of other"""
    if row["windows"] != other["windows"]:
        raise SystemExit(f"{row['label']} and {other['label']} were measured on other windows")
    above, below = sums(journal, row), sums(journal, other)
    return {figure: ratio(above[figure], below[figure]) for figure in ("loss", "kl")}


def setting(rows, journal):
    """what was measured: model, text, windows; and which builds made the rows"""
    row, n_tokens = rows[0], int(rows[0]["n_windows"] * (rows[0]["window"] - 1))
    commits = sorted({line["commit"] for r in rows for key, lines in journal.items()
                      if key == (r["model_sha256"], r["text_sha256"], int(r["window"]), r["label"]) for line in lines.values()})
    return (f"{row['model']}, {row['text']}, {int(row['n_windows'])} window{'s' * (row['n_windows'] > 1)} of {int(row['window']):,} tokens "
            f"({n_tokens:,} predicted); rows made at commit {', '.join(commits)}.\n")


def formats(rows):
    """every format, by bits"""
    def cells(row):
        kind = "*simulated*" if row["simulated"] else ""
        if row["fit_overlap"]:
            kind += " **fitted on some of these windows**"
        return [f"`{row['label']}`", kind, number(row["bits_payload"], 2), f"{number(row['bits_key'], 2)} / {number(row['bits_value'], 2)}",
                number(row["bits_held"], 2), with_interval(row, "perplexity", 2), with_interval(row, "loss"), with_interval(row, "kl"),
                f"{100 * row['top1']:.1f} %"]
    return table(["format", "", "bits", "K / V", "held", "perplexity", "loss, nats", "KL, nats", "top-1"],
                 [cells(row) for row in sorted(rows, key=lambda row: (-row["bits_payload"], row["loss"]))])


def met(found, bar):
    good = [figure for figure in ("loss", "kl") if found[figure][0] <= bar]
    return {0: "no", 1: f"{'loss' if good == ['loss'] else 'KL'} only", 2: "yes"}[len(good)]


def bars(rows, journal):
    """ours against KVQuant's recipe"""
    lines, of = [], {row["label"]: row for row in rows}
    for name, most, bar in BARS:
        peer = of.get(name)
        mine = peer and ours(rows, most or peer["bits_payload"])
        if mine:
            found = ratios(journal, mine, peer)
            lines.append([f"`{mine['label']}`", number(mine["bits_payload"], 2), f"`{name}`", number(peer["bits_payload"], 2),
                          format_ratio(found["loss"]), format_ratio(found["kl"]), f"{bar:.3g}", met(found, bar)])
    return table(["ours", "bits", "against", "bits", "ratio of losses", "ratio of KL", "bar", "met"], lines)


def not_beaten(rows):
    """the other formats of 2 to 5 bits that ours of no more bits is not below"""
    others = [row for row in rows if not row["label"].startswith("ours-") and 2 - BITS_TOLERANCE <= row["bits_payload"] <= 5 + BITS_TOLERANCE]
    left = []
    for row in sorted(others, key=lambda row: row["bits_payload"]):
        mine = ours(rows, row["bits_payload"])
        worse = [figure for figure in ("loss", "kl") if not mine or mine[figure] >= row[figure]]
        if worse:
            left.append(f"`{row['label']}` ({' and '.join(figure.replace('kl', 'KL') for figure in worse) if mine else 'none of ours is as small'})")
    return f"Of {len(others)} other formats of 2 to 5 bits, these have no more loss or KL than ours at no more bits: {', '.join(left) or 'none'}.\n"


def domain(row):
    """the text that a format was calibrated on, NAME@TEXT; WikiText-2 valid where it is not said"""
    return row["label"].partition("@")[2]


def texts(rows, journal):
    """every format on every text, a table a model; then ours against KVQuant's recipe on each"""
    places, found = {}, {}
    for row in rows:
        places.setdefault((row["model"], row["text"]), row)
        found.setdefault((row["model"], row["text"], row["label"]), row)
    out = ""
    for model in dict.fromkeys(model for model, _ in places):
        here = [text for m, text in places if m == model]
        labels = dict.fromkeys(row["label"] for row in rows if row["model"] == model)
        bits = {label: next(row["bits_payload"] for row in rows if row["model"] == model and row["label"] == label) for label in labels}
        of = lambda label, text: found.get((model, text, label))
        cell = lambda row: "" if row is None else f"{row['loss']:.4f} / {row['kl']:.4f}"
        reference = [f"{of('f32', text)['perplexity']:.2f}" for text in here]
        out += f"{model}: loss / KL, nats; f32: perplexity.\n\n"
        out += table(["format", "bits", *(f"{text}, {int(places[model, text]['n_windows'])} windows" for text in here)],
                     [["`f32`", "32", *reference]] + [[f"`{label}`", number(bits[label], 2), *(cell(of(label, text)) for text in here)]
                                                      for label in sorted(labels, key=bits.get) if label != "f32"]) + "\n"
    lines = []
    for model, text in places:
        here = [row for (m, t, _), row in found.items() if (m, t) == (model, text)]
        for ending in dict.fromkeys(domain(row) for row in here if row["label"].startswith("ours-")):
            at = "@" + ending if ending else ""
            for name, most, bar in BARS:
                peer = found.get((model, text, name + at))
                mine = peer and most is None and ours(here, peer["bits_payload"], at)
                if mine:
                    both = ratios(journal, mine, peer)
                    lines.append([model, text, ending or "wiki.valid", f"`{mine['label']}`", f"`{peer['label']}`", format_ratio(both["loss"]),
                                  format_ratio(both["kl"]), f"{bar:.3g}", met(both, bar)])
    return out + table(["model", "text", "calibrated on", "ours", "against", "ratio of losses", "ratio of KL", "bar", "met"], lines)


def ablation(rows, journal):
    """the whole recipe, `ours`, then what a change of it does"""
    whole = next(row for row in rows if row["label"] == "ours")
    lines = []
    for row in rows:
        if row["label"] == "f32":
            continue
        found = ratios(journal, row, whole)
        lines.append([f"`{row['label']}`", number(row["bits_payload"], 2), with_interval(row, "loss"), with_interval(row, "kl"),
                      *("" if row is whole else format_ratio(found[figure]) for figure in ("loss", "kl"))])
    return table(["recipe", "bits", "loss, nats", "KL, nats", "loss over the whole's", "KL over the whole's"], lines)


def main(folder):
    path = lambda name: os.path.join(folder, name)
    there = lambda name: os.path.exists(path(name))
    journal = read_journals(*(path(f"quality{part}_windows.csv") for part in ("", "_texts")))
    print("# Quality\n\nWritten by `experiments/quality_table.py` from the CSV files beside it; README.md says how they were made. Loss: added nats\n"
          "per token against keys and values in f32. KL: of f32 from the format. In brackets 95 % by bootstrap over windows; ratios pair by pair.")
    for name, title in (("quality.csv", "Every format"), ("quality_full.csv", "All windows")):
        if there(name):
            rows = read_summary(path(name))
            print(f"\n## {title}\n\n{setting(rows, journal)}\n{bars(rows, journal)}\n{not_beaten(rows)}\n{formats(rows)}", end="")
    if there("quality_texts.csv"):
        main_rows = [row for row in read_summary(path("quality.csv")) if not row["simulated"]] if there("quality.csv") else []
        print(f"\n## Other texts, other calibration, another model\n\n{texts(main_rows + read_summary(path('quality_texts.csv')), journal)}", end="")
    if there("quality_ablation.csv"):
        rows, journal = read_summary(path("quality_ablation.csv")), read_journals(path("quality_ablation_windows.csv"))
        print(f"\n## Parts of the recipe\n\n{setting(rows, journal)}\n{ablation(rows, journal)}", end="")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
