"""model.h5, tokens.h5 and activations.h5 by the letter of formats/README.md: the independent reader and `lowkey check` must
accept and refuse the same; what the project itself converts and ships must please the independent reader."""
import glob
import hashlib
import os
import shutil
import subprocess
import tempfile

import h5py
import numpy as np

import activation_files
import reader
import reader_inputs
import tap
from reader_changes import attribute, dataset, element

FOLDER = tempfile.mkdtemp(prefix="lowkey-inputs-")
LOWKEY = os.path.join(os.environ.get("B", "build/opt"), "lowkey")
L = "layers/001"


def path(name):
    return os.path.join(FOLDER, name)


def write_activations(name):
    contents = ["key", "value", "query", "key_grad", "value_weight"]
    capture = activation_files.make(lengths=(5, 9), contents=contents, value_head_dim=24, layers=(1, 3), rope_dims=8)
    activation_files.write(name, capture)


def write_tokens(name):
    with h5py.File(name, "w") as f:
        f.attrs.update(dict(schema="tokens", created_by="test", tokenizer="bytes", tokenizer_sha256="1" * 64,
                            vocab_size=50,
                            text_name="none", text_sha256="2" * 64, add_bos=0))
        f.attrs["schema_version"] = np.array([1, 0])
        f["tokens"] = np.arange(40) % 50
        f["sequence_offsets"] = np.array([0, 7, 40])


def write_model(name):
    """Two layers with everything that is optional; the hash is made here, by the document's words."""
    rng, digest = np.random.default_rng(1), hashlib.sha256()
    hidden, inner, vocab = 16, 24, 11
    geometry = dict(n_q_heads=4, n_kv_heads=2, key_head_dim=8, value_head_dim=16, logit_scale=0.3, rope_dims=8,
                    rope_pairing="half", rope_attention_factor=1.0)

    def put(group, name, *shape):
        values = rng.normal(size=shape).astype(np.float32)
        group[name] = values
        digest.update(f"{group[name].name}\n{','.join(str(n) for n in shape)}\n".encode() + values.tobytes())

    with h5py.File(name, "w") as f:
        f.attrs.update(dict(schema="model", created_by="test", n_layers=2, model_name="none", architecture="llama",
                            hidden_size=hidden, intermediate_size=inner, vocab_size=vocab, rms_norm_eps=1e-5,
                            tied_output=0,
                            attention_bias=1, qk_norm=1, bos_token_id=-1, eos_token_id=2, source="test",
                            license="none"))
        f.attrs["schema_version"] = np.array([1, 0])
        put(f, "token_embedding", vocab, hidden)
        for i in range(2):
            g = f.create_group(f"layers/{i:03d}")
            g.attrs.update(geometry)
            g["rope_inv_freq"] = np.array([1, 0.1, 0.01, 0.001])
            put(g, "attention_norm", hidden)
            for projection, rows in (("query_proj", 32), ("key_proj", 16), ("value_proj", 32)):
                put(g, projection, rows, hidden)
            for bias, rows in (("query_bias", 32), ("key_bias", 16), ("value_bias", 32)):
                put(g, bias, rows)
            for norm in ("query_norm", "key_norm"):
                put(g, norm, 8)
            put(g, "output_proj", hidden, 64)
            put(g, "ffn_norm", hidden)
            for projection in ("gate_proj", "up_proj"):
                put(g, projection, inner, hidden)
            put(g, "down_proj", hidden, inner)
        put(f, "final_norm", hidden)
        put(f, "output", vocab, hidden)
        f.attrs["model_sha256"] = digest.hexdigest()


def lossy(f):
    """Half precision as it is: other values, so another hash; as f64: the same."""
    f["final_norm"][...] = f["final_norm"][...].astype(np.float16)


