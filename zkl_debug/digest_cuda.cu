// multilinear-128: h_k = sum over lanes of lane * W_k[lane] mod 2^64, k = 1, 2. A lane is a signed 32-bit word of a row.
//
// A weight is stored as low + high * 2^32 with a signed low half, so that a product takes one widening and one plain
// 32-bit multiplication. A warp reads ROWS rows side by side, four lanes a thread, and keeps the sums of each row in
// registers; they are added up over the warp once, at the end, and over the warps that share the rows in shared memory:
// that of a block, or of a cluster of CLUSTER blocks where few long rows have to keep the whole device busy.
//
// The compiler is given FEW_ROWS and CLUSTER_ROWS, the rows that a warp reads side by side where there are few, and
// KEEP_LANES, whether lanes may stay in the first level cache.

typedef long long i64;
typedef unsigned long long u64;

#define CLUSTER 8
#define MANY_ROWS 8

struct Entry {       // one tensor
    const int* x;    // first lane of the first row
    i64* out;        // [n, 2]
    const i64* dest; // output row of each row, -1 to drop it; 0: in order
    i64 stride;      // lanes between rows
    int rows;
    int lanes;
    int inner;       // lanes that lie together
    int apart;       // lanes between such groups
    int offset;      // weight of the first lane
    int first;       // its first block
    int run;         // entries, one behind the other, whose blocks take turns from ``first`` on; each has as many
    unsigned char shift;    // 2^shift warps share the lanes of a row
    unsigned char wide;     // every row can be read sixteen bytes at a time
    unsigned char reverse;  // last rows first: they were written last and may still be in the cache
    unsigned char pad;
};
static_assert(sizeof(Entry) == 64, "as the host packs it");

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

// Lanes are read once: out of the first level cache they leave room there for the weights, which the next rows need.
#if KEEP_LANES
#define LOAD "ld.global"
#else
#define LOAD "ld.global.L1::no_allocate"
#endif

template <bool WIDE>
__device__ __forceinline__ int4 load4(const int* row, const Chunk& c) {
    if constexpr (WIDE) {
        int4 v;
        asm(LOAD ".v4.s32 {%0, %1, %2, %3}, [%4];"
            : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(__cvta_generic_to_global(row + c.at[0])));
        return v;
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

// Add four lanes of ROWS rows from ``lane`` on to the sums of the thread, and as many from each of the next DEEP - 1
// steps: all of it is loaded before any of it is used.
template <int ROWS, bool WIDE, int DEEP>
__device__ __forceinline__ void sum_at(u64* sum, const Entry& e, const int* const* row, const int2* w_1,
                                       const int2* w_2, int lane, int step) {
    Chunk c[DEEP];
#pragma unroll
    for (int d = 0; d < DEEP; ++d) c[d] = chunk_of<WIDE>(lane + d * step, e);
    int4 x[DEEP][ROWS];
    int2 a[DEEP][4], b[DEEP][4];
#pragma unroll
    for (int d = 0; d < DEEP; ++d) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) x[d][r] = load4<WIDE>(row[r], c[d]);
        const int at = lane + d * step;
        weights4<WIDE>(w_1 + at, e.lanes - at, a[d]);
        weights4<WIDE>(w_2 + at, e.lanes - at, b[d]);
    }
#pragma unroll
    for (int d = 0; d < DEEP; ++d) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            add(sum[2 * r], x[d][r].x, a[d][0]); add(sum[2 * r + 1], x[d][r].x, b[d][0]);
            add(sum[2 * r], x[d][r].y, a[d][1]); add(sum[2 * r + 1], x[d][r].y, b[d][1]);
            add(sum[2 * r], x[d][r].z, a[d][2]); add(sum[2 * r + 1], x[d][r].z, b[d][2]);
            add(sum[2 * r], x[d][r].w, a[d][3]); add(sum[2 * r + 1], x[d][r].w, b[d][3]);
        }
    }
}

