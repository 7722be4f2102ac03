// y[m, n] = x[m, k] . W[n, k]^T for many tokens on Hopper (sm_90a): W from the tile stream, unpacked in registers,
// times x in shared memory. Operands are swapped: the weights are the M side of wgmma, the tokens its N side, so
// unpacked weights never touch shared memory.
//
//   producers       four warps with bulk copies of weight tiles and TMA boxes of x into a ring of stages
//   consumers       warpgroups, N_TILES side by side times GROUPS behind one another, each owning M_TILES x 64 output
//                   rows. Those side by side read the same stage; groups take every GROUPS-th stage, so that one
//                   unpacks while another multiplies.
//   cluster         SPLIT blocks share one output tile, each with its own range of k, and add their partial sums
//                   through distributed shared memory
//   even            or else all k tiles of all outputs, in one row, are shared out evenly, to a block more than one
//                   output has: it begins with the end of an output, whose sums it leaves in global memory, and ends
//                   with the beginning of another, from the sums that the next block left there long before
//   extra blocks    or else, on multiprocessors that the clusters leave free, blocks that do the last k tiles of all
//                   outputs and leave their sums in global memory, where the clusters take them at the end
//
// The consumers' loop in chunks of four wgmmas, one weight tile: while a chunk is multiplied, the next is unpacked into
// the other half of the A registers. Below 128 tokens the issue of instructions matters most, so the loop has as few as
// possible: whatever is the same for a warp is in uniform registers, one fence, commit and wait for a chunk.
//
// Compiled per variant with -D: TOKENS (32 to 128), N_TILES, M_TILES, GROUPS, BITS (4, 8, 16), SPARSE=1, BF16.

#include "hopper.cuh"
#include "wgmma.cuh"

constexpr int kTokens = TOKENS;
constexpr int kMTiles = M_TILES;
constexpr int kGroups = GROUPS;
constexpr bool kEven = GROUPS == 1;    // may share out k evenly
constexpr bool kExtras = M_TILES == 1;  // may have extra blocks
// Codes are read two weight tiles ahead instead of one, since reads are slow while wgmmas read x. With blocks of 256 rows
// that is 1 to 3 % faster; else the earlier wait for the ring costs more, and 16 bits have no codes to read.
constexpr bool kFarReads = GROUPS == 1 && (BITS == 4 ? N_TILES * M_TILES == 4 : BITS == 8 && M_TILES == 2);
constexpr int kWarpgroups = N_TILES * kGroups;
constexpr int kConsumerWarps = 4 * kWarpgroups;
constexpr int kThreads = 32 * kConsumerWarps + 128;  // the producers are a warpgroup that gave up its registers
constexpr int kEntryRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = kWarpgroups > 2 ? 40 : 48;
constexpr int kFreeRegisters = (kEntryRegisters * kThreads - kProducerRegisters * 128) / (128 * kWarpgroups) / 8 * 8;
constexpr int kConsumerRegisters = kFreeRegisters > 240 ? 240 : kFreeRegisters;
constexpr int kBlockTiles = N_TILES * kMTiles;  // 64-row weight tiles of a block
constexpr int kBlockN = 64 * kBlockTiles;
constexpr int kBoxBytes = kTokens * 128;  // 64 k of every token, 128-byte swizzle
constexpr int kXStageBytes = 2 * kBoxBytes;
constexpr int kSteps = 4;                     // wgmmas of a weight tile: half of the A registers
constexpr int kOutTokens = 32;                // tokens that the epilogue stages at a time
constexpr int kOutStride = 64 * kMTiles + 8;  // 16-bit elements; the pad spreads rows over the banks

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 2) : "memory");
}

// What the main loop needs to know: where a lane reads in the first stage, x as the low word of its descriptor there,
// barriers, bytes.
struct Loop {
    u32 codes, meta, scale, x_low, full, empty;
    int weight_stage, tile_bytes, stages, zero;
    u32 granules;
};

