// y[m, n] = x[m, k] . W[n, k]^T for many tokens on Hopper (sm_90a): W from the tile stream, unpacked in registers,
// times x in shared memory. Operands are swapped: the weights are the M side of wgmma, the tokens its N side, so
// unpacked weights never touch shared memory.
//
//   producer warp   bulk copies of weight tiles and TMA boxes of x into a ring of stages
//   consumers       warpgroups, N_TILES side by side times GROUPS behind one another (alternating weight tiles along
//   k),
//                   each owning M_TILES x 64 output rows; warpgroups side by side read the same x
//   cluster         SPLIT blocks share one output tile, each with its own range of k, and add their partial sums
//   through
//                   distributed shared memory. SHARE blocks with neighbouring rows fetch x once between them
//                   (multicast).
//
// The consumers' loop in steps of one wgmma: while a step runs, the same step of the next chunk is unpacked into the
// other half of the A registers. Four or five wgmmas of a warpgroup are always under way.
//
// Compiled per variant with -D: TOKENS (32 to 128), N_TILES, M_TILES, GROUPS, BITS (4, 8, 16), SPARSE, BF16.

#include "hopper.cuh"
#include "wgmma.cuh"

constexpr int kTokens = TOKENS;
constexpr int kMTiles = M_TILES;
constexpr int kGroups = GROUPS;
constexpr int kWarpgroups = N_TILES * kGroups;
constexpr int kConsumerWarps = 4 * kWarpgroups;
constexpr int kThreads =
    32 * kConsumerWarps + 128;  // the producer is one warp of a warpgroup that gave up its registers
constexpr int kEntryRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = kWarpgroups > 2 ? 40 : 48;
constexpr int kFreeRegisters = (kEntryRegisters * kThreads - kProducerRegisters * 128) / (128 * kWarpgroups) / 8 * 8;
constexpr int kConsumerRegisters = kFreeRegisters > 240 ? 240 : kFreeRegisters;
constexpr int kBlockTiles = N_TILES * kMTiles;  // 64-row weight tiles of a block
constexpr int kBlockN = 64 * kBlockTiles;
constexpr int kBoxBytes = kTokens * 128;  // 64 k of every token, 128-byte swizzle
constexpr int kXTileBytes = 2 * kBoxBytes;
constexpr int kXStageBytes = kGroups * kXTileBytes;
constexpr int kSteps = 4;  // wgmmas of a chunk: half of the A registers
constexpr int kHalves = TILE_K / (STEP_K * kSteps);
constexpr int kChunks = kMTiles * kHalves;               // chunks of a stage
constexpr int kOutTokens = kTokens < 32 ? kTokens : 32;  // tokens that the epilogue stages at a time
constexpr int kOutStride = 64 * kMTiles + 8;             // 16-bit elements; the pad spreads rows over the banks

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 2) : "memory");
}

