"""lowkey fit as a user runs it: determinism, difficult data, refusals, interruption. Every file that is written passes
the independent reader; what it holds is compared with NumPy's own optimum."""
import glob
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time

import h5py
import numpy as np

import activation_files as activations
import reader
import tap

LOWKEY = os.path.join(os.environ.get("B", "build/opt"), "lowkey")
FOLDER = tempfile.mkdtemp(prefix="lowkey-fit-")
NEXT = iter(range(10**6))


def path(name=None):
    return os.path.join(FOLDER, name or f"{next(NEXT)}.h5")


def run(options, *files, out=None):
    out = out or path()
    done = subprocess.run([LOWKEY, "fit", "--out", out, *shlex.split(options), *files], capture_output=True, text=True)
    return done, out


def attributes(group):
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in group.attrs.items()}


def fit(options, *files):
    """The fitted file, read back and validated, with the report as .report_json."""
    done, out = run("--json " + options, *files)
    assert done.returncode == 0, f"fit {options}: {done.stderr}"
    quantizer = reader.quantizer(out)
    quantizer.report_json = json.loads(done.stdout)
    with h5py.File(out) as file:
        quantizer.record = attributes(file["fit"])
        for layer in quantizer.layers:
            for name in ("key", "value"):
                getattr(layer, name).attributes = attributes(file[f"layers/{layer.index:03d}/{name}"])
    return quantizer


def refused(options, *files, words, status=1):
    out = path()
    done, _ = run(options, *files, out=out)
    assert done.returncode == status, f"fit {options}: exit {done.returncode}, {done.stderr}"
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr, f"fit {options}: '{word}' not in: {done.stderr}"
    assert not os.path.exists(out) and done.stdout == ""


def made(dtype=np.float32, **what):
    file = path()
    activations.write(file, activations.make(**what), dtype=dtype)
    return file


def constant_layer(values):
    """A change for activations.make: channel c of keys is values[c % len]."""
    def change(name, layer, rows):
        if name == "key":
            flat = rows.reshape(len(rows), -1)
            for c in range(flat.shape[1]):
                flat[:, c] = values[c % len(values)]
    return change


# Determinism.

def same_bytes(options, contents):
    capture = activations.make(lengths=(1, 17, 300, 130, 64, 200, 5), contents=("key", "value") + contents)
    whole, shuffled = path(), path()
    activations.write(whole, capture)
    activations.write(shuffled, activations.take(capture, [4, 2, 6, 0, 5, 1, 3]), chunks=True, compression="gzip", shuffle=True)
    parts = [activations.write(path(), activations.take(capture, s)) for s in ([5], [3, 1], [0, 6, 2], [4])]
    outputs = []
    for more, files in (("--threads 1", [whole]), ("--threads 2", [whole]), ("--threads 7", [whole]),
                        ("--threads 2", [shuffled]), ("--threads 3", parts)):
        done, out = run(f"{options} {more}", *files)
        assert done.returncode == 0, done.stderr
        with open(out, "rb") as file:
            outputs.append(file.read())
    for i, bytes_out in enumerate(outputs[1:], 1):
        assert bytes_out == outputs[0], f"fit {options}: run {i} differs"
    reader.quantizer(out)


def test_same_bytes_attention():
    """The same bytes from 1, 2, 7 threads, shuffled samples, one file or four: queries, feedback, gain"""
    same_bytes("--bits 2 --feedback --gain --sinks 3", ("query",))


def test_same_bytes_gradients():
    """The same bytes: gradients, feedback on both sides, mixed widths, outliers"""
    same_bytes("--bits 1,3,5,8,16 --feedback=both --outliers 0.02", ("key_grad", "value_grad"))


def test_same_bytes_kvquant():
    """The same bytes: KVQuant's recipe, shared codebooks, token scales, Q-Norm"""
    same_bytes("--preset kvquant-nuq3-1% --qnorm", ("key_weight", "value_weight"))


def test_same_numbers_in_any_storage():
    """The same bytes whether values are stored as f16, f32, f64, either endianness, chunked and deflated or not"""
    def exact(name, layer, rows):
        rows[:] = rows.astype(np.float16)
    capture = activations.make(change=exact)
    outputs = set()
    for dtype, options in ((np.float16, {}), (">f2", {}), (np.float32, {"chunks": (32, 1, 16), "compression": "gzip"}),
                           (">f8", {}), (np.float16, {"chunks": True, "shuffle": True, "compression": 9, "fletcher32": True})):
        done, out = run("--bits 3", activations.write(path(), capture, dtype=dtype, **options))
        assert done.returncode == 0, done.stderr
        with open(out, "rb") as file:
            outputs.add(file.read())
    assert len(outputs) == 1


# What tables are, against an optimum found otherwise.

def best_cost(x, w, k):
    """The least sum of w (x - centroid)^2 over k centroids, by dynamic programming over every cut: O(k n^2)."""
    order = np.argsort(x, kind="stable")
    x, w = x[order].astype(np.float64), w[order].astype(np.float64)
    x = x - x.mean()
    sums = np.stack([np.concatenate([[0], np.cumsum(w * x**p)]) for p in range(3)])
    best = np.where(np.arange(len(x) + 1) == 0, 0, np.inf)
    for _ in range(k):
        weight, moment, square = (sums[p][None, :] - sums[p][:, None] for p in range(3))
        with np.errstate(all="ignore"):
            cost = np.where(weight > 0, square - moment**2 / weight, np.inf)
        best = np.minimum(np.min(best[:, None] + np.where(np.tri(len(best), k=-1).T > 0, cost, np.inf), axis=0),
                          np.where(np.arange(len(best)) == 0, 0, np.inf))
    return best[-1]


def cost_of(x, w, table, boundary):
    return float((w * (x.astype(np.float64) - table[np.searchsorted(boundary, x)].astype(np.float64)) ** 2).sum())


def tamed(w):
    w = np.where(w < w.max() * 2.0**-40, 0, w.astype(np.float64))
    return np.clip(w, w.mean() * 1e-3, w.mean() * 50)


