"""A small Llama-like checkpoint written as a Hugging Face folder and as GGUF, the way their own converters would."""
import json
import os
import struct

import gguf
import numpy as np

LAYER_NAMES = [  # model.h5, Hugging Face, GGUF, in the order of model_sha256
    ("attention_norm", "input_layernorm.weight", "attn_norm.weight"),
    ("query_proj", "self_attn.q_proj.weight",
     "attn_q.weight"), ("key_proj", "self_attn.k_proj.weight", "attn_k.weight"),
    ("value_proj", "self_attn.v_proj.weight", "attn_v.weight"),
    ("query_bias", "self_attn.q_proj.bias",
     "attn_q.bias"), ("key_bias", "self_attn.k_proj.bias", "attn_k.bias"),
    ("value_bias", "self_attn.v_proj.bias", "attn_v.bias"),
    ("query_norm", "self_attn.q_norm.weight",
     "attn_q_norm.weight"), ("key_norm", "self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("output_proj", "self_attn.o_proj.weight",
     "attn_output.weight"),
    ("post_attention_norm", "post_attention_layernorm.weight", "post_attention_norm.weight"),  # Gemma's
    ("ffn_norm", "post_attention_layernorm.weight", "ffn_norm.weight"),
    ("gate_proj", "mlp.gate_proj.weight",
     "ffn_gate.weight"), ("up_proj", "mlp.up_proj.weight", "ffn_up.weight"),
    ("down_proj", "mlp.down_proj.weight", "ffn_down.weight"),
    ("post_ffn_norm", "post_feedforward_layernorm.weight", "post_ffw_norm.weight"),  # Gemma's
]


def checkpoint(hidden=32, ffn=48, vocab=40, layers=2, q_heads=4, kv_heads=2, dim=8, bias=False, qk_norm=False,
               untied=False, post_norms=False):
    """model.h5's path -> f32 values, which f16 and bf16 hold exactly; in the order of model_sha256."""
    random = np.random.default_rng(5)

    def tensor(*shape):
        return (random.integers(-64, 65, shape) / 64).astype(np.float32)
    shapes = dict(attention_norm=(hidden,), query_proj=(q_heads * dim, hidden),
                  key_proj=(kv_heads * dim, hidden),
                  value_proj=(kv_heads * dim, hidden), query_bias=(q_heads * dim,), key_bias=(kv_heads * dim,),
                  value_bias=(kv_heads * dim,), query_norm=(dim,), key_norm=(dim,), output_proj=(hidden, q_heads * dim),
                  ffn_norm=(hidden,), post_attention_norm=(hidden,),
                  post_ffn_norm=(hidden,), gate_proj=(ffn, hidden), up_proj=(ffn, hidden), down_proj=(hidden, ffn))
    absent = ([] if bias else ["query_bias", "key_bias",
                               "value_bias"]) + ([] if qk_norm else ["query_norm", "key_norm"])
    absent += [] if post_norms else ["post_attention_norm", "post_ffn_norm"]
    tensors = {"/token_embedding": tensor(vocab, hidden)}
    for layer in range(layers):
        for name, _, _ in LAYER_NAMES:
            if name not in absent:
                tensors[f"/layers/{layer:03d}/{name}"] = tensor(*shapes[name])
    tensors["/final_norm"] = tensor(hidden)
    if untied:
        tensors["/output"] = tensor(vocab, hidden)
    return tensors


def config(architecture="LlamaForCausalLM", **changes):
    settings = dict(architectures=[architecture], hidden_act="silu", hidden_size=32, intermediate_size=48,
                    vocab_size=40,
                    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=10000.0,
                    tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, max_position_embeddings=64)
    settings.update(changes)
    return {key: value for key, value in settings.items() if value is not ...}


def folder_name(path):
    top = {"/token_embedding": "model.embed_tokens.weight", "/final_norm": "model.norm.weight",
           "/output": "lm_head.weight"}
    if path in top:
        return top[path]
    _, _, layer, name = path.split("/")
    return f"model.layers.{int(layer)}." + next(theirs for ours, theirs, _ in LAYER_NAMES if ours == name)


def write_folder(folder, tensors, settings, dtype="float32", shards=1, names=None):
    """tensors: paths of model.h5, or names of Hugging Face, to arrays."""
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(settings, file)
    files, where = [{} for _ in range(shards)], {}
    for i, (path, values) in enumerate(tensors.items()):
        name = (names or folder_name)(path) if path.startswith("/") else path
        data = values.astype(np.float32)
        data = (data.view(np.uint32) >> 16).astype("<u2") if dtype == "bfloat16" else data.astype(dtype)
        files[i % shards][name] = (values.shape, data.tobytes())
        where[name] = f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
    for i, content in enumerate(files):
        write_safetensors(os.path.join(folder, sorted(set(where.values()))[i]), content, dtype)
    if shards > 1:
        with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump(dict(weight_map=where), file)


def write_safetensors(path, content, dtype):
    short, offset, header = dict(float32="F32", float16="F16", bfloat16="BF16", int8="I8")[dtype], 0, {}
    for name, (shape, data) in content.items():
        header[name] = dict(dtype=short, shape=list(shape), data_offsets=[offset, offset + len(data)])
        offset += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, data in content.values()))


def permuted(rows, n_heads):
    """Row by row: the first half's row i of a head goes to 2i, the second half's to 2i + 1."""
    out, dim = np.empty_like(rows), len(rows) // n_heads
    for head in range(n_heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = rows[head * dim + i]
            out[head * dim + 2 * i + 1] = rows[head * dim + dim // 2 + i]
    return out


def write_gguf(path, tensors, architecture="llama", extra=None, change=None):
    """extra: metadata to add; change: name -> array or None, tensors to replace or leave out."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_license("mit")
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base((extra or {}).pop("ARCH.rope.freq_base", 10000.0))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in (extra or {}).items():
        add = writer.add_array if isinstance(value, list) else writer.add_string if isinstance(value, str) else writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(name.replace("ARCH", architecture), value)
    written = {}
    for ours, values in tensors.items():
        top = {"/token_embedding": "token_embd.weight", "/final_norm": "output_norm.weight",
               "/output": "output.weight"}
        name = top.get(ours)
        if not name:
            _, _, layer, last = ours.split("/")
            name = f"blk.{int(layer)}." + next(theirs for mine, _, theirs in LAYER_NAMES if mine == last)
            if architecture == "llama" and last.split("_")[0] in ("query", "key"):
                values = permuted(values, 4 if last.startswith("query") else 2)
        written[name] = values
    written.update(change or {})
    for name, values in written.items():
        if values is not None:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
