/* A cycle of named operations: a block of every rank with data behind it, which is reduced if all blocks are equal. */
#ifndef UNIDIST_BLOCKS_H
#define UNIDIST_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

#define UD_CYCLE_RANKS 64 /* at most, whose data is reduced in a cycle */

typedef struct {
    char *own;         /* one block and its data: `stride` bytes */
    char *all;         /* those of every rank, by rank */
    size_t block_bytes, stride;
    const char *block, *source; /* what goes to `own` */
    size_t source_bytes;
    char *target;      /* of the reduction; NULL: nothing is reduced */
    uint64_t count;
    uint8_t dtype, redop;
    double scale;
} ud_cycle;

/* Whether there is room for the data, of so many ranks. */
int ud_cycle_fits(const ud_cycle *cycle, int size);
/* Before the all-gather of `own` to `all`. */
void ud_fill_cycle(const ud_cycle *cycle);
/* After it: whether all blocks are equal, so that the data is reduced. */
int ud_conclude_cycle(const ud_cycle *cycle, int size);

#endif
