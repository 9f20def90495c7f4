/* Point-to-point messages: the sender posts where in its engine memory the bytes are, the receiver copies them
 * out and advances its counter, after which the sender may reuse the memory. In order per pair. */
#include "group.h"

#include <string.h>

/* How many messages `member` has sent to this rank; how many of this rank's it has received. */
static ud_counter *sent_by(ud_group *group, int member) { return ud_sent(group->slots[member], group->rank); }
ud_counter *ud_received_by(ud_group *group, int member) {
    return ud_received(group->slots[member], group->size, group->rank);
}

int ud_send(ud_group *group, int to, int64_t offset, uint64_t nbytes, int dtype, int64_t deadline, ud_blame *blame) {
    ud_slot *own = group->slots[group->rank];
    ud_counter *sent = ud_sent(own, to);
    uint32_t number = atomic_load(&sent->value) + 1;
    int status = ud_wait(group, ud_received_by, to, number - UD_MESSAGES, deadline, blame);
    if (status) return status;
    ud_messages(own, group->size, to)[number % UD_MESSAGES] =
        (ud_message){.nbytes = nbytes, .offset = offset, .dtype = (uint32_t)dtype};
    ud_publish(sent, number);
    return UD_OK;
}

int ud_receive(ud_group *group, int from, char *target, uint64_t nbytes, int dtype, int64_t deadline, ud_blame *blame,
               ud_message *found) {
    ud_counter *received = ud_received(group->slots[group->rank], group->size, from);
    uint32_t number = atomic_load(&received->value) + 1;
    int status = ud_wait(group, sent_by, from, number, deadline, blame);
    if (status) return status;
    *found = ud_messages(group->slots[from], group->size, group->rank)[number % UD_MESSAGES];
    int fits = found->nbytes == nbytes && (int)found->dtype == dtype;
    if (fits && nbytes) memcpy(target, group->bases[from] + found->offset, nbytes);
    ud_publish(received, number); /* also when it does not fit: the message is used up */
    return fits ? UD_OK : UD_MISMATCH;
}