// One chunk's share of a lane, read ahead of its unpacking.
struct Raw {
#if BITS != 16
    uint4 codes[BITS / 4];
    u32 scale;  // of the chunk's first step; later ones are read when they differ
#endif
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) hopper(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group_bytes = kGroups * p.tile_bytes;
    const int weight_stage = kBlockTiles * group_bytes;
    const u32 sh_full = shared_address(shared), sh_empty = sh_full + 8 * kMaxStages,
              sh_reduced = sh_empty + 8 * kMaxStages;
    const u32 sh_x = sh_full + 1024;  // boxes want this alignment
    const u32 sh_w = sh_x + p.stages * kXStageBytes;
    const u32 sh_out = (sh_w + p.stages * weight_stage + 127) & ~127u;

    const Cluster cluster = {p.split, p.share, p.overlaid};
    // Powers of two throughout: a division would cost more than all the rest of the start. Not from %clusterid and
    // %nclusterid, which say nothing useful in a launch without clusters.
    const int log_cluster = 31 - __clz(p.split * p.share);
    const int rank = blockIdx.x & ((1 << log_cluster) - 1);
    const int k_rank = rank & (p.split - 1), n_rank = rank >> (31 - __clz(p.split));

    if (warp == kConsumerWarps) {
        if (lane < p.stages) {
            barrier_init(sh_full + 8 * lane, 1);
            barrier_init(sh_empty + 8 * lane, kConsumerWarps * p.share);
        }
        if (lane == 0) barrier_init(sh_reduced, 1), prefetch_map(&p.x_map);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster.arrive_at_start();
    asm volatile("griddepcontrol.launch_dependents;");

    const int outputs = p.n_groups * p.token_blocks;
    const int log_split = 31 - __clz(p.split);
    const int k_begin = p.k_tiles * k_rank >> log_split, k_count = (p.k_tiles * (k_rank + 1) >> log_split) - k_begin;
    const int stage_count = (k_count + kGroups - 1) / kGroups;
    const int first = blockIdx.x >> log_cluster, stride = gridDim.x >> log_cluster;

    // Walk `band` token blocks, then the next rows, so that a wave of blocks shares both x and weights in the L2.
    auto place = [&](int output, int& n_block, int& token0) {
        const int per_band = p.band * p.n_groups;
        const int band = output / per_band, rest = output - band * per_band;
        const int width = min(p.band, p.token_blocks - band * p.band);
        n_block = (rest / width) * p.share + n_rank;
        token0 = (band * p.band + rest % width) * kTokens;
    };

    if (warp >= kConsumerWarps) {
        // ------------------------------------------------------------------------------------------------- producer
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        cluster.before_multicast();
        if (warp == kConsumerWarps) {
            // Lane i copies the block's weight tile i, with two lanes a k tile the same lanes then fetch the boxes of
            // x.
            u64 policy;
            asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
            const int share_rows = kTokens / p.share;
            const u8* source = nullptr;  // of this lane's next weight tile
            auto tiles_of = [&](int i) { return min(kGroups, k_count - i * kGroups); };
            auto send_weights = [&](int i, int stage) {
                const u32 full = sh_full + 8 * stage;
                const int tiles = tiles_of(i);
                if (lane == 0) barrier_expect(full, tiles * (kBlockTiles * p.tile_bytes + kXTileBytes));
                __syncwarp();
                if (lane < kBlockTiles)
                    copy_weights(sh_w + stage * weight_stage + lane * group_bytes, source, tiles * p.tile_bytes, full,
                                 policy);
                source += group_bytes;
            };
            auto seek = [&](int n_block) {
                source = p.stream +
                         (static_cast<i64>(min(n_block * kBlockTiles + lane, p.n_tiles - 1)) * p.k_tiles + k_begin) *
                             p.tile_bytes;
            };
            int stage = 0;
            u32 phase = 1;
            // Weights do not depend on the kernel before this one: ask for the first of them, then wait for x.
            int ahead = 0;
            if (first < outputs) {
                int n_block, token0;
                place(first, n_block, token0);
                seek(n_block);
                for (; ahead < min(min(p.stages, p.ahead), stage_count); ++ahead) send_weights(ahead, ahead);
            }
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int output = first; output < outputs; output += stride) {
                int n_block, token0;
                place(output, n_block, token0);
                if (output != first) seek(n_block);
                for (int i = 0; i < stage_count; ++i) {
                    if (ahead > 0) {
                        --ahead;
                    } else {
                        barrier_wait(sh_empty + 8 * stage, phase);
                        send_weights(i, stage);
                    }
                    if (lane < 2 * tiles_of(i)) {
                        const u32 to = sh_x + stage * kXStageBytes + lane * kBoxBytes, full = sh_full + 8 * stage;
                        const int k = (k_begin + i * kGroups) * TILE_K + lane * 64;
                        if (p.share == 1) {
                            copy_x(to, &p.x_map, k, token0, full);
                        } else {
                            u16 mask = 0;
                            for (int r = 0; r < p.share; ++r) mask |= 1u << (r * p.split + k_rank);
                            copy_x_multicast(to + n_rank * share_rows * 128, &p.x_map, k, token0 + n_rank * share_rows,
                                             full, mask);
                        }
                    }
                    if (++stage == p.stages) stage = 0, phase ^= 1;
                }
            }
        }
        __syncwarp();
        cluster.before_sums();
        cluster.arrive_at_end();
        cluster.wait_at_end();
        return;
    }

    // --------------------------------------------------------------------------------------------------- consumers
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    const int warpgroup = warp / 4, warp4 = warp % 4, gq = lane / 4;
    const int group = warpgroup / N_TILES, first_tile = (warpgroup % N_TILES) * kMTiles;
    const u32 tile = sh_w + first_tile * group_bytes + group * p.tile_bytes;
    u32 lane_codes = tile + warp4 * (CODE_WARP_BYTES) + lane * 16;
    u32 lane_meta = tile + CODE_BYTES + warp4 * 256 + lane * 8;
    u32 lane_scale = tile + SCALE_OFFSET + warp4 * 32 + gq * 4;
    // Opaque, or the compiler computes them anew at every use.
    asm volatile("" : "+r"(lane_codes), "+r"(lane_meta), "+r"(lane_scale));
    const int first_row = first_tile * 64;  // of the block's rows of W
    // Descriptor of x, K-major with 128-byte swizzle: 8-row atoms 1024 bytes apart. Only the low word changes.
    const u64 x_high = (u64)((1u << 30) | 64u) << 32;
    const u32 x_low = (1u << 16) | (sh_x + group * kXTileBytes) >> 4;
    const Magic magic(p.zero);

    float acc[kMTiles][kTokens / 2];
    u32 a[2][kSteps][4];
    u32 meta[2][2] = {{0, 0}, {0, 0}};
    [[maybe_unused]] Raw raw;
    [[maybe_unused]] u32 s0 = 0, s1 = 0;

    auto offset = [&](int stage, int chunk) { return stage * weight_stage + (chunk / kHalves) * group_bytes; };
    auto read = [&](int stage, int chunk) {
#if BITS != 16
        const u32 at = offset(stage, chunk);
        const int half = chunk % kHalves;
#pragma unroll
        for (int i = 0; i < BITS / 4; ++i) raw.codes[i] = load16(lane_codes + at + (half * (BITS / 4) + i) * 512);
        raw.scale = p.granules ? load_shared(lane_scale + at + (half * p.granules / kHalves) * 128) : ONES;
#endif
    };
    // A wgmma under way still reads its A and metadata registers. The compiler (13.0) keeps the former for it but takes
    // the latter for free: it was seen to load the next metadata over those of a running wgmma. So the address of the
    // next metadata is made to depend on the old ones, whose wgmma is over by then. Tests look for such overwriting in
    // the machine code of every variant.
    auto read_meta = [&](int buffer, int stage, int chunk) {
#if SPARSE
        u32 at = lane_meta + offset(stage, chunk);
        asm volatile("lop3.b32 %0, %1, %2, %0, 0xea;" : "+r"(at) : "r"(meta[buffer][0]), "r"(p.zero));
        asm volatile("lop3.b32 %0, %1, %2, %0, 0xea;" : "+r"(at) : "r"(meta[buffer][1]), "r"(p.zero));
        load_shared(meta[buffer], at);
#endif
    };
    auto unpack_step = [&](int buffer, int stage, int chunk, int s) {
#if BITS == 16
        const uint4 c = load16(lane_codes + offset(stage, chunk) + ((chunk % kHalves) * kSteps + s) * 512);
        a[buffer][s][0] = c.x, a[buffer][s][1] = c.y, a[buffer][s][2] = c.z, a[buffer][s][3] = c.w;
#else
        if (s == 0) {
            s0 = both_low(raw.scale), s1 = both_high(raw.scale);
        } else {
            // Only where groups are shorter than a tile; a branch, since predicated instructions would take their time
            // anyway.
            asm volatile(
                "{\n.reg .pred p;\n.reg .b32 v;\nsetp.le.s32 p, %2, 1;\n@p bra.uni SKIP;\nld.shared.u32 v, [%3];\n"
                "prmt.b32 %0, v, v, 0x1010;\nprmt.b32 %1, v, v, 0x3232;\nSKIP:\n}"
                : "+r"(s0), "+r"(s1)
                : "r"(p.granules), "r"(lane_scale + offset(stage, chunk) +
                                       (((chunk % kHalves) * kSteps + s) * p.granules / (TILE_K / STEP_K)) * 128)
                : "memory");
        }
#if BITS == 4
        const uint4 c = raw.codes[0];
        unpack4(a[buffer][s], s == 0 ? c.x : s == 1 ? c.y : s == 2 ? c.z : c.w, magic);
#else
        const uint4 c = raw.codes[s / 2];
        unpack8(a[buffer][s], s % 2 ? c.z : c.x, s % 2 ? c.w : c.y, magic);
#endif
        scale_rows(a[buffer][s], s0, s1);
#endif
    };
    auto multiply = [&](int buffer, int stage, int chunk, int s) {
        const int k =
            ((chunk % kHalves) * kSteps + s) * STEP_K;  // dense k in the tile: box k / 64, 2 bytes each inside it
        const u64 x = x_high | (x_low + stage * (kXStageBytes / 16) + ((k / 64) * kBoxBytes + (k % 64) * 2) / 16);
        wgmma_fence();
        if (s % 2 == 0)
            wgmma<0>(acc[chunk / kHalves], a[buffer][s], x, s / 2 ? meta[buffer][1] : meta[buffer][0]);
        else
            wgmma<1>(acc[chunk / kHalves], a[buffer][s], x, s / 2 ? meta[buffer][1] : meta[buffer][0]);
        wgmma_commit();
    };
    auto release = [&](int stage) {
        if (p.share == 1) {
            if (lane == 0) barrier_arrive(sh_empty + 8 * stage);
        } else if (lane < p.share) {
            barrier_arrive_remote(remote_address(sh_empty + 8 * stage, lane * p.split + k_rank));
        }
    };

    // Of the stages, those that hold a tile for this group: all, or all but the last. At least one, as the host sees
    // to.
    const int my_count = (k_count - group + kGroups - 1) / kGroups;
    int stage = 0;
    u32 phase = 0;
    cluster.before_multicast();
    for (int output = first; output < outputs; output += stride) {
        int n_block, token0;
        place(output, n_block, token0);
#pragma unroll
        for (int i = 0; i < kMTiles; ++i)
#pragma unroll
            for (int j = 0; j < kTokens / 2; ++j) acc[i][j] = 0.f;

        int previous = stage;
        barrier_wait(sh_full + 8 * stage, phase);
        read(stage, 0);
        read_meta(0, stage, 0);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) unpack_step(0, stage, 0, s);
        constexpr int kUnroll = kChunks % 2 ? 2 : 1;  // so that the buffer of a chunk is known at compile time
        for (int i = 0; i < my_count; i += kUnroll) {
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (u > 0 && i + u >= my_count) break;
                const int current = stage;
                if (++stage == p.stages) stage = 0, phase ^= 1;
#pragma unroll
                for (int chunk = 0; chunk < kChunks; ++chunk) {
                    const int buffer = (u * kChunks + chunk) % 2;
                    const bool ends = chunk + 1 == kChunks;
                    const int next_stage = ends ? stage : current, next_chunk = ends ? 0 : chunk + 1;
                    multiply(buffer, current, chunk, 0);
                    if (ends && i + u + 1 < my_count) barrier_wait(sh_full + 8 * stage, phase);
                    read(next_stage, next_chunk);  // after the last chunk this reads what nobody uses
#pragma unroll
                    for (int s = 0; s < kSteps; ++s) {
                        if (s > 0) multiply(buffer, current, chunk, s);
                        wgmma_wait<kSteps>();  // step s of the chunk before is over: its registers are free
                        if (s == kSteps - 1) {
                            if (chunk == 0 && i + u > 0) release(previous);
                            read_meta(buffer ^ 1, next_stage, next_chunk);
                        }
                        unpack_step(buffer ^ 1, next_stage, next_chunk, s);
                    }
                }
                previous = current;
            }
        }
        wgmma_wait<0>();
        release(previous);
        if (kGroups > 1 && my_count < stage_count) {  // the last stage has no tile for this group
            barrier_wait(sh_full + 8 * stage, phase);
            release(stage);
            if (++stage == p.stages) stage = 0, phase ^= 1;
        }

        // ------------------------------------------------------------------------------------------------ epilogue
        const int column0 = n_block * kBlockN;
        if (kGroups > 1 || p.split > 1) {  // one output a cluster
            sum_and_store<kTokens, kMTiles, kGroups, kBlockN, 32 * kConsumerWarps>(
                p, cluster, acc, sh_x, sh_reduced, k_rank, n_rank, group, first_row + warp4 * 16, column0, token0);
            break;
        }
        // Turn [rows of W, tokens] into [token, n] through shared memory, a few tokens at a time, and store 16 bytes a
        // lane.
        const int tokens = min(kTokens, p.m - token0);
        const u32 out = sh_out + warpgroup * (kOutTokens * kOutStride * 2);
        float scale[kMTiles][2], bias[kMTiles][2];
