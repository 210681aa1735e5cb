"""lowkey eval: the perplexities that other implementations find on the real model; formats, journals, runs that are stopped and
go on, and bad input."""
import csv
import json
import os
import signal
import subprocess
import tempfile
import time

import h5py
import numpy as np

import tap
from decoder_oracle import Model, forward, nll

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOWKEY = f"{ROOT}/{os.environ.get('B', 'build/opt')}/lowkey"
MODEL, TOKENS = f"{ROOT}/build/model/smollm2-135m.model.h5", f"{ROOT}/build/model/wiki.valid.tokens.h5"
TEST_TOKENS = f"{ROOT}/build/model/wiki.test.tokens.h5"  # for the known perplexity alone: formats are chosen on valid
SMALL = ("--window", "64", "--windows", "3")


def command(*options, model=MODEL, tokens=TOKENS):
    return [LOWKEY, "eval", "--model", model, "--tokens", tokens, *options]


def evaluate(*options, model=MODEL, tokens=TOKENS, **environment):
    return subprocess.run(command(*options, model=model, tokens=tokens), capture_output=True, text=True,
                          env={**os.environ, **environment})


def good(*options, **how):
    done = evaluate(*options, **how)
    assert done.returncode == 0, done.stderr
    return done


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def results_of(path):
    """what a journal's rows say, times left out"""
    return sorted((row["label"], row["window_index"], *(row[k] for k in ("nll", "kl", "top1", "n_predicted", "bits_key")))
                  for row in rows_of(path))


def test_known_perplexity():
    """the perplexity of the first window of 2,048 tokens of the test text is what an f64 forward pass finds, and f16's is near"""
    full = os.environ.get("FULL") == "1"
    found = json.loads(good("--windows", "4" if full else "1", "--json", "f16", tokens=TEST_TOKENS).stdout)
    reference, f16 = found["formats"]
    nlls = [window["nll"] for window in reference["per_window"]]
    running = np.exp(np.cumsum(nlls) / np.arange(1, len(nlls) + 1))
    print(f"# perplexity {running[0]:.4f}, f16 loses {f16['loss']:.2e} nats, KL {f16['kl']:.2e}")
    for got, want in zip(running, (15.1024, 18.9777, 22.8990, 24.3397)):
        assert abs(got - want) <= 1e-3, running
    assert abs(f16["loss"]) <= 1e-3 and 0 < f16["kl"] <= 1e-5 and f16["top1"] > 0.998, f16
    with h5py.File(MODEL) as model, h5py.File(TEST_TOKENS) as tokens:
        want = dict(model_sha256=model.attrs["model_sha256"], text_sha256=tokens.attrs["text_sha256"],
                    window=2048, n_predicted=len(nlls) * 2047)
    assert {k: found[k] for k in want} == want
    assert abs(reference["perplexity"] - running[-1]) < 1e-6 and reference["loss"] == reference["kl"] == 0


def test_f64():
    """perplexity over windows of 192 tokens is that of a forward pass in f64, to six digits"""
    found = json.loads(good("--window", "192", "--windows", "2", "--json").stdout)["formats"][0]
    model = Model(MODEL)
    with h5py.File(TOKENS) as file:
        windows = file["tokens"][:384].reshape(2, 192)
    want = [nll(model, forward(model, ids)[0], ids) / 191 for ids in windows]
    assert np.allclose([w["nll"] for w in found["per_window"]], want, rtol=0, atol=2e-6), (found, want)
    assert abs(found["perplexity"] - np.exp(np.mean(want))) < 1e-4


def test_blas_kernels():
    """whichever kernels OpenBLAS is told to take, or takes by itself, the perplexity is the same to six digits"""
    found = []
    for environment in ({}, dict(OPENBLAS_CORETYPE="Prescott"), dict(OPENBLAS_CORETYPE="Haswell")):
        done = good("--window", "100", "--windows", "1", "--json", **environment)
        found.append(json.loads(done.stdout)["formats"][0]["perplexity"])
    assert np.allclose(found, found[0], rtol=1e-6), found


def test_figures():
    """table, JSON and summary say the same, and are the means over the journal's rows"""
    with tempfile.TemporaryDirectory() as folder:
        journal, summary = f"{folder}/rows.csv", f"{folder}/summary.csv"
        options = (*SMALL, "--csv", journal, "--summary", summary, "f16", "mine=int-3")
        found = json.loads(good(*options, "--json").stdout)
        table = good(*options).stdout.splitlines()
        rows, summary = rows_of(journal), rows_of(summary)
    assert [row["label"] for row in summary] == ["f32", "f16", "mine"] == [line.split()[0] for line in table[2:]]
    assert len(rows) == 9 and {row["window_index"] for row in rows} == {"0", "1", "2"}
    total = {}
    for row in rows:
        assert row["window"] == "64" and row["n_predicted"] == "63" and row["text"] == "wiki.valid.raw"
        total.setdefault(row["label"], []).append([float(row[k]) for k in ("nll", "kl", "top1")])
    for row, of_json in zip(summary, found["formats"]):
        nll_sum, kl, top1 = np.sum(total[row["label"]], axis=0) / (3 * 63)
        loss = nll_sum - np.sum(total["f32"], axis=0)[0] / (3 * 63)
        for key, want in dict(perplexity=np.exp(nll_sum), loss=loss, kl=kl, top1=top1).items():
            assert abs(of_json[key] - want) < 1e-9 and abs(float(row[key]) - want) < 1e-9, (key, row, want)
            assert of_json[key + "_low"] <= want + 1e-12 and want <= of_json[key + "_high"] + 1e-12, (key, of_json)
        assert row["simulated"] == ("true" if row["label"] == "mine" else "false") and row["window"] == "64"
        assert row["windows"] == "0 1 2" and found["windows"] == [0, 1, 2]
    f16, int3 = found["formats"][1:]
    assert f16["bits_payload"] == 16 and f16["bits_held"] > 16 and int3["bits_held"] is None and int3["sinks"] == 1
    assert 3 < int3["bits_payload"] < 3.2 and int3["kl_low"] > f16["kl_high"]


