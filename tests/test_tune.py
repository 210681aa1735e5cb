"""lowkey tune as a user has it: on a small model, what is printed, logged and written; interruption and going on; refusals; and
that what eval makes of the written file is what the command said."""
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import h5py
import numpy as np

import reader
import tap
from tiny_llama import checkpoint, config, write_folder

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, f"{ROOT}/experiments")
import convert_model  # noqa: E402

LOWKEY = f"{ROOT}/{os.environ.get('B', 'build/opt')}/lowkey"
WORK = tempfile.mkdtemp()
LENGTH = 64


def lowkey(*arguments):
    return subprocess.run([LOWKEY, *arguments], capture_output=True, text=True)


def good(*arguments):
    done = lowkey(*arguments)
    assert done.returncode == 0, (arguments, done.stderr)
    return done


def model(name, seed_layers=2):
    tensors = checkpoint(layers=seed_layers)
    write_folder(f"{WORK}/{name}", {k: v / 4 if "proj" in k else v for k, v in tensors.items()},
                 config(num_hidden_layers=seed_layers, tie_word_embeddings=True))
    convert_model.write_model(convert_model.read_folder(f"{WORK}/{name}"), f"{WORK}/{name}.h5")
    return f"{WORK}/{name}.h5"


def tokens(name, seed, n=40 * LENGTH):
    ids = np.random.default_rng(seed).integers(0, 40, n)
    with h5py.File(f"{WORK}/{name}.h5", "w") as file:
        file.attrs.update(dict(schema="tokens", created_by="test", tokenizer="tiny", tokenizer_sha256="0" * 64,
                               vocab_size=40, text_name=name, text_sha256=f"{seed:02x}" * 32, add_bos=0,
                               schema_version=[1, 0]))
        file["tokens"], file["sequence_offsets"] = ids.astype(np.int32), np.array([0, n])
    return f"{WORK}/{name}.h5"


MODEL, TEXT = model("tiny"), tokens("numbers", 3)
CAPTURE, QUANTIZER = f"{WORK}/capture.h5", f"{WORK}/fitted.h5"
good("capture", "--model", MODEL, "--tokens", TEXT, "--length", "256", "--samples", "4", "--grad", "--out", CAPTURE)
good("fit", "--bits", "2", "--sensitivity", "fisher", "--sinks", "1", "--out", QUANTIZER, CAPTURE)
SMALL = ("--length", str(LENGTH), "--first-window", "16", "--validation", "30:36", "--steps", "12", "--validate", "4",
         "--rate", "0.05")


def command(*options, out=f"{WORK}/out.h5", **how):
    how = {"model": MODEL, "tokens": TEXT, "quantizer": QUANTIZER, **how}
    return ["tune", *(word for k, v in how.items() for word in (f"--{k}", v)), "--out", out, *options]


def read(path):
    with open(path, "rb") as file:
        return file.read()


def test_figures():
    """what is printed and logged is what eval measures of the file that is written, and widths and factors are the old ones"""
    done = good(*command(*SMALL, "--log", f"{WORK}/log.csv"))
    printed = [(int(a), float(b)) for a, b in re.findall(r"after (\d+) steps: KL (\S+)", done.stdout)]
    with open(f"{WORK}/log.csv", newline="") as file:
        log = list(csv.DictReader(file))
    assert [step for step, _ in printed] == [0, 4, 8, 12] and [int(row["step"]) for row in log] == list(range(13))
    assert all(abs(float(log[step]["validation_kl"]) - kl) < 1e-6 for step, kl in printed)
    windows = [int(row["window"]) for row in log[:-1]]
    assert len(set(windows)) == 12 and all(16 <= w < 30 for w in windows) and all(float(row["kl"]) > 0 for row in log[:-1])
    found = json.loads(good("eval", "--model", MODEL, "--tokens", TEXT, "--window", str(LENGTH), "--first-window", "30",
                            "--end-window", "36", "--json", f"old={QUANTIZER}", f"new={WORK}/out.h5").stdout)
    _, old, new = found["formats"]
    best = min(kl for _, kl in printed)
    assert abs(old["kl"] - printed[0][1]) < 2e-6 and abs(new["kl"] - best) < 2e-6 and best < printed[0][1], (printed, found)
    assert old["bits_payload"] == new["bits_payload"]
    with h5py.File(QUANTIZER) as old, h5py.File(f"{WORK}/out.h5") as new:
        for side in ("key", "value"):
            a, b = old[f"layers/001/{side}"], new[f"layers/001/{side}"]
            for name in ("bits", "order", "center", "exponent", "lower", "upper", *(["factor"] if "factor" in a else [])):
                assert np.array_equal(a[name], b[name]), name
            assert not np.array_equal(a["table"], b["table"])
            assert (b["report/histogram"][...].sum(-1) == 12 * (LENGTH - 1)).all()
        assert len(new["sample_sha256"]) == 4 + 12 and list(new.attrs["schema_version"]) == [1, 4]
        assert new["fit"].attrs["tuned_steps"] == min(printed, key=lambda row: row[1])[0]
    inspected = json.loads(good("inspect", "--json", f"{WORK}/out.h5").stdout)
    assert inspected["fit"]["tuned_steps"] > 0 and "tuned_steps" not in good("inspect", "--json", QUANTIZER).stdout
    assert reader.quantizer(f"{WORK}/out.h5").tuned_steps == inspected["fit"]["tuned_steps"]


