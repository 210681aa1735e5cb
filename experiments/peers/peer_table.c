/* peer_table.c - the formats by name: which method quantizes keys, which values, and with which settings. */
#include <string.h>

#include "experiments/peers/peer_parts.h"

/* Keys and values alike, tokens on their own; the rest is 0. */
#define BOTH(method_, ...)                                                                                   \
    .key = &(method_), .value = &(method_), .key_setting = { __VA_ARGS__ }, .value_setting = { __VA_ARGS__ }

#define PER_TOKEN(name_, method_, bits_)                                                                     \
    {                                                                                                        \
        .name = name_, .group_tokens = 1, BOTH(method_, .bits = bits_)                                       \
    }

#define SCOPED(name_, method_, scope_)                                                                       \
    {                                                                                                        \
        .name = name_, .group_tokens = (scope_) == LOWKEY_PER_PAGE ? 64 : 1,                                 \
        .wants = (scope_) == LOWKEY_PER_TENSOR || (scope_) == LOWKEY_PER_HEAD ? LOWKEY_PEER_FITS : 0,        \
        BOTH(method_, .scope = scope_)                                                                       \
    }

#define PRODUCT(name_, bits_)                                                                                \
    {                                                                                                        \
        .name = name_, .group_tokens = 1, .key = &lowkey_peer_turboquant_product,                            \
        .key_setting = { .bits = bits_ }, .value = &lowkey_peer_turboquant, .value_setting = {               \
            .bits = bits_                                                                                    \
        }                                                                                                    \
    }

#define COUPLED(name_, channels_)                                                                            \
    {                                                                                                        \
        .name = name_, .group_tokens = 1, .before_rope = 1,                                                  \
        .wants = LOWKEY_PEER_FITS | LOWKEY_PEER_GRADIENTS, BOTH(lowkey_peer_coupled, .group = channels_)     \
    }

#define KIVI(name_, bits_, window_)                                                                          \
    {                                                                                                        \
        .name = name_, .group_tokens = 32, .window = window_, .window_blocks = window_,                      \
        .key = &lowkey_peer_channel_groups, .key_setting = { .bits = bits_, .group = 32 },                   \
        .value = &lowkey_peer_token_groups, .value_setting = {                                               \
            .bits = bits_,                                                                                   \
            .group = 32                                                                                      \
        }                                                                                                    \
    }

#define KITTY(name_, share_, window_)                                                                        \
    {                                                                                                        \
        .name = name_, .group_tokens = 128, .window = window_, .window_blocks = window_,                     \
        .key = &lowkey_peer_kitty_keys, .key_setting = { .bits = 2, .group = 128, .rate = share_ },          \
        .value = &lowkey_peer_token_groups, .value_setting = {                                               \
            .bits = 2,                                                                                       \
            .group = 128                                                                                     \
        }                                                                                                    \
    }

#define SQUAT(name_, bits_, window_)                                                                         \
    {                                                                                                        \
        .name = name_, .group_tokens = 32, .window = window_, .window_blocks = window_,                      \
        .wants = LOWKEY_PEER_FITS | LOWKEY_PEER_QUERIES, .key = &lowkey_peer_squat_keys,                     \
        .key_setting = { .bits = bits_, .group = 32 }, .value = &lowkey_peer_token_groups,                   \
        .value_setting = {                                                                                   \
            .bits = bits_,                                                                                   \
            .group = 32                                                                                      \
        }                                                                                                    \
    }

#define RATEQUANT(name_, rate_)                                                                              \
    {                                                                                                        \
        .name = name_, .group_tokens = 32, .wants = LOWKEY_PEER_FITS | LOWKEY_PEER_GRADIENTS,                \
        BOTH(lowkey_peer_ratequant, .group = 32, .rate = rate_)                                              \
    }

#define BLOCK_GTQ(name_, bits_)                                                                              \
    {                                                                                                        \
        .name = name_, .group_tokens = 1, .before_rope = 1, .wants = LOWKEY_PEER_FITS | LOWKEY_PEER_QUERIES, \
        BOTH(lowkey_peer_block_gtq, .bits = bits_)                                                           \
    }

#define OSCAR(name_, window_)                                                                                \
    {                                                                                                        \
        .name = name_, .group_tokens = 1, .window = window_,                                                 \
        .wants = LOWKEY_PEER_FITS | LOWKEY_PEER_QUERIES, .key = &lowkey_peer_oscar,                          \
        .key_setting = { .bits = 2, .group = 128, .rate = 0.96 }, .value = &lowkey_peer_oscar,               \
        .value_setting = {                                                                                   \
            .bits = 2,                                                                                       \
            .group = 128,                                                                                    \
            .rate = 0.92                                                                                     \
        }                                                                                                    \
    }

