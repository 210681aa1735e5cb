"""lowkey cost against sums written out in NumPy over made-up captures: K and V of different head_dim, grouped queries, samples
of 70, 1 and 131 tokens, sinks; every row, and what is refused."""
import csv
import json
import os
import subprocess
import sys
import tempfile

import h5py
import numpy as np

sys.path.insert(0, os.path.dirname(__file__))
import activation_files as activations
import tap

LOWKEY = os.path.join(os.environ.get("B", "build/opt"), "lowkey")
folder = tempfile.TemporaryDirectory()
LENGTHS, SINKS = (70, 1, 131), 2
STREAMS = ("key", "value", "query", "key_grad", "value_grad")


def path(name):
    return os.path.join(folder.name, name)


CAPTURE = activations.make(lengths=LENGTHS, layers=(0, 2), contents=STREAMS, value_head_dim=24)
activations.write(path("a.h5"), CAPTURE)


def lowkey(*arguments):
    return subprocess.run([LOWKEY, *arguments], capture_output=True, text=True)


def cost(*arguments):
    done = lowkey("cost", "--activations", path("a.h5"), *arguments)
    assert done.returncode == 0, done.stderr
    return done


def rows(*arguments):
    return json.loads(cost("--json", *arguments).stdout)


def quantizer(name, *options):
    done = lowkey("fit", "--out", path(name), *options, path("a.h5"))
    assert done.returncode == 0, done.stderr
    return path(name)


def by_tables(file, layer, side, x):
    """What a quantizer of static tables without feedback stores; x: one sample [tokens, heads, channels]"""
    group = file[f"layers/{layer:03d}/{side}"]
    code = (x[..., None] > group["boundary"][...]).sum(-1)
    table = np.broadcast_to(group["table"][...], code.shape + group["table"].shape[-1:])
    stored = np.take_along_axis(table, code[..., None], -1)[..., 0]
    stored[:SINKS] = x[:SINKS].astype(np.float16)
    return stored


def f16(file, layer, side, x):
    return x.astype(np.float16).astype(np.float32)


def products(store, file, samples):
    """{(layer, side): [of each sample [tokens, heads, channels] of g e]}"""
    starts, found = np.concatenate([[0], np.cumsum(LENGTHS)]), {}
    for layer, streams in CAPTURE["layers"].items():
        for side in ("key", "value"):
            found[layer, side] = []
            for s in samples:
                x, g = (streams[n][starts[s]:starts[s + 1]] for n in (side, side + "_grad"))
                error = store(file, layer, side, x).astype(np.float64) - x
                found[layer, side].append(error * g.astype(np.float64))
    return found


def figures(units, samples):
    """units: lists over samples of products of what acts together"""
    n = sum(LENGTHS[s] for s in samples)
    sums = np.array([[p.sum() for p in unit] for unit in units])
    first = sums.sum(0)
    return dict(first_order=first.sum() / n,
                first_order_stderr=np.sqrt(len(first) * first.var(ddof=1)) / n if len(first) > 1 else None,
                diagonal=sum((p * p).sum() for unit in units for p in unit) / (2 * n),
                coherent=(sums ** 2).sum() / (2 * n))


def units_of(found, row):
    """The heads of a row, or its channel"""
    units = []
    for (layer, side), of_samples in found.items():
        if row["layer"] not in (None, layer) or row["side"] not in (None, side):
            continue
        for h in range(of_samples[0].shape[1]):
            if row["head"] in (None, h):
                c = slice(None) if row["channel"] is None else row["channel"]
                units.append([p[:, h, c] for p in of_samples])
    return units


def assert_rows(got, store, file, samples):
    found = products(store, file, samples)
    for row in got:
        for name, want in figures(units_of(found, row), samples).items():
            if want is None:
                assert row[name] is None
            else:
                assert abs(row[name] - want) <= 1e-7 * abs(want) + 1e-15, (name, row, want)


