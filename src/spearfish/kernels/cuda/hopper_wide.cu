// y[m, n] = x[m, k] . W[n, k]^T for hundreds of tokens and 16-bit 2:4 weights on Hopper (sm_90a). Nothing has to be
// unpacked, so wgmma.sp reads weights from shared memory, too, and the registers that hopper.cu unpacks into hold more
// sums instead: 192 rows by 256 tokens, which reads x and weights less often.
//
//   producer        one warp with bulk copies of weights and TMA boxes of x into a ring of four stages of 64 k
//   consumers       three warpgroups of 64 rows each by the same 256 tokens, two wgmmas of 128 for each 32 k. (One of
//                   256 would read weights once instead of twice, but with 512 threads ptxas refuses it; without the
//                   producer's warpgroup it was slower.)
//   outputs         whole ones in turn; the last one or two of a block share out their k tiles evenly: all that is left,
//                   in one row, is cut into equal pieces, so a block begins with the end of an output, whose sums it leaves
//                   in global memory, and ends with the beginning of another, to which it adds what others have left
//
// Compiled with -D: TOKENS=128, N_TILES=3, BITS=16, SPARSE=1, BF16.

#include "hopper.cuh"
#include "wgmma.cuh"

constexpr int kTokens = 2 * TOKENS;
constexpr int kConsumers = 128 * N_TILES;
constexpr int kThreads = kConsumers + 128;  // the producer's is a warpgroup that gave up its registers
constexpr int kProducerRegisters = 32;
constexpr int kConsumerRegisters = (65536 - kProducerRegisters * 128) / kConsumers / 8 * 8;
constexpr int kBlockN = 64 * N_TILES;
constexpr int kStages = 4;
constexpr int kStageX = kTokens * 128;                  // 64 k of every token, 128-byte swizzle
constexpr int kTileCodes = CODE_BYTES / 2;              // 64 rows by 64 k
constexpr int kStageCodes = N_TILES * kTileCodes;
constexpr int kMetaSlots = 3;                           // of k tiles: the second half of one is still read when the ring has
constexpr int kMetaSlot = N_TILES * META_BYTES;         // given back its first
constexpr int kOutTokens = 32;                          // tokens that the epilogue stages at a time
constexpr int kOutStride = 64 + 8;                      // 16-bit elements; the pad spreads rows over the banks
constexpr int kSumPieces = 8;                           // in which the sums of a block pass the ring
constexpr int kSumOctets = kTokens / 8 / kSumPieces;    // octets of tokens: 4 numbers of a lane
constexpr int kSumBytes = kSumOctets * kConsumers * 16;

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 2) : "memory");
}

// Where things are in shared memory.
struct Shared {
    u32 full, empty, x, codes, meta, out;
    __device__ __forceinline__ explicit Shared(const void* shared) {
        full = shared_address(shared), empty = full + 8 * kStages;
        x = full + 1024, codes = x + kStages * kStageX, meta = codes + kStages * kStageCodes;
        out = meta + kMetaSlots * kMetaSlot;
    }
};

// A run of k tiles of one output: `count` in the order in which they are shared out, from `from` on; the first is k tile
// `tile` and k tile 0 follows the last. Who has the first of an output adds what `others` blocks have left of it.
struct Piece {
    int output, from, count, tile, others;
};

// Where the share of a block begins, in k tiles of all outputs that are shared out, in a row.
__device__ __forceinline__ int begin_of(const Params& p, int share) {
    return share * p.units + min(share, p.spare);
}
// Backwards, so that a block only ever waits for those with lower numbers: they have started.
__device__ __forceinline__ int share_of_block() {
    return gridDim.x - 1 - blockIdx.x;
}

