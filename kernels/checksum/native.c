/* Page checksums, and copies that sum what they copy, without Python's lock. What is summed and why stands in weights.py.
 *
 * weight[i] = (hi[i] << 32) + 2*i + 1, so with signed words w[i]
 *   sum of w[i]*weight[i] = sum of w[i]*(2*i+1) + (sum of w[i]*hi[i] mod 2^32 << 32)      (mod 2^64)
 * The first sum needs no table and signed 32 x 32 -> 64 bit products only, as long as 2*i+1 < 2^31; the second needs
 * 4 bytes a word. Little-endian hosts only: elsewhere this does not compile and numpy does the work.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little-endian"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define WORD_BYTES 4
#define HASH_BYTES 16
#define MAX_WORDS ((Py_ssize_t)1 << 29) /* 2 GiB of payload: 2*i+1 stays below 2^31 */
#define STREAM_BYTES ((size_t)64 << 10) /* copies from here on leave the target out of the caches */

typedef struct {
    const uint8_t *source;
    uint8_t *target; /* NULL: sum only */
    size_t copy_bytes; /* at least payload_bytes */
    uint64_t sum;
} Job;

typedef uint64_t (*Kernel)(const uint8_t *source, uint8_t *target, const uint32_t *hi, size_t words);

static uint32_t load_word(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, WORD_BYTES);
    return word;
}

/* Words from..until, one by one: the plain form, and the end of the others. */
static uint64_t sum_words(const uint8_t *bytes, const uint32_t *hi, size_t from, size_t until) {
    uint64_t low = 0;
    uint32_t high = 0;
    for (size_t i = from; i < until; i++) {
        uint32_t word = load_word(bytes + WORD_BYTES * i);
        low += (uint64_t)((int64_t)(int32_t)word * (int64_t)(2 * i + 1));
        high += word * hi[i];
    }
    return low + ((uint64_t)high << 32);
}

/* Every kernel sums what it has written, not what it reads: a source may change meanwhile. */
static uint64_t copy_words(const uint8_t *source, uint8_t *target, const uint32_t *hi, size_t from, size_t until) {
    if (target == NULL) return sum_words(source, hi, from, until);
    memcpy(target + WORD_BYTES * from, source + WORD_BYTES * from, WORD_BYTES * (until - from));
    return sum_words(target, hi, from, until);
}

static uint64_t portable(const uint8_t *source, uint8_t *target, const uint32_t *hi, size_t words) {
    const size_t portion = 1024; /* what was copied is still in the first cache when it is summed */
    uint64_t total = 0;
    for (size_t from = 0; from < words; from += portion)
        total += copy_words(source, target, hi, from, words - from < portion ? words : from + portion);
    return total;
}

#if defined(__x86_64__)
typedef struct {
    __m256i low, high, odd; /* four 64-bit sums; eight 32-bit sums; 2*i+1 of the even words */
} Lanes;

__attribute__((target("avx2"), always_inline)) static inline void add_eight(Lanes *lanes, __m256i words,
                                                                             const uint32_t *hi) {
    const __m256i two = _mm256_set1_epi64x(2), sixteen = _mm256_set1_epi64x(16);
    __m256i weight = _mm256_loadu_si256((const __m256i *)hi);
    lanes->high = _mm256_add_epi32(lanes->high, _mm256_mullo_epi32(words, weight));
    lanes->low = _mm256_add_epi64(lanes->low, _mm256_mul_epi32(words, lanes->odd));
    __m256i odd_words = _mm256_srli_epi64(words, 32);
    lanes->low = _mm256_add_epi64(lanes->low, _mm256_mul_epi32(odd_words, _mm256_add_epi64(lanes->odd, two)));
    lanes->odd = _mm256_add_epi64(lanes->odd, sixteen);
}

