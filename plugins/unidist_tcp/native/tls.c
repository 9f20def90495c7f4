/* See tls.h. OpenSSL is declared here, as far as it is used: neither its headers nor its library are needed to build. */
#define _GNU_SOURCE
#include "tls.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* Stable since OpenSSL 1.1.1, the first with TLS 1.3. */
#define CTRL_MODE 33
#define CTRL_READ_AHEAD 41
#define CTRL_SESSION_CACHE 44
#define CTRL_MIN_VERSION 123
#define MODE_PARTIAL_WRITE 1
#define MODE_MOVING_BUFFER 2
#define TLS_1_3 0x0304
#define VERIFY_PEER 1
#define KEY_UPDATE_NOT_REQUESTED 0
#define ERROR_WANT_READ 2
#define ERROR_WANT_WRITE 3
#define ERROR_ZERO_RETURN 6
#define BIO_TYPE (100 | 0x0400)
#define BIO_READ_LATER (1 | 8)
#define BIO_WRITE_LATER (2 | 8)
#define BIO_CTRL_EOF 2
#define BIO_CTRL_FLUSH 11
#define READ_BUFFER_BYTES ((size_t)128 << 10)
/* Both begin with SHA-256, which belongs to a key from a callback. */
#define CIPHERS "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256"
#define IDENTITY "unidist"

typedef struct ssl_ctx_st SSL_CTX;
typedef struct ssl_st SSL;
typedef struct ssl_method_st SSL_METHOD;
typedef struct bio_st BIO;
typedef struct bio_method_st BIO_METHOD;
typedef unsigned (*client_callback)(SSL *, const char *, char *, unsigned, unsigned char *, unsigned);
typedef unsigned (*server_callback)(SSL *, const char *, unsigned char *, unsigned);

#define FUNCTIONS(X)                                                       \
    X(const SSL_METHOD *, TLS_method, (void))                              \
    X(SSL_CTX *, SSL_CTX_new, (const SSL_METHOD *))                        \
    X(void, SSL_CTX_free, (SSL_CTX *))                                     \
    X(long, SSL_CTX_ctrl, (SSL_CTX *, int, long, void *))                  \
    X(int, SSL_CTX_set_ciphersuites, (SSL_CTX *, const char *))            \
    X(int, SSL_CTX_set_num_tickets, (SSL_CTX *, size_t))                   \
    X(void, SSL_CTX_set_default_read_buffer_len, (SSL_CTX *, size_t))      \
    X(void, SSL_CTX_set_psk_client_callback, (SSL_CTX *, client_callback)) \
    X(void, SSL_CTX_set_psk_server_callback, (SSL_CTX *, server_callback)) \
    X(SSL *, SSL_new, (SSL_CTX *))                                         \
    X(void, SSL_free, (SSL *))                                             \
    X(void, SSL_set_bio, (SSL *, BIO *, BIO *))                            \
    X(int, SSL_set_ex_data, (SSL *, int, void *))                          \
    X(void *, SSL_get_ex_data, (const SSL *, int))                         \
    X(void, SSL_set_verify, (SSL *, int, void *))                          \
    X(void, SSL_set_connect_state, (SSL *))                                \
    X(void, SSL_set_accept_state, (SSL *))                                 \
    X(int, SSL_do_handshake, (SSL *))                                      \
    X(int, SSL_version, (const SSL *))                                     \
    X(int, SSL_session_reused, (const SSL *))                              \
    X(int, SSL_read, (SSL *, void *, int))                                 \
    X(int, SSL_write, (SSL *, const void *, int))                          \
    X(int, SSL_get_error, (const SSL *, int))                              \
    X(int, SSL_key_update, (SSL *, int))                                   \
    X(int, SSL_shutdown, (SSL *))                                          \
    X(BIO_METHOD *, BIO_meth_new, (int, const char *))                     \
    X(int, BIO_meth_set_write, (BIO_METHOD *, int (*)(BIO *, const char *, int)))       \
    X(int, BIO_meth_set_read, (BIO_METHOD *, int (*)(BIO *, char *, int)))              \
    X(int, BIO_meth_set_ctrl, (BIO_METHOD *, long (*)(BIO *, int, long, void *)))       \
    X(BIO *, BIO_new, (const BIO_METHOD *))                                \
    X(void, BIO_set_init, (BIO *, int))                                    \
    X(void, BIO_set_data, (BIO *, void *))                                 \
    X(void *, BIO_get_data, (BIO *))                                       \
    X(void, BIO_set_flags, (BIO *, int))                                   \
    X(void, BIO_clear_flags, (BIO *, int))                                 \
    X(void, ERR_clear_error, (void))                                       \
    X(unsigned long, ERR_peek_error, (void))                               \
    X(const char *, ERR_reason_error_string, (unsigned long))