// Add four lanes of ROWS rows from ``lane`` on to the sums of the thread, and four at every step from there.
template <int ROWS, bool WIDE>
__device__ __forceinline__ void sum_lanes(u64* sum, const Entry& e, int row0, const int2* w_1, i64 pitch, int lane,
                                          int step) {
    constexpr int DEEP = WIDE && ROWS < MANY_ROWS ? 2 : 1;  // few rows are few loads
    const int* row[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row[r] = e.x + (i64)min(row0 + r, e.rows - 1) * e.stride;
    const int2* w_2 = w_1 + pitch;
    if constexpr (DEEP > 1) {
#pragma unroll 1
        for (; lane + (DEEP - 1) * step < e.lanes; lane += DEEP * step)
            sum_at<ROWS, WIDE, DEEP>(sum, e, row, w_1, w_2, lane, step);
    }
#pragma unroll 1
    for (; lane < e.lanes; lane += step) sum_at<ROWS, WIDE, 1>(sum, e, row, w_1, w_2, lane, step);
}

// Over the warp: at each step a thread keeps half of its values and gives the other half away.
template <int ROWS, int HALF>
__device__ __forceinline__ void halve(u64* sum, int& held, int thread) {
    constexpr int far = 16 * HALF / ROWS;
    const bool upper = thread & far;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        u64 keep = upper ? sum[HALF + i] : sum[i], give = upper ? sum[i] : sum[HALF + i];
        sum[i] = keep + __shfl_xor_sync(0xffffffffu, give, far);
    }
    held = held * 2 + upper;
    if constexpr (HALF > 1) halve<ROWS, HALF / 2>(sum, held, thread);
}

// Over threads that differ in their last bits only.
template <int THREADS>
__device__ __forceinline__ u64 over(u64 value) {
#pragma unroll
    for (int far = THREADS / 2; far >= 1; far >>= 1) value += __shfl_xor_sync(0xffffffffu, value, far);
    return value;
}

// ---- a cluster of blocks: compute capability 9.0 on -------------------------------------------------------------
template <bool RELEASE>
__device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 900
    if constexpr (RELEASE) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    else asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

__device__ __forceinline__ void await() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Write to where ``mine`` lies in the shared memory of another block of the cluster.
__device__ __forceinline__ void store_at(int rank, u64* mine, u64 value) {
#if __CUDA_ARCH__ >= 900
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(mine)), "r"(rank));
    asm volatile("st.shared::cluster.u64 [%0], %1;" :: "r"(there), "l"(value) : "memory");
#endif
}

