/* The loops of rules.c for one element type. Included once for each, with T, ROOT and NAME(x) defined. Flags are
 * constants where these are inlined, so that each loop has no branch. Values `v` and slots `m` and `s` are read, and
 * written to `w`, `p` and `q`, which may be the same memory. */

INLINED void NAME(momentum_loop)(const T *v, const T *d, const T *m, T *w, T *p, size_t n, T decay, T momentum,
                                 T undamped, T step, int decays, int state, int nesterov) {
    INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        T g = decays ? v[i] * decay + d[i] : d[i];
        T direction = g;
        if (state) {
            T after = state == FIRST ? g : m[i] * momentum + g * undamped;
            p[i] = after;
            direction = nesterov ? after * momentum + g : after;
        }
        w[i] = v[i] + direction * step;
    }
}

VECTORIZED static void NAME(momentum)(const T *v, const T *d, const T *m, T *w, T *p, size_t n, const double *o,
                                      int64_t updates, double factor) {
    T decay = (T)o[4], momentum = (T)o[1], undamped = (T)(1.0 - o[2]), step = (T)(-(o[0] * factor));
    int state = !m || o[1] == 0.0 ? NONE : updates == 1 ? FIRST : LATER, nesterov = o[3] != 0.0;
#define RUN(DECAYS, STATE, NESTEROV) \
    NAME(momentum_loop)(v, d, m, w, p, n, decay, momentum, undamped, step, DECAYS, STATE, NESTEROV)
#define RUN_STATE(DECAYS)                                                     \
    do {                                                                      \
        if (state == NONE) RUN(DECAYS, NONE, 0);                              \
        else if (state == FIRST && nesterov) RUN(DECAYS, FIRST, 1);           \
        else if (state == FIRST) RUN(DECAYS, FIRST, 0);                       \
        else if (nesterov) RUN(DECAYS, LATER, 1);                             \
        else RUN(DECAYS, LATER, 0);                                           \
    } while (0)
    if (m && state == NONE) memmove(p, m, n * sizeof(T));
    if (o[4] != 0.0) RUN_STATE(1);
    else RUN_STATE(0);
#undef RUN_STATE
#undef RUN
}

INLINED void NAME(velocity_loop)(const T *v, const T *d, const T *m, T *w, T *p, size_t n, T kept, T momentum, T step,
                                 int state, int nesterov) {
    INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        T value = v[i] * kept, own = d[i] * step;
        if (state) {
            T after = m[i] * momentum + own;
            p[i] = after;
            if (nesterov) value = value + after * momentum;
            else own = after;
        }
        w[i] = value + own;
    }
}

VECTORIZED static void NAME(velocity)(const T *v, const T *d, const T *m, T *w, T *p, size_t n, const double *o,
                                      double factor) {
    double rate = o[0] * factor;
    T kept = (T)(1.0 - rate * o[3]), momentum = (T)o[1], step = (T)-rate;
    if (m && o[1] == 0.0) memmove(p, m, n * sizeof(T));
    if (!m || o[1] == 0.0) NAME(velocity_loop)(v, d, m, w, p, n, kept, momentum, step, 0, 0);
    else if (o[2] != 0.0) NAME(velocity_loop)(v, d, m, w, p, n, kept, momentum, step, 1, 1);
    else NAME(velocity_loop)(v, d, m, w, p, n, kept, momentum, step, 1, 0);
}

INLINED void NAME(adagrad_loop)(const T *v, const T *d, const T *s, T *w, T *q, size_t n, T decay, T kept, T epsilon,
                                T step, int decays, int in_root) {
    INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        T g = decays ? v[i] * decay + d[i] : d[i];
        T sum = s[i] + g * g;
        q[i] = sum;
        T root = in_root ? ROOT(sum + epsilon) : ROOT(sum) + epsilon;
        w[i] = v[i] * kept + g / root * step;
    }
}

VECTORIZED static void NAME(adagrad)(const T *v, const T *d, const T *s, T *w, T *q, size_t n, const double *o,
                                     int64_t updates, double factor) {
    double rate = o[0] * factor;
    int decoupled = o[6] != 0.0, decays = !decoupled && o[5] != 0.0, in_root = o[3] != 0.0;
    T decay = (T)o[5], kept = (T)(decoupled ? 1.0 - rate * o[5] : 1.0), epsilon = (T)o[2];
    T step = (T)(-rate / (1.0 + (double)(updates - 1) * o[1]));
#define RUN(DECAYS, IN_ROOT) NAME(adagrad_loop)(v, d, s, w, q, n, decay, kept, epsilon, step, DECAYS, IN_ROOT)
    if (decays && in_root) RUN(1, 1);
    else if (decays) RUN(1, 0);
    else if (in_root) RUN(0, 1);
    else RUN(0, 0);
#undef RUN
}

