#!/usr/bin/env python3
"""A Llama-like model, or a Gemma 3, from GGUF or safetensors to model.h5 (formats/README.md, "model.h5").

    convert_model.py MODEL.gguf OUT.model.h5
    convert_model.py FOLDER OUT.model.h5        a Hugging Face folder: config.json and *.safetensors

Weights become f32 (block formats are dequantized once), channels are in Hugging Face order, RoPE becomes its
vector of inverse frequencies. What the format cannot say is refused by name: other architectures, experts,
any tensor that has no place in model.h5.
"""
import argparse
import hashlib
import json
import math
import os
import struct

import gguf
import h5py
import numpy as np
from safetensors import SafetensorError, safe_open

import gemma
from artefact import Refused, need, note, progress, run, set_schema, whole_file
from rope_scaling import inverse_frequencies

# model.h5's name, Hugging Face's, GGUF's; in the order that model_sha256 goes through them.
LAYER_TENSORS = [
    ("attention_norm", "input_layernorm.weight", "attn_norm.weight"),
    ("query_proj", "self_attn.q_proj.weight", "attn_q.weight"),
    ("key_proj", "self_attn.k_proj.weight", "attn_k.weight"),
    ("value_proj", "self_attn.v_proj.weight", "attn_v.weight"),
    ("query_bias", "self_attn.q_proj.bias", "attn_q.bias"),
    ("key_bias", "self_attn.k_proj.bias", "attn_k.bias"),
    ("value_bias", "self_attn.v_proj.bias", "attn_v.bias"),
    ("query_norm", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("key_norm", "self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("output_proj", "self_attn.o_proj.weight", "attn_output.weight"),
    ("post_attention_norm", "post_attention_layernorm.weight", "post_attention_norm.weight"),
    ("ffn_norm", "post_attention_layernorm.weight", "ffn_norm.weight"),
    ("gate_proj", "mlp.gate_proj.weight", "ffn_gate.weight"),
    ("up_proj", "mlp.up_proj.weight", "ffn_up.weight"),
    ("down_proj", "mlp.down_proj.weight", "ffn_down.weight"),
    ("post_ffn_norm", "post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
]
# What the decoder of experiments/lm computes, and whether it normalises queries and keys. Biases show by
# their tensors.
FOLDER_QK_NORM = {"LlamaForCausalLM": 0, "MistralForCausalLM": 0, "Qwen2ForCausalLM": 0,
                  "Qwen3ForCausalLM": 1, "Gemma3ForCausalLM": 1}
GGUF_QK_NORM = {"llama": 0, "qwen2": 0, "qwen3": 1, "gemma3": 1}


class Model:
    """A model as model.h5 wants it: attributes of the root and of every layer, and a reader of tensors."""

    def __init__(self, **attributes):
        self.attributes = attributes      # as in formats/README.md
        self.layer = {}                   # geometry, the same in each layer
        self.inverse_frequencies = None   # [rope_dims / 2]
        self.window = None                # [n_layers], 0: sees all; None: no layer has one
        self.local_frequencies = None     # as inverse_frequencies, of layers with a window; None: the same
        self.read = None                  # name of the source's tensor -> f32 array
        self.names = {}                   # path in model.h5 -> name in the source
        self.unused = set()               # names in the source that nothing asked for


# ---- GGUF ----

def open_gguf(path):
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, AssertionError) as why:
        raise Refused(f"{path}: no readable GGUF file: {why}") from None

    def field(name, default=None):
        found = reader.get_field(name)
        return default if found is None else found.contents()
    return reader, field


def read_gguf(path):
    reader, field = open_gguf(path)
    architecture = field("general.architecture")
    need(architecture in GGUF_QK_NORM,
         f"{path}: architecture '{architecture}' is not one of {', '.join(GGUF_QK_NORM)}")
    need(field("split.count", 1) in (0, 1),
         f"{path}: is one of {field('split.count')} parts; merge them with gguf-split")

    def setting(name, default=None):
        value = field(f"{architecture}.{name}", default)
        need(value is not None, f"{path}: has no {architecture}.{name}")
        need(not isinstance(value, list),
             f"{path}: {architecture}.{name} differs between layers, which is not supported")
        return value
    windowed = ("attention.sliding_window",) if architecture != "gemma3" else ()
    for name in ("expert_count", "attention.max_alibi_bias", *windowed):
        need(not setting(name, 0),
             f"{path}: {architecture}.{name} = {setting(name, 0)}: not a plain Llama-like model")
    for name in ("logit_scale", "embedding_scale", "residual_scale"):
        need(setting(name, 1) in (0, 1),
             f"{path}: {architecture}.{name} = {setting(name, 1)}: not a plain Llama-like model")

    tensors = {t.name: t for t in reader.tensors}
    need("token_embd.weight" in tensors, f"{path}: has no tensor token_embd.weight")
    hidden, q_heads = setting("embedding_length"), setting("attention.head_count")
    key_dim = setting("attention.key_length", hidden // max(q_heads, 1))
    rope_dims = setting("rope.dimension_count", key_dim)
    permuted = architecture == "llama"
    need(not permuted or rope_dims == key_dim,
         f"{path}: partial RoPE ({rope_dims} of {key_dim} channels) of permuted llama rows is not supported")

    model = Model(
        architecture="llama", hidden_size=hidden, intermediate_size=setting("feed_forward_length"),
        vocab_size=int(tensors["token_embd.weight"].shape[-1]), n_layers=setting("block_count"),
        # 1e-05 again, from the f32 that is nearest to it.
        rms_norm_eps=float(str(np.float32(setting("attention.layer_norm_rms_epsilon")))),
        tied_output=int("output.weight" not in tensors),
        attention_bias=int("blk.0.attn_q.bias" in tensors), qk_norm=GGUF_QK_NORM[architecture],
        bos_token_id=field("tokenizer.ggml.bos_token_id",
                           -1), eos_token_id=field("tokenizer.ggml.eos_token_id", -1),
        model_name=field("general.name", os.path.basename(path)), source=os.path.basename(path),
        license=field("general.license", "unknown"))
    model.layer = dict(n_q_heads=q_heads, n_kv_heads=setting("attention.head_count_kv", q_heads),
                       key_head_dim=key_dim,
                       value_head_dim=setting("attention.value_length",
                                              key_dim), rope_dims=rope_dims, rope_pairing="half",
                       logit_scale=setting("attention.scale", 0.0) or 1 / math.sqrt(key_dim))
    gguf_rope(model, setting, tensors, rope_dims)
    if architecture == "gemma3":
        gemma.gguf_extension(model, setting, field)
    for layer in range(model.attributes["n_layers"]):
        model.names.update({f"/layers/{layer:03d}/{ours}": f"blk.{layer}.{theirs}"
                            for ours, _, theirs in LAYER_TENSORS})
    model.names.update({"/token_embedding": "token_embd.weight", "/final_norm": "output_norm.weight",
                        "/output": "output.weight"})

    def read(name):
        tensor = tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise Refused(f"{path}: tensor {name}: no reader for type {tensor.tensor_type.name}") from None
        values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        heads = {"attn_q": "n_q_heads", "attn_k": "n_kv_heads"}.get(name.split(".")[-2])
        return unpermuted(values, model.layer[heads]) if permuted and heads else values
    model.read = read
    model.unused = set(tensors) - {"rope_freqs.weight"}
    return model


def unpermuted(rows, n_heads):
    """Undo what converters to GGUF do for llama: row 2i + s of a head is row i + s * dim/2 of theirs."""
    need(rows.shape[0] % (2 * n_heads) == 0,
         f"{rows.shape[0]} query or key rows are not {n_heads} heads of even size")
    return rows.reshape(n_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_rope(model, setting, tensors, dims):
    scaling = {"type": setting("rope.scaling.type", "none")}
    need(scaling["type"] in ("none", "linear", "yarn"),
         f"RoPE scaling '{scaling['type']}' is not one of none, linear, yarn")
    if scaling["type"] != "none":
        scaling["factor"] = setting("rope.scaling.factor")
    if scaling["type"] == "yarn":
        scaling["original_max_position_embeddings"] = setting("rope.scaling.original_context_length")
        scaling["beta_fast"] = setting("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = setting("rope.scaling.yarn_beta_slow", 1.0)
        need(setting("rope.scaling.yarn_ext_factor", 1.0) == 1,
             "YaRN with an ext_factor other than 1 is not supported")
    frequencies, factor = inverse_frequencies(float(setting("rope.freq_base", 10000.0)), dims, scaling)
    if scaling["type"] == "yarn":
        factor *= setting("rope.scaling.attn_factor", 1.0)
    if "rope_freqs.weight" in tensors:  # Llama-3's scaling, as divisors
        divisors = np.asarray(tensors["rope_freqs.weight"].data, np.float64).ravel()
        need(divisors.shape == frequencies.shape and np.all(divisors > 0),
             f"tensor rope_freqs.weight: expected {len(frequencies)} divisors above 0, {divisors.size} found")
        frequencies = frequencies / divisors
    model.inverse_frequencies, model.layer["rope_attention_factor"] = frequencies, float(factor)


# ---- safetensors ----

class Shards:
    """The tensors of a folder's *.safetensors, one read at a time. The library checks each header and its
    offsets; the bytes are read here, since its NumPy side knows no bf16."""

    def __init__(self, folder):
        files = sorted(f for f in os.listdir(folder) if f.endswith(".safetensors"))
        need(files, f"{folder}: has no *.safetensors")
        index = os.path.join(folder, "model.safetensors.index.json")
        if os.path.exists(index):
            files = sorted(set(load_json(index).get("weight_map", {}).values()))
        elif "model.safetensors" in files:
            files = ["model.safetensors"]
        self.where = {}
        for name in files:
            path = os.path.join(folder, name)
            try:
                safe_open(path, framework="np")
            except SafetensorError as why:
                raise Refused(f"{path}: {why}") from None
            with open(path, "rb") as file:
                size, = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            twice = self.where.keys() & header.keys()
            need(not twice, f"{path}: tensor {min(twice, default='')} is in another file too")
            self.where.update({key: (path, 8 + size, entry) for key, entry in header.items()})

    def read(self, name):
        path, start, entry = self.where[name]
        stored = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}.get(entry["dtype"])
        need(stored, f"{path}: tensor {name}: type {entry['dtype']} is not one of F64, F32, F16, BF16")
        begin, end = entry["data_offsets"]
        values = np.fromfile(path, stored, (end - begin) // np.dtype(stored).itemsize, offset=start + begin)
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(entry["shape"]).astype(np.float32, copy=False)


def load_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError) as why:
        raise Refused(f"{path}: no JSON: {why}") from None
    need(isinstance(found, dict), f"{path}: expected a JSON object")
    return found


def read_folder(folder):
    path = os.path.join(folder, "config.json")
    config = load_json(path)
    architecture = (config.get("architectures") or ["none named"])[0]
    need(architecture in FOLDER_QK_NORM,
         f"{path}: architecture '{architecture}' is not one of {', '.join(FOLDER_QK_NORM)}")
    need("quantization_config" not in config,
         f"{path}: weights are quantized (quantization_config); convert the original")
    is_gemma = architecture == "Gemma3ForCausalLM"
    need(is_gemma or config.get("hidden_act", "silu") == "silu",
         f"{path}: hidden_act '{config.get('hidden_act')}' is not silu")

    def setting(name, default=None):
        value = config.get(name)
        if value is None and default is not None:
            note(f"{path}: no {name}; {default} is taken, as the architecture does")
            value = default
        need(isinstance(value, (int, float)), f"{path}: {name} must be a number, found {value!r}")
        return value
    shards = Shards(folder)
    hidden, q_heads = setting("hidden_size"), setting("num_attention_heads")
    key_dim = config.get("head_dim") or hidden // max(q_heads, 1)
    tied = bool(config.get("tie_word_embeddings", is_gemma))
    name = os.path.basename(os.path.abspath(folder))
    model = Model(
        architecture="llama", hidden_size=hidden, intermediate_size=setting("intermediate_size"),
        vocab_size=setting("vocab_size"), n_layers=setting("num_hidden_layers"),
        rms_norm_eps=float(setting("rms_norm_eps")),
        tied_output=int(tied), attention_bias=int("model.layers.0.self_attn.q_proj.bias" in shards.where),
        qk_norm=FOLDER_QK_NORM[architecture], bos_token_id=token_id(config, "bos_token_id"),
        eos_token_id=token_id(config, "eos_token_id"), source=name,
        model_name=config.get("_name_or_path") or name, license="unknown")
    model.layer = dict(n_q_heads=q_heads, n_kv_heads=setting("num_key_value_heads", q_heads),
                       key_head_dim=key_dim,
                       value_head_dim=key_dim, logit_scale=1 / math.sqrt(key_dim), rope_pairing="half")
    folder_rope(model, config, setting, key_dim)
    model.window = gemma.folder_windows(config, architecture, model.attributes["n_layers"])
    if model.window:
        model.attributes.update(architecture="extended", activation="silu", post_norms=0, embedding_scale=1.0)
    if is_gemma:
        need(model.window, f"{path}: has no sliding_window")
        gemma.folder_extension(model, config, setting)
    names = gemma.FOLDER_NAMES if is_gemma else {}
    for layer in range(model.attributes["n_layers"]):
        model.names.update({f"/layers/{layer:03d}/{ours}": f"model.layers.{layer}.{names.get(ours, theirs)}"
                            for ours, theirs, _ in LAYER_TENSORS})
    model.names.update({"/token_embedding": "model.embed_tokens.weight", "/final_norm": "model.norm.weight",
                        "/output": "lm_head.weight"})
    # Gemma's checkpoints hold w where RMSNorm multiplies by 1 + w; its GGUF files hold 1 + w.
    model.read = (lambda name: shards.read(name) + np.float32(name.endswith("norm.weight"))) if is_gemma \
        else shards.read
    model.unused = {name for name in shards.where if not name.endswith("rotary_emb.inv_freq")}
    if tied and "lm_head.weight" in shards.where:
        need(np.array_equal(shards.read("lm_head.weight"), shards.read("model.embed_tokens.weight")),
             f"{path}: tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.weight")
        model.unused.discard("lm_head.weight")
    return model


def token_id(config, name):
    value = config.get(name)
    return -1 if value is None else value[0] if isinstance(value, list) else value


def folder_rope(model, config, setting, head_dim):
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get("full_attention", parameters)
    scaling = dict(config.get("rope_scaling") or parameters)
    scaling["type"] = scaling.get("rope_type", scaling.get("type", "default"))
    need(scaling["type"] in ("default", "linear", "llama3", "yarn"),
         f"config.json: RoPE scaling '{scaling['type']}' is not one of default, linear, llama3, yarn")
    if scaling["type"] == "default":
        scaling["type"] = "none"
    if scaling["type"] == "yarn":
        scaling.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        need(scaling.get("truncate", True),
             "config.json: RoPE scaling yarn with truncate false is not supported")
    theta = parameters.get("rope_theta") or setting("rope_theta", 10000.0)
    share = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    dims = int(head_dim * share)
    model.layer["rope_dims"] = dims
    frequencies, factor = inverse_frequencies(float(theta), dims, scaling)
    model.inverse_frequencies, model.layer["rope_attention_factor"] = frequencies, factor


# ---- model.h5 ----

def shapes(model):
    """Path -> shape of every tensor that this model must have, in the order of model_sha256."""
    a, g = model.attributes, model.layer
    hidden, ffn = a["hidden_size"], a["intermediate_size"]
    queries, keys = g["n_q_heads"] * g["key_head_dim"], g["n_kv_heads"] * g["key_head_dim"]
    values, outputs = g["n_kv_heads"] * g["value_head_dim"], g["n_q_heads"] * g["value_head_dim"]
    of = dict(attention_norm=(hidden,), query_proj=(queries, hidden), key_proj=(keys, hidden),
              value_proj=(values, hidden),
              query_bias=(queries,), key_bias=(keys,), value_bias=(values,), query_norm=(g["key_head_dim"],),
              key_norm=(g["key_head_dim"],), output_proj=(hidden, outputs), ffn_norm=(hidden,),
              gate_proj=(ffn, hidden),
              up_proj=(ffn, hidden), down_proj=(hidden, ffn), post_attention_norm=(hidden,), post_ffn_norm=(hidden,))
    absent = ([] if a["attention_bias"] else ["query_bias", "key_bias", "value_bias"]) + \
             ([] if a["qk_norm"] else ["query_norm", "key_norm"]) + \
             ([] if a.get("post_norms") else ["post_attention_norm", "post_ffn_norm"])
    result = {"/token_embedding": (a["vocab_size"], hidden)}
    for layer in range(a["n_layers"]):
        result.update({f"/layers/{layer:03d}/{name}": of[name] for name, _, _ in LAYER_TENSORS
                       if name not in absent})
    result["/final_norm"] = (hidden,)
    if not a["tied_output"]:
        result["/output"] = (a["vocab_size"], hidden)
    return result


def check_geometry(model):
    a, g = model.attributes, model.layer
    for name in ("hidden_size", "intermediate_size", "vocab_size", "n_layers"):
        need(isinstance(a[name], int) and a[name] > 0,
             f"{name} must be a positive integer, found {a[name]!r}")
    for name in ("n_q_heads", "n_kv_heads", "key_head_dim", "value_head_dim"):
        need(isinstance(g[name], int) and g[name] > 0,
             f"{name} must be a positive integer, found {g[name]!r}")
    need(g["n_q_heads"] % g["n_kv_heads"] == 0,
         f"{g['n_q_heads']} query heads are not a multiple of {g['n_kv_heads']} KV heads")
    for name in ("key_head_dim", "value_head_dim"):
        need(g[name] % 8 == 0 and g[name] <= 256,
             f"{name} must be a multiple of 8 up to 256, found {g[name]}")
    need(g["rope_dims"] % 2 == 0 and 0 <= g["rope_dims"] <= g["key_head_dim"],
         f"rope_dims must be even and at most {g['key_head_dim']}, found {g['rope_dims']}")


def checked_tensor(model, path, shape):
    name, source = model.names[path], model.attributes["source"]
    need(name in model.unused, f"{source}: has no tensor {name}")
    model.unused.discard(name)
    values = np.ascontiguousarray(model.read(name), "<f4")
    need(values.shape == shape,
         f"{source}: tensor {name}: expected shape {list(shape)}, found {list(values.shape)}")
    need(np.isfinite(values).all(), f"{source}: tensor {name}: holds values that are not finite")
    return values


def hash_tensor(digest, path, values):
    digest.update(f"{path}\n{','.join(map(str, values.shape))}\n".encode("ascii"))
    digest.update(values)


def write_model(model, path):
    check_geometry(model)
    wanted = shapes(model)

    def verify(temporary):
        digest = hashlib.sha256()
        with h5py.File(temporary) as file:
            for name in wanted:
                hash_tensor(digest, name, file[name][...])
            need(file.attrs["model_sha256"] == digest.hexdigest(),
                 f"{temporary}: was not read back as written")

    with whole_file(path, verify) as file:
        set_schema(file, "model", minor=int(model.window is not None))
        for name, value in model.attributes.items():
            file.attrs[name] = value
        for layer in range(model.attributes["n_layers"]):
            group = file.create_group(f"/layers/{layer:03d}")
            for name, value in model.layer.items():
                group.attrs[name] = value
            if model.layer["rope_dims"]:
                local = model.local_frequencies is not None and model.window[layer]
                group.create_dataset("rope_inv_freq", track_times=False,
                                     data=model.local_frequencies if local else model.inverse_frequencies)
        if model.window:
            file.create_dataset("window", data=np.array(model.window, np.int32), track_times=False)
        digest = hashlib.sha256()
        for done, (name, shape) in enumerate(wanted.items()):
            values = checked_tensor(model, name, shape)
            hash_tensor(digest, name, values)
            file.create_dataset(name, data=values, track_times=False)
            progress("convert", done + 1, len(wanted))
        need(not model.unused, f"{model.attributes['source']}: tensor {min(model.unused, default='')} has no place"
             f" in model.h5 ({len(model.unused)} such)")
        file.attrs["model_sha256"] = digest.hexdigest()
    return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="Exit status: 0 good, 1 failed, 2 wrong usage.")
    parser.add_argument("model", help="a GGUF file, or a folder with config.json and *.safetensors")
    parser.add_argument("out", help="model.h5 to write")
    parser.add_argument("--name", help="model_name to write (default: what the source says)")
    parser.add_argument("--license", help="license to write (default: what the source says, else 'unknown')")
    options = parser.parse_args()
    model = read_folder(options.model) if os.path.isdir(options.model) else read_gguf(options.model)
    if options.name is not None:
        model.attributes["model_name"] = options.name
    if options.license is not None:
        model.attributes["license"] = options.license
    digest = write_model(model, options.out)
    name, layers = model.attributes["model_name"], model.attributes["n_layers"]
    print(f"{options.out}: {name}, {layers} layers, sha256 {digest}")


if __name__ == "__main__":
    run(main)