__attribute__((target("avx2"))) static uint64_t add_up(__m256i low, __m256i high) {
    uint64_t lows[4], total = 0;
    uint32_t highs[8], upper = 0;
    _mm256_storeu_si256((__m256i *)lows, low);
    _mm256_storeu_si256((__m256i *)highs, high);
    for (int i = 0; i < 4; i++) total += lows[i];
    for (int i = 0; i < 8; i++) upper += highs[i];
    return total + ((uint64_t)upper << 32);
}

/* One body for three uses; `mode` is known where it is inlined. */
enum { SUM, COPY, STREAM };

__attribute__((target("avx2"), always_inline)) static inline uint64_t
avx2_body(const uint8_t *source, uint8_t *target, const uint32_t *hi, size_t words, int mode) {
    Lanes lanes = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setr_epi64x(1, 5, 9, 13)};
    const __m256i *from = (const __m256i *)source;
    __m256i *to = (__m256i *)target;
    size_t vectors = words / 8;
    for (size_t v = 0; v < vectors; v++) {
        __m256i eight = _mm256_loadu_si256(from + v);
        if (mode == COPY) _mm256_storeu_si256(to + v, eight);
        if (mode == STREAM) _mm256_stream_si256(to + v, eight);
        add_eight(&lanes, eight, hi + 8 * v);
    }
    if (mode == STREAM) _mm_sfence();
    return add_up(lanes.low, lanes.high) + copy_words(source, target, hi, 8 * vectors, words);
}

__attribute__((target("avx2"))) static uint64_t avx2(const uint8_t *source, uint8_t *target, const uint32_t *hi,
                                                     size_t words) {
    if (target == NULL) return avx2_body(source, target, hi, words, SUM);
    if (WORD_BYTES * words >= STREAM_BYTES && (uintptr_t)target % 32 == 0)
        return avx2_body(source, target, hi, words, STREAM);
    return avx2_body(source, target, hi, words, COPY);
}
#endif

static Kernel kernel = portable;
static const char *kernel_name = "plain C";

static void choose_kernel(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        kernel = avx2;
        kernel_name = "AVX2";
    }
#endif
}

