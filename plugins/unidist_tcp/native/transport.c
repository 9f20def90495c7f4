/* Lanes, and who looks at them. */
#define _GNU_SOURCE
#include "tcp.h"

#include <errno.h>
#include <limits.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <linux/sockios.h>
#include <time.h>
#include <unistd.h>

#define BUFFER_BYTES ((size_t)64 << 10)
#define TURN_BYTES ((size_t)1 << 20) /* that a lane moves before others have a turn */
#define EVENTS 64
#define SLICE_NS INT64_C(100000000)
#define TICK_NS INT64_C(100000000)
#define SHORT_NAP_NS INT64_C(1000000)
#define LONG_NAP_NS INT64_C(250000000)
#define ACTIVE_NS INT64_C(100000000) /* after an operation, naps are short */
#define LONE_LANE_NS INT64_C(1000000000)

int64_t ud_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void wait_until(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t deadline) {
    struct timespec t = {.tv_sec = deadline / INT64_C(1000000000), .tv_nsec = deadline % INT64_C(1000000000)};
    pthread_cond_timedwait(condition, mutex, &t);
}

void ud_kick(ud_transport *transport) {
    uint64_t one = 1;
    if (transport->leading && write(transport->kick, &one, sizeof one) < 0) return; /* it was kicked already */
}

void ud_mark_dirty(ud_peer *peer) { peer->dirty = peer->transport->any_dirty = 1; }

static void want_write(ud_lane *lane, int wanted) {
    if (lane->wants_write == wanted || !lane->is_open) return;
    struct epoll_event event = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = lane};
    epoll_ctl(lane->peer->transport->epoll, EPOLL_CTL_MOD, lane->fd, &event);
    lane->wants_write = wanted;
}

/* Sending */

void ud_enqueue(ud_peer *peer, const ud_frame *frame, const void *payload, ud_op *op, int step) {
    size_t copied = op ? 0 : frame->length;
    ud_packet *packet = malloc(sizeof *packet + copied);
    if (!packet) { /* the connection is of no use with a frame missing */
        ud_peer_lost(peer, "this rank ran out of memory");
        return;
    }
    *packet = (ud_packet){.frame = *frame, .payload = payload, .op = op, .step = step};
    packet->frame.magic = UD_TCP_MAGIC;
    if (!op) {
        if (copied) memcpy(packet->data, payload, copied);
        packet->payload = packet->data;
    }
    *peer->packets_end = packet;
    peer->packets_end = &packet->next;
    ud_mark_dirty(peer);
}

void ud_enqueue_long(ud_peer *peer, ud_op *op, int step) {
    if (peer->num_longs == peer->longs_capacity) {
        int capacity = peer->longs_capacity ? 2 * peer->longs_capacity : 16;
        ud_long *longs = realloc(peer->longs, (size_t)capacity * sizeof *longs);
        if (!longs) {
            ud_peer_lost(peer, "this rank ran out of memory");
            return;
        }
        peer->longs = longs, peer->longs_capacity = capacity;
    }
    peer->longs[peer->num_longs++] = (ud_long){op, step};
    ud_mark_dirty(peer);
}

static void describe(const ud_op *op, ud_frame *frame) {
    *frame = (ud_frame){.magic = UD_TCP_MAGIC, .kind = UD_DATA, .opcode = (uint8_t)op->opcode, .dtype = (uint8_t)op->dtype,
                        .redop = (uint8_t)op->redop, .group = op->group->id, .seq = op->seq, .count = op->count,
                        .root = op->root, .hash = op->hash};
}

