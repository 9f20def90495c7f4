/* Point-to-point messages: the sender posts where in its engine memory the bytes are, the receiver copies them
 * out and advances its counter, after which the sender may reuse the memory. In order per pair.
 *
 * Neither side waits when it posts. What the ring has no room for yet, and receives whose message has not come,
 * queue up here; any wait or poll of this process, on whatever group, moves them (see progress.c). */
#include "group.h"

#include <stdlib.h>
#include <string.h>

/* How many messages `member` has sent to this rank; how many of this rank's it has received. */
static ud_counter *sent_by(ud_group *group, int member) { return ud_sent(group->slots[member], group->rank); }
static ud_counter *received_by(ud_group *group, int member) {
    return ud_received(group->slots[member], group->size, group->rank);
}
static ud_counter *received_from(ud_group *group, int member) {
    return ud_received(group->slots[group->rank], group->size, member);
}

static void append(ud_queue *queue, ud_queued *item) {
    item->next = NULL;
    item->number = ++queue->posted;
    if (queue->last) queue->last->next = item;
    else queue->first = item;
    queue->last = item;
}

static void drop_first(ud_queue *queue) {
    ud_queued *item = queue->first;
    queue->first = item->next;
    if (!queue->first) queue->last = NULL;
    free(item);
}

static void push(ud_group *group, int to) {
    ud_queue *queue = &group->outgoing[to];
    ud_slot *own = group->slots[group->rank];
    while (queue->first && ud_reached(received_by(group, to), queue->first->number - UD_MESSAGES)) {
        uint32_t number = queue->first->number;
        ud_messages(own, group->size, to)[number % UD_MESSAGES] = queue->first->message;
        drop_first(queue);
        ud_publish(ud_sent(own, to), number);
    }
}

static void take(ud_group *group, int from) {
    ud_queue *queue = &group->incoming[from];
    while (queue->first && ud_reached(sent_by(group, from), queue->first->number)) {
        ud_queued *wanted = queue->first;
        uint32_t number = wanted->number;
        ud_message *found = &ud_messages(group->slots[from], group->size, group->rank)[number % UD_MESSAGES];
        if (found->nbytes == wanted->message.nbytes && found->dtype == wanted->message.dtype) {
            if (found->nbytes) memcpy(wanted->target, group->bases[from] + found->offset, found->nbytes);
        } else { /* the message is used up all the same */
            ud_misfit *misfit = malloc(sizeof *misfit);
            if (misfit) {
                *misfit = (ud_misfit){.next = group->misfits, .from = from, .number = number, .found = *found};
                group->misfits = misfit;
            }
        }
        drop_first(queue);
        ud_publish(received_from(group, from), number);
    }
}

int ud_move_messages(ud_group *group) {
    if (!group->outgoing || pthread_mutex_trylock(&group->message_mutex)) return 0;
    int left = 0;
    if (ud_is_aborted(group)) {
        ud_drop_messages(group);
    } else {
        for (int m = 0; m < group->size; m++) {
            if (group->outgoing[m].first) push(group, m);
            if (group->incoming[m].first) take(group, m);
            /* What the caller itself sleeps for wakes it up; anything else it has to look for. */
            left |= group->outgoing[m].first || (group->incoming[m].first && m != atomic_load(&group->awaited));
        }
    }
    pthread_mutex_unlock(&group->message_mutex);
    return left;
}

void ud_drop_messages(ud_group *group) {
    for (int m = 0; group->outgoing && m < group->size; m++) {
        while (group->outgoing[m].first) drop_first(&group->outgoing[m]);
        while (group->incoming[m].first) drop_first(&group->incoming[m]);
    }
}

int ud_has_messages(ud_group *group) {
    int found = 0;
    pthread_mutex_lock(&group->message_mutex);
    for (int m = 0; !found && m < group->size; m++) found = group->outgoing[m].first || group->incoming[m].first;
    pthread_mutex_unlock(&group->message_mutex);
    return found;
}

int64_t ud_send(ud_group *group, int to, ud_message message, int *is_posted) {
    ud_queued *item = malloc(sizeof *item);
    if (!item) return -1;
    item->message = message;
    pthread_mutex_lock(&group->message_mutex);
    append(&group->outgoing[to], item);
    int64_t number = item->number;
    push(group, to);
    *is_posted = !group->outgoing[to].first;
    pthread_mutex_unlock(&group->message_mutex);
    if (!*is_posted) ud_activate(group);
    return number;
}

int64_t ud_receive(ud_group *group, int from, char *target, uint64_t nbytes, int dtype) {
    ud_queued *item = malloc(sizeof *item);
    if (!item) return -1;
    item->message = (ud_message){.nbytes = nbytes, .dtype = (uint32_t)dtype};
    item->target = target;
    pthread_mutex_lock(&group->message_mutex);
    append(&group->incoming[from], item);
    int64_t number = item->number;
    pthread_mutex_unlock(&group->message_mutex);
    ud_activate(group);
    return number;
}

int ud_wait_sent(ud_group *group, int to, uint32_t number, int64_t deadline, ud_blame *blame) {
    ud_move_messages(group);
    return ud_wait(group, received_by, to, number, deadline, blame);
}

int ud_wait_visible(ud_group *group, int to, uint32_t number, int64_t deadline, ud_blame *blame) {
    int status = ud_wait_sent(group, to, number - UD_MESSAGES, deadline, blame);
    if (status) return status;
    pthread_mutex_lock(&group->message_mutex);
    push(group, to);
    pthread_mutex_unlock(&group->message_mutex);
    return UD_OK;
}

int ud_wait_received(ud_group *group, int from, uint32_t number, int64_t deadline, ud_blame *blame) {
    ud_move_messages(group);
    if (ud_reached(received_from(group, from), number)) return UD_OK;
    atomic_store(&group->awaited, from);
    int status = ud_wait(group, sent_by, from, number, deadline, blame);
    atomic_store(&group->awaited, -1);
    if (status) return status;
    pthread_mutex_lock(&group->message_mutex); /* if another thread is copying it right now, until it has */
    if (!ud_is_aborted(group)) take(group, from);
    pthread_mutex_unlock(&group->message_mutex);
    if (ud_reached(received_from(group, from), number)) return UD_OK;
    return ud_check_abort(group, blame);
}
