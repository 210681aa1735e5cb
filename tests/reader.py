"""An independent reader of lowkey's files, written from formats/README.md alone: NumPy and h5py, nothing of lowkey.
Group reads and checks objects, quantizer(path) validates every MUST of quantizer.h5 and returns a plain namespace; what
breaks the format is a FormatError that names file, object, expected and found. reader_pages.py has the pages,
reader_inputs.py the other files."""
import re
from fractions import Fraction
from types import SimpleNamespace

import h5py
import numpy as np

from reader_pages import FLT_MAX, add_f32

VERSION = (1, 4)
FLOAT_TYPES = {  # (sign position, exponent position, size, mantissa position, size), exponent bias -> name
    ((15, 10, 5, 0, 10), 15): "f16",
    ((15, 7, 8, 0, 7), 127): "bf16",
    ((31, 23, 8, 0, 23), 127): "f32",
    ((63, 52, 11, 0, 52), 1023): "f64",
}
FILTERS = (h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32)


class FormatError(Exception):
    pass


class Group:
    """A group of a file, which remembers what was asked of it: close() refuses whatever else it holds."""

    def __init__(self, group, newer=False):
        self.group, self.newer, self.asked = group, newer, set()

    def fail(self, name, expected, found):
        path = f"{self.group.name.rstrip('/')}/{name}"
        raise FormatError(f"{self.group.file.filename}: {path}: expected {expected}, found {found}")

    # Attributes.

    def _attribute(self, name, shape=()):
        self.asked.add("@" + name)
        if name not in self.group.attrs:
            self.fail("@" + name, "an attribute", "none")
        attribute = self.group.attrs.get_id(name)
        if attribute.shape != shape:
            self.fail("@" + name, f"shape {shape}", attribute.shape)
        return attribute

    def string(self, name, choices=None):
        attribute = self._attribute(name)
        if not isinstance(attribute.get_type(), h5py.h5t.TypeStringID):
            self.fail("@" + name, "a string", attribute.dtype)
        value = self.group.attrs[name]
        value = value.decode() if isinstance(value, bytes) else str(value)
        if choices and value not in choices:
            self.fail("@" + name, f"one of {' '.join(choices)}", repr(value))
        return value

    def sha256(self, name, joined=False):
        value = self.string(name)
        if not all(re.fullmatch("[0-9a-f]{64}", part) for part in (value.split(";") if joined else [value])):
            self.fail("@" + name, "64 lower-case hexadecimal digits", repr(value))
        return value

    def integer(self, name, low, high=2**63 - 1):
        return int(self._integers(name, low, high, ()))

    def _integers(self, name, low, high, shape):
        if type(self._attribute(name, shape).get_type()) is not h5py.h5t.TypeIntegerID:
            self.fail("@" + name, "an integer", self.group.attrs.get_id(name).dtype)
        value = np.array(self.group.attrs[name])
        if int(value.min()) < low or int(value.max()) > high:
            self.fail("@" + name, f"{low} to {high}", value)
        return value

    def real(self, name, positive=False):
        attribute = self._attribute(name)
        if not isinstance(attribute.get_type(), h5py.h5t.TypeFloatID):
            self.fail("@" + name, "a float", attribute.dtype)
        value = float(self.group.attrs[name])
        if not np.isfinite(value) or (positive and value <= 0):
            self.fail("@" + name, "finite" + (" and > 0" if positive else ""), value)
        return value

    # Datasets.

    def _dataset(self, name, shape):
        """The dataset; None in shape is any size, a string too, which then names one size within the call."""
        self.asked.add(name)
        if name not in self.group:
            self.fail(name, "a dataset", "none")
        dataset = self.group[name]
        if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
            self.fail(name, "a dataset", "another object")
        if len(dataset.shape) != len(shape) or any(w not in (None, n) for w, n in zip(shape, dataset.shape)):
            self.fail(name, f"shape {shape}", dataset.shape)
        if 0 in dataset.shape:
            self.fail(name, "no dimension of 0", dataset.shape)
        plist = dataset.id.get_create_plist()
        for i in range(plist.get_nfilters()):
            if plist.get_filter(i)[0] not in FILTERS:
                self.fail(name, "deflate, shuffle or Fletcher-32", f"filter {plist.get_filter(i)[0]}")
        extra = set(dataset.attrs) - {"dtype"}
        if extra and not self.newer:
            self.fail(name, "no attribute but dtype", sorted(extra))
        return dataset

    def ints(self, name, shape, low, high=2**63 - 1):
        dataset = self._dataset(name, shape)
        if type(dataset.id.get_type()) is not h5py.h5t.TypeIntegerID:
            self.fail(name, "integers", dataset.dtype)
        if "dtype" in dataset.attrs and not self.newer:
            self.fail(name, "no attribute dtype", "one")
        values = dataset[...]
        if int(values.min()) < low or int(values.max()) > high:
            self.fail(name, f"{low} to {high}", f"{values.min()} to {values.max()}")
        return values.astype(np.int64)

    def hashes(self, name, n):
        return self.ints(name, (n, 32), 0, 255).astype(np.uint8)

    def floats(self, name, shape, to="exact", f16=True):
        """f32 values, those of the file "exact" or rounded ("f32"), or "f64". f16 False refuses that type."""
        dataset = self._dataset(name, shape)
        file_type = dataset.id.get_type()
        if isinstance(file_type, h5py.h5t.TypeFloatID):
            kind = FLOAT_TYPES.get((file_type.get_fields(), file_type.get_ebias()))
            if kind is None or (kind == "f16" and not f16) or "dtype" in dataset.attrs:
                self.fail(name, "f32, f64, bf16" + ", f16" * f16, dataset.dtype)
        elif type(file_type) is h5py.h5t.TypeIntegerID and dataset.dtype.kind == "u" and dataset.dtype.itemsize == 2:
            if dataset.attrs.get("dtype") not in ("bf16", b"bf16"):
                self.fail(name, "the attribute dtype = bf16 beside 16-bit integers", dataset.attrs.get("dtype"))
            kind = "bf16"
        else:
            self.fail(name, "floats", dataset.dtype)
        if kind == "bf16":  # the bits as they are, in the file's byte order
            raw = np.empty(dataset.shape, "<u2" if file_type.get_order() == h5py.h5t.ORDER_LE else ">u2")
            dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, file_type)
            values = (raw.astype(np.uint32) << 16).view(np.float32)
        else:
            values = dataset[...]
        if not np.isfinite(values).all():
            self.fail(name, "finite values", f"{np.sum(~np.isfinite(values))} others")
        if to == "f64":
            return values.astype(np.float64)
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32)
        if not np.isfinite(narrow).all() or (to == "exact" and (narrow != values).any()):
            self.fail(name, "values exact in f32", values[narrow != values][0])
        return narrow

    # Structure.

    def child(self, name):
        self.asked.add(name)
        if name not in self.group or not isinstance(self.group[name], h5py.Group):
            self.fail(name, "a group", "none")
        return Group(self.group[name], self.newer)

    def absent(self, name, why):
        if name in self.group:
            self.fail(name, f"nothing: {why}", "an object")

    def close(self):
        unknown = ({"@" + a for a in self.group.attrs} | set(self.group)) - self.asked
        if unknown and not self.newer:
            self.fail(sorted(unknown)[0], "nothing of this name", "it")


