/* The C code of the shm engine with threads as ranks, for sanitizers: the thread sanitizer sees one process only.
 *
 * Each rank has its own view of the groups and its own list of active groups, as a process has; the memory is at the same
 * addresses for all, so that an access by one rank that no counter orders after another rank's is a race. Usage:
 *   shm_group SEED ROUNDS
 * Every round runs a random program over two groups, with a second thread in each rank that polls; then somebody aborts
 * at a random moment while others close. Exits with 1 where a number is wrong, or a rank is not through in time. */
#include "group.h"
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define RANKS 4
#define SMALL 256
#define WINDOW (1 << 16)
#define ARENA (24 << 20)
#define LIMIT_NS INT64_C(60000000000)
#define LENGTH 60
#define MOST 40000 /* elements of an operation */
#define UNDER_WAY 6

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
    char *memory[RANKS];
    size_t used[RANKS];
    pthread_barrier_t all_are_through; /* with the random program */
} world;

static char *allocate(world *w, int rank, size_t nbytes) {
    char *found = w->memory[rank] + w->used[rank];
    w->used[rank] += (nbytes + 4095) & ~(size_t)4095;
    CHECK(w->used[rank] <= ARENA, "the arena of rank %d is full", rank);
    return found;
}

static ud_group *new_group(world *w, ud_process *process, int rank, int size, ud_slot *const *slots) {
    ud_group *group = calloc(1, sizeof *group);
    CHECK(group, "no memory");
    group->rank = rank, group->size = size;
    group->small_bytes = SMALL, group->window_bytes = WINDOW, group->spin_ns = 2000;
    CHECK(ud_init_group(group, process), "no memory");
    group->slots = calloc((size_t)size, sizeof *group->slots);
    group->bases = calloc((size_t)size, sizeof *group->bases);
    group->capacities = calloc((size_t)size, sizeof *group->capacities);
    group->liveness = calloc((size_t)size, sizeof *group->liveness);
    for (int m = 0; m < size; m++) {
        group->slots[m] = slots[m];
        group->bases[m] = w->memory[m];
        group->capacities[m] = ARENA;
        group->liveness[m] = -1; /* threads do not die */
    }
    return group;
}

typedef struct { /* an operation under way, and what it must give */
    int is_message;
    int64_t number, sent;
    uint32_t *target, *memory[2]; /* what is given back in the end */
    uint64_t count, first, step; /* element i is first + i * step */
    ud_group *group;
} pending;

typedef struct {
    world *w;
    ud_group *groups[2];
    ud_process process;
    uint64_t seed;
    int rank;
    _Atomic int has_aborted, is_over;
    uint32_t *staging[2 * UNDER_WAY]; /* engine memory, each of MOST elements; NULL while an operation uses it */
    uint32_t *begin, *end;            /* all of it */
} rank_state;

/* Memory of either kind. */
static uint32_t *place(rank_state *r, random_numbers *own, uint64_t count) {
    if (below(own, 2)) return malloc((count + 1) * 4);
    for (size_t i = 0;; i++)
        if (r->staging[i]) {
            uint32_t *found = r->staging[i];
            r->staging[i] = NULL;
            return found;
        }
}

static void give_back(rank_state *r, uint32_t *memory) {
    if (!memory || memory < r->begin || memory >= r->end) {
        free(memory);
        return;
    }
    size_t i = 0;
    while (r->staging[i]) i++;
    r->staging[i] = memory;
}

static void wait_for(rank_state *r, pending *p) {
    ud_blame blame;
    int64_t deadline = ud_now() + LIMIT_NS;
    int left = (r->rank + 1) % RANKS, right = (r->rank + RANKS - 1) % RANKS;
    if (p->is_message) {
        int status = ud_wait_received(p->group, right, (uint32_t)p->number, deadline, &blame);
        CHECK(!status, "rank %d: receive ended with %d", r->rank, status);
        status = ud_wait_sent(p->group, left, (uint32_t)p->sent, deadline, &blame);
        CHECK(!status, "rank %d: send ended with %d", r->rank, status);
    } else {
        pthread_mutex_lock(&p->group->mutex);
        int status = ud_drive(p->group, (uint64_t)p->number, deadline, &blame);
        pthread_mutex_unlock(&p->group->mutex);
        ud_deactivate_if_idle(p->group);
        CHECK(!status, "rank %d: operation %lld ended with %d", r->rank, (long long)p->number, status);
    }
    for (uint64_t i = 0; i < p->count; i++)
        CHECK(p->target[i] == (uint32_t)(p->first + i * p->step), "rank %d: element %llu is %u and not %u", r->rank,
              (unsigned long long)i, p->target[i], (uint32_t)(p->first + i * p->step));
    give_back(r, p->memory[0]);
    give_back(r, p->memory[1]);
}

