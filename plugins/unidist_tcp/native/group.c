/* Groups: operations and their frames, and why they end. The mutex of the transport is held everywhere. */
#define _GNU_SOURCE
#include "tcp.h"

#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_QUESTION_NS INT64_C(100000000)
#define NEXT_QUESTION_NS INT64_C(1000000000)

static const char *const opcode_names[] = {"allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "barrier",
                                           "message"};

static ud_peer *peer_of(ud_group *group, int member) { return &group->transport->peers[group->members[member]]; }

static void tell(ud_group *group, int member, ud_frame frame, const void *payload) {
    ud_peer *peer = peer_of(group, member);
    if (member == group->rank || peer->is_lost) return;
    frame.group = group->id;
    ud_enqueue(peer, &frame, payload, NULL, 0);
}

/* Operations */

static int is_receive(const ud_step *step) { return step->kind == UD_RECV || step->kind == UD_RECV_REDUCE; }

uint64_t ud_available(const ud_op *op, int step) {
    int stream = op->plan.steps[step].stream;
    return stream < 0 ? op->plan.steps[step].nbytes : op->transfers[stream].prefix;
}

static void end_op(ud_op *op, int status) {
    ud_transport *transport = op->transport;
    ud_group *group = op->group;
    op->status = status;
    if (op->before) op->before->next = op->next;
    else group->first = op->next;
    if (op->next) op->next->before = op->before;
    else group->last = op->before;
    op->group = NULL;
    if (status != UD_DONE) ud_detach(op);
    for (int i = 0; i < op->plan.num_steps; i++) free(op->transfers[i].seen);
    free(op->transfers);
    free(op->scratch);
    ud_free_plan(&op->plan);
    transport->num_pending--;
    if (op->orphan) free(op);
    if (transport->waiting) pthread_cond_broadcast(&transport->came);
}

void ud_release(ud_op *op) {
    if (op->status == UD_PENDING) op->orphan = 1;
    else free(op);
}

static void run_locally(ud_op *op, int index) {
    const ud_step *step = &op->plan.steps[index];
    ud_transfer *at = &op->transfers[index];
    double scale = step->scaled ? op->scale : 1.0;
    size_t count = step->nbytes / op->item;
    if (!count) return;
    if (step->kind == UD_COPY) {
        const char *source = at->own;
        if (scale != 1.0) ud_reduce(&at->target, 1, &source, 1, count, op->dtype, UD_SUM, scale, 0);
        else if (at->target != at->own) memmove(at->target, at->own, step->nbytes);
    } else if (step->kind == UD_REDUCE) {
        const char *sources[2] = {step->swap ? at->other : at->own, step->swap ? at->own : at->other};
        ud_reduce(&at->target, 1, sources, 2, count, op->dtype, op->redop, scale, 0);
    } else {
        const char *sources[UD_MAX_SLOTS];
        for (int i = 0; i < op->group->size; i++)
            sources[i] = i == op->group->rank ? at->own : at->other + (uint64_t)i * step->stride;
        ud_reduce(&at->target, 1, sources, op->group->size, count, op->dtype, op->redop, scale, 0);
    }
}

/* Carries out what has become possible. The operation may have ended afterwards. */
static void advance(ud_op *op) {
    ud_plan *plan = &op->plan;
    for (; op->prefix < plan->num_steps; op->prefix++) {
        ud_transfer *transfer = &op->transfers[op->prefix];
        if (transfer->complete) continue;
        if (plan->steps[op->prefix].peer >= 0) break;
        run_locally(op, op->prefix);
        transfer->complete = 1;
    }
    if (op->prefix == plan->num_steps) {
        end_op(op, UD_DONE);
        return;
    }
    for (int i = op->prefix; i < plan->num_steps; i++) {
        const ud_step *step = &plan->steps[i];
        ud_transfer *transfer = &op->transfers[i];
        if (step->kind != UD_SEND || transfer->queued || step->after >= op->prefix) continue;
        ud_peer *peer = peer_of(op->group, step->peer);
        if (step->nbytes > UD_EAGER_BYTES) {
            if (!transfer->granted) continue;
            transfer->queued = 1;
            ud_enqueue_long(peer, op, i);
        } else {
            if (step->stream >= 0 && !op->transfers[step->stream].complete) continue;
            transfer->queued = 1;
            ud_frame frame = {.kind = UD_DATA, .opcode = (uint8_t)op->opcode, .dtype = (uint8_t)op->dtype,
                              .redop = (uint8_t)op->redop, .group = op->group->id, .seq = op->seq, .total = step->nbytes,
                              .count = op->count, .length = (uint32_t)step->nbytes, .tag = step->tag, .root = op->root,
                              .hash = op->hash};
            ud_enqueue(peer, &frame, transfer->target, op, i);
        }
    }
}

