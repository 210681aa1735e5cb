"""The C library against the independent reader and packer: files, page bytes, values and attention, through ctypes."""
import os
import tempfile
from fractions import Fraction

import numpy as np

import lowkey_ctypes
import quantizer_files as make
import reader
import reader_pages as pages
import tap
from reader_compare import compare_attention, compare_sequence

LIBRARIES = lowkey_ctypes.load()
FOLDER = tempfile.mkdtemp(prefix="lowkey-reader-")
F32 = np.float32


def path(name):
    return os.path.join(FOLDER, name)


# The reader's own arithmetic.

def test_arithmetic():
    """The packer's fma and sums are rounded once, against rational numbers"""
    rng = np.random.default_rng(1)
    a, b = (F32(rng.normal(size=3000) * 2.0 ** rng.integers(-30, 30, 3000)) for _ in range(2))
    # Sums near the middle between two f32: c is the rounded product and half a unit more or less.
    c = np.where(np.arange(3000) % 3, -(a * b) * F32(2.0) ** rng.integers(-26, 27, 3000).astype(F32), -(a * b))
    a[::7], b[::7] = F32(3e-30), F32(2.5e-12) * rng.integers(1, 99, len(a[::7])).astype(F32)  # among the denormals
    c[::7] = F32(1.4e-45) * rng.integers(-9, 9, len(a[::7])).astype(F32)
    # Just beside the middle of two f32, by less than f64 holds.
    a[::5], b[::5] = F32(2.0**-24) * F32(1 + 2.0**-23), F32(1 - 2.0**-23)
    c[::5] = F32(1 + rng.integers(0, 2**23, len(c[::5])) * 2.0**-23)
    got = pages.fma_f32(a, b, c)
    for x, y, z, g in zip(a, b, c, got):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below, above = np.nextafter(g, F32(-np.inf)), np.nextafter(g, F32(np.inf))
        distance = abs(Fraction(float(g)) - exact)
        for other in (below, above):
            d = abs(Fraction(float(other)) - exact)
            assert distance < d or (distance == d and not g.view(np.uint32) & 1), (x, y, z, g)


def test_number_formats():
    """The packer's f16 is NumPy's, its E4M3 and E5M2 are the nearest of all codes"""
    rng = np.random.default_rng(2)
    x = F32(rng.normal(size=20000) * 2.0 ** rng.integers(-30, 15, 20000))
    ends = [0, -0.0, 65504, 65519, 65520, -65536, 3e38, 2.0**-24, 2.0**-25, 464, 464.1, -465]
    x = np.concatenate([x, ends]).astype(F32)
    with np.errstate(over="ignore"):
        half = np.clip(x.astype(np.float16), np.float16(-65504), np.float16(65504))
    assert (pages.encode(x, "f16")[0] == half.view(np.uint16)).all()
    assert (pages.encode(x, "f16")[1] == (np.abs(x) >= 65520)).all()
    assert (pages.encode(x, "e4m3")[1] == (np.abs(x) > 464)).all()
    for name, n in (("e4m3", 127), ("e5m2", 124), ("bf16", 0x7F80)):
        values = pages.decode(np.arange(n), name)
        middles = (values[1:].astype(np.float64) + values[:-1]) / 2
        code = np.searchsorted(middles, np.abs(x).astype(np.float64))  # ties to the lower
        tie = np.isin(np.abs(x).astype(np.float64), middles) & (code % 2 == 1)
        assert (pages.encode(x, name)[0] & (2 ** (15 if name == "bf16" else 7) - 1) == code + tie).all()
    assert pages.decode(0x7F, "e4m3") != pages.decode(0x7F, "e4m3") and pages.decode(0xFC, "e5m2") == -np.inf