// The `turn`-th piece of this block; false if there is none.
__device__ __forceinline__ bool piece_of(const Params& p, int turn, Piece& to) {
    // Read anew each time: what is made of it need not lie in registers through the main loop.
    int block, k_tiles = p.k_tiles;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block), "+r"(k_tiles));
    to.output = turn * gridDim.x + block, to.from = to.tile = to.others = 0, to.count = k_tiles;
    if (turn < p.whole) return true;
    const int share = gridDim.x - 1 - block, begin = begin_of(p, share), end = begin_of(p, share + 1);
    const int output = begin / k_tiles + turn - p.whole, first = output * k_tiles, at = max(begin, first);
    if (at >= end) return false;
    to.output = p.whole * gridDim.x + output, to.from = at - first, to.count = min(first + k_tiles, end) - at;
    if (to.count == k_tiles) return true;
    // Who has the beginning of an output does its last k tiles, so that all blocks go through k in step: what they begin
    // with is the end of an output, and the first k tiles.
    int owner_end = end;
    if (to.from) {
        int next = share;
        while (begin_of(p, next - 1) > first) --next;
        owner_end = begin_of(p, next);
    } else {
        while (begin_of(p, share + 1 + to.others) < first + k_tiles) ++to.others;
    }
    to.tile = at - owner_end;
    if (to.tile < 0) to.tile += k_tiles;
    return true;
}

// Who a consumer thread is. Read anew each time, as above.
struct Consumer {
    int thread, lane, warpgroup, warp4;
    __device__ __forceinline__ Consumer() {
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
        lane = thread % 32, warpgroup = warp / 4, warp4 = warp % 4;
    }
};

// acc = the warpgroup's part of `count` k tiles. `stages` and `meta_slot` are where in the ring the first is, and at the
// end where the next will be.
__device__ __forceinline__ void multiply(const Params& p, const Shared& s, float (&acc)[2][TOKENS / 2], int count,
                                         u32& stages, u32& meta_slot) {
    const Consumer me;
    const bool arrives = me.lane < kArriving;
    u32 at_meta = s.meta + me.warpgroup * META_BYTES + me.warp4 * META_WARP_BYTES + me.lane * 8;
    int zero = p.zero;
    asm volatile("" : "+r"(at_meta), "+r"(zero));  // opaque, or the compiler computes them anew at every use
    const u32 x_low = 1u << 16 | s.x >> 4, codes_low = 64u << 16 | (s.codes + me.warpgroup * kTileCodes) >> 4;
    u32 meta[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) acc[j / (TOKENS / 2)][j % (TOKENS / 2)] = 0.f;

    // Half a k tile, a stage; what came before it is over by its end.
    auto half_tile = [&](int half, bool gives_back) {
        const u32 stage = stages % kStages;
        barrier_wait(s.full + 8 * stage, stages / kStages % 2);
        // As in hopper.cu: the address depends on what wgmmas that are over have read.
        u32 from = at_meta + meta_slot * kMetaSlot + 4 * half;
        asm volatile("lop3.b32 %0, %1, %2, %0, 0xea;" : "+r"(from) : "r"(meta[half]), "r"(zero));
        meta[half] = load_shared(from);
        // Descriptors. x: 8-row atoms 1024 bytes apart, 128-byte swizzle. Codes: 8 x 8 matrices, 1024 bytes from one to
        // the next along k and 128 along the rows. Only the low word changes.
        const u32 x = x_low + stage * (kStageX / 16), codes = codes_low + stage * (kStageCodes / 16);
        auto x_of = [&](int step, int part) {
            return static_cast<u64>(1u << 30 | 64u) << 32 | (x + (step * 64 + part * TOKENS * 128) / 16);
        };
        auto codes_of = [&](int step) { return static_cast<u64>(8u) << 32 | (codes + step * CHUNK_BYTES / 16); };
        wgmma_fence();
        wgmma<0>(acc[0], codes_of(0), x_of(0, 0), meta[half]);
        wgmma<0>(acc[1], codes_of(0), x_of(0, 1), meta[half]);
        wgmma<1>(acc[0], codes_of(1), x_of(1, 0), meta[half]);
        wgmma<1>(acc[1], codes_of(1), x_of(1, 1), meta[half]);
        wgmma_commit();
        wgmma_wait<1>();
        if (gives_back) {
            __syncwarp();
            if (arrives) barrier_arrive(s.empty + 8 * ((stages - 1) % kStages));
        }
        ++stages;
    };
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        half_tile(0, i > 0);
        half_tile(1, true);
        if (++meta_slot == kMetaSlots) meta_slot = 0;
    }
    wgmma_wait<0>();
    __syncwarp();
    if (arrives) barrier_arrive(s.empty + 8 * ((stages - 1) % kStages));
}