def test_all_rows():
    """every figure of every row, down to channels, agrees with sums written out"""
    q = quantizer("q3.h5", "--bits", "3", "--sinks", str(SINKS), "--sensitivity", "fisher")
    got = rows("--per-channel", f"three={q}", "f16")
    kinds = 3  # K+V, K, V
    per_layer = [sum(s[n].shape[1] * (1 + s[n].shape[2]) for n in ("key", "value")) for s in CAPTURE["layers"].values()]
    assert len(got) == 2 * (kinds * 3 + sum(per_layer))
    with h5py.File(q) as file:
        assert_rows([r for r in got if r["format"] == "three"], by_tables, file, (0, 1, 2))
    assert_rows([r for r in got if r["format"] == "f16"], f16, None, (0, 1, 2))
    total = got[0]
    assert total["n_tokens"] == sum(LENGTHS) and total["coherent"] > 0 and total["fit_overlap"] == 3


def test_samples_and_layers():
    """--samples and --layers pick, and one sample alone has no standard error"""
    q = quantizer("q2.h5", "--bits", "2", "--sinks", str(SINKS), "--samples", "0:1")
    with h5py.File(q) as file:
        got = rows("--per-head", "--samples", "1:3", q)
        assert got[0]["fit_overlap"] == 0 and got[0]["fit_samples"] == 1
        assert_rows(got, by_tables, file, (1, 2))
        got = rows("--samples", "2:3", q)
        assert len(got) == 3 and got[0]["first_order_stderr"] is None
        assert_rows(got, by_tables, file, (2,))
        got = rows("--layers", "2", "--per-layer", q)
        assert [r["layer"] for r in got] == [None] * 3 + [2] * 3
        assert all(a["coherent"] == b["coherent"] for a, b in zip(got[:3], got[3:]))
        assert_rows(got[3:], by_tables, file, (0, 1, 2))


def test_outputs():
    """CSV has the rows of JSON, the table their figures, and threads change no byte"""
    q = quantizer("q1.h5", "--bits", "1", "--feedback=keys")
    out = [cost("--json", "--per-channel", "--csv", path("rows.csv"), "--threads", n, q, "bf16").stdout for n in "127"]
    assert out[0] == out[1] == out[2]
    with open(path("rows.csv")) as file:
        lines = list(csv.DictReader(file))
    want = json.loads(out[0])
    assert len(lines) == len(want) and list(lines[0]) == list(want[0])
    for line, row in zip(lines, want):
        for name, value in row.items():
            assert (line[name] == "" if value is None else np.isclose(float(line[name]), value, rtol=1e-10)
                    if isinstance(value, float) else line[name] == str(value)), (name, line[name], value)
    done = cost(q)
    table = done.stdout.splitlines()
    assert "gradients of labels: not said" in table[0] and table[-1].startswith("*"), table
    assert table[2].split()[:2] == ["q1.h5", "K+V"] and np.isclose(float(table[2].split()[3]), want[0]["coherent"], rtol=1e-3)
    assert "flatters" in done.stderr


def test_refusals():
    """captures without gradients, other models, wrong options: a line, and exit 1 or 2"""
    plain = dict(CAPTURE, contents=list(STREAMS[:4]))
    activations.write(path("plain.h5"), plain)
    activations.write(path("other.h5"), CAPTURE, model_sha256="ab" * 32)
    q = quantizer("q.h5", "--bits", "2")
    for status, words, arguments in (
            (1, "holds no value_grad", ["--activations", path("plain.h5"), "f16"]),
            (1, "model_sha256", ["--activations", path("other.h5"), q]),
            (1, "layer 1 was not captured", ["--activations", path("a.h5"), "--layers", "1", "f16"]),
            (1, "but it holds 3", ["--activations", path("a.h5"), "--samples", "2:4", "f16"]),
            (2, "no FORMAT", ["--activations", path("a.h5")]), (2, "--activations FILE is missing", ["f16"]),
            (2, "--queries", ["--activations", path("a.h5"), "--queries", "3", "f16"]),
            (2, "", ["--activations", path("a.h5"), "--csv", path("a.h5"), "f16"])):
        done = lowkey("cost", *arguments)
        assert done.returncode == status and words in done.stderr and not done.stdout, (words, done)
        assert len(done.stderr.splitlines()) == 1, done.stderr


tap.run(globals())