// acc += the tiles of `count` stages, this group's. `stage` and `phase` are where in the ring the first of them is, at
// the end where the next will be. kScales: scale rows of a tile, 0 (none, as for per column), 1, or 4 (2 or 4, read for
// every step).
template <int kScales>
__device__ __forceinline__ void multiply_tiles(float (&acc)[kMTiles][kTokens / 2], const Loop& at, const Magic& magic,
                                               int count, int& stage, u32& phase) {
    u32 a[2][kSteps][4];
    u32 meta[2][2] = {{0, 0}, {0, 0}};
    [[maybe_unused]] uint4 codes[BITS == 16 ? kSteps : BITS / 4];
    [[maybe_unused]] u32 scale;
    const int lane = threadIdx.x % 32;

    auto offset = [&](int stage, int chunk) { return stage * at.weight_stage + chunk * at.tile_bytes; };
    // A chunk's share of a lane, read ahead of its unpacking.
    auto read = [&](int stage, int chunk) {
        const u32 from = offset(stage, chunk);
        if (BITS != 16)
#pragma unroll
            for (int i = 0; i < BITS / 4; ++i)
                codes[i] = load16(at.codes + from + i * CHUNK_BYTES);
        if (kScales == 1) scale = load_shared(at.scale + from);
    };
    // A wgmma under way still reads its A and metadata registers. The compiler (13.0) keeps the former for it but takes
    // the latter for free: it was seen to load the next metadata over those of a running wgmma. So the address of the
    // next metadata is made to depend on the old ones, whose wgmma is over by then. Tests look for such overwriting in
    // the machine code of every variant.
    auto read_meta = [&](int buffer, int stage, int chunk) {
        u32 from = at.meta + offset(stage, chunk);
        asm volatile("lop3.b32 %0, %1, %2, %0, 0xea;" : "+r"(from) : "r"(meta[buffer][0]), "r"(at.zero));
        asm volatile("lop3.b32 %0, %1, %2, %0, 0xea;" : "+r"(from) : "r"(meta[buffer][1]), "r"(at.zero));
        load_shared(meta[buffer], from);
    };
    auto unpack = [&](int buffer, int stage, int chunk) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            u32(&to)[4] = a[buffer][s];
#if BITS == 16
            load_matrices(to, at.codes + offset(stage, chunk) + s * CHUNK_BYTES);
#else
#if BITS == 4
            const uint4 c = codes[0];
            unpack4(to, s == 0 ? c.x : s == 1 ? c.y : s == 2 ? c.z : c.w, magic);
#else
            const uint4 c = codes[s / 2];
            unpack8(to, s % 2 ? c.z : c.x, s % 2 ? c.w : c.y, magic);
#endif
            if (kScales > 0) {
                if (kScales > 1) {
                    const int row = s * at.granules * STEP_K / TILE_K;
                    scale = load_shared(at.scale + offset(stage, chunk) + row * SCALE_ROW_BYTES);
                }
                scale_rows(to, both_low(scale), both_high(scale));
            }
#endif
        }
    };
    auto multiply = [&](int buffer, int stage, int chunk) {
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            // Dense k in the tile: box k / 64, 2 bytes each inside it. K-major x with 128-byte swizzle: 8-row atoms
            // 1024 bytes apart; only the descriptor's low word changes.
            const int k = s * STEP_K;
            const u64 x = static_cast<u64>((1u << 30) | 64u) << 32 |
                          (at.x_low + stage * (kXStageBytes / 16) + ((k / 64) * kBoxBytes + (k % 64) * 2) / 16);
            if (s % 2 == 0)
                wgmma<0>(acc[chunk], a[buffer][s], x, s / 2 ? meta[buffer][1] : meta[buffer][0]);
            else
                wgmma<1>(acc[chunk], a[buffer][s], x, s / 2 ? meta[buffer][1] : meta[buffer][0]);
        }
        wgmma_commit();
    };

    // `ahead`: the last stage that was waited for. Beyond the end it stays, and what is read and unpacked then nobody uses.
    int previous = -1, ahead = stage, left = count - 1;
    auto advance = [&]() {
        if (--left < 0) return;
        if ((ahead += kGroups) >= at.stages) ahead -= at.stages, phase ^= 1;
        barrier_wait(at.full + 8 * ahead, phase);
    };
    // One stage: its chunks are multiplied, and the chunk after each is unpacked. `first`: the buffer of its first chunk.
    auto step = [&](int first) {
        const int current = stage;
#pragma unroll
        for (int chunk = 0; chunk < kMTiles; ++chunk) {
            const int buffer = (first + chunk) % 2, next_chunk = (chunk + 1) % kMTiles;
            const bool ends = chunk + 1 == kMTiles;
            multiply(buffer, current, chunk);
            // The chunk before is over: its registers and its stage are free. Where the ring has but two stages for a
            // group, that has to come before the wait for the next; else after the next reads are on their way.
            auto free_previous = [&]() {
                wgmma_wait<1>();
                if (chunk == 0 && previous >= 0) {
                    __syncwarp();  // every lane has read
                    if (lane < kArriving) barrier_arrive(at.empty + 8 * previous);
                }
            };
            constexpr bool kFreeFirst = kFarReads || kGroups > 2;
            if (kFreeFirst) free_previous();
            if (!kFarReads) {
                if (ends) advance();
                read(ends ? ahead : current, next_chunk);
            }
            if (!kFreeFirst) free_previous();
            const int next = ends ? ahead : current;
            read_meta(buffer ^ 1, next, next_chunk);
            unpack(buffer ^ 1, next, next_chunk);
            if (ends) stage = ahead;
            if (kFarReads) {
                if (chunk == 0) advance();
                read(ahead, (chunk + 2) % kMTiles);
            }
        }
        previous = current;
    };

    barrier_wait(at.full + 8 * stage, phase);
    read(stage, 0);
    read_meta(0, stage, 0);
    unpack(0, stage, 0);
    if (kFarReads) {
        if (kMTiles == 1) advance();
        read(ahead, 1 % kMTiles);
    }
    // So many stages in a turn that the buffer of a chunk is known at compile time.
    constexpr int kTurn = kMTiles % 2 ? 2 : 1;
    int i = 0;
    for (; i + kTurn <= count; i += kTurn) {
        step(0);
        if (kTurn > 1) step(1);
    }
    if (kTurn > 1 && i < count) step(0);
    wgmma_wait<0>();
    __syncwarp();
    if (lane < kArriving) barrier_arrive(at.empty + 8 * previous);
    stage = ahead + kGroups;
    if (stage >= at.stages) stage -= at.stages, phase ^= 1;
}

