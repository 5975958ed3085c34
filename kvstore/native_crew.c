/* Threads that seal and write records of slot files, or read and sum them, and never ask for Python's lock.
 *
 * A batch is many runs, each a file, an offset and records side by side; one call begins it and one waits for its end.
 * What a run came to is an errno, 0 for all of its bytes: whose fault it was is found out in Python, slot by slot.
 */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/uio.h>

#define CREW "epdserve.kvstore.crew"
#define TICKET "epdserve.kvstore.ticket"
#define MAX_THREADS 64
#define MAX_VECTORS 1024 /* IOV_MAX of Linux */

const char new_crew_doc[] = "crew(threads) -> threads that write and read";
const char stop_crew_doc[] = "stop(crew): end its threads once they have nothing to do; nothing can be begun any more";
const char begin_write_doc[] =
    "begin_write(crew, fds, offsets, counts, bodies, split, ends, covers) -> ticket: seal and write runs of records";
const char begin_read_doc[] = "begin_read(crew, fds, offsets, counts, pages, covers) -> ticket: read and sum records";
const char finish_doc[] = "finish(ticket) -> (errno of each run, crc32c of each record read)";

typedef struct Batch Batch;

typedef struct Job {
    struct Job *next;
    Batch *batch;
    int fd, error;
    off_t offset;
    Py_ssize_t first, count; /* of the batch's records */
} Job;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work, over;
    Job *head, *tail;
    int stopping, running; /* threads that were started */
    pthread_t threads[MAX_THREADS];
} Crew;

struct Batch {
    PyObject *owner; /* keeps the crew */
    Crew *crew;
    int writes;
    size_t split, covers;
    Views bodies, ends; /* reads have no ends */
    Py_ssize_t runs, left;
    Job *jobs;
    struct iovec *vectors; /* two a record */
    uint32_t *crcs;
};

/* ---- without Python ---- */

