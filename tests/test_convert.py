"""convert_model.py: the same tensors from safetensors and GGUF, RoPE's frequencies, and what is refused."""
import glob
import hashlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import gguf
import h5py
import numpy as np

import tap
from tiny_llama import checkpoint, config, write_folder, write_gguf

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, f"{ROOT}/experiments")
import convert_model  # noqa: E402
from in_process import call  # noqa: E402

LOWKEY = f"{ROOT}/{os.environ.get('B', 'build/opt')}/lowkey"
WORK = tempfile.mkdtemp()
GGUF = f"{ROOT}/build/model/SmolLM2-135M-Instruct.Q4_1.gguf"
REAL = f"{ROOT}/build/model/smollm2-135m.model.h5"
count = 0


def fresh(suffix=""):
    global count
    count += 1
    return f"{WORK}/{count}{suffix}"


def convert(source, *options):
    out = fresh(".model.h5")
    return out, *call(convert_model, source, out, *options)


def converted(source, *options):
    out, status, errors = convert(source, *options)
    assert status == 0, errors
    return out


def refused(source, words):
    out, status, errors = convert(source)
    assert status == 1 and words in errors.splitlines()[-1], (words, status, errors)
    assert not glob.glob(f"{out}*"), "something was left behind"


def folder(tensors=None, settings=None, **how):
    path = fresh()
    write_folder(path, checkpoint() if tensors is None else tensors, settings or config(), **how)
    return path


def gguf_file(tensors=None, **how):
    path = fresh(".gguf")
    write_gguf(path, checkpoint() if tensors is None else tensors, **how)
    return path


def canonical_sha256(tensors):
    digest = hashlib.sha256()
    for path, values in tensors.items():
        shape = ",".join(str(n) for n in values.shape)
        digest.update(f"{path}\n{shape}\n".encode() + values.astype("<f4").tobytes())
    return digest.hexdigest()


def assert_holds(path, tensors):
    with h5py.File(path) as file:
        for name, values in tensors.items():
            assert file[name].dtype == np.float32 and np.array_equal(file[name][...], values), name
        found = []
        file.visititems(lambda name, item: found.append("/" + name)
                        if isinstance(item, h5py.Dataset) else None)
        assert sorted(found) == sorted([*tensors,
                                        *(f"/layers/{i:03d}/rope_inv_freq"
                                          for i in range(file.attrs["n_layers"]))])
        assert file.attrs["model_sha256"] == canonical_sha256(tensors)


def test_safetensors():
    """safetensors in f32, f16, bf16, whole and in shards, give the checkpoint and one hash"""
    tensors = checkpoint()
    for how in (dict(), dict(dtype="float16"), dict(dtype="bfloat16"), dict(dtype="bfloat16", shards=3)):
        assert_holds(converted(folder(**how)), tensors)


def test_gguf():
    """GGUF with permuted query and key rows gives the same tensors and hash"""
    assert_holds(converted(gguf_file()), checkpoint())


def test_variants():
    """bias, QK-norm and a separate output come through both readers"""
    for hf, ours, bias, norm in (("Qwen2ForCausalLM", "qwen2", True, False),
                                 ("Qwen3ForCausalLM", "qwen3", False, True),
                                 ("LlamaForCausalLM", "llama", True, False)):
        tensors = checkpoint(bias=bias, qk_norm=norm, untied=True)
        for out in (converted(folder(tensors, config(hf, tie_word_embeddings=False))),
                    converted(gguf_file(tensors, architecture=ours))):
            assert_holds(out, tensors)
            with h5py.File(out) as file:
                assert [file.attrs[k] for k in ("tied_output", "attention_bias",
                                                "qk_norm")] == [0, int(bias), int(norm)]