static void complete(ud_op *op, int step) {
    op->transfers[step].complete = 1;
    advance(op);
}

void ud_moved(ud_op *op, int step, uint64_t nbytes) {
    ud_transfer *transfer = &op->transfers[step];
    transfer->moved += nbytes;
    if (transfer->moved == op->plan.steps[step].nbytes) complete(op, step);
}

/* A segment is where it belongs. */
static void came(ud_op *op, int index, uint64_t offset, uint64_t length) {
    const ud_step *step = &op->plan.steps[index];
    ud_transfer *transfer = &op->transfers[index];
    transfer->moved += length;
    if (transfer->seen) {
        transfer->seen[offset / UD_SEGMENT_BYTES] = 1;
        while (transfer->prefix < step->nbytes && transfer->seen[transfer->prefix / UD_SEGMENT_BYTES]) {
            uint64_t left = step->nbytes - transfer->prefix;
            transfer->prefix += left < UD_SEGMENT_BYTES ? left : UD_SEGMENT_BYTES;
        }
        for (int i = index + 1; i < op->plan.num_steps; i++)
            if (op->plan.steps[i].kind == UD_SEND && op->plan.steps[i].stream == index)
                ud_mark_dirty(peer_of(op->group, op->plan.steps[i].peer));
    } else
        transfer->prefix = transfer->moved;
    if (transfer->moved == step->nbytes) complete(op, index);
}

static void reduce_segment(ud_op *op, int index, uint64_t offset, uint64_t length, const char *incoming) {
    const ud_step *step = &op->plan.steps[index];
    ud_transfer *transfer = &op->transfers[index];
    char *target = transfer->target + offset;
    const char *sources[2] = {transfer->own + offset, incoming};
    ud_reduce(&target, 1, sources, 2, length / op->item, op->dtype, op->redop, step->scaled ? op->scale : 1.0, 0);
}

static int matches(const ud_op *op, const ud_frame *frame) {
    return op->opcode == frame->opcode && op->dtype == frame->dtype && op->redop == frame->redop &&
           op->root == frame->root && op->hash == frame->hash && op->count == frame->count;
}

static void describe(char *text, size_t size, int opcode, int dtype, int redop, uint32_t root, uint64_t count) {
    const char *name = opcode <= UD_MESSAGE ? opcode_names[opcode] : "an unknown operation";
    const char *type = dtype < UD_NUM_DTYPES ? ud_dtype_names[dtype] : "an unknown type";
    if (opcode == UD_BARRIER) snprintf(text, size, "%s", name);
    else if (opcode == UD_BROADCAST) snprintf(text, size, "%s of %s[%llu] from rank %u", name, type,
                                              (unsigned long long)count, root);
    else if (opcode == UD_ALLTOALL) snprintf(text, size, "%s of %s", name, type);
    else snprintf(text, size, "%s of %s[%llu] by %s", name, type, (unsigned long long)count,
                  redop < UD_NUM_REDOPS ? ud_redop_names[redop] : "an unknown reduction");
}

static void disagree(ud_op *op, int member, const ud_frame *frame) {
    char mine[160], theirs[160], text[UD_TEXT_BYTES];
    describe(mine, sizeof mine, op->opcode, op->dtype, op->redop, op->root, op->count);
    describe(theirs, sizeof theirs, frame->opcode, frame->dtype, frame->redop, frame->root, frame->count);
    snprintf(text, sizeof text, "rank %d called %s, rank %d called %s%s", op->group->rank, mine, member, theirs,
             strcmp(mine, theirs) ? "" : " with another scale or other counts");
    ud_fail(op->group, UD_MISMATCH, member, text, 1);
}

