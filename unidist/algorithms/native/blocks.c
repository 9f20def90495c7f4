#include "blocks.h"

#include "kernels.h"

#include <string.h>

int ud_cycle_fits(const ud_cycle *cycle, int size) {
    return cycle->block_bytes <= cycle->stride && cycle->source_bytes <= cycle->stride - cycle->block_bytes &&
           (!cycle->target || size <= UD_CYCLE_RANKS);
}

void ud_fill_cycle(const ud_cycle *cycle) {
    memcpy(cycle->own, cycle->block, cycle->block_bytes);
    if (cycle->source_bytes) memcpy(cycle->own + cycle->block_bytes, cycle->source, cycle->source_bytes);
}

int ud_conclude_cycle(const ud_cycle *cycle, int size) {
    const char *sources[UD_CYCLE_RANKS];
    for (int m = 0; m < size; m++) {
        const char *block = cycle->all + (size_t)m * cycle->stride;
        if (memcmp(block, cycle->own, cycle->block_bytes)) return 0;
        if (cycle->target) sources[m] = block + cycle->block_bytes;
    }
    char *target = cycle->target;
    if (target) ud_reduce(&target, 1, sources, size, cycle->count, cycle->dtype, cycle->redop, cycle->scale, 0);
    return 1;
}
