/* One group of ranks over shared memory: the layout that all of them see, and each one's private view.
 *
 * Every rank owns one *slot* in its own engine memory, mapped by all. A slot holds counters that only its
 * owner advances, a ring of operation descriptors, small payloads, and two staging windows. Nothing in it is
 * ever locked: a rank publishes by storing a counter (release) and reads after loading one (acquire).
 *
 * Collectives are numbered (`seq`) in the order in which every rank issues them. Two counters carry them:
 *   op_arrived >= seq   the owner has posted descriptor and small payload of operation seq;
 *   op_done    >= seq   the owner will read no other rank's memory for operation seq any more.
 * Ordinary memory larger than a small payload goes through the windows, numbered over all operations:
 *   win_arrived >= w    the owner's window w is filled;
 *   win_done    >= w    the owner's part of window w is reduced.
 * Windows alternate between two halves. Filling window w+2 overwrites w: safe, because a rank fills w+2 after
 * it saw everybody arrive at w+1, and arrives at w+1 only after it read all it needs of w. */
#ifndef UNIDIST_GROUP_H
#define UNIDIST_GROUP_H

#include "blocks.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define UD_RING 64        /* operations that may be under way at once; also descriptors kept for peers */
#define UD_MESSAGES 64    /* point-to-point messages under way per pair */
#define UD_NO_OFFSET (-1) /* memory that is not engine memory */
#define UD_REASON 240

enum ud_status { UD_OK, UD_PENDING, UD_TIMEOUT, UD_LOST, UD_ABORTED, UD_MISMATCH, UD_CLOSED };
enum ud_opcode { UD_ALLREDUCE, UD_ALLGATHER, UD_BROADCAST, UD_REDUCESCATTER, UD_ALLTOALL, UD_BARRIER };

typedef struct {
    _Alignas(64) _Atomic uint32_t value; /* also the futex word */
    _Atomic uint32_t waiters;
} ud_counter;

typedef struct { /* what an operation looks like to the other ranks */
    uint8_t opcode, dtype, redop, unused;
    uint32_t root;
    uint64_t count;       /* elements of the source */
    uint64_t layout;      /* hash of the counts per rank, where every rank must pass the same */
    double scale;
    int64_t source, target; /* offsets in the owner's engine memory, or UD_NO_OFFSET */
} ud_descriptor;

typedef struct { /* a message under way, in the sender's slot */
    uint64_t nbytes;
    int64_t offset; /* in the sender's engine memory */
    uint32_t dtype;
} ud_message;

typedef struct {
    ud_counter op_arrived, op_done, win_arrived, win_done;
    _Alignas(64) _Atomic uint32_t aborted; /* set in every slot of the group by whoever aborts */
    uint32_t abort_rank;
    _Atomic uint32_t closed; /* the owner looks at no slot of the group any more */
    char abort_reason[UD_REASON];
    ud_descriptor ring[UD_RING];
    /* Then, found by the functions below: sent[size], received[size] counters, messages[size][UD_MESSAGES],
     * small[UD_RING][small_bytes], windows[2][window_bytes]. */
} ud_slot;

typedef struct { /* an operation as its owner sees it */
    uint32_t seq;
    uint8_t opcode, dtype, redop;
    uint32_t root;
    uint64_t count;
    double scale;
    const char *source;
    char *target;
    uint64_t *counts;  /* per rank: of the target (allgather), the source (reducescatter), sent (alltoall) */
    uint64_t *counts2; /* received (alltoall) */
    int phase;         /* how far an operation in several steps has come */
    uint64_t window;
} ud_op;

typedef struct ud_failure {
    struct ud_failure *next;
    uint64_t number;
    char text[1024];
} ud_failure;

typedef struct ud_queued { /* a message that the ring has no room for, or a receive that waits for one */
    struct ud_queued *next;
    uint32_t number;
    ud_message message; /* of a receive: what is wanted */
    char *target;       /* of a receive */
} ud_queued;

typedef struct { /* per peer and direction */
    ud_queued *first, *last;
    uint32_t posted; /* number of the last one */
} ud_queue;

typedef struct ud_misfit { /* a message of another size or dtype than its receive */
    struct ud_misfit *next;
    int from;
    uint32_t number;
    ud_message found;
} ud_misfit;

typedef struct { /* one process's groups that have operations under way; see progress.c */
    pthread_mutex_t mutex;
    struct ud_group *first;
} ud_process;

