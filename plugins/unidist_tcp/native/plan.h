/* The steps of a collective on one rank: what is sent, received and added up, and what waits for what. Pure. */
#ifndef UNIDIST_TCP_PLAN_H
#define UNIDIST_TCP_PLAN_H

#include <stddef.h>
#include <stdint.h>

#define UD_EAGER_BYTES (32 << 10)   /* up to this, a message travels without being asked for */
#define UD_SEGMENT_BYTES (256 << 10) /* what is longer travels in segments; a multiple of every element size */
#define UD_MAX_DIRECT 8             /* ranks that send small payloads to all others at once */

enum ud_opcode { UD_ALLREDUCE, UD_ALLGATHER, UD_BROADCAST, UD_REDUCESCATTER, UD_ALLTOALL, UD_BARRIER, UD_MESSAGE };

enum ud_space { UD_SOURCE, UD_TARGET, UD_SCRATCH };

enum ud_step_kind {
    UD_SEND,
    UD_RECV,
    UD_RECV_REDUCE, /* target = own op what came, segment by segment */
    UD_COPY,        /* target = own; with a scale where `scaled` */
    UD_REDUCE,      /* target = own op other, or other op own with `swap` */
    UD_REDUCE_ALL,  /* target = op over the slots of all ranks in `other`, own in place of this rank's slot */
};

typedef struct {
    uint64_t offset;
    int space;
} ud_place;

/* Steps of the last three kinds are local: they begin when all steps before them are complete. */
typedef struct {
    int kind;
    int peer;
    uint32_t tag;    /* with the peer, pairs a send with its receive */
    uint64_t nbytes;
    ud_place target; /* what is sent, or where the result is put */
    ud_place own, other;
    uint64_t stride; /* of the slots of UD_REDUCE_ALL */
    int swap, scaled;
    int after;       /* a send begins when all steps up to this one are complete; -1: at once */
    int stream;      /* a send follows the receive of the same bytes, segment by segment; -1: none */
} ud_step;

typedef struct {
    int opcode, rank, size, root;
    uint64_t count;          /* elements of the source; of the target in an all-gather */
    uint64_t item;           /* bytes of an element */
    const uint64_t *counts;  /* elements of each rank's piece; all-to-all: to each rank */
    const uint64_t *counts2; /* all-to-all: from each rank */
    int in_place;            /* source and target are the same memory */
} ud_call;

typedef struct {
    ud_step *steps;
    int num_steps, capacity;
    uint64_t scratch_bytes;
    int failed; /* no memory */
} ud_plan;

enum ud_algorithm { UD_DIRECT, UD_DOUBLING, UD_HALVING, UD_RING, UD_TREE, UD_CHAIN, UD_ALONE };

/* By size, the same on every rank. */
int ud_choose(int opcode, int size, uint64_t nbytes);

/* Returns 0, or -1 without memory. The plan is freed with ud_free_plan either way. */
int ud_make_plan(ud_plan *plan, const ud_call *call);
void ud_free_plan(ud_plan *plan);

#endif
