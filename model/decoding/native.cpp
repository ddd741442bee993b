// One token of every row through a range of blocks: the CPU kernel behind model/decoding/native.py.
//
// The contract is that of model/decoding/blocks.py: embedded input, tables of cosines and sines, a row of the mask,
// the caches, the weights. Nothing here knows a positional scheme. No header of PyTorch is included, so that this
// file builds in seconds; the structs at the end of the first part are mirrored in native.py.
//
// All sums are float32. Loops are written for the compiler's vectoriser (`omp simd` allows it to reorder a sum), so
// the same text serves AVX2, AVX-512 and ARM. Threads split the rows of a matrix and meet at a barrier between phases.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

// --- What the caller hands over (shapes: legend in model/__init__.py) ---

enum Kind : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

struct Matrix {  // row-major; the weight is scales[row] * values[row][column], without scales 1 * values
    const void* values;
    const float* scales;
    int64_t rows, columns;
};

struct Block {
    Matrix qkv, o, gate_up, down;  // qkv: rows of q, then k, then v; gate_up: rows of gate, then up
    const float *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm and k_norm: null without qk_norm
    float *keys, *values;                                   // (B, G, capacity, D)
    int64_t acts;                                           // whether rotation and bias act in this block
};

struct Step {
    int64_t rows, heads, kv_heads, head_dim, width, hidden, slots, capacity;  // slots: keys before this token
    int64_t kind, threads, first, last, pairs, is_adjacent;  // pairs 0: no rotation
    const float *q_cos, *q_sin, *k_cos, *k_sin;
    int64_t rotation_stride;  // floats from row to row, 0: all rows turn alike
    const float *bias, *mask;  // added to the scores where the scheme acts and where not; null: all visible, no bias
    int64_t bias_row_stride, bias_head_stride, mask_row_stride;
    double eps;
    const Block* blocks;
    float* x;                 // (B, C), read and written
    float *projected, *mixed, *gated;  // scratch (B, (H + 2G) D), (B, H D), (B, 2 hidden)
    float* scores;            // scratch (threads, slots + 1)
    const Matrix* head;       // null: stop before the last norm
    const float* last_norm;
    float* logits;            // (B, V)
};

// --- Threads ---

// OpenMP's own barrier may put a thread to sleep at once, which costs more than a phase. This one sleeps only where
// the others are late, because other programs hold the processors.
class Barrier {
  public:
    explicit Barrier(int threads) : threads_(threads) {}

    void wait() {
        const int turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            turn_.notify_all();
            return;
        }
        for (int spins = 0; spins < kSpins; ++spins)
            if (turn_.load(std::memory_order_acquire) != turn) return;
        while (turn_.load(std::memory_order_acquire) == turn) turn_.wait(turn, std::memory_order_acquire);
    }

  private:
    static constexpr int kSpins = 20000;  // some ten microseconds
    const int threads_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> turn_{0};
};

struct Worker {
    int id, count;
    Barrier* barrier;

    // This thread's part of `total` things, in multiples of `unit`.
    int64_t begin(int64_t total, int64_t unit) const { return edge(total, unit, id); }
    int64_t end(int64_t total, int64_t unit) const { return edge(total, unit, id + 1); }

  private:
    int64_t edge(int64_t total, int64_t unit, int part) const {
        const int64_t units = (total + unit - 1) / unit;
        return std::min(total, units * part / count * unit);
    }
};

template <class Body>
void in_parallel(int threads, Body body) {
#ifdef _OPENMP
    std::unique_ptr<Barrier> barrier;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single  // fewer threads may come than were asked for
        barrier.reset(new Barrier(omp_get_num_threads()));
        body(Worker{omp_get_thread_num(), omp_get_num_threads(), barrier.get()});
    }
#else
    Barrier barrier(1);
    body(Worker{0, 1, &barrier});
#endif
}

// --- Small math ---

inline float widened(float value) { return value; }
inline float widened(int8_t value) { return static_cast<float>(value); }
inline float widened(uint16_t value) {  // bfloat16 is the upper half of a float32
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// e^x to 2e-7 (relative), as 2^n e^r with |r| <= ln(2)/2 and the Taylor series of e^r: a loop over it vectorises.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = std::floor(x * 1.44269504f + 0.5f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float series = 1.0f / 5040;
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) series = series * r + c;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return series * power;
}

float dot(const float* a, const float* b, int64_t size) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
    return sum;
}