// Where a block's things are in shared memory, and its share of the work: `k_count` k tiles from `k_begin`, each a
// stage, for the outputs `first`, `first` + `stride`, ..., of the first without `skipped`, `units` stages at most, so
// that `last_count` are left for output `last`.
struct Block {
    u32 sh_full, sh_empty, sh_reduced, sh_x, sh_w, sh_out;
    int weight_stage, k_rank, k_begin, k_count, outputs, first, stride, skipped, units, last, last_count;
    bool extra;

    __device__ __forceinline__ explicit Block(const Params& p, const void* shared) {
        // Read anew each time: what is made of it need not lie in registers through the main loop.
        int index, tile_bytes = p.tile_bytes;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index), "+r"(tile_bytes));
        weight_stage = kBlockTiles * tile_bytes;
        sh_full = shared_address(shared), sh_empty = sh_full + 8 * kMaxStages, sh_reduced = sh_empty + 8 * kMaxStages;
        sh_x = sh_full + 1024;  // boxes want this alignment
        sh_w = sh_x + p.stages * kXStageBytes;
        sh_out = (sh_w + p.stages * weight_stage + 127) & ~127u;
        // Powers of two throughout: a division would cost more than all the rest of the start. Not from %clusterid and
        // %nclusterid, which say nothing useful in a launch without clusters.
        extra = kExtras && index < p.extras;
        const int place = extra ? index : index - p.extras, blocks = extra ? p.extras : gridDim.x - p.extras;
        const int log_split = extra ? 0 : 31 - __clz(p.split), tiles = p.own_tiles;
        k_rank = place & ((1 << log_split) - 1);
        k_begin = extra ? tiles : tiles * k_rank >> log_split;
        k_count = (extra ? p.k_tiles : tiles * (k_rank + 1) >> log_split) - k_begin;
        outputs = p.n_blocks * p.token_blocks, first = place >> log_split, stride = blocks >> log_split;
        skipped = 0, units = 0x7fffffff, last = -1, last_count = 0;
        if (kEven && p.units) {
            const int begin = index * p.units + min(index, p.spare);
            units = p.units + (index < p.spare);
            first = begin / p.k_tiles, skipped = begin - first * p.k_tiles, stride = 1;
            last = (begin + units) / p.k_tiles, last_count = begin + units - last * p.k_tiles;
        }
    }
    // The block's `turn`-th output: `count` of its k tiles from `from` on. False if there is none.
    __device__ __forceinline__ bool part(int turn, int& output, int& from, int& count) const {
        output = first + turn * stride;
        from = turn ? 0 : skipped;
        const int left = turn ? units - turn * k_count + skipped : units;
        count = min(k_count - from, left);
        return output < outputs && left > 0;
    }
};

