"""Gemma 3, and models with windows: the same from GGUF and safetensors, the decoder against a forward pass in f64, the
tokenizer; and the real model where it was fetched (make model-gemma)."""
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile

import gguf
import h5py
import numpy as np

import tap
from decoder_oracle import Model, forward, nll
from tiny_llama import checkpoint, config, folder_name, write_folder, write_gguf

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, f"{ROOT}/experiments")
import convert_model  # noqa: E402
import tokenize_text  # noqa: E402
from in_process import call  # noqa: E402

LOWKEY = f"{ROOT}/{os.environ.get('B', 'build/opt')}/lowkey"
WORK = tempfile.mkdtemp()
GGUF, REAL = f"{ROOT}/build/model/gemma-3-270m.Q4_K_M.gguf", f"{ROOT}/build/model/gemma3-270m.model.h5"
VALID = f"{ROOT}/experiments/data/wikitext-2/wiki.valid.raw"
count = 0


def fresh(suffix=""):
    global count
    count += 1
    return f"{WORK}/{count}{suffix}"


def convert(source):
    out = fresh(".model.h5")
    return out, *call(convert_model, source, out)


def converted(source):
    out, status, errors = convert(source)
    assert status == 0, errors
    return out


def tensors():
    return checkpoint(qk_norm=True, post_norms=True)


METADATA = {"ARCH.attention.sliding_window": 24, "ARCH.attention.key_length": 8, "ARCH.attention.value_length": 8,
            "ARCH.rope.freq_base": 1e6}


def gguf_file(**extra):
    path = fresh(".gguf")
    write_gguf(path, tensors(), architecture="gemma3", extra={**METADATA, **extra})
    return path


def gemma_name(path):
    if path.endswith("/ffn_norm"):
        return folder_name(path).replace("post_attention_layernorm", "pre_feedforward_layernorm")
    return folder_name(path)


def folder(**changes):
    path = fresh()
    stored = {name: values - 1 if name.endswith("norm") else values for name, values in tensors().items()}
    settings = dict(hidden_act=..., hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=8, head_dim=8,
                    sliding_window=24, rope_theta=1e6, rope_local_base_freq=1e4, tie_word_embeddings=...)
    write_folder(path, stored, config("Gemma3ForCausalLM", **{**settings, **changes}), names=gemma_name)
    return path


def description(path):
    with h5py.File(path) as file:
        return {**{k: file.attrs[k] for k in ("architecture", "activation", "post_norms", "embedding_scale", "qk_norm")},
                "version": list(file.attrs["schema_version"]), "window": file["window"][...].tolist(),
                "theta": [round(float(file[f"layers/{i:03d}/rope_inv_freq"][1]) ** -4) for i in range(2)],
                "scale": file["layers/001"].attrs["logit_scale"]}


