"""scripts/quality.sh from captures to tables, on small random models in place of the real ones."""
import csv
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile

import h5py
import numpy as np

import tap
from tiny_llama import checkpoint, config, write_folder

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, f"{ROOT}/experiments")
import convert_model

LOWKEY = f"{ROOT}/{os.environ.get('B', 'build/opt')}/lowkey"
WORK = tempfile.mkdtemp()
MODELS, QUALITY, RESULTS = (f"{WORK}/{name}" for name in ("models", "quality", "results"))
SETTINGS = dict(LOWKEY=LOWKEY, MODELS=MODELS, QUALITY=QUALITY, RESULTS=RESULTS, LENGTH="40", TEXT_SAMPLES="4", MODEL_SAMPLES="6", PER_FILE="3",
                SPREAD="4", BUDGETS="2 2.5", KVQUANT="nuq2 nuq2-1%", PEERS="int-3 kivi-2-g32 watersic-2", VALID="--first-window 8 --spread 2",
                TEXTS="smollm2 wiki.test mixture --spread 4\nsmollm2 code.eval wiki --spread 2\ngemma3 code.eval mixture",
                TEXT_FITS="kvquant-nuq2-1% ours-2.5", TEXT_PEERS="kivi-2-g32", TEXT_CALIBRATED_PEERS="watersic-2", DIRTY="1")


def make_model(name):
    write_folder(f"{WORK}/{name}", checkpoint(layers=2, dim=16, kv_heads=2, q_heads=4, hidden=64), config(hidden_size=64, head_dim=16))
    convert_model.write_model(convert_model.read_folder(f"{WORK}/{name}"), f"{MODELS}/{name}.model.h5")


def make_text(name, n):
    ids = np.random.default_rng(len(name)).integers(0, 40, n)
    with h5py.File(f"{MODELS}/{name}.tokens.h5", "w") as file:
        file.attrs.update(dict(schema="tokens", created_by="test", tokenizer="tiny", tokenizer_sha256="0" * 64, vocab_size=40, text_name=name,
                               text_sha256=name.encode().hex().ljust(64, "0")[:64], add_bos=0, schema_version=[1, 0]))
        file["tokens"], file["sequence_offsets"] = ids.astype(np.int32), np.array([0, n])


def quality(what, rc=0, **settings):
    done = subprocess.run([f"{ROOT}/scripts/quality.sh", what], capture_output=True, text=True, env={**os.environ, **SETTINGS, **settings})
    assert done.returncode == rc, done.stdout + done.stderr
    return done


def labels(name):
    with open(f"{RESULTS}/{name}", newline="") as file:
        return [row["label"] for row in csv.DictReader(file)]


def test_main_table():
    """captures, fits, evaluation: every format of the list, in summary, journal, tables and plots; commands with what they took"""
    quality("short")
    want = ["f32", "f16", "bf16", "kvquant-nuq2", "kvquant-nuq2-1%", "kvquant-nuq2-1%-qnorm", "ours-2", "ours-2.5", "int-3", "kivi-2-g32", "watersic-2"]
    assert labels("quality.csv") == want and sorted(labels("quality_windows.csv")) == sorted(4 * want)
    with open(f"{RESULTS}/quality.md") as file:
        text = file.read()
    assert all(f"| `{label}` |" in text for label in want) and "| `ours-2.5` | 2.50 | `kvquant-nuq2-1%`" in text
    assert all(os.path.getsize(f"{RESULTS}/{name}") > 5000 for name in ("quality.png", "quality.svg", "quality_kl.png", "quality_kl.svg"))
    with open(f"{RESULTS}/quality_commands.csv", newline="") as file:
        commands = {row["name"]: row for row in csv.DictReader(file)}
    assert len(commands) == 8 and float(commands["fit smollm2 wiki ours-2.5"]["peak_mib"]) > 5
    assert "--grad=text --queries yes" in commands["capture smollm2 wiki text"]["command"]
    of_ours = commands["fit smollm2 wiki ours-2.5"]["command"]
    assert "model.activations.000.h5" in of_ours and "model.activations.001.h5" in of_ours and "text.activations" not in of_ours
    assert commands["fit smollm2 wiki kvquant-nuq2-1%-qnorm"]["command"].endswith("text.activations.001.h5")


def test_going_on():
    """a second run captures and fits nothing again; a quantizer that is gone is fitted again, to the same bytes"""
    path = f"{QUALITY}/smollm2.wiki/ours-2.quantizer.h5"
    with open(path, "rb") as file:
        before = file.read()
    kept = {name: os.stat(f"{QUALITY}/smollm2.wiki/{name}").st_mtime_ns for name in os.listdir(f"{QUALITY}/smollm2.wiki")}
    os.remove(path)
    done = quality("short")
    assert "44 results are there already" in done.stderr and done.stderr.count(" fit ") == 1 and " capture " not in done.stderr
    with open(path, "rb") as file:
        assert file.read() == before
    assert {name for name, at in kept.items() if os.stat(f"{QUALITY}/smollm2.wiki/{name}").st_mtime_ns != at} == {"ours-2.quantizer.h5", "ours-2.fit.txt"}


def test_another_machine():
    """where only the results are there, rows that come from no file are taken from them, and all else is made again"""
    done = quality("short", QUALITY=f"{WORK}/anew")
    assert "24 results are there already" in done.stderr  # f32, f16, bf16, three peers
    assert done.stderr.count(" fit ") == 5


