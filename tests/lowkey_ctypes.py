"""The public C interface (runtime/lowkey.h) as far as the Python tests call it, through ctypes. $B says which build."""
import ctypes as c
import os
import subprocess
import sys

import numpy as np

STATUS = ("OK EINVAL ENOMEM EIO EFORMAT EUNSUPPORTED EFULL EDEVICE ECANCELLED").split()


class Error(c.Structure):
    _fields_ = [("status", c.c_int), ("message", c.c_char * 508)]


class CacheConfig(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("n_pages", c.c_int), ("max_sequences", c.c_int),
                ("max_tokens", c.c_int), ("reserved", c.c_int)]


class ContextConfig(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("device", c.c_char_p), ("isa", c.c_char_p),
                ("device_index", c.c_int), ("stream", c.c_void_p), ("allocator", c.c_void_p * 3),
                ("parallel_for", c.c_void_p), ("parallel_user", c.c_void_p)]


class Rows(c.Structure):
    _fields_ = [("data", c.c_void_p), ("dtype", c.c_int), ("token_stride", c.c_ssize_t), ("head_stride", c.c_ssize_t)]


class AttendArgs(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("layer", c.c_int), ("n", c.c_int), ("sequences", c.POINTER(c.c_int)),
                ("n_queries", c.POINTER(c.c_int)), ("q", Rows), ("out", c.c_void_p), ("lse", c.c_void_p),
                ("workspace", c.c_void_p), ("workspace_bytes", c.c_size_t)]


class Usage(c.Structure):
    _fields_ = [("struct_size", c.c_size_t)] + [(name, c.c_uint64) for name in (
        "elements codes_bytes scales_bytes outliers_bytes sinks_bytes outliers clamped saturated "
        "held_pages_bytes held_sinks_bytes held_tables_bytes held_other_bytes").split()] + [
        ("bits_payload", c.c_double), ("bits_held", c.c_double), ("allocated_bytes", c.c_uint64)]


class SideDesc(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("bits", c.c_void_p), ("order", c.c_void_p), ("table_entries", c.c_int),
                ("n_entries", c.c_void_p), ("table", c.c_void_p), ("boundary", c.c_void_p), ("center", c.c_void_p),
                ("exponent", c.c_void_p), ("lower", c.c_void_p), ("upper", c.c_void_p), ("rule_8", c.c_int),
                ("rule_16", c.c_int), ("rule_scale", c.c_void_p), ("token_scale", c.c_int), ("scale_block", c.c_int),
                ("outlier_rule", c.c_int), ("outlier_rank", c.c_int), ("outlier_cap", c.c_int),
                ("outlier_page_capacity", c.c_int), ("factor", c.c_void_p), ("metric_weight", c.c_void_p),
                ("trellis", c.c_int), ("reserved", c.c_int)]


class LayerDesc(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("index", c.c_int), ("n_q_heads", c.c_int), ("n_kv_heads", c.c_int),
                ("key_head_dim", c.c_int), ("value_head_dim", c.c_int), ("logit_scale", c.c_double),
                ("rope_dims", c.c_int), ("rope_pairing", c.c_int), ("rope_attention_factor", c.c_double),
                ("rope_inv_freq", c.c_void_p), ("key", SideDesc), ("value", SideDesc)]


class QuantizerDesc(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("n_layers", c.c_int), ("layers", c.POINTER(LayerDesc)),
                ("n_sink_tokens", c.c_int), ("sink_rule", c.c_int), ("model_name", c.c_char_p),
                ("model_sha256", c.c_ubyte * 32)]


RULES = ("none", "f16", "bf16", "e4m3", "e5m2", "int8")


def describe(q):
    """lowkey_quantizer_desc of a reader.quantizer, which keeps what it points to."""
    keep = []

    def array(values, dtype):
        if values is None:
            return None
        keep.append(np.ascontiguousarray(values, dtype))
        return keep[-1].ctypes.data

    def side(s):
        return SideDesc(
            c.sizeof(SideDesc), array(s.bits, np.uint8), array(s.order, np.uint16), s.E,
            *[array(getattr(s, name) if s.E else None, dtype) for name, dtype in (
                ("n_entries", np.uint8), ("table", np.float32), ("boundary", np.float32))],
            array(s.center, np.float32), array(s.exponent, np.int16), array(s.lower, np.float32),
            array(s.upper, np.float32),
            RULES.index(s.rule_8), RULES.index(s.rule_16), array(s.rule_scale, np.float32),
            ("none", "f16", "f32").index(s.token_scale), s.scale_block,
            ("none", "limit", "rank").index(s.outlier_rule),
            s.rank, s.cap, s.capacity, array(s.factor, np.float32), array(s.metric_weight, np.float32), s.trellis)

    layers = (LayerDesc * len(q.layers))(*[LayerDesc(
        c.sizeof(LayerDesc), g.index, g.n_q_heads, g.n_kv_heads, g.key_head_dim, g.value_head_dim, g.logit_scale,
        g.rope_dims, ("half", "interleaved").index(g.rope_pairing), g.rope_attention_factor,
        array(g.rope_inv_freq, np.float64), side(g.key), side(g.value)) for g in q.layers])
    desc = QuantizerDesc(c.sizeof(QuantizerDesc), len(q.layers), layers, q.n_sink_tokens, RULES.index(q.sink_rule))
    desc.keep = keep, layers
    return desc


