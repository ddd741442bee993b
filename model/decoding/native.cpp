// One token of every row through a range of blocks: the CPU kernel behind model/decoding/native.py.
//
// The contract is that of model/decoding/decoder.py: embedded input, tables of cosines and sines, a row of the mask,
// the caches, the weights. Nothing here knows a positional scheme. No header of PyTorch is included, so that this
// file builds in seconds; the structs at the end of the first part are mirrored in native.py.
//
// All sums are float32. Matrix products are written in vectors of whatever width the processor has, by the compiler's
// own extension, and other loops for its vectoriser (`omp simd` allows it to reorder a sum), so the same text serves
// AVX2, AVX-512 and ARM. Threads split the rows of a matrix and meet at a barrier between phases.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// --- What the caller hands over (shapes: legend in model/__init__.py) ---

enum Kind : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

// Rows in groups of 16, in a group words of 32 bits: 16 words, one of each row, hold the first columns (1 of float32,
// 2 of bfloat16, 4 of int8; the first in the lowest bits), the next 16 words the next ones. So a group is read as one
// stream, a vector register takes the same columns of as many rows as it has lanes, and no sum runs across its lanes.
// Missing rows of the last group and columns up to a multiple of 4 are zero.
struct Matrix {
    const void* words;
    const float* scales;  // the weight is scales[row] * value; null: the value itself
    int64_t rows, columns;
};

struct Block {
    Matrix qkv, o, gate, up, down;  // qkv: rows of q, then k, then v
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
    float *projected, *mixed, *gated, *raised;  // scratch (B, (H + 2G) D), then padded (B, H D) and twice (B, hidden)
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

// --- Matrix times vectors ---

#if defined(ROPELAB_LANES)  // for tests: a compiler makes other widths up from what the processor has
constexpr int kLanes = ROPELAB_LANES;
#elif defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kGroup = 16, kParts = kGroup / kLanes;  // rows in a group, registers for them
constexpr int kMost = 12 / kParts;  // vectors multiplied at once: 12 registers hold sums, of 16 that there are at least
constexpr int kQuad = 4;  // columns in a step of the loops

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Integers = int32_t __attribute__((vector_size(4 * kLanes)));

int64_t rounded_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Column `k` of the four that begin at `quad`, for the rows of register `part`.
template <class W>
inline Floats weights_at(const uint32_t* quad, int k, int part) {
    constexpr int kInWord = 4 / sizeof(W);
    Words words;
    std::memcpy(&words, quad + k / kInWord * kGroup + part * kLanes, sizeof words);
    if constexpr (sizeof(W) == 4) return (Floats)words;
    // bfloat16 is the upper half of a float32.
    if constexpr (sizeof(W) == 2) return (Floats)(k % 2 ? words & 0xffff0000u : words << 16);
    return __builtin_convertvector((Integers)(words << (24 - 8 * (k % 4))) >> 24, Floats);
}

// Asks for what is read some kilobytes later: the processor's own prefetching begins anew with every page.
inline void fetch_ahead(const uint32_t* from, int64_t count) {
    constexpr int64_t kAhead = 8192;  // bytes
    const char* bytes = reinterpret_cast<const char*>(from) + kAhead;
    for (int64_t i = 0; i < count * 4; i += 64) __builtin_prefetch(bytes + i);
}

// out[n][row] = sum over columns of weight[row][column] x[n][column], for the rows of one group and N vectors.
template <class W, int N>
void products(const uint32_t* group, int64_t columns, const float* x, int64_t x_stride, float (*out)[kGroup]) {
    constexpr int kWords = kQuad * kGroup * sizeof(W) / 4;  // in four columns
    constexpr int kChains = std::clamp(8 / (N * kParts), 1, kQuad);  // sums enough to hide the latency of an addition
    Floats sums[N][kChains][kParts] = {};
    for (int64_t c = 0; c < columns; c += kQuad, group += kWords) {
        if constexpr (N == 1) fetch_ahead(group, kWords);
        for (int k = 0; k < kQuad; ++k) {
            Floats weights[kParts];
            for (int part = 0; part < kParts; ++part) weights[part] = weights_at<W>(group, k, part);
            for (int n = 0; n < N; ++n)
                for (int part = 0; part < kParts; ++part)
                    sums[n][k % kChains][part] += weights[part] * x[n * x_stride + c + k];
        }
    }
    for (int n = 0; n < N; ++n) {
        for (int chain = 1; chain < kChains; ++chain)
            for (int part = 0; part < kParts; ++part) sums[n][0][part] += sums[n][chain][part];
        std::memcpy(out[n], sums[n][0], sizeof out[n]);
    }
}

template <int N = kMost>
void products_of_few(int64_t few, const float* group, int64_t columns, const float* x, int64_t x_stride,
                     float (*out)[kGroup]) {
    if constexpr (N > 1)
        if (few < N) return products_of_few<N - 1>(few, group, columns, x, x_stride, out);
    products<float, N>(reinterpret_cast<const uint32_t*>(group), columns, x, x_stride, out);
}

// The same group with its values as float32.
template <class W>
const float* widened(const uint32_t* group, int64_t columns, std::vector<float>& room) {
    if constexpr (sizeof(W) == 4) return reinterpret_cast<const float*>(group);
    room.resize(kGroup * rounded_up(columns, kQuad));
    float* out = room.data();
    constexpr int kWords = kQuad * kGroup * sizeof(W) / 4;
    for (int64_t c = 0; c < columns; c += kQuad, group += kWords) {
        fetch_ahead(group, kWords);
        for (int k = 0; k < kQuad; ++k)
            for (int part = 0; part < kParts; ++part, out += kLanes) {
                const Floats weights = weights_at<W>(group, k, part);
                std::memcpy(out, &weights, sizeof weights);
            }
    }
    return room.data();
}

struct Vectors {  // the batch: (count, columns); of each vector as many more as make a multiple of 4 are zero
    const float* values;
    int64_t stride, count;
};

struct Output {  // value[b * stride + row] = product, or += product
    float* values;
    int64_t stride;
    bool adds;
};

void put(const float* product, const float* scales, int64_t count, float* to, bool adds) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const float scaled = scales ? product[i] * scales[i] : product[i];
        to[i] = adds ? to[i] + scaled : scaled;
    }
}

