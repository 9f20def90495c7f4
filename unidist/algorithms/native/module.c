/* The Python module `unidist.algorithms._kernels`: thin, no logic of its own. Addresses travel as integers; everything
 * that can touch much memory runs without the interpreter lock. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

#include <stdlib.h>

/* Copies a tuple of `size` integers; returns 0. */
static int read_numbers(PyObject *tuple, int size, uint64_t **out) {
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

static PyObject *module_reduce(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long target, count;
    PyObject *sources;
    int dtype, op;
    double scale;
    if (!PyArg_ParseTuple(args, "KOKiid", &target, &sources, &count, &dtype, &op, &scale)) return NULL;
    Py_ssize_t n = PyTuple_Check(sources) ? PyTuple_Size(sources) : 0;
    uint64_t *addresses;
    if (n < 1 || n > 4096) {
        PyErr_SetString(PyExc_ValueError, "sources is a tuple of 1 to 4096 addresses");
        return NULL;
    }
    if (dtype < 0 || dtype >= UD_NUM_DTYPES || op < 0 || op >= UD_NUM_REDOPS) {
        PyErr_SetString(PyExc_ValueError, "no such dtype or reduction");
        return NULL;
    }
    if (read_numbers(sources, (int)n, &addresses)) return NULL;
    char *out = (char *)(uintptr_t)target;
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = ud_reduce(&out, 1, (const char *const *)addresses, (int)n, count, dtype, op, scale, 0);
    Py_END_ALLOW_THREADS;
    free(addresses);
    if (status) {
        PyErr_SetString(PyExc_ValueError, "complex numbers have no minimum or maximum");
        return NULL;
    }
    return Py_NewRef(Py_None);
}

static PyObject *module_copy(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long target, source, nbytes;
    if (!PyArg_ParseTuple(args, "KKK", &target, &source, &nbytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    ud_copy((char *)(uintptr_t)target, (const char *)(uintptr_t)source, nbytes);
    Py_END_ALLOW_THREADS;
    return Py_NewRef(Py_None);
}

static PyMethodDef module_methods[] = {
    {"reduce", module_reduce, METH_VARARGS,
     "reduce(target, sources, count, dtype, op, scale): combine arrays at addresses element by element."},
    {"copy", module_copy, METH_VARARGS, "copy(target, source, nbytes): copy memory past the caches."},
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
    if (add_names(module, "DTYPES", ud_dtype_names, UD_NUM_DTYPES)) return -1;
    return add_names(module, "REDUCE_OPS", ud_redop_names, UD_NUM_REDOPS);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)module_exec}, {0, NULL}};
static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_kernels", "Arithmetic on host memory.", 0,
                                        module_methods, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&module_def); }
