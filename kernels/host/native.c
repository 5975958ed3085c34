/* Functions of rows on the host, each in one call: what a small step pays for is the number of calls. Formulas stand in
 * the families' reference.py; rows.py says when these are used.
 *
 * Tensors come as addresses, sizes as integers, numbers as floats. A row's result depends on that row alone: every sum
 * has one order, whatever stands beside. Lanes are tokens or channels that are computed alike, side by side.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
#define MAX_COPIES 4
#define MAX_EXPERTS 512
#define LONG_WORK ((Py_ssize_t)1 << 16) /* elements from which on Python's lock is given away */

static float E4M3[256], E8M0[256];
static const float E2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static void fill_tables(void) {
    for (int code = 0; code < 256; code++) {
        int exponent = code >> 3 & 15, mantissa = code & 7;
        float value = exponent ? ldexpf(1.0f + mantissa / 8.0f, exponent - 7) : ldexpf(mantissa / 8.0f, -6);
        E4M3[code] = code & 128 ? -value : value;
        if (exponent == 15 && mantissa == 7) {
            uint32_t not_a_number = code & 128 ? 0xFFF00000 : 0x7FF00000; /* PyTorch's */
            memcpy(&E4M3[code], &not_a_number, sizeof not_a_number);
        }
        E8M0[code] = code == 255 ? NAN : ldexpf(1.0f, code - 127);
    }
}

/* Sum of squares in one order: eight running sums, added pairwise at the end. */
static float sum_squares(const float *x, Py_ssize_t n) {
    float lane[LANES] = {0};
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) lane[k] += x[i + k] * x[i + k];
    for (int k = 0; i < n; i++, k++) lane[k] += x[i] * x[i];
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

static void run_rates(const float *x, float *out, Py_ssize_t rows, Py_ssize_t n, float eps) {
    for (Py_ssize_t r = 0; r < rows; r++) out[r] = 1.0f / sqrtf(sum_squares(x + r * n, n) / (float)n + eps);
}

static void run_rms_norm(const float *x, const float *weight, float *out, Py_ssize_t rows, Py_ssize_t n, float eps) {
    for (Py_ssize_t r = 0; r < rows; r++, x += n, out += n) {
        float rate = 1.0f / sqrtf(sum_squares(x, n) / (float)n + eps);
        for (Py_ssize_t i = 0; i < n; i++) out[i] = x[i] * rate * weight[i];
    }
}

static void run_rope(const float *x, float *out, Py_ssize_t rows, Py_ssize_t heads, Py_ssize_t width, const float *cosine,
                     const float *sine, Py_ssize_t pairs, float sign) {
    Py_ssize_t plain = width - 2 * pairs;
    for (Py_ssize_t r = 0; r < rows; r++, cosine += pairs, sine += pairs) {
        for (Py_ssize_t h = 0; h < heads; h++, x += width, out += width) {
            memcpy(out, x, plain * sizeof(float));
            for (Py_ssize_t i = 0; i < pairs; i++) {
                float a = x[plain + 2 * i], b = x[plain + 2 * i + 1], s = sign * sine[i];
                out[plain + 2 * i] = a * cosine[i] - b * s;
                out[plain + 2 * i + 1] = a * s + b * cosine[i];
            }
        }
    }
}

/* Eight tokens at a time: cell[i][j][lane]. Lines are summed from the first element to the last. */
static void sinkhorn(float cell[MAX_COPIES][MAX_COPIES][LANES], int n, int iters, float eps) {
    for (int step = 1; step < 2 * iters; step++) {
        for (int line = 0; line < n; line++) {
            float total[LANES] = {0};
            int by_row = step % 2 == 0;
            for (int k = 0; k < n; k++)
                for (int l = 0; l < LANES; l++) total[l] += by_row ? cell[line][k][l] : cell[k][line][l];
            for (int l = 0; l < LANES; l++) total[l] += eps;
            for (int k = 0; k < n; k++) {
                float *part = by_row ? cell[line][k] : cell[k][line];
                for (int l = 0; l < LANES; l++) part[l] /= total[l];
            }
        }
    }
}

typedef struct {
    const float *mixes, *rate, *scale, *base;
    float *pre, *post, *comb;
    int copies, iters;
    float eps;
} Mix;