def test_layout():
    """Slots, planes and paddings lie where the specification's words put them"""
    side = lambda bits: type("Side", (), dict(bits=np.array([bits]), order=np.array([range(len(bits))]), D=len(bits)))
    assert pages.plane_rows(side([3] * 64), 0)[1] == 1024 + 512
    codes = np.zeros((64, 8), int)
    codes[9, 1], codes[63, 1], codes[17, 0] = 0b101, 0b110, 0b10011
    page, mask = pages.write_codes(side([5, 3, 1, 2, 2, 2, 2, 2]), 0, codes, np.arange(64) != 2)
    # 4-bit plane: one row; 2-bit plane from 64: channel 1 first; 1-bit plane from 64 + 128: channels 0, 1, 2.
    assert len(page) == 64 + 128 + 64 and mask[2] == 0xF0 and mask[64 + 2] == 0xFC and mask[192 + 2] == 0xFE
    wanted = {17: 0x03, 64 + 9: 1, 64 + 15: 2 << 6, 192 + 1: 1 << 2, 192 + 8 + 1: 1 << 1, 192 + 8 + 7: 1 << 7}
    assert {i: b for i, b in enumerate(page) if b} == wanted, {i: b for i, b in enumerate(page) if b}
    assert (pages.read_codes(side([5, 3, 1, 2, 2, 2, 2, 2]), 0, page) == codes).all()


# What the format allows: cases of one layer each. name: (geometry, key, value, sinks, sink rule, tokens)

def case(name, heads, dims, key, value, rope=None, pairing="half", factor=1.0, sinks=0, sink_rule="f16", tokens=130):
    return dict(name=name, heads=heads, dims=dims, key=key, value=value, rope=dims[0] if rope is None else rope,
                pairing=pairing, factor=factor, sinks=sinks, sink_rule=sink_rule, tokens=tokens)


