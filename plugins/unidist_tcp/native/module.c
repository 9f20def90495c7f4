/* The Python module `unidist_tcp._tcp`: thin, no logic of its own. Addresses travel as integers; everything that can wait
 * or touch much memory runs without the interpreter lock. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "blocks.h"
#include "kernels.h"
#include "tcp.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    ud_transport *transport;
    int is_shut, is_forgotten;
} TransportObject;

typedef struct {
    PyObject_HEAD
    ud_group *group;
    TransportObject *owner; /* outlives the group and its operations */
} GroupObject;

typedef struct {
    PyObject_HEAD
    ud_op *op;
    TransportObject *owner;
} OpObject;

typedef struct {
    PyObject_HEAD
    ud_tls *tls; /* NULL: a transport has it */
} TlsObject;

static PyTypeObject *op_type, *transport_type, *tls_type;

static void *allocate(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

static void deallocate(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Copies a tuple of non-negative integers; returns its length, -1 with an exception set. None gives 0 and NULL. */
static Py_ssize_t read_numbers(PyObject *tuple, uint64_t **out) {
    *out = NULL;
    if (tuple == Py_None) return 0;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of numbers");
        return -1;
    }
    Py_ssize_t n = PyTuple_Size(tuple);
    uint64_t *numbers = malloc(((size_t)n + 1) * sizeof *numbers);
    if (!numbers) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
        if (PyErr_Occurred()) {
            free(numbers);
            return -1;
        }
    }
    *out = numbers;
    return n;
}

static int *read_ints(PyObject *tuple, int *count) {
    uint64_t *numbers;
    Py_ssize_t n = read_numbers(tuple, &numbers);
    if (n < 0) return NULL;
    int *ints = malloc(((size_t)n + 1) * sizeof *ints);
    if (!ints) PyErr_NoMemory();
    for (Py_ssize_t i = 0; ints && i < n; i++) ints[i] = (int)numbers[i];
    free(numbers);
    *count = (int)n;
    return ints;
}

/* Encryption */

static PyObject *module_load_tls(PyObject *module, PyObject *args) {
    (void)module;
    const char *names[2];
    char why[256];
    if (!PyArg_ParseTuple(args, "ss", &names[0], &names[1])) return NULL;
    if (ud_tls_load(names, 2, why, sizeof why)) {
        PyErr_SetString(PyExc_ImportError, why);
        return NULL;
    }
    return Py_NewRef(Py_None);
}

static PyObject *module_set_key_records(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "K", &number)) return NULL;
    ud_tls_set_key_records(number);
    return Py_NewRef(Py_None);
}