/* Takes what is to be sent next; returns 0 if there is nothing. */
static int next_frame(ud_lane *lane) {
    ud_peer *peer = lane->peer;
    lane->out_done = 0;
    if (lane->index == 0 && peer->packets) {
        ud_packet *packet = lane->out_packet = peer->packets;
        peer->packets = packet->next;
        if (!packet->next) peer->packets_end = &peer->packets;
        lane->out = packet->frame, lane->out_payload = packet->payload;
        lane->out_op = packet->op, lane->out_step = packet->step;
        return lane->sending = 1;
    }
    if (lane->index == 0 && peer->num_lanes > 1) return 0;
    for (int i = 0; i < peer->num_longs; i++) {
        ud_op *op = peer->longs[i].op;
        int step = peer->longs[i].step;
        ud_transfer *transfer = &op->transfers[step];
        uint64_t left = op->plan.steps[step].nbytes - transfer->taken;
        uint64_t length = left < UD_SEGMENT_BYTES ? left : UD_SEGMENT_BYTES;
        if (transfer->taken + length > ud_available(op, step)) continue;
        describe(op, &lane->out);
        lane->out.total = op->plan.steps[step].nbytes, lane->out.offset = transfer->taken;
        lane->out.length = (uint32_t)length, lane->out.tag = op->plan.steps[step].tag;
        lane->out_payload = transfer->target + transfer->taken;
        lane->out_op = op, lane->out_step = step;
        transfer->taken += length;
        if (length == left) {
            peer->num_longs--;
            memmove(&peer->longs[i], &peer->longs[i + 1], (size_t)(peer->num_longs - i) * sizeof *peer->longs);
        }
        return lane->sending = 1;
    }
    return 0;
}

static void end_frame_out(ud_lane *lane) {
    ud_op *op = lane->out_op;
    lane->sending = 0;
    lane->out_op = NULL;
    free(lane->out_packet);
    free(lane->out_copy);
    lane->out_packet = NULL, lane->out_copy = NULL;
    if (op) ud_moved(op, lane->out_step, lane->out.length);
}

static void drop_frame_out(ud_lane *lane) {
    lane->sending = 0;
    lane->out_op = NULL;
    free(lane->out_packet);
    free(lane->out_copy);
    lane->out_packet = NULL, lane->out_copy = NULL;
}

static void pump(ud_lane *lane) {
    size_t turn = 0;
    while (lane->is_open && (lane->sending || next_frame(lane))) {
        if (turn >= TURN_BYTES) {
            want_write(lane, 1); /* goes on after the others */
            return;
        }
        struct iovec parts[2];
        int num_parts = 0;
        uint64_t done = lane->out_done;
        if (done < sizeof lane->out) {
            parts[num_parts++] = (struct iovec){(char *)&lane->out + done, sizeof lane->out - done};
            done = sizeof lane->out;
        }
        done -= sizeof lane->out;
        if (done < lane->out.length)
            parts[num_parts++] = (struct iovec){(char *)lane->out_payload + done, lane->out.length - done};
        ssize_t n = ud_lane_send(lane, parts, num_parts);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM) {
                want_write(lane, 1);
                return;
            }
            /* The connection is broken. What the peer sent before, its reasons among it, is read first. */
            want_write(lane, 0);
            return;
        }
        turn += (size_t)n;
        lane->peer->transport->num_bytes_sent += (uint64_t)n;
        lane->out_done += (uint64_t)n;
        if (lane->out_done == sizeof lane->out + lane->out.length) end_frame_out(lane);
    }
    want_write(lane, 0);
}

void ud_flush(ud_transport *transport) {
    while (transport->any_dirty) {
        transport->any_dirty = 0;
        for (int i = 0; i < transport->size; i++) {
            ud_peer *peer = &transport->peers[i];
            if (!peer->dirty) continue;
            peer->dirty = 0;
            for (int j = 0; j < peer->num_lanes; j++)
                if (!peer->lanes[j].wants_write) pump(&peer->lanes[j]);
        }
    }
}

void ud_detach(ud_op *op) {
    ud_transport *transport = op->transport;
    for (int i = 0; i < transport->size; i++) {
        ud_peer *peer = &transport->peers[i];
        int kept = 0;
        for (int j = 0; j < peer->num_longs; j++)
            if (peer->longs[j].op != op) peer->longs[kept++] = peer->longs[j];
        peer->num_longs = kept;
        ud_packet **link = &peer->packets;
        while (*link) {
            ud_packet *packet = *link;
            if (packet->op == op) {
                *link = packet->next;
                free(packet);
            } else
                link = &packet->next;
        }
        peer->packets_end = link;
        for (int j = 0; j < peer->num_lanes; j++) {
            ud_lane *lane = &peer->lanes[j];
            if (lane->receiving && lane->in_op == op) lane->in_op = NULL, lane->in_target = NULL;
            if (!lane->sending || lane->out_op != op) continue;
            /* The rest of the frame has to follow, but the memory is the caller's again. */
            lane->out_op = NULL;
            char *copy = malloc(lane->out.length + 1);
            if (copy) {
                if (lane->out.length) memcpy(copy, lane->out_payload, lane->out.length);
                lane->out_copy = copy, lane->out_payload = copy;
            } else {
                shutdown(lane->fd, SHUT_RDWR);
                drop_frame_out(lane);
            }
        }
    }
}

