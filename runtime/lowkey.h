/* lowkey.h - the whole public interface of liblowkey: quantizers, and a paged 1-16 bit KV cache that
 * packs keys and values and attends over them.
 *
 * A stored element is  x ~ zero_t + scale_t * table_c[code]  (+ residual, where it is an outlier):
 * table_c belongs to a channel and was fitted offline, scale_t and zero_t to a token, and most formats
 * have neither. formats/README.md specifies every byte.
 *
 * Shapes are written [outer][inner]; the innermost dimension (channels, Hugging Face order) is contiguous
 * and other strides are given, in elements. Counts are of elements; a name ending in _bytes is in bytes.
 * Keys and queries are given before RoPE (after bias and QK-norm); the library rotates.
 *
 * An object is freed by its _free, which takes NULL: a cache before its context and its quantizer.
 * Calls that change an object need it to themselves; const objects may be read by many threads.
 * The library starts no thread, prints nothing, reads no environment, keeps no global state.
 *
 * Public structs begin with struct_size = sizeof the struct as the caller compiled it; a later version may
 * add fields behind, whose zero means what this version does. A struct whose other fields are all zero
 * asks for the defaults named beside the fields.
 */
#ifndef LOWKEY_H
#define LOWKEY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define LOWKEY_API __attribute__((visibility("default")))
#else
#define LOWKEY_API
#endif

#define LOWKEY_VERSION_MAJOR 0
#define LOWKEY_VERSION_MINOR 1

/* ---- errors: a call that can fail returns a status and, where err is not NULL, says why in words ---- */

typedef enum lowkey_status {
    LOWKEY_OK = 0,
    LOWKEY_EINVAL,       /* an argument is out of its stated range, or input is not finite */
    LOWKEY_ENOMEM,       /* host or device memory ran out */
    LOWKEY_EIO,          /* a file could not be read or written */
    LOWKEY_EFORMAT,      /* a file or a description breaks the format (message: object, expected, found) */
    LOWKEY_EUNSUPPORTED, /* valid, but not in this build or on this machine */
    LOWKEY_EFULL,        /* no free page, or the sequence's limit is reached; nothing was changed */
    LOWKEY_EDEVICE,      /* the device reported an error */
    LOWKEY_ECANCELLED    /* the caller's interrupt was seen; nothing was half written */
} lowkey_status;

typedef struct lowkey_error {
    lowkey_status status;
    char message[508]; /* one line, no newline, NUL-terminated */
} lowkey_error;

LOWKEY_API const char *lowkey_status_name(lowkey_status status); /* "LOWKEY_EINVAL"; "?" for no status */
LOWKEY_API const char *lowkey_version(void);                     /* "0.1" */

/* ---- memory and threads, from the caller ---- */

typedef struct lowkey_allocator { /* both functions NULL: aligned_alloc and free */
    void *(*alloc)(void *user, size_t bytes, size_t alignment); /* NULL: no memory; alignment a power of 2 */
    void (*free)(void *user, void *block, size_t bytes);
    void *user;
} lowkey_allocator;

/* Calls body(arg, i) for each i in 0..n-1, in any order, on any threads; returns when all have returned. */
typedef void lowkey_parallel_for(void *user, int n, void (*body)(void *arg, int i), void *arg);

/* ---- quantizer: what calibration fitted; in host memory, read-only once made, needs no context ---- */

typedef enum lowkey_pairing { /* which channels a RoPE pair is made of, for rope_dims = R */
    LOWKEY_PAIR_HALF = 0,     /* (i, i + R/2): Llama and most models in Hugging Face order */
    LOWKEY_PAIR_INTERLEAVED   /* (2i, 2i + 1) */
} lowkey_pairing;

