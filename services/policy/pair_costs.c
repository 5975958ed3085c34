/* Costs of pairs of workers: what joint.py computes with numpy, number for number, in one call.
 *
 * joint.py has the formulas and says what the arrays are; here they are worked out worker by worker, in the same order of
 * operations, so that both give the same bits. Products are not contracted into fused ones (-ffp-contract=off).
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define MAX_SHORTLIST 64
#define MAX_PAIRED (2 * MAX_SHORTLIST) /* of decode workers: the best, and one on the machine of each prefill worker */

enum { P_MACHINES, P_AHEAD, P_SPEED, P_HITS, P_FETCH, P_TROUBLE, PREFILL_ARRAYS };
enum { D_MACHINES, D_RUNNING, D_HELD, D_REMAINING, D_TOTAL, D_STEP, D_REQUEST, D_TOKEN, D_HITS, D_TROUBLE, DECODE_ARRAYS };

typedef struct {
    double prompt, rerun, token_bytes, ttft_s, tpot_s, mean, high;
    double prefill_crowd, decode_crowd, foresight, miss, overflow;
    double same_speed, other_speed, latency_s, other_latency_s, fixed_bytes, use_transfer;
} Numbers;

typedef struct {
    double ready_s, others, hit, compute;
} Prefill;

typedef struct {
    double now_s, cost;
} Decode;

/* Places of the least costs so far, in order; of equals, the one that came first. */
typedef struct {
    Py_ssize_t limit, count, place[MAX_SHORTLIST];
    double cost[MAX_SHORTLIST];
} Best;

static void offer(Best *best, Py_ssize_t place, double cost) {
    Py_ssize_t at = best->count;
    if (at == best->limit) {
        if (!(cost < best->cost[at - 1])) return;
        at--;
    } else {
        best->count++;
    }
    for (; at > 0 && cost < best->cost[at - 1]; at--) {
        best->place[at] = best->place[at - 1];
        best->cost[at] = best->cost[at - 1];
    }
    best->place[at] = place;
    best->cost[at] = cost;
}

static double late(double seconds, double target_s, double miss) {
    double share = seconds / target_s, excess = share - 1;
    return (excess > 0 ? excess : 0) * miss + share;
}

static Prefill prefill(double *const *p, Py_ssize_t workers, Py_ssize_t tiers, int own_speeds, Py_ssize_t at,
                       const Numbers *n) {
    double speed = p[P_SPEED][at], best_s = 0, fetch_s = 0, before = 0;
    Prefill found = {0, 0, 0, 0};
    for (Py_ssize_t tier = 0; tier < tiers; tier++) {
        double hit = p[P_HITS][tier * workers + at];
        if (hit > n->prompt - 1) hit = n->prompt - 1;
        double compute = n->prompt - hit;
        if (n->rerun > 0) compute = hit > n->rerun ? compute + n->rerun : n->prompt;
        double seconds = compute / speed;
        if (tier) {
            double fetch = p[P_FETCH][own_speeds ? tier * workers + at : tier];
            double more_s = (hit - before) * (n->token_bytes / fetch);
            fetch_s = tier == 1 ? more_s : fetch_s + more_s;
        }
        before = hit;
        if (!tier || seconds + fetch_s < best_s) {
            best_s = tier ? seconds + fetch_s : seconds;
            found.hit = hit;
            found.compute = compute;
        }
    }
    found.ready_s = p[P_AHEAD][at] / speed + best_s + p[P_TROUBLE][at];
    found.others = n->prefill_crowd * (found.compute / speed) / n->ttft_s;
    return found;
}

static Decode decode(double *const *d, Py_ssize_t at, const Numbers *n) {
    double running = d[D_RUNNING][at], held = d[D_HELD][at], remaining = d[D_REMAINING][at], request = d[D_REQUEST][at];
    double slower_s = request + d[D_TOKEN][at] * (n->prompt + n->mean / 2);
    double now_s = d[D_STEP][at] + request * running + d[D_TOKEN][at] * held + slower_s;
    double company = remaining / n->mean;
    if (running < company) company = running;
    double fewer = n->foresight * (running - company);
    double others = n->decode_crowd * slower_s * (running - fewer) / n->tpot_s;
    double fullness = (held + remaining + n->prompt + n->high) / d[D_TOTAL][at];
    double overflow = n->overflow * (fullness > 1 ? fullness : 0.0);
    return (Decode){now_s, late(now_s - request * fewer, n->tpot_s, n->miss) + others + overflow};
}

