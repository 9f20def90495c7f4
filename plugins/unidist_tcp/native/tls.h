/* TLS 1.3 on one connection, by OpenSSL's libssl, which is looked for when it is first asked for.
 *
 * Both ends have a key that nobody else has: there are no certificates. An object is used by one thread at a time, as a
 * lane is. Nothing here blocks. */
#ifndef UNIDIST_TCP_TLS_H
#define UNIDIST_TCP_TLS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define UD_TLS_KEY_BYTES 32
#define UD_TLS_RECORD_BYTES ((size_t)16384) /* of data, at most, in one record */

typedef struct ud_tls ud_tls;

enum ud_tls_step { UD_TLS_OPEN, UD_TLS_WANTS_READ, UD_TLS_WANTS_WRITE, UD_TLS_FAILED };

/* Loads the first library of these names that can be loaded; again, does nothing. Returns 0, or -1 and says why. One
 * thread at a time. */
int ud_tls_load(const char *const *names, int num_names, char *why, size_t why_bytes);
/* NULL: there is no memory. The descriptor stays the caller's. */
ud_tls *ud_tls_new(int fd, int is_server, const unsigned char key[UD_TLS_KEY_BYTES]);
enum ud_tls_step ud_tls_handshake(ud_tls *tls, char *why, size_t why_bytes);
/* As send and recv without blocking: -1 with errno, EAGAIN among them. EBADMSG: what came was not sent by the other end.
 * After EAGAIN, ud_tls_send has to be called again with the same bytes. It sends one record at most. */
ssize_t ud_tls_send(ud_tls *tls, const void *data, size_t length);
ssize_t ud_tls_recv(ud_tls *tls, void *data, size_t length);
/* Whether the last ud_tls_recv found that there is nothing more to be read for now. If not, something may be in memory,
 * of which the descriptor knows nothing. */
int ud_tls_is_drained(const ud_tls *tls);
void ud_tls_free(ud_tls *tls, int say_goodbye);
void ud_tls_set_key_records(uint64_t num_records); /* for tests: after so many, another key */
#endif
