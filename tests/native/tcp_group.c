/* The C code of the engine tcp with threads as ranks, for sanitizers.
 *
 * Each rank has a transport of its own; socket pairs stand for the network. Usage:
 *   tcp_group SEED ROUNDS
 * Every round runs a random program over two groups, one thread in each rank for each group, while the transports' own
 * threads take part. Then somebody sends frames with random bytes in them, or garbage, while the others go on, abort or
 * close. Every third round is encrypted. Exits with 1 where a number is wrong, or a rank is not through in time. */
#include "tcp.h"

#include "kernels.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RANKS 4
#define LANES 3
#define LENGTH 40
#define MOST 200000 /* elements of an operation */
#define UNDER_WAY 4
#define LIMIT_NS INT64_C(60000000000)

#define CHECK(condition, ...)                                   \
    do {                                                        \
        if (!(condition)) {                                     \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);     \
            fprintf(stderr, __VA_ARGS__);                       \
            fputc('\n', stderr);                                \
            exit(1);                                            \
        }                                                       \
    } while (0)

typedef struct {
    uint64_t state;
} random_numbers;

static uint32_t below(random_numbers *r, uint32_t limit) { /* SplitMix64 */
    uint64_t z = (r->state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (uint32_t)((z ^ (z >> 31)) % limit);
}

typedef struct {
    ud_transport *transport;
    ud_group *group;
    uint64_t seed;
    int rank, number; /* of the group */
    int fd;           /* of one of its connections */
    pthread_barrier_t *all_are_through;
} rank_state;

typedef struct {
    ud_op *op;
    uint32_t *source, *target;
    uint64_t count, first; /* of the target; first element of it in the whole */
    uint32_t number;
    int kind;
} pending;

static uint32_t value(int rank, uint32_t number, uint64_t i) { return (uint32_t)(rank * 1000003 + number * 77 + i * 13); }

static uint32_t expected(const pending *p, int size, uint64_t i) {
    uint32_t sum = 0;
    switch (p->kind) {
    case UD_ALLGATHER: return value((int)(i / (p->count / (uint64_t)size)), p->number, i % (p->count / (uint64_t)size));
    case UD_BROADCAST: return value((int)(p->number % (uint32_t)size), p->number, i);
    case UD_ALLTOALL: return value((int)(i / (p->count / (uint64_t)size)), p->number, p->first + i % (p->count / (uint64_t)size));
    default:
        for (int rank = 0; rank < size; rank++) sum += value(rank, p->number, p->first + i);
        return sum;
    }
}

static ud_op *post(rank_state *r, const ud_request *request) {
    pthread_mutex_lock(&r->transport->mutex);
    ud_op *op = ud_post(r->group, request);
    pthread_mutex_unlock(&r->transport->mutex);
    CHECK(op, "no memory");
    return op;
}

static void release(rank_state *r, ud_op *op) {
    pthread_mutex_lock(&r->transport->mutex);
    ud_release(op);
    pthread_mutex_unlock(&r->transport->mutex);
}

static pending start(rank_state *r, random_numbers *shared, uint32_t number) {
    static const uint64_t counts[] = {0, 1, 100, 5000, 20000, 70000, MOST};
    int size = r->group->size, rank = r->group->rank;
    pending p = {.kind = (int)below(shared, UD_MESSAGE), .number = number};
    uint64_t each = counts[below(shared, sizeof counts / sizeof *counts)] / RANKS, whole = each * RANKS;
    uint64_t pieces[RANKS];
    for (int i = 0; i < RANKS; i++) pieces[i] = each;
    p.source = malloc(4 * whole + 4), p.target = malloc(4 * whole + 4);
    for (uint64_t i = 0; i < whole; i++) p.source[i] = value(rank, number, i);
    p.count = p.kind == UD_REDUCESCATTER ? each : p.kind == UD_BARRIER ? 0 : whole;
    p.first = p.kind == UD_REDUCESCATTER || p.kind == UD_ALLTOALL ? each * (uint64_t)rank : 0;
    ud_request request = {.opcode = p.kind, .dtype = UD_UINT32, .redop = UD_SUM, .count = p.kind == UD_BARRIER ? 0 : whole,
                          .scale = 1.0, .source = (char *)p.source, .target = (char *)p.target};
    if (p.kind == UD_BROADCAST) {
        request.root = (int)(number % (uint32_t)size);
        memcpy(p.target, p.source, 4 * whole);
        request.source = request.target;
    }
    if (p.kind == UD_ALLGATHER || p.kind == UD_REDUCESCATTER || p.kind == UD_ALLTOALL) request.counts = pieces;
    if (p.kind == UD_ALLTOALL) request.counts2 = pieces;
    if (p.kind == UD_ALLREDUCE && below(shared, 2)) {
        memcpy(p.target, p.source, 4 * whole);
        request.source = request.target;
    }
    p.op = post(r, &request);
    return p;
}

static void wait_for(rank_state *r, pending *p) {
    int status = ud_drive(p->op, LIMIT_NS);
    CHECK(!status, "rank %d: operation %u of kind %d ended with %d (%s)", r->rank, p->number, p->kind, status, r->group->text);
    for (uint64_t i = 0; i < p->count; i++)
        CHECK(p->target[i] == expected(p, r->group->size, i), "rank %d: element %llu of operation %u, kind %d, is %u, not %u",
              r->rank, (unsigned long long)i, p->number, p->kind, p->target[i], expected(p, r->group->size, i));
    release(r, p->op);
    free(p->source);
    free(p->target);
}

static void pass_messages(rank_state *r) {
    int size = r->group->size, rank = r->group->rank;
    uint64_t nbytes = r->seed % 2 ? 300000 : 100;
    char *out = malloc(nbytes), *in = malloc(nbytes);
    memset(out, rank + 1, nbytes);
    pthread_mutex_lock(&r->transport->mutex);
    ud_op *receiving = ud_post_message(r->group, 0, (rank + size - 1) % size, in, nbytes);
    ud_op *sending = ud_post_message(r->group, 1, (rank + 1) % size, out, nbytes);
    pthread_mutex_unlock(&r->transport->mutex);
    CHECK(receiving && sending, "no memory");
    CHECK(!ud_drive(receiving, LIMIT_NS) && !ud_drive(sending, LIMIT_NS), "rank %d: a message did not pass (%s)", rank, r->group->text);
    for (uint64_t i = 0; i < nbytes; i++) CHECK(in[i] == (rank + size - 1) % size + 1, "rank %d: a wrong message", rank);
    release(r, receiving);
    release(r, sending);
    free(out);
    free(in);
}

/* Frames that no rank sends. */
static void misbehave(rank_state *r, random_numbers *own) {
    ud_frame frame = {.magic = UD_TCP_MAGIC, .kind = (uint8_t)(1 + below(own, UD_NUM_KINDS)), .opcode = (uint8_t)below(own, 8),
                      .group = below(own, 2) ? 7 : below(own, 9), .seq = below(own, 200), .total = below(own, 400000),
                      .offset = below(own, 3) * UD_SEGMENT_BYTES, .length = below(own, 3) ? 0 : below(own, 400000),
                      .tag = below(own, 4), .root = below(own, 6), .count = below(own, 3)};
    char *bytes = (char *)&frame;
    for (uint32_t i = below(own, 4); i > 0; i--) bytes[below(own, sizeof frame)] = (char)below(own, 256);
    ssize_t n = send(r->fd, &frame, below(own, 4) ? sizeof frame : below(own, sizeof frame), MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)n;
    char garbage[3000];
    for (size_t i = 0; i < sizeof garbage; i++) garbage[i] = (char)below(own, 256);
    n = send(r->fd, garbage, below(own, sizeof garbage), MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)n;
}

static void *run(void *argument) {
    rank_state *r = argument;
    random_numbers shared = {r->seed * 2 + (uint64_t)r->number}, own = {r->seed * 1000 + (uint64_t)(r->rank * 2 + r->number)};
    pending open[UNDER_WAY];
    int num_open = 0;
    for (uint32_t number = 0; number < LENGTH; number++) {
        open[num_open++] = start(r, &shared, number);
        while (num_open == UNDER_WAY || (num_open && below(&own, 3) == 0)) {
            int which = (int)below(&own, (uint32_t)num_open);
            wait_for(r, &open[which]);
            open[which] = open[--num_open];
        }
        if (number % 10 == 9) pass_messages(r);
    }
    while (num_open) wait_for(r, &open[--num_open]);
    pthread_barrier_wait(r->all_are_through);
    int leaves = r->rank > 1 && below(&own, 3) == 0, aborts = r->rank > 1 && below(&own, 3) == 0;
    uint32_t *buffer = malloc(4 * MOST);
    memset(buffer, 0, 4 * MOST);
    for (int round = 0, status = 0; !status && round < 30; round++) {
        if (r->rank == 1 && r->number == 0) misbehave(r, &own);
        ud_request request = {.opcode = round % 2 ? UD_BARRIER : UD_ALLREDUCE, .dtype = UD_UINT32, .scale = 1.0,
                              .count = round % 2 ? 0 : MOST, .source = (char *)buffer, .target = (char *)buffer};
        ud_op *op = post(r, &request);
        status = ud_drive(op, INT64_C(3000000000));
        release(r, op);
        if ((status || round == 10) && aborts) {
            pthread_mutex_lock(&r->transport->mutex);
            ud_fail(r->group, UD_ABORTED, r->group->rank, "enough", 1);
            pthread_mutex_unlock(&r->transport->mutex);
        }
        if (leaves && round == 5) break;
    }
    pthread_mutex_lock(&r->transport->mutex);
    ud_close_group(r->group);
    ud_free_group(r->group);
    pthread_mutex_unlock(&r->transport->mutex);
    free(buffer);
    return NULL;
}

static const unsigned char KEY[UD_TLS_KEY_BYTES] = "of all connections here";

static void encrypt(const int *pair, ud_tls **first, ud_tls **second) {
    char why[256] = "";
    for (int i = 0; i < 2; i++) fcntl(pair[i], F_SETFL, O_NONBLOCK);
    *first = ud_tls_new(pair[0], 0, KEY), *second = ud_tls_new(pair[1], 1, KEY);
    CHECK(*first && *second, "no memory");
    for (int i = 0, open = 0; open != 2; i++) {
        enum ud_tls_step steps[] = {ud_tls_handshake(*first, why, sizeof why), ud_tls_handshake(*second, why, sizeof why)};
        CHECK(i < 10 && steps[0] != UD_TLS_FAILED && steps[1] != UD_TLS_FAILED, "no handshake: %s", why);
        open = (steps[0] == UD_TLS_OPEN) + (steps[1] == UD_TLS_OPEN);
    }
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    int rounds = argc > 2 ? atoi(argv[2]) : 3;
    const char *const libraries[] = {"libssl.so.3", "libssl.so.1.1"};
    char why[256];
    CHECK(!ud_tls_load(libraries, 2, why, sizeof why), "no OpenSSL: %s", why);
    ud_tls_set_key_records(50);
    for (int round = 0; round < rounds; round++) {
        int is_encrypted = round % 3 == 2;
        ud_tls *tls[RANKS][RANKS][LANES], *const *tls_by_peer[RANKS];
        int fds[RANKS][RANKS][LANES], *by_peer[RANKS], num_lanes[RANKS];
        for (int i = 0; i < RANKS; i++)
            for (int j = i + 1; j < RANKS; j++)
                for (int k = 0; k < LANES; k++) {
                    int pair[2];
                    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), "no socket pair");
                    fds[i][j][k] = pair[0], fds[j][i][k] = pair[1];
                    if (is_encrypted) encrypt(pair, &tls[i][j][k], &tls[j][i][k]);
                }
        pthread_barrier_t all_are_through;
        pthread_barrier_init(&all_are_through, NULL, 2 * RANKS);
        rank_state states[RANKS][2];
        memset(states, 0, sizeof states);
        for (int i = 0; i < RANKS; i++) {
            for (int j = 0; j < RANKS; j++) by_peer[j] = fds[i][j], tls_by_peer[j] = tls[i][j], num_lanes[j] = i == j ? 0 : LANES;
            ud_transport *transport = ud_open(i, RANKS, num_lanes, by_peer, is_encrypted ? tls_by_peer : NULL,
                                              round % 2 ? 20000 : 0, INT64_C(5000000000));
            CHECK(transport, "no transport");
            int members[2][RANKS] = {{0, 1, 2, 3}, {3, 2, 1, 0}};
            for (int g = 0; g < 2; g++) {
                pthread_mutex_lock(&transport->mutex);
                ud_group *group = ud_open_group(transport, g ? 7 : 0, g ? RANKS - 1 - i : i, RANKS, members[g]);
                pthread_mutex_unlock(&transport->mutex);
                CHECK(group, "no memory");
                states[i][g] = (rank_state){transport, group, seed + (uint64_t)round, i, g, fds[i][0][round % LANES],
                                            &all_are_through};
            }
        }
        pthread_t threads[RANKS][2];
        for (int i = 0; i < RANKS; i++)
            for (int g = 0; g < 2; g++) pthread_create(&threads[i][g], NULL, run, &states[i][g]);
        for (int i = 0; i < RANKS; i++)
            for (int g = 0; g < 2; g++) pthread_join(threads[i][g], NULL);
        for (int i = 0; i < RANKS; i++) {
            ud_shut(states[i][0].transport, INT64_C(100000000));
            ud_free_transport(states[i][0].transport);
        }
        pthread_barrier_destroy(&all_are_through);
        printf("seed %llu: right\n", (unsigned long long)seed + (unsigned long long)round);
        fflush(stdout);
    }
    return 0;
}