LIMIT = dict(outlier_rule="limit", outlier_cap=6, outlier_page_capacity=300)
RANK = dict(outlier_rule="rank", outlier_rank=2, outlier_cap=4, outlier_page_capacity=256)
TIGHT = dict(outlier_rule="limit", outlier_cap=5, outlier_page_capacity=7)
CASES = [
    case("1 bit", (3, 1), (64, 64), dict(bits=(1,)), dict(bits=(1,))),
    case("2 bits with feedback", (4, 2), (64, 64), dict(bits=(2,), feedback=1), dict(bits=(2,), feedback=1), sinks=4),
    case("3 bits, fewer entries than codes", (8, 1), (80, 80), dict(bits=(3,), full=False, feedback=1),
         dict(bits=(3,), full=False)),
    case("4 bits, interleaved", (2, 2), (96, 64), dict(bits=(4,)), dict(bits=(4,)), pairing="interleaved", sinks=1),
    case("5 bits of 128 channels", (4, 4), (128, 128), dict(bits=(5,)), dict(bits=(5,), feedback=1), sinks=64,
         tokens=129),
    case("8 channels, mixed", (1, 1), (8, 8), dict(bits=(1, 2, 3, 4, 5), wide_table=True), dict(bits=(2, 5)),
         tokens=65),
    case("E4M3 and f16", (4, 1), (64, 72), dict(bits=(8,), rule_8="e4m3"), dict(bits=(16,), rule_16="f16"), rope=0),
    case("E5M2 and bf16", (4, 1), (72, 64), dict(bits=(8,), rule_8="e5m2"), dict(bits=(16,), rule_16="bf16"),
         rope=20),
    case("INT8, partial RoPE, YaRN", (2, 1), (64, 64), dict(bits=(8,), rule_8="int8"), dict(bits=(8,), rule_8="int8"),
         rope=16, factor=1.2, sinks=3, sink_rule="bf16"),
    case("every width, feedback, limit", (6, 2), (64, 64),
         dict(bits=(1, 2, 3, 4, 5, 8, 16), rule_8="e4m3", rule_16="bf16", feedback=1, full=False, **LIMIT),
         dict(bits=(1, 2, 3, 4, 5, 8, 16), rule_8="int8", rule_16="f16", feedback=1, full=False, **LIMIT), sinks=3),
    case("every width, token scales, rank", (6, 2), (64, 72),
         dict(bits=(1, 2, 3, 4, 5, 8, 16), rule_8="e5m2", rule_16="f16", feedback=1, token_scale="f16",
              scale_block=128, **RANK),
         dict(bits=(1, 2, 3, 4, 5, 8, 16), rule_8="int8", rule_16="bf16", token_scale="f32", scale_block=8,
              full=False, **RANK)),
    case("f16 scales a head", (2, 2), (64, 64), dict(bits=(3,), token_scale="f16", scale_block=64),
         dict(bits=(2,), token_scale="f16", scale_block=32, feedback=1), sinks=2),
    case("f32 scales, wide tables", (2, 1), (64, 64),
         dict(bits=(1, 2), token_scale="f32", scale_block=64, wide_table=True, **RANK),
         dict(bits=(3, 4), token_scale="f32", scale_block=16, wide_table=True, full=False), pairing="interleaved",
         rope=32),
    case("side pages that overflow by limit", (2, 2), (64, 64), dict(bits=(2,), feedback=1, **TIGHT),
         dict(bits=(4, 8), rule_8="e4m3", **TIGHT)),
    case("side pages that overflow by rank", (2, 2), (64, 64),
         dict(bits=(2,), **{**RANK, "outlier_page_capacity": 30}),
         dict(bits=(2, 16), rule_16="f16", token_scale="f16", scale_block=128, **{**RANK, "outlier_cap": 3}),
         sinks=5),
    case("rank of nearly all", (1, 1), (8, 8), dict(bits=(2,), **{**RANK, "outlier_rank": 3, "outlier_cap": 8}),
         dict(bits=(2, 16), rule_16="f16", token_scale="f16", scale_block=8,
              **{**RANK, "outlier_rank": 4, "outlier_cap": 8,
                                                                                "outlier_page_capacity": 512})),
    case("256 channels", (2, 1), (256, 256), dict(bits=(2, 3), feedback=1), dict(bits=(2,), **LIMIT), tokens=66,
         rope=128),
    case("one token", (2, 1), (64, 64), dict(bits=(2,), **LIMIT), dict(bits=(2,), token_scale="f16", scale_block=64),
         tokens=1),
    case("sinks alone", (2, 1), (64, 64), dict(bits=(2,), **LIMIT), dict(bits=(2,)), sinks=7, tokens=7),
    case("trellises of 1 and 2 survivors", (4, 2), (64, 72), dict(bits=(2,), trellis=1), dict(bits=(3,), trellis=2), sinks=4),
    case("trellises with feedback, mixed", (3, 1), (64, 64), dict(bits=(1, 2, 3, 4, 5), trellis=2, feedback=1, full=False),
         dict(bits=(1, 2, 3), trellis=4, feedback=1), sinks=3, tokens=80),
    case("a trellis of 8 channels beside token scales", (2, 2), (8, 64), dict(bits=(1, 5), trellis=4, wide_table=True),
         dict(bits=(2,), token_scale="f16", scale_block=64), pairing="interleaved", tokens=129),
    case("trellises of 128 and 256 channels", (2, 1), (128, 256), dict(bits=(4, 2), trellis=1, feedback=1),
         dict(bits=(2, 1), trellis=1, wide_table=True, full=False), rope=64, tokens=66),
    case("trellises of large and small channels", (2, 1), (64, 64), dict(bits=(2, 3), trellis=2, feedback=1, magnitude=1e18),
         dict(bits=(2, 3), trellis=4, magnitude=1e-20), tokens=66),
    case("63 tokens of large channels", (2, 1), (64, 64), dict(bits=(2,), magnitude=1e30, **LIMIT),
         dict(bits=(2,), magnitude=1e-30), tokens=63),
]


def write_case(c, seed):
    rng = np.random.default_rng(seed)
    (n_q, n_kv), (key_dim, value_dim) = c["heads"], c["dims"]
    g = make.geometry(rng, n_q, n_kv, key_dim, value_dim, c["rope"], c["pairing"], c["factor"])
    key = make.side(rng, n_kv, key_dim, make.pairs_of(g), **c["key"])
    value = make.side(rng, n_kv, value_dim, [], **c["value"])
    name = path(f"case-{seed}.h5")
    make.write(name, {2: (g, key, value)}, c["sinks"], c["sink_rule"])
    return rng, name