static ud_op *find_collective(ud_group *group, uint64_t seq) {
    for (ud_op *op = group->first; op; op = op->next)
        if (op->opcode != UD_MESSAGE && op->seq == seq) return op;
    return NULL;
}

static ud_op *find_message(ud_group *group, int member, uint64_t seq, int kind) {
    for (ud_op *op = group->first; op; op = op->next)
        if (op->opcode == UD_MESSAGE && op->seq == seq && op->peer == member && op->plan.steps[0].kind == kind) return op;
    return NULL;
}

static int find_receive(const ud_op *op, int member, uint32_t tag) {
    for (int i = 0; i < op->plan.num_steps; i++) {
        const ud_step *step = &op->plan.steps[i];
        if (is_receive(step) && step->peer == member && step->tag == tag) return i;
    }
    return -1;
}

static void misfit(ud_op *op, uint64_t other_bytes) {
    op->other_bytes = other_bytes;
    end_op(op, UD_MISFIT);
}

static void grant_message(ud_group *group, int member, uint64_t seq, uint64_t nbytes) {
    tell(group, member, (ud_frame){.kind = UD_GRANT, .opcode = UD_MESSAGE, .seq = seq, .total = nbytes}, NULL);
}

static void send_granted(ud_op *op, uint64_t their_bytes) {
    if (op->plan.steps[0].nbytes != their_bytes) {
        end_op(op, UD_DONE); /* the receiver has heard of the size, and raises */
        return;
    }
    op->transfers[0].granted = 1;
    advance(op);
}

static void collective_granted(ud_op *op, int member) {
    for (int i = 0; i < op->plan.num_steps; i++)
        if (op->plan.steps[i].kind == UD_SEND && op->plan.steps[i].peer == member) op->transfers[i].granted = 1;
    advance(op);
}

/* Whether a frame that comes for an operation belongs to it; otherwise the operation, or the group, has failed. */
static int accept(ud_op *op, int member, const ud_frame *frame, int *step) {
    if (op->opcode == UD_MESSAGE) {
        *step = 0;
        if (frame->total == op->plan.steps[0].nbytes) return 1;
        misfit(op, frame->total);
        return 0;
    }
    *step = matches(op, frame) ? find_receive(op, member, frame->tag) : -1;
    if (*step < 0 || op->plan.steps[*step].nbytes != frame->total) {
        disagree(op, member, frame);
        return 0;
    }
    return 1;
}

static int segment_is_valid(const ud_op *op, int step, const ud_frame *frame) {
    uint64_t nbytes = op->plan.steps[step].nbytes;
    if (op->transfers[step].complete) return 0;
    if (nbytes <= UD_EAGER_BYTES) return frame->offset == 0 && frame->length == nbytes;
    if (frame->offset % UD_SEGMENT_BYTES || frame->offset >= nbytes) return 0;
    uint64_t left = nbytes - frame->offset;
    return frame->length == (left < UD_SEGMENT_BYTES ? left : UD_SEGMENT_BYTES) &&
           !op->transfers[step].seen[frame->offset / UD_SEGMENT_BYTES];
}

/* Gives an operation the frames that came before it. It may have ended afterwards: returns whether it has not. */
static int take_stored(ud_group *group, ud_op *op) {
    ud_stored **link = &group->stored;
    int is_message = op->opcode == UD_MESSAGE;
    int is_send = is_message && op->plan.steps[0].kind == UD_SEND;
    while (*link) {
        ud_stored *stored = *link;
        ud_frame *frame = &stored->frame;
        if ((frame->opcode == UD_MESSAGE) != is_message || frame->seq != op->seq ||
            (is_message && (stored->peer != op->peer || (frame->kind == UD_GRANT) != is_send))) {
            link = &stored->next;
            continue;
        }
        *link = stored->next;
        if (!*link) group->stored_end = link;
        int step, goes_on = 1;
        if (frame->kind == UD_GRANT) {
            if (is_message) op->transfers[0].granted = frame->total == op->plan.steps[0].nbytes ? 1 : -1;
            else if (!matches(op, frame)) disagree(op, stored->peer, frame), goes_on = 0;
            else
                for (int i = 0; i < op->plan.num_steps; i++)
                    if (op->plan.steps[i].kind == UD_SEND && op->plan.steps[i].peer == stored->peer)
                        op->transfers[i].granted = 1;
        } else if (frame->kind == UD_OFFER) {
            if (frame->total != op->plan.steps[0].nbytes) {
                grant_message(group, stored->peer, op->seq, op->plan.steps[0].nbytes);
                misfit(op, frame->total), goes_on = 0;
            }
        } else if (!accept(op, stored->peer, frame, &step))
            goes_on = 0;
        else if (frame->length == frame->total && !op->transfers[step].complete) {
            ud_transfer *transfer = &op->transfers[step];
            if (op->plan.steps[step].kind == UD_RECV_REDUCE) reduce_segment(op, step, 0, frame->length, stored->data);
            else if (frame->length) memcpy(transfer->target, stored->data, frame->length);
            transfer->moved = transfer->prefix = frame->length;
            transfer->complete = 1; /* the caller advances */
        }
        free(stored);
        if (!goes_on) return 0;
    }
    return 1;
}

