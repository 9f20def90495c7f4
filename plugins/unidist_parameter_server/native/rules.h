/* The rules of `unidist_parameter_server.optimizers` on blocks of memory. No state, no Python.
 *
 * The operations and their order are those of the numpy code, and nothing is contracted to a fused multiply-add
 * (setup.py says so to the compiler): both give the same bits, on every processor. */
#ifndef UNIDIST_PS_RULES_H
#define UNIDIST_PS_RULES_H

#include <stddef.h>
#include <stdint.h>

enum ps_kind { PS_ADD, PS_MOMENTUM, PS_VELOCITY, PS_ADAGRAD, PS_ADAM, PS_NUM_KINDS };
enum { PS_NUM_OPTIONS = 9, PS_MAX_SLOTS = 2 };
enum ps_type { PS_FLOAT32, PS_FLOAT64 };

/* A rule with its options, in the order of the dataclass's fields; all numbers are doubles, as Python passes them. */
struct ps_rule {
    double kind;
    double options[PS_NUM_OPTIONS];
};

extern const char *const ps_kind_names[PS_NUM_KINDS];
extern const int ps_num_options[PS_NUM_KINDS];

/* Writes the new `count` values and slots, which may be in the memory of the old ones. `updates`: number of this
 * update, from 1. `num_slots` may be 0 for a rule that then keeps none (PS_ADD, and the two with momentum, without
 * it). */
void ps_apply_rule(const struct ps_rule *rule, enum ps_type type, const void *values, const void *change,
                   void *const *slots, void *new_values, void *const *new_slots, int num_slots, size_t count,
                   int64_t updates, double factor);

/* target = scale * (sources[0] + sources[1] + ...), added in this order. */
void ps_mean(enum ps_type type, void *target, const char *const *sources, int num_sources, size_t count);

#endif
