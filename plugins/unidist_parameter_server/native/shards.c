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

/* Elements that are saved and then changed: with the journal's and two slots they fit into the first-level cache. */
enum { BLOCK = 512 };

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

/* Undoes a change that its worker has not brought to its end. */
static void restore(const struct ps_store *store, const struct ps_shard *shard) {
    _Atomic int64_t *header = at(shard->header);
    int64_t noted = load(header + PS_NOTE);
    if (noted >> PS_WORKER_BITS != load(header + PS_VERSION) + 1) return;
    int64_t worker = noted & ((1 << PS_WORKER_BITS) - 1);
    size_t nbytes = (size_t)load(header + PS_SAVED) * size_of(shard);
    memcpy(at(shard->contents), journaled(store, shard, worker, shard->contents), nbytes);
    for (int k = 0; k < store->num_slots; k++)
        memcpy(at(shard->slots[k]), journaled(store, shard, worker, shard->slots[k]), nbytes);
    memcpy(at(shard->counts), journaled(store, shard, worker, shard->counts), (size_t)shard->num_pieces * 8);
    memcpy(at(shard->numbers), journaled(store, shard, worker, shard->numbers), (size_t)store->num_workers * 8);
    note(header + PS_NOTE, 0);
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

/* Copies elements `begin` to `end`, which are of pieces from `*piece` on, to the pieces' targets; goes on from there. */
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

/* Saves elements up to `end` to the journal, from where it was saved. */
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

static void apply_to_span(const struct ps_store *store, const struct ps_shard *shard, const struct ps_change *change,
                          const struct ps_rule *rule, int64_t updates, double factor, int64_t begin, int64_t end,
                          const int64_t *targets, int64_t *saved, int64_t *piece) {
    size_t size = size_of(shard);
    double mean[BLOCK];
    const char *sources[PS_MOST_SOURCES];
    for (int64_t low = begin; low < end; low += BLOCK) {
        int64_t high = low + BLOCK < end ? low + BLOCK : end;
        size_t offset = (size_t)low * size, count = (size_t)(high - low);
        save(store, shard, saved, high);
        for (int64_t k = 0; k < change->num_sources; k++)
            sources[k] = (const char *)at(change->sources[k * store->num_memories + shard->memory]) +
                         (size_t)shard->begin * size + offset;
        const void *applied = sources[0];
        if (change->num_sources > 1) {
            ps_mean((enum ps_type)shard->type, mean, sources, (int)change->num_sources, count);
            applied = mean;
        }
        void *slots[PS_MAX_SLOTS];
        for (int k = 0; k < store->num_slots; k++) slots[k] = (char *)at(shard->slots[k]) + offset;
        ps_apply_rule(rule, (enum ps_type)shard->type, (char *)at(shard->contents) + offset, applied, slots,
                      (int)store->num_slots, count, updates, factor);
        if (targets) copy_out(store, shard, targets, low, high, piece);
    }
}

/* Changes a shard; the caller holds its lock. `pushed`: number of this worker's push, 0 in a synchronous step. */
static void apply(const struct ps_store *store, const struct ps_shard *shard, const struct ps_change *change,
                  double factor, int64_t pushed, const int64_t *targets) {
    const struct ps_piece *pieces = (const struct ps_piece *)at(store->pieces) + shard->first_piece;
    _Atomic int64_t *header = at(shard->header);
    int64_t *counts = at(shard->counts), *numbers = at(shard->numbers), version = load(header + PS_VERSION);
    memcpy(journaled(store, shard, store->worker, shard->counts), counts, (size_t)shard->num_pieces * 8);
    memcpy(journaled(store, shard, store->worker, shard->numbers), numbers, (size_t)store->num_workers * 8);
    note(header + PS_SAVED, 0);
    note(header + PS_NOTE, (version + 1) << PS_WORKER_BITS | store->worker);
    int64_t saved = 0, copied = 0, begin = 0;
    while (begin < shard->num_pieces) { /* neighbouring pieces that are changed alike, gaps between them included */
        int64_t first = pieces[begin].parameter, end = begin + 1, count = counts[begin];
        while (end < shard->num_pieces && !change->present[pieces[end].parameter] == !change->present[first] &&
               change->rule_of[pieces[end].parameter] == change->rule_of[first] && counts[end] == count)
            end++;
        int64_t low = pieces[begin].start, high = pieces[end - 1].stop;
        if (change->present[first]) {
            save(store, shard, &saved, low);
            apply_to_span(store, shard, change, change->rules + change->rule_of[first], count + 1, factor, low, high,
                          targets, &saved, &copied);
            for (int64_t k = begin; k < end; k++) counts[k] = count + 1;
        } else if (targets) {
            copy_out(store, shard, targets, low, high, &copied);
        }
        begin = end;
    }
    if (pushed) {
        numbers[store->worker] = pushed;
        if (store->log_length) {
            int64_t *entry = (int64_t *)at(shard->log) + 2 * (version % store->log_length);
            entry[0] = store->worker, entry[1] = pushed;
        }
    }
    note(header + PS_VERSION, version + 1);
}

int64_t ps_push(const struct ps_store *store, int64_t *order, int64_t num, const struct ps_change *change,
                int64_t number, const int64_t *read_versions, const int64_t *targets, int64_t *versions) {
    int64_t busy = 0;
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
