/* Connections between the ranks of a job, and groups of ranks that use them.
 *
 * A pair of ranks has one connection for what is short (its first *lane*), and more for what is long. Everything travels
 * in frames, each complete in itself: so groups share connections, and a frame never waits for another one's receiver.
 * What is longer than UD_EAGER_BYTES travels only after its receiver has granted it, when the memory is known that it goes
 * to. So nothing long is ever kept for later, and every lane is always read.
 *
 * One mutex guards all of it. A thread that waits *leads*: it looks at the connections, for all groups, without the mutex
 * while nothing comes. Other threads that wait meanwhile sleep until the leader has something for them, or leaves. A thread
 * of the transport leads where operations are under way and nobody waits, so that they go on while the ranks compute. */
#ifndef UNIDIST_TCP_H
#define UNIDIST_TCP_H

#include "plan.h"
#include "tls.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/uio.h>

#define UD_TCP_MAGIC 0x31504354u
#define UD_TEXT_BYTES 1024
#define UD_MAX_LANES 9
#define UD_MAX_SLOTS 1024 /* ranks whose payloads are added up at once */

enum ud_kind {
    UD_DATA = 1,
    UD_OFFER,   /* a long message waits for its grant */
    UD_GRANT,
    UD_ABORT,   /* the payload says why */
    UD_CLOSE,   /* seq: collectives that the sender has entered; total: messages that it has sent to the receiver */
    UD_ENTERED, /* seq: collectives that the sender has entered; tag 1: the receiver shall say the same */
    UD_NUM_KINDS
};

enum ud_status {
    UD_DONE,
    UD_PENDING,
    UD_TIMEOUT,
    UD_LOST,     /* a peer died or left */
    UD_ABORTED,
    UD_MISMATCH, /* the ranks called different operations */
    UD_CLOSED,
    UD_MISFIT,   /* a message of another size: the receive failed, the group goes on */
};

typedef struct { /* as on the wire; both ends have the same byte order, which the handshake makes sure of */
    uint32_t magic;
    uint8_t kind, opcode, dtype, redop;
    uint64_t group, seq;
    uint64_t total;  /* bytes of the whole transfer */
    uint64_t offset; /* of this frame in it */
    uint64_t count;  /* elements of the operation */
    uint32_t length; /* bytes that follow */
    uint32_t tag, root, hash;
} ud_frame;

typedef struct ud_transport ud_transport;
typedef struct ud_group ud_group;
typedef struct ud_op ud_op;

typedef struct { /* a step that is under way */
    char *target, *own, *other;
    uint64_t taken;   /* bytes that lanes have taken to send */
    uint64_t moved;   /* bytes that were sent, or have come */
    uint64_t prefix;  /* bytes from the start that have come without a gap */
    uint8_t *seen;    /* segments that have come */
    int8_t granted, queued, complete;
} ud_transfer;

struct ud_op {
    ud_transport *transport;
    ud_group *group;     /* NULL: the operation has ended */
    ud_op *next, *before; /* of the group, oldest first */
    int opcode, dtype, redop, peer; /* peer: of a message */
    uint32_t root, hash;
    uint64_t seq, count, item;
    double scale;
    char *scratch;
    ud_plan plan;
    ud_transfer *transfers;
    int prefix;          /* steps from the start that are complete */
    int status;
    int orphan;          /* nobody will ask for it any more */
    uint64_t other_bytes; /* of a message that did not fit */
    int64_t posted_ns, asked_ns;
};

typedef struct ud_stored { /* a frame that came before its operation */
    struct ud_stored *next;
    int peer; /* rank in the group */
    ud_frame frame;
    char data[];
} ud_stored;

struct ud_group {
    ud_transport *transport;
    ud_group *next;
    uint64_t id;
    int rank, size;
    int *members;         /* world ranks */
    ud_op *first, *last;
    ud_stored *stored, **stored_end;
    uint64_t collectives; /* entered by this rank */
    uint64_t *sent, *received; /* messages to and from each rank */
    uint64_t *entered;    /* collectives that each rank is known to have entered */
    uint8_t *left;        /* has closed the group, after so many collectives and messages to this rank: */
    uint64_t *left_after, *left_messages;
    int failure, culprit; /* why no operation can succeed any more */
    char text[UD_TEXT_BYTES];
    int closed;
};

typedef struct ud_packet { /* a frame that waits for the first lane */
    struct ud_packet *next;
    ud_frame frame;
    const char *payload;
    ud_op *op; /* whose step this is; NULL: the payload belongs to the packet */
    int step;
    char data[];
} ud_packet;

