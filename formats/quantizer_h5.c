/* quantizer_h5.c - quantizer.h5: what a runtime needs is read into a description, which lowkey_quantizer_create then
 * checks value by value; the rest goes to the fit record. One table says which arrays there are. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/codes.h"
#include "formats/fit_record_h5.h"
#include "formats/geometry.h"
#include "runtime/error.h"

#define SIDE(member) .name = #member, .offset = offsetof(lowkey_side_desc, member)
static const struct lowkey_field side_fields[] = {
    { SIDE(bits), .type = LOWKEY_FIELD_U8, .when = LOWKEY_FIELD_ALWAYS, .high = 16 },
    { SIDE(order), .type = LOWKEY_FIELD_U16, .when = LOWKEY_FIELD_ALWAYS, .high = 255 },
    { SIDE(n_entries), .type = LOWKEY_FIELD_U8, .when = LOWKEY_FIELD_TABLE, .high = LOWKEY_MAX_TABLE },
    { SIDE(table), .type = LOWKEY_FIELD_F32, .shape = LOWKEY_FIELD_HDE, .when = LOWKEY_FIELD_TABLE },
    { SIDE(boundary), .type = LOWKEY_FIELD_F32, .shape = LOWKEY_FIELD_HDE_1, .when = LOWKEY_FIELD_BOUNDARY },
    { SIDE(center), .type = LOWKEY_FIELD_F32, .when = LOWKEY_FIELD_ALWAYS },
    { SIDE(exponent), .type = LOWKEY_FIELD_I16, .when = LOWKEY_FIELD_ALWAYS, .low = -126, .high = 127 },
    { SIDE(rule_scale), .type = LOWKEY_FIELD_F32, .when = LOWKEY_FIELD_RULE_8 },
    { SIDE(lower), .type = LOWKEY_FIELD_F32, .when = LOWKEY_FIELD_ALWAYS },
    { SIDE(upper), .type = LOWKEY_FIELD_F32, .when = LOWKEY_FIELD_ALWAYS },
    { SIDE(metric_weight), .type = LOWKEY_FIELD_F32, .when = LOWKEY_FIELD_TRELLIS },
    { SIDE(factor), .type = LOWKEY_FIELD_F16, .shape = LOWKEY_FIELD_HDD, .when = LOWKEY_FIELD_FACTOR },
    { 0 },
};
enum { BUDGET_MINOR = 2, TRELLIS_MINOR = 3, TUNED_MINOR = 4 }; /* versions that brought them */
static const char *const side_names[] = { "key", "value", NULL };
static const char *const token_scales[] = { "none", "f16", "f32", NULL }; /* by lowkey_token_scale */
static const char *const outlier_rules[] = { "none", "limit", "rank", NULL }; /* by lowkey_outlier_rule */
static const char *const rules_16[] = { "none", "f16", "bf16", NULL }; /* by lowkey_rule */
static const char *const rules_8[] = { "none", "e4m3", "e5m2", "int8", NULL }; /* from LOWKEY_RULE_E4M3 on */

static struct lowkey_field_sizes sizes_of(const lowkey_layer_desc *layer, int which,
                                          const lowkey_side_desc *side)
{
    return (struct lowkey_field_sizes) {
        .n_heads = layer->n_kv_heads,
        .head_dim = lowkey_side_head_dim(layer, which),
        .n_table = side->table_entries,
        .has = LOWKEY_FIELD_ALWAYS | (side->table_entries > 0 ? LOWKEY_FIELD_TABLE : 0) |
               (side->table_entries > 0 && !side->trellis ? LOWKEY_FIELD_BOUNDARY : 0) |
               (side->trellis ? LOWKEY_FIELD_TRELLIS : 0) |
               (side->rule_8 != LOWKEY_RULE_NONE ? LOWKEY_FIELD_RULE_8 : 0) |
               (side->factor ? LOWKEY_FIELD_FACTOR : 0),
    };
}

/* ---- reading ---- */

