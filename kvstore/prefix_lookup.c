/* How much of a hash chain each holder has: one walk over the slots of holder_table.py, which says what they hold.
 *
 * A large table is in no cache, so what the walk will touch soon is asked for while it is busy with what came. The lock
 * of Python is kept: the table belongs to one thread, and a chain of 800 blocks takes some tens of microseconds.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "hashes are split into little-endian words"
#endif

#define HASH_BYTES 16
#define WORD_BITS 64
#define KEY_WORDS 2
#define LINE_WORDS 8
#define AHEAD 24    /* blocks that are asked for before they are looked at: about as many as a core waits for at once */
#define OBJECT_BYTES 32 /* of a bytes object, about, before what it holds */
#define MAX_WORDS 1024 /* 65,536 holders */

/* A slot is two words of a hash, both zero if it is empty, and the bits of its holders. */
typedef struct {
    const uint64_t *slots;
    uint64_t mask; /* slots less one, a power of two less one */
    size_t stride; /* words of a slot */
} Table;

typedef struct {
    uint64_t low, high;
    int known; /* whether it has the length of a hash */
} Key;

static void ask_for(const Table *table, const Key *key) {
    const uint64_t *slot = table->slots + (key->low & table->mask) * table->stride;
    for (size_t word = 0; word < table->stride; word += LINE_WORDS) __builtin_prefetch(slot + word);
    __builtin_prefetch(slot + table->stride - 1);
}

/* Bits of a key's holders; NULL if nobody ever had it. */
static const uint64_t *holders_of(const Table *table, const Key *key) {
    if (!key->known) return NULL;
    uint64_t place = key->low & table->mask;
    for (;; place = (place + 1) & table->mask) {
        const uint64_t *slot = table->slots + place * table->stride;
        if (slot[0] == key->low && slot[1] == key->high) return slot + KEY_WORDS;
        if (!slot[0] && !slot[1]) return NULL;
    }
}

static int note(PyObject *lengths, PyObject *names, size_t word, uint64_t holders, Py_ssize_t length) {
    PyObject *value = PyLong_FromSsize_t(length);
    int failed = value == NULL;
    for (; !failed && holders; holders &= holders - 1) {
        Py_ssize_t number = (Py_ssize_t)(word * WORD_BITS) + __builtin_ctzll(holders);
        PyObject *name = PyList_GetItem(names, number); /* borrowed */
        failed = name == NULL || PyDict_SetItem(lengths, name, value) < 0;
    }
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

static int walk(const Table *table, const Key *keys, Py_ssize_t count, PyObject *names, PyObject *lengths) {
    uint64_t alive[MAX_WORDS], any = count > 0;
    size_t words = table->stride - KEY_WORDS;
    Py_ssize_t length = 0;
    for (Py_ssize_t at = 0; at < AHEAD && at < count; at++) ask_for(table, &keys[at]);
    for (; any && length < count; length += any != 0) {
        if (length + AHEAD < count) ask_for(table, &keys[length + AHEAD]);
        const uint64_t *held = holders_of(table, &keys[length]);
        any = 0;
        for (size_t word = 0; word < words; word++) {
            uint64_t now = held == NULL ? 0 : held[word];
            if (length) {
                uint64_t lost = alive[word] & ~now;
                now &= alive[word];
                if (lost && note(lengths, names, word, lost, length) < 0) return -1;
            }
            alive[word] = now;
            any |= now;
        }
    }
    for (size_t word = 0; any && word < words; word++)
        if (alive[word] && note(lengths, names, word, alive[word], length) < 0) return -1;
    return 0;
}

/* Keys of a list of bytes objects. Another thread may have made them, so they are asked for ahead, too. */
static int read_keys(PyObject *chain, Py_ssize_t count, uint64_t turn, Key *keys) {
    for (Py_ssize_t at = 0; at < count; at++) {
        if (at + AHEAD < count) __builtin_prefetch((const char *)PyList_GetItem(chain, at + AHEAD) + OBJECT_BYTES);
        char *bytes;
        Py_ssize_t size;
        PyObject *item = PyList_GetItem(chain, at); /* borrowed */
        if (item == NULL || PyBytes_AsStringAndSize(item, &bytes, &size) < 0) return -1;
        keys[at] = (Key){0, 0, size == HASH_BYTES};
        if (!keys[at].known) continue;
        memcpy(&keys[at].low, bytes, sizeof(uint64_t));
        memcpy(&keys[at].high, bytes + sizeof(uint64_t), sizeof(uint64_t));
        keys[at].low ^= turn;
    }
    return 0;
}

static int fits(const Py_buffer *view, Py_ssize_t base, Py_ssize_t stride, Py_ssize_t mask, Table *table) {
    Py_ssize_t words = view->len / (Py_ssize_t)sizeof(uint64_t), count = mask + 1;
    table->slots = (const uint64_t *)view->buf + base;
    table->mask = (uint64_t)mask;
    table->stride = (size_t)stride;
    if (mask >= 0 && !(mask & count) && base >= 0 && base <= words && stride > KEY_WORDS &&
        stride <= KEY_WORDS + MAX_WORDS && count <= (words - base) / stride)
        return 1;
    PyErr_SetString(PyExc_ValueError, "no such table: slots are a power of two, and all of them there");
    return 0;
}

PyDoc_STRVAR(prefix_lengths_doc, "prefix_lengths(slots, base, stride, mask, turn, chain, names)\n--\n\n"
                                 "{name: leading blocks} of the holders that have any.");

static PyObject *prefix_lengths(PyObject *module, PyObject *args) {
    PyObject *chain, *names, *lengths = NULL;
    Py_ssize_t base, stride, mask;
    unsigned long long turn;
    Py_buffer view;
    Table table;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nnnKOO", &view, &base, &stride, &mask, &turn, &chain, &names)) return NULL;
    Py_ssize_t count = PyList_Size(chain);
    Key *keys = count < 0 ? NULL : PyMem_Malloc(sizeof(Key) * (size_t)(count ? count : 1));
    if (count >= 0 && keys == NULL) PyErr_NoMemory();
    if (keys != NULL && fits(&view, base, stride, mask, &table) && read_keys(chain, count, turn, keys) == 0) {
        lengths = PyDict_New();
        if (lengths != NULL && walk(&table, keys, count, names, lengths) < 0) Py_CLEAR(lengths);
    }
    PyMem_Free(keys);
    PyBuffer_Release(&view);
    return lengths;
}

static PyMethodDef methods[] = {
    {"prefix_lengths", prefix_lengths, METH_VARARGS, prefix_lengths_doc},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) { return PyModule_AddIntConstant(module, "VERSION", 1); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_prefix_lookup",
    .m_doc = "How much of a hash chain each holder has.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__prefix_lookup(void) { return PyModuleDef_Init(&definition); }
