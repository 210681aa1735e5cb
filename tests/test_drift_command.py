"""lowkey check --drift: reports, limits and exit statuses, on made-up activations that are like those of the fit, or not."""
import json
import os
import shutil
import subprocess
import tempfile

import activation_files
import tap

LOWKEY = os.path.join(os.environ.get("B", "build/opt"), "lowkey")
WORK = tempfile.mkdtemp()
LENGTHS = (900, 700, 800, 600)


def lowkey(*arguments):
    return subprocess.run([LOWKEY, *arguments], capture_output=True, text=True, timeout=120)


def capture(name, samples, change=None, **options):
    whole = activation_files.make(lengths=LENGTHS, layers=(0, 2), change=change)
    return activation_files.write(f"{WORK}/{name}.h5", activation_files.take(whole, samples), **options)


def drift(*arguments):
    return lowkey("check", "--drift", QUANTIZER, *arguments)


def report(*arguments):
    done = drift("--json", *arguments)
    assert done.stderr == "", done.stderr
    return done.returncode, json.loads(done.stdout)


def scaled(name, layer, rows):
    if name == "key" and layer == 2:
        rows[:, 1, 7] *= 5


def moved(name, layer, rows):
    rows += 2 * rows.std(0)


FITTED = capture("fitted", [0, 1])
QUANTIZER = f"{WORK}/q.h5"
assert lowkey("fit", FITTED, "--bits", "2", "--sinks", "1", "--out", QUANTIZER).returncode == 0


def test_its_own():
    """the activations of the fit have no drift at all"""
    status, found = report(FITTED)
    assert status == 0 and found["mean_divergence"] == 0 and found["worst_divergence"] == 0 and found["verdict"] == "fits"
    assert [(s["layer"], s["side"], s["tokens"], s["channels"], s["outside_share"]) for s in found["sides"]] == [
        (layer, side, 1598, 32, 0) for layer in (0, 2) for side in ("key", "value")]


def test_alike():
    """other samples of the same distribution fit, in one file or two"""
    status, found = report(capture("alike", [2, 3]))
    assert status == 0 and found["verdict"] == "fits" and 0 < found["mean_divergence"] < 0.005, found["mean_divergence"]
    status, two = report(capture("a", [2]), capture("b", [3]))
    assert status == 0 and two["sides"] == found["sides"]


def test_scaled_channel():
    """a channel that grew is named first, with more end codes and values outside its range"""
    path = capture("scaled", [2, 3], change=scaled)
    status, found = report(path, "--worst", "2", "--fail-channel-above", "0.05")
    worst = found["worst_channels"][0]
    assert (worst["layer"], worst["side"], worst["head"], worst["channel"]) == (2, "key", 1, 7)
    assert worst["end_share"] > worst["end_share_fit"] + 0.2 and worst["outside_share"] > 0.01
    assert len(found["worst_channels"]) == 2 and found["worst_channels"][1]["divergence"] < 0.02
    assert status == 1 and [s["failed"] for s in found["sides"]] == [False, False, True, False]
    text = drift(path).stdout
    line = [line for line in text.splitlines() if line.split()[:2] == ["2", "key"]][0]
    assert "1:7" in line, line
    assert text.splitlines()[-1].startswith(f"{QUANTIZER}, fitted on made up: "), text


def test_shifted():
    """moved activations do not fit; --fail-above decides the exit status"""
    path = capture("moved", [2, 3], change=moved)
    status, found = report(path)
    assert status == 0 and found["verdict"] == "does not fit" and found["mean_divergence"] > 0.1
    assert drift(path, "--fail-above", "0.9").returncode == 0
    done = drift(path, "--fail-above", "0.1")
    assert done.returncode == 1 and "4 of 4 sides are above the limit" in done.stdout


def test_refusals():
    """another model's activations, quantizers without tables, and wrong usage"""
    done = drift(capture("other", [2], model_sha256="ab" * 32))
    assert done.returncode == 1 and "model_sha256" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    plain = f"{WORK}/f16.h5"
    assert lowkey("fit", FITTED, "--bits", "16", "--out", plain).returncode == 0
    done = lowkey("check", "--drift", plain, FITTED)
    assert done.returncode == 1 and "no channel has a table" in done.stderr, done.stderr
    for path in (FITTED, f"{WORK}/none.h5"):
        done = lowkey("check", "--drift", path, FITTED)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    for arguments, words in ((["--drift", QUANTIZER], "which file?"), (["--fail-above", "0.1", FITTED], "needs --drift"),
                             (["--drift", QUANTIZER, "--fail-above", "2", FITTED], "--fail-above"),
                             (["--drift", QUANTIZER, "--worst", "-1", FITTED], "--worst")):
        done = lowkey("check", *arguments)
        assert done.returncode == 2 and words in done.stderr, (arguments, done.stderr)


try:
    tap.run(globals())
finally:
    shutil.rmtree(WORK)
