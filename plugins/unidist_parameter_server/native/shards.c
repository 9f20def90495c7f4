#define _GNU_SOURCE
#include "shards.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

static inline void *at(int64_t address) { return (void *)(uintptr_t)address; }

static inline size_t size_of(const struct ps_shard *shard) { return shard->type == PS_FLOAT32 ? 4 : 8; }

static int lock_command(const struct ps_store *store, int64_t number, short type) {
    struct flock region = {.l_type = type, .l_whence = SEEK_SET, .l_start = number, .l_len = 1};
    return fcntl((int)store->locks, F_SETLK, &region);
}

/* Returns 1 with the lock, 0 if another process has it, -1 if it cannot be locked. */
static int try_lock(const struct ps_store *store, int64_t number) {
    if (!lock_command(store, number, F_WRLCK)) return 1;
    return errno == EACCES || errno == EAGAIN ? 0 : -1;
}

static void unlock(const struct ps_store *store, int64_t number) { lock_command(store, number, F_UNLCK); }

/* The header's numbers are stored after all that was stored before, and before all that is stored afterwards. */
static inline void note(_Atomic int64_t *place, int64_t value) {
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(place, value, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
}

static inline int64_t load(_Atomic int64_t *place) { return atomic_load_explicit(place, memory_order_acquire); }

/* The place in a worker's journal of what is at an address in the shard's contents. */
static inline char *journaled(const struct ps_store *store, const struct ps_shard *shard, int64_t worker,
                              int64_t address) {
    return (char *)at(((const int64_t *)at(store->journals))[worker] + (address - shard->contents));
}

/* Copies past the caches; the caller ends with `_mm_sfence`. */
static void stream(char *target, const char *source, size_t nbytes) {
#if defined(__x86_64__)
    size_t head = -(uintptr_t)target & 63; /* whole cache lines are streamed */
    if (nbytes >= 128 + head) {
        memcpy(target, source, head);
        target += head, source += head, nbytes -= head;
        for (; nbytes >= 64; target += 64, source += 64, nbytes -= 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)source), b = _mm_loadu_si128((const __m128i *)source + 1);
            __m128i c = _mm_loadu_si128((const __m128i *)source + 2), d = _mm_loadu_si128((const __m128i *)source + 3);
            _mm_stream_si128((__m128i *)target, a), _mm_stream_si128((__m128i *)target + 1, b);
            _mm_stream_si128((__m128i *)target + 2, c), _mm_stream_si128((__m128i *)target + 3, d);
        }
    }
#endif
    memcpy(target, source, nbytes);
}

/* Copies elements `begin` to `end`, which are of pieces from `*piece` on, to the pieces' targets; goes on there. */
static void copy_out(const struct ps_store *store, const struct ps_shard *shard, const int64_t *targets, int64_t begin,
                     int64_t end, int64_t *piece) {
    const struct ps_piece *pieces = (const struct ps_piece *)at(store->pieces) + shard->first_piece;
    size_t size = size_of(shard);
    for (; *piece < shard->num_pieces && pieces[*piece].start < end; ++*piece) {
        const struct ps_piece *each = pieces + *piece;
        int64_t low = begin > each->start ? begin : each->start, high = end < each->stop ? end : each->stop;
        if (low < high) {
            char *target = (char *)at(targets[shard->first_piece + *piece]) + (size_t)(low - each->start) * size;
            const char *source = (const char *)at(shard->contents) + (size_t)low * size;
            size_t nbytes = (size_t)(high - low) * size;
            if (store->streams) stream(target, source, nbytes);
            else memcpy(target, source, nbytes);
        }
        if (each->stop > end) return; /* its rest comes later */
    }
}

static void end_copies(const struct ps_store *store) {
#if defined(__x86_64__)
    if (store->streams) _mm_sfence();
#else
    (void)store;
#endif
}

/* Saves elements up to `end` to this worker's journal, from where it was saved. */
static void save(const struct ps_store *store, const struct ps_shard *shard, int64_t *saved, int64_t end) {
    if (*saved >= end) return;
    size_t size = size_of(shard), offset = (size_t)*saved * size, nbytes = (size_t)(end - *saved) * size;
    memcpy(journaled(store, shard, store->worker, shard->contents) + offset, (char *)at(shard->contents) + offset,
           nbytes);
    for (int k = 0; k < store->num_slots; k++)
        memcpy(journaled(store, shard, store->worker, shard->slots[k]) + offset, (char *)at(shard->slots[k]) + offset,
               nbytes);
    *saved = end;
    note((_Atomic int64_t *)at(shard->header) + PS_SAVED, end);
}

