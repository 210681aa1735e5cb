"""Files that other programs write: every storage that the format allows is read, to the right numbers. What
is wrong is in test_h5py_bad.py."""
import os
import shutil
import tempfile

import h5py
import numpy as np

import reader_inputs
import tap
from small_files import (assert_good, assert_refused, check, replace, write_activations, write_model,
                         write_tokens)

folder = tempfile.mkdtemp(prefix="lowkey_h5py_")
path = os.path.join(folder, "file.h5")


def bf16_type(order="<"):
    t = (h5py.h5t.IEEE_F32LE if order == "<" else h5py.h5t.IEEE_F32BE).copy()
    t.set_fields(15, 7, 8, 0, 7)
    t.set_size(2)
    t.set_ebias(127)
    return t


def bf16_bits(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def refuse_edited(edit, *words, write=write_activations, **options):
    assert_refused(write(path, edit=edit, **options), *words)


def test_schemas():
    """each schema as h5py writes it is good"""
    assert "2 of 8 layers, 40 tokens in 2 samples" in assert_good(write_activations(path))
    assert "30 in 2 sequences" in assert_good(write_tokens(path))
    for tied in 0, 1:
        for bias in 0, 1:
            for qk_norm in 0, 1:
                assert "hash right" in assert_good(write_model(path, tied, bias, qk_norm))
    for dtype in np.float16, np.float64:
        assert_good(write_model(path, dtype=dtype))


def test_labels():
    """from 1.1 on gradients say what they are of: text, or model with a seed"""
    whole = lambda group, name, values: group.create_dataset(name, data=values)

    def write(contents="key value key_grad", version=(1, 1), **attributes):
        def edit(file):
            file.attrs.update({"schema_version": list(version), **attributes})
        return write_activations(path, contents, put=whole, edit=edit)

    assert_good(write(gradient_labels="text"))
    assert_good(write(gradient_labels="model", gradient_seed=3))
    assert_good(write(version=(1, 0)))
    assert_good(write("key value"))
    assert_refused(write(), "gradient_labels: missing")
    assert_refused(write(gradient_labels="kl"), "gradient_labels")
    assert_refused(write(gradient_labels="model"), "gradient_seed: missing")
    assert_refused(write(gradient_labels="model", gradient_seed=-1), "gradient_seed")
    assert_refused(write(gradient_labels="text", gradient_seed=1), "gradient_seed")
    assert_refused(write("key value", gradient_labels="text"), "gradient_labels")
    assert_refused(write(version=(1, 0), gradient_labels="text"), "gradient_labels")


def test_contents():
    """gradients and weights are read; f16 gradients and negative weights are refused"""
    whole = lambda group, name, values: group.create_dataset(name, data=values)
    assert_good(write_activations(path, "key value query key_grad value_weight", put=whole))
    assert_good(write_activations(path, "key value value_grad key_weight", put=whole))
    assert_refused(write_activations(path, "key value key_grad"),
                   "/layers/001/key_grad: expected bf16, f32 or f64, found f16")

    def negative(file):
        file["layers/005/value_weight"][7, 1, 3] = -2

    refuse_edited(
        negative,
        "value_weight of layer 5, head 1, channel 3, token 7: expected a finite number, 0 or more, found -2",
        contents="key value value_weight")


def test_storage():
    """every storage of floats that the format allows is read"""
    def stored(**options):
        return lambda group, name, values: group.create_dataset(name, data=values, **options)
    for dtype in "<f2", ">f2", "<f4", ">f4", "<f8", ">f8":
        assert_good(write_activations(path, put=stored(dtype=dtype)))
        assert_good(
            write_activations(path,
                              put=stored(dtype=dtype, chunks=(7, 1, 8), compression="gzip", shuffle=True)))
    for options in (dict(chunks=True), dict(chunks=(3, 2, 16)),
                    dict(chunks=(64, 2, 16), maxshape=(None, None, None)), dict(fletcher32=True),
                    dict(compression="gzip", compression_opts=9),
                    dict(shuffle=True, fletcher32=True, compression="gzip")):
        assert_good(write_activations(path, put=stored(**options)))


def test_bf16():
    """bf16 is read as a 16-bit float type of either endianness and as uint16 with the attribute"""
    def as_float(order):
        def put(group, name, values):
            bits = bf16_bits(values).astype(order + "u2")
            d = h5py.h5d.create(group.id, name.encode(), bf16_type(order),
                                h5py.h5s.create_simple(values.shape))
            d.write(h5py.h5s.ALL, h5py.h5s.ALL, bits, bf16_type(order))
        return put
    def as_int(dtype, attribute):
        def put(group, name, values):
            d = group.create_dataset(name, data=bf16_bits(values).astype(dtype))
            if attribute:
                d.attrs["dtype"] = attribute
        return put
    for put in (as_float("<"), as_float(">"), as_int("<u2", "bf16"), as_int(">u2", "bf16"),
                as_int("<u2", np.bytes_("bf16"))):
        assert_good(write_activations(path, put=put))
    assert_refused(
        write_activations(path, put=as_int("<u2", None)),
        "/layers/001/key: expected float [40, 2, 16], found uint16 without "
        "attribute dtype; bf16 in uint16 needs dtype = 'bf16'")
    assert_refused(write_activations(path, put=as_int("<u2", "f16")),
                   "attribute dtype: expected bf16, found 'f16'")
    assert_refused(write_activations(path, put=as_int("<u2", 3)),
                   "attribute dtype: expected a string, found int64")
    assert_refused(write_activations(path, put=as_int("<i2", None)),
                   "expected float [40, 2, 16], found int16")


def test_values_are_decoded():
    """numbers are decoded right: the hash over them is that of the same model in f32"""
    def swap(dtype):
        def edit(file):
            for name in "query_proj", "up_proj":
                replace(file["layers/001"],
                        name,
                        file["layers/001"][name][...],
                        dtype=dtype,
                        chunks=(5, 7),
                        compression="gzip")
        return edit
    for dtype in "<f8", ">f8", ">f4":
        assert_good(write_model(path, edit=swap(dtype)))

    def as_bf16(order):
        def edit(file):
            for name in "token_embedding", "layers/000/query_norm":
                bits = bf16_bits(file[name][...])
                del file[name]
                d = h5py.h5d.create(file.id, name.encode(), bf16_type(order),
                                    h5py.h5s.create_simple(bits.shape))
                d.write(h5py.h5s.ALL, h5py.h5s.ALL, bits.astype(order + "u2"), bf16_type(order))
        return edit
    exact = lambda: write_model(path, qk_norm=1, dtype=np.float16, edit=None)
    assert_good(exact())
    for order in "<", ">":  # rounded to bf16, so another function: the hash tells
        refuse_edited(as_bf16(order), "attribute model_sha256: expected", write=write_model, qk_norm=1)


def test_extended_model():
    """a model with windows, another activation and further norms is good, for an independent reader too"""
    for post_norms in 0, 1:
        assert_good(write_model(path, extended=post_norms))
        found = reader_inputs.model(path)
        assert (found.post_norms, list(found.window)) == (post_norms, [512, 0])


def test_integers():
    """integers of any type and order are read and range-checked"""
    for dtype in "<i1", "<u1", ">i2", "<u2", "<i4", ">i8", "<u8":
        assert_good(write_tokens(path, edit=lambda f: replace(f, "tokens", np.arange(30), dtype=dtype)))
    big = np.arange(30, dtype=np.uint64)
    big[4] = 2**64 - 1
    refuse_edited(lambda f: replace(f, "tokens", big),
                  "/tokens[4]: expected 0..49, found 9223372036854775807 or more",
                  write=write_tokens)
    refuse_edited(lambda f: replace(f, "tokens", np.arange(30.0)),
                  "/tokens: expected int [n], found f64",
                  write=write_tokens)
    refuse_edited(lambda f: f["tokens"].__setitem__(29, 50),
                  "/tokens[29]: expected 0..49, found 50",
                  write=write_tokens)


def test_newer_minor_version():
    """a newer minor version may hold objects and attributes that are not known"""
    def newer(file):
        file.attrs["schema_version"] = [1, 7]
        file.attrs["new"] = 1
        file["layers/new"] = [1]
        file["layers/001"].attrs["new"] = 1
        file["layers/001/new"] = [1]
        file["layers/001/key"].attrs["new"] = 1
    assert_good(write_activations(path, edit=newer))


def test_open_elsewhere():
    """a file that another program is writing is refused, one that others read is not"""
    write_tokens(path)
    with h5py.File(path, "r"):
        assert_good(path)
    with h5py.File(path, "r+"):
        status, _, err = check(path)
        assert status == 1 and "being written" in err and err.count("\n") == 1, (status, err)


def test_read_only_folder():
    """a file in a folder that cannot be written is read"""
    write_tokens(path)
    os.chmod(path, 0o444)
    os.chmod(folder, 0o555)
    try:
        assert_good(path)
    finally:
        os.chmod(folder, 0o755)
        os.chmod(path, 0o644)


try:
    tap.run(globals())
finally:
    shutil.rmtree(folder)
