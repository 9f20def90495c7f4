/* The Python module `unidist.engines._shm`: thin, no logic of its own. Addresses travel as integers; everything
 * that can wait or touch much memory runs without the interpreter lock. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "group.h"
#include "kernels.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct {
    PyObject_HEAD
    ud_group *group;
} GroupObject;

static ud_process process = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* In a forked child, where another thread may have held the mutex: the groups are its parent's. */
static void forget_groups(void) { process = (ud_process){.mutex = PTHREAD_MUTEX_INITIALIZER}; }

/* A status and the rank that it concerns, in one negative number: -(status + 8 * (rank + 1)). */
static PyObject *outcome(int status, const ud_blame *blame, long long value) {
    return PyLong_FromLongLong(status == UD_OK ? value : -(long long)(status + 8 * (blame->rank + 1)));
}

#define CLOSED (-(long long)UD_CLOSED) /* an outcome, of no rank */

static int64_t deadline_after(long long timeout_ns) { return timeout_ns ? ud_now() + timeout_ns : 0; }

/* Copies a tuple of integers; returns 0 and leaves `*out` NULL for None. */
static int read_numbers(PyObject *tuple, int size, uint64_t **out) {
    *out = NULL;
    if (tuple == Py_None) return 0;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != size) {
        PyErr_SetString(PyExc_ValueError, "expected a tuple with one number per rank");
        return -1;
    }
    uint64_t *numbers = malloc((size_t)size * sizeof *numbers);
    if (!numbers) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < size; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
        if (PyErr_Occurred()) {
            free(numbers);
            return -1;
        }
    }
    *out = numbers;
    return 0;
}

