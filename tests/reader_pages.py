"""Pages and their arithmetic by formats/README.md alone, in NumPy: number formats, decoding of page bytes to f32, packing
of tokens to page bytes. Everything is exact to the bit; f64 stands in for f32 arithmetic only where that is proven.
Sides are the namespaces of reader.quantizer. H heads, D channels of a head, C = H * D, T tokens."""
from types import SimpleNamespace

import numpy as np

F32 = np.float32
FLT_MAX = F32((2 - 2**-23) * 2.0**127)
PAGE = 64
FORMATS = {  # exponent bits, mantissa bits, bias, largest
    "f16": (5, 10, 15, 65504.0),
    "bf16": (8, 7, 127, (2 - 2**-7) * 2.0**127),
    "e4m3": (4, 3, 7, 448.0),
    "e5m2": (5, 2, 15, 57344.0),
}
PLANES = {1: [(1, 0)], 2: [(2, 0)], 3: [(2, 0), (1, 2)], 4: [(4, 0)], 5: [(4, 0), (1, 4)], 8: [(8, 0)], 16: [(16, 0)]}


# Arithmetic. Sums of two doubles are rounded to odd first, which makes the second rounding, to f32, the only one.

def add_f32(a, b):
    """fl32(a + b) of doubles, rounded once."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    with np.errstate(all="ignore"):
        s = a + b
        part = s - a
        error = (a - (s - part)) + (b - part)
        even = (s.view(np.uint64) & 1) == 0
        to_odd = np.isfinite(s) & (error != 0) & even
        s = np.where(to_odd, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s)
        return s.astype(F32)


def fma_f32(a, b, c):
    """f32 fma: the product of two f32 is exact in f64."""
    with np.errstate(all="ignore"):
        return add_f32(np.asarray(a, np.float64) * np.asarray(b, np.float64), c)


def encode(x, name):
    """Codes of f32 values in a small float format, saturating, and which of them saturated."""
    exponent_bits, mantissa_bits, bias, largest = FORMATS[name]
    x = np.asarray(x, np.float64)
    size = np.where(np.isfinite(x), np.abs(x), 4 * largest)
    least = 1 - bias
    step = np.maximum(np.frexp(size)[1] - 1, least) - mantissa_bits
    rounded = np.ldexp(np.rint(np.ldexp(size, -step)), step)
    saturated = rounded > largest
    rounded = np.minimum(rounded, largest)
    exponent = np.maximum(np.frexp(rounded)[1] - 1, least)
    units = np.ldexp(rounded, mantissa_bits - exponent).astype(np.int64)  # the leading bit too, if normal
    field = np.where(units >> mantissa_bits, exponent + bias, 0)
    code = (field << mantissa_bits) | (units & (2**mantissa_bits - 1))
    return code | (np.signbit(x).astype(np.int64) << (exponent_bits + mantissa_bits)), saturated


def decode(code, name):
    exponent_bits, mantissa_bits, bias, _ = FORMATS[name]
    code = np.asarray(code, np.int64)
    field = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    size = np.ldexp((mantissa + np.where(field, 2**mantissa_bits, 0)).astype(np.float64),
                    np.maximum(field, 1) - bias - mantissa_bits)
    top = field == 2**exponent_bits - 1
    if name == "e4m3":
        size = np.where(top & (mantissa == 7), np.nan, size)
    else:
        size = np.where(top, np.where(mantissa, np.nan, np.inf), size)
    return np.where(code >> (exponent_bits + mantissa_bits) & 1, -size, size).astype(F32)


def encode_rule(t, rule, scale):
    with np.errstate(all="ignore"):
        if rule in ("f16", "bf16"):
            return encode(t, rule)
        t = t / scale
    if rule != "int8":
        return encode(t, rule)
    nearest = np.rint(t.astype(np.float64))
    return np.clip(nearest, -127, 127).astype(np.int64) & 255, np.abs(nearest) > 127


def decode_rule(code, rule, scale):
    if rule in ("f16", "bf16"):
        return decode(code, rule)
    value = ((code ^ 128) - 128).astype(F32) if rule == "int8" else decode(code, rule)
    with np.errstate(over="ignore"):
        return scale * value


# Layout.

def padded(n):
    return (n + 63) // 64 * 64


def plane_rows(side, h):
    """(plane bits, [(channel, place of the plane in its code)], byte offset of the plane) of a page, and its size."""
    planes, offset = [], 0
    for p in (16, 8, 4, 2, 1):
        rows = [(c, place) for c in side.order[h] for q, place in PLANES[side.bits[h, c]] if q == p]
        planes.append((p, rows, offset))
        offset += padded(len(rows) * 8 * p)
    return planes, offset


def read_plane(page, p, offset, n_rows):
    """Values [64, n_rows] of a plane."""
    if p == 16:
        return np.frombuffer(page, "<u2", 64 * n_rows, offset).reshape(n_rows, 64).T.astype(np.int64)
    row_bytes = 8 * p
    rows = np.frombuffer(page, np.uint8, row_bytes * n_rows, offset).reshape(n_rows, row_bytes).astype(np.int64)
    t = np.arange(PAGE)
    return ((rows[:, t % row_bytes] >> (p * (t // row_bytes))) & (2**p - 1)).T


def read_codes(side, h, page):
    """Codes [64, D] of one head's page, by channel."""
    codes = np.zeros((PAGE, side.D), np.int64)
    planes, size = plane_rows(side, h)
    assert len(page) == size, (len(page), size)
    for p, rows, offset in planes:
        values = read_plane(page, p, offset, len(rows))
        for i, (c, place) in enumerate(rows):
            codes[:, c] |= values[:, i] << place
    return codes