static lowkey_status read_side_attributes(lowkey_h5 *file, const char *group, const lowkey_layer_desc *layer,
                                          int which, lowkey_side_desc *side, int *feedback, lowkey_error *err)
{
    const int n = layer->n_kv_heads * lowkey_side_head_dim(layer, which);
    int rule_8, rule_16, token_scale, outlier_rule, major, minor;
    lowkey_h5_version(file, &major, &minor);
    if (minor >= TRELLIS_MINOR)
        LOWKEY_TRY(lowkey_h5_get_small(file, group, "trellis", 0, 4, &side->trellis, err));
    const int most = side->trellis ? LOWKEY_MAX_TABLE : LOWKEY_MAX_TABLE / 2;
    LOWKEY_TRY(lowkey_h5_get_small(file, group, "table_entries", 0, most, &side->table_entries, err));
    if (side->table_entries == 1)
        return lowkey_h5_fail(file, err, "%s: attribute table_entries: expected 0 or 2 to %d, found 1", group, most);
    LOWKEY_TRY(lowkey_h5_get_choice(file, group, "rule_8", rules_8, &rule_8, err));
    LOWKEY_TRY(lowkey_h5_get_choice(file, group, "rule_16", rules_16, &rule_16, err));
    LOWKEY_TRY(lowkey_h5_get_choice(file, group, "token_scale", token_scales, &token_scale, err));
    side->rule_8 = rule_8 ? (lowkey_rule)(LOWKEY_RULE_E4M3 + rule_8 - 1) : LOWKEY_RULE_NONE;
    side->rule_16 = (lowkey_rule)rule_16;
    side->token_scale = (lowkey_token_scale)token_scale;
    /* In memory 0 asks for the default where there is a scale; a file has no defaults. */
    LOWKEY_TRY(lowkey_h5_get_small(file, group, "scale_block", token_scale ? 8 : 0, token_scale ? n : 0,
                                   &side->scale_block, err));
    LOWKEY_TRY(lowkey_h5_get_choice(file, group, "outlier_rule", outlier_rules, &outlier_rule, err));
    side->outlier_rule = (lowkey_outlier_rule)outlier_rule;
    LOWKEY_TRY(lowkey_h5_get_small(file, group, "outlier_rank", 0, n, &side->outlier_rank, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, group, "outlier_cap", 0, n, &side->outlier_cap, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, group, "outlier_page_capacity", 0, UINT16_MAX,
                                   &side->outlier_page_capacity, err));
    return lowkey_h5_get_small(file, group, "feedback", 0, 1, feedback, err);
}

static lowkey_status read_side(lowkey_h5 *file, const lowkey_layer_desc *layer, int which,
                               lowkey_side_desc *side, struct lowkey_side_report *report,
                               struct lowkey_pool *pool, struct lowkey_pool *report_pool, lowkey_error *err)
{
    int major, minor;
    lowkey_h5_version(file, &major, &minor);
    const char *const attributes[] = {
        "table_entries",
        "rule_8",
        "rule_16",
        "token_scale",
        "scale_block",
        "outlier_rule",
        "outlier_rank",
        "outlier_cap",
        "outlier_page_capacity",
        "feedback",
        LOWKEY_REPORT_SIDE_ATTRIBUTES,
        minor < TRELLIS_MINOR ? NULL : "trellis",
        NULL,
    };
    static const char *const others[] = { "report", NULL };
    char group[LOWKEY_H5_MAX_PATH];
    int feedback;
    lowkey_h5_layer_path(layer->index, side_names[which], group);
    *side = (lowkey_side_desc) { .struct_size = sizeof *side };
    LOWKEY_TRY(read_side_attributes(file, group, layer, which, side, &feedback, err));
    struct lowkey_field_sizes sizes = sizes_of(layer, which, side);
    if (feedback) sizes.has |= LOWKEY_FIELD_FACTOR;
    LOWKEY_TRY(lowkey_fields_refuse_others(file, group, side_fields, &sizes, others, attributes, err));
    LOWKEY_TRY(lowkey_fields_read(file, group, side_fields, &sizes, side, pool, err));
    return lowkey_report_read(file, group, &sizes, report, report_pool, err);
}