def test_full():
    """all windows go on from the main table's journal; captures that quantizers were fitted on may be gone"""
    for name in os.listdir(f"{QUALITY}/smollm2.wiki"):
        if name.startswith("model.activations"):
            os.remove(f"{QUALITY}/smollm2.wiki/{name}")
    done = quality("full")
    assert " capture " not in done.stderr and " fit " not in done.stderr
    assert "28 results are there already" in done.stderr  # f32, f16, five quantizers
    assert labels("quality_full.csv") == ["f32", "f16", "kvquant-nuq2", "kvquant-nuq2-1%", "kvquant-nuq2-1%-qnorm", "ours-2", "ours-2.5"]
    assert labels("quality_windows.csv").count("ours-2") == 10 and "## All windows" in open(f"{RESULTS}/quality.md").read()


def test_texts():
    """other texts, other calibration, the second model; mixtures in shares of three"""
    quality("texts")
    mixed = ["kvquant-nuq2-1%@mixture", "ours-2.5@mixture", "watersic-2@mixture"]
    assert labels("quality_texts.csv") == ["f32", *mixed, "f32", "f16", "kivi-2-g32", "kvquant-nuq2-1%", "ours-2.5", "watersic-2", "f32", *mixed]
    assert set(mixed) <= set(labels("quality_windows.csv"))  # the main text's rows stay in one journal
    assert set(labels("quality_texts_windows.csv")) == {"f32", "f16", "kivi-2-g32", "kvquant-nuq2-1%", "ours-2.5", "watersic-2", *mixed}
    samples = {}
    for model in ("smollm2", "gemma3"):
        for name in sorted(name for name in os.listdir(f"{QUALITY}/{model}.mixture") if name.startswith("text.activations")):
            with h5py.File(f"{QUALITY}/{model}.mixture/{name}") as file:
                samples.setdefault(model, []).extend(np.diff(file["sample_offsets"]))
    assert samples == {"smollm2": [40] * 3, "gemma3": [20] * 6}  # of four, and of eight that are half as long
    text = open(f"{RESULTS}/quality.md").read()
    assert text.count("| `ours-2.5@mixture` | `kvquant-nuq2-1%@mixture` |") == 2 and "| code.eval | wiki.valid | `ours-2.5` |" in text


def test_ablation():
    """each part removed is a row; on valid windows behind those that are fitted on"""
    quality("ablation")
    found = labels("quality_ablation.csv")
    assert found[:5] == ["f32", "ours", "value-feedback", "no-feedback", "no-refit"]
    assert {"no-trellis", "flat", "flat-plain", "flat-outliers", "gain", "widths-2:4", "no-gradients", "16-samples", "text-labels"} <= set(found)
    with open(f"{RESULTS}/quality_ablation.csv", newline="") as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    assert rows["ours"]["text"] == "wiki.valid" and all(row["fit_overlap"] == "0" for row in rows.values())
    assert len({rows[name]["file_sha256"] for name in ("ours", "flat", "flat-outliers", "no-feedback", "no-gradients", "16-samples", "text-labels")}) == 7
    assert float(rows["flat-outliers"]["bits_payload"]) > float(rows["flat-plain"]["bits_payload"]) + 0.1
    assert "## Parts of the recipe" in open(f"{RESULTS}/quality.md").read()


def test_tuning():
    """where the list says so, tables are tuned after the fit, and the ablation has them as they were before"""
    quality("ablation", TUNED="then --steps 2 --length 20 --end-window 12 --validation 12:14", QUALITY=f"{WORK}/tuned", RESULTS=f"{WORK}/tuned")
    with open(f"{WORK}/tuned/quality_ablation.csv", newline="") as file:
        found = {row["label"]: row["file_sha256"] for row in csv.DictReader(file)}
    assert "untuned" in found
    folder = f"{WORK}/tuned/smollm2.wiki/ablation-2.5"
    with open(f"{folder}/ours.untuned.h5", "rb") as file:
        assert hashlib.sha256(file.read()).hexdigest() == found["untuned"]
    with open(f"{WORK}/tuned/quality_commands.csv", newline="") as file:
        commands = {row["name"]: row["command"] for row in csv.DictReader(file)}
    assert f"--steps 2 --length 20 --end-window 12 --validation 12:14 --quantizer {folder}/ours.untuned.h5" in commands["tune smollm2 wiki ours"]
    assert "wiki.valid.tokens.h5" in commands["tune smollm2 wiki ours"] and "tune smollm2 wiki untuned" not in commands


def test_refusals():
    """a build of uncommitted changes is refused in a line; a failed step fails the run; wrong words are refused"""
    fake = f"{WORK}/fake"
    with open(fake, "w") as file:
        file.write('#!/bin/sh\n[ "$1" = --version ] && echo lowkey 0.1 abc1234-dirty || exit 3\n')
    os.chmod(fake, 0o755)
    done = quality("short", rc=1, LOWKEY=fake, DIRTY="0", QUALITY=f"{WORK}/other")
    assert done.stderr.count("\n") == 1 and "'abc1234-dirty'" in done.stderr and not os.path.exists(f"{WORK}/other")
    quality("short", rc=3, LOWKEY=fake, QUALITY=f"{WORK}/other")
    assert not os.path.exists(f"{WORK}/other/commands.csv")
    assert "captures, fit, short" in quality("everything", rc=1).stderr


os.makedirs(MODELS)
make_model("smollm2-135m")
make_model("gemma3-270m")  # its name alone counts here
for name, n in (("wiki.valid", 500), ("wiki.test", 400), ("mixture.fit", 400), ("code.eval", 200), ("gemma3.mixture.fit", 400), ("gemma3.code.eval", 100)):
    make_text(name, n)
try:
    tap.run(globals())
finally:
    shutil.rmtree(WORK)
