/* What native.c and native_crew.c share. */
#ifndef EPDSERVE_KVSTORE_NATIVE_H
#define EPDSERVE_KVSTORE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>

#define HEADER_REST 32 /* of a header: its crc32c and what follows */
#define NAME_BYTES 128

typedef struct {
    Py_ssize_t count;
    Py_buffer *views;
} Views;

/* Buffers of a sequence, each `at_least` bytes long; 0, or -1 with an exception set and nothing held. */
int hold(PyObject *sequence, int flags, Py_ssize_t at_least, Views *views);
void release(Views *views);

/* crcs[i] of the first `count` bytes of each view, all of them at least as long. */
void crc_all(uint32_t *crcs, const Py_buffer *views, Py_ssize_t records, size_t count);

/* Fill in the three crc32c of a record's end, whose bytes so far, `covers` of them here, have the sum `state`. */
void seal_end(uint8_t *end, size_t covers, uint32_t state);

PyObject *new_crew(PyObject *module, PyObject *args);
PyObject *stop_crew(PyObject *module, PyObject *args);
PyObject *begin_write(PyObject *module, PyObject *args);
PyObject *begin_read(PyObject *module, PyObject *args);
PyObject *finish(PyObject *module, PyObject *args);
extern const char new_crew_doc[], stop_crew_doc[], begin_write_doc[], begin_read_doc[], finish_doc[];

#endif
