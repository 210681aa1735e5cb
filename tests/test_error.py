"""lowkey error against a recomputation of every metric in NumPy, on small made-up captures: K and V of different
head_dim, grouped queries, full, partial, no and interleaved RoPE, an attention factor, samples of 1, 70 and 131 tokens, sinks."""
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import h5py
import numpy as np

sys.path.insert(0, os.path.dirname(__file__))
import quantizer_files
import tap

LOWKEY = os.path.join(os.environ.get("B", "build/opt"), "lowkey")
ZEROS = "0" * 64
LENGTHS = (1, 70, 131)
N_SINKS = 3
METRICS = ("relative_logit_error softmax_kl softmax_kl_stderr relative_output_error top1_flips key_relative_mse "
           "value_relative_mse").split()
folder = tempfile.TemporaryDirectory()
rng = np.random.default_rng(7)


def path(name):
    return os.path.join(folder.name, name)


def sample_sha256(s):
    return np.frombuffer(hashlib.sha256(b"sample %d" % s).digest(), np.uint8)


def write_activations(name, layers, contents="key value query", **root):
    """layers: {index: (geometry, key, value, query)}"""
    with h5py.File(path(name), "w") as f:
        f.attrs.update(dict(dict(schema="activations", created_by="test_error.py 1", n_layers=8, model_name="none",
                                 model_sha256=ZEROS, contents=contents, key_stage="pre_rope", text_name="none",
                                 text_sha256=ZEROS), **root))
        f.attrs["schema_version"] = np.array([1, 0], np.int32)
        f["layer_index"] = np.array(sorted(layers), np.int32)
        f["sample_offsets"] = np.cumsum((0,) + LENGTHS)
        f["sample_sha256"] = np.stack([sample_sha256(s) for s in range(len(LENGTHS))])
        for index, (g, *streams) in layers.items():
            group = f.create_group(f"layers/{index:03d}")
            for key, entry in g.items():
                if key == "rope_inv_freq":
                    group[key] = entry
                else:
                    group.attrs[key] = entry
            for stream, data in zip("key value query".split(), streams):
                if stream in contents:
                    group[stream] = data


def made_up(g):
    n_tokens = sum(LENGTHS)
    shape = lambda heads, dim: (n_tokens, g[heads], g[dim])
    return (g, *(rng.normal(size=shape(*s)).astype(np.float32) for s in
                 (("n_kv_heads", "key_head_dim"), ("n_kv_heads", "value_head_dim"), ("n_q_heads", "key_head_dim"))))


def geometry(*args):
    return quantizer_files.geometry(rng, *args)


LAYERS = {0: made_up(geometry(4, 2, 16, 8, 16, "half", 1.0)),
          3: made_up(geometry(6, 2, 24, 16, 16, "interleaved", 1.3)),
          7: made_up(geometry(3, 3, 8, 8, 0, "half", 1.0))}
write_activations("a.h5", LAYERS)


def write_quantizer(name, bits, fitted_on=(), layers=LAYERS, root={}, **side):
    sides = {}
    for index, (g, key, value, _) in layers.items():
        pairs = quantizer_files.pairs_of(g)
        sides[index] = (g, quantizer_files.side(rng, key.shape[1], key.shape[2], pairs, bits, **side),
                        quantizer_files.side(rng, value.shape[1], value.shape[2], [], bits, **side))
    quantizer_files.write(path(name), sides, n_sink_tokens=N_SINKS, n_layers=8)
    with h5py.File(path(name), "a") as f:
        f.attrs.update(root)
        if fitted_on:
            del f["sample_sha256"]
            f["sample_sha256"] = np.stack(sorted((sample_sha256(s) for s in fitted_on), key=bytes))
    return sides


def f16(x, side=None):
    return x.astype(np.float16).astype(np.float32)


