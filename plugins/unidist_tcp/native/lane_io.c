/* The bytes of a lane: as they are, or encrypted. */
#define _GNU_SOURCE
#include "tcp.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

ssize_t ud_lane_send(ud_lane *lane, struct iovec *parts, int num_parts) {
    if (!lane->tls) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)num_parts};
        return sendmsg(lane->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    if (num_parts == 1) return ud_tls_send(lane->tls, parts[0].iov_base, parts[0].iov_len);
    /* A header and the begin of its payload make one record. Called again, it has the same length. */
    char record[UD_TLS_RECORD_BYTES];
    size_t first = parts[0].iov_len, room = sizeof record - first;
    size_t second = parts[1].iov_len < room ? parts[1].iov_len : room;
    memcpy(record, parts[0].iov_base, first);
    memcpy(record + first, parts[1].iov_base, second);
    return ud_tls_send(lane->tls, record, first + second);
}

ssize_t ud_lane_recv(ud_lane *lane, struct iovec *parts, int num_parts) {
    if (!lane->tls) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)num_parts};
        return recvmsg(lane->fd, &message, MSG_DONTWAIT);
    }
    ssize_t sum = 0;
    for (int i = 0; i < num_parts; i++) {
        for (size_t done = 0; done < parts[i].iov_len;) {
            ssize_t n = ud_tls_recv(lane->tls, (char *)parts[i].iov_base + done, parts[i].iov_len - done);
            if (n <= 0) return sum ? sum : n; /* the next call says it again */
            done += (size_t)n;
            sum += n;
        }
    }
    return sum;
}
