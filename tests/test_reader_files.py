"""quantizer.h5 by the letter of formats/README.md: what the independent reader and lowkey_quantizer_open accept and refuse
must be the same."""
import itertools
import os
import shutil
import subprocess
import tempfile

import h5py
import numpy as np

import lowkey_ctypes
import quantizer_files as make
import reader
import tap
from reader_changes import attribute, dataset, element

LIBRARIES = lowkey_ctypes.load()
FOLDER = tempfile.mkdtemp(prefix="lowkey-files-")
K, V = "layers/001/key", "layers/001/value"


def path(name):
    return os.path.join(FOLDER, name)


def base_layers(**changed):
    """Keys: every width, limit outliers, feedback; values: token scales, rank outliers."""
    rng = np.random.default_rng(5)
    g = make.geometry(rng, 4, 2, 16, 8, 8, "half", 1.0)
    key = make.side(rng, 2, 16, make.pairs_of(g), bits=(1, 2, 3, 4, 5, 8, 16), rule_8="e4m3", rule_16="bf16",
                    feedback=1,
                    full=False, outlier_rule="limit", outlier_cap=3, outlier_page_capacity=99)
    value = make.side(rng, 2, 8, [], bits=(2, 3), token_scale="f16", scale_block=8, outlier_rule="rank",
                      outlier_rank=1,
                      outlier_cap=2, outlier_page_capacity=128)
    return {1: (g, key, value), 4: (g, key, value)}


def opens(name):
    try:
        lowkey_ctypes.Cache(LIBRARIES, name, 1).close()
    except lowkey_ctypes.LowkeyError as error:
        return str(error)
    return None


def verdicts(name):
    """Of both readers: None, or what they say."""
    try:
        reader.quantizer(name)
        mine = None
    except (reader.FormatError, OSError) as error:
        mine = str(error)
    return mine, opens(name)


def first_table(f):
    """A channel of the keys with 3 entries or more: its index and how many."""
    n = f[f"{K}/n_entries"][...]
    where = tuple(np.argwhere((n >= 3) & (n < f[f"{K}/table"].shape[2]))[0])
    return where, n[where]


def table_change(name, change):
    def apply(f):
        where, n = first_table(f)
        data = {d: f[f"{K}/{d}"][...] for d in ("table", "boundary", "lower", "upper", "n_entries")}
        change({d: data[d][where] if data[d].ndim == 3 else data[d][where[0], where[1]:where[1] + 1] for d in data},
               n)
        for d in data:
            f[f"{K}/{d}"][...] = data[d]
    return name, apply


def no_pairs(f):
    order = f[f"{K}/order"][...]
    order[0] = np.roll(order[0], 1)
    f[f"{K}/order"][...] = order


def swapped_pair(f):
    order = f[f"{K}/order"][...]
    r = int(np.argwhere(order[1] == 0)[0, 0])
    order[1, r:r + 2] = order[1, [r + 1, r]]
    f[f"{K}/order"][...] = order


def swap_entries(a, n):
    a["table"][[0, 1]] = a["table"][[1, 0]]


def twice_an_entry(a, n):
    a["table"][1] = a["table"][0]


def other_tail(a, n):
    a["table"][-1] = np.nextafter(a["table"][-1], np.float32(9e9))


def falling_boundaries(a, n):
    a["boundary"][[0, 1]] = a["boundary"][[1, 0]]


def boundary_tail(a, n):
    a["boundary"][n - 1] = 1e30


def endless_boundary(a, n):
    a["boundary"][n - 2] = reader.FLT_MAX


def narrow_range(a, n):
    a["lower"][:] = a["upper"][:] = a["table"][0]


def crossed_range(a, n):
    a["lower"][:], a["upper"][:] = a["upper"] + 1, a["lower"].copy()


def no_entries(a, n):
    a["n_entries"][:] = 0


def off_grid(a, n):
    a["table"][n - 1:] += (np.abs(a["table"]).max() * 2.0**-20).astype(np.float32)


