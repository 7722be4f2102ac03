// y[m, n] = x[m, k] . W[n, k]^T for few tokens on Hopper: all about reading weights at the speed of the memory.
//
// The block's warpgroups are N_TILES side by side (more rows) times GROUPS behind one another (alternating weight tiles
// along k, so that a stage of the ring is one contiguous piece of the stream). Each owns M_TILES weight tiles, a warp
// 16 rows of each, unpacks them in registers and multiplies with mma.sp, which needs no other warp in step.
//
//   producer warp   bulk copies of weights and a TMA box of x into each stage of a ring; the first weights are on
//                   their way before the kernel in front has ended (programmatic dependent launch)
//   consumers       read codes, metadata and scales with one wide load each, unpack in registers, multiply
//   sum             the partial sums of GROUPS and of the SPLIT blocks of a cluster meet in the shared memory of the
//                   block that owns the columns, and are added in a fixed order: same bits on every run
//
// At the speed of the memory a warp has about a hundred instructions for a tile, so scales are multiplied on the
// accumulators, once per group, rather than on every weight.
//
// Compiled per variant with -D: TOKENS (8, 16), N_TILES, M_TILES, GROUPS, BLOCKS_PER_SM, BITS, SPARSE=1, BF16.

#include "hopper.cuh"

constexpr int kTokens = TOKENS;
constexpr int kNTiles = N_TILES;
constexpr int kMTiles = M_TILES;
constexpr int kGroups = GROUPS;
constexpr int kConsumerWarps = 4 * kNTiles * kGroups;
constexpr int kThreads = 32 * kConsumerWarps + 32;
constexpr int kBlockTiles = kNTiles * kMTiles;
constexpr int kBlockN = 64 * kBlockTiles;
constexpr int kBoxBytes = kTokens * 128;  // 64 k of every token, 128-byte swizzle
constexpr int kXTileBytes = 2 * kBoxBytes;
constexpr int kXStageBytes = kGroups * kXTileBytes;
// Quarters of a tile whose x is read before it is needed: as many as the registers hold.
constexpr int kQuartersAhead = TOKENS == 8 ? 4 : M_TILES == 1 && BITS != 8 ? 2 : 1;
constexpr int kCodeLoads = CODE_BYTES / 2048;  // 16-byte loads of a lane for a tile

// As in common.cuh but not volatile: here the compiler should mix the instructions of several steps.
template <int selector>
__device__ __forceinline__ void multiply_sparse(float* d, const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col." MMA_TYPES
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(selector));
}

// Where a lane reads in the first stage: codes, metadata, scales, and x for even and odd quarters of a tile.
struct Places {
    u32 codes, meta, scale, x[2];
};

// acc += one weight tile of every m tile times x. `w` and `x` are offsets of the stage. Everything is read first:
// nothing is worth more here than loads in flight. A part is what shares a scale: the whole tile, or a quarter of it
// (32 dense k) where groups are short. (A template, since NVRTC 13.0 takes generic lambdas for host functions.)
template <int parts>
__device__ __forceinline__ void multiply_tiles(float (&acc)[kMTiles][kTokens / 2], const Params& p, const Places& at,
                                               const Magic& magic, u32 w, u32 x) {
    const int group_bytes = kGroups * p.tile_bytes;
    [[maybe_unused]] uint4 codes[kMTiles][kCodeLoads];
    [[maybe_unused]] u32 meta[kMTiles][2], scale[kMTiles];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
        const u32 tile = w + i * group_bytes;
        if (BITS != 16) {
#pragma unroll
            for (int c = 0; c < kCodeLoads; ++c) codes[i][c] = load16(at.codes + tile + c * CHUNK_BYTES);
            if (parts == 1) scale[i] = p.granules ? load_shared(at.scale + tile) : ONES;
        }
        load_shared(meta[i], at.meta + tile);
    }
    float sum[kMTiles][kTokens / 2];
