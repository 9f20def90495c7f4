/* Element-wise reduction. Each block is combined in a small accumulator that stays in the first-level cache,
 * so main memory sees every source read once and every target written once. */
#include "kernels.h"

#include <math.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif
#include <string.h>

#define BLOCK 2048 /* elements of the accumulator */

/* Which clone to take is decided before a sanitizer has started, by code that it has instrumented: so there without. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORIZED
#endif

const char *const ud_dtype_names[UD_NUM_DTYPES] = {
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128"};
const char *const ud_redop_names[UD_NUM_REDOPS] = {"sum", "product", "min", "max"};
const size_t ud_dtype_bytes[UD_NUM_DTYPES] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16};

#define STREAM_BYTES 65536 /* below this the caches serve better */

/* Stores that go past the caches, where the processor has them: they do not first read what they overwrite. */
static void stream(char *target, const char *source, size_t nbytes) {
#if defined(__x86_64__)
    size_t head = -(uintptr_t)target & 63; /* whole cache lines are streamed */
    head = head < nbytes ? head : nbytes;
    memcpy(target, source, head);
    target += head, source += head, nbytes -= head;
    size_t lines = nbytes / 64;
    for (size_t i = 0; i < lines; i++, target += 64, source += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)source), b = _mm_loadu_si128((const __m128i *)source + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)source + 2), d = _mm_loadu_si128((const __m128i *)source + 3);
        _mm_stream_si128((__m128i *)target, a), _mm_stream_si128((__m128i *)target + 1, b);
        _mm_stream_si128((__m128i *)target + 2, c), _mm_stream_si128((__m128i *)target + 3, d);
    }
    _mm_sfence();
    nbytes -= lines * 64;
#endif
    memcpy(target, source, nbytes);
}

static void copy(char *target, const char *source, size_t nbytes) {
    if (nbytes) memcpy(target, source, nbytes); /* no elements may mean no address */
}

void ud_copy(char *target, const char *source, size_t nbytes) {
    if (nbytes >= STREAM_BYTES) stream(target, source, nbytes);
    else copy(target, source, nbytes);
}

static inline float bits_to_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

static inline float load_bfloat16(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

static inline uint16_t store_bfloat16(float f) { /* round to nearest even; NaN stays a quiet NaN */
    uint32_t bits = float_to_bits(f);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16) | 0x40 : rounded);
}

/* binary16 <-> binary32 without branches, so that the compiler can vectorize the loops: normal numbers by
 * shifting the exponent with a multiplication, subnormal ones by the addition of a magic number. */
static inline float load_float16(uint16_t h) {
    uint32_t w = (uint32_t)h << 16, twice = w + w;
    float normal = bits_to_float((twice >> 4) + (UINT32_C(0xE0) << 23)) * 0x1.0p-112f;
    float subnormal = bits_to_float((twice >> 17) | (UINT32_C(126) << 23)) - 0.5f;
    uint32_t magnitude = twice < (UINT32_C(1) << 27) ? float_to_bits(subnormal) : float_to_bits(normal);
    return bits_to_float((w & UINT32_C(0x80000000)) | magnitude);
}

static inline uint16_t store_float16(float f) {
    uint32_t w = float_to_bits(f), twice = w + w, sign = w & UINT32_C(0x80000000);
    float base = (bits_to_float(w & UINT32_C(0x7FFFFFFF)) * 0x1.0p+112f) * 0x1.0p-110f;
    uint32_t bias = twice & UINT32_C(0xFF000000);
    bias = bias < UINT32_C(0x71000000) ? UINT32_C(0x71000000) : bias;
    base = bits_to_float((bias >> 1) + UINT32_C(0x07800000)) + base;
    uint32_t bits = float_to_bits(base);
    uint32_t magnitude = ((bits >> 13) & 0x7C00) + (bits & 0x0FFF);
    return (uint16_t)((sign >> 16) | (twice > UINT32_C(0xFF000000) ? 0x7E00 : magnitude));
}

#define SAME(x) (x)
#define COMBINE_SUM(a, b) ((a) + (b))
#define COMBINE_PRODUCT(a, b) ((a) * (b))
#define COMBINE_OR(a, b) ((a) | (b))
#define COMBINE_AND(a, b) ((a) & (b))
#define COMBINE_MIN(a, b) ((b) < (a) || (b) != (b) ? (b) : (a))
#define COMBINE_MAX(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))

