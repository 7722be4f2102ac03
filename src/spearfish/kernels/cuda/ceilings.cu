// What the chip can do at best: how fast bytes come in, and how fast sparse tensor cores go. `spearfish bench` runs
// these beside the kernels, so that "% of roof" compares with the same card in the same minute.
//
//   read_plain      16-byte loads past the L1, any chip
//   read_bulk       bulk copies into shared memory, 12 of 16 KB in flight on each multiprocessor, sm_90 and later
//   rate_mma_sp     mma.sp m16n8k32 on registers, any chip
//   rate_wgmma_sp   wgmma.sp m64n128k32, A in registers, B in shared memory, sm_90a
//
// Depends on nothing, not even a CUDA header.

typedef unsigned int u32;
typedef unsigned long long u64;

// ------------------------------------------------------------------------------------------ bytes

struct ReadParams {
    const char* data;
    u64 bytes;  // a multiple of 128
    u32* sink;  // written only if the data says so, which random data does not: keeps the loads alive
};

#if defined(ENTRY_READ_PLAIN)

constexpr int LOADS = 8;  // in flight in each thread

extern "C" __global__ void __launch_bounds__(512) read_plain(const __grid_constant__ ReadParams p) {
    const u64 pieces = p.bytes / 16, stride = u64(gridDim.x) * blockDim.x;
    u32 all = 0;
    for (u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x; first < pieces; first += LOADS * stride) {
        u32 word[LOADS][4];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            // Beyond the end the last piece is read again, which costs no memory traffic.
            const u64 piece = first + i * stride < pieces ? first + i * stride : first;
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(word[i][0]), "=r"(word[i][1]), "=r"(word[i][2]), "=r"(word[i][3])
                         : "l"(p.data + piece * 16));
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) all ^= word[i][0] ^ word[i][1] ^ word[i][2] ^ word[i][3];
    }
    if (all == 0x5eed1e55) *p.sink = all;
}

#elif defined(ENTRY_READ_BULK)

constexpr int STAGES = 12;
constexpr int STAGE_BYTES = 16384;

// One thread asks and waits; nobody looks at what arrives. Blocks take equal shares, one after another in memory.
extern "C" __global__ void __launch_bounds__(32) read_bulk(const __grid_constant__ ReadParams p) {
    extern __shared__ __align__(128) char stage[];
    __shared__ u64 arrived[STAGES];
    if (threadIdx.x != 0) return;
    const u32 stage_address = static_cast<u32>(__cvta_generic_to_shared(stage));
    const u32 arrived_address = static_cast<u32>(__cvta_generic_to_shared(arrived));
    for (int s = 0; s < STAGES; s++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrived_address + 8 * s) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");

    const u64 share = (p.bytes / 128 + gridDim.x - 1) / gridDim.x * 128;
    const u64 begin = share * blockIdx.x < p.bytes ? share * blockIdx.x : p.bytes;
    const u64 end = begin + share < p.bytes ? begin + share : p.bytes;
    const int copies = static_cast<int>((end - begin + STAGE_BYTES - 1) / STAGE_BYTES);
    for (int i = 0; i < copies + STAGES; i++) {
        const u32 slot = i % STAGES, barrier = arrived_address + 8 * slot;
        if (i >= STAGES && i - STAGES < copies) {
            const u32 parity = (i / STAGES - 1) & 1;
            u32 done = 0;
            while (!done)
                asm volatile(
                    "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                    : "=r"(done)
                    : "r"(barrier), "r"(parity)
                    : "memory");
        }
        if (i < copies) {
            const u64 from = begin + u64(i) * STAGE_BYTES;
            const u32 size = end - from < STAGE_BYTES ? static_cast<u32>(end - from) : STAGE_BYTES;
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size) : "memory");
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    stage_address + slot * STAGE_BYTES),
                "l"(p.data + from), "r"(size), "r"(barrier)
                : "memory");
        }
    }
}

#endif

// ------------------------------------------------------------------------------------------ tensor cores

struct RateParams {
    const u32* data;  // 4096 words: pairs of float16, random, since the power that a multiply takes follows its bits
    int rounds;
    float* sink;
};

// Legal patterns of kept places, all six among them.
__device__ __forceinline__ u32 pattern(int i) {
    return i & 1 ? 0x4e9d8c4eu : 0xd9c84e9du;
}

#if defined(ENTRY_RATE_MMA_SP)

constexpr int TILES = 8;  // independent sums of a warp, to hide the latency of one

extern "C" __global__ void __launch_bounds__(256) rate_mma_sp(const __grid_constant__ RateParams p) {
    u32 a[2][4], b[TILES][4];
    float d[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) a[i / 4][i % 4] = p.data[(threadIdx.x + 256 * i) % 4096];
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) b[i / 4][i % 4] = p.data[(threadIdx.x + 97 * i + 13) % 4096];
    for (int round = 0; round < p.rounds; round++) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            float (&sum)[4] = d[i % TILES];
            asm volatile(
                "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32"
                " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0;"
                : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                : "r"(a[i / TILES][0]), "r"(a[i / TILES][1]), "r"(a[i / TILES][2]), "r"(a[i / TILES][3]),
                  "r"(b[i % TILES][0]), "r"(b[i % TILES][1]), "r"(b[i % TILES][2]), "r"(b[i % TILES][3]),
                  "r"(pattern(i)));
        }
    }
    float all = 0;
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) all += d[i / 4][i % 4];
    if (all == 1.2345f) *p.sink = all;
}

#elif defined(ENTRY_RATE_WGMMA_SP)

constexpr int STEPS = 4;                      // tiles of B in shared memory, each 128 tokens x 32 k
constexpr int TILE_WORDS = 128 * 32 * 2 / 4;  // 8 KB

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)

extern "C" __global__ void __launch_bounds__(512) rate_wgmma_sp(const __grid_constant__ RateParams p) {
    __shared__ __align__(128) u32 x[STEPS * TILE_WORDS];
    for (int i = threadIdx.x; i < STEPS * TILE_WORDS; i += blockDim.x) x[i] = p.data[(7 * i) % 4096];
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    // K-major without swizzle: core matrices of 8 tokens x 16 bytes, the four of a row 128 bytes apart, rows 512.
    const u64 address = static_cast<u32>(__cvta_generic_to_shared(x)) >> 4;
    const u64 first = address | u64(128 >> 4) << 16 | u64(512 >> 4) << 32;
    u32 a[STEPS][4];
#pragma unroll
    for (int i = 0; i < 4 * STEPS; i++) a[i / 4][i % 4] = p.data[(threadIdx.x + 517 * i) % 4096];
    float d[64] = {};
    for (int round = 0; round < p.rounds; round++) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            const u32(&part)[4] = a[i % STEPS];
            asm volatile(
                "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                "wgmma.mma_async.sp.sync.aligned.m64n128k32.f32.f16.f16 "
                "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,"
                "%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%"
                "40,%41,"
                "%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
                " {%64,%65,%66,%67}, %68, %69, 0, p, 1, 1, 0;\n}"
                : D16(0), D16(16), D16(32), D16(48)
                : "r"(part[0]), "r"(part[1]), "r"(part[2]), "r"(part[3]),
                  "l"(first + i % STEPS * (TILE_WORDS * 4 >> 4)), "r"(pattern(i)));
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    float all = 0;
#pragma unroll
    for (int i = 0; i < 64; i++) all += d[i];
    if (all == 1.2345f) *p.sink = all;
}

#endif
