/* Shards of a store in shared memory: locks, undo log, pushes, synchronous steps and fetches. No Python.
 *
 * The layout is that of `unidist_parameter_server.store.memory`, which says why nothing is torn when a process is
 * killed; `restore` there and here are the same. All structures consist of 8-byte numbers, addresses among them, and
 * are filled by Python. */
#ifndef UNIDIST_PS_SHARDS_H
#define UNIDIST_PS_SHARDS_H

#include "rules.h"

enum { PS_VERSION, PS_NOTE, PS_SAVED, PS_WORKER_BITS = 16 }; /* numbers in a shard's header */
enum { PS_MOST_SOURCES = 256 };

struct ps_piece {
    int64_t parameter, start, stop;
};

struct ps_shard {
    int64_t header, contents; /* the contents begin with the values */
    int64_t slots[PS_MAX_SLOTS], counts, numbers, log;
    int64_t type, count;
    int64_t memory, begin; /* of its first element in flat memory */
    int64_t first_piece, num_pieces;
};

struct ps_store {
    int64_t locks; /* file descriptor */
    int64_t worker, num_workers, num_slots, num_memories, log_length;
    int64_t journals; /* address of one address for each worker */
    int64_t shards, pieces; /* addresses of arrays */
    int64_t streams; /* whether what is fetched does not fit into the caches */
};

/* What is applied to shards. */
struct ps_change {
    const struct ps_rule *rules;
    const int32_t *rule_of;   /* for each parameter */
    const uint8_t *present;   /* for each parameter */
    const int64_t *sources;   /* addresses of flat memories: `num_memories` for each of `num_sources`; their mean is
                                 applied */
    int64_t num_sources;
    double factor;
};

/* Each of these goes over the shards `order[0]` to `order[num - 1]`, skips those whose lock another process holds, and
 * returns how many these are; their numbers are then the first ones in `order`. -1: errno says why locking failed.
 *
 * targets: for each piece the address that its new values are copied to, or NULL: nowhere.
 * versions: for each shard, set to its version. */

/* Applies push `number` of this worker, if it was not applied before. read_versions: for each shard the version that
 * this worker has read, if the factor is to be divided by the staleness; else NULL. */
int64_t ps_push(const struct ps_store *store, int64_t *order, int64_t num, const struct ps_change *change,
                int64_t number, const int64_t *read_versions, const int64_t *targets, int64_t *versions);

/* Applies synchronous step `label` to shards that do not have it. A shard to which this call has applied it, and whose
 * values it has copied, gets its version in `versions`; the others are left out there. */
int64_t ps_step(const struct ps_store *store, int64_t *order, int64_t num, const struct ps_change *change,
                int64_t label, const int64_t *targets, int64_t *versions);

/* Copies the values of shards. */
int64_t ps_fetch(const struct ps_store *store, int64_t *order, int64_t num, const int64_t *targets, int64_t *versions);

#endif