def test_trellis():
    """a trellis-coded quantizer is tuned too, and every entry of its report is one of the rows' own"""
    coded, out = f"{WORK}/coded.h5", f"{WORK}/coded_out.h5"
    good("fit", "--bits", "2", "--sensitivity", "fisher", "--sinks", "1", "--trellis", "2", "--refit", "0", "--out", coded, CAPTURE)
    done = good(*command(*SMALL, out=out, quantizer=coded))
    first, *others = [float(kl) for kl in re.findall(r"KL (\S+) nats", done.stdout)]
    assert min(others) < first, done.stdout
    with h5py.File(out) as new, h5py.File(coded) as old:
        for side in ("key", "value"):
            a, b = old[f"layers/000/{side}"], new[f"layers/000/{side}"]
            assert b["table"].shape[-1] == 8 and "boundary" not in b and not np.array_equal(a["table"], b["table"])
            assert np.array_equal(a["metric_weight"], b["metric_weight"]) and b.attrs["trellis"] == 2
            assert (b["report/histogram"][...].sum(-1) == 12 * (LENGTH - 1)).all()


def test_fitted_on():
    """eval warns of windows that were tuned on, and not of those that were validated on"""
    done = good("eval", "--model", MODEL, "--tokens", TEXT, "--window", str(LENGTH), "--first-window", "16",
                "--end-window", "36", f"{WORK}/out.h5")
    assert "was fitted on 12 of the 20 windows" in done.stderr, done.stderr


def test_equal_bytes():
    """threads change no byte, and the seed does"""
    for name, options in (("a", ("--threads", "1")), ("b", ("--threads", "2")), ("c", ("--threads", "1", "--seed", "2"))):
        good(*command(*SMALL, *options, out=f"{WORK}/{name}.h5"))
    assert read(f"{WORK}/a.h5") == read(f"{WORK}/b.h5") != read(f"{WORK}/c.h5")


def test_interrupted():
    """a run that is interrupted or killed keeps its checkpoint, and the same command then writes the same bytes"""
    many = ("--length", "512", "--first-window", "0", "--validation", "4:5", "--steps", "60", "--validate", "7",
            "--threads", "1")
    good(*command(*many, "--log", f"{WORK}/whole.csv", out=f"{WORK}/whole.h5"))
    keep = ("--checkpoint", f"{WORK}/kept", "--log", f"{WORK}/parts.csv")
    for how in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        before = os.stat(f"{WORK}/kept").st_mtime_ns if os.path.exists(f"{WORK}/kept") else 0
        run = subprocess.Popen([LOWKEY, *command(*many, *keep, out=f"{WORK}/parts.h5")], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
        while run.poll() is None and (not os.path.exists(f"{WORK}/kept") or os.stat(f"{WORK}/kept").st_mtime_ns == before):
            time.sleep(0.005)
        run.send_signal(how)
        _, errors = run.communicate(timeout=60)
        if how == signal.SIGKILL:
            assert run.returncode == -how, (run.returncode, errors)
        else:
            assert run.returncode == 1 and re.search(r"interrupted; the \d+ steps made are in .*kept", errors), errors
        assert not os.path.exists(f"{WORK}/parts.h5")
    done = good(*command(*many, *keep, out=f"{WORK}/parts.h5"))
    assert "steps are made already" in done.stderr, done.stderr
    assert read(f"{WORK}/parts.h5") == read(f"{WORK}/whole.h5") and read(f"{WORK}/parts.csv") == read(f"{WORK}/whole.csv")
    again = good(*command(*many, *keep, out=f"{WORK}/parts.h5"))
    assert again.stdout == done.stdout and "60 steps are made already" in again.stderr, again
    assert not [name for name in os.listdir(WORK) if name.endswith(".tmp") and "kept" not in name]


def test_refusals():
    """wrong options exit with 2 and wrong input with 1, in a line, and nothing is written"""
    other, scaled = model("other", 3), f"{WORK}/scaled.h5"
    good("fit", "--bits", "2", "--sensitivity", "none", "--value-token-scale", "f16", "--out", scaled, CAPTURE)
    good("capture", "--model", other, "--tokens", TEXT, "--length", "256", "--samples", "1", "--out", f"{WORK}/o.h5")
    good("fit", "--bits", "2", "--sensitivity", "none", "--out", f"{WORK}/otherq.h5", f"{WORK}/o.h5")
    out = f"{WORK}/none.h5"
    for status, words, options, how in (
            (2, "are needed", (), {}), (2, "--steps takes", ("--steps", "0"), {}), (2, "--rate takes", ("--rate", "0"), {}),
            (2, "FIRST < END", ("--validation", "5:5"), {}), (2, "'x' is not expected", ("--validation", "30:36", "x"), {}),
            (2, "is the input", ("--validation", "30:36", "--log", QUANTIZER), {}),
            (2, "is the input", ("--validation", "30:36", "--checkpoint", MODEL), {}),
            (1, "overlap", (*SMALL, "--end-window", "31"), {}), (1, "the text has 40 of 64", (*SMALL, "--validation", "30:41"), {}),
            (1, "No such file", SMALL, dict(quantizer="/none.h5")), (1, "expected quantizer, found model", SMALL, dict(quantizer=MODEL)),
            (1, "expected tokens, found", SMALL, dict(tokens=QUANTIZER)),
            (1, "only static tables are tuned, and this has a scale for each token", SMALL, dict(quantizer=scaled)),
            (1, "otherq.h5", SMALL, dict(quantizer=f"{WORK}/otherq.h5"))):
        done = lowkey(*command(*options, out=out, **how))
        assert done.returncode == status and words in done.stderr and not done.stdout, (words, done)
        assert len(done.stderr.splitlines()) == 1 and not os.path.exists(out), done.stderr


try:
    tap.run(globals())
finally:
    shutil.rmtree(WORK)