/* Decode workers to look at, in order: the best of all, and the best on the machine of each prefill worker in question. */
static Py_ssize_t paired(const int64_t *machines, Py_ssize_t count, const Decode *decodes, const Best *best,
                         const int64_t *near, Py_ssize_t nears, Py_ssize_t *chosen) {
    Py_ssize_t found = 0, first[MAX_SHORTLIST];
    for (Py_ssize_t i = 0; i < nears; i++) first[i] = -1;
    for (Py_ssize_t at = 0; at < count && nears; at++)
        for (Py_ssize_t i = 0; i < nears; i++)
            if (machines[at] == near[i] && (first[i] < 0 || decodes[at].cost < decodes[first[i]].cost)) first[i] = at;
    for (Py_ssize_t i = 0; i < best->count; i++) chosen[found++] = best->place[i];
    for (Py_ssize_t i = 0; i < nears; i++)
        if (first[i] >= 0) chosen[found++] = first[i];
    Py_ssize_t kept = 0; /* sorted, each once */
    for (Py_ssize_t i = 0; i < found; i++) {
        Py_ssize_t place = chosen[i], at = kept;
        while (at > 0 && chosen[at - 1] > place) at--;
        if (at > 0 && chosen[at - 1] == place) continue;
        memmove(chosen + at + 1, chosen + at, sizeof *chosen * (size_t)(kept - at));
        chosen[at] = place;
        kept++;
    }
    return kept;
}

static PyObject *places(const Py_ssize_t *values, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *value = PyLong_FromSsize_t(values[i]);
        if (value == NULL || PyList_SetItem(list, i, value) < 0) Py_CLEAR(list);
    }
    return list;
}

/* (rows, columns, costs, ttft_s, tpot_s, hits, compute): places, then bytes of doubles. */
static PyObject *pairs(const int64_t *p_machines, const Prefill *prefills, const Best *rows,
                       double *const *d, const int64_t *d_machines, const Decode *decodes, const Py_ssize_t *columns,
                       Py_ssize_t width, const Numbers *n) {
    double costs[MAX_SHORTLIST * MAX_PAIRED], seen_s[MAX_SHORTLIST * MAX_PAIRED]; /* 128 KiB of a stack of megabytes */
    double tpot_s[MAX_PAIRED], hits[MAX_SHORTLIST], compute[MAX_SHORTLIST];
    for (Py_ssize_t r = 0; r < rows->count; r++) {
        const Prefill *one = &prefills[rows->place[r]];
        hits[r] = one->hit;
        compute[r] = one->compute;
        for (Py_ssize_t c = 0; c < width; c++) {
            Py_ssize_t at = columns[c];
            double missing = n->prompt - d[D_HITS][at];
            missing = (missing > 0 ? missing : 0) * n->token_bytes;
            int same = p_machines[rows->place[r]] == d_machines[at];
            double transfer_s = (missing + n->fixed_bytes) / (same ? n->same_speed : n->other_speed);
            transfer_s = (same ? n->latency_s : n->other_latency_s) + transfer_s;
            double seen = one->ready_s + transfer_s + (d[D_STEP][at] + d[D_TROUBLE][at]);
            double counted = n->use_transfer > 0 ? seen : seen - transfer_s;
            seen_s[r * width + c] = seen;
            costs[r * width + c] = late(counted, n->ttft_s, n->miss) + (one->others + decodes[at].cost);
            tpot_s[c] = decodes[at].now_s;
        }
    }
    Py_ssize_t cells = rows->count * width * (Py_ssize_t)sizeof(double), size = (Py_ssize_t)sizeof(double);
    return Py_BuildValue("(NNy#y#y#y#y#)", places(rows->place, rows->count), places(columns, width), (char *)costs, cells,
                         (char *)seen_s, cells, (char *)tpot_s, width * size, (char *)hits, rows->count * size,
                         (char *)compute, rows->count * size);
}

/* ---- Python's side ---- */

typedef struct {
    Py_ssize_t count;
    Py_buffer views[PREFILL_ARRAYS + DECODE_ARRAYS];
} Views;

static void release(Views *views) {
    while (views->count > 0) PyBuffer_Release(&views->views[--views->count]);
}