/* Same numbers as seed() in weights.py. */
static uint64_t seed(size_t payload_bytes, const uint8_t *hash) {
    uint64_t value = payload_bytes, half;
    for (int start = 0; start < HASH_BYTES; start += 8) {
        memcpy(&half, hash + start, 8);
        value += half + UINT64_C(0x9E3779B97F4A7C15);
        value = (value ^ (value >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
        value = (value ^ (value >> 27)) * UINT64_C(0x94D049BB133111EB);
        value ^= value >> 31;
    }
    return value;
}

static void run(Job *job, size_t payload_bytes, const uint32_t *hi) {
    size_t words = payload_bytes / WORD_BYTES, done = words * WORD_BYTES;
    job->sum += kernel(job->source, job->target, hi, words);
    if (job->target != NULL) memcpy(job->target + done, job->source + done, job->copy_bytes - done);
    if (done < payload_bytes) { /* a ragged end counts as if zeros followed */
        uint8_t last[WORD_BYTES] = {0};
        const uint8_t *kept = job->target != NULL ? job->target : job->source;
        memcpy(last, kept + done, payload_bytes - done);
        uint32_t word = load_word(last);
        job->sum += (uint64_t)((int64_t)(int32_t)word * (int64_t)(2 * words + 1)) + ((uint64_t)(word * hi[words]) << 32);
    }
}

/* ---- Python's side ---- */

static int get_weights(PyObject *object, Py_ssize_t payload_bytes, Py_buffer *view) {
    Py_ssize_t words = payload_bytes / WORD_BYTES + (payload_bytes % WORD_BYTES != 0);
    if (payload_bytes < 0 || words > MAX_WORDS) {
        PyErr_Format(PyExc_ValueError, "a payload of %zd bytes", payload_bytes);
        return -1;
    }
    if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0) return -1;
    if (view->len / (Py_ssize_t)sizeof(uint32_t) >= words) return 0;
    PyErr_Format(PyExc_ValueError, "%zd words need as many weights, got %zd bytes", words, view->len);
    PyBuffer_Release(view);
    return -1;
}

static int seed_job(Job *job, PyObject *hashes, Py_ssize_t index, Py_ssize_t payload_bytes) {
    PyObject *hash = PySequence_GetItem(hashes, index);
    if (hash == NULL) return -1;
    char *bytes;
    Py_ssize_t length;
    int got = PyBytes_AsStringAndSize(hash, &bytes, &length);
    if (got == 0 && length != HASH_BYTES) {
        PyErr_Format(PyExc_ValueError, "a block hash has 16 bytes, got %zd", length);
        got = -1;
    }
    if (got == 0) job->sum = seed((size_t)payload_bytes, (const uint8_t *)bytes);
    Py_DECREF(hash);
    return got;
}

static PyObject *sums_of(const Job *jobs, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *sum = PyLong_FromUnsignedLongLong(jobs[i].sum);
        if (sum == NULL || PyList_SetItem(list, i, sum) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *run_all(Job *jobs, Py_ssize_t count, Py_ssize_t payload_bytes, const void *weights) {
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) run(&jobs[i], (size_t)payload_bytes, weights);
    Py_END_ALLOW_THREADS
    return sums_of(jobs, count);
}

static Job *new_jobs(Py_ssize_t count) {
    Job *jobs = PyMem_Calloc(count ? (size_t)count : 1, sizeof(Job));
    if (jobs == NULL) PyErr_NoMemory();
    return jobs;
}

/* Fills jobs[i].source from the buffer's page ids[i], each id checked. */
static int place_pages(Job *jobs, const Py_buffer *pages, Py_ssize_t stride, PyObject *ids, PyObject *hashes,
                       Py_ssize_t payload_bytes) {
    Py_ssize_t count = PySequence_Size(ids), num_pages = stride > 0 ? pages->len / stride : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *id = PySequence_GetItem(ids, i);
        if (id == NULL) return -1;
        Py_ssize_t page = PyNumber_AsSsize_t(id, PyExc_IndexError);
        Py_DECREF(id);
        if (page == -1 && PyErr_Occurred()) return -1;
        if (page < 0 || page >= num_pages) {
            PyErr_Format(PyExc_IndexError, "page %zd of %zd", page, num_pages);
            return -1;
        }
        jobs[i].source = (const uint8_t *)pages->buf + page * stride;
        if (seed_job(&jobs[i], hashes, i, payload_bytes) < 0) return -1;
    }
    return 0;
}

PyDoc_STRVAR(page_sums_doc, "page_sums(pages, stride, ids, payload_bytes, hashes, weights) -> list of sums");

static PyObject *page_sums(PyObject *module, PyObject *args) {
    PyObject *pages_object, *ids, *hashes, *weights_object, *result = NULL;
    Py_ssize_t stride, payload_bytes;
    Py_buffer pages, weights;
    (void)module;
    if (!PyArg_ParseTuple(args, "OnOnOO", &pages_object, &stride, &ids, &payload_bytes, &hashes, &weights_object))
        return NULL;
    Py_ssize_t count = PySequence_Size(ids), num_hashes = PySequence_Size(hashes);
    if (count < 0 || num_hashes < 0) return NULL;
    if (count != num_hashes || payload_bytes > stride)
        return PyErr_Format(PyExc_ValueError, "%zd ids, %zd hashes; %zd bytes of pages of %zd", count, num_hashes,
                            payload_bytes, stride);
    if (get_weights(weights_object, payload_bytes, &weights) < 0) return NULL;
    if (PyObject_GetBuffer(pages_object, &pages, PyBUF_SIMPLE) == 0) {
        Job *jobs = new_jobs(count);
        if (jobs != NULL && place_pages(jobs, &pages, stride, ids, hashes, payload_bytes) == 0)
            result = run_all(jobs, count, payload_bytes, weights.buf);
        PyMem_Free(jobs);
        PyBuffer_Release(&pages);
    }
    PyBuffer_Release(&weights);
    return result;
}

/* Views of one side of a batch of copies; released from the last to the first. */
static void release_views(Py_buffer *views, Py_ssize_t count) {
    while (count > 0) PyBuffer_Release(&views[--count]);
}

static Py_ssize_t get_views(PyObject *sequence, Py_ssize_t count, int flags, Py_buffer *views) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        int got = item == NULL ? -1 : PyObject_GetBuffer(item, &views[i], flags);
        Py_XDECREF(item);
        if (got < 0) {
            release_views(views, i);
            return -1;
        }
    }
    return count;
}