void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
    const float factor = 1.0f / std::sqrt(dot(x, x, size) / static_cast<float>(size) + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

// gate = silu(gate) * up
void silu_times(float* gate, const float* up, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) gate[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

void turn(float* x, const float* cos, const float* sin, int64_t pairs, bool is_adjacent) {
    const int64_t step = is_adjacent ? 2 : 1, apart = is_adjacent ? 1 : pairs;
    for (int64_t i = 0; i < pairs; ++i) {
        const float a = x[i * step], b = x[i * step + apart];
        x[i * step] = a * cos[i] - b * sin[i];
        x[i * step + apart] = a * sin[i] + b * cos[i];
    }
}

// --- Matrix times vectors: each weight is read once for up to four rows of the batch ---

#if defined(__AVX2__) && defined(__FMA__)
// Eight weights as float32. Left to itself, GCC widens bytes in ten instructions where the processor has one.
inline __m256 lanes(const float* w) { return _mm256_loadu_ps(w); }
inline __m256 lanes(const uint16_t* w) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline __m256 lanes(const int8_t* w) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w))));
}
inline float total(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
#define ROPELAB_LANES 8
#endif

// out[r][n] = sum_i w[r][i] x[n][i] for R rows of the matrix and N of the batch.
template <int R, int N, class W>
inline void dots(const W* w, int64_t columns, const float* x, int64_t x_stride, float (&out)[R][N]) {
    int64_t i = 0;
#ifdef ROPELAB_LANES
    constexpr int U = R * N < 4 ? 4 : R * N < 8 ? 2 : 1;  // sums enough to hide the latency of an addition
    __m256 sum[R][N][U];
    for (auto& row : sum)
        for (auto& cell : row)
            for (auto& part : cell) part = _mm256_setzero_ps();
    for (; i + 8 * U <= columns; i += 8 * U)
        for (int u = 0; u < U; ++u)
            for (int r = 0; r < R; ++r) {
                const __m256 weights = lanes(w + r * columns + i + 8 * u);
                for (int n = 0; n < N; ++n)
                    sum[r][n][u] =
                        _mm256_fmadd_ps(weights, _mm256_loadu_ps(x + n * x_stride + i + 8 * u), sum[r][n][u]);
            }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) {
            for (int u = 1; u < U; ++u) sum[r][n][0] = _mm256_add_ps(sum[r][n][0], sum[r][n][u]);
            out[r][n] = total(sum[r][n][0]);
        }
#else
    for (auto& row : out)
        for (float& cell : row) cell = 0;
#endif
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) {
            const W* row = w + r * columns;
            const float* in = x + n * x_stride;
            float rest = 0;
#pragma omp simd reduction(+ : rest)
            for (int64_t j = i; j < columns; ++j) rest += widened(row[j]) * in[j];
            out[r][n] += rest;
        }
}

// Asks for what is read some kilobytes later: the processor's own prefetching begins anew with every page.
template <class W>
inline void fetch_ahead(const W* from, int64_t count) {
#ifdef __GNUC__
    constexpr int64_t kAhead = 8192;  // bytes
    const char* bytes = reinterpret_cast<const char*>(from) + kAhead;
    for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(W)); i += 64) __builtin_prefetch(bytes + i);
#endif
}

struct Output {  // value[b * stride + row] = product, or += product
    float* values;
    int64_t stride;
    bool adds;
};

// Rows [begin, end) for N rows of the batch from b on, R rows of the matrix at a time; returns the first row left over.
template <int R, int N, class W>
int64_t stripe(const Matrix& m, int64_t begin, int64_t end, const float* x, int64_t x_stride, int64_t b,
               const Output& output) {
    const W* values = static_cast<const W*>(m.values);
    float product[R][N];
    for (; begin + R <= end; begin += R) {
        fetch_ahead(values + begin * m.columns, R * m.columns);
        dots<R, N, W>(values + begin * m.columns, m.columns, x + b * x_stride, x_stride, product);
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) {
                float& cell = output.values[(b + n) * output.stride + begin + r];
                const float scaled = product[r][n] * (m.scales ? m.scales[begin + r] : 1.0f);
                cell = output.adds ? cell + scaled : scaled;
            }
    }
    return begin;
}

