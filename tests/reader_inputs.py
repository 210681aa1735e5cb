"""model.h5, tokens.h5 and activations.h5 by formats/README.md alone; see reader.py."""
import hashlib
from types import SimpleNamespace

import numpy as np

from reader import geometry, layer_groups, layer_index, open_root, root_geometry


def rising_offsets(root, name, end):
    offsets = root.ints(name, (None,), 0)
    if len(offsets) < 2 or offsets[0] != 0 or (end is not None and offsets[-1] != end) or (np.diff(offsets) <= 0).any():
        root.fail(name, f"0 to {end}, strictly rising", offsets)
    return offsets


# model.h5

def model(path):
    """Geometry, settings and the SHA-256 over the tensors, which must be what the file says."""
    root = open_root(path, "model")
    m = SimpleNamespace(**root_geometry(root))
    extended = root.string("architecture", ("llama", "extended")) == "extended"
    for name in ("hidden_size", "intermediate_size", "vocab_size"):
        setattr(m, name, root.integer(name, 1))
    root.real("rms_norm_eps")
    for name in ("tied_output", "attention_bias", "qk_norm"):
        setattr(m, name, root.integer(name, 0, 1))
    for name in ("bos_token_id", "eos_token_id"):
        root.integer(name, -1, m.vocab_size - 1)
    root.string("source")
    root.string("license")
    m.post_norms, m.window = 0, [0] * m.n_layers
    if extended:
        root.string("activation", ("silu", "gelu_tanh"))
        root.real("embedding_scale", positive=True)
        m.post_norms = root.integer("post_norms", 0, 1)
        m.window = root.ints("window", (m.n_layers,), 0)
    digest = hashlib.sha256()

    def tensor(group, name, shape):
        values = group.floats(name, shape, to="f32")
        path = f"{group.group.name.rstrip('/')}/{name}"
        digest.update(f"{path}\n{','.join(map(str, shape))}\n".encode())
        digest.update(np.ascontiguousarray(values, "<f4"))

    tensor(root, "token_embedding", (m.vocab_size, m.hidden_size))
    m.layers = []
    for _, group in layer_groups(root, range(m.n_layers)):
        layer = geometry(group)
        for name, shape in layer_tensors(m, layer):
            tensor(group, name, shape)
        m.layers.append(layer)
    tensor(root, "final_norm", (m.hidden_size,))
    if not m.tied_output:
        tensor(root, "output", (m.vocab_size, m.hidden_size))
    root.close()
    m.computed_sha256 = digest.hexdigest()
    if m.computed_sha256 != m.model_sha256:
        root.fail("@model_sha256", m.computed_sha256, m.model_sha256)
    return m


def layer_tensors(m, g):
    q, k, v = g.n_q_heads * g.key_head_dim, g.n_kv_heads * g.key_head_dim, g.n_kv_heads * g.value_head_dim
    hidden, inner = m.hidden_size, m.intermediate_size
    tensors = [("attention_norm", (hidden,)), ("query_proj", (q, hidden)), ("key_proj", (k, hidden)),
               ("value_proj", (v, hidden))]
    if m.attention_bias:
        tensors += [("query_bias", (q,)), ("key_bias", (k,)), ("value_bias", (v,))]
    if m.qk_norm:
        tensors += [("query_norm", (g.key_head_dim,)), ("key_norm", (g.key_head_dim,))]
    post = [[("post_attention_norm", (hidden,))], [("post_ffn_norm", (hidden,))]] if m.post_norms else [[], []]
    return tensors + [("output_proj", (hidden, g.n_q_heads * g.value_head_dim)), *post[0], ("ffn_norm", (hidden,)),
                      ("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner)),
                      *post[1]]


# tokens.h5

def tokens(path):
    root = open_root(path, "tokens")
    root.string("tokenizer")
    root.sha256("tokenizer_sha256")
    root.string("text_name")
    root.sha256("text_sha256")
    t = SimpleNamespace(vocab_size=root.integer("vocab_size", 1), add_bos=root.integer("add_bos", 0, 1))
    t.tokens = root.ints("tokens", (None,), 0, t.vocab_size - 1)
    t.sequence_offsets = rising_offsets(root, "sequence_offsets", len(t.tokens))
    root.close()
    return t


# activations.h5

CONTENTS = ("key", "value", "query", "key_grad", "value_grad", "key_weight", "value_weight")


def activations(path):
    root = open_root(path, "activations")
    a = SimpleNamespace(**root_geometry(root))
    a.contents = names = root.string("contents").split(" ")
    if names != [n for n in CONTENTS if n in names] or not {"key", "value"} <= set(names):
        root.fail("@contents", f"names from {' '.join(CONTENTS)} in this order, key and value among them", names)
    for side in ("key", "value"):
        if {side + "_grad", side + "_weight"} <= set(names):
            root.fail("@contents", f"{side}_grad or {side}_weight", "both")
    if root.version >= (1, 1) and {"key_grad", "value_grad"} & set(names):
        a.gradient_labels = root.string("gradient_labels", ("text", "model"))
        if a.gradient_labels == "model":
            a.gradient_seed = root.integer("gradient_seed", 0, 2**63 - 1)
    root.string("key_stage", ("pre_rope",))
    root.string("text_name")
    root.sha256("text_sha256")
    a.sample_offsets = rising_offsets(root, "sample_offsets", None)
    a.sample_sha256 = root.hashes("sample_sha256", len(a.sample_offsets) - 1)
    T = int(a.sample_offsets[-1])
    a.layers = []
    for index, group in layer_groups(root, layer_index(root, a.n_layers)):
        layer = geometry(group)
        layer.index = int(index)
        for name in names:
            heads = layer.n_q_heads if name == "query" else layer.n_kv_heads
            dim = layer.value_head_dim if name.startswith("value") else layer.key_head_dim
            values = group.floats(name, (T, heads, dim), to="f64", f16=not name.endswith("_grad"))
            if name.endswith("_weight") and (values < 0).any():
                group.fail(name, ">= 0", values.min())
            setattr(layer, name, values)
        a.layers.append(layer)
    root.close()
    return a
