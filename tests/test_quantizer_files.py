"""test_quantizer_files.py - quantizer files as h5py writes and spoils them, opened by the library: what the document
allows is opened in every guise, what it forbids is refused in one line that names file and object, with nothing on
stderr."""
import ctypes as c
import os
import subprocess
import sys
import tempfile

import h5py
import numpy as np

import lowkey_ctypes
import quantizer_files
import tap

CORE, H5 = lowkey_ctypes.load()
FOLDER = tempfile.TemporaryDirectory()
PATH = os.path.join(FOLDER.name, "spoilt.quantizer.h5")
KEY, VALUE = "layers/002/key", "layers/002/value"


def good(path=PATH, styles=None, seed=0):
    rng = np.random.default_rng(seed)
    layers = {}
    for index in (2, 5):
        g = quantizer_files.geometry(rng, 6, 2, 24, 16, 16, "half", 1.0)
        layers[index] = (g, quantizer_files.side(rng, 2, 24, quantizer_files.pairs_of(g), bits=(1, 2, 3, 4, 5, 8, 16), rule_8="e4m3",
                                                 rule_16="bf16", outlier_rule="limit", outlier_cap=3, outlier_page_capacity=100,
                                                 feedback=1),
                         quantizer_files.side(rng, 2, 16, [], bits=(2, 4), token_scale="f16", scale_block=8, outlier_rule="rank",
                                              outlier_rank=2, outlier_cap=4, outlier_page_capacity=64))
    quantizer_files.write(path, layers, n_sink_tokens=4, n_layers=8, styles=styles)