/* Receiving */

static void end_frame_in(ud_lane *lane) {
    lane->receiving = 0;
    ud_end_frame(lane);
}

static void drop_frame_in(ud_lane *lane) {
    free(lane->in_stored);
    free(lane->in_text);
    lane->in_stored = NULL, lane->in_text = NULL, lane->in_op = NULL;
    lane->receiving = 0;
}

static void close_lane(ud_lane *lane, const char *why) {
    ud_peer *peer = lane->peer;
    if (!lane->is_open) return;
    int was_cut = lane->receiving || lane->begin != lane->end;
    lane->is_open = 0;
    peer->num_open--;
    epoll_ctl(peer->transport->epoll, EPOLL_CTL_DEL, lane->fd, NULL);
    shutdown(lane->fd, SHUT_RDWR);
    drop_frame_in(lane);
    /* Other lanes may bring what was sent before; and what the peer had to say about its end comes on the first one. */
    if (lane->index == 0 || was_cut || !peer->num_open) ud_peer_lost(peer, why);
}

/* Gives bytes that have come to the frame that they belong to; returns -1 if they are no frame. */
static int consume(ud_lane *lane) {
    while (lane->begin < lane->end) {
        size_t there = lane->end - lane->begin;
        if (!lane->receiving) {
            if (there < sizeof lane->in) return 0;
            memcpy(&lane->in, lane->buffer + lane->begin, sizeof lane->in);
            lane->begin += sizeof lane->in;
            lane->in_done = 0;
            lane->in_target = NULL;
            lane->receiving = 1;
            if (ud_begin_frame(lane)) return -1;
            if (!lane->in.length) end_frame_in(lane);
            continue;
        }
        size_t wanted = lane->in.length - lane->in_done, taken = there < wanted ? there : wanted;
        if (lane->in_target) memcpy(lane->in_target + lane->in_done, lane->buffer + lane->begin, taken);
        lane->begin += taken;
        lane->in_done += (uint32_t)taken;
        if (lane->in_done == lane->in.length) end_frame_in(lane);
    }
    return 0;
}

static void read_lane(ud_lane *lane) {
    size_t turn = 0;
    char trash[16384];
    while (lane->is_open && turn < TURN_BYTES) {
        if (lane->begin == lane->end)
            lane->begin = lane->end = 0;
        else if (lane->begin) {
            memmove(lane->buffer, lane->buffer + lane->begin, lane->end - lane->begin);
            lane->end -= lane->begin, lane->begin = 0;
        }
        /* The rest of a payload goes where it belongs, what follows into the buffer. */
        struct iovec parts[2];
        int num_parts = 0;
        size_t direct = 0;
        if (lane->receiving) {
            direct = lane->in.length - lane->in_done;
            if (lane->in_target)
                parts[num_parts++] = (struct iovec){lane->in_target + lane->in_done, direct};
            else {
                direct = direct < sizeof trash ? direct : sizeof trash;
                parts[num_parts++] = (struct iovec){trash, direct};
            }
        }
        /* Where long frames come, only the next header goes into the buffer: what follows it has a place of its own. */
        size_t room = BUFFER_BYTES - lane->end;
        if (lane->index) room = lane->end < sizeof lane->in ? sizeof lane->in - lane->end : 0;
        if (room && (!lane->receiving || lane->in_target))
            parts[num_parts++] = (struct iovec){lane->buffer + lane->end, room};
        ssize_t n = ud_lane_recv(lane, parts, num_parts);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) return;
            char why[128];
            int is_forged = lane->tls && errno == EBADMSG;
            if (is_forged) snprintf(why, sizeof why, "what came was not encrypted by it, or was changed");
            else snprintf(why, sizeof why, "the connection to it broke (%s)", strerror(errno));
            if (is_forged) ud_peer_lost(lane->peer, why);
            close_lane(lane, why);
            return;
        }
        if (n == 0) {
            close_lane(lane, "it closed the connection: it died or left");
            return;
        }
        turn += (size_t)n;
        size_t to_payload = (size_t)n < direct ? (size_t)n : direct, asked = 0;
        for (int i = 0; i < num_parts; i++) asked += parts[i].iov_len;
        lane->end += (size_t)n - to_payload;
        if (to_payload) {
            lane->in_done += (uint32_t)to_payload;
            if (lane->in_done == lane->in.length) end_frame_in(lane);
        }
        if (consume(lane)) {
            close_lane(lane, "it sent what is no frame of this protocol");
            return;
        }
        if ((size_t)n < asked) break; /* there is no more for now */
    }
    if (lane->is_open && lane->tls && !ud_tls_is_drained(lane->tls)) lane->has_unread = lane->peer->transport->any_unread = 1;
}