/* What reading gathers. */
struct gathered {
    lowkey_quantizer_desc desc;
    struct lowkey_pool pool; /* what desc points to */
    struct lowkey_record_box *box;
};

static lowkey_status read_root(lowkey_h5 *file, struct gathered *g, int **layer_index, lowkey_error *err)
{
    static const char *const objects[] = { "layer_index", "sample_sha256", "fit", "layers", NULL };
    static const char *const attributes[] = { "n_layers",      "model_name", "model_sha256",
                                              "n_sink_tokens", "sink_rule",  NULL };
    static const char *const sink_rules[] = { "f16", "bf16", NULL };
    int sink_rule;
    char *model_name;
    lowkey_quantizer_desc *desc = &g->desc;
    *desc = (lowkey_quantizer_desc) { .struct_size = sizeof *desc };
    LOWKEY_TRY(lowkey_h5_refuse_others(file, "/", objects, attributes, err));
    LOWKEY_TRY(
        lowkey_h5_read_identity(file, &g->box->record.n_model_layers, &model_name, desc->model_sha256, err));
    LOWKEY_TRY(lowkey_pool_own(&g->pool, model_name, err));
    desc->model_name = model_name;
    LOWKEY_TRY(
        lowkey_h5_get_small(file, "/", "n_sink_tokens", 0, LOWKEY_PAGE_TOKENS, &desc->n_sink_tokens, err));
    LOWKEY_TRY(lowkey_h5_get_choice(file, "/", "sink_rule", sink_rules, &sink_rule, err));
    desc->sink_rule = sink_rule ? LOWKEY_RULE_BF16 : LOWKEY_RULE_F16;
    LOWKEY_TRY(
        lowkey_h5_read_layer_index(file, g->box->record.n_model_layers, &desc->n_layers, layer_index, err));
    return lowkey_pool_own(&g->pool, *layer_index, err);
}

static lowkey_status read_layer(lowkey_h5 *file, struct gathered *g, int index, lowkey_layer_desc *layer,
                                struct lowkey_side_report reports[2], lowkey_error *err)
{
    LOWKEY_TRY(lowkey_h5_read_geometry(file, index, layer, err));
    LOWKEY_TRY(lowkey_pool_own(&g->pool, (void *)layer->rope_inv_freq, err));
    LOWKEY_TRY(lowkey_h5_refuse_layer_others(file, layer, side_names, err));
    LOWKEY_TRY(read_side(file, layer, 0, &layer->key, &reports[0], &g->pool, &g->box->pool, err));
    return read_side(file, layer, 1, &layer->value, &reports[1], &g->pool, &g->box->pool, err);
}

static lowkey_status read_all(lowkey_h5 *file, struct gathered *g, lowkey_error *err)
{
    int *layer_index;
    void *layers, *reports;
    LOWKEY_TRY(read_root(file, g, &layer_index, err));
    LOWKEY_TRY(lowkey_record_read(file, g->box, err));
    LOWKEY_TRY(lowkey_pool_take(&g->pool, (size_t)g->desc.n_layers, sizeof(lowkey_layer_desc), &layers, err));
    LOWKEY_TRY(lowkey_pool_take(&g->box->pool, (size_t)g->desc.n_layers, sizeof g->box->record.reports[0],
                                &reports, err));
    g->desc.layers = layers;
    g->box->record.reports = reports;
    for (int i = 0; i < g->desc.n_layers; i++)
        LOWKEY_TRY(read_layer(file, g, layer_index[i], (lowkey_layer_desc *)layers + i,
                              g->box->record.reports[i], err));
    return LOWKEY_OK;
}

