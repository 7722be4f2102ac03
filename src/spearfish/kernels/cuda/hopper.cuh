// What the Hopper kernels share: barriers, bulk copies, the sum of partial results in a cluster, unpacking of codes.
#pragma once

#include "common.cuh"

struct alignas(64) TensorMap {
    u64 opaque[16];
};

constexpr int kMaxStages = 32;
constexpr int kMaxChunks = 8;  // of the sums
constexpr int kSpareBarriers = 2 * kMaxStages + kMaxChunks;  // from here on nobody waits

struct Params {
    TensorMap x_map;            // x as [k / 64, m, 64]; boxes of a stage's k by TOKENS rows, 128-byte swizzle
    const u8* stream;           // tile stream
    const float* column_scale;  // [n padded] or null
    const u16* bias;            // [n] or null
    u16* y;                     // [m, n]
    float* partial;             // sums that blocks leave for one another, each the room of one output
    u64* arrived;               // flags that they are there
    u64 ticket;                 // what a raised flag says, another number in every call
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
    int units;     // k tiles of a block where they are shared out evenly, over the ends of outputs; else 0
    int spare;     // so many blocks have one more
    int extras;     // blocks in front of the others that do the last k tiles of all outputs
    int own_tiles;  // k tiles of an output that are not theirs
    int zero;      // 0, unknown to the compiler
    int whole;     // of hopper_wide: turns of whole outputs before what is left is shared out evenly
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
// The barriers of a block, the work of all warps: one after another they would take as long as the first bytes from
// memory. Full and empty for each stage, full without the first `begun`; and one for each chunk of the sums.
__device__ __forceinline__ void init_barriers(u32 full, int begun, const Params& p, int warp, int warps, u32 readers) {
    // No write that a predicate may switch off: compute-sanitizer's racecheck counts those, so there are spare places
    // for what need not be done, and loops that are not unrolled.
    if (threadIdx.x % 32 == 0) {
#pragma unroll 1
        for (int stage = warp; stage < p.stages; stage += warps) {
            barrier_init(full + 8 * (stage >= begun ? stage : kSpareBarriers + stage), 1);
            barrier_init(full + 8 * (kMaxStages + stage), readers);
        }
#pragma unroll 1
        for (int chunk = warp; chunk < kMaxChunks; chunk += warps)
            barrier_init(full + 8 * (2 * kMaxStages + chunk), 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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
    __device__ __forceinline__ explicit Magic(int zero) : magic(kMagic | zero), sixteenth(0x2c002c00u | zero) {
        asm volatile("" : "+r"(magic), "+r"(sixteenth));
    }
};

__device__ __forceinline__ void store16(u32 to_shared, const float* four) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to_shared), "f"(four[0]), "f"(four[1]), "f"(four[2]),
                 "f"(four[3])
                 : "memory");
}

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
// Every thread of a cluster passes the same barriers but for the last: at the start, if what neighbours send arrives
// beside the ring and may come before it is done; after the ring, if it arrives where the ring was; at the end, since
// no block may be gone while a neighbour still sends to it or what it sends is under way. There only producers wait,
// which keeps their block in place: consumers leave when they have all sums, and who has left counts as arrived.

struct Cluster {
    int split, overlaid;
    // Asked anew each time: an answer kept through the main loop would take a register there.
    __device__ __forceinline__ bool several() const {
        int blocks = split;
        asm volatile("" : "+r"(blocks));
        return blocks > 1;
    }
    __device__ __forceinline__ void arrive_at_start() const {
        if (several() && !overlaid) cluster_arrive();
    }
    __device__ __forceinline__ void before_sums() const {
        if (several() && overlaid) cluster_arrive();
        if (several()) cluster_wait();
    }
    __device__ __forceinline__ void stay() const {
        if (several()) cluster_arrive(), cluster_wait();
    }
};

// ----------------------------------------------------------------------------------------------------------- outputs

// Where an output lies. They walk `band` token blocks, then the next rows, so that a wave of blocks shares both x and
// weights in the L2.
template <int kTokens>
__device__ __forceinline__ void place_output(const Params& p, int output, int& n_block, int& token0) {
    if (p.token_blocks == 1) {  // spare the divisions
        n_block = output, token0 = 0;
        return;
    }
    const int per_band = p.band * p.n_blocks;
    const int band = output / per_band, rest = output - band * per_band;
    const int width = min(p.band, p.token_blocks - band * p.band);
    n_block = rest / width;
    token0 = (band * p.band + rest % width) * kTokens;
}