class LowkeyError(Exception):
    pass


def load():
    """Both libraries. Under the sanitizers the interpreter must have their runtime first: it starts itself anew."""
    build = os.environ.get("B", "build/opt")
    if os.path.basename(build) == "san" and "LD_PRELOAD" not in os.environ:
        find = ["gcc", "-print-file-name=libasan.so"], ["gcc", "-print-file-name=libubsan.so"]
        preload = " ".join(subprocess.check_output(f, text=True).strip() for f in find)
        os.environ.update(LD_PRELOAD=preload, ASAN_OPTIONS="detect_leaks=0")
        os.execv(sys.executable, [sys.executable] + sys.argv)
    core, h5 = c.CDLL(f"{build}/liblowkey.so"), c.CDLL(f"{build}/liblowkey-h5.so")
    core.lowkey_cache_free.argtypes = core.lowkey_context_free.argtypes = core.lowkey_quantizer_free.argtypes = [c.c_void_p]
    core.lowkey_attend_workspace_bytes.restype = c.c_size_t
    core.lowkey_context_isa.restype = c.c_char_p
    core.lowkey_context_isa.argtypes = [c.c_void_p]
    return core, h5


def checked(function, *args):
    error = Error()
    status = function(*args, c.byref(error))
    if status:
        assert status == error.status, (status, error.status)
        raise LowkeyError(f"{STATUS[status]}: {error.message.decode()}")


def ints(*values):
    return (c.c_int * len(values))(*values)


def rows(array):
    """Dense f32 or f16 rows of [n, heads, dim]."""
    assert array.flags.c_contiguous
    return Rows(array.ctypes.data, {"float32": 0, "float16": 1}[array.dtype.name], 0, 0)


class Cache:
    """A cache on a quantizer: a file's name, or a description made by describe."""

    def __init__(self, libraries, quantizer, n_pages, max_sequences=1, isa=None):
        self.core, h5 = libraries
        self.quantizer, self.context, self.cache = c.c_void_p(), c.c_void_p(), c.c_void_p()
        if isinstance(quantizer, QuantizerDesc):
            checked(self.core.lowkey_quantizer_create, c.byref(quantizer), None, c.byref(self.quantizer))
        else:
            checked(h5.lowkey_quantizer_open, os.fsencode(quantizer), None, c.byref(self.quantizer))
        config = ContextConfig(c.sizeof(ContextConfig), None, isa)
        checked(self.core.lowkey_context_create, c.byref(config), c.byref(self.context))
        config = CacheConfig(c.sizeof(CacheConfig), n_pages, max_sequences)
        checked(self.core.lowkey_cache_create, self.context, self.quantizer, c.byref(config), c.byref(self.cache))

    def close(self):
        self.core.lowkey_cache_free(self.cache)
        self.core.lowkey_context_free(self.context)
        self.core.lowkey_quantizer_free(self.quantizer)

    def isa(self):
        return self.core.lowkey_context_isa(self.context).decode()

    def reserve(self, n_tokens, sequence=0):
        checked(self.core.lowkey_cache_reserve, self.cache, sequence, n_tokens)

    def append(self, layer, keys, values, sequence=0):
        checked(self.core.lowkey_cache_append, self.cache, layer, 1, ints(sequence), ints(len(keys)), rows(keys),
                rows(values))

    def trim(self, n_tokens, sequence=0):
        checked(self.core.lowkey_cache_trim, self.cache, sequence, n_tokens)

    def read(self, layer, shape_k, shape_v, first, n, sequence=0):
        keys, values = np.empty((n, *shape_k), np.float32), np.empty((n, *shape_v), np.float32)
        checked(self.core.lowkey_cache_read, self.cache, sequence, layer, first, n, c.c_void_p(keys.ctypes.data),
                c.c_void_p(values.ctypes.data))
        return keys, values

    def page(self, layer, page, side, head, sequence=0):
        data, size = c.c_void_p(), c.c_size_t()
        checked(self.core.lowkey_cache_page, self.cache, sequence, layer, page, side, head, c.byref(data),
                c.byref(size))
        return c.string_at(data, size.value) if size.value else b""

    def attend(self, layer, q, value_dim, sequence=0):
        n, heads, _ = q.shape
        out, lse = np.empty((n, heads, value_dim), np.float32), np.empty((n, heads), np.float32)
        args = AttendArgs(c.sizeof(AttendArgs), layer, 1, ints(sequence), ints(n), rows(q), out.ctypes.data,
                          lse.ctypes.data)
        size = self.core.lowkey_attend_workspace_bytes(self.cache, c.byref(args))
        space = np.empty(size + 64, np.uint8)
        args.workspace, args.workspace_bytes = (space.ctypes.data + 63) // 64 * 64, size
        checked(self.core.lowkey_attend, self.cache, c.byref(args))
        return out, lse

    def usage(self):
        usage = Usage(c.sizeof(Usage))
        checked(self.core.lowkey_cache_measure, self.cache, c.byref(usage))
        return usage