// What a block has of the end of an output goes to global memory.
__device__ __forceinline__ void leave_sums(const Params& p, const float (&acc)[2][TOKENS / 2]) {
    const int share = share_of_block();
    float4* to = reinterpret_cast<float4*>(p.partial) + share * (kBlockN * kTokens / 4) + threadIdx.x;
    leave(to, kConsumers, acc);
    asm volatile("fence.proxy.async;" ::: "memory");  // it will be read by bulk copies
    consumer_sync<kConsumers>();
    if (threadIdx.x == 0) store_release(p.arrived + share, p.ticket);
}

// acc += what the producer sends of another block's sums.
__device__ __forceinline__ void take_sums(const Shared& s, float (&acc)[2][TOKENS / 2], u32& stages) {
    const Consumer me;
#pragma unroll
    for (int piece = 0; piece < kSumPieces; ++piece, ++stages) {
        const u32 stage = stages % kStages;
        barrier_wait(s.full + 8 * stage, stages / kStages % 2);
#pragma unroll
        for (int j = 0; j < kSumOctets; ++j) {
            const uint4 v = load16(s.x + stage * kStageX + (j * kConsumers + me.thread) * 16);
            const int i = piece * kSumOctets + j;
            float* d = &acc[i / (TOKENS / 8)][i % (TOKENS / 8) * 4];
            d[0] += __uint_as_float(v.x), d[1] += __uint_as_float(v.y), d[2] += __uint_as_float(v.z),
                d[3] += __uint_as_float(v.w);
        }
        __syncwarp();
        if (me.lane < kArriving) barrier_arrive(s.empty + 8 * stage);
    }
}

// Turn [rows of W, tokens] into [token, n] through shared memory, a few tokens at a time, and store 16 bytes a lane.
__device__ __forceinline__ void store(const Params& p, const Shared& s, const float (&acc)[2][TOKENS / 2], int output) {
    const Consumer me;
    int n_block, token0;
    place_output<kTokens>(p, output, n_block, token0);
    const int row0 = n_block * kBlockN + me.warpgroup * 64, tokens = min(kTokens, p.m - token0);
    const u32 out = s.out + me.warpgroup * (kOutTokens * kOutStride * 2);
    float bias[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = min(row0 + me.warp4 * 16 + me.lane / 4 + 8 * h, p.n - 1);
        bias[h] = p.bias ? widen(p.bias[row]) : 0.f;
    }
    const u32 lane_out =
        out + 2 * ((me.lane % 8 + 8 * (me.lane / 16)) * kOutStride + me.warp4 * 16 + 8 * ((me.lane / 8) & 1));
    const int piece = me.thread % 8, first = me.thread % 128 / 8, column = row0 + piece * 8;  // of 16 bytes
    const bool aligned = p.n % 8 == 0;
#pragma unroll
    for (int first_token = 0; first_token < kTokens; first_token += kOutTokens) {
        warpgroup_sync(me.warpgroup);  // the last reads are over
#pragma unroll
        for (int j = 0; j < kOutTokens / 8; j += 2) {
            u32 r[4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int i = first_token / 8 + j + h;
                const float* d = &acc[i / (TOKENS / 8)][i % (TOKENS / 8) * 4];
                r[2 * h] = round_pair(d[0] + bias[0], d[1] + bias[0]);
                r[2 * h + 1] = round_pair(d[2] + bias[1], d[3] + bias[1]);
            }
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                             lane_out + 2 * (8 * j * kOutStride)),
                         "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                         : "memory");
        }
        warpgroup_sync(me.warpgroup);
#pragma unroll 1
        for (int token = first; token < kOutTokens && first_token + token < tokens; token += 16) {
            const uint4 v = load16(out + 2 * (token * kOutStride + piece * 8));
            store_eight(p, token0 + first_token + token, column, v, aligned);
        }
    }
}

__device__ __forceinline__ void consume(const Params& p, const void* shared) {
    float acc[2][TOKENS / 2];
    u32 stages = 0, meta_slot = 0;
    Piece piece;
#pragma unroll 1
    for (int turn = 0; piece_of(p, turn, piece); ++turn) {
        multiply(p, Shared(shared), acc, piece.count, stages, meta_slot);
        piece_of(p, turn, piece);
        if (piece.from) {
            leave_sums(p, acc);
            continue;
        }
#pragma unroll 1
        for (int other = 0; other < piece.others; ++other) take_sums(Shared(shared), acc, stages);
        store(p, Shared(shared), acc, piece.output);
    }
}

