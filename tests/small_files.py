"""Small valid files of every schema but quantizer.h5, as h5py writes them from formats/README.md, for tests
that then break them. check(path) runs lowkey check as a user would."""
import hashlib
import os
import subprocess

import h5py
import numpy as np

COMMAND = os.environ.get("B", "build/opt") + "/lowkey"
TOKENS, KV_HEADS, Q_HEADS, KEY_DIM, VALUE_DIM = 40, 2, 4, 16, 24
LAYERS = (1, 5)


def root(file, schema, **attributes):
    file.attrs["schema"] = schema
    file.attrs["schema_version"] = [1, 0]
    file.attrs["created_by"] = "test_h5py_files.py"
    for name, value in attributes.items():
        file.attrs[name] = value


def add_geometry(group, key_head_dim=KEY_DIM, value_head_dim=VALUE_DIM):
    group.attrs.update(dict(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, key_head_dim=key_head_dim,
                            value_head_dim=value_head_dim, logit_scale=key_head_dim**-0.5,
                            rope_dims=key_head_dim, rope_pairing="half", rope_attention_factor=1.0))
    group["rope_inv_freq"] = 10000.0 ** (-np.arange(key_head_dim // 2) / (key_head_dim // 2))


def stream(name, layer, tokens=TOKENS):
    rng = np.random.default_rng([layer, len(name)])
    heads = Q_HEADS if name == "query" else KV_HEADS
    dim = VALUE_DIM if name.startswith("value") else KEY_DIM
    values = rng.normal(size=(tokens, heads, dim)).astype(np.float16).astype(np.float32)
    return abs(values) if name.endswith("weight") else values


def write_activations(path, contents="key value query", edit=None, put=None):
    """put(group, name, values) writes a dataset; edit(file) breaks or changes what is there."""
    put = put or (lambda group, name, values: group.create_dataset(name, data=values.astype(np.float16)))
    with h5py.File(path, "w") as file:
        root(file, "activations", n_layers=8, model_name="m", model_sha256="ab" * 32, contents=contents,
             key_stage="pre_rope", text_name="text", text_sha256="cd" * 32)
        file["layer_index"] = LAYERS
        file["sample_offsets"] = [0, 10, TOKENS]
        file["sample_sha256"] = np.arange(64, dtype=np.uint8).reshape(2, 32)
        for layer in LAYERS:
            group = file.create_group(f"layers/{layer:03d}")
            add_geometry(group)
            for name in contents.split():
                put(group, name, stream(name, layer))
        if edit:
            edit(file)
    return path


def write_tokens(path, edit=None):
    with h5py.File(path, "w") as file:
        root(file, "tokens", tokenizer="t", tokenizer_sha256="ab" * 32, vocab_size=50, text_name="x",
             text_sha256="cd" * 32, add_bos=0)
        file["tokens"] = np.arange(30, dtype=np.int32)
        file["sequence_offsets"] = [0, 4, 30]
        if edit:
            edit(file)
    return path


HIDDEN, INTERMEDIATE, VOCABULARY, MODEL_LAYERS = 32, 48, 20, 2


def model_tensors(tied, bias, qk_norm, post_norms=0):
    """Path and shape, in the order of the hash."""
    q, k, v, attended = Q_HEADS * KEY_DIM, KV_HEADS * KEY_DIM, KV_HEADS * VALUE_DIM, Q_HEADS * VALUE_DIM
    yield "/token_embedding", (VOCABULARY, HIDDEN)
    for layer in range(MODEL_LAYERS):
        for name, shape, there in (
                ("attention_norm", (HIDDEN,), 1), ("query_proj", (q, HIDDEN), 1),
                ("key_proj", (k, HIDDEN), 1), ("value_proj", (v, HIDDEN), 1), ("query_bias", (q,), bias),
                ("key_bias", (k,), bias), ("value_bias", (v,), bias), ("query_norm", (KEY_DIM,), qk_norm),
                ("key_norm", (KEY_DIM,), qk_norm), ("output_proj", (HIDDEN, attended), 1),
                ("post_attention_norm", (HIDDEN,), post_norms),
                ("ffn_norm", (HIDDEN,), 1), ("gate_proj", (INTERMEDIATE, HIDDEN), 1),
                ("up_proj", (INTERMEDIATE, HIDDEN), 1), ("down_proj", (HIDDEN, INTERMEDIATE), 1),
                ("post_ffn_norm", (HIDDEN,), post_norms)):
            if there:
                yield f"/layers/{layer:03d}/{name}", shape
    yield "/final_norm", (HIDDEN,)
    if not tied:
        yield "/output", (VOCABULARY, HIDDEN)


def write_model(path, tied=1, bias=0, qk_norm=0, dtype=np.float32, edit=None, extended=None):
    """extended: 0 or 1, whether an extended model has post_norms; None: a llama model."""
    rng = np.random.default_rng(5)
    digest = hashlib.sha256()
    with h5py.File(path, "w") as file:
        for name, shape in model_tensors(tied, bias, qk_norm, extended):
            values = rng.normal(size=shape).astype(dtype)
            file[name] = values
            digest.update(f"{name}\n{','.join(map(str, shape))}\n".encode() + values.astype("<f4").tobytes())
        for layer in range(MODEL_LAYERS):
            add_geometry(file[f"layers/{layer:03d}"])
        root(file, "model", n_layers=MODEL_LAYERS, model_name="m", model_sha256=digest.hexdigest(),
             architecture="llama", hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, vocab_size=VOCABULARY,
             rms_norm_eps=1e-5, tied_output=tied, attention_bias=bias, qk_norm=qk_norm, bos_token_id=1,
             eos_token_id=-1, source="here", license="none")
        if extended is not None:
            file.attrs.update(dict(architecture="extended", schema_version=[1, 1], activation="gelu_tanh",
                                   post_norms=extended, embedding_scale=HIDDEN**0.5))
            file["window"] = [512, 0]
        if edit:
            edit(file)
    return path


def check(path):
    """Exit status, standard output, and the one line of standard error."""
    run = subprocess.run([COMMAND, "check", path], capture_output=True, text=True, timeout=120,
                         errors="replace")
    return run.returncode, run.stdout, run.stderr


def assert_good(path):
    status, out, err = check(path)
    assert (status, err) == (0, "") and "good:" in out, (status, out, err)
    return out


def assert_refused(path, *words):
    status, out, err = check(path)
    assert status == 1 and out == "", (status, out, err)
    assert err.count("\n") == 1 and err.endswith("\n"), f"not one line: {err}"
    assert err.startswith(f"lowkey check: {path}: "), err
    for word in words:
        assert word in err, f"'{word}' is not in: {err}"
    assert "HDF5-DIAG" not in err, err


def replace(group, name, values, **options):
    """A dataset anew."""
    del group[name]
    return group.create_dataset(name, data=values, **options)
