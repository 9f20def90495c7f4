/* The part of XLA's foreign function interface (C ABI, version 0) that the handler uses.
 *
 * The ABI is stable: structs start with their size, and grow at their ends. Declared here because the header that says
 * all of it (xla/ffi/api/c_api.h, in jaxlib's wheel) is not there where unidist is built.
 * tests/adapters/unidist_jax/native compares the two.
 */
#ifndef UNIDIST_XLA_FFI_H
#define UNIDIST_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

enum {
    FFI_VERSION_MAJOR = 0,
    FFI_VERSION_MINOR = 1, /* what is used here has been there since */
    FFI_EXTENSION_METADATA = 1,
    FFI_STAGE_EXECUTE = 3,
    FFI_ERROR_INTERNAL = 13,
};

typedef struct ffi_error ffi_error;

typedef struct ffi_extension {
    size_t struct_size;
    int type;
    struct ffi_extension *next;
} ffi_extension;

typedef struct {
    size_t struct_size;
    ffi_extension *extensions;
    int major, minor;
} ffi_version;

typedef struct {
    size_t struct_size;
    ffi_version version;
    uint32_t traits;
} ffi_metadata;

typedef struct {
    ffi_extension base;
    ffi_metadata *metadata;
} ffi_metadata_extension;

typedef struct {
    size_t struct_size;
    ffi_extension *extensions;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} ffi_buffer;

/* Arguments, and results. */
typedef struct {
    size_t struct_size;
    ffi_extension *extensions;
    int64_t count;
    int *types;
    void **values; /* ffi_buffer */
} ffi_values;

typedef struct {
    int dtype;
    void *value;
} ffi_scalar;

typedef struct {
    size_t struct_size;
    ffi_extension *extensions;
    int64_t count;
    int *types;
    void *names;
    void **values; /* ffi_scalar */
} ffi_attributes;

typedef struct {
    size_t struct_size;
    ffi_extension *extensions;
    const char *message;
    int code;
} ffi_error_arguments;

typedef struct {
    size_t struct_size;
    ffi_extension *extensions;
    ffi_version version;
    const void *internal;
    ffi_error *(*make_error)(ffi_error_arguments *);
} ffi_api;

typedef struct {
    size_t struct_size;
    ffi_extension *extensions;
    const ffi_api *api;
    void *context;
    int stage;
    ffi_values arguments;
    ffi_values results;
    ffi_attributes attributes;
} ffi_call;

#endif
