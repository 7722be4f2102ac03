// What the Hopper kernels share: barriers, bulk copies, the sum of partial results in a cluster, unpacking of codes.
#pragma once

#include "common.cuh"

struct alignas(64) TensorMap {
    u64 opaque[16];
};

constexpr int kMaxStages = 32;

struct Params {
    TensorMap x_map;            // x as [k / 64, m, 64]; boxes of a stage's k by TOKENS rows, 128-byte swizzle
    const u8* stream;           // tile stream
    const float* column_scale;  // [n padded] or null
    const u16* bias;            // [n] or null
    u16* y;                     // [m, n]
    int m, n, n_tiles, k_tiles;
    int n_blocks, token_blocks;  // the output in pieces: rows of W of a block, and TOKENS
    int tile_bytes;
    int granules;  // scale rows in a tile: 0 (per column), 1, 2 or 4
    int split;     // blocks of a cluster that share an output, each with its own range of k; a power of two
    int stages;    // of the ring
    int ahead;     // stages of weights asked for before the kernel in front has ended
    int band;      // token blocks walked together before the next rows, for the L2
    int received;  // offset of the partial sums that arrive from other blocks, from the start of the ring
    int overlaid;  // 1 if that place belongs to the ring
    int zero;      // 0, unknown to the compiler
};

// ---------------------------------------------------------------------------------------------- barriers and copies

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ u32 remote_address(u32 local, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    return remote;
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// Relaxed: what neighbours exchange is ordered by mbarriers; .release would be a fence over the whole GPU (1 us,
// measured).
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Weights pass through the L2 once, so they should not push x out of it.
__device__ __forceinline__ void copy_weights(u32 to, const void* from, u32 bytes, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}
// A box of x from row `row` and 64-wide piece `piece` of k on.
__device__ __forceinline__ void copy_x(u32 to, const TensorMap* map, int row, int piece, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, %3}], [%4];" ::
            "r"(to),
        "l"(map), "r"(row), "r"(piece), "r"(bar)
        : "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_to_neighbour(u32 remote, u32 local, u32 bytes, u32 remote_bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(remote),
        "r"(local), "r"(bytes), "r"(remote_bar)
        : "memory");
}
// The warp's number, known to the compiler to be the same for all lanes: what depends on it may live in uniform
// registers.
__device__ __forceinline__ int warp_number() {
    return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
}
template <int kThreads>
__device__ __forceinline__ void consumer_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// ------------------------------------------------------------------------------------------ unpacking

__device__ __forceinline__ u32 subtract_pair(u32 a, u32 b) {
    u32 result;
#if BF16
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#endif
    return result;
}

__device__ __forceinline__ uint4 load16(u32 from_shared) {
    u32 words[4];
    load_shared(words, from_shared);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// (w & kMask) | magic in one instruction.
template <u32 kMask>
__device__ __forceinline__ u32 take(u32 w, u32 magic) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(w), "n"(kMask), "r"(magic));
    return r;
}
constexpr u32 kMagic = BF16 ? 0x43004300u : 0x64006400u;  // | q is 128 + q; 1024 + q, or | q << 4 is 1024 + 16 q

// The numbers of the unpacking in registers: made of an unknown zero, or the compiler loads them anew at every use.
struct Magic {
    u32 magic, sixteenth;
    __device__ __forceinline__ explicit Magic(int zero) : magic(kMagic | zero), sixteenth(0x2c002c00u | zero) {}
};

// Codes of one step -> the A fragment, exact: a[0], a[2] belong to row gq, a[1], a[3] to row gq + 8. Zero points are
// the scheme's own, 8 or 128.
__device__ __forceinline__ void unpack4(u32 (&a)[4], u32 w, const Magic& m) {
#if BF16
    const u32 zero = 0x43084308;
    a[0] = subtract_pair(take<0x000f000f>(w, m.magic), zero);
    a[1] = subtract_pair(take<0x000f000f>(w >> 4, m.magic), zero);
    a[2] = subtract_pair(take<0x000f000f>(w >> 8, m.magic), zero);
    a[3] = subtract_pair(take<0x000f000f>(w >> 12, m.magic), zero);
#else
    const u32 zero = 0x64086408, minus72 = 0xd480d480, v = w >> 8;
    a[0] = subtract_pair(take<0x000f000f>(w, m.magic), zero);
    a[1] = fma_pair(take<0x00f000f0>(w, m.magic), m.sixteenth, minus72);
    a[2] = subtract_pair(take<0x000f000f>(v, m.magic), zero);
    a[3] = fma_pair(take<0x00f000f0>(v, m.magic), m.sixteenth, minus72);
#endif
}

// Bytes of a step: word 0 = (a0 even, a1 even, a0 odd, a1 odd), word 1 the same of a2, a3.
__device__ __forceinline__ void unpack8(u32 (&a)[4], u32 w0, u32 w1, const Magic& m) {
    const u32 u[4] = {w0, w0 >> 8, w1, w1 >> 8};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if BF16
        // 128 + u does not fit 8 significant bits: take 128 + (low 7 bits), less 256 or 128 by the top bit: u - 128
        // exactly.
        a[i] = subtract_pair(take<0x007f007f>(u[i], m.magic), take<0x00800080>(~u[i], m.magic));
#else
        a[i] = subtract_pair(take<0x00ff00ff>(u[i], m.magic), 0x64806480);  // 1024 + u - 1152
#endif
    }
}