static void read_unread(ud_transport *transport) {
    transport->any_unread = 0;
    for (int i = 0; i < transport->size; i++)
        for (int j = 0; j < transport->peers[i].num_lanes; j++) {
            ud_lane *lane = &transport->peers[i].lanes[j];
            if (!lane->has_unread) continue;
            lane->has_unread = 0;
            read_lane(lane);
        }
}

/* Leading */

/* The kernel of a peer that lives answers to whatever is sent, even if the process is busy. */
static void check_alive(ud_lane *lane, int64_t now, int64_t *suspected) {
    struct tcp_info info;
    socklen_t length = sizeof info;
    if (getsockopt(lane->fd, IPPROTO_TCP, TCP_INFO, &info, &length)) return; /* not TCP, in tests */
    int64_t silent_ns = (int64_t)info.tcpi_last_ack_recv * 1000000;
    if ((!info.tcpi_unacked && !info.tcpi_probes) || now - silent_ns > *suspected || !*suspected) {
        *suspected = info.tcpi_unacked || info.tcpi_probes ? now : 0;
        return;
    }
    int64_t limit = lane->peer->transport->heartbeat_ns;
    if (now - *suspected < limit) return;
    char why[128];
    snprintf(why, sizeof why, "its host has answered nothing for %.1f s", (double)(now - *suspected) / 1e9);
    close_lane(lane, why);
    ud_peer_lost(lane->peer, why);
}

static void tick(ud_transport *transport, int64_t now) {
    if (now < transport->next_tick_ns) return;
    transport->next_tick_ns = now + TICK_NS;
    for (int i = 0; i < transport->size; i++) {
        ud_peer *peer = &transport->peers[i];
        if (peer->is_lost) continue;
        for (int j = 0; j < peer->num_lanes; j++)
            if (peer->lanes[j].is_open) check_alive(&peer->lanes[j], now, &peer->lanes[j].suspected_ns);
        if (peer->num_open == peer->num_lanes || !peer->lanes[0].is_open) peer->lone_since_ns = 0;
        else if (!peer->lone_since_ns) peer->lone_since_ns = now;
        else if (now - peer->lone_since_ns > LONE_LANE_NS) ud_peer_lost(peer, "one of the connections to it broke");
    }
    for (ud_group *group = transport->groups; group; group = group->next) ud_ask_around(group, now);
}

/* Looks at all lanes once. The mutex is held, but not while nothing comes. */
static int lead(ud_transport *transport, int wait_ms) {
    struct epoll_event events[EVENTS];
    int had_unread = transport->any_unread;
    pthread_mutex_unlock(&transport->mutex);
    int n = epoll_wait(transport->epoll, events, EVENTS, had_unread ? 0 : wait_ms);
    pthread_mutex_lock(&transport->mutex);
    for (int i = 0; i < n; i++) {
        ud_lane *lane = events[i].data.ptr;
        if (!lane) {
            uint64_t count;
            while (read(transport->kick, &count, sizeof count) > 0) {
            }
            continue;
        }
        if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) read_lane(lane);
        if (events[i].events & EPOLLOUT) pump(lane);
    }
    if (had_unread) read_unread(transport);
    ud_flush(transport);
    tick(transport, ud_now());
    ud_flush(transport);
    return n + had_unread;
}