#define DECLARE(result, name, arguments) static result(*name) arguments;
FUNCTIONS(DECLARE)

struct ud_tls {
    int fd, has_ended, is_drained;
    int error;      /* of the socket, in the call that is under way */
    int failed;     /* errno of the reading half, which has failed for good */
    SSL *ssl;
    uint64_t num_records; /* sent with this key */
    size_t again;   /* bytes that have to be passed again */
    /* OpenSSL reads nothing while it cannot send the message about another key. If both ends did that, and neither had room,
     * they would wait for each other. So this message is always taken, and goes before the record that follows it. */
    int is_changing_key;
    size_t num_held;
    char held[64];
    unsigned char key[UD_TLS_KEY_BYTES];
};

static SSL_CTX *context;
static BIO_METHOD *method;
/* Of AES-GCM, RFC 8446 allows 2^24.5 records with one key. */
static uint64_t key_records = UINT64_C(1) << 22;

void ud_tls_set_key_records(uint64_t num_records) { key_records = num_records; }

/* Loading */

static int find_functions(void *library, const char *name, char *why, size_t why_bytes) {
    const char *missing = NULL;
    /* POSIX lets an object pointer hold a function's address, and ISO C has no word for it. */
#define FIND(result, symbol, arguments) \
    if (!missing && !(*(void **)&symbol = dlsym(library, #symbol))) missing = #symbol;
    FUNCTIONS(FIND)
    if (!missing) return 0;
    snprintf(why, why_bytes, "%s has no %s: OpenSSL 1.1.1 or later is needed", name, missing);
    return -1;
}

static unsigned give_client_key(SSL *ssl, const char *hint, char *identity, unsigned identity_bytes, unsigned char *key,
                                unsigned key_bytes) {
    (void)hint;
    ud_tls *tls = SSL_get_ex_data(ssl, 0);
    if (key_bytes < UD_TLS_KEY_BYTES || identity_bytes < sizeof IDENTITY) return 0;
    memcpy(identity, IDENTITY, sizeof IDENTITY);
    memcpy(key, tls->key, UD_TLS_KEY_BYTES);
    return UD_TLS_KEY_BYTES;
}

static unsigned give_server_key(SSL *ssl, const char *identity, unsigned char *key, unsigned key_bytes) {
    ud_tls *tls = SSL_get_ex_data(ssl, 0);
    if (key_bytes < UD_TLS_KEY_BYTES || strcmp(identity, IDENTITY)) return 0;
    memcpy(key, tls->key, UD_TLS_KEY_BYTES);
    return UD_TLS_KEY_BYTES;
}

/* The socket below. OpenSSL's own sockets raise SIGPIPE. */

static ssize_t send_now(ud_tls *tls, const void *data, size_t length) {
    ssize_t n;
    do n = send(tls->fd, data, length, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0) tls->error = errno;
    return n;
}

static int is_full(int error) { return error == EAGAIN || error == ENOBUFS || error == ENOMEM; }

static int put(BIO *bio, const char *data, int length) {
    ud_tls *tls = BIO_get_data(bio);
    BIO_clear_flags(bio, BIO_READ_LATER | BIO_WRITE_LATER);
    while (tls->num_held) {
        ssize_t n = send_now(tls, tls->held, tls->num_held);
        if (n < 0) {
            if (is_full(tls->error)) BIO_set_flags(bio, BIO_WRITE_LATER);
            return -1;
        }
        tls->num_held -= (size_t)n;
        memmove(tls->held, tls->held + n, tls->num_held);
    }
    ssize_t n = send_now(tls, data, (size_t)length);
    if (n < 0 && !is_full(tls->error)) return -1;
    size_t rest = (size_t)length - (n > 0 ? (size_t)n : 0);
    if (tls->is_changing_key && rest <= sizeof tls->held) {
        tls->is_changing_key = 0;
        memcpy(tls->held, data + length - rest, tls->num_held = rest);
        return length;
    }
    if (n < 0) BIO_set_flags(bio, BIO_WRITE_LATER);
    return (int)n;
}

static int get(BIO *bio, char *data, int length) {
    ud_tls *tls = BIO_get_data(bio);
    BIO_clear_flags(bio, BIO_READ_LATER | BIO_WRITE_LATER);
    ssize_t n;
    do n = recv(tls->fd, data, (size_t)length, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n > 0) return (int)n;
    if (n == 0) {
        tls->has_ended = 1;
        return 0;
    }
    tls->error = errno;
    if (errno == EAGAIN) BIO_set_flags(bio, BIO_READ_LATER);
    return -1;
}

static long control(BIO *bio, int command, long number, void *pointer) {
    (void)number, (void)pointer;
    ud_tls *tls = BIO_get_data(bio);
    if (command == BIO_CTRL_EOF) return tls->has_ended;
    return command == BIO_CTRL_FLUSH;
}

static int prepare(char *why, size_t why_bytes) {
    context = SSL_CTX_new(TLS_method());
    method = BIO_meth_new(BIO_TYPE, "unidist lane");
    int is_ready = context && method && SSL_CTX_ctrl(context, CTRL_MIN_VERSION, TLS_1_3, NULL) &&
                   SSL_CTX_set_ciphersuites(context, CIPHERS) && BIO_meth_set_write(method, put) &&
                   BIO_meth_set_read(method, get) && BIO_meth_set_ctrl(method, control);
    if (!is_ready) {
        const char *reason = ERR_reason_error_string(ERR_peek_error());
        snprintf(why, why_bytes, "OpenSSL offers no TLS 1.3 with AES-128-GCM or ChaCha20 (%s)", reason ? reason : "no reason");
        ERR_clear_error();
        if (context) SSL_CTX_free(context);
        context = NULL;
        return -1;
    }
    SSL_CTX_ctrl(context, CTRL_MODE, MODE_PARTIAL_WRITE | MODE_MOVING_BUFFER, NULL);
    SSL_CTX_ctrl(context, CTRL_READ_AHEAD, 1, NULL);
    SSL_CTX_ctrl(context, CTRL_SESSION_CACHE, 0, NULL);
    SSL_CTX_set_default_read_buffer_len(context, READ_BUFFER_BYTES);
    SSL_CTX_set_num_tickets(context, 0); /* each connection has a key of its own */
    SSL_CTX_set_psk_client_callback(context, give_client_key);
    SSL_CTX_set_psk_server_callback(context, give_server_key);
    return 0;
}

int ud_tls_load(const char *const *names, int num_names, char *why, size_t why_bytes) {
    if (context) return 0;
    snprintf(why, why_bytes, "no libssl");
    for (int i = 0; i < num_names; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            if (!i) snprintf(why, why_bytes, "%s", dlerror());
            continue;
        }
        if (!find_functions(library, names[i], why, why_bytes) && !prepare(why, why_bytes)) return 0;
        dlclose(library);
    }
    return -1;
}

/* Connections */

ud_tls *ud_tls_new(int fd, int is_server, const unsigned char key[UD_TLS_KEY_BYTES]) {
    ud_tls *tls = calloc(1, sizeof *tls);
    if (!tls) return NULL;
    tls->fd = fd;
    memcpy(tls->key, key, UD_TLS_KEY_BYTES);
    tls->ssl = SSL_new(context);
    BIO *bio = tls->ssl ? BIO_new(method) : NULL;
    if (!bio) {
        ERR_clear_error();
        ud_tls_free(tls, 0);
        return NULL;
    }
    BIO_set_data(bio, tls);
    BIO_set_init(bio, 1);
    SSL_set_bio(tls->ssl, bio, bio);
    SSL_set_ex_data(tls->ssl, 0, tls);
    if (is_server) SSL_set_accept_state(tls->ssl);
    else {
        /* Nobody is trusted by a certificate: an end that does not have the key is refused. */
        SSL_set_verify(tls->ssl, VERIFY_PEER, NULL);
        SSL_set_connect_state(tls->ssl);
    }
    return tls;
}

enum ud_tls_step ud_tls_handshake(ud_tls *tls, char *why, size_t why_bytes) {
    ERR_clear_error();
    tls->error = 0;
    int result = SSL_do_handshake(tls->ssl);
    if (result == 1) {
        memset(tls->key, 0, sizeof tls->key);
        /* OpenSSL says that a session goes on where a key was used that both had before. */
        if (SSL_version(tls->ssl) == TLS_1_3 && SSL_session_reused(tls->ssl)) return UD_TLS_OPEN;
        snprintf(why, why_bytes, "the other end did not use the job's key");
        return UD_TLS_FAILED;
    }
    int kind = SSL_get_error(tls->ssl, result);
    if (kind == ERROR_WANT_READ) return UD_TLS_WANTS_READ;
    if (kind == ERROR_WANT_WRITE) return UD_TLS_WANTS_WRITE;
    const char *reason = ERR_reason_error_string(ERR_peek_error());
    if (tls->has_ended) snprintf(why, why_bytes, "it closed the connection");
    else snprintf(why, why_bytes, "%s", tls->error ? strerror(tls->error) : reason ? reason : "TLS failed");
    ERR_clear_error();
    return UD_TLS_FAILED;
}

/* Returns errno for a call without success. A read never has to wait until it can write, nor the other way round: TLS 1.3 has
 * no negotiation afterwards, and no end asks the other one for another key. */
static int failure(ud_tls *tls, int result, int expected) {
    int kind = SSL_get_error(tls->ssl, result);
    ERR_clear_error(); /* Python's own module looks at the errors of this thread, too */
    if (kind == expected) return EAGAIN;
    return tls->error && tls->error != EAGAIN ? tls->error : EBADMSG;
}

ssize_t ud_tls_send(ud_tls *tls, const void *data, size_t length) {
    ERR_clear_error();
    tls->error = 0;
    if (!tls->again && tls->num_records >= key_records) {
        tls->is_changing_key = SSL_key_update(tls->ssl, KEY_UPDATE_NOT_REQUESTED) == 1; /* told before the next record */
        tls->num_records = 0;
    }
    if (length > UD_TLS_RECORD_BYTES) length = UD_TLS_RECORD_BYTES;
    if (tls->again && tls->again != length) { /* OpenSSL has encrypted so many, and wants to hear of them */
        errno = EBADMSG;
        return -1;
    }
    int result = SSL_write(tls->ssl, data, (int)length);
    if (result > 0) {
        tls->num_records++;
        tls->again = 0;
        return result;
    }
    errno = failure(tls, result, ERROR_WANT_WRITE);
    tls->again = errno == EAGAIN ? length : 0;
    return -1;
}

ssize_t ud_tls_recv(ud_tls *tls, void *data, size_t length) {
    if (tls->failed) {
        errno = tls->failed;
        return -1;
    }
    ERR_clear_error();
    tls->error = 0;
    int result = SSL_read(tls->ssl, data, length < INT32_MAX ? (int)length : INT32_MAX);
    tls->is_drained = 0;
    if (result > 0) return result;
    if (tls->has_ended || SSL_get_error(tls->ssl, result) == ERROR_ZERO_RETURN) {
        /* With the other end's goodbye or without: what a rank means by closing stands in its frames. */
        ERR_clear_error();
        return 0;
    }
    errno = failure(tls, result, ERROR_WANT_READ);
    if (errno == EAGAIN) tls->is_drained = 1;
    else tls->failed = errno;
    return -1;
}

int ud_tls_is_drained(const ud_tls *tls) { return tls->is_drained; }

void ud_tls_free(ud_tls *tls, int say_goodbye) {
    if (!tls) return;
    if (tls->ssl) {
        if (say_goodbye && !tls->failed && !tls->again) SSL_shutdown(tls->ssl);
        ERR_clear_error();
        SSL_free(tls->ssl);
    }
    memset(tls->key, 0, sizeof tls->key);
    free(tls);
}