REFUSED = [
    attribute("/", "schema", "model"), attribute("/", "schema", None), attribute("/", "schema", 7),
    attribute("/", "schema_version", [2, 0]), attribute("/", "schema_version", 1),
    attribute("/", "schema_version", [1, 0, 0]),
    attribute("/", "schema_version", [1.0, 0.0]), attribute("/", "created_by", None), attribute("/", "surplus", 1),
    attribute("/", "n_layers", 4), attribute("/", "n_layers", 8.0), attribute("/", "n_layers", [8]),
    attribute("/", "n_layers", "8"),
    attribute("/", "model_sha256", "A" * 64), attribute("/", "model_sha256", "0" * 63),
    attribute("/", "model_name", None),
    attribute("/", "n_sink_tokens", 65), attribute("/", "n_sink_tokens", -1), attribute("/", "sink_rule", "none"),
    attribute("/", "sink_rule", None), attribute("fit", "sensitivity", "much"), attribute("fit", "damp", None),
    attribute("fit", "surplus", 1), attribute("fit", "n_tokens", 1.0), attribute("fit", "damp", np.nan),
    attribute("layers/001", "n_q_heads", 3), attribute("layers/001", "n_kv_heads", 0),
    attribute("layers/001", "key_head_dim", 12),
    attribute("layers/001", "key_head_dim", 264), attribute("layers/001", "logit_scale", 0.0),
    attribute("layers/001", "logit_scale", np.inf), attribute("layers/001", "logit_scale", 1),
    attribute("layers/001", "rope_dims", 7),
    attribute("layers/001", "rope_dims", 18), attribute("layers/001", "rope_dims", 0),
    attribute("layers/001", "rope_pairing", "whole"),
    attribute("layers/001", "rope_pairing", None), attribute("layers/001", "rope_attention_factor", 0.0),
    attribute("layers", "surplus", 1), attribute(f"{K}/report", "surplus", 1),
    attribute(K, "table_scope", "page"), attribute(K, "codebook", "none"), attribute(K, "codebook", "kmeans"),
    attribute(K, "table_entries", 16), attribute(K, "table_entries", 33), attribute(K, "rule_8", "none"),
    attribute(K, "rule_8", "f16"),
    attribute(K, "rule_16", "none"), attribute(K, "rule_16", "int8"), attribute(V, "rule_16", "f16"),
    attribute(V, "rule_8", "int8"),
    attribute(K, "token_scale", "f16"), attribute(V, "token_scale", "none"), attribute(V, "token_scale", "bf16"),
    attribute(V, "scale_block", 0), attribute(V, "scale_block", 4), attribute(V, "scale_block", 24),
    attribute(V, "scale_block", None),
    attribute(K, "outlier_rule", "none"), attribute(K, "outlier_rule", "rank"), attribute(V, "outlier_rule", "limit"),
    attribute(K, "outlier_rank", 1), attribute(V, "outlier_rank", 0), attribute(V, "outlier_rank", 9),
    attribute(V, "outlier_cap", 17), attribute(K, "outlier_cap", 0),
    attribute(K, "outlier_page_capacity", 0), attribute(K, "outlier_page_capacity", 65536),
    attribute(K, "feedback", 0),
    attribute(V, "feedback", 1), attribute(K, "feedback", 2), attribute(K, "gain", None), attribute(K, "qnorm", -1),
    attribute(K, "surplus", 1), attribute(f"{K}/bits", "surplus", 1), attribute(f"{K}/report", "n_tokens", None),
    element(f"{K}/bits", (0, 0), 6), element(f"{K}/bits", (0, 0), 0), element(f"{K}/order", (0, 0), 99),
    element(f"{K}/order", (1, slice(2)), 3), ("RoPE pairs at odd rows", no_pairs),
    ("a RoPE pair the wrong way", swapped_pair),
    element(f"{K}/rule_scale", (0, 0), 2.0), element(f"{K}/rule_scale", slice(None), 0.0),
    dataset(f"{K}/rule_scale", lambda d: np.where(d == 1, d, 3e38)),
    element(f"{K}/center", (0, 0), np.nan),
    element(f"{K}/exponent", (0, 0), 113), element(f"{K}/exponent", (0, 0), -127),
    element(f"{K}/factor", (0, 0, 0), 0.5),
    element(f"{K}/factor", (0, 1, 2), 0.5), element(f"{K}/factor", (0, 2, 1), 0.1),
    element(f"{K}/factor", (0, 2, 1), 1e6),
    element(f"{K}/n_entries", (0, 0), 3), element("layers/001/rope_inv_freq", 0, np.inf),
    element("layer_index", slice(None), [4, 1]), element("layer_index", slice(None), [1, 1]),
    element("layer_index", slice(None), [1, 9]),
    element("layer_index", slice(None), [1, 3]),
    table_change("entries out of order", swap_entries), table_change("an entry twice", twice_an_entry),
    table_change("another entry behind the last", other_tail), table_change("falling boundaries", falling_boundaries),
    table_change("a boundary behind the last", boundary_tail),
    table_change("a boundary of FLT_MAX in use", endless_boundary),
    table_change("a range far from the entries", narrow_range),
    table_change("lower above upper", crossed_range), table_change("no entries in use", no_entries),
    table_change("entries off the grid of center and exponent", off_grid),
    dataset("layer_index", lambda d: None), dataset("layer_index", lambda d: d[:1]),
    dataset("layer_index", lambda d: d * 1.0),
    dataset("sample_sha256", lambda d: None), dataset("sample_sha256", lambda d: d[:, :31]),
    dataset("sample_sha256", lambda d: np.array([[2] * 32, [1] * 32], np.uint8)),
    dataset("sample_sha256", lambda d: d + 256.0),
    dataset("sample_sha256", lambda d: d + np.int64(256)),
    dataset("surplus", lambda d: 1), dataset("layers/surplus", lambda d: 1), dataset(f"{K}/surplus", lambda d: [1]),
    dataset(f"{K}/bits", lambda d: d.reshape(-1)), dataset(f"{K}/bits", lambda d: d * 1.0),
    dataset(f"{K}/bits", lambda d: None),
    dataset(f"{K}/table", lambda d: None), dataset(f"{K}/table", lambda d: d[:, :, :16]),
    dataset(f"{K}/lower", lambda d: d[:1]),
    dataset(f"{K}/boundary", lambda d: np.concatenate([d, d[:, :, :1]], 2)),
    dataset(f"{K}/rule_scale", lambda d: None),
    dataset(f"{V}/rule_scale", lambda d: np.ones((2, 8))), dataset(f"{K}/factor", lambda d: None),
    dataset(f"{V}/factor", lambda d: np.zeros((2, 8, 8))),
    dataset(f"{K}/factor", lambda d: d.astype(np.float16).view(np.uint16)),
    dataset(f"{K}/center", lambda d: d.astype(np.float64) + 1e-12),
    dataset(f"{K}/upper", lambda d: d.astype(np.float64) * 1e300),
    dataset(f"{K}/lower", lambda d: d, compression="lzf", chunks=(1, 8)),
    dataset("layers/001/rope_inv_freq", lambda d: None),
    dataset("layers/001/rope_inv_freq", lambda d: d[:3]), dataset(f"{K}/report", lambda d: None),
    dataset(f"{K}/report/mse", lambda d: None), dataset(f"{K}/report/histogram", lambda d: d[:1]),
    dataset("fit", lambda d: None), dataset("layers/004", lambda d: None),
    dataset(f"{K}/upper", lambda d: np.zeros((0, 16))),
]


