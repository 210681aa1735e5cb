"""KVQuant's own recipe (arXiv 2401.18079), fitted by `--preset kvquant-nuq2-1%` with and without Q-Norm, against the paper's
description in NumPy: what is left out, limits, normalisation, weights, codebooks, and how Q-Norm moves them."""
import os
import shlex
import subprocess
import tempfile

import numpy as np

import activation_files as activations
import reader
import tap

LOWKEY = os.path.join(os.environ.get("B", "build/opt"), "lowkey")
FOLDER = tempfile.mkdtemp(prefix="lowkey-kvquant-")
TOKENS = 500


def fit(options, file):
    out = os.path.join(FOLDER, "out.quantizer.h5")
    done = subprocess.run([LOWKEY, "fit", "--out", out, *shlex.split(options), file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return reader.quantizer(out).layers[0]


CAPTURE = activations.make(lengths=(TOKENS,), layers=(0,), n_kv_heads=2, key_head_dim=8, value_head_dim=16,
                           contents=("key", "value", "key_grad", "value_grad"))
FILE = activations.write(os.path.join(FOLDER, "capture.h5"), CAPTURE)


def rows(name):  # the first token is a sink and counts for nothing
    return CAPTURE["layers"][0][name].reshape(TOKENS, -1)[1:].astype(np.float64)


def keys():
    """Normalised elements that are no outliers, their weights; zero and scale of channels. Limits are order statistics."""
    x, g = rows("key"), rows("key_grad")
    k = int(len(x) * 0.01 / 2)
    ordered = np.sort(x, 0)
    lower, upper = ordered[k], ordered[len(x) - 1 - k]
    zero, scale = (upper + lower) / 2, (upper - lower) / 2
    inside = (x >= lower) & (x <= upper)
    return ((x - zero) / scale)[inside], (g**2)[inside], zero, scale


def values():
    """The same per token: the largest and the smallest are outliers, one each of 32 elements at 1 %."""
    x, g = rows("value"), rows("value_grad")
    order = np.argsort(x, 1, kind="stable")[:, 1:-1]
    kept, weights = np.take_along_axis(x, order, 1), np.take_along_axis(g**2, order, 1)
    zero, scale = (kept[:, -1:] + kept[:, :1]) / 2, (kept[:, -1:] - kept[:, :1]) / 2
    return ((kept - zero) / scale).ravel(), weights.ravel()


def nearest(u, codebook):
    return codebook[np.searchsorted((codebook[1:] + codebook[:-1]) / 2, u)]


def lloyd(u, w, n):
    """The best of weighted k-means from many starts."""
    rng, best = np.random.default_rng(0), np.inf
    for _ in range(20):
        codebook = np.sort(rng.choice(u, n, replace=False))
        for _ in range(200):
            cell = np.searchsorted((codebook[1:] + codebook[:-1]) / 2, u)
            mass = np.bincount(cell, w, n)
            codebook = np.where(mass > 0, np.bincount(cell, w * u, n) / np.maximum(mass, 1e-300), codebook)
        best = min(best, (w * (u - nearest(u, codebook)) ** 2).sum())
    return best


def normalised(u, codebook):
    """Q-Norm: mean and deviation of the quantized elements made those of the elements."""
    v = nearest(u, codebook)
    return codebook * (u.std() / v.std()) + u.mean() - v.mean() * (u.std() / v.std())


def key_codebook(side, zero, scale):
    """What every channel's table is in normalised units: the same for all, but for rounding to f16."""
    tables = (side.table.reshape(16, -1)[:, :4].astype(np.float64) - zero[:, None]) / scale[:, None]
    assert np.ptp(tables, axis=0).max() < 2e-3, np.ptp(tables, axis=0)
    return tables.mean(0)


def test_keys():
    """Keys: limits and normalisation per channel, one codebook a layer that weighs by the squared gradient alone"""
    u, w, zero, scale = keys()
    side = fit("--preset kvquant-nuq2-1%", FILE).key
    assert np.allclose(side.lower.ravel(), zero - scale, rtol=1e-6, atol=1e-6) and (side.bits == 2).all()
    codebook = key_codebook(side, zero, scale)
    assert (w * (u - nearest(u, codebook)) ** 2).sum() < 1.003 * lloyd(u, w, 4)


def test_values():
    """Values: outliers by rank and min-max per token, one codebook a layer on what is left"""
    u, w = values()
    side = fit("--preset kvquant-nuq2-1%", FILE).value
    codebook = side.table[0, 0, :4].astype(np.float64)
    assert np.ptp(side.table, axis=(0, 1)).max() == 0
    assert (w * (u - nearest(u, codebook)) ** 2).sum() < 1.003 * lloyd(u, w, 4)


def test_qnorm():
    """Q-Norm: the codebook moves by the spread that quantizing lost, boundaries stay"""
    plain, moved = fit("--preset kvquant-nuq2-1%", FILE), fit("--preset kvquant-nuq2-1% --qnorm", FILE)
    u, _, zero, scale = keys()
    want = normalised(u, key_codebook(plain.key, zero, scale))
    assert np.abs(key_codebook(moved.key, zero, scale) - want).max() < 2e-3
    assert np.array_equal(plain.key.boundary, moved.key.boundary)
    u, _ = values()
    plain_codebook, moved_codebook = (q.value.table[0, 0, :4].astype(np.float64) for q in (plain, moved))
    assert np.abs(moved_codebook - normalised(u, plain_codebook)).max() < 2e-3
    assert np.abs(moved_codebook - plain_codebook).max() > 0.01
    assert np.array_equal(plain.value.boundary, moved.value.boundary)


def test_widths():
    """The other recipes: 2, 3 and 4 bits, without outliers too, limits then the extremes"""
    x = rows("key")
    for bits in (2, 3, 4):
        for outliers in ("", "-1%"):
            layer = fit(f"--preset kvquant-nuq{bits}{outliers} --qnorm", FILE)
            assert (layer.key.bits == bits).all() and (layer.value.bits == bits).all()
            if not outliers:
                assert np.allclose(layer.key.upper.ravel(), x.max(0), rtol=1e-6)


tap.run(globals())
