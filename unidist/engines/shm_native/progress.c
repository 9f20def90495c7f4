/* The groups of this process that have operations under way.
 *
 * Operations over engine memory need a hand from every rank, and a rank may sit in a wait on another group when
 * its peers need that hand. Whoever waits therefore moves the operations of all groups; without it two
 * groups could wait for each other in a circle. */
#include "group.h"

void ud_activate(ud_group *group) {
    ud_process *process = group->process;
    pthread_mutex_lock(&process->mutex);
    if (!group->is_active) {
        group->is_active = 1;
        group->next_active = process->first;
        process->first = group;
    }
    pthread_mutex_unlock(&process->mutex);
}

/* With the mutex of the process held. */
static void take_out(ud_group *group) {
    for (ud_group **link = &group->process->first; *link; link = &(*link)->next_active)
        if (*link == group) {
            *link = group->next_active;
            break;
        }
    group->is_active = 0;
}

void ud_deactivate(ud_group *group) {
    pthread_mutex_lock(&group->process->mutex);
    take_out(group);
    pthread_mutex_unlock(&group->process->mutex);
}

/* What another thread posts meanwhile stays in the list: it is posted before the group is activated, so either it is
 * seen here, or the group is activated after this. */
void ud_deactivate_if_idle(ud_group *group) {
    pthread_mutex_lock(&group->process->mutex);
    if (group->posted == group->completed && !ud_has_messages(group)) take_out(group);
    pthread_mutex_unlock(&group->process->mutex);
}

/* Returns whether some group has operations or messages under way that only looking again can move. One that is being
 * driven, by the caller or by another thread, is left to it. */
int ud_progress_all(ud_process *process) {
    int busy = 0;
    pthread_mutex_lock(&process->mutex);
    for (ud_group *group = process->first; group; group = group->next_active) {
        busy |= ud_move_messages(group);
        if (pthread_mutex_trylock(&group->mutex)) continue;
        if (group->posted != group->completed) {
            ud_blame ignored; /* the owner meets the same error when it drives the group itself */
            ud_drive(group, group->posted, 0, &ignored);
            busy = 1;
        }
        pthread_mutex_unlock(&group->mutex);
    }
    pthread_mutex_unlock(&process->mutex);
    return busy;
}