static lowkey_status read_file(const char *path, const lowkey_allocator *allocator,
                               lowkey_quantizer **quantizer, struct lowkey_fit_record **record,
                               lowkey_error *err)
{
    struct gathered g = { .box = calloc(1, sizeof *g.box) };
    lowkey_h5 *file = NULL;
    *quantizer = NULL;
    if (!g.box) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory for %zu bytes", path, sizeof *g.box);
    lowkey_status status = lowkey_h5_open(path, "quantizer", &file, err);
    if (status == LOWKEY_OK) {
        status = read_all(file, &g, err);
        if (status == LOWKEY_OK)
            status = lowkey_h5_blame(file, lowkey_quantizer_create(&g.desc, allocator, quantizer, err), err);
    }
    lowkey_h5_close(file);
    lowkey_pool_free(&g.pool);
    if (status == LOWKEY_OK && record)
        *record = &g.box->record;
    else
        lowkey_fit_record_free(&g.box->record);
    return status;
}

lowkey_status lowkey_quantizer_open(const char *path, const lowkey_allocator *allocator,
                                    lowkey_quantizer **out, lowkey_error *err)
{
    if (out) *out = NULL;
    if (!path || !out)
        return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_quantizer_open: %s is NULL", path ? "out" : "path");
    return read_file(path, allocator, out, NULL, err);
}

lowkey_status lowkey_quantizer_read(const char *path, lowkey_quantizer **quantizer,
                                    struct lowkey_fit_record **record, lowkey_error *err)
{
    *record = NULL;
    return read_file(path, NULL, quantizer, record, err);
}

/* ---- writing ---- */

static lowkey_status write_side(lowkey_h5 *file, const lowkey_layer_desc *layer, int which,
                                const lowkey_side_desc *side, const struct lowkey_side_report *report,
                                lowkey_error *err)
{
    char group[LOWKEY_H5_MAX_PATH];
    lowkey_h5_layer_path(layer->index, side_names[which], group);
    const struct lowkey_field_sizes sizes = sizes_of(layer, which, side);
    int major, minor;
    lowkey_h5_version(file, &major, &minor);
    const struct {
        const char *name;
        int value;
    } numbers[] = {
        { "table_entries", side->table_entries },
        { "scale_block", side->scale_block },
        { "outlier_rank", side->outlier_rank },
        { "outlier_cap", side->outlier_cap },
        { "outlier_page_capacity", side->outlier_page_capacity },
        { "feedback", side->factor != NULL },
        { "trellis", side->trellis },
    };
    const size_t n_numbers = sizeof numbers / sizeof numbers[0] - (minor < TRELLIS_MINOR);
    const struct {
        const char *name, *value;
    } words[] = {
        { "rule_8", rules_8[side->rule_8 == LOWKEY_RULE_NONE ? 0 : side->rule_8 - LOWKEY_RULE_E4M3 + 1] },
        { "rule_16", rules_16[side->rule_16] },
        { "token_scale", token_scales[side->token_scale] },
        { "outlier_rule", outlier_rules[side->outlier_rule] },
    };
    LOWKEY_TRY(lowkey_h5_put_group(file, group, err));
    for (size_t i = 0; i < n_numbers; i++)
        LOWKEY_TRY(lowkey_h5_put_int(file, group, numbers[i].name, numbers[i].value, err));
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        LOWKEY_TRY(lowkey_h5_put_string(file, group, words[i].name, words[i].value, err));
    LOWKEY_TRY(lowkey_fields_write(file, group, side_fields, &sizes, side, err));
    return lowkey_report_write(file, group, &sizes, report, err);
}

static lowkey_status write_root(lowkey_h5 *file, const lowkey_quantizer_desc *desc,
                                const struct lowkey_fit_record *record, lowkey_error *err)
{
    int *layer_index = malloc((size_t)desc->n_layers * sizeof *layer_index);
    if (!layer_index)
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d layer numbers", desc->n_layers);
    for (int i = 0; i < desc->n_layers; i++) layer_index[i] = desc->layers[i].index;
    const lowkey_status status = lowkey_h5_write_ints(file, "/layer_index", LOWKEY_DIMS(desc->n_layers),
                                                      layer_index, sizeof *layer_index, 1, err);
    free(layer_index);
    LOWKEY_TRY(status);
    LOWKEY_TRY(
        lowkey_h5_write_identity(file, record->n_model_layers, desc->model_name, desc->model_sha256, err));
    LOWKEY_TRY(lowkey_h5_put_int(file, "/", "n_sink_tokens", desc->n_sink_tokens, err));
    return lowkey_h5_put_string(file, "/", "sink_rule", desc->sink_rule == LOWKEY_RULE_BF16 ? "bf16" : "f16",
                                err);
}