def plain_tokens(rng, side, T):
    spread = (side.upper.astype(np.float64) - side.lower) / 4 + 1e-30
    return F32(side.center + rng.normal(size=(T, side.H, side.D)) * spread)


def middles(side):
    """The boundaries [H, D, E - 1], or what ties in a trellis: the middles of neighbours in a subset; entries for the rest."""
    if not side.trellis:
        return np.where(np.abs(side.boundary) < 1e30, side.boundary, side.table[:, :, :-1])
    apart = np.minimum(np.arange(side.E - 1) + 4, side.E - 1)
    return (side.table[:, :, :-1].astype(np.float64) + side.table[:, :, apart]) / 2


def hard_tokens(rng, side, T):
    """Each token of one of the kinds that break packers."""
    x = plain_tokens(rng, side, T).astype(np.float64)
    spread = (side.upper.astype(np.float64) - side.lower) / 4
    for t in range(T):
        kind = rng.integers(8)
        shape = x[t].shape
        if kind == 1:
            x[t] = side.center + spread * rng.standard_t(2, shape)
        elif kind == 2:
            x[t] += np.where(rng.random(shape) < 0.05, spread * rng.normal(size=shape) * 100, 0)
        elif kind == 3:
            x[t] *= 10.0 ** rng.integers(-44, 6)
        elif kind == 4:  # equal values everywhere, zeros of both signs among them
            x[t] = rng.choice([-2.0, -0.0, 0.0, 0.0, 2.0], shape)
        elif kind == 5 and side.E:  # on the boundaries and on the entries
            b = middles(side)
            pick = rng.integers(0, b.shape[2], shape)[:, :, None]
            x[t] = np.take_along_axis(b if rng.random() < 0.5 else side.table[:, :, :-1], pick, 2)[:, :, 0]
        elif kind == 6:
            x[t] = np.where(rng.random(shape) < 0.5, side.lower, side.upper)
        elif kind == 7:
            x[t] = rng.normal() * np.where(rng.random(shape) < 0.9, 1, 1 + 1e-7)
    return np.clip(x, -1e38, 1e38).astype(F32)