INLINED void NAME(adam_loop)(const T *v, const T *d, const T *m, const T *s, T *w, T *p, T *q, size_t n, T decay,
                             T kept, T beta1, T rest1, T beta2, T rest2, T epsilon, T step, int decays) {
    INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        T g = decays ? v[i] * decay + d[i] : d[i];
        T mean = m[i] * beta1 + g * rest1;
        T squares = s[i] * beta2 + g * g * rest2;
        p[i] = mean;
        q[i] = squares;
        w[i] = v[i] * kept + mean / (ROOT(squares) + epsilon) * step;
    }
}

VECTORIZED static void NAME(adam)(const T *v, const T *d, const T *m, const T *s, T *w, T *p, T *q, size_t n,
                                  const double *o, int64_t updates, double factor) {
    double rate = o[0] * factor, correction = sqrt(1.0 - pow(o[8], (double)updates));
    int decoupled = o[6] != 0.0, decays = !decoupled && o[5] != 0.0;
    T kept = (T)(decoupled ? 1.0 - rate * o[5] : 1.0), decay = (T)o[5];
    T beta1 = (T)o[1], rest1 = (T)(1.0 - o[1]), beta2 = (T)o[2], rest2 = (T)(1.0 - o[2]);
    T epsilon = (T)(o[3] * (o[4] != 0.0 ? 1.0 : correction));
    T step = (T)(-rate * correction / (1.0 - pow(o[7], (double)updates)));
    if (decays) NAME(adam_loop)(v, d, m, s, w, p, q, n, decay, kept, beta1, rest1, beta2, rest2, epsilon, step, 1);
    else NAME(adam_loop)(v, d, m, s, w, p, q, n, decay, kept, beta1, rest1, beta2, rest2, epsilon, step, 0);
}

VECTORIZED static void NAME(add)(const T *v, const T *d, T *w, size_t n, double factor) {
    T scale = (T)factor; /* times 1 changes no bit */
    INDEPENDENT
    for (size_t i = 0; i < n; i++) w[i] = v[i] + d[i] * scale;
}

VECTORIZED static void NAME(mean)(T *restrict target, const char *const *sources, int num_sources, size_t n) {
    const T *restrict first = (const T *)sources[0];
    T scale = (T)(1.0 / num_sources);
    if (num_sources == 2) {
        const T *restrict second = (const T *)sources[1];
        for (size_t i = 0; i < n; i++) target[i] = (first[i] + second[i]) * scale;
        return;
    }
    for (size_t i = 0; i < n; i++) target[i] = first[i];
    for (int k = 1; k < num_sources; k++) {
        const T *restrict source = (const T *)sources[k];
        for (size_t i = 0; i < n; i++) target[i] = target[i] + source[i];
    }
    if (num_sources > 1)
        for (size_t i = 0; i < n; i++) target[i] = target[i] * scale;
}

static void NAME(apply)(const struct ps_rule *rule, const T *v, const T *d, void *const *slots, T *w,
                        void *const *new_slots, int num_slots, size_t n, int64_t updates, double factor) {
    const double *o = rule->options;
    const T *m = num_slots > 0 ? slots[0] : NULL, *s = num_slots > 1 ? slots[1] : NULL;
    T *p = num_slots > 0 ? new_slots[0] : NULL, *q = num_slots > 1 ? new_slots[1] : NULL;
    enum ps_kind kind = (enum ps_kind)(int)rule->kind;
    for (int k = kept_slots[kind]; k < num_slots; k++) memmove(new_slots[k], slots[k], n * sizeof(T));
    switch (kind) {
    case PS_MOMENTUM: NAME(momentum)(v, d, m, w, p, n, o, updates, factor); break;
    case PS_VELOCITY: NAME(velocity)(v, d, m, w, p, n, o, factor); break;
    case PS_ADAGRAD: NAME(adagrad)(v, d, m, w, p, n, o, updates, factor); break;
    case PS_ADAM: NAME(adam)(v, d, m, s, w, p, q, n, o, updates, factor); break;
    default: NAME(add)(v, d, w, n, factor);
    }
}
