"""A Llama-like or Gemma-like model's forward pass in f64 with NumPy, straight from model.h5: what the decoder in C is held to."""
import h5py
import numpy as np


class Model:
    def __init__(self, path, n_layers=None):
        with h5py.File(path) as file:
            self.root = dict(file.attrs)
            self.embedding, self.final_norm = file["token_embedding"][...], file["final_norm"][...]
            self.output = file["output"][...] if "output" in file else self.embedding
            self.layers = []
            self.windows = file["window"][...] if "window" in file else [0] * self.root["n_layers"]
            for name in sorted(file["layers"])[:n_layers]:
                group = file["layers"][name]
                self.layers.append(({k: v[...].astype(np.float64) for k, v in group.items()},
                                    dict(group.attrs)))


def norm(x, weight, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def rotate(x, geometry, weights):
    """x: [tokens, heads, channels] at positions 0.."""
    dims = int(geometry["rope_dims"])
    if dims == 0:
        return x
    angles = np.arange(len(x))[:, None] * weights["rope_inv_freq"]
    turn = np.exp(1j * angles)[:, None, :] * float(geometry["rope_attention_factor"])
    first, second = (slice(0, dims // 2), slice(dims // 2, dims)) if geometry["rope_pairing"] == "half" else \
                    (slice(0, dims, 2), slice(1, dims, 2))
    turned = (x[..., first] + 1j * x[..., second]) * turn
    out = x.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def attend(query, key, value, geometry, weights, window=0):
    per_kv = query.shape[1] // key.shape[1]
    query, key = rotate(query, geometry, weights), rotate(key, geometry, weights)
    out = np.empty(query.shape[:2] + value.shape[2:])
    unseen = np.triu(np.ones((len(query), len(query)), bool), 1)
    if window:
        age = np.arange(len(query))[:, None] - np.arange(len(query))
        unseen |= age >= window
    for h in range(query.shape[1]):
        scores = float(geometry["logit_scale"]) * query[:, h] @ key[:, h // per_kv].T
        scores[unseen] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, h] = scores / scores.sum(-1, keepdims=True) @ value[:, h // per_kv]
    return out


def activate(root, x):
    if root.get("activation", "silu") == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def forward(model, tokens):
    """(hidden after the final norm, [(query, key, value) before RoPE of each layer])"""
    x, seen, n = model.embedding[tokens].astype(np.float64), [], len(tokens)
    x = x * float(model.root.get("embedding_scale", 1))
    epsilon = float(model.root["rms_norm_eps"])

    def behind(name, rows):
        return norm(rows, weights[name], epsilon) if name in weights else rows
    for (weights, geometry), window in zip(model.layers, model.windows):
        h = norm(x, weights["attention_norm"], epsilon)
        made = []
        for name, heads in (("query", "n_q_heads"), ("key", "n_kv_heads"), ("value", "n_kv_heads")):
            rows = h @ weights[f"{name}_proj"].T
            if f"{name}_bias" in weights:
                rows = rows + weights[f"{name}_bias"]
            rows = rows.reshape(n, int(geometry[heads]), -1)
            made.append(norm(rows, weights[f"{name}_norm"], epsilon) if f"{name}_norm" in weights else rows)
        seen.append(tuple(made))
        mixed = attend(*made, geometry, weights, window).reshape(n, -1)
        x = x + behind("post_attention_norm", mixed @ weights["output_proj"].T)
        h = norm(x, weights["ffn_norm"], epsilon)
        gate = h @ weights["gate_proj"].T
        x = x + behind("post_ffn_norm", (activate(model.root, gate) * (h @ weights["up_proj"].T)) @ weights["down_proj"].T)
    return norm(x, model.final_norm, epsilon), seen


def nll(model, hidden, tokens):
    """Summed negative log-likelihood of tokens[1:], nats."""
    total = 0.0
    output = model.output.T.astype(np.float64)
    for first in range(0, len(tokens) - 1, 256):
        rows = hidden[first:min(first + 256, len(tokens) - 1)] @ output
        top = rows.max(-1)
        total += (np.log(np.exp(rows - top[:, None]).sum(-1)) + top).sum()
        total -= rows[np.arange(len(rows)), tokens[first + 1:first + 1 + len(rows)]].sum()
    return total
