/* Copies and crc32c of many blocks in one call, without Python's lock. native.py says what and why, and has the same
 * functions in Python. Little-endian hosts only; crc32c and streaming stores want x86-64 with SSE4.2 and AVX2.
 */
#include "native.h"

#include <string.h>

#if !defined(__x86_64__)
#error "elsewhere native.py does the work"
#endif
#include <immintrin.h>

#define STREAM_BYTES ((size_t)64 << 10) /* copies from here on leave the target out of the caches */
#define NAME_CRC_OF_RECORD 104
#define NAME_CRC 124

/* ---- bytes ---- */

__attribute__((target("avx2"))) static void copy_streaming(uint8_t *target, const uint8_t *source, size_t bytes) {
    size_t at = 0;
    for (; at + 128 <= bytes; at += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(source + at));
        __m256i b = _mm256_loadu_si256((const __m256i *)(source + at + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(source + at + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(source + at + 96));
        _mm256_stream_si256((__m256i *)(target + at), a);
        _mm256_stream_si256((__m256i *)(target + at + 32), b);
        _mm256_stream_si256((__m256i *)(target + at + 64), c);
        _mm256_stream_si256((__m256i *)(target + at + 96), d);
    }
    _mm_sfence();
    memcpy(target + at, source + at, bytes - at);
}

static void copy(uint8_t *target, const uint8_t *source, size_t bytes) {
    if (bytes >= STREAM_BYTES && (uintptr_t)target % 32 == 0)
        copy_streaming(target, source, bytes);
    else
        memcpy(target, source, bytes);
}

__attribute__((target("sse4.2"))) static uint32_t crc_one(uint32_t crc, const uint8_t *bytes, size_t count) {
    uint64_t wide = crc, word;
    for (; count >= 8; bytes += 8, count -= 8) {
        memcpy(&word, bytes, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = (uint32_t)wide;
    for (; count > 0; bytes++, count--) crc = _mm_crc32_u8(crc, *bytes);
    return crc;
}

/* A crc waits three cycles for itself, so three records take as long as one. */
__attribute__((target("sse4.2"))) static void crc_three(uint32_t *crcs, const uint8_t *const *bytes, size_t count) {
    uint64_t a = crcs[0], b = crcs[1], c = crcs[2], word;
    size_t at = 0;
    for (; at + 8 <= count; at += 8) {
        memcpy(&word, bytes[0] + at, 8);
        a = _mm_crc32_u64(a, word);
        memcpy(&word, bytes[1] + at, 8);
        b = _mm_crc32_u64(b, word);
        memcpy(&word, bytes[2] + at, 8);
        c = _mm_crc32_u64(c, word);
    }
    crcs[0] = crc_one((uint32_t)a, bytes[0] + at, count - at);
    crcs[1] = crc_one((uint32_t)b, bytes[1] + at, count - at);
    crcs[2] = crc_one((uint32_t)c, bytes[2] + at, count - at);
}

void crc_all(uint32_t *crcs, const Py_buffer *views, Py_ssize_t records, size_t count) {
    Py_ssize_t i = 0;
    for (; i + 3 <= records; i += 3) {
        const uint8_t *bytes[3] = {views[i].buf, views[i + 1].buf, views[i + 2].buf};
        crc_three(crcs + i, bytes, count);
    }
    for (; i < records; i++) crcs[i] = crc_one(crcs[i], views[i].buf, count);
}

static void put_crc(uint8_t *at, uint32_t crc) { memcpy(at, &crc, sizeof crc); }

void seal_end(uint8_t *end, size_t covers, uint32_t state) {
    uint8_t *name = end + covers + HEADER_REST;
    uint32_t crc = ~crc_one(state, end, covers);
    put_crc(end + covers, crc);
    put_crc(name + NAME_CRC_OF_RECORD, crc);
    put_crc(name + NAME_CRC, ~crc_one(~(uint32_t)0, name, NAME_CRC));
}

/* ---- Python's side ---- */

void release(Views *views) {
    while (views->count > 0) PyBuffer_Release(&views->views[--views->count]);
    PyMem_Free(views->views);
    views->views = NULL;
}

int hold(PyObject *sequence, int flags, Py_ssize_t at_least, Views *views) {
    Py_ssize_t count = PySequence_Size(sequence);
    views->count = 0;
    if (count < 0) return -1;
    views->views = PyMem_Calloc(count ? (size_t)count : 1, sizeof(Py_buffer));
    if (views->views == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; views->count < count; views->count++) {
        PyObject *item = PySequence_GetItem(sequence, views->count);
        Py_buffer *view = &views->views[views->count];
        int got = item == NULL ? -1 : PyObject_GetBuffer(item, view, flags);
        Py_XDECREF(item);
        if (got < 0) break;
        if (view->len < at_least) {
            PyErr_Format(PyExc_ValueError, "%zd bytes of a buffer of %zd", at_least, view->len);
            views->count++;
            break;
        }
    }
    if (!PyErr_Occurred()) return 0;
    release(views);
    return -1;
}

PyDoc_STRVAR(copy_pages_doc, "copy_pages(targets, sources): copy buffers of equal length");

static PyObject *copy_pages(PyObject *module, PyObject *args) {
    PyObject *to, *from;
    Views targets, sources;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &to, &from) || hold(to, PyBUF_WRITABLE, 0, &targets) < 0) return NULL;
    if (hold(from, PyBUF_SIMPLE, 0, &sources) < 0) {
        release(&targets);
        return NULL;
    }
    int alike = targets.count == sources.count;
    for (Py_ssize_t i = 0; alike && i < targets.count; i++) alike = targets.views[i].len == sources.views[i].len;
    if (alike) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < targets.count; i++)
            copy(targets.views[i].buf, sources.views[i].buf, (size_t)sources.views[i].len);
        Py_END_ALLOW_THREADS
    }
    release(&sources);
    release(&targets);
    if (alike) Py_RETURN_NONE;
    return PyErr_Format(PyExc_ValueError, "targets and sources differ in number or length");
}