static PyObject *tls_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int fd, is_server;
    const char *key;
    Py_ssize_t key_bytes;
    static char *names[] = {"descriptor", "is_server", "key", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ipy#", names, &fd, &is_server, &key, &key_bytes)) return NULL;
    if (key_bytes != UD_TLS_KEY_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a key has another length");
        return NULL;
    }
    TlsObject *self = allocate(type);
    if (self && !(self->tls = ud_tls_new(fd, is_server, (const unsigned char *)key))) {
        Py_CLEAR(self);
        PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void tls_dealloc(TlsObject *self) {
    ud_tls_free(self->tls, 0);
    deallocate((PyObject *)self);
}

static PyObject *tls_handshake(TlsObject *self, PyObject *unused) {
    (void)unused;
    char why[256];
    if (!self->tls) {
        PyErr_SetString(PyExc_ValueError, "a transport has this connection");
        return NULL;
    }
    enum ud_tls_step step = ud_tls_handshake(self->tls, why, sizeof why);
    if (step != UD_TLS_FAILED) return PyLong_FromLong(step);
    PyErr_SetString(PyExc_ConnectionError, why);
    return NULL;
}

static PyMethodDef tls_methods[] = {
    {"handshake", (PyCFunction)tls_handshake, METH_NOARGS, "Go on with it: 0 when it is over, 1 to read, 2 to write."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot tls_slots[] = {{Py_tp_new, (void *)tls_new},
                                  {Py_tp_dealloc, (void *)tls_dealloc},
                                  {Py_tp_methods, tls_methods},
                                  {Py_tp_doc, "TLS on a connection; see tls.h."},
                                  {0, NULL}};
static PyType_Spec tls_spec = {"unidist_tcp._tcp.Tls", sizeof(TlsObject), 0, Py_TPFLAGS_DEFAULT, tls_slots};

/* Takes what encrypts the connections to a rank out of its objects; NULL with an exception set. */
static ud_tls **take_tls(PyObject *tuple, int count) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        PyErr_SetString(PyExc_ValueError, "expected a Tls for each connection");
        return NULL;
    }
    ud_tls **taken = calloc((size_t)count + 1, sizeof *taken);
    if (!taken) PyErr_NoMemory();
    for (int i = 0; taken && i < count; i++) {
        TlsObject *item = (TlsObject *)PyTuple_GetItem(tuple, i);
        if (!PyObject_TypeCheck((PyObject *)item, tls_type) || !item->tls) {
            PyErr_SetString(PyExc_ValueError, "expected a Tls that no transport has");
            free(taken);
            return NULL;
        }
        taken[i] = item->tls;
    }
    for (int i = 0; taken && i < count; i++) ((TlsObject *)PyTuple_GetItem(tuple, i))->tls = NULL;
    return taken;
}

/* Transport */

static PyObject *transport_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int rank;
    PyObject *descriptors, *encryption = Py_None;
    long long spin_ns, heartbeat_ns;
    static char *names[] = {"rank", "descriptors", "spin_ns", "heartbeat_ns", "encryption", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO!LL|O", names, &rank, &PyTuple_Type, &descriptors, &spin_ns,
                                     &heartbeat_ns, &encryption))
        return NULL;
    int size = (int)PyTuple_Size(descriptors);
    int is_encrypted = encryption != Py_None;
    if (size < 1 || rank < 0 || rank >= size || (is_encrypted && (!PyTuple_Check(encryption) || PyTuple_Size(encryption) != size))) {
        PyErr_SetString(PyExc_ValueError, "rank is outside of the job");
        return NULL;
    }
    int *num_lanes = calloc((size_t)size, sizeof *num_lanes), **fds = calloc((size_t)size, sizeof *fds), failed = 0;
    ud_tls ***tls = is_encrypted ? calloc((size_t)size, sizeof *tls) : NULL;
    if (!num_lanes || !fds || (is_encrypted && !tls)) failed = 1, PyErr_NoMemory();
    for (int i = 0; !failed && i < size; i++) {
        failed = !(fds[i] = read_ints(PyTuple_GetItem(descriptors, i), &num_lanes[i]));
        if (!failed && num_lanes[i] > UD_MAX_LANES) failed = 1, PyErr_SetString(PyExc_ValueError, "too many connections");
    }
    for (int i = 0; is_encrypted && !failed && i < size; i++)
        failed = !(tls[i] = take_tls(PyTuple_GetItem(encryption, i), num_lanes[i]));
    TransportObject *self = failed ? NULL : allocate(type);
    if (self) {
        self->transport = ud_open(rank, size, num_lanes, fds, (ud_tls *const *const *)tls, spin_ns, heartbeat_ns);
        if (!self->transport) {
            PyErr_SetFromErrno(PyExc_OSError);
            self->is_shut = 1;
            Py_CLEAR(self);
        }
    }
    for (int i = 0; fds && i < size; i++) free(fds[i]);
    for (int i = 0; tls && i < size; i++) free(tls[i]);
    free(tls);
    free(fds);
    free(num_lanes);
    return (PyObject *)self;
}

static void shut(TransportObject *self, long long linger_ns) {
    if (self->is_shut || self->is_forgotten) return;
    self->is_shut = 1;
    Py_BEGIN_ALLOW_THREADS;
    ud_shut(self->transport, linger_ns);
    Py_END_ALLOW_THREADS;
}