template <class W>
void rows_of(const Matrix& m, int64_t begin, int64_t end, const float* x, int64_t x_stride, int64_t batch,
             const Output& output) {
    constexpr int64_t kPanel = 32;  // rows of the matrix that stay in the cache while the batch passes by
    for (; begin < end; begin += kPanel) {
        const int64_t stop = std::min(end, begin + kPanel);
        int64_t b = 0;
        for (; b + 4 <= batch; b += 4) {
            const int64_t left = stripe<2, 4, W>(m, begin, stop, x, x_stride, b, output);
            stripe<1, 4, W>(m, left, stop, x, x_stride, b, output);
        }
        // Row after row for a single vector: memory is then read as one stream.
        for (; b < batch; ++b) stripe<1, 1, W>(m, begin, stop, x, x_stride, b, output);
    }
}

void multiply(int64_t kind, const Matrix& m, int64_t begin, int64_t end, const float* x, int64_t x_stride,
              int64_t batch, const Output& output) {
    if (kind == kFloat32) rows_of<float>(m, begin, end, x, x_stride, batch, output);
    if (kind == kBFloat16) rows_of<uint16_t>(m, begin, end, x, x_stride, batch, output);
    if (kind == kInt8) rows_of<int8_t>(m, begin, end, x, x_stride, batch, output);
}

// --- Attention of one query head of one row ---

void add_values(const float* v, const float* weights, int64_t count, int64_t size, float* out) {
    int64_t s = 0;
    for (; s + 4 <= count; s += 4) {
        const float *v0 = v + s * size, *v1 = v0 + size, *v2 = v1 + size, *v3 = v2 + size;
        const float w0 = weights[s], w1 = weights[s + 1], w2 = weights[s + 2], w3 = weights[s + 3];
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) out[i] += (w0 * v0[i] + w1 * v1[i]) + (w2 * v2[i] + w3 * v3[i]);
    }
    for (; s < count; ++s)
        for (int64_t i = 0; i < size; ++i) out[i] += weights[s] * v[s * size + i];
}

// Softmax in place; false, and nothing changed, where no key is visible.
bool softmax(float* scores, int64_t count) {
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t s = 0; s < count; ++s) largest = std::max(largest, scores[s]);
    // No comparison is true of NaN, which must come out as NaN and not as a key that nobody sees.
    const auto is_nan = [](float s) { return std::isnan(s); };
    if (largest == -INFINITY && std::none_of(scores, scores + count, is_nan)) return false;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t s = 0; s < count; ++s) {
        // What is 87 below the largest weighs nothing in float32; a masked key must weigh exactly nothing.
        const float difference = scores[s] - largest, e = exponential(difference);
        scores[s] = difference < -87.0f ? 0.0f : e;
        sum += scores[s];
    }
    const float factor = 1.0f / sum;
#pragma omp simd
    for (int64_t s = 0; s < count; ++s) scores[s] *= factor;
    return true;
}

void prepare(float* x, const float* norm, const Step& step, const Block& block, const float* cos, const float* sin,
             int64_t row) {
    if (norm) rms_norm(x, norm, static_cast<float>(step.eps), step.head_dim, x);
    const int64_t offset = row * step.rotation_stride;
    if (step.pairs && block.acts) turn(x, cos + offset, sin + offset, step.pairs, step.is_adjacent);
}

// Every head turns the newest key for itself, which is cheaper than to meet at a barrier; one head stores it.
void attend(const Step& step, const Block& block, int64_t row, int64_t head, float* scores, float* key) {
    const int64_t D = step.head_dim, sharing = step.heads / step.kv_heads, group = head / sharing, S = step.slots;
    float* projected = step.projected + row * (step.heads + 2 * step.kv_heads) * D;
    float* q = projected + head * D;
    const float* v = projected + (step.heads + step.kv_heads + group) * D;
    float* keys = block.keys + (row * step.kv_heads + group) * step.capacity * D;
    float* values = block.values + (row * step.kv_heads + group) * step.capacity * D;
    float* out = step.mixed + (row * step.heads + head) * D;

    std::copy_n(projected + (step.heads + group) * D, D, key);
    prepare(key, block.k_norm, step, block, step.k_cos, step.k_sin, row);
    prepare(q, block.q_norm, step, block, step.q_cos, step.q_sin, row);
    const float scale = 1.0f / std::sqrt(static_cast<float>(D));
    const Matrix past{keys, nullptr, S, D};
#pragma omp simd
    for (int64_t i = 0; i < D; ++i) q[i] *= scale;
    rows_of<float>(past, 0, S, q, D, 1, Output{scores, S + 1, false});
    scores[S] = dot(q, key, D);
    const float* added = block.acts ? step.bias : step.mask;
    if (added) {
        added += block.acts ? row * step.bias_row_stride + head * step.bias_head_stride : row * step.mask_row_stride;
        for (int64_t s = 0; s <= S; ++s) scores[s] += added[s];
    }
    std::fill_n(out, D, 0.0f);
    if (softmax(scores, S + 1)) {
        add_values(values, scores, S, D, out);
        add_values(v, scores + S, 1, D, out);
    }
    if (head % sharing == 0) {  // no other head reads this slot before the next call
        std::copy_n(key, D, keys + S * D);
        std::copy_n(v, D, values + S * D);
    }
}

