/* Shards of a store in shared memory: locks, undo log, pushes, synchronous steps and fetches. No Python.
 *
 * The layout is that of `unidist_parameter_server.store.memory`, which says why nothing is torn when a process is
 * killed; `ShardMemory.restore` is `undo` here. All structures consist of 8-byte numbers, addresses among them, and
 * are filled by Python. */
#ifndef UNIDIST_PS_SHARDS_H
#define UNIDIST_PS_SHARDS_H

#include "rules.h"

/* Numbers in a shard's header. PS_MODE: of the change that is being made. PS_SAVED: in mode PS_UNDO the elements that
 * were saved; in mode PS_REDO twice the elements that are done, plus 1 if the new ones of the block up to PS_BLOCK_END
 * are in the worker's memory for a block. */
enum { PS_VERSION, PS_NOTE, PS_SAVED, PS_MODE, PS_FACTOR, PS_BLOCK_END };
enum { PS_UNDO, PS_REDO };
enum { PS_WORKER_BITS = 16, PS_MOST_SOURCES = 256, PS_MOST_RULES = 64 };
enum { PS_BLOCK = 512 }; /* elements: old and new ones, with two slots, fit into the first-level cache */

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
    int64_t num_parameters;
    int64_t journals, blocks, intents; /* addresses of arrays of one address for each worker */
    int64_t inboxes;                   /* address of an array of `num_memories` addresses for each worker; or 0 */
    int64_t shards, pieces;            /* addresses of arrays */
    int64_t streams; /* whether what is fetched does not fit into the caches */
};

/* What a worker applies to shards, in shared memory, so that another one can bring it to its end. */
struct ps_intent {
    int64_t number; /* of the push; 0 in a synchronous step */
    int64_t num_sources;
    int64_t sources[PS_MOST_SOURCES]; /* workers, from whose inboxes */
    struct ps_rule rules[PS_MOST_RULES];
    int32_t rule_of[]; /* for each parameter; then `present`, one byte for each */
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
    const int64_t *workers; /* in whose inboxes the sources are; NULL: they are elsewhere */
    int64_t num_rules;
};

/* Brings a shard whose lock the caller holds to a version, if the worker that was changing it has been killed. */
void ps_restore(const struct ps_store *store, int64_t index);

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
