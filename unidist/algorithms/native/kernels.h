/* Element-wise reduction of several arrays into one or more. No state, no Python. */
#ifndef UNIDIST_KERNELS_H
#define UNIDIST_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* The order is that of unidist.buffer.DType; Python builds its tables from the names below. */
enum ud_dtype {
    UD_BOOL, UD_UINT8, UD_INT8, UD_UINT16, UD_INT16, UD_UINT32, UD_INT32, UD_UINT64, UD_INT64,
    UD_FLOAT16, UD_BFLOAT16, UD_FLOAT32, UD_FLOAT64, UD_COMPLEX64, UD_COMPLEX128, UD_NUM_DTYPES
};
enum ud_redop { UD_SUM, UD_PRODUCT, UD_MIN, UD_MAX, UD_NUM_REDOPS };

extern const char *const ud_dtype_names[UD_NUM_DTYPES];
extern const char *const ud_redop_names[UD_NUM_REDOPS];
extern const size_t ud_dtype_bytes[UD_NUM_DTYPES];

/* targets[j][i] = scale * (sources[0][i] op sources[1][i] op ...), for i < count and every j.
 *
 * Sources are combined in the order given, so that whoever computes an element gets the same bits. 16-bit
 * floats are combined in float32 and rounded once. Integers wrap around; a scale other than 1 is applied in
 * double and truncated toward zero. MIN and MAX propagate NaN. A target may be one of the sources.
 * past_caches: targets are stored without a detour through the caches, for what this core does not read again soon.
 * Returns 0, or -1 for a combination that has no meaning (MIN or MAX of complex numbers). */
int ud_reduce(char *const *targets, int num_targets, const char *const *sources, int num_sources,
              size_t count, int dtype, int op, double scale, int past_caches);

/* Copies without a detour through the caches, where the processor can: a store that goes past them does not first
 * read what it overwrites. For large blocks that this core does not read again soon. */
void ud_copy(char *target, const char *source, size_t nbytes);

#endif
