#include "plan.h"

#include <stdlib.h>
#include <string.h>

#define SMALL_TOTAL (64 << 10)   /* that all ranks together send at once */
#define DOUBLING_BYTES (16 << 10)
#define HALVING_BYTES (1 << 20)
#define TREE_BYTES (256 << 10)
#define DOUBLING_TAG 2u /* 0 and 1 belong to ranks beyond a power of two */
#define BACK_TAG 66u

int ud_choose(int opcode, int size, uint64_t nbytes) {
    if (size == 1) return UD_ALONE;
    int few = size <= UD_MAX_DIRECT && nbytes * (uint64_t)size <= SMALL_TOTAL;
    switch (opcode) {
    case UD_ALLREDUCE:
        if (few) return UD_DIRECT;
        if (nbytes <= DOUBLING_BYTES) return UD_DOUBLING;
        return size > 2 && nbytes <= HALVING_BYTES ? UD_HALVING : UD_RING;
    case UD_BROADCAST: return nbytes <= TREE_BYTES ? UD_TREE : UD_CHAIN;
    case UD_REDUCESCATTER: /* all bytes of a source */
    case UD_ALLGATHER:     /* all bytes of a target */
        return nbytes <= SMALL_TOTAL ? UD_DIRECT : UD_RING;
    default: return UD_DIRECT;
    }
}

static int add(ud_plan *plan, ud_step step) {
    if (plan->num_steps == plan->capacity) {
        int capacity = plan->capacity ? 2 * plan->capacity : 16;
        ud_step *steps = realloc(plan->steps, (size_t)capacity * sizeof *steps);
        if (!steps) {
            plan->failed = 1;
            return plan->num_steps - 1;
        }
        plan->steps = steps, plan->capacity = capacity;
    }
    plan->steps[plan->num_steps] = step;
    return plan->num_steps++;
}

static ud_place at(int space, uint64_t offset) { return (ud_place){offset, space}; }

static ud_place scratch(ud_plan *plan, uint64_t nbytes) {
    ud_place place = at(UD_SCRATCH, plan->scratch_bytes);
    plan->scratch_bytes += (nbytes + 63) / 64 * 64;
    return place;
}

static int send(ud_plan *plan, int to, uint32_t tag, ud_place from, uint64_t nbytes, int after, int stream) {
    return add(plan, (ud_step){UD_SEND, to, tag, nbytes, from, {0}, {0}, 0, 0, 0, after, stream});
}

static int receive(ud_plan *plan, int source, uint32_t tag, ud_place to, uint64_t nbytes) {
    return add(plan, (ud_step){UD_RECV, source, tag, nbytes, to, {0}, {0}, 0, 0, 0, -1, -1});
}

static int receive_reduce(ud_plan *plan, int source, uint32_t tag, ud_place to, ud_place own, uint64_t nbytes,
                          int scaled) {
    return add(plan, (ud_step){UD_RECV_REDUCE, source, tag, nbytes, to, own, {0}, 0, 0, scaled, -1, -1});
}

static int copy(ud_plan *plan, ud_place to, ud_place from, uint64_t nbytes, int scaled) {
    return add(plan, (ud_step){UD_COPY, -1, 0, nbytes, to, from, {0}, 0, 0, scaled, -1, -1});
}

static int reduce(ud_plan *plan, ud_place to, ud_place own, ud_place other, uint64_t nbytes, int swap, int scaled) {
    return add(plan, (ud_step){UD_REDUCE, -1, 0, nbytes, to, own, other, 0, swap, scaled, -1, -1});
}

/* Adds up what `receive`s put into slots, one for each rank; in rank order, so every rank gets the same bits. */
static void reduce_slots(ud_plan *plan, ud_place to, ud_place own, ud_place slots, uint64_t stride, uint64_t nbytes) {
    add(plan, (ud_step){UD_REDUCE_ALL, -1, 0, nbytes, to, own, slots, stride, 0, 1, -1, -1});
}

static int around(int rank, int size) { return ((rank % size) + size) % size; }

/* The first byte of each of `size` nearly equal pieces; the last entry is the end. */
static void cut_evenly(const ud_call *call, uint64_t *starts) {
    uint64_t small = call->count / (uint64_t)call->size, larger = call->count % (uint64_t)call->size, at_element = 0;
    for (int i = 0; i <= call->size; i++) {
        starts[i] = at_element * call->item;
        at_element += small + ((uint64_t)i < larger);
    }
}

