/* Waiting: spin while the peer is likely to be at work on another core, then yield, then sleep on a futex.
 *
 * A sleeper wakes every SLICE to look for what no counter tells: an abort, a dead peer, that another thread closes the
 * group, its own deadline, and operations of other groups that peers wait for. */
#define _GNU_SOURCE
#include "group.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLICE_NS 20000000   /* sleep at most 20 ms at a time */
#define BUSY_SLICE_NS 500000 /* 0.5 ms while other groups have operations to be moved */
#define YIELDS 32

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE() ((void)0)
#endif

int64_t ud_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void ud_publish(ud_counter *counter, uint32_t value) {
    /* seq_cst on both sides: either we see the waiter's registration, or it sees our value. */
    atomic_store(&counter->value, value);
    if (atomic_load(&counter->waiters))
        syscall(SYS_futex, &counter->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

ud_counter *ud_op_arrived(ud_group *group, int member) { return &group->slots[member]->op_arrived; }
ud_counter *ud_op_done(ud_group *group, int member) { return &group->slots[member]->op_done; }
ud_counter *ud_win_arrived(ud_group *group, int member) { return &group->slots[member]->win_arrived; }
ud_counter *ud_win_done(ud_group *group, int member) { return &group->slots[member]->win_done; }

void ud_abort(ud_group *group, int rank, const char *reason) {
    for (int m = 0; m < group->size; m++) {
        ud_slot *slot = group->slots[m];
        uint32_t expected = 0;
        /* 1 while the text is written, 2 when it can be read: the first abort decides. */
        if (!atomic_compare_exchange_strong(&slot->aborted, &expected, 1)) continue;
        slot->abort_rank = (uint32_t)rank;
        snprintf(slot->abort_reason, UD_REASON, "%s", reason);
        atomic_store(&slot->aborted, 2);
    }
    for (int m = 0; m < group->size; m++) { /* sleepers look up at once */
        ud_counter *counters[] = {&group->slots[m]->op_arrived, &group->slots[m]->op_done,
                                  &group->slots[m]->win_arrived, &group->slots[m]->win_done};
        for (size_t i = 0; i < sizeof counters / sizeof *counters; i++)
            syscall(SYS_futex, &counters[i]->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    }
}

/* A dead member that has not reached `value` never will. Its pipe breaks after its last store to the counter,
 * so the counter is read again after the pipe was seen broken. */
static int find_lost(ud_group *group, ud_counter_of counter_of, int only, uint32_t value) {
    for (int m = 0; m < group->size; m++) {
        if ((only >= 0 && m != only) || group->liveness[m] < 0 || ud_reached(counter_of(group, m), value)) continue;
        struct pollfd pipe = {.fd = group->liveness[m], .events = 0};
        if (poll(&pipe, 1, 0) > 0 && (pipe.revents & (POLLHUP | POLLERR | POLLNVAL)) &&
            !ud_reached(counter_of(group, m), value))
            return m;
    }
    return -1;
}

int ud_is_aborted(ud_group *group) {
    return atomic_load_explicit(&group->slots[group->rank]->aborted, memory_order_acquire) == 2;
}

int ud_check_abort(ud_group *group, ud_blame *blame) {
    if (ud_is_closing(group)) {
        blame->rank = group->rank;
        return UD_CLOSED;
    }
    if (!ud_is_aborted(group)) return UD_OK;
    blame->rank = (int)group->slots[group->rank]->abort_rank;
    return UD_ABORTED;
}

static void sleep_on(ud_counter *counter, uint32_t seen, int64_t nanoseconds) {
    struct timespec timeout = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    syscall(SYS_futex, &counter->value, FUTEX_WAIT, seen, &timeout, NULL, 0);
}

static int wait_for_member(ud_group *group, ud_counter_of counter_of, int only, int member, uint32_t value,
                           int64_t deadline, ud_blame *blame) {
    ud_counter *counter = counter_of(group, member);
    int64_t start = ud_now();
    while (ud_now() - start < group->spin_ns)
        for (int i = 0; i < 64; i++) {
            if (ud_reached(counter, value)) return UD_OK;
            PAUSE();
        }
    for (int i = 0; i < YIELDS; i++) {
        if (ud_reached(counter, value)) return UD_OK;
        sched_yield();
    }
    for (;;) {
        int status = ud_check_abort(group, blame);
        if (status) return status;
        int lost = find_lost(group, counter_of, only, value);
        if (lost >= 0) {
            blame->rank = lost;
            return UD_LOST;
        }
        int busy = ud_progress_all(group->process);
        int64_t left = deadline - ud_now();
        if (left <= 0) {
            blame->rank = member;
            return UD_TIMEOUT;
        }
        int64_t slice = busy ? BUSY_SLICE_NS : SLICE_NS;
        atomic_fetch_add(&counter->waiters, 1);
        uint32_t seen = atomic_load(&counter->value);
        if ((int32_t)(seen - value) < 0) sleep_on(counter, seen, left < slice ? left : slice);
        atomic_fetch_sub(&counter->waiters, 1);
        if (ud_reached(counter, value)) return UD_OK;
    }
}

int ud_wait(ud_group *group, ud_counter_of counter_of, int only, uint32_t value, int64_t deadline, ud_blame *blame) {
    for (int i = 0; i < group->size; i++) {
        int member = only >= 0 ? only : (group->rank + i) % group->size; /* not everyone on the same line */
        if (!ud_reached(counter_of(group, member), value)) {
            if (deadline == 0) {
                ud_move_messages(group);
                int status = ud_check_abort(group, blame);
                if (status) return status;
                int lost = find_lost(group, counter_of, only, value);
                blame->rank = lost;
                return lost >= 0 ? UD_LOST : UD_PENDING;
            }
            int status = wait_for_member(group, counter_of, only, member, value, deadline, blame);
            if (status) return status;
        }
        if (only >= 0) break;
    }
    return UD_OK;
}