static uint32_t *new_crcs(Py_ssize_t count) {
    uint32_t *crcs = PyMem_Malloc(sizeof(uint32_t) * (size_t)(count ? count : 1));
    if (crcs == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; crcs != NULL && i < count; i++) crcs[i] = ~(uint32_t)0;
    return crcs;
}

PyDoc_STRVAR(crc32c_doc, "crc32c(buffers, count) -> crc32c of the first count bytes of each");

static PyObject *crc32c(PyObject *module, PyObject *args) {
    PyObject *sequence, *result = NULL;
    Py_ssize_t count;
    Views views;
    (void)module;
    if (!PyArg_ParseTuple(args, "On", &sequence, &count) || hold(sequence, PyBUF_SIMPLE, count, &views) < 0) return NULL;
    uint32_t *crcs = count < 0 ? NULL : new_crcs(views.count);
    if (count < 0) PyErr_Format(PyExc_ValueError, "%zd bytes", count);
    if (crcs != NULL) {
        Py_BEGIN_ALLOW_THREADS
        crc_all(crcs, views.views, views.count, (size_t)count);
        Py_END_ALLOW_THREADS
        result = PyList_New(views.count);
        for (Py_ssize_t i = 0; result != NULL && i < views.count; i++) {
            PyObject *crc = PyLong_FromUnsignedLong(~crcs[i] & 0xFFFFFFFFu);
            if (crc == NULL || PyList_SetItem(result, i, crc) < 0) Py_CLEAR(result);
        }
        PyMem_Free(crcs);
    }
    release(&views);
    return result;
}

PyDoc_STRVAR(seal_doc, "seal(bodies, split, ends, covers): fill in the crc32c of records and of their names");

