/* The groups of this process that have operations under way.
 *
 * Operations over engine memory need a hand from every rank, and a rank may sit in a wait on another group when
 * its peers need that hand. Whoever waits therefore moves the operations of all groups; without it two
 * groups could wait for each other in a circle. */
#include "group.h"

static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static ud_group *active;

void ud_activate(ud_group *group) {
    pthread_mutex_lock(&list_mutex);
    if (!group->is_active) {
        group->is_active = 1;
        group->next_active = active;
        active = group;
    }
    pthread_mutex_unlock(&list_mutex);
}

void ud_deactivate(ud_group *group) {
    pthread_mutex_lock(&list_mutex);
    for (ud_group **link = &active; *link; link = &(*link)->next_active)
        if (*link == group) {
            *link = group->next_active;
            break;
        }
    group->is_active = 0;
    pthread_mutex_unlock(&list_mutex);
}

/* Returns whether some group has operations or messages under way that only looking again can move. One that is being driven, by the caller or by another
 * thread, is left to it. */
int ud_progress_all(void) {
    int busy = 0;
    pthread_mutex_lock(&list_mutex);
    for (ud_group *group = active; group; group = group->next_active) {
        busy |= ud_move_messages(group);
        if (pthread_mutex_trylock(&group->mutex)) continue;
        if (group->posted != group->completed) {
            ud_blame ignored; /* the owner meets the same error when it drives the group itself */
            ud_drive(group, group->posted, 0, &ignored);
            busy = 1;
        }
        pthread_mutex_unlock(&group->mutex);
    }
    pthread_mutex_unlock(&list_mutex);
    return busy;
}
