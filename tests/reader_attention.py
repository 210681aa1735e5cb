"""Attention over decoded values in f64, with the bound that runtime/lowkey.h states."""
import numpy as np

from reader import rope_pairs


def rotate(x, layer, positions):
    """RoPE of x [T, heads, D]."""
    x = x.astype(np.float64)
    out = x.copy()
    for i, (a, b) in enumerate(rope_pairs(layer)):
        angle = (positions * layer.rope_inv_freq[i])[:, None]
        cos, sin = np.cos(angle) * layer.rope_attention_factor, np.sin(angle) * layer.rope_attention_factor
        out[:, :, a], out[:, :, b] = x[:, :, a] * cos - x[:, :, b] * sin, x[:, :, a] * sin + x[:, :, b] * cos
    return out


def attend(layer, keys, values, q):
    """out, its bound as lowkey.h states it, and lse, of queries q [n, n_q_heads, key_head_dim] at the last n tokens."""
    n, T, group = len(q), len(keys), layer.n_q_heads // layer.n_kv_heads
    turned_q = rotate(q, layer, np.arange(T - n, T, dtype=np.float64))
    turned_k = rotate(keys, layer, np.arange(T, dtype=np.float64))
    out, bound = np.empty((n, layer.n_q_heads, layer.value_head_dim)), np.empty((n, layer.n_q_heads, 1))
    lse = np.empty((n, layer.n_q_heads))
    for j, h in np.ndindex(n, layer.n_q_heads):
        seen, kv = T - n + j + 1, h // group
        score = layer.logit_scale * (turned_k[:seen, kv] @ turned_q[j, h])
        weight = np.exp(score - score.max())
        lse[j, h] = score.max() + np.log(weight.sum())
        v = values[:seen, kv].astype(np.float64)
        out[j, h] = weight / weight.sum() @ v
        S = layer.logit_scale * (np.abs(keys[:seen, kv].astype(np.float64)) @ np.abs(q[j, h].astype(np.float64))).max()
        S *= layer.rope_attention_factor**2
        u = 2.0**-24
        bound[j, h] = (4 * (layer.key_head_dim + 8) * u * S + (seen + 16) * u) * np.abs(v).max()
    return out, bound, lse