def open_root(path, schema):
    file = h5py.File(path, "r")
    root = Group(file)
    root.string("schema", (schema,))
    version = tuple(int(v) for v in root._integers("schema_version", 0, 2**31 - 1, (2,)))
    if version[0] > VERSION[0]:
        root.fail("@schema_version", f"at most major {VERSION[0]}", f"{version[0]}.{version[1]}")
    root.newer, root.version = version > VERSION, version
    root.string("created_by")
    return root


def root_geometry(root):
    return dict(n_layers=root.integer("n_layers", 1), model_name=root.string("model_name"),
                model_sha256=root.sha256("model_sha256"))


def layer_groups(root, indices):
    layers = root.child("layers")
    for index in indices:
        group = layers.child(f"{index:03d}")
        yield index, group
        group.close()
    layers.close()


def geometry(group):
    g = SimpleNamespace()
    g.n_q_heads, g.n_kv_heads = group.integer("n_q_heads", 1, 65536), group.integer("n_kv_heads", 1, 65536)
    if g.n_q_heads % g.n_kv_heads:
        group.fail("@n_q_heads", f"a multiple of {g.n_kv_heads}", g.n_q_heads)
    for name in ("key_head_dim", "value_head_dim"):
        dim = group.integer(name, 8, 256)
        if dim % 8 or dim * g.n_kv_heads > 65536:
            group.fail("@" + name, "a multiple of 8, at most 65536 / n_kv_heads", dim)
        setattr(g, name, dim)
    g.logit_scale = group.real("logit_scale", positive=True)
    g.rope_dims = group.integer("rope_dims", 0, g.key_head_dim)
    if g.rope_dims % 2:
        group.fail("@rope_dims", "even", g.rope_dims)
    g.rope_pairing = group.string("rope_pairing", ("half", "interleaved"))
    g.rope_attention_factor = group.real("rope_attention_factor", positive=True)
    g.rope_inv_freq = np.zeros(0)
    if g.rope_dims:
        g.rope_inv_freq = group.floats("rope_inv_freq", (g.rope_dims // 2,), to="f64")
    return g


def rope_pairs(g):
    half = g.rope_dims // 2
    return [(i, i + half) if g.rope_pairing == "half" else (2 * i, 2 * i + 1) for i in range(half)]


def layer_index(root, n_layers):
    index = root.ints("layer_index", (None,), 0, n_layers - 1)
    if (np.diff(index) <= 0).any():
        root.fail("layer_index", "strictly rising", index)
    return index


# quantizer.h5

def quantizer(path):
    root = open_root(path, "quantizer")
    q = SimpleNamespace(**root_geometry(root))
    q.n_sink_tokens = root.integer("n_sink_tokens", 0, 64)
    q.sink_rule = root.string("sink_rule", ("f16", "bf16"))
    q.sample_sha256 = root.hashes("sample_sha256", None)
    rows = [bytes(r) for r in q.sample_sha256]
    if rows != sorted(rows):
        root.fail("sample_sha256", "rows in rising order", "others")
    fit = root.child("fit")
    fit.string("sensitivity", ("none", "fisher", "weight", "attention"))
    for name in ("outlier_fraction_key", "outlier_fraction_value", "damp"):
        fit.real(name)
    if root.version >= (1, 2):
        q.budget, *q.predicted_cost = (fit.real(name) for name in ("budget", "predicted_cost_key", "predicted_cost_value"))
        if not 0 <= q.budget <= 16 or min(q.predicted_cost) < 0 or (q.budget == 0 and any(q.predicted_cost)):
            fit.fail("@budget", "0 to 16, costs >= 0, and 0 without a budget", (q.budget, q.predicted_cost))
    if root.version >= (1, 4):
        q.tuned_steps = fit.integer("tuned_steps", 0)
    fit.integer("n_tokens", 0)
    fit.string("text_name")
    fit.sha256("text_sha256", joined=True)
    fit.close()
    q.layers = []
    for index, group in layer_groups(root, layer_index(root, q.n_layers)):
        layer = geometry(group)
        layer.index = int(index)
        for name, dim in (("key", layer.key_head_dim), ("value", layer.value_head_dim)):
            inner = group.child(name)
            side = quantizer_side(inner, layer.n_kv_heads, dim, rope_pairs(layer) if name == "key" else [],
                                  root.version)
            inner.close()
            setattr(layer, name, side)
        q.layers.append(layer)
    root.close()
    return q


def quantizer_side(group, H, D, pairs, version):
    s = SimpleNamespace(H=H, D=D, C=H * D, trellis=0)
    if version >= (1, 3):
        s.trellis = group.integer("trellis", 0, 4)
        if s.trellis == 3:
            group.fail("@trellis", "0, 1, 2 or 4", s.trellis)
    group.string("table_scope", ("channel", "head", "layer"))
    codebook = group.string("codebook", ("fitted", "uniform", "normal_float", "none"))
    s.E = E = group.integer("table_entries", *((4, 64) if s.trellis else (0, 32)))
    s.rule_8 = group.string("rule_8", ("none", "e4m3", "e5m2", "int8"))
    s.rule_16 = group.string("rule_16", ("none", "f16", "bf16"))
    side_scales(group, s)
    side_outliers(group, s)
    s.bits = bits = group.ints("bits", (H, D), 1, 16)
    if not np.isin(bits, (1, 2, 3, 4, 5, 8, 16)).all():
        group.fail("bits", "1..5, 8 or 16", sorted(set(bits.flat)))
    tabled = bits <= 5
    if s.trellis and not tabled.all():
        group.fail("bits", "1 to 5 with a trellis", sorted(set(bits.flat)))
    if s.trellis and (s.token_scale, s.outlier_rule) != ("none", "none"):
        group.fail("@trellis", "neither token_scale nor outlier_rule", (s.token_scale, s.outlier_rule))
    if (E == 0) == tabled.any() or E == 1 or (tabled.any() and E < table_size(s, bits[tabled].max())):
        group.fail("@table_entries", "0 iff no channel has a table, else 2^bits or more, twice that with a trellis", E)
    if (codebook == "none") != (E == 0):
        group.fail("@codebook", "none iff table_entries is 0", codebook)
    for rule, width in ((s.rule_8, 8), (s.rule_16, 16)):
        if (rule == "none") == (bits == width).any():
            group.fail(f"@rule_{width}", f"none iff no channel has {width} bits", rule)
    s.order = group.ints("order", (H, D), 0, D - 1)
    for h in range(H):
        row = {c: r for r, c in enumerate(s.order[h])}
        if len(row) != D:
            group.fail("order", "a permutation", f"head {h}")
        if any(row[a] % 2 or row[b] != row[a] + 1 for a, b in pairs):
            group.fail("order", "RoPE pairs at rows 2i and 2i + 1", f"head {h}")
    s.center, s.exponent = group.floats("center", (H, D)), group.ints("exponent", (H, D), -126, 112)
    s.lower, s.upper = group.floats("lower", (H, D)), group.floats("upper", (H, D))
    if (s.lower > s.upper).any():
        group.fail("lower", "lower <= upper", "lower > upper")
    s.n_entries = np.zeros((H, D), np.int64)
    if E:
        side_tables(group, s)
    s.rule_scale = np.ones((H, D), np.float32)
    if s.rule_8 != "none":
        s.rule_scale = group.floats("rule_scale", (H, D))
        if (s.rule_scale <= 0).any() or (s.rule_scale[bits != 8] != 1).any():
            group.fail("rule_scale", "> 0, and 1 where bits is not 8", "others")
        with np.errstate(over="ignore"):
            largest = s.rule_scale[bits == 8] * np.float32({"e4m3": 448, "e5m2": 57344, "int8": 127}[s.rule_8])
        if not np.isfinite(largest).all():
            group.fail("rule_scale", "finite times the largest number of the rule", "others")
    s.metric_weight = None
    if s.trellis:
        s.metric_weight = group.floats("metric_weight", (H, D))
        if (s.metric_weight <= 0).any():
            group.fail("metric_weight", "> 0", s.metric_weight.min())
    s.factor = None
    if group.integer("feedback", 0, 1):
        s.factor = group.floats("factor", (H, D, D))
        if np.triu(s.factor).any():
            group.fail("factor", "0 for i <= j", "others")
        with np.errstate(over="ignore"):
            if (s.factor.astype(np.float16).astype(np.float32) != s.factor).any():
                group.fail("factor", "values exact in f16", "others")
    group.integer("gain", 0, 1)
    group.integer("qnorm", 0, 1)
    s.report = side_report(group.child("report"), H, D, E)
    return s


def side_scales(group, s):
    s.token_scale = group.string("token_scale", ("none", "f16", "f32"))
    s.scale_block = group.integer("scale_block", 0, s.C)
    if (s.token_scale == "none") != (s.scale_block == 0):
        group.fail("@scale_block", "0 iff token_scale is none", s.scale_block)
    if s.scale_block and (s.C % s.scale_block or s.scale_block % 8):
        group.fail("@scale_block", f"a divisor of {s.C}, a multiple of 8", s.scale_block)
    s.n_blocks = s.C // s.scale_block if s.scale_block else 0


def side_outliers(group, s):
    s.outlier_rule = group.string("outlier_rule", ("none", "limit", "rank"))
    if s.outlier_rule == "limit" and s.token_scale != "none":
        group.fail("@outlier_rule", "limit only without token_scale", s.token_scale)
    some = int(s.outlier_rule != "none")
    ranked = int(s.outlier_rule == "rank")
    s.rank = group.integer("outlier_rank", ranked, ranked * s.C // 2)
    s.cap = group.integer("outlier_cap", some, some * s.C)
    s.capacity = group.integer("outlier_page_capacity", some, some * 65535)


def table_size(s, bits):
    """Entries that a row of so many bits can reach."""
    return 2 ** (bits + bool(s.trellis))


def side_tables(group, s):
    H, D, E = s.H, s.D, s.E
    s.n_entries = n = group.ints("n_entries", (H, D), 0, 64)
    s.table = group.floats("table", (H, D, E))
    s.boundary = None if s.trellis else group.floats("boundary", (H, D, E - 1))
    for h, c in np.ndindex(H, D):
        where, used = f"head {h} channel {c}", n[h, c]
        if not (1 <= used <= table_size(s, s.bits[h, c]) if s.bits[h, c] <= 5 else used == 0):
            group.fail("n_entries", "1..2^bits, twice that with a trellis, 0 for 8 and 16 bits", where)
        t = s.table[h, c].astype(np.float64)
        if (np.diff(t[:used]) <= 0).any() or (t[used:] != (t[used - 1] if used else 0)).any():
            group.fail("table", "strictly rising, then the last repeated", where)
        in_use = max(used - 1, 0)
        b = np.zeros(0) if s.trellis else s.boundary[h, c]
        if (np.diff(b[:in_use]) < 0).any() or ((b == FLT_MAX) != (np.arange(len(b)) >= in_use)).any():
            group.fail("boundary", "not falling and below FLT_MAX, then FLT_MAX", where)
        low, high = Fraction(float(s.lower[h, c])), Fraction(float(s.upper[h, c]))
        if used and (Fraction(t[0]) < low - 2 * (high - low) or Fraction(t[used - 1]) > high + 2 * (high - low)):
            group.fail("table", "entries within lower - 2 r to upper + 2 r", where)
    used = np.arange(E) < n[:, :, None]
    if not (on_grid(s.table, s.center[:, :, None], s.exponent[:, :, None]) | ~used).all():
        group.fail("table", "f32(center + h 2^exponent) for an f16 h", "others")


def on_grid(table, center, exponent):
    """Whether some f16 h has fl32(center + h 2^exponent) = table. That is monotonic in h, so h is nearest or next."""
    with np.errstate(over="ignore"):
        nearest = np.ldexp(table.astype(np.float64) - center, -exponent).astype(np.float16)
        nearest = np.clip(nearest, np.float16(-65504), np.float16(65504))
        found = np.zeros(table.shape, bool)
        for h in (nearest, np.nextafter(nearest, np.float16(np.inf)), np.nextafter(nearest, np.float16(-np.inf))):
            found |= np.isfinite(h) & (add_f32(center, np.ldexp(h.astype(np.float64), exponent)) == table)
    return found


def side_report(report, H, D, E):
    r = SimpleNamespace()
    for name in ("n_tokens", "n_outliers", "n_clamped", "n_saturated"):
        setattr(r, name, report.integer(name, 0))
    for name in ("mean", "variance", "mse", "weighted_mse", "gain"):
        setattr(r, name, report.floats(name, (H, D), to="f64"))
    if E:
        r.histogram = report.ints("histogram", (H, D, E), 0)
    r.flags = report.ints("flags", (H, D), 0, 31)
    report.close()
    return r