def trellis_layers():
    """Layer 1 has trellises of 2 and 4 survivors, of every width and feedback; layer 4 has none."""
    rng = np.random.default_rng(6)
    layers = base_layers()
    g = layers[1][0]
    key = make.side(rng, 2, 16, make.pairs_of(g), bits=(1, 2, 3, 4, 5), trellis=2, feedback=1, full=False)
    value = make.side(rng, 2, 8, [], bits=(2, 3), trellis=4)
    return {1: (g, key, value), 4: layers[4]}


def several(name, *changes):
    def apply(f):
        for _, change in changes:
            change(f)
    return name, apply


def tables_of(side, entries):
    """Tables of another size: cut, or the last entry repeated."""
    def resize(d):
        return np.concatenate([d] + [d[:, :, -1:]] * max(0, entries - d.shape[2]), 2)[:, :, :entries]
    return several(f"{side} with tables of {entries}", attribute(side, "table_entries", entries),
                   dataset(f"{side}/table", resize), dataset(f"{side}/report/histogram", lambda d: resize(0 * d)),
                   dataset(f"{side}/n_entries", lambda d: np.minimum(d, entries)))


LIMITED = [attribute(V, "outlier_rule", "limit"), attribute(V, "outlier_cap", 2), attribute(V, "outlier_page_capacity", 99)]
K4 = "layers/004/key"
TRELLIS_REFUSED = [
    *[attribute(K, "trellis", bad) for bad in (None, 0, 3, 5, 8, -1, 2.0, "2", [2])],
    attribute(K4, "trellis", 1), attribute("layers/004/value", "trellis", 1),
    attribute("/", "schema_version", [1, 2]), attribute("/", "schema_version", [1, 0]),
    dataset(f"{K}/metric_weight", lambda d: None), dataset(f"{K}/metric_weight", lambda d: d[:1]),
    dataset(f"{K}/metric_weight", lambda d: d.reshape(-1)), dataset(f"{K}/metric_weight", lambda d: np.ones((2, 16), int)),
    dataset(f"{K}/metric_weight", lambda d: d.astype(np.float64) + 1e-12),
    dataset(f"{K4}/metric_weight", lambda d: np.ones((2, 16), "f4")),
    *[element(f"{K}/metric_weight", (1, 2), bad) for bad in (0, -0.0, -1, np.nan, np.inf)],
    dataset(f"{K}/boundary", lambda d: np.full((2, 16, 63), reader.FLT_MAX)),
    several("8-bit channels", element(f"{V}/bits", (0, 0), 8), attribute(V, "rule_8", "int8"),
            element(f"{V}/n_entries", (0, 0), 0), element(f"{V}/table", (0, 0), 0),
            dataset(f"{V}/rule_scale", lambda d: np.ones((2, 8)))),
    several("16-bit channels", element(f"{V}/bits", (0, 0), 16), attribute(V, "rule_16", "f16"),
            element(f"{V}/n_entries", (0, 0), 0), element(f"{V}/table", (0, 0), 0)),
    several("a token scale", attribute(V, "token_scale", "f16"), attribute(V, "scale_block", 8)),
    several("outliers by limit", *LIMITED),
    several("outliers by rank", *LIMITED, attribute(V, "outlier_rule", "rank"), attribute(V, "outlier_rank", 1)),
    tables_of(K, 2), tables_of(K, 32), tables_of(K, 63), tables_of(K, 65), tables_of(K, 128), tables_of(V, 8), tables_of(V, 15),
    attribute(V, "table_entries", 2), attribute(V, "table_entries", 0),
    element(f"{V}/n_entries", (0, 0), 0), element(f"{V}/n_entries", (0, 0), 9), element(f"{V}/n_entries", (0, 0), 7),
    element(f"{V}/table", (0, 0, 7), 99),
]
TRELLIS_ACCEPTED = [
    ("nothing", lambda f: None), attribute(K, "trellis", 1), attribute(K, "trellis", 4, dtype=">u8"),
    dataset(f"{K}/metric_weight", lambda d: d.astype(">f8"), chunks=(1, 5), compression=9, fletcher32=True),
    dataset(f"{K}/metric_weight", lambda d: np.full(d.shape, 2.0**-24, np.float16)),
    element(f"{K}/metric_weight", (1, 2), 1e-45), element(f"{K}/metric_weight", (1, 2), reader.FLT_MAX),
    tables_of(V, 17), tables_of(V, 64),
]