// ---- the kernel -------------------------------------------------------------------------------------------------
template <int ROWS, int BLOCKS, int N>
__device__ __forceinline__ void digest(const Table<N>& t) {
    constexpr int HOLDERS = 16 / ROWS;  // threads that hold parts of one value after ``halve``
    __shared__ u64 partial[8 * BLOCKS][ROWS * 2];
    int which = 0;
#pragma unroll
    for (int i = 1; i < N; ++i) which += i < t.count && (int)blockIdx.x >= t.entry[i].first;
    int block = ((int)blockIdx.x - t.entry[which].first) / BLOCKS;
    if constexpr (N > 1) {  // the last one of a run was found, as all have the same first block
        const int run = t.entry[which].run;
        if (run > 1) {
            which -= block % run;
            block /= run;
        }
    }
    const Entry& e = t.entry[which];
    const int thread = threadIdx.x & 31, rank = blockIdx.x % BLOCKS;
    const int warp = rank * 8 + (threadIdx.x >> 5);       // of the cluster
    const int share = 1 << e.shift;                       // warps that share a group of rows
    const int part = warp & (share - 1);
    const int together = ((8 * BLOCKS) >> e.shift) * ROWS;  // rows of a cluster
    if (e.reverse) block = (e.rows + together - 1) / together - 1 - block;
    const int row0 = block * together + (warp >> e.shift) * ROWS;
    const bool across = BLOCKS > 1 && share > 8;          // the same for a whole cluster
    if (across) arrive<false>();                          // awaited below: by then every block of the cluster runs

    u64 sum[ROWS * 2];
#pragma unroll
    for (int i = 0; i < ROWS * 2; ++i) sum[i] = 0;
    if (row0 < e.rows) {
        const int2* weights = t.weights + e.offset;
        const int lane = (part * 32 + thread) * 4;
        if (e.wide) sum_lanes<ROWS, true>(sum, e, row0, weights, t.pitch, lane, share * 128);
        else sum_lanes<ROWS, false>(sum, e, row0, weights, t.pitch, lane, share * 128);
    }
    int held = 0;  // number of the value that the thread holds in the end
    halve<ROWS, ROWS>(sum, held, thread);
    u64 total = over<HOLDERS>(sum[0]);
    const int holder = thread & (HOLDERS - 1);
    if (share > 1) {
        // Warps that share rows write to the block of the first of them, at the place of the warp counted from there.
        if (across) {
            const int blocks = share / 8, at = warp & (share - 1);
            await();
            if (holder == 0) store_at(rank & ~(blocks - 1), &partial[at][held], total);
            arrive<true>();
            await();
        } else {
            if (holder == 0) partial[warp & 7][held] = total;
            __syncthreads();
        }
        if (part == 0) {
            total = 0;
#pragma unroll 4
            for (int i = holder; i < share; i += HOLDERS) total += partial[(warp & 7) + i][held];
            total = over<HOLDERS>(total);
        }
    }
    const int r = row0 + (held >> 1);
    if (part == 0 && holder == 0 && r < e.rows) {
        i64 place = e.dest ? e.dest[r] : r;
        if (place >= 0) e.out[place * 2 + (held & 1)] = (i64)total;
    }
}

struct Pick {           // sampled tokens, the log-probs that were returned, and those of the sampled tokens
    const i64* tokens;  // [n]
    const int* selected;
    const int* table;   // [n, width]
    int* out;           // [4n]: the tokens, and of each the two log-probs
    i64 stride;         // of the table, in lanes
    int width;
    int n;
};
static_assert(sizeof(Pick) == 48, "as the host packs it");

#define KERNEL(name, at_once, rows, n) \
    __global__ void __launch_bounds__(256, at_once) name(const __grid_constant__ Table<n> t) { digest<rows, 1>(t); }
#define CLUSTERED(name, at_once, rows, n) \
    __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(256, at_once) \
    name(const __grid_constant__ Table<n> t) { digest<rows, CLUSTER>(t); }

extern "C" {
KERNEL(digest_few_1, 3, FEW_ROWS, 1)
KERNEL(digest_few_8, 3, FEW_ROWS, 8)
KERNEL(digest_few_32, 3, FEW_ROWS, 32)
KERNEL(digest_many_1, 2, MANY_ROWS, 1)
KERNEL(digest_many_8, 2, MANY_ROWS, 8)
KERNEL(digest_many_32, 2, MANY_ROWS, 32)
#if __CUDA_ARCH__ >= 900
CLUSTERED(digest_cluster_1, 2, CLUSTER_ROWS, 1)
CLUSTERED(digest_cluster_8, 2, CLUSTER_ROWS, 8)
CLUSTERED(digest_cluster_32, 2, CLUSTER_ROWS, 32)
#endif

__global__ void pick(const __grid_constant__ Pick p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    const i64 token = p.tokens[i], last = p.width - 1;
    const i64 inside = token < 0 ? 0 : token > last ? last : token;  // what was not sampled is found out on the host
    ((i64*)p.out)[i] = token;
    p.out[2 * p.n + i] = p.selected[i];
    p.out[3 * p.n + i] = p.table[i * p.stride + inside];
}
}