static void store(ud_group *group, ud_stored *stored) {
    stored->next = NULL;
    *group->stored_end = stored;
    group->stored_end = &stored->next;
}

static void store_frame(ud_group *group, int member, const ud_frame *frame) {
    ud_stored *stored = malloc(sizeof *stored);
    if (!stored) {
        ud_fail(group, UD_LOST, group->rank, "this rank ran out of memory", 1);
        return;
    }
    stored->peer = member, stored->frame = *frame;
    store(group, stored);
}

static ud_op *new_op(ud_group *group, int opcode, int dtype, int redop, uint64_t item) {
    ud_op *op = calloc(1, sizeof *op);
    if (!op) return NULL;
    op->transport = group->transport, op->group = group;
    op->opcode = opcode, op->dtype = dtype, op->redop = redop, op->item = item;
    op->scale = 1.0, op->status = UD_PENDING, op->posted_ns = ud_now();
    return op;
}

static void link_op(ud_op *op) {
    ud_group *group = op->group;
    ud_transport *transport = group->transport;
    op->before = group->last;
    if (group->last) group->last->next = op;
    else group->first = op;
    group->last = op;
    transport->num_pending++;
    transport->last_post_ns = op->posted_ns;
    if (transport->napping_long) pthread_cond_signal(&transport->nap);
}

static int prepare(ud_op *op, const char *source, char *target) {
    ud_plan *plan = &op->plan;
    op->transfers = calloc((size_t)plan->num_steps + 1, sizeof *op->transfers);
    if (plan->scratch_bytes) op->scratch = malloc(plan->scratch_bytes);
    int failed = !op->transfers || (plan->scratch_bytes && !op->scratch);
    char *const bases[] = {(char *)(uintptr_t)source, target, op->scratch};
    for (int i = 0; !failed && i < plan->num_steps; i++) {
        const ud_step *step = &plan->steps[i];
        ud_transfer *at = &op->transfers[i];
        at->target = bases[step->target.space] + step->target.offset;
        at->own = bases[step->own.space] + step->own.offset;
        at->other = bases[step->other.space] + step->other.offset;
        if (is_receive(step) && step->nbytes > UD_EAGER_BYTES)
            failed = !(at->seen = calloc(step->nbytes / UD_SEGMENT_BYTES + 1, 1));
    }
    if (!failed) return 0;
    for (int i = 0; op->transfers && i < plan->num_steps; i++) free(op->transfers[i].seen);
    free(op->transfers);
    free(op->scratch);
    ud_free_plan(plan);
    free(op);
    return -1;
}

static uint32_t mix(uint32_t hash, const void *data, size_t nbytes) { /* FNV-1a */
    const unsigned char *bytes = data;
    for (size_t i = 0; i < nbytes; i++) hash = (hash ^ bytes[i]) * 16777619u;
    return hash;
}

/* What ends an operation before it begins. */
static int obstacle(ud_group *group) { return group->closed ? UD_CLOSED : group->failure; }

static ud_op *ended(ud_op *op, int status) {
    op->status = status;
    op->group = NULL;
    return op;
}