static PyObject *seal(PyObject *module, PyObject *args) {
    PyObject *body_sequence, *end_sequence;
    Py_ssize_t split, covers;
    Views bodies, ends;
    (void)module;
    if (!PyArg_ParseTuple(args, "OnOn", &body_sequence, &split, &end_sequence, &covers)) return NULL;
    if (split < 0 || covers < 0) return PyErr_Format(PyExc_ValueError, "%zd and %zd bytes", split, covers);
    if (hold(body_sequence, PyBUF_SIMPLE, split, &bodies) < 0) return NULL;
    if (hold(end_sequence, PyBUF_WRITABLE, covers + HEADER_REST + NAME_BYTES, &ends) < 0) {
        release(&bodies);
        return NULL;
    }
    int alike = bodies.count == ends.count;
    uint32_t *crcs = alike ? new_crcs(bodies.count) : NULL;
    if (!alike) PyErr_Format(PyExc_ValueError, "%zd bodies, %zd ends", bodies.count, ends.count);
    if (crcs != NULL) {
        Py_BEGIN_ALLOW_THREADS
        crc_all(crcs, bodies.views, bodies.count, (size_t)split);
        for (Py_ssize_t i = 0; i < ends.count; i++) seal_end(ends.views[i].buf, (size_t)covers, crcs[i]);
        Py_END_ALLOW_THREADS
        PyMem_Free(crcs);
    }
    release(&ends);
    release(&bodies);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(gather_doc, "gather(buffers, offset, count) -> those bytes of each, one after the other");

static PyObject *gather(PyObject *module, PyObject *args) {
    PyObject *sequence, *result = NULL;
    Py_ssize_t offset, count;
    Views views;
    (void)module;
    if (!PyArg_ParseTuple(args, "Onn", &sequence, &offset, &count)) return NULL;
    if (offset < 0 || count < 0) return PyErr_Format(PyExc_ValueError, "%zd and %zd bytes", offset, count);
    if (hold(sequence, PyBUF_SIMPLE, offset + count, &views) < 0) return NULL;
    result = PyBytes_FromStringAndSize(NULL, views.count * count);
    if (result != NULL) {
        char *to = PyBytes_AsString(result);
        for (Py_ssize_t i = 0; i < views.count; i++)
            memcpy(to + i * count, (const char *)views.views[i].buf + offset, (size_t)count);
    }
    release(&views);
    return result;
}

PyDoc_STRVAR(aligned_doc, "aligned(buffers, boundary) -> whether all of them begin at a multiple of it");

static PyObject *aligned(PyObject *module, PyObject *args) {
    PyObject *sequence;
    Py_ssize_t boundary;
    Views views;
    (void)module;
    if (!PyArg_ParseTuple(args, "On", &sequence, &boundary)) return NULL;
    if (boundary <= 0) return PyErr_Format(PyExc_ValueError, "a boundary of %zd bytes", boundary);
    if (hold(sequence, PyBUF_SIMPLE, 0, &views) < 0) return NULL;
    int all = 1;
    for (Py_ssize_t i = 0; i < views.count; i++) all &= (uintptr_t)views.views[i].buf % (uintptr_t)boundary == 0;
    release(&views);
    return PyBool_FromLong(all);
}

static PyMethodDef methods[] = {
    {"crew", new_crew, METH_VARARGS, new_crew_doc},
    {"stop", stop_crew, METH_VARARGS, stop_crew_doc},
    {"begin_write", begin_write, METH_VARARGS, begin_write_doc},
    {"begin_read", begin_read, METH_VARARGS, begin_read_doc},
    {"finish", finish, METH_VARARGS, finish_doc},
    {"gather", gather, METH_VARARGS, gather_doc},
    {"aligned", aligned, METH_VARARGS, aligned_doc},
    {"copy_pages", copy_pages, METH_VARARGS, copy_pages_doc},
    {"crc32c", crc32c, METH_VARARGS, crc32c_doc},
    {"seal", seal, METH_VARARGS, seal_doc},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("sse4.2")) {
        PyErr_SetString(PyExc_ImportError, "this processor lacks AVX2 or SSE4.2");
        return -1;
    }
    return PyModule_AddIntConstant(module, "VERSION", 3);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Copies, crc32c and direct I/O of blocks without Python's lock.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