CHANGES = {  # schema: (writer, reader, refused, accepted)
    "activations": (write_activations, reader_inputs.activations, [
        attribute("/", "contents", "key value"), attribute("/", "contents", "value key query key_grad value_weight"),
        attribute("/", "contents", "key value query key_grad value_grad"),
        attribute("/", "contents", "key value  query"),
        attribute("/", "contents", "key value query key_grad key_weight value_weight"),
        attribute("/", "contents", None),
        attribute("/", "key_stage", "post_rope"), attribute("/", "key_stage", None),
        attribute("/", "text_sha256", "3" * 65),
        attribute("/", "text_sha256", ";".join(["3" * 64] * 2)), attribute("/", "text_name", 3),
        attribute("/", "surplus", 1),
        attribute("/", "n_layers", 3), attribute("/", "model_sha256", "z" * 64),
        attribute("/", "schema", "quantizer"),
        attribute(L, "n_q_heads", 5), attribute(L, "value_head_dim", 16), attribute(L, "surplus", 1),
        attribute(L, "rope_dims", 0), attribute(L, "logit_scale", -1.0), attribute(f"{L}/key", "surplus", 1),
        element("sample_offsets", 0, 1), element("sample_offsets", 2, 13), element("sample_offsets", 2, 15),
        element("sample_offsets", 1, 0), element("sample_offsets", 1, 20), element("sample_offsets", 1, -3),
        element("layer_index", slice(None), [3, 1]), element("layer_index", 1, 4),
        element(f"{L}/key", (0, 0, 0), np.nan),
        element(f"{L}/value", (13, 1, 23), np.inf), element(f"{L}/query", (5, 0, 0), -np.inf),
        element(f"{L}/key_grad", (1, 1, 1), np.nan),
        element(f"{L}/value_weight", (2, 0, 1), -1e-30), element(f"{L}/value_weight", (2, 0, 1), np.inf),
        dataset("layer_index", lambda d: None), dataset("sample_offsets", lambda d: d[:2]),
        dataset("sample_offsets", lambda d: d[:1]),
        dataset("sample_sha256", lambda d: d[:1]), dataset("sample_sha256", lambda d: None),
        dataset("layers/003", lambda d: None),
        dataset(f"{L}/key", lambda d: None), dataset(f"{L}/key", lambda d: d[:13]),
        dataset(f"{L}/key", lambda d: d[:, :1]),
        dataset(f"{L}/key", lambda d: d.reshape(14, -1)), dataset(f"{L}/key", lambda d: d.astype(np.int32)),
        dataset(f"{L}/key", lambda d: d.astype(np.float16).view(np.uint16)),
        dataset(f"{L}/key", lambda d: d, compression="lzf"),
        dataset(f"{L}/key_grad", lambda d: d.astype(np.float16)),
        dataset(f"{L}/value_grad", lambda d: np.zeros((14, 2, 24))),
        dataset(f"{L}/query", lambda d: d[:, :2]), dataset(f"{L}/value_weight", lambda d: None),
        dataset("surplus", lambda d: [1]),
    ], [
        dataset(f"{L}/key", lambda d: d.astype(">f2"), compression=3, shuffle=True, chunks=(3, 1, 7)),
        dataset(f"{L}/key", lambda d: d.astype(np.float64)),
        dataset(f"{L}/key_grad", lambda d: d.astype(">f8"), fletcher32=True, chunks=True),
        element(f"{L}/value_weight", 3, 0.0),
        element(f"{L}/value_weight", 3, -0.0), dataset("sample_offsets", lambda d: d.astype(">i2")),
    ]),
    "tokens": (write_tokens, reader_inputs.tokens, [
        attribute("/", "tokenizer", None), attribute("/", "tokenizer_sha256", "1"), attribute("/", "vocab_size", 39),
        attribute("/", "vocab_size", 0), attribute("/", "add_bos", 2), attribute("/", "add_bos", None),
        attribute("/", "surplus", 1),
        attribute("/", "text_sha256", None), attribute("/", "schema_version", [1]), element("tokens", 3, -1),
        element("tokens", 3, 50),
        element("sequence_offsets", 0, 1), element("sequence_offsets", 2, 39), element("sequence_offsets", 2, 41),
        element("sequence_offsets", 1, 0), dataset("sequence_offsets", lambda d: None),
        dataset("sequence_offsets", lambda d: d[:1]),
        dataset("tokens", lambda d: None), dataset("tokens", lambda d: d[None]), dataset("tokens", lambda d: d * 1.0),
        dataset("tokens", lambda d: d[:0]), dataset("surplus", lambda d: 3),
        dataset("tokens", lambda d: d, compression="lzf"),
    ], [
        dataset("tokens", lambda d: d.astype(">u2"), compression=1, shuffle=True, chunks=(7,)),
        dataset("tokens", lambda d: d.astype(np.int8)),
        attribute("/", "tokenizer", np.bytes_("bytes")), attribute("/", "text_name", ""),
    ]),
    "model": (write_model, reader_inputs.model, [
        attribute("/", "architecture", "gpt2"), attribute("/", "hidden_size", 17), attribute("/", "tied_output", 1),
        attribute("/", "attention_bias", 0), attribute("/", "qk_norm", 0), attribute("/", "qk_norm", 2),
        attribute("/", "n_layers", 1),
        attribute("/", "n_layers", 3), attribute("/", "bos_token_id", -2), attribute("/", "eos_token_id", 11),
        attribute("/", "rms_norm_eps", np.nan), attribute("/", "rms_norm_eps", None), attribute("/", "source", None),
        attribute("/", "license", 1), attribute("/", "model_sha256", "1" * 64), attribute("/", "surplus", 1),
        attribute(L, "surplus", 1),
        attribute(L, "key_head_dim", 16), attribute(L, "rope_pairing", "both"), element("final_norm", 3, 7.0),
        ("half values", lossy),
        element(f"{L}/gate_proj", (1, 2), np.nan), element(f"{L}/key_bias", 0, 1.5),
        dataset("output", lambda d: None),
        dataset("token_embedding", lambda d: d[:10]), dataset("token_embedding", lambda d: d.T),
        dataset(f"{L}/query_norm", lambda d: None),
        dataset(f"{L}/down_proj", lambda d: d.T), dataset(f"{L}/up_proj", lambda d: None),
        dataset(f"{L}/surplus", lambda d: [1.0]),
        dataset("layers/000", lambda d: None), dataset("surplus", lambda d: 1),
        dataset(f"{L}/rope_inv_freq", lambda d: d[:2]),
    ], [
        dataset("final_norm", lambda d: d.astype(">f8")),
        dataset(f"{L}/up_proj", lambda d: d.astype(np.float64) * (1 + 2.0**-40)),
        dataset(f"{L}/gate_proj", lambda d: d, compression=2, chunks=(5, 3)), attribute("/", "bos_token_id", 10),
        attribute("/", "model_name", "another"),
    ]),
}