#pragma unroll
    for (int first = 0; first < 4; first += kQuartersAhead) {
        u32 b[kQuartersAhead][kTokens / 8][4];
#pragma unroll
        for (int q = 0; q < kQuartersAhead; ++q)
#pragma unroll
            for (int j = 0; j < kTokens / 8; ++j)
                load_matrices(b[q][j], at.x[(first + q) % 2] + x + ((first + q) / 2) * kBoxBytes + j * 1024);
#pragma unroll
        for (int quarter = first; quarter < first + kQuartersAhead; ++quarter) {
            if (quarter % (4 / parts) == 0)
#pragma unroll
                for (int i = 0; i < kMTiles; ++i) {
                    if (BITS != 16 && parts > 1)
                        scale[i] = load_shared(at.scale + w + i * group_bytes +
                                               (quarter * p.granules / 4) * SCALE_ROW_BYTES);
#pragma unroll
                    for (int j = 0; j < kTokens / 2; ++j) sum[i][j] = 0.f;
                }
#pragma unroll
            for (int i = 0; i < kMTiles; ++i) {
                u32 a[4];
#if BITS == 4
                const uint4 c = codes[i][0];
                unpack4(a, quarter == 0 ? c.x : quarter == 1 ? c.y : quarter == 2 ? c.z : c.w, magic);
#elif BITS == 8
                const uint4 c = codes[i][quarter / 2];
                unpack8(a, quarter % 2 ? c.z : c.x, quarter % 2 ? c.w : c.y, magic);
#else
                load_matrices(a, at.codes + w + i * group_bytes + quarter * CHUNK_BYTES);
#endif
#pragma unroll
                for (int j = 0; j < kTokens / 8; ++j) {
                    if (quarter % 2 == 0)
                        multiply_sparse<0>(&sum[i][4 * j], a, b[quarter - first][j], meta[i][quarter / 2]);
                    else
                        multiply_sparse<1>(&sum[i][4 * j], a, b[quarter - first][j], meta[i][quarter / 2]);
                }
            }
            if (quarter % (4 / parts) == 4 / parts - 1)
#pragma unroll
                for (int i = 0; i < kMTiles; ++i) {
                    const u32 pair = BITS == 16 ? 0 : scale[i];
                    const float s0 = BITS == 16 ? 1.f : widen(static_cast<u16>(pair));
                    const float s1 = BITS == 16 ? 1.f : widen(static_cast<u16>(pair >> 16));
#pragma unroll
                    for (int j = 0; j < kTokens / 2; ++j) acc[i][j] = fmaf(sum[i][j], j % 4 < 2 ? s0 : s1, acc[i][j]);
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM) hopper_decode(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const Cluster cluster = {p.split, p.overlaid};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group_bytes = kGroups * p.tile_bytes;
    const int weight_stage = kBlockTiles * group_bytes;
    const u32 sh_full = shared_address(shared), sh_empty = sh_full + 8 * kMaxStages,
              sh_reduced = sh_empty + 8 * kMaxStages;
    const u32 sh_x = sh_full + 1024;  // boxes want this alignment
    const u32 sh_w = sh_x + p.stages * kXStageBytes;

    // Powers of two and a grid of two dimensions: a division would cost more than all the rest of the start.
    const int log_split = 31 - __clz(p.split);
    const int k_rank = blockIdx.x & (p.split - 1), n_block = blockIdx.x >> log_split, token0 = blockIdx.y * kTokens;
    const int k_begin = p.k_tiles * k_rank >> log_split, k_count = (p.k_tiles * (k_rank + 1) >> log_split) - k_begin;
    const int stage_count = (k_count + kGroups - 1) / kGroups;

    const int ahead = min(min(p.stages, stage_count), p.ahead);

    // Of the producer: lane i copies the block's weight tile i of every group, lane 0 fetches x.
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    const u8* source =
        p.stream +
        (static_cast<i64>(min(n_block * kBlockTiles + lane, p.n_tiles - 1)) * p.k_tiles + k_begin) * p.tile_bytes;
    auto send_weights = [&](int i, int stage) {
        const u32 full = sh_full + 8 * stage;
        const int tiles = min(kGroups, k_count - i * kGroups);
        if (lane == 0) barrier_expect(full, tiles * kBlockTiles * p.tile_bytes + kXStageBytes);
        __syncwarp();
        if (lane < kBlockTiles)
            copy_weights(sh_w + stage * weight_stage + lane * group_bytes, source, tiles * p.tile_bytes, full, policy);
        source += group_bytes;
    };
    auto send_x = [&](int i, int stage) {
        if (lane == 0)
            copy_x(sh_x + stage * kXStageBytes, &p.x_map, token0, (k_begin + i * kGroups) * (TILE_K / 64),
                   sh_full + 8 * stage);
    };
    if (warp == kConsumerWarps) {
        if (lane == 0) prefetch_map(&p.x_map);
        if (lane == 0)
#pragma unroll 1  // as in init_barriers
            for (int stage = 0; stage < ahead; ++stage) barrier_init(sh_full + 8 * stage, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        __syncwarp();
        // Weights do not depend on the kernel before this one: the first are asked for at once, then x.
        for (int i = 0; i < ahead; ++i) send_weights(i, i);
        asm volatile("griddepcontrol.launch_dependents;");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        for (int i = 0; i < ahead; ++i) send_x(i, i);
    } else {
        init_barriers(sh_full, ahead, p, warp, kConsumerWarps, kConsumerWarps);
    }
    __syncthreads();
    cluster.arrive_at_start();

    if (warp == kConsumerWarps) {
        // ------------------------------------------------------------------------------------------------- producer
        int stage = ahead;
        u32 phase = 1;
        for (int i = ahead; i < stage_count; ++i, ++stage) {
            if (stage == p.stages) stage = 0, phase ^= 1;
            if (i >= p.stages) barrier_wait(sh_empty + 8 * stage, phase);
            send_weights(i, stage);
            send_x(i, stage);
        }
        __syncwarp();
        cluster.before_sums();
        cluster.stay();
        return;
    }

    // --------------------------------------------------------------------------------------------------- consumers
    const int warpgroup = warp / 4, warp4 = warp % 4, gq = lane / 4;
    const int group = warpgroup / kNTiles;
    const int first_tile = (warpgroup % kNTiles) * kMTiles;
    const u32 tile = sh_w + first_tile * group_bytes + group * p.tile_bytes;
    Places at;
    at.codes = tile + warp4 * CODE_WARP_BYTES + code_offset(lane);
    at.meta = tile + CODE_BYTES + warp4 * META_WARP_BYTES + lane * 8;
    at.scale = tile + SCALE_OFFSET + warp4 * 32 + gq * 4;
    // Row lane % 8 of a box and 16-byte piece lane / 8, found through the swizzle; the other half of the box is 64
    // away.
    at.x[0] = sh_x + group * kXTileBytes + (lane % 8) * 128 + (((lane / 8) ^ (lane % 8)) * 16);
    // Opaque, or the compiler computes them anew for every tile.
    asm volatile("" : "+r"(at.codes), "+r"(at.meta), "+r"(at.scale), "+r"(at.x[0]));
    at.x[1] = at.x[0] ^ 64;

    const Magic magic(p.zero);
    float acc[kMTiles][kTokens / 2];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTokens / 2; ++j) acc[i][j] = 0.f;


    int stage = 0;
    u32 phase = 0;
    for (int i = 0; i < stage_count; ++i) {
        barrier_wait(sh_full + 8 * stage, phase);
        if (i * kGroups + group < k_count) {  // the last stage may have no tile for this group
            if (p.granules <= 1)
                multiply_tiles<1>(acc, p, at, magic, stage * weight_stage, stage * kXStageBytes);
            else
                multiply_tiles<4>(acc, p, at, magic, stage * weight_stage, stage * kXStageBytes);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(sh_empty + 8 * stage);
        if (++stage == p.stages) stage = 0, phase ^= 1;
    }
    // ---------------------------------------------------------------------------------------------------- epilogue
    const int column0 = n_block * kBlockN;
    sum_and_store<kTokens, kMTiles, kGroups, kBlockN, 32 * kConsumerWarps>(
        p, cluster, acc, sh_x, sh_reduced, k_rank, group, first_tile * 64 + warp4 * 16, column0, token0);
}