def test_channel_tables_are_optimal():
    """A channel's table costs what the optimum of its weighted values costs, at 1 to 5 bits"""
    capture = activations.make(lengths=(150, 90), layers=(2,), contents=("key", "value", "key_weight", "value_weight"))
    file = activations.write(path(), capture)
    for bits in range(1, 6):
        layer = fit(f"--bits {bits} --sinks 2", file).layers[0]
        for name in ("key", "value"):
            kept = np.r_[2:150, 152:240]
            x = capture["layers"][2][name][kept]
            w = capture["layers"][2][name + "_weight"][kept]
            side = getattr(layer, name)
            for h, c in ((0, 0), (0, 7), (1, 3)):
                weights = tamed(w[:, h, c])
                n = side.n_entries[h, c]
                found = cost_of(x[:, h, c], weights, side.table[h, c][:n], side.boundary[h, c][:n - 1])
                best = best_cost(x[:, h, c], weights, 2**bits)
                assert found <= best * 1.002, f"{bits} bits, {name} {h} {c}: {found}, the optimum is {best}"


def test_shared_codebook_is_optimal_in_original_units():
    """A layer's shared codebook with outlier limits is the optimum of weights times the channel's scale squared"""
    capture = activations.make(lengths=(60,), layers=(0,), n_kv_heads=1, key_head_dim=8, value_head_dim=8,
                               contents=("key", "value", "key_weight", "value_weight"))
    file = activations.write(path(), capture)
    x, w = (capture["layers"][0][n].reshape(60, 8).astype(np.float64) for n in ("key", "key_weight"))
    k = 3  # floor(60 * 0.1 / 2)
    lower, upper = np.sort(x, 0)[k], np.sort(x, 0)[59 - k]
    zero, scale = (lower + upper) / 2, (upper - lower) / 2
    inside = (x >= lower) & (x <= upper)
    for units, power in (("original", 2), ("normalised", 0)):
        side = fit(f"--bits 2 --scope layer --outliers 0.1 --weight-clip 0 --weight-floor 0 --weight-units {units}", file).layers[0].key
        assert np.array_equal(side.lower.ravel(), lower.astype(np.float32))
        assert np.array_equal(side.upper.ravel(), upper.astype(np.float32))
        u, weights = ((x - zero) / scale)[inside], (w * scale**power)[inside]
        codebook = (side.table[0, 3] - zero[3]) / scale[3]
        found = cost_of(u, weights, codebook, (codebook[1:] + codebook[:-1]) / 2)
        assert found <= best_cost(u, weights, 4) * 1.005, units


def test_token_scale_codebook_is_optimal():
    """A codebook on values normalised per token is the optimum, outliers by rank left out"""
    def change(name, layer, rows):  # tokens of very different scale, so that it matters how they are weighed
        rows *= np.random.default_rng(4).lognormal(0, 1.5, (len(rows), 1, 1)).astype(np.float32)
        rows += np.abs(rows) * np.linspace(0, 0.5, len(rows), dtype=np.float32)[:, None, None]
    capture = activations.make(lengths=(64,), layers=(0,), n_kv_heads=1, key_head_dim=8, value_head_dim=16, change=change)
    x = capture["layers"][0]["value"].reshape(64, 16).astype(np.float64)
    side = fit("--bits 2 --value-scope layer --value-token-scale f32 --value-outliers 0.2",
               activations.write(path(), capture)).layers[0].value
    assert [side.attributes[n] for n in ("outlier_rule", "outlier_rank", "outlier_cap")] == ["rank", 2, 4]
    inside = np.sort(x, 1)[:, 2:-2]  # no ties here
    zero, scale = (inside[:, -1:] + inside[:, :1]) / 2, (inside[:, -1:] - inside[:, :1]) / 2
    u, weights = ((inside - zero) / scale).ravel(), np.repeat(scale**2, 12, 1).ravel()
    codebook = side.table[0, 0].astype(np.float64)
    found = cost_of(u, weights, codebook, (codebook[1:] + codebook[:-1]) / 2)
    assert found <= best_cost(u, weights, 4) * 1.005


def test_gain_makes_regression_exact():
    """After gain correction, x against x^ has slope 1 and the same mean, with the boundaries as they were"""
    capture = activations.make(lengths=(500,), layers=(0,))
    file = activations.write(path(), capture)
    plain, gained = (fit(f"--bits 2 {g}", file).layers[0].value for g in ("", "--gain"))
    assert gained.attributes["gain"] == 1 and plain.attributes["gain"] == 0
    assert np.array_equal(plain.boundary, gained.boundary)
    for h, c in ((0, 0), (1, 5)):
        x = capture["layers"][0]["value"][:, h, c].astype(np.float64)
        back = gained.table[h, c][np.searchsorted(gained.boundary[h, c], x)].astype(np.float64)
        assert abs(np.cov(x, back)[0, 1] / np.var(x, ddof=1) - 1) < 2e-3
        assert abs(x.mean() - back.mean()) < 2e-3 * x.std()
        assert gained.report.gain[h, c] > 1.01


def test_qnorm_restores_spread():
    """Q-Norm gives a channel's stored values the mean and deviation of the channel"""
    capture = activations.make(lengths=(500,), layers=(0,))
    side = fit("--bits 2 --qnorm", activations.write(path(), capture)).layers[0].key
    x = capture["layers"][0]["key"][:, 1, 4].astype(np.float64)
    back = side.table[1, 4][np.searchsorted(side.boundary[1, 4], x)].astype(np.float64)
    assert abs(back.std() / x.std() - 1) < 2e-3 and abs(back.mean() - x.mean()) < 2e-3 * x.std()


def test_fisher_is_the_squared_gradient():
    """--sensitivity fisher gives the tables of squared gradients as weights, and feedback the factor of E[g g']"""
    capture = activations.make(lengths=(400, 30), layers=(0,), contents=("key", "value", "key_grad", "value_grad"))
    layer = capture["layers"][0]
    weights = dict(capture, contents=["key", "value", "key_weight", "value_weight"],
                   layers={0: {**layer, **{f"{s}_weight": layer[f"{s}_grad"] ** 2 for s in ("key", "value")}}})
    fisher = fit("--bits 3 --sinks 2 --sensitivity fisher --feedback=both --refit 0 --damp 0.03", activations.write(path(), capture))
    weight = fit("--bits 3 --sinks 2 --sensitivity weight", activations.write(path(), weights))
    equal = fit("--bits 3 --sinks 2 --sensitivity none", activations.write(path(), capture))
    kept = np.r_[2:400, 402:430]
    for side in ("key", "value"):
        a, b, c = (getattr(q.layers[0], side) for q in (fisher, weight, equal))
        spread = layer[side].std()
        assert np.abs(a.table - b.table).max() < 1e-3 * spread < np.abs(a.table - c.table).max()
        g = layer[f"{side}_grad"][kept].astype(np.float64)
        for h in range(2):
            H = g[:, h].T @ g[:, h]
            H = (H + 0.03 * H.trace() / len(H) * np.eye(len(H)))[np.ix_(a.order[h], a.order[h])]
            L = np.linalg.cholesky(H)
            want = np.tril(L / np.diag(L), -1)
            assert np.abs(a.factor[h] - want).max() < 2e-3 * np.abs(want).max(), (side, h)


