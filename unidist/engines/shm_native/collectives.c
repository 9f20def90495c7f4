/* The collectives, each able to stop wherever it would have to wait and to go on later.
 *
 * Three ways to move data, chosen alike by every rank from the descriptors of all:
 *   small    the payload travels with the descriptor; everybody computes the whole result. One wait.
 *   direct   all sources (and targets, for allreduce) lie in engine memory: each rank reads its peers' memory.
 *   windows  anything else: pieces are copied through the staging windows. */
#include "group.h"

#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t align(size_t n) { return (n + 63) & ~(size_t)63; }

static size_t small_offset(int size) {
    return align(sizeof(ud_slot) + 2 * (size_t)size * sizeof(ud_counter) +
                 (size_t)size * UD_MESSAGES * sizeof(ud_message));
}
size_t ud_slot_bytes(int size, size_t small_bytes, size_t window_bytes) {
    return small_offset(size) + UD_RING * small_bytes + 2 * window_bytes;
}
ud_counter *ud_sent(ud_slot *slot, int member) { return (ud_counter *)(slot + 1) + member; }
ud_counter *ud_received(ud_slot *slot, int size, int member) { return (ud_counter *)(slot + 1) + size + member; }
ud_message *ud_messages(ud_slot *slot, int size, int member) {
    return (ud_message *)((ud_counter *)(slot + 1) + 2 * size) + (size_t)member * UD_MESSAGES;
}
char *ud_small(ud_group *group, int member, uint32_t seq) {
    return (char *)group->slots[member] + small_offset(group->size) + (seq % UD_RING) * group->small_bytes;
}
char *ud_window(ud_group *group, int member, uint32_t window) {
    return (char *)group->slots[member] + small_offset(group->size) + UD_RING * group->small_bytes +
           (window % 2) * group->window_bytes;
}
ud_descriptor *ud_descriptor_of(ud_group *group, int member, uint32_t seq) {
    return &group->slots[member]->ring[seq % UD_RING];
}

int64_t ud_offset(ud_group *group, const void *address, uint64_t nbytes) {
    const char *base = group->bases[group->rank], *p = address;
    if (p < base || p + nbytes > base + group->capacities[group->rank]) return UD_NO_OFFSET;
    return p - base;
}

void ud_free_op(ud_op *op) {
    free(op->counts);
    free(op->counts2);
    op->counts = op->counts2 = NULL;
}

/* Buffers without elements have no address, which memcpy would not take. */
static void move(char *target, const char *source, size_t nbytes) {
    if (target != source && nbytes) memcpy(target, source, nbytes);
}

/* ---- posting ---- */

static uint64_t hash_counts(const uint64_t *counts, int size) { /* FNV-1a over whole words */
    uint64_t hash = 14695981039346656037ULL;
    for (int i = 0; i < size; i++) hash = (hash ^ counts[i]) * 1099511628211ULL;
    return hash;
}

static uint64_t op_bytes(const ud_op *op) { return op->count * ud_dtype_bytes[op->dtype]; }

/* The part of a payload that is given to others in one piece of `small` memory; 0: too large, or not of that kind. */
static int is_small(ud_group *group, const ud_op *op) {
    return op->opcode != UD_ALLTOALL && op->opcode != UD_BARRIER && op_bytes(op) <= group->small_bytes;
}