typedef enum lowkey_rule {    /* how an 8- or 16-bit code is decoded, no table */
    LOWKEY_RULE_NONE = 0,
    LOWKEY_RULE_F16,          /* 16 bits, IEEE half */
    LOWKEY_RULE_BF16,         /* 16 bits */
    LOWKEY_RULE_E4M3,         /* 8 bits, OCP FP8: no infinity, saturates at 448; times rule_scale */
    LOWKEY_RULE_E5M2,         /* 8 bits, OCP FP8: saturates at 57344; times rule_scale */
    LOWKEY_RULE_INT8          /* 8 bits, -127..127; times rule_scale */
} lowkey_rule;

typedef enum lowkey_outlier_rule {
    LOWKEY_OUTLIER_NONE = 0,
    LOWKEY_OUTLIER_LIMIT, /* outside [lower, upper] of its channel; farthest first relative to upper - lower */
    LOWKEY_OUTLIER_RANK   /* the outlier_rank largest and smallest of a token's vector over all KV heads */
} lowkey_outlier_rule;

typedef enum lowkey_token_scale { /* scale_t and zero_t, found when a token is appended */
    LOWKEY_SCALE_NONE = 0,        /* static tables: scale 1, zero 0 */
    LOWKEY_SCALE_F16,             /* both stored as f16 */
    LOWKEY_SCALE_F32
} lowkey_token_scale;

/* Keys or values of one layer. H = the layer's n_kv_heads, D = this side's head_dim, C = H * D.
 * E = table_entries. A channel of b <= 5 bits uses the first n_entries[c] <= 2^b of its E entries, strictly
 * rising; further entries repeat the last one and further boundaries are FLT_MAX, so no code reaches them. */
typedef struct lowkey_side_desc {
    size_t struct_size;
    const uint8_t *bits;         /* [H][D], each 1..5, 8 or 16 */
    const uint16_t *order;       /* [H][D], row r of a page holds channel order[h][r]; NULL: lowkey_default_order */
    int table_entries;           /* E: 0 (no channel has a table) or 2..32; 4..64 with a trellis */
    const uint8_t *n_entries;    /* [H][D], 0 for channels without a table; NULL: 2^bits, 2^(bits+1) with a trellis */
    const float *table;          /* [H][D][E], in the units of x (of scale_t where there is one) */
    const float *boundary;       /* [H][D][E-1], rising; code = the number of boundaries below x. NULL with a trellis */
    const float *center;         /* [H][D]; table = fl32(center + h * 2^exponent), h exact in f16; NULL: 0 */
    const int16_t *exponent;     /* [H][D], -126..112; also the unit of stored outlier residuals; NULL: 0 */
    const float *lower, *upper;  /* [H][D], the fitted range; with LOWKEY_OUTLIER_LIMIT the outlier limits */
    lowkey_rule rule_8, rule_16; /* what 8- and 16-bit channels hold; NONE where there are none */
    const float *rule_scale;     /* [H][D], > 0; 8-bit channels: x ~ rule_scale * decode(code), finite for every code; NULL: 1 */
    lowkey_token_scale token_scale;
    int scale_block;             /* channels of C that share a token's scale: divides C, multiple of 8; 0: C */
    lowkey_outlier_rule outlier_rule;
    int outlier_rank;            /* with RANK: as many at each end of a token's C elements */
    int outlier_cap;             /* at most so many a token, 0 only with NONE */
    int outlier_page_capacity;   /* at most so many a page of 64 tokens, over all KV heads */
    const float *factor;         /* [H][D][D] error feedback by row: factor[i][j], i > j, exact in f16; NULL: none */
    const float *metric_weight;  /* [H][D] > 0, of a trellis: weight of a row's squared error in the search; else NULL */
    int trellis;                 /* 0: none; 1, 2, 4: rows are trellis coded, tables have up to 2^(b+1) entries, boundary is
                                    NULL, and packing keeps so many survivors a state. formats/README.md, "Pages" */
    int reserved;                /* 0 */
} lowkey_side_desc;

