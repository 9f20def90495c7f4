/* When a group's memory may go. Python unmaps it after `ud_close`, while other threads may be in calls on the group: one
 * that waits for a peer, a monitor that aborts. So calls are counted; closing turns new ones away, ends those that wait,
 * and returns when the last one has left. */
#define _GNU_SOURCE
#include "group.h"

#include <stdlib.h>
#include <time.h>

#define UD_CLOSING (UINT32_C(1) << 31) /* in `users` */
#define LOOK_EVERY_NS 50000

int ud_init_group(ud_group *group, ud_process *process) {
    pthread_mutex_init(&group->mutex, NULL);
    pthread_mutex_init(&group->post_mutex, NULL);
    pthread_mutex_init(&group->failure_mutex, NULL);
    pthread_mutex_init(&group->message_mutex, NULL);
    atomic_store(&group->awaited, -1);
    group->process = process;
    group->outgoing = calloc((size_t)group->size, sizeof *group->outgoing);
    group->incoming = calloc((size_t)group->size, sizeof *group->incoming);
    return group->outgoing && group->incoming;
}

void ud_free_group(ud_group *group) {
    ud_deactivate(group);
    for (int i = 0; i < UD_RING; i++) ud_free_op(&group->ops[i]);
    while (group->failures) {
        ud_failure *next = group->failures->next;
        free(group->failures);
        group->failures = next;
    }
    ud_drop_messages(group);
    while (group->misfits) {
        ud_misfit *next = group->misfits->next;
        free(group->misfits);
        group->misfits = next;
    }
    free(group->outgoing);
    free(group->incoming);
    free(group->slots);
    free(group->bases);
    free(group->capacities);
    free(group->liveness);
    pthread_mutex_destroy(&group->mutex);
    pthread_mutex_destroy(&group->post_mutex);
    pthread_mutex_destroy(&group->failure_mutex);
    pthread_mutex_destroy(&group->message_mutex);
    free(group);
}

int ud_is_closing(ud_group *group) { return (atomic_load(&group->users) & UD_CLOSING) != 0; }

int ud_enter(ud_group *group) {
    if (!(atomic_fetch_add(&group->users, 1) & UD_CLOSING)) return 1;
    ud_leave(group);
    return 0;
}

void ud_leave(ud_group *group) { atomic_fetch_sub(&group->users, 1); }

void ud_close(ud_group *group) {
    atomic_fetch_or(&group->users, UD_CLOSING);
    while (atomic_load(&group->users) != UD_CLOSING) {
        struct timespec pause = {0, LOOK_EVERY_NS};
        nanosleep(&pause, NULL);
    }
    ud_deactivate(group); /* and so no wait on another group moves this one any more */
    pthread_mutex_lock(&group->message_mutex);
    ud_drop_messages(group); /* their buffers go back to their owners */
    pthread_mutex_unlock(&group->message_mutex);
    atomic_store(&group->slots[group->rank]->closed, 1);
}