def test_attributes():
    """geometry and provenance are the source's, and lowkey check finds both files good"""
    paths = converted(folder(), "--name", "N", "--license", "L"), converted(gguf_file())
    for path, name, licence in zip(paths, ("N", "tiny"), ("L", "mit")):
        with h5py.File(path) as file:
            want = dict(schema="model", architecture="llama", n_layers=2, hidden_size=32,
                        intermediate_size=48, vocab_size=40,
                        rms_norm_eps=1e-5, tied_output=1, attention_bias=0, qk_norm=0, bos_token_id=1, eos_token_id=2,
                        model_name=name, license=licence)
            assert {k: file.attrs[k] for k in want} == want
            layer = dict(n_q_heads=4, n_kv_heads=2, key_head_dim=8, value_head_dim=8, rope_dims=8,
                         rope_pairing="half",
                         logit_scale=1 / math.sqrt(8), rope_attention_factor=1.0)
            assert dict(file["layers/001"].attrs) == layer
        done = subprocess.run([LOWKEY, "check", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout


def test_equal_bytes():
    """the same source twice is the same file"""
    for source in (folder(), gguf_file()):
        with open(converted(source), "rb") as a, open(converted(source), "rb") as b:
            assert a.read() == b.read()


def frequencies(path):
    with h5py.File(path) as file:
        return file["layers/000/rope_inv_freq"][...], float(file["layers/000"].attrs["rope_attention_factor"])


def test_rope():
    """RoPE scaling, plain, linear, llama3 and yarn, is in the frequencies, as the papers' formulas have it"""
    theta, dim, trained = 500000.0, 8, 8192
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]

    def llama3(f, factor=8, low=1, high=4):
        wave = 2 * math.pi / f
        if wave < trained / high:
            return f
        if wave > trained / low:
            return f / factor
        smooth = (trained / wave - low) / (high - low)
        return (1 - smooth) * f / factor + smooth * f

    def yarn(i, factor=4):
        turns = trained * plain[i] / (2 * math.pi)
        first = max(0, math.floor(dim / 2 * math.log(trained / (32 * 2 * math.pi)) / math.log(theta)))
        last = min(dim - 1, math.ceil(dim / 2 * math.log(trained / (2 * math.pi)) / math.log(theta)))
        part = min(1, max(0, (i - first) / (last - first)))
        assert turns > 0
        return plain[i] / factor * part + plain[i] * (1 - part)
    cases = [
        ({}, plain, 1),
        (dict(rope_type="linear", factor=4.0), [f / 4 for f in plain], 1),
        (dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=trained),
         [llama3(f) for f in plain], 1),
        (dict(type="yarn", factor=4.0, original_max_position_embeddings=trained),
         [yarn(i) for i in range(dim // 2)], 0.1 * math.log(4) + 1),
        (dict(type="yarn", factor=4.0, original_max_position_embeddings=trained, attention_factor=1.5),
         [yarn(i) for i in range(dim // 2)], 1.5),
    ]
    assert len({llama3(f) / f for f in plain}) == 3, "all three branches are in the case"
    for scaling, want, factor in cases:
        in_parameters = dict(scaling or dict(rope_type="default"), rope_theta=theta)
        for settings in (config(rope_theta=theta, rope_scaling=scaling or None),
                         config(rope_theta=..., rope_parameters=in_parameters)):
            found, attention_factor = frequencies(converted(folder(settings=settings)))
            assert np.allclose(found, want, rtol=1e-14) and abs(attention_factor - factor) < 1e-14, (scaling, found, want)
    base = {"ARCH.rope.freq_base": theta, "ARCH.rope.scaling.factor": 4.0}
    for kind, extra, want, factor in (("linear", {}, cases[1][1], 1),
                                      ("yarn", {"ARCH.rope.scaling.original_context_length": trained},
                                       *cases[3][1:])):
        found, attention_factor = frequencies(converted(gguf_file(extra={**base, "ARCH.rope.scaling.type": kind, **extra})))
        assert np.allclose(found, want, rtol=1e-7) and abs(attention_factor - factor) < 1e-7, kind
    divisors = np.array([f / llama3(f) for f in plain], np.float32)
    found, _ = frequencies(converted(gguf_file(extra={"ARCH.rope.freq_base": theta}, change={"rope_freqs.weight": divisors})))
    assert np.allclose(found, cases[2][1], rtol=1e-6)


def test_refusals_of_folders():
    """what a folder has that the format cannot say is refused in a line, and no file is left"""
    q = "model.layers.1.self_attn.q_proj.weight"
    for settings, words in (
            (config("GemmaForCausalLM"), "architecture 'GemmaForCausalLM' is not one of LlamaForCausalLM"),
            (config(architectures=None), "architecture 'none named'"), (config(hidden_act="gelu"), "hidden_act 'gelu' is not silu"),
            (config("MistralForCausalLM", sliding_window=-1), "sliding_window must be a positive integer"),
            (config("Qwen2ForCausalLM", sliding_window=64, use_sliding_window=True), "max_window_layers must be an integer, found None"),
            (config(quantization_config={}),
             "quantized"), (config(hidden_size="32"), "hidden_size must be a number, found '32'"),
            (config(num_attention_heads=3), "3 query heads are not a multiple of 2 KV heads"),
            (config(head_dim=12), "key_head_dim must be a multiple of 8 up to 256, found 12"),
            (config(head_dim=16), "expected shape [64, 32], found [32, 32]"),
            (config(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "RoPE scaling 'dynamic'"),
            (config(rope_scaling=dict(rope_type="linear")), "factor must be a number above 0, found None"),
            (config(num_hidden_layers=3), "has no tensor model.layers.2.input_layernorm.weight"),
            (config(num_hidden_layers=1), "has no place in model.h5"), (config(tie_word_embeddings=False), "has no tensor lm_head.weight")):
        refused(folder(settings=settings), words)
    nan = checkpoint()
    nan["/layers/001/query_proj"][3, 4] = np.nan
    refused(folder(nan), f"tensor {q}: holds values that are not finite")
    refused(folder({**checkpoint(), "model.layers.0.self_attn.o_proj.bias": np.zeros(32)}),
            "o_proj.bias has no place")
    refused(folder({**checkpoint(), "lm_head.weight": np.ones((40, 32))}), "lm_head.weight differs")
    refused(folder(dtype="int8"), "type I8 is not one of F64, F32, F16, BF16")
    refused(folder({**checkpoint(), q: np.ones((32, 31))}), "expected shape [32, 32], found [32, 31]")
    empty = folder()
    os.remove(f"{empty}/model.safetensors")
    refused(empty, "has no *.safetensors")
    for name, content in (("config.json", b"{"), ("model.safetensors", b"no"), ("model.safetensors", b"")):
        broken = folder()
        with open(f"{broken}/{name}", "wb") as file:
            file.write(content)
        refused(broken, name)
    refused(os.path.dirname(GGUF), "config.json: No such file or directory")


def test_refusals_of_gguf():
    """what a GGUF file has that the format cannot say is refused in a line, and no file is left"""
    for how, words in (
            (dict(architecture="gemma"), "architecture 'gemma' is not one of llama, qwen2, qwen3, gemma3"),
            (dict(extra={"ARCH.expert_count": 8}), "llama.expert_count = 8"),
            (dict(extra={"ARCH.attention.sliding_window": 8}), "llama.attention.sliding_window = 8"),
            (dict(extra={"ARCH.rope.dimension_count": 4}),
             "partial RoPE"), (dict(extra={"split.count": 2}), "one of 2 parts"),
            (dict(extra={"ARCH.rope.scaling.type": "longrope"}), "RoPE scaling 'longrope'"),
            (dict(change={"blk.1.attn_q.weight": None}), "has no tensor blk.1.attn_q.weight"),
            (dict(change={"token_embd.weight": None}), "has no tensor token_embd.weight"),
            (dict(change={"blk.0.attn_output.bias": np.ones(32, np.float32)}),
             "blk.0.attn_output.bias has no place"),
            (dict(change={"rope_freqs.weight": np.zeros(4, np.float32)}), "expected 4 divisors above 0, 4 found")):
        refused(gguf_file(**how), words)
    whole = gguf_file()
    size = os.path.getsize(whole)
    for cut in (0, 1, 8, 96, size // 2, size - 1):
        path = fresh(".gguf")
        with open(whole, "rb") as source, open(path, "wb") as target:
            target.write(source.read(cut))
        refused(path, path)
    refused(f"{ROOT}/Makefile", "no readable GGUF file")
    refused(f"{WORK}/none.gguf", "No such file or directory")


def test_blocks():
    """the real model's Q4_1 and Q8_0 blocks are dequantized, and its query rows are in Hugging Face order"""
    def q4_1(row):
        blocks = row.reshape(-1, 20)
        scale, least = (blocks[:, i:i + 2].copy().view("<f2").astype(np.float32) for i in (0, 2))
        nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
        return (nibbles * scale + least).ravel()

    def q8_0(row):
        blocks = row.reshape(-1, 34)
        return (blocks[:, :2].copy().view("<f2").astype(np.float32) * blocks[:, 2:].view(np.int8)).ravel()
    raw = {t.name: t.data for t in gguf.GGUFReader(GGUF).tensors}
    with h5py.File(REAL) as file:
        for row in (0, 17, 49151):
            assert np.array_equal(file["token_embedding"][row], q8_0(raw["token_embd.weight"][row]))
        for head, i, half in ((0, 0, 0), (0, 1, 0), (3, 5, 1), (8, 31, 1)):
            here, there = head * 64 + i + 32 * half, head * 64 + 2 * i + half
            assert np.array_equal(file["layers/007/query_proj"][here],
                                  q4_1(raw["blk.7.attn_q.weight"][there])), (head, i, half)
        assert np.array_equal(file["layers/029/value_proj"][5], q4_1(raw["blk.29.attn_v.weight"][5]))


def test_real_model():
    """lowkey check recomputes the hash of the real model's tensors and finds it good"""
    done = subprocess.run([LOWKEY, "check", REAL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout


def test_interrupted():
    """an interrupted conversion leaves the old file whole and nothing else"""
    out = fresh(".model.h5")
    shutil.copy(converted(folder()), out)
    with open(out, "rb") as file:
        before = file.read()
    running = subprocess.Popen([sys.executable, f"{ROOT}/experiments/convert_model.py", GGUF, out],
                               stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not glob.glob(f"{out}.*") and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130 and "interrupted" in errors, errors
    with open(out, "rb") as file:
        assert file.read() == before
    assert not glob.glob(f"{out}.*")


def test_usage():
    """wrong usage exits with 2"""
    for arguments in ([], ["a"], ["a", "b", "c"], ["a", "b", "--no"]):
        done = subprocess.run([sys.executable, f"{ROOT}/experiments/convert_model.py", *arguments],
                              capture_output=True, text=True)
        assert done.returncode == 2 and "usage:" in done.stderr


try:
    tap.run(globals())
finally:
    shutil.rmtree(WORK)