// What a block has of the end of an output goes to global memory.
__device__ __forceinline__ void leave_sums(const Params& p, const float (&acc)[kMTiles][kTokens / 2]) {
    float4* to = reinterpret_cast<float4*>(p.partial) + blockIdx.x * (kBlockN * kTokens / 4) + threadIdx.x;
    leave(to, 32 * kConsumerWarps, acc);
    consumer_sync<32 * kConsumerWarps>();
    if (threadIdx.x == 0) store_release(p.arrived + blockIdx.x, p.ticket);
}

// Where a thread's sums of a piece lie, the share of an output that an extra block has: [output][group][octet of tokens
// of an m tile][thread of the group], four floats each.
__device__ __forceinline__ float4* piece_sums(const Params& p, int output, int group) {
    return reinterpret_cast<float4*>(p.partial) + (output * kGroups + group) * (kBlockN * kTokens / 4) +
           threadIdx.x % (128 * N_TILES);
}

// They go to global memory, and a flag for every block that shares the output says that they are there.
__device__ __forceinline__ void leave_piece(const Params& p, const float (&acc)[kMTiles][kTokens / 2], int output,
                                            int group) {
    leave(piece_sums(p, output, group), 128 * N_TILES, acc);
    consumer_sync<32 * kConsumerWarps>();
    if (threadIdx.x < p.split) store_release(p.arrived + output * p.split + threadIdx.x, p.ticket);
}

// acc += the piece of `output`, of which the blocks of the cluster each take a share of the tokens. Four loads at a
// time: the address of the next depends on what came, or the compiler asks for all at once and runs out of registers.
// The flag is left cleared.
__device__ __forceinline__ void take_piece(const Params& p, float (&acc)[kMTiles][kTokens / 2], int output, int k_rank,
                                           int group) {
    constexpr int kOctets = kTokens / 8, kBatch = 4;
    if (threadIdx.x == 0) {
        u64* flag = p.arrived + output * p.split + k_rank;
        while (load_acquire(flag) != p.ticket) __nanosleep(20);
        *flag = 0;
    }
    consumer_sync<32 * kConsumerWarps>();
    const int begin = kOctets / p.split * k_rank, end = begin + kOctets / p.split;
    const float4* from = piece_sums(p, output, group);
    u32 nothing = 0;
#pragma unroll
    for (int i = 0; i < kMTiles; ++i)
#pragma unroll
        for (int first = 0; first < kOctets; first += kBatch) {
            if (first + kBatch <= begin || first >= end) continue;
            float4 v[kBatch];
#pragma unroll
            for (int j = first; j < first + kBatch; ++j)
                v[j - first] = j >= begin && j < end ? __ldcg(from + (i * kOctets + j + nothing) * (128 * N_TILES))
                                                     : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int j = first; j < first + kBatch; ++j) {
                float* d = &acc[i][4 * j];
                d[0] += v[j - first].x, d[1] += v[j - first].y, d[2] += v[j - first].z, d[3] += v[j - first].w;
            }
            asm volatile("and.b32 %0, %1, %2;"
                         : "=r"(nothing)
                         : "r"(__float_as_uint(acc[i][4 * first])), "r"(p.zero));
        }
}

// The beginning of an output starts from what the next block has left of its end, which it began with: long ago, as a
// block has more k tiles than an output. Where there is nothing to take, the accumulators stay as they are. The loads
// are predicated rather than branched around: where two ways meet the compiler would copy accumulators in the midst of
// wgmmas. The flag is left cleared.
__device__ __forceinline__ void take_sums(const Params& p, float (&acc)[kMTiles][kTokens / 2], bool takes) {
    const int from = blockIdx.x + 1;
    if (takes) {
        if (threadIdx.x == 0) {
            while (load_acquire(p.arrived + from) != p.ticket) __nanosleep(20);
            p.arrived[from] = 0;
        }
        consumer_sync<32 * kConsumerWarps>();
    }
    const float4* at = reinterpret_cast<const float4*>(p.partial) + from * (kBlockN * kTokens / 4) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kMTiles * kTokens / 8; ++i) {
        float* d = &acc[i / (kTokens / 8)][i % (kTokens / 8) * 4];
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "l"(at + i * 32 * kConsumerWarps), "r"(static_cast<int>(takes))
            : "memory");
    }
}