static void mix_lanes(const Mix *m, Py_ssize_t first, int count) {
    float cell[MAX_COPIES][MAX_COPIES][LANES];
    int n = m->copies, columns = n * (n + 2);
    for (int l = 0; l < LANES; l++) {
        Py_ssize_t t = first + (l < count ? l : 0);
        const float *row = m->mixes + t * columns;
        float rate = m->rate ? m->rate[t] : 1.0f;
        for (int c = 0; c < 2 * n && l < count; c++) {
            float gate = 1.0f / (1.0f + expf(-(row[c] * rate * m->scale[c / n] + m->base[c])));
            if (c < n) m->pre[t * n + c] = gate + m->eps;
            else m->post[t * n + c - n] = gate * 2.0f;
        }
        for (int i = 0; i < n; i++) {
            float value[MAX_COPIES], largest = -INFINITY, total = 0.0f;
            for (int j = 0; j < n; j++) {
                int c = 2 * n + i * n + j;
                value[j] = row[c] * rate * m->scale[2] + m->base[c];
                largest = fmaxf(largest, value[j]);
            }
            for (int j = 0; j < n; j++) total += value[j] = expf(value[j] - largest);
            for (int j = 0; j < n; j++) cell[i][j][l] = value[j] / total + m->eps;
        }
    }
    sinkhorn(cell, n, m->iters, m->eps);
    for (int l = 0; l < count; l++)
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++) m->comb[((first + l) * n + i) * n + j] = cell[i][j][l];
}

static void run_coefficients(const float *const *in, float *const *out, Py_ssize_t tokens, int copies, int iters,
                             float eps) {
    Mix m = {in[0], in[1], in[2], in[3], out[0], out[1], out[2], copies, iters, eps};
    for (Py_ssize_t t = 0; t < tokens; t += LANES) mix_lanes(&m, t, tokens - t < LANES ? (int)(tokens - t) : LANES);
}

static void run_fp8(const uint8_t *codes, Py_ssize_t stride, const uint8_t *scales, Py_ssize_t scale_stride, float *out,
                    Py_ssize_t rows, Py_ssize_t n) {
    for (Py_ssize_t r = 0; r < rows; r++, codes += stride, scales += scale_stride, out += n)
        for (Py_ssize_t i = 0; i < n; i++) out[i] = E4M3[codes[i]] * E8M0[scales[i / 32]];
}