ACCEPTED = [
    ("nothing", lambda f: None),
    attribute("/", "schema_version", [1, 0], dtype=">i8"), attribute("/", "schema", np.bytes_("quantizer")),
    attribute("/", "model_name", "é", dtype=h5py.string_dtype("utf-8")), attribute("/", "n_layers", 9, dtype=">u2"),
    attribute("fit", "text_sha256", ";".join(["1" * 64] * 2)),
    attribute("layers/001", "logit_scale", 0.25, dtype=">f2"),
    attribute("fit", "damp", 1, dtype="<f4"),
    dataset(f"{K}/bits", lambda d: d.astype(">u8"), chunks=(1, 16), compression=4, shuffle=True, fletcher32=True),
    dataset(f"{K}/order", lambda d: d.astype(np.int8)), dataset("layer_index", lambda d: d.astype(np.uint64)),
    dataset("sample_sha256", lambda d: np.array([[1] * 32, [1] * 32, [2] * 32], np.uint8)),
    dataset("sample_sha256", lambda d: d.astype(">i4")),
    dataset(f"{K}/table", lambda d: d.astype(">f8"), chunks=(1, 5, 7), compression=9),
    dataset(f"{K}/factor", lambda d: d.astype(">f2")),
    dataset(f"{K}/lower", lambda d: d.astype(">f4"), fletcher32=True, chunks=True),
    dataset("layers/001/rope_inv_freq", lambda d: d.astype(np.float16)),
]


