"""Files of `lowkey fit` by the letter of formats/README.md: the independent reader accepts them, the independent packer
finds the report's counts and errors, and a cache on them holds the packer's bytes."""
import os
import shlex
import subprocess
import tempfile

import numpy as np

import activation_files
import lowkey_ctypes
import reader
import reader_inputs
import reader_pages as pages
import tap
from reader_compare import compare_attention, compare_sequence

LIBRARIES = lowkey_ctypes.load()
FOLDER = tempfile.mkdtemp(prefix="lowkey-fit-")
LOWKEY = os.path.join(os.environ.get("B", "build/opt"), "lowkey")

# Options of fit; contents of the activations beside key and value.
FITS = [
    ("", ""),
    ("--bits 2 --feedback --sinks 4 --outliers 0.02", "query"),
    ("--bits 1,2,3,4,5 --feedback=both --gain --key-qnorm --outliers 0.05 --outlier-cap 2 --outlier-page 40",
     "key_grad value_grad"),
    ("--preset kvquant-nuq3-1% --sinks 5 --sink-rule bf16", "key_grad value_grad"),
    ("--preset kvquant-nuq2 --key-codebook uniform", "key_weight value_weight"),
    ("--key-bits 8 --key-rule-8 int8 --value-bits 8 --value-rule-8 e5m2 --outliers 0.01", ""),
    ("--key-bits 16 --key-rule-16 bf16 --value-bits 16", ""),
    ("--bits 3 --codebook normal_float --scope head --token-scale f16 --scale-block 16", "query"),
    ("--key-bits 2,8,4 --value-bits 3,16 --token-scale f32 --outliers 0.1 --feedback", "query"),
    ("--budget 2.3 --feedback=both --sinks 3", "key_grad value_grad"),
    ("--preset 2", "query"),
]


def path(name):
    return os.path.join(FOLDER, name)


def fit(number):
    options, more = FITS[number]
    capture = activation_files.make(lengths=(70, 133), contents=["key", "value"] + more.split(), value_head_dim=24,
                                    layers=(1, 3),
                                    rope_dims=[16, 8, 0][number % 3], pairing=["half", "interleaved"][number % 2],
                                    seed=number)
    activation_files.write(path("a.h5"), capture)
    done = subprocess.run([LOWKEY, "fit", "--out", path("q.h5"), *shlex.split(options), path("a.h5")],
                          capture_output=True, text=True)
    assert done.returncode == 0, f"fit {options}: {done.stderr}"
    return reader_inputs.activations(path("a.h5")), reader.quantizer(path("q.h5"))


def compare_report(q, side, x, offsets, what):
    """Pack each sample and count: what fit says of the file it wrote must be so."""
    report = side.report
    samples = [x[a:b].astype(np.float32) for a, b in zip(offsets, offsets[1:])]
    packed = [pages.pack(side, s, q.n_sink_tokens) for s in samples]
    for name in ("n_outliers", "n_clamped", "n_saturated"):
        found = sum(getattr(p, name) for p in packed)
        assert getattr(report, name) == found, f"{what}: {name} {getattr(report, name)}, expected {found}"
    true = np.concatenate([s[q.n_sink_tokens:] for s in samples]).astype(np.float64)
    kept = np.concatenate([p.values[q.n_sink_tokens:] for p in packed]).astype(np.float64)
    codes = np.concatenate([p.codes[q.n_sink_tokens:] for p in packed])
    assert report.n_tokens == len(true), f"{what}: n_tokens"
    if side.E:
        for h, c in np.argwhere(side.n_entries > 0):
            counts = np.bincount(pages.entries_of(side, h, codes[:, h])[:, c], minlength=side.E)
            found = report.histogram[h, c]
            assert (counts == found).all(), f"{what}: histogram head {h} channel {c}: {found}, expected {counts}"
    for name, want in (("mean", true.mean(0)), ("variance", true.var(0)), ("mse", ((kept - true) ** 2).mean(0))):
        assert np.allclose(getattr(report, name), want, rtol=1e-5, atol=1e-9), f"{what}: {name}"


def run_fit(number):
    a, q = fit(number)
    assert [bytes(r) for r in q.sample_sha256] == sorted(bytes(r) for r in a.sample_sha256)
    assert (q.model_sha256, q.n_layers) == (a.model_sha256, a.n_layers)
    assert [g.index for g in q.layers] == [g.index for g in a.layers]
    cache = lowkey_ctypes.Cache(LIBRARIES, path("q.h5"), 3)
    T = int(a.sample_offsets[1])
    cache.reserve(T)
    for layer, true in zip(q.layers, a.layers):
        what = f"fit {FITS[number][0]}: layer {layer.index}"
        for name in ("key", "value"):
            compare_report(q, getattr(layer, name), getattr(true, name), a.sample_offsets, f"{what} {name}")
        keys, values = true.key[:T].astype(np.float32), true.value[:T].astype(np.float32)
        packed = compare_sequence(cache, q, layer, keys, values, [9], 0, what)
        compare_attention(cache, layer, packed[0].values, packed[1].values, np.random.default_rng(number), 0, what)
    cache.close()


def fit_test(number):
    def test():
        run_fit(number)
    test.__doc__ = f"A fitted file is what the document and its own report say: {FITS[number][0] or 'the defaults'}"
    return test


for _number in range(len(FITS)):
    globals()[f"test_fit_{_number}"] = fit_test(_number)
tap.run(globals())
