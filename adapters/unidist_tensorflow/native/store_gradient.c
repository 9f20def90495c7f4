/* A node for graphs of TensorFlow, `UnidistStoreGradient`: brings a gradient into the memory that it is exchanged from,
 * as soon as it is computed and while it is in the caches. The node that fills a bucket tells Python so, which starts its
 * exchange.
 *
 * TensorFlow's C API is looked up in the library that the process has loaded, so nothing of TensorFlow is needed to
 * compile this, and one build serves every release.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>

#include "kernels.h"
#include "tensorflow_api.h"

/* Past this size a copy would leave nothing else in the caches. */
#define PAST_CACHES_BYTES ((size_t)1 << 18)

/* Where a gradient goes; Python has an array of these, one for each place of an exchange, and fills it before the nodes
 * of a step run. */
typedef struct {
    int64_t address;
    int64_t nbytes;
    int64_t dtype; /* of enum ud_dtype */
    int64_t mode;  /* of enum mode */
    int64_t bucket; /* address of the int64_t that counts the gradients which a bucket waits for, or 0 */
} target;

enum mode { NOT_READY, WRITE, ADD };

typedef struct {
    const target *target;
} node;

static tensorflow_api api;
/* Called with the address of a bucket's counter when the bucket is full. Raises nothing. */
static PyObject *bucket_full;

static void *make(tf_construction *construction) {
    tf_status *status = api.new_status();
    node *made = NULL;
    int64_t targets = 0, place = 0;
    api.get_attr_int64(construction, "targets", &targets, status);
    if (api.get_code(status) == TF_OK)
        api.get_attr_int64(construction, "place", &place, status);
    if (api.get_code(status) == TF_OK && !(made = malloc(sizeof *made)))
        api.set_status(status, TF_RESOURCE_EXHAUSTED, "unidist: no memory for a node");
    if (api.get_code(status) == TF_OK)
        made->target = (const target *)(intptr_t)targets + place;
    else
        api.construction_failure(construction, status);
    api.delete_status(status);
    return made;
}

static void delete (void *made) { free(made); }

static const char *store(const target *to, const char *gradient, size_t nbytes) {
    if (to->mode == NOT_READY)
        return "unidist: a gradient was computed before the step had begun";
    if ((int64_t)nbytes != to->nbytes)
        return "unidist: a gradient has another size than its variable";
    char *address = (char *)(intptr_t)to->address;
    if (to->mode == ADD) {
        const char *const sources[] = {address, gradient};
        size_t count = nbytes / ud_dtype_bytes[to->dtype];
        if (ud_reduce(&address, 1, sources, 2, count, (int)to->dtype, UD_SUM, 1.0, 0))
            return "unidist: gradients of this type cannot be added";
    } else if (nbytes > PAST_CACHES_BYTES) {
        ud_copy(address, gradient, nbytes);
    } else {
        memcpy(address, gradient, nbytes);
    }
    return NULL;
}

static void tell_python(const target *stored) {
    int64_t *waiting = (int64_t *)(intptr_t)stored->bucket;
    if (!waiting || __atomic_sub_fetch(waiting, 1, __ATOMIC_ACQ_REL) != 0 || !Py_IsInitialized())
        return;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *done = PyObject_CallFunction(bucket_full, "L", (long long)stored->bucket);
    if (!done)
        PyErr_WriteUnraisable(bucket_full);
    Py_XDECREF(done);
    PyGILState_Release(state);
}

static void compute(void *made, tf_context *context) {
    tf_status *status = api.new_status();
    tf_tensor *gradient = NULL;
    api.get_input(context, 0, &gradient, status);
    if (api.get_code(status) == TF_OK) {
        const char *failed = store(((node *)made)->target, api.tensor_data(gradient), api.tensor_byte_size(gradient));
        if (failed)
            api.set_status(status, TF_FAILED_PRECONDITION, failed);
        else
            tell_python(((node *)made)->target);
    }
    if (gradient)
        api.delete_tensor(gradient);
    if (api.get_code(status) != TF_OK)
        api.context_failure(context, status);
    api.delete_status(status);
}

/* There are no outputs. */
static void infer_shapes(tf_shapes *shapes, tf_status *status) {
    (void)shapes;
    (void)status;
}

static int register_node(tf_status *status) {
    tf_op_builder *op = api.new_op("UnidistStoreGradient");
    api.add_attr(op, "T: type");
    api.add_attr(op, "targets: int");
    api.add_attr(op, "place: int");
    api.add_input(op, "gradient: T");
    api.set_stateful(op, 1); /* else it would be taken for useless */
    api.set_shapes(op, infer_shapes);
    api.register_op(op, status);
    if (api.get_code(status) != TF_OK)
        return -1;
    tf_kernel_builder *kernel = api.new_kernel("UnidistStoreGradient", "CPU", make, compute, delete);
    api.register_kernel("UnidistStoreGradient", kernel, status);
    return api.get_code(status) == TF_OK ? 0 : -1;
}

static PyObject *register_nodes(PyObject *self, PyObject *arguments) {
    (void)self;
    const char *path;
    PyObject *function;
    if (!PyArg_ParseTuple(arguments, "sO", &path, &function))
        return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (!library) {
        PyErr_Format(PyExc_ImportError, "%s is not loaded in this process", path);
        return NULL;
    }
    const char *missing = find_tensorflow_api(&api, library);
    if (missing) {
        PyErr_Format(PyExc_ImportError, "%s has no function %s", path, missing);
        return NULL;
    }
    tf_status *status = api.new_status();
    int failed = register_node(status);
    if (failed)
        PyErr_Format(PyExc_ImportError, "TensorFlow refuses the node: %s", api.get_message(status));
    api.delete_status(status);
    if (failed)
        return NULL;
    bucket_full = Py_NewRef(function);
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"register_nodes", register_nodes, METH_VARARGS, "Register the node with the loaded library of TensorFlow, once."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "unidist_tensorflow._nodes", "A node for graphs of TensorFlow.", 0, methods, NULL, NULL, NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__nodes(void) {
    PyObject *module = PyModule_Create(&definition);
    PyObject *dtypes = module ? PyTuple_New(UD_NUM_DTYPES) : NULL;
    for (int i = 0; dtypes && i < UD_NUM_DTYPES; i++)
        PyTuple_SetItem(dtypes, i, PyUnicode_FromString(ud_dtype_names[i]));
    if (!dtypes || PyModule_AddObjectRef(module, "DTYPES", dtypes) ||
        PyModule_AddIntConstant(module, "NOT_READY", NOT_READY) || PyModule_AddIntConstant(module, "WRITE", WRITE) ||
        PyModule_AddIntConstant(module, "ADD", ADD))
        Py_CLEAR(module);
    Py_XDECREF(dtypes);
    return module;
}
