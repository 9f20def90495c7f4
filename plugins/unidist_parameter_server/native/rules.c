#include "rules.h"

#include <math.h>
#include <string.h>

/* Which clone to take is decided before a sanitizer has started, by code that it has instrumented: so there without. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORIZED
#endif
#define INLINED static inline __attribute__((always_inline))

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

enum { NONE, FIRST, LATER }; /* of the momentum: there is none, this update begins it, a later one */

const char *const ps_kind_names[PS_NUM_KINDS] = {"add", "momentum", "velocity", "adagrad", "adam"};
const int ps_num_options[PS_NUM_KINDS] = {0, 5, 4, 7, 9};
static const int kept_slots[PS_NUM_KINDS] = {0, 1, 1, 1, 2}; /* others stay as they are */

#define T float
#define ROOT sqrtf
#define NAME(x) x##_float32
#include "rules_of_type.h"
#undef T
#undef ROOT
#undef NAME
#define T double
#define ROOT sqrt
#define NAME(x) x##_float64
#include "rules_of_type.h"

void ps_apply_rule(const struct ps_rule *rule, enum ps_type type, const void *values, const void *change,
                   void *const *slots, void *new_values, void *const *new_slots, int num_slots, size_t count,
                   int64_t updates, double factor) {
    if (type == PS_FLOAT32)
        apply_float32(rule, values, change, slots, new_values, new_slots, num_slots, count, updates, factor);
    else
        apply_float64(rule, values, change, slots, new_values, new_slots, num_slots, count, updates, factor);
}

void ps_mean(enum ps_type type, void *target, const char *const *sources, int num_sources, size_t count) {
    if (type == PS_FLOAT32) mean_float32(target, sources, num_sources, count);
    else mean_float64(target, sources, num_sources, count);
}