/* Finds the memory that a worker has for the new elements of one block. */
static inline char *block_of(const struct ps_store *store, int64_t worker, int slot) {
    return (char *)at(((const int64_t *)at(store->blocks))[worker]) + (size_t)slot * PS_BLOCK * sizeof(double);
}

/* Copies the new elements of a block to a shard. */
static void copy_block(const struct ps_store *store, const struct ps_shard *shard, int64_t worker, int64_t begin,
                       int64_t end) {
    size_t size = size_of(shard), offset = (size_t)begin * size, nbytes = (size_t)(end - begin) * size;
    for (int k = 0; k <= store->num_slots; k++)
        memcpy((char *)at(k ? shard->slots[k - 1] : shard->contents) + offset, block_of(store, worker, k), nbytes);
}

/* A change of one shard. */
struct work {
    const struct ps_store *store;
    const struct ps_shard *shard;
    const struct ps_change *change;
    int64_t worker; /* whose change, and whose journal */
    int64_t number; /* of the push; 0 in a synchronous step */
    double factor;
    const int64_t *targets;
    int64_t saved, copied, from; /* elements; pieces; elements that were done before */
};

static void apply_to_span(struct work *work, const struct ps_rule *rule, int64_t updates, int64_t begin, int64_t end) {
    const struct ps_store *store = work->store;
    const struct ps_shard *shard = work->shard;
    const struct ps_change *change = work->change;
    _Atomic int64_t *header = at(shard->header);
    size_t size = size_of(shard);
    double mean[PS_BLOCK];
    const char *sources[PS_MOST_SOURCES];
    for (int64_t low = begin; low < end; low += PS_BLOCK) {
        if (low < work->from) continue;
        int64_t high = low + PS_BLOCK < end ? low + PS_BLOCK : end;
        size_t offset = (size_t)low * size, count = (size_t)(high - low);
        if (!change->workers) save(store, shard, &work->saved, high);
        for (int64_t k = 0; k < change->num_sources; k++)
            sources[k] = (const char *)at(change->sources[k * store->num_memories + shard->memory]) +
                         (size_t)shard->begin * size + offset;
        const void *applied = sources[0];
        if (change->num_sources > 1) {
            ps_mean((enum ps_type)shard->type, mean, sources, (int)change->num_sources, count);
            applied = mean;
        }
        void *slots[PS_MAX_SLOTS], *new_slots[PS_MAX_SLOTS];
        char *values = (char *)at(shard->contents) + offset, *new_values = values;
        for (int k = 0; k < store->num_slots; k++) new_slots[k] = slots[k] = (char *)at(shard->slots[k]) + offset;
        if (change->workers) {
            new_values = block_of(store, work->worker, 0);
            for (int k = 0; k < store->num_slots; k++) new_slots[k] = block_of(store, work->worker, k + 1);
        }
        ps_apply_rule(rule, (enum ps_type)shard->type, values, applied, slots, new_values, new_slots,
                      (int)store->num_slots, count, updates, work->factor);
        if (change->workers) {
            atomic_store_explicit(header + PS_BLOCK_END, high, memory_order_relaxed);
            note(header + PS_SAVED, 2 * low + 1);
            copy_block(store, shard, work->worker, low, high);
            note(header + PS_SAVED, 2 * high);
        }
        if (work->targets) copy_out(store, shard, work->targets, low, high, &work->copied);
    }
}