#define FOLD(COMBINE)                                                       \
    for (int s = 1; s < num_sources; s++) {                                 \
        const STORED *restrict source = (const STORED *)sources[s] + start; \
        for (size_t i = 0; i < n; i++)                                      \
            acc[i] = (ACC)COMBINE(acc[i], (ACC)LOAD(source[i]));            \
    }                                                                       \
    break;

/* One function per element type. STORED: as in memory; ACC: as accumulated. */
#define DEFINE_REDUCE(NAME, SCALE)                                                                       \
    VECTORIZED static void NAME(char *const *targets, int num_targets, const char *const *sources,       \
                                int num_sources, size_t count, int op, double scale, int past_caches) {  \
        ACC acc[BLOCK];                                                                                  \
        STORED out[BLOCK];                                                                               \
        double divisor = rint(1.0 / scale);                                                              \
        int exact = 1.0 / divisor == scale;                                                              \
        (void)exact;                                                                                     \
        for (size_t start = 0; start < count; start += BLOCK) {                                          \
            size_t n = count - start < BLOCK ? count - start : BLOCK;                                    \
            const STORED *first = (const STORED *)sources[0] + start;                                    \
            for (size_t i = 0; i < n; i++) acc[i] = (ACC)LOAD(first[i]);                                 \
            switch (op) {                                                                                \
            case UD_SUM: FOLD(SUM)                                                                       \
            case UD_PRODUCT: FOLD(PRODUCT)                                                               \
            case UD_MIN: FOLD(MINIMUM)                                                                   \
            default: FOLD(MAXIMUM)                                                                       \
            }                                                                                            \
            if (scale != 1.0)                                                                            \
                for (size_t i = 0; i < n; i++) acc[i] = SCALE;                                           \
            for (size_t i = 0; i < n; i++) out[i] = (STORED)STORE(acc[i]);                               \
            for (int t = 0; t < num_targets; t++)                                                        \
                (past_caches ? stream : copy)((char *)((STORED *)targets[t] + start), (const char *)out,          \
                                              n * sizeof(STORED));                                        \
        }                                                                                                \
    }

#define SUM COMBINE_SUM
#define PRODUCT COMBINE_PRODUCT
#define MINIMUM COMBINE_MIN
#define MAXIMUM COMBINE_MAX
#define LOAD SAME
#define STORE SAME

#define FLOAT_SCALE ((ACC)(acc[i] * (ACC)scale))
/* A mean must not lose a whole unit to rounding: 49 * (1.0 / 49) is below 1. Scales 1/n divide by n. */
#define INTEGER_SCALE ((ACC)(exact ? (double)acc[i] / divisor : (double)acc[i] * scale))

#define STORED float
#define ACC float
DEFINE_REDUCE(reduce_float32, FLOAT_SCALE)
#undef STORED
#undef ACC
#define STORED double
#define ACC double
DEFINE_REDUCE(reduce_float64, FLOAT_SCALE)
#undef STORED
#undef ACC
#define STORED int8_t
#define ACC int8_t
DEFINE_REDUCE(reduce_int8, INTEGER_SCALE)
#undef STORED
#undef ACC
#define STORED uint8_t
#define ACC uint8_t
DEFINE_REDUCE(reduce_uint8, INTEGER_SCALE)
#undef STORED
#undef ACC
#define STORED int16_t
#define ACC int16_t
DEFINE_REDUCE(reduce_int16, INTEGER_SCALE)
#undef STORED
#undef ACC
#define STORED uint16_t
#define ACC uint16_t
DEFINE_REDUCE(reduce_uint16, INTEGER_SCALE)
#undef STORED
#undef ACC
/* 32- and 64-bit integers add and multiply as unsigned numbers where signed overflow would be undefined:
 * the build passes -fwrapv, so the plain types are safe here. */
#define STORED int32_t
#define ACC int32_t
DEFINE_REDUCE(reduce_int32, INTEGER_SCALE)
#undef STORED
#undef ACC
#define STORED uint32_t
#define ACC uint32_t
DEFINE_REDUCE(reduce_uint32, INTEGER_SCALE)
#undef STORED
#undef ACC
#define STORED int64_t
#define ACC int64_t
DEFINE_REDUCE(reduce_int64, INTEGER_SCALE)
#undef STORED
#undef ACC
#define STORED uint64_t
#define ACC uint64_t
DEFINE_REDUCE(reduce_uint64, INTEGER_SCALE)
#undef STORED
#undef ACC