ud_op *ud_post(ud_group *group, const ud_request *request) {
    ud_op *op = new_op(group, request->opcode, request->dtype, request->redop, ud_dtype_bytes[request->dtype]);
    if (!op) return NULL;
    int status = obstacle(group);
    if (status) return ended(op, status);
    int is_reduction = request->opcode == UD_ALLREDUCE || request->opcode == UD_REDUCESCATTER;
    op->scale = request->scale, op->root = (uint32_t)request->root;
    op->count = request->opcode == UD_ALLTOALL ? 0 : request->count;
    op->hash = mix(2166136261u, &request->scale, sizeof request->scale);
    if (request->counts && request->opcode != UD_ALLTOALL)
        op->hash = mix(op->hash, request->counts, (size_t)group->size * sizeof *request->counts);
    if (!is_reduction) op->redop = 0;
    ud_call call = {.opcode = request->opcode, .rank = group->rank, .size = group->size, .root = request->root,
                    .count = request->count, .item = op->item, .counts = request->counts, .counts2 = request->counts2,
                    .in_place = request->source == request->target};
    if (ud_make_plan(&op->plan, &call)) {
        ud_free_plan(&op->plan);
        free(op);
        return NULL;
    }
    if (prepare(op, request->source, request->target)) return NULL;
    op->seq = group->collectives++;
    group->entered[group->rank] = group->collectives;
    link_op(op);
    for (int i = 0; i < group->size; i++)
        if (group->left[i] && group->left_after[i] <= op->seq) {
            ud_fail(group, UD_LOST, i, "it closed its communicator", 1);
            return op;
        }
    int granted = -1;
    for (int i = 0; i < op->plan.num_steps; i++) { /* one grant is for all steps; several peers follow each other */
        const ud_step *step = &op->plan.steps[i];
        if (!is_receive(step) || step->nbytes <= UD_EAGER_BYTES || step->peer == granted) continue;
        int was_granted = 0;
        for (int j = 0; j < i && !was_granted; j++)
            was_granted = is_receive(&op->plan.steps[j]) && op->plan.steps[j].peer == step->peer &&
                          op->plan.steps[j].nbytes > UD_EAGER_BYTES;
        granted = step->peer;
        if (was_granted) continue;
        tell(group, step->peer, (ud_frame){.kind = UD_GRANT, .opcode = (uint8_t)op->opcode, .dtype = (uint8_t)op->dtype,
                                           .redop = (uint8_t)op->redop, .seq = op->seq, .count = op->count,
                                           .root = op->root, .hash = op->hash}, NULL);
    }
    if (take_stored(group, op)) advance(op);
    ud_flush(group->transport);
    return op;
}

ud_op *ud_post_message(ud_group *group, int is_send, int peer, char *buffer, uint64_t nbytes) {
    ud_op *op = new_op(group, UD_MESSAGE, UD_UINT8, UD_SUM, 1);
    if (!op) return NULL;
    int status = obstacle(group);
    if (status) return ended(op, status);
    op->peer = peer;
    op->plan.steps = calloc(1, sizeof *op->plan.steps);
    if (!op->plan.steps) {
        free(op);
        return NULL;
    }
    op->plan.num_steps = 1;
    op->plan.steps[0] = (ud_step){.kind = is_send ? UD_SEND : UD_RECV, .peer = peer, .nbytes = nbytes,
                                  .target = {0, UD_TARGET}, .after = -1, .stream = -1};
    if (prepare(op, buffer, buffer)) return NULL;
    op->seq = is_send ? group->sent[peer]++ : group->received[peer]++;
    link_op(op);
    if (group->left[peer] && (is_send || op->seq >= group->left_messages[peer])) {
        ud_fail(group, UD_LOST, peer, "it closed its communicator", 1);
        return op;
    }
    ud_frame frame = {.kind = UD_DATA, .opcode = UD_MESSAGE, .group = group->id, .seq = op->seq, .total = nbytes,
                      .length = nbytes <= UD_EAGER_BYTES ? (uint32_t)nbytes : 0};
    if (is_send && peer == group->rank) { /* kept until it is received, however long it is */
        ud_op *receiver = find_message(group, peer, op->seq, UD_RECV);
        ud_stored *stored = receiver ? NULL : malloc(sizeof *stored + nbytes);
        if (receiver && receiver->plan.steps[0].nbytes != nbytes) misfit(receiver, nbytes);
        else if (receiver) {
            if (nbytes) memcpy(receiver->transfers[0].target, buffer, nbytes);
            end_op(receiver, UD_DONE);
        } else if (stored) {
            frame.length = (uint32_t)nbytes, frame.total = nbytes;
            stored->peer = peer, stored->frame = frame;
            if (nbytes) memcpy(stored->data, buffer, nbytes);
            store(group, stored);
        } else {
            ud_fail(group, UD_LOST, group->rank, "this rank ran out of memory", 1);
            return op;
        }
        end_op(op, UD_DONE);
        return op;
    }
    if (!take_stored(group, op)) {
        ud_flush(group->transport);
        return op;
    }
    if (is_send && nbytes > UD_EAGER_BYTES && op->transfers[0].granted <= 0) {
        frame.kind = UD_OFFER;
        tell(group, peer, frame, NULL);
    }
    if (is_send && op->transfers[0].granted < 0) end_op(op, UD_DONE); /* the receiver wants another size, and raises */
    else {
        if (!is_send && nbytes > UD_EAGER_BYTES && !op->transfers[0].complete) grant_message(group, peer, op->seq, nbytes);
        advance(op);
    }
    ud_flush(group->transport);
    return op;
}