def open_file(path):
    """(status name, message, what was printed)."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as printed:
        kept = os.dup(2), os.dup(1)
        os.dup2(printed.fileno(), 2), os.dup2(printed.fileno(), 1)
        quantizer, error = c.c_void_p(), lowkey_ctypes.Error()
        try:
            status = H5.lowkey_quantizer_open(os.fsencode(path), None, c.byref(quantizer), c.byref(error))
        finally:
            os.dup2(kept[0], 2), os.dup2(kept[1], 1)
            os.close(kept[0]), os.close(kept[1])
        printed.seek(0)
        text = printed.read()
    assert (status == 0) == bool(quantizer.value), "a quantizer comes exactly where the status is good"
    CORE.lowkey_quantizer_free(quantizer)
    return lowkey_ctypes.STATUS[status], error.message.decode(), text


def refused(words, path=PATH, statuses=("EFORMAT",)):
    status, message, printed = open_file(path)
    assert printed == b"", printed
    assert status in statuses, (status, message, words)
    assert message.startswith(path + ": "), message
    assert "\n" not in message and len(message) < 508
    assert words in message, (words, message)


def opened(path=PATH):
    status, message, printed = open_file(path)
    assert status == "OK" and printed == b"", (status, message, printed)


def replaced(f, name, data, **options):
    """A dataset written anew, with its attributes gone."""
    del f[name]
    return f.create_dataset(name, data=data, **options)


def spoil(*cases):
    """Each case: (how, words); how is called with the file open for writing."""
    for how, words in cases:
        good()
        with h5py.File(PATH, "r+") as f:
            how(f)
        try:
            refused(words)
        except AssertionError as error:
            raise AssertionError(f"where {words!r} was expected: {error}") from error


def budget(f, budget=2.25, key=0.5, value=0, version=2, without=None):
    """Make the file one of version 1.2, which says of what budget its widths are."""
    f.attrs["schema_version"] = np.array([1, version], np.int32)
    f["fit"].attrs.update({n: float(v) for n, v in (("budget", budget), ("predicted_cost_key", key), ("predicted_cost_value", value))
                           if n != without})


def attr(group, name, value):
    return lambda f: f[group].attrs.__setitem__(name, value)


def test_every_float_type():
    """Tables may be f32 or f64 of either byte order, chunked, shuffled, deflated, with Fletcher-32"""
    kinds = [("<f4", {}), (">f4", dict(chunks=True)), ("<f8", dict(compression="gzip", shuffle=True)),
             (">f8", dict(compression="gzip", fletcher32=True))]
    good()
    for n in range(4):
        styles = (kinds[(i + n) % 4] for i in range(10**6))
        good(styles=styles)
        opened()


def test_narrow_floats_where_exact():
    """f16 and both guises of bf16 are read where they hold the values"""
    good()
    with h5py.File(PATH, "r+") as f:
        for side in (KEY, VALUE, "layers/005/key", "layers/005/value"):
            replaced(f, f"{side}/report/gain", f[f"{side}/report/gain"][()].astype(">f2"))
            replaced(f, f"{side}/report/mse", np.zeros(f[f"{side}/bits"].shape, np.uint16)).attrs["dtype"] = "bf16"
            lower = f[f"{side}/lower"][()].astype(np.float32)
            down = (lower.view(np.uint32) + np.uint32(0xFFFF) * (lower < 0)) >> 16  # bf16 at or below, either sign
            replaced(f, f"{side}/lower", down.astype(np.uint16)).attrs["dtype"] = "bf16"
    opened()


def test_any_integer_type():
    """Integers may have any type that holds them"""
    for kind in ("u1", ">u2", "<i4", ">i8", "u8"):
        good()
        with h5py.File(PATH, "r+") as f:
            for name in ("bits", "order", "n_entries"):
                replaced(f, f"{KEY}/{name}", f[f"{KEY}/{name}"][()].astype(kind))
            f[KEY].attrs["outlier_cap"] = np.array(3, kind)
        opened()


def test_strings_of_any_kind():
    """Strings may be fixed or variable, ASCII or UTF-8"""
    good()
    with h5py.File(PATH, "r+") as f:
        f.attrs["model_name"] = np.bytes_("fixed")
        f[KEY].attrs.create("token_scale", "none", dtype=h5py.string_dtype("ascii"))
        f[VALUE].attrs.create("token_scale", np.array(b"f16", "S12"))
        f["fit"].attrs["text_name"] = "naïve"
    opened()


def test_budgets():
    """From version 1.2 a quantizer says of what budget its widths are, 0 for none; before it does not"""
    for what in ({}, dict(budget=0, key=0), dict(budget=16)):
        good()
        with h5py.File(PATH, "r+") as f:
            budget(f, **what)
        opened()
    spoil(*[(lambda f, what=what: budget(f, **what), words) for what, words in (
        (dict(version=1), "budget"), (dict(version=0), "budget"), (dict(without="budget"), "budget"),
        (dict(without="predicted_cost_value"), "predicted_cost_value"), (dict(budget=17), "17"), (dict(budget=-1), "-1"),
        (dict(key=-0.5), "predicted_cost_key"), (dict(value=float("nan")), "predicted_cost_value"),
        (dict(budget=0), "without a budget"))])


def tuned(f, steps, version=4):
    """Make the file one of version 1.4, which says how many steps its tables were tuned by."""
    budget(f, version=version)
    for layer in f["layers"].values():
        for side in ("key", "value"):
            layer[side].attrs["trellis"] = 0
    if steps is not None:
        f["fit"].attrs["tuned_steps"] = steps


def test_tuning():
    """From version 1.4 a quantizer says by how many steps its tables were tuned, 0 for none; before it does not"""
    for steps in (0, 1, 2**40):
        good()
        with h5py.File(PATH, "r+") as f:
            tuned(f, steps)
        opened()
    spoil(*[(lambda f, how=how: tuned(f, *how), "tuned_steps") for how in ((None,), (-1,), (1, 3), (1.5,), ("1",))])


def test_unknown_names():
    """At our version what the document does not name is refused; at a greater minor version it is ignored"""
    extras = [lambda f: f.attrs.__setitem__("note", "x"), lambda f: f.create_dataset("note", data=[1]),
              lambda f: f["fit"].attrs.__setitem__("note", 1), lambda f: f[KEY].attrs.__setitem__("note", 1),
              lambda f: f[KEY].create_dataset("note", data=[1.0]), lambda f: f[KEY + "/report"].create_dataset("note", data=[1.0]),
              lambda f: f["layers/002"].create_group("note"), lambda f: f["layers/002"].attrs.__setitem__("note", 1)]
    spoil(*[(how, "note") for how in extras])
    good()
    with h5py.File(PATH, "r+") as f:
        for how in extras:
            how(f)
        budget(f)
        f["fit"].attrs["tuned_steps"] = 0
        for group in ("key", "value"):
            for layer in f["layers"].values():
                layer[group].attrs["trellis"] = 0
        f.attrs["schema_version"] = np.array([1, 7], np.int32)
    opened()


def test_versions_and_schemas():
    """Another schema and a newer major version are refused by name"""
    spoil((attr("/", "schema_version", np.array([2, 0], np.int32)), "2"),
          (attr("/", "schema_version", 1), "schema_version"),
          (attr("/", "schema_version", "1.0"), "schema_version"),
          (attr("/", "schema", "activations"), "activations"),
          (attr("/", "schema", 3), "schema"),
          (lambda f: f.attrs.__delitem__("schema"), "schema"),
          (lambda f: f.attrs.__delitem__("created_by"), "created_by"))


def test_wrong_attributes():
    """Attributes of a wrong type, shape or size are refused by name"""
    spoil((attr(KEY, "outlier_cap", "3"), "outlier_cap"),
          (attr(KEY, "outlier_cap", 3.0), "outlier_cap"),
          (attr(KEY, "outlier_cap", np.array([3, 3])), "outlier_cap"),
          (attr(KEY, "outlier_cap", 2**62), "outlier_cap"),
          (attr(KEY, "outlier_cap", -2**62), "outlier_cap"),
          (attr(KEY, "rule_8", 0), "rule_8"),
          (attr(KEY, "rule_8", "E4M3"), "E4M3"),
          (attr(KEY, "rule_8", "e" * 60000), "rule_8"),
          (attr(KEY, "rule_8", "e4m3\nx"), "rule_8"),
          (attr(KEY, "rule_8", h5py.Empty("i4")), "rule_8"),
          (attr("fit", "damp", float("nan")), "damp"),
          (attr("fit", "damp", -1.0), "damp"),
          (attr("fit", "outlier_fraction_key", 1.5), "outlier_fraction_key"),
          (attr("layers/002", "logit_scale", 0.0), "logit_scale"),
          (attr("layers/002", "logit_scale", float("inf")), "logit_scale"),
          (attr("layers/002", "key_head_dim", 100), "100"),
          (attr("layers/002", "n_q_heads", 7), "n_q_heads"),
          (attr("layers/002", "rope_pairing", "full"), "rope_pairing"),
          (attr("/", "model_sha256", "A" * 64), "model_sha256"))


def test_wrong_shapes():
    """Ambiguous, flat, empty and enormous shapes are refused with what was expected"""
    def sparse(shape):
        return lambda f: (f.__delitem__(KEY + "/table"), f.create_dataset(KEY + "/table", shape=shape, dtype="f4", chunks=(1,) * len(shape)))

    spoil((lambda f: replaced(f, KEY + "/center", np.zeros(2, "f4")), "/layers/002/key/center"),
          (lambda f: replaced(f, KEY + "/lower", np.zeros((24, 2), "f4")), "/layers/002/key/lower"),
          (lambda f: replaced(f, KEY + "/upper", np.float32(1)), "/layers/002/key/upper"),
          (lambda f: replaced(f, KEY + "/table", f[KEY + "/table"][:, :, :15]), "/layers/002/key/table"),
          (lambda f: replaced(f, KEY + "/factor", np.zeros((2, 24, 0), "f2")), "/layers/002/key/factor"),
          (lambda f: replaced(f, KEY + "/bits", h5py.Empty("u1")), "/layers/002/key/bits"),
          (sparse((2, 24, 2**60)), "/layers/002/key/table"),
          (sparse((2**30, 2**20, 32)), "/layers/002/key/table"),
          (sparse((2, 24, 32)), "/layers/002/key/table"),  # declared, but never written
          (lambda f: replaced(f, KEY + "/bits", np.zeros((1,) * 32, "u1")), "/layers/002/key/bits"),
          (lambda f: replaced(f, "sample_sha256", np.zeros((1, 31), "u1")), "/sample_sha256"),
          (lambda f: replaced(f, "layer_index", np.zeros((0,), "i4")), "/layer_index"))


def test_wrong_types():
    """Numbers of a wrong kind, and things that are no datasets, are refused"""
    def group_for(name):
        return lambda f: (f.__delitem__(name), f.create_group(name))

    def link_for(name, link):
        return lambda f: (f.__delitem__(name), f.__setitem__(name, link))

    spoil((lambda f: replaced(f, KEY + "/center", np.zeros((2, 24), "u2")), "bf16"),
          (lambda f: replaced(f, KEY + "/center", np.zeros((2, 24), "i4")), "/layers/002/key/center"),
          (lambda f: replaced(f, KEY + "/bits", np.ones((2, 24), "f4")), "/layers/002/key/bits"),
          (lambda f: replaced(f, KEY + "/bits", np.full((2, 24), b"4")), "/layers/002/key/bits"),
          (lambda f: replaced(f, KEY + "/order", np.full((2, 24), 2**40)), "/layers/002/key/order"),
          (lambda f: replaced(f, KEY + "/order", np.full((2, 24), -1)), "/layers/002/key/order"),
          (lambda f: replaced(f, KEY + "/lower", f[KEY + "/lower"][()].astype("f8") * (1 + 1e-12)), "/layers/002/key/lower"),
          (lambda f: replaced(f, KEY + "/lower", np.full((2, 24), 1e300)), "/layers/002/key/lower"),
          (lambda f: replaced(f, KEY + "/table", f[KEY + "/table"][()], compression="lzf"), "lzf"),
          (group_for(KEY + "/bits"), "/layers/002/key/bits"),
          (group_for("layer_index"), "/layer_index"),
          (lambda f: replaced(f, KEY, [1.0]), "key"),
          (link_for(KEY + "/bits", h5py.SoftLink("/nowhere")), "/layers/002/key/bits"),
          (link_for(KEY + "/bits", h5py.ExternalLink("/etc/passwd", "/x")), "/layers/002/key/bits"),
          (link_for("layers/002", h5py.SoftLink("/")), "/layers/002"))


def test_missing_parts():
    """A side, a layer, a report or a frequency that is missing is named"""
    def drop(name):
        return lambda f: f.__delitem__(name)

    spoil((drop(KEY), "key"), (drop(VALUE), "value"), (drop("layers/005"), "/layers/005"), (drop("layers"), "layers"),
          (drop("layer_index"), "/layer_index"), (drop("fit"), "fit"), (drop(KEY + "/report"), "report"),
          (drop(VALUE + "/report/flags"), "flags"), (drop("layers/002/rope_inv_freq"), "rope_inv_freq"),
          (lambda f: f.move("layers/005", "layers/model.5"), "model.5"),
          (lambda f: f.move("layers/005", "layers/5"), "5"),
          (lambda f: f.move("layers/005", "layers/006"), "00"),
          (lambda f: replaced(f, "layer_index", np.array([5, 2])), "/layer_index"),
          (lambda f: replaced(f, "layer_index", np.array([2, 8])), "/layer_index"),
          (lambda f: replaced(f, "layer_index", np.array([2])), "005"))


def test_bad_values():
    """Values that would decode to something else are refused with layer, side, head and channel"""
    def put(name, at, value):
        def how(f):
            data = f[name][()]
            data[at] = value
            f[name][...] = data
        return how

    def swap(name, a, b):
        def how(f):
            data = f[name][()]
            data[a], data[b] = data[b].copy(), data[a].copy()
            f[name][...] = data
        return how

    def wide(f):  # a codebook 50 times wider than its channel's range
        middle = (f[VALUE + "/lower"][1, 3] + f[VALUE + "/upper"][1, 3]) / 2
        half = (f[VALUE + "/upper"][1, 3] - middle) / 50
        f[VALUE + "/lower"][1, 3], f[VALUE + "/upper"][1, 3] = middle - half, middle + half

    spoil((swap(VALUE + "/table", (1, 1, 0), (1, 1, 1)),
           "layer 2 value: table head 1 channel 1: entry 1 ("),
          (put(VALUE + "/table", (1, 1, 0), np.nan), "/layers/002/value/table"),
          (put(VALUE + "/boundary", (0, 1, 1), -1e30), "layer 2 value: boundary head 0 channel 1: entry 1 (-1.00000002e+30) is below entry 0 ("),
          (wide, "layer 2 value: table head 1 channel 3"),
          (attr(VALUE, "table_entries", 15), "/layers/002/value/table"),
          (put(KEY + "/bits", (1, 4), 7), "layer 2 key: bits head 1 channel 4: expected 1 to 5, 8 or 16, found 7"),
          (put(KEY + "/factor", (1, 0, 1), 0.5), "layer 2 key: factor head 1 row 0 column 1"),
          (swap(KEY + "/order", (0, 0), (0, 1)), "layer 2 key: order head 0: expected RoPE partners"),
          (put(KEY + "/exponent", (0, 0), 128), "/layers/002/key/exponent"),
          (put("layers/002/rope_inv_freq", 3, np.inf), "rope_inv_freq"),
          (put(VALUE + "/report/variance", (1, 2), -1), "/layers/002/value/report/variance channel 18"))


def test_no_quantizer_at_all():
    """Cut files, text, directories and nothing are refused in one line"""
    good()
    with open(PATH, "rb") as f:
        whole = f.read()
    for n in (0, 1, 8, 96, len(whole) // 2, len(whole) - 1):
        with open(PATH, "wb") as f:
            f.write(whole[:n])
        refused("", statuses=("EFORMAT", "EIO"))
    with open(PATH, "w") as f:
        f.write("a text, not HDF5\n" * 100)
    refused("", statuses=("EFORMAT", "EIO"))
    refused("", path=FOLDER.name, statuses=("EFORMAT", "EIO"))
    refused("", path=PATH + ".none", statuses=("EIO",))


def check(path):
    build = os.environ.get("B", "build/opt")
    return subprocess.run([f"{build}/lowkey", "check", path], capture_output=True, text=True, env={**os.environ, "LD_PRELOAD": ""})


def test_check_command():
    """lowkey check says good or, in one line, what is wrong, and outlives an HDF5 that does not"""
    good()
    done = check(PATH)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith(PATH + ": good"), done
    with h5py.File(PATH, "r+") as f:
        f[KEY].attrs["outlier_cap"] = 0
    done = check(PATH)
    assert done.returncode == 1 and done.stdout == "", done
    assert done.stderr.startswith(f"lowkey check: {PATH}: layer 2 key: outlier_cap") and done.stderr.count("\n") == 1, done
    with open("tests/golden/quantizer-1.0.h5", "rb") as f:
        data = bytearray(f.read())
    heap = data.index(b"GCOL") + 16  # the global heap's first string: number, references, zero, then its size
    data[heap + 8:heap + 16] = (2**40).to_bytes(8, "little")  # HDF5 1.10 copies that many bytes
    with open(PATH, "wb") as f:
        f.write(data)
    done = check(PATH)
    assert done.returncode == 1 and done.stdout == "", done
    assert f"lowkey check: {PATH}: " in done.stderr, done
    if os.path.basename(os.environ.get("B", "build/opt")) != "san":
        assert done.stderr.count("\n") == 1, done


tap.run(globals())
