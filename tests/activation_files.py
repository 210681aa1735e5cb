"""Activation files for tests, written with h5py straight from formats/README.md: seeded values whose channels have their own
mean, spread and tails, as many layers, samples and heads as asked for."""
import hashlib

import h5py
import numpy as np

MODEL_SHA256 = hashlib.sha256(b"a model for tests").hexdigest()


def make(lengths=(300, 200), layers=(0, 1), n_q_heads=4, n_kv_heads=2, key_head_dim=16, value_head_dim=16, rope_dims=None,
         pairing="half", contents=("key", "value"), seed=0, n_model_layers=4, change=None):
    """A capture as plain arrays: {"lengths", "sha256", "layers": {index: {"geometry", "key", "value", ...}}}. What a stream
    holds depends on the seed, the layer and the sample alone, not on which others there are. change(name, layer, rows)
    may alter a layer's rows in place."""
    rope_dims = key_head_dim if rope_dims is None else rope_dims
    shapes = {"key": (n_kv_heads, key_head_dim), "value": (n_kv_heads, value_head_dim), "query": (n_q_heads, key_head_dim)}
    for side in ("key", "value"):
        shapes[side + "_grad"] = shapes[side + "_weight"] = shapes[side]
    samples = range(len(lengths))
    capture = {"lengths": list(lengths), "contents": list(contents), "n_model_layers": n_model_layers, "layers": {},
               "sha256": [hashlib.sha256(f"{seed} {s}".encode()).digest() for s in samples]}
    for layer in layers:
        geometry = dict(n_q_heads=n_q_heads, n_kv_heads=n_kv_heads, key_head_dim=key_head_dim, value_head_dim=value_head_dim,
                        logit_scale=key_head_dim ** -0.5, rope_dims=rope_dims, rope_pairing=pairing, rope_attention_factor=1.0)
        if rope_dims:
            geometry["rope_inv_freq"] = 1e4 ** (-np.arange(rope_dims // 2) / (rope_dims // 2))
        streams = {"geometry": geometry}
        for number, name in enumerate(("key", "value", "query", "key_grad", "value_grad", "key_weight", "value_weight")):
            if name not in contents:
                continue
            shared = np.random.default_rng([seed, layer, number])
            mean, spread = shared.normal(0, 1, shapes[name]), shared.lognormal(0, 0.7, shapes[name])
            mix = shared.normal(0, 0.4, (shapes[name][1], shapes[name][1])) + np.eye(shapes[name][1])
            parts = []
            for s, length in zip(samples, lengths):
                rng = np.random.default_rng([seed, layer, number, s])
                noise = rng.standard_normal((length,) + shapes[name]) @ mix
                if name.endswith("_grad"):
                    parts.append(noise * spread * rng.lognormal(-6, 1.5, (length, 1, 1)))
                elif name.endswith("_weight"):
                    parts.append(rng.lognormal(0, 1.5, noise.shape))
                else:
                    parts.append(mean + spread * noise * (1 + 4 * (rng.random(noise.shape) < 0.01)))
            streams[name] = np.concatenate(parts).astype(np.float32)
            if change:
                change(name, layer, streams[name])
        capture["layers"][layer] = streams
    return capture


def take(capture, samples):
    """The same capture with these samples, in this order."""
    starts = np.concatenate([[0], np.cumsum(capture["lengths"])])
    rows = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in samples])
    layers = {i: {n: d if n == "geometry" else d[rows] for n, d in streams.items()}
              for i, streams in capture["layers"].items()}
    return {**capture, "lengths": [capture["lengths"][s] for s in samples], "layers": layers,
            "sha256": [capture["sha256"][s] for s in samples]}


def write(path, capture, dtype=np.float32, text_name="made up", model_sha256=MODEL_SHA256, **options):
    """dtype of key, value and query; options go to h5py's create_dataset."""
    with h5py.File(path, "w") as file:
        for name, value in (("schema", "activations"), ("created_by", "tests"), ("model_name", "test model"),
                            ("model_sha256", model_sha256), ("contents", " ".join(capture["contents"])),
                            ("key_stage", "pre_rope"), ("text_name", text_name),
                            ("text_sha256", hashlib.sha256(text_name.encode()).hexdigest())):
            file.attrs[name] = value
        file.attrs["schema_version"] = np.array([1, 0])
        file.attrs["n_layers"] = capture["n_model_layers"]
        file["layer_index"] = np.array(sorted(capture["layers"]))
        file["sample_offsets"] = np.concatenate([[0], np.cumsum(capture["lengths"])])
        file["sample_sha256"] = np.array([np.frombuffer(h, np.uint8) for h in capture["sha256"]])
        for layer, streams in capture["layers"].items():
            group = file.create_group(f"layers/{layer:03d}")
            for name, value in streams["geometry"].items():
                if name == "rope_inv_freq":
                    group[name] = value
                else:
                    group.attrs[name] = value
            for name in capture["contents"]:
                exact = dtype if name in ("key", "value", "query") else np.float32
                group.create_dataset(name, data=streams[name].astype(exact), **options)
    return path