/* The code of a magnitude of at most 448: to nearest even, as the float unit rounds. */
static uint8_t e4m3_code(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint8_t sign = (uint8_t)(bits >> 24 & 128);
    bits &= 0x7FFFFFFF;
    if (bits < 0x3C800000) return sign | (uint8_t)lrintf(fabsf(value) * 512.0f); /* below 2^-6 steps are 2^-9 */
    return sign | (uint8_t)(((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

/* Codes and scales of groups of 32; 0 if something is no finite number, which the reference has rules for. */
static int run_encode_fp8(const float *x, uint8_t *codes, uint8_t *scales, Py_ssize_t groups) {
    for (Py_ssize_t g = 0; g < groups; g++, x += 32, codes += 32) {
        float largest = 1e-4f, scale;
        for (int i = 0; i < 32; i++) {
            if (!(fabsf(x[i]) <= 3.4e38f)) return 0;
            largest = fmaxf(largest, fabsf(x[i]));
        }
        uint32_t bits;
        memcpy(&bits, &largest, sizeof bits);
        bits = (bits + 0x7FFFFF - 0x600000 - (8u << 23)) & 0x7F800000; /* 448 = 1.75 * 2^8: the least power that fits */
        memcpy(&scale, &bits, sizeof scale);
        scales[g] = (uint8_t)(bits >> 23);
        for (int i = 0; i < 32; i++) codes[i] = e4m3_code(x[i] / scale);
    }
    return 1;
}

/* n values in groups; a byte holds two, the even channel low. */
static void run_fp4(const uint8_t *codes, Py_ssize_t stride, const uint8_t *scales, Py_ssize_t scale_stride, float *out,
                    Py_ssize_t rows, Py_ssize_t n, Py_ssize_t group, const float *scale_table) {
    for (Py_ssize_t r = 0; r < rows; r++, codes += stride, scales += scale_stride) {
        for (Py_ssize_t i = 0; i < n; i += group, out += group) {
            float scale = scale_table[scales[i / group]];
            for (Py_ssize_t k = 0; k < group / 2; k++) {
                uint8_t byte = codes[i / 2 + k];
                out[2 * k] = E2M1[byte & 15] * scale;
                out[2 * k + 1] = E2M1[byte >> 4] * scale;
            }
        }
    }
}

static void run_swiglu(const float *gate, const float *up, Py_ssize_t gate_stride, Py_ssize_t up_stride, float *out,
                       Py_ssize_t rows, Py_ssize_t n, float limit) {
    for (Py_ssize_t r = 0; r < rows; r++, gate += gate_stride, up += up_stride, out += n)
        for (Py_ssize_t i = 0; i < n; i++) {
            float g = gate[i] > limit ? limit : gate[i];
            float u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
            out[i] = g / (expf(-g) + 1.0f) * u;
        }
}

static void run_route(const float *logits, const float *bias, Py_ssize_t bias_stride, int64_t *chosen, float *weights,
                      Py_ssize_t rows, Py_ssize_t experts, Py_ssize_t k, float scaling) {
    float affinity[MAX_EXPERTS], score[MAX_EXPERTS];
    for (Py_ssize_t r = 0; r < rows; r++, logits += experts, bias += bias_stride, chosen += k, weights += k) {
        for (Py_ssize_t e = 0; e < experts; e++) {
            float x = logits[e];
            affinity[e] = sqrtf(log1pf(expf(-fabsf(x))) + (x > 0.0f ? x : 0.0f));
            score[e] = affinity[e] + bias[e];
        }
        float total = 0.0f;
        for (Py_ssize_t i = 0; i < k; i++) {
            Py_ssize_t best = -1;
            for (Py_ssize_t e = 0; e < experts; e++) /* a score that is no number is never chosen before another */
                if (!isnan(affinity[e]) && (best < 0 || score[e] > score[best])) best = e;
            if (best < 0) best = i;
            chosen[i] = best;
            weights[i] = affinity[best];
            total += weights[i];
            score[best] = -INFINITY;
        }
        for (Py_ssize_t i = 0; i < k; i++) weights[i] = weights[i] / (total + 1e-20f) * scaling;
    }
}

/* -- calls ---------------------------------------------------------------------------------------------------------- */

static int read_numbers(PyObject *const *args, Py_ssize_t given, const char *kinds, void **p, Py_ssize_t *n, double *f) {
    if (given != (Py_ssize_t)strlen(kinds)) {
        PyErr_Format(PyExc_TypeError, "%zd arguments for \"%s\"", given, kinds);
        return 0;
    }
    for (Py_ssize_t i = 0; i < given; i++) {
        if (kinds[i] == 'p') *p++ = PyLong_AsVoidPtr(args[i]);
        else if (kinds[i] == 'n') *n++ = PyLong_AsSsize_t(args[i]);
        else *f++ = PyFloat_AsDouble(args[i]);
    }
    return PyErr_Occurred() == NULL;
}

#define CALL(name, kinds, work, body)                                                             \
    static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t given) {              \
        void *p[10];                                                                              \
        Py_ssize_t n[10];                                                                         \
        double f[4];                                                                              \
        (void)self;                                                                               \
        if (!read_numbers(args, given, kinds, p, n, f)) return NULL;                              \
        PyThreadState *state = (work) >= LONG_WORK ? PyEval_SaveThread() : NULL;                  \
        body;                                                                                     \
        if (state) PyEval_RestoreThread(state);                                                   \
        Py_RETURN_NONE;                                                                           \
    }

CALL(rates, "ppnnf", n[0] * n[1], run_rates(p[0], p[1], n[0], n[1], (float)f[0]))
CALL(rms_norm, "pppnnf", n[0] * n[1], run_rms_norm(p[0], p[1], p[2], n[0], n[1], (float)f[0]))
CALL(rope, "ppnnnppnf", n[0] * n[1] * n[2],
     run_rope(p[0], p[1], n[0], n[1], n[2], p[2], p[3], n[3], (float)f[0]))
CALL(coefficients, "pppppppnnnf", n[0] * 512,
     run_coefficients((const float *const *)p, (float *const *)p + 4, n[0], (int)n[1], (int)n[2], (float)f[0]))
CALL(decode_fp8, "pnpnpnn", n[2] * n[3], run_fp8(p[0], n[0], p[1], n[1], p[2], n[2], n[3]))
CALL(decode_fp4_e4m3, "pnpnpnn", n[2] * n[3], run_fp4(p[0], n[0], p[1], n[1], p[2], n[2], n[3], 16, E4M3))
CALL(decode_fp4_e8m0, "pnpnpnn", n[2] * n[3], run_fp4(p[0], n[0], p[1], n[1], p[2], n[2], n[3], 32, E8M0))
CALL(swiglu, "ppnnpnnf", n[2] * n[3], run_swiglu(p[0], p[1], n[0], n[1], p[2], n[2], n[3], (float)f[0]))
CALL(route, "ppnppnnnf", n[1] * n[2] * n[3],
     run_route(p[0], p[1], n[0], p[2], p[3], n[1], n[2], n[3], (float)f[0]))

static PyObject *encode_fp8(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    void *p[3];
    Py_ssize_t groups;
    (void)self;
    if (!read_numbers(args, given, "pppn", p, &groups, NULL)) return NULL;
    return PyBool_FromLong(run_encode_fp8(p[0], p[1], p[2], groups));
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    METHOD(rates),           METHOD(rms_norm), METHOD(rope),  METHOD(coefficients), METHOD(decode_fp8),
    METHOD(decode_fp4_e4m3), METHOD(decode_fp4_e8m0), METHOD(encode_fp8), METHOD(swiglu), METHOD(route), {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) {
    fill_tables();
    if (PyModule_AddIntConstant(module, "MAX_COPIES", MAX_COPIES) < 0) return -1;
    if (PyModule_AddIntConstant(module, "MAX_EXPERTS", MAX_EXPERTS) < 0) return -1;
    return PyModule_AddIntConstant(module, "VERSION", 1);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill_module}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Functions of rows on the host.", 0, methods, slots, NULL, NULL, NULL,
};
PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