/* Rank m contributes (m + 1) * (i + 1) as element i, so a sum is 10 * (i + 1). */
static pending start(rank_state *r, random_numbers *shared, random_numbers *own, int number) {
    static const uint32_t sizes[] = {0, 1, 63, 64, 65, 1000, 16383, 16385, MOST};
    ud_group *group = r->groups[below(shared, 2)];
    uint64_t count = sizes[below(shared, sizeof sizes / sizeof *sizes)];
    uint32_t kind = below(shared, 7), root = below(shared, RANKS);
    int me = r->rank;
    pending p = {.group = group, .count = count, .step = 1};
    ud_op op = {.dtype = UD_UINT32, .redop = UD_SUM, .scale = 1.0, .count = count, .root = 0};
    if (kind == 6) { /* a ring of messages; what is sent must be engine memory */
        uint32_t *source = (uint32_t *)allocate(r->w, me, count * 4 + 64);
        for (uint64_t i = 0; i < count; i++) source[i] = (uint32_t)(number + me + i);
        p.is_message = 1, p.target = p.memory[0] = malloc((count + 1) * 4);
        p.first = (uint64_t)(number + (me + RANKS - 1) % RANKS);
        int is_posted;
        ud_message message = {.nbytes = count * 4, .dtype = UD_UINT32, .offset = ud_offset(group, source, count * 4)};
        p.number = ud_receive(group, (me + RANKS - 1) % RANKS, (char *)p.target, count * 4, UD_UINT32);
        p.sent = ud_send(group, (me + 1) % RANKS, message, &is_posted);
        CHECK(p.number > 0 && p.sent > 0, "no memory");
        return p;
    }
    uint32_t *source = p.memory[0] = place(r, own, count);
    for (uint64_t i = 0; i < count; i++) source[i] = (uint32_t)(((uint64_t)me + 1) * (i + 1));
    op.opcode = (uint8_t)kind;
    op.source = (char *)source;
    uint64_t each = count / RANKS;
    switch (kind) {
    case UD_ALLREDUCE:
        p.target = below(own, 2) ? source : (p.memory[1] = place(r, own, count));
        p.first = p.step = 10;
        break;
    case UD_BROADCAST:
        op.root = root;
        p.target = source;
        p.first = p.step = root + 1;
        break;
    case UD_ALLGATHER: /* each rank's part goes on where the one before it ends */
        op.counts = malloc(RANKS * sizeof *op.counts);
        for (int m = 0; m < RANKS; m++) op.counts[m] = each;
        for (uint64_t i = 0; i < each; i++) source[i] = (uint32_t)((uint64_t)me * each + i);
        op.count = each;
        p.count = each * RANKS;
        p.target = p.memory[1] = place(r, own, p.count);
        break;
    case UD_REDUCESCATTER:
        op.counts = malloc(RANKS * sizeof *op.counts);
        for (int m = 0; m < RANKS; m++) op.counts[m] = each;
        op.count = each * RANKS;
        p.target = p.memory[1] = place(r, own, each);
        p.count = each, p.first = 10 * ((uint64_t)me * each + 1), p.step = 10;
        break;
    case UD_ALLTOALL: /* rank j gets, from rank i, numbers that follow those from rank i - 1 */
        op.counts = malloc(RANKS * sizeof *op.counts);
        op.counts2 = malloc(RANKS * sizeof *op.counts2);
        for (int m = 0; m < RANKS; m++) op.counts[m] = op.counts2[m] = each;
        for (uint64_t i = 0; i < each * RANKS; i++) source[i] = (uint32_t)((uint64_t)me * each + i % (each ? each : 1));
        op.count = p.count = each * RANKS;
        p.target = p.memory[1] = place(r, own, p.count);
        break;
    default:
        p.count = op.count = 0, op.source = NULL;
    }
    op.target = kind == UD_BARRIER ? NULL : (char *)p.target;
    ud_blame blame;
    pthread_mutex_lock(&group->post_mutex);
    int status = ud_post(group, &op, ud_now() + LIMIT_NS, &blame);
    p.number = (int64_t)group->posted;
    pthread_mutex_unlock(&group->post_mutex);
    CHECK(!status, "rank %d: posting ended with %d", me, status);
    return p;
}

static void *poll_groups(void *argument) {
    rank_state *r = argument;
    while (!atomic_load(&r->is_over)) {
        for (int g = 0; g < 2; g++) {
            if (!ud_enter(r->groups[g])) continue;
            ud_blame ignored;
            if (!pthread_mutex_trylock(&r->groups[g]->mutex)) {
                ud_drive(r->groups[g], r->groups[g]->posted, 0, &ignored);
                pthread_mutex_unlock(&r->groups[g]->mutex);
            }
            ud_deactivate_if_idle(r->groups[g]);
            ud_is_aborted(r->groups[g]);
            ud_leave(r->groups[g]);
        }
        struct timespec pause = {0, 20000};
        nanosleep(&pause, NULL);
    }
    return NULL;
}

