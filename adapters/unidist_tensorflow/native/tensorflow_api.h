/* The functions of TensorFlow's C API that are used here, found when the process runs. Their declarations are those of
 * tensorflow/c/kernels.h, ops.h, tf_status.h and tf_tensor.h. */
#ifndef UNIDIST_TENSORFLOW_API_H
#define UNIDIST_TENSORFLOW_API_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct TF_Status tf_status;
typedef struct TF_Tensor tf_tensor;
typedef struct TF_OpDefinitionBuilder tf_op_builder;
typedef struct TF_KernelBuilder tf_kernel_builder;
typedef struct TF_OpKernelConstruction tf_construction;
typedef struct TF_OpKernelContext tf_context;
typedef struct TF_ShapeInferenceContext tf_shapes;

enum { TF_OK = 0, TF_RESOURCE_EXHAUSTED = 8, TF_FAILED_PRECONDITION = 9 };

/* member, return type, name in the library, arguments */
#define TENSORFLOW_FUNCTIONS(F)                                                                                        \
    F(new_status, tf_status *, "TF_NewStatus", (void))                                                                 \
    F(delete_status, void, "TF_DeleteStatus", (tf_status *))                                                           \
    F(set_status, void, "TF_SetStatus", (tf_status *, int, const char *))                                              \
    F(get_code, int, "TF_GetCode", (const tf_status *))                                                                \
    F(get_message, const char *, "TF_Message", (const tf_status *))                                                    \
    F(delete_tensor, void, "TF_DeleteTensor", (tf_tensor *))                                                           \
    F(tensor_data, void *, "TF_TensorData", (const tf_tensor *))                                                       \
    F(tensor_byte_size, size_t, "TF_TensorByteSize", (const tf_tensor *))                                              \
    F(new_op, tf_op_builder *, "TF_NewOpDefinitionBuilder", (const char *))                                            \
    F(add_attr, void, "TF_OpDefinitionBuilderAddAttr", (tf_op_builder *, const char *))                                \
    F(add_input, void, "TF_OpDefinitionBuilderAddInput", (tf_op_builder *, const char *))                              \
    F(set_stateful, void, "TF_OpDefinitionBuilderSetIsStateful", (tf_op_builder *, _Bool))                             \
    F(set_shapes, void, "TF_OpDefinitionBuilderSetShapeInferenceFunction",                                             \
      (tf_op_builder *, void (*)(tf_shapes *, tf_status *)))                                                           \
    F(register_op, void, "TF_RegisterOpDefinition", (tf_op_builder *, tf_status *))                                    \
    F(new_kernel, tf_kernel_builder *, "TF_NewKernelBuilder",                                                          \
      (const char *, const char *, void *(*)(tf_construction *), void (*)(void *, tf_context *), void (*)(void *)))    \
    F(register_kernel, void, "TF_RegisterKernelBuilder", (const char *, tf_kernel_builder *, tf_status *))             \
    F(get_attr_int64, void, "TF_OpKernelConstruction_GetAttrInt64",                                                    \
      (tf_construction *, const char *, int64_t *, tf_status *))                                                       \
    F(construction_failure, void, "TF_OpKernelConstruction_Failure", (tf_construction *, tf_status *))                 \
    F(get_input, void, "TF_GetInput", (tf_context *, int, tf_tensor **, tf_status *))                                  \
    F(context_failure, void, "TF_OpKernelContext_Failure", (tf_context *, tf_status *))

#define TENSORFLOW_MEMBER(member, type, name, arguments) type(*member) arguments;
typedef struct {
    TENSORFLOW_FUNCTIONS(TENSORFLOW_MEMBER)
} tensorflow_api;

/* Fills the table from a loaded library. Returns the name of a function that is not there, or NULL. */
static inline const char *find_tensorflow_api(tensorflow_api *api, void *library) {
#define TENSORFLOW_FIND(member, type, name, arguments)                                                                 \
    if (!(*(void **)&api->member = dlsym(library, name)))                                                              \
        return name;
    TENSORFLOW_FUNCTIONS(TENSORFLOW_FIND)
    return NULL;
}

#endif