def test_feedback_lowers_the_metric():
    """With feedback from gradients, what keys' errors cost in g'e is lower, and codes alone changed"""
    capture = activations.make(lengths=(400,), layers=(0,), contents=("key", "value", "key_grad", "value_grad"))
    file = activations.write(path(), capture)
    plain, fed = (fit(f"--bits 2 {o}", file).layers[0].key for o in ("", "--feedback --refit 0"))
    assert np.array_equal(plain.table, fed.table) and np.array_equal(plain.boundary, fed.boundary)
    assert fed.attributes["feedback"] == 1 and np.any(fed.factor)
    grad, x = (capture["layers"][0][n].astype(np.float64) for n in ("key_grad", "key"))
    moments = np.einsum("thi,thj->hij", grad, grad)
    costs = []
    for side in (plain, fed):
        total = 0
        for h in range(2):
            order, e = side.order[h], np.zeros((400, 16))
            for j in range(15, -1, -1):
                c = order[j]
                t = x[:, h, c].copy()
                if side.attributes["feedback"]:
                    for i in range(j + 1, 16):
                        t -= side.factor[h, i, j] * e[:, order[i]]
                e[:, c] = side.table[h, c][np.searchsorted(side.boundary[h, c], t.astype(np.float32))] - x[:, h, c]
            total += np.einsum("ti,ij,tj->", e, moments[h], e)
        costs.append(total)
    assert costs[1] < 0.8 * costs[0], costs


# Difficult numbers.

def test_constants_are_exact():
    """Constant channels are stored exactly and flagged: 0, 7.5, -65504, and of any magnitude"""
    values = np.float32([0, 7.5, -65504, 0.1, 1e-30, 3e38, -1e-6, 123456.789])
    file = made(change=constant_layer(values), lengths=(70, 1))
    for options in ("--bits 2", "--bits 4 --outliers 0.01", "--bits 3 --scope layer", "--bits 1 --codebook uniform",
                    "--bits 5 --codebook normal_float --scope head"):
        q = fit(options, file)
        for layer in q.layers:
            side = layer.key
            got = side.table.reshape(-1, side.E)[:, 0]
            assert np.array_equal(got, np.resize(values, got.shape)), options
            assert (side.n_entries == 1).all() and (side.report.flags & 9 == 1).all() and not side.report.mse.any()
        assert q.report_json["sides"][0]["constant_channels"] == 32


def test_one_value_one_ulp_away():
    """A channel constant but for one sample one ulp away keeps both values exactly"""
    values = np.float32([7.5, -65504, 0.1, 1e-30, 3e38])

    def change(name, layer, rows):
        constant_layer(values)(name, layer, rows)
        if name == "key":
            rows[37] = np.nextafter(rows[37], np.float32(np.inf))
    side = fit("--bits 2", made(change=change)).layers[0].key
    for c in range(16):
        want = np.float32([values[c % 5], np.nextafter(values[c % 5], np.float32(np.inf))])
        assert side.n_entries[0, c] == 2 and np.array_equal(side.table[0, c][:2], want), (c, side.table[0, c])
        assert side.report.mse[0, c] == 0


def test_one_value_in_a_layer():
    """A whole layer of one value is exact, and reported as suspicious"""
    def change(name, layer, rows):
        rows[:] = -3.25
    q = fit("--bits 2 --outliers 0.01 --sinks 1", made(change=change))
    assert all("all_equal" in side["suspicions"] for side in q.report_json["sides"])
    assert all((layer.key.table == -3.25).all() for layer in q.layers)


def test_magnitudes():
    """Channels of magnitude 1e-30, 1e-6, 1e5 and up to 3e38 lose no more than those of magnitude 1"""
    magnitudes = np.float32([1, 1e-30, 1e-6, 1e5, 1e36, 6e37])

    def change(name, layer, rows):
        flat = rows.reshape(len(rows), -1)
        flat -= flat.mean(0)
        flat /= np.abs(flat).max(0) / 4
        flat *= np.resize(magnitudes, flat.shape[1])
    file = made(change=change, lengths=(400,))
    for options, most in (("--bits 4", 0.03), ("--bits 4 --outliers 0.01", 0.02), ("--bits 3 --scope head", 10),
                          ("--key-bits 8 --value-bits 5 --gain", 0.003), ("--bits 8 --rule-8 int8", 0.001)):
        for layer in fit(options, file).layers:
            for side in (layer.key, layer.value):
                relative = side.report.mse / side.report.variance
                assert np.isfinite(relative).all() and (relative < most).all(), (options, relative)


def test_the_ends_of_number_formats():
    """Values up to the largest f32, and beyond what scales of f16 hold, are fitted in every format; saturation is counted"""
    def change(largest):
        def put(name, layer, rows):
            rows *= np.float32(largest) / np.abs(rows).max()
            rows[3, 0, :2], rows[4, -1, 0] = (largest, -largest), -largest
            rows[..., 3] = largest
        return put
    for largest in (1e9, 3.4028235e38):
        file = made(change=change(largest), lengths=(100,))
        for options in ("--bits 1", "--bits 4 --gain=both", "--bits 2 --outliers 0.1", "--bits 8", "--bits 8 --rule-8 e5m2 --outliers 0.1",
                        "--bits 8 --rule-8 int8", "--bits 16", "--bits 16 --rule-16 bf16", "--bits 3 --token-scale f32 --scale-block 8",
                        "--bits 3 --token-scale f32 --outliers 0.05 --qnorm", "--bits 3 --token-scale f16",
                        "--bits 3 --token-scale f16 --outliers 0.05 --scope layer", "--bits 2 --token-scale f16 --outliers 0.05"):
            for layer in fit(options, file).layers:
                for side in (layer.key, layer.value):
                    assert np.isfinite(side.report.mse).all(), options
                    assert side.report.n_saturated > 0 or not ("scale f16" in options or options == "--bits 16"), options