def changed_file(number, change, base="base.h5"):
    name = path(f"changed-{number}.h5")
    shutil.copy(path(base), name)
    with h5py.File(name, "r+") as f:
        change(f)
    return name


def write_base():
    make.write(path("base.h5"), base_layers(), n_sink_tokens=2, n_layers=6)
    assert verdicts(path("base.h5")) == (None, None), verdicts(path("base.h5"))


def refuse(base, changes):
    wrong = []
    for number, (name, change) in enumerate(changes):
        mine, theirs = verdicts(changed_file(number, change, base))
        if mine is None or theirs is None:
            wrong.append(f"{name}: NumPy says {mine}; C says {theirs}")
        elif "\n" in theirs or f"changed-{number}.h5" not in theirs:
            wrong.append(f"{name}: not one line with the file's name: {theirs}")
    assert not wrong, "\n" + "\n".join(wrong)


def accept(base, changes):
    wrong = []
    for number, (name, change) in enumerate(changes):
        both = verdicts(changed_file(number, change, base))
        if both != (None, None):
            wrong.append(f"{name}: NumPy and C say {both}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_refusals():
    """What breaks the format is refused by both readers"""
    write_base()
    refuse("base.h5", REFUSED)


def test_variations():
    """What the format leaves open is accepted by both readers"""
    write_base()
    accept("base.h5", ACCEPTED)


def test_trellis_refusals():
    """What breaks the format of trellises is refused by both readers"""
    make.write(path("trellis.h5"), trellis_layers(), n_sink_tokens=2, n_layers=6)
    refuse("trellis.h5", TRELLIS_REFUSED)


def test_trellis_variations():
    """What the format of trellises leaves open is accepted by both readers"""
    make.write(path("trellis.h5"), trellis_layers(), n_sink_tokens=2, n_layers=6)
    accept("trellis.h5", TRELLIS_ACCEPTED)


def test_trellis_and_versions():
    """From version 1.3 a side says whether it has a trellis, 0 for none; before it does not"""
    write_base()
    costs = several("costs", *[attribute("fit", name, 0.0) for name in ("budget", "predicted_cost_key", "predicted_cost_value")])
    says = several("trellises", *[attribute(f"layers/{i}/{side}", "trellis", 0) for i in ("001", "004") for side in ("key", "value")])
    version = lambda minor: attribute("/", "schema_version", [1, minor])
    accept("base.h5", [several("1.3", version(3), costs, says), several("1.2", version(2), costs)])
    refuse("base.h5", [several("1.3 that does not say", version(3), costs), several("1.2 that says", version(2), costs, says),
                       several("1.0 that says", says), several("1.3 without costs", version(3), says),
                       several("one that does not", version(3), costs, says, attribute(V, "trellis", None))])


def test_newer_minor():
    """A greater minor version may hold objects without a name here; a greater major version is refused by name"""
    write_base()
    with h5py.File(path("base.h5"), "r+") as f:
        f.attrs["schema_version"] = np.array([1, 7])
        f[f"{K}/surplus"], f["layers/001/surplus"] = 1, [1.0]
        f[K].attrs["surplus"] = f.attrs["surplus"] = "new"
        f["fit"].attrs["surplus"] = 1.5
        for layer in f["layers"].values():
            layer["key"].attrs["trellis"] = layer["value"].attrs["trellis"] = 0
        f["fit"].attrs.update(budget=0.0, predicted_cost_key=0.0, predicted_cost_value=0.0, tuned_steps=0)
    assert verdicts(path("base.h5")) == (None, None), verdicts(path("base.h5"))
    with h5py.File(path("base.h5"), "r+") as f:
        f.attrs["schema_version"] = np.array([2, 0])
    assert all("2.0" in v for v in verdicts(path("base.h5"))), verdicts(path("base.h5"))


def bf16(values, as_float):
    """A bf16 dataset's file type and raw data."""
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    if not as_float:
        return raw.astype(np.uint16), None
    kind = h5py.h5t.IEEE_F16LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_ebias(127)
    return raw.astype("<u2"), kind


def test_bf16():
    """bf16 as a 16-bit float type and as marked integers is read to the same values, NaN among them refused"""
    layers = base_layers()
    for index in layers:
        layers[index][2]["lower"] = np.full((2, 8), np.float32(-40))
    for as_float, bad in itertools.product((0, 1), (0, 1)):
        make.write(path("bf16.h5"), layers, n_layers=6)
        with h5py.File(path("bf16.h5"), "r+") as f:
            values = f[f"{V}/lower"][...]
            values[0, :2] = np.nan if bad else -64, -(2.0**-133)
            raw, kind = bf16(values, as_float)
            del f[f"{V}/lower"]
            if kind is None:
                f[f"{V}/lower"] = raw
                f[f"{V}/lower"].attrs["dtype"] = "bf16"
            else:
                d = h5py.h5d.create(f[V].id, b"lower", kind, h5py.h5s.create_simple(raw.shape))
                d.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(raw), kind)
        mine, theirs = verdicts(path("bf16.h5"))
        assert (mine is not None, theirs is not None) == (bad, bad), (as_float, bad, mine, theirs)
        if not bad:
            assert (reader.quantizer(path("bf16.h5")).layers[0].value.lower[0, :2] == [-64, -(2.0**-133)]).all()


def test_broken_files():
    """Cut, empty and foreign files are refused in one line"""
    write_base()
    whole = open(path("base.h5"), "rb").read()
    for size in (0, 1, 8, 96, len(whole) // 2, len(whole) - 1):
        open(path("cut.h5"), "wb").write(whole[:size])
        said = opens(path("cut.h5"))
        assert said and "\n" not in said, (size, said)
    open(path("text.h5"), "w").write("not HDF5\n" * 99)
    for name in (path("text.h5"), FOLDER, path("absent.h5")):
        said = opens(name)
        assert said and "\n" not in said, (name, said)


tap.run(globals())