static void transport_dealloc(TransportObject *self) {
    if (self->transport && !self->is_forgotten) {
        shut(self, 0);
        ud_free_transport(self->transport);
    }
    deallocate((PyObject *)self);
}

static PyObject *transport_close(TransportObject *self, PyObject *args) {
    long long linger_ns;
    if (!PyArg_ParseTuple(args, "L", &linger_ns)) return NULL;
    shut(self, linger_ns);
    return Py_NewRef(Py_None);
}

static PyObject *transport_forget(TransportObject *self, PyObject *unused) {
    (void)unused;
    if (!self->is_shut && !self->is_forgotten) ud_forget(self->transport);
    self->is_forgotten = 1;
    return Py_NewRef(Py_None);
}

static PyObject *transport_sent(TransportObject *self, PyObject *unused) {
    (void)unused;
    pthread_mutex_lock(&self->transport->mutex);
    uint64_t sent = self->transport->num_bytes_sent;
    pthread_mutex_unlock(&self->transport->mutex);
    return PyLong_FromUnsignedLongLong(sent);
}

static PyMethodDef transport_methods[] = {
    {"close", (PyCFunction)transport_close, METH_VARARGS, "Close the connections once peers have what was sent."},
    {"forget", (PyCFunction)transport_forget, METH_NOARGS, "In a forked child: close its copies of the connections."},
    {"num_bytes_sent", (PyCFunction)transport_sent, METH_NOARGS, "Bytes that were sent to all peers."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot transport_slots[] = {{Py_tp_new, (void *)transport_new},
                                        {Py_tp_dealloc, (void *)transport_dealloc},
                                        {Py_tp_methods, transport_methods},
                                        {Py_tp_doc, "This rank's connections to all others; see tcp.h."},
                                        {0, NULL}};
static PyType_Spec transport_spec = {"unidist_tcp._tcp.Transport", sizeof(TransportObject), 0, Py_TPFLAGS_DEFAULT,
                                     transport_slots};

/* Operations */

static void op_dealloc(OpObject *self) {
    if (self->op && !self->owner->is_forgotten) {
        pthread_mutex_lock(&self->owner->transport->mutex);
        ud_release(self->op);
        pthread_mutex_unlock(&self->owner->transport->mutex);
    }
    Py_XDECREF((PyObject *)self->owner);
    deallocate((PyObject *)self);
}

static int is_forgotten(TransportObject *owner) {
    if (owner->is_forgotten) PyErr_SetString(PyExc_RuntimeError, "these connections belong to the process that forked");
    return owner->is_forgotten;
}

static PyObject *op_drive(OpObject *self, PyObject *args) {
    long long timeout_ns;
    int status;
    if (!PyArg_ParseTuple(args, "L", &timeout_ns) || is_forgotten(self->owner)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = ud_drive(self->op, timeout_ns);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(status);
}

static PyObject *op_status(OpObject *self, PyObject *unused) {
    (void)unused;
    if (is_forgotten(self->owner)) return NULL;
    pthread_mutex_lock(&self->owner->transport->mutex);
    int status = self->op->status;
    pthread_mutex_unlock(&self->owner->transport->mutex);
    return PyLong_FromLong(status);
}

static PyObject *list_of(const int *numbers, int count) {
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++)
        if (PyList_SetItem(list, i, PyLong_FromLong(numbers[i]))) Py_CLEAR(list);
    return list;
}

static PyObject *op_missing(OpObject *self, PyObject *unused) {
    (void)unused;
    if (is_forgotten(self->owner)) return NULL;
    int *ranks = malloc((size_t)self->owner->transport->size * sizeof *ranks);
    if (!ranks) return PyErr_NoMemory();
    pthread_mutex_lock(&self->owner->transport->mutex);
    int n = ud_missing_in(self->op, ranks);
    pthread_mutex_unlock(&self->owner->transport->mutex);
    PyObject *list = list_of(ranks, n);
    free(ranks);
    return list;
}

static PyObject *op_misfit(OpObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->op->other_bytes);
}

static PyMethodDef op_methods[] = {
    {"drive", (PyCFunction)op_drive, METH_VARARGS, "Wait until it has ended, or look once (timeout 0): its status."},
    {"status", (PyCFunction)op_status, METH_NOARGS, "Its status, without looking at the connections."},
    {"missing", (PyCFunction)op_missing, METH_NOARGS, "Ranks that are not known to have entered it."},
    {"misfit", (PyCFunction)op_misfit, METH_NOARGS, "Bytes of the message that did not fit."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot op_slots[] = {{Py_tp_dealloc, (void *)op_dealloc},
                                 {Py_tp_methods, op_methods},
                                 {Py_tp_doc, "An operation of a group."},
                                 {0, NULL}};
static PyType_Spec op_spec = {"unidist_tcp._tcp.Operation", sizeof(OpObject), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, op_slots};

static PyObject *wrap(GroupObject *group, ud_op *op) {
    if (!op) return PyErr_NoMemory();
    OpObject *self = allocate(op_type);
    if (!self) return NULL;
    self->op = op;
    self->owner = group->owner;
    Py_INCREF((PyObject *)self->owner);
    return (PyObject *)self;
}

/* Groups */

static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    TransportObject *owner;
    unsigned long long id;
    int rank, size = 0;
    PyObject *tuple;
    static char *names[] = {"transport", "id", "rank", "members", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!KiO", names, transport_type, &owner, &id, &rank, &tuple))
        return NULL;
    if (is_forgotten(owner)) return NULL;
    if (owner->is_shut) {
        PyErr_SetString(PyExc_RuntimeError, "the connections are closed");
        return NULL;
    }
    int *members = read_ints(tuple, &size);
    if (!members) return NULL;
    int is_valid = size >= 1 && rank >= 0 && rank < size && members[rank] == owner->transport->rank;
    for (int i = 0; i < size; i++) is_valid &= members[i] >= 0 && members[i] < owner->transport->size;
    GroupObject *self = is_valid ? allocate(type) : NULL;
    if (!is_valid) PyErr_SetString(PyExc_ValueError, "members are outside of the job");
    if (self) {
        pthread_mutex_lock(&owner->transport->mutex);
        self->group = ud_open_group(owner->transport, id, rank, size, members);
        pthread_mutex_unlock(&owner->transport->mutex);
        self->owner = owner;
        Py_INCREF((PyObject *)owner);
        if (!self->group) {
            Py_CLEAR(self);
            PyErr_NoMemory();
        }
    }
    free(members);
    return (PyObject *)self;
}

static void close_group(GroupObject *self) {
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&self->owner->transport->mutex);
    ud_close_group(self->group);
    pthread_mutex_unlock(&self->owner->transport->mutex);
    Py_END_ALLOW_THREADS;
}

static void group_dealloc(GroupObject *self) {
    if (self->group && !self->owner->is_forgotten) {
        close_group(self);
        ud_free_group(self->group);
    }
    Py_XDECREF((PyObject *)self->owner);
    deallocate((PyObject *)self);
}

static PyObject *group_post(GroupObject *self, PyObject *args) {
    int opcode, dtype, redop, root;
    unsigned long long source, target, count;
    double scale;
    PyObject *first, *second;
    if (!PyArg_ParseTuple(args, "iKKKiiidOO", &opcode, &source, &target, &count, &dtype, &redop, &root, &scale, &first,
                          &second))
        return NULL;
    if (is_forgotten(self->owner)) return NULL;
    uint64_t *counts = NULL, *counts2 = NULL;
    Py_ssize_t n = read_numbers(first, &counts), n2 = n < 0 ? -1 : read_numbers(second, &counts2);
    int size = self->group->size, has_counts = opcode == UD_ALLGATHER || opcode == UD_REDUCESCATTER;
    if (n2 >= 0 && (opcode < 0 || opcode >= UD_MESSAGE || dtype < 0 || dtype >= UD_NUM_DTYPES || redop < 0 ||
                    redop >= UD_NUM_REDOPS || root < 0 || root >= size ||
                    n != (has_counts || opcode == UD_ALLTOALL ? size : 0) || n2 != (opcode == UD_ALLTOALL ? size : 0))) {
        PyErr_SetString(PyExc_ValueError, "no such operation");
        n2 = -1;
    }
    if (n2 < 0) {
        free(counts);
        free(counts2);
        return NULL;
    }
    ud_request request = {.opcode = opcode, .dtype = dtype, .redop = redop, .root = root, .count = count, .scale = scale,
                          .source = (const char *)(uintptr_t)source, .target = (char *)(uintptr_t)target,
                          .counts = counts, .counts2 = counts2};
    ud_op *op;
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&self->owner->transport->mutex);
    op = ud_post(self->group, &request);
    pthread_mutex_unlock(&self->owner->transport->mutex);
    Py_END_ALLOW_THREADS;
    free(counts);
    free(counts2);
    return wrap(self, op);
}

/* Returns whether all blocks are equal; or the operation, if it has not ended within the time, or not well. */
static PyObject *group_cycle(GroupObject *self, PyObject *args) {
    unsigned long long own, all, source, target;
    Py_ssize_t block_bytes, stride, source_bytes;
    ud_cycle cycle;
    int dtype, redop, size = self->group->size;
    long long timeout_ns;
    if (!PyArg_ParseTuple(args, "KKny#KnKKiidL", &own, &all, &stride, &cycle.block, &block_bytes, &source, &source_bytes,
                          &target, &cycle.count, &dtype, &redop, &cycle.scale, &timeout_ns) || is_forgotten(self->owner))
        return NULL;
    cycle.own = (char *)(uintptr_t)own, cycle.all = (char *)(uintptr_t)all, cycle.target = (char *)(uintptr_t)target;
    cycle.block_bytes = (size_t)block_bytes, cycle.stride = (size_t)stride;
    cycle.source = (const char *)(uintptr_t)source, cycle.source_bytes = (size_t)source_bytes;
    cycle.dtype = (uint8_t)dtype, cycle.redop = (uint8_t)redop;
    if (!ud_cycle_fits(&cycle, size)) {
        PyErr_SetString(PyExc_ValueError, "there is no room for the data");
        return NULL;
    }
    uint64_t *counts = malloc((size_t)size * sizeof *counts);
    if (!counts) return PyErr_NoMemory();
    for (int i = 0; i < size; i++) counts[i] = cycle.stride;
    ud_request request = {.opcode = UD_ALLGATHER, .dtype = UD_UINT8, .redop = UD_SUM, .count = cycle.stride * size,
                          .scale = 1.0, .source = cycle.own, .target = cycle.all, .counts = counts};
    ud_transport *transport = self->owner->transport;
    ud_op *op;
    int status = UD_PENDING, is_equal = 0;
    Py_BEGIN_ALLOW_THREADS;
    ud_fill_cycle(&cycle);
    pthread_mutex_lock(&transport->mutex);
    op = ud_post(self->group, &request);
    pthread_mutex_unlock(&transport->mutex);
    if (op) status = ud_drive(op, timeout_ns);
    if (status == UD_DONE) {
        is_equal = ud_conclude_cycle(&cycle, size);
        pthread_mutex_lock(&transport->mutex);
        ud_release(op);
        pthread_mutex_unlock(&transport->mutex);
    }
    Py_END_ALLOW_THREADS;
    free(counts);
    return status == UD_DONE ? PyBool_FromLong(is_equal) : wrap(self, op);
}

static PyObject *group_message(GroupObject *self, PyObject *args) {
    int is_send, peer;
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(args, "piKK", &is_send, &peer, &address, &nbytes) || is_forgotten(self->owner)) return NULL;
    if (peer < 0 || peer >= self->group->size) {
        PyErr_SetString(PyExc_ValueError, "no such rank");
        return NULL;
    }
    ud_op *op;
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&self->owner->transport->mutex);
    op = ud_post_message(self->group, is_send, peer, (char *)(uintptr_t)address, nbytes);
    pthread_mutex_unlock(&self->owner->transport->mutex);
    Py_END_ALLOW_THREADS;
    return wrap(self, op);
}