def run_case(number):
    c = CASES[number]
    rng, name = write_case(c, number)
    q = reader.quantizer(name)
    layer, T = q.layers[0], c["tokens"]
    cache = lowkey_ctypes.Cache(LIBRARIES, name, 2 * (T // 64 + 1), max_sequences=2)
    counts = np.zeros(3, int)
    for sequence, tokens in enumerate((plain_tokens, hard_tokens)):
        cuts = [[1, min(2, T), min(67, T)], range(1, T)][(sequence + number) % 2]
        keys, values = tokens(rng, layer.key, T), tokens(rng, layer.value, T)
        packed = compare_sequence(cache, q, layer, keys, values, cuts, sequence, f"{c['name']}: {tokens.__name__}")
        counts += [sum(getattr(p, n) for p in packed) for n in ("n_outliers", "n_clamped", "n_saturated")]
        if tokens is plain_tokens:
            compare_attention(cache, layer, packed[0].values, packed[1].values, rng, sequence, c["name"])
    usage = cache.usage()
    found = [usage.outliers, usage.clamped, usage.saturated]
    assert found == list(counts), f"{c['name']}: outliers, clamped, saturated {found}, expected {list(counts)}"
    cache.close()


def case_test(number):
    def test():
        run_case(number)
    test.__doc__ = f"Bytes, values and attention are the independent ones: {CASES[number]['name']}"
    return test


for _number in range(len(CASES)):
    globals()[f"test_case_{_number:02d}"] = case_test(_number)


def test_cuts():
    """Any cut of the same tokens, and appending again after trimming, leaves the packer's bytes"""
    rng, name = write_case(CASES[9], 100)
    q = reader.quantizer(name)
    layer, T = q.layers[0], 150
    keys, values = hard_tokens(rng, layer.key, T), hard_tokens(rng, layer.value, T)
    for cuts in ([], [1, 2, 3, 4, 63, 64, 65, 66, 127, 128, 149], [int(c) for c in np.sort(rng.integers(0, T, 9))]):
        cache = lowkey_ctypes.Cache(LIBRARIES, name, 3)
        compare_sequence(cache, q, layer, keys, values, cuts, 0, f"cuts {cuts}")
        for keep in (130, 70, 64, 2, 0):
            cache.trim(keep)
            compare_sequence(cache, q, layer, keys, values, cuts, 0, f"cuts {cuts}, trimmed to {keep}", keep)
        cache.close()


def extreme_tokens(rng, side, T):
    """Up to the ends of f32."""
    x = rng.normal(size=(T, side.H, side.D)) * 10.0 ** rng.integers(-46, 39, (T, 1, 1)).astype(np.float64)
    often = rng.choice([0.02, 1.0], (T, 1, 1), p=[0.9, 0.1])
    x = np.where(rng.random(x.shape) < often, rng.choice([-1, 1], x.shape) * 3.4e38, x)
    return F32(np.clip(x, -3.4028234e38, 3.4028234e38))


def test_extremes():
    """Tokens from the smallest denormals to the largest f32 give the packer's bytes and the decoder's values, from quantizers made in memory"""
    far = dict(bits=(2,), feedback=1, magnitude=1e37)  # errors that are infinite, and then NaN
    cases = [case("channels near the end of f32", (2, 2), (64, 64), far, {**far, **LIMIT}),
             case("trellises near the end of f32", (1, 1), (64, 64), {**far, "trellis": 1}, {**far, "trellis": 4})] + CASES
    for number, c in enumerate(cases):
        rng, name = write_case(c, 200 + number)
        q = reader.quantizer(name)
        layer = q.layers[0]
        cache = lowkey_ctypes.Cache(LIBRARIES, lowkey_ctypes.describe(q), 3)
        keys, values = extreme_tokens(rng, layer.key, 150), extreme_tokens(rng, layer.value, 150)
        packed = compare_sequence(cache, q, layer, keys, values, [5, 77], 0, f"extremes: {c['name']}")
        assert all(np.isfinite(side.values).all() for side in packed)
        cache.close()


def test_fused_feedback():
    """Feedback is one rounding: products beside the middle of two f32 by less than a rounded product, or f64, can tell"""
    # F an f16 of 11 bits, E an f32 of 24: their product is 2^34 but for its last bits.
    found = [(f, round(2**34 / f)) for f in range(1025, 2048) if 0 < abs(f * round(2**34 / f) - 2**34) < 32]
    H, D, rng = len(found), 8, np.random.default_rng(3)
    g = make.geometry(rng, H, H, D, D, 0, "half", 1.0)
    factor, x = np.zeros((H, D, D)), np.empty((40, H, D), F32)
    for h, (f, e) in enumerate(found):
        factor[h, 7, :7] = rng.choice([-1, 1], 7) * f * 2.0**-24
        x[:, h, 7] = -e * 2.0**-34
    x[:, :, :7] = 1 + rng.integers(1, 2**22, (40, H, 7)) * 2.0**-23
    side = make.side(rng, H, D, [], bits=(1,), feedback=1)
    side.update(factor=factor, order=np.tile(np.arange(D), (H, 1)), center=np.zeros((H, D)), lower=np.zeros((H, D)),
                upper=np.full((H, D), 2.0), exponent=np.zeros((H, D), int), table=np.tile(F32([0, 2]), (H, D, 1)))
    halves = np.sign(factor[:, 7, :7]) * -2.0**-24
    side["boundary"][:, :, 0] = 0.5
    for t in range(40):  # a boundary at one of the two neighbours tells them apart
        side["boundary"][:, :7, 0] = np.minimum(x[t, :, :7], F32(x[t, :, :7] + 2 * halves))
        name = path("fused.h5")
        make.write(name, {2: (g, side, side)})
        q = reader.quantizer(name)
        cache = lowkey_ctypes.Cache(LIBRARIES, name, 1)
        packed = compare_sequence(cache, q, q.layers[0], x[t:t + 1], x[t:t + 1], [], 0, "fused")[0]
        assert 0 < packed.codes[0, :, :7].sum() < 7 * H
        cache.close()


tap.run(globals())
