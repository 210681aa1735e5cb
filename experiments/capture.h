/* capture.h - run text through a model and write what calibration reads: activations.h5. */
#ifndef LOWKEY_CAPTURE_H
#define LOWKEY_CAPTURE_H

#include "formats/activations.h"
#include "formats/model.h"
#include "formats/tokens.h"

struct lowkey_capture_request {
    const lowkey_model *model;
    const lowkey_tokens *tokens;
    int length, stride; /* of samples, in tokens, as experiments/samples.h cuts */
    int64_t first_sample, n_samples;
    const int *layers; /* [n_layers] rising numbers of the layers to write */
    int n_layers;
    int queries; /* write queries beside keys and values */
    enum lowkey_gradient_labels gradients; /* write gradients of keys and values, of the loss of these; NOT_SAID: none */
    int64_t seed; /* of LABELS_MODEL; each sample draws by it and the sample's hash */
    lowkey_dtype dtype;
    int n_threads; /* the file does not depend on it */
};

/* One file, whole or not there. Streams, and for gradients holds the tape of a sample (lm/gradient.h): memory grows with length, not with n_samples. Shows progress on stderr;
 * LOWKEY_ECANCELLED when interrupted. */
lowkey_status lowkey_capture(const struct lowkey_capture_request *request, const char *path,
                             lowkey_error *err);

/* The same in files of at most per_file samples, OUT.000.h5 for OUT.h5 and so on. A file that is there already and holds
 * the same capture is kept, so that a run that was stopped goes on. on_file: called for each (may be NULL). */
lowkey_status lowkey_capture_parts(const struct lowkey_capture_request *request, const char *path,
                                   int64_t per_file, void (*on_file)(const char *path, int kept),
                                   lowkey_error *err);

#endif