static PyObject *group_failure(GroupObject *self, PyObject *unused) {
    (void)unused;
    if (is_forgotten(self->owner)) return NULL;
    char text[UD_TEXT_BYTES];
    pthread_mutex_lock(&self->owner->transport->mutex);
    int failure = self->group->failure, culprit = self->group->culprit;
    memcpy(text, self->group->text, sizeof text);
    pthread_mutex_unlock(&self->owner->transport->mutex);
    if (!failure) return Py_NewRef(Py_None);
    PyObject *decoded = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    return decoded ? Py_BuildValue("iiN", failure, culprit, decoded) : NULL;
}

static PyObject *group_missing(GroupObject *self, PyObject *unused) {
    (void)unused;
    if (is_forgotten(self->owner)) return NULL;
    int *ranks = malloc((size_t)self->group->size * sizeof *ranks);
    if (!ranks) return PyErr_NoMemory();
    pthread_mutex_lock(&self->owner->transport->mutex);
    int n = ud_missing(self->group, ranks);
    pthread_mutex_unlock(&self->owner->transport->mutex);
    PyObject *list = list_of(ranks, n);
    free(ranks);
    return list;
}

static PyObject *group_abort(GroupObject *self, PyObject *args) {
    int culprit;
    const char *reason;
    if (!PyArg_ParseTuple(args, "is", &culprit, &reason) || is_forgotten(self->owner)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&self->owner->transport->mutex);
    ud_fail(self->group, UD_ABORTED, culprit, reason, 1);
    ud_flush(self->owner->transport);
    pthread_mutex_unlock(&self->owner->transport->mutex);
    Py_END_ALLOW_THREADS;
    return Py_NewRef(Py_None);
}

