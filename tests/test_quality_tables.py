"""quality_table.py and plot_quality.py on made-up figures whose ratios are known."""
import csv
import os
import re
import subprocess
import sys
import tempfile

import numpy as np

import tap

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, f"{ROOT}/experiments")
import plot_quality
import quality_results
import quality_table
from matplotlib import pyplot

WINDOWS, N = [3, 8, 21, 40], 2047
F32 = np.array([7000.0, 7100.0, 6900.0, 7300.0])  # a window's summed loss
SHAPE = np.array([0.8, 1.0, 1.3, 0.9])  # of a window's damage beside the mean
# label: bits, added loss and KL in the mean of all tokens times 1,000, simulated
FORMATS = {"f16": (16, 0, 0.001, False), "kvquant-nuq2-1%": (2.52, 400, 500, False), "kvquant-nuq3-1%": (3.52, 80, 90, False),
           "kvquant-nuq4-1%": (4.51, 20, 24, False), "ours-2": (2.0001, 100, 200, False), "ours-2.5": (2.5, 30, 60, False),
           "ours-3": (3.0, 12, 20, False), "ours-3.5": (3.5, 8, 9, False), "ours-4.5": (4.5, 6, 4, False), "kivi-2-g32": (3, 500, 500, True),
           "watersic-2": (2.0, 90, 300, True), "q8_0": (8.5, -0.5, 0.5, True), "cq-8c8b": (1, 900, 900, True)}


def write(folder, part, formats, text="wiki.test.raw", append=False, damage=1.0, model="made-up"):
    """a summary and a journal, as lowkey eval writes them"""
    common = dict(model=model, model_sha256="aa" + model, text=text, text_sha256="bb" + text, window=N + 1)
    summary, journal = [], []
    for label, (bits, loss, kl, simulated) in {"f32": (32, 0, 0, False), **formats}.items():
        shape = SHAPE if label.startswith(("kvquant", "q8")) else SHAPE[::-1]
        loss_sums, kl_sums = (damage * x / 1000 * N * 4 * shape / shape.sum() for x in (loss, kl))
        figures = dict(loss=loss_sums.sum() / (4 * N), kl=kl_sums.sum() / (4 * N), perplexity=np.exp((F32 + loss_sums).sum() / (4 * N)), top1=0.9)
        row = dict(common, label=label, simulated=str(simulated).lower(), bits_key=bits - 0.1, bits_value=bits + 0.1, bits_payload=bits,
                   bits_held="" if simulated else bits + 0.1, fit_overlap=0, n_windows=4, windows=" ".join(map(str, WINDOWS)))
        for name, x in figures.items():
            row.update({name: x, name + "_low": x - 0.1 * abs(x), name + "_high": x + 0.2 * abs(x)})
        summary.append(row)
        journal += [dict(common, label=label, window_index=i, n_predicted=N, nll=F32[w] + loss_sums[w], kl=kl_sums[w], commit="abc1234")
                    for w, i in enumerate(WINDOWS)]
        journal.append(dict(journal[-1], window_index=77, nll=1, kl=99))  # of another run: not this summary's
    for name, rows in ((f"quality{part}.csv", summary), (f"quality{part}_windows.csv", journal)):
        with open(f"{folder}/{name}", "a" if append else "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if not append:
                writer.writeheader()
            writer.writerows(rows)


def tables(folder, rc=0):
    done = subprocess.run([sys.executable, f"{ROOT}/experiments/quality_table.py", folder], capture_output=True, text=True)
    assert done.returncode == rc, done.stderr
    return done.stdout if rc == 0 else done.stderr


def cells(text, first):
    """the row of a table whose first cells are these"""
    found = [line for line in text.splitlines() if line.startswith("| " + first)]
    assert len(found) == 1, (first, found)
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def test_ratio():
    """a ratio is of the sums; its interval is that of drawing windows, the same for both"""
    below = np.array([10.0, 1.0, 5.0, 2.0])
    assert np.allclose(quality_results.ratio(0.25 * below, below), 0.25)  # pair by pair there is nothing to be unsure of
    above = np.array([1.0, 0.2, 0.1, 0.9])
    point, low, high = quality_results.ratio(above, below)
    assert abs(point - 2.2 / 18) < 1e-12
    every = np.stack(np.meshgrid(*[range(4)] * 4), -1).reshape(-1, 4)  # all 256 draws, equally likely
    want = np.quantile(above[every].sum(1) / below[every].sum(1), [0.025, 0.975])
    assert np.allclose((low, high), want, rtol=0.06) and low < point < high, (low, high, want)
    assert np.isnan(quality_results.ratio(above, np.array([10.0, -9.0, 1.0, 2.0]))[1])
    assert np.isnan(quality_results.ratio(above[:1], below[:1])[1])


def test_bars():
    """ours against KVQuant's recipe: which row, the ratios, whether the bar is met"""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, "", FORMATS)
        text = tables(folder)
    want = [("ours-2.5", "kvquant-nuq2-1%", "0.075", "0.120", "0.1", "loss only"), ("ours-3.5", "kvquant-nuq3-1%", "0.100", "0.100", "0.125", "yes"),
            ("ours-4.5", "kvquant-nuq4-1%", "0.300", "0.167", "0.25", "KL only"), ("ours-2", "kvquant-nuq2-1%", "0.250", "0.400", "0.333", "loss only"),
            ("ours-2", "kvquant-nuq3-1%", "1.250", "2.222", "1", "no"), ("ours-3", "kvquant-nuq4-1%", "0.600", "0.833", "1", "yes")]
    bars = [line for line in text.splitlines() if re.match(r"\| `ours-[\d.]+` \| [\d.]+ \| `kvquant", line)]
    assert len(bars) == len(want)
    for line, (mine, peer, loss, kl, bar, verdict) in zip(bars, want):
        found = [cell.strip() for cell in line.strip("|").split("|")]
        assert (found[0], found[2], found[6], found[7]) == (f"`{mine}`", f"`{peer}`", bar, verdict), found
        for cell, point in ((found[4], loss), (found[5], kl)):
            low, high = map(float, re.fullmatch(re.escape(point) + r" \[([\d.]+), ([\d.]+)\]", cell).groups())
            assert low < float(point) < high
    assert "Of 5 other formats of 2 to 5 bits" in text and "at no more bits: `watersic-2` (loss).\n" in text