#define STORED uint16_t
#define ACC float
#undef LOAD
#undef STORE
#define LOAD load_bfloat16
#define STORE store_bfloat16
DEFINE_REDUCE(reduce_bfloat16, FLOAT_SCALE)
#undef LOAD
#undef STORE
#define LOAD load_float16
#define STORE store_float16
DEFINE_REDUCE(reduce_float16, FLOAT_SCALE)
#undef LOAD
#undef STORE
#undef STORED
#undef ACC

/* bool: sum and max are "or", product and min are "and"; any byte other than 0 counts as true. */
#define TRUTH(x) ((x) != 0)
#define LOAD TRUTH
#define STORE SAME
#undef SUM
#undef PRODUCT
#undef MINIMUM
#undef MAXIMUM
#define SUM COMBINE_OR
#define PRODUCT COMBINE_AND
#define MINIMUM COMBINE_AND
#define MAXIMUM COMBINE_OR
#define STORED uint8_t
#define ACC uint8_t
DEFINE_REDUCE(reduce_bool, ((ACC)(acc[i] * scale != 0)))
#undef STORED
#undef ACC

/* Products of complex numbers; sums are sums of twice as many real ones. */
#define DEFINE_COMPLEX_PRODUCT(NAME, REAL)                                                                  \
    static void NAME(char *const *targets, int num_targets, const char *const *sources, int num_sources,    \
                     size_t count, double scale) {                                                          \
        for (size_t i = 0; i < count; i++) {                                                                \
            REAL re = ((const REAL *)sources[0])[2 * i], im = ((const REAL *)sources[0])[2 * i + 1];        \
            for (int s = 1; s < num_sources; s++) {                                                         \
                REAL a = ((const REAL *)sources[s])[2 * i], b = ((const REAL *)sources[s])[2 * i + 1];      \
                REAL product = re * a - im * b;                                                             \
                im = re * b + im * a;                                                                       \
                re = product;                                                                               \
            }                                                                                               \
            for (int t = 0; t < num_targets; t++) {                                                         \
                ((REAL *)targets[t])[2 * i] = (REAL)(re * scale);                                           \
                ((REAL *)targets[t])[2 * i + 1] = (REAL)(im * scale);                                       \
            }                                                                                               \
        }                                                                                                   \
    }
DEFINE_COMPLEX_PRODUCT(product_complex64, float)
DEFINE_COMPLEX_PRODUCT(product_complex128, double)

int ud_reduce(char *const *targets, int num_targets, const char *const *sources, int num_sources,
              size_t count, int dtype, int op, double scale, int past_caches) {
#define CALL(NAME, N) NAME(targets, num_targets, sources, num_sources, N, op, scale, past_caches); return 0
    switch (dtype) {
    case UD_BOOL: CALL(reduce_bool, count);
    case UD_UINT8: CALL(reduce_uint8, count);
    case UD_INT8: CALL(reduce_int8, count);
    case UD_UINT16: CALL(reduce_uint16, count);
    case UD_INT16: CALL(reduce_int16, count);
    case UD_UINT32: CALL(reduce_uint32, count);
    case UD_INT32: CALL(reduce_int32, count);
    case UD_UINT64: CALL(reduce_uint64, count);
    case UD_INT64: CALL(reduce_int64, count);
    case UD_FLOAT16: CALL(reduce_float16, count);
    case UD_BFLOAT16: CALL(reduce_bfloat16, count);
    case UD_FLOAT32: CALL(reduce_float32, count);
    case UD_FLOAT64: CALL(reduce_float64, count);
    case UD_COMPLEX64:
        if (op == UD_SUM) { CALL(reduce_float32, 2 * count); }
        if (op != UD_PRODUCT) return -1;
        product_complex64(targets, num_targets, sources, num_sources, count, scale);
        return 0;
    case UD_COMPLEX128:
        if (op == UD_SUM) { CALL(reduce_float64, 2 * count); }
        if (op != UD_PRODUCT) return -1;
        product_complex128(targets, num_targets, sources, num_sources, count, scale);
        return 0;
    default: return -1;
    }
#undef CALL
}