static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int rank, size;
    PyObject *slots, *bases, *capacities, *liveness;
    Py_ssize_t small_bytes, window_bytes;
    long long spin_ns;
    static char *names[] = {"rank", "size", "slots", "bases", "capacities", "liveness",
                            "small_bytes", "window_bytes", "spin_ns", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiOOOOnnL", names, &rank, &size, &slots, &bases, &capacities,
                                     &liveness, &small_bytes, &window_bytes, &spin_ns))
        return NULL;
    if (size < 1 || rank < 0 || rank >= size) {
        PyErr_SetString(PyExc_ValueError, "rank is outside of the group");
        return NULL;
    }
    GroupObject *self = (GroupObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    ud_group *group = calloc(1, sizeof *group);
    if (!self || !group) {
        free(group);
        Py_XDECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    self->group = group;
    group->rank = rank, group->size = size;
    int has_memory = ud_init_group(group, &process);
    group->small_bytes = (size_t)small_bytes, group->window_bytes = (size_t)window_bytes, group->spin_ns = spin_ns;
    uint64_t *fds = NULL;
    group->liveness = malloc((size_t)size * sizeof *group->liveness);
    if (!has_memory || !group->liveness || read_numbers(slots, size, (uint64_t **)&group->slots) ||
        read_numbers(bases, size, (uint64_t **)&group->bases) || read_numbers(capacities, size, &group->capacities) ||
        read_numbers(liveness, size, &fds)) {
        Py_DECREF((PyObject *)self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    for (int i = 0; i < size; i++) group->liveness[i] = i == rank ? -1 : (int)fds[i];
    free(fds);
    return (PyObject *)self;
}

static void group_dealloc(GroupObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->group) ud_free_group(self->group);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *group_post(GroupObject *self, PyObject *args) {
    int opcode, dtype, redop, root;
    unsigned long long source, target, count;
    double scale;
    PyObject *counts, *counts2;
    long long timeout_ns;
    if (!PyArg_ParseTuple(args, "iKKKiiidOOL", &opcode, &source, &target, &count, &dtype, &redop, &root, &scale, &counts,
                          &counts2, &timeout_ns))
        return NULL;
    ud_group *group = self->group;
    ud_op op = {.opcode = (uint8_t)opcode, .dtype = (uint8_t)dtype, .redop = (uint8_t)redop, .root = (uint32_t)root,
                .count = count, .scale = scale, .source = (const char *)(uintptr_t)source,
                .target = (char *)(uintptr_t)target};
    if (read_numbers(counts, group->size, &op.counts) || read_numbers(counts2, group->size, &op.counts2)) {
        ud_free_op(&op);
        return NULL;
    }
    ud_blame blame = {group->rank};
    int status = UD_CLOSED;
    long long number = 0;
    Py_BEGIN_ALLOW_THREADS;
    if (ud_enter(group)) {
        pthread_mutex_lock(&group->post_mutex);
        status = ud_post(group, &op, deadline_after(timeout_ns), &blame);
        number = (long long)group->posted;
        pthread_mutex_unlock(&group->post_mutex);
        ud_leave(group);
    }
    Py_END_ALLOW_THREADS;
    if (status != UD_OK) ud_free_op(&op);
    return outcome(status, &blame, number);
}

/* Looks once without a deadline: then a thread that is in a wait on the group does the driving. */
static int drive(ud_group *group, uint64_t number, long long timeout_ns, ud_blame *blame) {
    if (timeout_ns) pthread_mutex_lock(&group->mutex);
    else if (pthread_mutex_trylock(&group->mutex)) return group->completed >= number ? UD_OK : UD_PENDING;
    int status = ud_drive(group, number, deadline_after(timeout_ns), blame);
    pthread_mutex_unlock(&group->mutex);
    ud_deactivate_if_idle(group);
    return status;
}

static PyObject *group_drive(GroupObject *self, PyObject *args) {
    unsigned long long number;
    long long timeout_ns;
    if (!PyArg_ParseTuple(args, "KL", &number, &timeout_ns)) return NULL;
    ud_group *group = self->group;
    ud_blame blame = {group->rank};
    int status = UD_CLOSED;
    Py_BEGIN_ALLOW_THREADS;
    if (ud_enter(group)) {
        status = drive(group, number, timeout_ns, &blame);
        ud_leave(group);
    }
    Py_END_ALLOW_THREADS;
    return outcome(status, &blame, 0);
}

/* Returns whether all blocks are equal; or the number of an all-gather that is not complete, 0 if it was not posted. */
static PyObject *group_cycle(GroupObject *self, PyObject *args) {
    unsigned long long own, all, source, target;
    Py_ssize_t block_bytes, stride, source_bytes;
    ud_cycle cycle;
    int dtype, redop;
    long long timeout_ns;
    if (!PyArg_ParseTuple(args, "KKny#KnKKiidL", &own, &all, &stride, &cycle.block, &block_bytes, &source, &source_bytes,
                          &target, &cycle.count, &dtype, &redop, &cycle.scale, &timeout_ns))
        return NULL;
    ud_group *group = self->group;
    cycle.own = (char *)(uintptr_t)own, cycle.all = (char *)(uintptr_t)all, cycle.target = (char *)(uintptr_t)target;
    cycle.block_bytes = (size_t)block_bytes, cycle.stride = (size_t)stride;
    cycle.source = (const char *)(uintptr_t)source, cycle.source_bytes = (size_t)source_bytes;
    cycle.dtype = (uint8_t)dtype, cycle.redop = (uint8_t)redop;
    if (!ud_cycle_fits(&cycle, group->size)) {
        PyErr_SetString(PyExc_ValueError, "there is no room for the data");
        return NULL;
    }
    ud_blame blame = {group->rank};
    uint64_t number = 0;
    int status = UD_CLOSED, is_equal = 0;
    Py_BEGIN_ALLOW_THREADS;
    if (ud_enter(group)) {
        ud_fill_cycle(&cycle);
        status = ud_post_blocks(group, &cycle, deadline_after(timeout_ns), &number, &blame);
        if (status == UD_OK) status = drive(group, number, timeout_ns, &blame);
        if (status == UD_OK) is_equal = ud_finish_blocks(group, &cycle);
        ud_leave(group);
    }
    Py_END_ALLOW_THREADS;
    return status == UD_OK && is_equal >= 0 ? PyBool_FromLong(is_equal) : PyLong_FromUnsignedLongLong(number);
}

static PyObject *group_failures(GroupObject *self, PyObject *unused) {
    (void)unused;
    ud_group *group = self->group;
    pthread_mutex_lock(&group->failure_mutex);
    ud_failure *failures = group->failures;
    group->failures = NULL;
    pthread_mutex_unlock(&group->failure_mutex);
    PyObject *list = PyList_New(0);
    while (failures) {
        ud_failure *next = failures->next;
        PyObject *item = list ? Py_BuildValue("(Ks)", (unsigned long long)failures->number, failures->text) : NULL;
        if (!item || PyList_Append(list, item)) Py_CLEAR(list);
        Py_XDECREF(item);
        free(failures);
        failures = next;
    }
    return list;
}

static PyObject *group_missing(GroupObject *self, PyObject *unused) {
    (void)unused;
    ud_group *group = self->group;
    char *is_missing = calloc((size_t)group->size, 1);
    if (!is_missing) return PyErr_NoMemory();
    if (ud_enter(group)) {
        uint64_t completed = group->completed; /* first: another thread may complete what it has posted */
        for (int m = 0; group->posted != completed && m < group->size; m++)
            is_missing[m] = !ud_reached(ud_op_arrived(group, m), (uint32_t)completed + 1);
        ud_leave(group);
    }
    PyObject *list = PyList_New(0);
    for (int m = 0; list && m < group->size; m++) {
        if (!is_missing[m]) continue;
        PyObject *number = PyLong_FromLong(m);
        if (!number || PyList_Append(list, number)) Py_CLEAR(list);
        Py_XDECREF(number);
    }
    free(is_missing);
    return list;
}

static PyObject *group_send(GroupObject *self, PyObject *args) {
    int to, dtype, is_posted = 0;
    long long offset;
    unsigned long long nbytes;
    if (!PyArg_ParseTuple(args, "iLKi", &to, &offset, &nbytes, &dtype)) return NULL;
    long long number = CLOSED;
    if (ud_enter(self->group)) {
        ud_message message = {.nbytes = nbytes, .offset = offset, .dtype = (uint32_t)dtype};
        number = ud_send(self->group, to, message, &is_posted);
        ud_leave(self->group);
        if (number < 0) return PyErr_NoMemory();
    }
    return Py_BuildValue("(LO)", number, is_posted ? Py_True : Py_False);
}

static PyObject *group_receive(GroupObject *self, PyObject *args) {
    int from, dtype;
    unsigned long long target, nbytes;
    if (!PyArg_ParseTuple(args, "iKKi", &from, &target, &nbytes, &dtype)) return NULL;
    long long number = CLOSED;
    if (ud_enter(self->group)) {
        number = ud_receive(self->group, from, (char *)(uintptr_t)target, nbytes, dtype);
        ud_leave(self->group);
        if (number < 0) return PyErr_NoMemory();
    }
    return PyLong_FromLongLong(number);
}

typedef int (*message_wait)(ud_group *, int peer, uint32_t number, int64_t deadline, ud_blame *);

static PyObject *wait_for_message(GroupObject *self, PyObject *args, message_wait wait) {
    int peer;
    unsigned long number;
    long long timeout_ns;
    if (!PyArg_ParseTuple(args, "ikL", &peer, &number, &timeout_ns)) return NULL;
    ud_group *group = self->group;
    ud_blame blame = {group->rank};
    int status = UD_CLOSED;
    Py_BEGIN_ALLOW_THREADS;
    if (ud_enter(group)) {
        status = wait(group, peer, (uint32_t)number, deadline_after(timeout_ns), &blame);
        ud_leave(group);
    }
    Py_END_ALLOW_THREADS;
    return outcome(status, &blame, 0);
}

static PyObject *group_wait_sent(GroupObject *self, PyObject *args) { return wait_for_message(self, args, ud_wait_sent); }
static PyObject *group_wait_visible(GroupObject *self, PyObject *args) {
    return wait_for_message(self, args, ud_wait_visible);
}
static PyObject *group_wait_received(GroupObject *self, PyObject *args) {
    return wait_for_message(self, args, ud_wait_received);
}

static PyObject *group_misfits(GroupObject *self, PyObject *unused) {
    (void)unused;
    ud_group *group = self->group;
    PyObject *list = PyList_New(0);
    pthread_mutex_lock(&group->message_mutex);
    ud_misfit *misfits = group->misfits;
    group->misfits = NULL;
    pthread_mutex_unlock(&group->message_mutex);
    while (misfits) {
        ud_misfit *next = misfits->next;
        PyObject *item = list ? Py_BuildValue("(ikKs)", misfits->from, (unsigned long)misfits->number,
                                              (unsigned long long)misfits->found.nbytes,
                                              ud_dtype_names[misfits->found.dtype])
                              : NULL;
        if (!item || PyList_Append(list, item)) Py_CLEAR(list);
        Py_XDECREF(item);
        free(misfits);
        misfits = next;
    }
    return list;
}

static PyObject *group_offset(GroupObject *self, PyObject *args) {
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(args, "KK", &address, &nbytes)) return NULL;
    return PyLong_FromLongLong(ud_offset(self->group, (const void *)(uintptr_t)address, nbytes));
}

static PyObject *group_abort(GroupObject *self, PyObject *args) {
    int rank;
    const char *reason;
    if (!PyArg_ParseTuple(args, "is", &rank, &reason)) return NULL;
    if (ud_enter(self->group)) {
        ud_abort(self->group, rank, reason);
        ud_leave(self->group);
    }
    return Py_NewRef(Py_None);
}

static PyObject *group_aborted(GroupObject *self, PyObject *unused) {
    (void)unused;
    ud_group *group = self->group;
    int rank = -1;
    char reason[UD_REASON];
    if (ud_enter(group)) {
        if (ud_is_aborted(group)) { /* which is final */
            rank = (int)group->slots[group->rank]->abort_rank;
            memcpy(reason, group->slots[group->rank]->abort_reason, sizeof reason);
        }
        ud_leave(group);
    }
    if (rank < 0) return Py_NewRef(Py_None);
    PyObject *text = PyUnicode_DecodeUTF8(reason, (Py_ssize_t)strlen(reason), "ignore"); /* a character may be cut */
    return text ? Py_BuildValue("(iN)", rank, text) : NULL;
}

/* Called before the memory may be unmapped: nobody here looks at the slots any more, except for `all_closed`. */
static PyObject *group_close(GroupObject *self, PyObject *unused) {
    (void)unused;
    Py_BEGIN_ALLOW_THREADS;
    ud_close(self->group);
    Py_END_ALLOW_THREADS;
    return Py_NewRef(Py_None);
}

static PyObject *group_all_closed(GroupObject *self, PyObject *unused) {
    (void)unused;
    ud_group *group = self->group;
    for (int m = 0; m < group->size; m++)
        if (!atomic_load(&group->slots[m]->closed)) return Py_NewRef(Py_False);
    return Py_NewRef(Py_True);
}

static PyMethodDef group_methods[] = {
    {"post", (PyCFunction)group_post, METH_VARARGS, "Post a collective; returns its number."},
    {"drive", (PyCFunction)group_drive, METH_VARARGS, "Complete all collectives up to a number, or try to (timeout 0)."},
    {"cycle", (PyCFunction)group_cycle, METH_VARARGS, "Gather blocks, and reduce the data behind them if all are equal."},
    {"failures", (PyCFunction)group_failures, METH_NOARGS, "Take the (number, text) of collectives that did not agree."},
    {"missing", (PyCFunction)group_missing, METH_NOARGS, "Ranks that have not come to the oldest pending collective."},
    {"send", (PyCFunction)group_send, METH_VARARGS, "Queue a message; (its number, whether the receiver can see it)."},
    {"receive", (PyCFunction)group_receive, METH_VARARGS, "Queue a receive; returns its number."},
    {"wait_sent", (PyCFunction)group_wait_sent, METH_VARARGS, "Wait until the receiver has taken a message."},
    {"wait_visible", (PyCFunction)group_wait_visible, METH_VARARGS, "Wait until the receiver can see a message."},
    {"wait_received", (PyCFunction)group_wait_received, METH_VARARGS, "Wait until a receive is complete."},
    {"misfits", (PyCFunction)group_misfits, METH_NOARGS,
     "Take the (source, number, nbytes, dtype) of messages that did not fit their receive."},
    {"offset", (PyCFunction)group_offset, METH_VARARGS, "Offset of an address in this rank's engine memory, or -1."},
    {"abort", (PyCFunction)group_abort, METH_VARARGS, "Mark the group as aborted, for every member."},
    {"aborted", (PyCFunction)group_aborted, METH_NOARGS, "(rank, reason) once the group was aborted, else None."},
    {"close", (PyCFunction)group_close, METH_NOARGS, "End all calls of other threads, and refuse new ones."},
    {"all_closed", (PyCFunction)group_all_closed, METH_NOARGS, "Whether every member has closed the group."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot group_slots[] = {{Py_tp_new, (void *)group_new},
                                    {Py_tp_dealloc, (void *)group_dealloc},
                                    {Py_tp_methods, group_methods},
                                    {Py_tp_doc, "One group of ranks over shared memory; see group.h."},
                                    {0, NULL}};
static PyType_Spec group_spec = {"unidist.engines._shm.Group", sizeof(GroupObject), 0, Py_TPFLAGS_DEFAULT, group_slots};

static PyObject *module_map(PyObject *module, PyObject *args) {
    (void)module;
    int fd;
    unsigned long long nbytes;
    if (!PyArg_ParseTuple(args, "iK", &fd, &nbytes)) return NULL;
    void *address = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (address == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    madvise(address, nbytes, MADV_HUGEPAGE); /* fewer address translations, where the system allows it */
    madvise(address, nbytes, MADV_DONTDUMP); /* a core dump need not hold every rank's memory */
    return PyLong_FromUnsignedLongLong((uintptr_t)address);
}

static PyObject *module_unmap(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(args, "KK", &address, &nbytes)) return NULL;
    if (munmap((void *)(uintptr_t)address, nbytes)) return PyErr_SetFromErrno(PyExc_OSError);
    return Py_NewRef(Py_None);
}

static PyObject *module_slot_bytes(PyObject *module, PyObject *args) {
    (void)module;
    int size;
    Py_ssize_t small_bytes, window_bytes;
    if (!PyArg_ParseTuple(args, "inn", &size, &small_bytes, &window_bytes)) return NULL;
    return PyLong_FromSize_t(ud_slot_bytes(size, (size_t)small_bytes, (size_t)window_bytes));
}

static PyMethodDef module_methods[] = {
    {"map", module_map, METH_VARARGS, "map(fd, nbytes): map a file as shared memory; returns the address."},
    {"unmap", module_unmap, METH_VARARGS, "unmap(address, nbytes)"},
    {"slot_bytes", module_slot_bytes, METH_VARARGS, "slot_bytes(size, small_bytes, window_bytes): size of one slot."},
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
    pthread_atfork(NULL, NULL, forget_groups);
    PyObject *type = PyType_FromSpec(&group_spec);
    if (!type || PyModule_AddObjectRef(module, "Group", type)) return -1;
    Py_DECREF(type);
    if (add_names(module, "DTYPES", ud_dtype_names, UD_NUM_DTYPES)) return -1;
    return add_names(module, "REDUCE_OPS", ud_redop_names, UD_NUM_REDOPS);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)module_exec}, {0, NULL}};
static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_shm", "Kernels of the shm engine.", 0,
                                        module_methods, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__shm(void) { return PyModuleDef_Init(&module_def); }