typedef struct ud_group {
    int rank, size;
    ud_process *process;
    _Atomic uint32_t users; /* calls under way in this process, and UD_CLOSING once it was closed; see lifetime.c */
    ud_slot **slots;   /* every member's slot, in this process's mapping */
    char **bases;      /* every member's engine memory */
    uint64_t *capacities;
    int *liveness;     /* read ends of pipes that break when the member dies; -1 for oneself */
    size_t small_bytes, window_bytes;
    int64_t spin_ns;   /* how long to spin before giving the processor away */

    _Atomic uint64_t posted, completed; /* numbers of the last operation posted and completed here; shared: the low 32 bits */
    uint32_t window;            /* number of the last window used */
    ud_op ops[UD_RING];
    pthread_mutex_t mutex;      /* held while operations are driven */
    pthread_mutex_t post_mutex; /* held while one is posted, before `mutex` where both are: posting waits for no driving */
    ud_failure *failures;
    pthread_mutex_t failure_mutex; /* guards the failures; never held in a wait */
    ud_queue *outgoing, *incoming; /* per member */
    ud_misfit *misfits;
    _Atomic int awaited;           /* the member whose message a thread sleeps for, or -1 */
    pthread_mutex_t message_mutex; /* guards the queues and misfits; never held in a wait */
    struct ud_group *next_active;
    int is_active;
} ud_group;

typedef struct { /* the outcome of a wait: which rank was lost, aborted or missing */
    int rank;
} ud_blame;

/* sync.c */
int64_t ud_now(void);
void ud_publish(ud_counter *counter, uint32_t value);
static inline int ud_reached(ud_counter *counter, uint32_t value) {
    return (int32_t)(atomic_load_explicit(&counter->value, memory_order_acquire) - value) >= 0;
}
/* Waits until `counter_of(member)` of every member (or of `only`, when >= 0) reaches `value`.
 * deadline: ud_now() time in ns, or 0 to look once and return UD_PENDING. */
typedef ud_counter *(*ud_counter_of)(ud_group *, int member);
int ud_wait(ud_group *group, ud_counter_of counter_of, int only, uint32_t value, int64_t deadline, ud_blame *blame);
ud_counter *ud_op_arrived(ud_group *group, int member);
ud_counter *ud_op_done(ud_group *group, int member);
ud_counter *ud_win_arrived(ud_group *group, int member);
ud_counter *ud_win_done(ud_group *group, int member);
int ud_is_aborted(ud_group *group);
int ud_check_abort(ud_group *group, ud_blame *blame); /* UD_ABORTED, UD_CLOSED, or UD_OK */
void ud_abort(ud_group *group, int rank, const char *reason);

/* lifetime.c: a closed group's memory is unmapped, so every call says when it begins and ends */
int ud_init_group(ud_group *group, ud_process *process); /* of a zeroed group; whether there was memory */
void ud_free_group(ud_group *group);
int ud_enter(ud_group *group); /* whether the group is open; if so, ud_leave follows */
void ud_leave(ud_group *group);
void ud_close(ud_group *group); /* once; waits until every other call has ended, with UD_CLOSED */
int ud_is_closing(ud_group *group);

/* cycle.c */
int ud_post_blocks(ud_group *group, const ud_cycle *cycle, int64_t deadline, uint64_t *number, ud_blame *blame);
/* Whether all blocks are equal, so that the data is reduced; -1: an operation has failed, perhaps this one. */
int ud_finish_blocks(ud_group *group, const ud_cycle *cycle);

/* collectives.c */
size_t ud_slot_bytes(int size, size_t small_bytes, size_t window_bytes);
ud_counter *ud_sent(ud_slot *slot, int member);
ud_counter *ud_received(ud_slot *slot, int size, int member);
ud_message *ud_messages(ud_slot *slot, int size, int member);
char *ud_small(ud_group *group, int member, uint32_t seq);
char *ud_window(ud_group *group, int member, uint32_t window);
int64_t ud_offset(ud_group *group, const void *address, uint64_t nbytes);
int ud_post(ud_group *group, ud_op *op, int64_t deadline, ud_blame *blame);
int ud_drive(ud_group *group, uint64_t number, int64_t deadline, ud_blame *blame);
void ud_free_op(ud_op *op);

ud_descriptor *ud_descriptor_of(ud_group *group, int member, uint32_t seq);

/* progress.c: groups with operations under way, so that any wait moves them */
void ud_activate(ud_group *group);
void ud_deactivate(ud_group *group);
void ud_deactivate_if_idle(ud_group *group);
int ud_progress_all(ud_process *process);

/* messages.c */
int64_t ud_send(ud_group *group, int to, ud_message message, int *is_posted); /* its number, or -1: no memory */
int64_t ud_receive(ud_group *group, int from, char *target, uint64_t nbytes, int dtype);
/* Until the receiver took message `number`; until it is in the ring; until this rank took message `number`. */
int ud_wait_sent(ud_group *group, int to, uint32_t number, int64_t deadline, ud_blame *blame);
int ud_wait_visible(ud_group *group, int to, uint32_t number, int64_t deadline, ud_blame *blame);
int ud_wait_received(ud_group *group, int from, uint32_t number, int64_t deadline, ud_blame *blame);
int ud_move_messages(ud_group *group); /* returns whether something is left that only looking again can move */
int ud_has_messages(ud_group *group);
void ud_drop_messages(ud_group *group); /* with message_mutex held, or nobody else there */

#endif