/* Changes a shard from where the work has come to, and makes its next version. */
static void bring_to_end(struct work *work) {
    const struct ps_store *store = work->store;
    const struct ps_shard *shard = work->shard;
    const struct ps_change *change = work->change;
    const struct ps_piece *pieces = (const struct ps_piece *)at(store->pieces) + shard->first_piece;
    _Atomic int64_t *header = at(shard->header);
    /* Those before the change: those of the shard are changed at the end, and perhaps not for the first time. */
    const int64_t *counts = (const int64_t *)(const void *)journaled(store, shard, work->worker, shard->counts);
    int64_t *new_counts = at(shard->counts), version = load(header + PS_VERSION), begin = 0;
    while (begin < shard->num_pieces) { /* neighbouring pieces that are changed alike, gaps between them included */
        int64_t first = pieces[begin].parameter, end = begin + 1;
        while (end < shard->num_pieces && !change->present[pieces[end].parameter] == !change->present[first] &&
               change->rule_of[pieces[end].parameter] == change->rule_of[first] && counts[end] == counts[begin])
            end++;
        int64_t low = pieces[begin].start, high = pieces[end - 1].stop;
        if (change->present[first]) {
            if (!change->workers) save(store, shard, &work->saved, low);
            apply_to_span(work, change->rules + change->rule_of[first], counts[begin] + 1, low, high);
        } else if (work->targets) {
            copy_out(store, shard, work->targets, low, high, &work->copied);
        }
        begin = end;
    }
    for (int64_t k = 0; k < shard->num_pieces; k++)
        new_counts[k] = counts[k] + (change->present[pieces[k].parameter] ? 1 : 0);
    if (work->number) {
        ((int64_t *)at(shard->numbers))[work->worker] = work->number;
        if (store->log_length) {
            int64_t *entry = (int64_t *)at(shard->log) + 2 * (version % store->log_length);
            entry[0] = work->worker, entry[1] = work->number;
        }
    }
    note(header + PS_VERSION, version + 1);
}

/* Changes a shard whose lock the caller holds, and which is not interrupted. */
static void apply(const struct ps_store *store, const struct ps_shard *shard, const struct ps_change *change,
                  double factor, int64_t number, const int64_t *targets) {
    struct work work = {store, shard, change, store->worker, number, factor, targets, 0, 0, 0};
    _Atomic int64_t *header = at(shard->header);
    int64_t bits;
    memcpy(&bits, &factor, sizeof bits);
    memcpy(journaled(store, shard, store->worker, shard->counts), at(shard->counts), (size_t)shard->num_pieces * 8);
    memcpy(journaled(store, shard, store->worker, shard->numbers), at(shard->numbers), (size_t)store->num_workers * 8);
    atomic_store_explicit(header + PS_MODE, change->workers ? PS_REDO : PS_UNDO, memory_order_relaxed);
    atomic_store_explicit(header + PS_FACTOR, bits, memory_order_relaxed);
    atomic_store_explicit(header + PS_SAVED, 0, memory_order_relaxed);
    note(header + PS_NOTE, (load(header + PS_VERSION) + 1) << PS_WORKER_BITS | store->worker);
    bring_to_end(&work);
}

/* Undoes a change that its worker has not brought to its end. */
static void undo(const struct ps_store *store, const struct ps_shard *shard, int64_t worker) {
    _Atomic int64_t *header = at(shard->header);
    size_t nbytes = (size_t)load(header + PS_SAVED) * size_of(shard);
    memcpy(at(shard->contents), journaled(store, shard, worker, shard->contents), nbytes);
    for (int k = 0; k < store->num_slots; k++)
        memcpy(at(shard->slots[k]), journaled(store, shard, worker, shard->slots[k]), nbytes);
    memcpy(at(shard->counts), journaled(store, shard, worker, shard->counts), (size_t)shard->num_pieces * 8);
    memcpy(at(shard->numbers), journaled(store, shard, worker, shard->numbers), (size_t)store->num_workers * 8);
    note(header + PS_NOTE, 0);
}

/* Brings a change to its end that its worker has not, from what this has noted in shared memory. */
static void redo(const struct ps_store *store, const struct ps_shard *shard, int64_t worker) {
    _Atomic int64_t *header = at(shard->header);
    const struct ps_intent *intent = at(((const int64_t *)at(store->intents))[worker]);
    int64_t sources[PS_MOST_SOURCES], progress = load(header + PS_SAVED), bits = load(header + PS_FACTOR);
    double factor;
    memcpy(&factor, &bits, sizeof factor);
    if (progress & 1) {
        int64_t end = load(header + PS_BLOCK_END);
        copy_block(store, shard, worker, progress >> 1, end);
        progress = 2 * end;
        note(header + PS_SAVED, progress);
    }
    /* Of the sources that are the same in all flat memories only this shard's is looked at. */
    struct ps_store narrow = *store;
    struct ps_shard only = *shard;
    narrow.num_memories = 1, only.memory = 0;
    for (int64_t k = 0; k < intent->num_sources; k++)
        sources[k] = ((const int64_t *)at(store->inboxes))[intent->sources[k] * store->num_memories + shard->memory];
    struct ps_change change = {
        intent->rules, intent->rule_of, (const uint8_t *)(intent->rule_of + store->num_parameters), sources,
        intent->num_sources, factor, intent->sources, 0};
    struct work work = {&narrow, &only, &change, worker, intent->number, factor, NULL, 0, 0, progress >> 1};
    bring_to_end(&work);
}