def test_offset_heavy_channels():
    """A channel of 600 + N(0, 1) loses what N(0, 1) loses, at every width, and is flagged"""
    def change(name, layer, rows):
        rows[:] = np.random.default_rng(5).standard_normal(rows.shape)
        rows[..., ::2] += 600
    q = fit("--bits 1,2,3,4,5", made(change=change, lengths=(1000,), key_head_dim=80, n_kv_heads=1))
    for layer in q.layers:
        mse = layer.key.report.mse / layer.key.report.variance
        for bits in range(1, 6):
            here = layer.key.bits[0] == bits
            plain, offset = mse[0][here & (np.arange(80) % 2 == 1)], mse[0][here & (np.arange(80) % 2 == 0)]
            assert offset.mean() < 1.1 * plain.mean() + 1e-5, bits
        assert (layer.key.report.flags[0, ::2] & 2).all() and not (layer.key.report.flags[0, 1::2] & 2).any()
    assert "offset_heavy" in q.report_json["sides"][0]["suspicions"]


def test_few_values():
    """One token; three distinct values for 16 codes; one value left between the outliers"""
    q = fit("--bits 4 --sensitivity none", made(lengths=(1,), contents=("key", "value", "query")))
    assert (q.layers[0].key.n_entries == 1).all() and not q.layers[0].key.report.mse.any()

    def three(name, layer, rows):
        rows[:] = np.float32([-0.5, 0.25, 3])[np.random.default_rng(1).integers(0, 3, rows.shape)]
    side = fit("--bits 4", made(change=three, lengths=(90,))).layers[0].key
    assert (side.n_entries == 3).all() and np.array_equal(side.table[1, 2][:3], np.float32([-0.5, 0.25, 3]))
    assert (side.report.flags & 4).all() and not side.report.mse.any()

    def ends(name, layer, rows):
        rows[:] = 2.5
        rows[0], rows[1] = -1000, 1000
    side = fit("--bits 2 --outliers 0.04 --outlier-cap 16", made(change=ends, lengths=(50,), n_kv_heads=1, key_head_dim=8)).layers[0].key
    assert (side.n_entries == 1).all() and (side.table == 2.5).all() and (side.lower == 2.5).all() and (side.upper == 2.5).all()
    assert side.report.n_outliers == 16 and side.report.mse.max() < 1


def test_ties_at_the_limit():
    """Values equal to a limit are no outliers; ranks are exact"""
    def change(name, layer, rows):
        rows[:] = np.repeat([-5, -1, 0, 1, 5], 20)[:, None, None]
    side = fit("--bits 2 --outliers 0.2", made(change=change, lengths=(100,))).layers[0].key
    assert (side.lower == -5).all() and (side.upper == 5).all() and side.report.n_outliers == 0
    side = fit("--bits 2 --outliers 0.41", made(change=change, lengths=(100,))).layers[0].key  # 20 at each end: sorted[20]
    assert (side.lower == -1).all() and (side.upper == 1).all()
    assert side.report.n_outliers + side.report.n_clamped == 40 * 32
    side = fit("--bits 2 --outliers 1", made(change=change, lengths=(100,))).layers[0].key
    assert (side.lower == 0).all() and (side.upper == 0).all() and (side.n_entries == 1).all()


def test_sample_lengths_and_sinks():
    """Samples of 1, 17, 1000 tokens; more sinks than a sample has; counts of tokens are right"""
    file = made(lengths=(1, 17, 1000), layers=(3,), contents=("key", "value", "query"))
    for sinks, tokens in ((0, 1018), (1, 1015), (5, 12 + 995), (17, 983), (64, 936)):
        q = fit(f"--bits 2 --feedback --sinks {sinks}", file)
        assert q.layers[0].key.report.n_tokens == q.report_json["tokens"] == tokens
    refused("--sinks 64", made(lengths=(64, 10)), words=["no token is left", "64 sinks"])


def test_shapes():
    """Head dims 8 to 256, GQA ratios, both pairings, partial RoPE, every width at once"""
    for dim, q_heads, kv_heads, rope in ((8, 1, 1, 8), (64, 9, 3, 64), (72, 4, 1, 36), (80, 8, 2, 20), (96, 7, 1, 0),
                                         (128, 2, 2, 128), (256, 2, 1, 64)):
        file = made(lengths=(65, 63), layers=(0,), n_q_heads=q_heads, n_kv_heads=kv_heads, key_head_dim=dim, rope_dims=rope,
                    value_head_dim=264 - dim if dim > 8 else 16, pairing="interleaved" if dim % 3 else "half",
                    contents=("key", "value", "query"))
        q = fit("--bits 1,2,3,4,5,8,16 --feedback --outliers 0.02 --sinks 2", file)
        assert set(np.unique(q.layers[0].key.bits)) <= {1, 2, 3, 4, 5, 8, 16}
        assert q.layers[0].key.report.n_outliers > 0


def test_suspicious_bf16():
    """f16 that holds bf16's bits is suspected; bf16 itself, and plain f16, are not"""
    def narrow(name, layer, rows):
        rows.view(np.uint32)[:] &= 0xffff0000
    seen = lambda file: {s for side in fit("--bits 2", file).report_json["sides"] for s in side["suspicions"]}
    assert seen(made(np.float16, change=narrow)) == {"bf16_as_f16"}
    assert seen(made(np.float32, change=narrow)) == seen(made(np.float16)) == set()


# Weights.

def weighted(change):
    return made(contents=("key", "value", "key_weight", "value_weight"), change=change, layers=(0,))


def test_weights_of_every_kind():
    """Weights all zero (1 is taken), only one above zero, spread over 60 decades: fitted, and flagged"""
    def zero(name, layer, rows):
        if name == "key_weight":
            rows[:] = 0
    def one(name, layer, rows):
        if name == "key_weight":
            rows[:] = 0
            rows[7] = 3
    def wide(name, layer, rows):
        if name == "key_weight":
            rows[:] = 10.0 ** np.random.default_rng(2).uniform(-38, 22, rows.shape)
    plain = fit("--bits 2 --sensitivity none", weighted(zero))
    for options in ("--bits 2", "--bits 2 --scope layer", "--bits 2 --weight-clip 0 --weight-floor 0", "--preset kvquant-nuq2-1%"):
        side = fit(options, weighted(zero)).layers[0].key
        assert (side.report.flags & 8).all()
        if options == "--bits 2":
            assert np.array_equal(side.table, plain.layers[0].key.table)
        side = fit(options, weighted(one)).layers[0].key
        assert not (side.report.flags & 8).any() or "scope" in options or "clip" in options
        assert (fit(options, weighted(wide)).layers[0].key.report.flags & 16).any()