/* Arrays of a tuple: the first of int64, the others of doubles; each contiguous. */
static int hold(PyObject *arrays, Py_ssize_t count, Views *views, void **into) {
    if (!PyTuple_Check(arrays) || PyTuple_Size(arrays) != count) {
        PyErr_Format(PyExc_TypeError, "a tuple of %zd arrays", count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_buffer *view = &views->views[views->count];
        if (PyObject_GetBuffer(PyTuple_GetItem(arrays, i), view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) return -1;
        views->count++;
        const char *kind = view->format == NULL ? "B" : view->format;
        if (view->itemsize != 8 || kind[1] || (i ? kind[0] != 'd' : kind[0] != 'l' && kind[0] != 'q')) {
            PyErr_SetString(PyExc_TypeError, "machines are int64, all else float64");
            return -1;
        }
        into[i] = view->buf;
    }
    return 0;
}

static int lengths_fit(const Py_buffer *prefills, const Py_buffer *decodes, Py_ssize_t tiers) {
    Py_ssize_t p = prefills[P_MACHINES].len, d = decodes[D_MACHINES].len;
    int fits = p > 0 && d > 0 && tiers > 0 && prefills[P_HITS].len == tiers * p &&
               (prefills[P_FETCH].len == tiers * p || prefills[P_FETCH].len == tiers * (Py_ssize_t)sizeof(double));
    for (int i = 0; i < PREFILL_ARRAYS; i++) fits &= i == P_HITS || i == P_FETCH || prefills[i].len == p;
    for (int i = 0; i < DECODE_ARRAYS; i++) fits &= decodes[i].len == d;
    if (!fits) PyErr_SetString(PyExc_ValueError, "one element a worker, and one row of hits a tier");
    return fits;
}

static PyObject *weigh_all(double **p, Py_ssize_t prefills, Py_ssize_t tiers, int own_speeds, double **d,
                           Py_ssize_t decodes, Py_ssize_t shortlist, const Numbers *n) {
    Prefill *sources = PyMem_Malloc(sizeof(Prefill) * (size_t)prefills);
    Decode *targets = PyMem_Malloc(sizeof(Decode) * (size_t)decodes);
    PyObject *found = NULL;
    if (sources != NULL && targets != NULL) {
        const int64_t *p_machines = (const int64_t *)p[P_MACHINES], *d_machines = (const int64_t *)d[D_MACHINES];
        Best rows = {.limit = shortlist}, columns = {.limit = shortlist};
        Py_ssize_t chosen[MAX_PAIRED], width = 0;
        int64_t near[MAX_SHORTLIST];
        for (Py_ssize_t at = 0; at < prefills; at++) {
            sources[at] = prefill(p, prefills, tiers, own_speeds, at, n);
            offer(&rows, at, late(sources[at].ready_s, n->ttft_s, n->miss) + sources[at].others);
        }
        for (Py_ssize_t at = 0; at < decodes; at++) {
            targets[at] = decode(d, at, n);
            offer(&columns, at, targets[at].cost);
        }
        for (Py_ssize_t i = 0; i < rows.count; i++) near[i] = p_machines[rows.place[i]];
        width = paired(d_machines, decodes, targets, &columns, near, decodes > shortlist ? rows.count : 0, chosen);
        found = pairs(p_machines, sources, &rows, d, d_machines, targets, chosen, width, n);
    } else {
        PyErr_NoMemory();
    }
    PyMem_Free(sources);
    PyMem_Free(targets);
    return found;
}

PyDoc_STRVAR(weigh_doc, "weigh(prefills, decodes, tiers, shortlist, numbers)\n--\n\n"
                        "(rows, columns, costs, ttft_s, tpot_s, hits, compute) of the pairs worth looking at.");

static PyObject *weigh(PyObject *module, PyObject *args) {
    PyObject *sources, *targets, *found = NULL;
    Py_ssize_t tiers, shortlist;
    Numbers n;
    void *p[PREFILL_ARRAYS], *d[DECODE_ARRAYS];
    Views views = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOnn(dddddddddddddddddd)", &sources, &targets, &tiers, &shortlist, &n.prompt, &n.rerun,
                          &n.token_bytes, &n.ttft_s, &n.tpot_s, &n.mean, &n.high, &n.prefill_crowd, &n.decode_crowd,
                          &n.foresight, &n.miss, &n.overflow, &n.same_speed, &n.other_speed, &n.latency_s,
                          &n.other_latency_s, &n.fixed_bytes, &n.use_transfer))
        return NULL;
    if (shortlist < 1 || shortlist > MAX_SHORTLIST)
        return PyErr_Format(PyExc_ValueError, "a shortlist of 1 to %d", MAX_SHORTLIST);
    if (hold(sources, PREFILL_ARRAYS, &views, p) == 0 && hold(targets, DECODE_ARRAYS, &views, d) == 0 &&
        lengths_fit(views.views, views.views + PREFILL_ARRAYS, tiers)) {
        Py_ssize_t prefills = views.views[P_MACHINES].len / 8, decodes = views.views[PREFILL_ARRAYS].len / 8;
        int own_speeds = views.views[P_FETCH].len == views.views[P_HITS].len;
        found = weigh_all((double **)p, prefills, tiers, own_speeds, (double **)d, decodes, shortlist, &n);
    }
    release(&views);
    return found;
}

static PyMethodDef methods[] = {
    {"weigh", weigh, METH_VARARGS, weigh_doc},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) {
    if (PyModule_AddIntConstant(module, "MAX_SHORTLIST", MAX_SHORTLIST) < 0) return -1;
    return PyModule_AddIntConstant(module, "VERSION", 1);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_pair_costs",
    .m_doc = "Costs of pairs of workers.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__pair_costs(void) { return PyModuleDef_Init(&definition); }