// One warp. Lanes copy the weights, the first also x.
__device__ __forceinline__ void produce(const Params& p, const void* shared) {
    const Shared s(shared);
    const int lane = threadIdx.x % 32;
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    int n_block, token0, stages = 0, meta_slot = 0;
    const u8* row = nullptr;  // of tiles that this lane copies from: lane i codes, lane 16 + i metadata
    auto wait = [&]() { barrier_wait(s.empty + 8 * (stages % kStages), stages / kStages % 2 ^ 1); };
    auto send_weights = [&](int tile, int half) {
        const int stage = stages % kStages, own = lane % 16;
        const u32 full = s.full + 8 * stage;
        if (lane == 0) barrier_expect(full, kStageX + kStageCodes + (half ? 0 : kMetaSlot));
        __syncwarp();
        const u8* from = row + static_cast<i64>(tile) * p.tile_bytes;
        if (lane < N_TILES)
            copy_weights(s.codes + stage * kStageCodes + own * kTileCodes, from + half * kTileCodes, kTileCodes, full,
                         policy);
        if (half == 0 && lane >= 16 && own < N_TILES)
            copy_weights(s.meta + meta_slot * kMetaSlot + own * META_BYTES, from + CODE_BYTES, META_BYTES, full, policy);
        if (half && ++meta_slot == kMetaSlots) meta_slot = 0;
    };
    auto send_x = [&](int tile, int stage) {
        if (lane == 0)
            copy_x(s.x + stage * kStageX, &p.x_map, token0, tile * 2 + stage % 2, s.full + 8 * stage);
    };
    Piece piece;
#pragma unroll 1
    for (int turn = 0; piece_of(p, turn, piece); ++turn) {
        place_output<kTokens>(p, piece.output, n_block, token0);
        row = p.stream + static_cast<i64>(min(n_block * N_TILES + lane % 16, p.n_tiles - 1)) * p.k_tiles * p.tile_bytes;
        int tile = piece.tile, left = 2 * piece.count;  // stages
        auto next = [&](int half) {
            if (half && ++tile == p.k_tiles) tile = 0;
        };
        if (turn == 0) {
            // Weights do not depend on the kernel before this one: the first are asked for at once.
            const int begun = min(kStages, left);
#pragma unroll 1
            for (; stages < begun; ++stages) send_weights(tile, stages % 2), next(stages % 2);
            asm volatile("griddepcontrol.wait;" ::: "memory");
            tile = piece.tile;
#pragma unroll 1
            for (int stage = 0; stage < begun; ++stage) send_x(tile, stage), next(stage % 2);
            left -= begun;
        }
#pragma unroll 1
        for (; left > 0; --left, ++stages) {
            wait();
            send_weights(tile, stages % 2);
            send_x(tile, stages % kStages);
            next(stages % 2);
        }
        const u8* from = reinterpret_cast<const u8*>(p.partial) +
                         static_cast<i64>(share_of_block() + 1) * (kSumPieces * kSumBytes);
#pragma unroll 1
        for (int i = 0; i < piece.others * kSumPieces; ++i, ++stages) {
            wait();
            const int stage = stages % kStages;
            if (lane == 0) {
                if (i % kSumPieces == 0) {
                    u64* flag = p.arrived + share_of_block() + 1 + i / kSumPieces;
                    while (load_acquire(flag) != p.ticket) __nanosleep(20);
                    *flag = 0;  // it is left cleared
                    asm volatile("fence.proxy.async;" ::: "memory");
                }
                barrier_expect(s.full + 8 * stage, kSumBytes);
                copy_weights(s.x + stage * kStageX, from + i * kSumBytes, kSumBytes, s.full + 8 * stage, policy);
            }
            __syncwarp();
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) hopper_wide(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const int warp = warp_number();
    if (threadIdx.x == 0) {
        prefetch_map(&p.x_map);
        const Shared s(shared);
#pragma unroll 1
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(s.full + 8 * stage, 1);
            barrier_init(s.empty + 8 * stage, 4 * N_TILES * kArriving);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;");
    if (warp >= 4 * N_TILES) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        if (warp == 4 * N_TILES) produce(p, shared);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    consume(p, shared);
}
