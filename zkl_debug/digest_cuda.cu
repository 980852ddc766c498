// multilinear-128: h_k = sum over lanes of lane * W_k[lane] mod 2^64, k = 1, 2. A lane is a signed 32-bit word of a row.
//
// A weight is stored as low + high * 2^32 with a signed low half, so that a product takes one widening and one plain
// 32-bit multiplication. A warp reads ROWS rows side by side, four lanes a thread, and keeps the sums of each row in
// registers; they are added up over the warp once, at the end, and over the warps that share the rows in shared memory.

typedef long long i64;
typedef unsigned long long u64;

struct Entry {       // one tensor; 64 bytes
    const int* x;    // first lane of the first row
    i64* out;        // [n, 2]
    const i64* dest; // output row of each row, -1 to drop it; 0: in order
    i64 stride;      // lanes between rows
    int rows;
    int lanes;
    int inner;       // lanes that lie together
    int apart;       // lanes between such groups
    int offset;      // weight of the first lane
    int shift;       // 2^shift warps share the lanes of a row
    int first;       // its first block
    int reverse;     // last rows first: they were written last and may still be in the cache
};

// A launch's parameters. Those of one tensor have a type of their own: every node of a graph copies its parameters.
template <int N>
struct Table {
    const int2* weights; // [2, pitch]
    i64 pitch;
    int count;
    int pad;
    Entry entry[N];
};

struct Chunk { int at[4]; };  // where four lanes of a row lie, -1 behind its end

template <bool WIDE>
__device__ __forceinline__ Chunk chunk_of(int lane, const Entry& e) {
    Chunk c;
#pragma unroll
    for (int i = 0; i < (WIDE ? 1 : 4); ++i) {
        int l = lane + i;
        c.at[i] = e.inner == e.lanes ? l : (l / e.inner) * e.apart + l % e.inner;
        if (!WIDE && l >= e.lanes) c.at[i] = -1;
    }
    return c;
}

template <bool WIDE>
__device__ __forceinline__ int4 load4(const int* row, const Chunk& c) {
    if constexpr (WIDE) {
        return *reinterpret_cast<const int4*>(row + c.at[0]);
    } else {
        int v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = c.at[i] < 0 ? 0 : row[c.at[i]];
        return make_int4(v[0], v[1], v[2], v[3]);
    }
}

// Four weights as (low, high) pairs.
template <bool WIDE>
__device__ __forceinline__ void weights4(const int2* w, int left, int2* to) {
    if constexpr (WIDE) {
        int4 a = *reinterpret_cast<const int4*>(w), b = *reinterpret_cast<const int4*>(w + 2);
        to[0] = make_int2(a.x, a.y); to[1] = make_int2(a.z, a.w);
        to[2] = make_int2(b.x, b.y); to[3] = make_int2(b.z, b.w);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = i < left ? w[i] : make_int2(0, 0);
    }
}

__device__ __forceinline__ void add(u64& sum, int b, int2 w) {
    asm("{\n\t.reg .b32 low, high;\n\t"
        "mad.wide.s32 %0, %1, %2, %0;\n\t"
        "mov.b64 {low, high}, %0;\n\t"
        "mad.lo.s32 high, %1, %3, high;\n\t"
        "mov.b64 %0, {low, high};\n\t}"
        : "+l"(sum) : "r"(b), "r"(w.x), "r"(w.y));
}

template <int HALF>
__device__ __forceinline__ void halve(u64* sum, int& held, int thread, int far) {
    const bool upper = thread & far;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        u64 keep = upper ? sum[HALF + i] : sum[i], give = upper ? sum[i] : sum[HALF + i];
        sum[i] = keep + __shfl_xor_sync(0xffffffffu, give, far);
    }
    held = held * 2 + upper;
}