def test_every_format():
    """the table has every format once, by bits, with its intervals; rows of a fit on these windows are marked"""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, "", FORMATS)
        text = tables(folder)
        labels = re.findall(r"^\| `([^`]+)` \| (?:\*simulated\*)? \| ", text, re.M)
        assert sorted(labels) == sorted(["f32", *FORMATS])
        bits = [32, *(FORMATS[label][0] for label in labels[1:])]
        assert labels[0] == "f32" and bits == sorted(bits, reverse=True)
        assert "4 windows of 2,048 tokens (8,188 predicted); rows made at commit abc1234." in text
        row = cells(text, "`kvquant-nuq2-1%` |  |")
        assert row[2:5] == ["2.52", "2.42 / 2.62", "2.62"] and row[6:] == ["0.4000 [0.3600, 0.4800]", "0.5000 [0.4500, 0.6000]", "90.0 %"]
        assert cells(text, "`q8_0`")[6].startswith("-0.0005 [") and cells(text, "`f16`")[6] == "0.0000 [0.0000, 0.0000]"
        with open(f"{folder}/quality.csv") as file:
            lines = list(csv.DictReader(file))
        lines[3]["fit_overlap"] = 2
        with open(f"{folder}/quality.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, lines[0])
            writer.writeheader()
            writer.writerows(lines)
        assert tables(folder).count("**fitted on some of these windows**") == 1


def test_refusals():
    """a journal that is not the summary's, or has a window too few, is refused by name"""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, "", FORMATS)
        path = f"{folder}/quality_windows.csv"
        with open(path) as file:
            whole = file.readlines()
        at = next(i for i, line in enumerate(whole) if ",ours-2.5,8," in line)
        fields = whole[at].split(",")
        fields[-3] = str(float(fields[-3]) + 1)  # nll
        with open(path, "w") as file:
            file.writelines(whole[:at] + [",".join(fields)] + whole[at + 1:])
        assert re.search(r"ours-2.5 on wiki.test.raw: loss is 0.03 in the summary, 0.0301\d+ in the journal", tables(folder, rc=1))
        with open(path, "w") as file:
            file.writelines(whole[:at] + whole[at + 1:])
        assert "ours-2.5 on wiki.test.raw: the journal has no row of window 8" in tables(folder, rc=1)