static void cut_by_counts(const ud_call *call, const uint64_t *counts, uint64_t *starts) {
    uint64_t sum = 0;
    for (int i = 0; i < call->size; i++) {
        starts[i] = sum * call->item;
        sum += counts[i];
    }
    starts[call->size] = sum * call->item;
}

static void direct_allreduce(ud_plan *plan, const ud_call *call) {
    uint64_t nbytes = call->count * call->item, stride = (nbytes + 63) / 64 * 64;
    ud_place slots = scratch(plan, stride * (uint64_t)call->size);
    for (int i = 1; i < call->size; i++)
        send(plan, around(call->rank + i, call->size), 0, at(UD_SOURCE, 0), nbytes, -1, -1);
    for (int i = 1; i < call->size; i++) {
        int source = around(call->rank - i, call->size);
        receive(plan, source, 0, at(UD_SCRATCH, slots.offset + stride * (uint64_t)source), nbytes);
    }
    reduce_slots(plan, at(UD_TARGET, 0), at(UD_SOURCE, 0), slots, stride, nbytes);
}

/* Rabenseifner, "Optimization of collective reduction operations", 2004, section 4.1, and with `halves` unset recursive
 * doubling of the whole. Of a number of ranks that is not a power of two, those above the next lower one hand their data
 * to a partner and wait. */
static void butterfly_allreduce(ud_plan *plan, const ud_call *call, int halves) {
    uint64_t nbytes = call->count * call->item;
    int rank = call->rank, core = 1, last;
    while (2 * core <= call->size) core *= 2;
    if (rank >= core) {
        send(plan, rank - core, 0, at(UD_SOURCE, 0), nbytes, -1, -1);
        receive(plan, rank - core, 1, at(UD_TARGET, 0), nbytes);
        return;
    }
    ud_place own = at(UD_TARGET, 0);
    last = call->in_place ? -1 : copy(plan, own, at(UD_SOURCE, 0), nbytes, 0);
    int extra = rank + core < call->size ? rank + core : -1;
    if (extra >= 0) {
        ud_place incoming = scratch(plan, nbytes);
        receive(plan, extra, 0, incoming, nbytes);
        last = reduce(plan, own, own, incoming, nbytes, 0, 0);
    }
    uint64_t start = 0, stop = call->count, starts[32], stops[32], item = call->item;
    int round = 0;
    for (int distance = 1; distance < core; distance *= 2, round++) {
        int partner = rank ^ distance, is_last = 2 * distance == core;
        /* The partner differs in this bit only, so both have made the same cuts so far. */
        uint64_t middle = (start + stop + 1) / 2, given = start, given_end = stop;
        starts[round] = start, stops[round] = stop;
        if (halves) {
            if (rank & distance)
                given_end = middle, start = middle;
            else
                given = middle, stop = middle;
        }
        uint64_t kept_bytes = (stop - start) * item;
        ud_place kept = at(UD_TARGET, start * item), incoming = scratch(plan, kept_bytes);
        send(plan, partner, DOUBLING_TAG + (uint32_t)round, at(UD_TARGET, given * item), (given_end - given) * item, last,
             -1);
        receive(plan, partner, DOUBLING_TAG + (uint32_t)round, incoming, kept_bytes);
        last = reduce(plan, kept, kept, incoming, kept_bytes, partner < rank, is_last);
    }
    while (halves && round-- > 0) {
        int partner = rank ^ (1 << round);
        uint64_t from = start == starts[round] ? stop : starts[round];
        uint64_t missing = stops[round] - starts[round] - (stop - start);
        send(plan, partner, BACK_TAG + (uint32_t)round, at(UD_TARGET, start * item), (stop - start) * item, last, -1);
        last = receive(plan, partner, BACK_TAG + (uint32_t)round, at(UD_TARGET, from * item), missing * item);
        start = starts[round], stop = stops[round];
    }
    if (extra >= 0) send(plan, extra, 1, at(UD_TARGET, 0), nbytes, last, -1);
}

