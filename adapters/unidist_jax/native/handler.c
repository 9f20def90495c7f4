/* The function that XLA calls where a compiled program calls the host: hands the addresses to Python.
 *
 * XLA runs it on the thread that runs the program. It returns when Python has: a program waits for its operation.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "xla_ffi.h"

/* Called with the number of a host function, and the addresses of its arguments and results in one tuple; returns None,
 * or the text of an error. */
static PyObject *run;

static ffi_error *error(const ffi_call *call, const char *message) {
    ffi_error_arguments arguments = {sizeof arguments, NULL, message, FFI_ERROR_INTERNAL};
    return call->api->make_error(&arguments);
}

static int put(PyObject *addresses, Py_ssize_t first, const ffi_values *values) {
    for (int64_t i = 0; i < values->count; i++) {
        PyObject *address = PyLong_FromVoidPtr(((ffi_buffer *)values->values[i])->data);
        if (!address || PyTuple_SetItem(addresses, first + (Py_ssize_t)i, address))
            return -1;
    }
    return 0;
}

static PyObject *call_python(const ffi_call *call) {
    int64_t number = *(int64_t *)((ffi_scalar *)call->attributes.values[0])->value;
    PyObject *answer = NULL;
    PyObject *addresses = PyTuple_New((Py_ssize_t)(call->arguments.count + call->results.count));
    if (addresses && !put(addresses, 0, &call->arguments) &&
        !put(addresses, (Py_ssize_t)call->arguments.count, &call->results))
        answer = PyObject_CallFunction(run, "LO", (long long)number, addresses);
    Py_XDECREF(addresses);
    return answer;
}

static ffi_error *handle(ffi_call *call) {
    for (ffi_extension *each = call->extensions; each; each = each->next)
        if (each->type == FFI_EXTENSION_METADATA) {
            ffi_metadata *metadata = ((ffi_metadata_extension *)each)->metadata;
            metadata->version.major = FFI_VERSION_MAJOR;
            metadata->version.minor = FFI_VERSION_MINOR;
            metadata->traits = 0;
            return NULL;
        }
    if (call->stage != FFI_STAGE_EXECUTE)
        return NULL;
    if (call->attributes.count != 1)
        return error(call, "unidist: a host call without its number");
    if (!Py_IsInitialized())
        return error(call, "unidist: a program ran when Python had ended; call unidist.jax.shutdown() at the end");
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *answer = call_python(call);
    ffi_error *failed = NULL;
    if (!answer) {
        PyErr_WriteUnraisable(run);
        failed = error(call, "unidist: a host call failed; the error is on stderr");
    } else if (answer != Py_None) {
        const char *message = PyUnicode_AsUTF8AndSize(answer, NULL);
        PyErr_Clear();
        failed = error(call, message ? message : "unidist: a host call failed, with a text that is no UTF-8");
    }
    Py_XDECREF(answer);
    PyGILState_Release(state);
    return failed;
}

static PyObject *set_function(PyObject *self, PyObject *function) {
    (void)self;
    if (!PyCallable_Check(function)) {
        PyErr_SetString(PyExc_TypeError, "set_function: a function is needed");
        return NULL;
    }
    PyObject *before = run;
    run = Py_NewRef(function);
    Py_XDECREF(before);
    return Py_NewRef(Py_None);
}

static PyObject *handler(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyCapsule_New((void *)handle, NULL, NULL);
}

static PyMethodDef methods[] = {
    {"set_function", set_function, METH_O, NULL},
    {"handler", handler, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_handler", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__handler(void) {
    return PyModule_Create(&module);
}
