"""lowkey capture against an f64 forward pass in NumPy, on small models and on the real one; bad input; interruption."""
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import h5py
import numpy as np

import tap
import gradient_oracle
from decoder_oracle import Model, forward
from tiny_llama import checkpoint, config, write_folder

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, f"{ROOT}/experiments")
import convert_model  # noqa: E402

LOWKEY = f"{ROOT}/{os.environ.get('B', 'build/opt')}/lowkey"
REAL, TEXT = f"{ROOT}/build/model/smollm2-135m.model.h5", f"{ROOT}/build/model/wiki.valid.tokens.h5"
WORK = tempfile.mkdtemp()
OUT = f"{WORK}/out.h5"


def capture(*options, model=REAL, tokens=TEXT, out=OUT):
    return subprocess.run([LOWKEY, "capture", "--model", model, "--tokens", tokens, "--out", out, *options],
                          capture_output=True, text=True)


def captured(*options, **how):
    done = capture(*options, **how)
    assert done.returncode == 0, done.stderr
    return how.get("out", OUT)


def tiny_model(name, hf="LlamaForCausalLM", **how):
    write_folder(f"{WORK}/{name}", checkpoint(**how), config(hf, tie_word_embeddings=not how.get("untied")))
    model = convert_model.read_folder(f"{WORK}/{name}")
    convert_model.write_model(model, f"{WORK}/{name}.h5")
    return f"{WORK}/{name}.h5"


def tiny_tokens(offsets, vocab=40):
    """tokens.h5 of several sequences: (path, ids)"""
    ids = np.random.default_rng(3).integers(0, vocab, offsets[-1])
    with h5py.File(f"{WORK}/tokens.h5", "w") as file:
        file.attrs.update(dict(schema="tokens", created_by="test", tokenizer="tiny",
                               tokenizer_sha256="0" * 64, vocab_size=vocab,
                               text_name="numbers", text_sha256="ab" * 32, add_bos=0, schema_version=[1, 0]))
        file["tokens"], file["sequence_offsets"] = ids.astype(np.int32), np.array(offsets)
    return f"{WORK}/tokens.h5", ids


def words(attributes):
    """Attributes with strings as str, of fixed length or not."""
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}


def streams(path):
    with h5py.File(path) as file:
        return {f"{layer}/{name}": data[...] for layer, group in file["layers"].items()
                for name, data in group.items()}


def assert_captured(path, model, samples, layers, tolerance):
    """The file holds these layers of these samples (arrays of ids) as the oracle has them, in their order."""
    seen = [forward(model, ids)[1] for ids in samples]
    with h5py.File(path) as file:
        assert file["layer_index"][...].tolist() == layers
        assert file["sample_offsets"][...].tolist() == np.cumsum([0, *map(len, samples)]).tolist()
        hashes = [hashlib.sha256(np.asarray(ids, "<i4").tobytes()).digest() for ids in samples]
        assert [bytes(row) for row in file["sample_sha256"][...]] == hashes
        for layer in layers:
            for i, name in enumerate(("query", "key", "value")):
                got = file[f"layers/{layer:03d}/{name}"][...]
                want = np.concatenate([of_sample[layer][i] for of_sample in seen])
                assert got.shape == want.shape, (got.shape, want.shape)
                assert np.abs(got - want).max() <= tolerance * np.abs(want).max(), (layer, name, np.abs(got - want).max())


def test_real_model():
    """a capture of the real model agrees with a recomputation in f64, and its identity is the model's and the text's"""
    captured("--layers", "0,7", "--samples", "1:3", "--length", "150", "--dtype", "f32")
    with h5py.File(TEXT) as text, h5py.File(REAL) as model, h5py.File(OUT) as file:
        ids, root = text["tokens"][...], words(file.attrs)
        want = {**{k: model.attrs[k] for k in ("model_sha256", "model_name", "n_layers")},
                "text_sha256": text.attrs["text_sha256"],
                "text_name": "wiki.valid.raw", "contents": "key value query", "key_stage": "pre_rope", "schema": "activations"}
        assert {k: root[k] for k in want} == want
        for name in ("layers/000", "layers/007"):
            assert words(file[name].attrs) == words(model[name].attrs)
            assert np.array_equal(file[f"{name}/rope_inv_freq"], model[f"{name}/rope_inv_freq"])
    assert_captured(OUT, Model(REAL, 8), [ids[150:300], ids[300:450]], [0, 7], 2e-5)