// Eight numbers of y from `column` on, those that y has; `aligned` if rows of y are multiples of 16 bytes.
__device__ __forceinline__ void store_eight(const Params& p, int token, int column, uint4 v, bool aligned) {
    u16* to = p.y + static_cast<i64>(token) * p.n + column;
    if (aligned) {
        if (column < p.n) *(uint4*)to = v;
    } else {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (column + e < p.n) to[e] = (u16)(words[e / 2] >> (16 * (e % 2)));
    }
}

// All accumulators of a thread to global memory, four at a time, `stride` float4 apart.
template <int kParts, int kNumbers>
__device__ __forceinline__ void leave(float4* to, int stride, const float (&acc)[kParts][kNumbers]) {
#pragma unroll
    for (int i = 0; i < kParts * kNumbers / 4; ++i) {
        const float* d = &acc[i / (kNumbers / 4)][i % (kNumbers / 4) * 4];
        __stcg(to + i * stride, make_float4(d[0], d[1], d[2], d[3]));
    }
}

// ------------------------------------------------------------------------------------------------------ partial sums
//
// The accumulators of an output tile [kBlockN rows of W, kTokens] lie in `kGroups` warpgroups of each of `split`
// blocks. Where the tokens can be shared out, the groups of a block first add up among themselves: each hands the
// others their share of the tokens, in the order of the registers. Then every block owns a slice of the rows. All write
// their part to their own shared memory as [part][owner][token][slice], so that what an owner gets is contiguous, send
// it there with bulk copies, and each owner adds up its pieces in the order of rank and part: the same bits on every
// run. Tokens go in chunks, so that the first are added while the next are on their way. Called by all consumer threads
// after the ring is done; passes the cluster barrier `before_sums`.
template <int kTokens, int kMTiles, int kGroups, int kBlockN, int kThreads>
__device__ __forceinline__ void sum_and_store(const Params& p, const Cluster& cluster,
                                              float (&acc)[kMTiles][kTokens / 2], u32 sh_mine, u32 bar, int k_rank,
                                              int group, int first_row, int column0, int token0) {
    constexpr int kPairs = kTokens / 8;                          // of token octets: 4 numbers of a lane and m tile
    constexpr bool kShares = kTokens > 16 && kGroups > 1 && kPairs % kGroups == 0;
    constexpr int kShare = kShares ? kPairs / kGroups : kPairs;  // octets that a group keeps
    constexpr int kParts = kShares ? 1 : kGroups;                // that every owner adds up of a block
    int split = p.split, thread = threadIdx.x;
    asm volatile("" : "+r"(split), "+r"(thread));  // or what is made of them is kept in registers through the main loop
    const int lane = thread % 32, gq = lane / 4, t = lane % 4;
    const int shift = 31 - __clz(kBlockN / split), slice = 1 << shift;
    const int stride = slice + 4;  // floats of a token; the pad spreads the banks
    const u32 piece = kTokens * stride * 4;
    const int tokens = min(kTokens, p.m - token0);
    const u32 sh_received = sh_mine + p.received;
    // Four columns a thread, of every `step`-th token; a chunk is what all threads do at a time.
    constexpr int kBatch = kTokens >= 128 ? 2 : 1;
    const int c = (thread & (slice / 4 - 1)) * 4, column = column0 + k_rank * slice + c;
    const int log_step = __ffs(kThreads) - 1 - (shift - 2);
    const int first = thread >> (shift - 2), chunk_tokens = kBatch << log_step;
    const int chunks = (tokens + chunk_tokens - 1) >> (log_step + (kBatch > 1));
    auto chunk_bytes = [&](int chunk) {
        return (min(chunk_tokens, (tokens + 7) / 8 * 8 - chunk * chunk_tokens)) * stride * 4;
    };
    if (split > 1 && thread < chunks)
        barrier_expect(bar + 8 * thread, (split - 1) * kParts * chunk_bytes(thread));
    consumer_sync<kThreads>();  // everybody is done with the ring
    // What this thread has a part in: all of its accumulators, or its group's share of the tokens.
    float own[kMTiles][4 * kShare];
    const int part = kShares ? 0 : group, first_token = kShares ? 8 * kShare * group : 0;
    if constexpr (kShares) {
        const u32 sh_gifts = sh_mine + split * piece + (thread % 128) * 16;
        auto gift = [&](int to, int from, int i) {  // 16 bytes of a thread for each octet of tokens
            const int tile = first_row / 64 + i, pair = to * (kGroups - 1) + from - (from > to);
            return sh_gifts + (pair * (kBlockN / 64) + tile) * (kShare * 2048);
        };
#pragma unroll
        for (int to = 0; to < kGroups; ++to)
#pragma unroll
            for (int i = 0; i < kMTiles; ++i)
#pragma unroll
                for (int j = 0; j < kShare; ++j) {
                    const float* d = &acc[i][4 * (to * kShare + j)];
                    if (to != group)
                        store16(gift(to, group, i) + j * 2048, d);
                    else
#pragma unroll
                        for (int e = 0; e < 4; ++e) own[i][4 * j + e] = d[e];
                }
        consumer_sync<kThreads>();
#pragma unroll
        for (int other = 1; other < kGroups; ++other)
#pragma unroll
            for (int i = 0; i < kMTiles; ++i)
#pragma unroll
                for (int j = 0; j < kShare; ++j) {
                    const uint4 v = load16(gift(group, (group + other) % kGroups, i) + j * 2048);
                    own[i][4 * j] += __uint_as_float(v.x), own[i][4 * j + 1] += __uint_as_float(v.y),
                        own[i][4 * j + 2] += __uint_as_float(v.z), own[i][4 * j + 3] += __uint_as_float(v.w);
                }
    } else {
#pragma unroll
        for (int i = 0; i < kMTiles; ++i)
#pragma unroll
            for (int j = 0; j < 4 * kShare; ++j) own[i][j] = acc[i][j];
    }
#pragma unroll
    for (int i = 0; i < kMTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + i * 64 + gq + 8 * h;
            u32 to = sh_mine + (part * split + (row >> shift)) * piece +
                     4 * ((first_token + 2 * t) * stride + (row & (slice - 1)));
#pragma unroll
            for (int j = 0; j < kShare; ++j) {
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(own[i][4 * j + 2 * h]) : "memory");
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + 4 * stride), "f"(own[i][4 * j + 2 * h + 1])
                             : "memory");
                asm volatile("add.u32 %0, %0, %1;"
                             : "+r"(to)
                             : "r"(32 * stride));  // opaque: all addresses at once would not fit the registers
            }
        }
    if (split > 1) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        cluster.before_sums();
        consumer_sync<kThreads>();
        const int log_copies = 31 - __clz(split * kParts), chunk = thread >> log_copies;
        const int owner = thread / kParts & (split - 1), from = thread % kParts;
        if (chunk < chunks && owner != k_rank) {
            const int slot = k_rank - (k_rank > owner);  // an owner does not send to itself
            const u32 at = chunk * chunk_tokens * stride * 4;
            copy_to_neighbour(remote_address(sh_received + (slot * kParts + from) * piece + at, owner),
                              sh_mine + (from * split + owner) * piece + at, chunk_bytes(chunk),
                              remote_address(bar + 8 * chunk, owner));
        }
        __syncwarp();
    } else {
        consumer_sync<kThreads>();
    }
    const bool wide = p.n % 4 == 0;
    float scale[4], bias[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const int at = min(column + e, p.n - 1);
        scale[e] = p.column_scale ? p.column_scale[at] : 1.f;
        bias[e] = p.bias ? widen(p.bias[at]) : 0.f;
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
        if (split > 1) barrier_wait(bar + 8 * chunk, 0);
        const int token = chunk * chunk_tokens + first;
        if (token >= tokens || column >= p.n) continue;
        float sum[kBatch][4];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.f;
        for (int rank = 0; rank < split; ++rank) {
            const u32 from =
                rank == k_rank ? sh_mine + rank * piece : sh_received + (rank - (rank > k_rank)) * kParts * piece;
            const u32 next = rank == k_rank ? split * piece : piece;
#pragma unroll
            for (int g = 0; g < kParts; ++g)
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    // Beyond the last token this reads what nobody uses.
                    const int there = min(token + (i << log_step), kTokens - 1);
                    const uint4 v = load16(from + g * next + 4 * (there * stride + c));
                    sum[i][0] += __uint_as_float(v.x), sum[i][1] += __uint_as_float(v.y),
                        sum[i][2] += __uint_as_float(v.z), sum[i][3] += __uint_as_float(v.w);
                }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int at = token + (i << log_step);
            if (at >= tokens) break;
            u16* to = p.y + static_cast<i64>(token0 + at) * p.n + column;
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[i][e] = fmaf(sum[i][e], scale[e], bias[e]);
            if (wide) {
                *(uint2*)to = make_uint2(round_pair(sum[i][0], sum[i][1]), round_pair(sum[i][2], sum[i][3]));
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (column + e < p.n) to[e] = (u16)round_pair(sum[i][e], 0.f);
            }
        }
    }
}