/* Frames */

static ud_group *find_group(ud_transport *transport, uint64_t id) {
    for (ud_group *group = transport->groups; group; group = group->next)
        if (group->id == id) return group;
    return NULL;
}

static int member_of(const ud_group *group, int world_rank) {
    for (int i = 0; i < group->size; i++)
        if (group->members[i] == world_rank) return i;
    return -1;
}

int ud_begin_frame(ud_lane *lane) {
    ud_frame *frame = &lane->in;
    lane->in_op = NULL, lane->in_stored = NULL, lane->in_text = NULL;
    if (frame->magic != UD_TCP_MAGIC || frame->kind < UD_DATA || frame->kind >= UD_NUM_KINDS || frame->opcode > UD_MESSAGE)
        return -1;
    if (frame->kind == UD_ABORT) {
        if (frame->length >= UD_TEXT_BYTES) return -1;
        lane->in_target = lane->in_text = calloc(1, UD_TEXT_BYTES);
        return lane->in_text ? 0 : -1;
    }
    if (frame->kind != UD_DATA) return frame->length ? -1 : 0;
    if (frame->length > UD_SEGMENT_BYTES || frame->length > frame->total) return -1;
    ud_transport *transport = lane->peer->transport;
    ud_group *group = find_group(transport, frame->group);
    int member = group ? member_of(group, lane->peer->rank) : -1;
    if (member < 0 || group->failure) return 0; /* thrown away */
    int is_message = frame->opcode == UD_MESSAGE;
    if (!is_message && group->entered[member] <= frame->seq) group->entered[member] = frame->seq + 1;
    ud_op *op = is_message ? find_message(group, member, frame->seq, UD_RECV) : find_collective(group, frame->seq);
    if (op) {
        int step;
        if (!accept(op, member, frame, &step)) return 0;
        if (!segment_is_valid(op, step, frame)) return -1;
        lane->in_op = op, lane->in_step = step;
        lane->in_target = op->plan.steps[step].kind == UD_RECV_REDUCE ? lane->scratch
                                                                     : op->transfers[step].target + frame->offset;
        return 0;
    }
    if (frame->seq < (is_message ? group->received[member] : group->collectives)) return 0; /* of one that has ended */
    if (frame->length != frame->total || frame->total > UD_EAGER_BYTES) return -1; /* nobody asked for it */
    lane->in_stored = malloc(sizeof *lane->in_stored + frame->length);
    if (!lane->in_stored) return -1;
    lane->in_stored->peer = member, lane->in_stored->frame = *frame;
    lane->in_target = lane->in_stored->data;
    return 0;
}

static void closed_by(ud_group *group, int member, const ud_frame *frame) {
    group->left[member] = 1;
    group->left_after[member] = frame->seq, group->left_messages[member] = frame->total;
    for (ud_op *op = group->first; op; op = op->next) {
        int is_send = op->opcode == UD_MESSAGE && op->plan.steps[0].kind == UD_SEND;
        if (op->opcode == UD_MESSAGE ? op->peer == member && (is_send || op->seq >= frame->total) : op->seq >= frame->seq) {
            ud_fail(group, UD_LOST, member, "it closed its communicator", 1);
            return;
        }
    }
}

