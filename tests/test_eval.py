"""lowkey eval: the perplexities that other implementations find on the real model, and bad input."""
import json
import os
import subprocess

import h5py
import numpy as np

import tap
from decoder_oracle import Model, forward, nll

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOWKEY = f"{ROOT}/{os.environ.get('B', 'build/opt')}/lowkey"
MODEL, TOKENS = f"{ROOT}/build/model/smollm2-135m.model.h5", f"{ROOT}/build/model/wiki.test.tokens.h5"


def evaluate(*options, model=MODEL, tokens=TOKENS, **environment):
    return subprocess.run([LOWKEY, "eval", "--model", model, "--tokens", tokens, *options],
                          capture_output=True, text=True, env={**os.environ, **environment})


def test_known_perplexities():
    """the running perplexity over four windows of 2,048 tokens is what an independent f32 implementation finds"""
    done = evaluate("--window", "2048", "--windows", "4", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for window, want in zip(found["windows"], (15.1021, 18.9774, 22.8986, 24.3393), strict=True):
        assert abs(window["running_perplexity"] - want) <= 1e-3, (window, want)
    with h5py.File(MODEL) as model, h5py.File(TOKENS) as tokens:
        want = dict(model_sha256=model.attrs["model_sha256"], text_sha256=tokens.attrs["text_sha256"],
                    window=2048, n_predicted=4 * 2047)
    assert {k: found[k] for k in want} == want and found["perplexity"] == found["windows"][3]["running_perplexity"]


def test_f64():
    """perplexity over windows of 192 tokens is that of a forward pass in f64, to six digits"""
    done = evaluate("--window", "192", "--windows", "2")
    assert done.returncode == 0, done.stderr
    model = Model(MODEL)
    with h5py.File(TOKENS) as file:
        windows = file["tokens"][:384].reshape(2, 192)
    losses = [nll(model, forward(model, ids)[0], ids) for ids in windows]
    want = [[np.exp(losses[0] / 191), np.exp(losses[0] / 191)],
            [np.exp(losses[1] / 191), np.exp(sum(losses) / 382)]]
    found = [[float(word) for word in line.split()[1:]] for line in done.stdout.splitlines()[1:]]
    assert np.allclose(found, want, rtol=2e-6, atol=1e-4), (found, want)


def test_blas_kernels():
    """whichever kernels OpenBLAS is told to take, or takes by itself, the perplexity is the same to six digits"""
    found = []
    for environment in ({}, dict(OPENBLAS_CORETYPE="Prescott"), dict(OPENBLAS_CORETYPE="Haswell")):
        done = evaluate("--window", "100", "--windows", "1", "--json", **environment)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["perplexity"])
    assert np.allclose(found, found[0], rtol=1e-6), found


def test_refusals():
    """wrong options exit with 2 and wrong input with 1, in a line"""
    for status, words, options, how in (
            (2, "--window takes", ["--window", "1"], {}), (2, "--windows takes", ["--windows", "0"], {}),
            (2, "'x' is not expected", ["x"], {}), (2, "--what", ["--what"], {}),
            (1, "has 148 windows of 2048 tokens, 149 wanted", ["--windows", "149"], {}),
            (1, "has 0 windows", ["--window", "400000"],
             {}), (1, "expected tokens, found model", [], dict(tokens=MODEL)),
            (1, "No such file", [], dict(model="/none/model.h5"))):
        done = evaluate(*options, **how)
        assert done.returncode == status and words in done.stderr and not done.stdout, (words, done)
        assert len(done.stderr.splitlines()) <= 2, done.stderr


tap.run(globals())