typedef struct lowkey_layer_desc {
    size_t struct_size;
    int index;                   /* the layer's number in the model, from 0 */
    int n_q_heads, n_kv_heads;   /* n_q_heads a multiple of n_kv_heads */
    int key_head_dim, value_head_dim; /* multiples of 8, 8..256 */
    double logit_scale;          /* scores are logit_scale * q.k; 0: 1 / sqrt(key_head_dim) */
    int rope_dims;               /* even, 0 (no RoPE) .. key_head_dim; the first rope_dims channels rotate */
    lowkey_pairing rope_pairing;
    double rope_attention_factor;/* multiplies cos and sin of keys and queries alike (YaRN); 0: 1 */
    const double *rope_inv_freq; /* [rope_dims / 2], radians per position */
    lowkey_side_desc key, value;
} lowkey_layer_desc;

typedef struct lowkey_quantizer_desc {
    size_t struct_size;
    int n_layers;                /* layers described here, rising index; a model may have others */
    const lowkey_layer_desc *layers;
    int n_sink_tokens;           /* 0..64: a sequence's first tokens, kept in 16 bits */
    lowkey_rule sink_rule;       /* F16 or BF16; NONE: F16 */
    const char *model_name;      /* NULL: "" */
    unsigned char model_sha256[32];
} lowkey_quantizer_desc;

typedef struct lowkey_quantizer lowkey_quantizer;

/* Check a description whole (as lowkey check does for files) and copy it; the caller's arrays may go. */
LOWKEY_API lowkey_status lowkey_quantizer_create(const lowkey_quantizer_desc *desc, const lowkey_allocator *allocator,
                                                 lowkey_quantizer **out, lowkey_error *err);
/* Read quantizer.h5. In liblowkey.a and liblowkey-h5.so; needs HDF5, whose calls belong on one thread. */
LOWKEY_API lowkey_status lowkey_quantizer_open(const char *path, const lowkey_allocator *allocator,
                                               lowkey_quantizer **out, lowkey_error *err);
LOWKEY_API void lowkey_quantizer_free(lowkey_quantizer *quantizer);
/* What it was made from, every pointer filled in; lives as long as the quantizer. */
LOWKEY_API const lowkey_quantizer_desc *lowkey_quantizer_describe(const lowkey_quantizer *quantizer);
/* A 16-bit quantizer (rule F16 or BF16 in every channel) of the same geometry: the way back. */
LOWKEY_API lowkey_status lowkey_quantizer_create_16bit(const lowkey_quantizer_desc *geometry, lowkey_rule rule,
                                                       const lowkey_allocator *allocator, lowkey_quantizer **out,
                                                       lowkey_error *err);
/* The order of rows that is used where order is NULL: RoPE partners beside each other, then the rest. order: [head_dim] */
LOWKEY_API void lowkey_default_order(int head_dim, int rope_dims, lowkey_pairing pairing, uint16_t *order);

/* ---- context: where and with what to compute ---- */

typedef struct lowkey_context lowkey_context;

typedef struct lowkey_context_config {
    size_t struct_size;
    const char *device;          /* "cpu" (NULL) or "cuda"; a device that is absent is LOWKEY_EUNSUPPORTED */
    const char *isa;             /* CPU level by name ("scalar"); NULL: the best of this CPU */
    int device_index;            /* CUDA device */
    void *stream;                /* cudaStream_t; NULL: the default stream */
    lowkey_allocator allocator;
    lowkey_parallel_for *parallel_for; /* NULL: all on the calling thread. Results do not depend on it. */
    void *parallel_user;
} lowkey_context_config;

LOWKEY_API lowkey_status lowkey_context_create(const lowkey_context_config *config, lowkey_context **out, lowkey_error *err);
LOWKEY_API void lowkey_context_free(lowkey_context *context);
LOWKEY_API const char *lowkey_context_isa(const lowkey_context *context); /* the level that was chosen */

/* ---- cache: pages of packed keys and values of many sequences, all layers of one quantizer ---- */

#define LOWKEY_PAGE_TOKENS 64

typedef struct lowkey_cache lowkey_cache;

typedef struct lowkey_cache_config {
    size_t struct_size;
    int n_pages;                 /* pages of 64 tokens, shared by all sequences; one page number serves all layers */
    int max_sequences;           /* sequences are numbered 0..max_sequences-1 and are empty at first */
    int max_tokens;              /* the longest a sequence may become; 0: n_pages * 64 */
    int reserved;                /* 0. Structs end without padding, so that a field behind them changes their size */
} lowkey_cache_config;