/* Brings an interrupted shard, whose lock the caller holds, back to a version. */
static void restore(const struct ps_store *store, const struct ps_shard *shard) {
    _Atomic int64_t *header = at(shard->header);
    int64_t noted = load(header + PS_NOTE), worker = noted & ((1 << PS_WORKER_BITS) - 1);
    if (noted >> PS_WORKER_BITS != load(header + PS_VERSION) + 1) return;
    if (load(header + PS_MODE) == PS_REDO) redo(store, shard, worker);
    else undo(store, shard, worker);
}

void ps_restore(const struct ps_store *store, int64_t index) {
    restore(store, (const struct ps_shard *)at(store->shards) + index);
}

/* Notes what this worker is about to apply. None of its earlier changes is left to be brought to its end. */
static void declare(const struct ps_store *store, const struct ps_change *change, int64_t number) {
    if (!change->workers) return;
    struct ps_intent *intent = at(((const int64_t *)at(store->intents))[store->worker]);
    intent->number = number;
    intent->num_sources = change->num_sources;
    memcpy(intent->sources, change->workers, (size_t)change->num_sources * sizeof *change->workers);
    memcpy(intent->rules, change->rules, (size_t)change->num_rules * sizeof *change->rules);
    memcpy(intent->rule_of, change->rule_of, (size_t)store->num_parameters * sizeof *change->rule_of);
    memcpy(intent->rule_of + store->num_parameters, change->present, (size_t)store->num_parameters);
}

int64_t ps_push(const struct ps_store *store, int64_t *order, int64_t num, const struct ps_change *change,
                int64_t number, const int64_t *read_versions, const int64_t *targets, int64_t *versions) {
    int64_t busy = 0;
    declare(store, change, number);
    for (int64_t k = 0; k < num; k++) {
        int64_t index = order[k];
        const struct ps_shard *shard = (const struct ps_shard *)at(store->shards) + index;
        int locked = try_lock(store, index);
        if (locked < 0) return -1;
        if (!locked) {
            order[busy++] = index;
            continue;
        }
        restore(store, shard);
        _Atomic int64_t *version = (_Atomic int64_t *)at(shard->header) + PS_VERSION;
        if (((int64_t *)at(shard->numbers))[store->worker] < number) {
            double factor = change->factor;
            if (read_versions) {
                int64_t staleness = load(version) - read_versions[index];
                factor /= staleness > 1 ? (double)staleness : 1.0;
            }
            apply(store, shard, change, factor, number, targets);
        } else if (targets) {
            int64_t piece = 0;
            copy_out(store, shard, targets, 0, shard->count, &piece);
        }
        versions[index] = load(version);
        unlock(store, index);
    }
    end_copies(store);
    return busy;
}

int64_t ps_step(const struct ps_store *store, int64_t *order, int64_t num, const struct ps_change *change,
                int64_t label, const int64_t *targets, int64_t *versions) {
    int64_t busy = 0;
    declare(store, change, 0);
    for (int64_t k = 0; k < num; k++) {
        int64_t index = order[k];
        const struct ps_shard *shard = (const struct ps_shard *)at(store->shards) + index;
        _Atomic int64_t *version = (_Atomic int64_t *)at(shard->header) + PS_VERSION;
        if (load(version) > label) continue;
        int locked = try_lock(store, index);
        if (locked < 0) return -1;
        if (!locked) {
            order[busy++] = index;
            continue;
        }
        restore(store, shard);
        if (load(version) <= label) {
            apply(store, shard, change, change->factor, 0, targets);
            if (targets) versions[index] = load(version);
        }
        unlock(store, index);
    }
    end_copies(store);
    return busy;
}

int64_t ps_fetch(const struct ps_store *store, int64_t *order, int64_t num, const int64_t *targets, int64_t *versions) {
    int64_t busy = 0;
    for (int64_t k = 0; k < num; k++) {
        int64_t index = order[k], piece = 0;
        const struct ps_shard *shard = (const struct ps_shard *)at(store->shards) + index;
        int locked = try_lock(store, index);
        if (locked < 0) return -1;
        if (!locked) {
            order[busy++] = index;
            continue;
        }
        restore(store, shard);
        copy_out(store, shard, targets, 0, shard->count, &piece);
        versions[index] = load((_Atomic int64_t *)at(shard->header) + PS_VERSION);
        unlock(store, index);
    }
    end_copies(store);
    return busy;
}