def check(name):
    """What `lowkey check` says against it; None: nothing."""
    done = subprocess.run([LOWKEY, "check", name], capture_output=True, text=True)
    assert done.returncode in (0, 1), (done.returncode, done.stderr)
    return done.stderr.strip() or done.stdout.strip() if done.returncode else None


def verdicts(read, name):
    try:
        read(name)
        mine = None
    except (reader.FormatError, OSError) as error:
        mine = str(error)
    return mine, check(name)


def compare(schema, which):
    write, read = CHANGES[schema][:2]
    write(path("base.h5"))
    assert verdicts(read, path("base.h5")) == (None, None), verdicts(read, path("base.h5"))
    wrong = []
    for what, change in CHANGES[schema][which]:
        shutil.copy(path("base.h5"), path("changed.h5"))
        with h5py.File(path("changed.h5"), "r+") as f:
            change(f)
        both = verdicts(read, path("changed.h5"))
        if any((v is None) != (which == 3) for v in both) or "\n" in (both[1] or ""):
            wrong.append(f"{what}: NumPy says {both[0]}; C says {both[1]}")
    assert not wrong, "\n" + "\n".join(wrong)


def compare_test(schema, which):
    def test():
        compare(schema, which)
    test.__doc__ = f"{schema}.h5: both readers {'accept what the format leaves open' if which == 3 else 'refuse what breaks the format'}"
    return test


for _schema in CHANGES:
    for _which in (2, 3):
        globals()[f"test_{_schema}_{_which}"] = compare_test(_schema, _which)


def test_model():
    """The converted model's tensors hash to its model_sha256, read by the document alone"""
    found = sorted(glob.glob("build/model/smollm2-135m.model.h5"))
    if not found:
        tap.skip("no build/model/smollm2-135m.model.h5 (make model)")
    m = reader_inputs.model(found[0])
    assert len(m.layers) == m.n_layers == 30


def test_tokens():
    """The converted texts' tokens.h5 are as the document says"""
    found = sorted(glob.glob("build/model/*.tokens.h5"))
    if not found:
        tap.skip("no build/model/*.tokens.h5 (make model)")
    for name in found:
        reader_inputs.tokens(name)


def test_shipped_activations():
    """The captured activations that ship with the project are as the document says"""
    found = sorted(glob.glob("experiments/data/**/*.h5", recursive=True))
    if not found:
        tap.skip("no captured activations under experiments/data")
    for name in found:
        reader_inputs.activations(name)


tap.run(globals())