static void stop_leading(ud_transport *transport) {
    transport->leading = transport->thread_leads = 0;
    if (transport->waiting) pthread_cond_broadcast(&transport->came);
}

int ud_drive(ud_op *op, int64_t timeout_ns) {
    ud_transport *transport = op->transport;
    pthread_mutex_lock(&transport->mutex);
    int64_t now = ud_now(), deadline = timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
    int64_t spin_until = now + transport->spin_ns;
    int status = op->status;
    if (!timeout_ns) {
        if (status == UD_PENDING && !transport->leading) {
            transport->leading = 1;
            lead(transport, 0);
            stop_leading(transport);
            status = op->status;
        }
        pthread_mutex_unlock(&transport->mutex);
        return status;
    }
    while ((status = op->status) == UD_PENDING) {
        now = ud_now();
        if (now >= deadline) {
            status = UD_TIMEOUT;
            break;
        }
        int64_t left = deadline - now < SLICE_NS ? deadline - now : SLICE_NS;
        if (transport->leading) {
            if (transport->thread_leads) ud_kick(transport);
            transport->waiting++;
            wait_until(&transport->came, &transport->mutex, now + left);
            transport->waiting--;
            continue;
        }
        transport->leading = 1;
        int is_spinning = now < spin_until;
        int n = lead(transport, is_spinning ? 0 : (int)((left + 999999) / 1000000));
        if (n > 0) spin_until = ud_now() + transport->spin_ns;
        stop_leading(transport);
    }
    pthread_mutex_unlock(&transport->mutex);
    return status;
}

static void *run(void *argument) {
    ud_transport *transport = argument;
    pthread_mutex_lock(&transport->mutex);
    while (!transport->stop) {
        int64_t now = ud_now();
        int is_busy = transport->num_pending > 0;
        if (!transport->leading && !transport->waiting && (is_busy || now >= transport->next_tick_ns)) {
            transport->leading = transport->thread_leads = 1;
            lead(transport, is_busy ? 50 : 0);
            stop_leading(transport);
            if (transport->num_pending && !transport->waiting) continue;
        }
        now = ud_now();
        transport->napping_long = !transport->num_pending && now - transport->last_post_ns > ACTIVE_NS;
        wait_until(&transport->nap, &transport->mutex, now + (transport->napping_long ? LONG_NAP_NS : SHORT_NAP_NS));
        transport->napping_long = 0;
    }
    pthread_mutex_unlock(&transport->mutex);
    return NULL;
}

/* Opening and closing */

static int open_lane(ud_transport *transport, ud_peer *peer, int index, int fd, ud_tls *tls) {
    ud_lane *lane = &peer->lanes[index];
    *lane = (ud_lane){.peer = peer, .fd = fd, .index = index, .is_open = 1, .tls = tls, .has_unread = !!tls};
    if (tls) transport->any_unread = 1; /* it may have read more than its handshake */
    lane->buffer = malloc(BUFFER_BYTES);
    lane->scratch = malloc(UD_SEGMENT_BYTES);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = lane};
    peer->num_lanes++, peer->num_open++;
    return !lane->buffer || !lane->scratch || epoll_ctl(transport->epoll, EPOLL_CTL_ADD, fd, &event);
}

