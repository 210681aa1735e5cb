"""Gradients of keys and values by PyTorch's autograd in f64, straight from model.h5: what lowkey capture --grad is held to.

python tests/gradient_oracle.py MODEL.h5 ACTIVATIONS.h5 TOKENS.h5 [FIRST] compares the gradients of the file's first sample, whose
labels are of the text and whose first token is number FIRST of tokens.h5."""
import sys

import h5py
import numpy as np

try:
    import torch
except ImportError:
    torch = None

from decoder_oracle import Model


def tensor(array):
    return torch.tensor(np.asarray(array, np.float64))


def norm(x, weight, epsilon):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * tensor(weight)


def rotate(x, geometry, weights):
    dims = int(geometry["rope_dims"])
    if dims == 0:
        return x
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * tensor(weights["rope_inv_freq"])
    factor = float(geometry["rope_attention_factor"])
    cosine, sine = (factor * f(angles)[:, None, :] for f in (torch.cos, torch.sin))
    if geometry["rope_pairing"] in ("half", b"half"):
        a, b = x[..., :dims // 2], x[..., dims // 2:dims]
        turned = torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)
    else:
        a, b = x[..., 0:dims:2], x[..., 1:dims:2]
        turned = torch.stack([a * cosine - b * sine, a * sine + b * cosine], -1).flatten(-2)
    return torch.cat([turned, x[..., dims:]], -1)


def attend(query, key, value, geometry, weights):
    per_kv = query.shape[1] // key.shape[1]
    query, key = rotate(query, geometry, weights), rotate(key, geometry, weights)
    key, value = (x.repeat_interleave(per_kv, 1) for x in (key, value))
    scores = float(geometry["logit_scale"]) * torch.einsum("qhd,khd->hqk", query, key)
    unseen = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), value)


def gradients(model, tokens):
    """[(key_grad, value_grad)] of each layer, of the summed loss of tokens[1:]; and the loss"""
    x, seen, n = tensor(model.embedding[tokens]).requires_grad_(), [], len(tokens)
    epsilon = float(model.root["rms_norm_eps"])
    for weights, geometry in model.layers:
        h, made = norm(x, weights["attention_norm"], epsilon), []
        for name, heads in (("query", "n_q_heads"), ("key", "n_kv_heads"), ("value", "n_kv_heads")):
            rows = h @ tensor(weights[f"{name}_proj"]).T
            if f"{name}_bias" in weights:
                rows = rows + tensor(weights[f"{name}_bias"])
            rows = rows.reshape(n, int(geometry[heads]), -1)
            made.append(norm(rows, weights[f"{name}_norm"], epsilon) if f"{name}_norm" in weights else rows)
        seen += made[1:]
        x = x + attend(*made, geometry, weights).reshape(n, -1) @ tensor(weights["output_proj"]).T
        h = norm(x, weights["ffn_norm"], epsilon)
        act = torch.nn.functional.silu(h @ tensor(weights["gate_proj"]).T) * (h @ tensor(weights["up_proj"]).T)
        x = x + act @ tensor(weights["down_proj"]).T
    logits = norm(x, model.final_norm, epsilon)[:-1] @ tensor(model.output).T
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(np.asarray(tokens[1:], np.int64)), reduction="sum")
    found = [g.numpy() for g in torch.autograd.grad(loss, seen)]
    return list(zip(found[::2], found[1::2])), float(loss)


def worst(model_path, activations, tokens):
    """The largest relative error, in norm, of a layer's gradient of the file's first sample"""
    most = 0
    found, _ = gradients(Model(model_path), tokens)
    with h5py.File(activations) as file:
        n = int(file["sample_offsets"][1])
        assert n == len(tokens)
        for layer in file["layer_index"][...]:
            for name, want in zip(("key_grad", "value_grad"), found[layer]):
                got = file[f"layers/{layer:03d}/{name}"][:n]
                error = np.linalg.norm(got - want) / np.linalg.norm(want)
                most = max(most, error)
                if __name__ == "__main__":
                    print(f"layer {layer:3} {name:10} relative error {error:.3g}")
    return most


if __name__ == "__main__":
    if torch is None:
        sys.exit("PyTorch is missing")
    with h5py.File(sys.argv[2]) as file, h5py.File(sys.argv[3]) as text:
        start, n = int(sys.argv[4]) if len(sys.argv) > 4 else 0, int(file["sample_offsets"][1])
        ids = text["tokens"][start:start + n]
    print(f"largest {worst(sys.argv[1], sys.argv[2], ids):.3g}")