#pragma unroll
        for (int i = 0; i < kMTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = min(column0 + first_row + i * 64 + warp4 * 16 + gq + 8 * h, p.n - 1);
                scale[i][h] = p.column_scale ? p.column_scale[row] : 1.f;
                bias[i][h] = p.bias ? widen(p.bias[row]) : 0.f;
            }
        const u32 lane_out = out + 2 * ((lane % 8 + 8 * (lane / 16)) * kOutStride + warp4 * 16 + 8 * ((lane / 8) & 1));
        constexpr int kPieces = 8 * kMTiles;  // 16-byte pieces of a token's row
        const int piece = (threadIdx.x % 128) % kPieces;
        const int column = column0 + first_row + piece * 8;
        const bool wide = p.n % 8 == 0;
#pragma unroll
        for (int first_token = 0; first_token < kTokens; first_token += kOutTokens) {
            warpgroup_sync(warpgroup);  // the last reads are over
#pragma unroll
            for (int i = 0; i < kMTiles; ++i)
#pragma unroll
                for (int j = 0; j < kOutTokens / 8; j += 2) {
                    u32 r[4];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const float* d = &acc[i][4 * (first_token / 8 + j + h)];
                        r[2 * h] = round_pair(d[0] * scale[i][0] + bias[i][0], d[1] * scale[i][0] + bias[i][0]);
                        r[2 * h + 1] = round_pair(d[2] * scale[i][1] + bias[i][1], d[3] * scale[i][1] + bias[i][1]);
                    }
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                                     lane_out + 2 * (8 * j * kOutStride + i * 64)),
                                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                                 : "memory");
                }
            warpgroup_sync(warpgroup);
            for (int token = (threadIdx.x % 128) / kPieces; token < kOutTokens && first_token + token < tokens;
                 token += 128 / kPieces) {
                const uint4 v = load16(out + 2 * (token * kOutStride + piece * 8));
                u16* to = p.y + static_cast<i64>(token0 + first_token + token) * p.n + column;
                if (wide) {
                    if (column < p.n) *(uint4*)to = v;
                } else {
                    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        if (column + e < p.n) to[e] = (u16)(words[e / 2] >> (16 * (e % 2)));
                }
            }
        }
    }
    __syncwarp();
    if (p.split == 1) cluster.arrive_at_end();
    cluster.wait_at_end();
}