def write_codes(side, h, codes, live):
    """The page of codes [64, D], and a mask of the bits that live slots define."""
    planes, size = plane_rows(side, h)
    page, mask = bytearray(size), bytearray(size)
    for p, rows, offset in planes:
        if rows:
            channels, places = np.array(rows).T
            ones = np.broadcast_to(np.where(live, 2**p - 1, 0), (len(rows), PAGE))
            values = codes[:, channels].T >> places[:, None] & ones
            for out, value in ((page, values), (mask, ones)):
                row = plane_bytes(value, p)
                out[offset:offset + len(row)] = row
    return bytes(page), bytes(mask)


def plane_bytes(values, p):
    """Rows of values [n_rows, 64] as bytes: slot t lies in byte t mod 8p."""
    if p == 16:
        return values.astype("<u2").tobytes()
    groups = values.reshape(len(values), 8 // p, 8 * p) << (p * np.arange(8 // p))[:, None]
    return groups.sum(axis=1).astype(np.uint8).tobytes()


def side_sections(side):
    """Name -> (byte offset, shape, dtype) of a side page, and its size."""
    sections, offset = {}, 0
    number = {"f16": "<u2", "f32": "<f4"}.get(side.token_scale)
    wanted = [("scale", (PAGE, side.n_blocks), number), ("zero", (PAGE, side.n_blocks), number)] if number else []
    if side.outlier_rule != "none":
        wanted += [("end", (PAGE,), "<u2"), ("outliers", (side.capacity, 2), "<u2")]
    for name, shape, dtype in wanted:
        sections[name] = (offset, shape, dtype)
        offset += padded(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return sections, offset


def read_side(side, page):
    sections, size = side_sections(side)
    assert len(page) == size, (len(page), size)
    out = {}
    for name, (offset, shape, dtype) in sections.items():
        out[name] = np.frombuffer(page, dtype, int(np.prod(shape)), offset).reshape(shape)
        if name in ("scale", "zero"):
            out[name] = decode(out[name], "f16") if dtype == "<u2" else out[name]
    return out


# Decoding.

def entries_of(side, h, codes):
    """The entries of the table that codes [..., D] (by channel) of one head stand for: with a trellis a code's lowest bit
    and those of the next two rows choose."""
    if not side.trellis:
        return codes
    rows = codes[..., side.order[h]]
    low = np.concatenate([rows & 1, np.zeros((*rows.shape[:-1], 2), rows.dtype)], axis=-1)
    entries = np.empty_like(codes)
    entries[..., side.order[h]] = (rows >> 1) * 4 + (low[..., :-2] ^ low[..., 2:]) * 2 + low[..., 1:-1]
    return entries


def decode_column(side, h, c, codes, scale, zero):
    """x^ [T] of one channel without residuals, codes being its entries where it has a table; scale, zero [T, n_blocks]
    or None."""
    width = side.bits[h, c]
    if width == 16:
        return decode_rule(codes, side.rule_16, None)
    if width == 8:
        return decode_rule(codes, side.rule_8, side.rule_scale[h, c])
    e = side.table[h, c, codes]
    if scale is None:
        return e
    b = (h * side.D + c) // side.scale_block
    with np.errstate(all="ignore"):
        return zero[:, b] + scale[:, b] * e


def add_residual(side, channel, e, residual_bits):
    exponent = side.exponent.reshape(-1)[channel]
    with np.errstate(over="ignore"):
        return e + np.ldexp(decode(residual_bits, "f16").astype(np.float64), exponent).astype(F32)


def decode_page(side, pages, side_page, live):
    """f32 [n live, H, D] from the pages of all heads; live: the slots, rising, all that hold tokens."""
    extra = read_side(side, side_page)
    scale, zero = extra.get("scale"), extra.get("zero")
    out = np.empty((PAGE, side.H, side.D), F32)
    for h in range(side.H):
        entries = entries_of(side, h, read_codes(side, h, pages[h]))
        for c in range(side.D):
            # A dead slot may hold codes of no meaning.
            used = np.where(np.isin(np.arange(PAGE), live), entries[:, c], 0)
            out[:, h, c] = decode_column(side, h, c, used, scale, zero)
    if "end" in extra:
        flat, begin = out.reshape(PAGE, side.C), 0
        for t in live:
            entries = extra["outliers"][begin:extra["end"][t]]
            channels = entries[:, 0].astype(np.int64)
            assert (np.diff(channels) > 0).all()
            flat[t, channels] = add_residual(side, channels, flat[t, channels], entries[:, 1])
            begin = extra["end"][t]
    return out[live]


# Packing.

def pack(side, x, n_sinks):
    """Pack x [T, H, D] f32, tokens 0.. of a sequence. Gives codes [T, H, D], scale and zero [T, n_blocks] with their
    stored bits, outliers (per token a list of (channel, residual bits)), values [T, H, D], counts."""
    T = len(x)
    packed = SimpleNamespace(side=side, first=min(n_sinks, T), T=T, codes=np.zeros(x.shape, np.int64),
                             n_outliers=0, n_clamped=0, n_saturated=0, outliers=[[] for _ in range(T)])
    packed.values = np.zeros(x.shape, F32)
    x = x[packed.first:]
    ranked, taken = choose_outliers(packed, x.reshape(len(x), side.C))
    scale, zero = token_scales(packed, x.reshape(len(x), side.C), ranked)
    for h in range(side.H):
        if side.trellis:
            pack_trellis(packed, h, x[:, h])
            continue
        pack_head(packed, h, x[:, h], taken.reshape(x.shape)[:, h], scale, zero)
    for entries in packed.outliers:
        entries.sort()
    return packed


def choose_outliers(packed, x):
    """Masks [T, C]: what is left out of token scales, and what is stored as an outlier."""
    side = packed.side
    left_out, taken, used = np.zeros(x.shape, bool), np.zeros(x.shape, bool), {}
    allowed = side.bits.reshape(-1) != 16
    channels = np.flatnonzero(allowed)
    for i in range(len(x) if side.outlier_rule != "none" else 0):
        page = (packed.first + i) // PAGE
        room = min(side.cap, side.capacity - used.get(page, 0))
        if side.outlier_rule == "rank":
            falling = channels[np.lexsort((channels, -x[i, channels]))]
            largest, rest = falling[:side.rank], np.sort(falling[side.rank:])
            rising = rest[np.lexsort((rest, x[i, rest]))]
            found = np.sort(np.concatenate([largest, rising[:side.rank]]))
        else:
            found = limit_candidates(side, x[i], allowed)
        taken[i, found[:room]] = True
        left_out[i, found if side.outlier_rule == "rank" else found[:room]] = True
        used[page] = used.get(page, 0) + len(found[:room])
        packed.n_outliers += len(found[:room])
        packed.n_clamped += len(found[room:])
    return left_out, taken


def limit_candidates(side, x, allowed):
    """Channels beyond their limits, farthest first."""
    lower, upper = side.lower.reshape(-1), side.upper.reshape(-1)
    found = np.flatnonzero(allowed & ((x > upper) | (x < lower)))
    with np.errstate(all="ignore"):
        distance = np.where(x > upper, x - upper, lower - x)[found]
        extent = (upper - lower)[found]
        relative = np.where(extent == 0, F32(np.inf), distance / extent)
    return found[np.lexsort((found, -relative))]


def token_scales(packed, x, left_out):
    side = packed.side
    if side.token_scale == "none":
        return None, None
    T = len(x)
    counted = (~left_out & (side.bits.reshape(-1) <= 5)).reshape(T, side.n_blocks, side.scale_block)
    blocks = (x + F32(0)).reshape(counted.shape)
    some = counted.any(axis=2)
    high = np.where(some, np.where(counted, blocks, -np.inf).max(axis=2), 0).astype(F32)
    low = np.where(some, np.where(counted, blocks, np.inf).min(axis=2), 0).astype(F32)
    half = F32(0.5)
    zero, scale = half * high + half * low, half * high - half * low
    packed.scale_bits, packed.zero_bits = scale, zero
    if side.token_scale == "f16":
        (packed.scale_bits, over_scale), (packed.zero_bits, over_zero) = encode(scale, "f16"), encode(zero, "f16")
        packed.n_saturated += int(over_scale.sum() + over_zero.sum())
        scale, zero = decode(packed.scale_bits, "f16"), decode(packed.zero_bits, "f16")
    return halve_scales(packed, scale, zero), zero


def halve_scales(packed, scale, zero):
    """Until every table entry times its scale stays finite."""
    largest = np.abs(packed.side.table).max() if packed.side.E else F32(0)
    with np.errstate(over="ignore"):
        def too_large():
            return ~np.isfinite(np.abs(zero) + scale * largest)
        packed.n_saturated += int(too_large().sum())
        while too_large().any():
            scale = np.where(too_large(), F32(0.5) * scale, scale)
            if packed.side.token_scale == "f16":
                scale = decode(encode(scale, "f16")[0], "f16")
    packed.scale_bits = encode(scale, "f16")[0] if packed.side.token_scale == "f16" else scale
    return scale


def pack_head(packed, h, x, outlier, scale, zero):
    """x [T, D]: rows from the last to the first. What an error adds to the rows before it is added at once: each row
    still sees the errors in the order last to first."""
    side, order = packed.side, packed.side.order[h]
    t = x[:, order].copy()
    for j in range(side.D - 1, -1, -1):
        c = order[j]
        target = np.where(np.isfinite(t[:, j]), t[:, j], x[:, c])
        codes, e = pack_column(packed, h, c, target, scale, zero)
        flat = h * side.D + c
        hit = np.flatnonzero(outlier[:, c])
        if len(hit):
            with np.errstate(all="ignore"):
                residual = np.ldexp((x[hit, c] - e[hit]).astype(np.float64), -side.exponent[h, c])
            bits, over = encode(residual, "f16")
            packed.n_saturated += int(over.sum())
            bits = bits - ~np.isfinite(add_residual(side, flat, e[hit], bits))  # the next toward zero
            e[hit] = add_residual(side, flat, e[hit], bits)
            for i, b in zip(hit, bits):
                packed.outliers[packed.first + i].append((flat, int(b)))
        packed.codes[packed.first:, h, c] = codes
        packed.values[packed.first:, h, c] = e
        if side.factor is not None:
            with np.errstate(all="ignore"):
                error = e - x[:, c]
            t[:, :j] = fma_f32(-side.factor[h, j, :j], error[:, None], t[:, :j])


def pack_column(packed, h, c, t, scale, zero):
    side = packed.side
    width = side.bits[h, c]
    if width >= 8:
        codes, over = encode_rule(t, side.rule_16 if width == 16 else side.rule_8, side.rule_scale[h, c])
        packed.n_saturated += int(over.sum())
    else:
        boundary = side.boundary[h, c, :side.n_entries[h, c] - 1]
        if scale is not None:
            b = (h * side.D + c) // side.scale_block
            with np.errstate(all="ignore"):
                boundary = zero[:, b, None] + scale[:, b, None] * boundary
        codes = (boundary < t[:, None]).sum(axis=1)
        if scale is not None:
            codes = np.where(scale[:, b] == 0, 0, codes)
    return codes, decode_column(side, h, c, codes, scale, zero)


class Survivors:
    """The survivors of one state, n of them for each of T tokens: costs [T, n], the targets of all rows [T, n, D], and
    codes and values of the rows that are done [T, n, D], by row."""

    def __init__(self, cost, target, code, value):
        self.cost, self.target, self.code, self.value = cost, target, code, value

    def arrays(self):
        return self.cost, self.target, self.code, self.value


def pack_trellis(packed, h, x):
    """x [T, D]. How many survivors a state has does not depend on the data, so all tokens are searched at once."""
    side, order = packed.side, packed.side.order[h]
    T, D = x.shape
    states = {0: Survivors(np.zeros((T, 1), F32), x[:, None, order], np.zeros((T, 1, D), np.int64),
                           np.zeros((T, 1, D), F32))}
    for j in range(D - 1, -1, -1):
        candidates = {}
        for state in sorted(states):
            for u in (0, 1):
                made = trellis_candidate(side, h, j, x[:, order[j]], state, u, states[state])
                candidates.setdefault(2 * u + state // 2, []).append(made)
        states = {state: best_of(made, side.trellis) for state, made in candidates.items()}
    last = best_of([states[state] for state in sorted(states)], 1)
    packed.codes[packed.first:, h, order] = last.code[:, 0]
    packed.values[packed.first:, h, order] = last.value[:, 0]


def trellis_candidate(side, h, j, x, state, u, old):
    """What the survivors of a state become if row j's code has the lowest bit u; x [T] of the row's channel."""
    c = side.order[h, j]
    entries = np.arange(2 * (u ^ state % 2) + state // 2, 2 ** (side.bits[h, c] + 1), 4)
    t = np.where(np.isfinite(old.target[:, :, j]), old.target[:, :, j], x[:, None])
    with np.errstate(all="ignore"):
        d = t[:, :, None] - side.table[h, c, entries]
        pick = np.abs(d).argmin(axis=2)
        d = np.take_along_axis(d, pick[:, :, None], 2)[:, :, 0]
        cost = old.cost + side.metric_weight[h, c] * (d * d)
        e = side.table[h, c, entries[pick]] - x[:, None]
    new = Survivors(np.minimum(cost, FLT_MAX), old.target.copy(), old.code.copy(), old.value.copy())
    new.code[:, :, j], new.value[:, :, j] = entries[pick] // 4 * 2 + u, side.table[h, c, entries[pick]]
    if side.factor is not None:
        new.target[:, :, :j] = fma_f32(-side.factor[h, j, :j], e[:, :, None], old.target[:, :, :j])
    return new


def best_of(groups, n):
    """The n cheapest of several groups of survivors, of equal ones the earlier."""
    cost, target, code, value = (np.concatenate(a, axis=1) for a in zip(*(g.arrays() for g in groups)))
    kept = np.argsort(cost, axis=1, kind="stable")[:, :n]
    return Survivors(np.take_along_axis(cost, kept, 1),
                     *(np.take_along_axis(a, kept[:, :, None], 1) for a in (target, code, value)))


def live_slots(packed, page):
    first, last = max(packed.first, page * PAGE), min(packed.T, (page + 1) * PAGE)
    return np.arange(first, max(first, last)) - page * PAGE


def page_of(packed, page, h):
    """Bytes of a head's page and the mask of what is specified."""
    slots = live_slots(packed, page)
    codes, live = np.zeros((PAGE, packed.side.D), np.int64), np.zeros(PAGE, bool)
    codes[slots] = packed.codes[page * PAGE + slots, h]
    live[slots] = True
    return write_codes(packed.side, h, codes, live)


def side_page_of(packed, page):
    sections, size = side_sections(packed.side)
    data, mask = np.zeros(size, np.uint8), np.zeros(size, np.uint8)

    def section(array, name):
        offset, shape, dtype = sections[name]
        return array[offset:offset + int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

    slots = live_slots(packed, page)
    tokens = page * PAGE + slots
    for name in ("scale", "zero"):
        if name in sections:
            section(data, name)[slots] = getattr(packed, name + "_bits")[tokens - packed.first]
            bits = section(mask, name).view(np.uint32 if packed.side.token_scale == "f32" else np.uint16)
            bits[slots] = np.iinfo(bits.dtype).max
    if "end" in sections:
        entries = [e for t in tokens for e in packed.outliers[t]]
        section(data, "end")[slots] = np.cumsum([len(packed.outliers[t]) for t in tokens])
        section(mask, "end")[slots] = 65535
        if entries:
            section(data, "outliers")[:len(entries)] = entries
            section(mask, "outliers")[:len(entries)] = 65535
    return data.tobytes(), mask.tobytes()