static PyObject *group_close(GroupObject *self, PyObject *unused) {
    (void)unused;
    if (!self->owner->is_forgotten) close_group(self);
    return Py_NewRef(Py_None);
}

static PyMethodDef group_methods[] = {
    {"post", (PyCFunction)group_post, METH_VARARGS, "Begin a collective."},
    {"cycle", (PyCFunction)group_cycle, METH_VARARGS, "Gather blocks, and reduce the data behind them if all are equal."},
    {"message", (PyCFunction)group_message, METH_VARARGS, "Begin to send a message, or to receive one."},
    {"failure", (PyCFunction)group_failure, METH_NOARGS, "(status, rank, text) of why the group is of no more use, or None."},
    {"missing", (PyCFunction)group_missing, METH_NOARGS, "Ranks not known to have entered the oldest pending operation."},
    {"abort", (PyCFunction)group_abort, METH_VARARGS, "End all operations, here and on all members."},
    {"close", (PyCFunction)group_close, METH_NOARGS, "Leave the group."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot group_slots[] = {{Py_tp_new, (void *)group_new},
                                    {Py_tp_dealloc, (void *)group_dealloc},
                                    {Py_tp_methods, group_methods},
                                    {Py_tp_doc, "One group of ranks; see tcp.h."},
                                    {0, NULL}};
static PyType_Spec group_spec = {"unidist_tcp._tcp.Group", sizeof(GroupObject), 0, Py_TPFLAGS_DEFAULT, group_slots};

/* The plan of a collective, for tests. */
static PyObject *module_plan(PyObject *module, PyObject *args) {
    (void)module;
    int opcode, rank, size, root, in_place;
    unsigned long long count, item;
    PyObject *first, *second;
    if (!PyArg_ParseTuple(args, "iiiiKKOOp", &opcode, &rank, &size, &root, &count, &item, &first, &second, &in_place))
        return NULL;
    uint64_t *counts = NULL, *counts2 = NULL;
    ud_plan plan = {0};
    PyObject *steps = NULL;
    if (read_numbers(first, &counts) >= 0 && read_numbers(second, &counts2) >= 0) {
        ud_call call = {opcode, rank, size, root, count, item, counts, counts2, in_place};
        if (ud_make_plan(&plan, &call)) PyErr_NoMemory();
        else steps = PyList_New(plan.num_steps);
    }
    for (int i = 0; steps && i < plan.num_steps; i++) {
        const ud_step *s = &plan.steps[i];
        PyObject *step = Py_BuildValue("iiIK(iK)(iK)(iK)Kiiii", s->kind, s->peer, s->tag, (unsigned long long)s->nbytes,
                                       s->target.space, (unsigned long long)s->target.offset, s->own.space,
                                       (unsigned long long)s->own.offset, s->other.space,
                                       (unsigned long long)s->other.offset, (unsigned long long)s->stride, s->swap,
                                       s->scaled, s->after, s->stream);
        if (!step || PyList_SetItem(steps, i, step)) Py_CLEAR(steps);
    }
    unsigned long long scratch_bytes = plan.scratch_bytes;
    ud_free_plan(&plan);
    free(counts);
    free(counts2);
    return steps ? Py_BuildValue("NK", steps, scratch_bytes) : NULL;
}

static PyMethodDef module_methods[] = {
    {"load_tls", module_load_tls, METH_VARARGS, "load_tls(name, other_name): load libssl by the first name that is one"},
    {"set_key_records", module_set_key_records, METH_VARARGS, "For tests: after so many records comes another key."},
    {"plan", module_plan, METH_VARARGS, "plan(opcode, rank, size, root, count, item, counts, counts2, in_place)"},
    {NULL, NULL, 0, NULL}};

static int add_names(PyObject *module, const char *attribute, const char *const *names, int count) {
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (!name || PyTuple_SetItem(tuple, i, name)) Py_CLEAR(tuple);
    }
    if (!tuple) return -1;
    int status = PyModule_AddObjectRef(module, attribute, tuple);
    Py_DECREF(tuple);
    return status;
}

static int module_exec(PyObject *module) {
    transport_type = (PyTypeObject *)PyType_FromSpec(&transport_spec);
    op_type = (PyTypeObject *)PyType_FromSpec(&op_spec);
    tls_type = (PyTypeObject *)PyType_FromSpec(&tls_spec);
    PyObject *group = PyType_FromSpec(&group_spec);
    if (!transport_type || !op_type || !tls_type || !group) return -1;
    if (PyModule_AddObjectRef(module, "Transport", (PyObject *)transport_type) ||
        PyModule_AddObjectRef(module, "Operation", (PyObject *)op_type) ||
        PyModule_AddObjectRef(module, "Tls", (PyObject *)tls_type) || PyModule_AddObjectRef(module, "Group", group))
        return -1;
    Py_DECREF(group);
    if (PyModule_AddIntConstant(module, "EAGER_BYTES", UD_EAGER_BYTES) ||
        PyModule_AddIntConstant(module, "SEGMENT_BYTES", UD_SEGMENT_BYTES) ||
        PyModule_AddIntConstant(module, "MAX_RANKS", UD_MAX_SLOTS) ||
        PyModule_AddIntConstant(module, "MAX_CONNECTIONS", UD_MAX_LANES))
        return -1;
    if (add_names(module, "DTYPES", ud_dtype_names, UD_NUM_DTYPES)) return -1;
    return add_names(module, "REDUCE_OPS", ud_redop_names, UD_NUM_REDOPS);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)module_exec}, {0, NULL}};
static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_tcp", "Collectives over TCP.", 0,
                                        module_methods, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tcp(void) { return PyModuleDef_Init(&module_def); }