static uint64_t min64(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Where rank `member`'s share of `count` elements begins; shares are whole cache lines of the widest type. */
static uint64_t share_begin(uint64_t count, int size, int member) {
    uint64_t share = (count + (uint64_t)size - 1) / (uint64_t)size;
    share = (share + 63) & ~UINT64_C(63);
    return min64(count, share * (uint64_t)member);
}

int ud_post(ud_group *group, ud_op *op, int64_t deadline, ud_blame *blame) {
    uint32_t seq = (uint32_t)(group->posted + 1);
    if (group->posted + 1 - group->completed >= UD_RING) { /* the private ring is full */
        pthread_mutex_lock(&group->mutex);
        int status = ud_drive(group, group->posted + 2 - UD_RING, deadline, blame);
        pthread_mutex_unlock(&group->mutex);
        if (status) return status;
    }
    /* Peers may still read the descriptor that this one overwrites. */
    int status = ud_wait(group, ud_op_done, -1, seq - UD_RING, deadline, blame);
    if (status) return status;
    op->seq = seq;
    op->phase = 0;
    op->window = 0;
    ud_descriptor *mine = ud_descriptor_of(group, group->rank, seq);
    *mine = (ud_descriptor){.opcode = op->opcode, .dtype = op->dtype, .redop = op->redop, .root = op->root,
                            .count = op->count, .scale = op->scale};
    mine->layout = op->counts && op->opcode != UD_ALLTOALL ? hash_counts(op->counts, group->size) : 0;
    mine->source = ud_offset(group, op->source, op_bytes(op));
    mine->target = ud_offset(group, op->target, op_bytes(op));
    char *small = ud_small(group, group->rank, seq);
    if (op->opcode == UD_ALLTOALL) {
        memcpy(small, op->counts, group->size * sizeof(uint64_t));
        memcpy(small + group->size * sizeof(uint64_t), op->counts2, group->size * sizeof(uint64_t));
    } else if (is_small(group, op) && (op->opcode != UD_BROADCAST || (int)op->root == group->rank)) {
        move(small, op->source, op_bytes(op));
    }
    group->ops[seq % UD_RING] = *op;
    group->posted++;
    ud_publish(&group->slots[group->rank]->op_arrived, seq);
    ud_activate(group);
    return UD_OK;
}

/* ---- agreement ---- */

static void describe(char *text, size_t room, int rank, const ud_descriptor *d) {
    static const char *const names[] = {"allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "barrier"};
    int used = snprintf(text, room, "rank %d: %s", rank, names[d->opcode]);
    if (d->opcode == UD_BARRIER || used < 0 || (size_t)used >= room) return;
    text += used, room -= (size_t)used;
    used = snprintf(text, room, " of %s[%llu]", ud_dtype_names[d->dtype], (unsigned long long)d->count);
    if (used < 0 || (size_t)used >= room) return;
    text += used, room -= (size_t)used;
    if (d->opcode == UD_ALLREDUCE || d->opcode == UD_REDUCESCATTER)
        snprintf(text, room, " op=%s scale=%g", ud_redop_names[d->redop], d->scale);
    else if (d->opcode == UD_BROADCAST)
        snprintf(text, room, " root=%u", d->root);
}

static int agree(const ud_descriptor *a, const ud_descriptor *b) {
    if (a->opcode != b->opcode || a->dtype != b->dtype || a->redop != b->redop || a->root != b->root ||
        a->layout != b->layout || a->scale != b->scale)
        return 0;
    return a->count == b->count || a->opcode == UD_ALLGATHER || a->opcode == UD_ALLTOALL;
}

static const uint64_t *sent_counts(ud_group *group, int member, uint32_t seq) {
    return (const uint64_t *)ud_small(group, member, seq);
}

static void fail(ud_group *group, uint32_t seq) {
    ud_failure *failure = calloc(1, sizeof *failure);
    if (!failure) return;
    failure->number = group->completed + 1; /* only the oldest operation runs */
    size_t used = 0, room = sizeof failure->text;
    for (int m = 0; m < group->size && used + 80 < room; m++) {
        describe(failure->text + used, room - used, m, ud_descriptor_of(group, m, seq));
        used += strlen(failure->text + used);
        if (m + 1 < group->size) used += (size_t)snprintf(failure->text + used, room - used, "; ");
    }
    pthread_mutex_lock(&group->failure_mutex);
    ud_failure **end = &group->failures;
    while (*end) end = &(*end)->next;
    *end = failure;
    pthread_mutex_unlock(&group->failure_mutex);
}

/* Every rank sees all descriptors and so comes to the same conclusion. */
static int all_agree(ud_group *group, const ud_op *op) {
    for (int m = 1; m < group->size; m++)
        if (!agree(ud_descriptor_of(group, 0, op->seq), ud_descriptor_of(group, m, op->seq))) return 0;
    if (op->opcode == UD_ALLTOALL)
        for (int i = 0; i < group->size; i++)
            for (int j = 0; j < group->size; j++)
                if (sent_counts(group, i, op->seq)[j] != (sent_counts(group, j, op->seq) + group->size)[i]) return 0;
    return 1;
}

static int all_direct(ud_group *group, const ud_op *op) {
    for (int m = 0; m < group->size; m++) {
        const ud_descriptor *d = ud_descriptor_of(group, m, op->seq);
        if (op->opcode == UD_BROADCAST && (uint32_t)m != op->root) continue;
        if (d->source == UD_NO_OFFSET) return 0;
        if (op->opcode == UD_ALLREDUCE && d->target == UD_NO_OFFSET) return 0;
    }
    return 1;
}

static char *peer_source(ud_group *group, int member, uint32_t seq) {
    return group->bases[member] + ud_descriptor_of(group, member, seq)->source;
}

/* ---- pieces ---- */

static uint64_t sum_before(const uint64_t *counts, int end) {
    uint64_t sum = 0;
    for (int i = 0; i < end; i++) sum += counts[i];
    return sum;
}

static uint64_t largest(const uint64_t *counts, int size) {
    uint64_t most = 0;
    for (int i = 0; i < size; i++)
        if (counts[i] > most) most = counts[i];
    return most;
}

/* ---- small ---- */

static void run_small(ud_group *group, ud_op *op) {
    size_t item = ud_dtype_bytes[op->dtype];
    const char *sources[group->size];
    for (int m = 0; m < group->size; m++) sources[m] = ud_small(group, m, op->seq);
    switch (op->opcode) {
    case UD_ALLREDUCE:
        ud_reduce(&op->target, 1, sources, group->size, op->count, op->dtype, op->redop, op->scale, 0);
        break;
    case UD_REDUCESCATTER:
        for (int m = 0; m < group->size; m++) sources[m] += sum_before(op->counts, group->rank) * item;
        ud_reduce(&op->target, 1, sources, group->size, op->counts[group->rank], op->dtype, op->redop, op->scale, 0);
        break;
    case UD_ALLGATHER:
        for (int m = 0; m < group->size; m++)
            move(op->target + sum_before(op->counts, m) * item, sources[m], op->counts[m] * item);
        break;
    default: /* UD_BROADCAST */
        if ((int)op->root != group->rank) move(op->target, sources[op->root], op_bytes(op));
    }
}

/* An allgather is small when the largest contribution is. */
static int runs_small(ud_group *group, const ud_op *op) {
    if (op->opcode == UD_ALLGATHER)
        return largest(op->counts, group->size) * ud_dtype_bytes[op->dtype] <= group->small_bytes;
    return is_small(group, op);
}

/* ---- direct ---- */

static void run_direct(ud_group *group, ud_op *op) {
    size_t item = ud_dtype_bytes[op->dtype];
    const char *sources[group->size];
    char *targets[group->size];
    int me = group->rank;
    if (op->opcode == UD_BROADCAST) {
        if ((int)op->root != me) move(op->target, peer_source(group, (int)op->root, op->seq), op_bytes(op));
        return;
    }
    for (int m = 0; m < group->size; m++) sources[m] = peer_source(group, m, op->seq);
    switch (op->opcode) {
    case UD_ALLREDUCE: {
        uint64_t begin = share_begin(op->count, group->size, me), end = share_begin(op->count, group->size, me + 1);
        for (int m = 0; m < group->size; m++)
            targets[m] = group->bases[m] + ud_descriptor_of(group, m, op->seq)->target + begin * item;
        for (int m = 0; m < group->size; m++) sources[m] += begin * item;
        ud_reduce(targets, group->size, sources, group->size, end - begin, op->dtype, op->redop, op->scale, 0);
        break;
    }
    case UD_REDUCESCATTER: {
        for (int m = 0; m < group->size; m++) sources[m] += sum_before(op->counts, me) * item;
        ud_reduce(&op->target, 1, sources, group->size, op->counts[me], op->dtype, op->redop, op->scale, 0);
        break;
    }
    case UD_ALLGATHER:
        for (int i = 0; i < group->size; i++) {
            int m = (me + i) % group->size;
            move(op->target + sum_before(op->counts, m) * item, sources[m], op->counts[m] * item);
        }
        break;
    default: /* UD_ALLTOALL */
        for (int i = 0; i < group->size; i++) {
            int m = (me + i) % group->size;
            move(op->target + sum_before(op->counts2, m) * item,
                 sources[m] + sum_before(sent_counts(group, m, op->seq), me) * item, op->counts2[m] * item);
        }
    }
}

/* ---- windows ---- */

/* Elements that fit one window, a whole number of cache lines of every rank's share. */
static uint64_t window_elements(ud_group *group, const ud_op *op, int pieces) {
    uint64_t n = group->window_bytes / ud_dtype_bytes[op->dtype] / (uint64_t)pieces;
    return n & ~UINT64_C(63);
}

static uint64_t num_windows(ud_group *group, const ud_op *op) {
    uint64_t total, per_window;
    switch (op->opcode) {
    case UD_ALLREDUCE:
    case UD_BROADCAST:
        total = op->count, per_window = window_elements(group, op, 1);
        break;
    case UD_ALLGATHER:
        total = largest(op->counts, group->size), per_window = window_elements(group, op, 1);
        break;
    case UD_REDUCESCATTER:
        total = largest(op->counts, group->size), per_window = window_elements(group, op, group->size);
        break;
    default: /* UD_ALLTOALL: the largest piece that any rank sends to any other */
        total = 0, per_window = window_elements(group, op, group->size);
        for (int m = 0; m < group->size; m++) {
            uint64_t most = largest(sent_counts(group, m, op->seq), group->size);
            if (most > total) total = most;
        }
    }
    return (total + per_window - 1) / per_window;
}

/* Copies what the others read of this rank's source; what only it reads itself stays where it is. */
static void fill_window(ud_group *group, const ud_op *op, uint64_t index) {
    size_t item = ud_dtype_bytes[op->dtype];
    char *window = ud_window(group, group->rank, group->window);
    int me = group->rank, whole = op->opcode == UD_BROADCAST || op->opcode == UD_ALLGATHER;
    if (op->opcode == UD_BROADCAST && (int)op->root != me) return;
    if (whole) {
        uint64_t per_window = window_elements(group, op, 1), begin = index * per_window;
        if (begin < op->count)
            memcpy(window, op->source + begin * item, min64(per_window, op->count - begin) * item);
        return;
    }
    if (op->opcode == UD_ALLREDUCE) {
        uint64_t per_window = window_elements(group, op, 1), begin = index * per_window;
        uint64_t n = min64(per_window, op->count - begin);
        uint64_t from = share_begin(n, group->size, me), to = share_begin(n, group->size, me + 1);
        memcpy(window, op->source + begin * item, from * item);
        memcpy(window + to * item, op->source + (begin + to) * item, (n - to) * item);
        return;
    }
    uint64_t per_window = window_elements(group, op, group->size), begin = index * per_window, before = 0;
    for (int m = 0; m < group->size; m++) {
        if (begin < op->counts[m] && m != me)
            memcpy(window + (uint64_t)m * per_window * item, op->source + (before + begin) * item,
                   min64(per_window, op->counts[m] - begin) * item);
        before += op->counts[m];
    }
}

/* Every window is filled: reduce this rank's share of it, or take from it what is for this rank. */
static void use_window(ud_group *group, ud_op *op, uint64_t index) {
    size_t item = ud_dtype_bytes[op->dtype];
    int me = group->rank, pieces = op->opcode == UD_REDUCESCATTER || op->opcode == UD_ALLTOALL ? group->size : 1;
    uint64_t per_window = window_elements(group, op, pieces), begin = index * per_window;
    const char *sources[group->size];
    for (int m = 0; m < group->size; m++) sources[m] = ud_window(group, m, group->window);
    switch (op->opcode) {
    case UD_ALLREDUCE: {
        uint64_t n = min64(per_window, op->count - begin);
        uint64_t from = share_begin(n, group->size, me), to = share_begin(n, group->size, me + 1);
        for (int m = 0; m < group->size; m++) sources[m] += from * item;
        char *results[] = {(char *)sources[me], op->target + (begin + from) * item}; /* for the others, and here */
        sources[me] = op->source + (begin + from) * item;
        ud_reduce(results, 2, sources, group->size, to - from, op->dtype, op->redop, op->scale, 0);
        break;
    }
    case UD_BROADCAST:
        if ((int)op->root != me)
            memcpy(op->target + begin * item, sources[op->root], min64(per_window, op->count - begin) * item);
        break;
    case UD_ALLGATHER:
        for (int i = 0; i < group->size; i++) {
            int m = (me + i) % group->size;
            if (begin < op->counts[m])
                move(op->target + (sum_before(op->counts, m) + begin) * item,
                     m == me ? op->source + begin * item : sources[m],
                     min64(per_window, op->counts[m] - begin) * item);
        }
        break;
    case UD_REDUCESCATTER: {
        if (begin >= op->counts[me]) break;
        for (int m = 0; m < group->size; m++) sources[m] += (uint64_t)me * per_window * item;
        sources[me] = op->source + (sum_before(op->counts, me) + begin) * item;
        char *target = op->target + begin * item;
        ud_reduce(&target, 1, sources, group->size, min64(per_window, op->counts[me] - begin), op->dtype, op->redop,
                  op->scale, 0);
        break;
    }
    default: /* UD_ALLTOALL */
        for (int m = 0; m < group->size; m++)
            if (begin < op->counts2[m])
                memcpy(op->target + (sum_before(op->counts2, m) + begin) * item,
                       m == me ? op->source + (sum_before(op->counts, me) + begin) * item
                               : sources[m] + (uint64_t)me * per_window * item,
                       min64(per_window, op->counts2[m] - begin) * item);
    }
}

/* allreduce only: all shares of the window are reduced, each in its owner's window; take those of the others. */
static void collect_window(ud_group *group, ud_op *op, uint64_t index) {
    size_t item = ud_dtype_bytes[op->dtype];
    uint64_t per_window = window_elements(group, op, 1), begin = index * per_window;
    uint64_t n = min64(per_window, op->count - begin);
    for (int i = 1; i < group->size; i++) {
        int m = (group->rank + i) % group->size;
        uint64_t from = share_begin(n, group->size, m), to = share_begin(n, group->size, m + 1);
        move(op->target + (begin + from) * item, ud_window(group, m, group->window) + from * item, (to - from) * item);
    }
}

enum { FILL, USE, COLLECT };

static int run_windows(ud_group *group, ud_op *op, int *step, int64_t deadline, ud_blame *blame) {
    ud_slot *own = group->slots[group->rank];
    uint64_t n = num_windows(group, op);
    while (op->window < n) {
        if (*step == FILL) {
            group->window++;
            fill_window(group, op, op->window);
            ud_publish(&own->win_arrived, group->window);
            *step = USE;
        }
        if (*step == USE) {
            int status = ud_wait(group, ud_win_arrived, -1, group->window, deadline, blame);
            if (status) return status;
            use_window(group, op, op->window);
            ud_publish(&own->win_done, group->window);
            *step = op->opcode == UD_ALLREDUCE ? COLLECT : FILL;
        }
        if (*step == COLLECT) {
            int status = ud_wait(group, ud_win_done, -1, group->window, deadline, blame);
            if (status) return status;
            collect_window(group, op, op->window);
            *step = FILL;
        }
        op->window++;
    }
    return UD_OK;
}

/* ---- driving ---- */

enum { ARRIVE = 0, WINDOWS = 1 /* + step */, RELEASE = 8 };

/* Moves the oldest operation on; UD_OK: it is complete. */
static int advance(ud_group *group, ud_op *op, int64_t deadline, ud_blame *blame) {
    ud_counter *done = &group->slots[group->rank]->op_done;
    if (op->phase == ARRIVE) {
        int status = ud_wait(group, ud_op_arrived, -1, op->seq, deadline, blame);
        if (status) return status;
        if (!all_agree(group, op)) {
            fail(group, op->seq);
        } else if (op->opcode == UD_BARRIER) {
            /* that everybody arrived is all there is to it */
        } else if (runs_small(group, op)) {
            run_small(group, op);
        } else if (all_direct(group, op)) {
            run_direct(group, op);
            ud_publish(done, op->seq);
            if (op->opcode == UD_BROADCAST && (int)op->root != group->rank) return UD_OK; /* nobody reads ours */
            op->phase = RELEASE;
        } else {
            op->phase = WINDOWS;
        }
    }
    if (op->phase >= WINDOWS && op->phase < RELEASE) {
        int step = op->phase - WINDOWS;
        int status = run_windows(group, op, &step, deadline, blame);
        op->phase = WINDOWS + step;
        if (status) return status;
    }
    if (op->phase == RELEASE) /* peers may still read our source, or write their share into our target */
        return ud_wait(group, ud_op_done, -1, op->seq, deadline, blame);
    ud_publish(done, op->seq);
    return UD_OK;
}

int ud_drive(ud_group *group, uint64_t number, int64_t deadline, ud_blame *blame) {
    while (group->completed < number) {
        ud_op *op = &group->ops[(group->completed + 1) % UD_RING];
        int status = advance(group, op, deadline, blame);
        if (status) return status;
        ud_free_op(op);
        group->completed++;
    }
    return UD_OK;
}
