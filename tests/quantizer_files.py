"""Quantizer files with random tables, written with h5py straight from formats/README.md, for tests: every combination of
widths, rules, token scales, outliers, feedback and trellises that the format allows. A side is asked for as a
dict, see side()."""
import h5py
import numpy as np

from reader_pages import FLT_MAX, add_f32


def geometry(rng, n_q_heads, n_kv_heads, key_head_dim, value_head_dim, rope_dims, pairing, attention_factor):
    g = dict(n_q_heads=n_q_heads, n_kv_heads=n_kv_heads, key_head_dim=key_head_dim, value_head_dim=value_head_dim,
             logit_scale=key_head_dim**-0.5 * rng.uniform(0.5, 1.5), rope_dims=rope_dims, rope_pairing=pairing,
             rope_attention_factor=attention_factor)
    if rope_dims:
        g["rope_inv_freq"] = 10000.0 ** (-np.arange(rope_dims // 2) / (rope_dims // 2))
    return g


def pairs_of(g):
    half = g["rope_dims"] // 2
    return [(i, i + half) if g["rope_pairing"] == "half" else (2 * i, 2 * i + 1) for i in range(half)]


def random_order(rng, D, pairs):
    """Pairs whole and at even rows, at random places among the single channels."""
    singles = list(rng.permutation(sorted(set(range(D)) - {c for p in pairs for c in p})))
    units = [list(p) for p in pairs] + [singles[i:i + 2] for i in range(0, len(singles), 2)]
    return np.concatenate([units[i] for i in rng.permutation(len(units))])


def channel_table(rng, most, E, center, exponent, spread, full):
    """At most so many entries on the grid of center and exponent, and boundaries anywhere between them."""
    n = most if full else rng.integers(1, most + 1)
    halves = np.unique(np.float16(rng.normal(size=n) * np.ldexp(spread, -exponent)))
    entries = np.unique(add_f32(center, np.ldexp(halves.astype(np.float64), exponent)))
    wide = entries.astype(np.float64)
    between = wide[:-1] + rng.uniform(0.2, 0.8, len(wide) - 1) * np.diff(wide)
    table = np.concatenate([entries, np.repeat(entries[-1:], E - len(entries))])
    boundary = np.concatenate([between.astype(np.float32), np.repeat(FLT_MAX, E - len(entries))])
    return len(entries), table, boundary


def side(rng, H, D, pairs, bits=(2,), rule_8="none", rule_16="none", token_scale="none", scale_block=0,
         outlier_rule="none", outlier_rank=0, outlier_cap=0, outlier_page_capacity=0, feedback=0, full=True,
         wide_table=False, magnitude=1.0, trellis=0):
    """bits: widths drawn per channel. full: all entries in use. wide_table: E larger than needed."""
    widths = rng.choice(bits, size=(H, D))
    widths.reshape(-1)[:len(bits)] = bits  # each at least once
    more = 2 if trellis else 1
    E = 0 if min(bits) > 5 else 32 * more if wide_table else more * 2 ** max(b for b in bits if b <= 5)
    scaled = token_scale != "none"
    spread = np.exp(np.clip(rng.normal(size=(H, D)) * (0.2 if scaled else 1), -2, 1)) * (0.7 if scaled else magnitude)
    offset = rng.random((H, D)) < 0.3
    center = np.where(offset & (not scaled), np.clip(rng.normal(size=(H, D)), -3, 3) * 4 * magnitude,
                      0).astype(np.float32)
    exponent = np.floor(np.log2(spread)).astype(np.int64) + rng.integers(-4, 3, (H, D))
    exponent = np.minimum(exponent, 112)
    lower, upper = np.float32(center - 2 * spread), np.float32(center + 2 * spread)
    d = dict(H=H, D=D, table_scope="channel", codebook="fitted" if E else "none", table_entries=E, rule_8=rule_8,
             rule_16=rule_16, token_scale=token_scale, scale_block=scale_block, outlier_rule=outlier_rule,
             outlier_rank=outlier_rank, outlier_cap=outlier_cap, outlier_page_capacity=outlier_page_capacity,
             feedback=feedback, gain=0, qnorm=0, bits=widths, center=center, exponent=exponent,
             order=np.stack([random_order(rng, D, pairs) for _ in range(H)]))
    if E:
        tables = np.zeros((H, D, E), np.float32)
        boundaries, n_entries = np.full((H, D, E - 1), FLT_MAX), np.zeros((H, D), np.int64)
        for h, c in zip(*np.nonzero(widths <= 5)):
            n_entries[h, c], tables[h, c], boundaries[h, c] = channel_table(
                rng, more * 2 ** widths[h, c], E, center[h, c], exponent[h, c], spread[h, c], full)
        d.update(n_entries=n_entries, table=tables)
        if trellis:
            d.update(trellis=trellis, metric_weight=np.float32(np.exp2(rng.uniform(-6, 6, (H, D)))))
        else:
            d.update(boundary=boundaries)
        used = n_entries > 0
        lower = np.where(used, np.minimum(lower, tables[:, :, 0]), lower)
        upper = np.where(used, np.maximum(upper, tables[:, :, -1]), upper)
    if not scaled and not full:  # some constant channels
        constant = (rng.random((H, D)) < 0.1) & ((widths > 5) if not E else (d["n_entries"] == 1) | (widths > 5))
        lower = np.where(constant, center if not E else np.where(widths > 5, center, tables[:, :, 0]), lower)
        upper = np.where(constant, lower, upper)
    d.update(lower=lower, upper=upper)
    if rule_8 != "none":
        largest = {"e4m3": 448, "e5m2": 57344, "int8": 127}[rule_8]
        d["rule_scale"] = np.where(widths == 8,
                                   np.float32(np.abs(upper) + np.abs(lower) + 1e-9) / np.float32(largest), 1)
    if feedback:
        d["factor"] = np.tril(np.float16(rng.normal(size=(H, D, D)) * 0.3 / np.sqrt(D)), -1)
    return d


def report(group, d):
    r = group.create_group("report")
    for name in ("n_tokens", "n_outliers", "n_clamped", "n_saturated"):
        r.attrs[name] = 0
    shape = (d["H"], d["D"])
    for name in ("mean", "variance", "mse", "weighted_mse"):
        r[name] = np.zeros(shape, np.float32)
    r["gain"] = np.ones(shape, np.float32)
    r["flags"] = np.zeros(shape, np.uint8)
    if d["table_entries"]:
        r["histogram"] = np.zeros((*shape, d["table_entries"]), np.int64)


INTEGERS = ("bits", "order", "n_entries", "exponent")


def write_side(group, d, styles):
    """styles: a generator of (dtype, options) for float datasets; None: as f32."""
    for name, value in d.items():
        if name in ("H", "D"):
            continue
        if isinstance(value, (str, int)):
            group.attrs[name] = value
        elif name in INTEGERS:
            group[name] = np.asarray(value, np.int16)
        else:
            dtype, options = next(styles) if styles else ("<f4", {})
            group.create_dataset(name, data=np.asarray(value), dtype=dtype, **options)
    report(group, d)


def write(path, layers, n_sink_tokens=0, sink_rule="f16", n_layers=None, styles=None):
    """layers: {index: (geometry, key side, value side)}. A file of version 1.0, or of 1.3 where a side has a trellis."""
    trellises = any("trellis" in side for _, *sides in layers.values() for side in sides)
    with h5py.File(path, "w") as f:
        zeros = "0" * 64
        f.attrs.update(dict(schema="quantizer", created_by="quantizer_files.py 1",
                            n_layers=n_layers or max(layers) + 1,
                            model_name="none", model_sha256=zeros, n_sink_tokens=n_sink_tokens, sink_rule=sink_rule))
        f.attrs["schema_version"] = np.array([1, 3 if trellises else 0], np.int32)
        f["layer_index"] = np.array(sorted(layers), np.int32)
        f["sample_sha256"] = np.zeros((1, 32), np.uint8)
        fit = f.create_group("fit")
        fit.attrs.update(dict(sensitivity="none", outlier_fraction_key=0.0, outlier_fraction_value=0.0, damp=0.05,
                              n_tokens=1, text_name="none", text_sha256=zeros))
        if trellises:
            fit.attrs.update(dict(budget=0.0, predicted_cost_key=0.0, predicted_cost_value=0.0))
        for index, (g, key, value) in layers.items():
            group = f.create_group(f"layers/{index:03d}")
            for name, entry in g.items():
                if name == "rope_inv_freq":
                    group[name] = entry
                else:
                    group.attrs[name] = entry
            for name, side in (("key", key), ("value", value)):
                write_side(group.create_group(name), {"trellis": 0, **side} if trellises else side, styles)