/* Begins at a random moment, and goes on while the rank closes its groups. */
static void *abort_again_and_again(void *argument) {
    rank_state *r = argument;
    random_numbers own = {r->seed * 77 + (uint64_t)r->rank};
    struct timespec pause = {0, below(&own, 2000000)};
    nanosleep(&pause, NULL);
    do {
        for (int g = 1; g >= 0; g--)
            if (ud_enter(r->groups[g])) {
                int is_posted;
                ud_send(r->groups[g], 1, (ud_message){.dtype = UD_UINT8}, &is_posted); /* and nobody receives it */
                ud_receive(r->groups[g], 1, NULL, 0, UD_UINT8);
                ud_abort(r->groups[g], r->rank, "a monitor gave up");
                ud_leave(r->groups[g]);
            }
        atomic_store(&r->has_aborted, 1);
    } while (!atomic_load(&r->is_over));
    return NULL;
}

static void *run(void *argument) {
    rank_state *r = argument;
    random_numbers shared = {r->seed}, own = {r->seed * 1000 + (uint64_t)r->rank + 1};
    pthread_t poller, aborter;
    pthread_create(&poller, NULL, poll_groups, r);
    pending open[UNDER_WAY];
    int num_open = 0;
    for (int number = 0; number < LENGTH; number++) {
        open[num_open++] = start(r, &shared, &own, number);
        while (num_open == UNDER_WAY || (num_open && below(&own, 3) == 0)) {
            int which = (int)below(&own, (uint32_t)num_open);
            wait_for(r, &open[which]);
            open[which] = open[--num_open];
        }
    }
    while (num_open) wait_for(r, &open[--num_open]);
    pthread_barrier_wait(&r->w->all_are_through);
    /* Then barriers without end. Rank 0 aborts from another thread; some others close meanwhile. */
    if (r->rank == 0) pthread_create(&aborter, NULL, abort_again_and_again, r);
    int leaves = r->rank && below(&own, 3) == 0;
    for (int status = UD_OK, rounds = 0; !status && !(leaves && rounds == 3); rounds++) {
        ud_group *group = r->groups[rounds % 2];
        ud_op op = {.opcode = UD_BARRIER, .dtype = UD_UINT8, .scale = 1.0};
        ud_blame blame;
        if (!ud_enter(group)) break;
        pthread_mutex_lock(&group->post_mutex);
        status = ud_post(group, &op, ud_now() + LIMIT_NS, &blame);
        pthread_mutex_unlock(&group->post_mutex);
        pthread_mutex_lock(&group->mutex);
        if (!status) status = ud_drive(group, group->posted, ud_now() + LIMIT_NS, &blame);
        pthread_mutex_unlock(&group->mutex);
        ud_leave(group);
        CHECK(!status || status == UD_ABORTED, "rank %d: a barrier ended with %d", r->rank, status);
    }
    while (r->rank == 0 && !atomic_load(&r->has_aborted)) usleep(100); /* else the others of one group wait on */
    for (int g = 0; g < 2; g++) ud_close(r->groups[g]);
    atomic_store(&r->is_over, 1);
    if (r->rank == 0) pthread_join(aborter, NULL);
    pthread_join(poller, NULL);
    for (int g = 0; g < 2; g++) ud_free_group(r->groups[g]);
    return NULL;
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    int rounds = argc > 2 ? atoi(argv[2]) : 3;
    for (int round = 0; round < rounds; round++) {
        world w;
        memset(&w, 0, sizeof w);
        pthread_barrier_init(&w.all_are_through, NULL, RANKS);
        rank_state ranks[RANKS];
        memset(ranks, 0, sizeof ranks);
        ud_slot *slots[2][RANKS];
        size_t slot_bytes = ud_slot_bytes(RANKS, SMALL, WINDOW);
        for (int m = 0; m < RANKS; m++) {
            w.memory[m] = aligned_alloc(4096, ARENA);
            CHECK(w.memory[m], "no memory");
            memset(w.memory[m], 0, ARENA);
            for (int g = 0; g < 2; g++) slots[g][m] = (ud_slot *)allocate(&w, m, slot_bytes);
        }
        for (int m = 0; m < RANKS; m++) {
            rank_state *r = &ranks[m];
            r->w = &w, r->rank = m, r->seed = seed + (uint64_t)round;
            pthread_mutex_init(&r->process.mutex, NULL);
            for (int g = 0; g < 2; g++) r->groups[g] = new_group(&w, &r->process, m, RANKS, slots[g]);
            r->begin = (uint32_t *)(w.memory[m] + w.used[m]);
            for (size_t i = 0; i < sizeof r->staging / sizeof *r->staging; i++)
                r->staging[i] = (uint32_t *)allocate(&w, m, 4 * MOST);
            r->end = (uint32_t *)(w.memory[m] + w.used[m]);
        }
        pthread_t threads[RANKS];
        for (int m = 0; m < RANKS; m++) pthread_create(&threads[m], NULL, run, &ranks[m]);
        for (int m = 0; m < RANKS; m++) pthread_join(threads[m], NULL);
        for (int m = 0; m < RANKS; m++) free(w.memory[m]);
        printf("seed %llu: right\n", (unsigned long long)seed + (unsigned long long)round);
        fflush(stdout);
    }
    return 0;
}