/* desc is a quantizer's own: checked, every default filled in. */
static lowkey_status write_all(lowkey_h5 *file, const lowkey_quantizer_desc *desc,
                               const struct lowkey_fit_record *record, lowkey_error *err)
{
    LOWKEY_TRY(write_root(file, desc, record, err));
    LOWKEY_TRY(lowkey_record_write(file, record, err));
    LOWKEY_TRY(lowkey_h5_put_group(file, "/layers", err));
    for (int i = 0; i < desc->n_layers; i++) {
        const lowkey_layer_desc *layer = &desc->layers[i];
        char group[LOWKEY_H5_MAX_PATH];
        lowkey_h5_layer_path(layer->index, NULL, group);
        LOWKEY_TRY(lowkey_h5_put_group(file, group, err));
        LOWKEY_TRY(lowkey_h5_write_geometry(file, layer, err));
        LOWKEY_TRY(write_side(file, layer, 0, &layer->key, &record->reports[i][0], err));
        LOWKEY_TRY(write_side(file, layer, 1, &layer->value, &record->reports[i][1], err));
    }
    return LOWKEY_OK;
}

/* What was written is read back, checked as any reader checks it, and its arrays compared. */
static lowkey_status verify(void *arg, const char *path, lowkey_error *err)
{
    const lowkey_quantizer_desc *desc = arg;
    lowkey_quantizer *quantizer;
    LOWKEY_TRY(lowkey_quantizer_open(path, NULL, &quantizer, err));
    const lowkey_quantizer_desc *got = lowkey_quantizer_describe(quantizer);
    const char *differs = NULL;
    for (int i = 0; i < 2 * desc->n_layers && !differs; i++) {
        const lowkey_layer_desc *layer = &desc->layers[i / 2];
        const lowkey_side_desc *side = lowkey_side_of(layer, i % 2);
        const struct lowkey_field_sizes sizes = sizes_of(layer, i % 2, side);
        differs = lowkey_fields_differ(side_fields, &sizes, side, lowkey_side_of(&got->layers[i / 2], i % 2));
    }
    lowkey_quantizer_free(quantizer);
    return differs ? lowkey_fail(err, LOWKEY_EIO, "%s: %s does not read back as written", path, differs)
                   : LOWKEY_OK;
}

/* The least version that names all that is there. */
static int minor_of(const lowkey_quantizer_desc *desc, const struct lowkey_fit_record *record)
{
    if (record->tuned_steps > 0) return TUNED_MINOR;
    for (int i = 0; i < desc->n_layers; i++)
        if (desc->layers[i].key.trellis || desc->layers[i].value.trellis) return TRELLIS_MINOR;
    return record->budget > 0 ? BUDGET_MINOR : LOWKEY_FORMAT_WRITTEN_MINOR;
}

lowkey_status lowkey_quantizer_write(const char *path, const lowkey_quantizer_desc *desc,
                                     const struct lowkey_fit_record *record, lowkey_error *err)
{
    lowkey_quantizer *quantizer;
    lowkey_h5 *file;
    if (!path || !record || !record->reports)
        return lowkey_fail(
            err, LOWKEY_EINVAL,
            "lowkey_quantizer_write: expected a path, a record and its reports, found one missing");
    LOWKEY_TRY(lowkey_quantizer_create(desc, NULL, &quantizer, err));
    const lowkey_quantizer_desc *filled = lowkey_quantizer_describe(quantizer);
    lowkey_status status = lowkey_h5_create_minor(path, "quantizer", minor_of(filled, record), &file, err);
    if (status == LOWKEY_OK) {
        status = write_all(file, filled, record, err);
        if (status == LOWKEY_OK)
            status = lowkey_h5_commit(file, verify, (void *)filled, err);
        else
            lowkey_h5_abandon(file);
    }
    lowkey_quantizer_free(quantizer);
    return status;
}