/* The first half of the ring of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
 * workstations", 2009, section 3. Piece i starts at rank i + 1 and is complete when it comes to rank i. Returns the last
 * step. With `in_target`, pieces are added up at their place in the target; else in scratch memory, but for the own one,
 * which is all that the target holds. */
static int ring_reducescatter(ud_plan *plan, const ud_call *call, const uint64_t *starts, int in_target) {
    int rank = call->rank, size = call->size, last = -1;
    ud_place from = {0};
    for (int step = 0; step < size - 1; step++) {
        int given = around(rank - step - 1, size), kept = around(rank - step - 2, size);
        uint64_t nbytes = starts[kept + 1] - starts[kept];
        if (step == 0) from = at(UD_SOURCE, starts[given]);
        send(plan, around(rank + 1, size), (uint32_t)step, from, starts[given + 1] - starts[given], -1, last);
        from = in_target ? at(UD_TARGET, starts[kept]) : kept == rank ? at(UD_TARGET, 0) : scratch(plan, nbytes);
        last = receive_reduce(plan, around(rank - 1, size), (uint32_t)step, from, at(UD_SOURCE, starts[kept]), nbytes,
                              step == size - 2);
    }
    return last;
}

/* Piece i starts at rank i and goes around. `last`: the step that completes this rank's, or -1: it is in `own`. */
static void ring_allgather(ud_plan *plan, const ud_call *call, const uint64_t *starts, ud_place own, int last) {
    int rank = call->rank, size = call->size;
    for (int step = 0; step < size - 1; step++) {
        int given = around(rank - step, size), kept = around(rank - step - 1, size);
        uint32_t tag = (uint32_t)(size - 1 + step);
        ud_place from = step == 0 ? own : at(UD_TARGET, starts[given]);
        send(plan, around(rank + 1, size), tag, from, starts[given + 1] - starts[given], -1, last);
        last = receive(plan, around(rank - 1, size), tag, at(UD_TARGET, starts[kept]), starts[kept + 1] - starts[kept]);
    }
}

static void direct_allgather(ud_plan *plan, const ud_call *call, const uint64_t *starts) {
    int rank = call->rank, size = call->size;
    for (int i = 1; i < size; i++)
        send(plan, around(rank + i, size), 0, at(UD_SOURCE, 0), starts[rank + 1] - starts[rank], -1, -1);
    for (int i = 1; i < size; i++) {
        int source = around(rank - i, size);
        receive(plan, source, 0, at(UD_TARGET, starts[source]), starts[source + 1] - starts[source]);
    }
}

static void direct_reducescatter(ud_plan *plan, const ud_call *call, const uint64_t *starts) {
    int rank = call->rank, size = call->size;
    uint64_t nbytes = starts[rank + 1] - starts[rank], stride = (nbytes + 63) / 64 * 64;
    ud_place slots = scratch(plan, stride * (uint64_t)size);
    for (int i = 1; i < size; i++) {
        int to = around(rank + i, size);
        send(plan, to, 0, at(UD_SOURCE, starts[to]), starts[to + 1] - starts[to], -1, -1);
    }
    for (int i = 1; i < size; i++) {
        int source = around(rank - i, size);
        receive(plan, source, 0, at(UD_SCRATCH, slots.offset + stride * (uint64_t)source), nbytes);
    }
    reduce_slots(plan, at(UD_TARGET, 0), at(UD_SOURCE, starts[rank]), slots, stride, nbytes);
}

/* A binomial tree: the ranks that have the buffer double at each round. Each passes segments on as they come. */
static void tree_broadcast(ud_plan *plan, const ud_call *call) {
    uint64_t nbytes = call->count * call->item;
    int size = call->size, position = around(call->rank - call->root, size), received = -1, distance = 1;
    while (distance <= position) distance *= 2; /* it comes in the round before this one */
    if (position) received = receive(plan, around(call->rank - distance / 2, size), 0, at(UD_TARGET, 0), nbytes);
    for (; position + distance < size; distance *= 2)
        send(plan, around(call->rank + distance, size), 0, at(UD_TARGET, 0), nbytes, -1, received);
}