def test_families():
    """keys and queries are taken after bias and QK-norm, for small models of each family"""
    path, ids = tiny_tokens([0, 60])
    for name, hf, how in (("llama", "LlamaForCausalLM", {}),
                          ("qwen2", "Qwen2ForCausalLM", dict(bias=True, untied=True)),
                          ("qwen3", "Qwen3ForCausalLM", dict(qk_norm=True))):
        model = tiny_model(name, hf, **how)
        captured("--length", "20", "--dtype", "f32", model=model, tokens=path)
        assert_captured(OUT, Model(model), [ids[0:20], ids[20:40], ids[40:60]], [0, 1], 2e-5)


def test_samples():
    """samples stay inside sequences, start stride apart, and can be picked"""
    path, ids = tiny_tokens([0, 25, 30, 62])
    model = tiny_model("samples")
    cut = [("--length 10", [0, 10, 30, 40, 50]), ("--length 10 --stride 15", [0, 15, 30, 45]),
           ("--length 10 --stride 4 --samples 3", [0, 4, 8]),
           ("--length 10 --samples 1:4", [10, 30,
                                          40]), ("--length 32", [30]), ("--length 1 --samples 61:62", [61])]
    for options, starts in cut:
        length = int(options.split()[1])
        captured(*options.split(), "--dtype", "f32", model=model, tokens=path)
        assert_captured(OUT, Model(model), [ids[s:s + length] for s in starts], [0, 1], 2e-5)
    path, ids = tiny_tokens([0, 2300])
    captured("--length", "1100", "--dtype", "f32", model=model,
             tokens=path)  # longer than what the decoder takes at once
    assert_captured(OUT, Model(model), [ids[:1100], ids[1100:2200]], [0, 1], 2e-5)


def test_dtypes():
    """f16 and bf16 are the f32 capture, rounded to nearest, and --queries no leaves queries out"""
    path, _ = tiny_tokens([0, 40])
    model = tiny_model("dtypes")
    whole = streams(captured("--length", "40", "--dtype", "f32", model=model, tokens=path))
    for name, values in streams(captured("--length", "40", "--dtype", "f16", model=model, tokens=path)).items():
        assert name.endswith("rope_inv_freq") or (values.dtype == np.float16 and np.array_equal(values, whole[name].astype(np.float16))), name
    captured("--length", "40", "--dtype", "bf16", "--queries", "no", model=model, tokens=path)
    with h5py.File(OUT) as file:
        assert words(file.attrs)["contents"] == "key value" and "query" not in file["layers/000"]
        bits = whole["001/key"].view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
        assert np.array_equal(file["layers/001/key"].astype(np.float32)[...], rounded)


