#!/usr/bin/env python3
"""How long calibration takes and how much memory, and that its bytes depend on the data alone.

Captures 16 x 2,048 tokens of all layers, fits at 2, 3, 4 bits, fits again with 1 and 7 threads, from shuffled samples and
from the capture cut in four, then fits a made-up file of more than 4 GiB. One CSV row a run, in experiments/results.

    fit_scale.py [--work build/scale] [--fit-options "..."]
"""
import argparse
import csv
import hashlib
import os
import shlex
import subprocess
import sys
import time

import h5py
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)


def run(command):
    """Wall seconds, CPU seconds and peak resident MiB of a command that must succeed."""
    print("  " + shlex.join(command), file=sys.stderr)
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"fit_scale: failed: {shlex.join(command)}")
    return time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_big(path, like, tokens, heads=8, head_dim=128):
    """A one-layer capture of `tokens` tokens, keys and values of heads x head_dim channels in f32, seeded noise with
    each channel's own mean and spread and a few heavy tails; geometry attributes from a real capture."""
    random = np.random.default_rng(1)
    sample, n_samples = 2048, tokens // 2048
    with h5py.File(like, "r") as source, h5py.File(path, "w") as out:
        for name in source.attrs:
            out.attrs.create(name, source.attrs[name], dtype=source.attrs.get_id(name).dtype)
        out.attrs["contents"] = "key value"
        out.create_dataset("layer_index", data=np.array([0]))
        out.create_dataset("sample_offsets", data=np.arange(n_samples + 1) * sample)
        out.create_dataset("sample_sha256", data=random.integers(0, 256, (n_samples, 32), dtype=np.uint8))
        group = out.create_group("layers/000")
        layer = source["layers/000"]
        for name in layer.attrs:
            group.attrs.create(name, layer.attrs[name], dtype=layer.attrs.get_id(name).dtype)
        for name, value in (("n_q_heads", heads), ("n_kv_heads", heads), ("key_head_dim", head_dim),
                            ("value_head_dim", head_dim), ("rope_dims", head_dim)):
            group.attrs[name] = value
        group.attrs["logit_scale"] = head_dim ** -0.5
        group["rope_inv_freq"] = 1e4 ** (-np.arange(head_dim // 2) / (head_dim // 2))
        for stream in ("key", "value"):
            rows = group.create_dataset(stream, (n_samples * sample, heads, head_dim), np.float32,
                                        chunks=(256, 1, head_dim))
            mean = random.normal(0, 2, (heads, head_dim)).astype(np.float32)
            spread = random.lognormal(0, 1, (heads, head_dim)).astype(np.float32)
            for i in range(n_samples):
                noise = random.standard_normal((sample, heads, head_dim), np.float32)
                rows[i * sample:(i + 1) * sample] = mean + spread * noise * (1 + 3 * (noise > 3))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowkey", default=os.path.join(ROOT, "build/lowkey"))
    parser.add_argument("--model", default=os.path.join(ROOT, "build/model/smollm2-135m.model.h5"))
    parser.add_argument("--tokens", default=os.path.join(ROOT, "build/model/wiki.valid.tokens.h5"))
    parser.add_argument("--work", default=os.path.join(ROOT, "build/scale"))
    parser.add_argument("--out", default=os.path.join(HERE, "results/fit_scale.csv"))
    parser.add_argument("--fit-options", default="--feedback --gain", help="given to every lowkey fit but that of the made-up file")
    parser.add_argument("--big-tokens", type=int, default=540672, help="tokens of the made-up file; 8 KiB each")
    options = parser.parse_args()
    os.makedirs(options.work, exist_ok=True)
    at = lambda name: os.path.join(options.work, name)  # noqa: E731
    cut = [sys.executable, os.path.join(HERE, "cut_activations.py"), at("capture.h5")]
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    fit_options = shlex.split(options.fit_options)
    rows = []

    def record(what, command, out):
        seconds, cpu, peak = run(command)
        size = os.path.getsize(out)
        rows.append({"what": what, "wall_s": f"{seconds:.1f}", "cpu_s": f"{cpu:.1f}", "peak_mib": f"{peak:.0f}", "out_bytes": size,
                     "sha256": digest(out) if size < 1 << 30 else "", "cores": os.cpu_count(), "commit": commit,
                     "command": shlex.join(command).replace(ROOT + "/", "")})
        print(f"{what:34} {seconds:7.1f} s {cpu:7.1f} s CPU {peak:7.0f} MiB peak  {size:12,d} bytes out", flush=True)
        return rows[-1]["sha256"]

    def fit(what, bits, threads, name, sources, with_options=fit_options):
        return record(what, [options.lowkey, "fit", "--bits", str(bits), "--threads", str(threads), *with_options,
                             "--out", at(name)] + sources, at(name))

    record("capture 16 x 2048, 30 layers", [options.lowkey, "capture", "--model", options.model, "--tokens", options.tokens,
                                            "--samples", "16", "--length", "2048", "--out", at("capture.h5")], at("capture.h5"))
    whole = [at("capture.h5")]
    for bits in (2, 3, 4):
        want = fit(f"fit {bits} bits, 2 threads", bits, 2, f"{bits}.h5", whole)
    subprocess.run(cut + [at("shuffled.h5"), "--shuffle", "7"], check=True)
    parts = [at(f"part{i}.h5") for i in range(4)]
    for i, part in enumerate(parts):
        subprocess.run(cut + [part, "--samples", f"{4 * i}:{4 * i + 4}"], check=True)
    same = [fit("fit 4 bits, 1 thread", 4, 1, "t1.h5", whole), fit("fit 4 bits, 7 threads", 4, 7, "t7.h5", whole),
            fit("fit 4 bits, shuffled samples", 4, 2, "shuffled.q.h5", [at("shuffled.h5")]),
            fit("fit 4 bits, four files, reversed", 4, 2, "parts.q.h5", parts[::-1])]
    print("all bytes equal" if all(s == want for s in same) else "BYTES DIFFER")
    make_big(at("big.h5"), at("capture.h5"), options.big_tokens)
    big_size = os.path.getsize(at("big.h5"))
    fit(f"fit 3 bits, made-up {big_size / 2**30:.2f} GiB", 3, 2, "big.q.h5", [at("big.h5")],
        ["--gain"])  # it has no queries for feedback
    with open(options.out, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    ok = all(s == want for s in same) and all(float(r["peak_mib"]) <= 1024 for r in rows if r["what"].startswith("fit"))
    sys.exit(0 if ok else "fit_scale: bytes differ, or more than 1 GiB was used")


if __name__ == "__main__":
    main()