void ud_end_frame(ud_lane *lane) {
    ud_frame *frame = &lane->in;
    ud_transport *transport = lane->peer->transport;
    if (frame->kind == UD_DATA && lane->in_op) {
        ud_op *op = lane->in_op;
        lane->in_op = NULL;
        if (op->plan.steps[lane->in_step].kind == UD_RECV_REDUCE)
            reduce_segment(op, lane->in_step, frame->offset, frame->length, lane->scratch);
        came(op, lane->in_step, frame->offset, frame->length);
        return;
    }
    ud_group *group = find_group(transport, frame->group);
    int member = group ? member_of(group, lane->peer->rank) : -1;
    ud_stored *stored = lane->in_stored;
    char *text = lane->in_text;
    lane->in_stored = NULL, lane->in_text = NULL;
    if (member < 0 || group->failure) {
        free(stored);
        free(text);
        return;
    }
    int is_message = frame->opcode == UD_MESSAGE;
    ud_op *op;
    switch (frame->kind) {
    case UD_DATA:
        if (!stored) return;
        /* Its operation may have begun while it came. */
        op = is_message ? find_message(group, member, frame->seq, UD_RECV) : find_collective(group, frame->seq);
        store(group, stored);
        if (op && take_stored(group, op)) advance(op);
        return;
    case UD_OFFER:
        op = find_message(group, member, frame->seq, UD_RECV);
        if (!op) {
            if (frame->seq >= group->received[member]) store_frame(group, member, frame);
            else grant_message(group, member, frame->seq, UINT64_MAX); /* of a receive that has failed */
        } else if (op->plan.steps[0].nbytes != frame->total) {
            if (op->plan.steps[0].nbytes <= UD_EAGER_BYTES) grant_message(group, member, frame->seq, 0);
            misfit(op, frame->total);
        }
        return;
    case UD_GRANT:
        op = is_message ? find_message(group, member, frame->seq, UD_SEND) : find_collective(group, frame->seq);
        if (!is_message && group->entered[member] <= frame->seq) group->entered[member] = frame->seq + 1;
        if (!op) {
            if (frame->seq >= (is_message ? group->sent[member] : group->collectives)) store_frame(group, member, frame);
        } else if (is_message)
            send_granted(op, frame->total);
        else if (!matches(op, frame))
            disagree(op, member, frame);
        else
            collective_granted(op, member);
        return;
    case UD_ABORT: {
        int culprit = (int)frame->root < group->size ? (int)frame->root : member;
        int failure = frame->tag == UD_LOST || frame->tag == UD_MISMATCH ? (int)frame->tag : UD_ABORTED;
        ud_fail(group, failure, culprit, text, 0);
        free(text);
        return;
    }
    case UD_CLOSE: closed_by(group, member, frame); return;
    case UD_ENTERED:
        if (group->entered[member] < frame->seq) group->entered[member] = frame->seq;
        if (frame->tag) tell(group, member, (ud_frame){.kind = UD_ENTERED, .seq = group->collectives}, NULL);
        return;
    }
}

/* Groups */

ud_group *ud_open_group(ud_transport *transport, uint64_t id, int rank, int size, const int *members) {
    ud_group *group = calloc(1, sizeof *group);
    if (!group) return NULL;
    size_t n = (size_t)size;
    group->transport = transport, group->id = id, group->rank = rank, group->size = size;
    group->members = calloc(n, sizeof *group->members);
    group->sent = calloc(n, sizeof *group->sent), group->received = calloc(n, sizeof *group->received);
    group->entered = calloc(n, sizeof *group->entered), group->left = calloc(n, 1);
    group->left_after = calloc(n, sizeof *group->left_after);
    group->left_messages = calloc(n, sizeof *group->left_messages);
    group->stored_end = &group->stored;
    group->culprit = -1;
    if (!group->members || !group->sent || !group->received || !group->entered || !group->left || !group->left_after ||
        !group->left_messages) {
        group->closed = 1;
        ud_free_group(group);
        return NULL;
    }
    memcpy(group->members, members, n * sizeof *members);
    group->next = transport->groups;
    transport->groups = group;
    for (int i = 0; i < size; i++)
        if (i != rank && peer_of(group, i)->is_lost) ud_fail(group, UD_LOST, i, "the connection to it is lost", 0);
    return group;
}