// --- One token ---

void run_block(const Step& step, const Block& block, const Worker& worker, float* normed, float* scores, float* key) {
    const int64_t C = step.width, B = step.rows, mixed = step.heads * step.head_dim;
    const float eps = static_cast<float>(step.eps);
    const auto norm_all = [&](const float* weight) {  // by every thread for itself: no barrier
        for (int64_t b = 0; b < B; ++b) rms_norm(step.x + b * C, weight, eps, C, normed + b * C);
    };
    const Output to_x{step.x, C, true};

    norm_all(block.input_norm);
    const int64_t outputs = block.qkv.rows;
    multiply(step.kind, block.qkv, worker.begin(outputs, 4), worker.end(outputs, 4), normed, C, B,
             Output{step.projected, outputs, false});
    worker.barrier->wait();

    for (int64_t unit = worker.begin(B * step.heads, 1); unit < worker.end(B * step.heads, 1); ++unit)
        attend(step, block, unit / step.heads, unit % step.heads, scores, key);
    worker.barrier->wait();

    multiply(step.kind, block.o, worker.begin(C, 4), worker.end(C, 4), step.mixed, mixed, B, to_x);
    worker.barrier->wait();

    norm_all(block.post_norm);
    const int64_t F = step.hidden, begin = worker.begin(F, 4), end = worker.end(F, 4);
    const Output gated{step.gated, 2 * F, false};
    multiply(step.kind, block.gate_up, begin, end, normed, C, B, gated);
    multiply(step.kind, block.gate_up, F + begin, F + end, normed, C, B, gated);
    for (int64_t b = 0; b < B; ++b) {
        float* gate = step.gated + 2 * F * b + begin;
        silu_times(gate, gate + F, end - begin);
    }
    worker.barrier->wait();

    multiply(step.kind, block.down, worker.begin(C, 4), worker.end(C, 4), step.gated, 2 * F, B, to_x);
    worker.barrier->wait();
}

void run_head(const Step& step, const Worker& worker, float* normed) {
    const int64_t C = step.width, V = step.head->rows;
    for (int64_t b = 0; b < step.rows; ++b)
        rms_norm(step.x + b * C, step.last_norm, static_cast<float>(step.eps), C, normed + b * C);
    multiply(step.kind, *step.head, worker.begin(V, 4), worker.end(V, 4), normed, C, step.rows,
             Output{step.logits, V, false});
}

}  // namespace

extern "C" void ropelab_step(const Step* given) {
    const Step step = *given;
    in_parallel(static_cast<int>(step.threads), [&](const Worker& worker) {
        std::unique_ptr<float[]> normed(new float[step.rows * step.width]), key(new float[step.head_dim]);
        float* scores = step.scores + worker.id * (step.slots + 1);
        for (int64_t layer = step.first; layer < step.last; ++layer)
            run_block(step, step.blocks[layer], worker, normed.get(), scores, key.get());
        if (step.head) run_head(step, worker, normed.get());
    });
}

// The sum of `count` floats, read by all threads: what the machine's memory can do, for benchmarks.
extern "C" float ropelab_read(const float* values, int64_t count, int64_t threads) {
    std::atomic<float> total{0};
    in_parallel(static_cast<int>(threads), [&](const Worker& worker) {
        const int64_t begin = worker.begin(count, 64), quarter = (worker.end(count, 64) - begin) / 4;
        const float *a = values + begin, *b = a + quarter, *c = b + quarter, *d = c + quarter;
        float s = 0, t = 0, u = 0, v = 0;
#pragma omp simd reduction(+ : s, t, u, v)
        for (int64_t i = 0; i < quarter; ++i) s += a[i], t += b[i], u += c[i], v += d[i];
        float seen = total.load();
        while (!total.compare_exchange_weak(seen, seen + s + t + u + v)) {}
    });
    return total.load();
}

// The sizes of the structs: the caller's mirror of them must agree.
extern "C" int64_t ropelab_sizes() { return sizeof(Matrix) * 1000000 + sizeof(Block) * 1000 + sizeof(Step); }