template <class W>
void multiply_group(const Matrix& m, int64_t row, const Vectors& x, const Output& output, std::vector<float>& room) {
    const uint32_t* group = static_cast<const uint32_t*>(m.words) + row * rounded_up(m.columns, kQuad) * sizeof(W) / 4;
    float product[kMost][kGroup];
    const auto put_all = [&](int64_t b, int64_t end) {
        for (int64_t first = b; b < end; ++b)
            put(product[b - first], m.scales ? m.scales + row : nullptr, std::min<int64_t>(kGroup, m.rows - row),
                output.values + b * output.stride + row, output.adds);
    };
    if (x.count == 1) {
        products<W, 1>(group, m.columns, x.values, x.stride, product);
        return put_all(0, 1);
    }
    // Each weight is read from memory and widened once for the whole batch.
    const float* wide = widened<W>(group, m.columns, room);
    const int64_t blocks = (x.count + kMost - 1) / kMost;
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t b = x.count * block / blocks, end = x.count * (block + 1) / blocks;
        products_of_few(end - b, wide, m.columns, x.values + b * x.stride, x.stride, product);
        put_all(b, end);
    }
}

// This thread's groups of a matrix's rows.
void multiply(int64_t kind, const Matrix& m, const Worker& worker, const Vectors& x, const Output& output,
              std::vector<float>& room) {
    for (int64_t row = worker.begin(m.rows, kGroup); row < worker.end(m.rows, kGroup); row += kGroup) {
        if (kind == kFloat32) multiply_group<float>(m, row, x, output, room);
        if (kind == kBFloat16) multiply_group<uint16_t>(m, row, x, output, room);
        if (kind == kInt8) multiply_group<int8_t>(m, row, x, output, room);
    }
}

// --- Attention of one query head of one row ---

// out[s] = key s * q
void dots(const float* keys, const float* q, int64_t count, int64_t size, float* out) {
    int64_t s = 0;
    for (; s + 4 <= count; s += 4) {
        const float *k0 = keys + s * size, *k1 = k0 + size, *k2 = k1 + size, *k3 = k2 + size;
        float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
        for (int64_t i = 0; i < size; ++i) a += k0[i] * q[i], b += k1[i] * q[i], c += k2[i] * q[i], d += k3[i] * q[i];
        out[s] = a, out[s + 1] = b, out[s + 2] = c, out[s + 3] = d;
    }
    for (; s < count; ++s) out[s] = dot(keys + s * size, q, size);
}

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