// Times the scales of the rows, one rounding.
__device__ __forceinline__ void scale_rows(u32 (&a)[4], u32 s0, u32 s1) {
    a[0] = multiply_pair(a[0], s0), a[1] = multiply_pair(a[1], s1), a[2] = multiply_pair(a[2], s0),
    a[3] = multiply_pair(a[3], s1);
}

// ---------------------------------------------------------------------------------------- cluster barriers, in order
//
// Every thread of a cluster passes the same barriers: at the start, if what neighbours send arrives beside the ring and
// may come before it is done; after the ring, if it arrives where the ring was; at the end, since nobody may leave while
// a neighbour still reads from it or sends to it.

struct Cluster {
    int split, overlaid;
    __device__ __forceinline__ void arrive_at_start() const {
        if (split > 1 && !overlaid) cluster_arrive();
    }
    __device__ __forceinline__ void before_sums() const {
        if (split > 1 && overlaid) cluster_arrive();
        if (split > 1) cluster_wait();
    }
    __device__ __forceinline__ void arrive_at_end() const {
        if (split > 1) cluster_arrive();
    }
    __device__ __forceinline__ void wait_at_end() const {
        if (split > 1) cluster_wait();
    }
};

// ------------------------------------------------------------------------------------------------------ partial sums
//
// The accumulators of an output tile [kBlockN rows of W, kTokens] lie in `kGroups` warpgroups of each of `split`
// blocks. Every block owns a slice of the rows. All write their part to their own shared memory as
// [group][owner][token][slice], so that what an owner gets is one contiguous piece, send it there with a bulk copy, and
// each owner adds up its pieces in the order of rank and group: the same bits on every run. Called by all consumer
// threads after the ring is done; passes the cluster barriers `before_sums` and `arrive_at_end`.
template <int kTokens, int kMTiles, int kGroups, int kBlockN, int kThreads>
__device__ __forceinline__ void sum_and_store(const Params& p, const Cluster& cluster,
                                              const float (&acc)[kMTiles][kTokens / 2], u32 sh_mine, u32 bar,
                                              int k_rank, int group, int first_row, int column0, int token0) {
    const int lane = threadIdx.x % 32, gq = lane / 4, t = lane % 4;
    const int shift = 31 - __clz(kBlockN / p.split), slice = 1 << shift;
    const int stride = slice + 4;  // floats of a token; the pad spreads the banks
    const u32 piece = kTokens * stride * 4;
    const int tokens = min(kTokens, p.m - token0);
    const u32 used = (tokens + 7) / 8 * 8 * stride * 4;
    const u32 sh_received = sh_mine + p.received;
    if (p.split > 1 && threadIdx.x == 0) barrier_expect(bar, (p.split - 1) * kGroups * used);
    consumer_sync<kThreads>();  // everybody is done with the ring
#pragma unroll
    for (int i = 0; i < kMTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + i * 64 + gq + 8 * h;
            u32 to = sh_mine + (group * p.split + (row >> shift)) * piece + 4 * (2 * t * stride + (row & (slice - 1)));
#pragma unroll
            for (int j = 0; j < kTokens / 8; ++j) {
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(acc[i][4 * j + 2 * h]) : "memory");
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + 4 * stride), "f"(acc[i][4 * j + 2 * h + 1])
                             : "memory");
                asm volatile("add.u32 %0, %0, %1;"
                             : "+r"(to)
                             : "r"(32 * stride));  // opaque: all addresses at once would not fit the registers
            }
        }
    if (p.split > 1) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        cluster.before_sums();
        consumer_sync<kThreads>();
        const int owner = threadIdx.x / kGroups, g = threadIdx.x % kGroups;
        if (owner < p.split && owner != k_rank) {
            const int slot = k_rank - (k_rank > owner);  // an owner does not send to itself
            copy_to_neighbour(remote_address(sh_received + (slot * kGroups + g) * piece, owner),
                              sh_mine + (g * p.split + owner) * piece, used, remote_address(bar, owner));
        }
        barrier_wait(bar, 0);
        __syncwarp();
        cluster.arrive_at_end();
    } else {
        consumer_sync<kThreads>();
    }
    // Four columns a thread.
    const bool wide = p.n % 4 == 0;
    for (int at = threadIdx.x; at < tokens << (shift - 2); at += kThreads) {
        const int token = at >> (shift - 2), c = (at & (slice / 4 - 1)) * 4, column = column0 + k_rank * slice + c;
        if (column >= p.n) continue;
        const u32 place = 4 * (token * stride + c);
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        for (int rank = 0; rank < p.split; ++rank) {
            const u32 from =
                rank == k_rank ? sh_mine + rank * piece : sh_received + (rank - (rank > k_rank)) * kGroups * piece;
            const u32 next = rank == k_rank ? p.split * piece : piece;
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                const uint4 v = load16(from + g * next + place);
                sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y), sum[2] += __uint_as_float(v.z),
                    sum[3] += __uint_as_float(v.w);
            }
        }
        u16* to = p.y + (long long)(token0 + token) * p.n + column;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (column + e >= p.n) break;
            if (p.column_scale) sum[e] *= p.column_scale[column + e];
            if (p.bias) sum[e] += widen(p.bias[column + e]);
        }
        if (wide) {
            *(uint2*)to = make_uint2(round_pair(sum[0], sum[1]), round_pair(sum[2], sum[3]));
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (column + e < p.n) to[e] = (u16)round_pair(sum[e], 0.f);
        }
    }
}