def test_a_head_without_weight():
    """A head whose weights are all zero shares a codebook of unit weights; the other heads keep theirs"""
    def change(name, layer, rows):
        if name == "key_weight":
            rows[:, 1] = 0
    whole = fit("--bits 2 --scope head", weighted(None)).layers[0].key
    side = fit("--bits 2 --scope head", weighted(change)).layers[0].key
    plain = fit("--bits 2 --scope head --sensitivity none", weighted(None)).layers[0].key
    assert np.array_equal(side.table[0], whole.table[0]) and np.array_equal(side.table[1], plain.table[1])
    assert (side.report.flags[1] & 8).all() and not (side.report.flags[0] & 8).any()


def test_bad_weights_and_values():
    """Negative and infinite weights, NaN and infinities are refused by layer, head, channel and token"""
    for name, value in (("key_weight", -1), ("value_weight", np.inf), ("key", np.nan), ("value", -np.inf)):
        def change(stream, layer, rows):
            if stream == name:
                rows[11, 1, 5] = value
        refused("--bits 2", weighted(change), words=[name, "layer 0", "head 1", "channel 5", "token 11"])


def test_zero_gradients():
    """Gradients of zero: weights of 1, and a feedback that is all zero, both reported"""
    def change(name, layer, rows):
        if name == "key_grad":
            rows[:] = 0
    q = fit("--bits 2 --feedback", made(contents=("key", "value", "key_grad", "value_grad"), change=change))
    assert not np.any(q.layers[0].key.factor) and (q.layers[0].key.report.flags & 8).all()
    assert q.report_json["sides"][0]["zero_feedback_heads"] == 2


def test_default_sensitivity():
    """The default is the first of fisher, weight, attention that the file has; it is recorded"""
    for contents, want in (((), "none"), (("query",), "attention"), (("key_weight", "value_weight"), "weight"),
                           (("query", "key_grad", "value_grad"), "fisher")):
        q = fit("--bits 2", made(contents=("key", "value") + contents, layers=(0,)))
        assert q.record["sensitivity"] == q.report_json["sensitivity"] == want


# Refusals.

def test_missing_streams():
    """What needs streams that are not there is refused by their names"""
    file = made(layers=(0,))
    refused("--sensitivity fisher", file, words=["key_grad"])
    refused("--sensitivity weight", file, words=["key_weight"])
    refused("--sensitivity attention", file, words=["query"])
    refused("--feedback", file, words=["key_grad or query"])
    refused("--feedback=values", made(layers=(0,), contents=("key", "value", "query")), words=["value_grad"])
    refused("", file, made(layers=(0,), seed=1, contents=("key", "value", "query")), words=["same contents"])


def test_other_models():
    """Captures of different models, layers, RoPE, or with a sample in common are refused with both files"""
    first = made(layers=(0,))
    other = path()
    activations.write(other, activations.make(layers=(0,), seed=1), model_sha256="f" * 64)
    refused("", first, other, words=["f" * 16])
    refused("", first, made(layers=(0, 1), seed=1), words=["layer"])
    refused("", first, made(layers=(0,), seed=1, pairing="interleaved"), words=["pairing"])
    refused("", first, made(layers=(0,), seed=1, rope_dims=8), words=["rope_dims"])
    refused("", first, first, words=["count twice"])