struct Own {  // what a thread works in alone
    std::vector<float> normed, scores, key, group;
};

// Every head turns the newest key for itself, which is cheaper than to meet at a barrier; one head stores it.
void attend(const Step& step, const Block& block, int64_t row, int64_t head, Own& own) {
    const int64_t D = step.head_dim, sharing = step.heads / step.kv_heads, group = head / sharing, S = step.slots;
    float* projected = step.projected + row * (step.heads + 2 * step.kv_heads) * D;
    float* q = projected + head * D;
    const float* v = projected + (step.heads + step.kv_heads + group) * D;
    float* keys = block.keys + (row * step.kv_heads + group) * step.capacity * D;
    float* values = block.values + (row * step.kv_heads + group) * step.capacity * D;
    float* out = step.mixed + row * rounded_up(step.heads * D, kQuad) + head * D;
    float *scores = own.scores.data(), *key = own.key.data();

    std::copy_n(projected + (step.heads + group) * D, D, key);
    prepare(key, block.k_norm, step, block, step.k_cos, step.k_sin, row);
    prepare(q, block.q_norm, step, block, step.q_cos, step.q_sin, row);
    const float scale = 1.0f / std::sqrt(static_cast<float>(D));
#pragma omp simd
    for (int64_t i = 0; i < D; ++i) q[i] *= scale;
    dots(keys, q, S, D, scores);
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

// All rows of x, normed, by every thread for itself: no barrier.
Vectors normed(const Step& step, const float* weight, Own& own) {
    const int64_t C = step.width, stride = rounded_up(C, kQuad);
    for (int64_t b = 0; b < step.rows; ++b)
        rms_norm(step.x + b * C, weight, static_cast<float>(step.eps), C, own.normed.data() + b * stride);
    return {own.normed.data(), stride, step.rows};
}

void run_block(const Step& step, const Block& block, const Worker& worker, Own& own) {
    const int64_t B = step.rows, H = step.heads, F = step.hidden;
    const int64_t mixed = rounded_up(H * step.head_dim, kQuad), gated = rounded_up(F, kQuad);
    const auto times = [&](const Matrix& m, const Vectors& x, const Output& output) {
        multiply(step.kind, m, worker, x, output, own.group);
    };
    const Output to_x{step.x, step.width, true};

    times(block.qkv, normed(step, block.input_norm, own), {step.projected, block.qkv.rows, false});
    worker.barrier->wait();

    for (int64_t unit = worker.begin(B * H, 1); unit < worker.end(B * H, 1); ++unit)
        attend(step, block, unit / H, unit % H, own);
    worker.barrier->wait();

    times(block.o, {step.mixed, mixed, B}, to_x);
    worker.barrier->wait();

    const Vectors x = normed(step, block.post_norm, own);
    times(block.gate, x, {step.gated, gated, false});
    times(block.up, x, {step.raised, gated, false});
    const int64_t begin = worker.begin(F, kGroup), count = worker.end(F, kGroup) - begin;
    for (int64_t b = 0; b < B; ++b)
        silu_times(step.gated + b * gated + begin, step.raised + b * gated + begin, count);
    worker.barrier->wait();

    times(block.down, {step.gated, gated, B}, to_x);
    worker.barrier->wait();
}

void run_head(const Step& step, const Worker& worker, Own& own) {
    multiply(step.kind, *step.head, worker, normed(step, step.last_norm, own), {step.logits, step.head->rows, false},
             own.group);
}

}  // namespace

extern "C" void ropelab_step(const Step* given) {
    const Step step = *given;
    in_parallel(static_cast<int>(step.threads), [&](const Worker& worker) {
        static thread_local Own own;  // kept from token to token: large pieces of fresh memory are slow
        own.normed.assign(step.rows * rounded_up(step.width, kQuad), 0);
        own.scores.resize(step.slots + 1);
        own.key.resize(step.head_dim);
        for (int64_t layer = step.first; layer < step.last; ++layer) run_block(step, step.blocks[layer], worker, own);
        if (step.head) run_head(step, worker, own);
    });
}

// The sizes of the structs: the caller's mirror of them must agree.
extern "C" int64_t ropelab_sizes() { return sizeof(Matrix) * 1000000 + sizeof(Block) * 1000 + sizeof(Step); }