static int place_copies(Job *jobs, const Py_buffer *targets, const Py_buffer *sources, Py_ssize_t count,
                        PyObject *hashes, Py_ssize_t payload_bytes) {
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t length = sources[i].len;
        if (length < payload_bytes || (targets != NULL && targets[i].len != length)) {
            PyErr_Format(PyExc_ValueError, "%zd bytes of a source of %zd to a target of %zd", payload_bytes, length,
                         targets != NULL ? targets[i].len : length);
            return -1;
        }
        jobs[i].source = sources[i].buf;
        jobs[i].target = targets != NULL ? targets[i].buf : NULL;
        jobs[i].copy_bytes = (size_t)length;
        if (seed_job(&jobs[i], hashes, i, payload_bytes) < 0) return -1;
    }
    return 0;
}

PyDoc_STRVAR(copy_sums_doc, "copy_sums(targets or None, sources, payload_bytes, hashes, weights) -> list of sums");

static PyObject *copy_sums(PyObject *module, PyObject *args) {
    PyObject *targets, *sources, *hashes, *weights_object, *result = NULL;
    Py_ssize_t payload_bytes;
    Py_buffer weights;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOnOO", &targets, &sources, &payload_bytes, &hashes, &weights_object)) return NULL;
    int copying = targets != Py_None;
    Py_ssize_t count = PySequence_Size(sources), num_hashes = PySequence_Size(hashes);
    Py_ssize_t num_targets = copying ? PySequence_Size(targets) : count;
    if (count < 0 || num_hashes < 0 || num_targets < 0) return NULL;
    if (count != num_hashes || count != num_targets)
        return PyErr_Format(PyExc_ValueError, "%zd targets, %zd sources, %zd hashes", num_targets, count, num_hashes);
    if (get_weights(weights_object, payload_bytes, &weights) < 0) return NULL;
    Job *jobs = new_jobs(count);
    Py_buffer *views = PyMem_Calloc(count ? 2 * (size_t)count : 1, sizeof(Py_buffer));
    Py_ssize_t from = -1, to = -1;
    if (jobs != NULL && views != NULL) from = get_views(sources, count, PyBUF_SIMPLE, views);
    if (from >= 0) to = copying ? get_views(targets, count, PyBUF_WRITABLE, views + count) : 0;
    if (to >= 0 && place_copies(jobs, copying ? views + count : NULL, views, count, hashes, payload_bytes) == 0)
        result = run_all(jobs, count, payload_bytes, weights.buf);
    if (to > 0) release_views(views + count, to);
    if (from > 0) release_views(views, from);
    if (views == NULL && !PyErr_Occurred()) PyErr_NoMemory();
    PyMem_Free(views);
    PyMem_Free(jobs);
    PyBuffer_Release(&weights);
    return result;
}

static PyMethodDef methods[] = {
    {"page_sums", page_sums, METH_VARARGS, page_sums_doc},
    {"copy_sums", copy_sums, METH_VARARGS, copy_sums_doc},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) {
    choose_kernel();
    if (PyModule_AddIntConstant(module, "VERSION", 1) < 0) return -1;
    return PyModule_AddStringConstant(module, "KERNEL", kernel_name);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Checksums and copies of pages without Python's lock.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