def test_bad_files():
    """A missing, cut or foreign file is one line and exit 1; nothing is left behind"""
    good = made(layers=(0,))
    with open(good, "rb") as file:
        content = file.read()
    bad = path()
    for length in (0, 1, 8, 96, len(content) // 2, len(content) - 1):
        with open(bad, "wb") as file:
            file.write(content[:length])
        refused("", bad, words=[bad])
    refused("", path("no such file"), words=["no such file"])
    refused("", FOLDER, words=[FOLDER])
    refused("", made(layers=()), words=["layer_index"])
    done, _ = run("", good, out=good)
    assert done.returncode == 2 and "is the input" in done.stderr
    with open(good, "rb") as file:
        assert file.read() == content
    done, _ = run("", good, out="/nowhere/at/all/q.h5")
    assert done.returncode == 1 and "/nowhere/at/all" in done.stderr
    assert not glob.glob(os.path.join(FOLDER, ".lowkey*"))


def test_usage():
    """Wrong usage is exit 2 and says what was expected"""
    file = made(layers=(0,))
    for options, words in (("--bits 6", "bits"), ("--bits 17", "1 to 16"), ("--bits 2,x", "integer"), ("--preset nuq9", "nuq9"),
                           ("--outliers 2", "--outliers"), ("--scope page", "channel, head, layer"), ("--frob", "frob"),
                           ("--sinks 65", "--sinks"), ("--damp 0", "--damp"), ("--gain=all", "keys, values, both"),
                           ("--codebook normal_float --bits 1", "NormalFloat"), ("--bits 8 --token-scale f16", "token scale"),
                           ("--value-qnorm --gain", "Q-Norm")):
        done, out = run(options, file)
        assert done.returncode in (1, 2) and not os.path.exists(out), options
        assert words in done.stderr, f"{options}: {done.stderr}"
    assert subprocess.run([LOWKEY, "fit", file], capture_output=True).returncode == 2
    assert subprocess.run([LOWKEY, "fit", "--out", path()], capture_output=True).returncode == 2
    help_text = subprocess.run([LOWKEY, "help", "fit"], capture_output=True, text=True)
    assert help_text.returncode == 0 and "--feedback" in help_text.stdout


def test_kvquant_preset():
    """The preset is KVQuant's recipe, and later options change it wherever the preset stands"""
    file = made(contents=("key", "value", "key_grad", "value_grad"), layers=(0,))
    q = fit("--bits 3 --preset kvquant-nuq2-1%", file)
    key, value = q.layers[0].key, q.layers[0].value
    assert (key.bits == 3).all() and (value.bits == 3).all() and q.n_sink_tokens == 1
    named = lambda side: [side.attributes[n] for n in ("table_scope", "token_scale", "outlier_rule", "scale_block")]
    assert named(key) == ["layer", "none", "limit", 0] and named(value) == ["layer", "f16", "rank", 32]
    assert np.ptp(value.table, axis=(0, 1)).max() == 0
    q = fit("--preset kvquant-nuq4 --sinks 0", file)
    assert q.n_sink_tokens == 0 and q.layers[0].key.attributes["outlier_rule"] == "none" and (q.layers[0].key.bits == 4).all()


def test_millions_of_tokens():
    """A channel of more values than are sorted has exact limits, and a table near that of a part (FULL=1)"""
    if os.environ.get("FULL") != "1":
        tap.skip("takes a minute; make test-full")
    n = (1 << 21) + 64
    rng = np.random.default_rng(3)
    capture = activations.make(lengths=(1, 1), layers=(0,), n_q_heads=1, n_kv_heads=1, key_head_dim=8, value_head_dim=8)
    capture["lengths"] = [n - 64, 64]
    x = rng.standard_t(5, (n, 1, 8)).astype(np.float32) + np.float32(3)
    capture["layers"][0].update(key=x, value=x[::-1])
    side = fit("--bits 3 --outliers 0.01", activations.write(path(), capture)).layers[0].key
    ordered = np.sort(x[:, 0], axis=0)
    k = int(n * 0.01 / 2)
    assert np.array_equal(side.lower[0], ordered[k]) and np.array_equal(side.upper[0], ordered[n - 1 - k])
    capture["lengths"] = [100000, 64]
    capture["layers"][0].update(key=x[:100064], value=x[:100064])
    part = fit("--bits 3 --outliers 0.01", activations.write(path(), capture)).layers[0].key
    for c in range(8):
        inside = x[(x[:, 0, c] >= side.lower[0, c]) & (x[:, 0, c] <= side.upper[0, c]), 0, c]
        ours, others = (cost_of(inside, np.ones(len(inside)), s.table[0, c], s.boundary[0, c]) for s in (side, part))
        assert ours <= others * (1 + 1e-6)


# Interruption.

def big_file():
    file = path("big.h5")
    if not os.path.exists(file):
        activations.write(file, activations.make(lengths=[2048] * 2, layers=(0, 1, 2, 3), n_q_heads=4, n_kv_heads=4, key_head_dim=128,
                                                 value_head_dim=128, contents=("key", "value", "query")))
    return file


def work_for(process, seconds):
    """until it has used so much CPU time: how busy the machine is does not count"""
    used = 0
    while process.poll() is None and used < seconds:
        time.sleep(0.005)
        with open(f"/proc/{process.pid}/stat") as stat:
            used = sum(int(ticks) for ticks in stat.read().rsplit(")", 1)[1].split()[11:13]) / os.sysconf("SC_CLK_TCK")


def test_interrupted():
    """A signal ends a fit tidily, a kill ends it at once: the old file stays whole, and nothing else is left"""
    file, out = big_file(), path("kept.h5")
    with open(out, "wb") as kept:
        kept.write(b"the old file")
    for sent, delay in ((signal.SIGTERM, 0.3), (signal.SIGINT, 0.6), (signal.SIGKILL, 0.3), (signal.SIGKILL, 0.8)):
        process = subprocess.Popen([LOWKEY, "fit", "--out", out, "--bits", "2", "--feedback", "--threads", "1", file],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        work_for(process, delay)
        process.send_signal(sent)
        _, errors = process.communicate(timeout=60)
        if sent == signal.SIGKILL:
            assert process.returncode == -signal.SIGKILL
        else:
            assert process.returncode == 1 and errors.strip() == "lowkey fit: interrupted", (process.returncode, errors)
        with open(out, "rb") as kept:
            assert kept.read() == b"the old file"
        assert not glob.glob(os.path.join(FOLDER, ".lowkey*"))


# Widths under a budget.

def pairs_of(layer):
    """Rows 2i, 2i + 1 of a key's order are RoPE partners; those of it that rotate."""
    return [(h, *layer.key.order[h, 2 * i:2 * i + 2]) for h in range(layer.key.order.shape[0])
            for i in range(layer.rope_dims // 2)]


def mean_bits(q):
    bits = np.concatenate([getattr(layer, name).bits.ravel() for layer in q.layers for name in ("key", "value")])
    return bits.mean(), bits.size


def coded_cost(x, g, table, boundary, starts):
    """(diagonal + coherent) / 2 of a channel's table, in nats per token."""
    product = g.astype(np.float64) * (table[np.searchsorted(boundary, x)].astype(np.float64) - x)
    sums = np.add.reduceat(product, starts)
    return ((product**2).sum() + (sums**2).sum()) / 2 / (2 * len(x))


def test_budget_is_spent():
    """Widths fill the budget to the bit, RoPE pairs share one, the file passes lowkey check and the independent reader"""
    gradients = ("key", "value", "key_grad", "value_grad")
    for contents in (gradients, ("key", "value", "query"), ("key", "value", "key_weight", "value_weight"), ("key", "value")):
        file = made(lengths=(150, 90), contents=contents, rope_dims=8)
        for budget in (1, 2, 2.3, 3.57, 5):
            q = fit(f"--budget {budget} --sinks 2", file)
            mean, n = mean_bits(q)
            assert mean * n == np.floor(budget * n), f"{contents} {budget}: {mean}"
            widths = {int(b) for layer in q.layers for name in ("key", "value") for b in getattr(layer, name).bits.ravel()}
            if contents != gradients:  # without gradients: 2 to 4, and what the budget needs beyond
                assert widths <= set(range(1 if budget < 2 else 2, (5 if budget > 4 else 4) + 1)), (contents, budget, widths)
            assert q.budget == budget and q.report_json["budget"] == budget
            for layer in q.layers:
                assert all(layer.key.bits[h, a] == layer.key.bits[h, b] for h, a, b in pairs_of(layer))
                for h in range(2):
                    wide = layer.key.bits[h][layer.key.order[h]][:layer.rope_dims]
                    assert (np.diff(wide.astype(int)) <= 0).all(), "wide rows first"
            costs = q.predicted_cost
            assert all(c > 0 for c in costs) and costs == [q.report_json["predicted_cost_" + s] for s in ("key", "value")]
            assert (layer.key.factor is not None) == ("query" in contents or contents == gradients)
    done = subprocess.run([LOWKEY, "check", run("--budget 2.3", file)[1]], capture_output=True, text=True)
    assert done.returncode == 0 and "good" in done.stdout


def test_budget_goes_where_it_pays():
    """By gradients, predicted costs are those of the tables; no trade of a bit between two channels would lower them"""
    capture = activations.make(lengths=(150, 90, 60), layers=(0, 2), contents=("key", "value", "key_grad", "value_grad"))
    file = activations.write(path(), capture)
    options = "--sinks 2 --gain=none --feedback=none"
    flat = {b: fit(f"{options} --bits {b} --sensitivity fisher", file) for b in range(1, 6)}
    kept, starts = np.r_[2:150, 152:240, 242:300], [0, 148, 236]

    def cost(i, name, h, c, b):
        side, rows = getattr(flat[b].layers[i], name), capture["layers"][(0, 2)[i]]
        n = side.n_entries[h, c]
        return coded_cost(rows[name][kept, h, c], rows[name + "_grad"][kept, h, c], side.table[h, c][:n],
                          side.boundary[h, c][:n - 1], starts)

    q = fit(f"{options} --budget 2.5", file)
    for which, name in enumerate(("key", "value")):
        total, gains, losses = 0, [], []
        for i, layer in enumerate(q.layers):
            bits = getattr(layer, name).bits
            units = [(h, a, b) for h, a, b in pairs_of(layer)] if name == "key" else \
                [(h, c) for h in range(bits.shape[0]) for c in range(bits.shape[1])]
            for h, *channels in units:
                at = {b: sum(cost(i, name, h, c, b) for c in channels) / len(channels) for b in range(1, 6)}
                b = int(bits[h, channels[0]])
                total += at[b] * len(channels)
                gains += [(at[b] - at[wider]) / (wider - b) for wider in range(b + 1, 6)]
                losses += [(at[narrower] - at[b]) / (b - narrower) for narrower in range(1, b)]
        assert abs(total / q.predicted_cost[which] - 1) < 0.01, (name, total, q.predicted_cost)
        assert max(gains) <= min(losses) * 1.05, f"{name}: a bit moved gains {max(gains)} and loses {min(losses)}"


def test_feedback_takes_its_part_of_the_cost():
    """What feedback makes up for is taken off the costs: predictions fall, and keys give bits to values"""
    def change(name, layer, rows):  # gradients of keys with much in common
        if name == "key_grad":
            rows += 3 * rows[..., :1]
    file = made(lengths=(150, 90), contents=("key", "value", "key_grad", "value_grad"), change=change)
    plain, fed = (fit(f"--budget 2.5 --feedback={f}", file) for f in ("none", "keys"))
    assert fed.predicted_cost[0] < 0.8 * plain.predicted_cost[0]
    assert np.mean([layer.key.bits.mean() for layer in fed.layers]) < np.mean([layer.key.bits.mean() for layer in plain.layers])


def test_budget_refusals():
    """Budgets out of range, of no such widths, beside --bits, or with formats of other tables are refused by name"""
    file = made(layers=(0,))
    refused("--budget 5.5", file, words=["budget", "5 bits", "5.5"])
    refused("--budget 0.5", file, words=["budget", "0.5"])
    refused("--budget 4.5 --widths 2:4", file, words=["2 to 4", "4.5"])
    refused("--widths 4:2", file, words=["1:5", "4:2"])
    refused("--widths 1:6", file, words=["--widths"], status=2)
    refused("--widths 3", file, words=["LOW:HIGH"], status=2)
    refused("--budget 2 --bits 2", file, words=["--bits and --budget"], status=2)
    refused("--budget 2 --scope layer", file, words=["trellis", "per channel"])
    refused("--budget 2 --trellis 0 --scope layer", file, words=["budget", "per channel"])
    refused("--preset 2 --outliers 0.01", file, words=["trellis", "outliers"])
    refused("--preset 2 --trellis 0 --outliers 0.01", file, words=["budget", "outliers"])
    refused("--preset 2.5", file, words=["2.5"], status=2)


def test_presets_of_ours():
    """Preset 2, 3 and 4 are budgets with a trellis, and feedback where files allow; 4 is what no option means; --bits is flat"""
    file = made(lengths=(100, 50), contents=("key", "value", "key_grad", "value_grad"))
    q = {options: fit(options, file) for options in ("", "--preset 4", "--preset 2", "--preset 3", "--preset 2 --bits 2",
                                                     "--bits 2", "--budget 3", "--preset 3 --widths 2:4")}
    assert q[""].budget == q["--preset 4"].budget == 4
    assert all(a.report_json["sides"] == b.report_json["sides"] for a, b in ((q[""], q["--preset 4"]), (q["--budget 3"], q["--preset 3"])))
    for options, budget in (("--preset 2", 2), ("--preset 3", 3), ("", 4)):
        side = q[options].layers[0]
        assert q[options].budget == budget and q[options].n_sink_tokens == 1
        assert side.key.factor is not None and side.value.factor is None
        assert all((s.attributes["gain"], s.attributes["trellis"]) == (0, 4) for s in (side.key, side.value))
    flat = q["--preset 2 --bits 2"]
    assert getattr(flat, "budget", 0) == 0 and (flat.layers[0].key.bits == 2).all() and flat.layers[0].key.factor is not None
    assert (q["--bits 2"].layers[0].key.bits == 2).all() and q["--bits 2"].layers[0].key.factor is None
    assert {int(b) for layer in q["--preset 3 --widths 2:4"].layers for b in layer.value.bits.ravel()} <= {2, 3, 4}
    bare = fit("--preset 2", made(lengths=(100,), contents=("key", "value")))
    assert bare.layers[0].key.factor is None and bare.record["sensitivity"] == "none"
    changed = fit("--budget 2 --trellis 1", file)  # a budget is that of a preset whatever else is given
    assert changed.n_sink_tokens == 1 and changed.layers[0].key.attributes["trellis"] == 1


def refit_by_hand(x, w, side, h):
    """One round over the tables of a head: what each code's targets average to, weighted; x, w [T, D]."""
    D, order = x.shape[1], side.order[h]
    e, targets = np.zeros(x.shape), np.zeros(x.shape)
    codes = np.zeros(x.shape, int)
    for j in range(D - 1, -1, -1):
        c, n = order[j], side.n_entries[h, order[j]]
        t = x[:, c] - sum(side.factor[h, i, j] * e[:, order[i]] for i in range(j + 1, D))
        codes[:, c] = np.searchsorted(side.boundary[h, c][:n - 1], t)
        e[:, c] = side.table[h, c][codes[:, c]] - x[:, c]
        targets[:, c] = t
    return [[np.average(targets[codes[:, c] == k, c], weights=w[codes[:, c] == k, c]) if (codes[:, c] == k).any() else
             side.table[h, c][k] for k in range(side.n_entries[h, c])] for c in range(D)]


def test_refit():
    """A refit gives each entry the weighted mean of what its code quantizes once errors are fed back"""
    capture = activations.make(lengths=(150, 90), layers=(2,), contents=("key", "value", "key_grad", "value_grad"))
    file = activations.write(path(), capture)
    kept = np.r_[2:150, 152:240]
    none, once, auto, two = (fit(f"--bits 2 --feedback=both --sinks 2 {more}", file).layers[0]
                             for more in ("--refit 0", "--refit 1", "", "--refit 2"))
    for name in ("key", "value"):
        x, g = (capture["layers"][2][name + s][kept].astype(np.float64) for s in ("", "_grad"))
        before, after = getattr(none, name), getattr(once, name)
        assert np.array_equal(before.factor, after.factor)
        for h in range(x.shape[1]):
            w = np.stack([tamed(g[:, h, c] ** 2) for c in range(x.shape[2])], 1)
            want = refit_by_hand(x[:, h], w, before, h)
            for c, entries in enumerate(want):
                scale = np.ptp(x[:, h, c])
                assert np.allclose(after.table[h, c][:len(entries)], entries, atol=1e-3 * scale), f"{name} {h} {c}"
                n = len(entries)
                assert np.allclose(after.boundary[h, c][:n - 1], (np.array(entries)[1:] + np.array(entries)[:-1]) / 2, atol=1e-3 * scale)
        assert np.array_equal(getattr(auto, name).table, getattr(two, name).table)
        assert not np.array_equal(getattr(two, name).table, after.table)
    queries = made(layers=(0,), contents=("key", "value", "query"))  # no gradients: no refit by itself
    assert np.array_equal(*(fit(f"--bits 2 --feedback {more}", queries).layers[0].key.table for more in ("", "--refit 0")))
    refused("--bits 2 --feedback --outliers 0.01 --refit 1", queries, words=["refitting", "outliers"])


def test_trellis():
    """A trellis lowers the error at the same bits by far more than noise, its refit again; 1.3, without boundaries; any bits"""
    file = made(lengths=(900, 700), layers=(2,), contents=("key", "value"))
    plain, once, refitted = (fit(f"--bits 2 --sinks 1 {more}", file) for more in ("", "--trellis 4 --refit 0", "--trellis 4"))
    assert plain.layers[0].key.attributes.get("trellis", 0) == 0
    for name in ("key", "value"):
        errors = [(getattr(q.layers[0], name).report.mse / getattr(q.layers[0], name).report.variance).mean() for q in (plain, once, refitted)]
        assert errors[1] < 0.95 * errors[0] and errors[2] < 0.97 * errors[1], errors
        side = getattr(refitted.layers[0], name)
        assert side.attributes["trellis"] == 4 and side.table.shape[-1] == 8
        assert side.report.histogram.sum() == side.report.n_tokens * side.bits.size
    mixed = fit("--budget 2.5 --trellis 2 --feedback=both", made(lengths=(300, 200), contents=("key", "value", "key_grad", "value_grad")))
    assert {int(b) for b in mixed.layers[0].key.bits.ravel()} > {2} and abs(mixed.budget - 2.5) < 1e-9
    one = fit("--bits 2 --key-trellis 1", file)
    assert (one.layers[0].key.attributes["trellis"], one.layers[0].value.attributes["trellis"]) == (1, 0)


def test_rows_of_a_trellis_count_by_weight():
    """Rows count by the mean weight of their channel, with feedback by what the factor leaves, 1 the most of a head"""
    file = made(lengths=(400,), layers=(0,), contents=("key", "value", "key_grad", "value_grad"))
    capture = activations.make(lengths=(400,), layers=(0,), contents=("key", "value", "key_grad", "value_grad"))
    g = capture["layers"][0]["value_grad"].astype(np.float64)
    layer = fit("--bits 2 --trellis 4 --damp 0.1 --feedback=keys", file).layers[0]
    for h in range(g.shape[1]):
        weight = np.array([tamed(g[:, h, c] ** 2).mean() for c in range(g.shape[2])])
        assert np.allclose(layer.value.metric_weight[h], weight / weight.max(), rtol=1e-4), h
        H = np.einsum("ti,tj->ij", *(2 * [capture["layers"][0]["key_grad"][:, h].astype(np.float64)]))
        order = layer.key.order[h]
        A = (H + 0.1 * np.trace(H) / len(H) * np.eye(len(H)))[np.ix_(order, order)]
        left = np.diag(np.linalg.cholesky(A)) ** 2
        assert np.allclose(layer.key.metric_weight[h][order], left / left.max(), rtol=1e-4), h


def test_trellis_refusals():
    """A trellis goes with tables of each channel's own, 1 to 5 bits, and 1, 2 or 4 survivors"""
    file = made(layers=(0,))
    for options in ("--scope layer", "--codebook uniform", "--token-scale f16", "--outliers 0.01", "--bits 8", "--bits 2,16"):
        refused(f"--trellis 4 {options}", file, words=["trellis", "1 to 5 bits"])
    refused("--trellis 3", file, words=["1, 2 or 4", "3"])
    refused("--trellis 5", file, words=["--trellis"], status=2)


def test_same_bytes_trellis():
    """The same bytes from 1, 2, 7 threads, shuffled samples, one file or four: a trellis"""
    same_bytes("--budget 2.4 --feedback=keys --trellis 4", ("key_grad", "value_grad"))


def test_same_bytes_budget():
    """The same bytes from 1, 2, 7 threads, shuffled samples, one file or four: a budget by gradients, by queries"""
    same_bytes("--budget 2.4 --feedback=both", ("key_grad", "value_grad"))
    same_bytes("--preset 2", ("query",))


def test_report():
    """The report is a table, or JSON of the same; text and samples are recorded in the file"""
    file = made(lengths=(40, 30), contents=("key", "value", "query"))
    done, out = run("--bits 2 --outliers 0.05 --sinks 1", file)
    lines = done.stdout.splitlines()
    assert "68 tokens" in lines[0] and "attention" in lines[0]
    assert [line.split()[:2] for line in lines[3:7]] == [["0", "key"], ["0", "value"], ["1", "key"], ["1", "value"]]
    q = fit("--bits 2 --outliers 0.05 --sinks 1", file)
    assert (q.record["text_name"], q.record["n_tokens"], len(q.sample_sha256)) == ("made up", 68, 2)
    side = q.report_json["sides"][1]
    assert side["side"] == "value" and side["outliers"] == q.layers[0].value.report.n_outliers


tap.run(globals())
