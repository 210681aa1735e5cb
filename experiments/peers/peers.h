/* peers.h - other people's formats as stores (lm/store.h), simulated: quantize, dequantize. Each is checked against its own
 * paper or source by known answers in tests/test_peers*.c. A name selects format and settings: "kivi-2-g32", "turboquant-3",
 * "fp8-e4m3-head" and so on; README.md in this folder lists them with their source. */
#ifndef LOWKEY_PEERS_H
#define LOWKEY_PEERS_H

#include "experiments/lm/store.h"
#include "formats/model.h"

typedef struct lowkey_peer lowkey_peer;

struct lowkey_peer_bits { /* of an element, payload as the format's authors count it: codes, scales, zeros */
    double key, value;
};

/* 0: no such name. */
int lowkey_peer_known(const char *name);
/* The i-th name of those that are evaluated by default, NULL behind the last. */
const char *lowkey_peer_name(int i);

/* activations: captures of the model for formats that calibrate, paths[n_paths]; a format that needs them and has none is
 * refused by name, as is a model whose geometry does not suit it. The model is borrowed. Deterministic. */
lowkey_status lowkey_peer_open(const char *name, const lowkey_model *model, int n_paths, const char *const *paths,
                               int n_threads, lowkey_peer **out, lowkey_error *err);
void lowkey_peer_close(lowkey_peer *peer); /* takes NULL */
struct lowkey_store lowkey_peer_store(lowkey_peer *peer);
struct lowkey_peer_bits lowkey_peer_bits(const lowkey_peer *peer);

#endif