/* Along a line, in segments: each rank sends no more than once what it got. */
static void chain_broadcast(ud_plan *plan, const ud_call *call) {
    uint64_t nbytes = call->count * call->item;
    int size = call->size, position = around(call->rank - call->root, size), received = -1;
    if (position) received = receive(plan, around(call->rank - 1, size), 0, at(UD_TARGET, 0), nbytes);
    if (position < size - 1) send(plan, around(call->rank + 1, size), 0, at(UD_TARGET, 0), nbytes, -1, received);
}

static void pairwise_alltoall(ud_plan *plan, const ud_call *call, const uint64_t *sent, const uint64_t *received) {
    int rank = call->rank, size = call->size;
    copy(plan, at(UD_TARGET, received[rank]), at(UD_SOURCE, sent[rank]), sent[rank + 1] - sent[rank], 0);
    for (int i = 1; i < size; i++) { /* empty pieces too: so every pair compares its counts */
        int to = around(rank + i, size), source = around(rank - i, size);
        send(plan, to, 0, at(UD_SOURCE, sent[to]), sent[to + 1] - sent[to], -1, -1);
        receive(plan, source, 0, at(UD_TARGET, received[source]), received[source + 1] - received[source]);
    }
}

/* Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988: after log2(size) rounds each rank has
 * heard of all. */
static void dissemination_barrier(ud_plan *plan, const ud_call *call) {
    int last = -1, round = 0;
    for (int distance = 1; distance < call->size; distance *= 2, round++) {
        send(plan, around(call->rank + distance, call->size), (uint32_t)round, at(UD_SOURCE, 0), 0, last, -1);
        last = receive(plan, around(call->rank - distance, call->size), (uint32_t)round, at(UD_TARGET, 0), 0);
    }
}

int ud_make_plan(ud_plan *plan, const ud_call *call) {
    memset(plan, 0, sizeof *plan);
    uint64_t nbytes = call->count * call->item;
    uint64_t *starts = calloc((size_t)call->size + 1, sizeof *starts), *ends = calloc((size_t)call->size + 1, sizeof *ends);
    int algorithm = ud_choose(call->opcode, call->size, nbytes), rank = call->rank;
    if (!starts || !ends) plan->failed = 1;
    else switch (call->opcode) {
    case UD_ALLREDUCE:
        cut_evenly(call, starts);
        if (algorithm == UD_ALONE) copy(plan, at(UD_TARGET, 0), at(UD_SOURCE, 0), nbytes, 1);
        else if (algorithm == UD_DIRECT) direct_allreduce(plan, call);
        else if (algorithm != UD_RING) butterfly_allreduce(plan, call, algorithm == UD_HALVING);
        else {
            int last = ring_reducescatter(plan, call, starts, 1);
            ring_allgather(plan, call, starts, at(UD_TARGET, starts[rank]), last);
        }
        break;
    case UD_REDUCESCATTER:
        cut_by_counts(call, call->counts, starts);
        if (algorithm == UD_ALONE) copy(plan, at(UD_TARGET, 0), at(UD_SOURCE, 0), nbytes, 1);
        else if (algorithm == UD_DIRECT) direct_reducescatter(plan, call, starts);
        else ring_reducescatter(plan, call, starts, 0);
        break;
    case UD_ALLGATHER:
        cut_by_counts(call, call->counts, starts);
        copy(plan, at(UD_TARGET, starts[rank]), at(UD_SOURCE, 0), starts[rank + 1] - starts[rank], 0);
        if (algorithm == UD_DIRECT) direct_allgather(plan, call, starts);
        else if (algorithm == UD_RING) ring_allgather(plan, call, starts, at(UD_SOURCE, 0), -1);
        break;
    case UD_BROADCAST:
        if (algorithm == UD_TREE) tree_broadcast(plan, call);
        else if (algorithm == UD_CHAIN) chain_broadcast(plan, call);
        break;
    case UD_ALLTOALL:
        cut_by_counts(call, call->counts, starts);
        cut_by_counts(call, call->counts2, ends);
        pairwise_alltoall(plan, call, starts, ends);
        break;
    case UD_BARRIER: dissemination_barrier(plan, call); break;
    default: plan->failed = 1;
    }
    free(starts);
    free(ends);
    return plan->failed ? -1 : 0;
}

void ud_free_plan(ud_plan *plan) {
    free(plan->steps);
    plan->steps = NULL;
}