def test_windows():
    """--first-window, --end-window, --windows and --spread take the windows they name"""
    for options, want in ((("--windows", "2"), [0, 1]), (("--first-window", "5", "--end-window", "8"), [5, 6, 7]),
                          (("--spread", "3", "--first-window", "10", "--end-window", "22"), [12, 16, 20]),
                          (("--spread", "2", "--end-window", "2"), [0, 1])):
        assert json.loads(good("--window", "16", *options, "--json").stdout)["windows"] == want, options


def test_resume():
    """a run that is interrupted or killed leaves whole rows, and the same command then makes the rest: the same rows"""
    formats = ("f16", "int-4", "bf16")
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = f"{folder}/whole.csv", f"{folder}/parts.csv"
        options = ("--window", "64", "--windows", "5", "--threads", "1")
        good(*options, "--csv", whole, *formats)
        for how in (signal.SIGINT, signal.SIGKILL):
            before = len(rows_of(parts)) if os.path.exists(parts) else 0
            run = subprocess.Popen(command(*options, "--csv", parts, *formats), stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
            while run.poll() is None and (not os.path.exists(parts) or len(rows_of(parts)) < before + 4):
                time.sleep(0.02)
            run.send_signal(how)
            out, err = run.communicate()
            assert run.returncode == (1 if how == signal.SIGINT else -signal.SIGKILL) and not out, (how, run.returncode, err)
            if how == signal.SIGINT:
                assert "interrupted; what was done is in" in err, err
            assert before < len(rows_of(parts)) < 20
        with open(parts, "a") as file:
            file.write("f16,f16,no,,")  # a torn line
        kept = len(rows_of(parts)) - 1
        done = good(*options, "--csv", parts, *formats)
        assert f"{kept} results are there already" in done.stderr, done.stderr
        assert results_of(parts) == results_of(whole)
        again = good(*options, "--csv", parts, *formats)
        assert again.stdout == done.stdout and results_of(parts) == results_of(whole)
        # Another format and more windows join the same file.
        good("--window", "64", "--windows", "6", "--csv", parts, "int-3", "f16")
        assert len(rows_of(parts)) == 20 + 1 + 1 + 6 and len(set(results_of(parts))) == 28


def test_other_settings():
    """rows of another model, text, length, format, or number of sinks are refused with both values, and stay as they were"""
    with tempfile.TemporaryDirectory() as folder:
        journal = f"{folder}/rows.csv"
        good(*SMALL, "--csv", journal, "a=int-4", "f16")
        with open(journal) as file:
            before = file.read()
        for words, options, how in (
                (("window is '64', of this run '65'",), ("--window", "65", "--windows", "1", "f16"), {}),
                (("text_sha256 is '", "', of this run '"), (*SMALL,), dict(tokens=TEST_TOKENS)),
                (("(a): format is 'int-4', of this run 'int-3'",), (*SMALL, "a=int-3"), {}),
                (("(a): sinks is '1', of this run '4'",), (*SMALL, "--sinks", "4", "a=int-4"), {})):
            done = evaluate("--csv", journal, *options, **how)
            assert done.returncode == 1 and all(w in done.stderr for w in words) and not done.stdout, (words, done)
            with open(journal) as file:
                assert file.read() == before
        for text, words in (("label,x\n", "is no journal of lowkey eval"), (before + "a,b\n", "expected 22 fields, found fewer"),
                            (before.replace(",2047,", ",").replace(",63,", ",sixty,", 1), "expected a number, found 'sixty'")):
            with open(journal, "w") as file:
                file.write(text)
            done = evaluate(*SMALL, "--csv", journal, "f16")
            assert done.returncode == 1 and words in done.stderr, (words, done.stderr)


def test_refusals():
    """wrong options exit with 2 and wrong input with 1, in a line"""
    for status, words, options, how in (
            (2, "--window takes", ["--window", "1"], {}), (2, "--windows takes", ["--windows", "0"], {}),
            (2, "--what", ["--what"], {}), (2, "exclude", ["--windows", "1", "--spread", "1"], {}),
            (2, "is the input", ["--csv", MODEL], {}), (2, "is the input", ["--csv", "/dev/null", "--summary", "/dev/null"], {}),
            (1, "has 130 windows of 2048 tokens, 131 wanted", ["--windows", "131"], {}),
            (1, "has 130 windows of 2048 tokens, 3:131 wanted", ["--first-window", "3", "--end-window", "131"], {}),
            (1, "has 0 windows", ["--window", "400000"], {}), (1, "'f16' names two formats", ["f16", "bf16", "f16"], {}),
            (1, "'f32' names two formats", ["f32=f16"], {}), (1, "No such file", ["x"], {}),
            (1, "expected tokens, found model", [], dict(tokens=MODEL)),
            (1, "No such file", [], dict(model="/none/model.h5"))):
        done = evaluate(*options, **how)
        assert done.returncode == status and words in done.stderr and not done.stdout, (words, done)
        assert len(done.stderr.splitlines()) <= 2, done.stderr


tap.run(globals())
