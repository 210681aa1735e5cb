"""lowkey inspect and lowkey check as a person or a script calls them: facts of every schema, tables, JSON,
exit codes."""
import json
import os
import shutil
import subprocess
import tempfile

import h5py
import numpy as np

import tap
from small_files import COMMAND, LAYERS, TOKENS, write_activations, write_model, write_tokens

folder = tempfile.mkdtemp(prefix="lowkey_inspect_")
path = os.path.join(folder, "file.h5")
DEMO = "experiments/data/demo/smollm2-135m.activations.h5"


def lowkey(*arguments):
    run = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120, errors="replace")
    return run.returncode, run.stdout, run.stderr


def inspect(name, *options):
    status, out, err = lowkey("inspect", *options, name)
    assert (status, err) == (0, ""), (status, err)
    return json.loads(out) if options else out


def line(text, label):
    """The value of a line "label   value"."""
    found = [t[len(label):].strip() for t in text.splitlines() if t.startswith(label + "  ")]
    assert len(found) == 1, (label, text)
    return found[0]


def test_model():
    """a model: provenance, sizes, parameters, cache bytes"""
    write_model(path, tied=0, bias=1)
    facts = inspect(path, "--json")
    with h5py.File(path) as file:
        parameters = sum(d.size for g in [file, file["layers/000"], file["layers/001"]] for n, d in g.items()
                         if isinstance(d, h5py.Dataset) and n != "rope_inv_freq")
        assert facts["model_sha256"] == file.attrs["model_sha256"]
    assert facts["parameters"] == parameters
    assert (facts["schema"], facts["schema_version"], facts["created_by"]) == ("model", "1.0",
                                                                               "test_h5py_files.py")
    assert facts["bytes"] == os.path.getsize(path) and facts["file"] == path
    assert facts["cache_bytes_per_token_in_16_bits"] == 2 * 2 * 2 * (16 + 24)
    assert facts["attention_bias"] is True and facts["tied_output"] is False and facts["eos_token_id"] == -1
    assert [layer["layer"] for layer in facts["layers"]] == [0, 1]
    assert facts["layers"][1] == dict(layer=1,
                                      q_heads=4,
                                      kv_heads=2,
                                      key_head_dim=16,
                                      value_head_dim=24,
                                      logit_scale=0.25,
                                      rope="16 half, theta 10000",
                                      rope_attention_factor=1.0,
                                      window=0)
    text = inspect(path)
    assert line(text, "attention bias") == "yes" and line(text, "parameters") == f"{parameters:,}"
    assert (facts["activation"], facts["post_norms"], facts["embedding_scale"]) == ("silu", False, 1)
    assert "  layer: 0-1\n" in text and "q heads 4; kv heads 2; key head dim 16" in text


def test_extended_model():
    """an extended model: its activation, norms, scale, and each layer's window"""
    write_model(path, extended=1)
    facts = inspect(path, "--json")
    assert (facts["activation"], facts["post_norms"]) == ("gelu_tanh", True)
    assert abs(facts["embedding_scale"] - 32**0.5) < 1e-6
    assert [layer["window"] for layer in facts["layers"]] == [512, 0]


def test_rope():
    """RoPE is named by what its frequencies are"""
    def frequencies(values):
        def edit(file):
            file["layers/001/rope_inv_freq"][...] = values
        return edit
    even = 500000.0 ** (-np.arange(8) / 8)
    scaled = np.where(np.arange(8) > 5, even / 8, even)
    for values, words in ((even, "16 half, theta 500000"), (scaled, "16 half, scaled"),
                          (even.astype(np.float32), "16 half, theta 500000")):
        assert inspect(write_model(path, edit=frequencies(values)), "--json")["layers"][1]["rope"] == words

    def without(file):
        del file["layers/001/rope_inv_freq"]
        file["layers/001"].attrs["rope_dims"] = 0
    write_model(path, edit=without)
    assert inspect(path, "--json")["layers"][1]["rope"] == "none"
    assert "\n      1  none\n" in inspect(path), inspect(path)


def test_tokens():
    """tokens: counts, lengths, the first ids"""
    facts = inspect(write_tokens(path), "--json")
    assert (facts["tokens"], facts["sequences"], facts["shortest_of_sequences"],
            facts["longest_of_sequences"]) == (30, 2, 4, 26)
    assert facts["first_tokens"] == "0 1 2 3 4 5 6 7 8 9 10 11" and facts["begins_with_bos"] is False
    assert line(inspect(path), "longest of sequences") == "26"


def test_activations():
    """activations: samples, and the type of every stream"""
    put = lambda group, name, values: group.create_dataset(
        name, data=values, dtype="f4" if name.endswith("grad") else "f2")
    facts = inspect(write_activations(path, "key value query value_grad", put=put), "--json")
    assert (facts["tokens"], facts["samples"], facts["shortest_of_samples"],
            facts["longest_of_samples"]) == (TOKENS, 2, 10, 30)
    assert (facts["layers_of_model"], facts["layers_captured"]) == (8, 2)
    assert [layer["layer"] for layer in facts["layers"]] == list(LAYERS)
    assert facts["layers"][0]["stored"] == "key f16, value f16, query f16, value_grad f32"
    assert "  layer: 1, 5\n" in inspect(path)