typedef enum lowkey_dtype { LOWKEY_F32 = 0, LOWKEY_F16, LOWKEY_BF16 } lowkey_dtype;

typedef struct lowkey_rows { /* [n_tokens][n_heads][head_dim], channels contiguous, on the context's device */
    const void *data;            /* aligned as its elements are */
    lowkey_dtype dtype;
    ptrdiff_t token_stride, head_stride; /* in elements; both 0: dense */
} lowkey_rows;

LOWKEY_API lowkey_status lowkey_cache_create(lowkey_context *context, const lowkey_quantizer *quantizer,
                                             const lowkey_cache_config *config, lowkey_cache **out, lowkey_error *err);
LOWKEY_API void lowkey_cache_free(lowkey_cache *cache);

/* Make room for n_tokens more tokens of a sequence than its longest layer holds, in every layer: finds pages, checks
 * limits. LOWKEY_EFULL changes nothing. append then needs no memory and cannot run out. */
LOWKEY_API lowkey_status lowkey_cache_reserve(lowkey_cache *cache, int sequence, int n_tokens, lowkey_error *err);

/* Append at one layer n_tokens[i] tokens to sequences[i], i < n (no sequence twice). Rows of all sequences lie one
 * after the other: sum of n_tokens rows. Packed token by token: any cut of the same tokens gives the same bytes.
 * All or nothing: not reserved, or any element not finite (named by token, head, channel), changes nothing. */
LOWKEY_API lowkey_status lowkey_cache_append(lowkey_cache *cache, int layer, int n, const int *sequences,
                                             const int *n_tokens, lowkey_rows keys, lowkey_rows values,
                                             lowkey_error *err);

/* Tokens appended to a sequence at a layer, from 0; -1 for no such sequence or layer. */
LOWKEY_API int lowkey_cache_length(const lowkey_cache *cache, int sequence, int layer);

/* Shorten a sequence to n_tokens in every layer that holds more, and give back the pages (reserved ones too) that
 * no layer needs. Exact: what follows is as if the removed tokens had never been. n_tokens 0 drops it. */
LOWKEY_API lowkey_status lowkey_cache_trim(lowkey_cache *cache, int sequence, int n_tokens, lowkey_error *err);

/* Attend at one layer. Sequence sequences[i] has n_queries[i] queries, which belong to its last n_queries[i] tokens
 * (so: append first; 1 is a decode step, more is causal prefill): query j sits at position
 * length - n_queries[i] + j and sees tokens 0..position.
 *     out[j][h] = sum_t softmax_t(logit_scale * RoPE(q[j][h]) . RoPE(k_t)) v_t,  KV head = h / (n_q_heads / n_kv_heads)
 * over the *stored* keys and values. Products and sums are f32; angles are made in f64 and rounded to f32. Against the
 * same formula in f64 over lowkey_cache_read's values the error of out is at most, for positions below 2^24,
 *     (4 (key_head_dim + 8) 2^-24 S + (3 min(n, 64) + n / 8 + 16) 2^-24) * max |v|
 * with n the tokens seen and S the largest a score could be: logit_scale times the sum, over the RoPE pairs, of
 * rope_attention_factor^2 |q pair| |k pair| (2-norms, since RoPE turns pairs) and, over the other channels, of |q_c| |k_c|,
 * at its largest token; that of lse the same without max |v|, and 2^-23 |lse|. kernels/README.md derives it.
 * Queries must be finite, and stored keys and values always are. Scores, and means of values, beyond f32's range count as
 * its largest number, so that out and lse are finite too.
 * The result does not depend on the number of threads, nor on the other sequences of the call. */
