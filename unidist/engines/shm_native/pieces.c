/* Sources of an all-reduce that lie in ordinary memory, in pieces. A rank reads its own where they are, and those of its
 * peers through the kernel (process_vm_readv), a block at a time, so that what was read is still in the cache when it is
 * added up: nobody copies a whole source.
 *
 * A peer that gives up frees its memory, which then may hold anything. It marks the group as aborted before, so a rank
 * looks for that mark after its last read. */
#define _GNU_SOURCE
#include "group.h"

#include "kernels.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define BLOCK_BYTES 65536 /* of each source; a few of them stay in the second-level cache */
#define VECTORS 64        /* pieces that one system call reads */

typedef struct { /* one member's source, read from its beginning to its end */
    const ud_piece *next, *end;
} cursor;

static const ud_piece *table_of(ud_group *group, int member, uint32_t seq) {
    return (const ud_piece *)(group->bases[member] + ud_descriptor_of(group, member, seq)->pieces);
}

int ud_has_pieces(ud_group *group, uint32_t seq) {
    for (int m = 0; m < group->size; m++)
        if (ud_descriptor_of(group, m, seq)->pieces != UD_NO_OFFSET) return 1;
    return 0;
}

static int read_vectors(ud_group *group, int member, struct iovec *to, struct iovec *from, int n, ud_blame *blame) {
    size_t wanted = 0;
    for (int i = 0; i < n; i++) wanted += to[i].iov_len;
    if (!n || process_vm_readv((pid_t)group->pids[member], to, (size_t)n, from, (size_t)n, 0) == (ssize_t)wanted)
        return UD_OK;
    int gone = errno == ESRCH;
    int status = ud_check_abort(group, blame);
    if (status) return status;
    blame->rank = member;
    return gone ? UD_LOST : UD_UNREADABLE;
}

/* Brings elements [begin, end) of a member's pieces to `target`. */
static int fetch(ud_group *group, int member, const ud_piece *piece, const ud_piece *last, uint64_t begin, uint64_t end,
                 size_t item, char *target, ud_blame *blame) {
    struct iovec to[VECTORS], from[VECTORS];
    int n = 0;
    while (begin < end) {
        ud_piece next = {end, 0, 0};
        if (piece < last) next = *piece;
        uint64_t stop = next.begin < end ? next.begin : end;
        if (stop > begin) { /* before the next piece, or behind all of them */
            memset(target, 0, (stop - begin) * item);
            target += (stop - begin) * item, begin = stop;
            continue;
        }
        stop = next.begin + next.count < end ? next.begin + next.count : end;
        if (stop <= begin) { /* the table of a rank that has given up meanwhile: what it says means nothing */
            piece++;
            continue;
        }
        char *source = (char *)(uintptr_t)next.address + (begin - next.begin) * item;
        size_t nbytes = (stop - begin) * item;
        if (member == group->rank) {
            memmove(target, source, nbytes); /* it may be there already */
        } else {
            to[n] = (struct iovec){target, nbytes}, from[n] = (struct iovec){source, nbytes};
            if (++n == VECTORS) {
                int status = read_vectors(group, member, to, from, n, blame);
                if (status) return status;
                n = 0;
            }
        }
        target += nbytes, begin = stop;
        if (begin == next.begin + next.count) piece++;
    }
    return read_vectors(group, member, to, from, n, blame);
}

/* The address of elements [begin, end) of a member's source, in this process. */
static int find(ud_group *group, const ud_op *op, int member, cursor *at, uint64_t begin, uint64_t end, char *scratch,
                const char **found, ud_blame *blame) {
    size_t item = ud_dtype_bytes[op->dtype];
    if (!at->next) { /* engine memory */
        *found = group->bases[member] + ud_descriptor_of(group, member, op->seq)->source + begin * item;
        return UD_OK;
    }
    while (at->next < at->end && at->next->begin + at->next->count <= begin) at->next++;
    const ud_piece *piece = at->next;
    if (member == group->rank && piece < at->end && piece->begin <= begin && end <= piece->begin + piece->count) {
        *found = (const char *)(uintptr_t)piece->address + (begin - piece->begin) * item;
        return UD_OK;
    }
    *found = scratch;
    return fetch(group, member, piece, at->end, begin, end, item, scratch, blame);
}

int ud_reduce_pieces(ud_group *group, const ud_op *op, uint64_t begin, uint64_t end, char *const *targets,
                     int num_targets, ud_blame *blame) {
    size_t item = ud_dtype_bytes[op->dtype];
    uint64_t per_block = BLOCK_BYTES / item, first = begin;
    cursor cursors[group->size];
    const char *sources[group->size];
    char *outputs[num_targets];
    if (!group->scratch) group->scratch = aligned_alloc(4096, (size_t)group->size * BLOCK_BYTES);
    if (!group->scratch) {
        blame->rank = group->rank;
        return UD_UNREADABLE;
    }
    for (int m = 0; m < group->size; m++) {
        const ud_descriptor *d = ud_descriptor_of(group, m, op->seq);
        cursors[m] = (cursor){NULL, NULL};
        if (d->pieces != UD_NO_OFFSET)
            cursors[m] = (cursor){table_of(group, m, op->seq), table_of(group, m, op->seq) + d->num_pieces};
    }
    for (; begin < end; begin += per_block) {
        uint64_t stop = end - begin < per_block ? end : begin + per_block;
        for (int m = 0; m < group->size; m++) {
            int status = find(group, op, m, &cursors[m], begin, stop, group->scratch + (size_t)m * BLOCK_BYTES,
                              &sources[m], blame);
            if (status) return status;
        }
        for (int t = 0; t < num_targets; t++) outputs[t] = targets[t] + (begin - first) * item;
        ud_reduce(outputs, num_targets, sources, group->size, stop - begin, op->dtype, op->redop, op->scale,
                  1);
    }
    return ud_check_abort(group, blame);
}

void ud_gather_pieces(ud_group *group, ud_op *op) {
    ud_blame blame;
    fetch(group, group->rank, op->pieces, op->pieces + op->num_pieces, 0, op->count, ud_dtype_bytes[op->dtype],
          op->target, &blame);
    op->source = op->target, op->pieces = NULL;
}