def test_quantizer():
    """a quantizer: bits, payload, tables, errors by layer and side, against the file"""
    status, _, err = lowkey("fit", "--key-bits", "3", "--value-bits", "2", "--value-outliers", "0.01",
                            "--value-token-scale", "f16", "--sinks", "1", "--samples", "0:2", "--feedback",
                            "--out", path, DEMO)
    assert status == 0, err
    facts = inspect(path, "--json")
    assert (facts["sink_tokens"], facts["sink_rule"], facts["layers_of_model"],
            facts["layers_fitted"]) == (1, "f16", 30, 4)
    assert facts["fit"]["samples"] == 2 and facts["fit"]["outlier_fraction_value"] == 0.01
    rows = facts["layers"]
    assert [(r["layer"], r["side"]) for r in rows] == [(n, s) for n in (0, 10, 20, 29)
                                                       for s in ("key", "value")]
    total = 0
    with h5py.File(path) as file:
        for row in rows:
            group = file[f"layers/{row['layer']:03d}/{row['side']}"]
            report = group["report"]
            n, channels = report.attrs["n_tokens"], group["bits"].size
            payload = group["bits"][...].mean()
            if group.attrs["token_scale"] not in ("none", b"none"):
                payload += 2 * 16 / group.attrs["scale_block"]
            if group.attrs["outlier_rule"] not in ("none", b"none"):
                payload += (16 + 32 * report.attrs["n_outliers"] / n) / channels
            assert abs(row["bits_payload"] - payload) < 1e-6, (row, payload)
            assert abs(row["relative_error"] -
                       report["mse"][...].mean() / report["variance"][...].mean()) < 1e-6
            assert abs(row["relative_weighted_error"] -
                       report["weighted_mse"][...].mean() / report["variance"][...].mean()) < 1e-6
            assert abs(row["outliers"] - report.attrs["n_outliers"] / n / channels) < 1e-9
            assert row["bits"] == ("3" if row["side"] == "key" else "2")
            assert row["corrections"] == ("feedback" if row["side"] == "key" else "none")
            total += payload / len(rows)  # all sides have as many channels
    assert abs(facts["bits_payload"] -
               total) < 1e-6 and total < facts["bits_held_at_131072_tokens"] < total + 1
    text = inspect(path)
    assert line(text, "sink tokens") == "1" and line(text, "fit samples") == "2"
    assert "  layer: 0, 10, 20, 29\n" in text and "relative weighted error" in text


def test_mixed_widths():
    """widths that differ are listed with their shares"""
    assert lowkey("fit", "--bits", "2,4", "--samples", "0:1", "--sensitivity", "none", "--out", path,
                  DEMO)[0] == 0
    row = inspect(path, "--json")["layers"][0]
    assert row["bits"] == "2 (50 %), 4 (50 %)" and row["bits_payload"] == 3, row


def test_refusals():
    """wrong usage is 2, a file that is wrong is 1, each with one line"""
    for arguments, code, words in (((), 2, "which file?"), (("a", "b"), 2, "one file"),
                                   (("--foo", ), 2, "unknown option '--foo'"), (("/none", ), 1,
                                                                                "/none: No such file"),
                                   (("Makefile", ), 1, "not an HDF5 file"), ((folder, ), 1, "a directory")):
        status, out, err = lowkey("inspect", *arguments)
        assert status == code and out == "" and err.count("\n") == 1 and words in err and err.startswith(
            "lowkey inspect: "), (status, err)
    for arguments in ("inspect", "--help"), ("help", "inspect"), ("check", "--help"), ("help", "check"):
        status, out, err = lowkey(*arguments)
        assert status == 0 and err == "" and out.startswith("usage: lowkey ")


def test_full_stdout():
    """results that stdout does not take are a failure, of every command"""
    write_tokens(path)
    for arguments in ("inspect", path), ("inspect", "--json",
                                         path), ("check", path), ("help", "fit"), ("error", "--help"):
        with open("/dev/full", "w") as full:
            run = subprocess.run([COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
        assert run.returncode == 1 and run.stderr.count("\n") == 1 and "stdout: cannot write" in run.stderr, (
            arguments, run)


def test_check_of_several():
    """check goes on after a file that is wrong; --json has a verdict for each"""
    write_tokens(path)
    odd = os.path.join(folder, "odd \n\u00e9.h5")
    shutil.copy(path, odd)
    bad = os.path.join(folder.encode(), b"\xff.h5")
    shutil.copy("Makefile", bad)
    status, out, err = lowkey("check", "Makefile", path, "/none", odd)
    assert status == 1 and out.count("good:") == 2 and err.count("\n") == 2, (out, err)
    run = subprocess.run([COMMAND, "check", "--json", "Makefile", path, bad], capture_output=True)
    verdicts = json.loads(run.stdout)
    assert run.returncode == 1 and [v["good"] for v in verdicts] == [False, True, False]
    assert verdicts[2]["file"].endswith("/?.h5") and "not an HDF5 file" in verdicts[0]["message"]
    assert lowkey("check", path, odd)[0] == 0
    assert lowkey("check")[0] == 2 and lowkey("check", "--foo", path)[0] == 2


try:
    tap.run(globals())
finally:
    shutil.rmtree(folder)