def test_equal_bytes():
    """the file does not depend on the number of threads, and lowkey check finds it good"""
    files = []
    for n in ("1", "2", "7"):
        with open(captured("--layers", "0,1", "--samples", "1", "--length", "600", "--threads", n),
                  "rb") as file:
            files.append(file.read())
    assert files[0] == files[1] == files[2]
    done = subprocess.run([LOWKEY, "check", OUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_parts():
    """--per-file cuts one capture into files; those that are there already are kept, others are written anew"""
    path, _ = tiny_tokens([0, 100])
    model = tiny_model("parts")
    arguments, how = ("--length", "20", "--dtype",
                      "f32"), dict(model=model, tokens=path, out=f"{WORK}/part.h5")
    whole = streams(captured(*arguments, **how))
    parts = [f"{WORK}/part.{i:03d}.h5" for i in range(3)]
    done = capture(*arguments, "--per-file", "2", **how)
    assert done.stdout.splitlines() == [f"{part}: written" for part in parts], done.stdout + done.stderr
    cut = [streams(part) for part in parts]
    assert all(np.array_equal(whole[k], np.concatenate([c[k] for c in cut])) for k in whole
               if "rope" not in k)
    os.remove(parts[2])
    shutil.copy(parts[0], parts[1])  # other samples
    done = capture(*arguments, "--per-file", "2", **how)
    assert done.stdout.splitlines() == [f"{parts[0]}: was there already", f"{parts[1]}: written", f"{parts[2]}: written"], done.stdout
    assert all(np.array_equal(c[k], again[k]) for c, again in zip(cut, map(streams, parts)) for k in c)


def test_gradients():
    """--grad: PyTorch gives the same gradients, for small models of each family"""
    if gradient_oracle.torch is None:
        tap.skip("PyTorch is missing")
    path, ids = tiny_tokens([0, 70])
    for name, hf, how in (("llama", "LlamaForCausalLM", {}),
                          ("qwen2", "Qwen2ForCausalLM", dict(bias=True, untied=True)),
                          ("qwen3", "Qwen3ForCausalLM", dict(qk_norm=True))):
        model = tiny_model(name, hf, **how)
        captured("--length", "70", "--grad", model=model, tokens=path)
        assert gradient_oracle.worst(model, OUT, ids) < 1e-4


def test_gradient_files():
    """--grad: the file says its labels, has the streams of a capture without, and does not depend on threads or files"""
    path, _ = tiny_tokens([0, 100])
    model = tiny_model("labels")
    arguments, how = ("--length", "20", "--dtype", "f32"), dict(model=model, tokens=path)
    plain = streams(captured(*arguments, **how))
    for labels, options in (("text", ["--grad"]), ("model", ["--grad=model", "--seed", "7"])):
        whole = streams(captured(*arguments, *options, **how))
        with h5py.File(OUT) as file:
            root = words(file.attrs)
            assert root["contents"] == "key value query key_grad value_grad" and root["gradient_labels"] == labels
            assert list(root["schema_version"]) == [1, 1] and root.get("gradient_seed") == (7 if labels == "model" else None)
        assert all(np.abs(whole[k] - plain[k]).max() <= 1e-5 * np.abs(plain[k]).max() for k in plain)
        for layer in ("000", "001"):
            for name in ("key_grad", "value_grad"):
                grad = whole[f"{layer}/{name}"]
                assert (grad[19::20] == 0).all() and (np.abs(grad[18::20]).sum((1, 2)) > 0).all()
        before = open(OUT, "rb").read()
        captured(*arguments, *options, "--threads", "7", **how)
        assert open(OUT, "rb").read() == before
        parts = [f"{WORK}/grad.{i:03d}.h5" for i in range(3)]
        done = capture(*arguments, *options, "--per-file", "2", model=model, tokens=path, out=f"{WORK}/grad.h5")
        assert done.stdout.splitlines() == [f"{part}: written" for part in parts], done.stdout  # other labels are not kept
        cut = [streams(part) for part in parts]
        assert all(np.array_equal(whole[k], np.concatenate([c[k] for c in cut])) for k in whole if "rope" not in k)
        done = capture(*arguments, *options, "--per-file", "2", model=model, tokens=path, out=f"{WORK}/grad.h5")
        assert done.stdout.splitlines() == [f"{part}: was there already" for part in parts], done.stdout
        facts = subprocess.run([LOWKEY, "inspect", OUT], capture_output=True, text=True).stdout
        assert [line.split()[-1] for line in facts.splitlines() if line.startswith("gradient labels")] == [labels]
    done = capture(*arguments, "--grad=model", "--seed", "8", "--per-file", "2", model=model, tokens=path, out=f"{WORK}/grad.h5")
    assert "already" not in done.stdout  # nor other draws
    text, drawn = f"{WORK}/text.h5", f"{WORK}/drawn.h5"
    captured(*arguments, "--samples", "0:2", "--grad", model=model, tokens=path, out=text)
    captured(*arguments, "--samples", "2:4", "--grad=model", model=model, tokens=path, out=drawn)
    done = subprocess.run([LOWKEY, "fit", "--out", f"{WORK}/q.h5", text, drawn], capture_output=True, text=True)
    assert done.returncode == 1 and "gradient_labels" in done.stderr and "'model'" in done.stderr, done


def test_refusals():
    """wrong options exit with 2 and wrong input with 1, in a line, and leave the old file as it was"""
    path, _ = tiny_tokens([0, 50])
    large, _ = tiny_tokens([0, 50], vocab=41)
    large = shutil.copy(large, f"{WORK}/large.h5")
    tiny_tokens([0, 50])
    model = tiny_model("refusals")
    captured("--length", "20", model=model, tokens=path)
    before = open(OUT, "rb").read()
    for status, words, options, how in (
            (2, "--length takes an integer", ["--length", "0"],
             {}), (2, "--stride takes", ["--stride", "-1"], {}),
            (2, "--samples takes", ["--samples", "x"], {}), (2, "--samples takes", ["--samples", "3:3"], {}),
            (2, "--layers takes", ["--layers", "1,0"],
             {}), (2, "--dtype does not know 'f8'", ["--dtype", "f8"], {}),
            (2, "--queries does not know", ["--queries", "1"],
             {}), (2, "'more' is not expected", ["more"], {}),
            (2, "--no", ["--no"], {}), (2, "--threads takes", ["--threads", "0"], {}),
            (1, "layer 2: the model has 0 to 1", ["--length", "20", "--layers", "0,2"], {}),
            (1, "the text has 2 such", ["--length", "20", "--samples", "3"], {}),
            (1, "the text has 0 such", ["--length", "51"],
             {}), (1, "vocabulary of 41, the model's has 40", ["--length", "20"], dict(tokens=large)),
            (1, "expected model, found tokens", ["--length", "20"], dict(model=path)),
            (1, "No such file", ["--length", "20"], dict(model=f"{WORK}/none.h5")),
            (1, "none/out.h5", ["--length", "20"], dict(out=f"{WORK}/none/out.h5"))):
        done = capture(*options, **{**dict(model=model, tokens=path), **how})
        assert done.returncode == status and words in done.stderr, (words, done)
        assert len(done.stderr.splitlines()) <= 2 and open(OUT, "rb").read() == before
    done = subprocess.run([LOWKEY, "capture", "--model", model], capture_output=True, text=True)
    assert done.returncode == 2 and "--model, --tokens and --out are needed" in done.stderr
    assert not [name for name in os.listdir(WORK) if "tmp" in name], os.listdir(WORK)


def test_values_that_f16_cannot_hold():
    """a key beyond the range of f16 is refused by name, and bf16 takes it"""
    write_folder(f"{WORK}/far", checkpoint(bias=True), config("Qwen2ForCausalLM"))
    model = convert_model.read_folder(f"{WORK}/far")
    read = model.read
    model.read = lambda name: read(name) + (1e5 if name.endswith("layers.1.self_attn.k_proj.bias") else 0)
    convert_model.write_model(model, f"{WORK}/far.h5")
    path, _ = tiny_tokens([0, 30])
    done = capture("--length", "10", model=f"{WORK}/far.h5", tokens=path, out=f"{WORK}/far.out.h5")
    assert done.returncode == 1 and "key of layer 1, head 0, channel 0, token 0" in done.stderr, done.stderr
    assert not os.path.exists(f"{WORK}/far.out.h5")
    captured("--length", "10", "--dtype", "bf16", model=f"{WORK}/far.h5", tokens=path,
             out=f"{WORK}/far.out.h5")


def test_interrupted():
    """an interrupted capture says so, exits with 1 and leaves nothing"""
    folder = f"{WORK}/stopped"
    os.makedirs(folder)
    running = subprocess.Popen([LOWKEY, "capture", "--model", REAL, "--tokens", TEXT, "--out",
                                f"{folder}/a.h5"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not os.listdir(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 1 and errors.strip() == "lowkey capture: interrupted; nothing was written", errors
    assert os.listdir(folder) == []


try:
    tap.run(globals())
finally:
    shutil.rmtree(WORK)