def bf16(x, side=None):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def by_tables(x, side):
    """Sinks in f16, everything else the table entry that the boundaries say."""
    code = (x[..., None] > side["boundary"]).sum(-1)
    stored = np.take_along_axis(np.broadcast_to(side["table"], code.shape + side["table"].shape[-1:]), code[..., None], -1)[..., 0]
    stored[:N_SINKS] = f16(x[:N_SINKS])
    return stored


def rope(g, x):
    """x [tokens, heads, dim] at positions 0.., in f64"""
    x = x.astype(np.float64).copy()
    n = g["rope_dims"] // 2
    if n == 0:
        return x
    turn = g["rope_attention_factor"] * np.exp(1j * np.outer(np.arange(len(x)), g["rope_inv_freq"]))[:, None, :]
    first, second = (slice(0, n), slice(n, 2 * n)) if g["rope_pairing"] == "half" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    z = (x[..., first] + 1j * x[..., second]) * turn
    x[..., first], x[..., second] = z.real, z.imag
    return x


def attention(g, key, value, query, positions):
    """Per query head and position: scores, softmax and output."""
    key, query, group = rope(g, key), rope(g, query), g["n_q_heads"] // g["n_kv_heads"]
    for head in range(g["n_q_heads"]):
        for p in positions:
            s = g["logit_scale"] * key[: p + 1, head // group] @ query[p, head]
            e = np.exp(s - s.max())
            yield head, s, e / e.sum(), e / e.sum() @ value[: p + 1, head // group].astype(np.float64)


def top(s):
    return s >= s.max() - 2.0**-40 * np.abs(s).max()


def recompute(layer, samples, n_queries, store, sides=(None, None)):
    """Sums of one layer: {head: rows of (logit error, spread, KL, output error, size, flip)}, and both sides' distortion"""
    g, *streams = layer
    rows, distortion = {h: [] for h in range(g["n_q_heads"])}, np.zeros((2, g["n_kv_heads"], 2))
    for s in samples:
        first = sum(LENGTHS[:s])
        key, value, query = (x[first:first + LENGTHS[s]] for x in streams)
        n = min(n_queries, LENGTHS[s])
        positions = [(j + 1) * LENGTHS[s] // n - 1 for j in range(n)]
        stored = [store(x, side) for x, side in zip((key, value), sides)]
        for (head, a, p, o), (_, b, q, w) in zip(attention(g, key, value, query, positions),
                                                 attention(g, *stored, query, positions)):
            rows[head].append((np.sum(((b - a) - np.mean(b - a)) ** 2), np.sum((a - a.mean()) ** 2),
                               np.sum(p * np.log(p / q)), np.sum((w - o) ** 2), np.sum(o**2), not np.any(top(a) & top(b))))
        for i, (x, y) in enumerate(zip((key, value), stored)):
            x, y = x.astype(np.float64), y.astype(np.float64)
            distortion[i, :, 0] += ((y - x) ** 2).sum((0, 2))
            distortion[i, :, 1] += ((x - x.mean(0)) ** 2).sum((0, 2))
    return rows, distortion


def metrics(rows, distortion):
    rows = np.array(rows)
    ratio = lambda a, b: 0 if a == b == 0 else a / b
    return dict(zip(METRICS, (ratio(rows[:, 0].sum(), rows[:, 1].sum()) ** 0.5, rows[:, 2].mean(),
                              rows[:, 2].std(ddof=1) / len(rows) ** 0.5, ratio(rows[:, 3].sum(), rows[:, 4].sum()) ** 0.5,
                              rows[:, 5].mean(), *(ratio(*d.sum(0)) for d in distortion))))


def run(*arguments, rc=0):
    done = subprocess.run([LOWKEY, "error", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == rc, (done.returncode, done.stdout, done.stderr)
    assert rc == 0 or done.stderr.count("\n") == 1, done.stderr
    return done


def measure(*arguments):
    return json.loads(run("--activations", path("a.h5"), "--json", *arguments).stdout)


def compare(row, want):
    """The output is attended in f32, the rest is f64."""
    for name in METRICS:
        slack = 5e-7 * (1 + want[name]) if name == "relative_output_error" else 1e-10 * (1e-3 + abs(want[name]))
        assert abs(row[name] - want[name]) <= slack, (name, row[name], want[name])


def check_format(found, samples, n_queries, store, sides=None):
    """found: rows of one format with --per-head"""
    whole, whole_distortion = [], np.zeros((2, 0, 2))
    found = iter(found)
    summary = next(found)
    for index, layer in LAYERS.items():
        group = layer[0]["n_q_heads"] // layer[0]["n_kv_heads"]
        rows, distortion = recompute(layer, samples, n_queries, store, sides[index][1:] if sides else (None, None))
        of_layer = next(found)
        assert (of_layer["layer"], of_layer["head"]) == (index, None)
        compare(of_layer, metrics(sum(rows.values(), []), distortion))
        for head, head_rows in rows.items():
            row = next(found)
            assert (row["layer"], row["head"], row["n_rows"]) == (index, head, len(head_rows))
            compare(row, metrics(head_rows, distortion[:, head // group:head // group + 1]))
        whole += sum(rows.values(), [])
        whole_distortion = np.concatenate([whole_distortion, distortion], 1)
    assert next(found, None) is None and summary["n_rows"] == len(whole)
    compare(summary, metrics(whole, whole_distortion))
    return summary


def test_16_bits():
    """16 bits: every metric as NumPy has it, errors of a thousandth, no flips"""
    rows = measure("--per-head", "--queries", 9, "f16", "brain=bf16")
    n = 1 + sum(1 + layer[0]["n_q_heads"] for layer in LAYERS.values())
    of = lambda label: [r for r in rows if r["format"] == label]
    assert len(of("f16")) == len(of("brain")) == n and len(rows) == 2 * n
    half = check_format(of("f16"), (0, 1, 2), 9, f16)
    check_format(of("brain"), (0, 1, 2), 9, bf16)
    assert half["bits_payload"] == 16 and 16 <= half["bits_held"] < 16.1 and 0.99 < half["compression"] <= 1
    assert 0 < half["relative_logit_error"] < 1e-3 and 0 < half["relative_output_error"] < 1e-3
    assert half["top1_flips"] == 0 and half["fit_overlap"] == 0


def test_tables():
    """Tables of 1 to 5 bits and sinks: every metric as NumPy has it, payload to the bit at 131,072 tokens"""
    sides = write_quantizer("mixed.quantizer.h5", (1, 2, 3, 4, 5))
    two = write_quantizer("two.quantizer.h5", (2,))
    for samples, n_queries in (((0, 1, 2), 7), ((1,), 70), ((1, 2), 1)):
        rows = measure("--per-head", "--samples", f"{samples[0]}:{samples[-1] + 1}", "--queries", n_queries,
                       path("mixed.quantizer.h5"), path("two.quantizer.h5"))
        check_format([r for r in rows if r["format"] == "mixed"], samples, n_queries, by_tables, sides)
        summary = check_format([r for r in rows if r["format"] == "two"], samples, n_queries, by_tables, two)
        assert abs(summary["bits_payload"] - (2 * (131072 - N_SINKS) + 16 * N_SINKS) / 131072) < 1e-9
        assert summary["top1_flips"] > 0


def test_outliers():
    """Outliers count 32 bits each and 16 a token and side, as frequent as measured, at the stated length"""
    k = 2
    write_quantizer("rank.quantizer.h5", (3,), outlier_rule="rank", outlier_rank=k, outlier_cap=2 * k, outlier_page_capacity=64 * 2 * k)
    rows = measure("--per-layer", path("rank.quantizer.h5"))
    sides = [(g["n_kv_heads"] * g["key_head_dim"], g["n_kv_heads"] * g["value_head_dim"]) for g, *_ in LAYERS.values()]
    for row, channels in zip(rows, [sum(sides, ()), *sides], strict=True):
        packed = 3 * sum(channels) + len(channels) * (16 + 32 * 2 * k)
        want = ((131072 - N_SINKS) * packed + N_SINKS * 16 * sum(channels)) / 131072 / sum(channels)
        assert abs(row["bits_payload"] - want) < 1e-9 and row["bits_held"] > want
        tokens = sum(n - min(n, N_SINKS) for n in LENGTHS)
        assert row["outliers"] == tokens * 2 * k * len(channels)


def test_layers_and_csv():
    """Chosen layers; CSV and JSON say the same; the table has every format"""
    write_quantizer("two.quantizer.h5", (2,))
    rows = measure("--layers", "3", "--per-layer", "--csv", path("rows.csv"), "f16", "a=" + path("two.quantizer.h5"))
    assert [(r["format"], r["layer"]) for r in rows] == [("f16", None), ("a", None), ("f16", 3), ("a", 3)]
    assert rows[0]["layers"] == "3" and rows[0]["queries_per_sample"] == 64 and rows[0]["n_tokens"] == sum(LENGTHS)
    assert rows[0]["end_sample"] == 3 and rows[0]["model_sha256"] == ZEROS
    for row, line in zip(rows, csv.DictReader(open(path("rows.csv"))), strict=True):
        assert list(row) == list(line)
        for name, cell in row.items():
            if isinstance(cell, str):
                assert cell == line[name]
            elif cell is None:
                assert line[name] == ""
            else:
                assert abs(cell - float(line[name])) <= 1e-11 * abs(cell)
    one = measure("--layers", "3", "f16")[0]
    assert all(one[name] == rows[0][name] for name in METRICS)
    table = run("--activations", path("a.h5"), "--per-head", "f16", path("two.quantizer.h5")).stdout
    assert table.count("\nf16 ") == table.count("\ntwo ") == 1 + 3 + 4 + 6 + 3 and "*" not in table


def test_mse_is_not_all():
    """Where queries see one pair of channels, the format with less error has the worse softmax, and the table shows both"""
    g, key, value, query = made_up(geometry(2, 1, 16, 8, 16, "half", 1.0))
    query[..., [c for c in range(16) if c % 8]] = 0
    write_activations("pair.h5", {0: (g, key, value, 3 * query)})
    for name, bits in (("coarse-there.h5", "1,4,4,4,4,4,4,4"), ("even.h5", "2")):
        subprocess.run([LOWKEY, "fit", "--key-bits", bits, "--value-bits", "16", "--sensitivity", "none", "--out", path(name), path("pair.h5")],
                       check=True, stdout=subprocess.DEVNULL)
    done = run("--activations", path("pair.h5"), "--json", path("coarse-there.h5"), path("even.h5")).stdout
    coarse, even = json.loads(done)
    assert coarse["key_relative_mse"] < 0.7 * even["key_relative_mse"], (coarse, even)
    for metric in ("softmax_kl", "relative_logit_error", "relative_output_error", "top1_flips"):
        assert coarse[metric] > 1.3 * even[metric], (metric, coarse, even)


def test_threads():
    """The same output to the byte with 1, 2 and 7 threads"""
    write_quantizer("mixed.quantizer.h5", (1, 2, 3, 4, 5))
    outputs = {run("--activations", path("a.h5"), "--json", "--per-head", "--threads", n, "f16",
                   path("mixed.quantizer.h5")).stdout for n in (1, 2, 7)}
    assert len(outputs) == 1


def test_overlap():
    """A format fitted on samples that are measured is marked"""
    write_quantizer("seen.quantizer.h5", (2,), fitted_on=(1, 1, 2))
    arguments = "--activations", path("a.h5"), path("seen.quantizer.h5"), "f16"
    done = run(*arguments, "--json")
    assert [r["fit_overlap"] for r in json.loads(done.stdout)] == [2, 0]
    assert "fitted on 2 of the 3 samples" in done.stderr and done.stderr.count("\n") == 1
    assert run(*arguments).stdout.count("*") == 2
    done = run(*arguments, "--samples", "0:1")
    assert "*" not in done.stdout and done.stderr == ""


def test_refusals():
    """Of another model, without queries, without a layer: refused in a line"""
    write_quantizer("two.quantizer.h5", (2,))
    write_quantizer("other.quantizer.h5", (2,), root=dict(model_sha256="1" + ZEROS[1:]))
    write_quantizer("part.quantizer.h5", (2,), layers={0: LAYERS[0], 7: LAYERS[7]})
    turned = dict(LAYERS[0][0], rope_inv_freq=LAYERS[0][0]["rope_inv_freq"] * 1.5)
    write_quantizer("turned.quantizer.h5", (2,), layers=LAYERS | {0: (turned, *LAYERS[0][1:])})
    write_activations("blind.h5", LAYERS, contents="key value")
    refused = lambda *arguments: run("--activations", *arguments, rc=1).stderr
    a = path("a.h5")
    assert "model_sha256" in refused(a, "f16", path("other.quantizer.h5"))
    assert "rope_inv_freq" in refused(a, path("turned.quantizer.h5"))
    assert "no layer 3" in refused(a, path("part.quantizer.h5"))
    run("--activations", a, "--layers", "0,7", path("part.quantizer.h5"))
    assert "layer 1 was not captured" in refused(a, "--layers", "1", "f16")
    assert "samples 1:4" in refused(a, "--samples", "1:4", "f16") and "queries" in refused(path("blind.h5"), "f16")
    assert "nothere.h5" in refused(path("nothere.h5"), "f16") and "gone.h5" in refused(a, path("gone.h5"))
    assert path("no/rows.csv") in refused(a, "--csv", path("no/rows.csv"), "f16")


def test_usage():
    """Wrong usage is exit 2, help is not"""
    a = "--activations", path("a.h5")
    for bad in (("f16",), a, (*a, "--queries", "0", "f16"), (*a, "--queries", "x", "f16"), (*a, "--samples", "2:1", "f16"),
                (*a, "--layers", "3,1", "f16"), (*a, "--threads", "0", "f16"), (*a, "--nonsense", "f16"), (*a, "f16", "--csv")):
        run(*bad, rc=2)
    assert "usage: lowkey error" in run("--help").stdout


def test_written():
    """A full disk is an error; a table that was there stays until the new one is whole; devices are not replaced"""
    a = "--activations", path("a.h5")
    with open("/dev/full", "w") as full:
        done = subprocess.run([LOWKEY, "error", *a, "f16"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "cannot write" in done.stderr
    assert "/dev/full: cannot write" in run(*a, "--csv", "/dev/full", "f16", rc=1).stderr
    run(*a, "--csv", "/dev/null", "f16")
    assert not os.path.isfile("/dev/null")
    with open(path("old.csv"), "w") as f:
        f.write("old")
    run(*a, "--csv", path("old.csv"), "--samples", "5:6", "f16", rc=1)
    assert open(path("old.csv")).read() == "old"
    run(*a, "--csv", path("old.csv"), "f16")
    assert open(path("old.csv")).read().startswith("command,")
    assert not [name for name in os.listdir(folder.name) if "tmp" in name]


def test_interrupted():
    """An interrupt ends it with one line and no file"""
    many = {index: LAYERS[0] for index in range(8)}
    write_activations("many.h5", many)
    process = subprocess.Popen([LOWKEY, "error", "--activations", path("many.h5"), "--csv", path("cut.csv"), "--queries", "131",
                                "--threads", "1", *["f16"] * 200], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any("cut.csv" in name for name in os.listdir(folder.name)):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.1)  # the handler stands before the file does, this is for the work to have begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == "" and err == "lowkey error: interrupted\n", (process.returncode, err)
    assert not any("cut.csv" in name for name in os.listdir(folder.name))


tap.run(globals())
