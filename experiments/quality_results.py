"""What lowkey eval --summary and --csv wrote, and ratios between formats over the same windows."""
import csv
import os
import re

import numpy as np

RESAMPLES = 2000
SEED = 20240131
FIGURES = "perplexity loss kl top1".split()
NUMBERS = ("bits_key bits_value bits_payload bits_held fit_overlap n_windows window".split() +
           [figure + end for figure in FIGURES for end in ("", "_low", "_high")])


def read_summary(path):
    """rows with their numbers as such; what was not measured is None"""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row.update({name: float(row[name]) if row[name] else None for name in NUMBERS})
        row["simulated"] = row["simulated"] in ("1", "true", "yes")
        row["windows"] = [int(i) for i in re.findall(r"\d+", row["windows"])]
    return rows


def read_journals(*paths):
    """{(model_sha256, text_sha256, window, label): {window_index: row}}; as in lowkey eval the first row counts"""
    found = {}
    for path in paths:
        if not os.path.exists(path):
            continue
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                key = row["model_sha256"], row["text_sha256"], int(row["window"]), row["label"]
                found.setdefault(key, {}).setdefault(int(row["window_index"]), row)
    return found


def sums(journal, row):
    """{loss, kl}: per window of a summary's row, summed over its tokens. What the summary says must come out of it."""
    key = row["model_sha256"], row["text_sha256"], int(row["window"])
    where = f"{row['label']} on {row['text']}"
    mine, reference = journal.get((*key, row["label"]), {}), journal.get((*key, "f32"), {})
    missing = [i for i in row["windows"] if i not in mine or i not in reference]
    if missing:
        raise SystemExit(f"{where}: the journal has no row of window {missing[0]}")
    column = lambda rows, name: np.array([float(rows[i][name]) for i in row["windows"]])
    found = dict(loss=column(mine, "nll") - column(reference, "nll"), kl=column(mine, "kl"))
    n_tokens = column(mine, "n_predicted").sum()
    for figure, values in found.items():
        if abs(values.sum() / n_tokens - row[figure]) > 1e-6 + 1e-6 * abs(row[figure]):
            raise SystemExit(f"{where}: {figure} is {row[figure]:.6g} in the summary, {values.sum() / n_tokens:.6g} in the journal")
    return found


def ratio(above, below):
    """(of the sums, low, high): 95 % by drawing windows anew, the same ones for both. Where a draw's denominator is not
    positive the ratio has no interval: NaN."""
    n = len(above)
    draws = np.random.default_rng(SEED).integers(0, n, (RESAMPLES, n))
    low = high = np.nan
    if n > 1 and (below[draws].sum(1) > 0).all():
        low, high = np.quantile(above[draws].sum(1) / below[draws].sum(1), [0.025, 0.975])
    return above.sum() / below.sum(), low, high


def ours(rows, most_bits, ending=""):
    """the row of ours with the most bits, but no more than that; ending: what it was calibrated on"""
    fitting = [row for row in rows if re.fullmatch(r"ours-[\d.]+" + re.escape(ending), row["label"])
               and row["bits_payload"] <= most_bits + BITS_TOLERANCE]
    return max(fitting, key=lambda row: row["bits_payload"], default=None)


BITS_TOLERANCE = 0.005  # one sink in 16 bits of 131,072 tokens is 0.0001