template <int ROWS, bool WIDE, int N>
__device__ __forceinline__ void digest(const Table<N>& t) {
    __shared__ u64 partial[8][ROWS * 2];
    int which = 0;
    if constexpr (N > 1)
        while (which + 1 < t.count && (int)blockIdx.x >= t.entry[which + 1].first) ++which;
    const Entry& e = t.entry[which];
    const int warp = threadIdx.x >> 5, thread = threadIdx.x & 31;
    const int share = 1 << e.shift;                       // warps that share a group of rows
    const int group = warp >> e.shift, part = warp & (share - 1);
    const int per_block = (8 >> e.shift) * ROWS;
    const int blocks = (e.rows + per_block - 1) / per_block;
    int block = blockIdx.x - e.first;
    if (e.reverse) block = blocks - 1 - block;
    const int row0 = block * per_block + group * ROWS;

    u64 sum[ROWS * 2];
#pragma unroll
    for (int i = 0; i < ROWS * 2; ++i) sum[i] = 0;
    if (row0 < e.rows) {
        const int* row[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) row[r] = e.x + (i64)min(row0 + r, e.rows - 1) * e.stride;
        const int2* w_1 = t.weights + e.offset;
        const int2* w_2 = w_1 + t.pitch;
#pragma unroll (ROWS == 1 ? 4 : 2)
        for (int lane = (part * 32 + thread) * 4; lane < e.lanes; lane += share * 128) {
            const Chunk c = chunk_of<WIDE>(lane, e);
            int4 x[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) x[r] = load4<WIDE>(row[r], c);
            int2 a[4], b[4];
            weights4<WIDE>(w_1 + lane, e.lanes - lane, a);
            weights4<WIDE>(w_2 + lane, e.lanes - lane, b);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                add(sum[2 * r], x[r].x, a[0]); add(sum[2 * r + 1], x[r].x, b[0]);
                add(sum[2 * r], x[r].y, a[1]); add(sum[2 * r + 1], x[r].y, b[1]);
                add(sum[2 * r], x[r].z, a[2]); add(sum[2 * r + 1], x[r].z, b[2]);
                add(sum[2 * r], x[r].w, a[3]); add(sum[2 * r + 1], x[r].w, b[3]);
            }
        }
    }
    // Over the warp: at each step a thread keeps half of its values and gives the other half away.
    int held = 0;
    if (ROWS == 8) {
        halve<8>(sum, held, thread, 16);
        halve<4>(sum, held, thread, 8);
        halve<2>(sum, held, thread, 4);
        halve<1>(sum, held, thread, 2);
    } else {
        halve<1>(sum, held, thread, 16);
    }
    // Now a thread holds one value, number ``held``; threads that differ in the last bits only hold parts of the same.
#pragma unroll
    for (int far = 8 / ROWS; far >= 1; far >>= 1) sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], far);
    const bool first = (thread & (16 / ROWS - 1)) == 0;
    if (share > 1) {
        if (first) partial[warp][held] = sum[0];
        __syncthreads();
        if (part == 0 && first)
            for (int i = 1; i < share; ++i) sum[0] += partial[warp + i][held];
    }
    const int r = row0 + (held >> 1);
    if (part == 0 && first && r < e.rows) {
        i64 place = e.dest ? e.dest[r] : r;
        if (place >= 0) e.out[place * 2 + (held & 1)] = (i64)sum[0];
    }
}

#define KERNEL(name, rows, wide, n) \
    __global__ void __launch_bounds__(256) name(const __grid_constant__ Table<n> t) { digest<rows, wide>(t); }

extern "C" {
KERNEL(digest_few, 1, true, 1)
KERNEL(digest_few_narrow, 1, false, 1)
KERNEL(digest_many, 8, true, 1)
KERNEL(digest_many_narrow, 8, false, 1)
#define GROUP(n) \
    KERNEL(digest_few_group##n, 1, true, n) \
    KERNEL(digest_few_narrow_group##n, 1, false, n) \
    KERNEL(digest_many_group##n, 8, true, n) \
    KERNEL(digest_many_narrow_group##n, 8, false, n)
GROUP(8)
GROUP(32)
}