ud_transport *ud_open(int rank, int size, const int *num_lanes, int *const *fds, ud_tls *const *const *tls, int64_t spin_ns,
                      int64_t heartbeat_ns) {
    ud_transport *transport = calloc(1, sizeof *transport);
    if (!transport) return NULL;
    transport->rank = rank, transport->size = size, transport->spin_ns = spin_ns, transport->heartbeat_ns = heartbeat_ns;
    transport->peers = calloc((size_t)size, sizeof *transport->peers);
    transport->epoll = epoll_create1(EPOLL_CLOEXEC);
    transport->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&transport->mutex, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&transport->came, &monotonic);
    pthread_cond_init(&transport->nap, &monotonic);
    pthread_condattr_destroy(&monotonic);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    int failed = !transport->peers || transport->epoll < 0 || transport->kick < 0 ||
                 epoll_ctl(transport->epoll, EPOLL_CTL_ADD, transport->kick, &event);
    for (int i = 0; !failed && i < size; i++) {
        ud_peer *peer = &transport->peers[i];
        peer->transport = transport, peer->rank = i;
        peer->packets_end = &peer->packets;
        for (int j = 0; j < num_lanes[i]; j++)
            failed |= open_lane(transport, peer, j, fds[i][j], tls ? tls[i][j] : NULL);
    }
    transport->next_tick_ns = ud_now() + TICK_NS;
    if (!failed && size > 1) failed = !(transport->has_thread = !pthread_create(&transport->thread, NULL, run, transport));
    if (failed) {
        ud_shut(transport, 0);
        ud_free_transport(transport);
        return NULL;
    }
    return transport;
}

/* Whether nothing has been acknowledged for a good part of the time after which the peer is lost. */
static int is_silent(const ud_lane *lane, int64_t now) {
    return lane->suspected_ns && now - lane->suspected_ns > lane->peer->transport->heartbeat_ns / 4;
}

/* A host that is gone takes nothing, and those that go on without it do not wait for it. */
static int undelivered(ud_transport *transport) {
    int64_t now = ud_now();
    for (int i = 0; i < transport->size; i++) {
        ud_peer *peer = &transport->peers[i];
        if (peer->packets && peer->num_open && peer->lanes[0].is_open && !is_silent(&peer->lanes[0], now)) return 1;
        for (int j = 0; j < peer->num_lanes; j++) {
            ud_lane *lane = &peer->lanes[j];
            int left = 0;
            if (!lane->is_open || is_silent(lane, now)) continue;
            if (lane->sending || (!ioctl(lane->fd, SIOCOUTQ, &left) && left > 0)) return 1;
        }
    }
    return 0;
}

void ud_shut(ud_transport *transport, int64_t linger_ns) {
    pthread_mutex_lock(&transport->mutex);
    transport->stop = 1;
    pthread_cond_broadcast(&transport->nap);
    ud_kick(transport);
    pthread_mutex_unlock(&transport->mutex);
    if (transport->has_thread) pthread_join(transport->thread, NULL);
    pthread_mutex_lock(&transport->mutex);
    while (transport->leading || transport->waiting) { /* a call that was in a group that has been closed */
        ud_kick(transport);
        wait_until(&transport->came, &transport->mutex, ud_now() + 10000000);
    }
    int64_t deadline = ud_now() + linger_ns;
    while (undelivered(transport) && ud_now() < deadline) {
        transport->leading = 1;
        lead(transport, 1);
        transport->leading = 0;
    }
    for (int i = 0; transport->peers && i < transport->size; i++) {
        ud_peer *peer = &transport->peers[i];
        for (int j = 0; j < peer->num_lanes; j++) {
            ud_lane *lane = &peer->lanes[j];
            drop_frame_in(lane);
            drop_frame_out(lane);
            free(lane->buffer);
            free(lane->scratch);
            lane->buffer = lane->scratch = NULL;
            ud_tls_free(lane->tls, lane->is_open);
            lane->tls = NULL, lane->is_open = 0;
            close(lane->fd);
        }
        while (peer->packets) {
            ud_packet *packet = peer->packets;
            peer->packets = packet->next;
            free(packet);
        }
        free(peer->longs);
        peer->longs = NULL;
        peer->num_lanes = peer->num_open = peer->num_longs = 0;
    }
    close(transport->epoll);
    close(transport->kick);
    pthread_mutex_unlock(&transport->mutex);
}

void ud_free_transport(ud_transport *transport) {
    pthread_mutex_destroy(&transport->mutex);
    pthread_cond_destroy(&transport->came);
    pthread_cond_destroy(&transport->nap);
    free(transport->peers);
    free(transport);
}

void ud_forget(ud_transport *transport) {
    for (int i = 0; i < transport->size; i++)
        for (int j = 0; j < transport->peers[i].num_lanes; j++) close(transport->peers[i].lanes[j].fd);
    close(transport->epoll);
    close(transport->kick);
}