typedef struct lowkey_attend_args {
    size_t struct_size;
    int layer;
    int n;
    const int *sequences;        /* [n] */
    const int *n_queries;        /* [n]; NULL: 1 each. 0..length; a sequence without queries writes nothing */
    lowkey_rows q;               /* [sum of n_queries][n_q_heads][key_head_dim], before RoPE */
    float *out;                  /* [sum of n_queries][n_q_heads][value_head_dim], dense */
    float *lse;                  /* [sum of n_queries][n_q_heads] log-sum-exp of the scores, natural log; NULL: not wanted */
    void *workspace;             /* 64-byte aligned, on the device */
    size_t workspace_bytes;      /* at least lowkey_attend_workspace_bytes of the same args */
} lowkey_attend_args;

/* For the lengths of now; 0: no workspace is needed, or lowkey_attend would refuse the args (and say why). */
LOWKEY_API size_t lowkey_attend_workspace_bytes(const lowkey_cache *cache, const lowkey_attend_args *args);
LOWKEY_API lowkey_status lowkey_attend(const lowkey_cache *cache, const lowkey_attend_args *args, lowkey_error *err);

/* The stored values of tokens first..first+n_tokens-1, dequantized, keys before RoPE: [n_tokens][n_kv_heads][head_dim]
 * dense f32, host memory. Either pointer may be NULL. */
LOWKEY_API lowkey_status lowkey_cache_read(const lowkey_cache *cache, int sequence, int layer, int first, int n_tokens,
                                           float *keys, float *values, lowkey_error *err);

/* The bytes of a sequence's page (tokens 64 * page ..): of one KV head with head >= 0, of the layer's side page with
 * head == -1. formats/README.md says what they hold; bits of unused slots are unspecified. side: 0 keys, 1 values. */
LOWKEY_API lowkey_status lowkey_cache_page(const lowkey_cache *cache, int sequence, int layer, int page, int side,
                                           int head, const void **bytes, size_t *n_bytes, lowkey_error *err);

/* What a cache holds, each part, in bytes, at this moment. Payload counts what the tokens held need: codes, per-token
 * scales and zeros, outliers in use and 16 bits a token where there is an outlier rule; tokens kept as sinks count 16 bits
 * an element. Held counts what was taken from the allocator for them, whole pages and fixed parts. */
typedef struct lowkey_cache_usage {
    size_t struct_size;
    uint64_t elements;           /* of keys and values, sinks included: sum over sequences and layers */
    uint64_t codes_bytes, scales_bytes, outliers_bytes, sinks_bytes;  /* payload */
    uint64_t outliers, clamped, saturated; /* counts since creation: stored; beyond a cap; residuals, rules or sinks at the end of their range */
    uint64_t held_pages_bytes;   /* pages in use by sequences, side pages included, padding too */
    uint64_t held_sinks_bytes;   /* of the sequences that have pages */
    uint64_t held_tables_bytes;  /* tables, boundaries, orders, feedback factors, RoPE angles */
    uint64_t held_other_bytes;   /* block tables, lengths, the objects */
    double bits_payload;         /* per element; 0 where there is none */
    double bits_held;            /* per element */
    uint64_t allocated_bytes;    /* everything taken from the allocator by cache and quantizer, free pages too */
    uint64_t key_elements, value_elements; /* elements and payload of each side, sinks included */
    uint64_t key_payload_bits, value_payload_bits;
} lowkey_cache_usage;

LOWKEY_API lowkey_status lowkey_cache_measure(const lowkey_cache *cache, lowkey_cache_usage *usage, lowkey_error *err);

/* What lowkey_cache_measure would say of a cache of this size in which n_sequences sequences hold tokens_each tokens in
 * every layer; nothing is allocated. How many elements are outliers depends on the data: counts are 0, and the payload of
 * outliers is that of tokens without any. Held bytes are exact. LOWKEY_EFULL: they have no room in such a cache. */
LOWKEY_API lowkey_status lowkey_cache_estimate(const lowkey_quantizer *quantizer, const lowkey_cache_config *config,
                                               int n_sequences, int tokens_each, lowkey_cache_usage *usage,
                                               lowkey_error *err);

#ifdef __cplusplus
}
#endif
#endif