def test_both_sources():
    """GGUF holds 1 + w and safetensors w: both give the same model, extended, with windows and thetas by layer"""
    want = dict(architecture="extended", activation="gelu_tanh", post_norms=1, embedding_scale=math.sqrt(32), qk_norm=1,
                version=[1, 1], window=[24, 0], theta=[10000, 1000000], scale=1 / math.sqrt(8))
    hashes = []
    for source in (gguf_file(**{"ARCH.attention.sliding_window_pattern": 2}),
                   gguf_file(**{"ARCH.attention.sliding_window_pattern": [True, False]}),
                   folder(sliding_window_pattern=2), folder(layer_types=["sliding_attention", "full_attention"]),
                   folder(layer_types=["sliding_attention", "full_attention"], rope_theta=..., rope_local_base_freq=...,
                          rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e6),
                                               sliding_attention=dict(rope_type="default", rope_theta=1e4)))):
        path = converted(source)
        assert description(path) == want, description(path)
        with h5py.File(path) as file:
            hashes.append(file.attrs["model_sha256"])
            assert all(np.array_equal(file[name][...], values) for name, values in tensors().items())
        done = subprocess.run([LOWKEY, "check", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert len(set(hashes)) == 1


def test_settings_by_default():
    """every sixth layer sees all tokens where nothing is said, scaled RoPE is of those alone"""
    assert description(converted(gguf_file()))["window"] == [24, 24]
    path = converted(gguf_file(**{"ARCH.attention.sliding_window_pattern": 2, "ARCH.rope.scaling.type": "linear",
                                  "ARCH.rope.scaling.factor": 8.0, "ARCH.rope.freq_base_swa": 500.0}))
    with h5py.File(path) as file:
        assert abs(file["layers/000/rope_inv_freq"][1] - 500 ** -0.25) < 1e-9
        assert abs(file["layers/001/rope_inv_freq"][1] - 1e6 ** -0.25 / 8) < 1e-9


def test_windows_of_others():
    """Mistral's window is on every layer, Qwen's on those that its configuration names, or on none"""
    def windows(architecture, qk_norm=False, **changes):
        path = fresh()
        write_folder(path, checkpoint(qk_norm=qk_norm), config(architecture, **changes))
        with h5py.File(converted(path)) as file:
            return file["window"][...].tolist() if "window" in file else file.attrs["architecture"]
    assert windows("MistralForCausalLM", sliding_window=64) == [64, 64]
    assert windows("MistralForCausalLM", sliding_window=None) == "llama"
    assert windows("Qwen2ForCausalLM", sliding_window=64, use_sliding_window=True, max_window_layers=1) == [0, 64]
    assert windows("Qwen2ForCausalLM", sliding_window=64, use_sliding_window=False) == "llama"
    assert windows("Qwen3ForCausalLM", True, sliding_window=64, use_sliding_window=True,
                   layer_types=["full_attention", "sliding_attention"]) == [0, 64]


def test_refusals():
    """what the decoder does not compute is refused in a line"""
    for source, words in (
            (gguf_file(**{"ARCH.final_logit_softcapping": 30.0}), "gemma3.final_logit_softcapping = 30"),
            (gguf_file(**{"ARCH.attention.sliding_window_pattern": [True]}), "sliding_window_pattern has 1 layers of 2"),
            (folder(attn_logit_softcapping=50.0), "attn_logit_softcapping 50.0"),
            (folder(hidden_activation="gelu"), "hidden_activation 'gelu' is not gelu_pytorch_tanh"),
            (folder(use_bidirectional_attention=True), "use_bidirectional_attention True"),
            (folder(layer_types=["chunked_attention"] * 2), "layer_types must name 2 layers"),
            (folder(sliding_window=None), "has no sliding_window")):
        _, status, errors = convert(source)
        assert status == 1 and words in errors, (words, errors)


def tokens_file(ids, vocabulary):
    path = fresh(".tokens.h5")
    with h5py.File(path, "w") as file:
        file.attrs.update(dict(schema="tokens", schema_version=[1, 0], created_by="test", tokenizer="none",
                               tokenizer_sha256="1" * 64, vocab_size=vocabulary, text_name="none", text_sha256="2" * 64,
                               add_bos=0))
        file["tokens"], file["sequence_offsets"] = np.asarray(ids, np.int32), [0, len(ids)]
    return path


def assert_evaluates(path, ids, tolerance):
    model = Model(path)
    want = np.exp(nll(model, forward(model, ids)[0], ids) / (len(ids) - 1))
    done = subprocess.run([LOWKEY, "eval", "--model", path, "--tokens", tokens_file(ids, int(model.root["vocab_size"])),
                           "--window", str(len(ids)), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["formats"][0]["perplexity"]
    assert abs(found / want - 1) < tolerance, (found, want)


def test_decoder():
    """perplexity of a small Gemma beyond its window is that of a forward pass in f64"""
    path = converted(gguf_file(**{"ARCH.attention.sliding_window_pattern": 2}))
    assert_evaluates(path, np.random.default_rng(1).integers(0, 40, 150), 2e-6)


def pieces(add_space_prefix=False, scores=None, unknown=3):
    """A small SentencePiece vocabulary: specials, some bytes, letters and what they join to."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", "  "] + [f"<0x{i:02X}>" for i in range(256)]
    types = [3, 3, 3, 3, 4, 4] + [6] * 256
    joined = ["ab", "\u2581a", "bc", "abc", "\u2581ab", "\u2581", "a", "b", "c"]
    path = fresh(".gguf")
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + joined)
    writer.add_token_types(types + [1] * len(joined))
    writer.add_token_scores([-1000.0] * 6 + [0.0] * 256 + [-float(i) for i in range(len(joined))] if scores is None else scores)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(unknown)
    writer.add_add_space_prefix(add_space_prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def encode(path, text):
    tokenizer, _, _ = tokenize_text.tokenizer_from_gguf(path)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    return [tokenizer.id_to_token(i) for i in ids]


def test_sentence_piece():
    """neighbours of the highest score join first, runs of spaces and line ends are pieces, the rest is spelled in bytes"""
    path = pieces()
    assert encode(path, "abc") == ["abc"]            # ab, then abc
    assert encode(path, " abc") == ["\u2581", "abc"]  # ab before _a, abc before _ab
    assert encode(path, " a b") == ["\u2581a", "\u2581", "b"]
    assert encode(path, "a  a\n\u00e9") == ["a", "  ", "a", "\n", "<0xC3>", "<0xA9>"]
    for refused, words in ((pieces(add_space_prefix=True), "add_space_prefix"), (pieces(unknown=9999), "no unknown token"),
                           (pieces(scores=[0.0]), "scores are missing")):
        status, errors = call(tokenize_text, refused, VALID, fresh(".h5"))
        assert status == 1 and words in errors, (words, errors)


def test_sequences():
    """with --sequence each begins with BOS, in order, and what is left over is not used"""
    text, out = fresh(".txt"), fresh(".h5")
    with open(text, "w", encoding="utf-8") as file:
        file.write("a\nb\nc\na")
    for options, want, offsets in ((["--add-bos", "--sequence", "4"], [2, "a", 4, "b", 2, 4, "c", 4], [0, 4, 8]),
                                   (["--sequence", "3"], ["a", 4, "b", 4, "c", 4], [0, 3, 6]),
                                   (["--add-bos"], [2, "a", 4, "b", 4, "c", 4, "a"], [0, 8])):
        status, errors = call(tokenize_text, pieces(), text, out, *options)
        assert status == 0, errors
        letters = dict(a=268, b=269, c=270)
        with h5py.File(out) as file:
            assert file["tokens"][...].tolist() == [letters.get(x, x) for x in want]
            assert file["sequence_offsets"][...].tolist() == offsets
            assert file.attrs["add_bos"] == int("--add-bos" in options)
    status, errors = call(tokenize_text, pieces(), text, out, "--sequence", "100")
    assert status == 1 and "no tokens for a sequence of 100" in errors, errors


def real():
    if not os.path.exists(REAL):
        tap.skip("no Gemma here (make model-gemma)")


def test_real_tokenizer():
    """Gemma's own tokenizer: known ids, and texts come back"""
    real()
    tokenizer, _, bos = tokenize_text.tokenizer_from_gguf(GGUF)
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    assert bos == 2 and tokenizer.get_vocab_size() == 262144
    # The first tokens of a chat as Hugging Face's documentation prints them.
    assert ids("<start_of_turn>user\n") == [105, 2364, 107]
    assert ids("Hello world") == [9259, 1902]
    text = open(VALID, encoding="utf-8").read()
    found = ids(text)
    assert len(found) == 259887 and tokenizer.decode(found, skip_special_tokens=False) == text
    for text in ("def f(x):\n    return\t\t\u00e9\u4e16\u754c \U0001f999 \x01  ", "1984 don't   ", "\u2581"):
        assert tokenizer.decode(ids(text), skip_special_tokens=False).replace("\u2581", " ") == text.replace("\u2581", " ")


def test_real_model():
    """the real Gemma's perplexity over a window of 560 tokens, more than its layers see, is that in f64"""
    real()
    if os.environ.get("FULL") != "1":
        tap.skip("takes two minutes and 4 GB (make test-full)")
    tokenizer, _, bos = tokenize_text.tokenizer_from_gguf(GGUF)
    text = open(VALID, encoding="utf-8").read()[:20000]
    assert_evaluates(REAL, np.array([bos] + tokenizer.encode(text, add_special_tokens=False).ids[:559]), 2e-5)


try:
    tap.run(globals())
finally:
    shutil.rmtree(WORK)