def test_texts():
    """other texts: loss / KL of each format on each, and ratios between formats that were calibrated on the same"""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, "", FORMATS)
        write(folder, "_texts", FORMATS, text="code")
        mixed = {label + "@mixture": (bits, loss / (3 if label.startswith("ours") else 1), kl, simulated)
                 for label, (bits, loss, kl, simulated) in FORMATS.items() if label.startswith(("ours", "kvquant"))}
        write(folder, "_texts", mixed, text="code", append=True)
        write(folder, "_texts", FORMATS, text="prose", append=True, damage=3, model="second")
        text = tables(folder).split("## Other texts")[1]
    assert re.search(r"^\| format \| bits \| wiki.test.raw, 4 windows \| code, 4 windows \|$", text, re.M)
    assert re.search(r"^\| `ours-2.5` \| 2.50 \| 0.0300 / 0.0600 \| 0.0300 / 0.0600 \|$", text, re.M)
    assert re.search(r"^\| `ours-2.5@mixture` \| 2.50 \|  \| 0.0100 / 0.0600 \|$", text, re.M)
    assert re.search(r"^\| `ours-2.5` \| 2.50 \| 0.0900 / 0.1800 \|$", text, re.M)
    assert text.count("| made-up | code |") == 6 and text.count("| second | prose | wiki.valid |") == 3
    line = cells(text, "made-up | code | mixture | `ours-2.5@mixture`")
    assert line[4] == "`kvquant-nuq2-1%@mixture`" and line[5].startswith("0.025 [") and line[6].startswith("0.120 [")
    assert cells(text, "made-up | code | wiki.valid | `ours-2.5`")[5].startswith("0.075 [")
    assert cells(text, "second | prose | wiki.valid | `ours-2.5`")[5].startswith("0.075 [")


def test_ablation():
    """what a change of the recipe does is a ratio to the whole"""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, "_ablation", {"ours": (2.5, 30, 60, False), "no-refit": (2.5, 36, 63, False)}, text="wiki.valid.raw")
        text = tables(folder)
    assert cells(text, "`ours`")[-2:] == ["", ""]
    assert cells(text, "`no-refit`")[-2:] == ["1.200 [1.200, 1.200]", "1.050 [1.050, 1.050]"]


def test_plot():
    """every format that has bits to save is drawn once with its interval, in its family; one without a loss is named"""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, "", FORMATS)
        rows = quality_results.read_summary(f"{folder}/quality.csv")
        found = plot_quality.families(rows)
        assert list(found) == ["ours", "KVQuant, 1 % outliers", "KIVI", "WaterSIC (entropy coded)", "llama.cpp", "CQ"]
        assert [row["bits_payload"] for row in found["ours"]] == [2.0001, 2.5, 3.0, 3.5, 4.5]
        figure, axes = pyplot.subplots()
        plot_quality.draw(axes, "loss", found)
        drawn = {container.get_label(): container for container in axes.containers}
        assert list(drawn) == ["ours", "KVQuant, 1 % outliers", "KIVI, simulated", "WaterSIC (entropy coded), simulated", "CQ, simulated"]
        line, _, (bars,) = drawn["ours"].lines
        assert np.allclose(line.get_xydata(), [(FORMATS[k][0], FORMATS[k][1] / 1000) for k in FORMATS if k.startswith("ours")])
        assert np.allclose([s[:, 1] for s in bars.get_segments()], [(0.9 * y, 1.2 * y) for y in line.get_ydata()])
        assert [text.get_text() for text in axes.texts] == ["not above zero:\nq8_0, 8.5 bits: -5.0e-04"]
        plot_quality.main(f"{folder}/quality.csv", f"{folder}/plot")
        for name in ("plot", "plot_kl"):
            with open(f"{folder}/{name}.png", "rb") as file:
                assert file.read(8) == b"\x89PNG\r\n\x1a\n"
            with open(f"{folder}/{name}.svg") as file:
                svg = file.read()
            assert all(word in svg for word in ("KVQuant, 1 % outliers", "KIVI, simulated", "made-up, wiki.test.raw, 4 x 2,048 tokens")) and "f16" not in svg
            assert ("llama.cpp" in svg) == (name == "plot_kl")  # its loss is below zero, its KL is not


def test_families():
    """labels that lowkey eval knows fall into the families meant"""
    for label, name in {"kvquant-nuq2": "KVQuant", "kvquant-nuq2-1%-qnorm": "KVQuant, 1 % outliers, Q-Norm", "fp8-e4m3-head": "FP8 E4M3",
                        "kivi-2-g32-w128": "KIVI, recent 128 in 16 bits", "kitty-2-25-w128": "Kitty, recent 128 in 16 bits",
                        "turboquant-prod-3": "TurboQuant, products", "turboquant-3": "TurboQuant", "block-gtq-2": "Block-GTQ",
                        "oscar-2-w256": "OSCAR, recent 256 in 16 bits", "something": "something"}.items():
        assert plot_quality.family(label) == name, (label, plot_quality.family(label))


tap.run(globals())