// Who a consumer thread is. Read anew each time, as Block.
struct Consumer {
    int thread, lane, gq, warpgroup, warp4, group, first_tile;
    __device__ __forceinline__ Consumer() {
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
        lane = thread % 32, gq = lane / 4, warpgroup = warp / 4, warp4 = warp % 4;
        group = warpgroup / N_TILES, first_tile = (warpgroup % N_TILES) * kMTiles;
    }
};

// What a consumer warp does after it has its registers.
template <int kScales>
__device__ __forceinline__ void consume(const Params& p, const void* shared, const Cluster& cluster) {
    Loop at;
    const Block b(p, shared);
    const Consumer me;
    const int lane = me.lane, warp4 = me.warp4, gq = me.gq, group = me.group, first_tile = me.first_tile;
    const u32 tile = b.sh_w + first_tile * p.tile_bytes;
    at.codes = tile + warp4 * CODE_WARP_BYTES + code_offset(lane);
    at.meta = tile + CODE_BYTES + warp4 * META_WARP_BYTES + lane * 8;
    at.scale = tile + SCALE_OFFSET + warp4 * 32 + gq * 4;
    // Opaque, or the compiler computes them anew at every use.
    asm volatile("" : "+r"(at.codes), "+r"(at.meta), "+r"(at.scale));
    at.x_low = (1u << 16) | b.sh_x >> 4;
    at.full = b.sh_full, at.empty = b.sh_empty;
    at.weight_stage = b.weight_stage, at.tile_bytes = p.tile_bytes, at.stages = p.stages, at.zero = p.zero;
    at.granules = p.granules;
    asm volatile("" : "+r"(at.zero));  // as above
    const Magic magic(p.zero);
    float acc[kMTiles][kTokens / 2];

    int stage = group;
    u32 phase = 0;
    for (int turn = 0;; ++turn) {
        int output, from, count, n_block, token0;
        const Block now(p, shared);
        if (!now.part(turn, output, from, count)) break;
#pragma unroll
        for (int i = 0; i < kMTiles; ++i)
#pragma unroll
            for (int j = 0; j < kTokens / 2; ++j) acc[i][j] = 0.f;
        if constexpr (kEven) take_sums(p, acc, !from && count < now.k_count);

        // Every kGroups-th stage; at least one, as the host sees to.
        multiply_tiles<kScales>(acc, at, magic, (count - group + kGroups - 1) / kGroups, stage, phase);

        // ------------------------------------------------------------------------------------------------ epilogue
        const Block b(p, shared);
        const Consumer me;
        const int lane = me.lane, warp4 = me.warp4, gq = me.gq, first_row = me.first_tile * 64;  // of the block's rows
        b.part(turn, output, from, count);
        if (kExtras && b.extra) {
            leave_piece(p, acc, output, me.group);
            continue;
        }
        if constexpr (kEven)
            if (from) {
                leave_sums(p, acc);
                continue;
            }
        place_output<kTokens>(p, output, n_block, token0);
        const int column0 = n_block * kBlockN;
        if (kGroups > 1 || (kExtras && p.extras) || cluster.several()) {  // one output a cluster
            if (kExtras && p.extras) take_piece(p, acc, output, b.k_rank, me.group);
            sum_and_store<kTokens, kMTiles, kGroups, kBlockN, 32 * kConsumerWarps>(
                p, cluster, acc, b.sh_x, b.sh_reduced, b.k_rank, me.group, first_row + warp4 * 16, column0, token0);
            return;
        }
        // Turn [rows of W, tokens] into [token, n] through shared memory, a few tokens at a time, and store 16 bytes a
        // lane.
        const int tokens = min(kTokens, p.m - token0);
        const u32 out = b.sh_out + me.warpgroup * (kOutTokens * kOutStride * 2);
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
        const int piece = (me.thread % 128) % kPieces;
        const int column = column0 + first_row + piece * 8;
        const bool aligned = p.n % 8 == 0;
#pragma unroll
        for (int first_token = 0; first_token < kTokens; first_token += kOutTokens) {
            warpgroup_sync(me.warpgroup);  // the last reads are over
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
            warpgroup_sync(me.warpgroup);
            for (int token = (me.thread % 128) / kPieces; token < kOutTokens && first_token + token < tokens;
                 token += 128 / kPieces) {
                const uint4 v = load16(out + 2 * (token * kOutStride + piece * 8));
                store_eight(p, token0 + first_token + token, column, v, aligned);
            }
        }
    }
    cluster.before_sums();  // extra blocks of a cluster pass it, too
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) hopper(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const int warp = warp_number(), lane = threadIdx.x % 32;
    if (threadIdx.x == 32 * kConsumerWarps) prefetch_map(&p.x_map);
    const Block b(p, shared);

    const Cluster cluster = {p.split, p.overlaid};
    // Each of the four producers fills every fourth stage: what it takes to ask for one then does not hold up the next.
    // A stage is always the same warp's (and the same group's): only who has seen every turn of a barrier can tell the
    // turns by one bit. Lane i copies the block's weight tile i, lane 0 also fetches x.
    const int producer = warp - kConsumerWarps;
    const int begun = min(min(p.stages, 4), min(b.k_count - b.skipped, b.units));  // stages, asked for at once
    int n_block = 0, token0 = 0, shift = b.skipped;
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    // Which k tile the `i`-th of an output is. All blocks go through k in step, so that they want the same of x at the
    // same time, wherever in the row of all k tiles they begin.
    auto tile_of = [&](int i) {
        const int tile = i - shift;
        return b.k_begin + (kEven && tile < 0 ? tile + b.k_count : tile);
    };
    auto send_weights = [&](int i, int stage) {
        const i64 row = min(n_block * kBlockTiles + lane, p.n_tiles - 1);
        const u32 full = b.sh_full + 8 * stage;
        if (lane == 0) barrier_expect(full, kBlockTiles * p.tile_bytes + kXStageBytes);
        __syncwarp();
        if (lane < kBlockTiles)
            copy_weights(b.sh_w + stage * b.weight_stage + lane * p.tile_bytes,
                         p.stream + (row * p.k_tiles + tile_of(i)) * p.tile_bytes, p.tile_bytes, full, policy);
    };
    auto send_x = [&](int i, int stage) {
        copy_x(b.sh_x + stage * kXStageBytes, &p.x_map, token0, tile_of(i) * (TILE_K / 64), b.sh_full + 8 * stage);
    };
    if (producer >= 0) {
        const int place = producer < p.stages ? producer : kSpareBarriers + 4 + producer;  // init_barriers says why
        if (lane == 0) barrier_init(b.sh_full + 8 * place, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        __syncwarp();
        // Weights do not depend on the kernel before this one: the first are asked for at once.
        place_output<kTokens>(p, b.first, n_block, token0);
        if (producer < begun) send_weights(b.skipped + producer, producer);
    } else {
        init_barriers(b.sh_full, 4, p, warp, kConsumerWarps, 4 * N_TILES * kArriving);  // by the warps of one group
    }
    __syncthreads();
    cluster.arrive_at_start();
    asm volatile("griddepcontrol.launch_dependents;");

    if (producer >= 0) {
        // ------------------------------------------------------------------------------------------------- producer
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        asm volatile("griddepcontrol.wait;" ::: "memory");
        // The first of x in the order in which it is wanted: all of the ring at once takes a while to arrive.
        if (producer == 0 && lane == 0)
            for (int i = 0; i < begun; ++i) send_x(b.skipped + i, i);
        int output = producer < p.stages ? b.first : b.outputs, placed = b.first, stage = producer;
        u32 phase = 1;
        bool sent = producer < begun;
        for (int i = b.skipped + producer, units = b.units - producer;;) {
            for (; i >= b.k_count; i -= b.k_count) output += b.stride;
            if (output >= b.outputs || units <= 0) break;
            if (output != placed) {
                place_output<kTokens>(p, placed = output, n_block, token0);
                // The next block begins with the first k tiles of the last output.
                if (kEven && output == b.last) shift = b.last_count;
            }
            if (!sent) {
                barrier_wait(b.sh_empty + 8 * stage, phase);
                send_weights(i, stage);
                if (lane == 0) send_x(i, stage);
            }
            sent = false;
            int on = 4;
            if ((stage += 4) >= p.stages) on += p.stages - stage + producer, stage = producer, phase ^= 1;
            i += on, units -= on;
        }
        __syncwarp();
        cluster.before_sums();
        cluster.stay();
        return;
    }

    // --------------------------------------------------------------------------------------------------- consumers
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
#if BITS == 16
    consume<0>(p, shared, cluster);
#else
    // Apart from one another from here on: with the three loops in one place the compiler runs out of registers.
    if (p.granules > 1)
        consume<4>(p, shared, cluster);
    else if (p.granules == 1)
        consume<1>(p, shared, cluster);
    else
        consume<0>(p, shared, cluster);
#endif
}
