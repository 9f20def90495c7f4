/* The Python module `unidist_parameter_server.native._shards`: thin, no logic of its own. Addresses travel as integers;
 * everything that can touch much memory runs without the interpreter lock. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "shards.h"

#include <errno.h>

typedef unsigned long long address;

static inline void *at(address where) { return (void *)(uintptr_t)where; }

static PyObject *outcome(int64_t busy, int error) {
    if (busy >= 0) return PyLong_FromLongLong(busy);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *module_apply(PyObject *module, PyObject *args) {
    (void)module;
    address rule, values, change, first, second;
    int type, num_slots;
    long long count, updates;
    double factor;
    if (!PyArg_ParseTuple(args, "KiKKKKiLLd", &rule, &type, &values, &change, &first, &second, &num_slots, &count,
                          &updates, &factor))
        return NULL;
    void *slots[PS_MAX_SLOTS] = {at(first), at(second)};
    Py_BEGIN_ALLOW_THREADS;
    ps_apply_rule(at(rule), (enum ps_type)type, at(values), at(change), slots, at(values), slots, num_slots,
                  (size_t)count, updates, factor);
    Py_END_ALLOW_THREADS;
    return Py_NewRef(Py_None);
}

static PyObject *module_push(PyObject *module, PyObject *args) {
    (void)module;
    address store, order, rules, rule_of, present, sources, workers, read_versions, targets, versions;
    long long num, num_rules, number;
    double factor;
    if (!PyArg_ParseTuple(args, "KKLKLKKKKdLKKK", &store, &order, &num, &rules, &num_rules, &rule_of, &present,
                          &sources, &workers, &factor, &number, &read_versions, &targets, &versions))
        return NULL;
    struct ps_change change = {at(rules), at(rule_of), at(present), at(sources), 1, factor, at(workers), num_rules};
    int64_t busy;
    int error;
    Py_BEGIN_ALLOW_THREADS;
    busy = ps_push(at(store), at(order), num, &change, number, at(read_versions), at(targets), at(versions));
    error = errno;
    Py_END_ALLOW_THREADS;
    return outcome(busy, error);
}

static PyObject *module_step(PyObject *module, PyObject *args) {
    (void)module;
    address store, order, rules, rule_of, present, sources, workers, targets, versions;
    long long num, num_rules, num_sources, label;
    double factor;
    if (!PyArg_ParseTuple(args, "KKLKLKKKKLdLKK", &store, &order, &num, &rules, &num_rules, &rule_of, &present,
                          &sources, &workers, &num_sources, &factor, &label, &targets, &versions))
        return NULL;
    if (num_sources < 1 || num_sources > PS_MOST_SOURCES) {
        PyErr_Format(PyExc_ValueError, "a mean is of 1 to %d gradients", PS_MOST_SOURCES);
        return NULL;
    }
    struct ps_change change = {
        at(rules), at(rule_of), at(present), at(sources), num_sources, factor, at(workers), num_rules};
    int64_t busy;
    int error;
    Py_BEGIN_ALLOW_THREADS;
    busy = ps_step(at(store), at(order), num, &change, label, at(targets), at(versions));
    error = errno;
    Py_END_ALLOW_THREADS;
    return outcome(busy, error);
}

static PyObject *module_fetch(PyObject *module, PyObject *args) {
    (void)module;
    address store, order, targets, versions;
    long long num;
    if (!PyArg_ParseTuple(args, "KKLKK", &store, &order, &num, &targets, &versions)) return NULL;
    int64_t busy;
    int error;
    Py_BEGIN_ALLOW_THREADS;
    busy = ps_fetch(at(store), at(order), num, at(targets), at(versions));
    error = errno;
    Py_END_ALLOW_THREADS;
    return outcome(busy, error);
}

static PyObject *module_restore(PyObject *module, PyObject *args) {
    (void)module;
    address store;
    long long index;
    if (!PyArg_ParseTuple(args, "KL", &store, &index)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    ps_restore(at(store), index);
    Py_END_ALLOW_THREADS;
    return Py_NewRef(Py_None);
}

static PyMethodDef module_methods[] = {
    {"apply", module_apply, METH_VARARGS, "Apply a rule to memory, in place; see rules.h."},
    {"push", module_push, METH_VARARGS, "Apply a push to shards; return how many were busy, see shards.h."},
    {"step", module_step, METH_VARARGS, "Apply a synchronous step to shards; return how many were busy."},
    {"fetch", module_fetch, METH_VARARGS, "Copy the values of shards; return how many were busy."},
    {"restore", module_restore, METH_VARARGS, "Bring a shard to a version that a killed worker was changing."},
    {NULL, NULL, 0, NULL}};

static int module_exec(PyObject *module) {
    PyObject *kinds = PyDict_New();
    for (int k = 0; kinds && k < PS_NUM_KINDS; k++) {
        PyObject *number = Py_BuildValue("(ii)", k, ps_num_options[k]);
        if (!number || PyDict_SetItemString(kinds, ps_kind_names[k], number)) Py_CLEAR(kinds);
        Py_XDECREF(number);
    }
    if (!kinds) return -1;
    int status = PyModule_AddObjectRef(module, "KINDS", kinds);
    Py_DECREF(kinds);
    if (status) return -1;
    static const struct {
        const char *name;
        long value;
    } constants[] = {{"NUM_OPTIONS", PS_NUM_OPTIONS}, {"MAX_SLOTS", PS_MAX_SLOTS}, {"MOST_RULES", PS_MOST_RULES},
                     {"MOST_SOURCES", PS_MOST_SOURCES}, {"BLOCK_BYTES", PS_BLOCK * (long)sizeof(double)},
                     {"INTENT_BYTES", (long)sizeof(struct ps_intent)}};
    for (size_t k = 0; k < sizeof constants / sizeof *constants; k++)
        if (PyModule_AddIntConstant(module, constants[k].name, constants[k].value)) return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)module_exec}, {0, NULL}};
static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_shards", "Pushes to memory that processes share.", 0,
                                        module_methods, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__shards(void) { return PyModuleDef_Init(&module_def); }