static int move_all(int writes, int fd, struct iovec *vectors, Py_ssize_t count, off_t offset) {
    while (count > 0) {
        int some = count < MAX_VECTORS ? (int)count : MAX_VECTORS;
        ssize_t done = writes ? pwritev(fd, vectors, some, offset) : preadv(fd, vectors, some, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        if (done == 0) return EIO;
        offset += done;
        for (; count > 0 && (size_t)done >= vectors->iov_len; vectors++, count--) done -= (ssize_t)vectors->iov_len;
        if (done > 0) {
            vectors->iov_base = (char *)vectors->iov_base + done;
            vectors->iov_len -= (size_t)done;
        }
    }
    return 0;
}

static void add_vector(struct iovec *vectors, Py_ssize_t *count, void *bytes, size_t length) {
    if (length == 0) return;
    vectors[*count].iov_base = bytes;
    vectors[(*count)++].iov_len = length;
}

static void perform(Job *job) {
    Batch *batch = job->batch;
    const Py_buffer *bodies = batch->bodies.views + job->first;
    struct iovec *vectors = batch->vectors + 2 * job->first;
    uint32_t *crcs = batch->crcs + job->first;
    Py_ssize_t count = 0;
    if (batch->writes) {
        const Py_buffer *ends = batch->ends.views + job->first;
        crc_all(crcs, bodies, job->count, batch->split);
        for (Py_ssize_t i = 0; i < job->count; i++) {
            seal_end(ends[i].buf, batch->covers, crcs[i]);
            add_vector(vectors, &count, bodies[i].buf, batch->split);
            add_vector(vectors, &count, ends[i].buf, (size_t)ends[i].len);
        }
        job->error = move_all(1, job->fd, vectors, count, job->offset);
        return;
    }
    for (Py_ssize_t i = 0; i < job->count; i++) add_vector(vectors, &count, bodies[i].buf, (size_t)bodies[i].len);
    job->error = move_all(0, job->fd, vectors, count, job->offset);
    if (job->error == 0) crc_all(crcs, bodies, job->count, batch->covers);
}

static void *serve(void *argument) {
    Crew *crew = argument;
    pthread_mutex_lock(&crew->lock);
    while (crew->head != NULL || !crew->stopping) {
        Job *job = crew->head;
        if (job == NULL) {
            pthread_cond_wait(&crew->work, &crew->lock);
            continue;
        }
        crew->head = job->next;
        pthread_mutex_unlock(&crew->lock);
        perform(job);
        pthread_mutex_lock(&crew->lock);
        if (--job->batch->left == 0) pthread_cond_broadcast(&crew->over);
    }
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

/* 0, or -1 where the crew has been stopped. */
static int post(Batch *batch) {
    Crew *crew = batch->crew;
    pthread_mutex_lock(&crew->lock);
    int stopped = crew->stopping;
    batch->left = stopped ? 0 : batch->runs;
    for (Py_ssize_t i = 0; i < batch->left; i++) {
        Job *job = &batch->jobs[i];
        if (crew->head == NULL)
            crew->head = job;
        else
            crew->tail->next = job;
        crew->tail = job;
        pthread_cond_signal(&crew->work);
    }
    pthread_mutex_unlock(&crew->lock);
    return stopped ? -1 : 0;
}

static void await(Batch *batch) {
    pthread_mutex_lock(&batch->crew->lock);
    while (batch->left > 0) pthread_cond_wait(&batch->crew->over, &batch->crew->lock);
    pthread_mutex_unlock(&batch->crew->lock);
}

static void dismiss(Crew *crew) {
    pthread_mutex_lock(&crew->lock);
    int running = crew->running;
    crew->stopping = 1;
    crew->running = 0;
    pthread_cond_broadcast(&crew->work);
    pthread_mutex_unlock(&crew->lock);
    for (int i = 0; i < running; i++) pthread_join(crew->threads[i], NULL);
}

/* Signals are for Python's threads. Returns an errno if not one could be started. */
static int start(Crew *crew, int threads) {
    sigset_t all, before;
    int error = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (; error == 0 && crew->running < threads; crew->running += error == 0)
        error = pthread_create(&crew->threads[crew->running], NULL, serve, crew);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return crew->running > 0 ? 0 : error;
}

/* ---- Python's side ---- */

static void free_crew(PyObject *capsule) {
    Crew *crew = PyCapsule_GetPointer(capsule, CREW);
    if (crew == NULL) return;
    Py_BEGIN_ALLOW_THREADS
    dismiss(crew);
    Py_END_ALLOW_THREADS
    pthread_cond_destroy(&crew->work);
    pthread_cond_destroy(&crew->over);
    pthread_mutex_destroy(&crew->lock);
    free(crew);
}

PyObject *new_crew(PyObject *module, PyObject *args) {
    int threads;
    (void)module;
    if (!PyArg_ParseTuple(args, "i", &threads)) return NULL;
    if (threads < 1 || threads > MAX_THREADS) return PyErr_Format(PyExc_ValueError, "%d threads", threads);
    Crew *crew = calloc(1, sizeof(Crew));
    if (crew == NULL) return PyErr_NoMemory();
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->work, NULL);
    pthread_cond_init(&crew->over, NULL);
    PyObject *capsule = PyCapsule_New(crew, CREW, free_crew);
    if (capsule == NULL) {
        free(crew);
        return NULL;
    }
    errno = start(crew, threads);
    if (errno == 0) return capsule;
    PyErr_SetFromErrno(PyExc_OSError);
    Py_DECREF(capsule);
    return NULL;
}

PyObject *stop_crew(PyObject *module, PyObject *args) {
    PyObject *capsule;
    (void)module;
    if (!PyArg_ParseTuple(args, "O", &capsule)) return NULL;
    Crew *crew = PyCapsule_GetPointer(capsule, CREW);
    if (crew == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    dismiss(crew);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void free_batch(Batch *batch) {
    release(&batch->bodies);
    release(&batch->ends);
    Py_XDECREF(batch->owner);
    free(batch->jobs);
    free(batch->vectors);
    free(batch->crcs);
    free(batch);
}

/* Threads may be at it: whoever forgets a ticket waits here. */
static void free_ticket(PyObject *capsule) {
    Batch *batch = PyCapsule_GetPointer(capsule, TICKET);
    if (batch == NULL) return;
    Py_BEGIN_ALLOW_THREADS
    await(batch);
    Py_END_ALLOW_THREADS
    free_batch(batch);
}

static int number(PyObject *sequence, Py_ssize_t at, long long *found) {
    PyObject *item = PySequence_GetItem(sequence, at);
    if (item == NULL) return -1;
    *found = PyLong_AsLongLong(item);
    Py_DECREF(item);
    return *found == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Take the runs down as jobs; -1 with an exception set. */
static int plan(Batch *batch, PyObject *fds, PyObject *offsets, PyObject *counts) {
    Py_ssize_t records = batch->bodies.count, first = 0;
    long long fd, offset, count;
    batch->runs = PySequence_Size(fds);
    if (batch->runs < 0) return -1;
    batch->jobs = calloc(batch->runs ? (size_t)batch->runs : 1, sizeof(Job));
    batch->vectors = calloc(records ? (size_t)records : 1, 2 * sizeof(struct iovec));
    batch->crcs = malloc(sizeof(uint32_t) * (records ? (size_t)records : 1));
    if (batch->jobs == NULL || batch->vectors == NULL || batch->crcs == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < records; i++) batch->crcs[i] = ~(uint32_t)0;
    for (Py_ssize_t i = 0; i < batch->runs; i++) {
        if (number(fds, i, &fd) < 0 || number(offsets, i, &offset) < 0 || number(counts, i, &count) < 0) return -1;
        if (count <= 0 || count > records - first) break;
        Job job = {NULL, batch, (int)fd, 0, (off_t)offset, first, (Py_ssize_t)count};
        batch->jobs[i] = job;
        first += (Py_ssize_t)count;
    }
    if (first == records) return 0;
    PyErr_Format(PyExc_ValueError, "runs of %zd records in all, got %zd", first, records);
    return -1;
}

/* A ticket for a batch that holds its buffers; takes the batch over, whatever happens. */
static PyObject *begin(Batch *batch, PyObject *owner, PyObject *fds, PyObject *offsets, PyObject *counts) {
    PyObject *ticket = NULL;
    batch->crew = PyCapsule_GetPointer(owner, CREW);
    if (batch->crew != NULL && plan(batch, fds, offsets, counts) == 0)
        ticket = PyCapsule_New(batch, TICKET, free_ticket);
    if (ticket == NULL) {
        free_batch(batch);
        return NULL;
    }
    Py_INCREF(owner);
    batch->owner = owner;
    if (post(batch) == 0) return ticket;
    Py_DECREF(ticket);
    return PyErr_Format(PyExc_ValueError, "these threads have been stopped");
}

PyObject *begin_write(PyObject *module, PyObject *args) {
    PyObject *owner, *fds, *offsets, *counts, *bodies, *ends;
    Py_ssize_t split, covers;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOnOn", &owner, &fds, &offsets, &counts, &bodies, &split, &ends, &covers)) return NULL;
    if (split < 0 || covers < 0) return PyErr_Format(PyExc_ValueError, "%zd and %zd bytes", split, covers);
    Batch *batch = calloc(1, sizeof(Batch));
    if (batch == NULL) return PyErr_NoMemory();
    batch->writes = 1;
    batch->split = (size_t)split;
    batch->covers = (size_t)covers;
    int held = hold(bodies, PyBUF_SIMPLE, split, &batch->bodies) == 0 &&
               hold(ends, PyBUF_WRITABLE, covers + HEADER_REST + NAME_BYTES, &batch->ends) == 0;
    if (held && batch->bodies.count == batch->ends.count) return begin(batch, owner, fds, offsets, counts);
    if (held) PyErr_Format(PyExc_ValueError, "%zd bodies, %zd ends", batch->bodies.count, batch->ends.count);
    free_batch(batch);
    return NULL;
}

PyObject *begin_read(PyObject *module, PyObject *args) {
    PyObject *owner, *fds, *offsets, *counts, *pages;
    Py_ssize_t covers;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOn", &owner, &fds, &offsets, &counts, &pages, &covers)) return NULL;
    if (covers < 0) return PyErr_Format(PyExc_ValueError, "%zd bytes", covers);
    Batch *batch = calloc(1, sizeof(Batch));
    if (batch == NULL) return PyErr_NoMemory();
    batch->covers = (size_t)covers;
    if (hold(pages, PyBUF_WRITABLE, covers, &batch->bodies) == 0) return begin(batch, owner, fds, offsets, counts);
    free_batch(batch);
    return NULL;
}

static PyObject *errors_of(const Batch *batch) {
    PyObject *list = PyList_New(batch->runs);
    for (Py_ssize_t i = 0; list != NULL && i < batch->runs; i++) {
        PyObject *error = PyLong_FromLong(batch->jobs[i].error);
        if (error == NULL || PyList_SetItem(list, i, error) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *crcs_of(const Batch *batch) {
    Py_ssize_t count = batch->writes ? 0 : batch->bodies.count;
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *crc = PyLong_FromUnsignedLong(~batch->crcs[i] & 0xFFFFFFFFu);
        if (crc == NULL || PyList_SetItem(list, i, crc) < 0) Py_CLEAR(list);
    }
    return list;
}

PyObject *finish(PyObject *module, PyObject *args) {
    PyObject *ticket;
    (void)module;
    if (!PyArg_ParseTuple(args, "O", &ticket)) return NULL;
    Batch *batch = PyCapsule_GetPointer(ticket, TICKET);
    if (batch == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    await(batch);
    Py_END_ALLOW_THREADS
    PyObject *errors = errors_of(batch), *crcs = crcs_of(batch);
    if (errors != NULL && crcs != NULL) return Py_BuildValue("(NN)", errors, crcs);
    Py_XDECREF(errors);
    Py_XDECREF(crcs);
    return NULL;
}