#define WATERSIC(name_, rate_)                                                                               \
    {                                                                                                        \
        .name = name_, .group_tokens = 1, .wants = LOWKEY_PEER_FITS | LOWKEY_PEER_QUERIES,                   \
        BOTH(lowkey_peer_watersic, .rate = rate_)                                                            \
    }

static const struct lowkey_peer_format formats[] = {
    PER_TOKEN("q8_0", lowkey_peer_q8_0, 8),
    PER_TOKEN("q4_0", lowkey_peer_q4_0, 4),
    SCOPED("fp8-e4m3", lowkey_peer_e4m3, LOWKEY_PER_NOTHING),
    SCOPED("fp8-e4m3-tensor", lowkey_peer_e4m3, LOWKEY_PER_TENSOR),
    SCOPED("fp8-e4m3-head", lowkey_peer_e4m3, LOWKEY_PER_HEAD),
    SCOPED("fp8-e4m3-page", lowkey_peer_e4m3, LOWKEY_PER_PAGE),
    SCOPED("fp8-e4m3-token", lowkey_peer_e4m3, LOWKEY_PER_TOKEN),
    SCOPED("fp8-e5m2", lowkey_peer_e5m2, LOWKEY_PER_NOTHING),
    SCOPED("fp8-e5m2-tensor", lowkey_peer_e5m2, LOWKEY_PER_TENSOR),
    SCOPED("fp8-e5m2-head", lowkey_peer_e5m2, LOWKEY_PER_HEAD),
    SCOPED("fp8-e5m2-page", lowkey_peer_e5m2, LOWKEY_PER_PAGE),
    SCOPED("fp8-e5m2-token", lowkey_peer_e5m2, LOWKEY_PER_TOKEN),
    SCOPED("nvfp4", lowkey_peer_nvfp4, LOWKEY_PER_NOTHING),
    SCOPED("nvfp4-tensor", lowkey_peer_nvfp4, LOWKEY_PER_TENSOR),
    SCOPED("nvfp4-head", lowkey_peer_nvfp4, LOWKEY_PER_HEAD),
    SCOPED("nvfp4-page", lowkey_peer_nvfp4, LOWKEY_PER_PAGE),
    SCOPED("nvfp4-token", lowkey_peer_nvfp4, LOWKEY_PER_TOKEN),
    PER_TOKEN("int-4", lowkey_peer_int, 4),
    PER_TOKEN("int-3", lowkey_peer_int, 3),
    PER_TOKEN("int-2", lowkey_peer_int, 2),
    PER_TOKEN("nf-4", lowkey_peer_nf, 4),
    PER_TOKEN("nf-3", lowkey_peer_nf, 3),
    PER_TOKEN("nf-2", lowkey_peer_nf, 2),
    PER_TOKEN("turboquant-4", lowkey_peer_turboquant, 4),
    PER_TOKEN("turboquant-3", lowkey_peer_turboquant, 3),
    PER_TOKEN("turboquant-2", lowkey_peer_turboquant, 2),
    PRODUCT("turboquant-prod-4", 4),
    PRODUCT("turboquant-prod-3", 3),
    PRODUCT("turboquant-prod-2", 2),
    COUPLED("cq-2c8b", 2),
    COUPLED("cq-4c8b", 4),
    COUPLED("cq-8c8b", 8),
    KIVI("kivi-4-g32", 4, 0),
    KIVI("kivi-3-g32", 3, 0),
    KIVI("kivi-2-g32", 2, 0),
    KIVI("kivi-4-g32-w128", 4, 128),
    KIVI("kivi-3-g32-w128", 3, 128),
    KIVI("kivi-2-g32-w128", 2, 128),
    KITTY("kitty-2-12", 0.125, 0),
    KITTY("kitty-2-25", 0.25, 0),
    KITTY("kitty-2-25-w128", 0.25, 128),
    SQUAT("squat-2", 2, 0),
    SQUAT("squat-2-w128", 2, 128),
    RATEQUANT("ratequant-2.5", 2.5),
    RATEQUANT("ratequant-3", 3),
    BLOCK_GTQ("block-gtq-2", 2),
    BLOCK_GTQ("block-gtq-3", 3),
    OSCAR("oscar-2", 0),
    OSCAR("oscar-2-w256", 256),
    WATERSIC("watersic-2", 2),
    WATERSIC("watersic-2.5", 2.5),
    WATERSIC("watersic-3", 3),
};
enum { N_FORMATS = sizeof formats / sizeof formats[0] };

const struct lowkey_peer_format *lowkey_peer_find(const char *name)
{
    for (int i = 0; i < N_FORMATS; i++)
        if (strcmp(formats[i].name, name) == 0) return &formats[i];
    return NULL;
}

int lowkey_peer_known(const char *name)
{
    return lowkey_peer_find(name) != NULL;
}

const char *lowkey_peer_name(int i)
{
    return i >= 0 && i < N_FORMATS ? formats[i].name : NULL;
}