typedef struct {
    struct ud_peer *peer;
    int fd, index, is_open, wants_write;
    ud_tls *tls;    /* NULL: nothing is encrypted */
    int has_unread; /* bytes may have come that the descriptor does not tell of */
    /* being sent */
    int sending;
    ud_frame out;
    uint64_t out_done; /* of header and payload */
    const char *out_payload;
    ud_packet *out_packet;
    char *out_copy; /* of the rest of a payload whose operation has ended */
    ud_op *out_op;
    int out_step;
    /* being received */
    char *buffer;
    size_t begin, end;
    int receiving;
    ud_frame in;
    char *in_target; /* NULL: thrown away */
    uint32_t in_done;
    ud_op *in_op;
    int in_step;
    ud_stored *in_stored;
    char *in_text;
    char *scratch; /* for one segment */
    int64_t suspected_ns; /* since when nothing was acknowledged */
} ud_lane;

typedef struct { /* a long step that lanes may take segments from */
    ud_op *op;
    int step;
} ud_long;

typedef struct ud_peer {
    ud_transport *transport;
    int rank, num_lanes, num_open, is_lost, dirty;
    ud_lane lanes[UD_MAX_LANES];
    ud_packet *packets, **packets_end;
    ud_long *longs;
    int num_longs, longs_capacity;
    int64_t lone_since_ns; /* since when some lanes are closed */
} ud_peer;

struct ud_transport {
    pthread_mutex_t mutex;
    pthread_cond_t came; /* something happened that a waiting thread may want to know */
    pthread_cond_t nap;  /* the transport's thread may have something to do */
    pthread_t thread;
    int has_thread, stop;
    int rank, size, epoll, kick;
    ud_peer *peers;
    ud_group *groups;
    int leading, thread_leads, waiting, num_pending;
    int64_t spin_ns, heartbeat_ns, last_post_ns, next_tick_ns;
    int napping_long, any_dirty, any_unread;
    uint64_t num_bytes_sent;
};

int64_t ud_now(void);

/* lane_io.c: as sendmsg and recvmsg without blocking. With fewer bytes than was room for, ud_lane_recv says that there are
 * no more, or that the next call says why. */
ssize_t ud_lane_send(ud_lane *lane, struct iovec *parts, int num_parts);
ssize_t ud_lane_recv(ud_lane *lane, struct iovec *parts, int num_parts);

/* transport.c */
/* Takes the descriptors, and what encrypts them, even if it fails; tls is NULL if nothing is encrypted. */
ud_transport *ud_open(int rank, int size, const int *num_lanes, int *const *fds, ud_tls *const *const *tls, int64_t spin_ns,
                      int64_t heartbeat_ns);
/* Ends the thread, waits up to linger_ns until peers have all that was sent, and closes. No group is open any more. */
void ud_shut(ud_transport *transport, int64_t linger_ns);
void ud_free_transport(ud_transport *transport); /* after ud_shut, and after all operations were released */
void ud_forget(ud_transport *transport); /* in a forked child: closes the descriptors, and nothing else */
/* Waits until an operation has ended: its status, UD_PENDING with a timeout of 0, or UD_TIMEOUT. */
int ud_drive(ud_op *op, int64_t timeout_ns);
void ud_kick(ud_transport *transport); /* the leader looks again; with the mutex held, as all that follow */
void ud_flush(ud_transport *transport);
void ud_enqueue(ud_peer *peer, const ud_frame *frame, const void *payload, ud_op *op, int step);
void ud_enqueue_long(ud_peer *peer, ud_op *op, int step);
void ud_mark_dirty(ud_peer *peer);
void ud_detach(ud_op *op); /* no lane touches its memory any more */

/* group.c */
ud_group *ud_open_group(ud_transport *transport, uint64_t id, int rank, int size, const int *members);
/* Tells the others, and ends what is pending. The group can be freed afterwards. */
void ud_close_group(ud_group *group);
void ud_free_group(ud_group *group);
typedef struct {
    int opcode, dtype, redop, root;
    uint64_t count;
    double scale;
    const char *source;
    char *target;
    const uint64_t *counts, *counts2;
} ud_request;
/* Begins an operation. NULL: there is no memory. It may have ended already. */
ud_op *ud_post(ud_group *group, const ud_request *request);
ud_op *ud_post_message(ud_group *group, int is_send, int peer, char *buffer, uint64_t nbytes);
void ud_release(ud_op *op);
void ud_fail(ud_group *group, int failure, int culprit, const char *text, int tell);
int ud_missing(ud_group *group, int *ranks); /* of the oldest collective; returns how many */
int ud_missing_in(const ud_op *op, int *ranks);
void ud_peer_lost(ud_peer *peer, const char *why);
void ud_ask_around(ud_group *group, int64_t now);
/* A frame begins: where its payload goes to. Returns -1 if it is none that a rank sends. */
int ud_begin_frame(ud_lane *lane);
void ud_end_frame(ud_lane *lane);
void ud_moved(ud_op *op, int step, uint64_t nbytes); /* bytes of a send are with the kernel */
uint64_t ud_available(const ud_op *op, int step);    /* bytes that a long step could send now, from its start */
#endif
