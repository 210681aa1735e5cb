#!/usr/bin/env python3
"""Codebook solvers side by side on the same weighted points, one thread each: scikit-learn's KMeans as KVQuant uses it
(sample_weight, k-means++, n_init=1), flash1dkmeans, and lowkey bench solve. Costs are computed here, in f64 over all
points, by one function for all. Times are of the CPU, the least of --repeat runs of each, so that a busy machine matters
little; wall seconds beside them. Prints a table and writes experiments/results/solvers.csv.

    compare_solvers.py [--points 4194304] [--capture activations.h5] [--out FILE.csv]
"""
import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time

for name in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
    os.environ[f"{name}_NUM_THREADS"] = "1"

import logging

import flash1dkmeans
import numpy as np
import sklearn
from importlib.metadata import version
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

logging.disable(logging.WARNING)  # flash1dkmeans repeats its documentation there
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
COLUMNS = ("source", "points", "centroids", "solver", "cpu_seconds", "cpu_seconds_over_lowkey", "wall_seconds", "cost",
           "cost_over_lowkey", "repeat", "seed", "threads", "version", "commit", "machine")


def cost(x, w, centroids):
    """sum of w (x - nearest centroid)^2 in f64."""
    centroids = np.sort(np.asarray(centroids, np.float64).ravel())
    total = 0.0
    for i in range(0, len(x), 1 << 18):
        part = x[i:i + (1 << 18)].astype(np.float64)
        nearest = centroids[np.searchsorted((centroids[1:] + centroids[:-1]) / 2, part)]
        total += float(np.dot(w[i:i + (1 << 18)].astype(np.float64), (part - nearest) ** 2))
    return total


def timed(repeat, solve):
    """CPU and wall seconds of the fastest run, centroids."""
    times = []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        centroids = solve()
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    return min(times) + (centroids,)


def solve_sklearn(x, w, k, seed, repeat):
    with threadpool_limits(1):
        return timed(repeat, lambda: KMeans(n_clusters=k, init="k-means++", n_init=1, random_state=seed)
                     .fit(x[:, None], sample_weight=w).cluster_centers_)


def solve_flash(x, w, k, seed, repeat):
    return timed(repeat, lambda: flash1dkmeans.kmeans_1d(x, k, sample_weights=w, random_state=seed, return_cluster_borders=True)[0])


def solve_lowkey(x, w, k, command, folder, repeat):
    x.tofile(os.path.join(folder, "x.f32"))
    w.tofile(os.path.join(folder, "w.f32"))
    out = subprocess.run([command, "bench", "solve", "--json", "--repeat", str(repeat), "--centroids", str(k), "--input",
                          os.path.join(folder, "x.f32"), "--weights", os.path.join(folder, "w.f32")],
                         check=True, capture_output=True, text=True).stdout
    answer = json.loads(out)
    return answer["cpu_seconds"], answer["seconds"], answer["values"]


def made_up(n, seed):
    """Normal values, and values with heavy tails, with lognormal weights."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal(n, np.float32)
    heavy = random.standard_t(4, n).astype(np.float32)
    weights = random.lognormal(0, 1.5, n).astype(np.float32)
    return [("normal", normal, weights), ("student t, 4 degrees", heavy, weights)]


def captured(path, n, seed):
    """Keys of the captured layers, each channel scaled to [-1, 1] as KVQuant does, as many as are asked for."""
    import h5py
    random = np.random.default_rng(seed)
    parts, count = [], 0
    with h5py.File(path) as file:
        for name in file["layers"]:
            rows = file["layers"][name]["key"][:].astype(np.float32)
            rows = rows.reshape(len(rows), -1)
            low, high = rows.min(0), rows.max(0)
            parts.append(((rows - (low + high) / 2) / ((high - low) / 2 + 1e-30)).ravel())
            count += parts[-1].size
            if count >= n:
                break
    x = np.concatenate(parts)[:n]
    return [(f"keys of {os.path.basename(path)}", x, random.lognormal(0, 1.5, len(x)).astype(np.float32))]


def commit():
    try:
        run = lambda *args: subprocess.run(("git", "-C", ROOT) + args, capture_output=True, text=True).stdout.strip()
        return run("rev-parse", "--short=12", "HEAD") + ("+" if run("status", "--porcelain", "--untracked-files=no") else "")
    except OSError:
        return "?"


def cpu_model():
    with open("/proc/cpuinfo") as file:
        return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1 << 22)
    parser.add_argument("--centroids", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--capture", help="activations.h5, for real keys too (needs h5py)")
    parser.add_argument("--lowkey", default=os.path.join(ROOT, "build/lowkey"))
    parser.add_argument("--out", default=os.path.join(HERE, "results/solvers.csv"))
    settings = parser.parse_args()
    sources = made_up(settings.points, settings.seed)
    if settings.capture:
        sources += captured(settings.capture, settings.points, settings.seed)

    small = np.random.default_rng(0)
    solve_flash(small.standard_normal(1000, np.float32), np.ones(1000, np.float32), 4, 0, 1)  # compiles; not timed
    program = subprocess.run([settings.lowkey, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    versions = {"scikit-learn": sklearn.__version__, "flash1dkmeans": version("flash1dkmeans"), "lowkey": program}
    shared = {"repeat": settings.repeat, "seed": settings.seed, "threads": 1, "commit": commit(), "machine": cpu_model()}
    rows, worse = [], 0
    print(f"{'source':24} {'points':>9} {'k':>3} {'solver':14} {'CPU s':>8} {'times':>7} {'wall s':>8} {'cost over ours':>15}")
    for source, x, w in sources:
        for k in settings.centroids:
            with tempfile.TemporaryDirectory() as folder:
                answers = {"lowkey": solve_lowkey(x, w, k, settings.lowkey, folder, settings.repeat)}
            answers["flash1dkmeans"] = solve_flash(x, w, k, settings.seed, settings.repeat)
            answers["scikit-learn"] = solve_sklearn(x, w, k, settings.seed, settings.repeat)
            own_cpu, own_cost = answers["lowkey"][0], cost(x, w, answers["lowkey"][2])
            for solver, (cpu, wall, centroids) in answers.items():
                c = cost(x, w, centroids)
                worse += c < own_cost
                rows.append({"source": source, "points": len(x), "centroids": k, "solver": solver,
                             "cpu_seconds": f"{cpu:.4f}", "cpu_seconds_over_lowkey": f"{cpu / own_cpu:.1f}",
                             "wall_seconds": f"{wall:.4f}", "cost": f"{c:.12g}", "cost_over_lowkey": f"{c / own_cost:.12f}",
                             "version": versions[solver], **shared})
                print(f"{source:24.24} {len(x):9} {k:3} {solver:14} {cpu:8.4f} {cpu / own_cpu:7.1f} {wall:8.4f} "
                      f"{c / own_cost:15.12f}", flush=True)
    os.makedirs(os.path.dirname(settings.out), exist_ok=True)
    with open(settings.out, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{settings.out}: {len(rows)} rows; a lower cost than lowkey's: {worse}")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
