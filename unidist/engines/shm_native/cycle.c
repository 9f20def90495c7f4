/* A cycle of named operations in one call: an all-gather of blocks, and what is done if all are equal. */
#include "group.h"

#include "kernels.h"

#include <stdlib.h>

/* Posts the all-gather as `post` would, so that the other ranks may come to it by either way. */
int ud_post_blocks(ud_group *group, const ud_cycle *cycle, int64_t deadline, uint64_t *number, ud_blame *blame) {
    ud_op op = {.opcode = UD_ALLGATHER, .dtype = UD_UINT8, .redop = UD_SUM, .scale = 1.0, .count = cycle->stride,
                .source = cycle->own, .target = cycle->all};
    op.counts = malloc((size_t)group->size * sizeof *op.counts);
    if (!op.counts) return UD_PENDING;
    for (int i = 0; i < group->size; i++) op.counts[i] = cycle->stride;
    pthread_mutex_lock(&group->post_mutex);
    int status = ud_post(group, &op, deadline, blame);
    if (status == UD_OK) *number = group->posted;
    pthread_mutex_unlock(&group->post_mutex);
    if (status != UD_OK) ud_free_op(&op);
    return status;
}

int ud_finish_blocks(ud_group *group, const ud_cycle *cycle) {
    pthread_mutex_lock(&group->failure_mutex);
    int has_failed = group->failures != NULL;
    pthread_mutex_unlock(&group->failure_mutex);
    return has_failed ? -1 : ud_conclude_cycle(cycle, group->size);
}
