/* number_h5.c - number types of HDF5 files, and their decoding. HDF5's own conversion is not used: of f16 and
 * bf16 it is slow, and of integers it clamps silently. */
#include <stdio.h>
#include <string.h>

#include "formats/half.h"
#include "formats/parts_h5.h"

struct float_layout {
    enum lowkey_h5_kind kind;
    size_t bytes, exponent_at, exponent_bits, mantissa_bits,
        bias; /* the mantissa is at bit 0, the sign on top */
};

static enum lowkey_h5_kind float_kind(hid_t type)
{
    static const struct float_layout layouts[] = {
        { LOWKEY_H5_F16, 2, 10, 5, 10, 15 },
        { LOWKEY_H5_BF16, 2, 7, 8, 7, 127 },
        { LOWKEY_H5_F32, 4, 23, 8, 23, 127 },
        { LOWKEY_H5_F64, 8, 52, 11, 52, 1023 },
    };
    size_t sign_at, exponent_at, exponent_bits, mantissa_at, mantissa_bits;
    if (H5Tget_fields(type, &sign_at, &exponent_at, &exponent_bits, &mantissa_at, &mantissa_bits) < 0)
        return LOWKEY_H5_OTHER;
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        const struct float_layout *l = &layouts[i];
        if (H5Tget_size(type) == l->bytes && sign_at == 8 * l->bytes - 1 && exponent_at == l->exponent_at &&
            exponent_bits == l->exponent_bits && mantissa_at == 0 && mantissa_bits == l->mantissa_bits &&
            H5Tget_ebias(type) == l->bias && H5Tget_norm(type) == H5T_NORM_IMPLIED)
            return l->kind;
    }
    return LOWKEY_H5_OTHER;
}

static const char *class_words(H5T_class_t class)
{
    switch (class) {
    case H5T_INTEGER: return "integer";
    case H5T_FLOAT: return "float";
    case H5T_STRING: return "string";
    case H5T_ENUM: return "enumeration (a bool of h5py is one)";
    case H5T_COMPOUND: return "compound";
    case H5T_REFERENCE: return "reference";
    case H5T_VLEN: return "variable-length sequence";
    case H5T_ARRAY: return "array";
    default: return "type of another class";
    }
}

struct lowkey_h5_number lowkey_h5_classify(hid_t type, char words[LOWKEY_H5_WORDS])
{
    struct lowkey_h5_number number = { .kind = LOWKEY_H5_OTHER };
    const H5T_class_t class = H5Tget_class(type);
    const size_t bytes = H5Tget_size(type);
    snprintf(words, LOWKEY_H5_WORDS, "%s", class_words(class));
    if (class != H5T_INTEGER && class != H5T_FLOAT) return number;
    const H5T_order_t order = H5Tget_order(type);
    const int plain = (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8) &&
                      H5Tget_precision(type) == 8 * bytes && H5Tget_offset(type) == 0 &&
                      (order == H5T_ORDER_LE || order == H5T_ORDER_BE);
    if (plain) {
        number.kind = class == H5T_INTEGER ? LOWKEY_H5_INT : float_kind(type);
        number.bytes = (int)bytes;
        number.is_signed = class == H5T_INTEGER && H5Tget_sign(type) == H5T_SGN_2;
        number.is_big_endian = order == H5T_ORDER_BE;
    }
    const char *const names[] = {
        [LOWKEY_H5_F16] = "f16", [LOWKEY_H5_BF16] = "bf16", [LOWKEY_H5_F32] = "f32", [LOWKEY_H5_F64] = "f64"
    };
    if (number.kind == LOWKEY_H5_INT)
        snprintf(words, LOWKEY_H5_WORDS, "%sint%d", number.is_signed ? "" : "u", 8 * number.bytes);
    else if (number.kind != LOWKEY_H5_OTHER)
        snprintf(words, LOWKEY_H5_WORDS, "%s", names[number.kind]);
    else
        snprintf(words, LOWKEY_H5_WORDS, "%s of %zu bytes in a layout unknown here", class_words(class),
                 bytes);
    return number;
}

void lowkey_h5_swap(const struct lowkey_h5_number *number, void *raw, size_t n)
{
    if (!number->is_big_endian) return;
    unsigned char *bytes = raw;
    for (size_t i = 0; i < n; i++, bytes += number->bytes) {
        for (int k = 0; k < number->bytes / 2; k++) {
            const unsigned char low = bytes[k];
            bytes[k] = bytes[number->bytes - 1 - k];
            bytes[number->bytes - 1 - k] = low;
        }
    }
}

int lowkey_h5_int_at(const struct lowkey_h5_number *number, const void *raw, size_t i, int64_t *out)
{
    const int bits = 8 * number->bytes;
    uint64_t value = 0;
    memcpy(&value, (const unsigned char *)raw + i * (size_t)number->bytes, (size_t)number->bytes);
    const uint64_t sign = (uint64_t)1 << (bits - 1);
    if (number->is_signed) value = (value ^ sign) - sign; /* extends the sign */
    *out = (int64_t)value;
    return number->is_signed || *out >= 0;
}

double lowkey_h5_double_at(const struct lowkey_h5_number *number, const void *raw, size_t i)
{
    const unsigned char *at = (const unsigned char *)raw + i * (size_t)number->bytes;
    uint16_t half;
    float single;
    double whole;
    switch (number->kind) {
    case LOWKEY_H5_F16: return memcpy(&half, at, sizeof half), (double)lowkey_f16_to_f32(half);
    case LOWKEY_H5_BF16: return memcpy(&half, at, sizeof half), (double)lowkey_bf16_to_f32(half);
    case LOWKEY_H5_F32: return memcpy(&single, at, sizeof single), (double)single;
    default: return memcpy(&whole, at, sizeof whole), whole;
    }
}