void ud_fail(ud_group *group, int failure, int culprit, const char *text, int spread) {
    if (group->failure || group->closed) return;
    group->failure = failure, group->culprit = culprit;
    snprintf(group->text, sizeof group->text, "%s", text);
    while (group->first) end_op(group->first, failure);
    while (group->stored) {
        ud_stored *stored = group->stored;
        group->stored = stored->next;
        free(stored);
    }
    group->stored_end = &group->stored;
    ud_frame frame = {.kind = UD_ABORT, .root = (uint32_t)culprit, .tag = (uint32_t)failure,
                      .length = (uint32_t)strlen(group->text)};
    for (int i = 0; spread && i < group->size; i++)
        if (!group->left[i]) tell(group, i, frame, group->text);
    if (group->transport->waiting) pthread_cond_broadcast(&group->transport->came);
    ud_kick(group->transport);
}

void ud_close_group(ud_group *group) {
    if (group->closed) return;
    ud_transport *transport = group->transport;
    uint64_t through = group->collectives; /* collectives that need nothing of this rank any more */
    for (ud_op *op = group->first; op; op = op->next)
        if (op->opcode != UD_MESSAGE && op->seq < through) through = op->seq;
    for (int i = 0; i < group->size; i++)
        if (!group->left[i])
            tell(group, i, (ud_frame){.kind = UD_CLOSE, .seq = through, .total = group->sent[i]}, NULL);
    group->closed = 1;
    while (group->first) end_op(group->first, UD_CLOSED);
    ud_group **link = &transport->groups;
    while (*link != group) link = &(*link)->next;
    *link = group->next;
    ud_flush(transport);
    if (transport->waiting) pthread_cond_broadcast(&transport->came);
    ud_kick(transport);
}

void ud_free_group(ud_group *group) {
    while (group->stored) {
        ud_stored *stored = group->stored;
        group->stored = stored->next;
        free(stored);
    }
    free(group->members);
    free(group->sent);
    free(group->received);
    free(group->entered);
    free(group->left);
    free(group->left_after);
    free(group->left_messages);
    free(group);
}

static int needs(const ud_op *op, int member) {
    for (int i = 0; i < op->plan.num_steps; i++)
        if (op->plan.steps[i].peer == member && !op->transfers[i].complete) return 1;
    return 0;
}

void ud_peer_lost(ud_peer *peer, const char *why) {
    ud_transport *transport = peer->transport;
    if (!peer->num_open || peer->lanes[0].is_open) peer->is_lost = 1; /* else other lanes bring the rest */
    for (ud_group *group = transport->groups; group; group = group->next) {
        int member = member_of(group, peer->rank);
        if (member < 0 || member == group->rank) continue;
        int is_needed = !group->left[member];
        for (ud_op *op = group->first; op && !is_needed; op = op->next) is_needed = peer->is_lost && needs(op, member);
        if (is_needed) ud_fail(group, UD_LOST, member, why, 1);
    }
}

int ud_missing_in(const ud_op *op, int *ranks) {
    int n = 0;
    if (!op->group) return 0;
    if (op->opcode == UD_MESSAGE) {
        ranks[n++] = op->peer;
        return n;
    }
    for (int i = 0; i < op->group->size; i++)
        if (op->group->entered[i] <= op->seq) ranks[n++] = i;
    return n;
}

int ud_missing(ud_group *group, int *ranks) {
    for (ud_op *op = group->first; op; op = op->next)
        if (op->opcode != UD_MESSAGE) return ud_missing_in(op, ranks);
    return group->first ? ud_missing_in(group->first, ranks) : 0;
}

void ud_ask_around(ud_group *group, int64_t now) {
    for (ud_op *op = group->first; op; op = op->next) {
        if (op->opcode == UD_MESSAGE) continue;
        if (now - op->posted_ns < FIRST_QUESTION_NS || now - op->asked_ns < NEXT_QUESTION_NS) return;
        op->asked_ns = now;
        for (int i = 0; i < group->size; i++)
            if (group->entered[i] <= op->seq && !group->left[i])
                tell(group, i, (ud_frame){.kind = UD_ENTERED, .seq = group->collectives, .tag = 1}, NULL);
        return;
    }
}
