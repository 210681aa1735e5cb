"""Files that are wrong, in every way that h5py can write: each is refused in one line that says where and
what, never by a crash."""
import os
import shutil
import tempfile

import h5py
import numpy as np

import tap
from small_files import (KEY_DIM, KV_HEADS, LAYERS, TOKENS, VALUE_DIM, assert_good, assert_refused, check,
                         replace, stream, write_activations, write_model, write_tokens)

folder = tempfile.mkdtemp(prefix="lowkey_h5py_")
path = os.path.join(folder, "file.h5")


def refuse_edited(edit, *words, write=write_activations, **options):
    assert_refused(write(path, edit=edit, **options), *words)


def test_cut_off():
    """a good file cut at any length is refused in one line"""
    for write in write_activations, write_tokens, write_model:
        whole = open(write(path), "rb").read()
        cuts = [0, 1, 7, 8, 9, 48, 95, 96, 97, len(whole) // 2, len(whole) - 1]
        for n in cuts + [len(whole) * i // 23 for i in range(1, 23)]:
            with open(path, "wb") as file:
                file.write(whole[:n])
            assert_refused(path, "empty file" if n == 0 else "less than 8 bytes" if n < 8 else "HDF5")


def test_not_hdf5():
    """no file, a text file, a directory, a file one may not read, HDF5 of others"""
    assert_refused(os.path.join(folder, "none.h5"), "No such file or directory")
    with open(path, "w") as file:
        file.write("tokens\n" * 50)
    assert_refused(path, "not an HDF5 file")
    assert_refused(folder, "found a directory")
    assert_refused("/dev/null", "no regular file")
    with h5py.File(path, "w") as file:
        file["x"] = 1
    assert_refused(path, "attribute schema: missing", "no file of lowkey")
    with h5py.File(path, "w") as file:
        file.attrs["schema"] = "results"
    assert_refused(path,
                   "attribute schema: expected model, tokens, activations or quantizer, found 'results'")


def test_version():
    """a newer major version is refused by name"""
    def version(value):
        return lambda file: file.attrs.__setitem__("schema_version", value)
    refuse_edited(version([2, 0]), "activations version 2.0 is newer than 1.4")
    refuse_edited(version([99, 3]), "version 99.3")
    refuse_edited(version([0, 9]), "expected [1, 4], found [0, 9]")
    refuse_edited(version([1]), "attribute schema_version: expected shape [2], found shape [1]")
    refuse_edited(version(1), "attribute schema_version: expected shape [2], found a scalar")
    refuse_edited(version("1.0"), "attribute schema_version: expected shape [2], found a scalar")
    refuse_edited(version([1.0, 0.0]), "attribute schema_version: expected an integer, found f64")
    refuse_edited(lambda f: f.attrs.__delitem__("schema_version"), "attribute schema_version: missing")
    refuse_edited(lambda f: f.attrs.__delitem__("created_by"), "attribute created_by: missing")


def test_attributes():
    """attributes missing, too many, of another type, size or range"""
    def root(name, value):
        return lambda file: file.attrs.__setitem__(name, value)
    def layer(name, value):
        return lambda file: file["layers/005"].attrs.__setitem__(name, value)

    refuse_edited(lambda f: f.attrs.__delitem__("model_name"),
                  "/: attribute model_name: missing: expected a string")
    refuse_edited(root("more", 1), "/: unknown attribute more")
    refuse_edited(layer("more", 1), "/layers/005: unknown attribute more")
    refuse_edited(root("n_layers", 8.0), "/: attribute n_layers: expected an integer, found f64")
    refuse_edited(root("n_layers", "8"), "expected an integer, found string")
    refuse_edited(root("n_layers", True), "expected an integer, found enumeration (a bool of h5py is one)")
    refuse_edited(root("n_layers", [8]), "expected a scalar, found shape [1]")
    refuse_edited(root("n_layers", [[8, 1]]), "expected a scalar, found rank 2")
    refuse_edited(root("n_layers", h5py.Empty("i4")), "expected a scalar, found")
    refuse_edited(root("n_layers", np.array(2**63, np.uint64)),
                  "expected 1..65536, found 9223372036854775807 or more")
    refuse_edited(root("n_layers", 5), "/layer_index[1]: expected 0..4, found 5")
    refuse_edited(root("model_name", 5), "attribute model_name: expected a string, found int64")
    refuse_edited(root("model_name", ["a", "b"]), "expected a scalar, found shape [2]")
    refuse_edited(root("model_name", np.bytes_(b"\xff\xfe")), "expected UTF-8")
    refuse_edited(lambda f: f.attrs.create("model_name", "x" * 70000, dtype=h5py.string_dtype()),
                  "expected UTF-8 of at most 65536 bytes")
    refuse_edited(root("model_sha256", "AB" * 32), "expected 64 lower-case hexadecimal digits")
    refuse_edited(root("model_sha256", "ab" * 31), "expected 64 lower-case hexadecimal digits")
    refuse_edited(root("key_stage", "post_rope"), "attribute key_stage: expected pre_rope, found 'post_rope'")
    refuse_edited(root("contents", "value key"), "contents: expected names of", "found 'value key'")
    refuse_edited(layer("key_head_dim", 20), "layer 5: key_head_dim: expected a multiple of 8")
    refuse_edited(layer("key_head_dim", 264),
                  "/layers/005: attribute key_head_dim: expected 8..256, found 264")
    refuse_edited(layer("n_q_heads", 3), "layer 5: n_q_heads: expected a multiple of n_kv_heads 2")
    refuse_edited(layer("logit_scale", np.nan),
                  "/layers/005: attribute logit_scale: expected a finite number, found nan")
    refuse_edited(layer("logit_scale", 0.0), "layer 5: logit_scale")
    refuse_edited(layer("logit_scale", 1), "attribute logit_scale: expected a float, found int64")
    refuse_edited(layer("rope_pairing", "halves"),
                  "attribute rope_pairing: expected half or interleaved, found 'halves'")
    refuse_edited(layer("rope_dims", 14), "/layers/005/rope_inv_freq: expected float [7], found [8]")
    refuse_edited(layer("rope_dims", 0), "/layers/005: unknown object rope_inv_freq")
    refuse_edited(lambda f: f["layers/005/key"].attrs.__setitem__("unit", "V"),
                  "/layers/005/key: unknown attribute unit; expected none")
    for value in "plain", np.bytes_("fixed"), np.bytes_("padded   "):
        assert_good(write_activations(path, edit=root("model_name", value)))


def test_objects():
    """objects missing, too many, of another name, kind or shape, or elsewhere"""
    def without(name):
        return lambda file: file.__delitem__(name)

    refuse_edited(
        without("layers/005/value"),
        "/layers/005/value: missing: expected float [40, 2, 24], found key, query, rope_inv_freq there")
    refuse_edited(without("layers/001/key"), "/layers/001/key: missing: expected float [40, 2, 16]")
    refuse_edited(without("layers/005"), "/layers/005: missing: expected a group, found 001 there")
    refuse_edited(without("layers"), "/layers: missing")
    refuse_edited(without("sample_offsets"), "/sample_offsets: missing: expected int [n]")
    refuse_edited(without("layers/001/rope_inv_freq"),
                  "/layers/001/rope_inv_freq: missing: expected float [8]")

    def prefixed(file):
        for name in "key", "value", "query":
            file["layers/001"].move(name, f"model.{name}")

    refuse_edited(prefixed, "/layers/001/key: missing",
                  "found model.key, model.query, model.value, rope_inv_freq there")
    refuse_edited(lambda f: f.__setitem__("layers/001/extra", [1]),
                  "/layers/001: unknown object extra; expected key, value, query, rope_inv_freq")
    refuse_edited(lambda f: f.__setitem__("extra", [1]), "/: unknown object extra")
    refuse_edited(lambda f: f.create_group("layers/007"),
                  "/layers: unknown object 007; expected the layers of /layer_index")
    refuse_edited(lambda f: f["layers"].move("005", "5"), "/layers: unknown object 5",
                  "at least three digits")
    refuse_edited(lambda f: f["layers"].move("005", "0005"), "/layers: unknown object 0005")
    refuse_edited(without("layers/005/key_weight"),
                  "/layers/005/key_weight: missing",
                  contents="key value key_weight")

    def group_for_dataset(file):
        del file["layers/001/key"]
        file.create_group("layers/001/key")
    refuse_edited(group_for_dataset, "/layers/001/key: expected float [40, 2, 16], found a group")

    def dataset_for_group(file):
        del file["layers/001"]
        file["layers/001"] = [1]
    refuse_edited(dataset_for_group, "/layers/001")

    def elsewhere(link):
        def edit(file):
            del file["layers/001/key"]
            file["layers/001/key"] = link
        return edit
    other = write_activations(os.path.join(folder, "other.h5"))
    refuse_edited(elsewhere(h5py.SoftLink("/layers/005/key")),
                  "/layers/001/key: expected float [40, 2, 16], found a link to elsewhere")
    refuse_edited(elsewhere(h5py.ExternalLink(other, "/layers/001/key")), "found a link to elsewhere")
    os.unlink(other)


def test_shapes():
    """shapes that differ, of any rank, are printed as expected and found"""
    def shaped(shape, dtype=np.float16):
        return lambda file: replace(file["layers/005"], "value", np.zeros(shape, dtype))
    for shape in ((TOKENS, KV_HEADS), (TOKENS, KV_HEADS * VALUE_DIM), (KV_HEADS, TOKENS, VALUE_DIM),
                  (TOKENS, KV_HEADS, KEY_DIM), (TOKENS + 1, KV_HEADS, VALUE_DIM), (1,) * 32,
                  (TOKENS, KV_HEADS, VALUE_DIM, 1), (TOKENS, KV_HEADS, 0), (0,)):
        refuse_edited(shaped(shape), "/layers/005/value: expected float [40, 2, 24], found ["
                      + ", ".join(map(str, shape))[:60])
    refuse_edited(shaped(()), "/layers/005/value: expected float [40, 2, 24], found a scalar")

    def empty(file):
        del file["layers/005/value"]
        file["layers/005"].create_dataset("value", dtype="f2", data=h5py.Empty("f2"))
    refuse_edited(empty, "/layers/005/value: expected float [40, 2, 24], found an empty dataset")
    for shape in (0,), (2, 2), ():
        refuse_edited(lambda f: replace(f, "layer_index", np.zeros(shape, int)),
                      "/layer_index: expected int [n], found")
    refuse_edited(lambda f: replace(f, "sample_sha256", np.zeros((2, 64), np.uint8)),
                  "/sample_sha256: expected int [2, 32], found [2, 64]")
    refuse_edited(lambda f: replace(f, "sample_offsets", [0]), "/sample_offsets: expected 2 to")
    refuse_edited(lambda f: replace(f, "sample_offsets", [0, 10, 10, 40]),
                  "/sample_sha256: expected int [3, 32], found [2, 32]")
    refuse_edited(lambda f: replace(f, "sample_offsets", [0, 10, 39]),
                  "/layers/001/key: expected float [39, 2, 16], found [40, 2, 16]")
    refuse_edited(lambda f: replace(f, "sample_offsets", [0, 50, 40]), "/sample_offsets")
    refuse_edited(lambda f: replace(f, "layer_index", [5, 1]),
                  "/layer_index[1]: expected more than 5 before it, found 1")


def test_huge():
    """what a small file declares to be huge is refused before memory is taken"""
    def declared(name, shape, dtype, **options):
        def edit(file):
            del file[name]
            file.create_dataset(name, shape=shape, dtype=dtype, **options)
        return edit
    n = 2**62
    for write, name, options in ((write_tokens, "tokens", {}), (write_activations, "sample_offsets", {}),
                                 (write_activations, "layer_index", {})):
        refuse_edited(declared(name, (n, ), "i4", chunks=(1024, )),
                      f"/{name}: expected",
                      write=write,
                      **options)
        refuse_edited(declared(name, (2**40, ), "i8", chunks=(1024, )),
                      f"/{name}: expected",
                      write=write,
                      **options)
    refuse_edited(declared("layers/001/key", (n, 2, 16), "f2", chunks=(8, 2, 16)),
                  "/layers/001/key: expected float [40, 2, 16], found [4611")

    def agreed(file):  # everything agrees on 2^40 tokens
        for layer in LAYERS:
            for name in "key", "value":
                shape = (2**40,) + file[f"layers/{layer:03d}/{name}"].shape[1:]
                declared(f"layers/{layer:03d}/{name}", shape, "f2", chunks=(8,) + shape[1:])(file)
        replace(file, "sample_offsets", [0, 10, 2**40])
    refuse_edited(agreed, "/layers/001/key: expected", "chunks, found 0", contents="key value")

    def chunk(file):
        del file["layers/001/key"]
        file["layers/001"].create_dataset("key",
                                          shape=(TOKENS, 2, KEY_DIM),
                                          dtype="f4",
                                          chunks=(2**24, 2, KEY_DIM),
                                          maxshape=(None, 2, KEY_DIM),
                                          compression="gzip")
    refuse_edited(chunk, "/layers/001/key: expected chunks of at most 256 MiB")
    refuse_edited(lambda f: f.attrs.__setitem__("vocab_size", 2**31 - 1),
                  "/token_embedding: expected float [2147483647, 32]",
                  write=write_model)
    refuse_edited(lambda f: f.attrs.__setitem__("hidden_size", 2**31),
                  "attribute hidden_size: expected 1..2147483647, found 2147483648",
                  write=write_model)


def test_holes():
    """data that was never written is missing data, not zeros"""
    def unwritten(**options):
        def edit(file):
            del file["layers/001/key"]
            file["layers/001"].create_dataset("key", shape=(TOKENS, 2, KEY_DIM), dtype="f2", **options)
        return edit
    refuse_edited(unwritten(), "/layers/001/key: expected 2560 bytes of data, found 0")
    refuse_edited(unwritten(chunks=(10, 2, KEY_DIM)),
                  "/layers/001/key: expected 4 chunks, found 0: not all of it was written")

    def partly(file):
        unwritten(chunks=(10, 2, KEY_DIM), compression="gzip")(file)
        file["layers/001/key"][:30] = 1
    refuse_edited(partly, "/layers/001/key: expected 4 chunks, found 3")


def test_elsewhere():
    """data that lies outside the file is refused"""
    raw = os.path.join(folder, "raw")
    with open(raw, "wb") as file:
        file.write(bytes(TOKENS * 2 * KEY_DIM * 2))

    def external(file):
        del file["layers/001/key"]
        file["layers/001"].create_dataset("key",
                                          shape=(TOKENS, 2, KEY_DIM),
                                          dtype="f2",
                                          external=[(raw, 0, h5py.h5f.UNLIMITED)])
    refuse_edited(external, "/layers/001/key: expected data in this file, found a reference to another file")

    def virtual(file):
        del file["layers/001/key"]
        layout = h5py.VirtualLayout(shape=(TOKENS, 2, KEY_DIM), dtype="f2")
        layout[...] = h5py.VirtualSource("x.h5", "key", shape=(TOKENS, 2, KEY_DIM))
        file["layers/001"].create_virtual_dataset("key", layout)
    refuse_edited(virtual, "/layers/001/key: expected data in this file, found a virtual dataset")
    os.unlink(raw)


def test_filters():
    """filters that are not the format's are named"""
    def lzf(group, name, values):
        group.create_dataset(name, data=values.astype(np.float16), compression="lzf")

    assert_refused(
        write_activations(path, put=lzf),
        "/layers/001/key: expected no filters but deflate, shuffle and Fletcher-32, found "
        "filter lzf (number 32000)")

    def scaleoffset(file):
        replace(file, "tokens", np.arange(30), chunks=(30,), scaleoffset=0)
    refuse_edited(scaleoffset, "found filter scaleoffset (number 6)", write=write_tokens)

    def blosc(file):  # its number and name alone: no filter of that kind is here to write with
        del file["tokens"]
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk((30,))
        creation.set_filter(32001, h5py.h5z.FLAG_OPTIONAL, (2, 2, 4, 30))
        h5py.h5d.create(file.id, b"tokens", h5py.h5t.STD_I32LE, h5py.h5s.create_simple((30,)), creation)
    refuse_edited(blosc, "found filter blosc (number 32001)", write=write_tokens)


def test_types():
    """types that are no numbers of ours are named"""
    for values, words in ((np.zeros((TOKENS, 2, KEY_DIM), np.complex64), "found compound"), (np.zeros(
        (TOKENS, 2, KEY_DIM), "S3"), "found string"), (np.zeros(
            (TOKENS, 2, KEY_DIM),
            np.longdouble), "found float of 16 bytes in a layout unknown here"), (np.zeros(
                (TOKENS, 2, KEY_DIM), bool), "found enumeration"), (np.zeros(
                    (TOKENS, 2, KEY_DIM), np.int8), "found int8"), (np.zeros(
                        (TOKENS, 2, KEY_DIM), [("a", "f4")]), "found compound")):
        refuse_edited(lambda f: replace(f["layers/001"], "key", values),
                      "/layers/001/key: expected float [40, 2, 16]", words)


def test_not_finite():
    """NaN and infinities are refused by layer, head, channel and token, with their number"""
    for value in np.nan, np.inf, -np.inf:
        for name in "key", "value", "query":
            def put_one(file):
                d = file[f"layers/005/{name}"]
                d[3, 1, 7] = value
                d[17, 0, 2] = value

            refuse_edited(
                put_one, f"{name} of layer 5, head 1, channel 7, token 3: expected a finite number, "
                f"found {value} (2 such")
    refuse_edited(lambda f: f["layers/001/up_proj"].__setitem__((3, 5), np.nan),
                  "/layers/001/up_proj[3, 5]: expected a finite number, "
                  "found nan",
                  write=write_model)
    refuse_edited(lambda f: f["layers/001/rope_inv_freq"].__setitem__(2, np.inf),
                  "/layers/001/rope_inv_freq[2]: expected a finite number, found inf")

    def beyond(file):
        values = stream("key", 5).astype(np.float64)
        values[3, 0, 0] = 1e39
        replace(file["layers/005"], "key", values)
    refuse_edited(beyond, "/layers/005/key[3, 0, 0]: expected a number in f32's range, found 1e+39")


def test_model():
    """a model's tensors: missing, too many, of other shapes, other values"""
    refuse = lambda edit, *words, **options: refuse_edited(edit, *words, write=write_model, **options)
    refuse(lambda f: f.__delitem__("output"), "/output: missing: expected float [20, 32]", tied=0)
    refuse(lambda f: f.__setitem__("output", np.zeros((20, 32))), "/: unknown object output", tied=1)
    refuse(lambda f: f.__setitem__("layers/001/key_bias", np.zeros(32)),
           "/layers/001: unknown object key_bias")
    refuse(lambda f: f["layers/001"].__delitem__("key_norm"),
           "/layers/001/key_norm: missing: expected float [16]",
           qk_norm=1)
    refuse(lambda f: replace(f, "layers/000/down_proj", f["layers/000/down_proj"][...].T),
           "/layers/000/down_proj: expected float [32, 48], found [48, 32]")
    refuse(lambda f: f["final_norm"].__setitem__(3, 7), "attribute model_sha256: expected")
    refuse(lambda f: f.attrs.__setitem__("model_sha256", "00" * 32), "found 0000000000")
    refuse(lambda f: f.attrs.__setitem__("tied_output", 2), "attribute tied_output: expected 0..1, found 2")
    refuse(lambda f: f.attrs.__setitem__("bos_token_id", 20),
           "attribute bos_token_id: expected -1..19, found 20")
    refuse(lambda f: f.attrs.__setitem__("architecture", "mamba"),
           "attribute architecture: expected llama or extended, found 'mamba'")
    refuse(lambda f: f.attrs.__setitem__("activation", "silu"), "/: unknown attribute activation")
    refuse(lambda f: f.create_dataset("window", data=[0, 0]), "/: unknown object window")
    refuse(lambda f: f.attrs.__setitem__("n_layers", 3),
           "/layers/002: missing: expected a group, found 000, 001 there")
    refuse(lambda f: f.attrs.__setitem__("n_layers", 1),
           "/layers: unknown object 001; expected layers below n_layers")


def test_extended_model():
    """an extended model must say all that it is, in range"""
    refuse = lambda edit, *words: refuse_edited(edit, *words, write=write_model, extended=1)
    for name in "activation", "post_norms", "embedding_scale":
        refuse(lambda f: f.attrs.__delitem__(name), f"attribute {name}: missing")
    refuse(lambda f: f.attrs.__setitem__("activation", "relu"), "expected silu or gelu_tanh, found 'relu'")
    refuse(lambda f: f.attrs.__setitem__("post_norms", 2), "attribute post_norms: expected 0..1, found 2")
    refuse(lambda f: f.attrs.__setitem__("post_norms", 0), "unknown object post_")
    for value in 0.0, -1.0, np.nan:
        refuse(lambda f: f.attrs.__setitem__("embedding_scale", value), "attribute embedding_scale: expected a")
    refuse(lambda f: f.__delitem__("window"), "/window: missing: expected int [2]")
    refuse(lambda f: replace(f, "window", [5]), "/window: expected int [2], found [1]")
    refuse(lambda f: replace(f, "window", [5, -1]), "/window[1]: expected 0..2147483647, found -1")
    refuse(lambda f: f["layers/001"].__delitem__("post_ffn_norm"), "/layers/001/post_ffn_norm: missing")
    refuse(lambda f: f.attrs.__setitem__("architecture", "llama"), "unknown")


def test_damaged():
    """a file with any byte changed is good or refused in one line, never a crash"""
    rng = np.random.default_rng(3)
    for write in write_activations, write_tokens, write_model, lambda path: write_model(path, extended=1):
        whole = bytearray(open(write(path), "rb").read())
        places = list(rng.integers(0, len(whole), 40)) + list(range(0, min(2048, len(whole)), 37))
        for at in places:
            changed = bytearray(whole)
            changed[at] ^= int(rng.choice([1, 0x80, 0xff]))
            with open(path, "wb") as file:
                file.write(changed)
            status, out, err = check(path)
            assert status in (0, 1) and (out + err).count("\n") == 1 and "HDF5-DIAG" not in err, (at, status,
                                                                                                  out, err)


try:
    tap.run(globals())
finally:
    shutil.rmtree(folder)
